"""A real server on a free port of this machine, in a thread, for the tests of serving."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest


def need(*modules: str) -> None:
    """Skip the test file where an optional package is missing."""
    for name in modules:
        pytest.importorskip(name, reason=f"{name} is not installed (pip install {name.partition('.')[0]})")


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Until it is true; it must become so in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def free_port() -> int:
    """For whoever cannot take port 0. The kernel gives others none of these: Linux's begin at 32768, macOS's later."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


@contextmanager
def paced(engine: Any, seconds: float = 0.05) -> Iterator[None]:
    """Every step waits so long first: no answer ends before a test has looked at it, on whatever machine."""
    step = engine._step
    engine._step = lambda *args: (time.sleep(seconds), step(*args))
    try:
        yield
    finally:
        engine._step = step


@contextmanager
def listening(app: Any, server: Any = None) -> Iterator[str]:
    """The address of a uvicorn server that runs the application, or of the server that is given."""
    import uvicorn

    server = server or uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
