"""From the page's history and settings to requests of the engine; nothing here knows Gradio's widgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimode_vlm.engine import Engine
from trimode_vlm.request import Request
from trimode_vlm.vision.images import open_image

MODES = ("auto", "ar", "diffusion", "linear_spec", "quadratic_spec")
COMPARED = ("ar", "diffusion", "linear_spec", "quadratic_spec")
# The settings that a mode has beside those of all.
MODE_SETTINGS = {
    "auto": ("block_length",),
    "ar": (),
    "diffusion": ("block_length", "threshold"),
    "linear_spec": ("block_length",),
    "quadratic_spec": ("block_length",),
}


def options_of(mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """generate()'s options; temperature 0 is greedy, and a setting that the mode does not have is left out."""
    options: dict[str, Any] = {"mode": mode, "max_new_tokens": int(settings["max_new_tokens"])}
    for name in MODE_SETTINGS[mode]:
        if settings.get(name) is not None:
            options[name] = int(settings[name]) if name == "block_length" else float(settings[name])
    temperature = float(settings.get("temperature") or 0)
    options["do_sample"] = temperature > 0
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": float(settings.get("top_p") or 1), "seed": _seed(settings)}
    return {name: value for name, value in options.items() if value is not None}


def _seed(settings: Mapping[str, Any]) -> int | None:
    seed = settings.get("seed")
    return None if seed is None or seed < 0 else int(seed)


def ask(
    engine: Engine, history: Sequence[Mapping[str, Any]], system: str | None, mode: str, settings: Mapping[str, Any]
) -> Request:
    """Submit a conversation whose last message is the user's.

    Raises:
        ValueError: what the processor or generate() refuses, in one line.
    """
    messages = messages_of(history)
    if (system or "").strip():
        messages.insert(0, {"role": "system", "content": system})
    inputs = engine.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return engine.submit(dict(inputs), **options_of(mode, settings))


def messages_of(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The page's history as chat messages: neighbours of one role become one message, pictures before its text.

    Raises:
        ValueError: a file that is no image.
    """
    messages: list[dict[str, Any]] = []
    for entry in history:
        parts = [part for item in _items(entry["content"]) if (part := _part(item)) is not None]
        if messages and messages[-1]["role"] == entry["role"]:
            messages[-1]["content"] += parts
        else:
            messages.append({"role": entry["role"], "content": parts})
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        else:
            # Stable: pictures keep their order, and so do texts.
            message["content"].sort(key=lambda part: part["type"] != "image")
    return messages


def _items(content: Any) -> list[Any]:
    return list(content) if isinstance(content, (list, tuple)) else [content]


def _part(item: Any) -> dict[str, Any] | None:
    if isinstance(item, str):
        return {"type": "text", "text": item} if item else None
    if item.get("type") == "text":
        return {"type": "text", "text": item["text"]} if item["text"] else None
    file = item.get("file", item)
    path = file["path"] if isinstance(file, Mapping) else file
    return {"type": "image", "image": open_image(path)}
