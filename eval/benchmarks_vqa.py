"""Benchmarks that ask for a word, a number or yes and no."""

from __future__ import annotations

from typing import Any

from trimode_vlm.eval.declarations import (
    SHORT_SUFFIX,
    Answer,
    Benchmark,
    choices_of,
    text_or_none,
)
from trimode_vlm.eval.sources import Row, Source
from trimode_vlm.eval.tsv_rows import as_list

# OCRBench scores this part by a rule of its own; a TSV names it by its category alone.
HANDWRITTEN_FORMULAS = ("Handwritten Mathematical Expression Recognition", "HME100k")


def question(row: Row) -> str:
    """The question as it is: it says how to answer."""
    return str(row["question"])


def short_prompt(row: Row) -> str:
    """The question and the request for a word or phrase."""
    return f"{row['question']}{SHORT_SUFFIX}"


def chartqa_prompt(row: Row) -> str:
    """ChartQA's own request for a word."""
    return f"{row['question']}\nAnswer the question with a single word."


def chartqa_answer(row: Row) -> Answer:
    """One answer; the two halves of the test set are `human` and `augmented`."""
    half = text_or_none(row.get("type")) or text_or_none(row.get("split")) or ""
    return Answer(gold=str(row["answer"]), category=half.replace("test", "").strip("_") or None)


def any_of(row: Row) -> Answer:
    """The accepted answers."""
    return Answer(gold=[str(answer) for answer in as_list(row["answers"])])


def ocrbench_answer(row: Row) -> Answer:
    """Accepted answers by kind of question; the data set that the picture is from decides how they are compared."""
    category = text_or_none(row.get("question_type")) or text_or_none(row.get("category"))
    name, dataset = HANDWRITTEN_FORMULAS
    info = {"dataset": str(row.get("dataset") or (dataset if category == name else ""))}
    return Answer(gold=[str(answer) for answer in as_list(row["answer"])], category=category, info=info)


def mathvista_prompt(row: Row) -> str:
    """The data's own query: a hint how to answer, the question, its choices."""
    return str(row.get("query") or row["question"])


def mathvista_answer(row: Row) -> Answer:
    """The text of the right choice, or a number of `precision` digits, or a list."""
    metadata = row.get("metadata") or {}
    info: dict[str, Any] = {name: row[name] for name in ("question_type", "answer_type") if row.get(name)}
    info["choices"] = choices_of(row, "choices") if row.get("choices") else []
    if text_or_none(row.get("precision")):
        info["precision"] = int(float(row["precision"]))
    return Answer(gold=str(row["answer"]), category=text_or_none(metadata.get("task") or row.get("task")), info=info)


def yes_no(row: Row) -> Answer:
    """Yes or no, by category."""
    return Answer(gold=str(row["answer"]), category=text_or_none(row.get("category")))


def mme_answer(row: Row) -> Answer:
    """Yes or no; acc+ asks for both questions about one picture, which share its id."""
    image_id = row.get("question_id") or row.get("image_path") or row.get("index")
    return Answer(gold=str(row["answer"]), category=text_or_none(row["category"]), info={"image_id": str(image_id)})


BENCHMARKS = (
    Benchmark(
        name="chartqa",
        source=Source(path="lmms-lab/ChartQA"),
        columns=("question", "answer", "image"),
        prompt=chartqa_prompt,
        answer=chartqa_answer,
        metric="relaxed_accuracy",
    ),
    Benchmark(
        name="docvqa",
        source=Source(path="lmms-lab/DocVQA", config="DocVQA", split="validation"),
        columns=("question", "image", "answers"),
        prompt=short_prompt,
        answer=any_of,
        metric="anls",
    ),
    Benchmark(
        name="infovqa",
        source=Source(path="lmms-lab/DocVQA", config="InfographicVQA", split="validation"),
        columns=("question", "image", "answers"),
        prompt=short_prompt,
        answer=any_of,
        metric="anls",
    ),
    Benchmark(
        name="mathvista",
        source=Source(path="AI4Math/MathVista", split="testmini"),
        columns=("decoded_image", "answer", "question_type", "answer_type"),
        images=lambda row: [row["decoded_image"]],
        prompt=mathvista_prompt,
        answer=mathvista_answer,
        metric="mathvista",
        max_new_tokens=1024,
    ),
    Benchmark(
        name="ocrbench",
        source=Source(path="echo840/OCRBench"),
        columns=("question", "answer", "image"),
        prompt=question,
        answer=ocrbench_answer,
        metric="ocrbench",
        max_new_tokens=256,
    ),
    Benchmark(
        name="textvqa",
        source=Source(path="lmms-lab/textvqa", split="validation"),
        columns=("image", "question", "answers"),
        prompt=short_prompt,
        answer=any_of,
        metric="vqa_accuracy",
    ),
    Benchmark(
        name="pope",
        source=Source(path="lmms-lab/POPE"),
        columns=("question", "answer", "image"),
        prompt=short_prompt,
        answer=yes_no,
        metric="yes_no",
    ),
    Benchmark(
        name="mme",
        source=Source(path="lmms-lab/MME"),
        columns=("image", "question", "answer", "category"),
        prompt=question,
        answer=mme_answer,
        metric="mme",
    ),
)
