"""What scoring one answer gives, and the rule books it can be scored by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

STYLES = ("vlmevalkit", "lmms", "strict")
"""VLMEvalKit's rules without its LLM judge; lmms-eval's and lm-eval's; our reading of each benchmark's own paper."""


@dataclass(frozen=True)
class Scored:
    """Score of one answer, and what was read out of it; `parsed` None: nothing could be, and the score is 0."""

    score: float
    parsed: str | None


def scored(score: float, parsed: str | None) -> Scored:
    """A Scored in which an empty reading counts as none, unless it is right."""
    return Scored(float(score), parsed if parsed or score else None)


def golds(gold: Any) -> list[str]:
    """The accepted answers as texts: a list of them, or a single one.

    Raises:
        ValueError: an empty list.
    """
    answers = (
        [str(answer) for answer in gold] if isinstance(gold, Iterable) and not isinstance(gold, str) else [str(gold)]
    )
    if not answers:
        raise ValueError("the list of accepted answers is empty")
    return answers
