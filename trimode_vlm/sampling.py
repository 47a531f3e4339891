"""Sampling as pure functions: logits and one torch.Generator per row in, ids and probabilities out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
        outside[..., 0] = False  # even a top_p that rounds to 0 keeps one token
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


def block_acceptance(draft: Tensor, draft_probs: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification's chances and residuals (Sun et al. 2403.10444, algorithm 2).

    With p_0 = 1 and p_i = min(1, p_{i-1} target_i(x_i) / draft_i(x_i)), residual_i = max(0, p_i target_{i+1} -
    draft_{i+1}) and its mass s_i, a prefix of i tokens passes with probability h_i = s_i / (s_i + 1 - p_i), the whole
    draft with h_k = p_k. The longest prefix that passes is kept.

    Args:
        draft: [k]; draft_probs: [k, V]; target_probs: [k + 1, V].

    Returns:
        (h [k], of 1 to k tokens; weights [k + 1, V] of the token behind 0 to k of them, not normalised).
    """
    k = len(draft)
    chosen = draft[:, None]
    ratios = (target_probs[:k].gather(-1, chosen) / draft_probs.gather(-1, chosen)).squeeze(-1)
    p = [1.0]
    for ratio in ratios.tolist():
        p.append(min(1.0, p[-1] * ratio))
    joint = target_probs.new_tensor(p)
    residual = (joint[:k, None] * target_probs[:k] - draft_probs).clamp(min=0)
    mass = residual.sum(-1)
    total = mass[1:] + 1 - joint[1:k]
    # Nothing left and nothing lacking: draft and target agree from here on.
    passes = torch.where(total > 0, mass[1:] / total, torch.ones_like(total))
    return torch.cat((passes, joint[k:])) if k else joint[:0], torch.cat((residual, target_probs[k:]))


def block_accept(
    draft: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """`speculative_accept` by block verification: the same distribution, on average at least as many tokens."""
    k = len(draft)
    passes, weights = block_acceptance(draft, draft_probs, target_probs)
    uniform = torch.rand(k, generator=generator, device=generator.device).to(passes.device)
    passed = (uniform < passes).nonzero()
    num_accepted = int(passed[-1]) + 1 if len(passed) else 0
    final = weights[num_accepted]
    # Rounding alone can leave no mass where a prefix passed; then the target itself is the right distribution.
    final = final if final.sum() > 0 else target_probs[num_accepted]
    return num_accepted, int(torch.multinomial(final, 1, generator=generator))


class TokenLogprob(NamedTuple):
    """The log-probability of a token in nats, and (id, log-probability) of the likeliest ones, the best first."""

    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits_TV: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities under softmax(logits) of one token per position."""
    log_probs = logits_TV.float().log_softmax(-1)
    chosen = log_probs.gather(-1, torch.tensor(token_ids, device=log_probs.device)[:, None]).squeeze(-1)
    values, ids = log_probs.topk(num_top, -1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(value, top) for value, top in zip(chosen.tolist(), tops, strict=True)]
