"""Control tokens are the template's alone: what users type stays text, and one encoding gives ids and spans."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

THINK_TOKENS = ("<think>", "</think>", "[THINK]", "[/THINK]")
_PRIVATE_CHARACTERS = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class Span:
    """Characters start..stop of a rendered chat: one answer and the token that ends it."""

    start: int
    stop: int


class ControlEncoder:
    """Tokenises rendered chats so that only the template writes control tokens.

    It owns a copy of the tokenizer in which every control token has a random name. The rendered chat's own control
    tokens are renamed with it, user text is not; so one encoding of the whole chat gives ids and true offsets, the
    ids of a chat without literals are those of the plain tokenizer, and nothing that a user types is a control token.
    """

    def __init__(self, tokenizer: Any, extra: Iterable[str] = ()) -> None:
        added = tokenizer.added_tokens_decoder
        control = {*extra, *THINK_TOKENS}
        self.control = {token.content: i for i, token in added.items() if token.special or token.content in control}
        self.pattern = _any_of(self.control)
        # An assistant's own thinking marks, in the history or in training data, stay what they are.
        self.assistant_pattern = _any_of(set(self.control) - set(THINK_TOKENS))
        self._tokenizer = tokenizer
        self._ends: dict[frozenset[str], re.Pattern[str]] = {}
        self._copy: Tokenizer | None = None
        self._names: dict[str, str] = {}
        self._ids: dict[int, int | None] = {}
        self._boundary = ""

    def __deepcopy__(self, memo: Any) -> ControlEncoder:
        return self  # saving a processor deep-copies its attributes; this one is a cache

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None}  # built again where it is needed

    def end_pattern(self, not_ends: Iterable[str]) -> re.Pattern[str]:
        """Return a pattern of the control tokens that can end an answer: all but thinking marks and `not_ends`."""
        excluded = frozenset(not_ends)
        if excluded not in self._ends:
            self._ends[excluded] = _any_of(set(self.control) - set(THINK_TOKENS) - excluded)
        return self._ends[excluded]

    def encode(
        self, rendered: str, restore: dict[str, str], spans: list[Span] | None = None
    ) -> tuple[list[int], list[range]]:
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
        table = {ord(private): literal for private, literal in restore.items()}
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
        # Shares the model, has no added tokens yet, and no post-processor: those only trim offsets or add BOS here.
        copy = Tokenizer(backend.model)
        if backend.normalizer is not None:
            copy.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            copy.pre_tokenizer = backend.pre_tokenizer
        nonce = secrets.token_hex(8)
        names = {content: f"\U000ffffd{nonce}:{i}\U000ffffd" for i, content in enumerate(self.control)}
        self._boundary = f"\U000ffffd{nonce}|\U000ffffd"
        self._ids, new_content = {}, {}
        tokens = [AddedToken(self._boundary, normalized=False, special=True)]
        for token_id, token in self._tokenizer.added_tokens_decoder.items():
            content = names.get(token.content, token.content)
            new_content[content] = token_id
            renamed = AddedToken(
                content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized and content == token.content,
                special=token.special,
            )
            tokens.append(renamed)
        copy.add_tokens(tokens)  # at once: each call rebuilds the matcher
        for content, token_id in [*new_content.items(), (self._boundary, None)]:
            copied_id = copy.token_to_id(content)
            assert copied_id is not None
            self._ids[copied_id] = token_id
        self._names, self._copy = names, copy


class Shield:
    """Stands between user text and the tokenizer: literals of special tokens become private characters and back.

    A literal that crosses two adjacent text parts is broken by an (empty) private character at the seam.
    """

    def __init__(self, encoder: ControlEncoder) -> None:
        self._encoder = encoder
        self.restore: dict[str, str] = {}
        self._free: Iterator[str] = iter(())

    def cover(self, value: Any, role: str = "user") -> Any:
        """Return a copy of `value` (text, or nested lists and dicts of it) in which no special literal is left."""
        taken = set(json.dumps(value, ensure_ascii=False, default=str)) | set(self.restore)
        self._free = (c for c in map(chr, _PRIVATE_CHARACTERS) if c not in taken)
        return self._cover(value, role)

    def _cover(self, value: Any, role: str) -> Any:
        if isinstance(value, str):
            pattern = self._encoder.assistant_pattern if role == "assistant" else self._encoder.pattern
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
        return any(m.start() < len(left) < m.end() for m in self._encoder.pattern.finditer(left + right))

    def _private(self, literal: str) -> str:
        for character, known in self.restore.items():
            if known == literal:
                return character
        character = next(self._free)
        self.restore[character] = literal
        return character

    def uncover(self, text: str) -> str:
        """Put the literals back."""
        return text.translate({ord(private): literal for private, literal in self.restore.items()})


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    # Longest first, as the tokenizer matches them; (?!) matches nothing.
    return re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)")
