"""Chat messages: checked, brought to one form, and parted from their images."""

from __future__ import annotations

import difflib
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
IMAGE_KEYS = ("image", "url", "path", "base64")

Message = dict[str, Any]


def check_messages(messages: Any) -> tuple[list[Message], list[Any]]:
    """Return a copy of `messages` with plain content parts, and the image sources in order of appearance.

    Parts become {"type": "text", "text": ...} or {"type": "image"}; a source is None where the part names none.

    Raises:
        ValueError: no messages, an unknown role or part type, or content that is neither text nor parts.
    """
    messages = getattr(messages, "messages", messages)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    checked, sources = [], []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f"message {index}: expected {{'role': ..., 'content': ...}}, got {type(message).__name__}")
        if message["role"] not in ROLES:
            near = difflib.get_close_matches(str(message["role"]), ROLES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"message {index}: unknown role {message['role']!r}{hint}; known: {', '.join(ROLES)}")
        message = {key: value for key, value in message.items() if value is not None}
        content = message.get("content", "" if message.get("tool_calls") else None)
        if isinstance(content, (list, tuple)):
            parts = [_check_part(part, index) for part in content]
            sources += [source for kind, source in parts if kind == "image"]
            content = [{"type": "image"} if k == "image" else {"type": "text", "text": v} for k, v in parts]
        elif not isinstance(content, str):
            raise ValueError(f"message {index}: content must be text or a list of parts, got {type(content).__name__}")
        checked.append({**message, "content": content})
    return checked, sources


def _check_part(part: Any, index: int) -> tuple[str, Any]:
    """Return ("text", text) or ("image", source or None) for one content part."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return "text", part["text"]
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if url is None:
            raise ValueError(f"message {index}: an image_url part needs {{'image_url': {{'url': ...}}}}")
        return "image", url
    if kind == "image":
        found = [key for key in IMAGE_KEYS if part.get(key) is not None]
        if len(found) > 1:
            raise ValueError(f"message {index}: an image part names {len(found)} sources: {', '.join(found)}")
        if not found:
            return "image", None
        source = part[found[0]]
        return "image", f"data:;base64,{source}" if found[0] == "base64" else source
    raise ValueError(f"message {index}: unknown content part {kind!r}; known: text, image, image_url")


def adapt_content(messages: list[Message], takes: tuple[bool, bool], image_token: str | None) -> list[Message]:
    """Bring each message's content to the form that the template reads; takes: (a list of parts, text)."""
    takes_parts, takes_text = takes
    adapted = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and not takes_text and takes_parts:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and takes_text:
            only_text = all(part["type"] == "text" for part in content)
            # Many templates read parts in user messages only.
            if not takes_parts or (only_text and message["role"] != "user" and len(content) <= 1):
                content = "".join(p["text"] if p["type"] == "text" else image_token or "" for p in content)
        adapted.append({**message, "content": content})
    return adapted


def text_of(message: Message) -> str:
    """Return the text of a checked message, its parts joined."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")
