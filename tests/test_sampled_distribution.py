"""Self-speculation at temperature > 0 draws from the AR distribution (pitfalls.md, Decoding)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_tiny_model, tiny_config
from decoding_cases import MODES, PROMPT, SELF_SPECULATION, V, generate, options
from naive import by_position, scripted_model
from torch import Tensor

# --- Temperature > 0: self-speculation draws from the AR distribution.

WORDS = [20, 21, 22, 23]


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """p-value of observed counts [n] under probabilities [n]; cells of probability 0 must be empty."""
    assert counts[probs == 0].sum() == 0
    counts, probs = counts[probs > 0].double(), probs[probs > 0].double()
    expected = probs / probs.sum() * counts.sum()
    assert expected.min() >= 5, "too few draws for the chi-square approximation"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def random_language(seed: int) -> Any:
    """Next word by position and last word (causal), own word by position (draft): distributions that differ widely."""
    generator = torch.Generator().manual_seed(seed)
    causal = torch.full((16, V, V), -1e4)
    causal[:, :, WORDS] = torch.randn(16, V, len(WORDS), generator=generator)
    draft = torch.full((16, V), -1e4)
    draft[:, WORDS] = 1.5 * torch.randn(16, len(WORDS), generator=generator)
    draft[::3, WORDS[0]] = -1e4  # a word that the draft never says
    draft[:, 40] = 0.0  # a word that the verifier never says
    model = scripted_model(
        tiny_config(vision=False), lambda position, token, forward: causal[position, token], by_position(draft)
    )
    return model, causal


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The sampling distribution of one position, written out: temperature, top-k, top-p."""
    probs = (logits / temperature).softmax(-1)
    if top_k:
        kept = sorted(range(len(probs)), key=lambda i: -float(probs[i]))[:top_k]
        probs = torch.tensor([float(p) if i in kept else 0.0 for i, p in enumerate(probs)])
        probs = probs / probs.sum()
    if top_p < 1:
        order, mass, kept = sorted(range(len(probs)), key=lambda i: -float(probs[i])), 0.0, []
        for i in order:
            kept.append(i)
            mass += float(probs[i])
            if mass >= top_p:
                break
        probs = torch.tensor([float(p) if i in kept else 0.0 for i, p in enumerate(probs)])
        probs = probs / probs.sum()
    return probs


@pytest.mark.parametrize(
    ("mode", "temperature", "top_k", "top_p"),
    [
        ("ar", 0.7, 0, 1.0),
        ("linear_spec", 0.7, 0, 1.0),
        ("linear_spec", 1.0, 0, 1.0),
        ("linear_spec", 1.3, 3, 1.0),
        ("linear_spec", 1.0, 0, 0.8),
        ("quadratic_spec", 0.7, 0, 1.0),
        ("quadratic_spec", 1.0, 0, 1.0),
        ("quadratic_spec", 1.3, 3, 1.0),
        ("quadratic_spec", 1.0, 0, 0.8),
    ],
)
def test_sampled_tokens_have_the_ar_distribution(mode: str, temperature: float, top_k: int, top_p: float) -> None:
    """Marginals of each place and pairs of neighbours against the exact chain of the causal table.

    Over 20,000 rows where all of the distribution is drawn from, over 4000 behind a filter.
    """
    model, causal = random_language(seed=11)
    length, num_draws = 5, 20_000 if mode in SELF_SPECULATION and (top_k, top_p) == (0, 1.0) else 4000
    out = model.generate(
        torch.tensor([[30, 20]] * num_draws), max_new_tokens=length, do_sample=True, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=1234, **options(mode, 3),
    )  # fmt: skip
    drawn = out.sequences[:, 2:]
    assert drawn.shape == (num_draws, length) and set(drawn.unique().tolist()) <= set(WORDS)
    index = (drawn[..., None] == torch.tensor(WORDS)).long().argmax(-1)
    marginal = torch.zeros(len(WORDS))
    marginal[0] = 1.0  # the prompt's last word is WORDS[0]
    p_values = []
    for place in range(length):
        rows = [filtered(causal[1 + place, word], temperature, top_k, top_p)[WORDS] for word in WORDS]
        joint = marginal[:, None] * torch.stack(rows)
        marginal = joint.sum(0)
        p_values.append(chi_square_p(index[:, place].bincount(minlength=len(WORDS)), marginal))
        if place:
            pairs = index[:, place - 1] * len(WORDS) + index[:, place]
            p_values.append(chi_square_p(pairs.bincount(minlength=len(WORDS) ** 2), joint.flatten()))
    assert min(p_values) * len(p_values) > 0.01, p_values  # Bonferroni: of so many tests the smallest
    if mode in SELF_SPECULATION:
        accepted = [n for lengths in out.accepted_lengths for n in lengths]
        assert min(accepted) == 1 and max(accepted) == 3


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.3, 3, 1.0), (1.0, 0, 0.8)])
def test_diffusion_draws_its_masks_from_the_filtered_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Blocks of a seed, drawn by the causal table, and one mask, drawn by the other and committed at once."""
    generator = torch.Generator().manual_seed(3)
    tables = torch.full((2, 16, V), -1e4)
    tables[:, :, WORDS] = torch.randn(2, 16, len(WORDS), generator=generator)
    model = scripted_model(tiny_config(vision=False), *map(by_position, tables))
    out = model.generate(
        torch.tensor([[30, 20]] * 4000), max_new_tokens=4, do_sample=True, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=77, **options("diffusion", 2),
    )  # fmt: skip
    index = (out.sequences[:, 2:, None] == torch.tensor(WORDS)).long().argmax(-1)
    p_values = []
    for place in range(4):
        logits = tables[place % 2, 1 + place + place % 2]
        expected = filtered(logits, temperature, top_k, top_p)[WORDS]
        p_values.append(chi_square_p(index[:, place].bincount(minlength=len(WORDS)), expected))
    assert min(p_values) * len(p_values) > 0.01, p_values


def test_a_seed_repeats_the_draw_and_leaves_the_global_stream_alone() -> None:
    model = make_tiny_model(seed=6, vision=False)
    for mode in MODES:
        chosen = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, **options(mode, 4, 0.5)}
        before = torch.get_rng_state()
        runs = [generate(model, [PROMPT], seed=seed, **chosen)[0] for seed in (7, 7, 8)]
        assert runs[0] == runs[1] != runs[2]
        assert torch.equal(before, torch.get_rng_state())
