"""VQA accuracy with the EvalAI normaliser (Antol et al., arXiv 1505.00468; TextVQA, arXiv 1904.08920)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimode_vlm.eval.scored import Scored, golds, scored

ANSWERS_FOR_FULL_SCORE = 3

ARTICLES = ("a", "an", "the")
NUMBERS = {"none": "0"} | {
    word: str(value) for value, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'

# The words whose lost apostrophes the VQA evaluation puts back.
_CONTRACTED = """
    ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's isn't
    it'd it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've shouldn't
    somebody'll somebody's someone'd someone'll someone's something'd something'll that's there'd there're there's
    they'd they'll they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd where's
    where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've
    couldn't've hadn't've he'd've it'd've mightn't've she'd've shouldn't've somebody'd've someone'd've something'd've
    there'd've they'd've we'd've who'd've wouldn't've y'all'll y'all'd've you'd've 'ow's'at
""".split()


def _without_apostrophes(word: str) -> list[str]:
    """The spellings that lack apostrophes: the only one, or one of several."""
    places = [i for i, character in enumerate(word) if character == "'"]
    return [word[:place] + word[place + 1 :] for place in places]


CONTRACTIONS = {spelling: word for word in _CONTRACTED for spelling in _without_apostrophes(word)}
# As in the published table, where this one loses it.
CONTRACTIONS["somebody'd"] = "somebodyd"


def vqa_accuracy(
    prediction: str, gold: Any, info: Mapping[str, Any] | None = None, style: str = "vlmevalkit"
) -> Scored:
    """Mean over the answers of min(1, how many of the others equal the prediction / 3), all of them normalised.

    lmms-eval folds case, drops commas and question marks, and sets off 's before it looks at the rest of the
    punctuation (as the EvalAI server does); VLMEvalKit and `strict` do not (as the paper's own tool). VLMEvalKit keeps
    a full stop behind a digit, the others keep only those before one.

    Raises:
        ValueError: fewer than four accepted answers, with which no answer could score 1.
    """
    accepted = golds(gold)
    if len(accepted) <= ANSWERS_FOR_FULL_SCORE:
        raise ValueError(
            f"vqa_accuracy needs at least {ANSWERS_FOR_FULL_SCORE + 1} accepted answers, found {len(accepted)}: "
            "use exact_match or anls"
        )
    answer, *others = (normalise_answer(text, style) for text in [prediction, *accepted])
    matches = others.count(answer)
    rest = min(1.0, matches / ANSWERS_FOR_FULL_SCORE)
    own = min(1.0, (matches - 1) / ANSWERS_FOR_FULL_SCORE)
    # An answer that matches is not compared with itself.
    return scored((matches * own + (len(others) - matches) * rest) / len(others), answer)


def normalise_answer(text: str, style: str) -> str:
    """Lower case, no articles, digits for number words, contractions with apostrophes, punctuation out."""
    if style == "lmms":
        text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    text = without_punctuation(text.replace("\n", " ").replace("\t", " ").strip(), style)
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def without_punctuation(text: str, style: str) -> str:
    """Marks beside a space go, others become one; all go where a comma stands between digits; so do full stops."""
    separated = re.search(r"\d,\d", text) is not None
    kept = text
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        kept = kept.replace(mark, "" if beside_space or separated else " ")
    return re.sub(r"(?<!\d)\.(?!\d)" if style == "vlmevalkit" else r"\.(?!\d)", "", kept)
