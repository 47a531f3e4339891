"""What the PNG plots of this folder share: a figure that needs no window, colours, and a readable log axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which stay apart for colour-blind eyes and in print.
MODE_COLORS = {"ar": "#000000", "linear_spec": "#0072B2", "quadratic_spec": "#009E73"}
OTHER_COLORS = ("#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#999999", "#B8A800")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write the figure as a PNG."""
    figure.savefig(path, dpi=110)


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: a mode keeps its own, the others take theirs in turn."""
    others = [name for name in names if name not in MODE_COLORS]
    turns = {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(others)}
    return {name: MODE_COLORS.get(name) or turns[name] for name in names}


def log_x(axis: Any) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
