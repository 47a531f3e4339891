"""This process among the ranks: plain, torchrun, DeepSpeed and SLURM launches alike, through accelerate's state."""

from __future__ import annotations

import os
import socket
import warnings

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor


def use_cpu() -> bool:
    """Whether a run stays on the CPU: there are not enough GPUs for one per rank of this machine (NCCL needs that).

    An empty CUDA_VISIBLE_DEVICES in the environment keeps a run on the CPU.
    """
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    return not torch.cuda.is_available() or torch.cuda.device_count() < local_world


def start() -> PartialState:
    """Join the group that the launcher describes in the environment, if there is one; returns this process's place."""
    if use_cpu():
        if torch.cuda.is_available():
            num = torch.cuda.device_count()
            warnings.warn(f"more ranks than the {num} GPUs of this machine: training on the CPU", stacklevel=2)
        # DeepSpeed, which accelerate imports, looks for an accelerator and warns on stdout that it found none.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return PartialState(cpu=use_cpu(), backend="gloo" if use_cpu() and launched() else None)


def stand_alone() -> None:
    """Let a process that no launcher started be a group of one, which DeepSpeed needs (it asks for MPI otherwise)."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ.update(one)


def stop() -> None:
    """Leave the group, after every rank has come this far."""
    wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def wait() -> None:
    """Until every rank has come this far."""
    if dist.is_initialized():
        dist.barrier()


def launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def num_ranks() -> int:
    """How many ranks take part."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number, 0 for the one that writes files and shows progress."""
    return dist.get_rank() if dist.is_initialized() else 0


def reduce_(values: Tensor, device: torch.device, operation: str = "sum") -> Tensor:
    """Sum (or "max") a CPU tensor over ranks, in place; with one rank nothing happens."""
    if num_ranks() > 1:
        on_device = values.to(device)  # NCCL takes no CPU tensors
        dist.all_reduce(on_device, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation])
        values.copy_(on_device)
    return values
