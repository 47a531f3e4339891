"""From the page's history and settings to requests of the engine; nothing here knows Gradio's widgets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimode_vlm.engine import Engine
from trimode_vlm.request import Request
from trimode_vlm.terminal_options import MODE_OPTIONS
from trimode_vlm.vision.images import open_image

COMPARED = tuple(MODE_OPTIONS)
# One line for a visitor, "auto" first.
MODES = {
    "auto": "chooses between ar and drafts as it goes; the text of ar",
    "ar": "one token per forward",
    "diffusion": "denoises a block of tokens together; a text of its own",
    "linear_spec": "drafts a block by diffusion, verifies it in one more forward; the text of ar",
    "quadratic_spec": "verifies one draft and makes the next in the same forward; the text of ar",
}
# The settings that a mode has beside those of all, as far as the page has them.
BY_MODE = ("block_length", "threshold")
MODE_SETTINGS = {mode: tuple(name for name in BY_MODE if name in MODE_OPTIONS[mode]) for mode in MODES}
JOINER = "\u2060"
# What stands below an answer that was cut short, in the chat alone: neither in what the model is given nor in a copy.
MARK = f"\n\n{JOINER}{JOINER}… "


class PictureError(ValueError):
    """A picture that cannot be used; `path` is where it lies."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a visitor may ask for. `timeout_sec`: longest time of an answer, waiting included."""

    timeout_sec: float | None = None
    max_images: int = 16
    max_image_pixels: int = 40_000_000


def ask(
    engine: Engine,
    history: Sequence[Mapping[str, Any]],
    system: str | None,
    mode: str,
    settings: Mapping[str, Any],
    *,
    folders: Sequence[Path],
    limits: Limits,
) -> Request:
    """Submit a conversation whose last message is the user's; its pictures may lie in `folders` only.

    Raises:
        ValueError: what the processor or generate() refuses, in one line.
        RequestError: the engine is full or closed.
    """
    options = options_of(mode, settings)
    messages = messages_of(history, folders, limits)
    if (system or "").strip():
        messages.insert(0, {"role": "system", "content": system})
    inputs = engine.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    return engine.submit(dict(inputs), timeout_sec=limits.timeout_sec, **options)


def options_of(mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """generate()'s options; temperature 0 is greedy, and a setting that the mode does not have is left out.

    Raises:
        ValueError: an unknown mode, or a setting that is no number.
    """
    if mode not in MODE_SETTINGS:
        raise ValueError(f"unknown mode {mode!r} (known: {', '.join(MODES)})")
    options: dict[str, Any] = {"mode": mode, "max_new_tokens": _number(settings, "max_new_tokens", int)}
    for name in MODE_SETTINGS[mode]:
        options[name] = _number(settings, name, int if name == "block_length" else float)
    temperature = _number(settings, "temperature", float) or 0.0
    options["do_sample"] = temperature > 0
    if temperature > 0:
        seed = _number(settings, "seed", int)
        options |= {
            "temperature": temperature,
            "top_p": _number(settings, "top_p", float),
            "seed": None if seed is None or seed < 0 else seed,
        }
    return {name: value for name, value in options.items() if value is not None}


def _number(settings: Mapping[str, Any], name: str, kind: type) -> Any:
    value = settings.get(name)
    try:
        return None if value is None else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: expected a number, got {value!r}") from None


def user_message(value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """What a text box gave (text and files) as a message of the history."""
    value = {"text": value} if isinstance(value, str) else value or {}
    paths = [f["path"] if isinstance(f, Mapping) else str(f) for f in value.get("files") or []]
    files = [{"path": path, "alt_text": Path(path).name} for path in paths]
    text = as_shown((value.get("text") or "").strip())
    return {"role": "user", "content": [*files, *([{"type": "text", "text": text}] if text else [])]}


def clean_history(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The history as it came back from a browser: roles, texts and the paths of files, and nothing else.

    Raises:
        ValueError: a part that is neither text nor a file.
    """
    return [
        {"role": entry["role"], "content": [_clean(part) for part in _items(entry["content"])]} for entry in history
    ]


def _clean(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.get("type") == "text":
        return {"type": "text", "text": str(part["text"])}
    file = part.get("file", part)
    path = file.get("path") if isinstance(file, Mapping) else file
    if not isinstance(path, str):
        raise ValueError("a message holds text and pictures only")
    # Without the address that Gradio adds: given back to it, it would be fetched.
    return {"path": path, "alt_text": Path(path).name}


def as_shown(text: str) -> str:
    """Text that a browser shows letter by letter: Gradio's chat, Markdown or not, takes tags and entities for HTML.

    A word joiner, which takes no room, stands where a tag or an entity would begin; `as_written` takes it out.
    """
    return re.sub(r"([<&])(?=[A-Za-z/!?#])", rf"\1{JOINER}", text)


def as_written(text: str) -> str:
    return re.sub(rf"([<&]){JOINER}", r"\1", text.partition(MARK)[0])


def mark_of(record: Mapping[str, Any]) -> str:
    """What is shown below an answer's text about its end; nothing of an answer that ended by itself or goes on."""
    reasons = {
        "length": f"cut at {record['num_new_tokens']} tokens",
        "cancelled": "stopped",
        "timeout": "out of time",
    }
    reason = reasons.get(record["finish_reason"] or "")
    return MARK + reason if reason else ""


def messages_of(
    history: Sequence[Mapping[str, Any]], folders: Sequence[Path], limits: Limits = Limits()
) -> list[dict[str, Any]]:
    """The page's history as chat messages: neighbours of one role become one message, pictures before its text.

    Raises:
        PictureError: a file that is no image, has too many pixels or lies elsewhere than in `folders`.
        ValueError: too many images; a role.
    """
    messages: list[dict[str, Any]] = []
    for entry in clean_history(history):
        if entry["role"] not in ("user", "assistant"):
            raise ValueError(f"unknown role {entry['role']!r}")
        parts = [part for item in entry["content"] if (part := _part(item, folders, limits)) is not None]
        if messages and messages[-1]["role"] == entry["role"]:
            messages[-1]["content"] += parts
        else:
            messages.append({"role": entry["role"], "content": parts})
    if sum(part["type"] == "image" for message in messages for part in message["content"]) > limits.max_images:
        raise ValueError(f"more than {limits.max_images} pictures in one chat; clear it to begin another")
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        else:
            # Stable: pictures keep their order, and so do texts.
            message["content"].sort(key=lambda part: part["type"] != "image")
    return messages


def _items(content: Any) -> list[Any]:
    return list(content) if isinstance(content, (list, tuple)) else [content]


def _part(part: Mapping[str, Any], folders: Sequence[Path], limits: Limits) -> dict[str, Any] | None:
    if part.get("type") == "text":
        return {"type": "text", "text": as_written(part["text"])} if part["text"] else None
    path = Path(part["path"])
    # The history comes back from the browser, which may name any file.
    if not any(path.resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise PictureError(path, f"{path.name}: not a picture that was uploaded here")
    try:
        image = open_image(str(path), max_pixels=limits.max_image_pixels, name=path.name)
    except ValueError as error:
        raise PictureError(path, str(error)) from error
    return {"type": "image", "image": image}
