"""One request to the engine, as its caller sees it: events as they come, cancel, the result."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .detokenizer import IncrementalDetokenizer
from .generation import Generation, StreamEvent, TriModeGenerateOutput
from .stops import make_stopper

if TYPE_CHECKING:
    from .image_encoder import Encoding
    from .prefill import Prompt


class RequestError(RuntimeError):
    """The engine could not go on with a request; the message says why."""


class QueueFullError(RequestError):
    """Too many requests wait already: try again later."""


@dataclass(frozen=True, kw_only=True)
class TextEvent:
    """A row's progress as text. `text` is what became certain with this event; the rest is the StreamEvent's."""

    row: int
    text: str
    event: StreamEvent


class Request:
    """A request under way. Iterate it (or `async for` over `events()`) for TextEvents; `result()` waits for the end.

    Only one consumer reads the events. Finish reasons are generate()'s, and "cancelled" and "timeout".
    """

    def __init__(
        self,
        generation: Generation,
        input_ids: Any,
        tokenizer: Any,
        deadline: float | None,
        on_cancel: Callable[[], None],
    ) -> None:
        self.generation, self.deadline = generation, deadline
        self.error: BaseException | None = None
        self.texts = [""] * len(generation.rows)
        # Tokens of the prompt whose keys an earlier conversation had left.
        self.cached_tokens = 0
        # Features of its images, from when the engine asks for them until it starts.
        self.encoding: Encoding | None = None
        self._on_cancel = on_cancel
        self._input_ids = input_ids
        self._cancelled = threading.Event()
        self._done = threading.Event()
        # Where an asyncio consumer waits, and whether it has been told of events since it last looked.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Event | None = None
        self._is_told = False
        self._events: queue.SimpleQueue[StreamEvent | None] = queue.SimpleQueue()
        stops = generation.config.stop_strings
        self._detokenizers = [
            make_stopper(tokenizer, stops) if stops else IncrementalDetokenizer(tokenizer) for _ in generation.rows
        ]

    @property
    def prompt(self) -> Prompt:
        return self.generation.rows[0].prompt

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def mode(self) -> str:
        return self.generation.config.mode

    @property
    def is_ready(self) -> bool:
        """Whether it can be prefilled: it has no images, or they are encoded."""
        return not self.prompt.images or (self.encoding is not None and self.encoding.features.done())

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask for the end; forwards for this request cease at the next border between steps. From any thread."""
        self._cancelled.set()
        if not self.is_done:
            self._on_cancel()

    def __iter__(self) -> Iterator[TextEvent]:
        """Events until the request ends.

        Raises:
            RequestError: the engine failed or closed.
        """
        while (event := self._events.get()) is not None:
            yield self._as_text(event)
        if self.error is not None:
            raise RequestError(str(self.error)) from self.error

    async def events(self) -> AsyncIterator[TextEvent]:
        """The same for asyncio; a consumer that goes away cancels the request."""
        self._arrived = arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                arrived.clear()
                self._is_told = False
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    await arrived.wait()
                    continue
                if event is None:
                    break
                yield self._as_text(event)
        finally:
            self.cancel()
        if self.error is not None:
            raise RequestError(str(self.error)) from self.error

    def result(self) -> TriModeGenerateOutput:
        """Wait for the end, taking all events; `texts` then holds the answers.

        Raises:
            RequestError: the engine failed or closed.
        """
        for _ in self:
            pass
        return self.output()

    def output(self) -> TriModeGenerateOutput:
        """generate()'s output, as far as the answer has come; without the conversation's cache, which is shared."""
        return self.generation.output(self._input_ids, with_cache=False)

    def _as_text(self, event: StreamEvent) -> TextEvent:
        detokenizer = self._detokenizers[event.row]
        text = detokenizer.put(event.token_ids)
        if event.finish_reason is not None:
            text += detokenizer.end()
        self.texts[event.row] += text
        return TextEvent(row=event.row, text=text, event=event)

    # The engine's side.

    def put(self, event: StreamEvent | None) -> None:
        """A consumer in an asyncio loop sees it after `wake`."""
        self._events.put(event)

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()
        self.put(None)


def wake(requests: Iterable[Request]) -> None:
    """Tell the consumers in asyncio loops that events have come: one call per loop, since each one is a system call."""
    waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for request in requests:
        if request._loop is not None and request._arrived is not None and not request._is_told:
            request._is_told = True
            waiting.setdefault(request._loop, []).append(request._arrived)
    for loop, events in waiting.items():
        # A loop that has ended has no consumer left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
