"""MMMU's own rules for choices and open answers (arXiv 2311.16502, its evaluation tool), without its random guess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimode_vlm.eval.metric_choice import choices_of, letter_mmmu, multiple_choice
from trimode_vlm.eval.scored import Scored, golds, scored


def mmmu(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """A choice by letter, or an open answer by what its sentences end in; info `question_type` says which.

    Choices: `vlmevalkit` as `multiple_choice`, `lmms` and `strict` by MMMU's own rule (`letter_mmmu`), where the tools
    pick a letter at random if there is none. Open answers: MMMU's own rule in all styles; VLMEvalKit recasts them as a
    choice between the gold answer and "Other Answers" that the model never saw (so that `A` is right), which is not
    copied.
    """
    if (info or {}).get("question_type", "multiple-choice") == "multiple-choice":
        if style == "vlmevalkit":
            return multiple_choice(prediction, gold, info, style)
        letter = letter_mmmu(prediction, choices_of(info))
        return scored(letter is not None and letter in golds(gold), letter)
    found = open_answers(prediction)
    accepted = [value for answer in golds(gold) for value in _normalised(answer)]
    parsed = " | ".join(str(value) for value in found) if prediction.strip() else None
    return scored(any(_matches(value, accepted) for value in found), parsed)


_KEYS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")


def open_answers(text: str) -> list[str | float]:
    """What an open answer may mean: the shortest end of each line behind a word such as `is `, and its numbers."""
    text = text.strip().strip(".").lower()
    lines = text.split("\n")
    ends = []
    for i, line in enumerate(lines):
        keys = (*_KEYS, "=") if i == len(lines) - 1 else _KEYS
        behind = [line.split(key)[-1].strip() for key in keys if key in line]
        # An empty end yields to any later one, as in the tool.
        shortest = ""
        for end in behind:
            if not shortest or len(end) < len(shortest):
                shortest = end
        if shortest and shortest not in tuple(":,.!?;'"):
            ends.append(shortest)
    ends = ends or [text]
    values = [value for end in [*ends, *(n for end in ends for n in _numbers(end))] for value in _normalised(end)]
    return list(dict.fromkeys(values))


def _numbers(text: str) -> list[str]:
    with_commas = r"-?\b\d{1,3}(?:,\d{3})+\b"
    scientific = r"-?\d+(?:\.\d+)?[eE][+-]?\d+"
    simple = r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"
    return [number for pattern in (with_commas, scientific, simple) for number in re.findall(pattern, text)]


def _normalised(text: str) -> list[str | float]:
    """A number rounded to two places, or lower-cased text; a single character only beside a space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
    return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def _matches(value: str | float, accepted: list[str | float]) -> bool:
    if isinstance(value, str):
        return any(isinstance(answer, str) and answer in value for answer in accepted)
    return value in accepted
