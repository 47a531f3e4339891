"""From scored records to what a benchmark reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimode_vlm.eval.metrics import mean, standard_error


def summarise(metric: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Score, its standard error and the share of unparsed answers, over all records and per category.

    Args:
        records: each with `score`; `parsed` and `category` where it has them.

    Returns:
        score, standard_error, unparsed_rate, num_samples, extra (name -> number), categories (name -> score,
        standard_error, num_samples); None where there is nothing to average.
    """
    values = [record["score"] for record in records]
    unparsed = [float("parsed" in record and record["parsed"] is None) for record in records]
    names = dict.fromkeys(record.get("category") for record in records)
    categories = {
        name: _cell([record["score"] for record in records if record.get("category") == name])
        for name in names
        if name is not None
    }
    return _cell(values) | {"unparsed_rate": mean(unparsed), "extra": {}, "categories": categories}


def _cell(scores: Sequence[float]) -> dict[str, Any]:
    return {"score": mean(scores), "standard_error": standard_error(scores), "num_samples": len(scores)}
