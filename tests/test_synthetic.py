"""Synthetic pictures, tasks and the nano tokenizer: answers are right, reproducible and cannot be guessed."""

from __future__ import annotations

import csv
import io
import json
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from trimode_vlm.training.glyphs import CELL, COLORS, ITEMS, SHAPES
from trimode_vlm.training.nano_tokenizer import (
    SPECIAL_TOKENS,
    build_tokenizer,
    cell_token_ids,
    single_token_id,
    twin_token_ids,
)
from trimode_vlm.training.pictures import KINDS, Picture, make_picture
from trimode_vlm.training.synthetic import (
    HELD_OUT_SEED,
    TASKS,
    all_texts,
    examples,
    make_conversation,
    make_sample,
    questions,
    write_examples,
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def _pictures(kind: str, count: int = 40) -> list[Picture]:
    return [make_picture(kind, seed) for seed in range(count)]


def _answer(task: str, picture: Picture) -> str:
    return TASKS[task].pose(picture.facts, random.Random(0))[1]


def _table(text: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert set(text.splitlines()[1]) == {"|", "-"}
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_a_function_of_the_seed(kind):
    first, again, other = make_picture(kind, 3), make_picture(kind, 3), make_picture(kind, 4)
    assert first.image.tobytes() == again.image.tobytes()
    assert (first.facts, first.cells) == (again.facts, again.cells)
    assert first.image.tobytes() != other.image.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_whole_cells_with_a_frame(kind):
    for picture in _pictures(kind):
        height, width = picture.image_size
        assert (len(picture.cells) * CELL, len(picture.cells[0]) * CELL) == (height, width)
        assert 112 <= height <= 448 and 112 <= width <= 448
        pixels = np.asarray(picture.image, dtype=int)
        for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
            assert np.ptp(edge.reshape(-1, 3), axis=0).max() == 0 and edge.mean() < 140
    assert len({picture.image_size for picture in _pictures(kind)}) > 10
    assert make_picture(kind, 5, max_scale=0.0).image.size <= make_picture(kind, 5).image.size


@pytest.mark.parametrize("kind", KINDS)
def test_empty_cells_are_empty_and_the_others_are_not(kind):
    for picture in _pictures(kind, 20):
        gray = np.asarray(picture.image.convert("L"), dtype=int)
        for row, cells in enumerate(picture.cells):
            for col, cell in enumerate(cells):
                inside = gray[row * CELL + 4 : (row + 1) * CELL - 4, col * CELL + 4 : (col + 1) * CELL - 4]
                # Lines of charts and receipts run through empty cells, hence the median.
                spread = np.abs(inside - np.median(inside))
                filled = kind == "chart" and cell and cell[0] in COLORS
                assert filled or (spread > 45).sum() >= 4 if cell else (spread > 45).mean() < 0.2, (row, col, cell)


def test_grid_answers_and_cells_tell_the_board():
    for picture in _pictures("grid"):
        board = picture.facts["board"]
        words = [[" ".join(cell) for cell in row] for row in board]
        assert [row[1 : len(board[0]) + 1] for row in picture.cells[1 : len(board) + 1]] == board
        header, *rows = _table(_answer("grid_markdown", picture))
        assert header == ["row", *map(str, range(1, len(board[0]) + 1))]
        assert rows == [[str(i), *row] for i, row in enumerate(words, start=1)]
        parsed = json.loads(_answer("grid_json", picture))
        assert [row["row"] for row in parsed] == list(range(1, len(board) + 1))
        assert [[cell["shape"] for cell in row["cells"]] for row in parsed] == words
        sentences = _answer("grid_describe", picture).split("\n")
        for number, (sentence, row) in enumerate(zip(sentences, words, strict=True), start=1):
            assert sentence.startswith(f"Row {number} shows a")
            found = sentence.split(" shows ")[1].rstrip(".").replace(" and ", ", ").split(", ")
            assert [noun.split(" ", 1)[1] for noun in found] == row
        assert _answer("grid_size", picture) == f"The board has {len(board)} rows and {len(board[0])} columns."
        fields, answer = TASKS["grid_cell"].ask(picture.facts, random.Random(1))
        assert answer.split(" ", 1)[1] == words[int(fields["row"]) - 1][int(fields["column"]) - 1]


def test_receipt_answers_and_cells_tell_the_receipt():
    for picture in _pictures("receipt"):
        lines, total = picture.facts["lines"], picture.facts["total"]
        assert round(sum(quantity * float(price) for _, quantity, price in lines), 2) == float(total) < 100
        assert len({item for item, _, _ in lines}) == len(lines)
        for (item, quantity, price), row in zip(lines, picture.cells[1:], strict=False):
            assert "".join(word for cell in row for word in cell) == f"{item}{quantity}x{price}"
        assert "".join(word for cell in picture.cells[0] for word in cell) == "RECEIPT"
        assert "".join(word for cell in picture.cells[len(lines) + 1] for word in cell) == f"TOTAL{total}"
        expected = [[str(i), item, str(quantity), price] for i, (item, quantity, price) in enumerate(lines, start=1)]
        markdown = _answer("receipt_markdown", picture)
        assert _table(markdown)[1:] == expected and markdown.endswith(f"\nTotal: {total}")
        table = list(csv.reader(io.StringIO(_answer("receipt_csv", picture))))
        assert table == [["row", "item", "quantity", "price"], *expected, ["total", "", "", total]]
        parsed = json.loads(_answer("receipt_json", picture))
        assert parsed["total"] == total
        found = [[str(i["row"]), i["item"], str(i["quantity"]), i["price"]] for i in parsed["items"]]
        assert found == expected
        assert [i["text"] for i in parsed["items"]] == [f"{item} {n} x {price}" for item, n, price in lines]
        fields, answer = TASKS["receipt_describe_row"].ask(picture.facts, random.Random(1))
        item, _, price = lines[int(fields["row"]) - 1]
        assert answer == f"The {item} in row {fields['row']} costs {price}."
        fields, answer = TASKS["receipt_item"].ask(picture.facts, random.Random(1))
        assert answer == lines[int(fields["row"]) - 1][0]
        fields, answer = TASKS["receipt_line"].ask(picture.facts, random.Random(1))
        assert answer == lines[int(fields["row"]) - 1][2]
        assert _answer("receipt_total", picture) == total


def test_chart_answers_and_cells_tell_the_bars():
    for picture in _pictures("chart"):
        bars = picture.facts["bars"]
        expected = [[str(i), color, item, str(value)] for i, (color, item, value) in enumerate(bars, start=1)]
        assert _table(_answer("chart_markdown", picture)) == [["bar", "color", "item", "value"], *expected]
        assert json.loads(_answer("chart_json", picture)) == {
            "bars": [{"bar": int(i), "color": c, "item": item, "value": int(v)} for i, c, item, v in expected]
        }
        sentences = [f"Bar {i} is {c} and stands for {item} with a value of {v}." for i, c, item, v in expected]
        assert _answer("chart_describe", picture).split("\n") == sentences
        fields, answer = TASKS["chart_describe_bar"].ask(picture.facts, random.Random(1))
        _, item, value = bars[int(fields["bar"]) - 1]
        assert answer == f"Bar {fields['bar']} stands for {item} and has a value of {value}."
        fields, answer = TASKS["chart_bar"].ask(picture.facts, random.Random(1))
        assert answer == str(bars[int(fields["bar"]) - 1][2])
        columns = [[row[col] for row in picture.cells] for col in range(len(picture.cells[0]))]
        left = [column for column in columns if any(cell and cell[0] in COLORS for cell in column)][::2]
        digits = ["".join(word for cell in column for word in cell if word.isdigit()) for column in left]
        assert digits == [str(value // 10) for _, _, value in bars]
        assert [cell[0] for cell in picture.cells[-1] if cell and cell[0] in ITEMS] == [item for _, item, _ in bars]


def test_text_tasks():
    for seed in range(50):
        sample = make_sample("text_count", seed)
        numbers = [int(number) for number in sample.answer.split(" ")]
        assert numbers == list(range(numbers[0], 0, -1)) and 10 <= numbers[0] <= 60
        assert f"from {numbers[0]} to 1" in sample.question
        sample = make_sample("text_spell", seed)
        assert sample.answer.replace(" ", "") in sample.question and sample.image is None


def test_samples_are_messages_for_the_processor():
    sample = make_sample("grid_cell", 7)
    image_part, text_part = sample.messages[0]["content"]
    assert image_part["image"] is sample.image and text_part == {"type": "text", "text": sample.question}
    assert isinstance(sample.image, Image.Image) and sample.image_size == sample.image.size[::-1]
    assert sample.messages[1] == {"role": "assistant", "content": sample.answer}
    assert make_sample("grid_cell", 7).image.tobytes() == sample.image.tobytes()
    with pytest.raises(ValueError, match="unknown task"):
        make_sample("grid_cells", 7)


def test_a_conversation_asks_different_things_about_one_picture():
    for kind in KINDS:
        sample = make_conversation(kind, 3, num_turns=5)
        assert [message["role"] for message in sample.messages[:2]] == ["user", "assistant"]
        asked = [str(message["content"]) for message in sample.messages[::2]]
        assert len(set(asked)) == len(asked) >= 3
    picture = make_picture("receipt", 1)
    assert {task for task, _, _ in questions(picture, random.Random(0), 5)} == {
        "receipt_item", "receipt_describe_row", "receipt_line", "receipt_total"
    }  # fmt: skip
    with pytest.raises(ValueError, match="does not ask about"):
        questions(picture, random.Random(0), 5, ["grid_cell"])


def test_held_out_pictures_differ_from_training_pictures():
    for task, seed in (("grid_json", 1), ("receipt_json", 2), ("chart_json", 3)):
        training = {make_sample(task, seed + i).answer for i in range(100)}
        held_out = {make_sample(task, HELD_OUT_SEED + seed + i).answer for i in range(100)}
        assert not training & held_out and len(held_out) == 100


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.needs_image])
def test_answers_cannot_be_guessed(task):
    answers = Counter(make_sample(task, HELD_OUT_SEED + seed).answer for seed in range(200))
    # The chance that the answer of another, shuffled sample is right too.
    chance = sum(count * (count - 1) for count in answers.values()) / (200 * 199)
    assert chance < 0.08 and answers.most_common(1)[0][1] < 0.12 * 200


def test_tokenizer_is_small_fixed_and_covers_any_text(tokenizer):
    assert len(tokenizer) <= 768
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == list(SPECIAL_TOKENS)
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
    rng = random.Random(0)
    texts = [
        "",
        " ",
        "  leading and  double ",
        "Grüße, 你好 🙂👩‍👩‍👧\n\n\ttab\r\n",
        "3.14159 x² ≠ 1e-9",
        "e\u0301 |---|",
        '{"a": [1, 2]}',
    ]
    texts += ["".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x1F300, 0x1F600))))
                      for _ in range(40)) for _ in range(50)]  # fmt: skip
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_every_word_of_the_corpus_is_one_token(tokenizer):
    for text in all_texts(20):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for word in (*COLORS, *SHAPES, *ITEMS, "row", "total", "quantity", "value", "board", "receipt"):
        for form in (word, f" {word}"):
            single_token_id(tokenizer, form)
    for piece in (" |", '": "', '", "', '{"', '"}', " |\n| ", '": ', ', "', '"}, {"', "7", "---|"):
        single_token_id(tokenizer, piece)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("42")] == ["4", "2"]
    for seed in range(20):
        for task in TASKS:
            sample = make_sample(task, HELD_OUT_SEED + seed)
            for text in (sample.question, sample.answer):
                words = sum(word.isalpha() for word in "".join(c if c.isalpha() else " " for c in text).split())
                alphabetic = [t for t in map(tokenizer.decode, tokenizer.encode(text)) if t.strip().isalpha()]
                assert len(alphabetic) == words


def test_cells_have_token_labels(tokenizer):
    seen = set()
    for kind in KINDS:
        for picture in _pictures(kind, 30):
            for cell in (cell for row in picture.cells for cell in row):
                assert len(cell_token_ids(tokenizer, cell)) == len(cell) <= 2
                seen.update(cell)
    assert seen >= {*COLORS, *SHAPES, *ITEMS, *"0123456789.x", *"RECEIPT", *"TOTAL"}
    twins = dict(twin_token_ids(tokenizer))
    assert twins[single_token_id(tokenizer, "red")] == single_token_id(tokenizer, " red")
    with pytest.raises(ValueError, match="expected 1"):
        single_token_id(tokenizer, "two words")


def test_tokenizer_survives_saving_and_renders_chats(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    sample = make_sample("grid_json", 1)
    assert loaded.encode(sample.answer) == tokenizer.encode(sample.answer)
    text = loaded.apply_chat_template(sample.messages, tokenize=False)
    assert text == (
        f"<|im_start|>user\n<|image_pad|>{sample.question}<|im_end|>\n"
        f"<|im_start|>assistant\n{sample.answer}<|im_end|>\n"
    )
    asked = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.mask_token_id) == (4, 0, 9)


def test_long_answers_are_common(tokenizer):
    longest = {name: max(len(tokenizer.encode(make_sample(name, seed).answer)) for seed in range(40)) for name in TASKS}
    assert sum(length > 100 for length in longest.values()) >= len(TASKS) / 3
    assert sum(length > 200 for length in longest.values()) >= 2


def test_examples_are_held_out_and_written(tmp_path):
    write_examples(tmp_path)
    entries = json.loads((tmp_path / "questions.json").read_text(encoding="utf-8"))
    assert [sample.answer for _, sample in examples()] == [entry["answer"] for entry in entries]
    assert all(sample.seed >= HELD_OUT_SEED for _, sample in examples())
    for entry, (_, sample) in zip(entries, examples(), strict=True):
        with Image.open(tmp_path / entry["image"]) as image:
            assert image.convert("RGB").tobytes() == sample.image.tobytes()
