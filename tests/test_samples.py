"""Samples of a mixture: the same for any number of ranks and after a resume; bad ones by policy; no image cut."""

import collections
import pickle
import random

import pytest
import torch
from data_cases import chat_row, picture, png, write_jsonl
from torch.utils.data import DataLoader, Dataset
from training_cases import noise_settings

from trimode_vlm.bad_samples import BadSample
from trimode_vlm.training.collate import lay_out, micro_batches
from trimode_vlm.training.datasets import DataSettings
from trimode_vlm.training.mixture import StreamMember
from trimode_vlm.training.row_encoding import RowEncoder
from trimode_vlm.training.samples import MAX_TRIES, open_source, read_sample
from trimode_vlm.vision import images as vision_images


@pytest.fixture
def mixed(tmp_path):
    """Two data sets, one of them with pictures."""
    picture(30, 20).save(tmp_path / "a.png")
    picture(70, 20).save(tmp_path / "b.png")
    first = write_jsonl(tmp_path / "first.jsonl", [chat_row(i) for i in range(7)])
    rows = [chat_row(i, [["a.png"], ["a.png", "b.png"]][i % 2]) for i in range(5)]
    second = write_jsonl(tmp_path / "second.jsonl", rows)
    return [first, DataSettings(path=second.path, weight=2)]


def key(sample):
    return sample.sample_id, sample.epoch, sample.name, tuple(sample.input_ids), tuple(sample.loss_mask)


def same(one, other):
    images = [torch.equal(a, b) for a, b in zip(one.images, other.images, strict=True)]
    return key(one) == key(other) and all(images)


def streamed(settings):
    options = {"weight": 1.0, "streaming": True, "shuffle_buffer": 4}
    return [DataSettings(**{**vars(one), **options}) for one in settings]


@pytest.mark.parametrize("kind", ["tables", "streams", "both"])
def test_ranks_part_the_data_and_a_resumed_run_goes_on_with_the_same(mixed, processor, kind):
    settings = {"tables": mixed, "streams": streamed(mixed), "both": [mixed[0], *streamed(mixed)[1:]]}[kind]
    options = {"batch_samples": 6, "seed": 5, "max_length": 200}
    source = open_source(settings, processor, **options)
    assert source.num_samples == (17 if kind == "tables" else None)
    straight = [source.draw(step, 0, 1) for step in range(8)]
    for world in (2, 3, 4):
        ranks = [open_source(settings, processor, **options) for _ in range(world)]
        for step in range(8):
            shares = [ranks[rank].draw(step, rank, world) for rank in range(world)]
            together = [shares[i % world][i // world] for i in range(6)]
            assert all(same(a, b) for a, b in zip(together, straight[step], strict=True))
    resumed = open_source(settings, processor, **options)
    assert all(same(a, b) for step in (5, 6, 7) for a, b in zip(resumed.draw(step, 0, 1), straight[step], strict=True))
    drawn = [sample for step in straight for sample in step]
    assert len({(sample.sample_id, sample.epoch) for sample in drawn}) == len(drawn), "noise never repeats"
    other = open_source(settings, processor, **{**options, "seed": 6})
    assert [key(s) for s in other.draw(0, 0, 1)] != [key(s) for s in straight[0]]


def test_an_epoch_holds_every_row_by_its_weight(mixed, processor):
    source = open_source(mixed, processor, batch_samples=17)
    for epoch in range(2):
        names = collections.Counter(sample.name for sample in source.draw(epoch, 0, 1))
        expected = {f"first.jsonl row {i} (id r{i})": 1 for i in range(7)}
        assert names == {**expected, **{f"second.jsonl row {i} (id r{i})": 2 for i in range(5)}}


def test_evaluation_goes_in_order_and_its_part_is_not_trained_on(mixed, processor):
    options = {"batch_samples": 4, "eval_fraction": 0.3}
    train = open_source(mixed[:1], processor, **options, part="train")
    evaluated = open_source(mixed[:1], processor, **options, part="eval", shuffle=False)
    assert (train.num_samples, evaluated.num_samples) == (5, 2)
    ids = [[sample.sample_id for step in range(3) for sample in s.draw(step, 0, 1)] for s in (train, evaluated)]
    assert not set(ids[0]) & set(ids[1]) and len(set(ids[0]) | set(ids[1])) == 7
    assert ids[1][:2] == sorted(ids[1][:2])
    everything = {s.sample_id for s in open_source(mixed[:1], processor, batch_samples=7).draw(0, 0, 1)}
    assert everything == set(ids[0]) | set(ids[1]), "a sample keeps its id in every part"


class Steps(Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return 4

    def __getitem__(self, step):
        return self.source.draw(step, 0, 1)


@pytest.mark.parametrize("streaming", [False, True])
def test_workers_draw_the_same(mixed, processor, streaming):
    source = open_source(streamed(mixed) if streaming else mixed, processor, batch_samples=3)
    expected = [source.draw(step, 0, 1) for step in range(4)]
    packed = pickle.dumps(source)  # as a spawned worker gets it
    found = list(DataLoader(Steps(pickle.loads(packed)), batch_size=None, num_workers=2))
    assert all(same(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


def test_the_noise_of_a_sample_changes_with_its_epoch_only(mixed, processor):
    source = open_source(mixed, processor, batch_samples=17)
    by_id = {}
    for epoch in range(2):
        for sample in source.draw(epoch, 0, 1):
            by_id.setdefault(sample.sample_id, []).append(sample)
    settings = noise_settings(vision_token_ids=tuple(processor.layout.tokens(1, 2)))
    for visits in by_id.values():
        assert [s.epoch for s in sorted(visits, key=lambda s: s.epoch)] == list(range(len(visits)))
        rows = [lay_out(visit, settings).p_mask for visit in visits]
        assert not torch.equal(rows[0], rows[1]) and torch.equal(rows[0], lay_out(visits[0], settings).p_mask)


def test_samples_go_through_the_collator(mixed, processor):
    settings = noise_settings(vision_token_ids=tuple({*processor.layout.tokens(2, 2)}))
    samples = open_source(mixed, processor, batch_samples=17, max_length=60).draw(0, 0, 1)
    batches = micro_batches(samples, settings, micro_batch_tokens=200)
    assert sum(len(batch.sample_ids) for batch in batches) >= 17
    assert sum(len(b.image_sizes) for b in batches if b.image_sizes is not None) == sum(len(s.images) for s in samples)


# --- bad samples ----------------------------------------------------------------------------------------------------


def with_bad_rows(tmp_path, count=12, bad=(3, 4, 9)):
    picture().save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes(png()[:60])
    (tmp_path / "text.png").write_text("no image")
    rows = [chat_row(i, "a.png" if i % 2 else None) for i in range(count)]
    for i, row in zip(bad, ({"images": "gone.png"}, {"answer": " "}, {"images": "broken.png"}), strict=False):
        rows[i] = chat_row(i, **row)
    return write_jsonl(tmp_path / "train.jsonl", rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_sample_is_left_to_the_policy(tmp_path, processor, streaming):
    (tmp_path / "data").mkdir()
    settings = with_bad_rows(tmp_path / "data")
    settings = DataSettings(path=settings.path, streaming=streaming, shuffle_buffer=5)
    with pytest.raises(BadSample, match=r"^train.jsonl row (3|4|9) \(id r\d\): .") as error:
        open_source([settings], processor, batch_samples=12).draw(0, 0, 1)
    assert "\n" not in str(error.value)
    source = open_source([settings], processor, batch_samples=4, on_bad_sample="skip")
    ranks = [open_source([settings], processor, batch_samples=4, on_bad_sample="report") for _ in range(2)]
    drawn = []
    for step in range(3):
        straight = source.draw(step, 0, 1)
        shares = [ranks[rank].draw(step, rank, 2) for rank in range(2)]
        together = [shares[i % 2][i // 2] for i in range(4)]
        assert all(same(a, b) and a.skipped == b.skipped for a, b in zip(together, straight, strict=True))
        drawn += straight
    assert len(drawn) == 12, "a step keeps its size"
    skipped = sorted(sample.skipped for sample in drawn if sample.skipped)
    assert [message.split(":")[0] for message in skipped] == [f"train.jsonl row {i} (id r{i})" for i in (3, 4, 9)]
    assert "no such image file" in skipped[0] and "answer is empty" in skipped[1] and "truncated" in skipped[2]
    good = {sample.name for sample in drawn if not sample.skipped}
    assert len(good) == 9, "every good row is drawn in its own place"
    assert {sample.name for sample in drawn} == good


def test_the_next_good_row_stands_in(tmp_path, processor):
    settings = with_bad_rows(tmp_path)
    source = open_source([settings], processor, batch_samples=12, on_bad_sample="skip", shuffle=False)
    names = [int(sample.name.split("(id r")[1][:-1]) for sample in source.draw(0, 0, 1)]
    assert names == [0, 1, 2, 5, 5, 5, 6, 7, 8, 10, 10, 11]


def test_data_that_is_bad_throughout_ends_in_an_error(tmp_path, processor):
    settings = write_jsonl(tmp_path / "train.jsonl", [chat_row(i, "gone.png") for i in range(MAX_TRIES + 5)])
    source = open_source([settings], processor, batch_samples=1, on_bad_sample="skip", shuffle=False)
    with pytest.raises(
        BadSample, match=rf"^{MAX_TRIES} bad rows one after another, the first: train.jsonl row 0 \(id r0"
    ):
        source.draw(0, 0, 1)


@pytest.mark.parametrize("name, reason", [("broken.png", "truncated or damaged"), ("text.png", "not an image")])
def test_a_damaged_image_names_file_row_and_id(tmp_path, processor, name, reason):
    with_bad_rows(tmp_path)
    settings = write_jsonl(tmp_path / "bad.jsonl", [chat_row(7), chat_row(8, name)])
    with pytest.raises(BadSample) as error:
        read_sample(settings, processor, 1)
    assert str(error.value).startswith(f"bad.jsonl row 1 (id r8): {tmp_path / name}: ") and reason in str(error.value)
    assert error.value.kind == "image"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_huge_header_is_refused_without_decoding(tmp_path, processor, monkeypatch):
    Image = vision_images.Image
    Image.new("1", (10000, 9000)).save(tmp_path / "huge.png")
    settings = write_jsonl(tmp_path / "train.jsonl", [chat_row(0, "huge.png")])
    monkeypatch.setattr(vision_images, "_to_rgb", lambda *args: pytest.fail("decoded"))
    with pytest.raises(BadSample, match="more than max_pixels"):
        read_sample(settings, processor, 0)


def test_wrong_options(mixed, processor):
    for options, message in [
        ({"on_bad_sample": "ignore"}, "on_bad_sample must be one of raise, skip, report, got 'ignore'"),
        ({"part": "test"}, "part must be one of all, train, eval"),
        ({"part": "eval"}, "eval_fraction must lie between 0 and 1, got 0.0"),
        ({"batch_samples": 0}, "batch_samples must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_source(mixed, processor, **{"batch_samples": 1, **options})


# --- truncation -----------------------------------------------------------------------------------------------------


def test_truncation_never_cuts_inside_an_image(processor, tmp_path):
    image, other = png(60, 90), png(120, 30)
    turns = [("<image>Q one", "first answer"), ("Q two <image> end", "second answer"), ("Q three", "third")]
    row = {
        "conversations": [{"from": f, "value": v} for q, a in turns for f, v in (("human", q), ("gpt", a))],
        "images": [image, other],
    }
    settings = DataSettings(path="x")
    whole = RowEncoder(settings, tmp_path, processor).lay_out(row)
    first_answer = whole.loss_mask.index(True)
    image_tokens = set(processor.layout.tokens(2, 2))
    lengths = collections.Counter()
    for limit in range(1, len(whole.input_ids) + 2):
        encoder = RowEncoder(settings, tmp_path, processor, max_length=limit)
        if limit <= first_answer:
            with pytest.raises(BadSample, match=rf"cut to \d+ \(max_length {limit}\) leave no answer token") as error:
                encoder.lay_out(row)
            assert error.value.kind == "too long"
            continue
        cut = encoder.lay_out(row)
        length = len(cut.input_ids)
        assert length <= limit and cut.num_cut == len(whole.input_ids) - length
        assert cut.input_ids == whole.input_ids[:length] and cut.loss_mask == whole.loss_mask[:length]
        pads = sum(h // 28 * (w // 28) for h, w in cut.sizes)
        assert cut.input_ids.count(processor.image_token_id) == pads, "whole images only"
        assert cut.images == row["images"][: len(cut.images)] and len(encoder.pixels(cut)) == len(cut.images)
        if length < limit and length < len(whole.input_ids):
            assert whole.input_ids[length] in image_tokens, "only an image makes a cut shorter"
        lengths[len(cut.images)] += 1
    assert set(lengths) == {1, 2}


def test_an_image_that_does_not_fit_is_dropped_and_counted_by_the_policy(processor, tmp_path):
    rows = [chat_row(0), chat_row(1, "big.png"), chat_row(2)]
    picture(600, 600).save(tmp_path / "big.png")
    settings = write_jsonl(tmp_path / "train.jsonl", rows)
    options = {"batch_samples": 3, "max_length": 100}
    with pytest.raises(BadSample, match=r"train.jsonl row 1 \(id r1\): \d+ tokens cut to \d+ .*use smaller images"):
        open_source([settings], processor, **options).draw(0, 0, 1)
    drawn = open_source([settings], processor, **options, on_bad_sample="skip").draw(0, 0, 1)
    assert sum(bool(sample.skipped) for sample in drawn) == 1 and not any(sample.images for sample in drawn)
    assert len(open_source([settings], processor, batch_samples=3).draw(0, 0, 1)[0].input_ids) < 700


def test_images_beyond_the_cut_are_not_decoded(processor, tmp_path, monkeypatch):
    turns = [("human", "Q"), ("gpt", "A" * 50), ("human", "<image>Q"), ("gpt", "A")]
    row = {"conversations": [{"from": f, "value": v} for f, v in turns], "image": png()}
    encoder = RowEncoder(DataSettings(path="x"), tmp_path, processor, max_length=30)
    opened = []
    monkeypatch.setattr(
        type(processor.image_processor), "open", lambda self, source, name=None: opened.append(name) or picture(1, 1)
    )
    assert encoder.pixels(encoder.lay_out(row)) == []
    assert opened.count("image 0") == 0


# --- one sample -----------------------------------------------------------------------------------------------------


def test_read_sample_counts_through_the_data_sets(mixed, processor):
    names = [read_sample(mixed, processor, i).name for i in (0, 6, 7, 11)]
    assert names == ["first.jsonl row 0 (id r0)", "first.jsonl row 6 (id r6)", *(
        f"second.jsonl row {i} (id r{i})" for i in (0, 4)
    )]  # fmt: skip
    assert same(read_sample(streamed(mixed), processor, 8), read_sample(mixed, processor, 8))
    assert read_sample(mixed[0], processor, 3).name == "first.jsonl row 3 (id r3)"
    drawn = {s.sample_id: s for s in open_source(mixed, processor, batch_samples=17).draw(0, 0, 1)}
    sample = read_sample(mixed, processor, 8)
    assert same(drawn[sample.sample_id], sample) or drawn[sample.sample_id].epoch == 1
    for index in (12, -1):
        with pytest.raises(ValueError, match=f"there is no sample {index}: the data holds 12 rows"):
            read_sample(mixed, processor, index)


def test_text_only_rows_and_image_rows_are_the_same_but_for_the_image(processor, tmp_path):
    picture().save(tmp_path / "a.png")
    settings = write_jsonl(tmp_path / "t.jsonl", [chat_row(0), chat_row(0, "a.png")])
    text, image = read_sample(settings, processor, 0), read_sample(settings, processor, 1)
    tokens = processor.layout.tokens(2, 3)
    start = next(i for i in range(len(image.input_ids)) if image.input_ids[i : i + len(tokens)] == tokens)
    without = image.input_ids[:start] + image.input_ids[start + len(tokens) :]
    assert without == text.input_ids and text.images == []


def test_stream_members_report_no_length(mixed, processor):
    source = open_source(streamed(mixed), processor, batch_samples=2, shuffle=False)
    assert all(isinstance(member, StreamMember) and member.window == 1 for member in source.members)
    rng = random.Random(1)
    for step in [rng.randrange(30) for _ in range(10)]:
        fresh = open_source(streamed(mixed), processor, batch_samples=2, shuffle=False)
        assert [key(s) for s in fresh.draw(step, 0, 1)] == [key(s) for s in source.draw(step, 0, 1)]
