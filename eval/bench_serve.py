"""`trimode-vlm bench serve`: latencies and throughput of many users, by mode.

Held-out questions of nano, with and without pictures. First every question is asked alone, in each mode: what comes is
what every later answer is compared with. Then all runs (a mode under a load) in turn, medians over the repetitions, so
that a slower minute slows all. Greedy. An engine in this process answers, or, with --url, a server.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trimode_vlm.cli import UsageError, nearest
from trimode_vlm.eval import tables
from trimode_vlm.eval.arguments import numbers
from trimode_vlm.eval.load_generator import SERVER_DEFAULT, EngineClient, HttpClient, Job, Load, Run, run_load
from trimode_vlm.eval.serve_report import cell, memory_over_time, text_of, verdict
from trimode_vlm.eval.timing import there_and_back

DEFAULTS: dict[str, Any] = {
    "samples": 48,
    "repeats": 3,
    "users": "1,4,8,16",
    "rate": None,
    "duration_sec": None,
    "modes": "ar,linear_spec,auto",
    "mix": "both",
    "max_new_tokens": 640,
    "caches": False,
    "queue_limit": 128,
    "max_rows": 32,
    "url": None,
    "name": None,
    "adapter": None,
    "dtype": None,
    "device": None,
}
QUICK: dict[str, Any] = {"samples": 4, "repeats": 1, "users": "1,2", "modes": "ar,auto", "max_new_tokens": 32}
MODES = ("ar", "diffusion", "linear_spec", "quadratic_spec", "auto")
MIXES = ("both", "image", "text")
KEY_VARIABLES = ("TRIMODE_API_KEY", "OPENAI_API_KEY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only this measurement has, and those it shares with `bench frontier`."""
    add = parser.add_argument_group("serve only").add_argument
    add("--users", help=f"users at once, each asking when answered (default {DEFAULTS['users']})")
    add("--rate", help="instead of users: questions per second, at random moments (Poisson)")
    add("--duration-sec", type=float, help="ask for so long, the questions over and over, one repetition")
    add("--mix", help=f"questions: {', '.join(MIXES)} (default both)")
    add("--caches", action="store_const", const=True, help="keep the engine's prefix and picture caches between runs")
    add("--queue-limit", type=int, help="of the engine (default 128)")
    add("--max-rows", type=int, help="of the engine (default 32)")
    add(
        "--url", help=f"ask the OpenAI API there instead; key in {' or '.join(KEY_VARIABLES)}; mode: default sends none"
    )
    add("--name", help="with --url: the model's name there")


def check(args: argparse.Namespace, given: Sequence[str]) -> None:
    """Read the lists in place. Raises UsageError for what could not be measured."""
    from trimode_vlm.eval.settings import names_in

    if args.rate is not None:
        if "users" in given:
            raise UsageError("--users and --rate exclude each other: users ask when answered, arrivals do not wait")
        args.rate, args.users = numbers(args.rate, float, "--rate", 1e-3, 1e4), None
    else:
        args.users = numbers(args.users, int, "--users", 1, 4096)
    args.modes = names_in(args.modes)
    known = (*MODES, SERVER_DEFAULT) if args.url else MODES
    for mode in args.modes:
        if mode not in known:
            raise UsageError(f"--modes: unknown mode {mode!r}{nearest(mode, known)} (known: {', '.join(known)})")
    if not args.modes:
        raise UsageError("--modes names no mode")
    if args.mix not in MIXES:
        raise UsageError(f"--mix: unknown mix {args.mix!r}{nearest(args.mix, MIXES)} (known: {', '.join(MIXES)})")
    for name in ("duration_sec", "queue_limit", "max_rows"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")
    if args.url:
        for name in ("caches", "queue_limit", "max_rows", "adapter", "dtype", "device"):
            if name in given:
                raise UsageError(f"--{name.replace('_', '-')} is the engine's, and --url asks a server: leave it out")
        if not args.url.startswith(("http://", "https://")):
            raise UsageError(f"--url takes an address such as http://localhost:8000, got {args.url!r}")
    elif args.name:
        raise UsageError("--name is what a server calls its model: give --url too")


def bench_serve(args: argparse.Namespace, note: Callable[..., None]) -> None:
    """Ask alone, then under every load; each handed to `note(name, title, values, text)`."""
    jobs = questions(args.samples, args.seed, args.mix, args.max_new_tokens)
    if args.url:
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        measure(args, HttpClient(args.url, args.name, key, jobs), jobs, note, lambda: {})
        return
    import trimode_vlm
    from trimode_vlm.calibration import policy_for
    from trimode_vlm.engine import Engine, EngineSettings
    from trimode_vlm.eval.answering import check_adapter

    model, processor = trimode_vlm.load(
        args.model, dtype=args.dtype, device=args.device or "cpu", adapter=args.adapter or "auto"
    )
    check_adapter(model, args.model, args.adapter)
    limits: dict[str, Any] = {"queue_limit": args.queue_limit, "max_rows": args.max_rows}
    if not args.caches:
        limits |= {"prefix_cache_bytes": 0, "feature_cache_bytes": 0}
    if "auto" in args.modes:
        # What forwards cost is measured once; not in the middle of a run.
        policy_for(model, min(max(args.users), args.max_rows) if args.users else args.max_rows)
    with Engine(model, processor, EngineSettings(**limits)) as engine:
        measure(args, EngineClient(engine, jobs), jobs, note, lambda: memory(engine))


def questions(count: int, seed: int, mix: str, max_new_tokens: int) -> list[Job]:
    """Held-out tasks in turn, each question with a picture of its own."""
    from trimode_vlm.eval.tasks import select

    tasks = [t for t in select(["nano"]) if mix == "both" or t.needs_image == (mix == "image")]
    return [
        Job(
            number=i,
            messages=tasks[i % len(tasks)].example(i // len(tasks), seed).messages,
            max_new_tokens=max_new_tokens,
        )
        for i in range(count)
    ]


def memory(engine: Any) -> dict[str, float]:
    """MiB: of the process, and of what the engine holds."""
    import psutil

    stats = engine.stats()
    held = {name: stats[name] / 2**20 for name in ("kv_bytes", "prefix_cache_bytes", "feature_cache_bytes")}
    return {"resident": psutil.Process().memory_info().rss / 2**20} | held


def measure(
    args: argparse.Namespace,
    client: EngineClient | HttpClient,
    jobs: Sequence[Job],
    note: Callable[..., None],
    memory_now: Callable[[], dict[str, float]],
) -> None:
    """All runs, their tables, and what they say about many users and about auto."""
    loads = [Load(users=n) for n in args.users] if args.users else [Load(rate=rate) for rate in args.rate]
    alone: dict[str, dict[int, str]] = {}
    for mode in args.modes:
        answers = run_load(client, jobs, mode, Load(users=1)).answers
        refused = next((a for a in answers if a.status != "ok"), None)
        if refused is not None:
            raise ValueError(f"mode {mode}: question {refused.job} asked alone: {refused.error or refused.status}")
        alone[mode] = {answer.job: answer.text for answer in answers}
    runs: dict[tuple[str, str], list[Run]] = {(mode, str(load)): [] for load in loads for mode in args.modes}
    # One after the other, as single requests: the same questions, in the same turns.
    singles: dict[str, list[Run]] = {mode: [] for mode in args.modes}
    watched: list[dict[str, float]] = [memory_now()]
    for repeat in range(1 if args.duration_sec else args.repeats):
        modes = there_and_back(args.modes, repeat)
        if not args.duration_sec:
            for mode in modes:
                singles[mode].append(run_load(client, jobs, mode, Load(users=1)))
        for load in loads:
            for mode in modes:
                if load.users == 1 and not args.duration_sec:
                    runs[mode, str(load)].append(singles[mode][-1])
                    continue
                run = run_load(
                    client,
                    jobs,
                    mode,
                    load,
                    duration_sec=args.duration_sec,
                    seed=args.seed + repeat,
                    each_second=lambda: watched.append(memory_now()),
                )
                runs[mode, str(load)].append(run)
    watched.append(memory_now())
    cells = {
        str(load): {mode: cell(runs[mode, str(load)], singles[mode], alone[mode]) for mode in args.modes}
        for load in loads
    }
    note("loads", "by users" if args.users else "by arrivals", cells, text_of(cells))
    errors = Counter(a.error for group in runs.values() for run in group for a in run.answers if a.error)
    if errors:
        note("errors", "errors", {"first": dict(errors.most_common(5))})
    if watched[0]:
        held = memory_over_time(watched)
        rows = [[name, *(tables.number(value, 1) for value in values.values())] for name, values in held.items()]
        head = ["MiB", "start", "after a third of the time", "most", "end"]
        note("memory_mib", "memory", held, tables.markdown(head, rows))
    note("verdict", "in short", verdict(cells, alone))
