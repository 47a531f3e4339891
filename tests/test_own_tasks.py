"""A user's own task: a YAML file over any data, or a bare file of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from benchmark_fixtures import shown
from test_benchmarks import CHOICE, as_tsv, shape

from trimode_vlm.eval.metrics import score
from trimode_vlm.eval.tasks import EvalTask, images_of, select
from trimode_vlm.vision.images import open_image

ROWS = [
    {
        "frage": f"What is {n}?",
        "label": ["one", "eins"] if n else ["null"],
        "front": f"{n}.png",
        "back": [f"{1 - n}.png"],
    }
    | {"kind": "even" if n % 2 == 0 else "odd", "level": n}
    for n in range(2)
]
SAID = {"path": "data/rows.jsonl", "prompt": "frage", "answer": "label", "image": ["front", "back"], "category": "kind"}
SAID |= {"metric": "anls", "max_new_tokens": 12, "info": ["level"]}


def written(folder: Path, said: dict[str, Any] | None = None, rows: Any = ROWS) -> Path:
    """The YAML file, its rows in `data/` and two pictures in `data/images/`."""
    (folder / "data" / "images").mkdir(parents=True, exist_ok=True)
    for n in range(2):
        shown(n).save(folder / "data" / "images" / f"{n}.png")
    write_rows(folder / "data" / "rows.jsonl", rows)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(SAID if said is None else said), encoding="utf-8")
    return path


def write_rows(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def only(path: Path) -> EvalTask:
    (task,) = select([str(path)])
    return task


def test_a_yaml_file(tmp_path: Path) -> None:
    task = only(written(tmp_path))
    assert (task.name, task.num_examples, task.metric, task.max_new_tokens) == ("mine", 2, "anls", 12)
    assert task.needs_image
    example = task.example(1, 0)
    assert shape(example.messages) == "<1><2>What is 1?"
    for found, n in zip(images_of(example.messages), (1, 0), strict=True):
        assert np.array_equal(np.asarray(open_image(found)), np.asarray(shown(n)))
    assert (example.gold, example.category, example.info["level"]) == (["one", "eins"], "odd", 1)
    assert score(task.metric, "eins", example.gold, example.info).score == 1
    # Beside others, in the order asked for.
    assert [t.name for t in select(["text_spell", str(tmp_path / "mine.yaml"), "gsm8k"])] == [
        "text_spell",
        "mine",
        "gsm8k",
    ]


def test_a_template_fills_in_columns_and_nothing_else(tmp_path: Path) -> None:
    rows = [row | {"frage": "Is {kind} {x.__class__} right?"} for row in ROWS]
    template = "Level {level}: {frage} Say {} or {unknown thing}."
    task = only(written(tmp_path, SAID | {"template": template, "image": None}, rows))
    assert task.example(1, 0).messages == [
        {"role": "user", "content": "Level 1: Is {kind} {x.__class__} right? Say {} or {unknown thing}."}
    ]
    assert not task.needs_image
    placed = only(written(tmp_path, SAID | {"template": "<image 2> is not <image 1>: {frage}"}))
    example = placed.example(0, 0)
    assert shape(example.messages) == "<1> is not <2>: What is 0?"
    assert np.array_equal(np.asarray(open_image(images_of(example.messages)[0])), np.asarray(shown(1)))


CHOICES = [
    {"question": "Which?", "options": ["red", "blue"], "answer": answer, "image": "data/images/0.png", "id": f"q{n}"}
    for n, answer in enumerate(["blue", "B", 1])
]


def test_choices(tmp_path: Path) -> None:
    written(tmp_path)
    bare = only(write_rows(tmp_path / "quiz.jsonl", CHOICES))
    assert (bare.name, bare.metric) == ("quiz", "multiple_choice")
    for index in range(3):
        example = bare.example(index, 0)
        assert shape(example.messages) == f"<1>Which?\nA. red\nB. blue{CHOICE}"
        assert example.gold == "B" and example.info == {"question_id": f"q{index}", "choices": ["red", "blue"]}
    (tmp_path / "cot.yaml").write_text(
        yaml.safe_dump(
            {"path": "quiz.jsonl", "metric": "multiple_choice_cot", "template": "{question}\n{choices}\nThink."}
        ),
        encoding="utf-8",
    )
    assert shape(only(tmp_path / "cot.yaml").example(0, 0).messages) == "<1>Which?\nA. red\nB. blue\nThink."


def test_a_bare_file_names_its_metric_in_a_column(tmp_path: Path) -> None:
    rows = [{"prompt": "2 + 2?", "answer": "4", "metric": "contains"}, {"prompt": "3?", "answer": "3", "metric": "x"}]
    task = only(write_rows(tmp_path / "sums.jsonl", rows))
    assert (task.name, task.metric, task.needs_image) == ("sums", "contains", False)
    assert task.example(0, 0).messages == [{"role": "user", "content": "2 + 2?"}]
    with pytest.raises(ValueError, match="row 1: metric 'x', but this task is scored by 'contains'"):
        task.example(1, 0)


def test_the_kits_tsv_as_an_own_task(tmp_path: Path) -> None:
    task = only(as_tsv("mmstar", tmp_path / "bench.tsv"))
    assert (task.metric, task.needs_image, task.num_examples) == ("multiple_choice", True, 2)
    example = task.example(0, 0)
    assert shape(example.messages).startswith("<1>What stands there?\nA. A red car, parked\nB. A bus\n")
    assert (example.gold, example.category) == ("A", "coarse perception")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"metrik": "anls"}, "unknown field 'metrik'; did you mean metric?; known: name, path"),
        ({"metric": "anl"}, "unknown metric 'anl'; did you mean anls"),
        ({"prompt": "question"}, "no column 'question' (columns: frage, label"),
        ({"category": "sort"}, "no column 'sort'"),
        ({"image": "side"}, "no column 'side'"),
        ({"info": ["x"]}, "no column 'x'"),
        ({"template": "{fragen}?"}, "no column 'fragen'"),
        ({"path": None}, "path: must name the data"),
        ({"path": "none.jsonl"}, "none.jsonl: no such file or folder"),
        ({"max_new_tokens": "many"}, "max_new_tokens must be a whole number of at least 1, got 'many'"),
        ({"image": 3}, "image must be a column or a list of columns, got 3"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, SAID | said)
    with pytest.raises(ValueError) as error:
        select([str(path)])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_columns_that_are_not_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a.jsonl: no column question or prompt or .*a YAML file names it: prompt: COLUMN"
    ):
        select([str(write_rows(tmp_path / "a.jsonl", [{"q": "?", "answer": "1"}]))])
    with pytest.raises(ValueError, match=r"'chartqa' is a task already.*--data chartqa=.*chartqa.jsonl"):
        select([str(write_rows(tmp_path / "chartqa.jsonl", [{"question": "?", "answer": "1"}]))])
    task = only(write_rows(tmp_path / "b.jsonl", [{"question": "?", "answer": "1"}, {"question": "?"}]))
    with pytest.raises(ValueError, match=r"b: b.jsonl row 1 has no column 'answer' \(columns: question\)"):
        task.example(1, 0)
    for text in ("- a\n", "path: [\n"):
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="x.yaml: (expected fields|not YAML)"):
            select([str(tmp_path / "x.yaml")])
    with pytest.raises(ValueError, match="y.yaml: cannot be read"):
        select([str(tmp_path / "y.yaml")])
