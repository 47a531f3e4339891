"""From scored records to what a benchmark reports.

Standard errors are analytic, over samples taken as independent: of a mean, the sample deviation over sqrt(n); of a mean
over categories, the root of their summed squares over their number; of a ratio of sums (precision, recall, F1), the
first-order one. A `None` stands where there are too few samples for any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trimode_vlm.eval.metrics import mean, standard_error

Records = Sequence[Mapping[str, Any]]
Summary = dict[str, Any]

PAIR = 2
"""Questions about one MME image: one to affirm, one to deny."""

PERCEPTION = ("existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR")
"""MME's categories of perception; the others are cognition (arXiv 2306.13394)."""


def summarise(metric: str, records: Records, macro: bool | None = None) -> Summary:
    """Score, its standard error and the share of unparsed answers, over all records and per category.

    `extra` holds what a metric reports beside: `yes_no` precision, recall and F1 of yes, and the share of yes among the
    answers; `mme` acc+ (both questions of an image right) and the points that MME sums up, 200 per category; `ocrbench`
    points, one per right answer. Records with categories also have the mean over these, as `macro`.

    Args:
        records: each with `score`; `parsed`, `category`, `gold` and `info` where it has them.
        macro: `score` is the mean over categories (MMStar), not over samples; None: if the records say so.

    Returns:
        score, standard_error, unparsed_rate, num_samples, extra (name -> number), categories (name -> score,
        standard_error, num_samples, and what else the metric reports); None where there is nothing to average.

    Raises:
        ValueError: more than two MME questions about one image of one category.
    """
    report = EXTRAS.get(metric, _nothing)
    by_category = grouped(records, lambda record: record.get("category"))
    categories = {
        str(name): _cell(members) | report(members) for name, members in by_category.items() if name is not None
    }
    unparsed = [float("parsed" in record and record["parsed"] is None) for record in records]
    total = _cell(records)
    extra = report(records) | _macro(list(categories.values()))
    if metric == "mme":
        extra |= _mme_totals(categories)
    if records and (any(record.get("macro") for record in records) if macro is None else macro):
        if categories:
            total |= {"score": extra["macro"], "standard_error": extra["macro_standard_error"]}
    return total | {"unparsed_rate": mean(unparsed), "extra": extra, "categories": categories}


def grouped(records: Records, key: Callable[[Mapping[str, Any]], Any]) -> dict[Any, list[Mapping[str, Any]]]:
    """Records by the value of `key`, both in order of first appearance."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _cell(records: Records) -> Summary:
    scores = [record["score"] for record in records]
    return {"score": mean(scores), "standard_error": standard_error(scores), "num_samples": len(scores)}


def _macro(categories: Sequence[Summary]) -> Summary:
    """Mean over categories, each with the same weight."""
    if not categories:
        return {}
    errors = [category["standard_error"] for category in categories]
    value = mean([category["score"] for category in categories])
    return {"macro": value, "macro_standard_error": _of_sum(errors, 1 / len(categories))}


def _nothing(records: Records) -> Summary:
    return {}


def yes_no(records: Records) -> Summary:
    """Precision, recall and F1 of yes, and the share of yes among the answers; what is neither is no."""
    said = [record.get("parsed") == "yes" for record in records]
    true = [str(record["gold"]).strip().lower().rstrip(".") == "yes" for record in records]
    hits = [float(s and t) for s, t in zip(said, true, strict=True)]
    return {
        **_ratio("precision", hits, [float(s) for s in said]),
        **_ratio("recall", hits, [float(t) for t in true]),
        **_ratio("f1", [2 * hit for hit in hits], [float(s) + float(t) for s, t in zip(said, true, strict=True)]),
        "yes_ratio": mean([float(s) for s in said]),
    }


def mme(records: Records) -> Summary:
    """acc+: the share of images of which both questions are right, of those with both questions among the records."""
    pairs = _pairs(records)
    both = [float(sum(pair) == PAIR) for pair in pairs]
    return {"acc_plus": mean(both), "acc_plus_standard_error": standard_error(both), "num_pairs": len(pairs)}


def _pairs(records: Records) -> list[list[float]]:
    """The two scores of each image; images of one question (a limit cut the other off) are left out."""
    images = grouped(records, lambda record: (record.get("category"), (record.get("info") or {}).get("image_id")))
    for (category, image), members in images.items():
        if image is not None and len(members) > PAIR:
            raise ValueError(
                f"MME asks {PAIR} questions about an image, found {len(members)} about {image} ({category})"
            )
    return [
        [member["score"] for member in members]
        for (_, image), members in images.items()
        if image is not None and len(members) == PAIR
    ]


def _mme_totals(categories: Mapping[str, Summary]) -> Summary:
    """MME's points: accuracy and acc+ in per cent, summed over categories."""
    points = {
        name: 100 * (category["score"] + category["acc_plus"])
        for name, category in categories.items()
        if category["acc_plus"] is not None
    }
    perception = sum(value for name, value in points.items() if name in PERCEPTION)
    return {"points": sum(points.values()), "perception": perception, "cognition": sum(points.values()) - perception}


def ocrbench(records: Records) -> Summary:
    """One point for each right answer."""
    return {"points": sum(record["score"] for record in records)}


EXTRAS: dict[str, Callable[[Records], Summary]] = {"yes_no": yes_no, "mme": mme, "ocrbench": ocrbench}


def _ratio(name: str, above: Sequence[float], below: Sequence[float]) -> Summary:
    """Sum over sum and its first-order standard error; 0 over 0 is 0, as both kits have it."""
    total, n = sum(below), len(below)
    value = sum(above) / total if total else 0.0
    residual = standard_error([a - value * b for a, b in zip(above, below, strict=True)])
    error = residual * n / total if residual is not None and total else None
    return {name: value, f"{name}_standard_error": error}


def _of_sum(errors: Iterable[float | None], weight: float) -> float | None:
    """Standard error of the weighted sum of independent values; None if any of theirs is."""
    squares = [None if error is None else error**2 for error in errors]
    return None if None in squares else weight * math.sqrt(sum(square for square in squares if square is not None))
