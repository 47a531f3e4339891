"""The web page in a real Chromium: what a visitor sees and does, on nano."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import EXAMPLES
from serving import listening, need

need("gradio", "fastapi", "uvicorn", "playwright.sync_api")

from fastapi import FastAPI  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

import trimode_vlm  # noqa: E402
from trimode_vlm.demo.app import mount  # noqa: E402
from trimode_vlm.demo.handlers import Page as Handlers  # noqa: E402
from trimode_vlm.engine import Engine  # noqa: E402
from trimode_vlm.request import Request  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
ANSWERS = {q["image"]: q["answer"] for q in QUESTIONS}
WAIT_MS = 120_000
expect.set_options(timeout=WAIT_MS)
BOX = "#question textarea"


class PacedEngine(Engine):
    """Waits `pace_sec` before every step, so that there is time to press Stop."""

    pace_sec = 0.0

    def _step(self, *args: Any) -> None:
        time.sleep(self.pace_sec)
        super()._step(*args)


@pytest.fixture(scope="module")
def engine() -> Iterator[PacedEngine]:
    with PacedEngine(*trimode_vlm.load("nano")) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine: PacedEngine) -> Iterator[str]:
    with listening(mount(FastAPI(), engine)) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser, address: str, engine: PacedEngine) -> Iterator[Callable[..., Any]]:
    """Opens the page as a context; afterwards nothing ran into an error, and nothing was asked of another host."""
    engine.pace_sec = 0.0

    @contextmanager
    def visit(width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        faults: list[str] = []
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith((address, "data:", "blob:")) else faults.append(r.url),
        )
        try:
            page.goto(address)
            page.wait_for_selector(BOX)
            yield page
        finally:
            context.close()
        assert faults == []

    yield visit
    engine.pace_sec = 0.0


def attach(page: Page, *names: str, box: str = "#question") -> None:
    page.set_input_files(f"{box} input[type=file]", [str(EXAMPLES / name) for name in names])
    expect(page.locator(f"{box} .thumbnails img, {box} .thumbnail-item img")).to_have_count(len(names))


def send(page: Page, text: str, box: str = BOX) -> None:
    page.fill(box, text)
    page.press(box, "Enter")


def finished(page: Page, count: int, chat: str = "#chat") -> str:
    """The last answer, once there are `count` and the box takes questions again."""
    expect(page.locator(f"{chat} [data-testid=bot]")).to_have_count(count, timeout=WAIT_MS)
    box = "#question" if chat == "#chat" else "#text-question"
    expect(page.locator(f"{box} .submit-button")).to_be_visible(timeout=WAIT_MS)
    expect(page.locator("#live dd").last).to_contain_text("stop")
    return page.locator(f"{chat} [data-testid=bot]").last.inner_text()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_streams_and_stop_ends_its_forwards_within_a_step(
    visit: Any, engine: PacedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_cancel: list[int] = []
    cancel = Request.cancel

    def recorded(request: Request) -> None:
        if not request.is_cancelled and not request.is_done:
            at_cancel.append(engine.stats()["forwards"])
        cancel(request)

    monkeypatch.setattr(Request, "cancel", recorded)
    with visit() as page:
        attach(page, "receipt-1.png")
        page.get_by_label("ar", exact=True).check()
        engine.pace_sec = 0.1
        send(page, "Write the receipt as JSON.")
        answer = page.locator("#chat [data-testid=bot]")
        lengths = set()

        def has_grown() -> bool:
            lengths.add(len(answer.inner_text()) if answer.count() else 0)
            return len(lengths) >= 3

        until(has_grown)
        page.click("#question .stop-button")
        until(lambda: engine.stats()["running"] == 0)
        assert len(at_cancel) == 1 and engine.stats()["forwards"] - at_cancel[0] <= 1
        expect(page.locator("#live dd").last).to_contain_text("cancelled")
        expect(answer).to_contain_text("… stopped")
        stopped = answer.inner_text().partition("\n")[0]
        assert stopped and ANSWERS["receipt-1.png"].startswith(stopped)
        engine.pace_sec = 0.0
        expect(page.locator("#question .submit-button")).to_be_visible()
        send(page, "Write the receipt as JSON.")
        assert finished(page, 2).endswith('"total": "74.46"}')


def both_turns(engine: Engine) -> str:
    """What generate() answers to the second question of the test below."""
    picture, text = (lambda name: {"type": "image", "image": EXAMPLES / name}), (lambda t: {"type": "text", "text": t})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [picture("receipt-1.png"), text("Write the receipt as JSON.")]},
        {"role": "assistant", "content": ANSWERS["receipt-1.png"]},
        {"role": "user", "content": [picture("chart-1.png"), text("Give me the bars of this picture as JSON.")]},
    ]
    inputs = engine.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    out = engine.model.generate(**inputs, mode="diffusion", threshold=0.9, max_new_tokens=1024)
    return engine.processor.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_modes_settings_two_pictures_and_the_session(visit: Any, engine: PacedEngine) -> None:
    with visit() as page:
        attach(page, "receipt-1.png")
        send(page, "Write the receipt as JSON.")
        assert finished(page, 1).endswith('"total": "74.46"}')
        page.get_by_role("button", name="Settings").click()
        shown = {
            mode: [name for name in ("Block length", "Confidence at which") if _appears(page, mode, name)]
            for mode in ("ar", "linear_spec", "diffusion")
        }
        assert shown == {
            "ar": [],
            "linear_spec": ["Block length"],
            "diffusion": ["Block length", "Confidence at which"],
        }
        attach(page, "chart-1.png")
        send(page, "Give me the bars of this picture as JSON.")
        assert finished(page, 2) == both_turns(engine)
        assert page.locator("#chat img").count() == 2
        assert all(h <= 150 for h in page.eval_on_selector_all("#chat img", "all => all.map(i => i.clientHeight)"))
        session = page.locator("#session").inner_text()
        assert "linear_spec" in session and "diffusion" in session and page.locator("#session i").count() >= 3
        assert page.locator("#live .tm-new").count() > 1 and "im_end" not in page.locator("#live").inner_text()


def _appears(page: Page, mode: str, name: str) -> bool:
    page.get_by_label(mode, exact=True).check()
    page.wait_for_timeout(600)
    return page.get_by_text(name).first.is_visible()


def test_compare_says_what_is_identical(visit: Any) -> None:
    with visit() as page:
        page.get_by_role("tab", name="Compare").click()
        attach(page, "receipt-1.png", box="#compare-question")
        page.fill("#compare-question textarea", "Write the receipt as JSON.")
        page.get_by_role("button", name="Ask all modes").click()
        expect(page.locator("#comparison tr")).to_have_count(6, timeout=WAIT_MS)
        expect(page.locator("#comparison")).to_be_visible()
        assert page.locator("#comparison .tm-same").all_inner_texts() == ["reference", *["identical"] * 4]
        # Of the last mode asked; none is chosen here.
        expect(page.locator("#live dd").first).to_have_text("auto")
        expect(page.get_by_label("ar", exact=True)).to_have_count(0)
        texts = [page.locator(f"#answer-{mode} textarea").input_value() for mode in ("ar", "quadratic_spec")]
        assert texts[0] == texts[1] and texts[0].endswith('"74.46"}')
        page.get_by_role("tab", name="Chat").click()
        page.get_by_label("ar", exact=True).check()
        expect(page.get_by_text("one token per forward")).to_be_visible()


def test_text_tab_shows_what_was_typed_and_copies_it(visit: Any) -> None:
    typed = (
        "<b>x</b> <script>alert(1)</script> <foo> &lt; <img src=x onerror=alert(2)> 3 < 4 *x* | ![](http://a.b/c.png)"
    )
    with visit() as page:
        page.get_by_role("tab", name="Text only").click()
        send(page, typed, "#text-question textarea")
        finished(page, 1, "#text-chat")
        shown = page.locator("#text-chat [data-testid=user]")
        assert shown.inner_text().replace("\u2060", "") == typed
        assert shown.locator("b, script, img").count() == 0
        page.locator("#text-chat").get_by_label("Copy message").first.click()
        page.wait_for_function("text => navigator.clipboard.readText().then(t => t === text)", arg=typed)
        page.get_by_role("button", name="Clear", exact=True).locator("visible=true").last.click()
        expect(page.locator("#text-chat [data-testid=bot]")).to_have_count(0)
        send(page, "Spell the word pineapple.", "#text-question textarea")
        assert finished(page, 1, "#text-chat") == "p i n e a p p l e"
        page.locator("#text-chat").get_by_label("Edit").last.click()
        page.fill("#text-chat textarea", "Count from 12 to 1.")
        page.locator("#text-chat").get_by_label("Submit").click()
        expect(page.locator("#text-chat [data-testid=bot]").last).to_contain_text("12", timeout=WAIT_MS)


def test_a_bad_file_loses_nothing_else(visit: Any, tmp_path: Any) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    with visit() as page:
        send(page, "Spell the word lemon.")
        finished(page, 1)
        page.set_input_files("#question input[type=file]", [str(tmp_path / "bad.png")])
        expect(page.locator("#question .thumbnail-item")).to_have_count(1)
        send(page, "What is it?")
        expect(page.locator(".tm-note")).to_contain_text("bad.png")
        assert "/" not in page.locator(".tm-note").inner_text()
        expect(page.locator(BOX)).to_have_value("What is it?")
        expect(page.locator("#question .thumbnail-item")).to_have_count(0)
        assert page.locator("#chat [data-testid=user]").count() == page.locator("#chat [data-testid=bot]").count() == 1


def test_an_answer_cut_short_says_so_but_not_in_a_copy(visit: Any) -> None:
    with visit() as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("number input for Longest answer").fill("5")
        page.get_by_label("number input for Longest answer").press("Tab")
        send(page, "Count from 12 to 1.")
        answer = page.locator("#chat [data-testid=bot]")
        expect(answer).to_contain_text("… cut at 5 tokens", timeout=WAIT_MS)
        page.locator("#chat").get_by_label("Copy message").last.click()
        page.wait_for_function("navigator.clipboard.readText().then(t => t === '12 11')")
        answer.click(click_count=3)
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#chat [data-testid=bot]'))")
        page.keyboard.press("Control+c")
        page.wait_for_function("navigator.clipboard.readText().then(t => t.trim() === '12 11')")


def test_clear_and_reset_clear_everything(visit: Any) -> None:
    with visit() as page:
        width = page.locator(".tabs").first.bounding_box()["width"]
        send(page, "Spell the word lemon.")
        finished(page, 1)
        attach(page, "receipt-1.png")
        page.fill(BOX, "half a question")
        page.get_by_role("button", name="Clear", exact=True).locator("visible=true").last.click()
        expect(page.locator("#chat [data-testid=bot]")).to_have_count(0)
        expect(page.locator(BOX)).to_have_value("")
        expect(page.locator("#question .thumbnail-item")).to_have_count(0)
        expect(page.locator("#live")).to_contain_text("Ask something")
        expect(page.locator("#session td").first).to_have_text("linear_spec")
        page.get_by_role("button", name="Reset").click()
        expect(page.locator("#session")).to_contain_text("No answers yet")
        for tab in ("Compare", "Text only"):
            page.get_by_role("tab", name=tab).click()
            assert page.locator(".tabs").first.bounding_box()["width"] == width


def test_paste_and_drop(visit: Any) -> None:
    picture = base64.b64encode((EXAMPLES / "chart-1.png").read_bytes()).decode()
    script = """([picture, kind]) => {
        const bytes = Uint8Array.from(atob(picture), c => c.charCodeAt(0)), data = new DataTransfer();
        data.items.add(new File([bytes], "pasted.png", {type: "image/png"}));
        const options = {bubbles: true, cancelable: true};
        const event = kind == "paste" ? new ClipboardEvent("paste", {clipboardData: data, ...options})
                                      : new DragEvent("drop", {dataTransfer: data, ...options});
        document.querySelector("#question textarea").dispatchEvent(event);
    }"""
    with visit() as page:
        for count, kind in enumerate(("paste", "drop"), start=1):
            page.evaluate(script, [picture, kind])
            expect(page.locator("#question .thumbnail-item img")).to_have_count(count)


def test_who_closes_the_page_leaves_nothing_running(
    visit: Any, engine: PacedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    left: list[str] = []  # earlier tests' pages too: Gradio sees only at the next heartbeat that one has gone
    begin = Handlers._begin
    monkeypatch.setattr(Handlers, "_begin", lambda *given: (asked.append(given[1]), begin(*given))[1])
    monkeypatch.setattr(Handlers, "leave", lambda _, session: left.append(session))
    with visit() as page:
        engine.pace_sec = 0.2
        page.get_by_label("ar", exact=True).check()
        send(page, "Count from 60 to 1.")
        until(lambda: engine.stats()["running"] == 1)
    # The stream that nobody reads ends the forwards; what the page remembers of the visitor goes besides.
    until(lambda: engine.stats()["running"] == 0 and asked[0] in left)
    assert engine.stats()["finished"]["cancelled"] >= 1


@pytest.mark.parametrize("dark", [False, True])
def test_phone(visit: Any, dark: bool) -> None:
    with visit(390, 844, dark) as page:
        attach(page, "receipt-1.png")
        send(page, "Write the receipt as JSON.")
        finished(page, 1)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        places = [page.locator(selector).first.bounding_box() for selector in ("#chat", BOX, "#live", "#session")]
        assert [p["y"] for p in places] == sorted(p["y"] for p in places)
        assert all(p["x"] >= 0 and p["x"] + p["width"] <= 390 for p in places)
        for name in ("Stop", "Regenerate", "Clear"):
            box = page.get_by_role("button", name=name, exact=True).locator("visible=true").last.bounding_box()
            assert box["height"] >= 44
        table = page.locator("#session .tm-scroll")
        assert table.evaluate("box => box.scrollWidth <= box.clientWidth")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (sum(background[:3]) < 200) == dark
