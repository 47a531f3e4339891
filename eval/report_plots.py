"""The plots of a report as SVG text for an HTML page, and the figures behind them.

Colours are names that the page defines (`var(--ar)`, `currentColor`), so that one drawing suits light and dark.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimode_vlm.eval.tpf import totals

# Half octaves: lengths spread over three orders of magnitude, and 100 and 200 fall near edges.
EDGES = sorted({round(2**k * step) for k in range(15) for step in (1, 1.5)})

# Matplotlib wants real colours; these stand for what the page's style sheet says.
INK = "#010203"
_SLOTS = ("#010210", "#010211", "#010212", "#010213", "#010214", "#010215")
STYLES = {INK: "currentColor"} | {color: f"var(--series-{i})" for i, color in enumerate(_SLOTS)}
_MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """`alt` says in words what the picture shows."""

    title: str
    svg: str
    alt: str
    caption: str


def length_bins(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """TPF by response length: pooled over the samples of each half octave, and the quartiles of its samples."""
    places = np.searchsorted(EDGES, [r["num_new_tokens"] for r in records], side="right") - 1
    bins = []
    for place in sorted(set(places.tolist())):
        if place < 0:  # an answer without a token
            continue
        chosen = [r for r, p in zip(records, places, strict=True) if p == place]
        pooled = totals(chosen)
        each = [tpf for r in chosen if (tpf := totals([r]).tpf_decode) is not None]
        quartiles = np.percentile(each, [25, 75]).tolist() if each else [None, None]
        bins.append(
            {
                "from": EDGES[place],
                "to": EDGES[place + 1] - 1 if place + 1 < len(EDGES) else None,
                "num_samples": len(chosen),
                "mean_tokens": pooled.num_tokens / len(chosen),
                "tpf_decode": pooled.tpf_decode,
                "quartiles": quartiles,
            }
        )
    return bins


def accepted_counts(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many cycles of self-speculation gave how many tokens."""
    counts = Counter(n for r in records for n in r.get("accepted_lengths") or [])
    return {str(n): counts[n] for n in sorted(counts)}


def draw(report: Mapping[str, Any]) -> list[Plot]:
    """All plots for which the report has figures.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(inks, INK) | {
        "svg.fonttype": "none",
        "legend.frameon": False,
        "font.size": 10.5,
    }
    with matplotlib.rc_context(style):
        plots = [_tpf_by_length(report), _accepted(report), _scores(report)]
    return [plot for plot in plots if plot is not None]


def _tpf_by_length(report: Mapping[str, Any]) -> Plot | None:
    curves = {
        mode: points
        for mode, bins in report["tpf_by_length"].items()
        if (points := [b for b in bins if b["tpf_decode"] is not None])
    }
    if not curves:
        return None
    figure, axis = _figure(3.7)
    for mode, points in curves.items():
        color, marker = _look(report, mode)
        x = [p["mean_tokens"] for p in points]
        low, high = zip(*(p["quartiles"] for p in points), strict=True)
        axis.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        axis.plot(x, [p["tpf_decode"] for p in points], color=color, marker=marker, markersize=5, label=mode)
    axis.set_xscale("log")
    lengths = [p["mean_tokens"] for points in curves.values() for p in points]
    axis.set_xlim(min(lengths) / 1.3, max(lengths) * 1.3)
    axis.set_ylim(bottom=0)
    for threshold in report["settings"]["buckets"]:
        if threshold <= axis.get_xlim()[1]:
            axis.axvline(threshold, color=INK, linestyle=":", linewidth=1)
            axis.text(threshold, 1.01, f">{threshold}", transform=axis.get_xaxis_transform(), ha="center", fontsize=9)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, _: "")
    axis.set(xlabel="answer length in tokens", ylabel="tokens per forward")
    axis.legend(loc="upper left")
    ends = [
        f"{mode} from {points[0]['tpf_decode']:.2f} at {points[0]['mean_tokens']:.0f} tokens "
        f"to {points[-1]['tpf_decode']:.2f} at {points[-1]['mean_tokens']:.0f}"
        for mode, points in curves.items()
    ]
    return Plot(
        title="TPF against response length",
        svg=_svg(figure, "tpf"),
        alt="Line plot of tokens per decoding forward against answer length: " + "; ".join(ends) + ".",
        caption="Each point pools the answers of one half octave of length; the band holds the middle half of them. "
        "Dotted lines: the lengths above which TPF is also reported.",
    )


def _scores(report: Mapping[str, Any]) -> Plot | None:
    modes, tasks = report["settings"]["modes"], report["tasks"]
    bars = [(task, {m: cells[m] for m in modes if m in cells}) for task, cells in tasks.items()]
    mean = {m: c for m, c in report["mean_of_tasks"].items() if c["score"] is not None}
    bars += [("mean of tasks", mean)] if len(tasks) > 1 else []
    if not bars or not mean:
        return None
    figure, axis = _figure(0.9 + len(bars) * (0.12 + 0.13 * len(modes)))
    height = 0.82 / len(modes)
    for i, mode in enumerate(modes):
        color, _ = _look(report, mode)
        for row, (_, cells) in enumerate(bars):
            if mode not in cells or cells[mode]["score"] is None:
                continue
            axis.barh(
                row - 0.41 + (i + 0.5) * height,
                cells[mode]["score"],
                height * 0.9,
                color=color,
                label=mode if row == len(bars) - 1 else None,
                xerr=cells[mode]["standard_error"],
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 1.5},
            )
    axis.set_yticks(range(len(bars)), [name if len(name) <= 22 else f"{name[:21]}…" for name, _ in bars])
    axis.set_ylim(len(bars) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.set(xlabel="score ± one standard error")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=len(modes))
    figures = ", ".join(f"{mode} {cell['score']:.3f}" for mode, cell in mean.items())
    return Plot(
        title="Score by mode",
        svg=_svg(figure, "score"),
        alt=f"Bars of the score of each task in each mode, with error bars. Mean of tasks: {figures}.",
        caption="Error bars: one standard error. The numbers stand in the tables.",
    )


def _accepted(report: Mapping[str, Any]) -> Plot | None:
    counts = {mode: c for mode, c in report["accepted_lengths"].items() if c}
    if not counts:
        return None
    figure, axis = _figure(3.2)
    longest = max(int(n) for c in counts.values() for n in c)
    width = 0.85 / len(counts)
    words = []
    for i, (mode, found) in enumerate(counts.items()):
        total = sum(found.values())
        lengths = [int(n) for n in found]
        places = [n - 0.425 + (i + 0.5) * width for n in lengths]
        axis.bar(places, [100 * n / total for n in found.values()], width, color=_look(report, mode)[0], label=mode)
        mean = sum(int(n) * count for n, count in found.items()) / total
        words.append(
            f"{mode} accepts {mean:.2f} tokens a cycle on average over {total:,} cycles, {max(lengths)} at most"
        )
    axis.set_xlim(0.3, longest + 0.7)
    axis.set(xlabel="tokens accepted in one cycle", ylabel="% of cycles")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=len(counts))
    return Plot(
        title="Accepted lengths",
        svg=_svg(figure, "accepted"),
        alt="Histogram of accepted lengths: " + "; ".join(words) + ".",
        caption="A cycle of self-speculation gives the accepted part of the draft and the verifier's own token; "
        "the last one of an answer ends with it.",
    )


def _look(report: Mapping[str, Any], mode: str) -> tuple[str, str]:
    """Colour and marker of a mode: the same in every plot, and on the page."""
    place = report["settings"]["modes"].index(mode) % len(_SLOTS)
    return _SLOTS[place], _MARKERS[place]


def _figure(height: float) -> tuple[Any, Any]:
    """A figure as wide as a phone can show without shrinking its letters beyond reading."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, height), layout="constrained")
    axis = figure.add_subplot()
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.2, color=INK, linewidth=0.6)
    axis.set_axisbelow(True)
    return figure, axis


def _svg(figure: Any, name: str) -> str:
    """The figure as an <svg> element: text stays text, no id meets another plot's, colours are the page's."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    for color, style in STYLES.items():
        text = text.replace(color, style)
    return text
