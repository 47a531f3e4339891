"""The policy of mode auto against its formula, on numbers alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from trimode_vlm.policy import Acceptance, Policy, SharedRates, candidates, expected_tokens


def cheap_blocks(rows: int, k: int) -> float:
    """Two forwards, a token more costs a tenth of the first: drafts pay from about three tokens on."""
    return (1 if k == 1 else 2) * (0.9 + 0.1 * k)


@pytest.mark.parametrize("rates", [[0.0], [0.83], [1.0], [0.9, 0.2], [0.3, 1.0, 0.7], [1.0, 0.5, 0.4, 0.9]])
@pytest.mark.parametrize("k", [1, 2, 3, 6, 9])
def test_expected_tokens_are_those_of_all_outcomes(rates: list[float], k: int) -> None:
    """Every way in which k - 1 draft tokens can hold or fail, with its probability and the tokens that it brings."""
    by_place = [rates[min(octave, len(rates) - 1)] for octave in (0, 1, 1, 2, 2, 2, 2, 3)][: k - 1]
    mean = 0.0
    for outcome in itertools.product((True, False), repeat=k - 1):
        probability, held = 1.0, 0
        for rate, holds in zip(by_place, outcome, strict=True):
            probability *= rate if holds else 1 - rate
        while held < k - 1 and outcome[held]:
            held += 1
        mean += probability * (held + 1)
    assert expected_tokens(rates, [k]) == [pytest.approx(mean)]
    assert expected_tokens(rates, [1, (k + 1) // 2, k])[2] == pytest.approx(mean)


def test_the_choice_is_the_best_of_the_formula() -> None:
    """Against the sum written out, on random costs, rates, limits and bounds."""
    draw, chosen = random.Random(0), set()
    for _ in range(400):
        costs = {k: draw.uniform(0.5, 8) for k in [*range(1, 65)]}
        rates = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(draw.randint(1, 5))]
        limits = [draw.choice([1, 3, 100]) for _ in rates]
        longest, shortest = draw.choice([1, 2, 8, 24, 32, 64]), draw.choice([1, 2])
        policy = Policy(lambda rows, k, costs=costs: costs[k])
        got = policy.choose([[a] for a in rates], limits, longest, shortest)
        allowed = [k for k in (1, 2, 4, 8, 16, 32, 64) if shortest <= k < longest] + [longest]

        def speed(k: int, costs: Any = costs, rates: Any = rates, limits: Any = limits) -> float:
            tokens = (a**j for a, limit in zip(rates, limits, strict=True) for j in range(min(k, limit)))
            return sum(tokens) / costs[k]

        assert got in allowed and speed(got) >= max(map(speed, allowed)) * (1 - 1e-9)
        chosen.add(got)
    assert len(chosen) == 8


def test_the_choice_follows_rates_and_costs() -> None:
    policy = Policy(cheap_blocks)
    by_rate = [policy.choose([[a]], [1000], 64) for a in (0.0, 0.3, 0.75, 0.9, 0.97, 1.0)]
    assert by_rate == sorted(by_rate) and by_rate[:2] == [1, 1] and by_rate[-1] == 64 and len(set(by_rate)) > 3
    # Where rows together fill the machine, k tokens cost k times as much: AR.
    assert Policy(lambda rows, k: (1 if k == 1 else 2) * k * rows).choose([[1.0]] * 4, [100] * 4, 64) == 1
    # What a row may still emit is all that it can gain.
    assert policy.choose([[1.0]], [1], 64) == 1 and policy.choose([[1.0]], [6], 64) == 8
    assert candidates(24) == [1, 2, 4, 8, 16, 24] and candidates(1, 2) == [1] and candidates(3, 2) == [2, 3]


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("k", [2, 4, 16])
def test_a_full_block_says_at_least_so_many(rate: float, k: int) -> None:
    """The estimate finds the rate from blocks that are too short to show it, which a mean of lengths cannot."""
    draw, seen = random.Random(1), Acceptance()
    for _ in range(20000):
        tokens = 1
        while tokens < k and draw.random() < rate:
            tokens += 1
        seen.observe(tokens, k, decay=1.0)
    assert seen.held / (seen.held + seen.failed) == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize("longest", [8, 12, 64])
def test_the_rate_of_every_octave_is_found(longest: int) -> None:
    """Short answers beside long ones: most drafts end early or not at all, which one rate cannot say."""
    draw, shared, sizes = random.Random(2), SharedRates(), [2**j for j in range(1, 7) if 2**j <= longest] + [longest]
    rates, sums, count = [0.8, 0.5, 0.9, 1.0, 0.97, 0.95], [0.0] * 6, 0
    for cycle in range(4000):
        k, tokens = draw.choice(sizes), 1
        while tokens < k and draw.random() < rates[tokens.bit_length() - 1]:
            tokens += 1
        shared.observe(tokens, k)
        if cycle >= 400:
            sums, count = [a + b for a, b in zip(sums, shared.rates, strict=False)], count + 1
    assert len(sums) == len(shared.rates) == (longest - 1).bit_length()
    # An octave counts beside the one before it, which draws it a little that way.
    assert [total / count for total in sums] == pytest.approx(rates[: len(sums)], abs=0.06)


def test_what_no_draft_has_reached_is_like_what_came_before() -> None:
    """Drafts of 16 that always held make 32 worth a try, however little was believed at first."""
    policy = Policy(lambda rows, k: 1 if k == 1 else 2 + 0.1 * k)
    for _ in range(40):
        policy.observe(Acceptance(tokens=50), 16, 16)
    assert len(policy.old.rates) == 4 and policy.old.rates[-1] > 0.98
    assert policy.next_block_length([Acceptance(tokens=50)], [1000], 32) == 32


def test_one_rate_for_short_and_long_answers_would_choose_too_short_a_draft() -> None:
    """Half of the answers end after 3 tokens, half fill any draft: 32 tokens bring 17.5 on average, 16 bring 9.5."""
    policy = Policy(lambda rows, k: 1 if k == 1 else 2 * (2 + 0.09 * k))
    for _ in range(60):
        policy.observe(Acceptance(), 3, 16)
        policy.observe(Acceptance(), 16, 16)
    assert expected_tokens(policy.young.rates, [16]) == [pytest.approx(9.5, abs=1)]
    assert policy.next_block_length([Acceptance()], [1000], 32) == 32
    # The most likely single rate of the same cycles is 17 / 18, of which 32 brings 15.1: 16 is then chosen.
    assert policy.choose([[17 / 18]], [1000], 32) == 16


def test_the_average_is_exponential() -> None:
    seen = Acceptance()
    for tokens, k in ((3, 8), (8, 8), (1, 4)):
        seen.observe(tokens, k, decay=0.5)
    assert (seen.held, seen.failed) == (0.25 * 2 + 0.5 * 7 + 0, 0.25 * 1 + 0 + 1)


def test_a_row_starts_from_all_rows_and_goes_its_own_way() -> None:
    policy = Policy(cheap_blocks)
    good, bad = Acceptance(), Acceptance()
    for _ in range(9):
        policy.observe(good, 8, 8)
        policy.observe(bad, 1, 8)
    new = Acceptance(tokens=50)
    assert all(a > b > c for a, b, c in zip(*map(policy.rates, (good, new, bad)), strict=True))
    before = policy.rates(good), policy.rates(new)
    policy.observe(good, 1, 1)
    assert (policy.rates(good), policy.rates(new)) == before, "AR says nothing about drafts"


def test_what_a_row_knew_fades_in_ar() -> None:
    policy, row = Policy(cheap_blocks), Acceptance()
    for _ in range(3):
        policy.observe(row, 1, 8)
    rates = []
    for _ in range(300):
        rates.append(policy.rates(row)[0])
        policy.observe(row, 1, 1)
    assert rates == sorted(rates) and len(set(rates)) == pytest.approx(300 / 16, abs=2)
    assert rates[0] < 0.7 and rates[-1] == pytest.approx(policy.rates(Acceptance(tokens=50))[0], abs=0.01)


def test_answers_that_end_at_once_are_no_verdict_on_long_ones() -> None:
    """Only a row that is as young as they were starts with AR."""
    policy = Policy(cheap_blocks)
    for number in range(30):
        policy.observe(Acceptance(), 1, 8)
        if number == 2:
            assert policy.next_block_length([Acceptance()], [100], 32) > 1, "three are none on anything"
    row = Acceptance()
    lengths = []
    for _ in range(12):
        lengths.append(policy.next_block_length([row], [100], 32))
        policy.observe(row, lengths[-1], lengths[-1])
    assert lengths[:8] == [1] * 8 and min(lengths[8:]) > 1
    for _ in range(30):
        policy.observe(Acceptance(tokens=20), 1, 8)
    assert policy.next_block_length([Acceptance(tokens=20)], [100], 32) == 1


def test_where_no_draft_can_pay_none_is_made() -> None:
    policy = Policy(lambda rows, k: 2.0 * k if k > 1 else 1.0)
    rows = [Acceptance()]
    assert {policy.next_block_length(rows, [1000], 64) for _ in range(5000)} == {1}


def test_a_remembered_choice_is_the_one_that_would_be_made() -> None:
    """Rows of all ages come and go, drafts hold or fail: beside the policy one that remembers no choice."""
    draw, chosen = random.Random(3), []
    twins = [Policy(cheap_blocks), Policy(cheap_blocks)]
    pairs: list[list[Acceptance]] = []
    for cycle in range(1500):
        while not pairs or (len(pairs) < 3 and draw.random() < 0.05):
            pairs.append([Acceptance(), Acceptance()])
        limits = [draw.choice([1, 5, 100, 100, 100]) for _ in pairs] if draw.random() < 0.1 else [100] * len(pairs)
        longest, shortest = (32, 1) if draw.random() < 0.8 else (8, draw.choice([1, 2]))
        twins[1]._last = (None, 1, None)
        k, other = (
            twin.next_block_length([pair[i] for pair in pairs], limits, longest, shortest)
            for i, twin in enumerate(twins)
        )
        assert k == other
        chosen.append(k)
        for pair, limit in zip(pairs, limits, strict=True):
            # By turns drafts are mostly wrong and mostly right.
            tokens = k if draw.random() < cycle // 250 % 2 else draw.randint(1, min(k, 2))
            for row, twin in zip(pair, twins, strict=True):
                twin.observe(row, min(tokens, limit), min(k, limit))
        pairs = [pair for pair in pairs if draw.random() > 0.03]
    assert chosen.count(1) > 300 and len(set(chosen)) > 3


def test_a_choice_is_not_remembered_for_other_rows_or_costs() -> None:
    policy, rows = Policy(cheap_blocks), [Acceptance(tokens=50)]
    assert policy.next_block_length(rows, [100], 32) > 1
    policy.cost = lambda rows, k: 2.0 * k if k > 1 else 1.0  # measured anew
    assert policy.next_block_length(rows, [100], 32) == 1
    policy.cost = cheap_blocks
    assert policy.next_block_length(rows, [100], 32) > 1
    rows[0] = Acceptance(failed=200.0, tokens=50)
    assert policy.next_block_length(rows, [100], 32) == 1
