"""The tri-mode objective: L = L_AR + alpha * L_diff as per-term sums and counts, divided once over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimode_vlm.training.dual_stream import IGNORE

AVERAGINGS = ("tokens", "masked", "pooled", "sequence")
WEIGHTS = ("1/p", "1")


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a batch holds, known before any forward, so that ranks can agree on the denominators first.

    num_supervised: answer tokens, the targets of the AR loss. num_maskable: positions of the noisy half that the noise
    may mask, answer tokens and the padding behind them; with complementary masks those of both copies. num_masked:
    those that it did mask.
    """

    num_supervised: float = 0.0
    num_maskable: float = 0.0
    num_masked: float = 0.0
    num_sequences: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Sums over one micro-batch; ar_sum and diff_sum are scalars with a gradient, the rest are numbers without one.

    masked_correct counts right predictions at all masked positions, the padding behind an answer included.
    """

    ar_sum: Tensor
    diff_sum: Tensor
    ar_correct: Tensor
    masked_correct: Tensor


def count(target_BT: Tensor, is_noisy_BT: Tensor, is_maskable_BT: Tensor, sequence_BT: Tensor) -> Counts:
    """Count supervised tokens (targets of the clean half), maskable and masked tokens and sequences of a batch."""
    labelled = target_BT != IGNORE
    supervised = labelled & ~is_noisy_BT
    return Counts(
        num_supervised=float(supervised.sum()),
        num_maskable=float(is_maskable_BT.sum()),
        num_masked=float((labelled & is_noisy_BT).sum()),
        num_sequences=float(sequence_BT[supervised].unique().numel()),
    )


def tri_mode_terms(
    hidden_BTD: Tensor,
    target_BT: Tensor,
    is_noisy_BT: Tensor,
    p_mask_BT: Tensor,
    sequence_BT: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    averaging: str = "tokens",
    weight: str = "1/p",
    chunk_tokens: int = 2048,
) -> Terms:
    """Compute the summed losses of one micro-batch from the last hidden states; head maps [n, D] to logits [n, V].

    sequence_BT numbers the samples of the micro-batch (for averaging="sequence" and its count). A micro-batch without
    targets gives zeros that depend on every module that another micro-batch would use.
    """
    if averaging not in AVERAGINGS:
        raise ValueError(f"averaging must be one of {AVERAGINGS}, got {averaging!r}")
    if weight not in WEIGHTS:
        raise ValueError(f"weight must be one of {WEIGHTS}, got {weight!r}")
    # 1. Only labelled positions reach the head. The shift is already in the targets (dual_stream).
    labelled_BT = target_BT != IGNORE
    # Without any, one unlabelled position goes through the head and counts nothing: ranks must run the same modules.
    labelled_BT[0, 0] |= ~labelled_BT.any()
    hidden, target, is_noisy = hidden_BTD[labelled_BT], target_BT[labelled_BT], is_noisy_BT[labelled_BT]
    # 2. AR tokens weigh 1; masked ones 1/p, which makes the masked sum an unbiased estimate over all maskable tokens.
    token_weight = torch.ones_like(p_mask_BT[labelled_BT])
    if weight == "1/p":
        token_weight = torch.where(is_noisy, 1.0 / p_mask_BT[labelled_BT], token_weight)
    # 3. averaging="sequence" turns each sum into a sum of per-sequence means, each over its own term's tokens.
    if averaging == "sequence":
        group = sequence_BT[labelled_BT] * 2 + is_noisy.long()
        token_weight = token_weight / torch.bincount(group)[group]
    # 4. Cross entropy in chunks, recomputed in the backward pass: no B x T x V tensor lives at any time.
    loss, correct = _weighted_cross_entropy(hidden, target, token_weight, is_noisy, head, chunk_tokens)
    # 5. Sums and counts; the division belongs to `combine`, once for all micro-batches and ranks.
    return Terms(
        ar_sum=loss[0],
        diff_sum=loss[1],
        ar_correct=correct[0],
        masked_correct=correct[1],
    )


def combine(ar_sum: Tensor, diff_sum: Tensor, counts: Counts, *, alpha: float, averaging: str = "tokens") -> Tensor:
    """Return L_AR + alpha * L_diff for sums over any part of a global batch and the counts of the whole of it."""
    ar_count, diff_count = denominators(counts, averaging)
    return ar_sum / ar_count + alpha * diff_sum / diff_count


def denominators(counts: Counts, averaging: str = "tokens") -> tuple[float, float]:
    """What the sums of the AR and of the diffusion term are divided by, at least 1 each.

    tokens: supervised tokens; maskable tokens, which with weight 1/p estimates the mean over them without bias, also
    with complementary masks: two unbiased sums over the maskable tokens of two copies, the second weighted 1/(1-p).
    masked: each term's own labelled tokens. pooled: both by supervised + masked. sequence: the number of sequences.
    """
    if averaging not in AVERAGINGS:
        raise ValueError(f"averaging must be one of {AVERAGINGS}, got {averaging!r}")
    ar_count, diff_count = {
        "tokens": (counts.num_supervised, counts.num_maskable),
        "masked": (counts.num_supervised, counts.num_masked),
        "pooled": (counts.num_supervised + counts.num_masked,) * 2,
        "sequence": (counts.num_sequences, counts.num_sequences),
    }[averaging]
    return max(ar_count, 1.0), max(diff_count, 1.0)


def _weighted_cross_entropy(
    hidden: Tensor,
    target: Tensor,
    token_weight: Tensor,
    is_noisy: Tensor,
    head: Callable[[Tensor], Tensor],
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return (losses [2], hits [2]): AR and diffusion sums over n labelled tokens, chunk by chunk."""
    term = is_noisy.long()

    def one_chunk(h: Tensor, y: Tensor, w: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(h)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        losses = F.cross_entropy(logits, y, reduction="none", ignore_index=IGNORE) * w
        hits = (logits.detach().argmax(-1) == y).float()
        return losses.new_zeros(2).index_add(0, k, losses), hits.new_zeros(2).index_add(0, k, hits)

    loss, correct = hidden.new_zeros(2, dtype=torch.float32), hidden.new_zeros(2, dtype=torch.float32)
    for start in range(0, target.shape[0], chunk_tokens):
        part = slice(start, start + chunk_tokens)
        chunk = (hidden[part], target[part], token_weight[part], term[part])
        if torch.is_grad_enabled() and target.shape[0] > chunk_tokens:
            chunk_loss, chunk_correct = checkpoint(one_chunk, *chunk, use_reentrant=False)
        else:
            chunk_loss, chunk_correct = one_chunk(*chunk)
        loss, correct = loss + chunk_loss, correct + chunk_correct.detach()
    return loss, correct
