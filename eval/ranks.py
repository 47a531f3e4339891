"""This process among the ranks of torchrun, DeepSpeed's launcher or any other that sets RANK and WORLD_SIZE.

Ranks share nothing but the run's folder; they meet twice, before the first answer and after the last one. The meetings
are over gloo, on GPUs too: no tensor is exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")
# How long the first rank to finish waits for the last one. The end of a process ends the wait at once.
PATIENCE = timedelta(days=7)
POLL_SEC = 0.5


def world_size() -> int:
    """How many ranks a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def rank() -> int:
    """This process's number, 0 for the one that merges, reports and shows progress."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def default_device() -> str:
    """The GPU where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def own_device(name: str) -> str:
    """The device of this rank: `cuda` means the GPU of its number on this machine.

    Raises:
        ValueError: one GPU named for all ranks, or more ranks on this machine than GPUs.
    """
    if world_size() == 1 or not name.startswith("cuda"):
        return name
    import torch

    if name != "cuda":
        raise ValueError(f"--device {name} would put every rank on one GPU; use cuda, or no launcher")
    local, num = int(os.environ.get("LOCAL_RANK", rank())), torch.cuda.device_count()
    if local >= num:
        raise ValueError(f"rank {local} of this machine has no GPU of its own ({num} here): start {num} or fewer")
    return f"cuda:{local}"


class Group:
    """The ranks of one evaluation; alone, every method returns at once."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def first(self, prepare: Callable[[], T]) -> T:
        """Let rank 0 prepare while the others wait; all return what it found.

        Raises:
            SystemExit: on the other ranks, if it failed: rank 0 says why.
        """
        import torch.distributed as dist

        found: list[T | None] = [None]
        try:
            if rank() == 0:
                found = [prepare()]
        finally:
            if self._group is not None:
                dist.broadcast_object_list(found, src=0, group=self._group)
        if found[0] is None:
            raise SystemExit(1)
        return found[0]

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Until every rank has come this far; calls `meanwhile` now and then.

        Raises:
            RuntimeError: a rank ended before it came here.
        """
        if self._group is None:
            return
        import time

        import torch.distributed as dist

        work = dist.barrier(group=self._group, async_op=True)
        while not work.is_completed():
            meanwhile()
            time.sleep(POLL_SEC)
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                "a rank ended before its work was done (see its own message); "
                "the same command again goes on from what was written"
            ) from error


@contextmanager
def joined() -> Iterator[Group]:
    """Join the other ranks, for as long as the evaluation lasts."""
    if world_size() == 1:
        yield Group(None)
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    is_mine = not dist.is_initialized()
    if is_mine:
        store, number, count = next(rendezvous("env://"))
        # torchrun keeps its store when it starts dead ranks again: addresses of the dead would stand in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"trimode_vlm.eval.{attempt}", store)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield Group(group)
    finally:
        if is_mine:
            dist.destroy_process_group()
