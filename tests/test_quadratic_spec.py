"""Quadratic self-speculation: its forwards are those of the paper's layout, its cache stays that of AR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import END, MASK, PROMPT, answers, generate, options, prompts, says, speaker
from naive import Oracle, by_position, count_forwards, scripted_model
from torch import Tensor

from trimode_vlm.decoders import DecodeState
from trimode_vlm.draft_adapter import DraftAdapter

WORDS = [20 + i for i in range(9)]


@pytest.fixture
def cycles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Tensor, int, Tensor]]:
    """(cache lengths, ids [B, R], number of masks, logits [B, R, 1 + masks, V]) of each quadratic forward."""
    seen: list[tuple[list[int], Tensor, int, Tensor]] = []
    forward = DecodeState.propose_from_each

    def recorded(state: DecodeState, ids: Tensor, num_masks: int, *adapter: Any) -> Tensor:
        hidden = forward(state, ids, num_masks, *adapter)
        seen.append((state.cache.lengths, ids, num_masks, state.model.diffusion_head(hidden)))
        return hidden

    monkeypatch.setattr(DecodeState, "propose_from_each", recorded)
    return seen


def test_the_forwards_are_those_of_the_paper() -> None:
    """The drafts are wrong at answer places 3 and 4: cycles give 1 (the seed's row alone), 2, 1 and 4 tokens."""
    model = speaker(WORDS, [*WORDS[:3], 50, 51, *WORDS[5:]])
    sizes = count_forwards(model)
    [tokens], out = generate(model, [PROMPT], max_new_tokens=9, **options("quadratic_spec", 4))
    assert tokens == WORDS and out.accepted_lengths == [[1, 2, 1, 4]]
    assert out.nfe == [5] == [len(sizes)] and out.tokens_per_forward == [8 / 4]
    drafts = [[20], [21, 22, 50, 51], [23, 51, 25, 26], [24, 25, 26, 27]]
    for (ids, positions, ahead), draft, first in zip(model.encoder.calls[1:], drafts, (0, 1, 3, 4), strict=True):
        assert ids == [[token for word in draft for token in [word, MASK, MASK, MASK, MASK]]]
        start = len(PROMPT) + first
        assert positions == [[start + row + column for row in range(len(draft)) for column in range(5)]]
        assert ahead == [[False, True, True, True, True] * len(draft)]


def test_events_show_draft_and_acceptance() -> None:
    model = speaker(WORDS, [*WORDS[:3], 50, 51, *WORDS[5:]])
    stream = model.stream(torch.tensor([PROMPT]), max_new_tokens=9, **options("quadratic_spec", 4))
    events = [(event.token_ids, event.draft, event.num_accepted, event.num_forwards) for event in stream]
    assert events == [
        ([20], None, None, 1),
        ([21], [], 0, 2),
        ([22, 23], [22, 50, 51], 1, 3),
        ([24], [51, 25, 26], 0, 4),
        ([25, 26, 27, 28], [25, 26, 27], 3, 5),
    ]


@pytest.mark.parametrize("block_length", [2, 5])
def test_cached_logits_equal_a_cacheless_recomputation(
    block_length: int, cycles: list[tuple[list[int], Tensor, int, Tensor]]
) -> None:
    """Of verifier and masks, after each cycle, in a ragged batch whose rows accept differently."""
    model = make_tiny_model(seed=3, vision=False)
    rows = prompts(3, seed=3)
    tokens, out = generate(model, rows, max_new_tokens=16, eos_token_id=[], **options("quadratic_spec", block_length))
    known = [row + answer for row, answer in zip(rows, tokens, strict=True)]
    assert len(cycles) == out.total_nfe - 1 and len({n for lengths, *_ in cycles for n in lengths}) > 10
    oracle = Oracle(model, [], [])
    for lengths, ids, num_masks, logits in cycles:
        if len(lengths) < len(rows):
            continue  # which rows are left is not recorded
        for row, n in enumerate(lengths):
            expected = oracle.quadratic_logits(known[row][:n], ids[row].tolist(), num_masks)
            assert (logits[row] - expected).abs().max() < 1e-4
    assert any(len(set(lengths)) > 1 for lengths, *_ in cycles)


def test_the_cache_holds_what_ar_left() -> None:
    model = make_tiny_model(seed=4, vision=False)
    ids = torch.tensor([PROMPT])
    chosen: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
    ar, spec = (model.generate(ids, **chosen, **options(mode, 4)).cache.kv for mode in ("ar", "quadratic_spec"))
    n = min(ar.lengths[0], spec.lengths[0])
    assert n >= len(PROMPT) + 19
    torch.testing.assert_close(spec.kv[..., :n, :], ar.kv[..., :n, :], atol=1e-5, rtol=1e-5)


def test_nothing_is_drafted_where_no_draft_could_be_used(cycles: list[tuple[list[int], Tensor, int, Tensor]]) -> None:
    model = speaker(WORDS)
    generate(model, [PROMPT], max_new_tokens=3, **options("quadratic_spec", 1))
    assert [(ids.tolist(), num_masks) for _, ids, num_masks, _ in cycles] == [([[20]], 0), ([[21]], 0)]
    cycles.clear()
    generate(model, [PROMPT], max_new_tokens=7, **options("quadratic_spec", 4))
    assert [(ids.shape[1], num_masks) for _, ids, num_masks, _ in cycles] == [(1, 4), (4, 4), (1, 0)]


def test_the_head_sees_verdicts_and_the_next_draft_alone() -> None:
    """At most k positions of k (k + 1) at once: at a real vocabulary the others' logits would be most of the memory."""
    model = make_tiny_model(seed=5, vision=False)
    rows: list[int] = []
    model.diffusion_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].numel() // 32))
    generate(model, [PROMPT], max_new_tokens=20, eos_token_id=[], **options("quadratic_spec", 8))
    assert max(rows) == 8


@pytest.mark.parametrize("mix", [0.3, 0.7])
def test_a_mixed_verifier_follows_its_formula(mix: float) -> None:
    differs = False
    for seed in range(4):
        model = make_tiny_model(seed=seed, vision=False)
        oracle = Oracle(model, [END], model.config.never_sampled_ids)
        for block_length in (1, 3):
            expected = oracle.quadratic_spec(PROMPT, 12, block_length, mix)
            [tokens], out = generate(
                model, [PROMPT], max_new_tokens=12, verifier_mix=mix, **options("quadratic_spec", block_length)
            )
            assert tokens == expected.token_ids and out.nfe == [expected.nfe]
            assert out.accepted_lengths == [expected.accepted_lengths]
            differs |= tokens != oracle.ar(PROMPT, 12).token_ids
    assert differs


def test_a_mixed_verifier_samples_the_mix() -> None:
    """One word of two by the causal table, the other by the masks: 0.25 and 0.75."""
    causal, ahead = says([20, 20], shift=1, sure=50.0), says([20, 21], sure=50.0)
    model = scripted_model(make_tiny_model(vision=False).config, by_position(causal), by_position(ahead))
    out = model.generate(
        torch.tensor([PROMPT] * 2000), max_new_tokens=2, do_sample=True, seed=1, verifier_mix=0.25,
        **options("quadratic_spec", 4),
    )  # fmt: skip
    share = out.sequences[:, -1].eq(20).double().mean()
    assert set(out.sequences[:, -1].tolist()) == {20, 21} and abs(share - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.5, True, "half", float("nan")])
def test_a_mix_out_of_range_is_refused(value: Any) -> None:
    model = speaker(WORDS)
    with pytest.raises(ValueError, match="verifier_mix must"):
        model.generate(torch.tensor([PROMPT]), mode="quadratic_spec", verifier_mix=value)
    assert model.encoder.calls == []


def test_a_mix_belongs_to_this_mode() -> None:
    with pytest.raises(ValueError, match="does not use 'verifier_mix'; it belongs to quadratic_spec"):
        speaker(WORDS).generate(torch.tensor([PROMPT]), mode="linear_spec", verifier_mix=0.5)


@pytest.mark.parametrize("lean", [True, False])
def test_a_draft_adapter_acts_on_masks_alone(lean: bool, cycles: list[tuple[list[int], Tensor, int, Tensor]]) -> None:
    model = make_tiny_model(seed=6, vision=False)
    if not lean:
        model.encoder.norm.register_forward_hook(lambda *args: None)
    chosen: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [], **options("quadratic_spec", 4)}
    expected, _ = generate(model, [PROMPT], **chosen)
    [plain, *_] = cycles
    cycles.clear()
    g = torch.Generator().manual_seed(0)
    factors = {
        f"encoder.layers.{i}.self_attn.o_proj": (torch.randn(2, 32, generator=g), torch.randn(32, 2, generator=g))
        for i in range(2)
    }
    model.draft_adapter = DraftAdapter(Path(), 2, 1.0, factors)
    tokens, _ = generate(model, [PROMPT], **chosen)
    assert tokens == expected
    assert torch.equal(cycles[0][3][:, :, 0], plain[3][:, :, 0])
    assert (cycles[0][3][:, :, 1:] - plain[3][:, :, 1:]).abs().min(-1).values.max() > 1e-3


def test_it_needs_about_half_the_forwards_of_linear_spec() -> None:
    words = [20 + i % 30 for i in range(81)]
    model = speaker(words)
    linear, quadratic = (
        model.generate(torch.tensor([PROMPT]), max_new_tokens=81, **options(mode, 8))
        for mode in ("linear_spec", "quadratic_spec")
    )
    assert answers(linear, len(PROMPT)) == answers(quadratic, len(PROMPT)) == [words]
    assert (linear.nfe, quadratic.nfe) == ([1 + 20], [1 + 1 + 10])
