"""Numbers and formulas at the end of a solution: GSM8K (arXiv 2110.14168) and MATH (arXiv 2103.03874)."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from trimode_vlm.eval.scored import Scored, golds, scored

NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?(?<!\d)\.\d+")
VERIFY_TIMEOUT_SEC = 5
VERIFY_MAX_CHARACTERS = 500
"""A longer answer is compared as text only: it is no formula that anybody would call equal."""


def gsm8k(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if the final number equals the gold one, which may be the whole solution that ends in `#### 18`.

    Default: the number in the last box, else behind the last `####`, else the last number, compared by value. `lmms`:
    lm-eval's flexible-extract, the last run of digits, points, commas and dollar signs, compared as text. `strict`: the
    paper's form `#### 18` (lm-eval's strict-match).
    """
    right = golds(gold)
    if style == "vlmevalkit":
        found = final_number(prediction)
        return scored(found is not None and any(found == final_number(answer) for answer in right), _shown(found))
    if style == "strict":
        match = re.search(r"#### (-?[\d.,]+)", prediction)
        text = match[1] if match else None
    else:
        runs = re.findall(r"-?[$\d.,]{2,}|-?\d+", prediction)
        text = runs[-1] if runs else None
    return scored(text is not None and any(_bare(text) == _bare(answer) for answer in right), text)


def math(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if the final formula is the gold one.

    Default: the last box, else what follows the last `answer is`, else the last formula between dollar signs; equal as
    normalised text or by math-verify. `lmms`: lm-eval's hendrycks_math, all from the first to the last dollar sign or
    else the whole text, normalised. `strict`: the last box, normalised (the paper's own rule).

    Raises:
        ValueError: math-verify is needed and not installed.
    """
    if style == "strict":
        found = last_boxed(prediction)
    elif style == "lmms":
        first, last = prediction.find("$"), prediction.rfind("$")
        found = prediction[first + 1 : last] if first < last else prediction
    else:
        found = stated(prediction) or _last_formula(prediction)
    if found is None:
        return scored(False, None)
    right = [last_boxed(answer) or answer for answer in golds(gold)]
    equal = any(normalise_formula(found) == normalise_formula(answer) for answer in right)
    if not equal and style == "vlmevalkit":
        equal = any(_verified(found, answer) for answer in right)
    return scored(equal, found.strip())


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds, braces matched; None if there is none or it never closes."""
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    if not starts:
        return None
    depth = 1
    for i in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[starts[-1] : i]
    return None


def stated(text: str) -> str | None:
    """What a text states as its answer: the last box, else the rest of the line behind the last `answer is`."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    matches = re.findall(r"(?i)\banswer\s*(?:is|:|=)\s*:?(.*)", text)
    return (matches[-1].strip().strip("*$. ") or None) if matches else None


def final_number(text: str) -> float | None:
    """The last number in the last box, else behind the last `####`, else anywhere."""
    boxed = last_boxed(text)
    numbers = NUMBER.findall(boxed if boxed is not None else text.rpartition("####")[2])
    return float(numbers[-1].replace(",", "")) if numbers else None


def normalise_formula(text: str) -> str:
    """Text that is equal for formulas that differ in spelling only, by the rules of the MATH paper's tool.

    Line ends, spacing, `\\left`, degrees, dollars, percent and units behind it go; `k =` goes; `\\frac12`, `1/2`, `0.5`
    and `\\dfrac{1}{2}` become `\\frac{1}{2}`; `\\sqrt2` becomes `\\sqrt{2}`; `.5` becomes `0.5`.
    """
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"[td]frac", "frac", text)
    for dropped in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(dropped, "")
    text = text.split("\\text{ ")[0].replace("\\%", "")
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _shown(number: float | None) -> str | None:
    return None if number is None else f"{number:g}" if abs(number) < 1e6 else str(number)


def _bare(text: str) -> str:
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", re.sub(r"[,$]", "", text))).lower()


def _last_formula(text: str) -> str | None:
    formulas = re.findall(r"\$([^$]+)\$", text)
    return formulas[-1] if formulas else None


def _verified(found: str, answer: str) -> bool:
    """Whether math-verify calls two formulas equal; its timeout needs the main thread, so others go without."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError('the metric math needs math-verify: pip install "trimode-vlm[eval]"') from error
    if max(len(found), len(answer)) > VERIFY_MAX_CHARACTERS:
        return False
    limit = VERIFY_TIMEOUT_SEC if threading.current_thread() is threading.main_thread() else None
    # Wrapped, because math-verify reads LaTeX only inside an environment.
    right, left = (parse(f"${text.strip().strip('$')}$", parsing_timeout=limit) for text in (answer, found))
    return bool(verify(right, left, timeout_seconds=limit))
