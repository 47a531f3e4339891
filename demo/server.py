"""`trimode-vlm serve`: an OpenAI-compatible server on the engine; the web chat beside it with --ui."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trimode_vlm.demo.completions import Reply, most_characters
from trimode_vlm.demo.drain import Drain, UnderWay
from trimode_vlm.demo.guards import ApiError, Guard, handle_errors
from trimode_vlm.demo.openapi_schema import describer
from trimode_vlm.demo.prometheus import Metrics
from trimode_vlm.demo.protocol import ChatRequest, CompletionRequest, DecodingRequest, in_words_of_the_api
from trimode_vlm.demo.remote_images import read_images
from trimode_vlm.engine import Engine
from trimode_vlm.request import QueueFullError, RequestError
from trimode_vlm.request import Request as EngineRequest

# How often a reply that waits asks whether its client is still there.
DISCONNECT_POLL_SEC = 0.1
HALF_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server allows. `image_hosts`: whose pictures it fetches; none by default."""

    model_name: str = "trimode-vlm"
    api_keys: Sequence[str] = ()
    default_mode: str = "auto"
    max_body_bytes: int = 32 * 2**20
    max_images: int = 16
    max_image_pixels: int = 40_000_000
    max_image_bytes: int = 16 * 2**20
    image_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    timeout_sec: float | None = 300.0


def create_app(engine: Engine, settings: ServerSettings, metrics: Metrics | None = None) -> FastAPI:
    """The application. It closes the engine when it ends, after the answers under way.

    `app.state.drain` is what a server runs before it ends, while it still listens.

    Args:
        metrics: as given to the engine's on_finish; without, /metrics counts no finished requests.
    """
    drain = Drain(engine)
    api = _Api(engine, settings, drain)
    metrics = metrics or Metrics(engine.stats)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        drain.has_begun = True
        await asyncio.to_thread(engine.close, True)

    app = FastAPI(title="trimode-vlm", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.drain = drain

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Response:
        requests = await api.start(lambda: [api.chat(body)])
        return await api.answer("chat", body, requests, http)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, http: Request) -> Response:
        requests = await api.start(lambda: api.complete(body))
        return await api.answer("text", body, requests, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [api.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        api.check_model(name)
        return api.card

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": drain.status}, 200 if drain.status == "ok" else 503)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.openapi = describer(app, bool(settings.api_keys))  # type: ignore[method-assign]
    handle_errors(app)
    app.add_middleware(Guard, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(UnderWay, drain=drain)
    return app


class _Api:
    """Requests of the API as requests of the engine."""

    def __init__(self, engine: Engine, settings: ServerSettings, drain: Drain) -> None:
        self.engine, self.settings, self.drain = engine, settings, drain
        self.processor = engine.processor
        # Tokens that a prompt can have at most, by the model and by memory; characters that these can stand for.
        slots = engine.admission.kv_bytes // engine.admission.bytes_per_slot
        self.most_tokens = min(engine.model.config.max_position_embeddings, slots)
        per_token = most_characters(self.processor.tokenizer)
        self.most_characters = None if per_token is None else self.most_tokens * per_token
        self.card = {"id": settings.model_name, "object": "model", "created": 0, "owned_by": "trimode-vlm"}

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.model_name):
            message = f"unknown model {name!r}; this server has {self.settings.model_name!r}"
            raise ApiError(404, message, code="model_not_found")

    async def start(self, submit: Callable[[], list[EngineRequest]]) -> list[EngineRequest]:
        """Read and submit in a thread: pictures take time to decode, which a full queue is spared."""
        submitted: list[EngineRequest] = []
        is_left = False

        def work() -> None:
            submitted.extend(submit())
            if is_left:
                _cancel(submitted)

        try:
            self.engine.check_open()
            await asyncio.to_thread(work)
            return submitted
        except asyncio.CancelledError:
            # The thread goes on, and nobody is left to own what it submits.
            is_left = True
            _cancel(submitted)
            raise
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except QueueFullError as error:
            raise ApiError(429, str(error), "rate_limit_error", "queue_full") from error
        except RequestError as error:
            raise self.failure(error, "engine_failed", 503) from error

    def failure(self, error: RequestError, code: str | None = None, status: int = 500) -> ApiError:
        """What a client is told of an engine that could not go on: that it ends, or that it has failed."""
        if self.drain.has_begun:
            code, status = "shutting_down", 503
        return ApiError(status, str(error), "server_error", code)

    def chat(self, body: ChatRequest) -> EngineRequest:
        self.check_model(body.model)
        inputs = self.processor.apply_chat_template(
            self._messages(body.messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return self._submit(body, dict(inputs))

    def complete(self, body: CompletionRequest) -> list[EngineRequest]:
        self.check_model(body.model)
        requests: list[EngineRequest] = []
        prompts, limit = body.prompts(), self.engine.settings.queue_limit
        if len(prompts) > limit:
            raise ValueError(f"prompt: {len(prompts)} prompts in one request; this server queues {limit}")
        try:
            for prompt in prompts:
                requests.append(self._submit(body, self._prompt(prompt)))
        except Exception:
            _cancel(requests)
            raise
        return requests

    def _submit(self, body: DecodingRequest, inputs: dict[str, Any]) -> EngineRequest:
        options = {"mode": self.settings.default_mode} | body.options()
        try:
            return self.engine.submit(inputs, timeout_sec=self.settings.timeout_sec, **options)
        except ValueError as error:
            raise ValueError(in_words_of_the_api(str(error))) from error

    def _prompt(self, prompt: str | list[int]) -> dict[str, Any]:
        import torch

        if isinstance(prompt, str):
            self._check_length("prompt", [_whole_text(prompt, "prompt")])
            return {"input_ids": self.processor(text=prompt, return_tensors="pt")["input_ids"]}
        size = self.engine.model.config.vocab_size
        if unknown := [token_id for token_id in prompt if not 0 <= token_id < size]:
            raise ValueError(f"prompt: token id {unknown[0]} is outside the vocabulary of {size} tokens")
        return {"input_ids": torch.tensor([prompt])}

    def _check_length(self, name: str, texts: list[str]) -> None:
        """Refuse at once what would be tokenised for long and could never fit."""
        count = sum(map(len, texts))
        if self.most_characters is not None and count > self.most_characters:
            raise ValueError(
                f"{name}: {count} characters, more than the {self.most_tokens} tokens of a prompt can hold"
            )

    def _messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with their pictures opened; what a client may not name is refused here."""
        read, texts = [], []
        # By their names in error messages: what pictures are, and the parts that wait for them.
        sources: dict[str, Any] = {}
        waiting: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            role = "system" if message.get("role") == "developer" else message.get("role")
            if role not in ("system", "user", "assistant"):
                raise ValueError(f"message {index}: unknown role {role!r}; known: system, developer, user, assistant")
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            taken: list[dict[str, Any]] = []
            for part in parts:
                kind = part.get("type") if isinstance(part, dict) else None
                if kind == "text":
                    text = part.get("text")
                    if not isinstance(text, str):
                        raise ValueError(f"message {index}: expected text, got {type(text).__name__}")
                    texts.append(_whole_text(text, f"message {index}"))
                    taken.append({"type": "text", "text": text})
                elif kind == "image_url":
                    given = part.get("image_url")
                    name = f"image {len(sources) + 1} (message {index})"
                    sources[name] = given.get("url") if isinstance(given, dict) else given
                    taken.append({"type": "image"})
                    waiting.append(taken[-1])
                else:
                    raise ValueError(f"message {index}: unknown content part {kind!r}; known: text, image_url")
            read.append({"role": role, "content": taken if isinstance(content, list) else content})
        if len(sources) > self.settings.max_images:
            raise ValueError(f"more than the {self.settings.max_images} images that this server takes")
        self._check_length("messages", texts)
        images = read_images(
            sources,
            max_pixels=self.settings.max_image_pixels,
            max_bytes=self.settings.max_image_bytes,
            allowed_hosts=self.settings.image_hosts,
        )
        for part, image in zip(waiting, images, strict=True):
            part["image"] = image
        return read

    async def answer(self, kind: str, body: DecodingRequest, requests: list[EngineRequest], http: Request) -> Response:
        """The whole reply, or its stream. A client that goes away ends its forwards."""
        reply = Reply(kind, self.settings.model_name, self.processor.tokenizer, requests)
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return _Stream(reply, include_usage, self.failure)
        watch = asyncio.create_task(_cancel_when_gone(http, reply))
        try:
            whole = await reply.whole()
        except RequestError as error:
            raise self.failure(error) from error
        finally:
            watch.cancel()
            reply.cancel()
        if any(row.finish_reason == "timeout" for request in requests for row in request.generation.rows):
            raise ApiError(504, f"no whole answer within {self.settings.timeout_sec:g} s", "server_error", "timeout")
        return JSONResponse(whole)


class _Stream(StreamingResponse):
    """A reply's chunks as server-sent events. However it ends, before its first byte even, so do its forwards."""

    def __init__(self, reply: Reply, include_usage: bool, failure: Callable[[RequestError], ApiError]) -> None:
        super().__init__(_server_sent(reply, include_usage, failure), media_type="text/event-stream")
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reply.cancel()


def _whole_text(text: str, name: str) -> str:
    """The text; JSON can spell half a character, which no tokenizer takes."""
    if HALF_CHARACTER.search(text):
        raise ValueError(f"{name}: the text holds half of a surrogate pair (\\ud800 to \\udfff)")
    return text


def _cancel(requests: Iterable[EngineRequest]) -> None:
    for request in requests:
        request.cancel()


async def _server_sent(
    reply: Reply, include_usage: bool, failure: Callable[[RequestError], ApiError]
) -> AsyncIterator[str]:
    """The chunks as server-sent events. An engine that fails is told as an event, since the status is out."""
    try:
        async for chunk in reply.chunks(include_usage):
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except RequestError as error:
        yield f"data: {json.dumps(failure(error).body)}\n\n"
    yield "data: [DONE]\n\n"


async def _cancel_when_gone(http: Request, reply: Reply) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(DISCONNECT_POLL_SEC)
    reply.cancel()
