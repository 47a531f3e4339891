"""Block-wise diffusion: a block of masks is denoised in parallel, then read once causally to keep its keys.

The first token of a block, its seed, is the causal prediction of the pass before; the others start as masks. Each
round is one bidirectional forward; it commits the most confident masked position and every other that the rule allows.
A committed token never changes. Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), section 3, and appendix A for the
learned rule (learned_sampler.py); the entropy rule is the entropy-bounded sampler of arXiv 2505.24857.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..sampling import confidence, entropy, pick
from .state import DecodeState, Settings, Step


def decode_diffusion(state: DecodeState) -> Iterator[list[Step]]:
    """Yield the committed tokens at the left edge of the block as they become final, with the whole canvas.

    Every row is at its own place: one forward denoises the rows that have masks and reads the full blocks of the rest.
    """
    blocks = _Blocks(state.settings.block_length, state.mask_token_id, state.next_logits.device)
    num_new = state.batch
    while True:
        if num_new:
            blocks.add(state, num_new)
            yield blocks.steps(state, first=state.batch - num_new, cost=0)
        blocks.keep(state.drop_finished())
        num_new = state.join()
        if num_new:
            continue
        if not state.rows:
            return
        is_full = ~blocks.masked.any(-1)
        logits = state.propose_or_commit(blocks.canvas, is_full)
        full = is_full.nonzero().squeeze(-1)
        if len(full) < state.batch:
            tokens = _pick_open_rows(state, logits, blocks.masked)
            judged = _judge(state, logits, blocks)
            sure = confidence(logits, tokens, state.settings.sampling)
            chosen = _choose(logits, sure, blocks.masked & ~state.held(blocks.canvas), state.settings, judged)
            blocks.commit(tokens, sure, chosen)
        if len(full):
            state.cache.advance((is_full.long() * blocks.block_length).tolist())
            state.next_logits = state.next_logits.index_copy(0, full, logits[full, -1].to(state.next_logits.dtype))
            blocks.start(state, full)
        yield blocks.steps(state, first=0, cost=1)


class _Blocks:
    """The block that each row is filling: `canvas`, `masked`, `sure` [B, k], and how much of it has been emitted.

    `sure` is the probability with which a token was committed; 1 for seeds, which come from causal passes.
    """

    def __init__(self, block_length: int, mask_token_id: int, device: torch.device) -> None:
        self.block_length, self.mask_token_id = block_length, mask_token_id
        self.canvas = torch.empty(0, block_length, dtype=torch.long, device=device)
        self.masked = self.canvas.bool()
        self.sure = self.canvas.float()
        self.emitted: list[int] = []

    def add(self, state: DecodeState, count: int) -> None:
        """A first block for each of the last `count` rows."""
        new = (count, self.block_length)
        self.canvas = torch.cat((self.canvas, self.canvas.new_zeros(new)))
        self.masked = torch.cat((self.masked, self.masked.new_zeros(new)))
        self.sure = torch.cat((self.sure, self.sure.new_zeros(new)))
        self.emitted += [0] * count
        self.start(state, torch.arange(state.batch - count, state.batch, device=self.canvas.device))

    def start(self, state: DecodeState, index: Tensor) -> None:
        """A new block for the rows at `index`: the token behind the last causal pass, then masks."""
        generators = [state.generators[i] for i in index.tolist()]
        self.canvas[index] = self.mask_token_id
        self.canvas[index, 0] = pick(state.next_logits[index], state.settings.sampling, generators)
        self.masked[index] = True
        self.masked[index, 0] = False
        self.sure[index] = 0.0
        self.sure[index, 0] = 1.0
        for i in index.tolist():
            self.emitted[i] = 0

    def commit(self, tokens: Tensor, sure: Tensor, chosen: Tensor) -> None:
        self.canvas = torch.where(chosen, tokens, self.canvas)
        self.sure = torch.where(chosen, sure.float(), self.sure)
        self.masked = self.masked & ~chosen

    def keep(self, kept: Tensor | None) -> None:
        """Follow `drop_finished`."""
        if kept is not None:
            self.canvas, self.masked, self.sure = self.canvas[kept], self.masked[kept], self.sure[kept]
            self.emitted = [self.emitted[i] for i in kept.tolist()]

    def steps(self, state: DecodeState, first: int, cost: int) -> list[Step]:
        """The Steps of the rows from `first` on: what is newly committed without a gap; moves `emitted` along."""
        steps = []
        run = (~self.masked).long().cumprod(-1).sum(-1).tolist()
        sure = self.sure.tolist()
        for i in range(first, state.batch):
            ids = self.canvas[i].tolist()
            new = ids[self.emitted[i] : run[i]]
            step = Step(row=state.rows[i], token_ids=new, num_forwards=cost, canvas=ids, confidence=sure[i])
            steps.append(step)
            self.emitted[i] = run[i]
        return steps


def _pick_open_rows(state: DecodeState, logits: Tensor, masked: Tensor) -> Tensor:
    """Candidates [B, k]; a row whose block is full draws nothing, so that it draws what it would draw alone."""
    rows = masked.any(-1).nonzero().squeeze(-1)
    picked = pick(logits[rows], state.settings.sampling, [state.generators[i] for i in rows.tolist()])
    return torch.zeros_like(masked, dtype=torch.long).index_copy(0, rows, picked)


def _judge(state: DecodeState, logits: Tensor, blocks: _Blocks) -> Tensor | None:
    """How likely each position's likeliest token is final, by the learned sampler [B, k]; None under other rules."""
    if state.settings.commit_rule != "learned":
        return None
    sampler = state.model.learned_sampler
    assert sampler is not None
    return sampler.probabilities(state.model, logits, blocks.canvas, blocks.masked)


def _choose(logits: Tensor, sure: Tensor, masked: Tensor, settings: Settings, judged: Tensor | None = None) -> Tensor:
    """Which masked positions to commit now: bool [B, k], at least one in every row that has a mask."""
    score = -entropy(logits) if settings.commit_rule == "entropy" else sure
    score = score.masked_fill(~masked, float("-inf"))
    best = torch.zeros_like(masked).scatter(-1, score.argmax(-1, keepdim=True), True)
    if settings.commit_rule == "entropy":
        # Sorted by entropy, commit while the entropies before a position sum to at most the bound.
        ordered, order = (-score).sort(-1)
        before = ordered.masked_fill(ordered.isinf(), 0).cumsum(-1) - ordered.masked_fill(ordered.isinf(), 0)
        extra = torch.zeros_like(masked).scatter(-1, order, before <= settings.entropy_bound)
    elif settings.threshold is None:
        extra = torch.zeros_like(masked)
    elif judged is not None:
        extra = judged > settings.threshold
    else:
        extra = score >= settings.threshold
    return (best | extra) & masked
