"""Choices, yes or no, MMMU and MathVista beside the public kits' own functions, over generated answers.

Equal, or different for the reason named in the test; each test skips where its kit is not installed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kits
import pytest
from kits import CASES, CHOICES, FILLERS, HELPERS, answers, compare, draw, matching

from trimode_vlm.eval.metric_choice import choices_of, letter_lmms, letter_mmmu, letter_vlmevalkit
from trimode_vlm.eval.metric_mathvista import extract
from trimode_vlm.eval.metrics import score


def letters(seed: int) -> Iterator[tuple[str]]:
    return ((text,) for text in answers(seed))


def test_multiple_choice_lmms() -> None:
    kit = kits.imported("lmms_eval.tasks._task_utils.mcq_extract").extract_mcq_answer
    choices = choices_of({"choices": CHOICES})
    assert (
        compare(lambda text: letter_lmms(text, choices) or "", lambda text: kit(text, list("ABCD")), letters(11)) == []
    )


def test_multiple_choice_lmms_tasks_read_less() -> None:
    """lmms-eval's AI2D and ScienceQA know `B` and `B. ...` only: what they read, we read; not the other way."""
    ai2d = kits.imported("lmms_eval.tasks.ai2d.utils").MultiChoiceRegexFilter()
    scienceqa = kits.imported("lmms_eval.tasks.scienceqa.utils").sqa_process_results
    more = Counter()
    for (text,) in letters(12):
        ours = score("multiple_choice", text, "B", {"choices": CHOICES}, "lmms").score
        for name, theirs in (
            ("ai2d", float(ai2d.apply([[text]], [{}])[0] == "B")),
            ("scienceqa", scienceqa({"choices": CHOICES, "answer": 1}, [text])["exact_match"]),
        ):
            more[name] += ours > theirs
            # ScienceQA folds the case of a letter that stands alone.
            assert ours >= theirs or text.strip() == "b", text
    assert min(more.values()) > 10


def test_multiple_choice_vlmevalkit() -> None:
    """Different only where the kit reads nothing and would ask its judge: then `answer is X` counts here."""
    kit = matching()
    choices = choices_of({"choices": CHOICES})

    def theirs(text: str) -> str | None:
        letter = kit.can_infer(text, dict(choices))
        return letter if letter in choices else None

    different = compare(lambda text: letter_vlmevalkit(text, choices), theirs, letters(13))
    assert all(its is None and f"{mine}" in text and "nswer" in text for (text,), mine, its in different), different
    assert len(different) < CASES / 10


def test_multiple_choice_with_reasoning_vlmevalkit() -> None:
    """The kit counts the A of `Answer:` itself, and so reads A where the line names nothing; that is not copied."""
    cot = kits.vlmevalkit("dataset/image_mcq.py", "cot_postproc", **HELPERS).cot_postproc
    choices = choices_of({"choices": CHOICES})
    lines = (
        "Answer: {}",
        "Answer: {}.",
        "Answer: ({})",
        "Answer:{}",
        "I say A.\nAnswer: {}\n",
        "Answer: {}\nAnswer: B",
        "{}",
    )

    def cases() -> Iterator[tuple[str]]:
        generator = random.Random(14)
        for text in answers(15):
            yield (f"{text}\n" * generator.randint(0, 1) + generator.choice(lines).format(generator.choice(FILLERS)),)

    def ours(text: str) -> str | None:
        return score("multiple_choice_cot", text, "A", {"choices": CHOICES}).parsed

    different = compare(ours, lambda text: letter_vlmevalkit(cot(None, text), choices), cases())
    assert all(its == "A" and mine != "A" for _, mine, its in different), different


def test_mmmu_choices() -> None:
    """Different only where the kit draws a letter at random, which it would say twice in a row."""
    kit = kits.imported("lmms_eval.tasks._task_utils.mmmu_mcq_utils").parse_mmmu_multi_choice_response
    choices = choices_of({"choices": CHOICES})
    drawn = []

    def theirs(text: str) -> str | None:
        seen = {kit(text, list("ABCD"), choices) for _ in range(12)}
        drawn.append(len(seen) > 1)
        return None if len(seen) > 1 else seen.pop()

    assert compare(lambda text: letter_mmmu(text, choices), theirs, letters(16)) == []
    assert 10 < sum(drawn) < CASES * 0.8


KEYS = ("could be", "so", "is", "thus", "therefore", "final", "answer", "result", "=")


def test_mmmu_open() -> None:
    kit = kits.imported("lmms_eval.tasks.mmmu.utils")
    golds = draw(17, ("8", "1234", "1,234", "-3", "blue bus", "a", "0.12", ["8.0", "eight"], "350", "x"))

    def cases() -> Iterator[tuple[str, Any]]:
        more = (
            *("The result is 8. So it is 9", "the value = 1,234.00\nthus 8", "it is :", "x = -3", "final answer 8.004"),
            *(f"we see {key} {end}" for key in KEYS for end in ("8 here", "blue bus", "8.004")),
        )
        yield from zip(answers(18, more * 3), golds, strict=False)

    def theirs(text: str, gold: Any) -> bool:
        doc = {"id": "validation_Art_1", "question_type": "open", "answer": gold, "options": "[]"}
        return kit.mmmu_aggregate_results([kit.mmmu_process_results(doc, [text])["mmmu_acc"]]) == 1

    assert (
        compare(lambda p, g: score("mmmu", p, g, {"question_type": "open"}, "lmms").score == 1, theirs, cases()) == []
    )


def test_realworldqa() -> None:
    kit = kits.imported("lmms_eval.tasks.realworldqa.utils").realworldqa_process_results
    golds = draw(19, (*"ABCD", "8", "Blue bus", "yes", "no"))

    def theirs(text: str, gold: str) -> bool:
        return bool(kit({"answer": gold}, [text])["exact_match"])

    cases = zip(answers(20, ("8", "8.", "blue bus", "Yes.") * 3), golds, strict=False)
    assert compare(lambda p, g: score("realworldqa", p, g, style="lmms").score == 1, theirs, cases) == []


@pytest.mark.parametrize(("metric", "style"), [("yes_no", "lmms"), ("mme", "lmms"), ("yes_no", "vlmevalkit")])
def test_yes_no(metric: str, style: str) -> None:
    if style == "vlmevalkit":
        punctuation = kits.vlmevalkit("smp/misc.py", "process_punctuation").process_punctuation
        kit = kits.vlmevalkit(
            "dataset/utils/yorn.py", "YOrN_Extraction", process_punctuation=punctuation
        ).YOrN_Extraction

        def theirs(text: str, gold: str) -> bool:
            return kit(text) == gold
    elif metric == "mme":
        process = kits.imported("lmms_eval.tasks.mme.utils").mme_process_results

        def theirs(text: str, gold: str) -> bool:
            doc = {"answer": gold, "category": "count", "question_id": 0}
            return process(doc, [text])["mme_perception_score"]["score"] == 1
    else:
        pope = kits.imported("lmms_eval.tasks.pope.utils").pope_process_results

        def theirs(text: str, gold: str) -> bool:
            return pope({"answer": gold, "question_id": 0}, [text])["pope_accuracy"]["score"] == 1

    words = ("Yes", "No", "yes.", "no,", "Nothing", "yesterday", "y", "N.", "y.e.s", "yes/no", "not yes", "No no")
    golds, bare = draw(22, ("Yes", "No")), random.Random(22)
    texts = (bare.choice([text, *words]) for text in answers(21, words * 12))
    cases = zip(texts, golds, strict=False)
    assert compare(lambda p, g: score(metric, p, g, style=style).score == 1, theirs, cases) == []


MATHVISTA_INFO = (
    {"question_type": "free_form", "answer_type": "integer", "precision": None, "choices": None, "gold": "14"},
    {"question_type": "free_form", "answer_type": "float", "precision": 1.0, "choices": None, "gold": "1.5"},
    {"question_type": "free_form", "answer_type": "list", "precision": None, "choices": None, "gold": "[1, 2]"},
    {"question_type": "multi_choice", "answer_type": "text", "precision": None, "choices": CHOICES, "gold": "blue bus"},
)
NUMBERS = (
    "14",
    "14.0",
    "14.4",
    "14.7",
    "1.5",
    "1.45",
    "1.55",
    " 14 ",
    "1,4",
    "[1, 2]",
    "[1,2]",
    "15",
    "0",
    "blue bus",
    "(B)",
    "B",
)


def mathvista_cases(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    generator = random.Random(seed)
    for text in answers(seed + 1, NUMBERS * 4):
        yield (generator.choice(NUMBERS) if generator.random() < 0.4 else text), generator.choice(MATHVISTA_INFO)


def test_mathvista_lmms() -> None:
    """Our extraction stands in for the kit's judge. Where nothing is read, the kit guesses the nearest choice."""
    evaluator = kits.imported("lmms_eval.tasks.mathvista.mathvista_evals").MathVistaEvaluator()

    def theirs(text: str, info: dict[str, Any]) -> bool:
        read = extract(text, info, "lmms")
        evaluator.get_chat_response = lambda *_, **__: read or ""
        problem = {"query": ""} | info | {"choices": info["choices"] or []}
        found = evaluator.extract_answer(text, problem)
        precision = None if info["precision"] is None else int(info["precision"])
        found = evaluator.normalize_extracted_answer(
            found, info["choices"], info["question_type"], info["answer_type"], precision
        )
        return read is not None and evaluator.safe_equal(found, info["gold"])

    def ours(text: str, info: dict[str, Any]) -> bool:
        return score("mathvista", text, info["gold"], info, "lmms").score == 1

    cases = ((text, info) for text, info in mathvista_cases(26))
    assert compare(ours, theirs, cases) == []


def test_mathvista_vlmevalkit() -> None:
    """Our extraction stands in for the kit's judge; the kit compares a list with the word None, which is not copied."""
    kit = kits.vlmevalkit("dataset/utils/mathvista.py", "post_check", "list_to_dict", can_infer=matching().can_infer)

    def theirs(text: str, info: dict[str, Any]) -> bool:
        row = info | {
            "answer": info["gold"],
            "answer_option": "B",
            "choices": repr(info["choices"]),
            "prediction": text,
        }
        read = kit.post_check(row, prefetch=True) or extract(text, info) or ""
        return bool(kit.post_check(row | {"res": read}))

    def ours(text: str, info: dict[str, Any]) -> bool:
        return score("mathvista", text, info["gold"], info).score == 1

    different = compare(ours, theirs, mathvista_cases(28))
    unexplained = [case for case in different if case[0][1]["answer_type"] != "list"]
    assert unexplained == []


def test_the_oracles_are_called() -> None:
    """`compare` sees one wrong answer among many."""
    kit = SimpleNamespace(rule=lambda text: "B" in text or text == "(C)")
    assert len(compare(lambda text: "B" in text, kit.rule, letters(11))) >= 1
