"""The web page: chat with pictures, all modes side by side, chat with text alone; and the same as an API.

No font, script or style comes from elsewhere, and nothing is reported anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

import trimode_vlm
from trimode_vlm.demo import panels
from trimode_vlm.demo.chat_logic import COMPARED, MODE_SETTINGS, MODES, ask
from trimode_vlm.demo.live_answer import LiveAnswer
from trimode_vlm.engine import Engine
from trimode_vlm.request import Request, RequestError

TITLE = "trimode-vlm"
EXAMPLES = Path(trimode_vlm.__file__).parent / "examples"
SETTING_NAMES = ("max_new_tokens", "block_length", "threshold", "temperature", "top_p", "seed")
THEME = gr.themes.Default(
    font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "Consolas", "monospace"], primary_hue="blue"
)
CSS = panels.CSS + ".gradio-container { max-width: 1280px !important; margin: 0 auto; }"
HEAD = '<meta name="viewport" content="width=device-width, initial-scale=1">'


class Page:
    """The page's handlers over one engine. A visitor's running answers are known by the session, for Stop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._running: dict[str, set[Request]] = {}

    # --- chat

    def respond(
        self, history: list[dict[str, Any]], records: list[dict[str, Any]], mode: str, system: str,
        *settings: Any, session: gr.Request | None = None,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        """Answer the last message; yields (history, counts, canvas, records, note)."""
        if not history or history[-1]["role"] != "user":
            yield history, gr.skip(), gr.skip(), records, ""
            return
        try:
            request = ask(self.engine, history, system, mode, dict(zip(SETTING_NAMES, settings, strict=True)))
        except (ValueError, RequestError) as error:
            yield history, gr.skip(), gr.skip(), records, f"⚠ {error}"
            return
        answer: dict[str, Any] = {"role": "assistant", "content": []}
        for live in self._follow(request, session):
            # As a part: Gradio strips the indentation of bare text.
            answer["content"] = [{"type": "text", "text": live.text}]
            yield [*history, answer], panels.stats(live.record()), self._canvas(live), records, ""
        record = live_record(request)
        note = f"⚠ {request.error}" if request.error is not None else ""
        shown = [*history, answer] if answer["content"] else history
        yield shown, panels.stats(record), gr.skip(), [*records, record], note

    def _follow(self, request: Request, session: gr.Request | None) -> Iterator[LiveAnswer]:
        """The answer's states. Whoever stops listening, or presses Stop, ends its forwards."""
        running = self._running.setdefault(_session_of(session), set())
        running.add(request)
        try:
            yield from LiveAnswer(request)
        except RequestError:
            pass  # told by request.error
        finally:
            request.cancel()
            running.discard(request)

    def stop(self, session: gr.Request) -> None:
        """End what this visitor has running."""
        for request in list(self._running.get(_session_of(session), ())):
            request.cancel()

    def leave(self, session: gr.Request) -> None:
        self.stop(session)
        self._running.pop(_session_of(session), None)

    def _canvas(self, live: LiveAnswer) -> str:
        return panels.canvas(live.token_ids, live.last, self._piece, self.engine.model.config.mask_token_id)

    def _piece(self, token_id: int) -> str:
        return self.engine.processor.tokenizer.decode([token_id], skip_special_tokens=False)

    # --- all modes

    def compare(
        self, question: dict[str, Any], *settings: Any, session: gr.Request | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """One question in every mode, one after the other, so that their seconds are honest."""
        history = [user_message(question)]
        values = dict(zip(SETTING_NAMES, settings, strict=True)) | {"temperature": 0.0}
        texts, records = [""] * len(COMPARED), []
        for i, mode in enumerate(COMPARED):
            try:
                request = ask(self.engine, history, "", mode, values)
            except (ValueError, RequestError) as error:
                yield (*texts, panels.comparison_table(records, texts[: len(records)]), f"⚠ {error}")
                return
            for live in self._follow(request, session):
                texts[i] = live.text
                yield (*texts, gr.skip(), f"answering with {mode} …")
            if (
                request.error is not None
                or request.is_cancelled
                and live_record(request)["finish_reason"] == "cancelled"
            ):
                yield (*texts, gr.skip(), "stopped" if request.error is None else f"⚠ {request.error}")
                return
            records.append(live_record(request))
            yield (*texts, panels.comparison_table(records, texts[: i + 1]), "")

    # --- API

    def answer(
        self, message: dict[str, Any], mode: str, system: str, *settings: Any, session: gr.Request | None = None
    ) -> Iterator[dict[str, Any]]:
        """One question for gradio_client: {"text", "mode", counts} as the answer grows."""
        try:
            values = dict(zip(SETTING_NAMES, settings, strict=True))
            request = ask(self.engine, [user_message(message)], system, mode, values)
        except (ValueError, RequestError) as error:
            raise gr.Error(str(error)) from error
        text = ""
        for live in self._follow(request, session):
            text = live.text
            yield {"text": text} | live.record()
        if request.error is not None:
            raise gr.Error(str(request.error))
        yield {"text": text} | live_record(request)


def live_record(request: Request) -> dict[str, Any]:
    """Counts of a request that has ended."""
    live = LiveAnswer(request)
    live.token_ids = list(request.generation.rows[0].token_ids)
    return live.record()


def user_message(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """What a text box gave (text and files) as a message of the history."""
    value = {"text": value, "files": []} if isinstance(value, str) else value or {"text": "", "files": []}
    files = [{"path": _path_of(f), "alt_text": Path(_path_of(f)).name} for f in value.get("files") or []]
    text = (value.get("text") or "").strip()
    return {"role": "user", "content": [*files, *([{"type": "text", "text": text}] if text else [])]}


def _path_of(file: Any) -> str:
    return file["path"] if isinstance(file, dict) else str(file)


def _session_of(session: gr.Request | None) -> str:
    return getattr(session, "session_hash", None) or "api"


def build(engine: Engine, default_mode: str = "linear_spec") -> gr.Blocks:
    """The page over a running engine."""
    page = Page(engine)
    has_vision = engine.model.config.vision_config is not None
    with gr.Blocks(title=TITLE, analytics_enabled=False) as blocks:
        gr.Markdown(
            f"# {TITLE}\nOne model, three ways to decode. TPF is tokens per forward: the higher, the fewer steps."
        )
        records = gr.State([])
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=320):
                with gr.Tabs():
                    if has_vision:
                        with gr.Tab("Chat"):
                            chat = _chat_parts(with_images=True)
                        with gr.Tab("Compare"):
                            comparing = _compare_parts()
                    with gr.Tab("Text only"):
                        text_chat = _chat_parts(with_images=False)
            with gr.Column(scale=2, min_width=320):
                mode = gr.Radio(MODES, value=default_mode, label="Mode")
                settings = _settings_parts(engine, default_mode)
                counts = gr.HTML(panels.stats(None), label="This answer")
                canvas = gr.HTML(panels.canvas([], None, str, None))
                with gr.Accordion("TPF by answer length, this session", open=True):
                    table = gr.HTML(panels.session_table([]))
                    plot = gr.BarPlot(
                        x="answers", y="TPF", color="mode", sort=None, height=220, y_lim=[0, 1], visible=False
                    )
        values = [mode, settings["system"], *(settings[name] for name in SETTING_NAMES)]
        mode.change(_shown_settings, mode, [settings["block_length"], settings["threshold"]], api_visibility="private")
        records.change(_session, records, [table, plot], api_visibility="private", show_progress="hidden")
        shared = {"records": records, "values": values, "outputs": [counts, canvas]}
        _wire_chat(page, text_chat, shared)
        if has_vision:
            _wire_chat(page, chat, shared)
            outputs = [*comparing["answers"], comparing["table"], comparing["note"]]
            run = gr.on(
                [comparing["question"].submit, comparing["ask"].click], _with_session(page.compare),
                [comparing["question"], *values[2:]], outputs, api_visibility="private",
                concurrency_limit=None, show_progress="hidden",
            )  # fmt: skip
            comparing["stop"].click(page.stop, cancels=[run], api_visibility="private", queue=False)
        _wire_api(page, values)
        blocks.unload(page.leave)
    return blocks


def _chat_parts(with_images: bool) -> dict[str, Any]:
    chatbot = gr.Chatbot(
        height=480, buttons=["copy", "copy_all"], editable="user", feedback_options=None, show_label=False,
        placeholder="Ask about a picture, or just ask." if with_images else "Ask in words.",
    )  # fmt: skip
    note = gr.Markdown("", elem_classes="tm-note")
    box = gr.MultimodalTextbox(
        file_count="multiple" if with_images else "single", file_types=["image"] if with_images else [],
        sources=["upload"] if with_images else [], show_label=False, submit_btn=True, stop_btn=True, lines=1,
        placeholder="A question; pictures by the clip, by drag or by paste" if with_images else "A question",
        elem_id="question" if with_images else "text-question",
    )  # fmt: skip
    with gr.Row():
        stop = gr.Button("Stop", size="sm", min_width=80)
        again = gr.Button("Regenerate", size="sm", min_width=80)
        clear = gr.Button("Clear", size="sm", min_width=80)
    if with_images:
        questions = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
        gr.Examples(
            [[{"text": q["question"], "files": [str(EXAMPLES / q["image"])]}] for q in questions], [box],
            label="Examples", cache_examples=False, api_visibility="private",
        )  # fmt: skip
    else:
        texts = [[{"text": text, "files": []}] for text in ("Count from 12 to 1.", "Spell the word pineapple.")]
        gr.Examples(texts, [box], label="Examples", cache_examples=False, api_visibility="private")
    return {"chatbot": chatbot, "note": note, "box": box, "stop": stop, "again": again, "clear": clear}


def _compare_parts() -> dict[str, Any]:
    question = gr.MultimodalTextbox(
        file_count="multiple", file_types=["image"], sources=["upload"], show_label=False, submit_btn=False,
        placeholder="One question, answered in every mode (greedy)", elem_id="compare-question",
    )  # fmt: skip
    with gr.Row():
        button = gr.Button("Ask all modes", variant="primary", size="sm", min_width=120)
        stop = gr.Button("Stop", size="sm", min_width=80)
    note = gr.Markdown("")
    table = gr.HTML("")
    with gr.Row():
        answers = [
            gr.Textbox(label=mode, lines=6, max_lines=14, buttons=["copy"], interactive=False, min_width=240)
            for mode in COMPARED
        ]
    questions = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
    gr.Examples(
        [[{"text": q["question"], "files": [str(EXAMPLES / q["image"])]}] for q in questions[1:4]], [question],
        label="Examples", cache_examples=False, api_visibility="private",
    )  # fmt: skip
    return {"question": question, "ask": button, "stop": stop, "note": note, "table": table, "answers": answers}


def _settings_parts(engine: Engine, mode: str) -> dict[str, Any]:
    config = engine.model.config
    with gr.Accordion("Settings", open=False):
        system = gr.Textbox(label="System message", lines=1)
        parts = {
            "max_new_tokens": gr.Slider(1, 4096, value=1024, step=1, label="Longest answer, in tokens"),
            "block_length": gr.Slider(
                1, 64, value=config.block_length, step=1, label="Block length",
                visible="block_length" in MODE_SETTINGS[mode],
            ),
            "threshold": gr.Slider(
                0.05, 1, value=0.9, step=0.05, label="Confidence at which tokens are committed together",
                visible="threshold" in MODE_SETTINGS[mode],
            ),
            "temperature": gr.Slider(0, 2, value=0, step=0.05, label="Temperature (0: greedy)"),
            "top_p": gr.Slider(0.05, 1, value=1, step=0.05, label="Top-p"),
            "seed": gr.Number(0, label="Seed (-1: another each time)", precision=0),
        }  # fmt: skip
    return parts | {"system": system}


def _shown_settings(mode: str) -> list[Any]:
    return [gr.update(visible=name in MODE_SETTINGS[mode]) for name in ("block_length", "threshold")]


def _session(records: list[dict[str, Any]]) -> tuple[str, Any]:
    import pandas

    points = panels.session_points(records)
    if not points:
        return panels.session_table(records), gr.update(visible=False)
    highest = max(point["TPF"] for point in points)
    return panels.session_table(records), gr.BarPlot(
        pandas.DataFrame(points), x="answers", y="TPF", color="mode", sort=None, height=220,
        y_lim=[0, 1.1 * highest], visible=True,
    )  # fmt: skip


def _wire_chat(page: Page, parts: dict[str, Any], shared: dict[str, Any]) -> None:
    """The events of one chat: ask, stop, regenerate, edit, clear."""
    chatbot, box, note = parts["chatbot"], parts["box"], parts["note"]
    answering = {
        "fn": _with_session(page.respond),
        "inputs": [chatbot, shared["records"], *shared["values"]],
        "outputs": [chatbot, *shared["outputs"], shared["records"], note],
        "api_visibility": "private",
        "concurrency_limit": None,
        "show_progress": "hidden",
    }
    quiet = {"api_visibility": "private", "queue": False, "show_progress": "hidden"}
    asked = box.submit(_take_question, [box, chatbot], [chatbot, box, note], **quiet).then(**answering)
    again = gr.on([chatbot.retry, parts["again"].click], _without_answer, chatbot, chatbot, **quiet).then(**answering)
    edited = chatbot.edit(_edited, chatbot, chatbot, **quiet).then(**answering)
    running = [asked, again, edited]
    gr.on([parts["stop"].click, box.stop], page.stop, None, None, cancels=None, **quiet)
    gr.on([parts["clear"].click, chatbot.clear], _cleared, None, [chatbot, note], cancels=running, **quiet).then(
        page.stop, None, None, **quiet
    )


def _take_question(value: dict[str, Any], history: list[dict[str, Any]]) -> tuple[Any, Any, str]:
    """The question moves from the box into the history; an empty one stays where it is."""
    message = user_message(value)
    if not message["content"]:
        return history, value, "Write a question, or attach a picture."
    return [*history, message], gr.MultimodalTextbox(value=None), ""


def _without_answer(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history up to the last question."""
    while history and history[-1]["role"] != "user":
        history = history[:-1]
    return history


def _edited(history: list[dict[str, Any]], change: gr.EditData) -> list[dict[str, Any]]:
    """The history up to the question that was edited, as it now reads."""
    index = change.index[0] if isinstance(change.index, (list, tuple)) else change.index
    return history[: index + 1]


def _cleared() -> tuple[list[Any], str]:
    return [], ""


def _wire_api(page: Page, values: list[Any]) -> None:
    """`answer` for gradio_client, on widgets that the page does not show: files come by upload alone."""
    with gr.Row(visible=False):
        message = gr.MultimodalTextbox(file_count="multiple", file_types=["image"], label="message")
        out = gr.JSON(label="answer")
        button = gr.Button("answer")
    button.click(
        _with_session(page.answer), [message, *values], out, api_name="answer", concurrency_limit=None,
        api_description="One question, with pictures or without; streams {text, mode, counts}.",
    )  # fmt: skip


def _with_session(handler: Any) -> Any:
    """A generator handler that is told its session: Gradio gives it to a parameter annotated as its Request."""

    # First, because Gradio counts positions and cannot count past *values.
    def run(session: gr.Request, *values: Any) -> Iterator[Any]:
        yield from handler(*values, session=session)

    return run


def mount(app: Any, engine: Engine, path: str = "/") -> Any:
    """The page on a server's application, beside its API."""
    return gr.mount_gradio_app(
        app, build(engine), path, theme=THEME, css=CSS, head=HEAD, allowed_paths=[str(EXAMPLES)], footer_links=["api"],
        ssr_mode=False, enable_monitoring=False, pwa=False,
    )  # fmt: skip
