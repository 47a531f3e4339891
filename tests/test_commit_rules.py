"""The rules by which diffusion commits beside the confidence threshold, on the rows of pitfalls.md (Decoding)."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_tiny_model, tiny_config
from decoding_cases import END, MASK, PROMPT, V, answers, generate, padded, prompts, says, speaker
from naive import Oracle, Rule, by_position, count_forwards, scripted_model
from torch import Tensor

ENTROPY = {"mode": "diffusion", "commit_rule": "entropy"}
LEARNED = {"mode": "diffusion", "commit_rule": "learned", "threshold": 0.5}
RULES = {"entropy": ENTROPY | {"entropy_bound": 3.0}, "learned": LEARNED}


def by_entropy(bound: float) -> Rule:
    """The surest first, by entropy; then on while those before it have at most the bound together."""

    def rule(probs: Tensor, masked: list[int]) -> list[int]:
        nats = {i: -sum(p * math.log(p) for p in probs[i].tolist() if p > 0) for i in masked}
        taken: list[int] = []
        for i in sorted(masked, key=lambda i: (nats[i], i)):
            if sum(nats[j] for j in taken) > bound:
                break
            taken.append(i)
        return taken

    return rule


class EveryOther:
    """A learned sampler that is sure of every second position, committed or not, by the token seen there."""

    config = SimpleNamespace(block_length=64)

    def probabilities(self, model: Any, logits: Tensor, canvas: Tensor, masked: Tensor) -> Tensor:
        return (torch.arange(canvas.shape[1]) % 2 == logits.argmax(-1) % 2).float()


def with_sampler(model: Any) -> Any:
    model.learned_sampler = EveryOther()
    return model


@pytest.mark.parametrize("block_length", [1, 2, 7])
@pytest.mark.parametrize("bound", [0.0, 0.5, 3.0, 500.0])
def test_the_entropy_rule_is_its_formula(bound: float, block_length: int) -> None:
    """Tokens, forwards and finish reason of the cacheless oracle; a bound of nothing commits one token a forward."""
    model = make_tiny_model(seed=1, vision=False)
    oracle = Oracle(model, [END, 17], model.config.never_sampled_ids)
    for prompt, budget in itertools.product(prompts(3, seed=5), (3, 12)):
        expected = oracle.diffusion(prompt, budget, block_length, None, by_entropy(bound))
        chosen = {**ENTROPY, "entropy_bound": bound, "block_length": block_length, "eos_token_id": [END, 17]}
        [tokens], out = generate(model, [prompt], max_new_tokens=budget, **chosen)
        assert (tokens, out.nfe, out.finish_reasons) == (
            expected.token_ids, [expected.nfe], [expected.finish_reason],
        )  # fmt: skip


def test_bounds_between_all_and_nothing_differ() -> None:
    model = make_tiny_model(seed=1, vision=False)
    chosen = {**ENTROPY, "block_length": 8, "max_new_tokens": 16, "eos_token_id": []}
    nfe = [generate(model, [PROMPT], entropy_bound=bound, **chosen)[1].nfe[0] for bound in (0.0, 3.0, 500.0)]
    assert nfe == sorted(nfe, reverse=True) and len(set(nfe)) == 3 and nfe[-1] == 1 + 1 + 1 + 1


@pytest.mark.parametrize("rule", RULES)
def test_an_end_token_ends_the_output_where_it_stands(rule: str) -> None:
    for end_at in (0, 1, 2, 3, 5, 9):
        words = [20 + i for i in range(12)]
        words[end_at] = END
        model = with_sampler(speaker(words))
        sizes = count_forwards(model)
        [tokens], out = generate(model, [PROMPT], max_new_tokens=12, block_length=4, **RULES[rule])
        assert tokens == words[: end_at + 1] and out.finish_reasons == ["stop"]
        assert (out.num_new_tokens, out.nfe) == ([end_at + 1], [len(sizes)])


@pytest.mark.parametrize("rule", RULES)
def test_the_budget_is_exact_and_no_filler_is_returned(rule: str) -> None:
    """Every position wants the mask most, then image tokens, padding and bos, then a word."""
    words = [20 + i for i in range(12)]
    causal, ahead = says(words, shift=1), says(words)
    for table in (causal, ahead):
        table[:, [MASK, 4, 5, 6, 7, 0, 1]] = torch.tensor([60.0, *[50.0] * 6])
    model = with_sampler(scripted_model(tiny_config(), by_position(causal), by_position(ahead)))
    for budget, block_length in itertools.product((1, 4, 7, 12), (1, 3, 5, 40)):
        [tokens], out = generate(model, [PROMPT], max_new_tokens=budget, block_length=block_length, **RULES[rule])
        assert tokens == words[:budget] and out.finish_reasons == ["length"]


@pytest.mark.parametrize("rule", RULES)
def test_a_row_in_a_batch_gives_what_it_gives_alone(rule: str) -> None:
    model = with_sampler(make_tiny_model(seed=7, vision=False))
    rows = prompts(10, seed=7)
    chosen = {"max_new_tokens": 15, "eos_token_id": [END, 17, 30, 41], "block_length": 4, **RULES[rule]}
    inputs = padded(rows)
    out = model.generate(**inputs, **chosen)
    together = answers(out, inputs["input_ids"].shape[1])
    assert len(set(out.num_new_tokens)) > 2
    for i, row in enumerate(rows):
        [alone], single = generate(model, [row], **chosen)
        assert together[i] == alone
        assert (out.nfe[i], out.finish_reasons[i]) == (single.nfe[0], single.finish_reasons[0])


@pytest.mark.parametrize("rule", RULES)
def test_a_committed_token_is_never_changed(rule: str) -> None:
    """The script changes its mind at every forward, and is surest about what is already committed."""
    drafts = 3.0 * torch.randn(64, 80, V, generator=torch.Generator().manual_seed(0))
    model = scripted_model(
        tiny_config(vision=False),
        by_position(says([20 + i for i in range(24)], shift=1)),
        lambda position, token, forward: drafts[forward % 64, position] * (1 + 9 * (token != MASK))[..., None],
    )
    chosen = {"block_length": 8, "max_new_tokens": 24, "eos_token_id": [], **RULES[rule]}
    stream = with_sampler(model).stream(torch.tensor([PROMPT]), **chosen)
    canvases = [event.canvas for event in stream]
    changed = 0
    for before, after in itertools.pairwise(canvases):
        if MASK in before:
            assert all(old in (MASK, new) for old, new in zip(before, after, strict=True))
            changed += before != after
    assert changed > 4
    final = stream.output().sequences[0, len(PROMPT) :].tolist()
    blocks = [canvas for canvas in canvases if MASK not in canvas]
    assert final == [token for block in dict.fromkeys(map(tuple, blocks)) for token in block]
