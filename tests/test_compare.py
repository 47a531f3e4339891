"""Two runs side by side: pairs, differences and intervals against plain arithmetic and scipy; what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimode_vlm.eval import compare

scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is not installed (pip install '.[test]')")

Lines = list[dict[str, Any]]


def line(task: str, mode: str, index: int, score: float, tokens: int, decode: int, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"run": "model", "task": task, "mode": mode, "id": index, "image_from": index}
    base |= {"score": score, "num_new_tokens": tokens, "nfe": decode + 1, "nfe_prefill": 1, "seconds": 1.0}
    base |= {"ids_hash": f"{score} {tokens}", "gold": f"gold {index}", "question_hash": f"q{index}", "metric": "anls"}
    return base | {"accepted_lengths": [], "metric_style": "strict", "parsed": "x", "category": None} | changes


def runs(
    seed: int, sizes: dict[str, int], modes: tuple[str, ...] = ("linear_spec",), longest: int = 300
) -> tuple[Lines, Lines]:
    """A and a B that is right more often and drafts better, sample by sample alike."""
    rng = random.Random(seed)
    a, b = [], []
    for task, size in sizes.items():
        for mode in modes:
            for i in range(size):
                tokens, luck = rng.randint(2, longest), rng.random()
                decode_a, decode_b = 1 + tokens // rng.randint(2, 5), 1 + tokens // rng.randint(4, 8)
                a.append(line(task, mode, i, float(luck < 0.6), tokens, decode_a))
                b.append(line(task, mode, i, float(luck < 0.7 - 0.1 * rng.random()), tokens + 1, decode_b))
    return a, b


def folders(tmp_path: Path, a: Lines, b: Lines) -> tuple[Path, Path]:
    for name, lines in (("a", a), ("b", b)):
        (tmp_path / name).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "samples.jsonl").write_text(text, encoding="utf-8")
    return tmp_path / "a", tmp_path / "b"


def tpf(lines: Lines) -> float:
    return sum(r["num_new_tokens"] - 1 for r in lines) / sum(r["nfe"] - 1 for r in lines)


def test_differences_and_ratios_by_plain_arithmetic(tmp_path: Path) -> None:
    a, b = runs(0, {"one": 30, "two": 10}, ("ar", "linear_spec"))
    random.Random(1).shuffle(b)
    result = compare.compare(*folders(tmp_path, a, b))
    by_key = {(r["task"], r["mode"], r["id"]): r for r in b}
    for task in ("one", "two"):
        for mode in ("ar", "linear_spec"):
            own_a = [r for r in a if (r["task"], r["mode"]) == (task, mode)]
            own_b = [by_key[task, mode, r["id"]] for r in own_a]
            cell = result["tasks"][task][mode]
            differences = [y["score"] - x["score"] for x, y in zip(own_a, own_b, strict=True)]
            assert cell["num_pairs"] == len(own_a)
            assert cell["difference"] == pytest.approx(sum(differences) / len(own_a))
            assert cell["difference"] == pytest.approx(cell["score_b"] - cell["score_a"])
            assert (cell["b_better"], cell["a_better"]) == (differences.count(1.0), differences.count(-1.0))
            assert (cell["tpf_a"], cell["tpf_b"]) == (pytest.approx(tpf(own_a)), pytest.approx(tpf(own_b)))
            assert cell["tpf_ratio"] == pytest.approx(tpf(own_b) / tpf(own_a))
            assert cell["interval"][0] <= cell["difference"] <= cell["interval"][1]
            assert cell["tpf_interval"][0] < cell["tpf_ratio"] < cell["tpf_interval"][1]
    for mode in ("ar", "linear_spec"):
        one, two = (result["tasks"][task][mode]["difference"] for task in ("one", "two"))
        assert result["mean_of_tasks"][mode]["difference"] == pytest.approx((one + two) / 2)
        assert result["pooled"][mode]["difference"] == pytest.approx((30 * one + 10 * two) / 40)
        assert result["pooled"][mode]["num_pairs"] == 40
    assert result["unpaired"] == {"a": {}, "b": {}}


@pytest.mark.parametrize("longest", [300, 4], ids=["hardly two pairs alike", "few kinds of pairs"])
def test_intervals_are_scipys(tmp_path: Path, longest: int) -> None:
    """The percentile bootstrap of scipy, up to the chance of both drawings; and near the paired t interval."""
    a, b = runs(3, {"one": 200}, longest=longest)
    cell = compare.compare(*folders(tmp_path, a, b))["tasks"]["one"]["linear_spec"]
    scores_a, scores_b = (np.array([r["score"] for r in lines]) for lines in (a, b))
    options = {"method": "percentile", "n_resamples": 9999, "rng": np.random.default_rng(5), "vectorized": True}
    wanted = scipy_stats.bootstrap((scores_b - scores_a,), np.mean, **options)
    spread = wanted.standard_error
    low, high = wanted.confidence_interval
    assert abs(cell["interval"][0] - low) < 0.15 * spread and abs(cell["interval"][1] - high) < 0.15 * spread
    t_low, t_high = scipy_stats.ttest_rel(scores_b, scores_a).confidence_interval(0.95)
    assert abs(cell["interval"][0] - t_low) < 0.3 * spread and abs(cell["interval"][1] - t_high) < 0.3 * spread

    def ratio(tokens_a: Any, forwards_a: Any, tokens_b: Any, forwards_b: Any, axis: int = -1) -> Any:
        sums = [x.sum(axis=axis) for x in (tokens_b, forwards_b, tokens_a, forwards_a)]
        return (sums[0] / sums[1]) / (sums[2] / sums[3])

    counts = [np.array([r[name] - 1 for r in lines]) for lines in (a, b) for name in ("num_new_tokens", "nfe")]
    wanted = scipy_stats.bootstrap(counts, ratio, paired=True, **options)
    low, high = wanted.confidence_interval
    spread = wanted.standard_error
    assert abs(cell["tpf_interval"][0] - low) < 0.15 * spread and abs(cell["tpf_interval"][1] - high) < 0.15 * spread


def test_pooling_draws_within_tasks(tmp_path: Path) -> None:
    """Two tasks of opposite, constant differences: only draws within tasks leave the pooled interval without width."""
    a = [line(task, "ar", i, float(task == "two"), 5, 4) for task in ("one", "two") for i in range(20)]
    b = [line(task, "ar", i, float(task == "one"), 5, 4) for task in ("one", "two") for i in range(20)]
    result = compare.compare(*folders(tmp_path, a, b))
    assert result["pooled"]["ar"]["interval"] == [0, 0] and result["mean_of_tasks"]["ar"]["interval"] == [0, 0]
    assert result["tasks"]["one"]["ar"]["interval"] == [1, 1]


def test_pairing_narrows_the_interval(tmp_path: Path) -> None:
    a, b = runs(4, {"one": 150})
    interval = compare.compare(*folders(tmp_path, a, b))["tasks"]["one"]["linear_spec"]["interval"]
    variances = [np.var([r["score"] for r in lines], ddof=1) / 150 for lines in (a, b)]
    assert interval[1] - interval[0] < 0.7 * 2 * 1.96 * np.sqrt(sum(variances))


def test_it_is_the_same_each_time_and_antisymmetric_in_its_figures(tmp_path: Path) -> None:
    a, b = folders(tmp_path, *runs(5, {"one": 25}))
    there, again, back = compare.compare(a, b), compare.compare(a, b), compare.compare(b, a)
    assert there == again
    x, y = there["tasks"]["one"]["linear_spec"], back["tasks"]["one"]["linear_spec"]
    assert x["difference"] == pytest.approx(-y["difference"]) and x["tpf_ratio"] == pytest.approx(1 / y["tpf_ratio"])


def test_samples_without_a_partner_are_counted_and_named(tmp_path: Path) -> None:
    a, b = runs(6, {"one": 12, "two": 5}, ("ar", "linear_spec"))
    b = [r for r in b if r["task"] == "one" and r["id"] not in (3, 4, 9)]
    b += [line("three", "ar", 7, 1.0, 3, 2)]
    control = [r | {"run": "control"} for r in a]
    result = compare.compare(*folders(tmp_path, a + control, b))
    assert result["tasks"].keys() == {"one"} and result["pooled"]["ar"]["num_pairs"] == 9
    assert result["unpaired"]["a"]["one"] == {"ar": [3, 4, 9], "linear_spec": [3, 4, 9]}
    text = compare.markdown(result)
    assert "Left out, 16 answers that only A has: one `ar`, `linear_spec` 3-4, 9; two `ar`, `linear_spec` 0-4." in text
    assert "Left out, 1 answers that only B has: three `ar` 7." in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"question_hash": "other"},
            'sample 2: question_hash is "q2" in .*a and "other" in .*b; .*the same data and --',
        ),
        ({"gold": "else"}, 'gold is "gold 2" in .* "else"'),
        ({"seed": 8}, None),
        (
            {"metric_style": "lmms"},
            'metric_style is "strict" in .* "lmms" in .*; the first run.s command again with --metric-style lmms',
        ),
        ({"metric": "f1"}, "metric is"),
    ],
)
def test_runs_over_other_questions_or_rules_are_refused(tmp_path: Path, changes: Any, message: str | None) -> None:
    a, b = runs(7, {"one": 4})
    b[2] |= changes
    paths = folders(tmp_path, a, b)
    if message is None:  # A has no seed to differ from
        compare.compare(*paths)
        return
    with pytest.raises(ValueError, match=message):
        compare.compare(*paths)


def test_nothing_to_compare_is_said(tmp_path: Path) -> None:
    a, b = folders(tmp_path, runs(8, {"one": 2})[0], runs(8, {"two": 2})[1])
    with pytest.raises(ValueError, match="no task, mode and sample in common"):
        compare.compare(a, b)
    with pytest.raises(ValueError, match="nowhere holds no answers"):
        compare.compare(a, tmp_path / "nowhere")


def test_settings_that_differ_are_listed(tmp_path: Path) -> None:
    paths = folders(tmp_path, *runs(9, {"one": 5}))
    for path, threshold, weights in zip(paths, (0.9, 0.6), ("abc", "def"), strict=True):
        told = {"settings": {"model": "m", "threshold": threshold, "output": str(path), "seed": 0}}
        (path / "report.json").write_text(json.dumps(told), encoding="utf-8")
        (path / "settings.json").write_text(json.dumps({"model": weights}), encoding="utf-8")
    result = compare.compare(*paths)
    assert result["different_settings"] == {"threshold": [0.9, 0.6], "weights": ["abc", "def"]}
    assert "threshold 0.9 / 0.6" in compare.markdown(result)


def test_answers_without_a_decode_forward_have_no_ratio(tmp_path: Path) -> None:
    a = [line("one", "ar", i, 1.0, 1, 0) for i in range(3)]
    result = compare.compare(*folders(tmp_path, a, a))
    cell = result["tasks"]["one"]["ar"]
    assert cell["tpf_ratio"] is None and cell["tpf_interval"] is None and cell["identical"] == 3
    assert "| – | – | – | – |" in compare.markdown(result)


def test_written_files_and_table(tmp_path: Path) -> None:
    a, b = folders(tmp_path, *runs(10, {"one": 6, "two": 6}))
    result = compare.compare(a, b)
    compare.write(result, tmp_path / "out" / "deep")
    assert json.loads((tmp_path / "out" / "deep" / "compare.json").read_text(encoding="utf-8")) == result
    text = (tmp_path / "out" / "deep" / "compare.md").read_text(encoding="utf-8")
    assert text == compare.markdown(result) + "\n" and "percentile bootstrap" in text
    table = text.split("\n\n")[0].splitlines()
    assert len(table) == 2 + 2 + 1 + 1 and len({row.count("|") for row in table}) == 1
    cell = result["tasks"]["two"]["linear_spec"]
    assert f"{cell['difference']:+.3f} | {cell['interval'][0]:+.3f} to {cell['interval'][1]:+.3f}" in table[3]


def test_a_benchmarks_own_score_is_told_where_it_is_no_mean_over_samples(tmp_path: Path) -> None:
    a = [line("mmstar", "ar", i, float(i < 2), 5, 4, category="x" if i < 3 else "y", macro=True) for i in range(4)]
    b = [r | {"score": 1.0} for r in a]
    result = compare.compare(*folders(tmp_path, a, b))
    cell = result["tasks"]["mmstar"]["ar"]
    assert (cell["score_a"], cell["reported_a"]) == (0.5, pytest.approx(1 / 3))
    assert "own scores are (A / B): mmstar `ar` 0.333 / 1.000." in compare.markdown(result)


def test_ranges() -> None:
    assert compare._ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert compare._ranges(list(range(0, 40, 2))) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
