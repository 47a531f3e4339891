"""Sampled drafts verified by block (arXiv 2403.10444): AR's distribution, and never fewer tokens than by token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decoding_cases import PROMPT, SELF_SPECULATION, options, speaker
from test_sampled_distribution import WORDS, chi_square_p, filtered, random_language
from torch import Tensor

from trimode_vlm.sampling import block_accept, block_acceptance

# A language: the next token's probabilities [V] behind every prefix.
Language = dict[tuple[int, ...], Tensor]


def chain(seed: int, vocab: int, length: int, kind: str) -> Language:
    """Conditional distributions behind every prefix of up to `length` tokens; "sparse" ones rule tokens out."""
    generator = torch.Generator().manual_seed(seed)
    language: Language = {}
    for n in range(length + 1):
        for prefix in itertools.product(range(vocab), repeat=n):
            probs = (2 * torch.randn(vocab, generator=generator).double()).softmax(-1)
            if kind == "sparse":
                dropped = torch.rand(vocab, generator=generator) < 0.4
                dropped[torch.randint(vocab, (), generator=generator)] = False
                probs = probs.masked_fill(dropped, 0)
            language[prefix] = probs / probs.sum()
    return language


def rows(language: Language, draft: tuple[int, ...], count: int) -> Tensor:
    return torch.stack([language[draft[:i]] for i in range(count)])


def drafts(q: Language, vocab: int, k: int) -> list[tuple[tuple[int, ...], float]]:
    """Every draft that q can draw, with its probability."""
    found = []
    for draft in itertools.product(range(vocab), repeat=k):
        chance = math.prod(float(q[draft[:i]][token]) for i, token in enumerate(draft))
        found += [(draft, chance)] if chance > 0 else []
    return found


def block_lengths(p: Language, q: Language, draft: tuple[int, ...]) -> tuple[list[float], Tensor]:
    """The chance that 0..k tokens of a draft are kept, and the weights of the token behind them."""
    k = len(draft)
    passes, weights = block_acceptance(torch.tensor(draft), rows(q, draft, k), rows(p, draft, k + 1))
    h = passes.tolist()
    longer = [1.0] * (k + 1)
    for i in reversed(range(k)):
        longer[i] = longer[i + 1] * (1 - h[i])
    return [longer[0]] + [h[i] * longer[i + 1] for i in range(k)], weights


def expected_by_token(p: Language, q: Language, vocab: int, k: int) -> float:
    """Mean number of tokens that min(1, p / q), token by token, keeps."""
    total = 0.0
    for draft, chance in drafts(q, vocab, k):
        kept = 1.0
        for i, token in enumerate(draft):
            kept *= min(1.0, float(p[draft[:i]][token] / q[draft[:i]][token]))
            total += chance * kept
    return total


def expected_by_block(p: Language, q: Language, vocab: int, k: int) -> float:
    return sum(
        chance * sum(n * part for n, part in enumerate(block_lengths(p, q, draft)[0]))
        for draft, chance in drafts(q, vocab, k)
    )


KINDS = ["dense", "sparse"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "k"), [(2, 1), (2, 4), (3, 2), (3, 3), (4, 2)])
def test_the_output_has_the_targets_distribution_exactly(vocab: int, k: int, kind: str) -> None:
    """Kept tokens, the token behind them, then AR up to k + 1 tokens: summed over all drafts, lengths and tokens."""
    for seed in range(8):
        p, q = chain(seed, vocab, k, kind), chain(1000 + seed, vocab, k, kind)
        out: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(vocab), repeat=k + 1), 0.0)
        for draft, chance in drafts(q, vocab, k):
            lengths, weights = block_lengths(p, q, draft)
            for n, part in enumerate(lengths):
                if part * chance < 1e-15:
                    continue
                behind = weights[n] / weights[n].sum()
                for rest in itertools.product(range(vocab), repeat=k + 1 - n):
                    text = draft[:n] + rest
                    tail = [float(p[text[:i]][text[i]]) for i in range(n + 1, k + 1)]
                    out[text] += chance * part * float(behind[rest[0]]) * math.prod(tail)
        for text, got in out.items():
            want = math.prod(float(p[text[:i]][token]) for i, token in enumerate(text))
            assert abs(got - want) < 1e-9, (seed, text, got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_no_fewer_tokens_than_by_token(kind: str) -> None:
    """On 300 random pairs of chains, by enumeration; with more on most of those of three drafts."""
    more = 0
    for seed in range(300):
        vocab, k = ((2, 3), (3, 3), (3, 2))[seed % 3]
        p, q = chain(seed, vocab, k, kind), chain(1000 + seed, vocab, k, kind)
        gain = expected_by_block(p, q, vocab, k) - expected_by_token(p, q, vocab, k)
        assert gain > -1e-12
        more += gain > 1e-6
    assert more >= 150


def test_the_papers_example() -> None:
    """Two tokens, draft 2/3 and 1/3, target 1/3 and 2/3, two drafts: 10/9 tokens by token, 11/9 by block."""
    prefixes = [text for n in range(3) for text in itertools.product(range(2), repeat=n)]
    q = dict.fromkeys(prefixes, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    p = dict.fromkeys(prefixes, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    assert abs(expected_by_token(p, q, 2, 2) - 10 / 9) < 1e-12
    assert abs(expected_by_block(p, q, 2, 2) - 11 / 9) < 1e-12


def test_equal_and_disjoint_distributions() -> None:
    same = torch.tensor([0.25, 0.75])
    passes, _ = block_acceptance(torch.tensor([1, 0, 1]), same.repeat(3, 1), same.repeat(4, 1))
    assert passes.tolist() == [1, 1, 1]
    never = torch.tensor([1.0, 0.0]).repeat(3, 1), torch.tensor([0.0, 1.0]).repeat(4, 1)
    assert block_acceptance(torch.tensor([0, 0, 0]), *never)[0].tolist() == [0, 0, 0]
    assert block_accept(torch.tensor([0, 0, 0]), *never, torch.Generator()) == (0, 1)
    none = torch.empty(0, dtype=torch.long), torch.empty(0, 2), torch.tensor([[0.0, 1.0]])
    assert block_accept(*none, torch.Generator()) == (0, 1)


def test_accepting_draws_what_the_chances_say() -> None:
    """20,000 draws of one draft against its exact joint distribution of length and next token."""
    p, q = chain(5, 3, 3, "dense"), chain(1005, 3, 3, "dense")
    draft = (0, 2, 1)
    lengths, weights = block_lengths(p, q, draft)
    exact = torch.tensor(lengths)[:, None] * weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    given = torch.tensor(draft), rows(q, draft, 3), rows(p, draft, 4)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros_like(exact)
    for _ in range(20_000):
        n, token = block_accept(*given, generator)
        counts[n, token] += 1
    probs = exact.flatten() * (exact.flatten() > 1e-12)
    assert chi_square_p(counts.flatten(), probs) > 0.01


@pytest.mark.parametrize(("mode", "temperature", "top_p"), [("linear_spec", 1.0, 0.8), ("quadratic_spec", 0.7, 1.0)])
def test_answers_verified_by_block_have_the_ar_distribution(mode: str, temperature: float, top_p: float) -> None:
    """Marginals and pairs of 20,000 answers against the exact chain of the causal table."""
    num_draws, length = 20_000, 4
    model, causal = random_language(seed=11)
    out = model.generate(
        torch.tensor([[30, 20]]), max_new_tokens=length, do_sample=True, temperature=temperature, top_p=top_p,
        seed=77, verification="block", num_return_sequences=num_draws, **options(mode, 4),
    )  # fmt: skip
    drawn = out.sequences[:, 2:]
    index = (drawn[..., None] == torch.tensor(WORDS)).long().argmax(-1)
    marginal = torch.zeros(len(WORDS))
    marginal[0] = 1.0  # the prompt's last word is WORDS[0]
    p_values = []
    for place in range(length):
        joint = marginal[:, None] * torch.stack(
            [filtered(causal[1 + place, word], temperature, 0, top_p)[WORDS] for word in WORDS]
        )
        marginal = joint.sum(0)
        p_values.append(chi_square_p(index[:, place].bincount(minlength=len(WORDS)), marginal))
        if place:
            pairs = index[:, place - 1] * len(WORDS) + index[:, place]
            p_values.append(chi_square_p(pairs.bincount(minlength=len(WORDS) ** 2), joint.flatten()))
    assert min(p_values) * len(p_values) > 0.01, p_values  # Bonferroni: of so many tests the smallest


@pytest.mark.parametrize("mode", SELF_SPECULATION)
def test_the_option_reaches_the_verifier(mode: str) -> None:
    model, _ = random_language(seed=11)
    chosen: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 1, **options(mode, 4)}
    by_token, default, by_block = (
        model.generate(torch.tensor([[30, 20]] * 200), **chosen, **how).accepted_lengths
        for how in ({"verification": "token"}, {}, {"verification": "block"})
    )
    assert by_token == default != by_block


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"mode": "linear_spec", "verification": "block"}, "no effect without do_sample=True"),
        ({"mode": "ar", "do_sample": True, "verification": "block"}, "belongs to linear_spec, quadratic_spec"),
        ({"mode": "diffusion", "do_sample": True, "verification": "block"}, "does not use 'verification'"),
        ({"mode": "linear_spec", "do_sample": True, "verification": "blocks"}, "known: token, block"),
        ({"mode": "linear_spec", "do_sample": True, "verification": "block", "block_length": "auto"}, "no effect"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speaker([20]).generate(torch.tensor([PROMPT]), **chosen)
