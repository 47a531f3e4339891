"""Loss curves of a run as a PNG, drawn from its log.jsonl: `python -m trimode_vlm.training.curves FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimode_vlm.training.run_log import LOG_NAME, Record, read_log

CURVES_NAME = "curves.png"

# Okabe and Ito's colours, which stay apart for colour-blind eyes and in print.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SMOOTH_FROM = 60
"""From so many points on a curve is drawn faintly, with its smoothed course over it."""

Series = tuple[list[int], list[float]]
Curve = tuple[str, str, str]
"""Name in the log, colour, name in the legend."""


def series(records: Sequence[Record], name: str) -> Series:
    """(steps, values) of one metric, where it was logged and finite."""
    points = {record["step"]: record[name] for record in records if isinstance(record.get(name), (int, float))}
    return list(points), list(points.values())


def smoothed(values: Sequence[float] | np.ndarray, share: float = 0.03) -> list[float]:
    """A straight line fitted to the neighbours of each point, `share` of all points wide, read at the point.

    Inside the curve that is the mean of a centred window, which does not lag behind the points as a running average
    would; at both ends, where the window is one-sided, the fit follows the slope.
    """
    # Sums over windows from cumulative ones. Places count from the middle, to keep the products small.
    count = len(values)
    place = np.arange(count) - (count - 1) / 2
    reach = max(1, round(share * count / 2))
    first = np.clip(np.arange(count) - reach, 0, None)
    end = np.clip(np.arange(count) + reach + 1, None, count)

    def mean(x: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(x)])
        return (sums[end] - sums[first]) / (end - first)

    y = np.asarray(values, dtype=float)
    mean_place, mean_y = mean(place), mean(y)
    spread = (end - first - 1) * (end - first + 1) / 12  # the variance of consecutive integers
    slope = (mean(place * y) - mean_place * mean_y) / np.maximum(spread, 1e-12)
    return (mean_y + slope * (place - mean_place)).tolist()


def plot_curves(folder: Path) -> Path | None:
    """Draw folder/log.jsonl as folder/curves.png; None if there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # The object interface draws with Agg whatever the machine's default is, and leaves pyplot's global state alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder = Path(folder)
    records = read_log(folder / LOG_NAME)
    if not records:
        return None
    figure = Figure(figsize=(12, 11), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(folder.resolve().name)
    axes = figure.subplot_mosaic([["loss", "loss"], ["mask", "speed"], ["lr", "norm"]])
    evaluation = [("eval_loss", GREEN, "evaluation"), ("eval_ar_loss", BLUE, "evaluation, AR"),
                  ("eval_diff_loss", ORANGE, "evaluation, diffusion")]  # fmt: skip
    _draw(axes["loss"], records, [("ar_loss", BLUE, "AR"), ("diff_loss", ORANGE, "diffusion")], "loss", log=True)
    _draw_points(axes["loss"], records, evaluation)
    masked = [("masked_accuracy", ORANGE, "masked accuracy"), ("ar_accuracy", BLUE, "AR accuracy"),
              ("mask_ratio", PURPLE, "mask ratio")]  # fmt: skip
    _draw(axes["mask"], records, masked, "share of tokens", bottom=0)
    _draw(axes["speed"], records, [("tokens_per_sec", GREEN, "tokens/s")], "tokens per second", bottom=0)
    # A schedule is no noisy measurement: it is drawn as it was.
    _draw(axes["lr"], records, [("learning_rate", BLUE, "learning rate")], "learning rate", bottom=0, smooth=False)
    _draw(axes["norm"], records, [("grad_norm", PURPLE, "gradient norm")], "gradient norm", log=True)
    path = folder / CURVES_NAME
    figure.savefig(path, dpi=110)
    return path


def _draw(
    axis: Any,
    records: Sequence[Record],
    curves: Sequence[Curve],
    label: str,
    *,
    log: bool = False,
    bottom: float | None = None,
    smooth: bool = True,
) -> None:
    found = [(color, text, *series(records, name)) for name, color, text in curves]
    drawn = [value for *_, values in found for value in values]
    # Plain axes read easier; a logarithmic one only where the values span more than a decade.
    is_log = log and bool(drawn) and min(drawn) > 0 and max(drawn) > 10 * min(drawn)
    for color, text, steps, values in found:
        if not values:
            continue
        is_long = len(values) >= SMOOTH_FROM
        if not (is_long and smooth):
            axis.plot(steps, values, color=color, linewidth=1.5, marker=None if is_long else ".", label=text)
            continue
        axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
        # On a logarithmic axis the course is that of the logarithms: a single spike would lift a mean for long.
        course = np.exp(smoothed(np.log(values))) if is_log else smoothed(values)
        axis.plot(steps, course, color=color, linewidth=1.8, label=text)
    axis.set(xlabel="step", ylabel=label)
    axis.grid(alpha=0.25)
    if not drawn:
        axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color="grey")
    elif is_log:
        axis.set_yscale("log")
    elif bottom is not None:
        axis.set_ylim(bottom, (max(drawn) * 1.1) or 1)
    if len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend()


def _draw_points(axis: Any, records: Sequence[Record], curves: Sequence[Curve]) -> None:
    for name, color, text in curves:
        steps, values = series(records, name)
        if values:
            axis.plot(steps, values, color=color, marker="o", linestyle="--", markeredgecolor="black", label=text)
            axis.legend()


def main(argv: Sequence[str]) -> int:
    """Draw the curves of the run folders that are named; returns the exit code."""
    if not argv or {"-h", "--help"} & set(argv):
        print("usage: python -m trimode_vlm.training.curves FOLDER [FOLDER ...]\n\nDraws log.jsonl as curves.png.")
        return 0 if argv else 2
    for folder in map(Path, argv):
        try:
            path = plot_curves(folder)
        except ImportError:
            print(NO_MATPLOTLIB, file=sys.stderr)
            return 1
        if path is None:
            print(f"{folder / LOG_NAME}: there is no logged step to draw", file=sys.stderr)
            return 1
        print(path)
    return 0


NO_MATPLOTLIB = "no loss curves: matplotlib is not installed (pip install 'trimode-vlm[train]')"

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
