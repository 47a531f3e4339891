"""`trimode-vlm chat`: one question, a conversation, or one question in all modes side by side.

Answers go to stdout, everything else to stderr. torch is imported only once the command line and the files are right.
"""

from __future__ import annotations

import argparse
import math
import os.path
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trimode_vlm.cli import UsageError, check_device, check_dtype, nearest, one_line, print_settings
from trimode_vlm.compare import compare, summary

if TYPE_CHECKING:
    from PIL.Image import Image

    from trimode_vlm.generate import TriModeGenerateOutput

EXAMPLES = """examples:
  trimode-vlm chat --image receipt.png "What is the total?"
  trimode-vlm chat --compare --image receipt.png "Write the receipt as JSON."
  trimode-vlm chat --mode diffusion --threshold 0.8 --image a.png --image b.png "What changed?"
  trimode-vlm chat --model path/to/checkpoint --dtype bfloat16 --device cuda
  echo "Hello" | trimode-vlm chat

without a question it is a conversation:
  /image FILE   attach a picture to the next question
  /mode MODE    ar, diffusion, linear_spec, quadratic_spec or auto
  /clear        forget the conversation
  /help, /quit  (Ctrl-C stops an answer, Ctrl-D ends)
"""
# The options that a mode uses beside those that all use; kept here too so that a wrong one is refused before torch is
# imported. A test compares it with the decoders' own table.
MODE_OPTIONS: dict[str, tuple[str, ...]] = {
    "ar": (),
    "diffusion": ("block_length", "threshold"),
    "linear_spec": ("block_length",),
    "quadratic_spec": ("block_length", "verifier_mix"),
    "auto": ("block_length",),
}
SAMPLING_OPTIONS = ("top_p", "top_k")
# As generation_config has it.
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
    add("--block-length", type=int, help="tokens per block or draft (default: the model's)")
    add("--threshold", type=float, help="confidence at which diffusion commits tokens together (default 0.9)")
    mix_help = (
        "below 1, quadratic_spec accepts by a mix with the diffusion's guess: no longer the text of ar (default 1)"
    )
    add("--verifier-mix", type=float, help=mix_help)
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, help="with --temperature: sample from the likeliest tokens of this total mass")
    add("--top-k", type=int, help="with --temperature: sample from this many likeliest tokens")
    add("--seed", type=int, help="with --temperature: of the sampling (default 0)")
    add("--dtype", help="such as bfloat16 (default: the checkpoint's)")
    add("--device", help="such as cuda or cpu (default: cuda where there is one)")


def mode_name(text: str) -> str:
    """A known mode, for argparse."""
    if text not in MODE_OPTIONS:
        raise argparse.ArgumentTypeError(
            f"unknown mode {text!r}{nearest(text, MODE_OPTIONS)} (known: {', '.join(MODE_OPTIONS)})"
        )
    return text


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
        is_piped = sys.stdin is None or not sys.stdin.isatty()
        failures = talk(conversation, images, read_lines())
        return 1 if failures and is_piped else 0
    return 0


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
    for name in (*SAMPLING_OPTIONS, "seed"):
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


def check_values(args: argparse.Namespace) -> None:
    """Raise UsageError for a number out of its range; nan is in none."""
    temperature, top_p, top_k = args.temperature, args.top_p, args.top_k
    length, threshold, mix = args.block_length, args.threshold, args.verifier_mix
    ranges = (
        ("temperature", temperature, math.isfinite(temperature) and temperature >= 0, "be 0 or more, and finite"),
        ("top-p", top_p, top_p is None or 0 < top_p <= 1, "be above 0 and at most 1"),
        ("top-k", top_k, top_k is None or top_k >= 0, "be 0 or more"),
        ("threshold", threshold, threshold is None or 0 < threshold <= 1, "be above 0 and at most 1"),
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


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its processor, on the device that was asked for."""
    import torch

    import trimode_vlm

    trimode_vlm.register_auto_classes()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, processor = trimode_vlm.load(args.model, dtype=args.dtype, device=device)
    if processor is None:
        raise ValueError(f"{args.model} holds no tokenizer, so there is no way to ask it anything")
    return model, processor


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The decoding options that were given, for any mode."""
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "seed": args.seed or 0}
    options["do_sample"] = args.temperature > 0
    if args.temperature > 0:
        options["temperature"] = args.temperature
    given = {name: getattr(args, name) for name in ("block_length", "threshold", "verifier_mix", *SAMPLING_OPTIONS)}
    return options | {name: value for name, value in given.items() if value is not None}


class Conversation:
    """Messages so far and the cache that holds them, so that a turn computes only what is new."""

    def __init__(self, model: Any, processor: Any, options: dict[str, Any], system: str | None = None) -> None:
        self.model, self.processor, self.options, self.system = model, processor, options, system
        # A prompt beyond the positions is refused in one line; transformers would warn of it besides.
        processor.tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        self.mode = "linear_spec"
        self.output: TriModeGenerateOutput | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all turns."""
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        self.cache: Any = None

    def mode_options(self, mode: str) -> dict[str, Any]:
        """generate()'s options for a mode: what belongs to other modes only is left out."""
        others = {name for names in MODE_OPTIONS.values() for name in names} - set(MODE_OPTIONS[mode])
        return {"mode": mode} | {name: value for name, value in self.options.items() if name not in others}

    def user_turn(self, question: str, images: Sequence[Image]) -> dict[str, Any]:
        """A message of pictures and a question."""
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": question}] if parts else question}

    def inputs(self, turn: dict[str, Any]) -> Any:
        """The tensors of the whole conversation with one more turn."""
        batch = self.processor.apply_chat_template(
            [*self.messages, turn], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return batch.to(self.model.device)

    def ask(self, question: str, images: Sequence[Image] = ()) -> Iterator[str]:
        """Yield the answer's text as it becomes final; `output` has the statistics afterwards.

        An answer that is cut short (the iterator is closed, Ctrl-C) stays in the history as far as it got.
        """
        from trimode_vlm.detokenizer import IncrementalDetokenizer

        turn = self.user_turn(question, images)
        stream = self.model.stream(**self.inputs(turn), cache=self.cache, **self.mode_options(self.mode))
        # The stream writes into the cache: only its output says again what the cache holds.
        self.cache = self.output = None
        detokenizer = IncrementalDetokenizer(self.processor.tokenizer)
        said: list[str] = []
        started = False
        try:
            for event in stream:
                started = True
                said.append(detokenizer.put(event.token_ids))
                if said[-1]:
                    yield said[-1]
            said.append(detokenizer.end())
            yield said[-1]
        finally:
            stream.close()
            if started:
                self.messages += [turn, {"role": "assistant", "content": "".join(said)}]
                self.output = stream.output()
                self.cache = self.output.cache


def say(conversation: Conversation, question: str, images: Sequence[Image]) -> None:
    """Stream one answer to stdout and its summary to stderr; Ctrl-C ends the answer alone."""
    pieces = conversation.ask(question, images)
    begun = stopped = False
    try:
        for piece in pieces:
            begun = True
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stopped = True
    finally:
        pieces.close()  # type: ignore[attr-defined]
        if begun:
            print(flush=True)
    output = conversation.output
    if output is None:
        print("no answer", file=sys.stderr)
    else:
        reason = "stopped" if stopped or not output.finish_reasons else output.finish_reasons[0]
        print(f"{summary(conversation.mode, output)}, {reason}", file=sys.stderr)


def read_lines() -> Iterator[str]:
    """Lines of stdin until it ends: with a prompt and line editing on a terminal, bare from a pipe."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    try:
        import readline  # noqa: F401  (gives input() editing and history)
    except ImportError:
        pass
    print("Ask a question, or /help. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def talk(conversation: Conversation, images: Sequence[Image], lines: Iterator[str]) -> int:
    """A conversation: every line is a question or a /command; an error costs a line, not the conversation.

    Returns how many lines failed.
    """
    from trimode_vlm.vision.images import open_image

    waiting = list(images)
    failures = 0

    def attach(path: str) -> str:
        if not path:
            raise ValueError("type /image FILE, with the path of a picture")
        reason = image_fault(path)
        if reason:
            raise ValueError(f"{path}: {reason}")
        waiting.append(open_image(path))
        return f"{len(waiting)} picture(s) go with the next question"

    def change_mode(name: str) -> str:
        try:
            conversation.mode = mode_name(name)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from error
        return f"mode {name}"

    def clear(_: str) -> str:
        conversation.clear()
        waiting.clear()
        return "forgotten"

    commands: dict[str, Callable[[str], str]] = {
        "/image": attach, "/mode": change_mode, "/clear": clear,
        "/help": lambda _: EXAMPLES[EXAMPLES.index("  /image") :].rstrip(),
    }  # fmt: skip
    for line in lines:
        name, _, rest = line.partition(" ")
        try:
            if name == "/quit":
                break
            if name in commands:
                print(commands[name](rest.strip()), file=sys.stderr)
            elif line.startswith("/"):
                raise ValueError(f"unknown command {name}{nearest(name, [*commands, '/quit'])} (/help lists them)")
            elif line.strip():
                say(conversation, line, waiting)
                waiting.clear()
        except (ValueError, OSError, RuntimeError) as error:
            failures += 1
            print(f"error: {one_line(error)}", file=sys.stderr)
    return failures
