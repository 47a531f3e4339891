"""The web page without a browser: its logic and HTML, and the API as gradio_client sees it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import EXAMPLES, REPOSITORY, make_tiny_model
from serving import free_port, listening, need, paced, wait_for

from trimode_vlm.eval import tpf

need("gradio", "fastapi", "uvicorn", "gradio_client", "prometheus_client")

import gradio as gr  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from gradio_client import Client, handle_file  # noqa: E402

import trimode_vlm  # noqa: E402
from trimode_vlm import cli  # noqa: E402
from trimode_vlm.checkpoints import NANO_HINT  # noqa: E402
from trimode_vlm.demo import app, handlers, panels, serve  # noqa: E402
from trimode_vlm.demo.chat_logic import (  # noqa: E402
    MODE_SETTINGS,
    MODES,
    Limits,
    as_shown,
    as_written,
    mark_of,
    messages_of,
    options_of,
    user_message,
)
from trimode_vlm.demo.handlers import Page, Turn  # noqa: E402
from trimode_vlm.demo.live_answer import LiveAnswer  # noqa: E402
from trimode_vlm.demo.server import ServerSettings, create_app  # noqa: E402
from trimode_vlm.engine import Engine  # noqa: E402

QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
ANSWERS = {q["image"]: q["answer"] for q in QUESTIONS}
RECEIPT = "Write the receipt as JSON."
SETTINGS = {"max_new_tokens": 1024, "block_length": 32, "threshold": 0.9, "temperature": 0, "top_p": 1, "seed": 0}
VALUES = tuple(SETTINGS.values())
HOSTILE = "<script>alert(1)</script> <b>x</b> &lt; ![](http://a.b/c.png) 'q' \"q\""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(*trimode_vlm.load("nano")) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with listening(app.mount(FastAPI(), engine)) as address:
        yield address


def client_of(address: str) -> Client:
    """With more patience than httpx's own 5 seconds, beside other tests on few cores."""
    return Client(address, verbose=False, httpx_kwargs={"timeout": 120})


@pytest.fixture(scope="module")
def client(address: str) -> Client:
    return client_of(address)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def question(words: str = "", *names: str) -> dict[str, Any]:
    return user_message({"text": words, "files": [str(EXAMPLES / name) for name in names]})


# --- the history as messages


def test_messages_keep_pictures_and_texts_in_order() -> None:
    history = [
        question("", "receipt-1.png", "chart-1.png"),
        question("What?"),
        {"role": "assistant", "content": [text("  one"), text(" two")]},
        {"role": "user", "content": [text("And this?"), {"file": {"path": str(EXAMPLES / "board-1.png")}}]},
    ]
    messages = messages_of(history, [EXAMPLES])
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    kinds = [[part["type"] for part in m["content"]] for m in (messages[0], messages[2])]
    assert kinds == [["image", "image", "text"], ["image", "text"]]
    assert messages[1]["content"] == "  one two"
    from PIL import Image

    for part, name in zip(messages[0]["content"][:2], ("receipt-1.png", "chart-1.png"), strict=True):
        assert part["image"].tobytes() == Image.open(EXAMPLES / name).convert("RGB").tobytes()


@pytest.mark.parametrize("form", ["file", "path", "string in a file", "symlink", "dots"])
def test_a_picture_outside_the_uploads_is_refused(tmp_path: Path, form: str) -> None:
    secret, uploads = tmp_path / "secret.png", tmp_path / "uploads"
    shutil.copy(EXAMPLES / "board-1.png", secret)
    uploads.mkdir()
    (uploads / "link.png").symlink_to(secret)
    item: Any = {
        "file": {"type": "file", "file": {"path": str(secret)}},
        "path": {"path": str(secret)},
        "string in a file": {"file": str(secret)},
        "symlink": {"path": str(uploads / "link.png")},
        "dots": {"path": f"{uploads}/../secret.png"},
    }[form]
    with pytest.raises(ValueError, match=r"not a picture that was uploaded here$"):
        messages_of([{"role": "user", "content": [item]}], [uploads])


def test_bad_pictures_and_roles_are_one_line(tmp_path: Path) -> None:
    whole = (EXAMPLES / "receipt-1.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    from PIL import Image

    # More pixels than this page takes, and more than Pillow does.
    for name, side in (("large.png", 7000), ("huge.png", 20_000)):
        Image.new("1", (side, side)).save(tmp_path / name)
    for name in ("cut.png", "text.png", "large.png", "huge.png"):
        with pytest.raises(ValueError, match=name) as caught:
            messages_of([user_message({"files": [str(tmp_path / name)]})], [tmp_path])
        assert "\n" not in str(caught.value) and ("pixels" in str(caught.value)) == (name in ("large.png", "huge.png"))
    with pytest.raises(ValueError, match="system"):
        messages_of([{"role": "system", "content": "x"}], [tmp_path])
    with pytest.raises(ValueError, match="more than 16 pictures"):
        messages_of([question("", *["chart-1.png"] * 17)], [EXAMPLES])


def test_what_is_shown_below_an_answer_is_no_part_of_it() -> None:
    marks = {
        reason: mark_of({"finish_reason": reason, "num_new_tokens": 5})
        for reason in (None, "stop", "length", "cancelled", "timeout")
    }
    assert marks[None] == marks["stop"] == ""
    assert [marks[r].strip("\n\u2060… ") for r in ("length", "cancelled", "timeout")] == [
        "cut at 5 tokens", "stopped", "out of time",
    ]  # fmt: skip
    for mark in marks.values():
        history = [{"role": "assistant", "content": [text(as_shown("a <b>\n") + mark)]}]
        assert messages_of(history, []) == [{"role": "assistant", "content": "a <b>\n"}]


def test_what_is_shown_is_what_was_written() -> None:
    from html.parser import HTMLParser

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__(convert_charrefs=True)
            self.tags: list[str] = []
            self.text = ""

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.tags.append(tag)

        handle_comment = handle_decl = handle_pi = lambda self, data: self.tags.append(data)

        def handle_data(self, data: str) -> None:
            self.text += data

    for written in (HOSTILE, "<<b>x</b", "<!-- c --> <?php <!DOCTYPE x> </p>", "a < b && c &amp; &#60;b&#62; R&D 3<4"):
        parser = Tags()
        parser.feed(as_shown(written))
        parser.close()
        assert parser.tags == [] and as_written(parser.text) == as_written(as_shown(written)) == written
    assert as_shown('{"a": 1} 3 < 4 | x & y') == '{"a": 1} 3 < 4 | x & y'


# --- settings


def test_options_are_those_that_the_mode_has(engine: Engine) -> None:
    values = SETTINGS | {"temperature": 0.5, "top_p": 0.9, "seed": -1}
    common = {"max_new_tokens", "do_sample", "mode"}
    for mode in MODES:
        assert set(options_of(mode, SETTINGS)) == common | set(MODE_SETTINGS[mode])
        sampled = options_of(mode, values)
        assert set(sampled) == common | set(MODE_SETTINGS[mode]) | {"temperature", "top_p"}
        # generate() itself refuses an option that a mode does not have.
        inputs = engine.processor(text="Count", return_tensors="pt")
        engine.model.begin_generation(**inputs, tokenizer=engine.processor.tokenizer, **sampled)
    assert options_of("ar", values | {"seed": 7})["seed"] == 7
    for bad in ({"max_new_tokens": "x"}, {"max_new_tokens": float("nan")}, {"max_new_tokens": []}):
        with pytest.raises(ValueError, match="max_new_tokens: expected a number"):
            options_of("ar", SETTINGS | bad)
    with pytest.raises(ValueError, match="unknown mode 'x'"):
        options_of("x", SETTINGS)


# --- the live panel


def run(page: Page, *arguments: Any, chat: str = "chat", session: str = "a") -> list[tuple[Any, ...]]:
    async def all_of() -> list[tuple[Any, ...]]:
        return [outputs async for outputs in page.ask(session, chat, *arguments)]

    return asyncio.run(all_of())


@pytest.mark.parametrize("mode", ["ar", "diffusion", "linear_spec", "quadratic_spec"])
def test_the_record_is_what_generate_counts(engine: Engine, mode: str) -> None:
    page, records = Page(engine, [EXAMPLES]), []
    outputs = run(page, {"text": RECEIPT, "files": [str(EXAMPLES / "receipt-1.png")]}, [], records, mode, "", *VALUES)
    history = next(o[1] for o in reversed(outputs) if isinstance(o[1], list))
    assert history[-1]["content"][0]["text"] == ANSWERS["receipt-1.png"]
    inputs = engine.processor.apply_chat_template(
        messages_of(history[:-1], [EXAMPLES]), add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    out = engine.model.generate(**inputs, **options_of(mode, SETTINGS))
    (record,) = records
    assert record["num_new_tokens"] == out.num_new_tokens[0]
    assert (record["nfe"], record["nfe_prefill"]) == (out.nfe[0], out.nfe_prefill[0])
    assert record["accepted_lengths"] == list(out.accepted_lengths[0])
    assert tpf.totals([record]).tpf_decode == pytest.approx(out.tokens_per_forward[0])
    assert tpf.totals([record]).tpf_end_to_end == pytest.approx(out.tokens_per_forward_end_to_end[0])
    assert record["finish_reason"] == "stop" and 0 < record["seconds_to_first_token"] <= record["seconds"]
    shown = panels.stats(record)
    assert f"<dd>{out.num_new_tokens[0]}</dd>" in shown and f"<dd>{out.tokens_per_forward[0]:.2f}</dd>" in shown


def shown_text(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html))


def settled_text(html: str) -> str:
    """What the canvas shows of the answer up to the first mask, without what was rejected."""
    cells = re.sub(r"<span class='tm-no'.*?</span>", "", html.partition("</div>")[0], flags=re.S)
    return shown_text(cells.partition("<span class='tm-mask'")[0].partition("<span class='tm-end'")[0]).replace("⏎", "")


@pytest.mark.parametrize("mode", ["diffusion", "linear_spec"])
def test_canvas_ends_where_the_answer_ends_and_repeats_nothing(engine: Engine, mode: str) -> None:
    page = Page(engine, [EXAMPLES])
    request = asyncio.run(page._submit(Turn(), [question(RECEIPT, "receipt-1.png")], "", mode, VALUES))
    live, seen, longest = LiveAnswer(request), [], 0
    for event in request:
        live.take(event)
        seen.append(panels.canvas(live, page._piece, engine.model.config.mask_token_id))
        settled = settled_text(seen[-1])
        # Neither twice nor with a gap: the block follows on what stands before it.
        assert settled in ANSWERS["receipt-1.png"]
        longest = max(longest, len(settled))
    assert longest > 40
    assert "im_end" not in seen[-1] and seen[-1].count("■ end") == 1
    # The last tokens of the answer, once.
    assert ANSWERS["receipt-1.png"].endswith(shown_text(seen[-1]).partition(" ■ end")[0].strip())
    assert any("tm-mask" in html for html in seen) == (mode == "diffusion")
    assert any("tm-yes" in html for html in seen) == (mode == "linear_spec")


@pytest.mark.parametrize("mode", ["ar", "diffusion", "linear_spec", "quadratic_spec", "auto"])
def test_live_counts_and_canvas_are_those_of_what_was_given(engine: Engine, mode: str) -> None:
    page = Page(engine, [EXAMPLES])
    values = [5 if name == "max_new_tokens" else value for name, value in SETTINGS.items()]
    request = asyncio.run(page._submit(Turn(), [question("Count from 12 to 1.")], "", mode, values))
    live, shown = LiveAnswer(request), ""
    wait_for(lambda: request.is_done)
    for event in request:
        live.take(event)
        record = live.record()
        assert record["num_new_tokens"] == len(live.token_ids)
        assert record["nfe"] == event.event.num_forwards
        assert mode != "ar" or record["nfe"] == record["num_new_tokens"]
        shown = panels.canvas(live, page._piece, engine.model.config.mask_token_id)
    row = request.generation.rows[0]
    assert (record["nfe"], record["seconds"], record["accepted_lengths"], record["finish_reason"]) == (
        row.nfe, row.seconds, row.accepted_lengths, "length",
    )  # fmt: skip
    # Nothing that the budget left out.
    assert shown_text(shown.partition("</div>")[0]) == live.text == "12 11"


def test_everything_written_is_escaped() -> None:
    record = {
        "mode": HOSTILE, "num_new_tokens": 150, "nfe": 20, "nfe_prefill": 1, "seconds": 1.0,
        "seconds_to_first_token": 0.1, "accepted_lengths": [8], "finish_reason": HOSTILE,
    }  # fmt: skip
    for html in (
        panels.stats(record), panels.session([record]), panels.comparison([record], ["x"]), panels.note(HOSTILE)
    ):  # fmt: skip
        assert "<script" not in html and "<b>x" not in html and "alert(1)" in html

    class Live:
        token_ids, block, block_end, end_token_ids = [5], None, 0, frozenset()

    html = panels.canvas(Live(), lambda _: HOSTILE, None)  # type: ignore[arg-type]
    assert "<script" not in html and shown_text(html).startswith(HOSTILE)


def test_session_pools_as_eval_does() -> None:
    records = [
        {"mode": mode, "num_new_tokens": n, "nfe": nfe, "nfe_prefill": 1, "seconds": n / 100,
         "seconds_to_first_token": 0.1, "accepted_lengths": [], "finish_reason": "stop"}
        for mode, n, nfe in (("ar", 4, 4), ("linear_spec", 101, 11), ("linear_spec", 250, 20), ("linear_spec", 3, 3))
    ]  # fmt: skip
    html = panels.session(records)
    rows = [shown_text(row.replace("</td>", "|")) for row in html.split("<tr>")[2:]]
    assert rows == [
        "ar|all|1|4|4|1.00|1.00|100|",
        # (354 - 3) / (34 - 3), 354 / 34; (351 - 2) / (31 - 2), 351 / 31; 249 / 19, 250 / 20.
        "linear_spec|all|3|354|34|11.32|10.41|100|",
        "linear_spec|>100|2|351|31|12.03|11.32|100|",
        "linear_spec|>200|1|250|20|13.11|12.50|100|",
    ]
    for bucket, total in tpf.bucketed(records[1:]).items():
        assert f"|{bucket}|" in "".join(rows) and f"<b>{total.tpf_decode:.2f}</b>" in html
    assert html.count("<h4>") == 3 and html.count("<i ") == 4
    assert "No answers yet" in panels.session([])


def test_comparison_says_identical_or_not() -> None:
    record = {"num_new_tokens": 5, "nfe": 5, "nfe_prefill": 1, "seconds": 0.0, "accepted_lengths": []}
    records = [{"mode": mode, **record} for mode in ("ar", "diffusion", "linear_spec")]
    html = panels.comparison(records, ["a", "b", "a"])
    assert [html.count(f">{word}<") for word in ("reference", "not identical", "identical")] == [1, 1, 1]


# --- what a visitor does


def test_refused_question_returns_to_the_box(engine: Engine, tmp_path: Path) -> None:
    page, records = Page(engine, [EXAMPLES]), []
    good = str(EXAMPLES / "chart-1.png")
    value = {"text": "What?", "files": [good, str(tmp_path / "gone.png")]}
    before = [question("Hi"), {"role": "assistant", "content": [text("x")]}]
    outputs = run(page, value, before, records, "ar", "", *VALUES)
    box, history, *_, note = outputs[-1]
    assert box["value"] == value | {"files": [good]} and box["submit_btn"] and history == before
    assert "gone.png" in note
    assert records == [] and page._turns == {}
    (only,) = run(page, {"text": " ", "files": []}, before, records, "ar", "", *VALUES)
    assert "Write a question" in only[-1]


def test_stop_and_the_next_question(engine: Engine) -> None:
    page = Page(engine, [EXAMPLES])

    async def stopped() -> Any:
        last = None
        async for outputs in page.ask("a", "chat", "Count from 60 to 1.", [], records, "ar", "", *VALUES):
            last = outputs[1] if isinstance(outputs[1], list) else last
            page.stop("b", "chat")  # another visitor
            if last and last[-1]["role"] == "assistant":
                page.stop("a", "chat")
        return last

    records: list[dict[str, Any]] = []
    with paced(engine):
        history = asyncio.run(stopped())
    assert records[0]["finish_reason"] == "cancelled" and records[0]["num_new_tokens"] < 150
    assert history[-1]["content"][0]["text"].startswith("6")
    assert history[-1]["content"][0]["text"].endswith("… stopped")
    run(page, "Spell the word pineapple.", [], records, "ar", "", *VALUES)
    assert records[1]["finish_reason"] == "stop"


def test_who_leaves_is_forgotten_and_leaves_nothing_running(engine: Engine) -> None:
    page, records = Page(engine, [EXAMPLES]), []
    cancelled = engine.stats()["finished"].get("cancelled", 0)

    async def left() -> None:
        async for outputs in page.ask("a", "chat", "Count from 60 to 1.", [], records, "ar", "", *VALUES):
            if isinstance(outputs[2], str):
                page.leave("b")  # another visitor
                page.leave("a")

    with paced(engine):
        asyncio.run(left())
        assert records == [] and page._turns == {}
        wait_for(lambda: engine.stats()["finished"].get("cancelled", 0) == cancelled + 1)
    assert engine.stats()["running"] == 0


def test_who_leaves_while_pictures_are_read_leaves_nothing_running(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, is_read, is_left, requests = Page(engine, [EXAMPLES]), threading.Event(), threading.Event(), []
    ask = handlers.ask

    def slow(*args: Any, **options: Any) -> Any:
        is_read.set()
        assert is_left.wait(60)
        requests.append(ask(*args, **options))
        return requests[-1]

    monkeypatch.setattr(handlers, "ask", slow)

    async def left() -> None:
        answer = page.answer("a", "Count from 60 to 1.", "ar", "", *VALUES)
        asked = asyncio.ensure_future(anext(answer))
        while not is_read.is_set():
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])
        assert page._turns == {} and requests == []
        is_left.set()

    asyncio.run(left())
    wait_for(lambda: requests and requests[0].is_done)
    assert requests[0].generation.rows[0].finish_reason == "cancelled"


def test_a_newer_turn_of_a_chat_ends_the_one_before(engine: Engine) -> None:
    page, records = Page(engine, [EXAMPLES]), []

    async def both() -> None:
        old = page.ask("a", "chat", "Count from 60 to 1.", [], records, "ar", "", *VALUES)
        async for outputs in old:
            if isinstance(outputs[2], str):
                break
        async for _ in page.ask("a", "chat", "Spell the word pineapple.", [], records, "ar", "", *VALUES):
            pass
        # It shows nothing over the newer one, but may give the box its send button back.
        assert not any([isinstance(outputs[1], list) async for outputs in old])

    asyncio.run(both())
    assert [r["finish_reason"] for r in records] == ["stop"] and engine.stats()["running"] == 0


def test_a_model_without_vision_shows_the_text_tab_alone(processor: Any) -> None:
    with Engine(make_tiny_model(vision=False), processor) as engine:
        blocks = app.build(engine)
    tabs = [block.label for block in blocks.blocks.values() if isinstance(block, gr.Tab)]
    assert tabs == ["Text only"]
    assert not any(isinstance(block, gr.MultimodalTextbox) for block in blocks.blocks.values())


# --- the API


def test_a_model_that_fails_is_told_in_one_line(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(engine, [EXAMPLES])
    monkeypatch.setattr(engine.model, "hidden", lambda *_, **__: 1 / 0)

    async def asked() -> None:
        async for _ in page.answer("a", "Count from 12 to 1.", "ar", "", *VALUES):
            pass

    with pytest.raises(gr.Error, match="division by zero"):
        asyncio.run(asked())
    assert page._turns == {}


def test_api_lists_answer_alone(client: Client) -> None:
    api = client.view_api(return_format="dict", print_info=False)
    assert set(api["named_endpoints"]) == {"/answer"} and api["unnamed_endpoints"] == {}
    names = [p["parameter_name"] for p in api["named_endpoints"]["/answer"]["parameters"]]
    assert names == ["message", "mode", "system", *SETTINGS]


def test_client_streams_and_the_last_is_the_whole(client: Client) -> None:
    job = client.submit(
        {"text": RECEIPT, "files": [handle_file(EXAMPLES / "receipt-1.png")]}, mode="ar", api_name="/answer"
    )
    states = list(job)
    texts = [state["text"] for state in states]
    assert len(set(texts)) > 1 and all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert texts[-1] == ANSWERS["receipt-1.png"]
    assert states[-1]["mode"] == "ar" and states[-1]["finish_reason"] == "stop"
    assert states[-1]["nfe"] == states[-1]["num_new_tokens"]


def test_client_gives_settings_and_text_alone(client: Client) -> None:
    state = client.predict({"text": "Count from 12 to 1.", "files": []}, max_new_tokens=5, mode="diffusion",
                           block_length=4, threshold=0.5, api_name="/answer")  # fmt: skip
    assert state["num_new_tokens"] == 5 and state["finish_reason"] == "length" and state["text"].startswith("12")
    sampled = [
        client.predict({"text": RECEIPT, "files": []}, mode="ar", temperature=2, seed=seed, max_new_tokens=20,
                       api_name="/answer")["text"]
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert sampled[0] == sampled[1] != sampled[2]


def test_the_snippet_of_the_readme_runs(address: str, monkeypatch: Any, capsys: Any) -> None:
    (snippet,) = re.findall(r"```py\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), flags=re.S)
    monkeypatch.chdir(REPOSITORY)
    exec(snippet.replace("http://127.0.0.1:7860", address), {})
    assert capsys.readouterr().out.rstrip().endswith(ANSWERS["receipt-1.png"])


@pytest.mark.parametrize(
    "change, word",
    [
        ({"mode": "fast"}, "fast"),
        ({"max_new_tokens": 0}, "minimum"),
        ({"threshold": 3}, "maximum"),
        ({"threshold": "x"}, "cannot be 'x'"),
        ({"temperature": None}, "cannot be None"),
        ({"seed": "x"}, "cannot be 'x'"),
        ({"message": {"text": "", "files": []}}, "empty"),
        ({"message": "bad.png"}, "bad.png"),
        ({"message": "cut.png"}, "cut.png"),
    ],
)
def test_client_errors_are_one_line(
    client: Client, tmp_path: Path, change: dict[str, Any], word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes((EXAMPLES / "receipt-1.png").read_bytes()[:500])
    if isinstance(change.get("message"), str):
        change = {"message": {"text": "?", "files": [handle_file(tmp_path / change["message"])]}}
    with pytest.raises(Exception, match=f"(?i){word}") as caught:
        client.predict(**({"message": {"text": "Hi", "files": []}} | change), api_name="/answer")
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value) and "/gradio/" not in str(caught.value)
    # Nor is it in the server's log.
    assert "Traceback" not in capfd.readouterr().err


def test_three_clients_with_different_pictures_at_once(address: str) -> None:
    clients = [client_of(address) for _ in range(3)]
    asked = [q for q in QUESTIONS if q["task"] in ("receipt_json", "chart_json", "grid_describe")]
    jobs = [
        c.submit({"text": q["question"], "files": [handle_file(EXAMPLES / q["image"])]}, mode=mode, api_name="/answer")
        for c, q, mode in zip(clients, asked, ("ar", "linear_spec", "ar"), strict=True)
    ]
    assert [job.result(timeout=120)["text"] for job in jobs] == [q["answer"] for q in asked]


def test_a_client_that_cancels_leaves_nothing_running(client: Client, engine: Engine) -> None:
    before = engine.stats()["finished"].get("cancelled", 0)
    with paced(engine):
        job = client.submit({"text": "Count from 60 to 1.", "files": []}, mode="ar", api_name="/answer")
        wait_for(job.outputs)
        job.cancel()
        wait_for(lambda: engine.stats()["finished"].get("cancelled", 0) == before + 1)
    assert engine.stats()["running"] == 0


def forged(address: str, page_function: str, data: list[Any]) -> str:
    """What the server says to a request that no browser of ours would send."""
    import httpx

    config = httpx.get(f"{address}/config", timeout=60).json()
    index = next(
        d["id"] for d in config["dependencies"] if d["api_name"] == page_function and len(d["inputs"]) == len(data)
    )
    body = {"data": data, "fn_index": index, "session_hash": "forged"}
    httpx.post(f"{address}/gradio_api/queue/join", json=body, timeout=60).raise_for_status()
    with httpx.stream("GET", f"{address}/gradio_api/queue/data", params={"session_hash": "forged"}, timeout=60) as s:
        lines = []
        for line in s.iter_lines():
            lines.append(line)
            if "process_completed" in line:
                break
    return "\n".join(lines)


@pytest.mark.parametrize("place", ["history", "history by name", "message"])
def test_a_client_reads_no_file_of_the_server(address: str, tmp_path: Path, engine: Engine, place: str) -> None:
    secret = tmp_path / "secret.png"
    shutil.copy(EXAMPLES / "receipt-1.png", secret)
    file = {"path": str(secret), "meta": {"_type": "gradio.FileData"}}
    box, history = {"text": RECEIPT, "files": []}, []
    if place == "message":
        box["files"] = [file]
    else:
        part = {"type": "file", "file": file if place == "history" else {"path": str(secret)}}
        history = [{"role": "user", "content": [part]}]
    answered = engine.stats()["finished"].get("stop", 0)
    said = forged(address, "ask", [box, history, None, "ar", "", *VALUES])
    assert "74.46" not in said and "process_completed" in said
    assert engine.stats()["finished"].get("stop", 0) == answered


def test_a_client_makes_the_server_fetch_nothing(address: str, engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = threading.Event()
        threading.Thread(target=lambda: (listener.accept(), asked.set()), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        file = {"path": url, "url": url, "meta": {"_type": "gradio.FileData"}}
        said = forged(address, "ask", [{"text": "?", "files": [file]}, [], None, "ar", "", *VALUES])
        assert "upload the picture itself" in said and not asked.is_set()


# --- the command


def command(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trimode_vlm", "demo", *argv], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--port", "99999"], "--port must lie between"),
        (["--max-rows", "0"], "--max-rows must be above 0"),
        (["--device", "tpu"], "tpu"),
        (["--prot", "7"], "--prot"),
        (["--mode", "fast"], "unknown mode 'fast'"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_options_are_one_line(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--port", "0", *argv]) in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("settings:")]
    assert len(lines) == 1 and word in lines[0]


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["demo", "--port", str(port)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].count(f"127.0.0.1:{port}") == 1


def test_ctrl_c_ends_cleanly() -> None:
    process = command("--port", str(free_port()))
    assert process.stderr is not None
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    said = []
    for line in process.stderr:
        said.append(line)
        if "open http" in line:
            process.send_signal(signal.SIGINT)
    watchdog.cancel()
    assert process.wait(60) == 0 and "Traceback" not in "".join(said), said


def test_a_server_ends_though_a_page_is_open() -> None:
    import httpx

    argv = ["serve", "--ui", "--port", "0", "--drain-sec", "3600"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trimode_vlm", *argv], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    try:
        address = next(line.split()[-1] for line in process.stderr if "listening" in line)
        with httpx.stream("GET", f"{address}/gradio_api/heartbeat/page", timeout=60) as page:
            for _ in page.iter_lines():
                process.send_signal(signal.SIGTERM)
                break
            assert process.wait(60) == 0
    finally:
        watchdog.cancel()
        process.kill()


def test_a_server_that_ends_answers_what_a_page_has_asked() -> None:
    engine = Engine(*trimode_vlm.load("nano"))
    served = app.mount(create_app(engine, ServerSettings()), engine)
    server = serve.draining_server(served, "127.0.0.1", 0, drain_sec=120)
    with paced(engine, 0.02), listening(served, server) as address:
        client = client_of(address)
        asked = {"text": RECEIPT, "files": [handle_file(EXAMPLES / "receipt-1.png")]}
        job = client.submit(asked, mode="ar", api_name="/answer")
        wait_for(job.outputs)
        server.should_exit = True
        assert job.result(timeout=120)["text"] == ANSWERS["receipt-1.png"]
        wait_for(lambda: not engine.is_alive)


def test_the_limits_of_serve_bind_its_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted: dict[str, Any] = {}
    settings = ServerSettings(timeout_sec=7, max_images=3, max_image_pixels=5_000_000)
    monkeypatch.setattr(serve, "load_model", lambda _: (engine.model, engine.processor))
    monkeypatch.setattr(app, "mount", lambda served, _, **options: (mounted.update(options), served)[1])
    monkeypatch.setattr(
        serve, "draining_server", lambda served, *_: SimpleNamespace(run=served.state.drain.engine.close, started=True)
    )
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    argv = ["serve", "--ui", "--port", "0", "--max-images", "3", "--max-image-megapixels", "5", "--timeout-sec", "7"]
    assert cli.main(argv) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    limits = mounted["limits"]
    assert (limits.timeout_sec, limits.max_images, limits.max_image_pixels) == (
        settings.timeout_sec, settings.max_images, settings.max_image_pixels,
    )  # fmt: skip
    assert (mounted["name"], mounted["note"]) == ("nano", NANO_HINT) and app.note_of("some/model") is None
    page = Page(engine, [EXAMPLES], Limits(max_images=1))
    *_, note = run(page, {"text": "?", "files": [str(EXAMPLES / "chart-1.png")] * 2}, [], [], "ar", "", *VALUES)[-1]
    assert "more than 1 pictures" in note
    page = Page(engine, [EXAMPLES], Limits(max_image_pixels=100))
    *_, note = run(page, {"text": "?", "files": [str(EXAMPLES / "chart-1.png")]}, [], [], "ar", "", *VALUES)[-1]
    assert "pixels" in note and "chart-1.png" in note
