"""Options that several commands of this folder share: lists of numbers, TASK=PATH, files that will be written."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trimode_vlm.cli import UsageError


def numbers(text: str, kind: Callable[[str], Any], option: str, least: float, most: float) -> list[Any]:
    """The numbers of a comma-separated text, each once; above 0 in any case, as no setting of decoding here is 0.

    Raises:
        UsageError: no number, or one that is out of range.
    """
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(max(least, 1e-9) <= value <= most for value in values):
        raise UsageError(f"{option} takes numbers such as 4,8 or 0.9,0.7 (from {least} to {most}), got {text!r}")
    return list(dict.fromkeys(values))


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """What `TASK=PATH` texts say.

    Raises:
        UsageError: one of them has no name or no path.
    """
    parts = {text: text.partition("=") for text in texts}
    for text, (name, _, value) in parts.items():
        if not name or not value:
            raise UsageError(f"{option} takes TASK=PATH, found {text!r}")
    return {name: value for name, _, value in parts.values()}


def check_file(option: str, path: str | None) -> None:
    """Raise UsageError for a file that could not be written in the end."""
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise UsageError(f"{option} {path}: not a file in a folder that exists")


def check_plot(path: str | None) -> None:
    """Raise UsageError for a --plot that cannot be drawn or written."""
    check_file("--plot", path)
    if path is not None and Path(path).suffix != ".png":
        raise UsageError(f"--plot {path}: the plot is a .png")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib (pip install 'trimode-vlm[eval]')")
