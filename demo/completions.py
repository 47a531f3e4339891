"""From the engine's events to OpenAI's objects: choices, chunks, log-probabilities, usage."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from trimode_vlm.detokenizer import BYTE_TOKEN, is_byte_level
from trimode_vlm.request import Request, TextEvent

# Ours that OpenAI's clients do not know are told as the nearest that they do.
FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length", "cancelled": "stop"}


@dataclass
class Reply:
    """One response: the requests of its prompts (chat has one), in order, and how its objects look.

    `kind` is "chat" or "text"; choices are numbered through, request after request. Take `whole` or `chunks`, once.
    """

    kind: str
    model: str
    tokenizer: Any
    requests: Sequence[Request]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    # Of each choice, the characters of the tokens told so far.
    _offsets: Counter[int] = field(default_factory=Counter)

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()

    def frame(self, **content: Any) -> dict[str, Any]:
        """The fields that every object of the reply has."""
        is_chunk = self.kind == "chat" and content.pop("is_chunk", False)
        content.pop("is_chunk", None)
        names = {"chat": ("chatcmpl-", "chat.completion"), "text": ("cmpl-", "text_completion")}
        prefix, name = names[self.kind]
        return {
            "id": prefix + self.id,
            "object": name + (".chunk" if is_chunk else ""),
            "created": self.created,
            "model": self.model,
            **content,
        }

    async def whole(self) -> dict[str, Any]:
        """Wait for all answers. Raises RequestError where the engine fails."""
        choices: list[dict[str, Any]] = []
        for request in self.requests:
            logprobs: list[list[Any]] = [[] for _ in request.texts]
            async for event in request.events():
                logprobs[event.row] += self._logprobs(event)
            for row, text in enumerate(request.texts):
                index = len(choices)
                choice: dict[str, Any] = {"index": index}
                choice |= {"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text}
                choice["logprobs"] = self._logprob_object(request, index, logprobs[row])
                choice["finish_reason"] = FINISH_REASONS[str(request.generation.rows[row].finish_reason)]
                choices.append(choice)
        return self.frame(choices=choices, usage=usage(self.requests))

    async def chunks(self, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Chunks as the tokens come; prompts of a text completion one after the other."""
        first = 0
        try:
            for request in self.requests:
                if self.kind == "chat":
                    for row in range(len(request.texts)):
                        yield self._chunk(first + row, {"role": "assistant", "content": ""}, include_usage)
                async for event in request.events():
                    for chunk in self._event_chunks(first, request, event, include_usage):
                        yield chunk
                first += len(request.texts)
        finally:
            self.cancel()
        if include_usage:
            yield self.frame(is_chunk=True, choices=[], usage=usage(self.requests))

    def _event_chunks(
        self, first: int, request: Request, event: TextEvent, include_usage: bool
    ) -> Iterator[dict[str, Any]]:
        """What the event brought, then the end of the choice in a chunk without text, as OpenAI tells it."""
        index = first + event.row
        if event.text or event.event.logprobs:
            logprobs = self._logprob_object(request, index, self._logprobs(event))
            yield self._chunk(index, {"content": event.text}, include_usage, logprobs)
        if event.event.finish_reason:
            yield self._chunk(index, {}, include_usage, reason=FINISH_REASONS[event.event.finish_reason])

    def _chunk(
        self, index: int, delta: dict[str, Any], include_usage: bool, logprobs: Any = None, reason: Any = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self.kind == "chat" else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        # OpenAI's: every chunk has the field, null but in the last.
        return self.frame(is_chunk=True, choices=[choice], **({"usage": None} if include_usage else {}))

    def _logprobs(self, event: TextEvent) -> list[Any]:
        """(token id, log-probability, [(id, log-probability), ...]) of each token."""
        values = event.event.logprobs
        if values is None:
            return []
        tops = event.event.top_logprobs or [[] for _ in values]
        return list(zip(event.event.token_ids, values, tops, strict=True))

    def _logprob_object(self, request: Request, index: int, entries: list[Any]) -> dict[str, Any] | None:
        if not request.generation.config.output_logprobs:
            return None
        if self.kind == "chat":
            content = [
                {**self._token(token, value), "top_logprobs": [self._token(t, v) for t, v in top]}
                for token, value, top in entries
            ]
            return {"content": content, "refusal": None}
        texts, offsets = [self._text(token) for token, _, _ in entries], []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [value for _, value, _ in entries],
            "top_logprobs": [{self._text(t): v for t, v in top} for _, _, top in entries],
            "text_offset": offsets,
        }

    def _token(self, token_id: int, value: float) -> dict[str, Any]:
        return {"token": self._text(token_id), "logprob": value, "bytes": list(self._bytes(token_id))}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _bytes(self, token_id: int) -> bytes:
        """Those of the token itself: where it cuts a character, its text has lost them."""
        piece = self.tokenizer.convert_ids_to_tokens(token_id) or ""  # an id that the vocabulary is padded with
        if self._is_byte_level and all(letter in byte_alphabet() for letter in piece):
            return bytes(byte_alphabet()[letter] for letter in piece)
        if not self._is_byte_level and BYTE_TOKEN.match(piece):
            return bytes.fromhex(piece[3:5])
        return self._text(token_id).encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        return is_byte_level(self.tokenizer)


@cache
def byte_alphabet() -> dict[str, int]:
    """The bytes that byte-level BPE's letters stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def most_characters(tokenizer: Any) -> int | None:
    """How many characters one token stands for at most.

    None where that cannot be told: a normalizer, an unknown token or one that takes the blanks beside it may stand for
    any number.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is not None or type(backend.model).__name__ != "BPE":
        return None
    split, vocabulary = repr(backend.pre_tokenizer), tokenizer.get_vocab()
    keeps_all = "ByteLevel" in split and "Removed" not in split and byte_alphabet().keys() <= vocabulary.keys()
    if not keeps_all or any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return None
    # A piece has a letter for each byte, and a character has one byte at least.
    return max(map(len, vocabulary))


def usage(requests: Sequence[Request]) -> dict[str, Any]:
    """OpenAI's counts, and ours: forwards, tokens per forward (micro-averaged over the answers), time to first token.

    The prompt counts once, however many answers it has.
    """
    rows = [row for request in requests for row in request.generation.rows]
    prompt = sum(request.prompt_tokens for request in requests)
    tokens, decode = sum(len(row.token_ids) for row in rows), sum(row.nfe_decode for row in rows)
    started = [row for row in rows if row.token_ids]
    accepted = [n for row in rows for n in row.accepted_lengths]
    first = [row.seconds_to_first_token for row in rows if row.seconds_to_first_token is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in requests)},
        "mode": requests[0].mode,
        "nfe": sum(row.nfe for row in rows),
        "nfe_prefill": sum(row.nfe_prefill for row in rows),
        "tpf": (tokens - len(started)) / decode if decode else 1.0,
        "tpf_end_to_end": tokens / (sum(row.nfe for row in rows) or 1),
        "mean_accepted_length": sum(accepted) / len(accepted) if accepted else None,
        "seconds": max(row.seconds for row in rows),
        "seconds_to_first_token": min(first) if first else None,
    }
