"""Token ids to text while they arrive: no broken characters, no leaked stop strings, linear time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>$")
_UNKNOWN = "\ufffd"


class IncrementalDetokenizer:
    """Turns ids into text piece by piece; the pieces joined equal `tokenizer.decode` of all ids.

    Args:
        tokenizer: a transformers tokenizer or processor.
        skip_special_tokens: leave special tokens out of the text.
        stop_strings: the text ends before the first of these to be completed, however the ids are cut.

    Attributes:
        stopped: a stop string was found; later ids give no text.
        stop_string: which one.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool = True, stop_strings: str | Iterable[str] | None = None
    ) -> None:
        self._tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self._skipped: set[int] = set()
        if skip_special_tokens:
            self._skipped = {i for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or [])
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # Byte-level BPE cuts characters between tokens; elsewhere unknown characters are final, and rare ones are
        # spelt in byte tokens. A tokenizer that does not show its decoder may do either.
        byte_level = is_byte_level(self._tokenizer)
        self._joins_bytes = backend is None or byte_level
        self._has_byte_tokens = not byte_level
        self.stopped = False
        self.stop_string: str | None = None
        self._window: list[int] = []  # context tokens, whose text is out, then pending tokens
        self._context = 0
        self._emitted = ""  # the text of the context
        self._held = ""  # text that could be the start of a stop string

    def put(self, ids: Any) -> str:
        """Take new ids (an int, a list or a tensor of one row) and return the text that is now certain."""
        if self.stopped:
            return ""
        return self._filter_stops(self._decode_new(ids))

    def end(self) -> str:
        """Return the rest of the text, incomplete characters included; nothing after a stop string."""
        text = "" if self.stopped else self._filter_stops(self._flush())
        text, self._held = text + self._held, ""
        self._window, self._context, self._emitted = [], 0, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _decode_new(self, ids: Any) -> str:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        ids = [ids] if isinstance(ids, int) else ids
        flat = [i for item in ids for i in (item if isinstance(item, (list, tuple)) else [item])]
        self._window += [i for i in flat if i not in self._skipped]
        if len(self._window) == self._context:
            return ""
        if self._has_byte_tokens and self._is_byte_token(self._window[-1]):
            return ""  # the fate of a run of byte tokens is known at its end: one bad byte spoils all of it
        text = self._decode(self._window)
        if self._joins_bytes and text.endswith(_UNKNOWN):
            return self._advance_part(text)
        return self._advance(len(self._window), text)

    def _is_byte_token(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and BYTE_TOKEN.match(token) is not None

    def _advance(self, upto: int, text: str) -> str:
        """Emit the text of window[:upto] beyond the context; its pending tokens become the next context."""
        if not text.startswith(self._emitted) or text == self._emitted:
            return ""
        new = text[len(self._emitted) :]
        self._window = self._window[self._context :]
        self._context = upto - self._context
        self._emitted = self._decode(self._window[: self._context])
        return new

    def _advance_part(self, text: str) -> str:
        """Emit what stands before an unknown character at the end, which the next token may complete.

        A cut is safe where both sides, decoded alone, give the whole: then no character crosses it. A character has at
        most four bytes, so one of the last four cuts is.
        """
        for cut in range(len(self._window) - 1, max(self._context, len(self._window) - 5), -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if tail and head + tail == text:
                return self._advance(cut, head)
        return ""

    def _flush(self) -> str:
        text = self._decode(self._window) if self._window else ""
        return text[len(self._emitted) :] if text.startswith(self._emitted) else text

    def _filter_stops(self, new: str) -> str:
        if not self._stops or not new:
            return new
        text, start = self._held + new, len(self._held)
        # The first stop string to be completed wins, so that the result does not depend on how the ids are cut.
        hits = [(text.find(s, max(0, start - len(s) + 1)) + len(s), -len(s), s) for s in self._stops if s in text]
        if hits:
            stop_at, _, self.stop_string = min(hits)
            self.stopped, self._held = True, ""
            return text[: stop_at - len(self.stop_string)]
        hold = max(_overlap(text, s) for s in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def is_byte_level(tokenizer: Any) -> bool:
    """Whether each letter of a token stands for a byte, as far as the tokenizer shows its decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a start of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
