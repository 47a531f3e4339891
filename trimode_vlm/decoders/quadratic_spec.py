"""Quadratic self-speculation: one forward verifies a draft and drafts what follows each of its tokens.

A row [d_i, mask x k] for each of the k tokens d_0..d_{k-1} of seed and draft; column 0 verifies as a causal forward
would, the masks of row i draft after d_i. The row that acceptance ends in has the next draft ready, so a cycle is one
forward of k (k + 1) tokens and gives 1..k tokens. Greedy output equals greedy AR; sampled output has AR's distribution.
Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), appendix C; accept rule: arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .linear_spec import add_seeds, cycle_steps, drafting_rows, pick_drafts, verify
from .state import DecodeState, Step


def decode_quadratic_spec(state: DecodeState) -> Iterator[list[Step]]:
    """Yield the seed of the prefill, then per cycle the accepted drafts and the verifier's own next token.

    The first cycle has no draft: it runs the seed's row alone, which gives a token as well as the first draft.
    """
    k, mix = state.settings.block_length, state.settings.verifier_mix
    seed, num_new = torch.empty(0, dtype=torch.long, device=state.next_logits.device), state.batch
    draft_logits = None
    has_draft: list[bool] = []
    while True:
        if num_new:
            seed, steps = add_seeds(state, seed, num_new)
            has_draft += [False] * num_new
            yield steps
        kept = state.drop_finished()
        if kept is not None:
            seed, has_draft = seed[kept], [has_draft[i] for i in kept.tolist()]
            draft_logits = None if draft_logits is None else draft_logits[kept]
        num_new = state.join()
        if num_new:
            if draft_logits is not None:
                # Newcomers have no draft yet: what stands there counts for nothing.
                draft_logits = torch.cat((draft_logits, draft_logits.new_zeros(num_new, *draft_logits.shape[1:])))
            continue
        if not state.rows:
            return
        # A row that may emit one token more needs no draft; one forward then finishes it as AR would.
        drafting = k > 1 and max(state.remaining) > 1
        rows = [i for i in drafting_rows(state) if has_draft[i]]
        draft_ids, draft_probs = seed[:, None][:, :0], None
        if drafting and draft_logits is not None:
            canvas = seed.new_full((state.batch, k), state.mask_token_id)
            canvas[:, 0] = seed
            draft_ids, draft_probs = pick_drafts(state, state.process_own(draft_logits, canvas), rows)
        block = torch.cat((seed[:, None], draft_ids), 1)
        num_masks = k if drafting or mix < 1 else 0
        hidden = state.propose_from_each(block, num_masks, state.adapter)
        logits = state.process(_verifier_logits(state, hidden), block)
        num_accepted, seed = verify(state, draft_ids, draft_probs, logits, rows)
        state.cache.advance([n + 1 for n in num_accepted], stride=num_masks + 1)
        had_draft = has_draft
        if drafting:
            # The first mask's own guess gives way to the verifier's token, which is the next seed.
            draft_logits = state.logits(hidden[range(state.batch), num_accepted, 2:])
            has_draft = [True] * state.batch
        steps = cycle_steps(state, draft_ids, num_accepted, seed, 1)
        yield [step if had else replace(step, draft=[]) for step, had in zip(steps, had_draft, strict=True)]


def _verifier_logits(state: DecodeState, hidden: Tensor) -> Tensor:
    """Logits [B, R, V] of the token after each d_i; with verifier_mix < 1 of the mix of AR and first mask."""
    mix = state.settings.verifier_mix
    ar_logits = state.causal_logits(hidden[:, :, 0])
    if mix == 1:
        return ar_logits
    diffusion_logits = state.logits(hidden[:, :, 1])
    return (mix * ar_logits.float().softmax(-1) + (1 - mix) * diffusion_logits.float().softmax(-1)).log()
