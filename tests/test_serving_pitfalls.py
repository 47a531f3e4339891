"""What serving gets wrong elsewhere: messages of a picture alone, users whose pictures get mixed, characters cut in
streams. Over HTTP, on the shipped model; where a tokenizer must cut characters, on a byte-level one."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import EXAMPLES, make_tiny_model
from serving import need
from transformers import PreTrainedTokenizerFast

need("fastapi", "httpx", "prometheus_client")

import httpx  # noqa: E402
from tokenizers import Tokenizer, decoders, models  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402

import trimode_vlm  # noqa: E402
from trimode_vlm.demo.server import ServerSettings, create_app  # noqa: E402
from trimode_vlm.engine import Engine  # noqa: E402

QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model, processor = trimode_vlm.load("nano")
    with Engine(model, processor) as engine:
        yield engine


def picture(name: str) -> dict[str, Any]:
    data = base64.b64encode((EXAMPLES / name).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def post_all(engine: Engine, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """All at once."""
    app = create_app(engine, ServerSettings(default_mode="ar"))

    async def go() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await asyncio.gather(*(client.post("/v1/chat/completions", json=b, timeout=60) for b in bodies))

    return asyncio.run(go())


def alone(engine: Engine, content: Any, **options: Any) -> str:
    """What generate() says to a message with the same parts."""
    if isinstance(content, list):
        content = [{"type": "image", "image": p["image_url"]["url"]} if "image_url" in p else p for p in content]
    inputs = engine.processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    out = engine.model.generate(**inputs, mode="ar", **options)
    return engine.processor.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_messages_of_a_picture_alone_and_of_text_alone(engine: Engine) -> None:
    contents = [[picture("chart-1.png")], [picture("chart-1.png"), {"type": "text", "text": ""}], "Count from 3 to 1."]
    expected = [alone(engine, content, max_new_tokens=60) for content in contents]
    bodies = [{"messages": [{"role": "user", "content": c}], "max_tokens": 60} for c in contents]
    replies = post_all(engine, bodies)
    assert [r.json()["choices"][0]["message"]["content"] for r in replies] == expected


def test_three_users_with_pictures_of_their_own_and_one_question(engine: Engine) -> None:
    """Pictures of one size and the same words: nothing but the picture tells the users apart."""
    question = {"type": "text", "text": QUESTIONS[0]["question"]}
    contents = [[picture(name), question] for name in ("chart-1.png", "chart-2.png", "board-1.png")]
    expected = [alone(engine, content, max_new_tokens=80) for content in contents]
    assert len(set(expected)) == 3
    for _ in range(2):  # the second time from the caches
        bodies = [{"messages": [{"role": "user", "content": c}], "max_tokens": 80} for c in contents]
        replies = post_all(engine, bodies)
        assert [r.json()["choices"][0]["message"]["content"] for r in replies] == expected


class Bytes:
    """A processor whose tokens are single bytes: every character beyond ASCII is cut."""

    def __init__(self) -> None:
        words = sorted(ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
        backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("mode", ["ar", "linear_spec"])
def test_characters_that_tokens_cut_and_stop_strings_across_them(mode: str) -> None:
    said = "naïve – 日本語 🦙🦙 end STOP and more"
    processor = Bytes()
    model = make_tiny_model(vision=False, vocab_size=512)
    ids = processor.tokenizer.encode(said)
    script = [*ids, *ids]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        """The byte that follows a place, or stands there where it is masked; `hidden` holds places, see below."""
        out = torch.zeros(*hidden.shape[:-1], 512)
        place = hidden[..., 0].long() % len(script)
        return out.scatter(-1, torch.tensor(script)[place][..., None], 9.0)

    mask = model.config.mask_token_id
    model.encoder.embed_tokens.forward = lambda token_ids: (token_ids == mask)[..., None].float()
    model.hidden = lambda is_mask, position_ids, *_, **__: position_ids[..., None] - is_mask
    model.diffusion_head = torch.nn.Identity()
    model.diffusion_head.forward = logits
    options = {"block_length": 5} if mode == "linear_spec" else {}
    cases = [
        (None, said),
        ("🦙 end STOP", "naïve – 日本語 🦙"),
        ("語 ", "naïve – 日本"),
        ("and more!", said),  # held back to the end, in case it comes
    ]
    with Engine(model, processor) as engine:
        for stop, expected in cases:
            request = engine.submit(
                {"input_ids": torch.tensor([[0]])},
                mode=mode,
                max_new_tokens=len(ids),
                eos_token_id=[],
                stop_strings=[stop] if stop else None,
                **options,
            )
            events = list(request)
            texts = [event.text for event in events]
            assert max(len(event.event.token_ids) for event in events) == (1 if mode == "ar" else 5)
            assert "".join(texts) == request.texts[0] == expected
            assert all("\ufffd" not in text for text in texts) and len([t for t in texts if t]) > 3
