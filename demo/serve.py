"""`trimode-vlm serve`: load a checkpoint, start the engine, listen."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import signal
import socket
import sys
from typing import Any

from trimode_vlm.cli import UsageError, check_device, check_dtype, main, nearest, print_settings
from trimode_vlm.terminal_options import MODE_OPTIONS

EXAMPLES = """examples:
  trimode-vlm serve
  trimode-vlm serve --model path/to/checkpoint --dtype bfloat16 --device cuda --host 0.0.0.0 --port 8000
  TRIMODE_API_KEY=secret trimode-vlm serve --ui --mode linear_spec
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Count from 12 to 1."}], "mode": "linear_spec"}'
SIGTERM (or Ctrl-C) answers what is under way, up to --drain-sec, and ends.
"""
KEY_VARIABLE = "TRIMODE_API_KEY"
THREADS_VARIABLE = "OMP_NUM_THREADS"
HOSTS = "images.example.com,cdn.example.com:8443"
MODES = tuple(MODE_OPTIONS)
# When all is answered, how long a client may take to read the last of it.
LAST_BYTES_SEC = 5
ABOVE_ZERO = ("max_rows", "queue_limit", "timeout_sec", "kv_gib", "threads")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What to load; the web chat takes the same."""
    add = parser.add_argument
    add("--model", default="nano", help="checkpoint folder or hub id (default: nano, which ships with the package)")
    add("--adapter", metavar="FOLDER", help="draft adapter (default: linear_spec_lora/ beside the weights, if there)")
    add("--sampler", metavar="FOLDER", help="learned sampler (default: learned_sampler/ beside the weights, if there)")
    add("--quantize", help="text layers in few bits: int8, int4 (torchao) or 4bit (bitsandbytes)")
    add("--dtype", help="such as bfloat16 (default: the checkpoint's)")
    add("--device", help="such as cuda or cpu (default: cuda where there is one)")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Limits of the engine."""
    add = parser.add_argument
    add("--max-rows", type=int, default=32, help="answers that decode together (default 32)")
    add("--queue-limit", type=int, default=128, help="requests that may wait; more are refused with 429 (default 128)")
    add("--kv-gib", type=float, help="GiB for keys and values of running answers (default: a quarter of free memory)")
    add("--timeout-sec", type=float, default=300.0, help="longest time of a request, waiting included (default 300)")
    add(
        "--threads",
        type=int,
        help="CPU threads that compute, and as many while images are encoded "
        f"(default: {THREADS_VARIABLE} if set, else one less than the cores)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm serve`."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--name", help="what the API calls the model (default: the last part of --model)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="port to listen on (default 8000)")
    add("--mode", default="auto", help=f"mode of requests that name none: {', '.join(MODES)} (default auto)")
    add("--ui", action="store_true", help="also serve the web chat, at /")
    add("--api-key", action="append", default=[], metavar="KEY", help=f"key that clients must send; or {KEY_VARIABLE}")
    add("--image-hosts", default="", help=f"hosts whose pictures may be fetched, such as {HOSTS} (default: none)")
    add("--cors-origins", default="", help="comma-separated web origins that browsers may call from (default: none)")
    add("--max-body-mib", type=float, default=32.0, help="largest request body (default 32)")
    add("--max-images", type=int, default=16, help="images in one request (default 16)")
    add(
        "--max-image-megapixels",
        type=float,
        default=40.0,
        help="largest picture; those of a request may have 4 times that (default 40)",
    )
    add("--drain-sec", type=float, default=30.0, help="after SIGTERM, how long answers may still take (default 30)")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    check(args)
    set_threads(args)
    shown = {name: value for name, value in vars(args).items() if value not in (None, [], "", False)}
    print_settings(shown | ({"api_key": "set"} if args.api_key else {}))
    # Faults of the engine and of requests, with their tracebacks, on stderr.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from trimode_vlm.demo.server import create_app

    engine, metrics, settings = start(args)
    app = create_app(engine, settings, metrics)
    if args.ui:
        from trimode_vlm.demo.app import mount, note_of
        from trimode_vlm.demo.chat_logic import Limits

        limits = Limits(
            timeout_sec=settings.timeout_sec,
            max_images=settings.max_images,
            max_image_pixels=settings.max_image_pixels,
        )
        app = mount(app, engine, limits=limits, name=settings.model_name, note=note_of(args.model))
    server = draining_server(app, args.host, args.port, args.drain_sec)
    # uvicorn raises its signals once more when all is answered; a drained server has not failed.
    signals: list[int] = []
    before = {n: signal.signal(n, lambda number, _: signals.append(number)) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    return 0 if server.started else 1


def start(args: Any) -> tuple[Any, Any, Any]:
    """The engine over its model, its metrics and the server's settings, for whoever runs the application.

    Args:
        args: what `add_arguments` makes; `host`, `port`, `ui` and `drain_sec` are not read.
    """
    from trimode_vlm.demo.prometheus import Metrics
    from trimode_vlm.demo.server import ServerSettings
    from trimode_vlm.engine import Engine

    model, processor = load_model(args)
    engine = Engine(model, processor, engine_settings(args))
    metrics = Metrics(engine.stats)
    engine.on_finish = metrics.observe
    settings = ServerSettings(
        model_name=args.name or os.path.basename(args.model.rstrip("/")) or args.model,
        api_keys=args.api_key,
        default_mode=args.mode,
        max_body_bytes=int(args.max_body_mib * 2**20),
        max_images=args.max_images,
        max_image_pixels=int(args.max_image_megapixels * 1e6),
        image_hosts=_names(args.image_hosts),
        cors_origins=_names(args.cors_origins),
        timeout_sec=args.timeout_sec,
    )
    return engine, metrics, settings


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work before the model is loaded; take the key from the environment.

    Raises:
        UsageError: an unknown mode, device or dtype; a value out of range; a package that is missing; a port in use.
    """
    check_packages(("fastapi", "uvicorn", "prometheus_client", "httpx", "psutil"), "serve")
    check_settings(args)
    check_engine_arguments(args)
    if args.ui:
        check_packages(("gradio",), "demo")
    args.api_key = api_keys(args.api_key)
    check_address(args.host, args.port)


def check_settings(args: Any) -> None:
    """The same for what depends on no machine: also replicas', before there are any."""
    if args.mode not in MODES:
        raise UsageError(f"--mode: unknown mode {args.mode!r}{nearest(args.mode, MODES)} (known: {', '.join(MODES)})")
    _check_above_zero(args, *ABOVE_ZERO, "max_body_mib", "max_images", "max_image_megapixels")
    check_dtype(args.dtype)
    if not args.drain_sec >= 0:
        raise UsageError(f"--drain-sec must be at least 0, got {args.drain_sec}")
    if hosts := _names(args.image_hosts):
        from trimode_vlm.demo.remote_images import can_be_fetched_from

        if never := [host for host in hosts if not can_be_fetched_from(host)]:
            raise UsageError(f"--image-hosts: no picture's address can match {never[0]!r}; give hosts such as {HOSTS}")


def check_engine_arguments(args: argparse.Namespace) -> None:
    """The same for what the web chat and the server share."""
    _check_above_zero(args, *ABOVE_ZERO)
    check_device(args.device)
    check_dtype(args.dtype)


def _check_above_zero(args: Any, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, got {value}")


def check_address(host: str, port: int) -> None:
    """Try to listen before the model is loaded: seconds for nano, minutes for a large one."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must lie between 0 and 65535, got {port}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port} ({error.strerror or error}); see --host, --port"
            ) from None


def api_keys(given: list[str]) -> list[str]:
    """The keys that were given, else the environment's; a file of secrets may end in a line break.

    Raises:
        UsageError: a key is empty, which would leave the server open.
    """
    source = "--api-key" if given else KEY_VARIABLE
    set_in_environment = [os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else []
    keys = [key.strip() for key in given or set_in_environment]
    if "" in keys:
        raise UsageError(f"{source}: the key is empty; leave it out for a server that asks for none")
    return keys


def check_packages(names: tuple[str, ...], extra: str) -> None:
    if missing := [name for name in names if not importlib.util.find_spec(name)]:
        raise UsageError(f"this needs {', '.join(missing)} (pip install 'trimode-vlm[{extra}]')")


def set_threads(args: Any) -> None:
    """Set, and note in `args`, how many CPU threads a thread that computes has: by default one core stays free.

    Threads that share a product wait for each other: one whose core talks to clients would hold up all.
    """
    import torch

    if args.threads is None and not os.environ.get(THREADS_VARIABLE):
        args.threads = max(1, torch.get_num_threads() - 1)
    if args.threads is not None:
        torch.set_num_threads(args.threads)


def load_model(args: Any) -> tuple[Any, Any]:
    """The model and its processor; what mode auto chooses by is measured before the first request, and kept."""
    import torch

    import trimode_vlm
    from trimode_vlm.calibration import policy_for

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {name: getattr(args, name) for name in ("sampler", "quantize") if getattr(args, name)}
    adapter = args.adapter or "auto"
    model, processor = trimode_vlm.load(args.model, dtype=args.dtype, device=device, adapter=adapter, **options)
    if model.config.mask_token_id is not None:
        policy_for(model, args.max_rows)
    return model, processor


def engine_settings(args: Any) -> Any:
    from trimode_vlm.engine import EngineSettings

    kv_bytes = None if args.kv_gib is None else int(args.kv_gib * 2**30)
    return EngineSettings(max_rows=args.max_rows, queue_limit=args.queue_limit, kv_bytes=kv_bytes)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def draining_server(app: Any, host: str, port: int, drain_sec: float) -> Any:
    """A uvicorn server that says where it listens once it does, and answers what it has before it ends."""
    import uvicorn

    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=LAST_BYTES_SEC)

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                port = self.servers[0].sockets[0].getsockname()[1]
                print(f"trimode-vlm serve: listening on http://{config.host}:{port}", file=sys.stderr, flush=True)

        async def shutdown(self, sockets: Any = None) -> None:
            # Before the listener closes, so that a balancer that asks hears of it.
            await app.state.drain.run(drain_sec, lambda: self.force_exit)
            # What was forced is the end of the answers; uvicorn would leave the application unended as well.
            self.force_exit = False
            getattr(app.state, "close_pages", lambda: None)()
            await super().shutdown(sockets)

    return Server(config)


if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
