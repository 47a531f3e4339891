"""Noise is a function of (seed, epoch, sample id), touches supervised tokens only, and has the right rate."""

import pytest
import torch

from trimode_vlm.training.corruption import corrupt, noise_generator
from trimode_vlm.training.dual_stream import assign_blocks

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


def test_wrong_options_are_named():
    ids, loss_mask = sample(10, 0)
    with pytest.raises(ValueError, match="noise must be one of"):
        corrupt(ids, loss_mask, noise_generator(0, 0, 0), MASK, noise="token")
    with pytest.raises(ValueError, match="block_id"):
        corrupt(ids, loss_mask, noise_generator(0, 0, 0), MASK, noise="block")
