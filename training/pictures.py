"""Synthetic pictures whose every 28-pixel cell is known: boards of shapes, receipts, bar charts.

The nano model sees one token per 28 x 28 pixels, so a cell holds one glyph at most, and every picture carries a
visible frame, from which 2-D rotary positions can tell the absolute row and column.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from trimode_vlm.training.glyphs import (
    CELL,
    COLORS,
    ITEMS,
    MAX_CELLS,
    SHAPES,
    Color,
    char_mask,
    grain,
    icon,
    mix,
    shade,
    shape_masks,
    vary,
)

Cell = tuple[str, ...]
KINDS = ("grid", "receipt", "chart")
MAX_TOTAL_CENTS = 9999


@dataclass(frozen=True)
class Picture:
    """A picture and what it shows.

    image: RGB, sides multiples of 28 pixels, at most 448.
    cells: rows x columns of the words that the model should see in each 28-pixel cell, at most two each.
    facts: the ground truth, by kind: grid {"board": rows of (colour, shape)}; receipt {"lines": (item, quantity,
        price text), "total": text}; chart {"bars": (colour, item, value)}.
    """

    kind: str
    seed: int
    image: Image.Image
    cells: list[list[Cell]]
    facts: dict[str, Any]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.image.height, self.image.width


def make_picture(kind: str, seed: int, max_scale: float = 1.0) -> Picture:
    """Draw the picture of this kind and seed; max_scale in 0..1 bounds how much it holds (0: the smallest only)."""
    if kind not in KINDS:
        raise ValueError(f"unknown picture kind {kind!r}, expected one of {', '.join(KINDS)}")
    rng = random.Random(f"{kind}-{seed}")
    facts, canvas = _MAKERS[kind](rng, min(max(max_scale, 0.0), 1.0))
    return Picture(kind, seed, canvas.finish(), canvas.cells, facts)


class Canvas:
    """A picture under construction: glyphs go into cells by (row, column), labels are kept beside."""

    def __init__(self, rng: random.Random, num_rows: int, num_cols: int, paper: Color) -> None:
        assert 1 <= num_rows <= MAX_CELLS and 1 <= num_cols <= MAX_CELLS, (num_rows, num_cols)
        self.rng = rng
        self.image = Image.new("RGB", (num_cols * CELL, num_rows * CELL), paper)
        self.draw = ImageDraw.Draw(self.image)
        self.cells: list[list[Cell]] = [[() for _ in range(num_cols)] for _ in range(num_rows)]
        self.font_size = rng.randint(22, 25)
        self.drift = rng.randint(-1, 1)
        self.bold = rng.random() < 0.4
        self.icon_size = rng.randint(22, 24)
        self.shape_size = rng.randint(18, 22)
        self.frame = vary(rng, rng.choice(_FRAMES), 20)

    def char(self, row: int, col: int, char: str, color: Color, dx: int = 0) -> None:
        """Write one character, dx pixels right of the middle of its cell."""
        mask = char_mask(char, self.font_size, self.bold)
        self._stamp(row, col, mask, color, dx + self.rng.randint(-1, 1), self.drift)
        self.cells[row][col] = (char,)

    def shape(self, row: int, col: int, color_name: str, shape: str) -> None:
        color = vary(self.rng, COLORS[color_name], 12)
        dx, dy = self.rng.randint(-1, 1), self.rng.randint(-1, 1)
        outer, inner = shape_masks(shape, self.shape_size)
        self._stamp(row, col, outer, shade(color, 0.72), dx, dy)
        self._stamp(row, col, inner, color, dx, dy)
        self.cells[row][col] = (color_name, shape)

    def icon(self, row: int, col: int, item: str, dx: int = 0) -> None:
        picture = icon(item, self.icon_size)
        left, top = _corner(row, col, picture, dx + self.rng.randint(0, 1), self.rng.randint(-1, 1))
        self.image.paste(picture, (left, top), picture)
        self.cells[row][col] = (item,)

    def _stamp(self, row: int, col: int, mask: Image.Image, color: Color, dx: int, dy: int) -> None:
        self.image.paste(color, _corner(row, col, mask, dx, dy), mask)

    def finish(self) -> Image.Image:
        """Add paper grain and the frame."""
        strength = self.rng.choice((0.0, 2.0, 3.5, 5.0))
        if strength:
            height, width = self.image.height, self.image.width
            top, left = self.rng.randrange(64), self.rng.randrange(64)
            noise = grain()[top : top + height, left : left + width, None] * np.float32(strength)
            pixels = np.asarray(self.image, dtype=np.float32) + noise
            self.image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        width, height = self.image.size
        ImageDraw.Draw(self.image).rectangle((0, 0, width - 1, height - 1), outline=self.frame, width=2)
        return self.image


_FRAMES: tuple[Color, ...] = ((50, 50, 60), (70, 60, 50), (40, 60, 90), (80, 40, 50), (40, 80, 60))
_PAPERS: tuple[Color, ...] = ((255, 255, 255), (252, 250, 244), (246, 249, 253), (250, 246, 250), (246, 251, 246))
_STRIPS: tuple[Color, ...] = ((226, 232, 242), (240, 230, 218), (226, 240, 230), (238, 228, 240), (232, 232, 232))
_INKS: tuple[Color, ...] = ((40, 40, 46), (30, 40, 80), (70, 50, 40), (30, 66, 56))


def _grid(rng: random.Random, scale: float) -> tuple[dict[str, Any], Canvas]:
    """A board with row numbers at its left and column numbers above it."""
    num_rows = rng.randint(3, 3 + round(3 * scale))
    num_cols = rng.randint(3, 3 + round(4 * scale))
    spare_rows, spare_cols = (rng.choice((0, 0, 1, 2)) if scale > 0.5 else 0 for _ in range(2))
    paper, strip, ink = vary(rng, rng.choice(_PAPERS), 3), vary(rng, rng.choice(_STRIPS), 6), rng.choice(_INKS)
    canvas = Canvas(rng, num_rows + 1 + spare_rows, num_cols + 1 + spare_cols, paper)
    style = rng.choice(("tiles", "checks", "plain"))
    canvas.draw.rectangle((0, 0, canvas.image.width, CELL - 1), fill=strip)
    canvas.draw.rectangle((0, 0, CELL - 1, canvas.image.height), fill=strip)
    board = []
    for row in range(1, num_rows + 1):
        canvas.char(row, 0, str(row), ink)
        for col in range(1, num_cols + 1):
            _tile(canvas, row, col, style, strip)
        board.append([(rng.choice(tuple(COLORS)), rng.choice(SHAPES)) for _ in range(num_cols)])
        for col, (color, shape) in enumerate(board[-1], start=1):
            canvas.shape(row, col, color, shape)
    for col in range(1, num_cols + 1):
        canvas.char(0, col, str(col), ink)
    return {"board": board}, canvas


def _tile(canvas: Canvas, row: int, col: int, style: str, strip: Color) -> None:
    left, top = col * CELL, row * CELL
    box = (left, top, left + CELL, top + CELL)
    light = mix(strip, (255, 255, 255), 0.5)
    if style == "tiles":
        canvas.draw.rounded_rectangle((left + 1, top + 1, left + CELL - 2, top + CELL - 2), 4, outline=strip)
    elif style == "checks" and (row + col) % 2:
        canvas.draw.rectangle(box, fill=light)
    elif style == "plain":
        canvas.draw.rectangle(box, outline=light)


def _receipt(rng: random.Random, scale: float) -> tuple[dict[str, Any], Canvas]:
    """Header, item rows, total: one character or icon per cell; prices right-aligned."""
    num_lines = rng.randint(2, 2 + round(5 * scale))
    num_cols = 11 + (rng.choice((0, 0, 1, 2)) if scale > 0.5 else 0)
    spare_rows = rng.choice((0, 0, 1)) if scale > 0.5 else 0
    paper, ink = vary(rng, rng.choice(_PAPERS), 3), rng.choice(_INKS)
    canvas = Canvas(rng, num_lines + 2 + spare_rows, num_cols, paper)
    lines = _receipt_lines(rng, num_lines)
    total = sum(quantity * cents for _, quantity, cents in lines)
    for col, char in enumerate("RECEIPT", start=(num_cols - 7) // 2):
        canvas.char(0, col, char, ink)
    for row, (item, quantity, cents) in enumerate(lines, start=1):
        canvas.icon(row, 0, item, dx=1)
        canvas.char(row, 2, str(quantity), ink)
        canvas.char(row, 3, "x", mix(ink, paper, 0.3))
        _write_right(canvas, row, num_cols, f"{cents / 100:.2f}", ink)
    for col, char in enumerate("TOTAL"):
        canvas.char(num_lines + 1, col, char, ink)
    _write_right(canvas, num_lines + 1, num_cols, f"{total / 100:.2f}", ink)
    for row in (1, num_lines + 1):
        for left in range(8, canvas.image.width - 8, 8):
            canvas.draw.line((left, row * CELL, left + 4, row * CELL), fill=mix(ink, paper, 0.55))
    facts = {"lines": [(item, quantity, f"{cents / 100:.2f}") for item, quantity, cents in lines]}
    return facts | {"total": f"{total / 100:.2f}"}, canvas


def _receipt_lines(rng: random.Random, num_lines: int) -> list[tuple[str, int, int]]:
    """Different items with quantity and price in cents, whose total has at most two digits before the point."""
    items = rng.sample(ITEMS, num_lines)
    highest = 999
    while True:
        lines = [(item, min(rng.randint(1, 9), rng.randint(1, 9)), rng.randint(20, highest)) for item in items]
        if sum(quantity * cents for _, quantity, cents in lines) <= MAX_TOTAL_CENTS:
            return lines
        highest = max(highest - 20, 300)


def _write_right(canvas: Canvas, row: int, end_col: int, text: str, ink: Color) -> None:
    for col, char in enumerate(text, start=end_col - len(text)):
        canvas.char(row, col, char, ink)


def _chart(rng: random.Random, scale: float) -> tuple[dict[str, Any], Canvas]:
    """Bars two cells wide; above each its value, below it a key of its colour and the item that it stands for."""
    num_bars = rng.randint(3, 3 + round(3 * scale))
    num_plot_rows = rng.randint(3, 3 + round(5 * scale))
    pitch = 3 if num_bars <= 5 else 2
    num_cols = max(1 + num_bars * pitch, 2 + num_bars * 2)
    paper, ink = vary(rng, rng.choice(_PAPERS), 3), rng.choice(_INKS)
    canvas = Canvas(rng, num_plot_rows + 3, num_cols, paper)
    bars = list(zip(rng.sample(tuple(COLORS), num_bars), rng.sample(ITEMS, num_bars), strict=True))
    facts = {"bars": [(color, item, rng.randint(10, 99)) for color, item in bars]}
    base = (num_plot_rows + 2) * CELL
    if rng.random() < 0.6:
        for tick in range(1, 5):
            y = base - round(tick * 0.25 * num_plot_rows * CELL)
            canvas.draw.line((CELL // 2, y, canvas.image.width - CELL // 2, y), fill=mix(ink, paper, 0.88))
    inset = rng.randint(3, 6)
    for index, (color, item, value) in enumerate(facts["bars"]):
        _bar(canvas, 1 + index * pitch, base, round(value / 100 * num_plot_rows * CELL), color, value, inset)
        canvas.icon(num_plot_rows + 2, 2 + index * pitch, item)
    canvas.draw.line((CELL // 2, base, canvas.image.width - CELL // 2, base), fill=ink, width=2)
    canvas.draw.line((CELL // 2, CELL, CELL // 2, base), fill=ink, width=2)
    return facts, canvas


def _bar(canvas: Canvas, col: int, base: int, height: int, color_name: str, value: int, inset: int) -> None:
    # A sliver of a few pixels is no cell of its own: the eye and the label would disagree.
    rest = height % CELL
    height += -rest if rest < 3 else max(5 - rest, 0)
    color = vary(canvas.rng, COLORS[color_name], 12)
    left, top = col * CELL + inset, base - height
    box = (left, top, left + 2 * CELL - 2 * inset, base)
    canvas.draw.rounded_rectangle(box, 3, fill=color, outline=shade(color, 0.72), corners=(True, True, False, False))
    top_row, base_row = top // CELL, base // CELL
    for row in range(top_row, base_row):
        canvas.cells[row][col] = canvas.cells[row][col + 1] = (color_name,)
    ink = shade(color, 0.55)
    canvas.char(top_row - 1, col, str(value // 10), ink, dx=4)
    canvas.char(top_row - 1, col + 1, str(value % 10), ink, dx=-4)
    swatch = (col * CELL + 9, base + 9, col * CELL + 21, base + 21)
    canvas.draw.rounded_rectangle(swatch, 3, fill=color, outline=shade(color, 0.72))
    canvas.cells[base_row][col] = (color_name,)


_MAKERS: dict[str, Callable[[random.Random, float], tuple[dict[str, Any], Canvas]]] = {
    "grid": _grid,
    "receipt": _receipt,
    "chart": _chart,
}


def _corner(row: int, col: int, glyph: Image.Image, dx: int, dy: int) -> tuple[int, int]:
    return col * CELL + (CELL - glyph.width) // 2 + dx, row * CELL + (CELL - glyph.height) // 2 + dy
