"""When an answer ends, and when the thought in it must: end tokens, stop strings, criteria, the thinking budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .detokenizer import IncrementalDetokenizer

# How thoughts open and close in the tokenizers of the models that load; the first pair that a tokenizer has counts.
THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class StopRules:
    """What ends one row. `token_ids` is the row's own list of emitted tokens, the newest last.

    Args:
        criteria: transformers' stopping criteria, asked after every token with all ids [1, T].
    """

    def __init__(
        self,
        prompt_ids: list[int],
        token_ids: list[int],
        end_token_ids: Collection[int],
        stopper: IncrementalDetokenizer | None,
        criteria: Sequence[Any],
        device: torch.device,
    ) -> None:
        self._prompt_ids, self._token_ids, self._end_token_ids = prompt_ids, token_ids, end_token_ids
        self._stopper, self._criteria, self._device = stopper, criteria, device

    def stops(self) -> bool:
        """Whether the newest token ends the answer; call it once per token."""
        token = self._token_ids[-1]
        if token in self._end_token_ids:
            return True
        if self._stopper is not None:
            self._stopper.put([token])
            if self._stopper.stopped:
                return True
        if self._criteria:
            ids = torch.tensor([self._prompt_ids + self._token_ids], device=self._device)
            return any(bool(torch.as_tensor(rule(ids, None)).all()) for rule in self._criteria)
        return False


def make_stopper(tokenizer: Any, stop_strings: str | Iterable[str]) -> IncrementalDetokenizer:
    """A reader of one row's answer that notices stop strings; special tokens are text where a stop string has one.

    Raises:
        ValueError: there is no tokenizer; a stop string is empty or no string.
    """
    if tokenizer is None:
        raise ValueError("stop_strings needs tokenizer=, to read the answer as text")
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if odd := [s for s in strings if not isinstance(s, str) or not s]:
        raise ValueError(f"a stop string must be text and not empty, got {odd[0]!r}")
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    special = [t.content for t in inner.added_tokens_decoder.values() if t.special]
    names_special = any(content in s for content in special for s in strings)
    return IncrementalDetokenizer(inner, skip_special_tokens=not names_special, stop_strings=strings)


@dataclass(kw_only=True)
class Thought:
    """The first thought of one answer; places count the answer's tokens from 0.

    Attributes:
        budget: tokens that it may have before `end_id` is forced; `end_id` itself is not among them.
        start_id: the token that opens a thought; None: the answer is one from its first token on.
        start: place of the first token of the thought; end: place of the token that closed it; None: not yet.
        num_emitted: tokens of the answer so far.
    """

    budget: int
    start_id: int | None
    end_id: int
    start: int | None = None
    end: int | None = None
    num_emitted: int = 0

    @classmethod
    def of(cls, budget: int, start_id: int | None, end_id: int, prompt_ids: Sequence[int]) -> Thought:
        """A thought that the prompt opened and did not close is under way."""
        thought = cls(budget=budget, start_id=start_id, end_id=end_id)
        last_mark = next((t for t in reversed(prompt_ids) if t in (start_id, end_id)), None)
        if start_id is None or last_mark == start_id:
            thought.start = 0
        return thought

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of the thought, the one that closed it included."""
        if self.start is None:
            return 0
        return max(0, (self.num_emitted if self.end is None else self.end + 1) - self.start)

    def put(self, token: int) -> None:
        """Follow the answer by one token."""
        place, self.num_emitted = self.num_emitted, self.num_emitted + 1
        if self.start is None:
            self.start = place + 1 if token == self.start_id else None
        elif self.end is None and token == self.end_id:
            self.end = place

    def closing_place(self, ids: Sequence[int], first: int) -> int | None:
        """Where `end_id` must stand, given the ids at the places from `first` on; None: nowhere that can be told yet.

        A thought that is closed, by itself or by force, is never closed again. The place may lie behind `ids`.
        """
        if self.end is not None:
            return None
        start = self.start
        if start is None:
            if self.start_id is None or self.start_id not in ids:
                return None
            start = first + list(ids).index(self.start_id) + 1
        place = max(start + self.budget, self.num_emitted)
        return None if self.end_id in ids[max(0, start - first) : max(0, place - first)] else place


def thought_marks(config: Any, tokenizer: Any, forbids: Callable[[int], bool]) -> tuple[int | None, int]:
    """(the token that opens a thought, or None; the token that closes it), as given or as the tokenizer has them.

    Raises:
        ValueError: no closing token is given or found; no answer may hold it.
    """
    vocabulary = {} if tokenizer is None else getattr(tokenizer, "tokenizer", tokenizer).get_vocab()
    known = [(vocabulary.get(start), vocabulary[end]) for start, end in THOUGHT_MARKS if end in vocabulary]
    start_id, end_id = config.start_of_thought_token_id, config.end_of_thought_token_id
    if end_id is None:
        if not known:
            marks = " or ".join(end for _, end in THOUGHT_MARKS)
            raise ValueError(f"thinking_budget needs end_of_thought_token_id=, or tokenizer= with {marks} as one token")
        end_id = known[0][1]
    if start_id is None:
        start_id = next((start for start, end in known if end == end_id), None)
    if forbids(end_id):
        raise ValueError(f"end_of_thought_token_id {end_id} is banned or no token, so that no thought could be closed")
    if start_id == end_id:
        raise ValueError(f"start_of_thought_token_id and end_of_thought_token_id are both {end_id}")
    return start_id, end_id
