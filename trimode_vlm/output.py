"""What generate() returns and what a stream yields."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from .conversation import ConversationCache


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
            that was closed); of an engine also "cancelled" and "timeout".
        accepted_lengths: per cycle of self-speculation, the tokens that it gave.
        block_lengths: the block length of each of these cycles; 1, in mode "auto", is a forward of AR.
        num_thinking_tokens: with thinking_budget=, the tokens of the first thought, the one that closed it included.
        logprobs: with output_logprobs=True, log softmax of the head's logits at each emitted token, in nats: of the
            model itself, before biases, bans, penalties and temperature. top_logprobs: with top_logprobs=K, the K
            likeliest (id, log-probability) at each place, the best first.
        seconds: from the start of the call to the row's last token; seconds_to_first_token: to its first;
            total_seconds: of the whole call.
        total_nfe: calls of the backbone in the whole call; one call serves all rows of a batch. Samples of one prompt
            share its prefill, and each counts it in `nfe`, as it would alone. None in an engine, where requests
            share forwards.
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
    num_thinking_tokens: list[int] | None = None
    logprobs: list[list[float]] | None = None
    top_logprobs: list[list[list[tuple[int, float]]]] | None = None
    seconds: list[float] | None = None
    seconds_to_first_token: list[float | None] | None = None
    total_seconds: float | None = None
    total_nfe: int | None = None
    total_tokens_per_forward: float | None = None
    total_tokens_per_forward_end_to_end: float | None = None
    cache: ConversationCache | None = None


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """One row's progress. `token_ids` are new and final; `num_forwards` counts all forwards of the row so far.

    `canvas`: diffusion's present block, the mask token where nothing is committed; `confidence`: the probability with
    which each token of it was committed, 0 at masks, 1 at its first. `draft` and `num_accepted`: the last
    cycle of self-speculation. `logprobs` and `top_logprobs` belong to `token_ids`, as in TriModeGenerateOutput.
    `finish_reason` is set on the row's last event.
    """

    row: int
    token_ids: list[int]
    num_forwards: int
    seconds: float
    canvas: list[int] | None = None
    confidence: list[float] | None = None
    draft: list[int] | None = None
    num_accepted: int | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: str | None = None
