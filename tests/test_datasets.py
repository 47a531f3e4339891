"""Data sets of every kind open as the same rows; slices, splits and mixtures take what they say."""

import collections
import json
import os
import pickle
import random
import subprocess
import sys

import datasets
import numpy as np
import pytest
from data_cases import picture, png, write_jsonl
from PIL import Image

from trimode_vlm.bad_samples import BadSample
from trimode_vlm.json_rows import JsonRows
from trimode_vlm.row_images import column_images
from trimode_vlm.training.datasets import DataSettings, data_settings
from trimode_vlm.training.mixture import Mixture, StreamMember, TableMember, quotas, sample_id_bases
from trimode_vlm.training.tables import open_table
from trimode_vlm.vision.images import image_size, open_image


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def rows_of(table):
    if hasattr(table, "items"):
        return [table.read(row) for _, _, row in table.items()]
    return [table.read(i) for i in range(len(table))]


def opened(path, **options):
    return open_table(DataSettings(path=str(path), **options))


# --- settings -------------------------------------------------------------------------------------------------------


def test_settings_from_yaml():
    assert data_settings("a.jsonl") == (DataSettings(path="a.jsonl"),)
    two = data_settings(["a.jsonl[:1000]", {"path": "b", "weight": 2, "columns": {"image": "picture"}}])
    assert two == (
        DataSettings(path="a.jsonl[:1000]"),
        DataSettings(path="b", weight=2.0, columns={"image": "picture"}),
    )
    assert data_settings(two) == two
    wrong = [
        ([], "data names no data set"),
        (None, "data names no data set"),
        ({"weight": 1}, "data has no path"),
        (["a", {"path": "b", "wieght": 2}], "unknown setting 'data[1].wieght'; the nearest known one is"),
        ({"path": "a", "format": "chatml"}, "data.format must be one of"),
        ({"path": "a", "weight": 0}, "data.weight must be above 0"),
        ({"path": "a", "columns": {"picture": "image"}}, "data.columns renames 'picture', which is none of"),
        (["a", 3], "data[1] must be a path or a mapping"),
    ]
    for value, message in wrong:
        with pytest.raises(ValueError) as error:
            data_settings(value)
        assert message in str(error.value) and "\n" not in str(error.value)


# --- JSON -----------------------------------------------------------------------------------------------------------

ODD_ROWS = [
    {"text": "2021-01-01", "n": 1},
    {"text": "line\nbreak\u2028 世界 👩‍👩‍👧", "extra": [1, {"a": None}]},
    {"content": "text"},
    {"content": [{"type": "text"}], "deep": {"b": "é, ]}"}},
    ["a", "list"],
    {"text": "[{,"},
]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_json_lists_equal_json_load(tmp_path, ascii_only, indent, bom):
    path = tmp_path / "a.json"
    path.write_text(bom + "\n" + json.dumps(ODD_ROWS, ensure_ascii=ascii_only, indent=indent) + "\n", encoding="utf-8")
    assert rows_of(opened(path)) == ODD_ROWS


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n \n\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_json_lines_equal_json_loads(tmp_path, end, name, bom):
    lines = [json.dumps(row, ensure_ascii=bool(i % 2)) for i, row in enumerate(ODD_ROWS)]
    (tmp_path / name).write_bytes((bom + end.join(lines)).encode())
    assert rows_of(opened(tmp_path / name)) == ODD_ROWS
    assert rows_of(opened(tmp_path / name, streaming=True)) == ODD_ROWS


def test_texts_that_look_like_dates_stay_texts(tmp_path):
    rows = [{"text": "2021-01-01"}, {"text": "2021-01-02 10:00:00"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    assert rows_of(opened(tmp_path / "a.jsonl")) == rows
    theirs = datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train")
    assert theirs[0] != rows[0], "the reason for our own reader is gone"


def test_a_broken_line_is_one_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 0}\n{"n": 1\n{"n": 2}\n\xff\xfe\n{"n": 4}\n')
    for table in (opened(path), opened(path, streaming=True)):
        items = [i for _, _, i in table.items()] if hasattr(table, "items") else range(len(table))
        read = []
        for item in items:
            try:
                read.append(table.read(item)["n"])
            except BadSample as error:
                assert error.kind == "JSON" and "\n" not in str(error)
                read.append(None)
        assert read == [0, None, 2, None, 4]
    assert opened(path).name(3) == "a.jsonl row 3"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.json", "[]", "holds no rows"),
        ("a.json", '{\n"data": []\n}', "expected a list of rows"),
        ("a.json", '[{"a": 1}, {"a": 2', "not valid JSON in row 1"),
        ("a.json", '[{"a": 1} {"a": 2}]', "not valid JSON in row 1"),
        ("a.json", '[{"a": 1},', "not valid JSON in row 1"),
        ("a.csv", "a,b", "cannot read this kind of file"),
    ],
)
def test_files_that_hold_no_rows(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        opened(tmp_path / name)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_rows_are_read_from_the_file_and_survive_pickling(tmp_path):
    rows = [{"n": i, "text": "x" * 1000} for i in range(2000)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    found = JsonRows([tmp_path / "a.jsonl"])
    packed = pickle.dumps(found)
    assert len(packed) < 100_000, "places, not rows"
    assert [pickle.loads(packed)[i]["n"] for i in (0, 7, 1999)] == [0, 7, 1999]


# --- Parquet, Arrow, folders, the hub -------------------------------------------------------------------------------

IMAGE_ROWS = [
    {
        "id": i,
        "image": picture(20 + i, 30, (10 * i, 0, 0)),
        "images": [picture(5 + j, 6) for j in range(i % 3)],
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"yo {i}"}],
    }
    for i in range(8)
]
FEATURES = datasets.Features(
    {
        "id": datasets.Value("int64"),
        "image": datasets.Image(),
        "images": datasets.List(datasets.Image()),
        "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
    }
)


def write_dataset(kind, folder):
    dataset = datasets.Dataset.from_list(IMAGE_ROWS, features=FEATURES)
    if kind == "parquet":
        dataset.to_parquet(str(folder / "a.parquet"))
        return folder / "a.parquet"
    if kind == "disk":
        dataset.save_to_disk(str(folder / "saved"))
        return folder / "saved"
    if kind == "disk with splits":
        datasets.DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    if kind == "folder":
        (folder / "data").mkdir()
        dataset.to_parquet(str(folder / "data" / "train-00000-of-00001.parquet"))
        dataset.select([0]).to_parquet(str(folder / "data" / "test-00000-of-00001.parquet"))
        return folder / "data"
    for shard in range(2):
        dataset.select(range(4 * shard, 4 * shard + 4)).to_parquet(str(folder / f"part-{shard}.parquet"))
    return folder / "part-*.parquet"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "disk", "disk with splits", "folder", "shards"])
def test_the_datasets_librarys_files(tmp_path, kind, streaming):
    path = write_dataset(kind, tmp_path)
    table = opened(path, streaming=streaming)
    found = rows_of(table)
    assert [row["id"] for row in found] == list(range(8))
    for row, expected in zip(found, IMAGE_ROWS, strict=True):
        assert row["messages"] == expected["messages"]
        assert [isinstance(row["image"]["bytes"], bytes), len(row["images"])] == [True, len(expected["images"])]
        for image, original in zip(
            [row["image"], *row["images"]], [expected["image"], *expected["images"]], strict=True
        ):
            assert np.array_equal(np.asarray(open_image(image)), np.asarray(original))
            assert image_size(image) == (original.height, original.width)
    name = next(iter(table.items()))[1] if streaming else table.name(0)
    assert name.endswith(" row 0") and path.name.split(".")[0] in name


def test_the_librarys_progress_bars_stay_out_of_log_files(tmp_path):
    """In a process of its own, whose stderr is no terminal."""
    write_dataset("parquet", tmp_path)
    code = "from trimode_vlm.training.datasets import DataSettings; from trimode_vlm.training.tables import open_table;"
    code += f"assert len(open_table(DataSettings(path={str(tmp_path / 'a.parquet')!r}))) == 8"
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""


def test_bytes_paths_and_mixed_types_from_arrow(tmp_path):
    import pandas

    (tmp_path / "images").mkdir()
    picture().save(tmp_path / "images" / "b.png")
    pandas.DataFrame({"image": [png(), png()], "prompt": ["a", "b"]}).to_parquet(tmp_path / "bytes.parquet")
    assert [open_image(row["image"]).size for row in rows_of(opened(tmp_path / "bytes.parquet"))] == [(60, 40)] * 2
    messages = [
        [{"role": "user", "content": "text"}, {"role": "assistant", "content": "42"}],
        [{"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]}],
    ]
    mixed = datasets.Dataset.from_dict({"messages": messages}, on_mixed_types="use_json")
    mixed.save_to_disk(str(tmp_path / "mixed"))
    assert [row["messages"] for row in rows_of(opened(tmp_path / "mixed"))] == messages
    assert [row["messages"] for row in rows_of(opened(tmp_path / "mixed", streaming=True))] == messages


def test_an_image_folder_as_the_hub_has_them(tmp_path):
    folder = tmp_path / "pets"
    (folder / "train").mkdir(parents=True)
    picture().save(folder / "train" / "a.png")
    write_jsonl(folder / "train" / "metadata.jsonl", [{"file_name": "a.png", "prompt": "Q", "completion": "A"}])
    (row,) = rows_of(opened(folder))
    assert row["prompt"] == "Q" and open_image(row["image"]).size == (60, 40)


def test_folders_of_json_files(tmp_path):
    write_jsonl(tmp_path / "train-0.jsonl", [{"n": 0}, {"n": 1}])
    write_jsonl(tmp_path / "train-1.jsonl", [{"n": 2}])
    write_jsonl(tmp_path / "eval.jsonl", [{"n": 9}])
    table = opened(tmp_path)
    assert [row["n"] for row in rows_of(table)] == [0, 1, 2]
    assert [table.name(i) for i in range(3)] == ["train-0.jsonl row 0", "train-0.jsonl row 1", "train-1.jsonl row 0"]
    assert rows_of(opened(tmp_path, split="eval")) == [{"n": 9}]
    assert [row["n"] for row in rows_of(opened(tmp_path / "*.jsonl"))] == [9, 0, 1, 2]
    with pytest.raises(ValueError, match=r"no file begins with the split 'test' \(found eval.jsonl"):
        opened(tmp_path, split="test")


def test_what_is_not_there(tmp_path, monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for path in (tmp_path / "gone.jsonl", tmp_path / "gone", "gone.parquet", "./gone"):
        with pytest.raises(ValueError, match="no such file or folder$"):
            opened(path)
    with pytest.raises(ValueError, match=r"^owner/name \(train\): no such file or folder here, and the hub cannot be"):
        opened("owner/name")
    calls = []

    def reached(*args, **options):
        calls.append((args, options))
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", reached)
    with pytest.raises(ValueError, match="cannot be loaded .*DatasetNotFoundError"):
        opened("owner/name[:5]", name="small", split="validation", streaming=True)
    assert calls == [(("owner/name", "small"), {"streaming": True, "split": "validation"})]


def test_a_split_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"no split 'eval'; it has train, test"):
        opened(write_dataset("disk with splits", tmp_path), split="eval")
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="cannot be loaded .*Unknown split") as error:
        opened(write_dataset("folder", tmp_path / "b"), split="eval")
    assert "\n" not in str(error.value)


# --- slices and parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 7, 10, 33])
@pytest.mark.parametrize(
    "piece", ["[:5]", "[5:]", "[-3:]", "[:-3]", "[2:4]", "[:10%]", "[10%:]", "[33%:66%]", "[-50%:]"]
)
def test_slices_equal_those_of_the_datasets_library(tmp_path, num_rows, piece):
    write_jsonl(tmp_path / "a.jsonl", [{"n": i} for i in range(num_rows)])
    everything = datasets.Dataset.from_dict({"n": list(range(num_rows))})
    instruction = datasets.ReadInstruction.from_spec(f"train{piece}")
    (absolute,) = instruction.to_absolute({"train": num_rows})
    expected = everything[absolute.from_ : absolute.to]["n"]
    try:
        found = [row["n"] for row in rows_of(opened(f"{tmp_path / 'a.jsonl'}{piece}"))]
    except ValueError as error:
        assert "no rows are left" in str(error)
        found = []
    assert found == expected


def test_slices_keep_the_rows_own_numbers_and_limit(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"n": i} for i in range(10)])
    table = opened(f"{tmp_path / 'a.jsonl'}[4:]", limit=2)
    assert [table.name(i) for i in range(len(table))] == ["a.jsonl row 4", "a.jsonl row 5"]
    stream = opened(f"{tmp_path / 'a.jsonl'}[4:8]", limit=2, streaming=True)
    assert [name for _, name, _ in stream.items(skip=1)] == ["a.jsonl row 5"]
    for piece in ("[:10%]", "[-3:]"):
        with pytest.raises(ValueError, match="needs plain numbers"):
            opened(f"{tmp_path / 'a.jsonl'}{piece}", streaming=True)
    (tmp_path / "odd[1:2]").mkdir()
    write_jsonl(tmp_path / "odd[1:2]" / "train.jsonl", [{"n": 1}])
    assert rows_of(opened(tmp_path / "odd[1:2]")) == [{"n": 1}], "a folder of that name wins"


@pytest.mark.parametrize("streaming", [False, True])
def test_train_and_eval_parts_share_nothing_and_leave_nothing_out(tmp_path, streaming):
    write_jsonl(tmp_path / "a.jsonl", [{"n": i} for i in range(200)])
    table = opened(tmp_path / "a.jsonl", streaming=streaming)
    parts = [[row["n"] for row in rows_of(table.part(part, 0.1))] for part in ("train", "eval")]
    assert sorted(parts[0] + parts[1]) == list(range(200)) and parts[1] == sorted(parts[1])
    assert len(parts[1]) == 20 if not streaming else 8 <= len(parts[1]) <= 35
    assert parts[1] != list(range(20)) and parts[1] != list(range(180, 200))
    if streaming:
        skipped = [row for _, _, row in table.part("train", 0.1).items(skip=5)]
        assert [table.read(row)["n"] for row in skipped] == parts[0][5:]
        return
    small = opened(f"{tmp_path / 'a.jsonl'}[:3]")
    assert [len(small.part(part, 0.01)) for part in ("train", "eval")] == [2, 1]
    with pytest.raises(ValueError, match="1 rows cannot be split"):
        opened(f"{tmp_path / 'a.jsonl'}[:1]").part("eval", 0.5)


# --- mixtures -------------------------------------------------------------------------------------------------------


def members_of(tmp_path, sizes, streaming=False, window=4):
    made = []
    for i, size in enumerate(sizes):
        write_jsonl(tmp_path / f"{i}.jsonl", [{"n": k} for k in range(size)])
        table = opened(tmp_path / f"{i}.jsonl", streaming=streaming)
        made.append(StreamMember(table, f"key{i}", window) if streaming else TableMember(table, f"key{i}"))
    return made


def test_a_weight_is_how_often_each_row_is_seen_in_an_epoch(tmp_path):
    weights, sizes = (1, 2.5, 0.25), (10, 6, 20)
    members = members_of(tmp_path, sizes)
    mixture = Mixture(quotas(sizes, weights), seed=3)
    assert mixture.quotas == (10, 15, 5) and mixture.epoch_samples == 30
    seen = [collections.Counter() for _ in sizes]
    for epoch in range(4):
        this = [collections.Counter() for _ in sizes]
        for number in range(30 * epoch, 30 * epoch + 30):
            member, place = mixture.locate(number)
            drawn = members[member].draw(place)
            this[member][drawn.index] += 1
            assert drawn.epoch == seen[member][drawn.index] + this[member][drawn.index] - 1, "earlier visits"
        assert [sum(counter.values()) for counter in this] == [10, 15, 5]
        assert set(this[0].values()) == {1} and set(this[1].values()) == {2, 3}
        assert not set(this[2]) & set(seen[2]), "a fraction takes another part each epoch"
        seen = [a + b for a, b in zip(seen, this, strict=True)]
    assert set(seen[1].values()) == {10} and set(seen[2].values()) == {1}


def test_orders_change_with_epoch_and_seed_only(tmp_path):
    (member,) = members_of(tmp_path, [50])
    order = [[member.draw(50 * epoch + i).index for i in range(50)] for epoch in range(2)]
    assert order[0] != order[1] and sorted(order[0]) == sorted(order[1]) == list(range(50))
    assert [TableMember(member.table, "key0").draw(i).index for i in range(50)] == order[0]
    assert [TableMember(member.table, "other").draw(i).index for i in range(50)] != order[0]
    assert [TableMember(member.table, "key0", shuffle=False).draw(i).index for i in range(50)] == list(range(50))
    mixed = [[Mixture((30, 20), seed).locate(n)[0] for n in range(50)] for seed in (0, 0, 1)]
    assert mixed[0] == mixed[1] != mixed[2] and sum(mixed[0]) == 20
    plain = [Mixture((3, 2), 0, shuffle=False).locate(n) for n in range(10)]
    assert plain[:5] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)] and plain[5:7] == [(0, 3), (0, 4)]


@pytest.mark.parametrize("size, window", [(13, 4), (12, 4), (3, 8), (5, 1)])
def test_a_stream_is_a_function_of_the_draw_alone(tmp_path, size, window):
    (member,) = members_of(tmp_path, [size], streaming=True, window=window)
    straight = [member.draw(i) for i in range(3 * size)]
    for epoch in range(3):
        part = straight[epoch * size : (epoch + 1) * size]
        assert sorted(drawn.index for drawn in part) == list(range(size))
        assert {drawn.epoch for drawn in part} == {epoch}
    if window == 1:
        assert [drawn.index for drawn in straight] == [*range(size)] * 3
    elif size > window:
        assert [d.index for d in straight[:size]] != [d.index for d in straight[size : 2 * size]]
    rng = random.Random(0)
    for number in [rng.randrange(3 * size) for _ in range(20)]:
        (fresh,) = members_of(tmp_path, [size], streaming=True, window=window)
        for drawn in (fresh.draw(number), member.draw(number), pickle.loads(pickle.dumps(member)).draw(number)):
            expected = straight[number]
            assert (drawn.index, drawn.epoch, drawn.read()) == (expected.index, expected.epoch, expected.read())


def test_a_stream_reads_each_row_once(tmp_path, monkeypatch):
    (member,) = members_of(tmp_path, [40], streaming=True, window=8)
    opened_at, items = [], type(member.stream).items
    monkeypatch.setattr(type(member.stream), "items", lambda self, skip=0: opened_at.append(skip) or items(self, skip))
    for number in range(0, 40, 3):
        member.draw(number)
    assert opened_at == [0], "steps of other ranks are skipped, not read again"
    resumed = pickle.loads(pickle.dumps(member))
    resumed.draw(35)
    assert opened_at == [0, 32], "a resumed run starts at its window"


def test_weights_of_streams_are_shares():
    mixture = Mixture(quotas([None, 50], [3, 1]))
    drawn = collections.Counter(mixture.locate(n)[0] for n in range(4000))
    assert drawn == {0: 3000, 1: 1000}
    early = collections.Counter(mixture.locate(n)[0] for n in range(200))
    assert 120 < early[0] < 180, "mixed from the start"


def test_sample_ids_never_meet_and_stay():
    names = ["a", "b", "a", "c"]
    bases = sample_id_bases(names)
    assert len(set(bases)) == 4 and all(base % 2**40 == 0 and base + 2**40 <= 2**63 for base in bases)
    assert sample_id_bases(["c", "b"]) == (bases[3], bases[1]), "whatever else is in the mixture"


def test_images_of_a_column():
    image = Image.new("RGB", (1, 1))
    assert column_images(None, "") == column_images([], None) == []
    assert column_images(None, image) == column_images([image], "other.png") == [image]
    assert column_images(["a", None, ""], None) == ["a"]
