"""Rows of every format become the same chat; what is wrong with one is said in a line."""

import base64
import copy
import io
import json
import pickle
import random
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from data_cases import picture, png
from processor_cases import CHATML_THINKING, chatml_tokenizer, mistral_tokenizer, random_text

from trimode_vlm import TriModeProcessor
from trimode_vlm.bad_samples import BadSample
from trimode_vlm.training.datasets import DataSettings
from trimode_vlm.training.row_encoding import RowEncoder
from trimode_vlm.training.rows import read_row
from trimode_vlm.vision.images import image_size, open_image

TEXT_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": " Bye, 世界"},
]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
LLAVA = [{"from": NAMES[m["role"]], "value": m["content"]} for m in TEXT_CHAT]
PAIR = [{"user": "Hi there", "assistant": "Hello"}, {"user": "And now?", "assistant": " Bye, 世界"}]
SAME_CHAT = {
    "LLaVA": {"conversations": LLAVA},
    "OpenAI": {"messages": TEXT_CHAT},
    "parts": {"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TEXT_CHAT]},
    "messages from/value": {"messages": LLAVA},
    "conversations role/content": {"conversations": TEXT_CHAT},
    "system column": {"system": "Be brief.", "conversations": LLAVA[1:]},
    "pairs": {"system": "Be brief.", "conversations": PAIR},
    "JSON in text": {"messages": json.dumps(TEXT_CHAT)},
    "dict of lists": {"conversations": {key: [turn[key] for turn in LLAVA] for key in ("from", "value")}},
    "empty columns of Arrow": {"messages": [{**m, "name": None, "tool_calls": None} for m in TEXT_CHAT], "text": None},
    "capital roles": {"messages": [{**m, "role": m["role"].title()} for m in TEXT_CHAT]},
    "rendered text beside it": {"text": "<|im_start|>user...", "messages": TEXT_CHAT},
    "both and no images": {"conversations": LLAVA, "image": ""},
}


@pytest.fixture
def settings(tmp_path):
    return partial(DataSettings, path=str(tmp_path / "train.jsonl"))


@pytest.fixture
def read(settings, tmp_path):
    return lambda row, **options: read_row(row, settings(**options), tmp_path)


def refused(read, row, **options):
    with pytest.raises(BadSample) as error:
        read(row, **options)
    assert "\n" not in str(error.value)
    return error.value.kind, str(error.value)


def without_images(messages):
    return [
        {**m, "content": [p["text"] if p["type"] == "text" else "IMAGE" for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]


@pytest.mark.parametrize("name", SAME_CHAT)
def test_every_format_gives_the_same_tokens(name, settings, processor, tmp_path):
    expected = processor.encode_chat(TEXT_CHAT)
    layout = RowEncoder(settings(), tmp_path, processor).lay_out(SAME_CHAT[name])
    assert layout.input_ids == expected["input_ids"]
    assert layout.loss_mask == expected["loss_mask"] and any(layout.loss_mask)


def test_prompt_and_completion(read):
    pair = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert read({"prompt": "Q", "completion": "A"}).messages == pair
    assert read({"question": "Q", "answer": "A", "text": "ignored"}).messages == pair
    assert read({"instruction": "Q", "input": "", "output": "A"}).messages == pair
    assert read({"instruction": "Q", "input": "X", "output": "A"}).messages[0]["content"] == "Q\nX"
    assert read({"q": "Q", "a": "A"}, columns={"prompt": "q", "completion": "a"}).messages == pair
    asked = [*pair, {"role": "user", "content": "Q2"}]
    lists = read({"prompt": asked, "completion": [{"role": "assistant", "content": "A2"}]}).messages
    assert [m.get("train", True) for m in lists] == [True, False, True, True], "only the completion is trained"
    assert read({"prompt": "Q", "completion": "A", "system": "S"}).messages[0] == {"role": "system", "content": "S"}
    assert refused(read, {"prompt": "Q", "completion": 3}) == ("format", "column 'completion' must be text, got int")
    assert "nothing in column 'completion'" in refused(read, {"prompt": "Q"}, format="prompt")[1]


def test_columns_are_renamed(read, tmp_path):
    picture().save(tmp_path / "a.png")
    row = {"dialog": [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "A"}], "picture": "a.png"}
    example = read(row, columns={"conversations": "dialog", "image": "picture"})
    assert example.images == [str(tmp_path / "a.png")]
    kind, message = refused(read, row, columns={"conversations": "dialogue"})
    assert kind == "format" and "no column 'dialogue'" in message and "columns: dialog, picture" in message
    assert "nothing in column 'dialogue'" in refused(
        read, row, format="conversations", columns={"conversations": "dialogue"}
    )[1]  # fmt: skip


@pytest.mark.parametrize("processor_name", ["nano", "chatml", "thinking", "mistral"])
def test_labels_of_random_conversations_are_the_answers_and_their_end_tokens(processor_name, processor, read, tmp_path):
    processor = {
        "nano": lambda: processor,
        "chatml": lambda: TriModeProcessor(tokenizer=chatml_tokenizer()),
        "thinking": lambda: TriModeProcessor(tokenizer=chatml_tokenizer(CHATML_THINKING)),
        "mistral": lambda: TriModeProcessor(tokenizer=mistral_tokenizer()),
    }[processor_name]()
    rng = random.Random(processor_name)
    encoder = RowEncoder(DataSettings(path="x"), tmp_path, processor)
    for _ in range(80):
        texts = [(random_text(rng) + "q", " " * rng.randint(0, 2) + random_text(rng) + "a") for _ in range(3)]
        images = [png(rng.randint(1, 90), rng.randint(1, 90)) for _ in range(rng.randint(0, 2))]
        turns = [turn for q, a in texts for turn in ({"from": "human", "value": q}, {"from": "gpt", "value": a})]
        for _image in images:
            turn = turns[2 * rng.randint(0, 2)]
            turn["value"] = "<image>" + turn["value"] if rng.random() < 0.5 else turn["value"] + "<image>"
        layout = encoder.lay_out({"conversations": turns, "images": images})
        pieces, piece = [], []
        for token, trained in zip([*layout.input_ids, -1], [*layout.loss_mask, False], strict=True):
            if trained:
                piece.append(token)
            elif piece:
                pieces, piece = [*pieces, piece], []
        assert [p[-1] for p in pieces] == [processor.tokenizer.eos_token_id] * 3
        assert [processor.tokenizer.decode(p[:-1]) for p in pieces] == [answer for _, answer in texts]
        assert processor.image_token_id not in [t for p in pieces for t in p]
        columns = sum(rows * cols for rows, cols in ((h // 28, w // 28) for h, w in layout.sizes))
        assert layout.input_ids.count(processor.image_token_id) == columns


def test_header_sizes_and_one_pass_give_what_encode_chat_gives(processor, settings, tmp_path):
    sideways = picture(90, 30).getexif()
    sideways[0x0112] = 6
    images = [png(100, 30), picture(31, 60), {"bytes": png(90, 30, exif=sideways), "path": None}]
    parts = [{"type": "text", "text": "Look: "}, *({"type": "image", "image": image} for image in images)]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Three."}]
    expected = processor.encode_chat(messages)
    encoder = RowEncoder(settings(), tmp_path, processor)
    layout = encoder.lay_out({"messages": messages})
    assert layout.input_ids == expected["input_ids"] and layout.loss_mask == expected["loss_mask"]
    assert layout.sizes == expected["image_sizes"] and layout.sizes[2][0] > layout.sizes[2][1]
    assert [tuple(p.shape) for p in encoder.pixels(layout)] == [(3, *size) for size in layout.sizes]


def test_images_from_every_kind_of_source(read, tmp_path):
    (tmp_path / "images").mkdir()
    picture().save(tmp_path / "near.png")
    picture().save(tmp_path / "images" / "inner.png")
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    picture().save(elsewhere / "far é.png")
    data, uri = png(), "data:image/png;base64," + base64.b64encode(png()).decode()
    chat = [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "A"}]

    def found(image, column="image", **options):
        (source,) = read({"conversations": chat, column: image}, **options).images
        return source

    assert found("near.png") == str(tmp_path / "near.png")
    assert found(["near.png"], "images") == str(tmp_path / "near.png")
    assert found("inner.png") == str(tmp_path / "images" / "inner.png")
    assert found({"bytes": None, "path": "inner.png"}) == str(tmp_path / "images" / "inner.png")
    assert found("far é.png", images=str(elsewhere)) == str(elsewhere / "far é.png")
    assert found(str(elsewhere / "far é.png")) == str(elsewhere / "far é.png"), "absolute"
    for same in (data, uri, picture(), (tmp_path / "near.png").as_uri(), np.zeros((4, 5, 3), np.uint8)):
        assert found(same) is same or found(same) == same
    assert found({"bytes": data, "path": "gone.png"})["bytes"] == data
    kind, message = refused(read, {"conversations": chat, "image": "near.png"}, images=str(elsewhere))
    assert kind == "missing image" and message == f"near.png: no such image file in {elsewhere}"
    assert refused(read, {"conversations": chat, "image": "a" * 500 + ".png"})[1].count("a") < 150
    assert "neither bytes nor a path" in refused(read, {"conversations": chat, "image": {"bytes": b"", "path": ""}})[1]
    kind, message = refused(read, {"conversations": chat, "image": "https://h.test/a.png"})
    assert kind == "image URL" and "allow_urls" in message


def test_urls_are_fetched_only_when_allowed(settings, processor, tmp_path):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(png(100, 30) if self.path == "/a.png" else b"no")

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    encoder = RowEncoder(settings(allow_urls=True), tmp_path, processor)
    part = {"type": "image_url", "image_url": {"url": f"{url}/a.png"}}
    row = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A"}]}
    assert encoder.pixels(encoder.lay_out(row))[0].shape == (3, 56, 112)
    part["image_url"] = f"{url}/gone.png"
    with pytest.raises(BadSample, match="cannot be fetched .*404"):
        encoder.lay_out(row)
    with pytest.raises(BadSample, match="allow_urls"):
        RowEncoder(settings(), tmp_path, processor).lay_out(row)
    server.shutdown()
    server.server_close()


def test_images_take_the_places_of_placeholders_in_order(read):
    a, b, c = b"a", b"b", b"c"
    chat = [
        {"from": "human", "value": "<image>\n<image>\nCompare <image> here"},
        {"from": "gpt", "value": "Literally <image>"},
    ]
    example = read({"conversations": chat, "images": [a, b, c]})
    assert example.images == [a, b, c]
    assert without_images(example.messages) == [
        {"role": "user", "content": ["IMAGE", "IMAGE", "Compare ", "IMAGE", " here"]},
        {"role": "assistant", "content": "Literally <image>"},
    ]
    chat[0]["value"] = "What is it?\n<image>"
    assert without_images(read({"conversations": chat, "image": a}).messages)[0]["content"] == ["What is it?", "IMAGE"]
    chat[0]["value"] = "1:\n<image>\n2:\n<image>\nwhich?"
    kept = without_images(read({"conversations": chat, "images": [a, b]}).messages)[0]["content"]
    assert kept == ["1:\n", "IMAGE", "\n2:\n", "IMAGE", "\nwhich?"], "line breaks inside a text are the text's"
    parts = [{"type": "image"}, {"type": "text", "text": "and <image>"}, {"type": "image", "image": b}, "x"]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "<image>"}]
    example = read({"messages": [*messages, {"role": "assistant", "content": "A"}], "images": [a, c]})
    assert example.images == [a, b, c]
    assert without_images(example.messages)[0]["content"] == ["IMAGE", "and <image>", "IMAGE", "x"]
    chat[0]["value"] = "<img>Q"
    assert read({"conversations": chat, "image": a}, image_placeholder="<img>").images == [a]


def test_image_count_against_placeholders(read):
    chat = [{"from": "human", "value": "<image><image><image>Q"}, {"from": "gpt", "value": "A"}]
    kind, message = refused(read, {"conversations": chat, "images": [b"a", b"b"]})
    assert kind == "image count" and "found 3 image placeholders (<image>) but received 2 images" in message
    assert "found 3 image placeholders (<image>) but received 0 images" in refused(read, {"conversations": chat})[1]
    chat[0]["value"] = "Q"
    kind, message = refused(read, {"conversations": chat, "images": [b"a", b"b"]})
    assert kind == "image count" and "found 0" in message and "images_first" in message
    example = read({"conversations": chat, "images": [b"a", b"b"]}, images_first=True)
    assert without_images(example.messages)[0]["content"] == ["IMAGE", "IMAGE", "Q"]
    assert read({"prompt": "Q", "completion": "A", "image": b"a"}).images == [b"a"]
    openai = [{"role": "user", "content": "What does <image> mean?"}, {"role": "assistant", "content": "A tag."}]
    assert read({"messages": openai}).messages == openai, "no image column: it is text"
    assert refused(read, {"messages": openai, "images": []})[0] == "image count", "an image got lost"
    parts = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "A"}]
    assert "found 1 image placeholders but received 0 images" in refused(read, {"messages": parts})[1]


def test_roles_turns_and_answers_are_checked(read):
    user, answer = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    wrong = [
        ([{"from": "hmuan", "value": "Q"}, answer], "role", "turn 0: unknown role 'hmuan' (did you mean 'human'?)"),
        ([user, {"from": "gpt", "value": " \n"}], "empty answer", "turn 1: the answer is empty"),
        ([user, {"from": "gpt", "value": None}], "empty answer", "turn 1: the assistant turn has no text"),
        ([{"role": "user"}, answer], "format", "turn 0: the user turn has no text"),
        ([user], "no answer", "there is no answer to train on"),
        ([user, {**answer, "train": False}], "no answer", "there is no answer to train on"),
        ([user, {**answer, "train": "no"}], "format", "turn 1: train must be true or false (1 or 0), got 'no'"),
        ([user, {**answer, "weight": 0.5}], "format", "turn 1: weight must be"),
        ([user, {"role": "assistant", "content": 5}], "format", "message 1: content must be text"),
        ([user, {"role": "assistant", "content": [{"type": "image", "image": b"x"}]}], "format", "holds an image"),
        ([{"role": "user", "content": [{"type": "video"}]}, answer], "format", "unknown content part 'video'"),
        ([{"role": "user", "content": "half \ud83d"}, answer], "unicode", "turn 0: the text holds half a character"),
        (["Q", "A"], "format", "turn 0: expected a mapping with role and content, got 'Q'"),
        ([{"speaker": "x", "said": "y"}], "role", "turn 0: no role ('role' or 'from') among speaker, said"),
        ([], "format", "a conversation must be a non-empty list of turns, got []"),
        ("hello", "format", "the conversation is text, but not JSON"),
    ]
    for turns, kind, message in wrong:
        found = refused(read, {"messages": turns})
        assert found[0] == kind and message in found[1], found
    assert refused(read, [user, answer])[1] == "a row must be a mapping of columns, got list"
    assert refused(read, {"text": " \n"}) == ("empty answer", "the text is empty")
    assert refused(read, {"caption": "x"})[1].startswith("unknown format: no column messages")
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert read({"messages": [user, {"role": "assistant", "content": None, "tool_calls": calls}]}).messages[1][
        "tool_calls"
    ] == calls  # fmt: skip
    clone = pickle.loads(pickle.dumps(BadSample("text", "role")))
    assert str(clone) == "text" and type(BadSample("as a DataLoader rebuilds it")) is BadSample


@pytest.mark.parametrize("switch", [{"train": False}, {"weight": 0}])
def test_an_answer_can_be_left_out_of_the_loss(switch, settings, processor, tmp_path):
    chat = copy.deepcopy(TEXT_CHAT)
    chat[2].update(switch)
    layout = RowEncoder(settings(), tmp_path, processor).lay_out({"messages": chat})
    trained = [i for i, flag in zip(layout.input_ids, layout.loss_mask, strict=True) if flag]
    assert processor.tokenizer.decode(trained[:-1]) == " Bye, 世界"
    assert layout.input_ids == processor.encode_chat(TEXT_CHAT)["input_ids"]


def test_special_tokens_that_a_user_types_stay_text(settings, processor, tmp_path):
    typed = "<|image_pad|> <|mask|> <|im_end|> <|im_start|>system <|image_start|> </s>"
    special = set(processor.tokenizer.all_special_ids)
    encoder = RowEncoder(settings(), tmp_path, processor)
    plain = encoder.lay_out({"prompt": "x", "completion": "y"})
    layout = encoder.lay_out({"prompt": typed, "completion": f"It says {typed}"})
    count = [sum(i in special for i in ids) for ids in (plain.input_ids, layout.input_ids)]
    assert count[0] == count[1] and count[0] > 2
    assert processor.tokenizer.decode(layout.input_ids).count(typed) == 2
    text = encoder.lay_out({"text": typed})
    assert [i for i in text.input_ids if i in special] == [processor.tokenizer.eos_token_id]
    assert processor.tokenizer.decode(text.input_ids[:-1]) == typed


def test_plain_text_is_trained_whole_and_ends(settings, processor, tmp_path):
    encoder = RowEncoder(settings(), tmp_path, processor)
    layout = encoder.lay_out({"text": " Once  upon 世界\n"})
    assert layout.input_ids[-1] == processor.tokenizer.eos_token_id and all(layout.loss_mask)
    assert processor.tokenizer.decode(layout.input_ids[:-1]) == " Once  upon 世界\n"
    with_image = encoder.lay_out({"text": "A cat <image> sits", "image": png(60, 30)})
    is_image = [i in set(processor.layout.tokens(2, 3)) for i in with_image.input_ids]
    assert sum(is_image) == len(processor.layout.tokens(2, 3))
    assert with_image.loss_mask == [not flag for flag in is_image]
    with_bos = TriModeProcessor(tokenizer=mistral_tokenizer())
    layout = RowEncoder(settings(), tmp_path, with_bos).lay_out({"text": "Hello world"})
    expected = [*with_bos.tokenizer("Hello world")["input_ids"], with_bos.tokenizer.eos_token_id]
    assert layout.input_ids == expected and expected[0] == with_bos.tokenizer.bos_token_id
    assert layout.loss_mask == [False, *[True] * (len(expected) - 1)]


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_headers_size_is_that_of_the_opened_image(file_format):
    for orientation in range(10):
        exif = picture().getexif()
        exif[0x0112] = orientation
        buffer = io.BytesIO()
        picture(30, 50).save(buffer, file_format, exif=exif)
        opened = open_image(buffer.getvalue())
        assert image_size(buffer.getvalue()) == (opened.height, opened.width), orientation
