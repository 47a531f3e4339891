"""The evaluation: counts, buckets and reports, on a scripted stub in place of model and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_cases import StubModel, evaluate, example, lines, settings, stub_tasks  # noqa: F401 - a fixture

from trimode_vlm.eval import report
from trimode_vlm.eval.metrics import exact_match, mean, standard_error
from trimode_vlm.eval.tasks import derangement, images_of, select, with_images
from trimode_vlm.eval.tpf import bucketed, totals


def record(tokens: int, forwards: int, prefill: int = 1, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"num_new_tokens": tokens, "nfe": forwards, "nfe_prefill": prefill, "seconds": seconds} | more


def test_tpf_is_pooled_and_not_a_mean_of_ratios() -> None:
    """9 tokens in 2 forwards and 1 + 100 tokens in 1 + 100: pooled (8 + 100) / (1 + 100)."""
    result = totals([record(9, 2, accepted_lengths=[8]), record(101, 101)])
    assert result.tpf_decode == (8 + 100) / (1 + 100)
    assert result.tpf_end_to_end == 110 / 103
    assert result.as_dict()["mean_accepted_length"] == 8 and result.as_dict()["tokens_per_sec"] == 55


def test_ar_is_exactly_one_in_both_conventions_and_nothing_is_none() -> None:
    result = totals([record(n, n) for n in (1, 2, 200)])
    assert result.tpf_decode == result.tpf_end_to_end == 1.0
    assert totals([record(1, 1)]).tpf_decode is None and totals([]).as_dict()["mean_tokens"] is None


def test_a_continued_cache_has_no_prefill_token_to_subtract() -> None:
    assert totals([record(8, 4, prefill=0)]).tpf_decode == 2.0


def test_buckets_nest_and_split_strictly_above() -> None:
    result = bucketed([record(n, n) for n in (1, 100, 101, 200, 201)], thresholds=(100, 200))
    assert {name: value.num_samples for name, value in result.items()} == {"all": 5, ">100": 3, ">200": 1}
    assert list(bucketed([], thresholds=(7,))) == ["all", ">7"]


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("a\nb", "a\r\nb ", 1.0),
        ("\n a", "a", 1.0),
        ("A", "a", 0.0),
        ("a  b", "a b", 0.0),
        ("a.", "a", 0.0),
        ("a\n\nb", "a\nb", 0.0),
        ("", "a", 0.0),
    ],
)
def test_exact_match_normalisation(prediction: str, gold: str, score: float) -> None:
    assert exact_match(prediction, gold).score == score


def test_standard_error_of_the_mean() -> None:
    assert mean([]) is None and standard_error([1.0]) is None
    assert standard_error([0.0, 1.0, 1.0, 1.0]) == pytest.approx(0.25)


@pytest.mark.parametrize("n", [2, 3, 10, 500])
def test_derangement_moves_every_sample(n: int) -> None:
    order = derangement(n, seed=3)
    assert sorted(order) == list(range(n)) and all(i != j for i, j in enumerate(order))
    assert order == derangement(n, seed=3)
    with pytest.raises(ValueError, match="found 1"):
        derangement(1, seed=0)


def test_with_images_swaps_pictures_only() -> None:
    swapped = with_images(example(1, 0), ["other"])
    assert images_of(swapped.messages) == ["other"] and images_of(example(1, 0).messages) == ["picture 1"]
    assert (
        swapped.messages[0]["content"][1] == example(1, 0).messages[0]["content"][1]
        and swapped.gold == example(1, 0).gold
    )
    assert images_of(with_images(example(1, 0), ["a", "b"]).messages) == ["a"]
    with pytest.raises(ValueError, match="1 images but received 0"):
        with_images(example(1, 0), [])


def test_select_expands_groups_and_names_the_nearest() -> None:
    assert [task.name for task in select(["recite", "nano"])] == ["recite", "spell"]
    with pytest.raises(ValueError, match="did you mean spell"):
        select(["spel"])


def test_report_numbers_equal_the_scripted_counts(tmp_path: Path) -> None:
    """Answers of 1, 4, 7, 10, 13 letters: 35 tokens, 5 of them from prefills; drafts of 4."""
    result = evaluate(settings(tmp_path), StubModel())
    ar, spec = (result["tasks"]["spell"][mode] for mode in ("ar", "linear_spec"))
    assert (ar["num_tokens"], ar["num_forwards"], ar["tpf_decode"], ar["tpf_end_to_end"]) == (35, 35, 1.0, 1.0)
    cycles = 0 + 1 + 2 + 3 + 3
    assert (spec["num_decode_forwards"], spec["num_prefill_forwards"]) == (2 * cycles, 5)
    assert spec["tpf_decode"] == 30 / (2 * cycles) and spec["mean_accepted_length"] == 30 / cycles
    assert spec["score"] == 1.0 and spec["standard_error"] == 0.0 and spec["seconds"] == 2.5
    assert spec["finish_reasons"] == {"stop": 5}
    assert result["same_as_ar"] == {"linear_spec": {"identical": 5, "of": 5}}
    assert result["convention"]["tpf_decode"] and json.loads(
        (tmp_path / "out" / "report.json").read_text()
    ) == json.loads(json.dumps(result))


def test_padding_after_the_end_is_neither_decoded_nor_counted(tmp_path: Path) -> None:
    chosen = settings(tmp_path, modes=("ar",), batch_size=5)
    evaluate(chosen, StubModel())
    assert [(r["prediction"], r["num_new_tokens"]) for r in lines(chosen)] == [
        (chr(97 + i) * (3 * i + 1), 3 * i + 1) for i in range(5)
    ]


def test_cut_answers_are_scored_as_they_are(tmp_path: Path) -> None:
    result = evaluate(settings(tmp_path, tasks=("recite",), modes=("ar", "diffusion")), StubModel())
    cell = result["tasks"]["recite"]
    assert cell["ar"]["num_samples"] == 3 and cell["ar"]["finish_reasons"] == {"stop": 2, "length": 1}
    assert cell["diffusion"]["score"] == 0.0 and result["same_as_ar"]["diffusion"] == {"identical": 0, "of": 3}
    short = evaluate(settings(tmp_path / "b", max_new_tokens=2, modes=("ar",)), StubModel())
    assert short["tasks"]["spell"]["ar"]["score"] == pytest.approx(1 / 5)


def test_buckets_hold_score_and_counts_of_the_long_answers(tmp_path: Path) -> None:
    result = evaluate(settings(tmp_path, seed=1, modes=("ar",)), StubModel(seed=1))
    lengths = result["pooled"]["ar"]
    assert [lengths[name]["num_tokens"] for name in ("all", ">100", ">200")] == [605, 543, 241]
    assert lengths[">200"]["num_samples"] == 1 and lengths[">200"]["score"] == 1.0


def test_markdown_and_the_readme_block(tmp_path: Path) -> None:
    chosen = settings(tmp_path, modes=("ar", "linear_spec", "diffusion"), shuffle_images=True)
    result = evaluate(chosen, StubModel())
    text = report.markdown(result)
    assert "| spell | 7 | 1.000 ± 0.000 | 1.000 ± 0.000 | 1.67 | 0.000 ± 0.000 | 0.86 |" in text
    assert "`linear_spec` gives the token ids of `ar` on 5/5 samples." in text
    widths = {line.count("|") for line in text.split("\n\n")[0].splitlines()}
    assert len(widths) == 1
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{report.START}\nold\n{report.END}\nrest\n", encoding="utf-8")
    assert report.main([str(tmp_path / "out" / "report.json"), "--update", str(readme)]) == 0
    assert readme.read_text(encoding="utf-8") == f"# Title\n{report.START}\n{text}\n{report.END}\nrest\n"
    readme.write_text("no marks", encoding="utf-8")
    assert report.main([str(tmp_path / "out" / "report.json"), "--update", str(readme)]) == 1
    assert readme.read_text(encoding="utf-8") == "no marks"


def test_larger_batches_report_no_speed(tmp_path: Path) -> None:
    text = report.markdown(evaluate(settings(tmp_path, batch_size=2), StubModel()))
    assert "tokens/s" not in text and "batch 2" in text


def test_held_out_nano_samples_are_no_training_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from trimode_vlm.training.synthetic import HELD_OUT_SEED

    tasks = select(["nano"])
    seeds = [task.example(i, seed).seed or 0 for task in tasks for seed in (0, 1) for i in (0, 999)]
    assert min(seeds) >= HELD_OUT_SEED and len(set(seeds)) == 4
    assert all(bool(images_of(task.example(0, 0).messages)) == task.needs_image for task in tasks)
    assert all(task.example(3, 1).messages[-1]["role"] == "user" for task in tasks)
