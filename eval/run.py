"""`trimode-vlm eval`: answer every sample in every mode, keep one JSON line each, report.

The lines are the state: the same command after a kill goes on where it stopped. The report is made from them alone, and
scores are made anew from the stored answers each time, so another metric style needs no new answers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trimode_vlm.cli import UsageError, main, print_settings
from trimode_vlm.eval import answering, ranks, report, run_folder, state
from trimode_vlm.eval.settings import EvalSettings, add_arguments, check, from_arguments
from trimode_vlm.eval.state import Key, Record
from trimode_vlm.eval.tasks import EvalTask, derangement, list_tasks

__all__ = ["EXAMPLES", "EvalSettings", "add_arguments", "evaluate", "plan", "run"]

EXAMPLES = """examples:
  trimode-vlm eval --model nano --tasks nano --mode ar,diffusion,linear_spec --limit 50 --output reports/nano
  trimode-vlm eval --model MODEL --tasks ai2d,docvqa --data docvqa=copies/docvqa --limit 200 --output reports/mine
  torchrun --nproc-per-node 8 -m trimode_vlm eval --model MODEL --tasks mmmu --output reports/mine
  deepspeed --num_gpus 8 --module trimode_vlm eval --model MODEL --tasks mmmu --output reports/mine
  trimode-vlm eval --shuffle-images --control runs/nano/ar --control-limit 100 --output reports/nano
  trimode-vlm eval --compare reports/mine reports/theirs
The same command again resumes, with any number of ranks; --limit, --tasks, --mode, the controls and --metric-style may
change between runs.
"""


def evaluate(settings: EvalSettings, loader: answering.Loader | None = None) -> dict[str, Any]:
    """Answer what is missing in `settings.output`; return the report, also written there as report.json and report.md.

    Under a launcher every rank calls this; all but rank 0 return an empty report.

    Args:
        loader: (path, dtype=, device=, ...) -> (model, processor), `trimode_vlm.load` by default; picklable if
            workers > 1.

    Raises:
        ValueError: an unknown task or mode, too few samples, or an output folder that holds another run.
        SampleError: a sample cannot be read or answered; what was answered before stays.
        RuntimeError: a worker process or a rank died; what it had written stays.
    """
    from trimode_vlm.eval.progress import Progress
    from trimode_vlm.eval.workers import fan_out, work

    settings = replace(settings, device=settings.device or ranks.default_device())
    tasks = check(settings)
    folder, rank, loader = Path(settings.output), ranks.rank(), loader or answering.load
    # Rank 0's; the others are told what is left to answer.
    keys: list[Key] = []
    done: dict[Key, Record] = {}
    with ExitStack() as stack:

        def prepare() -> list[Key]:
            nonlocal keys, done
            keys, done = _prepare(settings, tasks, loader, stack)
            return [key for key in keys if key not in done]

        group = stack.enter_context(ranks.joined())
        todo = group.first(prepare)
        answered = [done[key] for key in keys if key in done]
        with Progress(folder, len(keys), answered, is_shown=rank == 0) as progress:
            if settings.workers > 1:
                fan_out(settings, todo, loader, progress)
            elif mine := answering.share(todo, settings.batch_size, rank, ranks.world_size()):
                work(settings, mine, loader, rank, progress.look)
            group.wait(progress.look)
        return _finish(settings, tasks, keys) if rank == 0 else {}


def _prepare(
    settings: EvalSettings, tasks: Sequence[EvalTask], loader: answering.Loader, stack: ExitStack
) -> tuple[list[Key], dict[Key, Record]]:
    """All that may be refused, before the first answer; then one merged file: every sample, and what it holds."""
    folder = Path(settings.output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder}: this is a file; name a folder")
    keys = plan(settings, tasks)
    done = state.read(folder)
    if loader is answering.load:
        from trimode_vlm.checkpoints import resolve

        # All of them before the first answer: the control comes last, perhaps hours later.
        for path in dict.fromkeys(answering.checkpoint(settings, key) for key in keys if key not in done):
            if not any((resolve(path) / name).is_file() for name in ("config.json", "adapter_config.json")):
                raise ValueError(f"{path}: no config.json, so this is not a model folder")
    run_folder.companions(settings)
    stack.enter_context(state.lock(folder))
    run_folder.claim(folder, settings, tasks, done)
    done = state.merge(folder, lambda record: _scored_anew(record, settings, tasks))
    state.merge_skipped(folder, done)
    return keys, done


def _finish(settings: EvalSettings, tasks: Sequence[EvalTask], keys: Sequence[Key]) -> dict[str, Any]:
    """Merge the shards and report."""
    folder = Path(settings.output)
    records = state.merge(folder)
    skipped = state.merge_skipped(folder, records)
    missing = [key for key in keys if key not in records and key not in skipped]
    if missing:
        raise RuntimeError(
            f"{folder}: {len(missing)} of {len(keys)} answers are not here; if the ranks are on several machines, "
            "they need one shared --output"
        )
    of_this_run = {key: skipped[key] for key in keys if key in skipped}
    if len(of_this_run) == len(keys):
        raise ValueError(f"every sample was skipped, the first because of: {of_this_run[keys[0]]['error']}")
    content = asdict(settings) | {
        "tasks": [task.name for task in tasks],
        "workers": max(settings.workers, ranks.world_size()),
        "num_examples": {task.name: task.num_examples for task in tasks},
        "skipped": _counts(of_this_run),
    }
    result = report.build(content, [records[key] for key in keys if key in records])
    report.write(result, folder)
    return result


def _counts(skipped: dict[Key, Record]) -> dict[str, dict[str, int]]:
    """task -> mode -> samples that could not be read or answered (of the controls too)."""
    counts: dict[str, dict[str, int]] = {}
    for key in skipped:
        by_mode = counts.setdefault(key.task, {})
        by_mode[key.mode] = by_mode.get(key.mode, 0) + 1
    return counts


def _scored_anew(record: Record, settings: EvalSettings, tasks: Sequence[EvalTask]) -> Record:
    """A stored record with the score that its answer has by today's metric and style."""
    metrics = {task.name: task.metric for task in tasks}
    metric = metrics.get(record["task"]) or record.get("metric", "exact_match")
    try:
        return answering.scored(record, metric, settings.metric_style)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{settings.output}: {record['task']}, row {record['id']}: {error}") from error


def plan(settings: EvalSettings, tasks: Sequence[EvalTask]) -> list[Key]:
    """Every sample that the settings ask for; the shuffled control runs in the first mode, the rest in all modes.

    Raises:
        ValueError: a task's data cannot be read, or is endless and no limit is given.
    """
    keys = []
    for task in tasks:
        limit = settings.limit or task.default_limit
        available = task.num_examples
        if limit is None and available is None:
            raise ValueError(f"{task.name} has as many samples as you ask for: give --limit")
        count, control_count = (
            min(n for n in (asked, available) if n is not None) for asked in (limit, settings.control_limit or limit)
        )
        keys += [Key("model", task.name, mode, i, i) for mode in settings.modes for i in range(count)]
        if settings.shuffle_images and task.needs_image:
            donors = derangement(control_count, settings.seed)
            keys += [Key("shuffled", task.name, settings.modes[0], i, donors[i]) for i in range(control_count)]
        if settings.control:
            keys += [Key("control", task.name, mode, i, i) for mode in settings.modes for i in range(control_count)]
    order = {"model": 0, "shuffled": 1, "control": 2}
    return sorted(keys, key=lambda key: order[key.run])


def run(args: argparse.Namespace) -> int:
    """Evaluate as asked and print the Markdown report; returns the exit code."""
    if args.list_tasks:
        print(list_tasks())
        return 0
    if args.compare:
        first, second = args.compare
        return _compare(first, second, args.output)
    rank = ranks.rank()
    try:
        settings = from_arguments(args)
    except UsageError:
        if rank == 0:
            raise
        return 2  # one line is enough
    if rank == 0:
        said = {name: value for name, value in asdict(settings).items() if value is not None and value is not False}
        print_settings({name: value for name, value in said.items() if value != {}})
    try:
        with _stopping_on_sigterm():
            result = evaluate(settings)
    except (KeyboardInterrupt, SystemExit):
        if rank == 0:
            print(f"stopped; the same command again goes on from what is in {settings.output}", file=sys.stderr)
        raise
    except Exception:
        if ranks.world_size() > 1:
            print(f"\nrank {rank} failed:", file=sys.stderr)  # on a line of its own: rank 0's bar holds the last one
        raise
    if rank == 0:
        print(report.markdown(result))
        skipped = sum(n for by_mode in result["settings"]["skipped"].values() for n in by_mode.values())
        if skipped:
            print(f"\n{skipped} samples were skipped: see {settings.output}/{state.SKIPPED}", file=sys.stderr)
        print(f"\nwritten to {settings.output}: report.json, report.md, report.html, {state.MERGED}", file=sys.stderr)
    return 0


@contextmanager
def _stopping_on_sigterm() -> Iterator[None]:
    """Let `finally` blocks run on what a scheduler or a launcher sends before it kills."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _compare(first: str, second: str, output: str | None) -> int:
    from trimode_vlm.eval import compare

    result = compare.compare(Path(first), Path(second))
    print(compare.markdown(result))
    if output is not None:
        compare.write(result, Path(output))
    return 0


if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
