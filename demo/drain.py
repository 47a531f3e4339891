"""How a server ends: it takes no request more, answers what is under way, and says so at /health meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from trimode_vlm.engine import Engine

POLL_SEC = 0.05
# Gradio's pages keep such a request up for as long as they are open: nothing to wait for.
ENDLESS = "/gradio_api/heartbeat/"


class Drain:
    """`requests`: those that have not been answered in full, as `UnderWay` keeps them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: set[object] = set()
        self.has_begun = False

    @property
    def status(self) -> str:
        """ "ok", "draining" or "failed"."""
        if self.has_begun:
            return "draining"
        return "ok" if self.engine.is_alive and not self.engine.is_closing else "failed"

    async def run(self, limit_sec: float, is_forced: Callable[[], bool] = lambda: False) -> None:
        """Return when all that is under way now has been answered. After `limit_sec`, or once forced, the rest fails.

        The listener had better stay open meanwhile: then who asks is told to go elsewhere.
        """
        self.has_begun = True
        deadline, left = time.monotonic() + limit_sec, set(self.requests)
        closing = asyncio.create_task(asyncio.to_thread(self.engine.close, True))
        while (left & self.requests or not closing.done()) and time.monotonic() < deadline and not is_forced():
            await asyncio.sleep(POLL_SEC)
        await asyncio.to_thread(self.engine.close)
        await closing


class UnderWay:
    """ASGI middleware: keeps `drain.requests`."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app, self.drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or ENDLESS in scope["path"]:
            await self.app(scope, receive, send)
            return
        request = object()
        self.drain.requests.add(request)
        try:
            await self.app(scope, receive, send)
        finally:
            self.drain.requests.discard(request)
