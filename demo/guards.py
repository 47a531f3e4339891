"""What stands between the network and the routes: keys, body size, and errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Reachable without a key: what load balancers and scrapers ask. A web page mounted beside the API has its own doors.
GUARDED = "/v1/"


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Guard:
    """ASGI middleware: refuses a wrong key with 401 and a body over `max_body_bytes` with 413, before it is read."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self.app, self.max_body_bytes = app, max_body_bytes
        self.api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self.api_keys and scope["method"] != "OPTIONS" and not self._knows(headers.get(b"authorization", b"")):
            body = error_body(
                "wrong or missing API key (Authorization: Bearer ...)", "invalid_request_error", "invalid_api_key"
            )
            await _reply(send, 401, body)
            return
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit():
            await _reply(send, 400, error_body("Content-Length is not a number", "invalid_request_error"))
            return
        # Python reads numbers of up to 4300 digits.
        if len(declared) > 20 or int(declared) > self.max_body_bytes:
            await self._too_large(send)
            return
        await self._limited(scope, receive, send)

    def _knows(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        # Every key is compared in full, so that the time tells nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self.api_keys]
        return scheme.lower() == b"bearer" and any(matches)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body here (a chunked one declares no length), then hand it on whole."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                await self._too_large(send)
                return
            if not message.get("more_body", False):
                break
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self.app(scope, replay, send)

    async def _too_large(self, send: Send) -> None:
        message = f"the body is larger than the {self.max_body_bytes} bytes that this server takes"
        await _reply(send, 413, error_body(message, "invalid_request_error", "request_too_large"))


async def _reply(send: Callable[[Message], Awaitable[None]], status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    # The body was not read: a connection that goes on would take it for the next request.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
