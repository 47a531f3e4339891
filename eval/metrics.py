"""Scores of one answer by the name of a metric, and the error of their mean.

A metric is a pure function (prediction, gold, info, style) -> Scored in one of the `metric_*.py` files. None guesses:
what cannot be read out of an answer scores 0 and is reported as unparsed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimode_vlm.eval.scored import STYLES, Scored

__all__ = ["METRICS", "STYLES", "Scored", "exact_match", "mean", "normalise", "score", "standard_error"]

Metric = Callable[[str, Any, Mapping[str, Any], str], Scored]


def score(
    metric: str, prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit"
) -> Scored:
    """Score an answer.

    Args:
        gold: the right answer, or the list of accepted ones; for multiple choice the letter.
        info: what the metric reads beside the gold answer: choices, question, question_type, answer_type, precision ...
        style: one of STYLES.

    Raises:
        ValueError: an unknown metric or style, or a gold answer or info that the metric cannot use.
    """
    if metric not in METRICS:
        near = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown metric {metric!r}, did you mean {near!r}? Known: {', '.join(METRICS)}")
    if style not in STYLES:
        near = difflib.get_close_matches(style, STYLES, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown metric style {style!r}, did you mean {near!r}? Known: {', '.join(STYLES)}")
    return METRICS[metric](prediction, gold, info or {}, style)


def normalise(text: str) -> str:
    """Text with LF line ends, without spaces at line ends and blank lines around it; all else stays, case included."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def exact_match(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if the normalised text equals (one of) the gold answers, in every style; an answer cut by its budget counts."""
    answer = normalise(prediction)
    golds = [gold] if isinstance(gold, str) else gold
    right = any(answer == normalise(str(g)) for g in golds)
    return Scored(float(right), answer if answer or right else None)


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
