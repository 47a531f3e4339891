"""`trimode-vlm train` and `python -m trimode_vlm.training`: settings from YAML and `--key value`, then the recipe."""

from __future__ import annotations

import sys

from trimode_vlm.training.settings import build, make_folder, parse_overrides, read_yaml, resolved

USAGE = """usage: trimode-vlm train --config NAME_OR_FILE [--key value ...]

Train a model from a YAML file of settings; --key value overrides one of them (nested keys with dots).
Interrupted runs resume when the same command is given again. Steps and budgets may grow then; other changes
need another --out or --allow_changed_settings true.

examples:
  trimode-vlm train --config nano --out runs/nano
  trimode-vlm train --config nano-smoke --out runs/smoke --joint.alpha 0.5
  torchrun --nproc-per-node 2 -m trimode_vlm.training --config nano --out runs/nano
"""


def train(argv: list[str] | None = None) -> int:
    """Run a training command; returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    try:
        overrides = parse_overrides([arg for arg in argv if arg != "--debug"])
        name = overrides.pop("config", None)
        if name is None:
            raise ValueError("--config is missing: give a YAML file or the name of a shipped one")
        base = read_yaml(str(name))
        # Imported only now: a wrong option is told at once, not after torch has loaded.
        from trimode_vlm.training import nano_recipe

        settings = build(nano_recipe.NanoSettings, base, overrides)
        make_folder(settings.out)
    except ValueError as error:
        if "--debug" in argv:
            raise
        print(f"trimode-vlm train: {error}", file=sys.stderr)
        return 2
    return _run(settings, debug="--debug" in argv)


def _run(settings: object, debug: bool) -> int:
    from trimode_vlm.training import nano_recipe
    from trimode_vlm.training.distributed import Ranks

    assert isinstance(settings, nano_recipe.NanoSettings)
    ranks = Ranks.start()
    try:
        if ranks.is_main:
            print(resolved(settings), flush=True)
        folder = nano_recipe.run(settings, ranks)
    except (ValueError, FloatingPointError, OSError) as error:
        if debug:
            raise
        print(f"trimode-vlm train: {error}", file=sys.stderr)
        return 1
    ranks.stop()
    if ranks.is_main:
        print(f"done: {folder}")
    return 0
