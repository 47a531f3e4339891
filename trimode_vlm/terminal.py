"""`trimode-vlm chat`: one question, a conversation, or one question in all modes side by side.

Answers go to stdout, everything else to stderr. torch is imported only once the command line and the files are right.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trimode_vlm.cli import print_settings
from trimode_vlm.compare import compare
from trimode_vlm.terminal_chat import COMMANDS, Conversation, read_lines, say, talk
from trimode_vlm.terminal_options import MODE_OPTIONS, add_arguments, check, load_options, options_of

__all__ = ["EXAMPLES", "add_arguments", "load_model", "run"]

EXAMPLES = f"""examples:
  trimode-vlm chat --image receipt.png "What is the total?"
  trimode-vlm chat --compare --image receipt.png "Write the receipt as JSON."
  trimode-vlm chat --mode diffusion --threshold 0.8 --image a.png --image b.png "What changed?"
  trimode-vlm chat --mode diffusion --commit-rule entropy --entropy-bound 0.3 "Count from 12 to 1."
  trimode-vlm chat --model path/to/checkpoint --adapter auto --dtype bfloat16 --device cuda
  echo "Count from 12 to 1." | trimode-vlm chat

without a question it is a conversation:
{COMMANDS}"""


def run(args: argparse.Namespace) -> int:
    """Answer as asked; returns the exit code."""
    modes = tuple(MODE_OPTIONS) if args.compare else (args.mode or "linear_spec",)
    check(args, modes)
    given = {name: value for name, value in vars(args).items() if value not in (None, [])}
    print_settings(given | {"mode": ", ".join(modes)})
    from trimode_vlm.vision.images import open_image

    images = [open_image(path) for path in args.image]
    model, processor = load_model(args)
    conversation = Conversation(model, processor, options_of(args), args.system)
    conversation.mode = modes[0]
    if args.compare:
        compare(conversation, modes, args.question, images)
    elif args.question is not None:
        say(conversation, args.question, images)
    else:
        from trimode_vlm.checkpoints import NANO, NANO_HINT

        if args.model == NANO:
            print(f"{NANO_HINT} (/clear)", file=sys.stderr)
        is_piped = sys.stdin is None or not sys.stdin.isatty()
        failures = talk(conversation, images, read_lines())
        return 1 if failures and is_piped else 0
    return 0


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its processor, on the device that was asked for."""
    import torch

    import trimode_vlm

    trimode_vlm.register_auto_classes()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, processor = trimode_vlm.load(args.model, device=device, **load_options(args))
    if processor is None:
        raise ValueError(f"{args.model} holds no tokenizer, so there is no way to ask it anything")
    if args.adapter is not None and model.draft_adapter is None:
        raise ValueError(f"{args.model} has no draft adapter beside its weights: name its folder with --adapter")
    if args.commit_rule == "learned" and model.learned_sampler is None:
        raise ValueError(f"{args.model} has no learned sampler beside its weights: name its folder with --sampler")
    return model, processor
