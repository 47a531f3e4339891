"""Sampling as pure functions: logits and one torch.Generator per row in, ids and probabilities out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is drawn. `do_sample=False` is greedy; top_k 0 and top_p 1 switch their filter off."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """[..., V] logits -> the distribution that a sampled token is drawn from: temperature, then top-k, then top-p.

    Top-p keeps the smallest set of most likely tokens whose mass reaches `top_p` (Holtzman et al. 1904.09751).
    """
    scaled = logits.float() / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        kth = scaled.topk(params.top_k, -1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= params.top_p
        probs = probs.masked_fill(outside.scatter(-1, order, outside), 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Draw one id per distribution: [B, ..., V] -> [B, ...], row b with its own generator."""
    rows = [
        torch.multinomial(row.reshape(-1, row.shape[-1]), 1, generator=g).view(row.shape[:-1])
        for row, g in zip(probs, generators, strict=True)
    ]
    return torch.stack(rows)


def pick(logits: Tensor, params: SamplingParams, generators: list[torch.Generator]) -> Tensor:
    """The next token of each position, greedy or drawn: [B, ..., V] -> [B, ...]."""
    if not params.do_sample:
        return logits.argmax(-1)
    return draw(probabilities(logits, params), generators)


def confidence(logits: Tensor, tokens: Tensor, params: SamplingParams) -> Tensor:
    """Probability that the model (or the sampling distribution) gives to the chosen tokens: [..., V] -> [...]."""
    probs = probabilities(logits, params) if params.do_sample else logits.float().softmax(-1)
    return probs.gather(-1, tokens[..., None]).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): [..., V] -> [...]."""
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs.clamp(min=-1e30)).sum(-1)


def speculative_accept(
    draft: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """Accept a prefix of the draft so that the result is distributed as the target (Leviathan et al. 2211.17192).

    Args:
        draft: [k] drafted ids; draft_probs: [k, V], what each was drawn from; target_probs: [k + 1, V].

    Returns:
        (num_accepted, next_token): the token after the accepted ones, from the residual max(0, p - q) at the first
        rejection or from the last target distribution when all k were accepted.
    """
    k = len(draft)
    chosen = draft[:, None]
    p, q = target_probs[:k].gather(-1, chosen).squeeze(-1), draft_probs.gather(-1, chosen).squeeze(-1)
    uniform = torch.rand(k, generator=generator, device=generator.device).to(p.device)
    accepted = uniform * q < p
    num_accepted = int(accepted.long().cumprod(0).sum())
    if num_accepted == k:
        final = target_probs[k]
    else:
        residual = (target_probs[num_accepted] - draft_probs[num_accepted]).clamp(min=0)
        # p == q up to rounding leaves no residual mass; then p itself is the right distribution.
        final = residual if residual.sum() > 0 else target_probs[num_accepted]
    return num_accepted, int(torch.multinomial(final, 1, generator=generator))
