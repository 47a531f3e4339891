"""One request under way: a decoder, the stop rules, and the statistics of every row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.utils import ModelOutput

from .conversation import ConversationCache
from .decoders import DECODERS, DecodeState, Step
from .generation_config import TriModeGenerationConfig
from .lean_forward import lean_forward
from .prefill import Prompt, prefill, read_prompts

if TYPE_CHECKING:
    from .model import TriModeVLM
    from .serving_caches import FeatureCache


@dataclass
class TriModeGenerateOutput(ModelOutput):
    """What generate() returns; every list has one entry per row.

    Attributes:
        sequences: LongTensor [rows, prompt + new], the given input_ids followed by the answer, padded behind the end.
        tokens_per_forward: (emitted - 1) / decode forwards; the prefill gave the first token.
        tokens_per_forward_end_to_end: emitted / all forwards.
        nfe: decode forwards (draft, verify, denoise, refresh) and prefill; nfe_prefill: the prefill's part.
        num_new_tokens: emitted tokens, an end token included, nothing behind it.
        finish_reasons: "stop" (end token, stop string or criterion), "length", or None of a row that goes on (a stream
            that was closed).
        accepted_lengths: per cycle of self-speculation, the tokens that it gave.
        block_lengths: the block length of each of these cycles; 1, in mode "auto", is a forward of AR.
        seconds: from the start of the call to the row's last token; total_seconds: of the whole call.
        total_nfe: calls of the backbone in the whole call; one call serves all rows of a batch.
        total_tokens_per_forward, total_tokens_per_forward_end_to_end: the two ratios pooled over rows, sum over sum.
        cache: the conversation's cache for the next turn (calls with one row).
    """

    sequences: Tensor | None = None
    tokens_per_forward: list[float] | None = None
    tokens_per_forward_end_to_end: list[float] | None = None
    nfe: list[int] | None = None
    nfe_prefill: list[int] | None = None
    num_new_tokens: list[int] | None = None
    finish_reasons: list[str | None] | None = None
    accepted_lengths: list[list[int]] | None = None
    block_lengths: list[list[int]] | None = None
    seconds: list[float] | None = None
    total_seconds: float | None = None
    total_nfe: int | None = None
    total_tokens_per_forward: float | None = None
    total_tokens_per_forward_end_to_end: float | None = None
    cache: ConversationCache | None = None


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """One row's progress. `token_ids` are new and final; `num_forwards` counts all forwards of the row so far.

    `canvas`: diffusion's present block, the mask token where nothing is committed. `draft` and `num_accepted`: the last
    cycle of self-speculation. `finish_reason` is set on the row's last event.
    """

    row: int
    token_ids: list[int]
    num_forwards: int
    seconds: float
    canvas: list[int] | None = None
    draft: list[int] | None = None
    num_accepted: int | None = None
    finish_reason: str | None = None


@dataclass
class Row:
    """The bookkeeping of one row."""

    prompt: Prompt
    budget: int
    nfe_prefill: int = 0
    token_ids: list[int] = field(default_factory=list)
    nfe_decode: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    block_lengths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    seconds: float = 0.0
    stopper: Any = None

    @property
    def nfe(self) -> int:
        return self.nfe_decode + self.nfe_prefill

    @property
    def remaining(self) -> int:
        return self.budget - len(self.token_ids)


class Generation:
    """One request under way: iterate `events()`, then read `output()`."""

    def __init__(
        self,
        model: TriModeVLM,
        config: TriModeGenerationConfig,
        inputs: dict[str, Any],
        *,
        logits_processor: LogitsProcessorList | None,
        stopping_criteria: StoppingCriteriaList | None,
        cache: ConversationCache | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.start = time.perf_counter()
        if config.mode == "diffusion" and logits_processor:
            raise ValueError("mode 'diffusion' cannot honour logits_processor: use ar or linear_spec")
        self.model, self.config = model, config
        self.criteria: list[Any] = stopping_criteria or []
        self.processors: list[Any] = logits_processor or []
        self.cache_in: ConversationCache | None = cache
        self.state: DecodeState | None = None
        prompts = read_prompts(model, **inputs)
        if cache is not None and not isinstance(cache, ConversationCache):
            raise ValueError(f"cache= takes the cache of an earlier output, got {type(cache).__name__}")
        if cache is not None and len(prompts) != 1:
            raise ValueError(f"cache= continues one conversation; input_ids has {len(prompts)} rows")
        budgets = [self._budget(p) for p in prompts]
        self.rows = [Row(p, b) for p, b in zip(prompts, budgets, strict=True)]
        if config.stop_strings:
            if tokenizer is None:
                raise ValueError("stop_strings needs tokenizer=, to read the answer as text")
            from .detokenizer import IncrementalDetokenizer

            strings = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings)
            for row in self.rows:
                row.stopper = IncrementalDetokenizer(tokenizer, stop_strings=strings)

    def _budget(self, prompt: Prompt) -> int:
        """New tokens that this row may have: what was asked for, within the model's positions."""
        n, limit = len(prompt.token_ids), self.model.config.max_position_embeddings
        if n >= limit:
            raise ValueError(f"the prompt has {n} tokens but the model has {limit} positions; shorten it")
        asked = self.config.max_new_tokens
        if asked is None:
            asked = 256 if self.config.max_length is None else self.config.max_length - n
        if asked < 1:
            raise ValueError(f"max_length {self.config.max_length} leaves no room behind a prompt of {n} tokens")
        return min(asked, limit - n)

    @torch.inference_mode()
    def events(self) -> Iterator[StreamEvent]:
        state = self.begin()
        for steps in DECODERS[self.config.mode](state):
            for i, step in enumerate(steps):
                row = self.rows[step.row]
                event = self.take(row, step)
                state.remaining[i] = row.remaining
                if row.finish_reason:
                    state.finished.add(step.row)
                if event.token_ids or event.canvas or event.finish_reason:
                    yield event

    def begin(self, features: FeatureCache | None = None) -> DecodeState:
        """Prefill: the rows as a decoder takes them, or as an engine lets them join those that are running."""
        config, model = self.config, self.model
        # Without a seed the global generator gives one, so that calls differ and torch.manual_seed still rules them.
        base = int(torch.randint(2**62, ())) if config.seed is None else config.seed
        generators = [torch.Generator(model.device).manual_seed((base + i) % 2**63) for i in range(len(self.rows))]
        settings = config.settings(model.config.block_length)
        if config.mode not in ("ar", "auto") and model.config.mask_token_id is None:
            raise ValueError(f"mode {config.mode!r} needs a mask token; this model's config has no mask_token_id")
        room = max(row.budget for row in self.rows) + settings.block_length
        lean = lean_forward(model.encoder)
        kv, logits = prefill(model, [r.prompt for r in self.rows], self.cache_in, room, lean, features)
        for row in self.rows:
            row.nfe_prefill = 1
        banned_ids = model.config.banned_ids(config.end_token_ids)
        banned = torch.tensor(banned_ids, dtype=torch.long, device=logits.device)
        self.state = state = DecodeState(
            model,
            kv,
            list(range(len(self.rows))),
            logits,
            generators,
            [r.budget for r in self.rows],
            settings,
            banned,
            self.process if self.processors else None,
            lean,
            model.draft_adapter.deltas(model) if model.draft_adapter else None,
        )
        if banned.numel():
            logits = logits.index_fill(-1, banned, float("-inf"))
        state.next_logits = logits
        if self.processors:
            no_ids = torch.empty(0, dtype=torch.long, device=logits.device)
            state.next_logits = torch.stack([self.process(i, no_ids, x[None])[0] for i, x in enumerate(logits)])
        return state

    def take(self, row: Row, step: Step) -> StreamEvent:
        """Put a step's tokens behind the row's, up to its end; decide whether the row is finished."""
        row.nfe_decode += step.num_forwards
        first = len(row.token_ids)
        for token in step.token_ids:
            row.token_ids.append(token)
            if self._stops(row, token):
                row.finish_reason = "stop"
            elif len(row.token_ids) == row.budget:
                row.finish_reason = "length"
            if row.finish_reason:
                break
        row.seconds = time.perf_counter() - self.start
        new = row.token_ids[first:]
        if step.draft is not None:
            row.accepted_lengths.append(len(new))
            row.block_lengths.append(len(step.draft) + 1)
        return StreamEvent(
            row=step.row,
            token_ids=new,
            num_forwards=row.nfe,
            seconds=row.seconds,
            canvas=step.canvas,
            draft=step.draft,
            num_accepted=step.num_accepted,
            finish_reason=row.finish_reason,
        )

    def _stops(self, row: Row, token: int) -> bool:
        if token in self.config.end_token_ids:
            return True
        if row.stopper is not None:
            row.stopper.put([token])
            if row.stopper.stopped:
                return True
        if self.criteria:
            ids = torch.tensor([row.prompt.token_ids + row.token_ids], device=self.model.device)
            return any(bool(torch.as_tensor(rule(ids, None)).all()) for rule in self.criteria)
        return False

    def process(self, index: int, ids_T: Tensor, logits_TV: Tensor) -> Tensor:
        """The user's logits processors at each position of a causal forward, with all ids before it."""
        row = self.rows[index]
        # The block's first token is already in the row's ids, except at the prefill, where the block is empty.
        before = row.prompt.token_ids + row.token_ids[: len(row.token_ids) - 1 if len(ids_T) else None]
        context = torch.tensor([before], device=logits_TV.device)
        out = []
        for t, scores in enumerate(logits_TV):
            ids = torch.cat((context, ids_T[None, : t + 1]), 1)
            for processor in self.processors:
                scores = processor(ids, scores[None])[0]
            out.append(scores)
        return torch.stack(out)

    def output(self, input_ids: Tensor, with_cache: bool = True) -> TriModeGenerateOutput:
        """What there is so far; before the first event, an answer without tokens."""
        rows = self.rows
        pad = self.config.pad_token_id
        if pad is None:
            pad = min(self.config.end_token_ids, default=0)
        longest = max(len(r.token_ids) for r in rows)
        new = torch.full((len(rows), longest), pad, dtype=torch.long)
        for i, row in enumerate(rows):
            new[i, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.long)
        return TriModeGenerateOutput(
            sequences=torch.cat((input_ids, new.to(input_ids.device)), 1),
            tokens_per_forward=[_ratio([r], end_to_end=False) for r in rows],
            tokens_per_forward_end_to_end=[_ratio([r], end_to_end=True) for r in rows],
            nfe=[r.nfe for r in rows],
            nfe_prefill=[r.nfe_prefill for r in rows],
            num_new_tokens=[len(r.token_ids) for r in rows],
            finish_reasons=[r.finish_reason for r in rows],
            accepted_lengths=[r.accepted_lengths for r in rows],
            block_lengths=[r.block_lengths for r in rows],
            seconds=[r.seconds for r in rows],
            total_seconds=time.perf_counter() - self.start,
            total_nfe=self.state.num_forwards + 1 if self.state else 0,
            total_tokens_per_forward=_ratio(rows, end_to_end=False),
            total_tokens_per_forward_end_to_end=_ratio(rows, end_to_end=True),
            cache=self._conversation() if with_cache and len(rows) == 1 else None,
        )

    def _conversation(self) -> ConversationCache | None:
        """The cache with what it now holds. A continued conversation keeps its one object: its buffers are shared."""
        if self.state is None:
            return self.cache_in
        row, kv = self.rows[0], self.state.cache
        known = row.prompt.token_ids + row.token_ids
        kv.truncate(min(kv.lengths[0], len(known)))
        conversation = self.cache_in or ConversationCache(kv, [])
        conversation.hold(known[: kv.lengths[0]], row.prompt.digests)
        return conversation


def _ratio(rows: list[Row], end_to_end: bool) -> float:
    """Tokens per forward, pooled; 1 where the prefill gave everything (facts: its one token is no decode's)."""
    if end_to_end:
        forwards = sum(r.nfe for r in rows)
        return sum(len(r.token_ids) for r in rows) / forwards if forwards else 1.0
    forwards = sum(r.nfe_decode for r in rows)
    return sum(len(r.token_ids) - 1 for r in rows) / forwards if forwards else 1.0
