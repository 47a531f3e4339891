"""`trimode-vlm bench`: the measurements of this folder's bench_*.py, which run, print and end alike.

The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from trimode_vlm.cli import UsageError, check_dtype, print_settings
from trimode_vlm.eval import bench_decode, bench_frontier, bench_modes, bench_serve, bench_train
from trimode_vlm.eval.arguments import check_file, check_plot

EXAMPLES = """examples:
  trimode-vlm bench decode
  trimode-vlm bench decode --threads 1 --repeats 7 --json reports/decode.json
  trimode-vlm bench decode --quick
  trimode-vlm bench decode --quantize int8
  trimode-vlm bench frontier --limit 5 --plot reports/frontier.png --json reports/frontier.json
  trimode-vlm bench frontier --modes diffusion --block-lengths 32 --thresholds 0.95,0.9,0.8,0.7,0.6,0.5
  trimode-vlm bench modes --plot reports/modes.png
  trimode-vlm bench serve
  trimode-vlm bench serve --users 32 --duration-sec 180 --modes ar --mix image --caches
  trimode-vlm bench serve --url http://localhost:8000 --users 1,8 --modes linear_spec,auto
  trimode-vlm bench serve --rate 0.5,2 --modes auto
  trimode-vlm bench train
"""
# The options of each beside those of all, with their defaults, and other ones for --quick.
DEFAULTS: dict[str, dict[str, Any]] = {
    "decode": bench_decode.DEFAULTS,
    "frontier": bench_frontier.DEFAULTS,
    "modes": bench_modes.DEFAULTS,
    "serve": bench_serve.DEFAULTS,
    "train": bench_train.DEFAULTS,
}
QUICK: dict[str, dict[str, Any]] = {
    "decode": bench_decode.QUICK,
    "frontier": bench_frontier.QUICK,
    "modes": bench_modes.QUICK,
    "serve": bench_serve.QUICK,
    "train": bench_train.QUICK,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm bench`."""
    add = parser.add_argument
    add("what", choices=list(DEFAULTS), help="what to measure")
    add("--model", default="nano", help="checkpoint that knows the held-out tasks (default: the shipped nano)")
    add("--threads", type=int, default=1, help="CPU threads (default 1)")
    add("--repeats", type=int, help="not of frontier: interleaved repetitions (default 5, serve 3; modes: for one row)")
    budget = "decode: tokens per AR answer in the comparisons (default 128); frontier, serve: budget of every answer"
    budget += " (default: the task's; serve: 640)"
    add("--max-new-tokens", "--new-tokens", type=int, help=budget)
    samples = "decode: held-out answers of over 200 tokens (default 8); frontier: per task (default 5); modes: requests"
    samples += " (default 16); serve: questions (default 48); train: rows (default 4)"
    add("--samples", "--limit", type=int, help=samples)
    adapter = "a PEFT folder, or auto: decode, frontier: also draft with this adapter; modes, serve: draft with it"
    add("--adapter", help=f"{adapter} (default: frontier, serve: auto; else none)")
    add("--quantize", help="decode, frontier: also with text layers in int8, int4 or 4bit")
    add("--dtype", help="not of train: such as bfloat16 (default: the checkpoint's)")
    add("--plot", metavar="FILE.png", help="frontier, modes: draw the curves")
    add("--seed", type=int, default=0, help="which held-out samples, or which random rows (default 0)")
    add("--json", metavar="FILE", help="also write the JSON document to this file")
    add("--quick", action="store_true", help="one repetition of everything, small sizes: shows that it runs, no more")
    bench_frontier.add_arguments(parser)
    bench_serve.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and end with the JSON document; returns the exit code."""
    check(args)
    # Read when torch loads: set later, these would change nothing.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    settings = {name: value for name, value in vars(args).items() if value is not None}
    print_settings(settings)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result: dict[str, Any] = {"settings": versions | settings}

    def note(name: str, title: str, values: dict[str, Any], text: str | None = None) -> None:
        result[name] = values
        report(title, values if text is None else text)

    name = f"bench_{args.what}"
    measure = getattr(importlib.import_module(f"trimode_vlm.eval.{name}"), name)
    with torch.inference_mode(args.what != "train"):
        measure(args, note)
    text = json.dumps(result)
    # Before the file, whose disk may be full by now: the measurement is not lost then.
    print(f"\n{text}", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return 0


def check(args: argparse.Namespace) -> None:
    """Fill in the defaults; raise UsageError for what could not be measured, or not be written in the end."""
    for name in sorted({name for options in DEFAULTS.values() for name in options} - DEFAULTS[args.what].keys()):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is nothing to bench {args.what}: leave it out")
    for name in ("threads", "repeats", "max_new_tokens", "samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    check_dtype(args.dtype)
    check_file("--json", args.json)
    check_plot(args.plot)
    defaults = DEFAULTS[args.what] | (QUICK[args.what] if args.quick else {})
    given = [name for name in defaults if getattr(args, name) is not None]
    for name in defaults.keys() - set(given):
        setattr(args, name, defaults[name])
    if args.what == "frontier":
        bench_frontier.check(args, given)
    elif args.what == "serve":
        bench_serve.check(args, given)


def report(title: str, values: Mapping[str, Any] | str) -> None:
    """Print one comparison, a text as it is, values as `name: value` lines, numbers to four digits."""
    print(f"\n{title}")
    if isinstance(values, str):
        print(f"\n{values}")
        values = {}
    for name, value in values.items():
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, item in items:
            label = f"{name} [{key}]" if key else name
            print(f"  {label}: {format(item, '.4g') if isinstance(item, float) else item}")
    sys.stdout.flush()
