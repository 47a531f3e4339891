"""What the page consists of: the parts of a chat, of the comparison, and the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradio as gr

import trimode_vlm
from trimode_vlm.demo.chat_logic import COMPARED, MODE_SETTINGS
from trimode_vlm.engine import Engine

EXAMPLES = Path(trimode_vlm.__file__).parent / "examples"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
TEXT_QUESTIONS = ("Count from 12 to 1.", "Spell the word pineapple.")


def chat_parts(with_images: bool) -> dict[str, Any]:
    chatbot = gr.Chatbot(
        height=480, buttons=["copy", "copy_all"], editable="user", feedback_options=None, show_label=False,
        placeholder="Ask about a picture, or just ask." if with_images else "Ask in words.", elem_classes="tm-chat",
        render_markdown=False, latex_delimiters=[], elem_id="chat" if with_images else "text-chat", label="Chat",
    )  # fmt: skip
    note = gr.HTML("", elem_classes="tm-noted")
    if with_images:
        box: Any = gr.MultimodalTextbox(
            file_count="multiple", file_types=["image"], sources=["upload"], show_label=False, label="Question",
            placeholder="A question; pictures by the clip, by drag or by paste", elem_id="question",
        )  # fmt: skip
        examples = [[{"text": q["question"], "files": [str(EXAMPLES / q["image"])]}] for q in QUESTIONS]
    else:
        box = gr.Textbox(
            show_label=False, label="Question", placeholder="A question", elem_id="text-question", submit_btn=True
        )
        examples = [[text] for text in TEXT_QUESTIONS]  # type: ignore[list-item]
    with gr.Row(elem_classes="tm-buttons"):
        stop, again, clear = (gr.Button(name, size="sm", min_width=80) for name in ("Stop", "Regenerate", "Clear"))
    _examples(examples, box)
    return {"chatbot": chatbot, "note": note, "box": box, "stop": stop, "again": again, "clear": clear}


def compare_parts() -> dict[str, Any]:
    question = gr.MultimodalTextbox(
        file_count="multiple", file_types=["image"], sources=["upload"], show_label=False, submit_btn=False,
        placeholder="One question, answered in every mode (greedy)", elem_id="compare-question", label="Question",
    )  # fmt: skip
    with gr.Row(elem_classes="tm-buttons"):
        button = gr.Button("Ask all modes", variant="primary", size="sm", min_width=120)
        stop = gr.Button("Stop", size="sm", min_width=80)
    note, table = gr.HTML("", elem_classes="tm-noted"), gr.HTML("", elem_id="comparison", elem_classes="tm-noted")
    with gr.Row():
        answers = [
            gr.Textbox(
                label=mode, lines=6, max_lines=14, buttons=["copy"], interactive=False, min_width=240,
                elem_id=f"answer-{mode}",
            )
            for mode in COMPARED
        ]  # fmt: skip
    _examples([[{"text": q["question"], "files": [str(EXAMPLES / q["image"])]}] for q in QUESTIONS[1:4]], question)
    return {"question": question, "ask": button, "stop": stop, "note": note, "table": table, "answers": answers}


def _examples(values: list[list[Any]], box: Any) -> None:
    with gr.Column(elem_classes="tm-examples"):
        gr.Examples(values, [box], label="Examples", cache_examples=False, api_visibility="private")


def settings_parts(engine: Engine, mode: str) -> dict[str, Any]:
    config = engine.model.config
    with gr.Accordion("Settings", open=False):
        parts = {
            "block_length": gr.Slider(
                1, 64, value=config.block_length, step=1, label="Block length",
                visible="block_length" in MODE_SETTINGS[mode],
            ),
            "threshold": gr.Slider(
                0.05, 1, value=0.9, step=0.05, label="Confidence at which tokens are committed together",
                visible="threshold" in MODE_SETTINGS[mode],
            ),
            "max_new_tokens": gr.Slider(1, 4096, value=1024, step=1, label="Longest answer, in tokens"),
            "temperature": gr.Slider(0, 2, value=0, step=0.05, label="Temperature (0: greedy)"),
            "top_p": gr.Slider(0.05, 1, value=1, step=0.05, label="Top-p", visible=False),
            "seed": gr.Number(0, label="Seed (-1: another each time)", precision=0, visible=False),
            "system": gr.Textbox("", label="System message", lines=1),
            "markdown": gr.Checkbox(False, label="Show answers as formatted Markdown"),
        }  # fmt: skip
    return parts
