"""Local copies in every form give the rows that the hub's files give; what is not there is told in one line."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from benchmark_fixtures import FIXTURES, shown

from trimode_vlm.eval import sources
from trimode_vlm.eval.sources import Rows, Source
from trimode_vlm.eval.tasks import EvalTask, images_of, select
from trimode_vlm.eval.tsv_rows import TsvRows, as_list
from trimode_vlm.vision.images import open_image

CHARTQA = FIXTURES["chartqa"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
    sources._open.cache_clear()


def chartqa(path: Path | str) -> EvalTask:
    return select(["chartqa"], {"chartqa": str(path)})[0]


def png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def write(kind: str, folder: Path) -> Path:
    """The three rows of ChartQA in one of the forms of a local copy; returns what --data would name."""
    dataset = CHARTQA.dataset()
    other = dataset.select([2, 1])
    if kind == "parquet":
        dataset.to_parquet(str(folder / "anything.parquet"))
        return folder / "anything.parquet"
    if kind == "shards":
        for n in range(3):
            dataset.select([n]).to_parquet(str(folder / f"part-{n}.parquet"))
        return folder / "part-*.parquet"
    if kind == "folder of unnamed files":
        dataset.to_parquet(str(folder / "0.parquet"))
        return folder
    if kind == "repository":
        (folder / "data").mkdir()
        other.to_parquet(str(folder / "data" / "train-00000-of-00001.parquet"))
        dataset.to_parquet(str(folder / "data" / "test-00000-of-00001.parquet"))
        return folder
    if kind == "saved":
        dataset.save_to_disk(str(folder / "saved"))
        return folder / "saved"
    if kind == "saved with splits":
        datasets.DatasetDict({"train": other, "test": dataset}).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    rows = [{key: value for key, value in row.items() if key != "image"} for row in CHARTQA.rows]
    (folder / "images").mkdir()
    for n, row in enumerate(rows):
        shown(n).save(folder / "images" / f"{n}.png")
        row["image"] = f"{n}.png" if n else "images/0.png"
    if kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return folder / "a.jsonl"
    if kind == "json":
        rows[1]["image"] = base64.b64encode(png(shown(1))).decode()
        (folder / "a.json").write_text(json.dumps(rows), encoding="utf-8")
        return folder / "a.json"
    if kind == "json folder":
        (folder / "test.json").write_text(json.dumps(rows), encoding="utf-8")
        (folder / "train.json").write_text(json.dumps(rows[:1]), encoding="utf-8")
        return folder
    if kind == "imagefolder":
        lines = [{**row, "file_name": f"{n}.png"} for n, row in enumerate(rows)]
        for line in lines:
            del line["image"]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "images" / "metadata.jsonl").write_text(text, encoding="utf-8")
        return folder / "images"
    assert kind == "tsv with the hub's columns"
    lines = ["\t".join(["type", "question", "answer", "image"])]
    lines += ["\t".join([row["type"], row["question"], row["answer"], row["image"]]) for row in rows]
    (folder / "a.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


KINDS = ("parquet", "shards", "folder of unnamed files", "repository", "saved", "saved with splits")
KINDS += ("jsonl", "json", "json folder", "imagefolder", "tsv with the hub's columns")


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_local_copy(kind: str, tmp_path: Path) -> None:
    task = chartqa(write(kind, tmp_path))
    assert task.num_examples == 3
    # Any row at any time.
    for index in (2, 0, 1):
        example = task.example(index, 0)
        assert (example.gold, example.category) == (CHARTQA.rows[index]["answer"], CHARTQA.categories[index])
        (picture,) = images_of(example.messages)
        assert np.array_equal(np.asarray(open_image(picture)), np.asarray(shown(index)))


def test_a_clone_of_a_repository_with_configurations(tmp_path: Path) -> None:
    """DocVQA and InfoVQA lie in one repository, with or without the card that names them."""
    for name in ("docvqa", "infovqa"):
        FIXTURES[name].write(tmp_path)
    for card in (False, True):
        if card:
            configs = [
                {"config_name": c, "data_files": [{"split": "validation", "path": f"{c}/validation-*"}]}
                for c in ("DocVQA", "InfographicVQA")
            ]
            (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
        sources._open.cache_clear()
        for name in ("docvqa", "infovqa"):
            (task,) = select([name], {name: str(tmp_path)})
            found = [task.example(i, 0).gold for i in range(task.num_examples or 0)]
            assert found == [row["answers"] for row in FIXTURES[name].rows]
    with pytest.raises(ValueError, match=r"it has the configurations DocVQA, InfographicVQA; name one by config:"):
        chartqa(tmp_path).example(0, 0)


def test_the_hub_under_both_names_of_an_organisation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, name: Any, *, split: str, streaming: bool) -> Any:
        asked.append((path, name, split))
        if path.startswith("lmms-lab/"):
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        return FIXTURES["docvqa"].dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (task,) = select(["docvqa"])
    assert asked == []
    assert task.num_examples == 2 and task.example(1, 0).gold == FIXTURES["docvqa"].rows[1]["answers"]
    # Opened once, however often it is asked and selected.
    assert select(["docvqa"])[0].num_examples == 2
    assert asked == [(f"{name}/DocVQA", "DocVQA", "validation") for name in ("lmms-lab", "lmms-lab-encoder")]


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, *args: Any, **options: Any) -> Any:
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError) as error:
        select(["ai2d"])[0].num_examples  # noqa: B018
    message = str(error.value)
    assert message.startswith("ai2d: ") and message.endswith("--data ai2d=FOLDER_OR_FILE") and "\n" not in message
    assert "lmms-lab/ai2d" in message and "lmms-lab-encoder/ai2d" in message and "cannot be reached" in message


@pytest.mark.parametrize(
    ("files", "data", "message"),
    [
        ({}, "missing.parquet", r"chartqa: .*missing.parquet: no such file or folder"),
        ({}, "missing.tsv", r"chartqa: .*missing.tsv: no such file"),
        ({"a.txt": "x"}, "a.txt", r"chartqa: .*a.txt: cannot read this kind of file"),
        ({"a.jsonl": ""}, "a.jsonl", r"a.jsonl holds no rows"),
        ({"a.tsv": "index\tquestion\n"}, "a.tsv", r"a.tsv holds no rows"),
        ({"a.tsv": "a\ta\n1\t2\n"}, "a.tsv", r"a.tsv: its header names a column twice"),
        ({"a.jsonl": "{"}, "a.jsonl", r"not valid JSON"),
        ({"a.jsonl": "[1]"}, "a.jsonl", r"chartqa: a.jsonl row 0 must be a mapping of columns"),
        (
            {"d/x.json": "[{}]", "d/y.json": "[{}]"},
            "d",
            r"no file begins with the split 'test' \(found x.json, y.json\)",
        ),
        ({"d/notes.md": "x"}, "d", r"chartqa: .*d: cannot be opened"),
    ],
)
def test_what_cannot_be_opened(files: dict[str, str], data: str, message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        chartqa(tmp_path / data).example(0, 0)
    assert "\n" not in str(error.value)


def test_a_split_that_is_not_there(tmp_path: Path) -> None:
    dataset = CHARTQA.dataset()
    datasets.DatasetDict({"train": dataset, "val": dataset}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"chartqa: .*no split 'test'.*\(splits: train, val\)"):
        chartqa(tmp_path / "saved").example(0, 0)
    (tmp_path / "map.yaml").write_text("path: saved\nsplit: val\n", encoding="utf-8")
    assert chartqa(tmp_path / "map.yaml").num_examples == 3


def test_a_picture_that_is_not_there(tmp_path: Path) -> None:
    row = {"type": "human_test", "question": "?", "answer": "1"}
    for value, message in (("no.png", "no.png: no such image file in"), ("https://x/y.png", "URLs are not fetched")):
        path = tmp_path / f"{len(value)}.jsonl"
        path.write_text(json.dumps({**row, "image": value}) + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match=rf"^chartqa: {path.name} row 0: .*{message}"):
            chartqa(path).example(0, 0)
    shown(1).save(tmp_path / "no.png")
    (tmp_path / "map.yaml").write_text(f"path: {len('no.png')}.jsonl\nimages: .\n", encoding="utf-8")
    assert images_of(chartqa(tmp_path / "map.yaml").example(0, 0).messages) == [str(tmp_path / "no.png")]


def test_rows_travel_to_other_processes(tmp_path: Path) -> None:
    rows = Rows(Source(path=str(write("parquet", tmp_path))), "chartqa", ("question",))
    assert pickle.loads(pickle.dumps(rows))[1]["question"] == CHARTQA.rows[1]["question"]


# --- TSV ------------------------------------------------------------------------------------------------------------


def test_tsv_cells(tmp_path: Path) -> None:
    """Against pandas, which writes and reads such files: quotes, tabs, line breaks, empty cells, other alphabets."""
    import pandas

    texts = ["plain", 'say "yes"', "two\nlines\r\nor three", "a\ttab", "", "Größe 大小", " spaces ", "'single'"]
    table = pandas.DataFrame({"index": range(100, 108), "question": texts, "C": ["x"] * 8, "hint": ["", "h"] * 4})
    table.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    rows = TsvRows(tmp_path / "a.tsv")
    read = pandas.read_csv(tmp_path / "a.tsv", sep="\t", dtype=str)
    assert len(rows) == len(read) == 8
    for place in (7, 0, 3, 1, 2, 4, 5, 6):
        expected = {key: value for key, value in read.iloc[place].items() if isinstance(value, str)}
        assert {key: value for key, value in rows[place].items() if key in read.columns} == expected
    assert rows[0]["options"] == ["x"]


def test_tsv_pictures(tmp_path: Path) -> None:
    """Base64, several of them, the index of another row, a path, a data URI."""
    cells = [base64.b64encode(png(shown(n))).decode() for n in range(2)]
    images = [cells[0], "7", str(cells), "sub/1.png", f"data:image/png;base64,{cells[1]}", "11"]
    lines = ["index\timage\tquestion\tanswer"]
    lines += [f"{7 + n}\t{cell}\twhat?\t1" for n, cell in enumerate(images)]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    shown(1).save(tmp_path / "sub" / "1.png")
    rows = Rows(Source(path=str(tmp_path / "a.tsv")), "own", ())
    shownas = [[0], [0], [0, 1], [1], [1], [1]]
    for place, expected in enumerate(shownas):
        found = [np.asarray(open_image(rows.picture(value))) for value in rows[place]["images"]]
        assert len(found) == len(expected)
        for one, number in zip(found, expected, strict=True):
            assert np.array_equal(one, np.asarray(shown(number)))
    (tmp_path / "b.tsv").write_text("index\timage\n1\t2\n2\t3\n3\t1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="the image is '2': no picture, no file, and not the index of a row"):
        TsvRows(tmp_path / "b.tsv")[0]


def test_tsv_rows_are_read_where_they_stand(tmp_path: Path) -> None:
    """Opening holds no cell in memory: a file of 24 MiB costs less than one."""
    import tracemalloc

    with (tmp_path / "a.tsv").open("w", encoding="utf-8") as file:
        file.write("index\timage\tanswer\n")
        file.writelines(f"{n}\t{'A' * 2**18}\t{n}\n" for n in range(96))
    tracemalloc.start()
    rows = TsvRows(tmp_path / "a.tsv")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**20 and peak < 2**23
    assert rows[95]["answer"] == "95"


def test_lists_written_as_text() -> None:
    assert as_list("['a', \"b's\", 3]") == ["a", "b's", 3]
    assert as_list("plain") == ["plain"] and as_list(["x"]) == ["x"] and as_list("[]") == []
    for text in ("['a'", "[__import__('os').getcwd()]", "[1] + [2]"):
        with pytest.raises(ValueError, match="a list written as Python writes it"):
            as_list(text)
