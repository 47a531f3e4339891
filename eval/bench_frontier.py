"""`trimode-vlm bench frontier`: what accuracy each way to decode has, against its tokens per forward and its seconds.

Every point of the sweep answers every sample, the points in turn on one sample before the next, so that a slower minute
slows all of them. Greedy, one row at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimode_vlm.cli import UsageError, check_device, nearest
from trimode_vlm.eval.arguments import numbers, pairs

if TYPE_CHECKING:
    from trimode_vlm.eval.settings import EvalSettings
    from trimode_vlm.eval.state import Record
    from trimode_vlm.eval.tasks import EvalTask

DEFAULTS: dict[str, Any] = {
    "tasks": "nano",
    "data": (),
    "samples": 5,
    "modes": "ar,diffusion,linear_spec,quadratic_spec",
    "block_lengths": "8,16,32",
    "commit_rules": None,
    "thresholds": "0.95,0.9,0.7,0.5,0.3",
    "entropy_bounds": "0.05,0.2,0.8",
    "adapter": None,
    "sampler": None,
    "control_sampler": None,
    "quantize": None,
    "max_new_tokens": None,
    "plot": None,
    "dtype": None,
    "device": None,
}
QUICK: dict[str, Any] = {
    "tasks": "receipt_csv,text_spell",
    "samples": 1,
    "block_lengths": "16",
    "thresholds": "0.9",
    "entropy_bounds": "0.2",
}
MAX_BLOCK_LENGTH = 1024
COMMIT_RULES = ("confidence", "entropy", "learned")
DRAFTING = ("linear_spec", "quadratic_spec", "auto")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to decode.

    threshold: of the confidence or learned rule. is_control: the learned rule asks the control sampler. weights: "" or
    how they are quantised.
    """

    mode: str
    block_length: int | None = None
    commit_rule: str | None = None
    threshold: float | None = None
    entropy_bound: float | None = None
    adapter: bool = False
    is_control: bool = False
    weights: str = ""

    @property
    def family(self) -> str:
        """What a curve joins: all but block length and threshold."""
        rule = f" {self.commit_rule}{' (control)' if self.is_control else ''}" if self.commit_rule else ""
        return f"{self.mode}{rule}{' + adapter' if self.adapter else ''}{' ' + self.weights if self.weights else ''}"

    @property
    def setting(self) -> str:
        """What differs within a family."""
        values = (self.block_length, self.threshold, self.entropy_bound)
        return " at ".join(f"{value:g}" for value in values if value is not None)

    @property
    def name(self) -> str:
        return f"{self.family} {self.setting}".strip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that only this measurement has; None where nothing is given, `check` puts the defaults in."""
    add = parser.add_argument_group("frontier (those marked: serve too)").add_argument
    default = {name: f"(default {value})" for name, value in DEFAULTS.items() if value is not None}
    add("--tasks", help=f"comma-separated tasks, as for eval {default['tasks']}")
    add("--data", action="append", metavar="TASK=PATH", help="read a task from your copy, as for eval; repeatable")
    add(
        "--modes", "--mode", help=f"serve too; comma-separated; auto too {default['modes']}; serve: ar,linear_spec,auto"
    )
    add("--block-lengths", help=f"of all modes that have one {default['block_lengths']}")
    add("--commit-rules", help="of diffusion: confidence, entropy, learned (default: all that the model has)")
    add("--thresholds", help=f"of the rules confidence and learned {default['thresholds']}")
    add("--entropy-bounds", help=f"of the rule entropy {default['entropy_bounds']}")
    add("--sampler", metavar="FOLDER", help="learned sampler; default: learned_sampler/ beside the weights, if there")
    add("--control-sampler", metavar="FOLDER", help="another one beside it, such as one trained with --arch mlp")
    add("--device", help="serve too; such as cuda (default: cpu)")


def check(args: argparse.Namespace, given: Sequence[str]) -> None:
    """Read the lists in place. Raises UsageError for what could not be measured, or would change nothing.

    Args:
        given: the options that the user named; the others hold their defaults.
    """
    from trimode_vlm.decoders import MODE_OPTIONS
    from trimode_vlm.eval.settings import names_in
    from trimode_vlm.eval.tasks import select
    from trimode_vlm.quantize import check_quantize

    args.modes, rules = names_in(args.modes), names_in(args.commit_rules or "")
    for option, values, known in (("--modes", args.modes, MODE_OPTIONS), ("--commit-rules", rules, COMMIT_RULES)):
        for value in values:
            if value not in known:
                raise UsageError(f"{option}: unknown {value!r}{nearest(value, known)} (known: {', '.join(known)})")
    if not args.modes:
        raise UsageError("--modes names no mode")
    args.commit_rules = rules or None
    uses = {
        "block_lengths": any("block_length" in MODE_OPTIONS[mode] for mode in args.modes),
        "commit_rules": "diffusion" in args.modes,
        "thresholds": "diffusion" in args.modes and rules != ("entropy",),
        "entropy_bounds": "diffusion" in args.modes and (not rules or "entropy" in rules),
        "sampler": "diffusion" in args.modes and (not rules or "learned" in rules),
        "control_sampler": "diffusion" in args.modes and (not rules or "learned" in rules),
        "adapter": any(mode in DRAFTING for mode in args.modes),
    }
    for name in given:
        if not uses.get(name, True):
            what = f" and --commit-rules {','.join(rules)}" if rules and "diffusion" in args.modes else ""
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --modes {','.join(args.modes)}{what}")
    args.block_lengths = numbers(args.block_lengths, int, "--block-lengths", 1, MAX_BLOCK_LENGTH)
    args.thresholds = numbers(args.thresholds, float, "--thresholds", 0, 1)
    args.entropy_bounds = numbers(args.entropy_bounds, float, "--entropy-bounds", 0, 100)
    check_device(args.device)
    args.data = pairs("--data", args.data)
    try:
        tasks = select(names_in(args.tasks), args.data)
        if args.quantize:
            check_quantize(args.quantize, args.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not tasks:
        raise UsageError("--tasks names no task")


def bench_frontier(args: argparse.Namespace, note: Callable[..., None]) -> None:
    """Answer every sample at every point, and hand the result to `note(name, title, values, text)`."""
    from trimode_vlm.eval import frontier_report
    from trimode_vlm.eval.settings import names_in
    from trimode_vlm.eval.tasks import select

    tasks = select(names_in(args.tasks), args.data)
    models, processor = load(args)
    control = load_control(args, models[""])
    points = sweep(args, models[""], control)
    records = list(measure(models, processor, points, tasks, args, control))
    result = frontier_report.build(points, records, {task.name: task.metric for task in tasks})
    title = "accuracy against tokens per forward and seconds; * marks the Pareto front"
    note("frontier", title, result, frontier_report.markdown(result))
    if args.plot:
        frontier_report.plot(result, Path(args.plot))


def load(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """The models by their weights, "" as they are, and the processor.

    Raises:
        ValueError: no tokenizer, or an adapter or sampler that was asked for and is not there.
    """
    from trimode_vlm.eval.answering import check_adapter
    from trimode_vlm.eval.answering import load as load_model

    options: dict[str, Any] = {"dtype": args.dtype, "device": args.device}
    options |= {"adapter": args.adapter or "auto", "sampler": args.sampler or "auto"}
    model, processor = load_model(args.model, **options)
    check_adapter(model, args.model, args.adapter)
    if "learned" in (args.commit_rules or ()) and model.learned_sampler is None:
        raise ValueError(f"{args.model} has no learned sampler beside its weights: name its folder with --sampler")
    models = {"": model}
    if args.quantize:
        models[args.quantize], _ = load_model(args.model, **options, quantize=args.quantize)
    return models, processor


def load_control(args: argparse.Namespace, model: Any) -> Any:
    """The control sampler, None where none was asked for.

    Raises:
        ValueError: its folder holds none that fits the model, or the model has no sampler to compare it with.
    """
    from trimode_vlm.learned_sampler import find_sampler, read_sampler

    if args.control_sampler is None:
        return None
    folder = find_sampler(args.control_sampler, Path(args.model))
    if folder is None or model.learned_sampler is None:
        raise ValueError("--control-sampler stands beside a learned sampler: name that with --sampler")
    return read_sampler(folder, model)


def sweep(args: argparse.Namespace, model: Any, control: Any = None) -> list[Point]:
    """All points that the options ask for and the model has, mode by mode, quantised weights last."""
    points = [point for mode in args.modes for point in _points(mode, args, model, control)]
    return points + [replace(point, weights=args.quantize) for point in points if args.quantize]


def _points(mode: str, args: argparse.Namespace, model: Any, control: Any) -> Iterator[Point]:
    if mode == "ar":
        yield Point(mode=mode)
    elif mode == "diffusion":
        learned = [sampler for sampler in (model.learned_sampler, control) if sampler is not None]
        for rule in args.commit_rules or [rule for rule in COMMIT_RULES if rule != "learned" or learned]:
            name = "entropy_bound" if rule == "entropy" else "threshold"
            for sampler in learned if rule == "learned" else [None]:
                is_control = sampler is not None and sampler is control
                for length in args.block_lengths:
                    # A learned sampler knows blocks up to a length.
                    if sampler is not None and length > sampler.config.block_length:
                        continue
                    for value in args.entropy_bounds if rule == "entropy" else args.thresholds:
                        point = Point(mode=mode, block_length=length, commit_rule=rule, is_control=is_control)
                        yield replace(point, **{name: value})
    else:
        for adapter in (False, True) if model.draft_adapter is not None else (False,):
            for length in (None,) if mode == "auto" else args.block_lengths:
                yield Point(mode=mode, block_length=length, adapter=adapter)


def measure(
    models: Mapping[str, Any],
    processor: Any,
    points: Sequence[Point],
    tasks: Sequence[EvalTask],
    args: argparse.Namespace,
    control: Any = None,
) -> Iterator[Record]:
    """One record, as `eval` writes it, for each sample and point, with the point's name."""
    from tqdm import tqdm

    from trimode_vlm.eval.answering import Answerer
    from trimode_vlm.eval.state import Key

    adapters = {weights: model.draft_adapter for weights, model in models.items()}
    samplers = {weights: model.learned_sampler for weights, model in models.items()}

    def answerer(point: Point) -> Answerer:
        loaded = models[point.weights], processor
        return Answerer(eval_settings(point, args), args.model, lambda *_, **options: loaded, is_control=False)

    answerers = {point: answerer(point) for point in points}
    work = [(task, index) for task in tasks for index in range(min(args.samples, task.num_examples or args.samples))]
    try:
        for task, index in tqdm(work, unit="sample", dynamic_ncols=True):
            for point in points:
                models[point.weights].draft_adapter = adapters[point.weights] if point.adapter else None
                models[point.weights].learned_sampler = control if point.is_control else samplers[point.weights]
                key = Key("model", task.name, point.mode, index, index)
                [record] = answerers[point].answer(task, [key])
                yield {**record, "point": point.name}
    finally:
        for weights, model in models.items():
            model.draft_adapter, model.learned_sampler = adapters[weights], samplers[weights]


def eval_settings(point: Point, args: argparse.Namespace) -> EvalSettings:
    """What `eval` would be told to decode as the point does."""
    from trimode_vlm.eval.settings import EvalSettings

    return EvalSettings(
        model=args.model,
        tasks=(),
        modes=(point.mode,),
        output="",
        seed=args.seed,
        device=args.device,
        max_new_tokens=args.max_new_tokens,
        block_length=point.block_length,
        commit_rule=point.commit_rule or "confidence",
        threshold=point.threshold,
        entropy_bound=point.entropy_bound,
    )
