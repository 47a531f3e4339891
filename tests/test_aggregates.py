"""What a benchmark reports, beside scikit-learn, the kits' own aggregates, and a bootstrap for the standard errors."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import kits
import numpy as np
import pytest

from trimode_vlm.eval.aggregates import summarise
from trimode_vlm.eval.metrics import score

Rows = list[dict[str, Any]]


def pope_rows(n: int, unknown: float = 0.0, seed: int = 0) -> Rows:
    """Answers that say yes too often, `unknown` of them neither yes nor no."""
    generator = random.Random(seed)
    rows = []
    for i in range(n):
        gold = generator.choice(["yes", "no"])
        text = gold if generator.random() < 0.7 else "yes"
        text = "perhaps" if generator.random() < unknown else text
        scored = score("yes_no", text, gold)
        category = generator.choice(["random", "popular", "adversarial"])
        rows.append({"score": scored.score, "parsed": scored.parsed, "gold": gold, "category": category, "id": i})
    return rows


def mme_rows(seed: int = 0) -> Rows:
    """Two questions about each of some images of four categories; one image's name occurs in two categories."""
    generator = random.Random(seed)
    rows = []
    for category in ("count", "OCR", "code_reasoning", "text_translation"):
        for image in range(generator.randint(6, 12)):
            for gold in ("Yes", "No"):
                right = float(generator.random() < 0.7)
                info = {"image_id": f"{image}.png"}
                rows.append({"score": right, "parsed": "yes", "gold": gold, "category": category, "info": info})
    generator.shuffle(rows)
    return rows


def test_mean_error_and_categories() -> None:
    rows = [
        {"score": 1.0, "parsed": "7", "category": "human"},
        {"score": 0.0, "parsed": None, "category": "human"},
        {"score": 0.5, "parsed": "8", "category": "augmented"},
        {"score": 1.0, "category": None},
    ]
    found = summarise("relaxed_accuracy", rows)
    deviation = np.std([1, 0, 0.5, 1], ddof=1)
    assert found["score"] == 0.625 and found["num_samples"] == 4 and found["unparsed_rate"] == 0.25
    assert found["standard_error"] == pytest.approx(deviation / 2)
    assert found["categories"] == {
        "human": {"score": 0.5, "standard_error": pytest.approx(0.5), "num_samples": 2},
        "augmented": {"score": 0.5, "standard_error": None, "num_samples": 1},
    }
    assert found["extra"] == {"macro": 0.5, "macro_standard_error": None}


def test_nothing_to_average() -> None:
    for metric in ("exact_match", "yes_no", "mme"):
        found = summarise(metric, [])
        assert found["score"] is None and found["standard_error"] is None and found["unparsed_rate"] is None
        assert found["num_samples"] == 0 and found["categories"] == {}
    assert summarise("exact_match", [{"score": 1}])["standard_error"] is None


def test_macro_is_mmstars_mean_over_categories() -> None:
    """lmms-eval's aggregate on the same rows, grouped as it groups them; the error by resampling within categories."""
    kit = kits.imported("lmms_eval.tasks.mmstar.utils").mmstar_aggregate_results
    generator = random.Random(1)
    names = ["math"] * 30 + ["logical reasoning"] * 50 + ["coarse perception"] * 12
    rows = [{"score": float(generator.random() < len(name) / 20), "category": name} for name in names]
    found = summarise("multiple_choice", rows, macro=True)
    assert found["score"] == pytest.approx(kit([{"score": r["score"], "l2_category": r["category"]} for r in rows]))
    micro = summarise("multiple_choice", rows)
    assert micro["score"] == pytest.approx(np.mean([r["score"] for r in rows])) != found["score"]
    assert micro["extra"]["macro"] == found["score"]
    assert summarise("multiple_choice", [row | {"macro": True} for row in rows]) == found
    groups = defaultdict(list)
    for row in rows:
        groups[row["category"]].append(row["score"])
    draws = np.random.default_rng(0)
    means = [np.mean([draws.choice(g, len(g)).mean() for g in groups.values()]) for _ in range(1000)]
    assert found["standard_error"] == pytest.approx(np.std(means), rel=0.1)


def test_pope_is_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rows = pope_rows(300, unknown=0.1)
    found = summarise("yes_no", rows)

    def expected(members: Rows) -> dict[str, Any]:
        said = [r["parsed"] == "yes" for r in members]
        true = [r["gold"] == "yes" for r in members]
        values = sklearn.precision_recall_fscore_support(true, said, average="binary")[:3]
        return dict(zip(("precision", "recall", "f1"), values, strict=True)) | {"yes_ratio": np.mean(said)}

    groups = {"": rows} | {name: [r for r in rows if r["category"] == name] for name in ("random", "popular")}
    for name, members in groups.items():
        cell = found["categories"][name] if name else found["extra"]
        for key, value in expected(members).items():
            assert cell[key] == pytest.approx(value), (name, key)
    assert found["score"] == np.mean([r["score"] for r in rows])
    assert 0.05 < found["unparsed_rate"] < 0.15


def test_pope_errors_are_those_of_a_bootstrap() -> None:
    rows = pope_rows(400, unknown=0.05, seed=2)
    found = summarise("yes_no", rows)["extra"]
    draws = random.Random(3)
    again = [summarise("yes_no", draws.choices(rows, k=len(rows)))["extra"] for _ in range(400)]
    for name in ("precision", "recall", "f1"):
        spread = float(np.std([extra[name] for extra in again]))
        assert found[f"{name}_standard_error"] == pytest.approx(spread, rel=0.15), name


def test_pope_beside_the_kits() -> None:
    """Equal where every answer is yes or no, but for lmms-eval's yes ratio, which counts the gold answers."""
    kit = kits.imported("lmms_eval.tasks.pope.utils")
    rows = pope_rows(200)
    found = summarise("yes_no", rows)
    theirs = [{"score": r["score"], "prediction": r["parsed"], "ground_truth": r["gold"]} for r in rows]
    assert found["score"] == kit.pope_aggregate_accuracy(theirs)
    assert found["extra"]["precision"] == pytest.approx(kit.pope_aggregate_precision(theirs))
    assert found["extra"]["recall"] == pytest.approx(kit.pope_aggregate_recall(theirs))
    assert found["extra"]["f1"] == pytest.approx(kit.pope_aggregate_f1_score(theirs))
    assert kit.pope_aggregate_yes_ratio(theirs) == np.mean([r["gold"] == "yes" for r in rows])
    assert found["extra"]["yes_ratio"] == np.mean([r["parsed"] == "yes" for r in rows])


def test_pope_beside_vlmevalkit() -> None:
    """Also where some answers are neither yes nor no."""
    pandas = pytest.importorskip("pandas")
    rating = kits.vlmevalkit(
        "dataset/utils/yorn.py", "POPE_rating", np=np, pd=pandas, load=lambda frame: frame
    ).POPE_rating
    rows = pope_rows(200, unknown=0.2)
    frame = pandas.DataFrame(
        {
            "category": [r["category"] for r in rows],
            "answer": [r["gold"].title() for r in rows],
            "extracted": [(r["parsed"] or "unknown").title() for r in rows],
            "score": [r["score"] for r in rows],
        }
    )
    found = summarise("yes_no", rows)
    for line in rating(frame).to_dict("records"):
        cell = found["extra"] | {"score": found["score"]}
        cell = cell if line["split"] == "Overall" else found["categories"][line["split"]]
        for ours, theirs in (("f1", "Overall"), ("score", "acc"), ("precision", "precision"), ("recall", "recall")):
            assert 100 * cell[ours] == pytest.approx(line[theirs]), (line["split"], ours)


def test_mme_beside_the_kits() -> None:
    lmms = kits.imported("lmms_eval.tasks.mme.utils").mme_aggregate_results
    rows = mme_rows()
    found = summarise("mme", rows)
    theirs = [{"question_id": r["info"]["image_id"], "category": r["category"], "score": r["score"]} for r in rows]
    assert found["extra"]["points"] == pytest.approx(lmms(theirs))
    perception = [row for row in theirs if row["category"] in ("count", "OCR")]
    assert found["extra"]["perception"] == pytest.approx(lmms(perception))
    assert found["extra"]["cognition"] == pytest.approx(lmms([row for row in theirs if row not in perception]))


def test_mme_beside_vlmevalkit() -> None:
    pandas = pytest.importorskip("pandas")
    helpers = {"np": np, "defaultdict": defaultdict, "load": lambda frame: frame, "d2df": lambda scores: scores}
    rating = kits.vlmevalkit("dataset/utils/yorn.py", "MME_rating", **helpers).MME_rating
    rows = mme_rows(seed=1)
    columns = {"category": "category", "score": "score"}
    frame = pandas.DataFrame({ours: [r[theirs] for r in rows] for ours, theirs in columns.items()})
    frame["image_path"] = [r["info"]["image_id"] for r in rows]
    ratings = rating(frame)
    found = summarise("mme", rows)
    assert found["extra"]["perception"] == pytest.approx(ratings["perception"])
    assert found["extra"]["cognition"] == pytest.approx(ratings["reasoning"])
    for name, cell in found["categories"].items():
        assert 100 * (cell["score"] + cell["acc_plus"]) == pytest.approx(ratings[name])


def test_mme_pairs() -> None:
    rows = mme_rows()
    pairs: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        pairs[row["category"], row["info"]["image_id"]].append(row["score"])
    both = [float(all(pair)) for pair in pairs.values()]
    found = summarise("mme", rows)
    assert found["extra"]["acc_plus"] == np.mean(both) and found["extra"]["num_pairs"] == len(both)
    assert found["extra"]["acc_plus_standard_error"] == pytest.approx(np.std(both, ddof=1) / math.sqrt(len(both)))
    # A limit can cut a pair in two: its image counts for accuracy alone.
    cut = summarise("mme", rows[1:])["extra"]
    assert cut["num_pairs"] == len(both) - 1
    third = {"score": 1.0, "category": "count", "info": {"image_id": "0.png"}}
    with pytest.raises(ValueError, match="2 questions about an image, found 3 about 0.png \\(count"):
        summarise("mme", [*rows, third])


def test_ocrbench_points_and_subjects() -> None:
    kinds = ["Regular Text Recognition"] * 3 + ["Key Information Extraction"] * 2
    rows = [{"score": float(i != 1), "category": kind} for i, kind in enumerate(kinds)]
    found = summarise("ocrbench", rows)
    assert found["extra"]["points"] == 4
    assert {name: cell["points"] for name, cell in found["categories"].items()} == {kinds[0]: 2, kinds[3]: 2}
    subjects = summarise("mmmu", [{"score": 1.0, "category": f"subject {i % 30}"} for i in range(900)])["categories"]
    assert len(subjects) == 30 and all(cell["num_samples"] == 30 for cell in subjects.values())
