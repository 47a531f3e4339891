"""Linear self-speculation: diffusion drafts a block, one causal forward of the same weights verifies it.

A cycle is two forwards and gives 1..k tokens for block length k. Greedy output equals greedy AR; sampled output has
AR's distribution. Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), section 3; accept rules: arXiv 2211.17192 and, by
block, 2403.10444.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..sampling import block_accept, draw, pick, probabilities, speculative_accept
from .state import DecodeState, Step


def decode_linear_spec(state: DecodeState) -> Iterator[list[Step]]:
    """Yield the seed of the prefill, then per cycle the accepted drafts and the verifier's own next token."""
    seed, num_new = torch.empty(0, dtype=torch.long, device=state.next_logits.device), state.batch
    while True:
        if num_new:
            seed, steps = add_seeds(state, seed, num_new)
            yield steps
        kept = state.drop_finished()
        if kept is not None:
            seed = seed[kept]
        num_new = state.join()
        if num_new:
            continue
        if not state.rows:
            return
        # A row that may emit one token more needs no draft; one forward then finishes it as AR would.
        drafting = state.settings.block_length > 1 and max(state.remaining) > 1
        draft_ids, draft_probs = _draft(state, seed) if drafting else (seed[:, None][:, :0], None)
        block = torch.cat((seed[:, None], draft_ids), 1)
        logits = state.process(state.commit(block), block)
        num_accepted, seed = verify(state, draft_ids, draft_probs, logits, drafting_rows(state))
        state.cache.advance([n + 1 for n in num_accepted])
        yield cycle_steps(state, draft_ids, num_accepted, seed, 2 if drafting else 1)


def add_seeds(state: DecodeState, seed: Tensor, num_new: int) -> tuple[Tensor, list[Step]]:
    """The seeds with those of the last `num_new` rows, which their prefill gave, and the Steps that emit the latter."""
    new = pick(state.next_logits[-num_new:], state.settings.sampling, state.generators[-num_new:])
    steps = [
        Step(row=r, token_ids=[t], num_forwards=0) for r, t in zip(state.rows[-num_new:], new.tolist(), strict=True)
    ]
    return torch.cat((seed, new)), steps


def _draft(state: DecodeState, seed: Tensor) -> tuple[Tensor, Tensor | None]:
    """One bidirectional forward of [seed, mask x (k - 1)], see `pick_drafts`."""
    canvas = seed.new_full((len(seed), state.settings.block_length), state.mask_token_id)
    canvas[:, 0] = seed
    return pick_drafts(state, state.propose(canvas, state.adapter)[:, 1:], drafting_rows(state))


def cycle_steps(
    state: DecodeState, draft_ids: Tensor, num_accepted: list[int], bonus: Tensor, num_forwards: int
) -> list[Step]:
    """What a cycle brought to each row: its accepted drafts and the verifier's own token.

    A row that may emit one token more takes part in the verifying forward alone.
    """
    drafts, tokens = draft_ids.tolist(), bonus.tolist()
    return [
        Step(
            row=row,
            token_ids=drafts[i][: num_accepted[i]] + [tokens[i]],
            draft=drafts[i],
            num_accepted=num_accepted[i],
            num_forwards=num_forwards if state.remaining[i] > 1 else 1,
        )
        for i, row in enumerate(state.rows)
    ]


def pick_drafts(state: DecodeState, logits: Tensor, rows: list[int]) -> tuple[Tensor, Tensor | None]:
    """Draft logits [B, k - 1, V] -> ids [B, k - 1] and, sampling, what they were drawn from.

    rows: batch indices of those that draw, as they would alone.
    """
    params = state.settings.sampling
    if not params.do_sample:
        return logits.argmax(-1), None
    draft_probs = probabilities(logits, params)
    drafts = draft_probs.argmax(-1)
    if rows:
        drafts[rows] = draw(draft_probs[rows], [state.generators[i] for i in rows])
    return drafts, draft_probs


def drafting_rows(state: DecodeState) -> list[int]:
    """Batch indices of the rows that may emit more than one token; only these need drafts."""
    return [i for i, remaining in enumerate(state.remaining) if remaining > 1]


def verify(
    state: DecodeState, draft_ids: Tensor, draft_probs: Tensor | None, logits: Tensor, rows: list[int]
) -> tuple[list[int], Tensor]:
    """How many drafts each row accepts, and the token that follows them [B].

    rows: batch indices of those that have a draft of their own; the others accept none.
    """
    params, drafting = state.settings.sampling, set(rows)
    if not params.do_sample:
        target = logits.argmax(-1)
        agree = (target[:, :-1] == draft_ids).long().cumprod(-1)
        num_accepted = agree.sum(-1)
        if len(rows) < state.batch:
            has_draft = [i in drafting for i in range(state.batch)]
            num_accepted = num_accepted * torch.tensor(has_draft, device=num_accepted.device)
        return num_accepted.tolist(), target.gather(-1, num_accepted[:, None]).squeeze(-1)
    target_probs = probabilities(logits, params)
    if draft_probs is None:
        draft_probs = target_probs[:, :0]
    accept = block_accept if state.settings.verification == "block" else speculative_accept
    results = []
    for i in range(state.batch):
        k = draft_ids.shape[1] if i in drafting else 0
        results.append(accept(draft_ids[i, :k], draft_probs[i, :k], target_probs[i, : k + 1], state.generators[i]))
    return [n for n, _ in results], torch.tensor([t for _, t in results], device=logits.device)
