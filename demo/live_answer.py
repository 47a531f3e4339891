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
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.block: StreamEvent | None = None
        self.block_end = 0

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
        self.token_ids += event.event.token_ids
        if event.event.canvas or event.event.draft:
            self.block, self.block_end = event.event, len(self.token_ids)

    @property
    def finish_reason(self) -> str | None:
        return self._row.finish_reason

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset(self.request.generation.config.end_token_ids)

    @property
    def _row(self) -> Any:
        return self.request.generation.rows[0]

    def record(self) -> dict[str, Any]:
        """Counts in the words of eval's records, so that the page and reports pool them alike."""
        row = self._row
        return {
            "mode": self.request.mode,
            "num_new_tokens": len(self.token_ids),
            "nfe": row.nfe,
            "nfe_prefill": row.nfe_prefill,
            "seconds": row.seconds,
            "seconds_to_first_token": row.seconds_to_first_token,
            "accepted_lengths": list(row.accepted_lengths),
            "finish_reason": row.finish_reason,
        }
