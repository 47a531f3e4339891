"""Who waits for an engine, and who of them can start."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from .image_encoder import ImageEncoder
from .prefill import Prompt
from .request import QueueFullError, Request, RequestError

# Waiting requests whose images are encoded before their turn; their features are held meanwhile.
AHEAD = 4


class Waiting:
    """A line that any thread may join; one, the engine's, takes from it, and sleeps in `wait` while it is idle.

    Args:
        limit: requests that wait; more are refused.
        num_held: how many of a prompt's first images need no encoding now.
    """

    def __init__(self, limit: int, encoder: ImageEncoder, num_held: Callable[[Prompt], int]) -> None:
        self.limit, self.encoder, self.num_held = limit, encoder, num_held
        self.closed: str | None = None  # why nobody is let in
        self._requests: deque[Request] = deque()
        self._has_news = False  # since the engine last looked
        self._condition = threading.Condition()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_encoding(self) -> int:
        """Those whose images are being encoded, or are the next to be."""
        with self._condition:
            return sum(request.encoding is not None and not request.is_ready for request in self._requests)

    def put(self, request: Request) -> None:
        """Raises what `check_open` raises."""
        with self._condition:
            self.check_open()
            self._requests.append(request)
            self.tell()

    def check_open(self) -> None:
        """Raise what `put` would raise now for any request."""
        if self.closed:
            raise RequestError(self.closed)
        if len(self._requests) >= self.limit:
            raise QueueFullError(f"{len(self._requests)} requests wait already; try again later")

    def close(self, reason: str) -> None:
        """Let nobody in any more; `wait` goes on until the line is empty."""
        with self._condition:
            self.closed = reason
            self.tell()

    def tell(self) -> None:
        """There is something to look at."""
        with self._condition:
            self._has_news = True
            self._condition.notify()

    def wait(self, is_busy: bool) -> bool:
        """Sleep until there is news or a deadline, not at all while rows run. False: it is closed, and all is done."""
        with self._condition:
            while not (is_busy or self._has_news or (self.closed and not self._requests)):
                deadlines = [r.deadline for r in self._requests if r.deadline is not None]
                if not self._condition.wait(max(0.0, min(deadlines) - time.perf_counter()) if deadlines else None):
                    break
            self._has_news = False
            return is_busy or bool(self._requests) or not self.closed

    def take_all(self, is_to_go: Callable[[Request], bool] = lambda _: True) -> list[Request]:
        """Those that are to go, out of the line; nobody encodes their images any more."""
        with self._condition:
            gone = [request for request in self._requests if is_to_go(request)]
            for request in gone:
                self._requests.remove(request)
        for request in gone:
            if request.encoding is not None:
                request.encoding.features.cancel()
                request.encoding = None
        return gone

    def next_ready(self) -> Request | None:
        """The first that has no images or whose images are encoded; meanwhile those of the first few are."""
        with self._condition:
            waiting = list(self._requests)
        for request in islice((request for request in waiting if request.prompt.images), AHEAD):
            if request.encoding is None:
                request.encoding = self.encoder.ask(request.prompt, self.num_held(request.prompt))
        return next((request for request in waiting if request.is_ready), None)

    def take(self, request: Request) -> bool:
        """Take it out of the line. False: it stays, since what had held its first images has gone in the meantime."""
        first = 0 if request.encoding is None else request.encoding.first
        if first and (held := self.num_held(request.prompt)) < first:
            request.encoding = self.encoder.ask(request.prompt, held)
            return False
        with self._condition:
            self._requests.remove(request)
        return True
