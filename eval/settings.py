"""The settings of an evaluation: the command's options, what is refused, and what each mode's `generate` receives."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimode_vlm.cli import UsageError, check_device, nearest
from trimode_vlm.eval import ranks
from trimode_vlm.eval.arguments import pairs
from trimode_vlm.eval.scored import STYLES
from trimode_vlm.eval.tasks import EvalTask, select
from trimode_vlm.eval.tpf import DEFAULT_BUCKETS
from trimode_vlm.terminal_options import tokens_or_auto

# What `generate` takes beside mode and budget, each where the mode uses it.
DECODING = ("threshold", "commit_rule", "entropy_bound", "block_length", "verifier_mix", "verification")
SAMPLING = ("temperature", "top_p", "top_k")
DEFAULT_THRESHOLD = 0.9


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of one evaluation; of the command's options, those that say what to do.

    limit: samples per task; None: the whole data set, of generated tasks as many as they name.
    max_new_tokens: budget of every answer; None: each task's own. task_budgets: task -> budget, before both.
    data: task -> local path or hub id in place of the task's own. threshold: None: 0.9 with the confidence rule.
    block_length: tokens; None: the model's own; "auto": chosen per draft, in the modes that can.
    on_error: "raise", or "skip" samples that cannot be read or answered.
    control_limit: samples per task of the two controls; None: as `limit`.
    """

    model: str
    tasks: tuple[str, ...]
    modes: tuple[str, ...]
    output: str
    limit: int | None = None
    seed: int = 0
    batch_size: int = 1
    workers: int = 1
    metric_style: str = "vlmevalkit"
    data: Mapping[str, str] = field(default_factory=dict)
    threshold: float | None = None
    commit_rule: str = "confidence"
    entropy_bound: float | None = None
    block_length: int | str | None = None
    verifier_mix: float | None = None
    verification: str | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    task_budgets: Mapping[str, int] = field(default_factory=dict)
    adapter: str | None = None
    sampler: str | None = None
    quantize: str | None = None
    on_error: str = "raise"
    shuffle_images: bool = False
    control: str | None = None
    control_limit: int | None = None
    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.threshold is None and self.commit_rule == "confidence":
            object.__setattr__(self, "threshold", DEFAULT_THRESHOLD)

    def budget(self, task: EvalTask) -> int:
        """Tokens that an answer of this task may have."""
        return self.task_budgets.get(task.name, self.max_new_tokens or task.max_new_tokens)

    def generate_options(self, mode: str, max_new_tokens: int, first_id: int = 0) -> dict[str, Any]:
        """generate()'s options in one mode for rows of successive ids; row b draws from the stream of id first_id + b.

        So a sampled answer too is the same in whatever batch and on whatever rank it is drawn.
        """
        from trimode_vlm.decoders import MODE_OPTIONS
        from trimode_vlm.generation_config import ADAPTIVE_MODES

        options: dict[str, Any] = {"mode": mode, "max_new_tokens": max_new_tokens, "do_sample": self.temperature > 0}
        given = {name: getattr(self, name) for name in DECODING if name in MODE_OPTIONS[mode]}
        if self.block_length == "auto" and mode not in ADAPTIVE_MODES and set(ADAPTIVE_MODES) & set(self.modes):
            given.pop("block_length", None)
        if self.temperature > 0:
            given |= {name: getattr(self, name) for name in SAMPLING} | {"seed": self.seed * 10_000_000 + first_id}
        return options | {name: value for name, value in given.items() if value is not None}

    def load_options(self, is_control: bool) -> dict[str, Any]:
        """load()'s options; adapter and sampler were trained for the model, so the control goes without."""
        options = {"dtype": self.dtype, "device": self.device}
        more = {"quantize": self.quantize} | ({} if is_control else {"adapter": self.adapter, "sampler": self.sampler})
        return options | {name: value for name, value in more.items() if value is not None}


def check(settings: EvalSettings) -> list[EvalTask]:
    """The tasks of settings that an evaluation can honour; nothing is loaded or written.

    Raises:
        ValueError: a value out of range, an unknown task or mode, or options that do not go together.
    """
    from trimode_vlm.checkpoints import parse_dtype
    from trimode_vlm.generation_config import TriModeGenerationConfig
    from trimode_vlm.quantize import check_quantize

    for name in ("limit", "control_limit", "batch_size", "workers", "max_new_tokens"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', ' ')} must be at least 1, got {value}")
    if settings.workers > 1 and ranks.world_size() > 1:
        raise ValueError("--workers starts processes of its own: leave it out under torchrun or deepspeed")
    if settings.metric_style not in STYLES:
        raise ValueError(f"unknown metric style {settings.metric_style!r} (known: {', '.join(STYLES)})")
    if settings.on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be raise or skip, got {settings.on_error!r}")
    tasks = select(settings.tasks, settings.data)
    if not tasks:
        raise ValueError("no task is named")
    _check_budgets(settings, [task.name for task in tasks])
    if not settings.modes:
        raise ValueError("no mode is named")
    for mode in settings.modes:
        TriModeGenerationConfig().override(settings.generate_options(mode, settings.max_new_tokens or 1))
    if settings.dtype is not None:
        parse_dtype(settings.dtype)
    if settings.quantize is not None:
        check_quantize(settings.quantize)
    check_device(settings.device)
    return tasks


def _check_budgets(settings: EvalSettings, names: Sequence[str]) -> None:
    for name, budget in settings.task_budgets.items():
        if name not in names:
            raise ValueError(f"--max-new-tokens {name}={budget}: no such task in this run{nearest(name, names)}")
        if budget < 1:
            raise ValueError(f"--max-new-tokens {name}={budget}: must be at least 1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm eval`."""
    add = parser.add_argument
    add("--model", default="nano", help="checkpoint folder or hub id (default: the shipped nano)")
    add("--tasks", default="nano", help="comma-separated tasks; 'nano' is all held-out synthetic tasks")
    add("--list-tasks", action="store_true", help="print the tasks with their metrics and budgets, and end")
    add("--mode", "--modes", default="ar,diffusion,linear_spec", help="comma-separated decoding modes")
    add("--output", help="folder of this run: state, report.json, report.md, report.html")
    add("--limit", type=int, help="samples per task, the first ones (default: all; of nano's tasks 500)")
    add("--data", action="append", default=[], metavar="TASK=PATH", help="read a task from your copy; repeatable")
    add("--metric-style", default="vlmevalkit", help=f"{', '.join(STYLES)}; a finished run is scored anew at once")
    add("--on-error", default="raise", help="raise (default), or skip samples that cannot be read; they are counted")
    add("--seed", type=int, default=0, help="which held-out samples; also of sampling and of shuffled images")
    add("--batch-size", type=int, default=1, help="rows per call; 1 gives honest seconds, more is for accuracy only")
    add("--workers", type=int, default=1, help="processes of one thread each on this machine; for GPUs use torchrun")
    add("--threshold", type=float, help="confidence at which diffusion commits (default 0.9)")
    add("--commit-rule", default="confidence", help="how diffusion commits: confidence (default), entropy, learned")
    add("--entropy-bound", type=float, help="nats that the entropy rule may commit at once (default 0.1)")
    add(
        "--block-length",
        type=tokens_or_auto,
        help="tokens per block or draft; auto: what pays best; default: the model's",
    )
    add("--verifier-mix", type=float, help="below 1, quadratic_spec accepts by a mix with the diffusion's guess")
    add("--verification", help="with --temperature, of drafts: token (default) or block")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, help="with --temperature: sample from the likeliest tokens of this total mass")
    add("--top-k", type=int, help="with --temperature: sample from this many likeliest tokens")
    add(
        "--max-new-tokens",
        metavar="N | TASK=N,...",
        help="budget of an answer, of all or of one task; default: its own",
    )
    add("--adapter", help="draft adapter of self-speculation: a PEFT folder, or auto for the one beside the weights")
    add("--sampler", help="folder of a learned sampler, for --commit-rule learned (default: beside the weights)")
    add("--quantize", help="the text layers in int8, int4 or 4bit")
    add("--shuffle-images", action="store_true", help="also answer with the images of other samples, in the first mode")
    add("--control", help="another checkpoint to put beside the model, such as the AR-only one")
    add("--control-limit", type=int, help="samples per task of the two controls (default: as --limit)")
    add("--buckets", default="100,200", help="response lengths in tokens above which TPF is also reported")
    add("--dtype", help="such as bfloat16; default: the checkpoint's")
    add("--device", help="such as cuda or cpu (default: cuda where there is one)")
    add("--compare", nargs=2, metavar=("A", "B"), help="two folders of runs side by side; answers nothing")


def from_arguments(args: argparse.Namespace) -> EvalSettings:
    """Settings from parsed options.

    Raises:
        UsageError: an unknown mode or task, a value out of range, or an option that nothing here uses.
    """
    if args.output is None:
        raise UsageError("the following arguments are required: --output")
    modes = names_in(args.mode)
    _refuse_without_effect(args, modes)
    if not all(part.isdigit() for part in names_in(args.buckets)):
        raise UsageError(f"--buckets takes numbers of tokens such as 100,200, found {args.buckets!r}")
    fields = EvalSettings.__dataclass_fields__
    values = {name: value for name, value in vars(args).items() if name in fields}
    max_new_tokens, task_budgets = _budgets(args.max_new_tokens)
    settings = EvalSettings(
        **values
        | {
            "tasks": names_in(args.tasks),
            "modes": modes,
            "buckets": tuple(sorted(int(part) for part in names_in(args.buckets))),
            "data": pairs("--data", args.data),
            "max_new_tokens": max_new_tokens,
            "task_budgets": task_budgets,
        }
    )
    try:
        check(settings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return settings


def _refuse_without_effect(args: argparse.Namespace, modes: Sequence[str]) -> None:
    """Raise UsageError for an unknown mode, and for an option that no mode or other option here uses."""
    from trimode_vlm.decoders import DECODERS, MODE_OPTIONS

    for mode in modes or [""]:
        if mode not in DECODERS:
            raise UsageError(f"unknown mode {mode!r}{nearest(mode, DECODERS)} (known: {', '.join(DECODERS)})")
    users = {name: [mode for mode, options in MODE_OPTIONS.items() if name in options] for name in DECODING}
    users["adapter"] = [mode for mode in DECODERS if mode not in ("ar", "diffusion")]
    for name, using in users.items():
        is_given = getattr(args, name) not in (None, "confidence")
        if is_given and not set(using) & set(modes):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} has no effect with --mode {','.join(modes)}; it belongs to {', '.join(using)}")
    if args.control_limit is not None and not (args.control or args.shuffle_images):
        raise UsageError("--control-limit has no effect without --control or --shuffle-images")
    if args.sampler is not None and args.commit_rule != "learned":
        raise UsageError("--sampler has no effect without --commit-rule learned")
    for name in ("top_p", "top_k"):
        if getattr(args, name) is not None and not args.temperature:
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --temperature")
    if not args.temperature >= 0:
        raise UsageError(f"--temperature must be 0 or more, found {args.temperature}")


def _budgets(text: str | None) -> tuple[int | None, dict[str, int]]:
    """ "512", "docvqa=64,chartqa=16" or "512,docvqa=64": the budget of all, and of single tasks."""
    everywhere, single = None, {}
    for part in names_in(text or ""):
        name, equals, number = part.rpartition("=")
        if not number.lstrip("-").isdigit() or bool(name) != bool(equals) or (not name and everywhere is not None):
            raise UsageError(f"--max-new-tokens takes a number or TASK=NUMBER pairs such as docvqa=64, found {text!r}")
        if name:
            single[name] = int(number)
        else:
            everywhere = int(number)
    return everywhere, single


def names_in(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated text, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
