"""The dual stream: one row [noisy | clean] whose per-token metadata is the single source of the attention pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trimode_vlm.training.blocks import Blocks, assign_blocks
from trimode_vlm.training.corruption import Corruption

IGNORE = -100
NOISY_STREAMS = ("response", "text", "all")


@dataclass(frozen=True, kw_only=True)
class DualStream:
    """One row of the dual stream; every tensor is [T] with T = noisy tokens + clean tokens.

    position: the token's place in its clean document, kept by noisy tokens (so gaps appear where images were).
    block_start: position of the first token of the block (noisy) or the token's own position (clean).
    block_id: number of the block within its document (noisy), -1 (clean). The tokens of a block stand side by side.
    source: index of the token in the clean half (-1: padding behind a response). is_maskable: True for the noisy
    tokens that noise may mask, answer tokens and padding. p_mask: masking probability of a token that may be masked
    in this draw, else 1. target: the next token for a clean token, the own token for a masked one, IGNORE elsewhere.
    image_copies: how often the tokens of each image stand in the row.
    """

    input_ids: Tensor
    position: Tensor
    document: Tensor
    block_start: Tensor
    block_id: Tensor
    is_noisy: Tensor
    source: Tensor
    is_maskable: Tensor
    target: Tensor
    p_mask: Tensor
    image_copies: int = 1


TOKEN_FIELDS = (
    "input_ids", "position", "document", "block_start", "block_id", "is_noisy", "source", "is_maskable", "target",
    "p_mask",
)  # fmt: skip


def build_dual_stream(
    input_ids: Tensor,
    loss_mask: Tensor,
    blocks: Blocks | None = None,
    noisy_input_ids: Tensor | None = None,
    noise_mask: Tensor | None = None,
    p_mask: Tensor | None = None,
    *,
    complement: Corruption | None = None,
    is_vision: Tensor | None = None,
    noisy_stream: str = "response",
    block_length: int = 32,
    document: int = 0,
) -> DualStream:
    """Lay out one sample as [noisy | clean]; without `blocks` the clean half alone (AR only).

    input_ids, loss_mask: [T]. noisy_input_ids, noise_mask, p_mask: [T'], the corruption of blocks.token_ids.

    noisy_stream="response": the noisy half holds the response tokens, L_resp + L in all. "text": every token that is no
    vision token (the paper's L_text + L). "all": every token, the symmetric 2 L. Prompt and vision tokens stand there
    unmasked, in blocks of block_length that end with their segment, and give the same losses because no response
    block sees them.
    complement: the corruption with the complementary mask; it gives a second noisy half of response tokens, with blocks
    of its own, before the same clean half: [noisy | complement | clean], so the AR loss is there once.
    """
    if noisy_stream not in NOISY_STREAMS:
        raise ValueError(f"noisy_stream must be one of {NOISY_STREAMS}, got {noisy_stream!r}")
    clean = _clean_half(input_ids, loss_mask, document)
    if blocks is None:
        return clean
    assert noisy_input_ids is not None and noise_mask is not None and p_mask is not None
    first = Corruption(noisy_input_ids, noise_mask, p_mask)
    keep = blocks.loss_mask
    if noisy_stream != "response":
        in_prompt = ~loss_mask if noisy_stream == "all" or is_vision is None else ~loss_mask & ~is_vision
        blocks, keep = _with_prompt(blocks, in_prompt, block_length)
    halves = [_noisy_half(blocks, first, keep, blocks.loss_mask, document)]
    if complement is not None:
        may_mask = p_mask < 1
        # Blocks whose tokens are all masked in the first copy have nothing left to learn from.
        has_maskable = torch.bincount(blocks.block_id[may_mask], minlength=int(blocks.block_id.max()) + 2) > 0
        keep = blocks.loss_mask & has_maskable[blocks.block_id]
        blocks = replace(blocks, block_id=blocks.block_id + len(has_maskable))
        halves.append(_noisy_half(blocks, complement, keep, may_mask, document))
    return _join([*halves, clean], image_copies=2 if noisy_stream == "all" else 1)


def _clean_half(input_ids: Tensor, loss_mask: Tensor, document: int) -> DualStream:
    # The shift happens here and nowhere else: the clean token before a supervised token carries it as its target.
    target = torch.full_like(input_ids, IGNORE)
    target[:-1] = torch.where(loss_mask[1:], input_ids[1:], IGNORE)
    position, no = torch.arange(input_ids.shape[0]), torch.zeros_like(loss_mask)
    return DualStream(
        input_ids=input_ids,
        position=position,
        document=torch.full_like(input_ids, document),
        block_start=position,
        block_id=torch.full_like(input_ids, -1),
        is_noisy=no,
        source=position,
        is_maskable=no,
        target=target,
        p_mask=torch.ones(input_ids.shape[0]),
    )


def _noisy_half(blocks: Blocks, corruption: Corruption, keep: Tensor, is_maskable: Tensor, document: int) -> DualStream:
    """The tokens of `keep` [T'] with their noise; a masked one has its own token as its target."""
    target = torch.where(corruption.noise_mask, blocks.token_ids, IGNORE)
    ids = corruption.noisy_input_ids[keep]
    return DualStream(
        input_ids=ids,
        position=blocks.position[keep],
        document=torch.full_like(ids, document),
        block_start=blocks.block_start[keep],
        block_id=blocks.block_id[keep],
        is_noisy=torch.ones_like(ids, dtype=torch.bool),
        source=blocks.source[keep],
        is_maskable=is_maskable[keep],
        target=target[keep],
        p_mask=corruption.p_mask[keep],
    )


def _with_prompt(blocks: Blocks, in_prompt: Tensor, block_length: int) -> tuple[Blocks, Tensor]:
    """Give the prompt tokens of in_prompt [T] blocks of their own; also return which tokens [T'] now have a block."""
    prompt_id, prompt_start = assign_blocks(in_prompt, block_length)
    first_free = int(blocks.block_id.max()) + 1
    is_response = blocks.loss_mask  # true for padding, whose source leads nowhere
    with_prompt = replace(
        blocks,
        block_id=torch.where(is_response, blocks.block_id, prompt_id[blocks.source] + first_free),
        block_start=torch.where(is_response, blocks.block_start, prompt_start[blocks.source]),
    )
    return with_prompt, is_response | in_prompt[blocks.source]


def _join(rows: Sequence[DualStream], **replaced: Any) -> DualStream:
    names = [name for name in TOKEN_FIELDS if name not in replaced]
    joined: dict[str, Any] = {name: torch.cat([getattr(row, name) for row in rows]) for name in names}
    return DualStream(**joined, **replaced)


def pack(rows: Sequence[DualStream]) -> DualStream:
    """Join samples into one row with documents 0, 1, ...; positions restart, sources index the joined clean half."""
    documents, sources, num_clean = [], [], 0
    for number, row in enumerate(rows):
        documents.append(torch.full_like(row.document, number))
        sources.append(torch.where(row.source >= 0, row.source + num_clean, -1))
        num_clean += int((~row.is_noisy).sum())
    (image_copies,) = {row.image_copies for row in rows}
    return _join(rows, document=torch.cat(documents), source=torch.cat(sources), image_copies=image_copies)
