"""One answer while it comes, as the web page shows it: text, canvas or draft, counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimode_vlm.output import StreamEvent
from trimode_vlm.request import Request


class LiveAnswer:
    """Iterate for itself after every event; then `record()` is what the session's table adds up."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.last: StreamEvent | None = None

    def __iter__(self) -> Iterator[LiveAnswer]:
        for event in self.request:
            self.text += event.text
            self.token_ids += event.event.token_ids
            self.last = event.event
            yield self

    @property
    def finish_reason(self) -> str | None:
        return self._row.finish_reason

    @property
    def _row(self) -> Any:
        return self.request.generation.rows[0]

    def record(self) -> dict[str, Any]:
        """Counts in the words of eval's records, so that the page and reports pool them alike."""
        row = self._row
        tokens = len(self.token_ids)
        return {
            "mode": self.request.mode,
            "num_new_tokens": tokens,
            "nfe": row.nfe,
            "nfe_prefill": row.nfe_prefill,
            "seconds": row.seconds,
            "seconds_to_first_token": row.seconds_to_first_token,
            "accepted_lengths": list(row.accepted_lengths),
            "finish_reason": row.finish_reason,
        }
