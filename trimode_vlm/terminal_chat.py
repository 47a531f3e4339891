"""A conversation on the terminal: the turns so far, an answer as it streams, lines that are questions or commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trimode_vlm.cli import nearest, one_line
from trimode_vlm.compare import summary
from trimode_vlm.terminal_options import ADAPTIVE_MODES, MODE_OPTIONS, image_fault, mode_name

if TYPE_CHECKING:
    from PIL.Image import Image

    from trimode_vlm.generate import TriModeGenerateOutput

COMMANDS = """  /image FILE   attach a picture to the next question
  /mode [MODE]  ar, diffusion, linear_spec, quadratic_spec or auto; alone: which it is
  /clear        forget the conversation
  /help, /quit  (Ctrl-C stops an answer, Ctrl-D ends)
"""


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
        if self.options.get("block_length") == "auto" and mode not in ADAPTIVE_MODES:
            others.add("block_length")
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
        return "1 picture goes with the next question" if len(waiting) == 1 else f"{len(waiting)} pictures go with it"

    def change_mode(name: str) -> str:
        try:
            conversation.mode = mode_name(name or conversation.mode)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from error
        return f"mode {conversation.mode}"

    def clear(_: str) -> str:
        conversation.clear()
        waiting.clear()
        return "forgotten"

    commands: dict[str, Callable[[str], str]] = {
        "/image": attach, "/mode": change_mode, "/clear": clear,
        "/help": lambda _: COMMANDS.rstrip(),
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
