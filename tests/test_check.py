"""The check before training finds what training would refuse, counts what it would see, and reads headers only."""

import re

import pytest
from data_cases import chat_row, picture, png, write_jsonl

from trimode_vlm.training import check
from trimode_vlm.training.check import check_data
from trimode_vlm.training.cli import train
from trimode_vlm.training.datasets import DataSettings
from trimode_vlm.training.samples import open_source
from trimode_vlm.vision import images as vision_images


@pytest.fixture
def good(tmp_path):
    """Nine rows, three with a picture, of growing length."""
    picture(70, 30).save(tmp_path / "a.png")
    rows = [chat_row(i, "a.png" if i % 3 == 0 else None, answer="x " * 10 * (i + 1)) for i in range(9)]
    return write_jsonl(tmp_path / "good.jsonl", rows)


@pytest.fixture
def bad(tmp_path):
    """One row of each fault, and more of one kind than a report names."""
    picture(800, 800).save(tmp_path / "big.png")
    (tmp_path / "text.png").write_text("no image")
    rows = [
        chat_row(0),
        chat_row(1, "gone.png"),
        chat_row(2, answer=""),
        chat_row(3, "text.png"),
        {**chat_row(4), "images": [["a.png"]]},
        {"id": "r5", "conversations": [{"from": "hmuan", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        chat_row(6, "big.png"),
        {"caption": "c"},
        {"id": "r8", "conversations": [{"from": "human", "value": "Q"}]},
        *(chat_row(i, "gone.png") for i in range(9, 14)),
    ]
    settings = write_jsonl(tmp_path / "bad.jsonl", rows)
    with open(settings.path, "a", encoding="utf-8") as file:
        file.write("{not JSON\n")
    return settings


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("max_length", [None, 100])
def test_counts_are_those_of_training(good, processor, streaming, max_length):
    settings = DataSettings(path=good.path, streaming=streaming)
    report = check_data([settings], processor, max_length=max_length, progress=False)
    samples = open_source([good], processor, batch_samples=9, max_length=max_length).draw(0, 0, 1)
    (found,) = report.sets
    assert report.ok and found.num_rows == 9
    assert sorted(found.lengths) == sorted(len(sample.input_ids) for sample in samples)
    assert found.num_supervised == sum(sum(sample.loss_mask) for sample in samples)
    assert found.num_images == sum(len(sample.images) for sample in samples) == 3
    whole = open_source([good], processor, batch_samples=9).draw(0, 0, 1)
    assert found.num_cut_tokens == sum(len(sample.input_ids) for sample in whole) - sum(found.lengths)
    assert (found.num_cut_samples > 0) == (max_length is not None)
    lengths = sorted(found.lengths)
    text = str(report)
    assert f"tokens       {sum(lengths)}; per sample: least {lengths[0]}, 50 % {lengths[4]}" in text
    assert f"most {lengths[-1]}" in text and "every sample can be trained on (9 rows read" in text


def test_every_fault_is_found_and_grouped(good, bad, processor, capsys):
    report = check_data([good, bad], processor, max_length=300, progress=False)
    assert not report.ok and report.num_bad == 14
    assert report.sets[0].num_bad == {}
    assert report.sets[1].num_bad == {
        "missing image": 6,
        "empty answer": 1,
        "image": 1,
        "image count": 1,
        "role": 1,
        "too long": 1,
        "format": 1,
        "no answer": 1,
        "JSON": 1,
    }
    text = str(report)
    assert len(text.splitlines()) < 40
    assert re.search(r"6 x missing image\n    bad.jsonl row 1 \(id r1\): gone.png: no such image file in .*\n", text)
    assert "and 3 more" in text and "bad.jsonl row 14: not valid JSON" in text
    assert "data check: 14 bad samples (24 rows read, of images the headers" in text
    assert text.index("missing image") < text.index("empty answer"), "the most frequent first"
    assert capsys.readouterr() == ("", "")
    good_names = {sample.name for sample in draw_all(bad, processor)}
    assert good_names == {"bad.jsonl row 0 (id r0)"}, "what is bad here is bad in training"


def test_torn_pictures_pass_the_quick_command_and_fail_the_whole_one(tmp_path, capsys):
    (tmp_path / "cut.png").write_bytes(png(70, 30)[:70])
    cut = write_jsonl(tmp_path / "cut.jsonl", [chat_row(0, "cut.png")]).path
    options = ["--config", "finetune", "--model", "nano", "--data", cut, "--out", str(tmp_path / "run")]
    assert train([*options, "--check"]) == 0
    assert "of images the headers" in capsys.readouterr().out
    assert train([*options, "--check-images"]) == 1
    found = capsys.readouterr().out
    assert "truncated" in found and "headers" not in found
    assert not (tmp_path / "run").exists()


def draw_all(settings, processor):
    return open_source([settings], processor, batch_samples=15, max_length=300, on_bad_sample="skip").draw(0, 0, 1)


def test_pixels_are_decoded_only_when_asked(good, processor, tmp_path, monkeypatch):
    (tmp_path / "cut.png").write_bytes(png(70, 30)[:70])
    cut = write_jsonl(tmp_path / "cut.jsonl", [chat_row(0, "cut.png"), chat_row(1, "a.png")])
    report = check_data([cut], processor, decode_images=True, progress=False)
    assert report.sets[0].num_bad == {"image": 1} and "truncated" in str(report)
    to_rgb = vision_images._to_rgb
    large = []
    monkeypatch.setattr(vision_images, "_to_rgb", lambda image, name: large.append(image.size) or to_rgb(image, name))
    assert check_data([cut], processor, progress=False).ok
    assert set(large) <= {(1, 1)}, "stand-ins only"


def test_workers_find_the_same(good, bad, processor):
    reports = [check_data([good, bad], processor, workers=n, max_length=300, progress=False) for n in (0, 2)]
    assert str(reports[0]) == str(reports[1])


def test_a_data_set_that_cannot_be_opened_is_an_error(processor, tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        check_data([DataSettings(path=str(tmp_path / "gone.jsonl"))], processor)


def test_weights_are_told(good, processor):
    weighted = DataSettings(path=good.path, weight=2.5)
    assert "good.jsonl: 9 rows, weight 2.5, 0 bad" in str(check_data([weighted], processor, progress=False))
    assert check.SetReport("empty", 1.0).num_rows == 0
