"""`trimode-vlm convert`: write a checkpoint in another layout."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from trimode_vlm.cli import UsageError, check_dtype, nearest, print_settings

EXAMPLES = """examples:
  trimode-vlm convert nano exported/nano --to nld
  trimode-vlm convert path/to/ministral-3 start/8b --to trimode --dtype bfloat16
  trimode-vlm convert runs/nano/model exported/mistral3 --to ministral3

layouts:
  trimode     ours: the released names, with our config
  nld         as released by Nemotron-Labs-Diffusion
  ministral3  Mistral3ForConditionalGeneration, or Ministral3ForCausalLM without images; with transformers'
              PixtralProcessor where it can say the image layout (it has no start token of its own, so that the chat
              template writes it); it resizes pictures by its own rule
  llama       LlamaForCausalLM, where its architecture can hold the model
"""
# Kept here too so that a wrong one is refused before torch is imported. A test compares it with the library's.
LAYOUTS = ("trimode", "nld", "ministral3", "llama")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm convert`."""
    add = parser.add_argument
    add("source", help="checkpoint folder, hub id, or nano")
    add("target", help="the folder to make")
    add("--to", default="trimode", help="trimode (default), nld, ministral3 or llama")
    add("--dtype", help="such as bfloat16 (default: the source's)")
    add("--max-shard-size", default="5GB", help="size of one weight file (default 5GB)")
    add("--overwrite", action="store_true", help="replace a model folder that is there")


def run(args: argparse.Namespace) -> int:
    """Convert and say where the result is; returns the exit code."""
    if args.to not in LAYOUTS:
        raise UsageError(f"--to: unknown layout {args.to!r}{nearest(args.to, LAYOUTS)} (known: {', '.join(LAYOUTS)})")
    check_dtype(args.dtype)
    target = Path(args.target).expanduser()
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty and not args.overwrite:
        raise UsageError(f"{args.target} is there already: choose another target or give --overwrite")
    print_settings(vars(args))
    from trimode_vlm.checkpoints import convert

    size = args.max_shard_size
    folder = convert(args.source, args.target, args.to, args.dtype, args.overwrite, max_shard_size=size)
    if args.to == "ministral3" and (folder / "tokenizer.json").is_file():
        print(f"processor: {processor_of(folder)}", file=sys.stderr)
    print(folder)
    return 0


def processor_of(folder: Path) -> str:
    """In words, the processor that a converted Ministral-3 folder holds."""
    if (folder / "processor_config.json").is_file():
        return "PixtralProcessor, which resizes pictures by its own rule"
    if "vision_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return "none, since PixtralProcessor cannot say this image layout or chat template; the tokenizer is there"
    return "none, for text the tokenizer is enough"
