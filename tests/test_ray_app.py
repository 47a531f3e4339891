"""Replicas under Ray Serve: two of them on this machine, answers as from a single server, one of them killed."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import EXAMPLES
from serving import free_port, need

need("fastapi", "httpx", "psutil")
pytest.importorskip("ray.serve", reason="ray is not installed (pip install 'trimode-vlm[ray]')")

import httpx  # noqa: E402
import psutil  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402

import trimode_vlm  # noqa: E402
from trimode_vlm.demo.ray_app import Arguments, Replica, build  # noqa: E402
from trimode_vlm.demo.serve import add_arguments  # noqa: E402
from trimode_vlm.engine import Engine  # noqa: E402
from trimode_vlm.eval.load_generator import as_openai  # noqa: E402
from trimode_vlm.vision.images import open_image  # noqa: E402

QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
ROOT = str(Path(__file__).parents[1])


def messages(index: int) -> list[dict[str, Any]]:
    asked = QUESTIONS[index % len(QUESTIONS)]
    picture = open_image(str(EXAMPLES / asked["image"]))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": asked["question"]}]
    return [{"role": "user", "content": content}]


def ask(url: str, index: int, **options: Any) -> httpx.Response:
    body = {"messages": [as_openai(m) for m in messages(index)], "mode": "linear_spec", **options}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=120, trust_env=False)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    environment = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(Arguments(min_replicas=2, max_replicas=2, num_cpus=0.4, timeout_sec=60)))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas_that_answer(url: str, seconds: float) -> set[str]:
    """Ask several at a time until two replicas have answered; every answer is the right one."""
    seen: set[str] = set()
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(6) as pool:
        while len(seen) < 2 and time.monotonic() < end:
            for index, reply in enumerate(pool.map(lambda i: ask(url, i), range(6))):
                assert reply.status_code == 200, reply.text
                assert reply.json()["choices"][0]["message"]["content"] == QUESTIONS[index % len(QUESTIONS)]["answer"]
                seen.add(reply.headers["x-replica"])
    return seen


def test_both_replicas_answer_as_a_single_server_does(url: str) -> None:
    assert len(replicas_that_answer(url, 120)) == 2
    model, processor = trimode_vlm.load("nano")
    inputs = processor.apply_chat_template(
        messages(2), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    with Engine(model, processor) as engine:
        request = engine.submit(dict(inputs), mode="linear_spec")
        out = request.result()
    reply = ask(url, 2).json()
    assert reply["choices"][0]["message"]["content"] == request.texts[0]
    assert (reply["usage"]["completion_tokens"], reply["usage"]["nfe"]) == (out.num_new_tokens[0], out.nfe[0])


def test_streams_errors_and_health_come_through(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Count from 12 to 1."}], "stream": True, "mode": "ar"}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60, trust_env=False) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 5
    assert ask(url, 0, mode="fast").status_code == 400
    assert httpx.get(url + "/health", trust_env=False).json() == {"status": "ok"}


def test_a_killed_replica_is_missed_by_nobody(url: str) -> None:
    running = [p for p in psutil.Process().children(recursive=True) if "ServeReplica" in " ".join(p.cmdline())]
    assert len(running) == 2
    before = replicas_that_answer(url, 60)
    running[0].kill()
    for index in range(6):
        assert ask(url, index).status_code == 200
    after = replicas_that_answer(url, 300)
    assert len(after) == 2 and after != before, "another has come in its place"


def test_a_replica_that_leaves_answers_what_it_has(url: str) -> None:
    """The last test of these replicas: it takes them down."""
    words = [{"role": "user", "content": "Count from 12 to 1."}]
    body = {"messages": words, "mode": "ar", "max_tokens": 1500, "min_tokens": 1500, "stream": True}
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=120, trust_env=False) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        with ThreadPoolExecutor(1) as pool:
            gone = pool.submit(serve.delete, "default")
            rest = list(lines)
            gone.result()
    assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]


def plain_class() -> Any:
    """The replica without what Ray Serve puts around it, which is asynchronous."""
    return next(kind for kind in Replica.__mro__ if "check_health" in vars(kind))


def test_health_is_that_of_the_engines_thread() -> None:
    replica: Any = object.__new__(plain_class())
    model, processor = trimode_vlm.load("nano")
    replica.engine = Engine(model, processor)
    replica.check_health()
    replica.engine.close()
    with pytest.raises(RuntimeError, match="thread has ended"):
        replica.check_health()


def test_replicas_load_as_serve_does(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = vars(parser.parse_args([]))
    for name in ("host", "port", "ui", "api_key"):
        del options[name]
    assert options.items() <= Arguments().model_dump().items()
    loaded: dict[str, Any] = {}

    def load(model: str, **given: Any) -> Any:
        loaded.update(given, model=model)
        return nano(model)

    nano = trimode_vlm.load
    monkeypatch.setattr(trimode_vlm, "load", load)
    monkeypatch.setattr("trimode_vlm.calibration.policy_for", lambda _, rows: loaded.update(rows=rows))
    monkeypatch.setenv("TRIMODE_API_KEY", "secret")
    arguments = Arguments(device="cpu", sampler="folder", quantize="int8", max_rows=3, kv_gib=0.5, max_images=2)
    replica = plain_class()(arguments)
    replica.engine.close()
    assert loaded == {
        "model": "nano", "adapter": "auto", "sampler": "folder", "quantize": "int8", "device": "cpu", "dtype": None,
        "rows": 3,
    }  # fmt: skip
    assert (replica.engine.settings.max_rows, replica.engine.settings.kv_bytes) == (3, 2**29)
    assert (replica.settings.api_keys, replica.settings.max_images) == (["secret"], 2)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown mode 'fsat'"):
        build({"mode": "fsat"})
    with pytest.raises(ValueError, match="--max-rows must be above 0"):
        build({"max_rows": "0"})
    with pytest.raises(ValueError, match="need 1 <= min <= max"):
        build({"min_replicas": "3", "max_replicas": "2"})  # as `serve run` gives them
    with pytest.raises(ValueError, match="treshold"):
        Arguments(treshold=1)  # type: ignore[call-arg]
