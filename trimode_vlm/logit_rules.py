"""What changes logits before a token is chosen: biases, bans, penalties, the end of a thought, users' processors.

Three kinds, by what they look at:
- the token alone (logit_bias, suppress_tokens, bad words and biased sequences of one token): one add, on all logits;
- the place (end tokens before min_new_tokens, the forced end of a thought): on causal logits, drafts and denoising;
- the tokens before (repetition_penalty, bad words and biased sequences of several tokens, logits_processor): on causal
  logits, each position with what stands before it. These are transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from .stops import Thought

MAX_LOGIT_BIAS = 100.0
_NEVER = float("-inf")
# Processors may leave the range of float32, and then no distribution is left to draw from.
_LARGEST = 1e30


@dataclass(frozen=True, kw_only=True)
class LogitRules:
    """What one request asks for.

    Attributes:
        bias: float32 [V] or None. banned: ids that no answer may hold, whatever is asked for.
        min_new_tokens: until then `end_ids` (LongTensor) are banned.
        processors: of transformers, called with one row per position, padded on the left with V, which is no token.
        user_processors: called position by position with unpadded ids [1, T], as transformers calls them.
    """

    bias: Tensor | None = None
    banned: Collection[int] = ()
    vocab_size: int = 0
    min_new_tokens: int = 0
    end_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    processors: Sequence[Any] = ()
    user_processors: Sequence[Any] = ()

    def forbids(self, token_id: int) -> bool:
        """Whether no answer can hold the token."""
        is_token = 0 <= token_id < self.vocab_size and token_id not in self.banned
        return not is_token or (self.bias is not None and float(self.bias[token_id]) == _NEVER)

    def in_context(self, logits_TV: Tensor, ids: list[int], length: int) -> Tensor:
        """Apply `processors`; position t has seen ids[: length + t]."""
        if not self.processors:
            return logits_TV
        T, V = logits_TV.shape
        known = torch.tensor(ids, device=logits_TV.device)
        seen = length + torch.arange(T, device=known.device)[:, None]
        place = torch.arange(len(ids), device=known.device) + seen - len(ids)
        context = torch.where(place < 0, V, known[place.clamp(min=0)])
        for processor in self.processors:
            logits_TV = processor(context, logits_TV)
        return logits_TV

    def by_users(self, logits_TV: Tensor, ids: list[int], length: int) -> Tensor:
        """Apply `user_processors`; position t has seen ids[: length + t]."""
        if not self.user_processors:
            return logits_TV
        known = torch.tensor([ids], device=logits_TV.device)
        out = []
        for t, scores in enumerate(logits_TV):
            for processor in self.user_processors:
                scores = processor(known[:, : length + t], scores[None])[0]
            out.append(scores)
        return torch.stack(out)


@dataclass
class RowRules:
    """The rules of one row, with what they look at; `token_ids` is the row's own list of emitted tokens.

    Attributes:
        num_top: how many likely tokens are reported beside each emitted one's log-probability; None: none is.
        first_logits: the head's own logits [V] behind the prompt, until the first token is chosen by them.
    """

    shared: LogitRules
    prompt_ids: list[int]
    token_ids: list[int]
    thought: Thought | None = None
    num_top: int | None = None
    first_logits: Tensor | None = None

    @property
    def act(self) -> bool:
        """Whether `behind` or `own` may change anything from here on."""
        shared = self.shared
        holds_ends = len(self.token_ids) < shared.min_new_tokens
        thinks = self.thought is not None and self.thought.end is None
        return bool(shared.processors or shared.user_processors or holds_ends or thinks)

    def behind(self, logits_TV: Tensor, ids: list[int], length: int) -> Tensor:
        """Causal logits. `ids` stand behind the row's first `length` tokens, the last position has seen all of them."""
        start, lead = length - len(self.prompt_ids), len(ids) - len(logits_TV) + 1
        known = (
            (self.prompt_ids + self.token_ids)[:length] + ids
            if self.shared.processors or self.shared.user_processors
            else []
        )
        logits_TV = self.shared.in_context(logits_TV, known, length + lead)
        logits_TV = self._without_ends(logits_TV, start + lead)
        logits_TV = self.shared.by_users(logits_TV, known, length + lead)
        if known:
            logits_TV = logits_TV.nan_to_num(_NEVER, _LARGEST, _NEVER).clamp(max=_LARGEST)
        place = self.thought.closing_place(ids, start) if self.thought else None
        return logits_TV if place is None else self._close(logits_TV, place - start - lead)

    def own(self, logits_TV: Tensor, ids: list[int], length: int) -> Tensor:
        """Logits of the last places of a block `ids` behind the row's first `length` tokens, each of its own token."""
        start, skip = length - len(self.prompt_ids), len(ids) - len(logits_TV)
        logits_TV = self._without_ends(logits_TV, start + skip)
        place = self.thought.closing_place(ids, start) if self.thought else None
        if place is None:
            return logits_TV
        t = place - start - skip
        logits_TV = self._close(logits_TV, t)
        # What closes at `place` at the latest is not to be closed again by a guess made beside it.
        logits_TV[max(t, -1) + 1 :, self._end_of_thought] = _NEVER
        return logits_TV

    def held(self, ids: list[int], length: int, mask_token_id: int) -> int | None:
        """The place in diffusion's block that must wait for those before it: they decide if a thought closes there."""
        start = length - len(self.prompt_ids)
        place = self.thought.closing_place(ids, start) if self.thought else None
        if place is None or place - start >= len(ids) or mask_token_id not in ids[: place - start]:
            return None
        return place - start

    @property
    def _end_of_thought(self) -> int:
        assert self.thought is not None
        return self.thought.end_id

    def _without_ends(self, logits_TV: Tensor, first: int) -> Tensor:
        """No end token at the answer's places before min_new_tokens; position t is place first + t."""
        count = self.shared.min_new_tokens - first
        if count <= 0 or not self.shared.end_ids.numel():
            return logits_TV
        logits_TV = logits_TV.clone()
        logits_TV[:count].index_fill_(-1, self.shared.end_ids, _NEVER)
        return logits_TV

    def _close(self, logits_TV: Tensor, t: int) -> Tensor:
        """Leave the end of the thought as the one choice at position t, where that is among the positions."""
        logits_TV = logits_TV.clone()
        if 0 <= t < len(logits_TV):
            logits_TV[t] = _NEVER
            logits_TV[t, self._end_of_thought] = 0.0
        return logits_TV


def stacked_bias(rules: Sequence[RowRules]) -> Tensor | None:
    """The rows' biases: None, one [V] that all share, or [B, V]."""
    biases = [r.shared.bias for r in rules]
    given = next((b for b in biases if b is not None), None)
    if given is None or all(b is given for b in biases):
        return given
    return torch.stack([torch.zeros_like(given) if b is None else b for b in biases])


def logit_rules(
    config: Any, vocab_size: int, banned: Collection[int], user_processors: Sequence[Any], device: torch.device
) -> LogitRules:
    """Read the options of a TriModeGenerationConfig.

    Raises:
        ValueError: an option names no token of the vocabulary, holds a value out of range, leaves no token to emit, or
            needs the tokens before it, which diffusion does not have.
    """
    ends = [i for i in sorted(config.end_token_ids) if 0 <= i < vocab_size]
    biased = _checked_sequences("sequence_bias", _sequence_bias(config.sequence_bias), vocab_size)
    bad_words = _checked_sequences("bad_words_ids", _bad_words(config.bad_words_ids, ends), vocab_size)
    suppressed = _token_ids("suppress_tokens", config.suppress_tokens or [], vocab_size)
    bias = torch.zeros(vocab_size, device=device)
    for token, value in _logit_bias(config.logit_bias, vocab_size).items():
        bias[token] += value
    for ids, value in biased.items():
        if len(ids) == 1:
            bias[ids[0]] += value
    bias[suppressed + [ids[0] for ids in bad_words if len(ids) == 1]] = _NEVER
    left = bias != _NEVER
    left[[*banned, *(ends if config.min_new_tokens else [])]] = False
    if not left.any():
        raise ValueError("suppress_tokens, bad_words_ids and biases leave no token that an answer could hold")
    processors: list[Any] = []
    longer: Any = {ids: value for ids, value in biased.items() if len(ids) > 1}
    if longer:
        processors.append(SequenceBiasLogitsProcessor(longer))
    if config.repetition_penalty not in (None, 1.0):
        processors.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
    if words := [list(ids) for ids in bad_words if len(ids) > 1]:
        processors.append(NoBadWordsLogitsProcessor(words))
    if config.mode == "diffusion":
        _refuse_context(config, processors, user_processors)
    return LogitRules(
        bias=bias if bias.any() else None,
        banned=banned,
        vocab_size=vocab_size,
        min_new_tokens=config.min_new_tokens or 0,
        end_ids=torch.tensor(ends, dtype=torch.long, device=device),
        processors=processors,
        user_processors=list(user_processors),
    )


def _refuse_context(config: Any, processors: Sequence[Any], user_processors: Sequence[Any]) -> None:
    names = {
        RepetitionPenaltyLogitsProcessor: f"repetition_penalty={config.repetition_penalty}",
        SequenceBiasLogitsProcessor: "sequence_bias of several tokens",
        NoBadWordsLogitsProcessor: "bad_words_ids of several tokens",
    }
    asked = [names[type(p)] for p in processors] + (["logits_processor"] if user_processors else [])
    if asked:
        raise ValueError(
            f"mode 'diffusion' cannot honour {' and '.join(asked)}: it fills a block in any order, without the tokens "
            "before each place; use another mode, or leave it out"
        )


def _token_ids(option: str, ids: Any, vocab_size: int) -> list[int]:
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"{option} must be a list of token ids, got {ids!r}")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"{option} names token {token!r}, but the vocabulary has the ids 0 to {vocab_size - 1}")
    return list(ids)


def _logit_bias(given: Any, vocab_size: int) -> dict[int, float]:
    """OpenAI's form: {token id: bias from -100 to 100}; JSON makes the ids strings."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias must be a dictionary of token ids and biases, got {given!r}")
    biases = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in given.items()}
    _token_ids("logit_bias", list(biases), vocab_size)
    for token, value in biases.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias must lie between -100 and 100, got {value!r} for token {token}")
    return {token: float(value) for token, value in biases.items()}


def _sequence_bias(given: Any) -> dict[tuple[int, ...], float]:
    """transformers' form: {ids: bias} or [[ids, bias], ...]; its class checks it."""
    if given is None:
        return {}
    sequences = SequenceBiasLogitsProcessor(given).sequence_bias
    if odd := [value for value in sequences.values() if not value <= _LARGEST]:
        raise ValueError(f"sequence_bias must be at most {_LARGEST:g}, got {odd[0]}")
    return sequences


def _bad_words(given: Any, end_ids: list[int]) -> dict[tuple[int, ...], float]:
    """As transformers reads them: a bad word that is an end token does not count."""
    if given is None:
        return {}
    sequences = NoBadWordsLogitsProcessor(given).sequence_bias
    return {ids: value for ids, value in sequences.items() if ids not in {(end,) for end in end_ids}}


def _checked_sequences(
    option: str, sequences: dict[tuple[int, ...], float], vocab_size: int
) -> dict[tuple[int, ...], float]:
    for ids in sequences:
        if not ids:
            raise ValueError(f"{option} holds an empty sequence")
        _token_ids(option, ids, vocab_size)
    return sequences
