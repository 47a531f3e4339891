"""Benchmarks of text alone that need no other harness; lm-eval's own run through its adapter."""

from __future__ import annotations

from trimode_vlm.eval.declarations import Answer, Benchmark, no_image, text_or_none
from trimode_vlm.eval.sources import Row, Source

BOXED_SUFFIX = "\nReason step by step, and put the final answer within \\boxed{}."


def gsm8k_answer(row: Row) -> Answer:
    """The number behind `####` at the end of the worked solution."""
    return Answer(gold=str(row["answer"]).rpartition("####")[2].strip().replace(",", ""))


BENCHMARKS = (
    Benchmark(
        name="gsm8k",
        source=Source(path="gsm8k", config="main"),
        columns=("question", "answer"),
        images=no_image,
        prompt=lambda row: f"{row['question']}{BOXED_SUFFIX}",
        answer=gsm8k_answer,
        metric="gsm8k",
        max_new_tokens=1024,
    ),
    Benchmark(
        name="math500",
        source=Source(path="HuggingFaceH4/MATH-500"),
        columns=("problem", "answer"),
        images=no_image,
        prompt=lambda row: f"{row['problem']}{BOXED_SUFFIX}",
        answer=lambda row: Answer(gold=str(row["answer"]), category=text_or_none(row.get("subject"))),
        metric="math",
        max_new_tokens=2048,
    ),
)
