"""The objective without a dual stream: a plain causal forward for the AR loss, one forward per noisy block.

Nothing is shared with the layout of training but the draw itself (which tokens were masked, with what probability).
Run it on a model in double precision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from training_cases import IMAGE

from trimode_vlm.patterns import Pattern
from trimode_vlm.vision.images import pad_pixels


def ar_losses(model: Any, sample: Any) -> list[Tensor]:
    """The cross entropy of every trained token, given all before it."""
    ids = torch.tensor(sample.input_ids)
    logits = model(input_ids=ids[None], **images_of(sample)).logits[0]
    return [F.cross_entropy(logits[i - 1], ids[i]) for i, trained in enumerate(sample.loss_mask) if trained]


def diffusion_losses(model: Any, sample: Any, row: Any) -> list[tuple[Tensor, float]]:
    """(cross entropy, masking probability) of every masked token, one forward for each noisy block."""
    found = []
    for block in row.block_id[row.is_maskable].unique(sorted=True):
        members = row.is_noisy & (row.block_id == block)
        place = int(row.position[members][0])
        logits = block_logits(model, sample, place, row.input_ids[members])
        for own, target, p in zip(logits, row.target[members], row.p_mask[members], strict=True):
            if target != -100:
                found.append((F.cross_entropy(own, target), float(p)))
    return found


def block_logits(model: Any, sample: Any, place: int, noisy_ids: Tensor) -> Tensor:
    """Logits of a block that starts at `place`: it sees the clean tokens before it and itself, both ways."""
    ids = torch.cat([torch.tensor(sample.input_ids[:place], dtype=torch.long), noisy_ids])
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    allowed[place:, place:] = True
    pattern = Pattern(lambda b, h, q, k: allowed[q, k], 1, len(ids), len(ids), ids.device)
    assert IMAGE not in sample.input_ids[place:], "every image precedes the first response of these samples"
    return model(input_ids=ids[None], pattern=pattern, **images_of(sample)).logits[0, place:]


def images_of(sample: Any) -> dict[str, Tensor]:
    if not sample.images:
        return {}
    sizes = torch.tensor([image.shape[-2:] for image in sample.images])
    return {"pixel_values": pad_pixels(sample.images), "image_sizes": sizes}


def naive_objective(
    model: Any, samples: Any, rows: Any, averaging: str, weight: str = "1/p", alpha: float = 0.3, copies: int = 1
) -> Tensor:
    """L_AR + alpha * L_diff of a whole batch; copies: 2 with complementary masks."""
    ar = [ar_losses(model, sample) for sample in samples]
    diff = [
        [loss / p if weight == "1/p" else loss for loss, p in diffusion_losses(model, sample, row)]
        for sample, row in zip(samples, rows, strict=True)
    ]
    num_supervised, num_masked = sum(map(len, ar)), sum(map(len, diff))
    if averaging == "sequence":
        return (sum(map(mean, ar)) + alpha * sum(map(mean, diff))) / len(samples)
    ar_sum, diff_sum = sum(map(sum, ar)), sum(map(sum, diff))
    if averaging == "pooled":
        return (ar_sum + alpha * diff_sum) / (num_supervised + num_masked)
    return ar_sum / num_supervised + alpha * diff_sum / (
        num_masked if averaging == "masked" else copies * num_supervised
    )


def mean(values: list[Tensor]) -> Any:
    return sum(values) / max(len(values), 1)
