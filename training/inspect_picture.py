"""The attention pattern of one sample as a picture: who sees whom in the row [noisy | clean], coloured by rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from trimode_vlm.training.collate import collate
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.inspect_text import Paint
from trimode_vlm.training.inspect_view import SampleView, Token

# Okabe and Ito's colours, which stay apart for colour-blind eyes and in print.
RULES: dict[str, tuple[int, int, int]] = {
    "noisy -> noisy": (230, 159, 0),
    "noisy -> clean": (0, 158, 115),
    "clean -> clean": (86, 180, 233),
    "clean -> noisy": (213, 0, 0),
}
"""Colour of an allowed pair by the streams of query and key. The last never occurs: it would show a fault."""
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
NEVER = "clean -> noisy"
EMPTY, LINE, EDGE, INK = (250, 250, 250), (226, 226, 226), (70, 70, 70), (30, 30, 30)
LABEL_COLORS = {"masked": (190, 90, 0), "trained": (0, 110, 60), "image": (140, 60, 140), "other": (90, 90, 90)}
SIDE_PIXELS = 1600
"""About how wide the pattern may become; a cell has at least two pixels, and from nine on its row has a label."""
MAX_TOKENS = SIDE_PIXELS // 2
MAX_CELL, LABEL_CELL, LABEL_CHARACTERS = 18, 9, 18


@dataclass(frozen=True)
class Picture:
    """The drawn pattern. Query i and key j are the square of `cell` pixels at (left + j * cell, top + i * cell)."""

    image: Image.Image
    left: int
    top: int
    cell: int


def attention_mask(view: SampleView) -> torch.Tensor:
    """The dense mask [T, T] that training's own pattern gives for the row: True where query i sees key j."""
    sample = Encoded(sample_id=view.sample_id, input_ids=[], loss_mask=[], name=view.name)
    return collate([sample], [view.row]).pattern().attn_mask[0, 0]


def draw_pattern(view: SampleView) -> Picture:
    """Draw the attention pattern with its tokens beside it.

    Raises:
        ValueError: the row is too long for a picture.
    """
    num_tokens = len(view.tokens)
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"{view.name}: a row of {num_tokens} tokens is too long for a picture, which shows at most {MAX_TOKENS}; "
            "choose a shorter sample"
        )
    cell = max(2, min(MAX_CELL, SIDE_PIXELS // num_tokens))
    font = ImageFont.load_default(size=max(9, cell - 4)) if cell >= LABEL_CELL else None
    labels = [_label(token) for token in view.tokens]
    margin = 40 if font is None else 34 + max(round(font.getlength(text)) for text in labels)
    title_font = ImageFont.load_default(size=14)
    lines = _title(view)
    left, top, side = margin, margin + 22 * len(lines) + 8, num_tokens * cell
    width = max(left + side + 12, 24 + max(round(title_font.getlength(text)) for text, _ in lines) + 24)
    image = Image.new("RGB", (width, top + side + 12), "white")
    draw = ImageDraw.Draw(image)
    for number, (text, color) in enumerate(lines):
        if color is not None:
            draw.rectangle((12, 12 + 22 * number, 26, 26 + 22 * number), fill=color, outline=EDGE)
        draw.text((12 if color is None else 34, 11 + 22 * number), text, fill=INK, font=title_font)
    image.paste(_cells(view, cell), (left, top))
    _lines(view, draw, left, top, cell)
    _stream_names(view, image, left, top, cell, title_font)
    if font is not None:
        for number, (token, text) in enumerate(zip(view.tokens, labels, strict=True)):
            color = LABEL_COLORS[_kind(token, view)]
            row, column = (_strip(text, margin - 30, cell, color, font, at_end) for at_end in (True, False))
            image.paste(row, (left - row.width - 3, top + number * cell))
            image.paste(column.rotate(90, expand=True), (left + number * cell, top - column.width - 3))
    return Picture(image, left, top, cell)


def _cells(view: SampleView, cell: int) -> Image.Image:
    mask, is_noisy = attention_mask(view).numpy(), view.row.is_noisy.numpy()
    pixels = np.full((*mask.shape, 3), EMPTY, dtype=np.uint8)
    for rule, color in RULES.items():
        query, key = (is_noisy if name == "noisy" else ~is_noisy for name in rule.split(" -> "))
        pixels[mask & query[:, None] & key[None, :]] = color
    image = Image.fromarray(pixels)
    return image.resize((image.width * cell, image.height * cell), Image.Resampling.NEAREST)


def _lines(view: SampleView, draw: ImageDraw.ImageDraw, left: int, top: int, cell: int) -> None:
    """A grid where cells are large enough, darker around blocks and darkest around the streams."""
    side = len(view.tokens) * cell
    starts = [0, *(i for i in range(1, len(view.tokens)) if _border(view.tokens[i - 1], view.tokens[i])), side // cell]
    fine = range(len(view.tokens) + 1) if cell >= LABEL_CELL else ()
    for places, color, width in ((fine, LINE, 1), (starts, EDGE, 1), (_stream_starts(view), INK, 2)):
        for i in places:
            draw.line((left + i * cell, top, left + i * cell, top + side), fill=color, width=width)
            draw.line((left, top + i * cell, left + side, top + i * cell), fill=color, width=width)


def _border(before: Token, token: Token) -> bool:
    return before.stream != token.stream or before.block != token.block


def _stream_starts(view: SampleView) -> list[int]:
    streams = [token.stream for token in view.tokens]
    return [i for i in range(1, len(streams)) if streams[i] != streams[i - 1]]


def _strip(
    text: str, width: int, height: int, color: tuple[int, int, int], font: Font, at_end: bool = False
) -> Image.Image:
    """A strip of paper with one label, flush left or right."""
    strip = Image.new("RGB", (width, height), "white")
    place = width - font.getlength(text) if at_end else 0
    ImageDraw.Draw(strip).text((place, height / 2), text, fill=color, font=font, anchor="lm")
    return strip


def _stream_names(view: SampleView, image: Image.Image, left: int, top: int, cell: int, font: Font) -> None:
    """The name of each stream outside the labels, along both sides."""
    edges = [0, *_stream_starts(view), len(view.tokens)]
    for start, stop in zip(edges, edges[1:], strict=False):
        text = view.tokens[start].stream
        name = _strip(text, round(font.getlength(text)) + 2, 20, INK, font)
        along = max(0, (start + stop) * cell // 2 - name.width // 2)
        image.paste(name.rotate(90, expand=True), (4, top + along))
        image.paste(name, (left + along, top - left + 4))


def _title(view: SampleView) -> list[tuple[str, tuple[int, int, int] | None]]:
    n = view.lengths
    title = (
        f"{view.name}: {n['row']} tokens, {n['noisy']} noisy and {n['clean']} clean; a row sees its coloured columns"
    )
    mask, is_noisy = attention_mask(view), view.row.is_noisy
    lines: list[tuple[str, tuple[int, int, int] | None]] = [(Paint(unicode=False).visible(title, blanks=False), None)]
    for rule, color in RULES.items():
        query, key = (is_noisy if name == "noisy" else ~is_noisy for name in rule.split(" -> "))
        count = int((mask & query[:, None] & key[None, :]).sum())
        if count or rule != NEVER:
            lines.append((f"{rule}: {RULE_TEXTS[rule]} ({count} pairs)", color))
    return lines


RULE_TEXTS = {
    "noisy -> noisy": "the tokens of the own block, before and after",
    "noisy -> clean": "the tokens before the own block",
    "clean -> clean": "the tokens before, as in any causal model",
    "clean -> noisy": "never, so this is a fault",
}


def _kind(token: Token, view: SampleView) -> str:
    if token.id in view.noise.vision_token_ids:
        return "image"
    if token.stream != "clean":
        return "masked" if token.loss else "other"
    return "trained" if token.loss else "other"


def _label(token: Token) -> str:
    text = Paint(unicode=False).visible(token.text)
    if len(text) > LABEL_CHARACTERS:
        text = text[: LABEL_CHARACTERS - 2] + ".."
    return f"{text}  {token.position}"
