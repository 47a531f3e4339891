"""From encoded samples to padded micro-batches: corruption, dual-stream layout, packing, buckets of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimode_vlm import patterns
from trimode_vlm.training.blocks import RESPONSE_PADDINGS, cut_blocks, sample_block_length
from trimode_vlm.training.corruption import complement, corrupt, noise_generator
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.dual_stream import IGNORE, DualStream, build_dual_stream, pack
from trimode_vlm.training.objective import Counts, count
from trimode_vlm.vision.images import pad_pixels


@dataclass(frozen=True, kw_only=True)
class NoiseSettings:
    """How a sample is cut into blocks and corrupted. `dual=False` leaves the noisy half out (alpha 0).

    block_alignment, block_offset: see `assign_blocks`. noisy_stream, complementary_masks: see `build_dual_stream`.
    noise, eps, the fractions and mask_ratio: see `corrupt`. response_padding: "block" fills the last block of each
    response in the noisy half with end tokens, "none" leaves it short.
    """

    mask_token_id: int
    vision_token_ids: tuple[int, ...] = ()
    end_token_id: int | None = None
    seed: int = 0
    dual: bool = True
    block_length: int | tuple[int, ...] = 32
    block_alignment: str = "response"
    block_offset: str = "response"
    noisy_stream: str = "response"
    response_padding: str = "none"
    complementary_masks: bool = False
    noise: str = "sequence"
    mask_ratio: str = "drawn"
    eps: float = 1e-3
    full_block_fraction: float = 0.0
    clean_first_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch, right padded: tensors [B, T] as in DualStream; padding has document -1 and no target.

    pixel_values [n, 3, Hmax, Wmax] and image_sizes [n, 2] (height, width) hold all rows' images in order, or None; an
    image whose tokens stand in both halves (noisy_stream="all") is there twice. sequence numbers the samples.
    sample_names: what messages call them.
    is_plain: one document a row and no noisy token, so that plain causal attention is exact.
    skipped: what was wrong with each bad sample that another one stands for.
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
    sample_names: tuple[str, ...] = ()
    is_plain: bool = False
    skipped: tuple[str, ...] = ()

    @property
    def counts(self) -> Counts:
        """Supervised, maskable and masked tokens and sequences of the batch."""
        return count(self.target, self.is_noisy, self.is_maskable, self.sequence)

    def pattern(self) -> patterns.Pattern:
        """Which token attends to which."""
        if self.is_plain:
            # Right padding: no real token comes after a pad.
            rows, length = self.input_ids.shape
            return patterns.causal(rows, length, self.input_ids.device)
        return patterns.dual_stream(self.position, self.document, self.block_start, self.block_id, self.is_noisy)

    def to(self, device: torch.device) -> Batch:
        """Move every tensor to a device."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def lay_out(sample: Encoded, noise: NoiseSettings) -> DualStream:
    """Corrupt one sample and build its dual-stream row; a function of (noise.seed, epoch, sample id) only.

    Raises:
        ValueError: an image token is to be trained, or an option has no such value.
    """
    input_ids = torch.tensor(sample.input_ids, dtype=torch.long)
    loss_mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
    is_vision = torch.isin(input_ids, torch.tensor(noise.vision_token_ids, dtype=torch.long))
    if bool((loss_mask & is_vision).any()):
        name = sample.name or f"sample {sample.sample_id}"
        raise ValueError(f"{name}: an image token lies inside a supervised span")
    if not noise.dual:
        return build_dual_stream(input_ids, loss_mask)
    if noise.response_padding not in RESPONSE_PADDINGS:
        raise ValueError(f"response_padding must be one of {RESPONSE_PADDINGS}, got {noise.response_padding!r}")
    generator = noise_generator(noise.seed, sample.epoch, sample.sample_id, "blocks")
    block_length = sample_block_length(noise.block_length, generator)
    padding_id = noise.end_token_id if noise.response_padding == "block" else None
    blocks = cut_blocks(
        input_ids, loss_mask, block_length, noise.block_offset, generator, padding_id, noise.block_alignment
    )
    first = corrupt(
        blocks.token_ids,
        blocks.loss_mask,
        noise_generator(noise.seed, sample.epoch, sample.sample_id),
        noise.mask_token_id,
        noise.eps,
        noise.noise,
        blocks.block_id,
        noise.full_block_fraction,
        noise.clean_first_fraction,
        complementary_masks=noise.complementary_masks,
        mask_ratio=noise.mask_ratio,
    )
    second = complement(blocks.token_ids, first, noise.mask_token_id) if noise.complementary_masks else None
    return build_dual_stream(
        input_ids,
        loss_mask,
        blocks,
        *first,
        complement=second,
        is_vision=is_vision,
        noisy_stream=noise.noisy_stream,
        block_length=block_length,
    )


def collate(samples: Sequence[Encoded], rows: Sequence[DualStream], pad_token_id: int = 0) -> Batch:
    """Pad rows [T_i] to a batch [B, T] and stack the images of all samples, in order, with zero padding.

    samples: those of the first row in the order of its documents, then those of the second, and so on.
    """
    images = [image for sample in samples for image in sample.images * rows[0].image_copies]
    pixel_values = image_sizes = None
    if images:
        image_sizes = torch.tensor([image.shape[-2:] for image in images])
        pixel_values = pad_pixels(images)

    def padded(name: str, value: float) -> Tensor:
        return pad_sequence([getattr(row, name) for row in rows], batch_first=True, padding_value=value)

    document, is_noisy = padded("document", -1), padded("is_noisy", False)
    row_number = torch.arange(len(rows))[:, None]
    num_documents = int(document.max()) + 1
    return Batch(
        input_ids=padded("input_ids", pad_token_id),
        position=padded("position", 0),
        document=document,
        block_start=padded("block_start", -1),
        block_id=padded("block_id", -1),
        is_noisy=is_noisy,
        is_maskable=padded("is_maskable", False),
        target=padded("target", IGNORE),
        p_mask=padded("p_mask", 1.0),
        sequence=row_number * num_documents + document.clamp(min=0),
        pixel_values=pixel_values,
        image_sizes=image_sizes,
        sample_ids=tuple(sample.sample_id for sample in samples),
        sample_names=tuple(sample.name or str(sample.sample_id) for sample in samples),
        is_plain=num_documents == 1 and not bool(is_noisy.any()),
        skipped=tuple(sample.skipped for sample in samples if sample.skipped),
    )


def dummy_batch(pad_token_id: int = 0) -> Batch:
    """One row of two tokens without a target, for a rank that has fewer micro-batches than others: losses 0, counts 0.

    Its forward and backward pass run the same modules as any other's, which DDP and ZeRO need.
    """
    nothing = Encoded(sample_id=-1, input_ids=[pad_token_id] * 2, loss_mask=[False] * 2)
    row = build_dual_stream(torch.tensor(nothing.input_ids), torch.tensor(nothing.loss_mask))
    return replace(collate([nothing], [row], pad_token_id), sample_ids=(), sample_names=())


def micro_batches(
    samples: Sequence[Encoded],
    noise: NoiseSettings,
    micro_batch_tokens: int | None = None,
    micro_batch_samples: int | None = None,
    pad_token_id: int = 0,
    packing_length: int | None = None,
) -> list[Batch]:
    """Cut one rank's samples of a step into micro-batches: by padded tokens (sorted by length) or by samples.

    A sample longer than micro_batch_tokens gets a micro-batch of its own.

    packing_length: join samples into rows of at most so many tokens of both streams (first fit, longest first); a
    longer sample gets a row of its own. Then rows are what a micro-batch is filled with. The losses stay the same.
    """
    single = [lay_out(sample, noise) for sample in samples]
    members = [[index] for index in range(len(samples))]
    if packing_length is not None:
        members = first_fit([_length(row) for row in single], packing_length)
    rows = [pack([single[i] for i in row]) if len(row) > 1 else single[row[0]] for row in members]
    batches = []
    for group in _groups([_length(row) for row in rows], micro_batch_tokens, micro_batch_samples):
        documents = [samples[i] for number in group for i in members[number]]
        batches.append(collate(documents, [rows[number] for number in group], pad_token_id))
    return batches


def first_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Put items into as few groups of at most `limit` in all as first fit, longest first, gives; their indices."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((number for number, free in enumerate(room) if lengths[index] <= free), len(groups))
        if place == len(groups):
            groups.append([])
            room.append(limit)
        groups[place].append(index)
        room[place] -= lengths[index]
    return groups


def _groups(lengths: list[int], micro_batch_tokens: int | None, micro_batch_samples: int | None) -> list[list[int]]:
    """Indices of the rows of each micro-batch."""
    order = list(range(len(lengths)))
    if micro_batch_tokens is None:
        size = micro_batch_samples or max(len(lengths), 1)
        return [order[start : start + size] for start in range(0, len(order), size)]
    order.sort(key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for index in order:
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > micro_batch_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


def _length(row: DualStream) -> int:
    return row.input_ids.shape[0]
