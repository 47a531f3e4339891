"""`trimode-vlm demo`: the web page on a server of its own."""

from __future__ import annotations

import argparse
import os
import sys
import threading

from trimode_vlm.cli import main, print_settings
from trimode_vlm.demo.serve import (
    add_engine_arguments,
    add_model_arguments,
    check_address,
    check_engine_arguments,
    check_packages,
    engine_settings,
    set_threads,
)
from trimode_vlm.demo.serve import load_model as load
from trimode_vlm.terminal_options import MODE_OPTIONS, mode_name

EXAMPLES = """examples:
  trimode-vlm demo
  trimode-vlm demo --model path/to/checkpoint --dtype bfloat16 --device cuda --host 0.0.0.0 --port 7860
  trimode-vlm serve --ui        # the same page beside an OpenAI-compatible server
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm demo`."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add(
        "--mode",
        type=mode_name,
        default="linear_spec",
        help=f"mode that is chosen at first: {', '.join(MODE_OPTIONS)} (default linear_spec)",
    )
    add("--port", type=int, default=7860, help="port to listen on (default 7860)")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    check_packages(("gradio", "psutil"), "demo")
    check_engine_arguments(args)
    check_address(args.host, args.port)
    set_threads(args)
    print_settings({name: value for name, value in vars(args).items() if value is not None})
    # Read when gradio loads.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    from trimode_vlm.demo import app
    from trimode_vlm.demo.chat_logic import Limits
    from trimode_vlm.engine import Engine

    model, processor = load(args)
    with Engine(model, processor, engine_settings(args)) as engine:
        limits, name = Limits(timeout_sec=args.timeout_sec), os.path.basename(os.path.normpath(args.model))
        blocks = app.build(engine, args.mode, limits, name=name, note=app.note_of(args.model))
        blocks.queue(default_concurrency_limit=None)
        blocks.launch(
            server_name=args.host, server_port=args.port, theme=app.THEME, css=app.CSS, head=app.HEAD,
            allowed_paths=[str(app.EXAMPLES)], footer_links=["api"], ssr_mode=False, quiet=True,
            prevent_thread_lock=True, max_file_size=app.MAX_UPLOAD, enable_monitoring=False,
            run_history=False,
        )  # fmt: skip
        try:
            print(f"trimode-vlm demo: open http://{args.host}:{args.port}", file=sys.stderr, flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            print("trimode-vlm demo: closing", file=sys.stderr, flush=True)
        finally:
            blocks.close(verbose=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
