"""One process or several gloo/NCCL ranks under torchrun: the few collectives the loop needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks; every method is a no-op with one rank."""

    rank: int = 0
    world: int = 1

    @classmethod
    def start(cls) -> Ranks:
        """Join the group that torchrun describes in the environment, if there is one."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
        return cls(dist.get_rank(), world)

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
        """Sum a tensor over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: float) -> float:
        """Return rank 0's number on every rank."""
        if self.world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(tensor, 0)
        return float(tensor)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over ranks in one flat message; a rank without a gradient adds zeros."""
        if self.world == 1:
            return
        parameters = list(parameters)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        dist.all_reduce(flat)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()
