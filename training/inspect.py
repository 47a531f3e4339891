"""`trimode-vlm inspect`: one training sample as the model will see it, as text, as JSON and as a picture."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimode_vlm.cli import UsageError
from trimode_vlm.training.settings import parse_overrides

if TYPE_CHECKING:
    from trimode_vlm.training.collate import NoiseSettings
    from trimode_vlm.training.data import Encoded

USAGE = """usage: trimode-vlm inspect (--config NAME_OR_FILE | --model MODEL --data FILE) --index N [--key value ...]

Show a training sample as the model will see it: its tokens and images, which tokens are trained, the blocks and the
masks of this draw, both streams [noisy | clean] and their lengths. No weights are read. --key value overrides a
setting, as in trimode-vlm train.

options:
  --index N      which sample: the row of the data, counted from 0; for the nano recipe any number
  --epoch N      how often the sample was seen before (default 0): with seed and row it fixes the noise
  --step N       step of the run (default: its last), where settings change with it
  --stage NAME   stage of the nano recipe: ar, joint (default) or control
  --json         print one JSON document in place of text
  --png FILE     also draw the attention pattern; for rows of at most 800 tokens, with labels up to 177
  --whole        show long stretches of prompt in full

examples:
  trimode-vlm inspect --config my.yaml --index 3
  trimode-vlm inspect --model nano --data train.jsonl --index 3 --png pattern.png
  trimode-vlm inspect --config nano --index 3 --joint.block_length 8
  trimode-vlm inspect --config my.yaml --index 3 --epoch 1 --json
"""
FLAGS = ("json", "whole")
STAGES = ("ar", "joint", "control")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What of the command line is no setting of the run."""

    index: int
    epoch: int = 0
    step: int | None = None
    stage: str = "joint"
    json: bool = False
    png: str | None = None
    whole: bool = False


def inspect(argv: list[str]) -> int:
    """Show a sample; returns the exit code.

    Raises:
        UsageError: a wrong option or setting.
        ValueError: there is no such sample, or it is bad; the message names file and row.
    """
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    options, overrides = read_options(argv)
    config, processor, sample, noise = find_sample(read_settings(overrides), options)
    # Imported only now: a wrong option is told at once, not after torch has loaded.
    from trimode_vlm.training.inspect_text import Paint, render
    from trimode_vlm.training.inspect_view import view_sample

    view = view_sample(sample, noise, processor)
    if options.json:
        print(json.dumps(view.as_json(), ensure_ascii=False))
    else:
        is_terminal = sys.stdout.isatty()
        color = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        paint = Paint(color=color, unicode="utf" in (sys.stdout.encoding or "").lower())
        width = shutil.get_terminal_size((100, 24)).columns if is_terminal else 100
        print(render(view, width, paint, options.whole))
    if options.png:
        from trimode_vlm.training.inspect_picture import draw_pattern

        draw_pattern(view).image.save(options.png, "PNG")
        print(f"written to {options.png}", file=sys.stderr)
    return 0


def read_options(argv: list[str]) -> tuple[InspectOptions, dict[str, Any]]:
    """The command's own options, and the settings that remain.

    Raises:
        UsageError: no index, a wrong value, or a picture that could not be written.
    """
    flags = {name: f"--{name}" in argv for name in FLAGS}
    try:
        overrides = parse_overrides([arg for arg in argv if arg.removeprefix("--") not in FLAGS])
    except ValueError as error:
        raise UsageError(str(error)) from error
    names = [f.name for f in fields(InspectOptions)]
    own = {name: overrides.pop(name) for name in names if name in overrides}
    for name in overrides:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        if near and name not in ("steps", "epochs"):
            raise UsageError(f"unknown option --{name}; did you mean --{near[0]}?")
    if "index" not in own:
        raise UsageError("--index is missing: which sample, counted from 0")
    for name in ("index", "epoch", "step"):
        value = own.get(name, 0)
        if type(value) is not int or value < 0:
            raise UsageError(f"--{name} must be a whole number from 0 on, found {value!r}")
    options = InspectOptions(**own | flags)
    if options.stage not in STAGES:
        raise UsageError(f"--stage must be one of {', '.join(STAGES)}, found {options.stage!r}")
    if options.png is not None:
        path = Path(str(options.png))
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"--png {path}: not a file in a folder that exists")
        options = replace(options, png=str(path))
    return options, overrides


def read_settings(overrides: dict[str, Any]) -> Any:
    """The settings of a run; a data file without a config is fine-tuning with the shipped settings.

    Raises:
        UsageError: no config and no data, or a wrong setting.
    """
    if "config" not in overrides and "data" not in overrides:
        raise UsageError("give --config, or --model and --data")
    from trimode_vlm.training import cli

    try:
        return cli.read_settings({"config": "finetune", **overrides})
    except ValueError as error:
        raise UsageError(str(error)) from error


def find_sample(settings: Any, options: InspectOptions) -> tuple[Any, Any, Encoded, NoiseSettings]:
    """The model's config and processor, the sample, and the noise that training would draw for it."""
    from trimode_vlm.training.steps import noise_token_ids

    if settings.recipe == "nano":
        from trimode_vlm.config import preset
        from trimode_vlm.training import nano_data, nano_recipe

        processor = nano_data.build_processor()
        config: Any = preset("nano", **{**nano_data.token_ids(processor), **settings.model})
        train: Any = nano_recipe.stage_settings(settings, options.stage)
        step = train.steps - 1 if options.step is None else options.step
        sample = nano_recipe.sample_maker(processor, train, options.stage)(options.index, step)
        sample = replace(sample, name=f"nano's stage {options.stage}, sample {options.index}")
    else:
        from trimode_vlm.checkpoints import open_processor
        from trimode_vlm.training.samples import read_sample

        config, processor = open_processor(settings.model, settings.mask_token_id)
        train = settings
        step = train.steps - 1 if options.step is None else options.step
        sample = read_sample(settings.data, processor, options.index, settings.max_length)
    noise = train.noise_settings(step, **noise_token_ids(config, train))
    return config, processor, replace(sample, epoch=options.epoch), noise
