"""The options of `trimode-vlm chat`: what there is, what is refused, and what `load` and `generate` receive.

torch is not imported here, so that a wrong option answers at once.
"""

from __future__ import annotations

import argparse
import math
import os.path
import urllib.parse
from collections.abc import Sequence
from typing import Any

from trimode_vlm.cli import UsageError, check_device, check_dtype, nearest

# These tables are kept here too so that a wrong option is refused before torch is imported; a test compares them with
# the library's. First, what a mode uses beside what all use.
MODE_OPTIONS: dict[str, tuple[str, ...]] = {
    "ar": (),
    "diffusion": ("block_length", "threshold", "commit_rule", "entropy_bound"),
    "linear_spec": ("block_length", "verification"),
    "quadratic_spec": ("block_length", "verifier_mix", "verification"),
    "auto": ("block_length",),
}
SAMPLING_OPTIONS = ("top_p", "top_k")
COMMIT_RULES = ("confidence", "entropy", "learned")
VERIFICATIONS = ("token", "block")
ADAPTIVE_MODES = ("linear_spec", "auto")
DRAFTING_MODES = ("linear_spec", "quadratic_spec", "auto")
QUANTIZE_KINDS = ("int8", "int4", "4bit")
MAX_BLOCK_LENGTH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm chat`."""
    add = parser.add_argument
    add("question", nargs="?", help="one question; without it, a conversation over stdin")
    add("--image", action="append", default=[], metavar="FILE", help="a picture; may be given several times")
    add("--model", default="nano", help="checkpoint folder or hub id (default: nano, which ships with the package)")
    add("--mode", type=mode_name, help=f"{', '.join(MODE_OPTIONS)} (default: linear_spec)")
    add("--compare", action="store_true", help="answer in every mode and compare tokens, forwards and seconds")
    add("--system", metavar="TEXT", help="a system message")
    add("--max-new-tokens", type=int, default=1024, help="budget of an answer (default 1024)")
    length_help = "tokens per block or draft (default: the model's); auto, in linear_spec: what pays best now"
    add("--block-length", type=tokens_or_auto, metavar="N", help=length_help)
    add("--threshold", type=float, help="confidence at which diffusion commits tokens together (default 0.9)")
    add("--commit-rule", help=f"how diffusion commits: {', '.join(COMMIT_RULES)} (default: confidence)")
    add("--entropy-bound", type=float, help="nats that the entropy rule may commit at once (default 0.1)")
    mix_help = (
        "below 1, quadratic_spec accepts by a mix with the diffusion's guess: no longer the text of ar (default 1)"
    )
    add("--verifier-mix", type=float, help=mix_help)
    add("--verification", help="with --temperature, of drafts: token (default) or block")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, help="with --temperature: sample from the likeliest tokens of this total mass")
    add("--top-k", type=int, help="with --temperature: sample from this many likeliest tokens")
    add("--seed", type=int, help="with --temperature: of the sampling (default 0)")
    add("--adapter", help="draft adapter of self-speculation: a PEFT folder, or auto for the one beside the weights")
    add("--sampler", help="folder of the learned sampler (default: the one beside the weights)")
    add("--quantize", help=f"text layers in fewer bits: {', '.join(QUANTIZE_KINDS)}")
    add("--dtype", help="such as bfloat16 (default: the checkpoint's)")
    add("--device", help="such as cuda or cpu (default: cuda where there is one)")


def mode_name(text: str) -> str:
    """A known mode, for argparse."""
    if text not in MODE_OPTIONS:
        raise argparse.ArgumentTypeError(
            f"unknown mode {text!r}{nearest(text, MODE_OPTIONS)} (known: {', '.join(MODE_OPTIONS)})"
        )
    return text


def tokens_or_auto(text: str) -> int | str:
    """A block length, for argparse."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of tokens or auto, found {text!r}") from None


def check(args: argparse.Namespace, modes: Sequence[str]) -> None:
    """Refuse what cannot work, before anything slow.

    Raises:
        UsageError: options that do not go together, a value out of range, a missing file.
    """
    if args.compare and args.mode:
        raise UsageError("--compare runs every mode: leave --mode out")
    if args.compare and args.question is None:
        raise UsageError("--compare needs a question")
    if args.question is not None and not args.question.strip():
        raise UsageError("the question is empty")
    for name in sorted({name for names in MODE_OPTIONS.values() for name in names}):
        users = [mode for mode, names in MODE_OPTIONS.items() if name in names]
        if getattr(args, name) is not None and not set(users) & set(modes):
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} has no effect with --mode {modes[0]}; it belongs to {', '.join(users)}")
    _check_names(args)
    _check_diffusion(args)
    if args.adapter is not None and not set(DRAFTING_MODES) & set(modes):
        raise UsageError(f"--adapter has no effect with --mode {modes[0]}; it belongs to {', '.join(DRAFTING_MODES)}")
    if args.block_length == "auto" and not set(ADAPTIVE_MODES) & set(modes):
        raise UsageError(
            f"--block-length auto has no effect with --mode {modes[0]}; it belongs to {', '.join(ADAPTIVE_MODES)}"
        )
    if args.verification == "block" and args.block_length == "auto":
        raise UsageError("--verification block has no effect with --block-length auto")
    for name in (*SAMPLING_OPTIONS, "seed", "verification"):
        if getattr(args, name) is not None and not args.temperature:
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --temperature above 0")
    check_values(args)
    check_dtype(args.dtype)
    for path in args.image:
        reason = image_fault(path)
        if reason:
            raise UsageError(f"--image {path}: {reason}" if path else f"--image: {reason}")
    # Last, since it has to import torch.
    check_device(args.device)


def _check_names(args: argparse.Namespace) -> None:
    for name, known in (
        ("commit_rule", COMMIT_RULES),
        ("verification", VERIFICATIONS),
        ("quantize", QUANTIZE_KINDS),
    ):
        value = getattr(args, name)
        if value is not None and value not in known:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option}: unknown {value!r}{nearest(value, known)} (known: {', '.join(known)})")


def _check_diffusion(args: argparse.Namespace) -> None:
    """Refuse what the commit rule has no use for."""
    rule = args.commit_rule or "confidence"
    if args.threshold is not None and rule == "entropy":
        raise UsageError("--threshold has no effect with --commit-rule entropy; its bound is --entropy-bound")
    if args.entropy_bound is not None and rule != "entropy":
        raise UsageError("--entropy-bound has no effect without --commit-rule entropy")
    if args.sampler is not None and rule != "learned":
        raise UsageError("--sampler has no effect without --commit-rule learned")
    if rule == "learned" and args.temperature:
        raise UsageError("--commit-rule learned is greedy: leave --temperature out")


def check_values(args: argparse.Namespace) -> None:
    """Raise UsageError for a number out of its range; nan is in none."""
    temperature, top_p, top_k = args.temperature, args.top_p, args.top_k
    length = None if args.block_length == "auto" else args.block_length
    threshold, mix, bound = args.threshold, args.verifier_mix, args.entropy_bound
    ranges = (
        ("temperature", temperature, math.isfinite(temperature) and temperature >= 0, "be 0 or more, and finite"),
        ("top-p", top_p, top_p is None or 0 < top_p <= 1, "be above 0 and at most 1"),
        ("top-k", top_k, top_k is None or top_k >= 0, "be 0 or more"),
        ("threshold", threshold, threshold is None or 0 < threshold <= 1, "be above 0 and at most 1"),
        ("entropy-bound", bound, bound is None or (math.isfinite(bound) and bound >= 0), "be 0 or more, and finite"),
        ("verifier-mix", mix, mix is None or 0 < mix <= 1, "be above 0 and at most 1"),
        ("max-new-tokens", args.max_new_tokens, args.max_new_tokens >= 1, "be at least 1"),
        ("block-length", length, length is None or length >= 1, "be at least 1"),
        ("block-length", length, length is None or length <= MAX_BLOCK_LENGTH, f"be at most {MAX_BLOCK_LENGTH}"),
    )
    for name, value, is_right, rule in ranges:
        if not is_right:
            raise UsageError(f"--{name} must {rule}, found {value}")


def image_fault(path: str) -> str | None:
    """Why there is no picture at a path, `file://` or data URI; None where there may be one."""
    scheme = path[:8].lower()
    if scheme.startswith("data:"):
        return None
    if scheme.startswith(("http://", "https://")):
        return "remote images are not read; download it first"
    if scheme.startswith("file://"):
        path = urllib.parse.unquote(urllib.parse.urlsplit(path).path)
    if not path.strip():
        return "the path is empty; give the file of a picture"
    if os.path.isdir(path):
        return "this is a folder; give the file of a picture"
    return None if os.path.isfile(path) else "no such file"


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The decoding options that were given, for any mode."""
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "seed": args.seed or 0}
    options["do_sample"] = args.temperature > 0
    if args.temperature > 0:
        options["temperature"] = args.temperature
    of_modes = {name for names in MODE_OPTIONS.values() for name in names}
    given = {name: getattr(args, name) for name in (*sorted(of_modes), *SAMPLING_OPTIONS)}
    return options | {name: value for name, value in given.items() if value is not None}


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """load()'s options that were given."""
    given = {name: getattr(args, name) for name in ("dtype", "adapter", "sampler", "quantize")}
    return {name: value for name, value in given.items() if value is not None}
