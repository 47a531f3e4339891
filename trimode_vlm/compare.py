"""One question in several modes: the answers, a table of what they cost, and whether they are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from trimode_vlm.terminal_chat import Conversation


def compare(conversation: Conversation, modes: Sequence[str], question: str, images: Sequence[Image]) -> None:
    """Print the answer of every mode, once where they agree, and a table."""
    inputs = conversation.inputs(conversation.user_turn(question, images))
    generate, prompt = conversation.model.generate, inputs["input_ids"].shape[1]
    # Whoever comes first would pay for the first touch of weights and buffers, and auto for what it measures once.
    for mode in ("ar", "auto"):
        generate(**inputs, **conversation.mode_options(mode) | {"max_new_tokens": 1})
    same = f"same as {modes[0]}"
    rows = [("mode", "tokens", "forwards", "TPF decode", "TPF end to end", "seconds", "tokens/s", same)]
    first: list[int] | None = None
    for mode in modes:
        output = generate(**inputs, **conversation.mode_options(mode))
        ids = output.sequences[0, prompt:].tolist()
        first = ids if first is None else first
        text = conversation.processor.decode(ids, skip_special_tokens=True)
        print(f"{mode}:\n{text}\n" if mode == modes[0] or ids != first else f"{mode}: the same text\n", flush=True)
        tokens, seconds = output.num_new_tokens[0], output.seconds[0]
        rows.append((
            mode, str(tokens), str(output.nfe[0]), f"{output.tokens_per_forward[0]:.2f}",
            f"{output.tokens_per_forward_end_to_end[0]:.2f}", f"{seconds:.2f}", f"{tokens / max(seconds, 1e-9):.0f}",
            "" if mode == modes[0] else "yes" if ids == first else "no",
        ))  # fmt: skip
    print(table(rows))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def summary(mode: str, output: Any) -> str:
    """One line about the one row of an output."""
    return (
        f"{mode}: {output.num_new_tokens[0]} tokens in {output.nfe[0]} forwards "
        f"({output.nfe_prefill[0]} prefill), TPF {output.tokens_per_forward[0]:.2f} decode, "
        f"{output.tokens_per_forward_end_to_end[0]:.2f} end to end, {output.seconds[0]:.2f} s"
    )
