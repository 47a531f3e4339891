"""Records of `trimode-vlm bench frontier` as figures, a table and a plot, with the Pareto fronts marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimode_vlm.eval import plotting, tables
from trimode_vlm.eval.aggregates import summarise
from trimode_vlm.eval.metrics import mean
from trimode_vlm.eval.tpf import CONVENTION, DEFAULT_BUCKETS, totals

if TYPE_CHECKING:
    from trimode_vlm.eval.bench_frontier import Point
    from trimode_vlm.eval.state import Record

LONG = DEFAULT_BUCKETS[0]

Result = dict[str, Any]


def build(points: Sequence[Point], records: Sequence[Record], metrics: Mapping[str, str]) -> Result:
    """groups[group] = one cell for each point, a group being all samples or those with long answers.

    Args:
        records: one for each sample and point, with the point's name. metrics: of the tasks, by name.
    """
    longest = {(r["task"], r["id"]) for r in records if r["point"] == points[0].name and r["num_new_tokens"] > LONG}
    groups = {"all": list(records), f">{LONG} tokens": [r for r in records if (r["task"], r["id"]) in longest]}
    return {
        "convention": {
            **CONVENTION,
            "score": "mean over tasks of each task's own aggregate; standard error from those of the tasks",
            "seconds_per_answer": "wall time of generate, prefill included, one row at a time, greedy",
            f">{LONG} tokens": f"samples whose answer at the first point ({points[0].name}) is so long",
            "pareto": "no other point has at least as much of both and more of one",
        },
        "points": [asdict(point) | {"name": point.name, "family": point.family} for point in points],
        "groups": {name: _cells(points, chosen, metrics) for name, chosen in groups.items() if chosen},
    }


def _cells(points: Sequence[Point], records: Sequence[Record], metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """A cell for each point, with whether it is on the front of accuracy against TPF and against seconds."""
    cells = []
    for point in points:
        own = [r for r in records if r["point"] == point.name]
        tasks = {task: [r for r in own if r["task"] == task] for task in metrics}
        by_task = {task: summarise(metrics[task], rows) for task, rows in tasks.items() if rows}
        sums = totals(own)
        cells.append(
            {
                "name": point.name,
                **_mean_score(list(by_task.values())),
                **sums.as_dict(),
                "seconds_per_answer": sums.seconds / sums.num_samples,
                "scores": {task: summary["score"] for task, summary in by_task.items()},
            }
        )
    for key, sign in (("tpf_decode", 1), ("seconds_per_answer", -1)):
        front = pareto([(sign * (cell[key] or 0.0), cell["score"]) for cell in cells])
        for cell, is_on in zip(cells, front, strict=True):
            cell[f"pareto_{key}"] = is_on
    return cells


def _mean_score(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    errors = [summary["standard_error"] for summary in summaries]
    known = None not in errors
    error = math.sqrt(sum(e * e for e in errors)) / len(errors) if known else None
    return {"score": mean([summary["score"] for summary in summaries]), "standard_error": error}


def pareto(values: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each (x, y) is on the front where more of both is better: none has as much of both and more of one."""
    tops: dict[float, float] = {}
    for x, y in values:
        tops[x] = max(y, tops.get(x, y))
    front, best = set(), -math.inf
    for x in sorted(tops, reverse=True):
        if tops[x] > best:
            front.add((x, tops[x]))
            best = tops[x]
    return [value in front for value in values]


def markdown(result: Result) -> str:
    """A table for each group, a row for each point."""
    return "\n\n".join(f"{group}:\n\n{_table(cells)}" for group, cells in result["groups"].items())


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    head = ["point", "score", "TPF", "TPF with prefill", "accepted length", "seconds per answer", "tokens/s", "answers"]
    rows = []
    for cell in cells:
        tpf = tables.number(cell["tpf_decode"]) + " *" * cell["pareto_tpf_decode"]
        seconds = tables.number(cell["seconds_per_answer"], 3) + " *" * cell["pareto_seconds_per_answer"]
        row = [f"`{cell['name']}`", tables.score(cell), tpf, tables.number(cell["tpf_end_to_end"])]
        row += [tables.number(cell["mean_accepted_length"]), seconds, tables.number(cell["tokens_per_sec"], 0)]
        rows.append([*row, f"{cell['num_samples']:,}"])
    return tables.markdown(head, rows)


def plot(result: Result, path: Path) -> None:
    """Score against TPF and against seconds per answer, all samples above and long answers below, as a PNG.

    A family of points has a colour, a block length a marker; a line joins what differs in its threshold alone. Rings
    and the grey line are the Pareto front, bars one standard error.
    """
    groups = result["groups"]
    figure = plotting.new_figure(13, 5.2 * len(groups))
    axes = figure.subplots(len(groups), 2, squeeze=False)
    labels = {"tpf_decode": "TPF: tokens per decode forward", "seconds_per_answer": "seconds per answer"}
    for row, (group, cells) in zip(axes, groups.items(), strict=True):
        for axis, (key, label) in zip(row, labels.items(), strict=True):
            _draw(axis, result["points"], cells, key)
            axis.set(xlabel=label, ylabel="score", title=f"{group}, {cells[0]['num_samples']} answers each")
            axis.grid(alpha=0.25)
        plotting.log_x(row[1])
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    plotting.save(figure, path)


def _draw(axis: Any, points: Sequence[Mapping[str, Any]], cells: Sequence[Mapping[str, Any]], key: str) -> None:
    both = [(point, cell) for point, cell in zip(points, cells, strict=True) if cell[key] is not None]
    colors = plotting.colors_of(list(dict.fromkeys(point["family"] for point in points)))
    lengths = sorted({point["block_length"] for point in points if point["block_length"] is not None})
    front = sorted((cell[key], cell["score"]) for _, cell in both if cell[f"pareto_{key}"])
    axis.plot(*zip(*front, strict=True), color="#BBBBBB", linewidth=6, alpha=0.5, zorder=0, label="Pareto front")
    for family, length in dict.fromkeys((point["family"], point["block_length"]) for point, _ in both):
        own = [cell for point, cell in both if (point["family"], point["block_length"]) == (family, length)]
        color = colors[family]
        marker = "*" if length is None else plotting.MARKERS[lengths.index(length) % len(plotting.MARKERS)]
        axis.errorbar(
            [cell[key] for cell in own],
            [cell["score"] for cell in own],
            [cell["standard_error"] or 0.0 for cell in own],
            color=color,
            marker=marker,
            linewidth=1,
            elinewidth=0.5,
            alpha=0.9,
            label=family if length is None else f"{family}, block {length}",
        )
        ringed = [(cell[key], cell["score"]) for cell in own if cell[f"pareto_{key}"]]
        if ringed:
            axis.scatter(*zip(*ringed, strict=True), s=140, facecolors="none", edgecolors=color, linewidths=1.5)
