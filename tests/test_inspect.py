"""`trimode-vlm inspect`: what it shows is the row that training lays out, in words, as JSON and as a picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import chat_row, picture, write_jsonl
from PIL import Image

from trimode_vlm import cli
from trimode_vlm.training import inspect_picture
from trimode_vlm.training.collate import NoiseSettings, lay_out
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.dual_stream import IGNORE
from trimode_vlm.training.inspect_picture import EMPTY, RULES, draw_pattern
from trimode_vlm.training.inspect_text import Paint, display_width, render
from trimode_vlm.training.inspect_view import SampleView, view_sample
from trimode_vlm.training.nano_data import encode

ANSWERS = ("A naïve 世界 🎈 square.\n", " Yes.")
CHAT: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": picture(84, 56)},
            {"type": "image", "image": picture(28, 28)},
            {"type": "text", "text": "What is it? \x1b[31m <|mask|>"},
        ],
    },
    {"role": "assistant", "content": ANSWERS[0]},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": ANSWERS[1]},
]
NOISES: dict[str, dict[str, Any]] = {
    "response": {},
    "text": {"noisy_stream": "text"},
    "all": {"noisy_stream": "all"},
    "padded": {"response_padding": "block", "noise": "block"},
    "padded text": {"response_padding": "block", "noisy_stream": "text", "block_offset": "random"},
    "sequence": {"block_alignment": "sequence"},
    "complement": {"complementary_masks": True},
    "complement all": {"complementary_masks": True, "noisy_stream": "all", "response_padding": "block"},
    "seeded": {"clean_first_fraction": 1.0, "full_block_fraction": 0.5, "noise": "block"},
    "alpha 0": {"dual": False},
}


@pytest.fixture(scope="module")
def sample(processor: Any) -> Encoded:
    return encode(processor, CHAT, 11)


@pytest.fixture(scope="module")
def noise(processor: Any) -> Any:
    """Make NoiseSettings for the shared tokenizer."""
    ids = processor.tokenizer.convert_tokens_to_ids
    vision = tuple(ids(f"<|image_{part}|>") for part in ("pad", "start", "break", "end"))

    def make(**options: Any) -> NoiseSettings:
        tokenizer = processor.tokenizer
        given = {"mask_token_id": tokenizer.mask_token_id, "end_token_id": tokenizer.eos_token_id, "block_length": 8}
        return NoiseSettings(**given | {"vision_token_ids": vision} | options)

    return make


@pytest.fixture(scope="module")
def view(sample: Encoded, noise: Any, processor: Any) -> SampleView:
    return view_sample(sample, noise(response_padding="block"), processor)


# --- the view -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", NOISES.values(), ids=NOISES)
def test_the_view_is_the_row_that_training_lays_out(
    sample: Encoded, noise: Any, processor: Any, options: dict[str, Any]
) -> None:
    settings = noise(**options)
    seen, row = view_sample(sample, settings, processor), lay_out(sample, settings)
    tokens = seen.tokens
    assert [t.id for t in tokens] == row.input_ids.tolist()
    assert [t.position for t in tokens] == row.position.tolist()
    assert [t.stream != "clean" for t in tokens] == row.is_noisy.tolist()
    assert [-1 if t.source is None else t.source for t in tokens] == row.source.tolist()
    assert [-1 if t.block is None else t.block for t in tokens] == row.block_id.tolist()
    assert [t.p is not None for t in tokens] == row.is_maskable.tolist()
    masked = row.is_noisy & (row.target != IGNORE)
    assert [t.loss == "diffusion" for t in tokens] == masked.tolist()
    assert [t.target for t in tokens if t.target is not None] == row.target[masked].tolist()
    assert [t.p for t in tokens if t.target is not None] == row.p_mask[masked].tolist()
    clean = tokens[seen.lengths["noisy"] :]
    targets = row.target[seen.lengths["noisy"] :].tolist()
    assert [t.loss == "ar" for t in clean[1:]] == [target != IGNORE for target in targets[:-1]]
    assert "".join(t.text for t in clean) == processor.tokenizer.decode(sample.input_ids)
    for start, stop in ((b.start, b.stop) for b in seen.blocks):
        assert len(set(row.block_id[start:stop].tolist())) == 1
    assert sum(b.stop - b.start for b in seen.blocks) == seen.lengths["noisy"] == int(row.is_noisy.sum())
    assert (seen.masked, seen.maskable) == (int(masked.sum()), int(row.is_maskable.sum()))


def test_trained_tokens_are_the_answers(sample: Encoded, view: SampleView, processor: Any) -> None:
    end = processor.tokenizer.eos_token
    answers = [f"{answer}{end}" for answer in ANSWERS]
    clean = [t for t in view.tokens if t.stream == "clean"]
    assert ["".join(t.text for t in clean[start:stop]) for start, stop in view.responses] == answers
    assert "".join(t.text for t in clean if t.loss) == "".join(answers)
    noisy = [t for t in view.tokens if t.stream == "noisy" and t.source is not None]
    filled = [t.id if t.target is None else t.target for t in noisy]
    assert processor.tokenizer.decode(filled) == "".join(answers), "masked tokens know what they are to become"
    assert {t.text for t in noisy if t.target is not None} == {"<|mask|>"}
    assert [t.text for t in view.tokens if t.source is None and t.target is None].count(end) == sum(
        t.source is None and t.target is None for t in view.tokens
    ), "padding is end tokens"


def test_images_and_lengths(sample: Encoded, view: SampleView, processor: Any, noise: Any) -> None:
    assert [(i.size, i.grid) for i in view.images] == [((56, 84), (2, 3)), ((28, 28), (1, 1))]
    pad = processor.image_token_id
    for image in view.images:
        span = sample.input_ids[image.start : image.stop]
        assert span.count(pad) == image.grid[0] * image.grid[1]
        assert processor.tokenizer.decode(span[:1] + span[-1:]) == "<|image_start|><|image_end|>"
    length, num_image = len(sample.input_ids), sum(i.stop - i.start for i in view.images)
    num_answer = sum(sample.loss_mask)
    assert view.lengths["tokens"] == length == view.lengths["text"] + num_image
    plain = view_sample(sample, noise(), processor)
    expected = {"response": num_answer + length, "text": length - num_image + length, "all": 2 * length}
    assert plain.row_lengths == expected and plain.lengths["row"] == expected["response"]
    padding = sum(-(-(stop - start) // 8) * 8 for start, stop in plain.responses) - num_answer
    assert padding == sum(b.padding for b in view.blocks) == view.lengths["row"] - plain.lengths["row"] > 0


def test_complementary_halves_mask_each_answer_token_once(sample: Encoded, noise: Any, processor: Any) -> None:
    seen = view_sample(sample, noise(complementary_masks=True, noise="block"), processor)
    masked = sorted(t.source for t in seen.tokens if t.loss == "diffusion" and t.source is not None)
    assert masked == [i for i, trained in enumerate(sample.loss_mask) if trained]
    assert {t.stream for t in seen.tokens if t.loss == "diffusion"} == {"noisy", "complement"}
    ps: dict[int, list[float]] = {}
    for block in seen.blocks:
        if block.p is not None:
            ps.setdefault(block.first_position, []).append(block.p)
    assert all(sum(pair) == pytest.approx(1.0) for pair in ps.values() if len(pair) == 2)


def test_halves_of_a_single_token(noise: Any, processor: Any) -> None:
    one = Encoded(sample_id=0, input_ids=[20, 21], loss_mask=[False, True])
    seen = view_sample(one, noise(complementary_masks=True), processor)
    assert [t.stream for t in seen.tokens] == ["noisy", "complement", "clean", "clean"]


def test_the_noise_is_one_of_seed_epoch_and_sample(sample: Encoded, noise: Any, processor: Any) -> None:
    def masked(one: Encoded, **options: Any) -> list[int]:
        return [t.position for t in view_sample(one, noise(**options), processor).tokens if t.loss == "diffusion"]

    first = masked(sample)
    assert first == masked(sample)
    changed = [masked(replace(sample, epoch=1)), masked(replace(sample, sample_id=12)), masked(sample, seed=1)]
    assert all(one != first for one in changed)


def test_images_that_are_not_where_their_tokens_are(sample: Encoded, noise: Any, processor: Any) -> None:
    wrong = replace(sample, images=[torch.zeros(3, 84, 84), *sample.images[1:]], name="row 5")
    with pytest.raises(ValueError, match="row 5: image 0 has 3x3 cells, and its 13 tokens are not in the ids"):
        view_sample(wrong, noise(), processor)


# --- as text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("options", NOISES.values(), ids=NOISES)
def test_the_text_holds_every_token_within_its_width(
    sample: Encoded, noise: Any, processor: Any, options: dict[str, Any], width: int
) -> None:
    seen = view_sample(sample, noise(**options), processor)
    text = render(seen, width)
    lines = text.splitlines()
    assert max(map(display_width, lines)) <= width and "\x1b" not in text
    shown = [int(i) for line in lines if re.match(r" *\d+    id  ", line) for i in line.split()[2:]]
    inside = {i for image in seen.images for i in range(image.start, image.stop)}
    padding = {t.position: t for t in seen.tokens if t.source is None}
    outside = [i for k, i in enumerate(sample.input_ids) if k not in inside]
    end = processor.tokenizer.eos_token_id
    assert len(shown) == len(outside) + sum(
        max(b.padding for b in seen.blocks if b.first_position == first)
        for first in {b.first_position for b in seen.blocks if b.padding}
    )
    assert [i for i in shown if i != end] == [i for i in outside if i != end]
    assert "[image 1: 2x3 cells: 9 tokens" in text and "[image 2: 1x1 cells: 3 tokens" in text
    if seen.noise.dual:
        marks = "".join("".join(line.split()[1:]) for line in lines if line.startswith("        loss"))
        by_stream = [sum(t.loss == "diffusion" and t.stream == s for t in seen.tokens) for s in ("noisy", "complement")]
        assert [marks.count("d"), marks.count("c")] == by_stream
        assert marks.count("a") == sum(t.loss == "ar" for t in seen.tokens)
        assert f"{seen.masked} of {seen.maskable} masked" in text
    assert bool(padding) is (options.get("response_padding") == "block")
    answers = [m for m in (re.match(r"positions? (\d+)(?:\.\.(\d+))?  answer (\d)", line) for line in lines) if m]
    places = [(int(m[3]) - 1, i) for m in answers for i in range(int(m[1]), int(m[2] or m[1]) + 1)]
    assert places == [(k, i) for k, (start, stop) in enumerate(seen.responses) for i in range(start, stop)]


def test_clean_stands_over_noisy(view: SampleView, processor: Any) -> None:
    lines = render(view, 300).splitlines()
    first = next(i for i, line in enumerate(lines) if "answer 1; block 0:" in line)
    block = view.blocks[0]
    p = f"p {block.p:.3f}, {block.masked} of {block.maskable} masked"
    assert lines[first] == f"positions {block.first_position}..{block.first_position + 7}  answer 1; block 0: {p}"
    labels = [line[:12].split()[-1] for line in lines[first + 1 : first + 5]]
    assert labels == ["id", "text", "noisy", "loss"]
    starts = [m.start() for m in re.finditer(r"\d+", lines[first + 1])][1:]
    for token, start in zip(view.tokens[block.start : block.stop], starts, strict=True):
        sign = "▒▒▒" if token.loss else token.text.replace(" ", "·") or "…"
        assert lines[first + 3][start:].startswith(sign)
        assert lines[first + 4][start:].split(" ")[0] == ("ad" if token.loss else "a")


def test_what_a_user_wrote_does_not_reach_the_terminal_as_a_command(view: SampleView) -> None:
    for paint in (Paint(), Paint(color=True), Paint(unicode=False)):
        text = render(view, 100, paint)
        assert "\x1b[31m " not in text.replace("\x1b[0m", "") and "\\x1b" in text
        assert ("\x1b[32m" in text) is paint.color
        assert text.isascii() or paint.unicode
    assert len(re.findall("<|mask|>", render(view, 100))) > 1, "typed, it is text like any other"


def test_long_prompts_are_cut_in_the_middle(noise: Any, processor: Any) -> None:
    chat = [{"role": "user", "content": "x y " * 200}, {"role": "assistant", "content": "z"}]
    seen = view_sample(encode(processor, chat, 0), noise(), processor)
    short, whole = render(seen), render(seen, whole=True)
    hidden = re.search(r"\.\.\. (\d+) more tokens", short)
    assert hidden and len(short.splitlines()) < 30 < len(whole.splitlines()) and "more tokens" not in whole
    assert int(hidden[1]) == seen.responses[0][0] - 60


def test_display_width_counts_columns() -> None:
    assert [display_width(text) for text in ("abc", "世界", "e\u0301", "🎈", "▒·⏎")] == [3, 4, 1, 2, 3]


# --- as a picture ---------------------------------------------------------------------------------------------------


def allowed(view: SampleView, i: int, j: int) -> str | None:
    """The rule by which query i sees key j, written anew from facts.md 2."""
    row = view.row
    q_noisy, k_noisy = bool(row.is_noisy[i]), bool(row.is_noisy[j])
    if q_noisy and k_noisy:
        return "noisy -> noisy" if row.block_id[i] == row.block_id[j] else None
    if q_noisy:
        return "noisy -> clean" if row.position[j] < row.block_start[i] else None
    if not k_noisy:
        return "clean -> clean" if j <= i else None
    return None


@pytest.mark.parametrize("name", ["padded", "text", "complement", "alpha 0"])
def test_every_square_has_the_colour_of_its_rule(
    sample: Encoded, noise: Any, processor: Any, name: str, tmp_path: Path
) -> None:
    seen = view_sample(sample, noise(**NOISES[name]), processor)
    drawn = draw_pattern(seen)
    drawn.image.save(tmp_path / "pattern.png")
    image = Image.open(tmp_path / "pattern.png").convert("RGB")
    length = seen.lengths["row"]
    assert image.size == drawn.image.size and image.height == drawn.top + length * drawn.cell + 12
    assert image.width >= drawn.left + length * drawn.cell
    for i in range(length):
        for j in range(length):
            x, y = drawn.left + j * drawn.cell + drawn.cell // 2, drawn.top + i * drawn.cell + drawn.cell // 2
            rule = allowed(seen, i, j)
            assert image.getpixel((x, y)) == (RULES[rule] if rule else EMPTY), (i, j, rule)


def test_a_clean_token_that_saw_a_noisy_one_would_be_red(view: SampleView, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = inspect_picture.attention_mask(view)
    mask[-1, 0] = True
    monkeypatch.setattr(inspect_picture, "attention_mask", lambda _: mask)
    drawn = draw_pattern(view)
    half, last = drawn.cell // 2, (view.lengths["row"] - 1) * drawn.cell
    assert drawn.image.getpixel((drawn.left + half, drawn.top + last + half)) == RULES["clean -> noisy"]


def test_rows_that_are_too_long_for_a_picture(noise: Any, processor: Any) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "word " * 250}]
    seen = view_sample(encode(processor, chat, 0), noise(), processor)
    with pytest.raises(ValueError, match=f"a row of {seen.lengths['row']} tokens .* at most 800"):
        draw_pattern(seen)
    smaller = view_sample(
        encode(processor, [chat[0], {"role": "assistant", "content": "a b " * 40}], 0), noise(), processor
    )
    assert 2 <= draw_pattern(smaller).cell < inspect_picture.LABEL_CELL, "no labels, squares alone"


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> str:
    picture(84, 56).save(tmp_path / "a.png")
    rows = [chat_row(0), chat_row(1, ["a.png"], "A longer answer, of several blocks of four."), chat_row(2, ["no.png"])]
    return write_jsonl(tmp_path / "train.jsonl", rows).path


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `trimode-vlm inspect ARGS`; returns (exit code, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["inspect", *argv])
        return code, *capsys.readouterr()

    return call


def test_a_row_of_a_users_file(inspect: Any, data: str, tmp_path: Path) -> None:
    """Text, JSON and picture, and the masks are those that a training run draws for the row."""
    from trimode_vlm import load
    from trimode_vlm.training.datasets import DataSettings
    from trimode_vlm.training.finetune import FinetuneSettings
    from trimode_vlm.training.samples import open_source
    from trimode_vlm.training.steps import noise_token_ids

    argv = ["--data", data, "--index", "1", "--block_length", "4", "--response_padding", "none"]
    png = tmp_path / "pattern.png"
    code, text, err = inspect(*argv, "--png", str(png))
    assert code == 0 and err == f"written to {png}\n" and Image.open(png).format == "PNG"
    assert "train.jsonl row 1 (id r1)" in text and "[image 1: 2x3 cells: 9 tokens]" in text and "\x1b" not in text
    first, second = (json.loads(inspect(*argv, "--json", "--epoch", epoch)[1]) for epoch in ("0", "1"))
    assert first["name"] == "train.jsonl row 1 (id r1)" and len(first["images"]) == 1
    assert [t["id"] for t in first["tokens"] if t["stream"] == "clean"] == [
        t["id"] for t in second["tokens"] if t["stream"] == "clean"
    ]

    model, processor = load("nano")
    settings = FinetuneSettings(data=(DataSettings(path=data),), block_length=4)
    source = open_source(settings.data, processor, batch_samples=3, max_length=4096, on_bad_sample="skip")
    drawn = {sample.epoch: sample for sample in map(source.sample, range(12)) if sample.name == first["name"]}
    for seen, epoch in ((first, 0), (second, 1)):
        trained = lay_out(drawn[epoch], settings.noise_settings(0, **noise_token_ids(model.config, settings)))
        assert [t["id"] for t in seen["tokens"]] == trained.input_ids.tolist()
        assert seen["epoch"] == epoch and seen["mask_ratio"] == seen["masked"] / seen["maskable"]


def test_samples_of_the_nano_recipe(inspect: Any) -> None:
    code, text, _ = inspect("--config", "nano-smoke", "--index", "3")
    assert code == 0 and text.startswith("nano's stage joint, sample 3   drawn with seed 0, epoch 0, sample 3\n")
    assert inspect("--config", "nano-smoke", "--index", "3")[1] == text
    assert inspect("--config", "nano-smoke", "--index", "4")[1] != text
    assert "block_length 5" in inspect("--config", "nano-smoke", "--index", "3", "--joint.block_length", "5")[1]
    code, text, _ = inspect("--config", "nano-smoke", "--index", "3", "--stage", "ar", "--json")
    seen = json.loads(text)
    assert code == 0 and seen["blocks"] == [] and seen["row_lengths"] == {} and seen["mask_ratio"] is None


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, "--index is missing"),
        (["--index", "1"], 2, "give --config, or --model and --data"),
        (["--index", "x", "--data", "DATA"], 2, "--index must be a whole number from 0 on, found 'x'"),
        (["--index", "-1", "--data", "DATA"], 2, "--index must be a whole number from 0 on, found -1"),
        (["--index", "1", "--epoch", "1.5", "--data", "DATA"], 2, "--epoch must be a whole number"),
        (["--indx", "1", "--data", "DATA"], 2, "unknown option --indx; did you mean --index?"),
        (["--index", "1", "--data", "DATA", "--blok_length", "4"], 2, "the nearest known one is 'block_length'"),
        (["--index", "1", "--data", "DATA", "--block_length", "0"], 2, "block_length must be at least 1"),
        (
            ["--index", "1", "--data", "DATA", "--png", "no/such/a.png"],
            2,
            "--png no/such/a.png: not a file in a folder",
        ),
        (
            ["--index", "1", "--config", "nano-smoke", "--stage", "vision"],
            2,
            "--stage must be one of ar, joint, control",
        ),
        (["--index", "1", "--config", "no/such.yaml"], 2, "no config 'no/such.yaml'"),
        (["--index", "3", "--data", "DATA"], 1, "there is no sample 3: the data holds 3 rows, counted from 0"),
        (["--index", "0", "--data", "no/such.jsonl"], 1, "no/such.jsonl"),
        (["--index", "2", "--data", "DATA"], 1, "train.jsonl row 2 (id r2): "),
        (["--index", "0", "--data", "DATA", "--model", "no/such"], 1, "no folder 'no/such'"),
    ],
)
def test_what_is_refused(inspect: Any, data: str, argv: list[str], code: int, words: str) -> None:
    found, out, err = inspect(*(data if arg == "DATA" else arg for arg in argv))
    assert found == code and out == "" and words in err and len(err.splitlines()) == 1, err


def test_a_missing_image_is_named(inspect: Any, data: str) -> None:
    assert "no.png" in inspect("--index", "2", "--data", data)[2]
