"""The draft adapter's objective: drafts for every slot of a batch, which of them count, and the loss at those.

A slot is a block [seed, mask x (k - 1)] of the noisy half, as self-speculation drafts it over the clean tokens before.
Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), appendix B; LK losses: arXiv 2602.23881.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trimode_vlm.training.dual_stream import IGNORE

LOSS_TEMPERATURE, LOSS_TOP = 3.0, 200
# Of ids outside the union: exactly 0 after a softmax, and no infinity that would make 0 * (log p - log q) nan.
FLOOR = -1e9


@dataclass(frozen=True)
class Slots:
    """The slots of a batch, as indices into its flattened tokens [B T].

    mask: [n], every mask, those of a slot side by side; slot: [n], the number of its slot; seed: [S], the slots' first
    tokens.
    """

    mask: Tensor
    slot: Tensor
    seed: Tensor


def slots_of(target_BT: Tensor, is_noisy_BT: Tensor) -> Slots:
    """The slots of a noisy half whose blocks keep their first token and mask all others, which have a target."""
    is_noisy = is_noisy_BT.flatten()
    is_mask = is_noisy & (target_BT.flatten() != IGNORE)
    is_seed = is_noisy & ~is_mask
    number = is_seed.long().cumsum(0) - 1
    return Slots(is_mask.nonzero()[:, 0], number[is_mask], is_seed.nonzero()[:, 0])


def draw_drafts(logits: Tensor, uniform: Tensor, is_greedy: Tensor) -> Tensor:
    """One id per row of logits [n, V]: the likeliest, or at temperature 1 where the cdf passes `uniform` [n]."""
    cdf = logits.float().softmax(-1).cumsum(-1)
    drawn = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
    return torch.where(is_greedy, logits.argmax(-1), drawn)


def positions_that_count(
    draft_ids: Tensor, target_ids: Tensor, slot: Tensor, is_end: Tensor, seed_is_end: Tensor
) -> tuple[Tensor, Tensor]:
    """(accepted, active), bool [n]: active are the accepted drafts of a slot and its first mismatch.

    A draft is accepted where it and all before it in its slot equal the verifier's ids. Behind an end token, accepted
    or seed, nothing counts: no decoder would look at it.

    Args:
        draft_ids, target_ids, slot, is_end: [n]; is_end: whether the draft is an end token. seed_is_end: [S].
    """
    agrees = draft_ids == target_ids
    stops = (~agrees | is_end).long()
    before = stops.cumsum(0) - stops
    starts = torch.ones_like(agrees)
    starts[1:] = slot[1:] != slot[:-1]
    in_slot = before - before[starts][starts.long().cumsum(0) - 1]
    active = (in_slot == 0) & ~seed_is_end[slot]
    return active & agrees, active


def lk_hybrid(
    draft_logits: Tensor, verifier_logits: Tensor, temperature: float = LOSS_TEMPERATURE, top: int = LOSS_TOP
) -> Tensor:
    """LK loss [n] = lam * KL(p || q) + (1 - lam) * TV(p, q) of logits [n, V]: p the verifier's, q the draft's.

    p, q: softmax at `temperature` over the union of both top sets. lam = exp(-0.5 * A) with the acceptance
    A = sum min(p, q), no gradient through it: KL leads where little is accepted, TV (which is 1 - A) where much is.
    """
    z_d, z_t = draft_logits.float(), verifier_logits.float()
    top = min(top, z_t.shape[-1])
    union = torch.zeros_like(z_t, dtype=torch.bool)
    for z in (z_t, z_d):
        union.scatter_(-1, z.topk(top).indices, True)
    log_p, log_q = ((z / temperature).masked_fill(~union, FLOOR).log_softmax(-1) for z in (z_t, z_d))
    p, q = log_p.exp(), log_q.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    lam = torch.exp(-0.5 * acceptance.detach())
    return lam * kl + (1 - lam) * (1 - acceptance)


def draft_terms(draft_logits: Tensor, verifier_logits: Tensor) -> Tensor:
    """Summed [LK, CE] of n active positions; CE: of the draft, at temperature 1, to the verifier's argmax."""
    ce = F.cross_entropy(draft_logits.float(), verifier_logits.argmax(-1), reduction="sum")
    return torch.stack([lk_hybrid(draft_logits, verifier_logits).sum(), ce])
