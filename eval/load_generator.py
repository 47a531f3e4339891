"""Users who ask an engine in this process, or a server, and what they see: times, texts, refusals.

Closed loop: each user asks the next question as soon as the last is answered. Open loop: questions arrive at random
moments at a given rate (Poisson), whoever still waits.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trimode_vlm.eval.prompts import inputs_of

if TYPE_CHECKING:
    from trimode_vlm.engine import Engine

# What a user waits after a refusal; a server says the same in whole seconds (Retry-After).
RETRY_SEC = 0.05
SERVER_DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A question. `messages` are a chat whose image parts hold PIL pictures."""

    number: int
    messages: Sequence[dict[str, Any]]
    max_new_tokens: int


@dataclass(kw_only=True)
class Answer:
    """What came of a job. Times are time.perf_counter's; `arrivals`: one per event that brought tokens."""

    job: int
    sent: float
    status: str = "ok"  # or refused, failed
    text: str = ""
    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    done: float = 0.0
    error: str | None = None


class EngineClient:
    """Asks an engine in this process. Prompts are tokenised and pictures read beforehand."""

    def __init__(self, engine: Engine, jobs: Iterable[Job]) -> None:
        self.engine = engine
        self.inputs = {job.number: dict(inputs_of(engine.processor, [job.messages])) for job in jobs}

    async def ask(self, job: Job, mode: str) -> Answer:
        from trimode_vlm.request import QueueFullError, RequestError

        answer = Answer(job=job.number, sent=time.perf_counter())
        try:
            request = self.engine.submit(self.inputs[job.number], mode=mode, max_new_tokens=job.max_new_tokens)
            async for event in request.events():
                if event.event.token_ids:
                    answer.arrivals.append(time.perf_counter())
                    answer.tokens += len(event.event.token_ids)
            answer.text = request.texts[0]
        except QueueFullError:
            answer.status = "refused"
        except (RequestError, ValueError) as error:
            answer.status, answer.error = "failed", str(error)
        answer.done = time.perf_counter()
        return answer

    async def close(self) -> None:
        """Nothing is open between runs."""


class HttpClient:
    """Asks a server that speaks the OpenAI API, in streams; the mode goes as an extra field of the body."""

    def __init__(self, url: str, model: str | None, api_key: str | None, jobs: Iterable[Job]) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.bodies = {
            job.number: {
                "messages": [as_openai(message) for message in job.messages],
                "max_tokens": job.max_new_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"model": model} if model else {}),
            }
            for job in jobs
        }
        self._http: Any = None

    async def ask(self, job: Job, mode: str) -> Answer:
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None), trust_env=False)
        body = self.bodies[job.number] | ({} if mode == SERVER_DEFAULT else {"mode": mode})
        answer = Answer(job=job.number, sent=time.perf_counter())
        try:
            async with self._http.stream("POST", self.url, json=body, headers=self.headers) as reply:
                if reply.status_code == 200:
                    await self._read(reply.aiter_lines(), answer)
                elif reply.status_code == 429:
                    answer.status = "refused"
                else:
                    answer.status, answer.error = (
                        "failed",
                        f"{reply.status_code} {(await reply.aread()).decode()[:200]}",
                    )
        # Beside the connection's errors those of a chunk that is no JSON, or no chunk of an answer.
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            answer.status, answer.error = "failed", f"{type(error).__name__} {error}".strip()
        answer.done = time.perf_counter()
        return answer

    async def _read(self, lines: Any, answer: Answer) -> None:
        finished = False
        async for line in lines:
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.status, answer.error = "failed", chunk["error"]["message"]
                return
            if chunk.get("usage"):
                answer.tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                finished = finished or choice["finish_reason"] is not None
                if text := choice["delta"].get("content"):
                    answer.arrivals.append(time.perf_counter())
                    answer.text += text
        if not finished:
            answer.status, answer.error = "failed", "the stream ended before the answer"

    async def close(self) -> None:
        """A client belongs to the event loop of its run."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """A chat message with its pictures as data URIs."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [_part(part) for part in message["content"]]}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    file = io.BytesIO()
    part["image"].save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()},
    }


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many ask: `users` in a closed loop, or `rate` arrivals per second. One of the two."""

    users: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} per sec" if self.users is None else str(self.users)


@dataclass(frozen=True, kw_only=True)
class Run:
    answers: list[Answer]
    seconds: float

    @property
    def answered(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == "ok"]

    @property
    def tokens_per_sec(self) -> float:
        return sum(answer.tokens for answer in self.answered) / self.seconds


def run_load(
    client: EngineClient | HttpClient,
    jobs: Sequence[Job],
    mode: str,
    load: Load,
    *,
    duration_sec: float | None = None,
    seed: int = 0,
    each_second: Callable[[], None] | None = None,
) -> Run:
    """Ask all jobs once; with a duration all of them over and over, until it is up and what was asked is answered."""

    async def go() -> Run:
        start = time.perf_counter()
        given = iter(jobs) if duration_sec is None else _until(itertools.cycle(jobs), start + duration_sec)
        clock = asyncio.create_task(_tick(each_second or (lambda: None)))
        try:
            if load.users is not None:
                answers = await _closed_loop(client.ask, given, mode, load.users)
            else:
                answers = await _arrivals(client.ask, given, mode, load.rate or 1.0, random.Random(seed))
            return Run(answers=answers, seconds=time.perf_counter() - start)
        finally:
            clock.cancel()
            await client.close()

    return asyncio.run(go())


Ask = Callable[[Job, str], Awaitable[Answer]]


async def _closed_loop(ask: Ask, jobs: Iterator[Job], mode: str, users: int) -> list[Answer]:
    answers = []

    async def user() -> None:
        for job in jobs:  # one iterator for all: whoever is free takes the next
            answers.append(await ask(job, mode))
            if answers[-1].status == "refused":
                await asyncio.sleep(RETRY_SEC)

    await asyncio.gather(*(user() for _ in range(users)))
    return answers


async def _arrivals(ask: Ask, jobs: Iterator[Job], mode: str, rate: float, chance: random.Random) -> list[Answer]:
    tasks: list[asyncio.Future[Answer]] = []
    for job in jobs:
        if tasks:
            await asyncio.sleep(chance.expovariate(rate))
        tasks.append(asyncio.ensure_future(ask(job, mode)))
    return list(await asyncio.gather(*tasks))


def _until(jobs: Iterator[Job], end: float) -> Iterator[Job]:
    return itertools.takewhile(lambda _: time.perf_counter() < end, jobs)


async def _tick(call: Callable[[], None]) -> None:
    while True:
        call()
        await asyncio.sleep(1.0)
