"""From encoded samples to padded micro-batches: corruption, dual-stream layout, buckets of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimode_vlm.training.corruption import corrupt, noise_generator
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.dual_stream import (
    IGNORE,
    RESPONSE_PADDINGS,
    DualStream,
    build_dual_stream,
    cut_blocks,
    sample_block_length,
)
from trimode_vlm.training.objective import Counts, count
from trimode_vlm.vision.images import pad_pixels


@dataclass(frozen=True, kw_only=True)
class NoiseSettings:
    """How a sample is cut into blocks and corrupted. `dual=False` leaves the noisy half out (alpha 0)."""

    mask_token_id: int
    vision_token_ids: tuple[int, ...] = ()
    end_token_id: int | None = None
    seed: int = 0
    dual: bool = True
    block_length: int | tuple[int, ...] = 32
    block_offset: str = "response"
    noisy_stream: str = "response"
    response_padding: str = "none"
    noise: str = "sequence"
    eps: float = 1e-3
    full_block_fraction: float = 0.0
    clean_first_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch, right padded: tensors [B, T] as in DualStream; padding has document -1 and no target.

    pixel_values [n, 3, Hmax, Wmax] and image_sizes [n, 2] (height, width) hold all rows' images in order, or None.
    """

    input_ids: Tensor
    position: Tensor
    document: Tensor
    block_start: Tensor
    block_id: Tensor
    is_noisy: Tensor
    is_maskable: Tensor
    target: Tensor
    p_mask: Tensor
    sequence: Tensor
    pixel_values: Tensor | None
    image_sizes: Tensor | None
    sample_ids: tuple[int, ...]

    @property
    def counts(self) -> Counts:
        """Supervised, maskable and masked tokens and sequences of the batch."""
        return count(self.target, self.is_noisy, self.is_maskable, self.sequence)

    def to(self, device: torch.device) -> Batch:
        """Move every tensor to a device."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return Batch(**values)


def lay_out(sample: Encoded, noise: NoiseSettings) -> DualStream:
    """Corrupt one sample and build its dual-stream row; a function of (noise.seed, epoch, sample id) only."""
    input_ids = torch.tensor(sample.input_ids, dtype=torch.long)
    loss_mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    if not noise.dual:
        return build_dual_stream(input_ids, loss_mask)
    is_vision = torch.isin(input_ids, torch.tensor(noise.vision_token_ids, dtype=torch.long))
    if bool((loss_mask & is_vision).any()):
        raise ValueError(f"sample {sample.sample_id}: an image token lies inside a supervised span")
    if noise.response_padding not in RESPONSE_PADDINGS:
        raise ValueError(f"response_padding must be one of {RESPONSE_PADDINGS}, got {noise.response_padding!r}")
    generator = noise_generator(noise.seed, sample.epoch, sample.sample_id, "blocks")
    block_length = sample_block_length(noise.block_length, generator)
    padding_id = noise.end_token_id if noise.response_padding == "block" else None
    blocks = cut_blocks(input_ids, loss_mask, block_length, noise.block_offset, generator, padding_id)
    noisy_input_ids, noise_mask, p_mask = corrupt(
        blocks.token_ids,
        blocks.loss_mask,
        noise_generator(noise.seed, sample.epoch, sample.sample_id),
        noise.mask_token_id,
        noise.eps,
        noise.noise,
        blocks.block_id,
        noise.full_block_fraction,
        noise.clean_first_fraction,
    )
    return build_dual_stream(
        input_ids,
        loss_mask,
        blocks,
        noisy_input_ids,
        noise_mask,
        p_mask,
        is_vision=is_vision,
        noisy_stream=noise.noisy_stream,
        block_length=block_length,
    )


def collate(samples: Sequence[Encoded], rows: Sequence[DualStream], pad_token_id: int = 0) -> Batch:
    """Pad rows [T_i] to a batch [B, T] and stack the images of all samples, in order, with zero padding."""
    images = [image for sample in samples for image in sample.images]
    pixel_values = image_sizes = None
    if images:
        image_sizes = torch.tensor([image.shape[-2:] for image in images])
        pixel_values = pad_pixels(images)

    def padded(name: str, value: float) -> Tensor:
        return pad_sequence([getattr(row, name) for row in rows], batch_first=True, padding_value=value)

    document = padded("document", -1)
    row_number = torch.arange(len(rows))[:, None]
    num_documents = int(document.max()) + 1
    return Batch(
        input_ids=padded("input_ids", pad_token_id),
        position=padded("position", 0),
        document=document,
        block_start=padded("block_start", -1),
        block_id=padded("block_id", -1),
        is_noisy=padded("is_noisy", False),
        is_maskable=padded("is_maskable", False),
        target=padded("target", IGNORE),
        p_mask=padded("p_mask", 1.0),
        sequence=row_number * num_documents + document.clamp(min=0),
        pixel_values=pixel_values,
        image_sizes=image_sizes,
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


def micro_batches(
    samples: Sequence[Encoded],
    noise: NoiseSettings,
    micro_batch_tokens: int | None = None,
    micro_batch_samples: int | None = None,
    pad_token_id: int = 0,
) -> list[Batch]:
    """Cut one rank's samples of a step into micro-batches: by padded tokens (sorted by length) or by samples.

    A sample longer than micro_batch_tokens gets a micro-batch of its own.
    """
    rows = [lay_out(sample, noise) for sample in samples]
    order = list(range(len(samples)))
    groups: list[list[int]] = []
    if micro_batch_tokens is None:
        size = micro_batch_samples or len(samples)
        groups = [order[start : start + size] for start in range(0, len(order), size)]
    else:
        order.sort(key=lambda i: -rows[i].input_ids.shape[0])
        for index in order:
            longest = rows[groups[-1][0]].input_ids.shape[0] if groups else 0
            if not groups or (len(groups[-1]) + 1) * longest > micro_batch_tokens:
                groups.append([])
            groups[-1].append(index)
    return [collate([samples[i] for i in group], [rows[i] for i in group], pad_token_id) for group in groups]
