"""Multiple choice and yes/no: which letter or word an answer names."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from trimode_vlm.eval.metric_vqa import without_punctuation
from trimode_vlm.eval.scored import Scored, scored

LETTERS = string.ascii_uppercase
LETTERS_WITHOUT_CHOICES = "ABCDEFGH"
"""Taken for the valid letters where a sample lists no choices (lmms-eval's default)."""

LONG_ANSWER_WORDS = 5
"""A longer answer may name its choice by the text."""

REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
"""Sentences that VLMEvalKit takes for a refusal, wherever they stand."""


def multiple_choice(
    prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit"
) -> Scored:
    """1 if the letter read out of the answer is the gold letter; info `choices` holds the texts in letter order.

    `vlmevalkit`: its exact matching (`letter_vlmevalkit`). `lmms`: the extractor that lmms-eval shares between tasks
    (`letter_lmms`); its AI2D and ScienceQA read less, only `B` or `B. ...`. `strict`: the letter or the choice alone.
    """
    letter = read_letter(prediction, choices_of(info), style)
    return scored(letter == _gold_letter(gold), letter)


def multiple_choice_cot(
    prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit"
) -> Scored:
    """1 if the answer's last line is `Answer: X` with the gold letter (MMMU-Pro, arXiv 2409.02813).

    `vlmevalkit`: what follows `Answer:` where exactly one line starts so, else the whole text, read as
    `multiple_choice` does; the kit also reads A out of `Answer: none`, which is not copied. `lmms`: MMMU's own rule on
    the whole text (its vision task compares the whole text with the letter, so that no reasoning can be right).
    `strict`: the last line that starts with `Answer:`, nothing else.
    """
    choices = choices_of(info)
    stated = [match[1] for line in prediction.splitlines() if (match := _ANSWER_LINE.match(line))]
    if style == "lmms":
        letter = letter_mmmu(prediction, choices)
    elif style == "strict":
        letter = letter_strict(stated[-1], choices) if stated else None
    else:
        exact = [
            line.strip()[len("Answer:") :] for line in prediction.split("\n") if line.strip().startswith("Answer:")
        ]
        letter = letter_vlmevalkit(exact[0] if len(exact) == 1 else prediction, choices)
    return scored(letter == _gold_letter(gold), letter)


_ANSWER_LINE = re.compile(r"[\s*_#>]*(?:final\s+)?answer\s*[*_]*\s*:(.*)", re.IGNORECASE)


def realworldqa(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """The letter where the gold answer is one of A to D, else equal text: case, outer spaces and a full stop aside."""
    if str(gold).strip().upper() in tuple("ABCD"):
        info = {"choices": [""] * 4} | dict(info or {})
        return multiple_choice(prediction, gold, info, style)
    answer = prediction.lower().strip().rstrip(".")
    return scored(answer == str(gold).strip().lower(), answer)


def yes_no(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if the answer says yes or no as the gold answer does (POPE, arXiv 2305.10355).

    `vlmevalkit`: whichever of the two words occurs, if only one does. `lmms`: nothing but the word, so `Yes.` is wrong.
    `strict`: the first word. (POPE's own script takes all that is not no for yes, which is a guess.)
    """
    if style == "lmms":
        word = prediction.lower().strip()
        said = word if word in ("yes", "no") else None
    else:
        said = _yes_or_no(prediction, style)
    return scored(said == _gold_word(gold), said)


def mme(prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit") -> Scored:
    """1 if the answer says yes or no as the gold answer does (MME, arXiv 2306.13394); pairs are for the aggregate.

    `lmms`: MME's own tool: yes or no in the first four characters, or `y` or `n` alone, so `Not sure` is no.
    """
    said = _first_four(prediction) if style == "lmms" else _yes_or_no(prediction, style)
    return scored(said == _gold_word(gold), said)


def choices_of(info: Mapping[str, Any] | None) -> dict[str, str]:
    """Letter -> text of the choice; texts are empty where the sample lists none."""
    choices: Sequence[Any] | None = (info or {}).get("choices")
    if not choices:
        return dict.fromkeys(LETTERS_WITHOUT_CHOICES, "")
    return dict(zip(LETTERS, map(str, choices), strict=False))


def read_letter(text: str, choices: Mapping[str, str], style: str) -> str | None:
    """The letter that a style reads out of `text`; None if it reads none."""
    return {"vlmevalkit": letter_vlmevalkit, "lmms": letter_lmms, "strict": letter_strict}[style](text, choices)


def letter_vlmevalkit(text: str, choices: Mapping[str, str]) -> str | None:
    """VLMEvalKit's exact matching, and what a text states where the kit would ask its judge.

    A letter counts if it alone of the letters stands as a word, among the last four; else a choice counts if its text
    alone occurs, in an answer at most twice as long as all choices. Beyond the kit: else the last `answer is X`.
    """
    if any(refusal in text for refusal in REFUSALS):
        return None
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", text).split()
    named = [letter for letter in choices if letter in words]
    if len(named) == 1 and words.index(named[0]) > len(words) - 5:
        return named[0]
    if not named and "Z" in words:
        return None
    texts = {letter: choice.lower() for letter, choice in choices.items() if choice}
    if len(text.lower()) <= 2 * sum(map(len, texts.values())):
        held = [letter for letter, choice in texts.items() if choice in text.lower()]
        if len(held) == 1:
            return held[0]
    stated = [letter for letter in _STATED.findall(text) if letter in choices]
    return stated[-1] if stated else None


_STATED = re.compile(r"\b(?i:answer\s*(?:is|:))[\s*_(\[{$]*([A-Z])\b(?!')")

_FORMS = (("({})", 6), ("{}.", 5), ("{}:", 4), ("{})", 3), ("{} ", 2))
_AT_START, _AT_END, _BEHIND_PHRASE, _ANYWHERE = 10, 9, 7, 0
_PHRASES = (
    *(
        f"{article}{what} is"
        for article in ("the ", "")
        for what in "answer|correct answer|best answer|correct option|best option|choice|correct choice".split("|")
    ),
    *"i choose|i select|i pick|my answer is|my choice is".split("|"),
    *"옵션|정답은|답은|답:|答案是|答案为|选|答えは".split("|"),
)


def letter_lmms(text: str, choices: Mapping[str, str]) -> str | None:
    """The extractor that lmms-eval's tasks share: the best form in which a letter occurs, the last of its kind.

    From best to worst: first in the text, last in the text, behind a phrase such as `the answer is`, (A), A., A:, A),
    A and a space; a letter anywhere only where nothing else is found.
    """
    bare = text.strip()
    for mark in ",.!?;:'\"":
        bare = bare.strip(mark)
    padded, bare = f" {bare} ", bare.strip()
    found: list[tuple[int, int, str]] = []
    for form, rank in _FORMS:
        found += [(rank, padded.rfind(form.format(letter)), letter) for letter in choices]
    lowered = padded.lower()
    for phrase in _PHRASES:
        if phrase in lowered:
            behind = lowered.index(phrase) + len(phrase)
            found += [(_BEHIND_PHRASE, padded.find(letter, behind), letter) for letter in choices]
    for letter in choices:
        if bare.startswith(letter) and not bare[1:2].isalpha():
            found.append((_AT_START, 0, letter))
        if bare.endswith(letter) and not bare[-2:-1].isalpha():
            found.append((_AT_END, len(padded), letter))
    found = [entry for entry in found if entry[1] >= 0]
    if not found:
        found = [(_ANYWHERE, padded.rfind(letter), letter) for letter in choices if letter in padded]
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def letter_mmmu(text: str, choices: Mapping[str, str]) -> str | None:
    """MMMU's own rule: the last letter of the best form, (A), A and a space, A.; else, in a long text, a choice."""
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    for form, place in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        named = [letter for letter in choices if form.format(letter) in text]
        if named:
            # Found by one form and placed by another, as in the tools; the first letter wins where none has a place.
            return max(named, key=lambda letter: text.rfind(place.format(letter)))
    if len(text.split()) > LONG_ANSWER_WORDS:
        lowered = text.lower()
        named = [letter for letter, choice in choices.items() if choice and choice.lower() in lowered]
        if named:
            return max(named, key=lambda letter: lowered.rfind(choices[letter].lower()))
    return None


def letter_strict(text: str, choices: Mapping[str, str]) -> str | None:
    """The letter, bare or as `(B)`, `B.`, `B:`, with or without its choice behind it; or the choice's text alone."""
    bare = text.strip().strip("*_ ").rstrip(".").strip()
    for letter, choice in choices.items():
        if choice and bare.casefold() == choice.strip().rstrip(".").casefold():
            return letter
    match = re.fullmatch(r"[(\[]?([A-Za-z])[)\]]?(?:[.:)]?\s*(.*))?", bare, re.DOTALL)
    if match is None or match[1].upper() not in choices:
        return None
    letter, rest = match[1].upper(), match[2] or ""
    return letter if not rest or rest.casefold() == choices[letter].strip().rstrip(".").casefold() else None


def _gold_letter(gold: Any) -> str:
    letter = str(gold).strip().upper()
    if len(letter) != 1 or letter not in LETTERS:
        raise ValueError(f"the gold answer of multiple choice is a letter, found {gold!r}")
    return letter


def _gold_word(gold: Any) -> str:
    word = str(gold).lower().strip().rstrip(".")
    if word not in ("yes", "no"):
        raise ValueError(f"the gold answer is yes or no, found {gold!r}")
    return word


def _yes_or_no(text: str, style: str) -> str | None:
    if style == "strict":
        words = re.findall(r"\w+", text.lower())[:1]
    else:
        words = without_punctuation(text.lower(), style).split()
    said = [word for word in ("yes", "no") if word in words]
    return said[0] if len(said) == 1 else None


def _first_four(text: str) -> str | None:
    bare = text.lower().strip().replace(".", "")
    if bare in ("y", "n"):
        return {"y": "yes", "n": "no"}[bare]
    return next((word for word in ("yes", "no") if word in bare[:4] and len(bare) > 1), None)
