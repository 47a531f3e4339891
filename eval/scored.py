"""What scoring one answer gives, and the rule books it can be scored by."""

from __future__ import annotations

from dataclasses import dataclass

STYLES = ("vlmevalkit", "lmms", "strict")
"""VLMEvalKit's rules without its LLM judge; lmms-eval's; our reading of each benchmark's own paper."""


@dataclass(frozen=True)
class Scored:
    """Score of one answer, and what was read out of it; `parsed` None: nothing could be, and the score is 0."""

    score: float
    parsed: str | None
