"""`bench serve`: the load that it makes, what it counts, and that an engine and a server look alike to it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from serving import listening, need
from test_engine import Gate

need("fastapi", "uvicorn", "prometheus_client", "httpx", "psutil")

import trimode_vlm  # noqa: E402
from trimode_vlm import cli  # noqa: E402
from trimode_vlm.demo.server import ServerSettings, create_app  # noqa: E402
from trimode_vlm.engine import Engine, EngineSettings  # noqa: E402
from trimode_vlm.eval import bench, bench_serve  # noqa: E402
from trimode_vlm.eval.bench_serve import questions  # noqa: E402
from trimode_vlm.eval.load_generator import (  # noqa: E402
    Answer,
    EngineClient,
    HttpClient,
    Job,
    Load,
    Run,
    as_openai,
    run_load,
)
from trimode_vlm.eval.serve_report import cell, latencies, percentiles, text_of, verdict  # noqa: E402
from trimode_vlm.request import QueueFullError  # noqa: E402
from trimode_vlm.vision.images import open_image  # noqa: E402

JOBS = [Job(number=i, messages=[], max_new_tokens=1) for i in range(12)]


class Asked:
    """A client whose answers take `seconds`, or until `awaited` have asked; counts who asks at once."""

    def __init__(self, seconds: float, awaited: int = 0) -> None:
        self.seconds, self.now, self.most, self.jobs = seconds, 0, 0, []  # type: ignore[var-annotated]
        self.awaited, self.all_ask = awaited, asyncio.Event()

    async def ask(self, job: Job, mode: str) -> Answer:
        self.now += 1
        self.most = max(self.most, self.now)
        self.jobs.append((job.number, time.perf_counter()))
        if len(self.jobs) == self.awaited:
            self.all_ask.set()
        await (asyncio.wait_for(self.all_ask.wait(), 60) if self.awaited else asyncio.sleep(self.seconds))
        self.now -= 1
        return Answer(job=job.number, sent=0.0, text=mode, tokens=2)

    async def close(self) -> None:
        pass


def ask_all(client: Any, load: Load, **options: Any) -> Run:
    return run_load(client, JOBS, "ar", load, **options)


def test_users_ask_again_when_they_are_answered() -> None:
    client = Asked(0.005)
    run = ask_all(client, Load(users=5))
    assert client.most == 5 and sorted(n for n, _ in client.jobs) == list(range(12))
    assert len(run.answers) == 12 and run.tokens_per_sec == pytest.approx(24 / run.seconds)


def test_arrivals_do_not_wait_for_answers() -> None:
    """Nothing is answered before all have come; the moments are the seed's."""
    client = Asked(0.0, awaited=12)
    ask_all(client, Load(rate=200.0), seed=3)
    assert client.most == 12
    gaps = [[b - a for (_, a), (_, b) in zip(c.jobs, c.jobs[1:], strict=False)] for c in (client,)]
    assert len(set(gaps[0])) == 11 and max(gaps[0]) > 1.5 * min(gaps[0])


def test_nobody_waits_behind_the_last_arrival() -> None:
    """The gap that this seed gives would be 18 seconds."""
    assert run_load(Asked(0.0), JOBS[:1], "ar", Load(rate=0.1), seed=0).seconds < 15  # type: ignore[arg-type]


def test_a_duration_goes_over_the_questions_again() -> None:
    client, seconds = Asked(0.002), []
    run = ask_all(client, Load(users=3), duration_sec=2.0, each_second=lambda: seconds.append(1))
    assert len(run.answers) == len(client.jobs) > 12 and run.seconds >= 2.0 and seconds
    assert [n for n, _ in client.jobs][:13] == [*range(12), 0]


def test_latencies_of_an_answer() -> None:
    answer = Answer(job=0, sent=10.0, tokens=7, arrivals=[10.5, 10.6, 10.9], done=11.0)
    found = latencies([answer, Answer(job=1, sent=1.0, done=1.25)])
    assert found["ttft"] == pytest.approx([500]) and found["e2el"] == pytest.approx([1000, 250])
    assert found["tpot"] == pytest.approx([400 / 6]) and found["itl"] == pytest.approx([100, 300])
    assert percentiles([float(n) for n in range(101)]) == {"mean": 50, "p50": 50, "p95": 95, "p99": 99}
    assert percentiles([]) is None


def test_what_a_cell_counts() -> None:
    answers = [
        Answer(job=0, sent=0, text="a", tokens=10),
        Answer(job=1, sent=0, text="x", tokens=30),
        Answer(job=2, sent=0, status="refused"),
        Answer(job=3, sent=0, status="failed", error="no"),
    ]
    single = Run(answers=answers[:1], seconds=1.0)
    runs = [Run(answers=answers, seconds=seconds) for seconds in (1.0, 2.0, 4.0)]
    value = cell(runs, [single] * 3, {0: "a", 1: "b"})
    assert (value["requests"], value["failed"], value["refused"], value["mismatches"]) == (12, 3, 3, 3)
    assert value["mismatched_jobs"] == [1] and value["tokens_per_sec"] == 20 and value["requests_per_sec"] == 1
    assert value["over_single_requests"] == 2.0  # 40, 20 and 10 tokens per second beside 10


def test_a_repetition_whose_single_requests_failed_is_left_out() -> None:
    run = Run(answers=[Answer(job=0, sent=0, text="a", tokens=10)], seconds=1.0)
    failed = Run(answers=[Answer(job=0, sent=0, status="failed", error="no")], seconds=1.0)
    assert cell([run] * 2, [failed, run], {0: "a"})["over_single_requests"] == 1.0
    row = {"ar": cell([failed] * 3, [failed] * 3, {0: "a"}), "auto": cell([run] * 3, [failed] * 3, {0: "a"})}
    assert "over_single_requests" not in row["auto"] and "| 8 | ar | 0.00 |" in text_of({"8": row})
    said = verdict({"8": row}, {"ar": {0: "a"}, "auto": {0: "a"}})
    assert said["auto_over_best_fixed"] == {"8": None} and said["auto_within_5_percent"] is None


def test_what_the_verdict_says() -> None:
    def row(ar: list[float], auto: list[float]) -> dict[str, Any]:
        counts = {"failed": 0, "refused": 1, "mismatches": 0, "over_single_requests": ar[1] / 100}
        return {
            mode: counts | {"tokens_per_sec": values[1], "tokens_per_sec_by_repetition": values}
            for mode, values in (("ar", ar), ("auto", auto))
        }

    # The last repetitions fell into a slow minute, which is nothing to auto's credit or debit.
    cells = {"1": row([90, 100, 10], [45, 96, 9.6]), "8": row([250, 260, 390], [200, 240, 360])}
    said = verdict(cells, {"ar": {0: "a", 1: "b"}, "auto": {0: "a", 1: "c"}})
    assert said["auto_over_best_fixed"] == {"1": 0.96, "8": 240 / 260} and said["auto_within_5_percent"] is False
    assert said["ar_8_users_over_single_requests"] == 2.6 and said["at_least_2.5"] is True
    assert said["questions_that_differ_from_ar"] == {"auto": 1} and said["refused"] == 4
    cells = {"1": {m: v | {"tokens_per_sec_by_repetition": [1.0, 1.0]} for m, v in cells["1"].items()}}
    said = verdict(cells, {"ar": {}, "auto": {}})
    assert said["auto_over_best_fixed"] == {"1": 1.0} and said["auto_within_5_percent"] is None, "two are too few"


def test_questions_have_pictures_of_their_own() -> None:
    def pictures(jobs: list[Job]) -> list[bytes]:
        parts = [p for j in jobs for m in j.messages if isinstance(m["content"], list) for p in m["content"]]
        return [part["image"].tobytes() for part in parts if part["type"] == "image"]

    assert len(set(pictures(questions(8, 0, "image", 5)))) == 8
    assert pictures(questions(4, 0, "text", 5)) == []
    assert 0 < len(pictures(questions(24, 0, "both", 5))) < 24


def test_an_engine_and_a_server_give_the_same_answers() -> None:
    model, processor = trimode_vlm.load("nano")
    jobs = [*questions(2, 0, "image", 40), *[Job(number=9, messages=j.messages, max_new_tokens=40) for j in TEXTS]]
    engine = Engine(model, processor)
    direct = run_load(EngineClient(engine, jobs), jobs, "linear_spec", Load(users=3))
    with listening(create_app(engine, ServerSettings(api_keys=["k"]))) as url:
        through = run_load(HttpClient(url + "/v1/", None, "k", jobs), jobs, "linear_spec", Load(users=3))
        wrong = run_load(HttpClient(url, None, "other", jobs), jobs[:1], "ar", Load(users=1))
    by_job = [{a.job: (a.text, a.tokens, a.status) for a in run.answers} for run in (direct, through)]
    assert by_job[0] == by_job[1] and len(by_job[0]) == 3
    assert all(a.arrivals and a.sent < a.arrivals[0] <= a.done for a in [*direct.answers, *through.answers])
    assert wrong.answers[0].status == "failed" and "401" in str(wrong.answers[0].error)


TEXTS = questions(1, 5, "text", 40)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"choices": [{}]}', '{"error": "no"}', '{"choices": 5}'])
def test_a_chunk_that_is_no_answer_fails_its_question_alone(line: str) -> None:
    """A server that sends such a thing to the first who asks, and a whole answer to the second."""
    import httpx

    good = {"choices": [{"finish_reason": "stop", "delta": {"content": "yes"}}], "usage": {"completion_tokens": 1}}
    lines = iter([line, json.dumps(good)])
    client = HttpClient("http://somewhere", None, None, JOBS[:2])

    async def ask() -> list[Answer]:
        answer = httpx.MockTransport(lambda request: httpx.Response(200, text=f"data: {next(lines)}\n\n"))
        client._http = httpx.AsyncClient(transport=answer)
        return [await client.ask(job, "ar") for job in JOBS[:2]]

    first, second = asyncio.run(ask())
    assert first.status == "failed" and first.error and (second.status, second.text) == ("ok", "yes")


class Measured(Exception):
    """The costs would be measured now."""


@pytest.mark.parametrize(
    ("words", "rows"), [(["--rate", "1"], 32), (["--users", "2,5"], 5), (["--users", "9", "--max-rows", "4"], 4)]
)
def test_costs_are_measured_for_all_rows_beforehand_and_the_adapter_is_there(
    words: list[str], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def policy_for(model: Any, rows: int) -> None:
        asked["rows"] = rows
        raise Measured

    monkeypatch.setattr("trimode_vlm.load", lambda path, **options: (asked.update(options), None))
    monkeypatch.setattr("trimode_vlm.calibration.policy_for", policy_for)
    parser = cli.Parser()
    bench.add_arguments(parser)
    args = parser.parse(["serve", "--samples", "1", *words])
    bench.check(args)
    with pytest.raises(Measured):
        bench_serve.bench_serve(args, lambda *values: None)
    assert asked["rows"] == rows and asked["adapter"] == "auto"


def test_a_full_queue_is_counted_as_refused() -> None:
    """The engine does nothing until somebody has been refused."""
    model, processor = trimode_vlm.load("nano")
    jobs = questions(6, 0, "text", 60)
    engine = Engine(model, processor, EngineSettings(max_rows=1, queue_limit=1))
    gate, check_open = Gate(model), engine._waiting.check_open

    def checked() -> None:
        try:
            check_open()
        except QueueFullError:
            gate.open.set()
            raise

    engine._waiting.check_open = checked  # type: ignore[method-assign]
    with listening(create_app(engine, ServerSettings())) as url:
        for client in (EngineClient(engine, jobs), HttpClient(url, None, None, jobs)):
            gate.close()
            run = run_load(client, jobs, "ar", Load(users=6))
            assert {a.status for a in run.answers} == {"ok", "refused"}


def test_pictures_survive_the_way_to_a_server() -> None:
    message = questions(1, 0, "image", 5)[0].messages[-1]
    sent = as_openai(message)
    for part, given in zip(sent["content"], message["content"], strict=True):
        if given["type"] == "image":
            image = open_image(part["image_url"]["url"])
            assert image.tobytes() == open_image(given["image"]).tobytes()
        else:
            assert part == given


def test_the_command_ends_with_its_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMODE_VLM_CACHE", str(tmp_path))
    spoil = bench_serve.run_load
    calls = []

    def spoilt(client: Any, jobs: Any, mode: str, load: Load, **options: Any) -> Run:
        run = spoil(client, jobs, mode, load, **options)
        calls.append((mode, load.users))
        if (mode, load.users) == ("linear_spec", 2):
            run.answers[0].text += "?"
        return run

    monkeypatch.setattr(bench_serve, "run_load", spoilt)
    words = ["bench", "serve", "--samples", "2", "--users", "2", "--repeats", "1", "--max-new-tokens", "6"]
    assert cli.main([*words, "--modes", "ar,linear_spec"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert calls == [(m, n) for n in (1, 1, 2) for m in ("ar", "linear_spec")]
    assert said["loads"]["2"]["ar"]["mismatches"] == 0 and said["loads"]["2"]["linear_spec"]["mismatches"] == 1
    assert said["verdict"]["mismatches"] == 1 and said["memory_mib"]["resident"]["end"] > 50
    assert said["loads"]["2"]["ar"]["latency_ms"]["ttft"]["p95"] > 0 and said["settings"]["users"] == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--users", "0"], "--users takes numbers"),
        (["--users", "2", "--rate", "1"], "--users and --rate exclude each other"),
        (["--modes", "fast"], "unknown mode 'fast'"),
        (["--modes", "default"], "unknown mode 'default'"),
        (["--mix", "pictures"], "unknown mix 'pictures'"),
        (["--duration-sec", "0"], "--duration-sec must be above 0"),
        (["--url", "localhost:8000"], "--url takes an address"),
        (["--url", "http://x", "--max-rows", "3"], "--max-rows is the engine's"),
        (["--url", "http://x", "--adapter", "auto"], "--adapter is the engine's"),
        (["--name", "x"], "give --url too"),
        (["--tasks", "nano"], "--tasks is nothing to bench serve"),
    ],
)
def test_wrong_usage_is_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err
