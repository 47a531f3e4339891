"""Benchmarks that ask for the letter of an option."""

from __future__ import annotations

import re
from typing import Any

from trimode_vlm.eval.declarations import (
    CHOICE_SUFFIX,
    LONG_ANSWER_TOKENS,
    SHORT_SUFFIX,
    Answer,
    Benchmark,
    choice_answer,
    choice_prompt,
    choices_of,
    listed_choices,
    text_or_none,
)
from trimode_vlm.eval.sources import Row, Source
from trimode_vlm.eval.tsv_rows import LETTERS, as_list

MAX_IMAGES = 7
# MMMU-Pro's own wording for the setting where the question stands in the picture.
STEP_BY_STEP = (
    "Write out the multiple-choice question in the image and then solve it. The last line of your response should be "
    "of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of options. Think step by step "
    "before answering."
)


def ai2d_answer(row: Row) -> Answer:
    """The hub writes the index as text."""
    answer = str(row["answer"])
    return choice_answer(row | {"answer": int(answer) if answer.isdigit() else answer}, choices_of(row))


def subject_of(row: Row) -> str | None:
    """The subject, which a TSV calls its category."""
    return text_or_none(row.get("subject")) or text_or_none(row.get("category"))


def numbered_images(row: Row) -> list[Any]:
    """image_1 to image_7, None where there is none."""
    return [row.get(f"image_{n}") for n in range(1, MAX_IMAGES + 1)]


def mmmu_prompt(row: Row) -> str:
    """Lettered options and the suffix of multiple choice; an open question asks for a word or phrase."""
    return choice_prompt(row) if _has_options(row) else f"{row['question']}{SHORT_SUFFIX}"


def mmmu_answer(row: Row) -> Answer:
    """A letter, or the accepted answers of an open question; the subject stands in the id: validation_Accounting_1."""
    subject = subject_of(row) or re.sub(r"^(dev|validation|test)_|_\d+$", "", str(row.get("id", ""))) or None
    if _has_options(row):
        return choice_answer(row, choices_of(row), subject, question_type="multiple-choice")
    gold = [str(answer) for answer in as_list(row["answer"])]
    return Answer(gold=gold[0] if len(gold) == 1 else gold, category=subject, info={"question_type": "open"})


def _has_options(row: Row) -> bool:
    """Open questions have none, or an empty list of them."""
    return row.get("question_type") != "open" and bool(row.get("options")) and bool(choices_of(row))


def realworldqa_prompt(row: Row) -> str:
    """The question as it is, which says how to answer; a TSV has its options in columns instead."""
    return choice_prompt(row) if row.get("options") else str(row["question"])


def realworldqa_answer(row: Row) -> Answer:
    """A letter where the question lists options (lines `A. ...`), else a word or number."""
    choices = choices_of(row) if row.get("options") else listed_choices(row["question"])
    if choices and str(row["answer"]).strip() in LETTERS:
        return choice_answer(row, choices)
    return Answer(gold=str(row["answer"]), info={"choices": choices} if choices else {})


def mmstar_prompt(row: Row) -> str:
    """The question, which lists its options; a TSV has them in columns instead."""
    return choice_prompt(row) if row.get("options") else f"{row['question']}{CHOICE_SUFFIX}"


def mmstar_answer(row: Row) -> Answer:
    """A letter; the options stand in the question's text."""
    choices = choices_of(row) if row.get("options") else listed_choices(row["question"])
    if choices:
        return choice_answer(row, choices, text_or_none(row["category"]))
    return Answer(gold=str(row["answer"]).strip(), category=text_or_none(row["category"]))


def scienceqa_prompt(row: Row) -> str:
    """The hint as context, the question, its options."""
    hint = text_or_none(row.get("hint"))
    return f"{f'Context: {hint}{chr(10)}' if hint else ''}{choice_prompt(row, 'choices')}"


MMMU_COLUMNS = ("question", "answer")

BENCHMARKS = (
    Benchmark(
        name="ai2d",
        source=Source(path="lmms-lab/ai2d"),
        columns=("question", "options", "answer", "image"),
        prompt=choice_prompt,
        answer=ai2d_answer,
        metric="multiple_choice",
    ),
    Benchmark(
        name="mmmu",
        source=Source(path="lmms-lab/MMMU", split="validation"),
        columns=MMMU_COLUMNS,
        images=numbered_images,
        placeholders=True,
        prompt=mmmu_prompt,
        answer=mmmu_answer,
        metric="mmmu",
        max_new_tokens=512,
    ),
    Benchmark(
        name="mmmu_pro",
        source=Source(path="MMMU/MMMU_Pro", config="standard (10 options)"),
        columns=(*MMMU_COLUMNS, "options"),
        images=numbered_images,
        placeholders=True,
        prompt=mmmu_prompt,
        answer=mmmu_answer,
        metric="multiple_choice",
        max_new_tokens=512,
    ),
    Benchmark(
        name="mmmu_pro_vision",
        source=Source(path="MMMU/MMMU_Pro", config="vision"),
        columns=("image", "options", "answer"),
        prompt=lambda row: STEP_BY_STEP,
        answer=lambda row: choice_answer(row, choices_of(row), subject_of(row)),
        metric="multiple_choice_cot",
        max_new_tokens=LONG_ANSWER_TOKENS,
    ),
    Benchmark(
        name="realworldqa",
        source=Source(path="lmms-lab/RealWorldQA"),
        columns=("image", "question", "answer"),
        prompt=realworldqa_prompt,
        answer=realworldqa_answer,
        metric="realworldqa",
    ),
    Benchmark(
        name="mmstar",
        source=Source(path="Lin-Chen/MMStar", split="val"),
        columns=("question", "image", "answer", "category"),
        prompt=mmstar_prompt,
        answer=mmstar_answer,
        metric="multiple_choice",
        macro=True,
    ),
    Benchmark(
        name="scienceqa",
        source=Source(path="lmms-lab/ScienceQA", config="ScienceQA-IMG"),
        columns=("image", "question", "choices", "answer"),
        prompt=scienceqa_prompt,
        answer=lambda row: choice_answer(row, choices_of(row, "choices"), subject_of(row)),
        metric="multiple_choice",
    ),
)
