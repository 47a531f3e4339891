"""One process or several ranks under torchrun: each rank's device and the few collectives the loop needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks and the device it trains on; with one rank the collectives are no-ops."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @classmethod
    def start(cls) -> Ranks:
        """Join the group that torchrun describes in the environment, if there is one.

        The ranks of a machine take one GPU each and NCCL where there are enough GPUs, else all take the CPU and gloo.
        An empty CUDA_VISIBLE_DEVICES in the environment keeps a run on the CPU.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank, local_world = (
            int(os.environ.get(f"LOCAL_{name}", n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
        device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        if world == 1:
            return cls(device=device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        return cls(dist.get_rank(), world, device)

    def stop(self) -> None:
        """Leave the group, after every rank has come this far."""
        if self.world > 1 and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and shows progress."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place, wherever it lies."""
        if self.world > 1:
            on_device = values.to(self.device)  # NCCL takes no CPU tensors
            dist.all_reduce(on_device)
            values.copy_(on_device)
        return values

    def broadcast(self, value: float) -> float:
        """Return rank 0's number on every rank."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return float(tensor)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients, which lie on the device, over ranks in one flat message; a missing one counts as zeros."""
        if self.world == 1:
            return
        parameters = list(parameters)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        dist.all_reduce(flat)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()
