"""The paper's table beside what a report measured. Published numbers are never measured here, and every row says so."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from trimode_vlm.eval.metrics import mean


@functools.cache
def load() -> dict[str, Any]:
    """published.json: source, label, and tables of scores in percent and tokens per forward."""
    return json.loads((files("trimode_vlm.eval") / "published.json").read_text(encoding="utf-8"))


def beside(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Published numbers for which the report has the same benchmark and mode; None if there are none.

    Mean score and TPF of a table are over all of its benchmarks, so they stand only beside a report that has them all.
    The measured TPF pools these benchmarks' samples; the paper does not say how it averages.

    Returns:
        label, source, and rows of table, what, mode, unit ("percent" or "tokens per forward"), published, measured,
        standard_error, num_samples.
    """
    rows: list[dict[str, Any]] = []
    for table in load()["tables"]:
        names = list(table["tasks"])
        cells = report["tasks"]
        for task in names:
            for mode, published in table["tasks"][task].items():
                if cell := cells.get(task, {}).get(mode):
                    rows.append(_row(table, task, mode, published, cell["score"], cell["standard_error"], [cell]))
        for mode, published in table["mean_score"].items():
            chosen = [cells.get(task, {}).get(mode) for task in names]
            if chosen and all(chosen):
                rows.append(_row(table, "mean of benchmarks", mode, published, *mean_of(chosen), chosen))
                rows += _tpf_rows(table, mode, chosen)
    return {"label": load()["label"], "source": load()["source"], "rows": rows} if rows else None


def mean_of(cells: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Mean of the cells' scores, each cell once, and its standard error from theirs; None where a cell has none."""
    scores = [cell["score"] for cell in cells]
    errors = [cell["standard_error"] for cell in cells]
    centre = None if None in scores else mean(scores)
    return centre, None if None in errors else math.sqrt(sum(e * e for e in errors)) / len(errors)


def _row(
    table: Mapping[str, Any],
    what: str,
    mode: str,
    published: float,
    measured: float | None,
    error: float | None,
    cells: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    return {
        "table": table["name"],
        "what": what,
        "mode": mode,
        "unit": "percent",
        "published": published,
        "measured": None if measured is None else 100 * measured,
        "standard_error": None if error is None else 100 * error,
        "num_samples": sum(cell["num_samples"] for cell in cells),
    }


def _tpf_rows(table: Mapping[str, Any], mode: str, cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for bucket, published in table["tpf"].get(mode, {}).items():
        found = [cell["buckets"][bucket] for cell in cells if bucket in cell["buckets"]]
        forwards = sum(b["num_decode_forwards"] for b in found)
        tokens = sum(b["num_tokens"] - b["num_prefill_tokens"] for b in found)
        rows.append(
            _row(table, f"TPF, {bucket} tokens" if bucket != "all" else "TPF, all", mode, published, None, None, found)
            | {"unit": "tokens per forward", "measured": tokens / forwards if forwards else None}
        )
    return rows
