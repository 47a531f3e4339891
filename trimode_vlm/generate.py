"""generate() and stream(): a decoder, the stop rules, streamers and the statistics of every row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .conversation import ConversationCache
from .decoders import DECODERS, DecodeState, Step
from .generation_config import TriModeGenerationConfig
from .prefill import Prompt, prefill, read_prompts

if TYPE_CHECKING:
    from .model import TriModeVLM


@dataclass
class TriModeGenerateOutput(ModelOutput):
    """What generate() returns; every list has one entry per row.

    Attributes:
        sequences: LongTensor [rows, prompt + new], the given input_ids followed by the answer, padded behind the end.
        tokens_per_forward: (emitted - 1) / decode forwards; the prefill gave the first token.
        tokens_per_forward_end_to_end: emitted / all forwards.
        nfe: decode forwards (draft, verify, denoise, refresh) and prefill; nfe_prefill: the prefill's part.
        num_new_tokens: emitted tokens, an end token included, nothing behind it.
        finish_reasons: "stop" (end token, stop string or criterion) or "length".
        accepted_lengths: per cycle of self-speculation, the tokens that it gave.
        seconds: from the start of the call to the row's last token; total_seconds: of the whole call.
        total_nfe: forwards of the backbone in the whole call.
        cache: the conversation's cache for the next turn (calls with one row).
    """

    sequences: Tensor | None = None
    tokens_per_forward: list[float] | None = None
    tokens_per_forward_end_to_end: list[float] | None = None
    nfe: list[int] | None = None
    nfe_prefill: list[int] | None = None
    num_new_tokens: list[int] | None = None
    finish_reasons: list[str] | None = None
    accepted_lengths: list[list[int]] | None = None
    seconds: list[float] | None = None
    total_seconds: float | None = None
    total_nfe: int | None = None
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
    token_ids: list[int] = field(default_factory=list)
    nfe_decode: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    seconds: float = 0.0
    stopper: Any = None

    @property
    def nfe(self) -> int:
        return self.nfe_decode + 1

    @property
    def tokens_per_forward(self) -> float:
        return (len(self.token_ids) - 1) / self.nfe_decode if self.nfe_decode else 1.0


class Generation:
    """One request under way: iterate `events()`, then read `output()`."""

    def __init__(
        self,
        model: TriModeVLM,
        config: TriModeGenerationConfig,
        inputs: dict[str, Tensor | None],
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
        self.criteria = stopping_criteria or []
        self.processors = logits_processor or []
        self.cache_in, self.state = cache, cast(DecodeState, None)
        prompts = read_prompts(model, **inputs)
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

    @torch.no_grad()
    def events(self) -> Iterator[StreamEvent]:
        config, model = self.config, self.model
        base = torch.initial_seed() if config.seed is None else config.seed
        generators = [torch.Generator(model.device).manual_seed((base + i) % 2**63) for i in range(len(self.rows))]
        settings = config.settings(model.config.block_length)
        if config.mode != "ar" and model.config.mask_token_id is None:
            raise ValueError(f"mode {config.mode!r} needs a mask token; this model's config has no mask_token_id")
        kv, logits = prefill(model, [r.prompt for r in self.rows], self.cache_in)
        banned = torch.tensor(model.config.never_sampled_ids, dtype=torch.long, device=logits.device)
        self.state = state = DecodeState(
            model,
            kv,
            list(range(len(self.rows))),
            logits,
            generators,
            [r.budget for r in self.rows],
            settings,
            banned,
            self._process if self.processors else None,
        )
        if banned.numel():
            logits = logits.index_fill(-1, banned, float("-inf"))
        state.next_logits = logits
        if self.processors:
            no_ids = torch.empty(0, dtype=torch.long, device=logits.device)
            state.next_logits = torch.stack([self._process(i, no_ids, x[None])[0] for i, x in enumerate(logits)])
        for steps in DECODERS[config.mode](state):
            for i, step in enumerate(steps):
                row = self.rows[step.row]
                event = self._take(row, step)
                state.remaining[i] = row.budget - len(row.token_ids)
                if row.finish_reason:
                    state.finished.add(step.row)
                if event.token_ids or event.canvas or event.finish_reason:
                    yield event

    def _take(self, row: Row, step: Step) -> StreamEvent:
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

    def _process(self, index: int, ids_T: Tensor, logits_TV: Tensor) -> Tensor:
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

    def output(self, input_ids: Tensor) -> TriModeGenerateOutput:
        rows = self.rows
        pad = self.config.pad_token_id
        if pad is None:
            pad = min(self.config.end_token_ids, default=0)
        longest = max(len(r.token_ids) for r in rows)
        new = torch.full((len(rows), longest), pad, dtype=torch.long)
        for i, row in enumerate(rows):
            new[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
        return TriModeGenerateOutput(
            sequences=torch.cat((input_ids, new.to(input_ids.device)), 1),
            tokens_per_forward=[r.tokens_per_forward for r in rows],
            tokens_per_forward_end_to_end=[len(r.token_ids) / r.nfe for r in rows],
            nfe=[r.nfe for r in rows],
            nfe_prefill=[1] * len(rows),
            num_new_tokens=[len(r.token_ids) for r in rows],
            finish_reasons=[r.finish_reason or "length" for r in rows],
            accepted_lengths=[r.accepted_lengths for r in rows],
            seconds=[r.seconds for r in rows],
            total_seconds=time.perf_counter() - self.start,
            total_nfe=self.state.num_forwards + 1,
            cache=self._conversation() if len(rows) == 1 else None,
        )

    def _conversation(self) -> ConversationCache:
        row, kv = self.rows[0], self.state.cache
        known = row.prompt.token_ids + row.token_ids
        kv.truncate(min(kv.lengths[0], len(known)))
        return ConversationCache(kv, known[: kv.lengths[0]], [digest for digest, _ in row.prompt.images])


class TriModeGenerationMixin:
    """generate(), stream() and the released model's own entry points, for TriModeVLM."""

    def adjust_generation_fn(
        self,
        generation_config: Any,
        from_auto_class: bool,
        from_pipeline: Any,
        name_or_path: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Called by from_pretrained: read generation_config.json as our class; without one, the defaults."""
        model = cast("TriModeVLM", self)
        if generation_config is not None:
            model.generation_config = TriModeGenerationConfig.from_dict(generation_config.to_dict())
        elif name_or_path is not None:
            try:
                model.generation_config = TriModeGenerationConfig.from_pretrained(name_or_path)
            except OSError:
                model.generation_config = TriModeGenerationConfig(eos_token_id=model.config.eos_token_id)

    def _start(
        self,
        input_ids: Tensor,
        generation_config: TriModeGenerationConfig | None,
        cache: ConversationCache | None,
        logits_processor: Any,
        stopping_criteria: Any,
        tokenizer: Any,
        options: dict[str, Any],
    ) -> Generation:
        model = cast("TriModeVLM", self)
        tensors = {name: options.pop(name, None) for name in ("attention_mask", "pixel_values", "image_sizes")}
        base = generation_config or model.generation_config
        if not isinstance(base, TriModeGenerationConfig):
            base = TriModeGenerationConfig.from_dict(base.to_dict())
        config = base.override({k: v for k, v in options.items() if v is not None or k == "threshold"})
        if config.eos_token_id is None and "eos_token_id" not in options:
            config.eos_token_id = model.config.eos_token_id
        return Generation(
            model,
            config,
            {"input_ids": input_ids, **tensors},
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            cache=cache,
            tokenizer=tokenizer,
        )

    def generate(
        self,
        input_ids: Tensor,
        *,
        generation_config: TriModeGenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache: ConversationCache | None = None,
        return_nfe: bool = False,
        **options: Any,
    ) -> Any:
        """Answer every row of a batch.

        Args:
            input_ids: [rows, T] with attention_mask=, pixel_values=, image_sizes= as the processor gives them; left or
                right padded.
            generation_config: read in place of the model's own; `options` override it (see TriModeGenerationConfig).
            streamer: a transformers streamer; drafts and canvases go to its `put_draft` where it has one.
            logits_processor: applied to causal logits (ar, linear_spec). stopping_criteria: asked after every token.
            tokenizer: needed by stop_strings.
            cache: a conversation's cache from an earlier output; pass the whole conversation again.
            return_nfe: return (sequences, nfe) as the released model does, nfe in its own count.

        Returns:
            TriModeGenerateOutput, or the sequences alone with return_dict_in_generate=False.

        Raises:
            ValueError: an unknown mode or option, an option the mode does not use, a prompt beyond the positions.
        """
        run = self._start(input_ids, generation_config, cache, logits_processor, stopping_criteria, tokenizer, options)
        if streamer is not None:
            if len(run.rows) > 1:
                raise ValueError(f"a streamer takes one row; input_ids has {len(run.rows)}")
            streamer.put(input_ids.cpu())
        for event in run.events():
            if streamer is not None:
                _feed(streamer, event)
        if streamer is not None:
            streamer.end()
        output = run.output(input_ids)
        if return_nfe:
            return output.sequences, sum(released_nfe(run.config.mode, row) for row in run.rows)
        return output.sequences if run.config.return_dict_in_generate is False else output

    def stream(
        self,
        input_ids: Tensor,
        *,
        generation_config: TriModeGenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache: ConversationCache | None = None,
        **options: Any,
    ) -> Stream:
        """generate() as an iterator of StreamEvents; close() ends the forwards, output() has the statistics."""
        run = self._start(input_ids, generation_config, cache, logits_processor, stopping_criteria, tokenizer, options)
        return Stream(run, input_ids)

    def ar_generate(self, prompt_ids: Tensor, **options: Any) -> tuple[Tensor, int]:
        """The released model's call: (ids with the prompt, forwards)."""
        return self.generate(prompt_ids, mode="ar", return_nfe=True, **options)

    def linear_spec_generate(self, prompt_ids: Tensor, **options: Any) -> tuple[Tensor, int]:
        """The released model's call: (ids with the prompt, forwards)."""
        return self.generate(prompt_ids, mode="linear_spec", return_nfe=True, **options)


class Stream:
    """An answer under way: iterate its events, close() to stop, output() for what there is so far."""

    def __init__(self, run: Generation, input_ids: Tensor) -> None:
        self._run, self._input_ids, self._events = run, input_ids, run.events()

    def __iter__(self) -> Iterator[StreamEvent]:
        return self._events

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        self._events.close()  # type: ignore[attr-defined]

    def output(self) -> TriModeGenerateOutput:
        return self._run.output(self._input_ids)


def released_nfe(mode: str, row: Row) -> int:
    """Forwards as the released model counts them: ar one per token, diffusion without the prefill, linear with it."""
    if mode == "ar":
        return len(row.token_ids)
    return row.nfe_decode if mode == "diffusion" else row.nfe


def _feed(streamer: BaseStreamer, event: StreamEvent) -> None:
    shown = event.canvas if event.canvas is not None else event.draft
    if event.token_ids:
        streamer.put(torch.tensor(event.token_ids))
    if shown is not None and hasattr(streamer, "put_draft") and event.finish_reason is None:
        streamer.put_draft(torch.tensor([shown]))
