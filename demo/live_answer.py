"""One answer while it comes, as the web page shows it: text, canvas or draft, counts."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from trimode_vlm.output import StreamEvent
from trimode_vlm.request import Request, RequestError, TextEvent

# Between two pictures of an answer. Events that come meanwhile are shown together, so that a page never lags behind.
FRAME_SEC = 0.04


class LiveAnswer:
    """`async for` over `frames()` for itself as it grows; `record()` is what the session's table adds up.

    `block` is the last event that showed a canvas or a draft, and `block_end` how many tokens there were after it.
    All of it is as of the last event taken: the engine may be ahead.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.block: StreamEvent | None = None
        self.block_end = 0
        self.last: StreamEvent | None = None
        self.seconds_to_first_token: float | None = None
        self.accepted_lengths: list[int] = []

    async def frames(self) -> AsyncIterator[LiveAnswer]:
        """States to show; the last is the end. Leaving it early ends the request's forwards.

        The engine's failure is told by `request.error` alone.
        """
        shown, is_shown = -FRAME_SEC, True
        try:
            async for event in self.request.events():
                self.take(event)
                is_shown = time.perf_counter() - shown >= FRAME_SEC
                if is_shown:
                    yield self
                    shown = time.perf_counter()
        except RequestError:
            pass
        finally:
            self.request.cancel()
        if not is_shown:
            yield self

    def take(self, event: TextEvent) -> None:
        self.text += event.text
        self.last = last = event.event
        self.token_ids += last.token_ids
        if last.token_ids and self.seconds_to_first_token is None:
            self.seconds_to_first_token = last.seconds
        if last.draft is not None:
            self.accepted_lengths.append(len(last.token_ids))
        if last.canvas or last.draft:
            self.block, self.block_end = last, len(self.token_ids)

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset(self.request.generation.config.end_token_ids)

    def record(self) -> dict[str, Any]:
        """Counts in the words of eval's records, so that the page and reports pool them alike."""
        last = self.last
        num_forwards = last.num_forwards if last else 0
        return {
            "mode": self.request.mode,
            "num_new_tokens": len(self.token_ids),
            "nfe": num_forwards,
            "nfe_prefill": min(1, num_forwards),
            "seconds": last.seconds if last else 0.0,
            "seconds_to_first_token": self.seconds_to_first_token,
            "accepted_lengths": list(self.accepted_lengths),
            "finish_reason": last.finish_reason if last else None,
        }
