"""Block-wise diffusion: a block of masks is denoised in parallel, then read once causally to keep its keys.

The first token of a block, its seed, is the causal prediction of the pass before; the others start as masks. Each
round is one bidirectional forward; it commits the most confident masked position and every other that the rule allows.
A committed token never changes. Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), section 3; the entropy rule is the
entropy-bounded sampler of arXiv 2505.24857.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..sampling import confidence, entropy, pick
from .state import DecodeState, Settings, Step


def decode_diffusion(state: DecodeState) -> Iterator[list[Step]]:
    """Yield the committed tokens at the left edge of the block as they become final, with the whole canvas."""
    k, mask_id = state.settings.block_length, state.mask_token_id
    refreshes = 0
    while state.rows:
        seed = pick(state.next_logits, state.settings.sampling, state.generators)
        canvas = torch.full((state.batch, k), mask_id, device=seed.device)
        canvas[:, 0] = seed
        masked = torch.ones_like(canvas, dtype=torch.bool)
        masked[:, 0] = False
        emitted = [0] * state.batch
        cost = [refreshes] * state.batch
        while True:
            yield _emit(state, canvas, masked, emitted, cost)
            kept = state.drop_finished()
            if kept is not None:
                canvas, masked = canvas[kept], masked[kept]
                emitted = [emitted[i] for i in kept.tolist()]
            if not masked.any():
                break
            cost = masked.any(-1).long().tolist()
            logits = state.propose(canvas)
            tokens = _pick_open_rows(state, logits, masked)
            chosen = _choose(logits, tokens, masked, state.settings)
            canvas = torch.where(chosen, tokens, canvas)
            masked = masked & ~chosen
        if not state.rows:
            return
        logits = state.commit(canvas)
        state.cache.advance([k] * state.batch)
        state.next_logits = state.process(logits, canvas)[:, -1]
        refreshes = 1


def _pick_open_rows(state: DecodeState, logits: Tensor, masked: Tensor) -> Tensor:
    """Candidates [B, k]; a row whose block is full draws nothing, so that it draws what it would draw alone."""
    rows = masked.any(-1).nonzero().squeeze(-1)
    picked = pick(logits[rows], state.settings.sampling, [state.generators[i] for i in rows.tolist()])
    return torch.zeros_like(masked, dtype=torch.long).index_copy(0, rows, picked)


def _choose(logits: Tensor, tokens: Tensor, masked: Tensor, settings: Settings) -> Tensor:
    """Which masked positions to commit now: bool [B, k], at least one in every row that has a mask."""
    if settings.commit_rule == "entropy":
        score = -entropy(logits)
    else:
        score = confidence(logits, tokens, settings.sampling)
    score = score.masked_fill(~masked, float("-inf"))
    best = torch.zeros_like(masked).scatter(-1, score.argmax(-1, keepdim=True), True)
    if settings.commit_rule == "entropy":
        # Sorted by entropy, commit while the entropies before a position sum to at most the bound.
        ordered, order = (-score).sort(-1)
        before = ordered.masked_fill(ordered.isinf(), 0).cumsum(-1) - ordered.masked_fill(ordered.isinf(), 0)
        extra = torch.zeros_like(masked).scatter(-1, order, before <= settings.entropy_bound)
    elif settings.threshold is None:
        extra = torch.zeros_like(masked)
    else:
        extra = score >= settings.threshold
    return (best | extra) & masked


def _emit(state: DecodeState, canvas: Tensor, masked: Tensor, emitted: list[int], cost: list[int]) -> list[Step]:
    """The Steps of a round: what is newly committed without a gap; moves `emitted` along."""
    steps = []
    run = (~masked).long().cumprod(-1).sum(-1).tolist()
    for i, row in enumerate(state.rows):
        ids = canvas[i].tolist()
        steps.append(Step(row=row, token_ids=ids[emitted[i] : run[i]], num_forwards=cost[i], canvas=ids))
        emitted[i] = run[i]
    return steps
