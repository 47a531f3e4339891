"""MathVista (arXiv 2310.02255), whose kits let a judge model read answers; here rules do, so label scores rule-only."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from trimode_vlm.eval.metric_choice import choices_of, letter_strict, letter_vlmevalkit
from trimode_vlm.eval.metric_math import NUMBER, stated
from trimode_vlm.eval.scored import Scored, scored


def mathvista(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if what the rules read is the gold answer; info has question_type, answer_type, precision and choices.

    What is read (`extract`) is the same in all styles; how it is compared is each kit's: `vlmevalkit` by value, `lmms`
    as text after truncation to an integer or rounding to `precision`. `strict` rounds and compares by value. Nothing is
    taken for the nearest choice, which lmms-eval does with an empty reading too.

    Args:
        gold: the answer's text; of a choice its text or its letter.

    Raises:
        ValueError: the gold answer is none of the choices.
    """
    info = info or {}
    if info.get("question_type") == "multi_choice":
        choices = choices_of(info)
        letter = extract(prediction, info, style)
        return scored(letter in _gold_letters(gold, choices), letter)
    found = extract(prediction, info, style)
    return scored(found is not None and _equal(found, str(gold), info, style), found)


def extract(text: str, info: Mapping[str, Any], style: str = "vlmevalkit") -> str | None:
    """What the rules read out of an answer, by question type and answer type; None if nothing.

    A choice: its letter. A number: the first in what the answer states (`metric_math.stated`), else the last of all. A
    list: the last in brackets. Text: what is stated, else everything.
    """
    final = stated(text)
    if info.get("question_type") == "multi_choice":
        choices = choices_of(info)
        same = [letter for letter, choice in choices.items() if choice and choice == text]
        if same:
            return same[0]
        if style == "strict":
            return letter_strict(final or text, choices)
        return letter_vlmevalkit(text, choices) or (letter_vlmevalkit(final, choices) if final else None)
    kind = info.get("answer_type", "text")
    if kind in ("integer", "float"):
        # What Python reads as a number is one, however it is written.
        if _as_float(text) is not None:
            return text.strip()
        numbers = NUMBER.findall(final)[:1] if final else []
        numbers = numbers or NUMBER.findall(text)[-1:]
        return numbers[0].replace(",", "") if numbers else None
    if kind == "list":
        lists = re.findall(r"\[[^\[\]]*\]", text)
        return lists[-1] if lists else None
    return final or text.strip() or None


def _equal(found: str, gold: str, info: Mapping[str, Any], style: str) -> bool:
    kind, precision = info.get("answer_type", "text"), int(float(info.get("precision") or 0))
    if kind not in ("integer", "float"):
        if style == "strict" and kind == "list":
            return _literal(found) == _literal(gold)
        return found.strip() == gold.strip() or (style == "strict" and found.casefold() == gold.strip().casefold())
    number, target = _as_float(found), _as_float(gold)
    if number is None or target is None:
        return False
    if style == "lmms":
        shown = str(int(number)) if kind == "integer" else str(round(number, precision))
        return shown == gold.strip()
    if style == "strict":
        return round(number, precision) == round(target, precision) if kind == "float" else number == target
    # VLMEvalKit reads an integer only where int() does.
    return number == target and (kind == "float" or re.fullmatch(r"\s*[+-]?\d+\s*", found) is not None)


def _gold_letters(gold: Any, choices: Mapping[str, str]) -> list[str]:
    """The letters whose choice is the gold text, or the one that the gold answer is."""
    text = str(gold).strip()
    letters = [letter for letter, choice in choices.items() if choice.strip() == text]
    if not letters and text not in choices:
        raise ValueError(f"the gold answer {text!r} is none of the choices {list(choices.values())}")
    return letters or [text]


def _as_float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()
