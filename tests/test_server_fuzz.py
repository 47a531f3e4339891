"""Malformed requests of every kind: an answer below 500, in the shape that the OpenAPI document promises, and no worker
that hangs. TRIMODE_FUZZ_REQUESTS sets how many (the default suits a CI); the seeds are fixed."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import EXAMPLES
from PIL import Image
from serving import need

need("fastapi", "prometheus_client", "httpx", "schemathesis", "jsonschema_rs")

import httpx  # noqa: E402
import jsonschema_rs  # noqa: E402
import schemathesis  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

import trimode_vlm  # noqa: E402
from trimode_vlm.demo.server import ServerSettings, create_app  # noqa: E402
from trimode_vlm.engine import Engine  # noqa: E402

REQUESTS = int(os.environ.get("TRIMODE_FUZZ_REQUESTS", "100"))
TIMEOUT_SEC = 60.0
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PICTURE = (EXAMPLES / "chart-1.png").read_bytes()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Short positions, so that no answer is long."""
    model, processor = trimode_vlm.load("nano")
    model.config.max_position_embeddings = 320
    with Engine(model, processor) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: Engine) -> Any:
    return create_app(engine, ServerSettings(model_name="nano", default_mode="ar", max_body_bytes=2**20))


@pytest.fixture(scope="module")
def promised(app: Any) -> dict[str, Any]:
    return app.openapi()


def send_all(app: Any, requests: list[dict[str, Any]]) -> list[httpx.Response]:
    """One after the other; none may take longer than TIMEOUT_SEC."""

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await asyncio.wait_for(client.request(**request), TIMEOUT_SEC) for request in requests]

    return asyncio.run(go())


def check(promised: dict[str, Any], request: dict[str, Any], reply: httpx.Response) -> None:
    """Below 500, a status that the document has for the path, and a body as it says."""
    shown = f"{str(request)[:600]} -> {reply.status_code} {reply.text[:300]}"
    assert reply.status_code < 500, shown
    operation = promised["paths"].get(request["url"], {}).get(request["method"].lower())
    if operation is None or reply.status_code == 405:
        assert reply.status_code in (400, 401, 404, 405, 413), shown
        return
    described = operation["responses"].get(str(reply.status_code))
    assert described is not None, f"not in the OpenAPI document: {shown}"
    kind = reply.headers["content-type"].partition(";")[0]
    assert kind in described["content"], shown
    if kind == "application/json":
        schema = {**described["content"][kind]["schema"], "components": promised["components"]}
        jsonschema_rs.validator_for(schema).validate(reply.json())


def fuzz(app: Any, promised: dict[str, Any], requests: list[dict[str, Any]]) -> Counter[int]:
    replies = send_all(app, requests)
    for request, reply in zip(requests, replies, strict=True):
        check(promised, request, reply)
    [health, alive] = send_all(
        app,
        [
            {"method": "GET", "url": "/health"},
            {"method": "POST", "url": CHAT, "json": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}},
        ],
    )
    assert (health.status_code, alive.status_code) == (200, 200)
    return Counter(reply.status_code for reply in replies)


# --- JSON

BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    (
        CHAT,
        {
            "model": "nano",
            "messages": [
                {"role": "system", "content": "Be short."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                    ],
                },
            ],
            "max_tokens": 2,
            "temperature": 1.0,
            "top_p": 0.9,
            "seed": 1,
            "stop": ["x"],
            "n": 2,
            "logit_bias": {"5": 1},
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 3,
            "mode": "linear_spec",
            "block_length": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "thinking_budget": 1,
            "repetition_penalty": 1.1,
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3,
            "mode": "diffusion",
            "threshold": 0.5,
            "commit_rule": "confidence",
            "block_length": 4,
            "min_tokens": 1,
            "top_k": 3,
            "temperature": 0.7,
        },
    ),
    (TEXT, {"prompt": ["a b", "c"], "max_tokens": 2, "logprobs": 1, "echo": False, "best_of": 1}),
    (TEXT, {"prompt": [[70, 71], [72]], "max_tokens": 2, "mode": "quadratic_spec", "block_length": 3}),
]
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(10**30), 10**30, 0.5, -0.0, 1e-300, 1e308, "", "x", "nano", "\x00",
    "\ud800", "é" * 50, "٣", "-1", "1e9", "auto", "ar", "data:", "data:image/png;base64,", "data:,x", "http://[::1]/",
    "file:///etc/passwd", "<|im_end|>", "[IMG]", [], {}, [[]], [None], ["x"] * 20, {"": None}, {"type": "text"},
    {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlhAQABAA=="}},
    {"url": "data:;base64,AAAA"}, [1, "a", None, {}], [[[[[[1]]]]]], float("nan"), float("inf"),
]  # fmt: skip


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [path, *(p for key, item in inner for p in paths_in(item, (*path, key)))]


def spoilt(body: dict[str, Any], chance: random.Random) -> Any:
    """A body with one to three values replaced, removed, added or doubled."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        path = chance.choice(paths_in(body)[1:] or [()])
        if not path:
            return copy.deepcopy(chance.choice(ODD))
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        what = chance.random()
        if what < 0.6:
            holder[path[-1]] = copy.deepcopy(chance.choice(ODD))
        elif what < 0.75:
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[chance.choice(["extra", "top_p", "n", "stop", "mode", "role", "type", "\ud800"])] = chance.choice(
                ODD
            )
        else:
            holder.append(copy.deepcopy(chance.choice([*holder, *ODD])))
    return body


def broken_text(body: dict[str, Any], chance: random.Random) -> bytes:
    """The JSON itself cut, with bytes replaced, or nested deeply."""
    raw = bytearray(json.dumps(body).encode())
    what = chance.random()
    if what < 0.4:
        for _ in range(chance.randint(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
    elif what < 0.6:
        del raw[chance.randrange(len(raw)) :]
    elif what < 0.7:
        depth = chance.choice([50, 900, 50_000])
        raw = bytearray(
            b'{"messages":[{"role":"user","content":"x"}],"metadata":{"a":' + b"[" * depth + b"]" * depth + b"}}"
        )
    elif what < 0.8:
        raw = bytearray(json.dumps(body).encode(chance.choice(["utf-16", "utf-32", "utf-8-sig"])))
    elif what < 0.9:
        raw = bytearray(
            b'{"messages":[{"role":"user","content":"x"}],"max_tokens":' + b"9" * chance.choice([30, 5000]) + b"}"
        )
    else:
        raw = bytearray(chance.randbytes(chance.randint(0, 60)))
    return bytes(raw)


def test_malformed_json(app: Any, promised: dict[str, Any]) -> None:
    chance = random.Random(0)
    requests = []
    for number in range(REQUESTS * 2 // 5):
        url, body = chance.choice(BODIES)
        content = broken_text(body, chance) if number % 4 == 3 else json.dumps(spoilt(body, chance)).encode()
        requests.append(
            {"method": "POST", "url": url, "content": content, "headers": {"Content-Type": "application/json"}}
        )
    counts = fuzz(app, promised, requests)
    assert counts[400] > len(requests) / 3


# --- pictures


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    image = Image.open(io.BytesIO(PICTURE)).convert("RGB").resize((40, 30))
    image.save(file, kind)
    return file.getvalue()


def odd_picture(chance: random.Random) -> str:
    """A data URI whose picture is cut, has bits turned, or is something else; or whose words are wrong."""
    kind = chance.choice(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "ICO", "EPS", "PDF"])
    raw = bytearray(encoded(kind))
    what = chance.random()
    if what < 0.3:
        del raw[chance.randrange(len(raw)) :]
    elif what < 0.8:
        for _ in range(chance.randint(1, 12)):
            raw[chance.randrange(min(len(raw), chance.choice([64, 100_000])))] = chance.randrange(256)
    else:
        raw = bytearray(chance.randbytes(chance.randint(0, 200)))
    text = base64.b64encode(raw).decode()
    head = chance.choice(
        ["data:image/png;base64,", "data:;base64,", "DATA:image/*;BASE64,", "data:base64,", "data:image/png,"]
    )
    if chance.random() < 0.15:
        place = chance.randrange(len(text) + 1)
        text = text[:place] + chance.choice(["%", "%zz", "=", "é", " ", "\n", "\ud800", ","]) + text[place:]
    return head + text


def test_malformed_pictures(app: Any, promised: dict[str, Any]) -> None:
    chance = random.Random(1)
    requests = []
    for _ in range(REQUESTS // 5):
        parts = [
            {"type": "image_url", "image_url": {"url": odd_picture(chance)}} for _ in range(chance.choice([1, 1, 2]))
        ]
        body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], "max_tokens": 1}
        requests.append({"method": "POST", "url": CHAT, "content": json.dumps(body).encode()})
        requests[-1]["headers"] = {"Content-Type": "application/json"}
    counts = fuzz(app, promised, requests)
    assert counts[400] > len(requests) / 4


# --- headers


def test_odd_headers_methods_and_paths(app: Any, promised: dict[str, Any]) -> None:
    chance = random.Random(2)
    values = [b"", b"x", b"-1", b"0", b"9" * 5000, b"\xff\xfe", b"application/json; charset=utf-16", b"text/plain",
              b"multipart/form-data; boundary=", b"application/x-www-form-urlencoded", b"Bearer ", b"Bearer \xc3\xa9",
              b"gzip", b"chunked", b"a" * 9000, b"application/json;;;=", "²".encode(), b"null", b"*"]  # fmt: skip
    names = [b"Content-Type", b"Content-Length", b"Authorization", b"Content-Encoding", b"Transfer-Encoding", b"Host",
             b"Accept", b"Origin", b"Expect", b"Range", b"Cookie", b"X-Forwarded-For", b"Connection"]  # fmt: skip
    urls = [
        CHAT,
        TEXT,
        "/v1/models",
        "/health",
        "/metrics",
        "/v1/models/nano",
        "/v1/models/%ff",
        "/v1/../health",
        "/v1//",
    ]
    content = json.dumps(BODIES[0][1]).encode()
    requests = []
    for number in range(REQUESTS // 5):
        post = number % 2 == 0
        headers = [(chance.choice(names), chance.choice(values)) for _ in range(chance.randint(1, 3))]
        requests.append(
            {
                "method": "POST"
                if post
                else chance.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"]),
                "url": chance.choice(urls[:2]) if post else chance.choice(urls),
                "headers": headers,
                "content": content,
            }
        )
    fuzz(app, promised, requests)


@pytest.mark.parametrize(
    ("url", "content", "headers", "status"),
    [
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {}, 400),
        (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udfff"}]}]}', {}, 400),
        (TEXT, b'{"prompt": "\\ud800"}', {}, 400),
        (TEXT, b'{"prompt": [9223372036854775808]}', {}, 400),
        (TEXT, b'{"prompt": "x", "temperature": 1, "top_p": 1e-300, "max_tokens": 2}', {}, 200),
        (CHAT, b"{}", {"Content-Length": "9" * 5000}, 413),
        (CHAT, b"{}", {"Content-Length": "x"}, 400),
    ],
)  # fmt: skip
def test_what_fuzzing_found(
    app: Any, promised: dict[str, Any], url: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    request = {"method": "POST", "url": url, "content": content}
    request["headers"] = {"Content-Type": "application/json"} | headers
    [reply] = send_all(app, [request])
    check(promised, request, reply)
    assert reply.status_code == status, reply.text


def test_a_program_that_pillow_would_run_is_not_run(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPS is PostScript, which Pillow hands to Ghostscript."""
    import PIL.EpsImagePlugin

    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr(PIL.EpsImagePlugin, "Ghostscript", run)
    part = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(encoded("EPS")).decode()}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    [reply] = send_all(app, [{"method": "POST", "url": CHAT, "json": body}])
    assert reply.status_code == 400 and "known format" in reply.json()["error"]["message"]


# --- the OpenAPI document


def test_requests_made_from_the_document(app: Any, promised: dict[str, Any]) -> None:
    """schemathesis makes bodies that the schema allows and some that it forbids, and holds replies to the document."""
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    counts: Counter[str] = Counter()
    for path in (CHAT, TEXT):
        operation = document[path]["POST"]
        for mode, share in ((schemathesis.GenerationMode.POSITIVE, 0.05), (schemathesis.GenerationMode.NEGATIVE, 0.05)):
            strategy = operation.as_strategy(generation_mode=mode)

            @seed(0)
            @settings(
                max_examples=max(2, int(REQUESTS * share)),
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def answer(case: Any) -> None:
                reply = case.call()
                counts[str(reply.status_code)] += 1
                # Rules between fields are not in the schema, so that what it allows may still be refused.
                case.validate_response(
                    reply, excluded_checks=[schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
                )

            answer()
    assert sum(counts.values()) >= 8 and counts["400"] and counts["200"], counts
    assert [r.status_code for r in send_all(app, [{"method": "GET", "url": "/health"}])] == [200]
