"""generate() and stream(): transformers' conventions around one request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .conversation import ConversationCache
from .generation import Generation, Row
from .generation_config import TriModeGenerationConfig
from .output import StreamEvent, TriModeGenerateOutput

if TYPE_CHECKING:
    from .model import TriModeVLM

__all__ = ["Stream", "StreamEvent", "TriModeGenerateOutput", "TriModeGenerationConfig", "TriModeGenerationMixin"]


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
        if generation_config is None and name_or_path is not None:
            try:
                generation_config = GenerationConfig.from_pretrained(name_or_path)
            except OSError:
                return  # no such file: the defaults that the model was made with
        if generation_config is not None:
            model.generation_config = TriModeGenerationConfig.from_settings(generation_config.to_diff_dict())

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Nothing to prepare: generate() keeps its own cache. PEFT's wrappers for language models ask for it."""
        return {"input_ids": input_ids, **kwargs}

    def begin_generation(
        self,
        input_ids: Tensor,
        *,
        generation_config: TriModeGenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        cache: ConversationCache | None = None,
        **options: Any,
    ) -> Generation:
        """generate()'s request, checked and not yet run: what an engine takes."""
        model = cast("TriModeVLM", self)
        tensors = {name: options.pop(name, None) for name in ("attention_mask", "pixel_values", "image_sizes")}
        base = generation_config or model.generation_config
        if not isinstance(base, TriModeGenerationConfig):
            base = cast(TriModeGenerationConfig, TriModeGenerationConfig.from_dict(base.to_dict()))
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
            logits_processor: applied to causal logits (not in diffusion). stopping_criteria: asked after every token.
            tokenizer: needed by stop_strings, and by thinking_budget where no end_of_thought_token_id is given.
            cache: a conversation's cache from an earlier output; pass the whole conversation again.
            return_nfe: return (sequences, nfe) as the released model does, nfe in its own count.

        Returns:
            TriModeGenerateOutput, or the sequences alone with return_dict_in_generate=False.

        Raises:
            ValueError: an unknown mode or option, an option the mode does not use, a prompt beyond the positions.
        """
        run = self.begin_generation(
            input_ids,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer,
            cache=cache,
            **options,
        )
        if streamer is not None:
            if len(run.rows) > 1:
                raise ValueError(f"a streamer takes one row; this request has {len(run.rows)}")
            streamer.put(input_ids.cpu())
        for event in run.events():
            if streamer is not None:
                _feed(streamer, event, cast("TriModeVLM", self).config.mask_token_id)
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
        run = self.begin_generation(
            input_ids,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer,
            cache=cache,
            **options,
        )
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


def _feed(streamer: BaseStreamer, event: StreamEvent, mask_token_id: int | None) -> None:
    """Final tokens to `put`; what stands behind them and may still change, or was just rejected, to `put_draft`."""
    if event.token_ids:
        streamer.put(torch.tensor(event.token_ids))
    if not hasattr(streamer, "put_draft") or event.finish_reason is not None:
        return
    rest: list[int] = []
    if event.canvas is not None and mask_token_id in event.canvas:
        rest = event.canvas[event.canvas.index(mask_token_id) :]
    elif event.draft is not None and event.num_accepted is not None:
        rest = event.draft[event.num_accepted + 1 :]
    if rest:
        streamer.put_draft(torch.tensor([rest]))
