"""Stalls and losses that are not finite: what to tell the user, and the thread that notices that nothing happens."""

from __future__ import annotations

import faulthandler
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

MAX_NAMES = 8
"""Samples that a message names; it counts the others."""


def not_finite_message(step: int, sample_names: Sequence[str], what: str = "the loss") -> str:
    """What to print when `what` became nan or inf in step `step`; sample_names are those of the running batch."""
    return (
        f"{what} is not finite at step {step}, samples {_listed(sample_names)}. To try: a lower lr or a longer warmup; "
        "bf16 instead of fp16; a look at these samples with `trimode-vlm inspect`"
    )


def stall_message(
    step: int, sample_names: Sequence[str], idle_sec: float, *, rank: int = 0, place: str = "", dump: Path | None = None
) -> str:
    """What to print when no step ended for `idle_sec`; place: where the training thread stands, dump: all stacks."""
    stacks = f", all stacks in {dump}" if dump else ""
    return (
        f"rank {rank}: no step ended for {idle_sec / 60:.3g} minutes, stopping. Running: step {step}, samples "
        f"{_listed(sample_names)}. It stands at {place or 'an unknown place'}{stacks}. To try: if that is a collective "
        "(all_reduce, all_gather, barrier), read what the other ranks print here and set NCCL_DEBUG=INFO; if it waits "
        "for data, see whether the data folder answers and use fewer data workers; if a step may take this long, "
        "raise stall_minutes (0 switches this off)"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(str, names[:MAX_NAMES])) or "unknown"
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def innermost(frame: FrameType | None, depth: int = 3) -> str:
    """The innermost calls of a stack, innermost first: "data.py:88 in draw, called from trainer.py:10 in step"."""
    if frame is None:
        return ""
    calls = traceback.extract_stack(frame)[-depth:][::-1]
    return ", called from ".join(f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in calls)


def dump_stacks(path: Path) -> None:
    """Write the stacks of all threads to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)


class Watchdog:
    """A thread that calls `on_stall(idle_sec)` once if no `beat` came for `stall_sec`; `stop` ends it."""

    def __init__(
        self,
        stall_sec: float,
        on_stall: Callable[[float], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        poll_sec: float | None = None,
    ) -> None:
        self.stall_sec, self.on_stall, self.clock = stall_sec, on_stall, clock
        self.poll_sec = min(stall_sec / 10, 10.0) if poll_sec is None else poll_sec
        self._beaten_at = clock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Say that something happened."""
        self._beaten_at = self.clock()

    def idle_sec(self) -> float:
        """Seconds since the last beat."""
        return self.clock() - self._beaten_at

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self.poll_sec):
            if (idle := self.idle_sec()) > self.stall_sec:
                self.on_stall(idle)
                return
