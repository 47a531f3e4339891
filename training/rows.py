"""One row of a data set, in any of the formats in use, as chat messages that carry their images."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimode_vlm.bad_samples import BadSample
from trimode_vlm.chat_messages import Message, check_messages, text_of
from trimode_vlm.row_images import ImageFinder, column_images
from trimode_vlm.training.datasets import DataSettings

# Names seen in public data sets of the LLaVA and ShareGPT families.
ROLE_NAMES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("query", "response"),
)  # fmt: skip
KEPT_KEYS = ("tool_calls", "tool_call_id", "name")


@dataclass(frozen=True)
class Example:
    """What a row holds. messages: as `processor.encode_chat` takes them, each image part with its source.

    plain: the row is text without a chat; then `messages` is one assistant message.
    """

    messages: list[Message]
    plain: bool = False

    @property
    def images(self) -> list[Any]:
        """The image sources in order."""
        return [part["image"] for part in self._parts() if part["type"] == "image"]

    def _parts(self) -> Iterator[dict[str, Any]]:
        for message in self.messages:
            yield from message["content"] if isinstance(message["content"], list) else []


def read_row(row: Any, settings: DataSettings, folder: Path) -> Example:
    """Turn a row into an example; relative image paths start from `folder` unless the settings say otherwise.

    Raises:
        BadSample: the row's format is unknown, a role, a text or an image is missing or wrong, or the images do not fit
            the placeholders.
    """
    if not isinstance(row, dict):
        raise BadSample(f"a row must be a mapping of columns, got {type(row).__name__}", "format")
    columns = _Columns(row, settings)
    format_name = settings.format or _detect(columns)
    if format_name == "text":
        messages = [{"role": "assistant", "content": columns.text("text")}]
    elif format_name == "prompt":
        messages = _prompt_and_completion(columns)
    else:
        messages = _turns(columns.need(format_name))
    if columns.get("system") and format_name != "text" and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": columns.text("system")})
    try:
        messages, sources = check_messages(messages)
    except ValueError as error:
        raise BadSample(str(error), "format") from None
    finder = ImageFinder(folder, settings.images, allow_urls=settings.allow_urls)
    given = [finder.find(value) for value in column_images(columns.get("images"), columns.get("image"))]
    sources = [None if source is None else finder.find(source) for source in sources]
    searched = settings.image_placeholder if format_name == "conversations" or columns.has_images() else None
    first = settings.images_first or format_name in ("prompt", "text")
    plain = format_name == "text"
    messages = _place(messages, sources, given, searched, first, answers_too=plain)
    _check_texts(messages, plain)
    return Example(messages, plain)


class _Columns:
    """A row under our column names."""

    def __init__(self, row: dict[str, Any], settings: DataSettings) -> None:
        self.row, self.renamed = row, settings.columns

    def name(self, ours: str) -> str:
        return self.renamed.get(ours, ours)

    def get(self, ours: str) -> Any:
        return self.row.get(self.name(ours))

    def has_images(self) -> bool:
        return self.name("image") in self.row or self.name("images") in self.row

    def need(self, ours: str) -> Any:
        value = self.get(ours)
        if value is None:
            found = ", ".join(map(str, self.row)) or "none"
            raise BadSample(f"there is nothing in column {self.name(ours)!r} (columns: {found})", "format")
        return value

    def text(self, ours: str) -> str:
        value = self.need(ours)
        if not isinstance(value, str):
            raise BadSample(f"column {self.name(ours)!r} must be text, got {type(value).__name__}", "format")
        return value


def _detect(columns: _Columns) -> str:
    for name in ("messages", "conversations"):
        if columns.get(name) is not None:
            return name
    if _pair(columns) is not None:
        return "prompt"
    if columns.get("text") is not None:
        return "text"
    found = ", ".join(map(str, columns.row)) or "none"
    if missing := [theirs for theirs in columns.renamed.values() if theirs not in columns.row]:
        raise BadSample(f"unknown format: no column {missing[0]!r}, which `columns` names (columns: {found})", "format")
    raise BadSample(
        f"unknown format: no column messages, conversations, prompt and completion, or text (columns: {found}); "
        "rename them with columns: {ours: theirs}",
        "format",
    )


def _pair(columns: _Columns) -> tuple[str, str] | None:
    """Return the columns' own names of question and answer, or None."""
    renamed = columns.name("prompt"), columns.name("completion")
    for prompt, answer in (renamed, *PAIRS):
        if columns.row.get(prompt) is not None and columns.row.get(answer) is not None:
            return prompt, answer
    return None


def _prompt_and_completion(columns: _Columns) -> list[Message]:
    """Two texts, or two lists of messages of which the second is trained."""
    pair = _pair(columns)
    if pair is None:
        columns.need("prompt")
        columns.need("completion")
        raise AssertionError("one of the two is missing")
    prompt, answer = (columns.row[name] for name in pair)
    if pair[0] == "instruction" and isinstance(columns.row.get("input"), str) and columns.row["input"]:
        prompt = f"{prompt}\n{columns.row['input']}"
    for name, value in zip(pair, (prompt, answer), strict=True):
        if not isinstance(value, (str, list)):
            raise BadSample(f"column {name!r} must be text, got {type(value).__name__}", "format")
    before = _turns(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    after = _turns(answer) if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    before = [{**message, "train": False} if message["role"] == "assistant" else message for message in before]
    return before + after


def _turns(value: Any) -> list[Message]:
    if isinstance(value, str):  # data sets that keep the whole conversation as JSON in a text column
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise BadSample(f"the conversation is text, but not JSON ({error})", "format") from None
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        # Arrow's older form of a list of structs.
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        raise BadSample(f"a conversation must be a non-empty list of turns, got {_short(value)}", "format")
    return [message for index, turn in enumerate(value) for message in _turn(turn, index)]


def _turn(turn: Any, index: int) -> list[Message]:
    """One turn as messages; {"user": ..., "assistant": ...} gives two."""
    if not isinstance(turn, dict):
        raise BadSample(f"turn {index}: expected a mapping with role and content, got {_short(turn)}", "format")
    name = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    if name is None:
        pairs = [(key, text) for key, text in turn.items() if key in ROLE_NAMES and text is not None]
        if not pairs:
            raise BadSample(f"turn {index}: no role ('role' or 'from') among {', '.join(map(str, turn))}", "role")
        return [{"role": ROLE_NAMES[key], "content": text} for key, text in pairs]
    role = ROLE_NAMES.get(str(name).lower())
    if role is None:
        near = difflib.get_close_matches(str(name), ROLE_NAMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise BadSample(f"turn {index}: unknown role {_short(name)}{hint}", "role")
    content = next((turn[key] for key in ("content", "value", "text") if turn.get(key) is not None), None)
    kept = {key: turn[key] for key in KEPT_KEYS if turn.get(key) is not None}
    if content is None and not (role == "assistant" and turn.get("tool_calls")):
        kind = "empty answer" if role == "assistant" else "format"
        raise BadSample(f"turn {index}: the {role} turn has no text ('content' or 'value')", kind)
    message = {"role": role, "content": "" if content is None else content, **kept}
    return [message if _is_trained(turn, index) else {**message, "train": False}]


def _is_trained(turn: dict[str, Any], index: int) -> bool:
    """`train: false`, or OpenAI's `weight: 0`, leaves an answer out of the loss."""
    for key in ("train", "weight"):
        if turn.get(key) is not None:
            if turn[key] not in (0, 1):
                raise BadSample(
                    f"turn {index}: {key} must be true or false (1 or 0), got {_short(turn[key])}", "format"
                )
            return bool(turn[key])
    return True


def _place(
    messages: list[Message], sources: list[Any], given: list[Any], placeholder: str | None, first: bool,
    answers_too: bool,
) -> list[Message]:  # fmt: skip
    """Give every image part its source; `placeholder` in a text becomes a part, `given` are a row's own images.

    sources: one for each image part, None where it takes the next of `given`.
    """
    messages = [
        {**m, "content": _split(m["content"], placeholder)}
        if placeholder and isinstance(m["content"], str) and (answers_too or m["role"] != "assistant")
        else m
        for m in messages
    ]
    rest = iter(sources)
    parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] == "image"]
    # A part that came from a placeholder has the key already, with nothing in it.
    found = [part.get("image") if "image" in part else next(rest) for part in parts]
    num_open = sum(source is None for source in found)
    if given and not num_open and first:
        return _put_first(_filled(messages, iter(found)), given)
    if num_open != len(given):
        hint = "; put them where the images belong, or set images_first: true" if not num_open else ""
        what = f"image placeholders ({placeholder})" if placeholder else "image placeholders"
        raise BadSample(f"found {num_open} {what} but received {len(given)} images{hint}", "image count")
    own = iter(given)
    return _filled(messages, iter([next(own) if source is None else source for source in found]))


def _filled(messages: list[Message], sources: Iterator[Any]) -> list[Message]:
    return [
        {
            **m,
            "content": [
                {"type": "image", "image": next(sources)} if p["type"] == "image" else p for p in m["content"]
            ],
        }
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]  # fmt: skip


def _put_first(messages: list[Message], images: list[Any]) -> list[Message]:
    place = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages) - 1)
    content = messages[place]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = [*({"type": "image", "image": image} for image in images), *parts]
    return [{**m, "content": parts} if i == place else m for i, m in enumerate(messages)]


def _split(text: str, placeholder: str) -> str | list[dict[str, Any]]:
    """Cut a text at its placeholders; LLaVA's line break between leading or trailing placeholders and text goes."""
    pieces = text.split(placeholder)
    if len(pieces) == 1:
        return text
    for i in range(len(pieces) - 1):  # pieces[i] stands before placeholder i
        if any(pieces[: i + 1]):
            break
        pieces[i + 1] = pieces[i + 1].removeprefix("\n")
    for i in range(len(pieces) - 1, 0, -1):
        if any(pieces[i:]):
            break
        pieces[i - 1] = pieces[i - 1].removesuffix("\n")
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(pieces):
        parts += [{"type": "image", "image": None}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _check_texts(messages: list[Message], plain: bool) -> None:
    num_trained = 0
    for index, message in enumerate(messages):
        text = text_of(message)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadSample(f"turn {index}: the text holds half a character (a lone surrogate)", "unicode") from None
        if message["role"] != "assistant":
            continue
        if not plain and any(part["type"] == "image" for part in message["content"] if isinstance(part, dict)):
            raise BadSample(f"turn {index}: an answer holds an image, which a model cannot write", "format")
        if message.get("train") is not False:
            num_trained += 1
            if not text.strip() and not message.get("tool_calls"):
                what = "the text" if plain else f"turn {index}: the answer"
                raise BadSample(f"{what} is empty", "empty answer")
    if not num_trained:
        raise BadSample("there is no answer to train on", "no answer")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
