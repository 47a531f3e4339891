"""Answers compared as text: exact match, containment, token F1, ANLS, relaxed accuracy, OCRBench."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trimode_vlm.eval.scored import Scored, golds, scored

TOLERANCE = 0.05
"""Relaxed accuracy: share of the gold number that a number may be off by (ChartQA, arXiv 2203.10244, section 5.1)."""

ANLS_THRESHOLD = 0.5

YEARS = range(1900, 2101)
"""Whole numbers that `strict` relaxed accuracy takes for years: 5 % of one would be a century."""

HANDWRITTEN_MATH = ("HME100k", "Handwritten Mathematical Expression Recognition")
"""OCRBench's data set of formulas, and its question type."""


def normalise(text: str) -> str:
    """Text with LF line ends, without spaces at line ends and blank lines around it; all else stays, case included."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def exact_match(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if the normalised text equals an accepted answer, in every style; an answer cut by its budget counts."""
    answer = normalise(prediction)
    return scored(any(answer == normalise(accepted) for accepted in golds(gold)), answer)


def contains(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if an accepted answer occurs in the text, case and runs of spaces aside, in every style."""
    answer = _folded(prediction)
    return scored(any(_folded(accepted) in answer for accepted in golds(gold)), answer)


def f1(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """Harmonic mean of token precision and recall against the best accepted answer, in every style.

    SQuAD's (arXiv 1606.05250): tokens of lower-cased text without punctuation and articles; two empty texts agree.
    """
    tokens = _squad_tokens(prediction)
    return scored(max(_token_f1(tokens, _squad_tokens(accepted)) for accepted in golds(gold)), " ".join(tokens))


def anls(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """Average normalised Levenshtein similarity to the closest accepted answer (arXiv 1905.13648, section 5.1).

    Both kits fold case and runs of spaces, divide by the lengths before folding, and keep a similarity of exactly 0.5.
    `strict` keeps spaces inside the text, divides by the lengths that it compares, and drops a distance of exactly 0.5.
    """
    accepted = golds(gold)
    if not prediction.strip() and all(answer.strip() for answer in accepted):
        # The kits' lengths would give spaces a share of a short answer.
        return Scored(0.0, None)
    distance = _closest(prediction, accepted, strict=style == "strict")
    dropped = distance >= ANLS_THRESHOLD if style == "strict" else 1 - distance < ANLS_THRESHOLD
    return scored(0.0 if dropped else 1 - distance, prediction.strip())


def relaxed_accuracy(
    prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit"
) -> Scored:
    """1 for a number within 5 % of the gold number or else for equal text, case aside (ChartQA, arXiv 2203.10244).

    The kits read what Python's float() reads, percent signs as hundredths, and compare with a gold zero as text;
    VLMEvalKit strips the answer first, lmms-eval does not. `strict` also reads thousands separators, compares zeros as
    numbers, and wants years exactly.
    """
    answer = prediction if style == "lmms" else prediction.strip()
    rule = _relaxed_strict if style == "strict" else _relaxed
    return scored(any(rule(answer, accepted) for accepted in golds(gold)), answer.strip())


def ocrbench(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if an accepted answer occurs in the text (OCRBench, arXiv 2305.07895): case folded, line ends as spaces.

    Handwritten formulas (info `dataset` HME100k, or `question_type`) compare with case and without spaces. lmms-eval
    also folds full-width ASCII.
    """
    info = info or {}
    formula = info.get("dataset") == HANDWRITTEN_MATH[0] or info.get("question_type") == HANDWRITTEN_MATH[1]

    def fold(text: str) -> str:
        text = text.strip().replace("\n", " ")
        if formula:
            return text.replace(" ", "")
        return (text.translate(FULL_WIDTH) if style == "lmms" else text).lower().strip()

    answer = fold(prediction)
    return scored(any(fold(accepted) in answer for accepted in golds(gold)), answer)


FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _squad_tokens(text: str) -> list[str]:
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _token_f1(answer: list[str], accepted: list[str]) -> float:
    if not answer or not accepted:
        return float(answer == accepted)
    common = (Counter(answer) & Counter(accepted)).total()
    return 2 * common / (len(answer) + len(accepted))


def _closest(prediction: str, accepted: list[str], strict: bool) -> float:
    """Smallest normalised edit distance, in [0, 1]."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise ValueError('the metric anls needs rapidfuzz: pip install "trimode-vlm[eval]"') from error

    def distance(answer: str) -> float:
        left, right = (prediction.strip().lower(), answer.strip().lower()) if strict else (prediction, answer)
        # Of upper-cased text, in which a sharp s counts twice, because the kits measure that.
        longest = max(len(left), len(right)) if strict else max(len(left.upper()), len(right.upper()))
        if not strict:
            left, right = (" ".join(text.lower().split()) for text in (left, right))
        return Levenshtein.distance(left, right) / longest if longest else 0.0

    return min(distance(answer) for answer in accepted)


def _relaxed(answer: str, accepted: str) -> bool:
    number, target = _float(answer), _float(accepted)
    if number is not None and target:
        return abs(number - target) / abs(target) <= TOLERANCE
    return answer.lower() == accepted.lower()


def _float(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def _relaxed_strict(answer: str, accepted: str) -> bool:
    number, target = _plain_number(answer), _plain_number(accepted)
    if number is None or target is None:
        return answer.casefold() == accepted.strip().casefold()
    if target in YEARS and re.fullmatch(r"\d{4}", accepted.strip()):
        return number == target
    return abs(number - target) <= TOLERANCE * abs(target)


def _plain_number(text: str) -> float | None:
    """The value of a decimal number, thousands separators and a percent sign allowed; None for anything else."""
    match = re.fullmatch(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?)\s*(%?)", text.strip())
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    return float(match[1].replace(",", "")) / (100 if match[2] else 1)
