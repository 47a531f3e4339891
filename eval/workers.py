"""The processes of an evaluation: this one, or several of one thread each; every one appends to a shard of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from trimode_vlm.cli import one_line
from trimode_vlm.eval import answering, state
from trimode_vlm.eval.progress import LEAST_SEC, Progress
from trimode_vlm.eval.settings import EvalSettings
from trimode_vlm.eval.state import Key


def work(
    settings: EvalSettings, keys: Sequence[Key], loader: answering.Loader, shard: int, meanwhile: Callable[[], None]
) -> None:
    """Answer `keys` and append the records to a shard of the run's folder."""
    folder = Path(settings.output)
    with state.Writer(state.shard_path(folder, shard)) as writer:
        for records in answering.answers(settings, keys, loader):
            answered = [record for record in records if "error" not in record]
            writer.append(answered)
            if len(answered) < len(records):
                with state.Writer(state.shard_path(folder, shard, state.SKIPPED)) as skipped:
                    skipped.append(record for record in records if "error" in record)
            meanwhile()


def fan_out(settings: EvalSettings, todo: Sequence[Key], loader: answering.Loader, progress: Progress) -> None:
    """Share `todo` among up to `settings.workers` processes of one thread each; none is started for nothing.

    Raises:
        RuntimeError: one of them ended before its work was done; the others were stopped.
    """
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the children when they import torch
    processes = []
    try:
        for worker in range(settings.workers):
            keys = answering.share(todo, settings.batch_size, worker, settings.workers)
            if not keys:
                break
            process = context.Process(
                target=_child, name=f"eval-worker-{worker}", args=(settings, keys, loader, worker), daemon=True
            )
            process.start()
            processes.append(process)
        running = list(processes)
        while running:
            wait([process.sentinel for process in running], timeout=LEAST_SEC)
            progress.look()
            running = [process for process in running if process.is_alive()]
            failed = [f"worker {i} exited with code {p.exitcode}" for i, p in enumerate(processes) if p.exitcode]
            if failed:
                raise RuntimeError(f"{', '.join(failed)}; the same command again goes on from what was written")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _child(settings: EvalSettings, keys: Sequence[Key], loader: Callable[..., Any], worker: int) -> None:
    import torch

    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None and not parent.is_alive():
            raise SystemExit(1)

    try:
        work(settings, keys, loader, worker, end_with_parent)
    except KeyboardInterrupt:  # Ctrl-C reaches all processes of a terminal; the parent says so
        raise SystemExit(130) from None
    except Exception as error:
        print(f"worker {worker}: {one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from error
