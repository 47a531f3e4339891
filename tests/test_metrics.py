"""Scores of single answers: the values of the public kits, what each style reads, and that nothing is guessed."""

from __future__ import annotations

from typing import Any

import pytest

from trimode_vlm.eval.metrics import METRICS, STYLES, Scored, score

CHOICES = {"choices": ["a red car", "blue bus", "green van", "none"]}
LMMS, VLMEVALKIT = ("lmms",), ("vlmevalkit",)


@pytest.mark.parametrize(
    ("prediction", "gold", "value", "styles"),
    [
        ("cat", "cat", 1.0, STYLES),
        ("abcd", "abxy", 0.5, LMMS + VLMEVALKIT),
        ("abcd", "abxy", 0.0, ("strict",)),
        ("abcd", "abcx", 0.75, STYLES),
        ("Paris", "paris.", 0.8333, STYLES),
        ("10  MG", ["10 mg", "10mg"], 1.0, LMMS + VLMEVALKIT),
        ("abxy    ", "abcd", 0.75, LMMS + VLMEVALKIT),  # the kits divide by lengths before stripping
        ("abxy    ", "abcd", 0.0, ("strict",)),
        ("", "cat", 0.0, STYLES),
    ],
)
def test_anls(prediction: str, gold: Any, value: float, styles: tuple[str, ...]) -> None:
    for style in styles:
        assert score("anls", prediction, gold, style=style).score == pytest.approx(value, abs=1e-4), style


@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [  # vlmevalkit, lmms, strict
        ("105", "100", "vls"),
        ("105.01", "100", ""),
        ("5%", "0.05", "vls"),
        ("0.0", "0", "s"),
        ("1,000", "1000", "s"),
        ("Yes ", "yes", "vs"),
        ("2010", "2015", "vl"),  # strict offers exact years
        ("2015", "2015", "vls"),
        ("95", "100", "vls"),
        ("-5", "5", ""),
        ("5", "5%", ""),
        ("nan", "100", ""),
        ("", "100", ""),
    ],
)
def test_relaxed_accuracy(prediction: str, gold: str, right: str) -> None:
    values = {style[0]: score("relaxed_accuracy", prediction, gold, style=style).score for style in STYLES}
    assert values == {initial: float(initial in right) for initial in "vls"}


@pytest.mark.parametrize(
    ("prediction", "lmms", "vlmevalkit", "strict"),
    [
        ("B.", "B", "B", "B"),
        ("(C)", "C", "C", "C"),
        ("The answer is D because A is wrong", "A", "D", None),
        ("the blue bus", None, "B", None),
        ("A dog is shown", "A", "A", None),
        ("", None, None, None),
        ("B. blue bus", "B", "B", "B"),
        ("Blue bus.", "B", "B", "B"),
        ("I'm sorry, but without the image provided I choose B", "B", None, None),
        ("Both A and B", "B", None, None),
        ("Z", None, None, None),
    ],
)
def test_multiple_choice(prediction: str, lmms: str | None, vlmevalkit: str | None, strict: str | None) -> None:
    for style, letter in (("lmms", lmms), ("vlmevalkit", vlmevalkit), ("strict", strict)):
        for gold in "ABCD":
            expected = Scored(float(letter == gold), letter)
            assert score("multiple_choice", prediction, gold, CHOICES, style) == expected, style


@pytest.mark.parametrize(
    ("prediction", "letters"),
    [  # vlmevalkit, lmms, strict
        ("A is tempting, but the bus is blue.\nAnswer: B", "BBB"),
        ("Both C and D fit.\n**Answer:** (C)", "CCC"),
        ("Answer: A\nNo, wait.\nAnswer: B", "BBB"),
        ("The answer is C.", "CC-"),
        ("Thinking and thinking and", "---"),
        ("Answer: none of them", "D--"),  # the text of D; the kit would read A out of the word Answer
    ],
)
def test_multiple_choice_with_reasoning(prediction: str, letters: str) -> None:
    found = [score("multiple_choice_cot", prediction, "A", CHOICES, style).parsed or "-" for style in STYLES]
    assert "".join(found) == letters


@pytest.mark.parametrize(
    ("prediction", "mme_lmms", "pope_lmms", "vlmevalkit", "strict"),
    [
        ("yes.", "yes", None, "yes", "yes"),
        ("Not sure", "no", None, None, None),
        ("The answer is yes.", None, None, "yes", None),
        ("Yes", "yes", "yes", "yes", "yes"),
        ("no", "no", "no", "no", "no"),
        ("Yes and no", "yes", None, None, "yes"),
        ("n", "no", None, None, None),
        ("", None, None, None, None),
    ],
)
def test_yes_no(prediction: str, mme_lmms: str, pope_lmms: str, vlmevalkit: str, strict: str) -> None:
    assert score("mme", prediction, "Yes", style="lmms").parsed == mme_lmms
    assert score("yes_no", prediction, "yes", style="lmms").parsed == pope_lmms
    for metric in ("mme", "yes_no"):
        for style, said in (("vlmevalkit", vlmevalkit), ("strict", strict)):
            assert score(metric, prediction, "Yes", style=style) == Scored(float(said == "yes"), said)
            assert score(metric, prediction, "no", style=style).score == float(said == "no")


def test_vqa_accuracy_counts_the_answers_of_others() -> None:
    for style in STYLES:
        three = ["two", "2", "2"] + [f"other {i}" for i in range(7)]
        assert score("vqa_accuracy", "2", three, style=style).score == pytest.approx(0.9)
        assert score("vqa_accuracy", "Two", three[:1] + three[2:] + ["x"], style=style).score == pytest.approx(0.6)
        assert score("vqa_accuracy", "the two!", ["two"] * 10, style=style).score == 1.0
        with pytest.raises(ValueError, match="at least 4 accepted answers, found 1: use"):
            score("vqa_accuracy", "2", "2", style=style)


def test_mmmu() -> None:
    open_question = {"question_type": "open"}
    for style in STYLES:
        assert score("mmmu", "The answer is 8.", "8", open_question, style).score == 1
        assert score("mmmu", "1,234", "1234", open_question, style).score == 1
        assert score("mmmu", "The answer is 9.", ["7", "9.0"], open_question, style).score == 1
        assert score("mmmu", "A", "8", open_question, style).score == 0  # right in VLMEvalKit, by chance
        assert score("mmmu", "", "8", open_question, style) == Scored(0.0, None)
        assert score("mmmu", "I cannot say.", "A", CHOICES | {"question_type": "multiple-choice"}, style).parsed is None
    long = "What is shown there is the blue bus"
    assert score("mmmu", long, "B", CHOICES, "lmms") == Scored(1.0, "B")
    assert score("mmmu", "(A) or rather (C)", "C", CHOICES, "strict") == Scored(1.0, "C")


MATHVISTA = [
    ("14", "14", "integer", "vls"),
    ("The number missing is 14.", "14", "integer", "vls"),
    ("There are 12 and 2, so the answer is 14 cars of 20.", "14", "integer", "vls"),
    ("\\boxed{1,400}", "1400", "integer", "vls"),
    ("14.7", "14", "integer", "l"),  # lmms-eval truncates
    ("14.0", "14", "integer", "ls"),  # VLMEvalKit's int() refuses
    ("I see no number", "14", "integer", ""),
    ("0.62", "0.6", "float", "ls"),
    ("0.6", "0.6", "float", "vls"),
    ("Between [2007, 2008], I think", "[2007, 2008]", "list", "vls"),
    ("[2007,2008]", "[2007, 2008]", "list", "s"),
]


@pytest.mark.parametrize(("prediction", "gold", "kind", "right"), MATHVISTA)
def test_mathvista_free_form(prediction: str, gold: str, kind: str, right: str) -> None:
    info = {"question_type": "free_form", "answer_type": kind, "precision": 1.0 if kind == "float" else None}
    values = {style[0]: score("mathvista", prediction, gold, info, style).score for style in STYLES}
    assert values == {initial: float(initial in right) for initial in "vls"}


def test_mathvista_choices() -> None:
    info = {"question_type": "multi_choice", "answer_type": "text", "choices": ["3/11", "8/11", "6/11", "3/5"]}
    for style in STYLES:
        assert score("mathvista", "The correct answer is (B) 8/11.", "8/11", info, style).parsed in ("B", None)
        assert score("mathvista", "The answer is (B).", "8/11", info, style) == Scored(1.0, "B")
        assert score("mathvista", "8/11", "B", info, style) == Scored(1.0, "B")
        assert score("mathvista", "no idea", "3/5", info, style) == Scored(0.0, None)  # not the nearest choice
        with pytest.raises(ValueError, match="'7/11' is none of the choices"):
            score("mathvista", "8/11", "7/11", info, style)


def test_ocrbench() -> None:
    for style in STYLES:
        assert score("ocrbench", "The word is CENTRE\nPARK.", ["centre park", "other"], style=style).score == 1
        assert score("ocrbench", "x^2+1", ["x ^ 2 + 1"], {"dataset": "HME100k"}, style).score == 1
        assert score("ocrbench", "X^2+1", ["x ^ 2 + 1"], {"dataset": "HME100k"}, style).score == 0
        assert score("ocrbench", "x^2+1", ["x ^ 2 + 1"], {"dataset": "IIIT5K"}, style).score == 0
        assert score("ocrbench", "", ["word"], style=style) == Scored(0.0, None)
        assert score("ocrbench", "ＡＢ１", ["ab1"], style=style).score == float(style == "lmms")


def test_realworldqa() -> None:
    for style in STYLES:
        assert score("realworldqa", "B.", "B", style=style) == Scored(1.0, "B")
        assert score("realworldqa", "Downhill.", "downhill", style=style).score == 1
        assert score("realworldqa", "3 cars", "3", style=style) == Scored(0.0, "3 cars")
        assert score("realworldqa", "", "3", style=style).parsed is None


@pytest.mark.parametrize(
    ("prediction", "right"),
    [  # vlmevalkit, lmms, strict
        ("So she has 10 + 8 = 18 dollars.\n#### 18", "vls"),
        ("That makes $18.00.", "v"),
        ("That makes \\boxed{18}, not 3.", "v"),
        ("That makes 18 eggs, 18.", "vl"),
        ("5-3", ""),
        ("1,8", "l"),  # lm-eval drops every comma
        ("eighteen", ""),
        ("", ""),
    ],
)
def test_gsm8k(prediction: str, right: str) -> None:
    for gold in ("18", "She sells 9 * 2 = 18.\n#### 18"):
        values = {style[0]: score("gsm8k", prediction, gold, style=style).score for style in STYLES}
        assert values == {initial: float(initial in right) for initial in "vls"}


def test_gsm8k_reads_thousands_and_signs() -> None:
    assert score("gsm8k", "It is 12,345", "#### 12345").score == 1
    assert score("gsm8k", "x = -5", "-5").score == 1
    assert score("gsm8k", "10-5", "5").score == 1
    assert score("gsm8k", "no number", "5") == Scored(0.0, None)


@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [  # vlmevalkit, lmms, strict
        ("so $x = \\boxed{\\dfrac{1}{2}}$.", "\\frac12", "vs"),
        ("\\boxed{0.5}", "\\frac{1}{2}", "vs"),
        ("$\\frac{1}{2}$", "\\frac12", "vl"),
        ("The answer is 14/3.", "\\frac{14}{3}", "v"),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", "v"),
        ("\\boxed{(3, \\frac{\\pi}{2})}", "\\left( 3, \\frac{\\pi}{2} \\right)", "vs"),
        ("\\boxed{x+1}", "1+x", "v"),
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{2}", ""),
        ("\\boxed{90^\\circ}", "90", "vs"),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", "vs"),
        ("nothing", "7", ""),
        ("\\boxed{7", "7", ""),
    ],
)
def test_math(prediction: str, gold: str, right: str) -> None:
    pytest.importorskip("math_verify", reason="math-verify is in the eval extra")
    values = {style[0]: score("math", prediction, gold, style=style).score for style in STYLES}
    assert values == {initial: float(initial in right) for initial in "vls"}
    assert score("math", prediction, f"Thus $\\boxed{{{gold}}}$.", style="strict").score == float("s" in right)


def test_f1() -> None:
    assert score("f1", "The red bus, red", "a red car or bus").score == pytest.approx(2 * 2 / (3 + 4))
    assert score("f1", "red bus", ["car", "the red bus"]).score == 1
    assert score("f1", "red", "blue") == Scored(0.0, "red")
    assert score("f1", "The!", "an") == Scored(1.0, "")


def test_contains() -> None:
    assert score("contains", "It is a  Red\nBUS.", ["car", "red bus"]) == Scored(1.0, "it is a red bus.")
    assert score("contains", "It is red", "bus").score == 0


GOLDS: dict[str, Any] = {
    "vqa_accuracy": ["x"] * 10, "multiple_choice": "A", "multiple_choice_cot": "A", "mmmu": "A", "ocrbench": ["x"],
    "yes_no": "no", "mme": "No", "mathvista": "7", "realworldqa": "A", "gsm8k": "7", "math": "7",
}  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
def test_an_empty_answer_is_unparsed_and_wrong(metric: str) -> None:
    """Nothing to read scores nothing, always the same; the kits draw a letter in some of these places."""
    if metric == "math":
        pytest.importorskip("math_verify", reason="math-verify is in the eval extra")
    for style in STYLES:
        for empty in ("", " \n"):
            assert score(metric, empty, GOLDS.get(metric, "x"), style=style) == Scored(0.0, None), style


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ValueError, match="unknown metric 'anl', did you mean 'anls'"):
        score("anl", "x", "x")
    with pytest.raises(ValueError, match="unknown metric style 'lms', did you mean 'lmms'"):
        score("anls", "x", "x", style="lms")
    with pytest.raises(ValueError, match="a letter, found 'blue bus'"):
        score("multiple_choice", "B", "blue bus")
    with pytest.raises(ValueError, match="yes or no, found 'maybe'"):
        score("mme", "yes", "maybe")
    with pytest.raises(ValueError, match="accepted answers is empty"):
        score("anls", "yes", [])
