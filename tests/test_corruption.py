"""Noise is a function of (seed, epoch, sample id), touches supervised tokens only, and has the right rate."""

import pytest
import torch

from trimode_vlm.training.blocks import assign_blocks
from trimode_vlm.training.corruption import complement, corrupt, noise_generator

MASK = 99


def sample(length=4000, prompt=500):
    ids = torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(length) >= prompt


def test_prompt_is_never_masked_and_masked_tokens_are_the_mask_token():
    ids, loss_mask = sample()
    noisy, noise_mask, p_mask = corrupt(ids, loss_mask, noise_generator(0, 0, 7), MASK)
    assert not (noise_mask & ~loss_mask).any()
    assert (noisy[noise_mask] == MASK).all() and torch.equal(noisy[~noise_mask], ids[~noise_mask])
    assert (p_mask[~loss_mask] == 1).all()


@pytest.mark.parametrize("noise", ["sequence", "block"])
def test_masking_rate_follows_p(noise):
    ids, loss_mask = sample(20000, 0)
    block_id, _ = assign_blocks(loss_mask, 32)
    rates, expected = [], []
    for number in range(20):
        _, noise_mask, p = corrupt(ids, loss_mask, noise_generator(0, 0, number), MASK, noise=noise, block_id=block_id)
        rates.append(noise_mask.float().mean())
        expected.append(p.mean())
    assert torch.allclose(torch.stack(rates), torch.stack(expected), atol=0.015)
    assert 0.3 < torch.stack(expected).mean() < 0.7


def test_inverse_p_weight_is_unbiased():
    ids, loss_mask = sample(20000, 0)
    totals = []
    for number in range(300):
        _, noise_mask, p = corrupt(ids[:200], loss_mask[:200], noise_generator(0, 0, number), MASK, eps=0.05)
        totals.append((noise_mask / p).sum() / 200)
    assert abs(float(torch.stack(totals).mean()) - 1) < 0.03


def test_noise_depends_on_seed_epoch_and_sample_only():
    ids, loss_mask = sample()

    def noisy(*key):
        return corrupt(ids, loss_mask, noise_generator(*key), MASK)[0]

    torch.manual_seed(3)
    first = noisy(0, 0, 5)
    torch.manual_seed(4)
    assert torch.equal(first, noisy(0, 0, 5))
    for other in [(1, 0, 5), (0, 1, 5), (0, 0, 6)]:
        assert not torch.equal(first, noisy(*other))


def test_full_blocks_and_clean_first_tokens():
    ids, loss_mask = sample(640, 64)
    block_id, block_start = assign_blocks(loss_mask, 32)
    _, noise_mask, p = corrupt(ids, loss_mask, noise_generator(0, 0, 0), MASK, full_block_fraction=1.0)
    assert torch.equal(noise_mask, loss_mask) and (p == 1).all()
    _, noise_mask, _ = corrupt(
        ids,
        loss_mask,
        noise_generator(0, 0, 0),
        MASK,
        full_block_fraction=1.0,
        clean_first_fraction=1.0,
        block_id=block_id,
    )
    is_first = block_start == torch.arange(640)
    assert torch.equal(noise_mask, loss_mask & ~is_first)


def test_own_level_per_block():
    ids, loss_mask = sample(320, 0)
    block_id, _ = assign_blocks(loss_mask, 32)
    p = corrupt(ids, loss_mask, noise_generator(0, 0, 0), MASK, noise="block", block_id=block_id)[2]
    assert p.view(10, 32).std(1).max() < 1e-6 and p.unique().numel() == 10


@pytest.mark.parametrize("options", [{}, {"noise": "block", "full_block_fraction": 0.5, "clean_first_fraction": 1.0}])
def test_the_complement_masks_what_the_first_copy_left(options):
    ids, loss_mask = sample(640, 64)
    block_id, _ = assign_blocks(loss_mask, 32)
    for number in range(20):
        generator = noise_generator(0, 0, number)
        first = corrupt(ids, loss_mask, generator, MASK, block_id=block_id, complementary_masks=True, **options)
        second = complement(ids, first, MASK)
        assert not (first.noise_mask & second.noise_mask).any()
        may_mask = loss_mask
        if options:  # the first token of a block stays clean, and of a block that is masked as a whole nothing is left
            may_mask = loss_mask & (torch.cat([torch.tensor([-2]), block_id[:-1]]) == block_id)
        assert torch.equal(first.noise_mask | second.noise_mask, may_mask)
        both = first.p_mask < 1
        assert torch.allclose(first.p_mask[both] + second.p_mask[both], torch.ones(int(both.sum())))
        assert (second.noise_mask <= both).all() and (second.p_mask[~both] == 1).all()
        assert (second.noisy_input_ids[second.noise_mask] == MASK).all()
        assert torch.equal(second.noisy_input_ids[~second.noise_mask], ids[~second.noise_mask])


@pytest.mark.parametrize("noise", ["sequence", "block"])
@pytest.mark.parametrize("full_block_fraction", [0.0, 0.4])
@pytest.mark.parametrize("eps", [1e-3, 0.05])
def test_weights_of_complementary_masks_are_unbiased_for_each_copy(noise, full_block_fraction, eps):
    """1/p for the first copy, 1/(1-p) for its complement: given p, each maskable token weighs 1 in the mean."""
    ids, loss_mask = sample(64, 0)
    block_id, _ = assign_blocks(loss_mask, 8)
    totals, counts, levels = torch.zeros(2), torch.zeros(2), []
    for number in range(3000):
        options = dict(noise=noise, block_id=block_id, full_block_fraction=full_block_fraction)
        first = corrupt(ids, loss_mask, noise_generator(0, 0, number), MASK, eps, complementary_masks=True, **options)
        second = complement(ids, first, MASK)
        totals += torch.stack([(c.noise_mask / c.p_mask).sum() for c in (first, second)])
        counts += torch.stack([loss_mask.sum(), (first.p_mask < 1).sum()])
        levels += first.p_mask[first.p_mask < 1].unique().tolist()
    assert torch.allclose(totals / counts, torch.ones(2), atol=0.03)
    least, most = min(levels), max(levels)
    assert eps <= least < eps + 0.02 and 1 - eps - 0.02 < most <= 1 - eps, "p and 1 - p have one distribution"


def test_complementary_masks_move_the_level_by_eps_at_most():
    ids, loss_mask = sample()
    one, two = (corrupt(ids, loss_mask, noise_generator(0, 0, 5), MASK, complementary_masks=c) for c in (False, True))
    assert (one.p_mask - two.p_mask).abs().max() < 2e-3
    assert (one.noise_mask != two.noise_mask).float().mean() < 0.01


@pytest.mark.parametrize("noise", ["sequence", "block"])
def test_realised_mask_ratio(noise):
    """Each sample's (or block's) masked tokens weigh as much together as its maskable ones."""
    ids, loss_mask = sample(320, 64)
    block_id, _ = assign_blocks(loss_mask, 32)
    for number in range(20):
        generators = (noise_generator(0, 0, number) for _ in range(2))
        options = dict(noise=noise, block_id=block_id)
        drawn, realised = (
            corrupt(ids, loss_mask, g, MASK, mask_ratio=ratio, **options)
            for g, ratio in zip(generators, ("drawn", "realised"), strict=True)
        )
        assert torch.equal(drawn.noise_mask, realised.noise_mask), "the draw is the same"
        for group in [loss_mask] if noise == "sequence" else [block_id == b for b in range(8)]:
            if realised.noise_mask[group].any():
                weights = (realised.noise_mask / realised.p_mask)[group & realised.noise_mask]
                assert float(weights.sum()) == pytest.approx(int(group.sum()), rel=1e-5)


def test_wrong_options_are_named():
    ids, loss_mask = sample(10, 0)
    with pytest.raises(ValueError, match="noise must be one of"):
        corrupt(ids, loss_mask, noise_generator(0, 0, 0), MASK, noise="token")
    with pytest.raises(ValueError, match="block_id"):
        corrupt(ids, loss_mask, noise_generator(0, 0, 0), MASK, noise="block")
    with pytest.raises(ValueError, match="mask_ratio must be one of"):
        corrupt(ids, loss_mask, noise_generator(0, 0, 0), MASK, mask_ratio="exact")
