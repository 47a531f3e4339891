"""Automatic mode: AR or self-speculation, and how long a draft, decided before every cycle by the policy.

AR is self-speculation with block length 1: nothing is drafted, one forward gives one token. All rows of a batch take
the same block length. A row's text does not depend on it: greedy and sampled, it is that of AR with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..calibration import policy_for
from ..coupling import Races, pick_coupled
from ..policy import Acceptance, Policy
from .linear_spec import add_seeds, cycle_steps
from .state import DecodeState, Step


def decode_auto(state: DecodeState) -> Iterator[list[Step]]:
    """Yield as linear_spec does; cycles of block length 1 have an empty draft."""
    return decode_adaptive(state, shortest=1)


def decode_adaptive(state: DecodeState, shortest: int) -> Iterator[list[Step]]:
    """Self-speculation with block lengths from `shortest` to the settings' by the policy of the model."""
    longest = 1 if state.model.config.mask_token_id is None else state.settings.block_length
    policy = Policy(lambda rows, block_length: 1.0)
    seed, num_new = torch.empty(0, dtype=torch.long, device=state.next_logits.device), state.batch
    # By place in the batch.
    rows: list[Acceptance] = []
    races: list[Races] = []
    while True:
        if num_new:
            if longest > 1:
                policy = policy_for(state.model, state.batch)
            seed, steps = add_seeds(state, seed, num_new)
            rows = rows + [Acceptance() for _ in range(num_new)]
            races = races + [Races(generator) for generator in state.generators[-num_new:]]
            yield steps
        kept = state.drop_finished()
        if kept is not None:
            seed = seed[kept]
            rows, races = ([values[i] for i in kept.tolist()] for values in (rows, races))
        num_new = state.join()
        if num_new:
            continue
        if not state.rows:
            return
        limits = list(state.remaining)
        k = policy.next_block_length(rows, limits, longest, shortest)
        seed, steps = cycle(state, seed, k, races)
        yield steps
        # The driver has moved `remaining` by what counted of each row's tokens.
        for row, limit, left in zip(rows, limits, state.remaining, strict=True):
            policy.observe(row, limit - left, min(k, limit))


def cycle(state: DecodeState, seed: Tensor, block_length: int, races: list[Races]) -> tuple[Tensor, list[Step]]:
    """One cycle behind the seeds [B]: the next seeds, and what each row got."""
    params = state.settings.sampling
    drafting = block_length > 1
    block = seed[:, None]
    if drafting:
        canvas = seed.new_full((state.batch, block_length), state.mask_token_id)
        canvas[:, 0] = seed
        draft_ids = pick_coupled(state.propose(canvas, state.adapter)[:, 1:], params, races)
        block = torch.cat((block, draft_ids), 1)
    target = pick_coupled(state.process(state.commit(block), block), params, races)
    if drafting:
        agree = target[:, :-1] == block[:, 1:]
        accepted = agree.long().cumprod(-1).sum(-1)
        num_accepted, bonus = accepted.tolist(), target.gather(-1, accepted[:, None]).squeeze(-1)
        steps = cycle_steps(state, block[:, 1:], num_accepted, bonus, 2)
    else:
        bonus, num_accepted = target[:, 0], [0] * state.batch
        steps = [
            Step(row=row, token_ids=[token], draft=[], num_accepted=0, num_forwards=1)
            for row, token in zip(state.rows, bonus.tolist(), strict=True)
        ]
    counts = [n + 1 for n in num_accepted]
    state.cache.advance(counts)
    if params.do_sample:
        for race, count in zip(races, counts, strict=True):
            race.pass_over(count)
    return bonus, steps
