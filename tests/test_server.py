"""The OpenAI API as the openai client sees it: conformance, errors, cancelling, limits."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import io
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import EXAMPLES, REPOSITORY, make_tiny_model
from PIL import Image
from serving import listening, need, paced, wait_for
from test_engine import Gate

need("fastapi", "uvicorn", "prometheus_client", "openai", "httpx")

import httpx  # noqa: E402
import openai  # noqa: E402

import trimode_vlm  # noqa: E402
from trimode_vlm import cli  # noqa: E402
from trimode_vlm.demo import serve  # noqa: E402
from trimode_vlm.demo.completions import Reply, byte_alphabet, most_characters  # noqa: E402
from trimode_vlm.demo.drain import Drain  # noqa: E402
from trimode_vlm.demo.prometheus import Metrics  # noqa: E402
from trimode_vlm.demo.server import ServerSettings, _Api, create_app  # noqa: E402
from trimode_vlm.engine import Engine, EngineSettings  # noqa: E402
from trimode_vlm.request import RequestError  # noqa: E402

# httpx's own 5 seconds are little beside other tests on few cores.
get, post = (functools.partial(call, timeout=60) for call in (httpx.get, httpx.post))
KEY = "right"
COUNT = [{"role": "user", "content": "Count from 12 to 1."}]
COUNTED = "12 11 10 9 8 7 6 5 4 3 2 1"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))


def data_uri(name: str) -> str:
    return "data:image/png;base64," + base64.b64encode((EXAMPLES / name).read_bytes()).decode()


def picture(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(name)}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def question(index: int) -> list[dict[str, Any]]:
    asked = QUESTIONS[index]
    return [{"role": "user", "content": [picture(asked["image"]), text(asked["question"])]}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model, processor = trimode_vlm.load("nano")
    engine = Engine(model, processor)
    metrics = Metrics(engine.stats)
    engine.on_finish = metrics.observe
    engine.metrics = metrics  # type: ignore[attr-defined]
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def app(engine: Engine) -> Any:
    settings = ServerSettings(
        model_name="nano", api_keys=["other", KEY], default_mode="linear_spec", max_body_bytes=2**20, max_images=3
    )
    return create_app(engine, settings, engine.metrics)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def address(app: Any) -> Iterator[str]:
    with listening(app) as url:
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address + "/v1", api_key=KEY, max_retries=0)


def ask(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="nano", messages=messages, **options)


def streamed(client: openai.OpenAI, messages: Any, **options: Any) -> tuple[str, list[Any]]:
    chunks = list(ask(client, messages, stream=True, **options))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


# --- answers


@pytest.mark.parametrize("index", range(len(QUESTIONS)))
def test_a_picture_is_read(client: openai.OpenAI, index: int) -> None:
    reply = ask(client, question(index))
    assert reply.choices[0].message.content == QUESTIONS[index]["answer"]
    assert reply.choices[0].finish_reason == "stop" and reply.object == "chat.completion"


@pytest.mark.parametrize("mode", ["ar", "diffusion", "linear_spec", "auto"])
def test_streaming_equals_not_streaming(client: openai.OpenAI, mode: str) -> None:
    options = {"extra_body": {"mode": mode}}
    whole = ask(client, question(2), **options)
    joined, chunks = streamed(client, question(2), stream_options={"include_usage": True}, **options)
    assert joined == whole.choices[0].message.content == QUESTIONS[2]["answer"]
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    ending = next(c.choices[0] for c in chunks if c.choices and c.choices[0].finish_reason)
    assert ending.delta.model_dump(exclude_none=True) == {} and ending.logprobs is None
    usage, last = whole.usage, chunks[-1].usage
    assert not chunks[-1].choices and last.completion_tokens == usage.completion_tokens == 167
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.mode == mode and (last.nfe == usage.nfe or mode == "auto")
    if mode == "ar":
        assert (usage.nfe, usage.tpf, usage.tpf_end_to_end) == (167, 1.0, 1.0)
    assert usage.tpf == pytest.approx((usage.completion_tokens - 1) / (usage.nfe - usage.nfe_prefill))


def test_two_pictures_in_one_message_and_in_two_turns(client: openai.OpenAI, engine: Engine) -> None:
    both = [
        {"role": "user", "content": [picture("receipt-1.png"), picture("chart-1.png"), text(QUESTIONS[4]["question"])]}
    ]
    turns = [
        *question(2),
        {"role": "assistant", "content": QUESTIONS[2]["answer"]},
        {"role": "user", "content": [picture("chart-1.png"), text(QUESTIONS[4]["question"])]},
    ]
    for messages in (both, turns):
        reply = ask(client, messages)
        local = [
            {
                "role": m["role"],
                "content": m["content"]
                if isinstance(m["content"], str)
                else [
                    {"type": "image", "image": p["image_url"]["url"]} if p["type"] == "image_url" else p
                    for p in m["content"]
                ],
            }
            for m in messages
        ]
        inputs = engine.processor.apply_chat_template(
            local, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        out = engine.model.generate(**inputs, mode="linear_spec")
        ids = out.sequences[0, inputs["input_ids"].shape[1] :]
        assert reply.choices[0].message.content == engine.processor.decode(ids, skip_special_tokens=True)
        assert reply.usage.prompt_tokens == inputs["input_ids"].shape[1]
    usage = ask(client, turns).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "the last is read again for its logits"


def test_text_alone_and_roles(client: openai.OpenAI, engine: Engine) -> None:
    alone = ask(client, COUNT)
    assert alone.choices[0].message.content == COUNTED
    expected = engine.processor.apply_chat_template(
        [{"role": "system", "content": "Be short."}, *COUNT], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )["input_ids"]  # fmt: skip
    for role in ("system", "developer"):
        reply = ask(client, [{"role": role, "content": "Be short."}, *COUNT])
        assert reply.choices[0].message.role == "assistant"
        assert reply.usage.prompt_tokens == expected.shape[1] > alone.usage.prompt_tokens


@pytest.mark.parametrize("stop", ["7 6", ["zzz", "7 6"], [" 7", "6"]])
def test_a_stop_string_is_not_in_the_answer(client: openai.OpenAI, stop: Any) -> None:
    expected = COUNTED[: COUNTED.index("7")].rstrip() if stop == [" 7", "6"] else COUNTED[: COUNTED.index("7")]
    assert ask(client, COUNT, stop=stop).choices[0].message.content == expected
    assert streamed(client, COUNT, stop=stop)[0] == expected


def test_the_budget_and_its_finish_reason(client: openai.OpenAI) -> None:
    for option in ("max_tokens", "max_completion_tokens"):
        reply = ask(client, COUNT, **{option: 5})
        assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 5)


def test_several_choices_with_a_seed_repeat(client: openai.OpenAI) -> None:
    options = {"n": 3, "temperature": 2.0, "seed": 4, "max_tokens": 12}
    odd = [{"role": "user", "content": "Zq?"}]
    first, second = ask(client, odd, **options), ask(client, odd, **options)
    answers = [c.message.content for c in first.choices]
    assert answers == [c.message.content for c in second.choices] and [c.index for c in first.choices] == [0, 1, 2]
    assert len(set(answers)) > 1
    chunks = streamed(client, odd, **options)[1]
    for index, answer in enumerate(answers):
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == index) == answer


@pytest.mark.parametrize("mode", ["ar", "linear_spec"])
def test_log_probabilities(client: openai.OpenAI, engine: Engine, mode: str) -> None:
    import torch

    reply = ask(client, COUNT, logprobs=True, top_logprobs=2, extra_body={"mode": mode})
    entries = reply.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == COUNTED + "<|im_end|>"
    inputs = engine.processor.apply_chat_template(
        COUNT, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    out = engine.model.generate(**inputs, mode="ar")
    with torch.no_grad():
        expected = engine.model(input_ids=out.sequences).logits.log_softmax(-1)[
            0, inputs["input_ids"].shape[1] - 1 : -1
        ]
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row.max()), abs=1e-4)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
    parts = [c.choices[0].logprobs.content for c in streamed(client, COUNT, logprobs=True)[1] if c.choices[0].logprobs]
    assert [e.token for part in parts for e in part] == [e.token for e in entries]


def test_the_bytes_of_tokens_that_cut_a_character(engine: Engine) -> None:
    from test_serving_pitfalls import Bytes
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = engine.processor.tokenizer
    written = "🦙 é\n\x00 x"
    fallback = Tokenizer(models.BPE(vocab={"<0xF0>": 0, "▁a": 1, "<0xFx>": 2, "b": 3}, merges=[], byte_fallback=True))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    with_fallback = PreTrainedTokenizerFast(tokenizer_object=fallback)
    for known, text in ((tokenizer, written), (Bytes().tokenizer, written)):
        reply = Reply("chat", "nano", known, [])
        ids = known.encode(text, add_special_tokens=False)
        parts = [bytes(reply._token(token_id, -1.0)["bytes"]) for token_id in ids]
        assert b"".join(parts).decode() == text and max(map(len, parts)) <= 4
    reply = Reply("chat", "nano", tokenizer, [])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert bytes(reply._token(end, -1.0)["bytes"]) == b"<|im_end|>"
    assert reply._token(len(tokenizer) + 3, -1.0)["bytes"] == []
    reply = Reply("chat", "nano", with_fallback, [])
    assert [bytes(reply._token(i, -1.0)["bytes"]) for i in (0, 2, 3)] == [b"\xf0", b"<0xFx>", b"b"]


def test_logit_bias_bans_a_token(client: openai.OpenAI, engine: Engine) -> None:
    [seven] = engine.processor.tokenizer.encode("7", add_special_tokens=False)
    reply = ask(client, COUNT, logit_bias={str(seven): -100}, max_tokens=40)
    assert "7" not in reply.choices[0].message.content


def test_completions(client: openai.OpenAI, engine: Engine) -> None:
    reply = client.completions.create(model="nano", prompt=["12 11 10", "3"], max_tokens=4, logprobs=1)
    assert [c.index for c in reply.choices] == [0, 1] and reply.object == "text_completion"
    assert all(len(c.logprobs.tokens) == len(c.logprobs.token_logprobs) for c in reply.choices)
    stream = client.completions.create(model="nano", prompt=["12 11 10", "3"], max_tokens=4, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in reply.choices]
    options: dict[str, Any] = {"prompt": ["12 11 10", "3"], "max_tokens": 4, "extra_body": {"min_tokens": 4}}
    reply = client.completions.create(model="nano", logprobs=0, **options)
    stream = client.completions.create(model="nano", stream=True, logprobs=0, **options)
    told: list[tuple[list[str], list[int]]] = [([], []), ([], [])]
    for chunk in stream:
        if chunk.choices[0].finish_reason:
            continue
        for whole, part in zip(
            told[chunk.choices[0].index],
            (chunk.choices[0].logprobs.tokens, chunk.choices[0].logprobs.text_offset),
            strict=True,
        ):
            whole += part
    for (tokens, offsets), choice in zip(told, reply.choices, strict=True):
        assert offsets == [len("".join(tokens[:i])) for i in range(4)] == choice.logprobs.text_offset
        assert tokens == choice.logprobs.tokens
    ids = engine.processor.tokenizer.encode("12 ")
    by_ids = client.completions.create(model="nano", prompt=ids, max_tokens=2)
    assert by_ids.usage.prompt_tokens == len(ids)
    for token_id in (2**63, -(2**63) - 1, -1, 10**6):
        with pytest.raises(openai.BadRequestError, match=f"token id {token_id} is outside the vocabulary of "):
            client.completions.create(model="nano", prompt=[70, token_id])
    with pytest.raises(openai.BadRequestError, match="200 prompts in one request; this server queues 128"):
        client.completions.create(model="nano", prompt=["Count from 3 to 1."] * 200)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# --- errors


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "unknown model 'gpt'"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "unknown role 'wizard'"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, openai.BadRequestError, "'video'"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, openai.BadRequestError, "4096 positions"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"n": 2}, openai.BadRequestError, "n=2 needs a temperature above 0"),
        ({"top_p": 0.5}, openai.BadRequestError, "top_p=0.5 has no effect without a temperature above 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            openai.BadRequestError,
            "message 0: expected text, got NoneType",
        ),
        ({"stop": ""}, openai.BadRequestError, "stop"),
        ({"frequency_penalty": 1.0}, openai.BadRequestError, "frequency_penalty"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"top_logprobs": 2}, openai.BadRequestError, "logprobs"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"mode": "fast"}}, openai.BadRequestError, "unknown mode 'fast'"),
        ({"extra_body": {"treshold": 0.5}}, openai.BadRequestError, "treshold"),
        ({"extra_body": {"mode": "ar", "block_length": 4}}, openai.BadRequestError, "block_length"),
        ({"extra_body": {"mode": "diffusion"}, "logprobs": True}, openai.BadRequestError, "diffusion"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_told_why(
    client: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIStatusError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "nano", "messages": COUNT, **change})
    error = caught.value.body
    assert words in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert ask(client, COUNT).choices[0].message.content == COUNTED


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,xxxx", "image 1"),
        ("data:image/png;base64,", "image 1"),
        ("data:text/plain;base64,aGVsbG8=", "not an image"),
        ("/etc/passwd", "only data URIs"),
        ("file:///etc/passwd", "only data URIs"),
        ("http://127.0.0.1/x.png", "fetches no pictures"),
        ("https://example.com/x.png", "fetches no pictures"),
    ],
)
def test_a_picture_that_is_none_or_may_not_be_read(client: openai.OpenAI, url: str, words: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(openai.BadRequestError, match=words):
        ask(client, [{"role": "user", "content": [part, text("?")]}])


def test_a_picture_of_too_many_pixels_and_too_many_pictures(client: openai.OpenAI) -> None:
    file = io.BytesIO()
    Image.new("1", (7000, 7000)).save(file, "PNG")
    huge = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    with pytest.raises(openai.BadRequestError, match="7000x7000.*max_pixels"):
        ask(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": huge}}]}])
    with pytest.raises(openai.BadRequestError, match="more than the 3 images"):
        ask(client, [{"role": "user", "content": [picture("chart-1.png")] * 4}])


def test_a_text_that_can_never_fit_is_not_tokenised(
    client: openai.OpenAI, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = engine.processor.tokenizer
    longest = max(map(len, tokenizer.get_vocab()))
    assert most_characters(tokenizer) == longest
    long = "x " * (4096 * longest // 2 + 1)
    monkeypatch.setattr(type(engine.processor), "apply_chat_template", lambda *_, **__: pytest.fail("tokenised"))
    monkeypatch.setattr(type(engine.processor), "__call__", lambda *_, **__: pytest.fail("tokenised"))
    with pytest.raises(openai.BadRequestError, match=f"messages: {len(long)} characters, more than the 4096 tokens"):
        ask(client, [{"role": "user", "content": long[:1000]}, {"role": "user", "content": [text(long[1000:])]}])
    with pytest.raises(openai.BadRequestError, match=f"prompt: {len(long)} characters, more than the 4096 tokens"):
        client.completions.create(model="nano", prompt=long)


def test_what_one_token_stands_for_is_told_only_where_it_is_bound() -> None:
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def made(vocabulary: list[str], normalizer: Any = None, pre_tokenizer: Any = None) -> Any:
        model = models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[])
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel()
        if normalizer is not None:
            backend.normalizer = normalizer
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    letters = [*byte_alphabet()]
    assert most_characters(made([*letters, "abc"])) == 3
    blanks = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Whitespace()])
    assert most_characters(made(letters[1:])) is None
    assert most_characters(made(letters, normalizers.Strip())) is None
    assert most_characters(made(letters, None, blanks)) is None
    greedy = made(letters)
    greedy.add_tokens([AddedToken("<x>", lstrip=True)])
    assert most_characters(greedy) is None


def test_keys_and_bodies_are_checked_before_anything(address: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        reply = post(address + "/v1/chat/completions", json={"messages": COUNT}, headers=headers)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 2**20}]}).encode()
    for body in (large, iter([large[:1000], large[1000:]])):
        reply = post(address + "/v1/chat/completions", content=body, headers=headers)
        assert reply.status_code == 413 and reply.json()["error"]["type"] == "invalid_request_error"
    for body in (b"", b"{", b"[]", b"null", b'{"messages": 1}', b"\xff\xfe"):
        reply = post(address + "/v1/chat/completions", content=body, headers=headers)
        assert reply.status_code == 400 and reply.json()["error"]["message"]
    reply = post(address + "/v1/chat/completions", content=b'{"a": }', headers=headers).json()["error"]
    assert reply["message"] == "the body is not valid JSON: Expecting value at character 6" and reply["param"] is None
    for path in ("/v1/nothing", "/nothing"):
        assert get(address + path, headers=headers).json()["error"]["message"] == "Not Found"
    assert get(address + "/health").json() == {"status": "ok"}


def test_browsers_are_told_nothing_by_default(address: str) -> None:
    reply = httpx.options(
        address + "/v1/chat/completions",
        headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
        timeout=60,
    )
    assert "access-control-allow-origin" not in reply.headers


def test_metrics(address: str, client: openai.OpenAI) -> None:
    def value(name: str) -> float:
        lines = [line for line in get(address + "/metrics").text.splitlines() if line.startswith(name + " ")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    name = 'trimode_requests_total{mode="linear_spec",reason="length"}'
    before, tokens = value(name), value("trimode_tokens_total")
    ask(client, COUNT, max_tokens=4)
    # An answer may be out a moment before it is counted.
    wait_for(lambda: value(name) == before + 1 and value("trimode_tokens_total") == tokens + 4)
    seconds, per_forward = (
        f'trimode_{name}_count{{mode="linear_spec"}}' for name in ("request_seconds", "tokens_per_forward")
    )
    asked, answers = value(seconds), value(per_forward)
    ask(client, COUNT, max_tokens=4, n=3, temperature=1.0)
    wait_for(lambda: (value(name), value(seconds), value(per_forward)) == (before + 2, asked + 1, answers + 3))


def test_a_failed_request_is_counted_and_in_no_histogram(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(engine.stats)
    seen = threading.Event()
    monkeypatch.setattr(engine, "on_finish", lambda request: (metrics.observe(request), seen.set()))
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "hidden", lambda *_, **__: 1 / 0)
        request = engine.submit(engine.processor(text="12", return_tensors="pt"), mode="ar", max_new_tokens=2)
        with pytest.raises(RequestError, match="division by zero"):
            request.result()
    assert seen.wait(60)
    text = metrics.text().decode()
    assert 'trimode_requests_total{mode="ar",reason="error"} 1.0' in text
    assert "trimode_request_seconds_count" not in text


# --- going away, and coming in crowds


def wait_until_idle(engine: Engine) -> None:
    wait_for(lambda: not engine.stats()["running"] and not engine.stats()["waiting"])


def cancelled_by(engine: Engine) -> int:
    return engine.stats()["finished"].get("cancelled", 0)


def test_a_client_that_goes_away_leaves_nothing_running(client: openai.OpenAI, engine: Engine, address: str) -> None:
    options = {"max_tokens": 3000, "extra_body": {"mode": "ar", "min_tokens": 3000}}
    cancelled = cancelled_by(engine)
    stream = ask(client, COUNT, stream=True, **options)
    next(iter(stream))
    stream.close()
    wait_for(lambda: cancelled_by(engine) == cancelled + 1)
    body = {"messages": COUNT, "max_tokens": 3000, "mode": "ar", "min_tokens": 3000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(address + "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=0.3)
    wait_for(lambda: cancelled_by(engine) == cancelled + 2)
    several = client.completions.create(
        model="nano", prompt=["12 11 10"] * 3, max_tokens=3000, stream=True, extra_body=options["extra_body"]
    )
    next(iter(several))
    several.close()
    wait_for(lambda: cancelled_by(engine) == cancelled + 5)
    wait_until_idle(engine)
    assert ask(client, COUNT).choices[0].message.content == COUNTED


def test_random_disconnects_leave_nothing_running(
    client: openai.OpenAI, engine: Engine, app: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    submitted: list[Any] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *a, **k: (submitted.append(submit(*a, **k)), submitted[-1])[1])

    def visit(wait: float, stream: bool) -> None:
        body = {"messages": COUNT, "max_tokens": 3900, "mode": "ar", "stream": stream, "min_tokens": 3900}
        try:
            with httpx.stream(
                "POST",
                address + "/v1/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {KEY}"},
                timeout=wait,
            ) as reply:
                for number, _ in enumerate(reply.iter_raw()):
                    if number == 2:
                        break
        except httpx.HTTPError:
            pass

    threads = [
        threading.Thread(target=visit, args=(chance.uniform(0.01, 0.3), chance.random() < 0.5)) for _ in range(100)
    ]
    for thread in threads:
        thread.start()
        time.sleep(chance.uniform(0, 0.03))
    for thread in threads:
        thread.join()
    # This one's connection is behind all of theirs; what was read before it may still be in a thread that tokenises.
    assert ask(client, COUNT).choices[0].message.content == COUNTED
    wait_for(lambda: not app.state.drain.requests and all(request.is_done for request in submitted))
    # Some may go before their request is read.
    ends = Counter(request.generation.rows[0].finish_reason for request in submitted)
    told = [(r.generation.rows[0].finish_reason, r.is_cancelled, r.output().seconds) for r in submitted]
    assert ends == {"cancelled": len(submitted) - 1, "stop": 1} and 50 < len(submitted) <= 101, told
    wait_until_idle(engine)


def test_a_stream_whose_first_byte_cannot_be_sent_ends_its_forwards(engine: Engine) -> None:
    app = create_app(engine, ServerSettings())
    cancelled = cancelled_by(engine)
    body = json.dumps({"messages": COUNT, "max_tokens": 3900, "mode": "ar", "min_tokens": 3900, "stream": True})
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "POST", "query_string": b"",
        "path": "/v1/chat/completions", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def send(_: Any) -> None:
        raise OSError("the client has gone")

    async def call() -> None:
        with contextlib.suppress(Exception):
            await app(scope, receive, send)

    asyncio.run(call())
    wait_for(lambda: cancelled_by(engine) == cancelled + 1)
    wait_until_idle(engine)


def test_different_pictures_at_once_are_not_mixed(client: openai.OpenAI) -> None:
    answers: dict[int, str] = {}

    def visit(number: int) -> None:
        answers[number] = ask(client, question(number % len(QUESTIONS))).choices[0].message.content

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: QUESTIONS[n % len(QUESTIONS)]["answer"] for n in range(12)}


def test_a_full_queue_and_a_slow_answer() -> None:
    model, processor = trimode_vlm.load("nano")
    gate = Gate(model, pace_sec=0.002)  # on any machine too slow for the time-out
    gate.close()
    engine = Engine(model, processor, EngineSettings(max_rows=1, queue_limit=1))
    app = create_app(engine, ServerSettings(timeout_sec=2.0))
    long = {"messages": COUNT, "max_tokens": 3900, "mode": "ar", "min_tokens": 3900}
    with listening(app) as url:
        replies: list[httpx.Response] = []

        def visit() -> None:
            replies.append(httpx.post(url + "/v1/chat/completions", json=long, timeout=120))

        threads = [threading.Thread(target=visit) for _ in range(5)]
        threads[0].start()
        assert gate.reached.wait(60)
        for thread in threads[1:]:
            thread.start()
        wait_for(lambda: len(replies) == 3)
        # A full queue spends nothing on what a request holds.
        odd = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}]}]
        assert httpx.post(url + "/v1/chat/completions", json={"messages": odd}, timeout=60).status_code == 429
        gate.open.set()
        for thread in threads:
            thread.join()
        codes = sorted(reply.status_code for reply in replies)
        assert codes == [429, 429, 429, 504, 504]
        refused = next(reply for reply in replies if reply.status_code == 429)
        assert refused.json()["error"]["type"] == "rate_limit_error" and refused.headers["retry-after"]


def test_a_model_that_fails_is_a_500_and_the_next_request_works() -> None:
    model, processor = trimode_vlm.load("nano")
    engine = Engine(model, processor)
    with listening(create_app(engine, ServerSettings())) as url:
        hidden = model.hidden
        model.hidden = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("device lost"))
        for stream in (False, True):
            reply = httpx.post(url + "/v1/chat/completions", json={"messages": COUNT, "stream": stream}, timeout=60)
            assert "device lost" in reply.text and reply.status_code == (200 if stream else 500)
        model.hidden = hidden
        reply = httpx.post(url + "/v1/chat/completions", json={"messages": COUNT}, timeout=60)
        assert reply.json()["choices"][0]["message"]["content"] == COUNTED
    assert engine.is_closing


def test_a_text_model_refuses_pictures() -> None:
    model = make_tiny_model(vision=False)
    _, processor = trimode_vlm.load("nano")
    model.config.max_position_embeddings = 1024
    engine = Engine(model, processor)
    with listening(create_app(engine, ServerSettings())) as url:
        reply = httpx.post(url + "/v1/chat/completions", json={"messages": question(0)}, timeout=60)
    assert reply.status_code == 400


def test_what_a_thread_submits_after_its_visitor_has_left_is_cancelled(engine: Engine) -> None:
    api = _Api(engine, ServerSettings(), Drain(engine))
    started, may_end, made = threading.Event(), threading.Event(), []

    def submit() -> list[Any]:
        started.set()
        assert may_end.wait(60)
        inputs = engine.processor(text="12", return_tensors="pt")
        made.append(engine.submit(inputs, mode="ar", max_new_tokens=3900, min_new_tokens=3900))
        return made

    async def visit() -> None:
        task = asyncio.create_task(api.start(submit))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_end.set()

    asyncio.run(visit())
    wait_for(lambda: made and made[0].is_cancelled)
    wait_until_idle(engine)


# --- its end


def test_a_draining_server_says_so_and_answers_what_it_has() -> None:
    engine = Engine(*trimode_vlm.load("nano"))
    step, has_been_looked_at = engine._step, threading.Event()
    engine._step = lambda *args: (engine.totals.steps < 3 or has_been_looked_at.wait(60), step(*args))  # type: ignore
    app = create_app(engine, ServerSettings(default_mode="ar"))
    server = serve.draining_server(app, "127.0.0.1", 0, drain_sec=120)
    body = {"messages": COUNT, "max_tokens": 150, "min_tokens": 150}
    with listening(app, server) as url, httpx.Client(base_url=url, timeout=60) as kept:
        assert kept.get("/health").json() == {"status": "ok"}
        with httpx.stream("POST", url + "/v1/chat/completions", json=body | {"stream": True}, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            server.should_exit = True
            wait_for(lambda: kept.get("/health").status_code == 503)
            for client in (kept, httpx.Client(base_url=url, timeout=60)):
                assert client.get("/health").json() == {"status": "draining"}
                refused = client.post("/v1/chat/completions", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            has_been_looked_at.set()
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2] and len(rest) > 100
        wait_for(lambda: not engine.is_alive)


@pytest.mark.parametrize("drain_sec", [0, 0.5])
def test_a_drain_that_takes_too_long_ends_what_is_left(drain_sec: float) -> None:
    engine = Engine(*trimode_vlm.load("nano"))
    app = create_app(engine, ServerSettings(default_mode="ar"))
    server = serve.draining_server(app, "127.0.0.1", 0, drain_sec=drain_sec)
    body = {"messages": COUNT, "max_tokens": 3900, "min_tokens": 3900, "stream": True}
    with paced(engine), listening(app, server) as url:
        whole: list[httpx.Response] = []
        waits = threading.Thread(
            target=lambda: whole.append(
                httpx.post(url + "/v1/chat/completions", json=body | {"stream": False}, timeout=60)
            )
        )
        waits.start()
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            wait_for(lambda: engine.stats()["running"] == 2)
            server.should_exit = True
            rest = list(lines)
        waits.join(60)
        assert rest[-1] == "data: [DONE]" and "shutting down" in rest[-2] and '"shutting_down"' in rest[-2]
        assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "shutting_down")
        wait_for(lambda: not engine.is_alive)


def test_an_engine_that_has_failed_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(*trimode_vlm.load("nano"))
    monkeypatch.setattr(engine, "_admit", lambda: 1 / 0)
    with listening(create_app(engine, ServerSettings())) as url:
        assert httpx.get(url + "/health", timeout=60).status_code == 200
        body = {"messages": COUNT}
        codes = [httpx.post(url + "/v1/chat/completions", json=body, timeout=60).status_code for _ in range(2)]
        assert codes == [500, 503]
        wait_for(lambda: not engine.is_alive)
        health = httpx.get(url + "/health", timeout=60)
        assert (health.status_code, health.json()) == (503, {"status": "failed"})


# --- the command


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "99999"], "--port must lie between"),
        (["--mode", "fsat"], "--mode: unknown mode 'fsat'"),
        (["--max-images", "0"], "--max-images must be above 0"),
        (["--kv-gib", "-1"], "--kv-gib must be above 0"),
        (["--threads", "0"], "--threads must be above 0"),
        (["--drain-sec", "-1"], "--drain-sec must be at least 0"),
        (["--image-hosts", "a.test,https://b.test/x"], "no picture's address can match 'https://b.test/x'"),
        (["--api-key", "right", "--api-key", " "], "--api-key: the key is empty"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_bad_options_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "0", *argv]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_keys_come_from_the_line_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    assert serve.api_keys([]) == []
    monkeypatch.setenv(serve.KEY_VARIABLE, "of a file\n")
    assert serve.api_keys([]) == ["of a file"] and serve.api_keys(["a ", "b"]) == ["a", "b"]
    with pytest.raises(cli.UsageError, match="--api-key: the key is empty"):
        serve.api_keys([""])
    monkeypatch.setenv(serve.KEY_VARIABLE, "\n")
    with pytest.raises(cli.UsageError, match=f"{serve.KEY_VARIABLE}: the key is empty"):
        serve.api_keys([])


@pytest.mark.parametrize(
    ("argv", "environment", "cores", "expected"),
    [([], None, 4, 3), ([], "", 1, 1), ([], "4", 4, None), (["--threads", "2"], "4", 4, 2)],
)
def test_a_core_is_left_to_the_clients(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], environment: str | None, cores: int, expected: int | None
) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(argv)
    serve.set_threads(args)
    assert args.threads == expected and given == ([] if expected is None else [expected])


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "load_model", lambda _: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].count(f"127.0.0.1:{port}") == 1


FAULTY = """
import sys
from trimode_vlm import cli
from trimode_vlm.demo.prometheus import Metrics
from trimode_vlm.engine import Engine

def fault(*_):
    raise RuntimeError("a fault of the scrape")

def start(self, request):
    raise RuntimeError("a fault of the request")

Metrics.text, Engine._start = fault, start
sys.exit(cli.main(["serve", "--port", "0"]))
"""


def test_tracebacks_are_on_stderr() -> None:
    process = subprocess.Popen([sys.executable, "-c", FAULTY], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    assert process.stderr is not None
    try:
        url = next(line.split()[-1] for line in process.stderr if "listening" in line)
        assert httpx.get(url + "/metrics", timeout=60).status_code == 500
        assert httpx.post(url + "/v1/chat/completions", json={"messages": COUNT}, timeout=60).status_code == 500
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(60) == 0
    finally:
        watchdog.cancel()
        process.kill()
    assert "ERROR trimode_vlm.demo.guards: GET /metrics failed\nTraceback" in said
    assert "ERROR trimode_vlm.engine: a request failed\nTraceback" in said
    assert "RuntimeError: a fault of the scrape" in said and "RuntimeError: a fault of the request" in said
