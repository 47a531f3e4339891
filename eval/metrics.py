"""Scores of one answer by the name of a metric, and the error of their mean.

A metric is a pure function (prediction, gold, info, style) -> Scored in one of the `metric_*.py` files. None guesses:
what cannot be read out of an answer scores 0 and is reported as unparsed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimode_vlm.eval.metric_choice import mme, multiple_choice, multiple_choice_cot, realworldqa, yes_no
from trimode_vlm.eval.metric_math import gsm8k
from trimode_vlm.eval.metric_math import math as math_formula
from trimode_vlm.eval.metric_mathvista import mathvista
from trimode_vlm.eval.metric_mmmu import mmmu
from trimode_vlm.eval.metric_text import anls, contains, exact_match, f1, normalise, ocrbench, relaxed_accuracy
from trimode_vlm.eval.metric_vqa import vqa_accuracy
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


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "relaxed_accuracy": relaxed_accuracy,
    "anls": anls,
    "vqa_accuracy": vqa_accuracy,
    "multiple_choice": multiple_choice,
    "multiple_choice_cot": multiple_choice_cot,
    "mmmu": mmmu,
    "mathvista": mathvista,
    "ocrbench": ocrbench,
    "realworldqa": realworldqa,
    "yes_no": yes_no,
    "mme": mme,
    "gsm8k": gsm8k,
    "math": math_formula,
    "contains": contains,
    "f1": f1,
}


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
