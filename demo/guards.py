"""What stands between the network and the routes: keys, body size, and errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Reachable without a key: what load balancers and scrapers ask. A web page mounted beside the API has its own doors.
GUARDED = "/v1/"
logger = logging.getLogger(__name__)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, code)


def handle_errors(app: FastAPI) -> None:
    """Give every error that a route raises, and those of routing itself, OpenAI's shape."""
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_validation_error)
    app.exception_handler(Exception)(_server_error)


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


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body, error.status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code, error.headers)


async def _validation_error(_: Request, error: Exception) -> Response:
    """The first fault, in one line that names the field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # its place is a character of the text
        reason = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return JSONResponse(error_body(f"the body is not valid JSON: {reason}", "invalid_request_error"), 400)
    place = [str(part) for part in first["loc"] if part != "body"]
    param = place[0] if place else None
    text = first["msg"].removeprefix("Value error, ")
    message = f"{'.'.join(place)}: {text}" if place else text
    return JSONResponse(error_body(message, "invalid_request_error", param=param), 400)


async def _server_error(http: Request, error: Exception) -> Response:
    logger.exception("%s %s failed", http.method, http.url.path, exc_info=error)
    return JSONResponse(error_body(f"{type(error).__name__} in the server", "server_error"), 500)
