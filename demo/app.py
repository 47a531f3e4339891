"""The web page: chat with pictures, all modes side by side, chat with text alone; and the same as an API.

No font, script or style comes from elsewhere, and nothing is reported anywhere.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from gradio_client.utils import is_http_url_like

from trimode_vlm.checkpoints import NANO, NANO_HINT
from trimode_vlm.demo import panels
from trimode_vlm.demo.chat_logic import BY_MODE, MODE_SETTINGS, MODES, Limits
from trimode_vlm.demo.handlers import SETTING_NAMES, Page
from trimode_vlm.demo.page_parts import EXAMPLES, chat_parts, compare_parts, settings_parts
from trimode_vlm.demo.page_style import CSS, HEAD
from trimode_vlm.engine import Engine

TITLE = "trimode-vlm"
KEPT_SEC = 24 * 3600
MAX_UPLOAD = "16mb"
THEME = gr.themes.Default(
    font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "Consolas", "monospace"], primary_hue="blue"
)
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}


def build(
    engine: Engine, default_mode: str = "linear_spec", limits: Limits | None = None, *, name: str | None = None,
    note: str | None = None,
) -> gr.Blocks:  # fmt: skip
    """The page over a running engine; name: of the model; note: what a visitor should know of it."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    page = Page(engine, [Path(get_upload_folder()), EXAMPLES], limits)
    has_vision = engine.model.config.vision_config is not None
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(3600, KEPT_SEC)) as blocks:
        gr.HTML(panels.title(TITLE, name, note), elem_id="title", padding=False)
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=320), gr.Tabs():
                if has_vision:
                    with gr.Tab("Chat") as chat_tab:
                        chat = chat_parts(with_images=True)
                    with gr.Tab("Compare") as compare_tab:
                        comparing = compare_parts()
                with gr.Tab("Text only") as text_tab:
                    text_chat = chat_parts(with_images=False)
            with gr.Column(scale=2, min_width=320):
                mode = gr.Radio(list(MODES), value=default_mode, label="Mode", info=MODES[default_mode])
                settings = settings_parts(engine, default_mode)
                panel = gr.HTML(panels.live_panel(None), elem_id="live")
                with gr.Accordion("TPF by answer length, this session", open=True):
                    session = gr.HTML(panels.session([]), elem_id="session")
                    reset = gr.Button("Reset", size="sm")
        shared: dict[str, Any] = {
            "records": gr.State([]),
            "values": [mode, settings["system"], *(settings[name] for name in SETTING_NAMES)],
            "panel": panel,
            "session": session,
        }
        _wire_settings(mode, settings, [parts["chatbot"] for parts in ([chat] if has_vision else []) + [text_chat]])
        if has_vision:
            _wire_chat(page, "chat", chat, shared)
            _wire_compare(page, comparing, shared)
            _wire_tabs([chat_tab, text_tab], compare_tab, mode, settings)
        _wire_chat(page, "text", text_chat, shared)
        reset.click(_reset, shared["records"], [session, shared["records"]], **PRIVATE)
        _wire_api(page, shared["values"], has_vision)
        blocks.unload(_left(page))
    for block in blocks.blocks.values():
        if isinstance(block, (gr.Chatbot, gr.MultimodalTextbox)):
            _fetch_nothing(block)
        if isinstance(block, (gr.Radio, gr.Slider, gr.Number)):
            _refuse_quietly(block)
    # Gradio compares the paths that clients name with the upload folder only then, and a mounted page never launches.
    blocks.has_launched = True
    return blocks


def _fetch_nothing(block: Any) -> None:
    """Refuse files that a client gives as an address: Gradio would fetch them."""
    move = block.async_move_resource_to_block_cache

    async def local_only(source: Any) -> Any:
        if is_http_url_like(str(source)):
            raise gr.Error("addresses are not read here; upload the picture itself", print_exception=False)
        return await move(source)

    block.async_move_resource_to_block_cache = local_only


def _refuse_quietly(block: Any) -> None:
    """Keep what a client asked wrongly out of the log: it is told, and the server is not at fault."""
    preprocess = block.preprocess

    def checked(payload: Any) -> Any:
        try:
            return preprocess(payload)
        except gr.Error as error:
            error.print_exception = False
            raise
        except (TypeError, ValueError):
            reason = f"{block.label}: cannot be {payload!r}"
            raise gr.Error(reason, print_exception=False) from None

    block.preprocess = checked


def note_of(model: str) -> str | None:
    """What a visitor should know of a model, by what `--model` calls it."""
    return NANO_HINT if model == NANO else None


def mount(
    app: Any, engine: Engine, path: str = "/", limits: Limits | None = None, *, name: str | None = None,
    note: str | None = None,
) -> Any:  # fmt: skip
    """The page on a server's application, beside its API; the rest as `build`."""
    app = gr.mount_gradio_app(
        app, build(engine, limits=limits, name=name, note=note), path, theme=THEME, css=CSS, head=HEAD,
        allowed_paths=[str(EXAMPLES)], footer_links=["api"], ssr_mode=False, enable_monitoring=False, pwa=False,
        show_error=False, max_file_size=MAX_UPLOAD, run_history=False,
    )  # fmt: skip
    # Every open page holds a connection, for which a server that ends would wait.
    app.state.close_pages = app.routes[-1].app.stop_event.set
    return app


# --- parts


# --- events


def _wire_settings(mode: Any, settings: dict[str, Any], chatbots: list[Any]) -> None:
    sampled = ("top_p", "seed")
    mode.change(
        lambda value: [gr.update(info=MODES[value]), *_shown_settings(value)],
        mode, [mode, *(settings[name] for name in BY_MODE)], **PRIVATE,
    )  # fmt: skip
    settings["temperature"].change(
        lambda value: [gr.update(visible=value > 0)] * len(sampled),
        settings["temperature"], [settings[name] for name in sampled], **PRIVATE,
    )  # fmt: skip
    settings["markdown"].change(
        lambda value: [gr.update(render_markdown=value)] * len(chatbots), settings["markdown"], chatbots, **PRIVATE
    )


def _shown_settings(mode: str) -> list[Any]:
    return [gr.update(visible=name in MODE_SETTINGS[mode]) for name in BY_MODE]


def _wire_tabs(chats: list[Any], comparing: Any, mode: Any, settings: dict[str, Any]) -> None:
    """Comparing asks every mode: none is chosen there, and every mode's settings are shown."""
    changed = [mode, *(settings[name] for name in BY_MODE)]
    comparing.select(lambda: [gr.update(visible=visible) for visible in (False, True, True)], None, changed, **PRIVATE)
    for chat in chats:
        chat.select(lambda value: [gr.update(visible=True), *_shown_settings(value)], mode, changed, **PRIVATE)


def _reset(records: list[Any]) -> tuple[str, list[Any]]:
    """In place, as answers under way add to the same list."""
    records.clear()
    return panels.session(records), records


def _wire_chat(page: Page, name: str, parts: dict[str, Any], shared: dict[str, Any]) -> None:
    """The events of one chat: ask, stop, regenerate, edit, clear."""
    chatbot, box = parts["chatbot"], parts["box"]
    given = [chatbot, shared["records"], *shared["values"]]
    shown = [box, chatbot, shared["panel"], shared["session"], shared["records"], parts["note"]]

    async def ask(session: gr.Request, value: Any, *values: Any) -> AsyncIterator[Any]:
        async for outputs in page.ask(_id_of(session), name, value, *values):
            yield outputs

    async def again(session: gr.Request, *values: Any) -> AsyncIterator[Any]:
        async for outputs in page.again(_id_of(session), name, *values):
            yield outputs

    async def edited(change: gr.EditData, session: gr.Request, history: Any, *values: Any) -> AsyncIterator[Any]:
        index = change.index[0] if isinstance(change.index, (list, tuple)) else change.index
        async for outputs in page.again(_id_of(session), name, history[: index + 1], *values):
            yield outputs

    async def stop(session: gr.Request) -> None:
        page.stop(_id_of(session), name)

    async def clear(session: gr.Request) -> Any:
        return page.clear(_id_of(session), name)

    asked = box.submit(ask, [box, *given], shown, **PRIVATE)
    repeated = gr.on([chatbot.retry, parts["again"].click], again, given, shown, cancels=[asked], **PRIVATE)
    changed = chatbot.edit(edited, given, shown, cancels=[asked, repeated], **PRIVATE)
    gr.on([parts["stop"].click, box.stop], stop, queue=False, **PRIVATE)
    gr.on(
        [parts["clear"].click, chatbot.clear], clear, None, [box, chatbot, shared["panel"], parts["note"]],
        cancels=[asked, repeated, changed], **PRIVATE,
    )  # fmt: skip


def _wire_compare(page: Page, parts: dict[str, Any], shared: dict[str, Any]) -> None:
    async def compare(session: gr.Request, *values: Any) -> AsyncIterator[Any]:
        async for outputs in page.compare(_id_of(session), *values):
            yield outputs

    async def stop(session: gr.Request) -> None:
        page.stop(_id_of(session), "compare")

    gr.on(
        [parts["question"].submit, parts["ask"].click], compare,
        [parts["question"], shared["records"], *shared["values"][2:]],
        [
            parts["question"], *parts["answers"], parts["table"], shared["panel"], shared["session"],
            shared["records"], parts["note"],
        ],
        **PRIVATE,
    )  # fmt: skip
    parts["stop"].click(stop, queue=False, **PRIVATE)


def _wire_api(page: Page, values: list[Any], has_vision: bool) -> None:
    """`answer` for gradio_client, on widgets that the page does not show: files come by upload alone."""

    async def answer(
        session: gr.Request, message: Any, mode: str, system: str, max_new_tokens: int, block_length: int,
        threshold: float, temperature: float, top_p: float, seed: int,
    ) -> AsyncIterator[Any]:  # fmt: skip
        settings = (max_new_tokens, block_length, threshold, temperature, top_p, seed)
        async for outputs in page.answer(_id_of(session), message, mode, system, *settings):
            yield outputs

    with gr.Row(visible=False):
        if has_vision:
            message: Any = gr.MultimodalTextbox(file_count="multiple", file_types=["image"], label="message")
        else:
            message = gr.Textbox(label="message")
        out = gr.JSON(label="answer")
        button = gr.Button("answer")
    button.click(
        answer, [message, *values], out, api_name="answer", concurrency_limit=None,
        api_description="One question, with pictures or without; streams {text, mode, counts}.",
    )  # fmt: skip


def _left(page: Page) -> Callable[..., None]:
    def leave(session: gr.Request) -> None:
        page.leave(_id_of(session))

    return leave


def _id_of(session: gr.Request) -> str:
    return session.session_hash or "api"
