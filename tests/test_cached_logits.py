"""Every cached forward of a ragged batch equals its recomputation without a cache (pitfalls.md, Decoding)."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import END, MASK, MODES, generate, options, prompts
from test_auto import AnyLength
from torch import Tensor

from trimode_vlm.decoders import DecodeState
from trimode_vlm.patterns import Pattern

RULES = {"diffusion entropy": {"mode": "diffusion", "commit_rule": "entropy", "entropy_bound": 3.0, "block_length": 4}}


class Forward(NamedTuple):
    """Of one row in one call of the backbone: what it was given, and the hidden states [T, D] that came out."""

    call: int
    row: int
    length: int
    ids: list[int]
    positions: list[int]
    sees: Tensor
    hidden: Tensor


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    seen: list[Forward] = []
    hidden_of = DecodeState._hidden

    def recorded(state: DecodeState, ids: Tensor, positions: Tensor, pattern: Pattern, *adapter: Any) -> Tensor:
        lengths, T, call = list(state.cache.lengths), ids.shape[1], state.num_forwards
        hidden = hidden_of(state, ids, positions, pattern, *adapter)
        mask = pattern.attn_mask.expand(len(ids), 1, T, pattern.key_length)[:, 0]
        for b, (row, n) in enumerate(zip(state.rows, lengths, strict=True)):
            # The whole prefix, and no slot behind the row's own.
            assert mask[b, :, :n].all() and not mask[b, :, n + T :].any()
            place = positions[b if len(positions) > 1 else 0].tolist()
            seen.append(Forward(call, row, n, ids[b].tolist(), place, mask[b, :, n : n + T], hidden[b].clone()))
        return hidden

    monkeypatch.setattr(DecodeState, "_hidden", recorded)
    return seen


def recomputed(model: Any, prefix: list[int], forward: Forward) -> Tensor:
    """The same hidden states by one forward of everything: the prefix causal, the new tokens as they saw each other."""
    n, T = len(prefix), len(forward.ids)
    allowed = torch.ones(n + T, n + T, dtype=torch.bool).tril()
    allowed[n:, n:] = forward.sees
    pattern = Pattern(lambda b, h, q, k: allowed[q, k], 1, n + T, n + T, torch.device("cpu"))
    ids = torch.tensor([prefix + forward.ids])
    positions = torch.tensor([[*range(n), *forward.positions]])
    return model.encoder(model.encoder.embed_tokens(ids), positions, pattern)[0, n:]


@pytest.mark.parametrize("block_length", [3, 5])
@pytest.mark.parametrize("mode", [*MODES, "auto", *RULES])
def test_it_equals_a_recomputation(
    mode: str, block_length: int, forwards: list[Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AnyLength(block_length)
    monkeypatch.setattr(importlib.import_module("trimode_vlm.decoders.auto"), "policy_for", lambda *args: policy)
    model = make_tiny_model(seed=7, vision=False)
    rows = prompts(6, seed=7)
    chosen = {"max_new_tokens": 14, "eos_token_id": [END, 17, 30, 41]}
    chosen |= RULES[mode] if mode in RULES else options(mode, block_length, 0.15)
    answers, out = generate(model, rows, **chosen)
    known = [row + answer for row, answer in zip(rows, answers, strict=True)]
    assert len(set(out.num_new_tokens)) > 2
    assert len(forwards) >= sum(out.nfe) - len(rows) and {forward.row for forward in forwards} <= set(range(6))
    if mode.startswith("diffusion"):
        # Some calls denoise the blocks of some rows and read those of others.
        calls = [[MASK in f.ids for f in forwards if f.call == call] for call in {f.call for f in forwards}]
        assert any(len(set(is_draft)) == 2 for is_draft in calls)
    for forward in forwards:
        prefix = known[forward.row][: forward.length]
        assert len(prefix) == forward.length, "the cache holds what was not emitted"
        T = len(forward.ids)
        if mode != "quadratic_spec" or MASK not in forward.ids:
            # A block with a mask in it is denoised, both ways; what has none is read causally, and kept.
            assert forward.sees.equal(
                torch.ones(T, T).bool() if MASK in forward.ids else torch.ones(T, T).bool().tril()
            )
            assert forward.positions == list(range(forward.length, forward.length + T))
        with torch.inference_mode():
            logits = [model.diffusion_head(hidden) for hidden in (forward.hidden, recomputed(model, prefix, forward))]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
