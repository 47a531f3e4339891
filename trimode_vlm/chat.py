"""Chat messages to token ids: checked messages, special tokens that users cannot type, and the spans of the answers."""

from __future__ import annotations

import difflib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

ROLES = ("system", "user", "assistant", "tool")
IMAGE_KEYS = ("image", "url", "path", "base64")
THINK_TOKENS = ("<think>", "</think>", "[THINK]", "[/THINK]")
_EMPTY_THINK = re.compile(r"<think>\s*</think>\s*$")
_PRIVATE_CHARACTERS = range(0xF0000, 0xFFFFE)

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]


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
            raise ValueError(f"message {index}: expected a dict with 'role' and 'content', got {type(message).__name__}")
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


def adapt_content(messages: list[Message], takes_parts: bool, takes_text: bool, image_token: str | None) -> list[Message]:
    """Bring each message's content to the form that the template reads: text, or a list of parts."""
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


class Shield:
    """Stands between user text and the tokenizer: literals of special tokens become private characters and back.

    A literal that crosses two adjacent text parts is broken by an (empty) private character at the seam.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        literals = sorted(set(literals), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, literals)) or r"(?!)")
        without_think = [literal for literal in literals if literal not in THINK_TOKENS]
        # An assistant's own thinking marks, in the history or in training data, stay what they are.
        self._assistant_pattern = re.compile("|".join(map(re.escape, without_think)) or r"(?!)")
        self.restore: dict[str, str] = {}
        self._free: Iterator[str] = iter(())

    def cover(self, value: Any, role: str = "user") -> Any:
        """Return a copy of `value` (text, or nested lists and dicts of it) in which no special literal is left."""
        if not self.restore:
            taken = set(json.dumps(value, ensure_ascii=False, default=str))
            self._free = (c for c in map(chr, _PRIVATE_CHARACTERS) if c not in taken)
        return self._cover(value, role)

    def _cover(self, value: Any, role: str) -> Any:
        if isinstance(value, str):
            pattern = self._assistant_pattern if role == "assistant" else self._pattern
            return pattern.sub(lambda match: self._private(match.group()), value)
        if isinstance(value, dict):
            role = value.get("role", role) if isinstance(value.get("role"), str) else role
            return {k: v if k in ("role", "type") else self._cover(v, role) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            covered = [self._cover(item, role) for item in value]
            for left, right in zip(covered, covered[1:], strict=False):
                if _is_text(left) and _is_text(right) and self._meet(left["text"], right["text"]):
                    left["text"] += self._private("")
            return covered
        return value

    def _meet(self, left: str, right: str) -> bool:
        return any(m.start() < len(left) < m.end() for m in self._pattern.finditer(left + right))

    def _private(self, literal: str) -> str:
        for character, known in self.restore.items():
            if known == literal:
                return character
        character = next(self._free)
        self.restore[character] = literal
        return character

    def uncover(self, text: str) -> str:
        """Put the literals back."""
        return text.translate(str.maketrans(self.restore)) if self.restore else text


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


@dataclass(frozen=True)
class Span:
    """Characters start..stop of a rendered chat: one answer and the token that ends it."""

    start: int
    stop: int


def answer_spans(
    messages: list[Message], render: Render, end_tokens: re.Pattern[str], full: str
) -> tuple[str, list[Span]]:
    """Return the rendered chat and the spans of its trained answers, from prefix renderings of the template.

    An answer starts where the prompt for it ends and stops after the first of `end_tokens`. Where the prompt ends in
    an empty thinking block that the template leaves out of the history, the block is put before the answer, as at
    inference. A message with `train: False` gives no span.

    Raises:
        ValueError: the prompt is not a prefix of the chat, or the answer has no end token.
    """
    spans, insertions = [], []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("train") is False:
            continue
        prompt = render(messages[:index], True)
        start, block = len(prompt), ""
        if not full.startswith(prompt):
            think = _EMPTY_THINK.search(prompt)
            if think is None or not full.startswith(prompt[: think.start()]):
                raise ValueError(
                    f"message {index}: the prompt that the chat template renders for this answer is not a prefix of "
                    "the rendered chat, so the answer cannot be located"
                )
            start = think.start()
            if not full[start:].lstrip().startswith("<think>"):
                block = think.group()
        end = end_tokens.search(full, start)
        if end is None:
            raise ValueError(f"message {index}: the chat template does not close an answer with an end token")
        if end.start() == start and _text_of(message).strip():
            raise ValueError(
                f"message {index}: the chat template renders {end.group()!r} where the answer should start; "
                "does it support add_generation_prompt?"
            )
        if block:
            insertions.append((start, block))
        spans.append(Span(start, end.end()))
    return _insert(full, spans, insertions)


def _insert(full: str, spans: list[Span], insertions: list[tuple[int, str]]) -> tuple[str, list[Span]]:
    def shift(position: int) -> int:
        return position + sum(len(block) for at, block in insertions if at <= position)

    for at, block in sorted(insertions, reverse=True):
        full = full[:at] + block + full[at:]
    return full, [Span(shift(span.start), shift(span.stop)) for span in spans]


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(p["text"] for p in content if p["type"] == "text")


class ChatEncoder:
    """Tokenises rendered chats so that only the template writes control tokens.

    It owns a copy of the tokenizer in which every control token has a random name. The rendered chat's own control
    tokens are renamed with it, user text is not; so one encoding of the whole chat gives ids and true offsets, the
    ids of a chat without literals are those of the plain tokenizer, and nothing that a user types is a control token.
    """

    def __init__(self, tokenizer: Any, extra: Iterable[str] = ()) -> None:
        added = tokenizer.added_tokens_decoder
        extra = set(extra)
        self.control = {t.content: i for i, t in added.items() if t.special or t.content in extra}
        self.control.update({t.content: i for i, t in added.items() if t.content in THINK_TOKENS})
        longest_first = sorted(self.control, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._tokenizer = tokenizer
        self._copy: Tokenizer | None = None
        self._names: dict[str, str] = {}
        self._ids: dict[int, int | None] = {}
        self._boundary = ""

    def __deepcopy__(self, memo: Any) -> ChatEncoder:
        return self  # saving a processor deep-copies its attributes; this one is a cache

    def end_pattern(self, not_ends: Iterable[str]) -> re.Pattern[str]:
        """Return a pattern of the control tokens that can end an answer: all but thinking marks and `not_ends`."""
        ends = sorted(set(self.control) - set(THINK_TOKENS) - set(not_ends), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, ends)) or r"(?!)")

    def encode(self, rendered: str, restore: dict[str, str], spans: list[Span] | None = None) -> tuple[list[int], list[range]]:
        """Return the ids of a rendered chat and, per span, the range of token indices that it covers.

        Args:
            rendered: the chat, with private characters where user text held special literals.
            restore: private character -> literal (`Shield.restore`).
            spans: answers, each ending with a control token.
        """
        if not restore and not spans:
            return self._tokenizer(rendered, add_special_tokens=False)["input_ids"], []
        spans = spans or []
        encoding, starts, stops = self._encode_marked(rendered, restore, spans, frozenset())
        # A token that begins before an answer and ends in it never occurs at inference, where the prompt is complete.
        cut = {i for i, at in enumerate(starts) if any(a < at < b for a, b in encoding.offsets)}
        if cut:
            encoding, starts, stops = self._encode_marked(rendered, restore, spans, frozenset(cut))
        kept = [(self._ids.get(i, i), at) for i, at in zip(encoding.ids, encoding.offsets, strict=True)]
        kept = [(i, at) for i, at in kept if i is not None]
        ranges = []
        for start, stop in zip(starts, stops, strict=True):
            first = next(k for k, (_, at) in enumerate(kept) if at[0] >= start)
            last = next(k for k, (_, at) in enumerate(kept) if at[1] == stop and k >= first)
            ranges.append(range(first, last + 1))
        return [i for i, _ in kept if i is not None], ranges

    def _encode_marked(
        self, rendered: str, restore: dict[str, str], spans: list[Span], cut: frozenset[int]
    ) -> tuple[Any, list[int], list[int]]:
        """Encode with renamed control tokens; also return the spans' ends in the renamed text."""
        self._build_copy()
        assert self._copy is not None
        table = str.maketrans(restore)
        starts, stops = {span.start: i for i, span in enumerate(spans)}, {span.stop: i for i, span in enumerate(spans)}
        edges = sorted({0, len(rendered), *starts, *stops})
        pieces: list[str] = []
        length = 0
        new_starts, new_stops = [0] * len(spans), [0] * len(spans)
        for left, right in zip(edges, [*edges[1:], len(rendered)], strict=True):
            if left in stops:
                new_stops[stops[left]] = length
            if left in starts:
                if starts[left] in cut:
                    pieces.append(self._boundary)
                    length += len(self._boundary)
                new_starts[starts[left]] = length
            piece = self._rename(rendered[left:right], table)
            pieces.append(piece)
            length += len(piece)
        return self._copy.encode("".join(pieces), add_special_tokens=False), new_starts, new_stops

    def _rename(self, text: str, table: dict[int, str]) -> str:
        pieces, last = [], 0
        for match in self.pattern.finditer(text):
            pieces += [text[last : match.start()].translate(table), self._names[match.group()]]
            last = match.end()
        return "".join([*pieces, text[last:].translate(table)])

    def _build_copy(self) -> None:
        if self._copy is not None:
            return
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("this needs a fast tokenizer (tokenizer.json); got " + type(self._tokenizer).__name__)
        blueprint = json.loads(backend.to_str())
        # Post-processors only trim offsets or add BOS here; padding and truncation are the processor's work.
        blueprint.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        copy = Tokenizer.from_str(json.dumps(blueprint, ensure_ascii=False))
        nonce = secrets.token_hex(8)
        names = {content: f"\U000ffffd{nonce}:{i}\U000ffffd" for i, content in enumerate(self.control)}
        self._boundary = f"\U000ffffd{nonce}|\U000ffffd"
        new_content = {}
        for token_id, token in self._tokenizer.added_tokens_decoder.items():
            content = names.get(token.content, token.content)
            new_content[content] = token_id
            copy.add_tokens([
                AddedToken(
                    content, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word,
                    normalized=token.normalized and content == token.content, special=token.special,
                )
            ])  # fmt: skip
        copy.add_tokens([AddedToken(self._boundary, normalized=False, special=True)])
        self._ids = {copy.token_to_id(content): token_id for content, token_id in new_content.items()}
        self._ids[copy.token_to_id(self._boundary)] = None
        self._names, self._copy = names, copy
