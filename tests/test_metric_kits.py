"""Scores of texts, numbers and formulas beside the public kits' own functions, over generated answers.

Equal, or different for the reason named in the test. Kits: lmms-eval 0.7.3, lm-eval 0.4.13 and VLMEvalKit (ms-vlmeval
0.0.20); each test skips where its kit is not installed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import kits
import pytest
from kits import CASES, FILLERS, HELPERS, VQA_EVAL, answers, compare, draw

from trimode_vlm.eval.metric_vqa import CONTRACTIONS
from trimode_vlm.eval.metrics import score


@pytest.mark.parametrize("style", ["lmms", "vlmevalkit"])
def test_anls(style: str) -> None:
    """Different only for an answer of nothing but spaces, to which the kits give a share of a short gold answer."""
    if style == "lmms":
        kit = kits.imported("lmms_eval.api.metrics").anls

        def theirs(prediction: str, golds: list[str]) -> float:
            return float(kit(golds, [prediction])["anls"])
    else:
        kit = kits.vlmevalkit(VQA_EVAL, "anls_compute", "levenshtein_distance", "hit_calculate", **HELPERS)

        def theirs(prediction: str, golds: list[str]) -> float:
            match = [kit.anls_compute(gold, prediction) for gold in golds]
            return float(kit.hit_calculate([{"match": match}], "DocVQA")[0])

    def cases() -> Iterator[tuple[str, list[str]]]:
        generator = random.Random(1)
        for text in answers(2):
            other = "".join(c for c in text if generator.random() > 0.25) + generator.choice(["", " ", "x", "ß"])
            yield (
                text,
                [other.upper() if generator.random() < 0.3 else other, generator.choice(FILLERS)][
                    : generator.randint(1, 2)
                ],
            )

    different = compare(
        lambda p, g: round(score("anls", p, g, style=style).score, 9), lambda p, g: round(theirs(p, g), 9), cases()
    )
    assert all(not prediction.strip() for (prediction, _), _, _ in different), different


@pytest.mark.parametrize("style", ["lmms", "vlmevalkit"])
def test_relaxed_accuracy(style: str) -> None:
    if style == "lmms":
        theirs = kits.imported("lmms_eval.tasks.chartqa.utils").relaxed_correctness
    else:
        kit = kits.vlmevalkit(VQA_EVAL, "relaxed_correctness").relaxed_correctness

        def theirs(prediction: str, gold: str) -> bool:
            return bool(kit(gold, prediction.strip()))

    numbers = (
        "100",
        "105",
        "105.01",
        "95",
        "94.9",
        "5%",
        "0.05",
        "0",
        "0.0",
        "-100",
        "1e2",
        "inf",
        " 100 ",
        "100%",
        "1",
    )
    golds = draw(3, (*numbers, "Yes", "yes ", "1,234", "2015", "12%", "blue bus"))

    def cases() -> Iterator[tuple[str, str]]:
        near = random.Random(4)
        for text, gold in zip(answers(5, numbers * 3), golds, strict=False):
            yield (near.choice(numbers) if near.random() < 0.5 else near.choice([text, gold, gold.upper()])), gold

    assert compare(lambda p, g: score("relaxed_accuracy", p, g, style=style).score == 1, theirs, cases()) == []


def test_vqa_contractions_are_the_published_table() -> None:
    table = kits.imported("lmms_eval.tasks._task_utils.vqa_eval_metric").EvalAIAnswerProcessor.CONTRACTIONS
    # Words are folded before the table is read, so that its upper-case entries are never met.
    reached = {word: full for word, full in table.items() if word == word.lower() and word != full}
    assert reached == {word: full for word, full in CONTRACTIONS.items() if word in table}
    assert set(CONTRACTIONS) - set(table) == set()


@pytest.mark.parametrize("style", ["lmms", "vlmevalkit"])
def test_vqa_accuracy(style: str) -> None:
    if style == "lmms":
        kit = kits.imported("lmms_eval.tasks.textvqa.utils").textvqa_process_results

        def theirs(prediction: str, golds: list[str]) -> float:
            return float(kit({"answers": list(golds), "question_id": 0}, [prediction])["exact_match"])
    else:
        punctuation = kits.vlmevalkit("smp/misc.py", "process_punctuation").process_punctuation
        kit = kits.vlmevalkit(
            VQA_EVAL,
            *("process_line", "process_answer", "_process_digit_article"),
            **HELPERS | {"process_punctuation": punctuation, "eval": lambda answers: answers},
        )

        def theirs(prediction: str, golds: list[str]) -> float:
            match = kit.process_line({"answer": golds, "prediction": prediction})["match"]
            return float(sum(match) / len(match))

    spelt = ("a blue-bus", "blue bus!", "blue/bus", "its", "dont know", "don't know", "1,000 x-y", "3.5.", "7.", "no?")
    alike = (("Ten", "10", "the 10", "10."), ("none", "0", "Zero."), ("dog's", "a dog 's", "dogs"), ("it's", "its"))

    def cases() -> Iterator[tuple[str, list[str]]]:
        generator = random.Random(6)
        for text in answers(7, spelt):
            pool = [text, *generator.choices(spelt + FILLERS, k=1), *generator.choice(alike)]
            yield generator.choice(pool), [generator.choice(pool) for _ in range(generator.choice([5, 10]))]

    ours = compare(
        lambda p, g: round(score("vqa_accuracy", p, g, style=style).score, 9),
        lambda p, g: round(theirs(p, g), 9),
        cases(),
    )
    assert ours == []


def test_ocrbench() -> None:
    kit = kits.imported("lmms_eval.tasks.ocrbench.utils").ocrbench_process_results

    def theirs(prediction: str, golds: list[str], dataset: str) -> bool:
        doc = {"answer": golds, "dataset": dataset, "question_type": ""}
        return bool(kit(doc, [prediction])["ocrbench_accuracy"]["score"])

    def cases() -> Iterator[tuple[str, list[str], str]]:
        generator = random.Random(8)
        for text in answers(9, ("ＡＢ", "ab", "a\u3000b", "x\u3000y") * 4):
            part = text[generator.randint(0, 3) : generator.randint(4, 40)] + generator.choice(["", " ", "\n", "q"])
            golds = [
                generator.choice([part.upper(), part.replace(" ", ""), part.replace("\u3000", " "), part]),
                generator.choice(FILLERS) or "q",
            ]
            yield text, golds, generator.choice(["HME100k", "IIIT5K"])

    different = compare(lambda p, g, d: score("ocrbench", p, g, {"dataset": d}, "lmms").score == 1, theirs, cases())
    assert different == []


def test_f1() -> None:
    kit = kits.imported("lm_eval.tasks.mlqa.utils").f1_score
    words = "the a red, Red bus and. an car the-car 3.5 BLUE".split()

    def cases() -> Iterator[tuple[str, str]]:
        generator = random.Random(10)
        for _ in range(CASES):
            yield tuple(" ".join(generator.choices(words, k=generator.randint(0, 6))) for _ in range(2))

    different = compare(lambda p, g: round(score("f1", p, g).score, 9), lambda p, g: round(kit(p, g, "en"), 9), cases())
    # The kit gives two empty texts 0, SQuAD's own script 1.
    assert all(mine == 1 and not kit(prediction, gold, "en") for (prediction, gold), mine, _ in different), different


SOLUTIONS = (
    "#### {}", "So {} + {} = {}.\n#### {}", "The total is ${}.", "{} eggs. That is {} in all", "\\boxed{{{}}}",
    "{}", "{}...",
    "It is {} %", "it is -{}", "{} apples and {} pears",
)  # fmt: skip


def solutions(seed: int, values: tuple[str, ...]) -> Iterator[str]:
    generator = random.Random(seed)
    for _ in range(CASES):
        frame = generator.choice(SOLUTIONS)
        yield frame.format(*generator.choices(values, k=frame.count("{}")))


@pytest.mark.parametrize(("style", "name"), [("lmms", "flexible-extract"), ("strict", "strict-match")])
def test_gsm8k(style: str, name: str) -> None:
    """lm-eval's two filters with its exact match, as its gsm8k task sets them up."""
    import yaml

    filters, metrics = kits.imported("lm_eval.filters.extraction"), kits.imported("lm_eval.api.metrics")
    path = Path(kits.imported("lm_eval").__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    task = yaml.safe_load(path.read_text())
    chosen = next(entry for entry in task["filter_list"] if entry["name"] == name)["filter"][0]
    regex = filters.RegexFilter(**{key: value for key, value in chosen.items() if key != "function"})
    metric = {key: value for key, value in task["metric_list"][0].items() if key.startswith(("ignore", "regexes"))}

    def theirs(text: str, gold: str) -> bool:
        found = regex.apply([[text]], [{}])[0][0]
        return bool(metrics.exact_match_fn(predictions=[found], references=[gold], **metric)["exact_match"])

    values = ("18", "18.", "18.0", "1,800", "1800", "-18", "$18", "3/4", "0.5", ".5", "eighteen", "18,")
    golds = draw(23, ("18", "9 * 2 = 18\n#### 18", "#### 1,800", "#### -18", "0.5"))
    cases = zip(solutions(24, values), golds, strict=False)
    assert compare(lambda p, g: score("gsm8k", p, g, style=style).score == 1, theirs, cases) == []


FORMULAS = (
    "\\frac{1}{2}", "\\frac12", "\\dfrac 12", "1/2", "0.5", ".5", "\\tfrac1{2}", "\\sqrt2", "\\sqrt{2}", "x=5",
    "5", "xy=5",
    "90^\\circ", "90^{\\circ}", "90", "50\\%", "50", "\\$5", "10\\text{ cm}", "10", "\\left(1, 2\\right)", "(1,2)",
    "{.5}",
    "{0.5}", "-1/2", "-\\frac{1}{2}", "1\\!000", "1000", "\\frac{x+1}2", "3\\sqrt7x", "3\\sqrt{7}x",
    "\\text{Evelyn}", "a . 5",
    "1\\\\2", "\\frac 1 3", "\\frac{1}{3}", "2/3/4", "x/2",
)  # fmt: skip


def test_math() -> None:
    """lm-eval's hendrycks_math; it falls back on equal raw text where its rules raise, as on `x/2`."""
    kit = kits.imported("lm_eval.tasks.hendrycks_math.utils")

    def theirs(text: str, gold: str) -> bool:
        return bool(kit.process_results({"solution": f"so \\boxed{{{gold}}}."}, [text])["exact_match"])

    def cases() -> Iterator[tuple[str, str]]:
        generator = random.Random(25)
        frames = ("{}", "${}$", "We get $x$ and so ${}$.", " {} ", "$$ {} $$", "the answer is ${}$", "${}")
        for gold in generator.choices(FORMULAS, k=2 * CASES):
            same = [formula for formula in FORMULAS if kit.is_equiv(formula, gold)]
            formula = generator.choice(same if generator.random() < 0.5 else FORMULAS)
            yield generator.choice(frames).format(formula), gold

    different = compare(lambda p, g: score("math", p, g, style="lmms").score == 1, theirs, cases())
    # `x/2`: its int() raises, so that a space in the answer already makes it wrong.
    assert all(mine and "x/2" in text for (text, _), mine, _ in different), different
