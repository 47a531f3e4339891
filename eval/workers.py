"""The processes of an evaluation: one in place, or several of one thread each, with one progress bar."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimode_vlm.eval import state
from trimode_vlm.eval.state import Key, Record
from trimode_vlm.eval.tpf import Totals

if TYPE_CHECKING:
    from trimode_vlm.eval.run import EvalSettings


def work(settings: EvalSettings, todo: Sequence[Key], loader: Callable[..., Any], total: int) -> None:
    """Answer `todo` and leave the records in the shards of the output folder; `total` is the bar's length.

    Raises:
        RuntimeError: a worker process ended before its work was done.
    """
    with _Progress(total, done=total - len(todo)) as progress:
        if settings.workers == 1:
            _shard(settings, todo, loader, 0, progress.update)
        else:
            _fan_out(settings, todo, loader, progress)


def _shard(
    settings: EvalSettings,
    keys: Sequence[Key],
    loader: Callable[..., Any],
    worker: int,
    report: Callable[[list[Record]], None],
) -> None:
    from trimode_vlm.eval.run import answer_all

    with state.Writer(state.shard_path(Path(settings.output), worker)) as writer:

        def emit(records: list[Record]) -> None:
            writer.append(records)
            report(records)

        answer_all(settings, keys, loader, emit)


def _fan_out(settings: EvalSettings, todo: Sequence[Key], loader: Callable[..., Any], progress: _Progress) -> None:
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the children when they import torch
    processes, pipes = [], []
    try:
        for worker in range(settings.workers):
            receive, send = context.Pipe(duplex=False)
            keys = [key for key in todo if key.id % settings.workers == worker]
            process = context.Process(
                target=_child, name=f"eval-worker-{worker}", args=(settings, keys, loader, worker, send), daemon=True
            )
            process.start()
            send.close()  # the child holds the only other end: its death ends the pipe
            processes.append(process)
            pipes.append(receive)
        _listen(pipes, progress)
        for process in processes:
            process.join()
        failed = [f"worker {i} exited with code {p.exitcode}" for i, p in enumerate(processes) if p.exitcode]
        if failed:
            raise RuntimeError(f"{', '.join(failed)}; the same command again goes on from what was written")
    finally:
        for process in processes:
            process.terminate()
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _listen(pipes: Sequence[Connection], progress: _Progress) -> None:
    open_pipes = list(pipes)
    while open_pipes:
        ready: list[Any] = wait(open_pipes)
        for pipe in ready:
            try:
                progress.update(pipe.recv())
            except EOFError:
                open_pipes.remove(pipe)


def _child(
    settings: EvalSettings, keys: Sequence[Key], loader: Callable[..., Any], worker: int, pipe: Connection
) -> None:
    import torch

    torch.set_num_threads(1)
    _shard(settings, keys, loader, worker, pipe.send)  # a dead parent breaks the pipe, and so ends this process


class _Progress:
    """A bar with the running score and tpf_decode of each mode (controls left out)."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, initial=done, unit="sample", dynamic_ncols=True, mininterval=1.0)
        self._scores: dict[str, float] = {}
        self._totals: dict[str, Totals] = {}

    def update(self, records: list[Record]) -> None:
        for record in records:
            if record["run"] == "model":
                mode = record["mode"]
                self._scores[mode] = self._scores.get(mode, 0.0) + record["score"]
                self._totals.setdefault(mode, Totals()).add(record)
        shown = {
            mode: f"{self._scores[mode] / totals.num_samples:.3f} @ {totals.tpf_decode or 0:.2f}"
            for mode, totals in self._totals.items()
        }
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(len(records))

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
