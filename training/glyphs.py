"""What synthetic pictures are made of: named colours, shapes and icons, and their cached renderings."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 28
MAX_CELLS = 16
Color = tuple[int, int, int]

COLORS: dict[str, Color] = {
    "red": (214, 40, 48),
    "blue": (38, 92, 214),
    "green": (38, 152, 74),
    "yellow": (244, 206, 40),
    "purple": (126, 58, 178),
    "orange": (244, 130, 26),
    "black": (38, 38, 44),
    "pink": (244, 148, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond")
ITEMS = (
    "apple", "banana", "grapes", "lemon", "melon", "pineapple",
    "carrot", "broccoli", "mushroom", "corn", "avocado", "eggplant",
    "bread", "cheese", "egg", "fish", "pepper", "coffee",
    "cake", "candy", "honey", "rice", "salt", "cookie",
)  # fmt: skip


def vary(rng: random.Random, color: Color, amount: int) -> Color:
    red, green, blue = (min(max(value + rng.randint(-amount, amount), 0), 255) for value in color)
    return red, green, blue


def mix(color: Color, other: Color, share: float) -> Color:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(color, other, strict=True))
    return red, green, blue


def shade(color: Color, factor: float) -> Color:
    return mix((0, 0, 0), color, factor)


@cache
def grain() -> np.ndarray:
    side = MAX_CELLS * CELL + 64
    return np.random.RandomState(0).standard_normal((side, side)).astype(np.float32)


@cache
def char_mask(char: str, size: int, bold: bool) -> Image.Image:
    """A whole-cell coverage mask of a character on a common baseline."""
    mask = Image.new("L", (CELL, CELL))
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    baseline = CELL / 2 + font.getbbox("0", anchor="ls")[1] / -2
    stroke = 0.6 if bold else 0.25
    ImageDraw.Draw(mask).text((CELL / 2, baseline), char, 255, font, anchor="ms", stroke_width=stroke)
    return mask


_OVERSAMPLE = 8
_POLYGONS: dict[str, list[tuple[float, float]]] = {
    "square": [(0.06, 0.06), (0.94, 0.06), (0.94, 0.94), (0.06, 0.94)],
    "triangle": [(0.5, 0.02), (1.0, 0.95), (0.0, 0.95)],
    "diamond": [(0.5, -0.04), (0.94, 0.5), (0.5, 1.04), (0.06, 0.5)],
    "star": [
        (0.5 + r * np.sin(i * np.pi / 5), 0.54 - r * np.cos(i * np.pi / 5))
        for i, r in enumerate((0.58, 0.25) * 5)
    ],
    "heart": [
        (0.5 + 0.5 * np.sin(t) ** 3,
         0.46 - 0.032 * (13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)))
        for t in np.linspace(0, 2 * np.pi, 60)
    ],
}  # fmt: skip


@cache
def shape_masks(shape: str, size: int) -> tuple[Image.Image, Image.Image]:
    """Coverage of a shape with its outline, and of its inside alone."""
    return _shape_mask(shape, size), _shape_mask(shape, size - 3)


def _shape_mask(shape: str, size: int) -> Image.Image:
    side = CELL * _OVERSAMPLE
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    start, extent = (CELL - size) / 2 * _OVERSAMPLE, size * _OVERSAMPLE
    if shape == "circle":
        draw.ellipse((start, start, start + extent, start + extent), fill=255)
    else:
        # Shrinking about the centroid keeps the outline even: a triangle's lies below the middle of its box.
        points = [(start + x * extent, start + y * extent) for x, y in _POLYGONS[shape]]
        if shape == "triangle":
            points = [(x, y + (22 - size) * 0.15 * _OVERSAMPLE) for x, y in points]
        draw.polygon(points, fill=255)
    return mask.resize((CELL, CELL), Image.Resampling.BOX)


@cache
def _icon_sheet() -> Image.Image:
    with Image.open(Path(__file__).with_name("icons.png")) as sheet:
        return sheet.convert("RGBA")


@cache
def icon(item: str, size: int) -> Image.Image:
    index = ITEMS.index(item)
    left, top = index % 6 * 48, index // 6 * 48
    return _icon_sheet().crop((left, top, left + 48, top + 48)).resize((size, size), Image.Resampling.LANCZOS)
