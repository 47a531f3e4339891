"""Autoregressive decoding: one token per forward."""

from __future__ import annotations

from collections.abc import Iterator

from ..sampling import pick
from .state import DecodeState, Step


def decode_ar(state: DecodeState) -> Iterator[list[Step]]:
    """Yield one token per row and round; the first comes from the prefill's logits and costs no forward."""
    num_new = state.batch
    while True:
        token = pick(state.next_logits, state.settings.sampling, state.generators)
        costs = [1] * (state.batch - num_new) + [0] * num_new
        tokens = token.tolist()
        yield [
            Step(row=r, token_ids=[t], num_forwards=cost) for r, t, cost in zip(state.rows, tokens, costs, strict=True)
        ]
        kept = state.drop_finished()
        if kept is not None:
            token = token[kept]
        if state.rows:
            state.next_logits = state.process(state.commit(token[:, None]), token[:, None])[:, -1]
            state.cache.advance([1] * state.batch)
        num_new = state.join()
        if not state.rows:
            return
