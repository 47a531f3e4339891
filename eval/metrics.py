"""Scores of one answer, and the error of their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Metric = Callable[[str, str], float]


def normalise(text: str) -> str:
    """Text with LF line ends, without spaces at line ends and blank lines around it; all else stays, case included."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def exact_match(prediction: str, gold: str) -> float:
    """1.0 if the normalised texts are equal, else 0.0; an answer cut by its budget is scored as it is."""
    return float(normalise(prediction) == normalise(gold))


METRICS: dict[str, Metric] = {"exact_match": exact_match}


def mean(scores: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return sum(scores) / len(scores) if scores else None


def standard_error(scores: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1) over sqrt(n); None below two samples."""
    n = len(scores)
    if n < 2:
        return None
    centre = sum(scores) / n
    return math.sqrt(sum((score - centre) ** 2 for score in scores) / (n - 1) / n)
