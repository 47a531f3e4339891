"""Absorbing-mask noise for the diffusion loss: which response tokens become the mask token, with what probability."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

NOISE_KINDS = ("sequence", "block")
MASK_RATIOS = ("drawn", "realised")


class Corruption(NamedTuple):
    """Noise on one sample, [T] each: the ids the model sees, True where a token was masked, and with what probability.

    p_mask is 1 for a token that may not be masked; a masked token weighs 1 / p_mask in the loss.
    """

    noisy_input_ids: Tensor
    noise_mask: Tensor
    p_mask: Tensor


def noise_generator(seed: int, epoch: int, sample_id: int, stream: str = "noise") -> torch.Generator:
    """Return a CPU generator that depends on (seed, epoch, sample id, stream) only.

    Rank, batch position and restarts therefore never change a sample's noise, and every rank draws its own levels.
    """
    digest = hashlib.blake2b(f"{stream}/{seed}/{epoch}/{sample_id}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def corrupt(
    input_ids: Tensor,
    loss_mask: Tensor,
    generator: torch.Generator,
    mask_token_id: int,
    eps: float = 1e-3,
    noise: str = "sequence",
    block_id: Tensor | None = None,
    full_block_fraction: float = 0.0,
    clean_first_fraction: float = 0.0,
    *,
    complementary_masks: bool = False,
    mask_ratio: str = "drawn",
) -> Corruption:
    """Mask supervised tokens of one sample: input_ids, loss_mask -> noisy_input_ids, noise_mask, p_mask; all [T].

    Draws t ~ U(0, 1) and p = (1 - eps) * t + eps, once for the sample (noise="sequence") or once for each block
    ("block", as SDAR-VL); each supervised token is masked with probability p. noise_mask is True where a token was
    masked; p_mask holds p where a token may be masked and 1 elsewhere. Prompt and image tokens never change.
    block_id [T] (-1 outside responses) is needed by noise="block" and by clean_first_fraction.

    full_block_fraction: share of samples (or blocks) whose p is 1, as the first forward of a draft sees them.
    clean_first_fraction: share of samples whose blocks keep their first token, as decoding starts from a known seed.
    complementary_masks: p = (1 - 2 * eps) * t + eps, so that p and 1 - p are distributed alike; see `complement`.
    mask_ratio="realised": p_mask holds the share of the sample's (or block's) maskable tokens that was masked, not
    the probability (SDAR-VL): less variance; a sample or block in which nothing was masked counts as loss 0.
    """
    if noise not in NOISE_KINDS:
        raise ValueError(f"noise must be one of {NOISE_KINDS}, got {noise!r}")
    if mask_ratio not in MASK_RATIOS:
        raise ValueError(f"mask_ratio must be one of {MASK_RATIOS}, got {mask_ratio!r}")
    if block_id is None and (noise == "block" or clean_first_fraction > 0):
        raise ValueError("block_id is needed for noise='block' and for clean_first_fraction > 0")
    num_tokens = input_ids.shape[0]
    # Every draw is made whatever the options, so that one option does not move the random numbers of another.
    level_group = torch.zeros(num_tokens, dtype=torch.long)
    num_groups = 1
    if noise == "block":
        assert block_id is not None
        level_group = block_id.clamp(min=0)
        num_groups = int(level_group.max()) + 1 if num_tokens else 1
    keep_first = bool(torch.rand((), generator=generator) < clean_first_fraction)
    span = 1 - 2 * eps if complementary_masks else 1 - eps
    p_group = span * torch.rand(num_groups, generator=generator) + eps
    full_group = torch.rand(num_groups, generator=generator) < full_block_fraction
    p_group = torch.where(full_group, torch.ones_like(p_group), p_group)
    may_mask = loss_mask.clone()
    if keep_first:
        assert block_id is not None
        is_first = torch.ones(num_tokens, dtype=torch.bool)
        is_first[1:] = block_id[1:] != block_id[:-1]
        may_mask &= ~is_first
    p_mask = torch.where(may_mask, p_group[level_group], torch.ones(()))
    noise_mask = may_mask & (torch.rand(num_tokens, generator=generator) < p_mask)
    if mask_ratio == "realised":
        num_masked, num_maskable = (
            torch.bincount(level_group[chosen], minlength=num_groups) for chosen in (noise_mask, may_mask)
        )
        p_mask = torch.where(may_mask, (num_masked / num_maskable)[level_group], torch.ones(()))
    return Corruption(masked(input_ids, noise_mask, mask_token_id), noise_mask, p_mask)


def complement(input_ids: Tensor, first: Corruption, mask_token_id: int) -> Corruption:
    """The same sample with the complementary mask: of each token that may be masked, one of the two copies masks it.

    A token that the first copy masks with probability p is masked here with 1 - p, and weighs 1 / (1 - p). With levels
    drawn for complementary masks the second copy is thus distributed like the first, both are unbiased estimates of one
    loss, and so is their mean, which is what the sum over both copies divided by the maskable tokens of both is.
    Where p is 1 (full_block_fraction) nothing is left to mask: the second copy has no maskable token there.
    """
    may_mask = first.p_mask < 1
    noise_mask = may_mask & ~first.noise_mask
    p_mask = torch.where(may_mask, 1 - first.p_mask, torch.ones(()))
    return Corruption(masked(input_ids, noise_mask, mask_token_id), noise_mask, p_mask)


def masked(input_ids: Tensor, noise_mask: Tensor, mask_token_id: int) -> Tensor:
    """The ids with the mask token where noise_mask is True."""
    return torch.where(noise_mask, torch.full_like(input_ids, mask_token_id), input_ids)
