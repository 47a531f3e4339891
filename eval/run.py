"""`trimode-vlm eval`: answer every sample in every mode, keep one JSON line each, report.

The lines are the state: the same command after a kill goes on where it stopped. The report is made from them alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from trimode_vlm.cli import UsageError, check_device, main, nearest, print_settings
from trimode_vlm.eval import report, state
from trimode_vlm.eval.metrics import score
from trimode_vlm.eval.state import Key, Record
from trimode_vlm.eval.tasks import EvalTask, Example, derangement, images_of, select, with_images
from trimode_vlm.eval.tpf import DEFAULT_BUCKETS

Loader = Callable[..., tuple[Any, Any]]

EXAMPLES = """examples:
  trimode-vlm eval --model nano --tasks nano --mode ar,diffusion,linear_spec --limit 50 --output reports/nano
  trimode-vlm eval --model nano --tasks grid_json,receipt_csv --mode ar --batch-size 16 --output reports/quick
  trimode-vlm eval --shuffle-images --control runs/nano/ar --control-limit 100 --output reports/nano
The same command again resumes; --limit, --tasks, --mode and the controls may grow between runs.
"""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of one evaluation; `control_limit` is the samples per task of the two controls (None: `limit`)."""

    model: str
    tasks: tuple[str, ...]
    modes: tuple[str, ...]
    output: str
    limit: int = 500
    seed: int = 0
    batch_size: int = 1
    workers: int = 1
    threshold: float = 0.9
    block_length: int | None = None
    max_new_tokens: int | None = None
    shuffle_images: bool = False
    control: str | None = None
    control_limit: int | None = None
    buckets: tuple[int, ...] = DEFAULT_BUCKETS
    dtype: str | None = None
    device: str | None = None


# A run folder belongs to one value of each of these (and to one model): they change answers or seconds.
FIXED = ("seed", "batch_size", "threshold", "block_length", "max_new_tokens", "dtype", "device")


def evaluate(settings: EvalSettings, loader: Loader | None = None) -> dict[str, Any]:
    """Answer what is missing in `settings.output`; return the report, also written there as report.json and report.md.

    Args:
        loader: (path, dtype=, device=) -> (model, processor), `trimode_vlm.load` by default; picklable if workers > 1.

    Raises:
        ValueError: an unknown task or mode, too few samples, or an output folder that holds another run.
        RuntimeError: a worker process died; what it had written stays.
    """
    if loader is None:
        loader = _load
    check(settings)
    tasks = {task.name: task for task in select(settings.tasks)}
    folder = Path(settings.output)
    keys = plan(settings, list(tasks.values()))
    done = state.read(folder)
    todo = [key for key in keys if key not in done]
    if loader is _load:
        from trimode_vlm.checkpoints import resolve

        # All of them before the first answer: the control comes last, perhaps hours later.
        for checkpoint in dict.fromkeys(_checkpoint(settings, key) for key in todo):
            if not (resolve(checkpoint) / "config.json").is_file():
                raise ValueError(f"{checkpoint}: no config.json, so this is not a model folder")
    _claim(folder, settings, has_records=bool(done))
    state.merge(folder)
    if todo:
        from trimode_vlm.eval.workers import work

        work(settings, todo, loader, total=len(keys))
    records = state.merge(folder)
    result = report.build(asdict(settings) | {"tasks": list(tasks)}, [records[key] for key in keys])
    report.write(result, folder)
    return result


def check(settings: EvalSettings) -> None:
    """Raise ValueError for settings that no evaluation can honour; nothing is loaded or written."""
    from trimode_vlm.checkpoints import parse_dtype
    from trimode_vlm.generation_config import TriModeGenerationConfig

    for name in ("limit", "control_limit", "batch_size", "workers", "max_new_tokens"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', ' ')} must be at least 1, got {value}")
    if not select(settings.tasks):
        raise ValueError("no task is named")
    if not settings.modes:
        raise ValueError("no mode is named")
    for mode in settings.modes:
        TriModeGenerationConfig().override(_options(settings, mode, settings.max_new_tokens or 1))
    if settings.dtype is not None:
        parse_dtype(settings.dtype)
    check_device(settings.device)


def plan(settings: EvalSettings, tasks: Sequence[EvalTask]) -> list[Key]:
    """Every sample that the settings ask for; the shuffled control runs in the first mode, the rest in all modes."""
    keys = []
    control_limit = settings.control_limit or settings.limit
    for task in tasks:
        available = task.num_examples or settings.limit
        count, control_count = min(settings.limit, available), min(control_limit, available)
        keys += [Key("model", task.name, mode, i, i) for mode in settings.modes for i in range(count)]
        if settings.shuffle_images and task.needs_image:
            donors = derangement(control_count, settings.seed)
            keys += [Key("shuffled", task.name, settings.modes[0], i, donors[i]) for i in range(control_count)]
        if settings.control:
            keys += [Key("control", task.name, mode, i, i) for mode in settings.modes for i in range(control_count)]
    order = {"model": 0, "shuffled": 1, "control": 2}
    return sorted(keys, key=lambda key: order[key.run])


def answer_all(
    settings: EvalSettings, keys: Sequence[Key], loader: Loader, emit: Callable[[list[Record]], None]
) -> None:
    """Answer `keys` in order and hand each batch's records to `emit`; one model is in memory at a time."""
    tasks = {task.name: task for task in select(settings.tasks)}
    model = processor = loaded = None
    for batch in _batches(keys, settings.batch_size):
        path = _checkpoint(settings, batch[0])
        if path != loaded:
            model = processor = None
            model, processor = loader(path, dtype=settings.dtype, device=settings.device)
            loaded = path
        emit(answer(model, processor, tasks[batch[0].task], batch, settings))


def answer(model: Any, processor: Any, task: EvalTask, keys: Sequence[Key], settings: EvalSettings) -> list[Record]:
    """Records of one batch of samples of one task in one mode."""
    examples = [_example(task, key, settings.seed) for key in keys]
    conversations = [example.messages for example in examples]
    inputs = processor.apply_chat_template(
        conversations[0] if len(keys) == 1 else conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **({} if len(keys) == 1 else {"padding": True}),
    )
    if settings.device is not None:
        inputs = inputs.to(settings.device)
    options = _options(settings, keys[0].mode, settings.max_new_tokens or task.max_new_tokens)
    out = model.generate(**inputs, **options)
    prompt_tokens = inputs["input_ids"].shape[1]
    records = []
    for row, (key, example) in enumerate(zip(keys, examples, strict=True)):
        ids = out.sequences[row, prompt_tokens : prompt_tokens + out.num_new_tokens[row]].tolist()
        prediction = processor.decode(ids, skip_special_tokens=True)
        records.append(
            {
                **key._asdict(),
                "seed": example.seed,
                "prediction": prediction,
                "gold": example.gold,
                "score": score(task.metric, prediction, example.gold).score,
                "num_new_tokens": int(out.num_new_tokens[row]),
                "nfe": int(out.nfe[row]),
                "nfe_prefill": int(out.nfe_prefill[row]),
                "seconds": float(out.seconds[row]),
                "finish_reason": out.finish_reasons[row],
                "accepted_lengths": [int(n) for n in out.accepted_lengths[row] or []],
                "ids_hash": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
            }
        )
    return records


def _options(settings: EvalSettings, mode: str, max_new_tokens: int) -> dict[str, Any]:
    """generate()'s options in one mode."""
    options: dict[str, Any] = {"mode": mode, "max_new_tokens": max_new_tokens, "do_sample": False}
    if mode == "diffusion":
        options["threshold"] = settings.threshold
    if mode != "ar" and settings.block_length is not None:
        options["block_length"] = settings.block_length
    return options


def _checkpoint(settings: EvalSettings, key: Key) -> str:
    return settings.control if key.run == "control" and settings.control else settings.model


def _load(path: str, *, dtype: str | None, device: str | None) -> tuple[Any, Any]:
    import trimode_vlm

    return trimode_vlm.load(path, dtype=dtype, device=device)


def _example(task: EvalTask, key: Key, seed: int) -> Example:
    example = task.example(key.id, seed)
    if key.image_from == key.id:
        return example
    return with_images(example, images_of(task.example(key.image_from, seed).messages))


def _batches(keys: Sequence[Key], batch_size: int) -> Iterator[list[Key]]:
    for _, group in groupby(keys, key=lambda key: (key.run, key.task, key.mode)):
        members = list(group)
        for start in range(0, len(members), batch_size):
            yield members[start : start + batch_size]


def _claim(folder: Path, settings: EvalSettings, has_records: bool) -> None:
    """Write or compare settings.json, so that lines of two different runs never meet in one folder.

    Without a record there is nothing to protect, and what a failed run left there is overwritten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if has_records and path.exists() else {}
    mine = {name: getattr(settings, name) for name in FIXED}
    for name in ("model", "control"):
        checkpoint = getattr(settings, name)
        if checkpoint:
            mine[name] = fingerprint(checkpoint) or checkpoint
    changed = [name for name in mine if stored.get(name, mine[name]) != mine[name]]
    different = [f"{name} {stored[name]!r}, not {mine[name]!r}" for name in changed]
    if different:
        raise ValueError(f"{folder} holds another run: {'; '.join(different)}; choose another --output")
    path.write_text(json.dumps(stored | mine, indent=1) + "\n", encoding="utf-8")


def fingerprint(model: str) -> str | None:
    """Hash over names, sizes and first mebibytes of the weight files; None for what is not a folder here (a hub id)."""
    folder = Path(model)
    if model == "nano":
        import trimode_vlm

        folder = Path(trimode_vlm.__file__).parent / "nano"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 20))
    return digest.hexdigest()[:16]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm eval`."""
    add = parser.add_argument
    add("--model", default="nano", help="checkpoint folder or hub id (default: the shipped nano)")
    add("--tasks", default="nano", help="comma-separated tasks; 'nano' is all held-out synthetic tasks")
    add("--mode", default="ar,diffusion,linear_spec", help="comma-separated decoding modes")
    add("--output", required=True, help="folder of this run: state, report.json, report.md")
    add("--limit", type=int, default=500, help="samples per task (default 500)")
    add("--seed", type=int, default=0, help="which held-out samples (default 0); also the order of shuffled images")
    add("--batch-size", type=int, default=1, help="rows per call; 1 gives honest seconds, more is for accuracy only")
    add("--workers", type=int, default=1, help="processes of one thread each; the samples are shared out by index")
    add("--threshold", type=float, help="confidence at which diffusion commits (default 0.9)")
    add("--block-length", type=int, help="default: the model's generation config")
    add("--max-new-tokens", type=int, help="budget of every answer; default: the task's")
    add("--shuffle-images", action="store_true", help="also answer with the images of other samples, in the first mode")
    add("--control", help="another checkpoint to put beside the model, such as the AR-only one")
    add("--control-limit", type=int, help="samples per task of the two controls (default: --limit)")
    add("--buckets", default="100,200", help="response lengths in tokens above which TPF is also reported")
    add("--dtype", help="such as bfloat16; default: the checkpoint's")
    add("--device", help="such as cuda; default: cpu")


def from_arguments(args: argparse.Namespace) -> EvalSettings:
    """Settings from parsed options.

    Raises:
        UsageError: an unknown mode or task, a value out of range, or an option that nothing here uses.
    """
    from trimode_vlm.decoders import DECODERS, MODE_OPTIONS

    modes = _names(args.mode)
    for mode in modes or [""]:
        if mode not in DECODERS:
            raise UsageError(f"unknown mode {mode!r}{nearest(mode, DECODERS)} (known: {', '.join(DECODERS)})")
    if not all(part.isdigit() for part in _names(args.buckets)):
        raise UsageError(f"--buckets takes numbers of tokens such as 100,200, found {args.buckets!r}")
    for name in ("threshold", "block_length"):
        users = [mode for mode, options in MODE_OPTIONS.items() if name in options]
        if getattr(args, name) is not None and not set(users) & set(modes):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} has no effect with --mode {','.join(modes)}; it belongs to {', '.join(users)}")
    if args.control_limit is not None and not (args.control or args.shuffle_images):
        raise UsageError("--control-limit has no effect without --control or --shuffle-images")
    fields = EvalSettings.__dataclass_fields__
    values = {name: value for name, value in vars(args).items() if name in fields}
    if args.threshold is None:
        values["threshold"] = fields["threshold"].default
    buckets = tuple(sorted(int(part) for part in _names(args.buckets)))
    settings = EvalSettings(**values | {"tasks": _names(args.tasks), "modes": modes, "buckets": buckets})
    try:
        check(settings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return settings


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def run(args: argparse.Namespace) -> int:
    """Evaluate as asked and print the Markdown report; returns the exit code."""
    settings = from_arguments(args)
    print_settings(asdict(settings))
    print(report.markdown(evaluate(settings)))
    print(f"\nwritten to {settings.output}: report.json, report.md, {state.MERGED}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
