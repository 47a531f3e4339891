"""One request under way: a decoder, the stop rules, and the statistics of every row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from .conversation import ConversationCache
from .decoders import DECODERS, DecodeState, Step
from .generation_config import TriModeGenerationConfig
from .lean_forward import LeanForward, lean_forward
from .learned_sampler import check_sampler
from .logit_rules import RowRules, logit_rules
from .output import StreamEvent, TriModeGenerateOutput
from .prefill import Prompt, prefill, read_prompts
from .sampling import TokenLogprob
from .stops import StopRules, Thought, make_stopper, thought_marks

if TYPE_CHECKING:
    from .model import TriModeVLM


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
    seconds_to_first_token: float | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stops: StopRules | None = None
    thought: Thought | None = None

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
        self.model, self.config = model, config
        if config.mode not in ("ar", "auto") and model.config.mask_token_id is None:
            raise ValueError(f"mode {config.mode!r} needs a mask token; this model's config has no mask_token_id")
        if config.mode == "diffusion" and config.commit_rule == "learned":
            check_sampler(model, config.settings(model.config.block_length).block_length)
        self.cache_in: ConversationCache | None = cache
        self.state: DecodeState | None = None
        prompts = read_prompts(model, **inputs)
        if cache is not None and not isinstance(cache, ConversationCache):
            raise ValueError(f"cache= takes the cache of an earlier output, got {type(cache).__name__}")
        if cache is not None and len(prompts) != 1:
            raise ValueError(f"cache= continues one conversation; input_ids has {len(prompts)} rows")
        banned = model.config.banned_ids(config.end_token_ids)
        self.rules = logit_rules(config, model.config.vocab_size, banned, logits_processor or [], model.device)
        if config.top_logprobs and config.top_logprobs > model.config.vocab_size:
            raise ValueError(
                f"top_logprobs {config.top_logprobs} exceeds the vocabulary of {model.config.vocab_size} tokens"
            )
        # Prompt by prompt, each with all its samples, as transformers orders them.
        self.samples = config.num_return_sequences or 1
        self.rows = [Row(prompt, self._budget(prompt)) for prompt in prompts for _ in range(self.samples)]
        self._set_stops(stopping_criteria or [], tokenizer)

    def _set_stops(self, criteria: list[Any], tokenizer: PreTrainedTokenizerBase | None) -> None:
        config, device = self.config, self.model.device
        budget, strings = config.thinking_budget, config.stop_strings
        marks = None if budget is None else thought_marks(config, tokenizer, self.rules.forbids)
        for row in self.rows:
            prompt_ids = row.prompt.token_ids
            stopper = None if strings is None or strings == [] else make_stopper(tokenizer, strings)
            row.stops = StopRules(prompt_ids, row.token_ids, config.end_token_ids, stopper, criteria, device)
            if budget is not None and marks is not None:
                row.thought = Thought.of(budget, *marks, prompt_ids)

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
        if (self.config.min_new_tokens or 0) > asked:
            raise ValueError(
                f"min_new_tokens {self.config.min_new_tokens} exceeds the {asked} new tokens of the budget"
            )
        return min(asked, limit - n)

    @property
    def most_slots(self) -> int:
        """Cache slots that a row may come to: prompt, budget, and what a step writes beyond."""
        k = self.config.settings(self.model.config.block_length).block_length
        beyond = {"ar": 1, "quadratic_spec": k * (k + 1)}.get(self.config.mode, k)
        longest = max(len(row.prompt.token_ids) for row in self.rows)
        return longest + max(row.budget for row in self.rows) + beyond

    @torch.inference_mode()
    def events(self) -> Iterator[StreamEvent]:
        self.state = state = self.begin()
        for steps in DECODERS[self.config.mode](state):
            places = {row: place for place, row in enumerate(state.rows)}
            for step in steps:
                row = self.rows[step.row]
                event = self.take(row, step)
                state.remaining[places[step.row]] = row.remaining
                if row.finish_reason:
                    state.finished.add(step.row)
                if event.token_ids or event.canvas or event.finish_reason:
                    yield event

    def begin(self, features: Sequence[Tensor] | None = None, lean: LeanForward | None = None) -> DecodeState:
        """Prefill: the rows as a decoder takes them, or as an engine lets them join those that are running.

        features: [N, D] of each image that `cache_in` does not hold; None: the images are encoded here.
        """
        config, model = self.config, self.model
        # Without a seed the global generator gives one, so that calls differ and torch.manual_seed still rules them.
        base = int(torch.randint(2**62, ())) if config.seed is None else config.seed
        generators = [torch.Generator(model.device).manual_seed((base + i) % 2**63) for i in range(len(self.rows))]
        settings = config.settings(model.config.block_length)
        longest = max(len(row.prompt.token_ids) for row in self.rows)
        lean = lean or lean_forward(model.encoder)
        prompts = [row.prompt for row in self.rows[:: self.samples]]
        kv, logits = prefill(model, prompts, self.cache_in, self.most_slots - longest, lean, features)
        if self.samples > 1:
            if self.cache_in is not None:
                self.cache_in.hold(prompts[0].token_ids, prompts[0].digests)
            copies = [i for i in range(len(prompts)) for _ in range(self.samples)]
            kv, logits = kv.select(copies), logits[copies]
        for row in self.rows:
            row.nfe_prefill = 1
        num_top = (config.top_logprobs or 0) if config.output_logprobs else None
        banned_ids = model.config.banned_ids(config.end_token_ids)
        state = DecodeState(
            model=model,
            cache=kv,
            rows=list(range(len(self.rows))),
            next_logits=logits,
            generators=generators,
            remaining=[r.budget for r in self.rows],
            settings=settings,
            banned=torch.tensor(banned_ids, dtype=torch.long, device=logits.device),
            lean=lean,
            adapter=model.draft_adapter.deltas(model) if model.draft_adapter else None,
            rules=[RowRules(self.rules, r.prompt.token_ids, r.token_ids, r.thought, num_top) for r in self.rows],
        )
        state.next_logits = state.first_logits(logits)
        return state

    def take(self, row: Row, step: Step, number: int | None = None) -> StreamEvent:
        """Put a step's tokens behind the row's, up to its end; decide whether the row is finished.

        number: what the event calls the row, where an engine's step has another number for it.
        """
        row.nfe_decode += step.num_forwards
        first = len(row.token_ids)
        for token in step.token_ids:
            row.token_ids.append(token)
            if row.thought is not None:
                row.thought.put(token)
            if row.stops is not None and row.stops.stops():
                row.finish_reason = "stop"
            elif len(row.token_ids) == row.budget:
                row.finish_reason = "length"
            if row.finish_reason:
                break
        row.seconds = time.perf_counter() - self.start
        new = row.token_ids[first:]
        if new and not first:
            row.seconds_to_first_token = row.seconds
        logprobs = None if step.logprobs is None else step.logprobs[: len(new)]
        row.logprobs += logprobs or []
        if step.draft is not None:
            row.accepted_lengths.append(len(new))
            row.block_lengths.append(len(step.draft) + 1)
        return StreamEvent(
            row=step.row if number is None else number,
            token_ids=new,
            num_forwards=row.nfe,
            seconds=row.seconds,
            canvas=step.canvas,
            confidence=step.confidence,
            draft=step.draft,
            num_accepted=step.num_accepted,
            logprobs=None if logprobs is None else [entry.logprob for entry in logprobs],
            top_logprobs=[entry.top for entry in logprobs]
            if logprobs is not None and self.config.top_logprobs
            else None,
            finish_reason=row.finish_reason,
        )

    def output(self, input_ids: Tensor, with_cache: bool = True) -> TriModeGenerateOutput:
        """What there is so far; before the first event, an answer without tokens."""
        rows, config = self.rows, self.config
        pad = self.config.pad_token_id
        if pad is None:
            pad = min(self.config.end_token_ids, default=0)
        longest = max(len(r.token_ids) for r in rows)
        new = torch.full((len(rows), longest), pad, dtype=torch.long)
        for i, row in enumerate(rows):
            new[i, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.long)
        return TriModeGenerateOutput(
            sequences=torch.cat((input_ids.repeat_interleave(self.samples, 0), new.to(input_ids.device)), 1),
            tokens_per_forward=[_ratio([r], end_to_end=False) for r in rows],
            tokens_per_forward_end_to_end=[_ratio([r], end_to_end=True) for r in rows],
            nfe=[r.nfe for r in rows],
            nfe_prefill=[r.nfe_prefill for r in rows],
            num_new_tokens=[len(r.token_ids) for r in rows],
            finish_reasons=[r.finish_reason for r in rows],
            accepted_lengths=[r.accepted_lengths for r in rows],
            block_lengths=[r.block_lengths for r in rows],
            num_thinking_tokens=None
            if config.thinking_budget is None
            else [r.thought.num_tokens for r in rows if r.thought],
            logprobs=[[entry.logprob for entry in r.logprobs] for r in rows] if config.output_logprobs else None,
            top_logprobs=[[entry.top for entry in r.logprobs] for r in rows] if config.top_logprobs else None,
            seconds=[r.seconds for r in rows],
            seconds_to_first_token=[r.seconds_to_first_token for r in rows],
            total_seconds=time.perf_counter() - self.start,
            total_nfe=self.state.num_forwards + 1 if self.state else None,
            total_tokens_per_forward=_ratio(rows, end_to_end=False),
            total_tokens_per_forward_end_to_end=_ratio(rows, end_to_end=True),
            cache=self._conversation() if with_cache else None,
        )

    def _conversation(self) -> ConversationCache | None:
        """The cache with what it now holds. A continued conversation keeps its one object: its buffers are shared."""
        if self.state is None or len(self.rows) > 1:
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
