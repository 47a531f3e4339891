"""The server as replicas of a Ray Serve application, on one machine or many; each replica has an engine of its own.

    serve run trimode_vlm.demo.ray_app:app
    serve run trimode_vlm.demo.ray_app:build model=path/to/checkpoint max_replicas=4 num_gpus=1

Replicas come and go with the number of requests under way. One that goes first answers what it has; one whose engine
has died fails its health check and is replaced. An API key is read from TRIMODE_API_KEY on the replica's machine.
"""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimode_vlm.demo.serve import api_keys, check_settings, set_threads, start
from trimode_vlm.demo.server import create_app

REPLICA_HEADER = b"x-replica"


class Arguments(BaseModel):
    """What `serve run ...:build name=value` takes: the options of `trimode-vlm serve`, then Ray's."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = "nano"
    adapter: str | None = None
    sampler: str | None = None
    quantize: str | None = None
    dtype: str | None = None
    device: str | None = None
    name: str | None = None  # what the API calls it; None is the last part of `model`
    mode: str = "auto"
    image_hosts: str = ""
    cors_origins: str = ""
    max_body_mib: float = 32.0
    max_images: int = 16
    max_image_megapixels: float = 40.0
    drain_sec: float = 30.0
    max_rows: int = 32
    queue_limit: int = 128
    kv_gib: float | None = None
    timeout_sec: float = 300.0
    threads: int | None = None
    min_replicas: int = 1
    max_replicas: int = 2
    # Requests under way per replica at which another is started; None is half of max_rows.
    target_requests: float | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0


@serve.ingress()
class Replica:
    """One process with one engine. `__serve_build_asgi_app__` is where Ray Serve asks for the application."""

    def __init__(self, arguments: Arguments) -> None:
        options = argparse.Namespace(**arguments.model_dump(), api_key=api_keys([]))
        set_threads(options)
        self.engine, self.metrics, self.settings = start(options)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Its lifespan ends with the replica and drains the engine.
        app = create_app(self.engine, self.settings, self.metrics)
        return _Named(app, serve.get_replica_context().replica_id.unique_id)

    def check_health(self) -> None:
        """Called by Ray Serve now and then; a replica that raises is replaced."""
        if not self.engine.is_alive:
            raise RuntimeError("the engine's thread has ended")


class _Named:
    """ASGI middleware: every reply says which replica gave it."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app, self.header = app, (REPLICA_HEADER, name.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self.header]}
            await send(message)

        await self.app(scope, receive, named)


def build(arguments: Arguments | dict[str, str]) -> Any:
    """The application for `serve run`, which gives a dict of texts, or for serve.run in Python."""
    if not isinstance(arguments, Arguments):
        arguments = Arguments.model_validate(arguments)
    check_settings(arguments)
    if not 1 <= arguments.min_replicas <= arguments.max_replicas:
        raise ValueError(
            f"min_replicas {arguments.min_replicas} and max_replicas {arguments.max_replicas}: need 1 <= min <= max"
        )
    deployment = serve.deployment(Replica).options(
        name="trimode-vlm",
        # What an engine lets in or keeps waiting; it answers 429 itself beyond that.
        max_ongoing_requests=arguments.max_rows + arguments.queue_limit + 1,
        autoscaling_config={
            "min_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": arguments.target_requests or max(1, arguments.max_rows // 2),
        },
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        graceful_shutdown_timeout_s=arguments.drain_sec,
        health_check_period_s=5.0,
    )
    return deployment.bind(arguments)


app = build(Arguments())
