"""`trimode-vlm train` and `python -m trimode_vlm.training`: settings from YAML and `--key value`, then the recipe."""

from __future__ import annotations

import difflib
import sys
import warnings
from pathlib import Path
from typing import Any

from trimode_vlm.training.settings import build, chosen, make_folder, parse_overrides, read_yaml, resolved

USAGE = """usage: trimode-vlm train --config NAME_OR_FILE [--check[-images] | --estimate [--gpus N]] [--key value ...]

Train a model from a YAML file of settings; --key value overrides one of them (nested keys with dots).
`recipe: finetune` trains a checkpoint on your own data, `recipe: draft_lora` the adapter of its drafts, `recipe:
learned_sampler` what tells diffusion when to commit, `recipe: nano` makes the shipped model from nothing.
Each run writes all its settings, with the defaults, to OUT/settings.yaml; training/README.md explains the
ones that matter.
Interrupted runs resume when the same command is given again. Steps may grow then; other changes need another --out or
--allow_changed_settings true.

options:
  --check          read all data once, report what is wrong with it, and train nothing; of images, read the headers
  --check-images   the same, and decode every image; --workers N shares the work
  --estimate       print memory per GPU and FLOPs per step for --gpus N (default 1), and train nothing

examples:
  trimode-vlm train --config finetune --model MODEL --data train.jsonl --out runs/mine --check
  trimode-vlm train --config my.yaml --lr 2e-6
  trimode-vlm train --config my.yaml --estimate --gpus 8
  deepspeed --num_gpus 8 --module trimode_vlm.training --config my.yaml --deepspeed zero2
  torchrun --nproc-per-node 8 -m trimode_vlm.training --config my.yaml --deepspeed zero3
  torchrun --nproc-per-node 2 -m trimode_vlm.training --config nano --out runs/nano
"""
FLAGS = ("--check", "--check-images", "--estimate", "--debug")
RECIPES = ("finetune", "draft_lora", "learned_sampler", "nano")


def train(argv: list[str] | None = None) -> int:
    """Run a training command; returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    flags = {flag for flag in FLAGS if flag in argv}
    try:
        for arg in argv:
            if arg not in flags and (near := difflib.get_close_matches(arg, FLAGS, n=1, cutoff=0.8)):
                raise ValueError(f"unknown option {arg}; did you mean {near[0]}?")
        overrides = parse_overrides([arg for arg in argv if arg not in flags])
        overrides.pop("local_rank", None)  # from DeepSpeed's launcher, which sets LOCAL_RANK as well
        gpus = int(overrides.pop("gpus", 1))
        settings = read_settings(overrides)
        if not flags - {"--debug"}:
            make_folder(settings.out)
    except ValueError as error:
        if "--debug" in flags:
            raise
        print(f"trimode-vlm train: {error}", file=sys.stderr)
        return 2
    try:
        if flags & {"--check", "--check-images"}:
            return check(settings, decode_images="--check-images" in flags)
        if "--estimate" in flags:
            return estimate(settings, gpus)
        return run(settings)
    except (ValueError, FloatingPointError, OSError) as error:
        if "--debug" in flags:
            raise
        # What a data worker raises comes with the worker's traceback; its last line is the message.
        text = str(error).strip()
        print(f"trimode-vlm train: {text.splitlines()[-1] if 'Traceback' in text else text}", file=sys.stderr)
        return 1


def read_settings(overrides: dict[str, Any]) -> Any:
    """The settings of the recipe that a config names, with overrides.

    Raises:
        ValueError: no config, an unknown recipe, or a wrong setting.
    """
    overrides = dict(overrides)
    name = overrides.pop("config", None)
    if name is None:
        raise ValueError("--config is missing: give a YAML file or the name of a shipped one")
    base = read_yaml(str(name))
    if "steps" in overrides and "epochs" not in overrides:
        base.pop("epochs", None)  # the file's epochs would have stood in place of the steps
    recipe = overrides.get("recipe", base.get("recipe", "finetune"))
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    # Imported only now: a wrong option is told at once, not after torch has loaded.
    if recipe == "nano":
        from trimode_vlm.training.nano_recipe import NanoSettings

        return build(NanoSettings, base, overrides)
    if recipe == "draft_lora":
        from trimode_vlm.training.draft_lora import DraftLoraSettings

        return build(DraftLoraSettings, base, overrides)
    if recipe == "learned_sampler":
        from trimode_vlm.training.learned_sampler import LearnedSamplerSettings

        return build(LearnedSamplerSettings, base, overrides)
    from trimode_vlm.training.finetune import FinetuneSettings

    return build(FinetuneSettings, base, overrides)


def run(settings: Any) -> int:
    """Train; every rank comes here."""
    from transformers.utils import logging

    from trimode_vlm.training import distributed, draft_lora, finetune, learned_sampler, nano_recipe

    # Shards are written in a moment, and DeepSpeed calls what torch renames.
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    distributed.start()
    file = Path(settings.out) / "settings.yaml"
    if distributed.rank() == 0:
        if not file.exists():  # a run that is there may yet refuse these settings
            file.write_text(resolved(settings), encoding="utf-8")
        print(f"{chosen(settings)}(all settings: {file})\n", flush=True)
    recipes: dict[str, Any] = {
        "nano": nano_recipe.run,
        "draft_lora": draft_lora.run,
        "learned_sampler": learned_sampler.run,
        "finetune": finetune.run,
    }
    folder = recipes[settings.recipe](settings)
    if distributed.rank() == 0:
        file.write_text(resolved(settings), encoding="utf-8")
        print(f"done: {folder}")
    distributed.stop()
    return 0


def check(settings: Any, decode_images: bool) -> int:
    """Read all data once; returns 1 if anything is wrong with it."""
    if settings.recipe == "nano" or not settings.data:
        raise ValueError("--check reads a user's data: this recipe makes its own")
    from trimode_vlm.checkpoints import open_processor
    from trimode_vlm.training.check import check_data

    _, processor = open_processor(settings.model, settings.mask_token_id)
    reports = [
        check_data(
            data,
            processor,
            max_length=settings.max_length,
            workers=settings.workers,
            decode_images=decode_images,
        )
        for data in (settings.data, settings.eval_data)
        if data
    ]
    for report in reports:
        print(report)
    return 0 if all(report.ok for report in reports) else 1


def estimate(settings: Any, gpus: int) -> int:
    """Print what a step costs."""
    if settings.recipe != "finetune":
        raise ValueError(f"--estimate is for fine-tuning, not for recipe {settings.recipe}")
    from trimode_vlm.checkpoints import open_processor
    from trimode_vlm.training.estimate import estimate_report
    from trimode_vlm.training.run_shapes import estimate_inputs

    config, processor = open_processor(settings.model, settings.mask_token_id)
    print(estimate_report(estimate_inputs(settings, config, processor, gpus), config, gpus))
    return 0
