"""Which token attends to which: every attention pattern of the project as a predicate.

A predicate takes (b, h, q, k) index tensors and returns a bool tensor. True in row q, column k: query q attends to
key k. The same predicate gives the dense mask (the reference), SDPA's mask and FlexAttention's BlockMask.
With a cache, key k is the slot k of the cache, and query q of row b stands in slot offset[b] + q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .dual_attention import DualPlan

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Kind = Literal["full", "causal", "dual", "masked"]


class DualMetadata(NamedTuple):
    """What decides the dual-stream pattern, token by token; each tensor [B, T]. See `dual_stream`."""

    position: Tensor
    document: Tensor
    block_start: Tensor
    block_id: Tensor
    is_noisy: Tensor


@dataclass(frozen=True, eq=False)
class Pattern:
    """A predicate with the shape it is used at.

    `kind` is what a kernel may exploit: "full" (every query sees every key), "causal" (square and lower triangular),
    "dual" (see `dual_plan`) or "masked" (evaluate the predicate). It never changes the result.
    `positions_are_slots`: behind a cache, whether each query's position is the slot that its key is written to.
    """

    predicate: Predicate
    batch: int
    query_length: int
    key_length: int
    device: torch.device
    kind: Kind = "masked"
    metadata: DualMetadata | None = None
    positions_are_slots: bool = True

    @cached_property
    def attn_mask(self) -> Tensor:
        """The predicate evaluated everywhere: bool [B, 1, T, S]."""
        b = torch.arange(self.batch, device=self.device)[:, None, None, None]
        h = torch.zeros(1, dtype=torch.long, device=self.device)[None, :, None, None]
        q = torch.arange(self.query_length, device=self.device)[None, None, :, None]
        k = torch.arange(self.key_length, device=self.device)[None, None, None, :]
        mask = self.predicate(b, h, q, k)
        return mask.expand(self.batch, 1, self.query_length, self.key_length)

    @cached_property
    def block_mask(self) -> Any:
        """The predicate as FlexAttention's BlockMask (about a second to build: keep the pattern, not the mask)."""
        from torch.nn.attention.flex_attention import create_block_mask

        if self.metadata is not None:
            return dual_block_mask(self.metadata, self.predicate)
        return create_block_mask(
            self.predicate, self.batch, None, self.query_length, self.key_length, device=str(self.device)
        )

    @cached_property
    def dual_plan(self) -> DualPlan | None:
        """How the CPU computes a dual stream without what it forbids, planned once; None: use the mask."""
        from .dual_attention import make_plan

        return None if self.metadata is None or self.device.type != "cpu" else make_plan(self.metadata)


def causal(
    batch: int, query_length: int, device: torch.device, offset: int | Tensor = 0, key_valid: Tensor | None = None
) -> Pattern:
    """Each query sees the keys at or before its own slot.

    Args:
        offset: slots filled before the queries, one number or a LongTensor [B] for ragged rows.
        key_valid: bool [B, S], False at padding. A padding query still sees itself, so no row is empty.
    """
    if isinstance(offset, int):
        key_length = offset + query_length
        full = query_length == 1 and key_valid is None
        square = offset == 0 and key_valid is None
        kind: Kind = "full" if full else "causal" if square else "masked"
        if key_valid is None:

            def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return k <= q + offset
        else:

            def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (k <= q + offset) & (key_valid[b, k] | (k == q + offset))

        return Pattern(predicate, batch, query_length, key_length, device, kind)

    def ragged(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + offset[b]

    return Pattern(ragged, batch, query_length, int(offset.max()) + query_length, device)


def block(batch: int, query_length: int, device: torch.device, offset: int | Tensor = 0) -> Pattern:
    """Each query sees the whole prefix and the whole block it stands in, both ways: the denoising pattern."""
    if isinstance(offset, int):
        end = offset + query_length
        return Pattern(lambda b, h, q, k: k < end, batch, query_length, end, device, "full")

    def ragged(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < offset[b] + query_length) & (q >= 0)

    return Pattern(ragged, batch, query_length, int(offset.max()) + query_length, device)


def causal_or_block(is_causal_B: Tensor, query_length: int, device: torch.device, offset: int | Tensor = 0) -> Pattern:
    """`causal` for the rows where `is_causal_B`, `block` for the others."""

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        begin = offset if isinstance(offset, int) else offset[b]
        return (k <= begin + q) | (k < begin + query_length) & ~is_causal_B[b]

    end = (offset if isinstance(offset, int) else int(offset.max())) + query_length
    return Pattern(predicate, len(is_causal_B), query_length, end, device)


def dual_stream(position: Tensor, document: Tensor, block_start: Tensor, block_id: Tensor, is_noisy: Tensor) -> Pattern:
    """Training pattern over [noisy | clean] tokens, decided by per-token metadata alone, each tensor [B, T].

    A clean query sees clean keys of its document at or before its position. A noisy query sees noisy keys of its own
    block, and clean keys of its document before its block's first position. Clean never sees noisy.
    Padding has document -1; it sees itself only. `block_id` is unique within a document.
    """

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same_document = (document[b, q] == document[b, k]) & (document[b, k] >= 0)
        clean_to_clean = ~is_noisy[b, q] & ~is_noisy[b, k] & (position[b, k] <= position[b, q])
        noisy_to_noisy = is_noisy[b, q] & is_noisy[b, k] & (block_id[b, k] == block_id[b, q])
        noisy_to_clean = is_noisy[b, q] & ~is_noisy[b, k] & (position[b, k] < block_start[b, q])
        return same_document & (clean_to_clean | noisy_to_noisy | noisy_to_clean) | (q == k)

    batch, length = position.shape
    metadata = DualMetadata(position, document, block_start, block_id, is_noisy)
    return Pattern(predicate, batch, length, length, position.device, "dual", metadata)


def causal_blocks(dual: Pattern) -> Pattern:
    """A dual stream whose noisy tokens see of their block only what stands before them: how a verifier reads drafts."""
    if dual.metadata is None:  # a batch without a noisy token
        return dual
    is_noisy = dual.metadata.is_noisy

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return dual.predicate(b, h, q, k) & (~is_noisy[b, k] | (k <= q))

    return replace(dual, predicate=predicate, kind="masked", metadata=None)


def dual_block_mask(metadata: DualMetadata, predicate: Predicate, tile: int = 128) -> Any:
    """The dual stream as a BlockMask, from the ranges of each tile's tokens: T x T is never evaluated.

    A tile that is wrongly thought to hold an allowed pair costs time, no more: the predicate decides inside it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    position, document, block_start, block_id, is_noisy = metadata
    length = position.shape[1]

    def tiles(x: Tensor, where: Tensor, reduce: Literal["amin", "amax"]) -> Tensor:
        """[B, T] -> [B, tiles]: the least or largest value where `where` holds, or past every bound."""
        nothing = 2**40 if reduce == "amin" else -(2**40)
        x = torch.nn.functional.pad(torch.where(where, x, nothing), (0, -length % tile), value=nothing)
        return getattr(x.unflatten(1, (-1, tile)), reduce)(-1)

    def overlap(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """[B, tiles, tiles]: whether the range of x over q tokens of a tile meets that over k tokens of another."""
        above = tiles(x, q, "amax")[:, :, None] >= tiles(x, k, "amin")[:, None]
        return above & (tiles(x, q, "amin")[:, :, None] <= tiles(x, k, "amax")[:, None])

    everywhere, real = torch.ones_like(is_noisy), document >= 0
    clean, noisy = real & ~is_noisy, real & is_noisy
    # A query sees the clean keys of its document up to this position.
    limit = torch.where(is_noisy, block_start - 1, position)
    to_clean = tiles(position, clean, "amin")[:, None] <= tiles(limit, real, "amax")[:, :, None]
    to_clean &= overlap(document, real, clean)
    to_noisy = overlap(document, noisy, noisy) & overlap(block_id, noisy, noisy)
    itself = torch.eye(to_clean.shape[1], dtype=torch.bool, device=position.device)
    one_document = tiles(document, everywhere, "amin")[:, :, None] == tiles(document, everywhere, "amax")[:, None]
    one_document = one_document & one_document.transpose(1, 2)
    all_clean = tiles(clean.long(), everywhere, "amin") == 1
    full = tiles(position, everywhere, "amax")[:, None] <= tiles(limit, everywhere, "amin")[:, :, None]
    full &= one_document & all_clean[:, None]
    if length % tile:
        full[:, -1], full[:, :, -1] = False, False
    some = (to_clean | to_noisy | itself) & ~full

    def listed(tile_mask: Tensor) -> tuple[Tensor, Tensor]:
        order = tile_mask.int().argsort(dim=-1, descending=True, stable=True)
        return tile_mask.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

    return BlockMask.from_kv_blocks(
        *listed(some), *listed(full), BLOCK_SIZE=tile, mask_mod=predicate, seq_lengths=(length, length)
    )


def quadratic(num_rows: int, num_masks: int, batch: int, device: torch.device, offset: int | Tensor = 0) -> Pattern:
    """One forward that verifies and drafts (paper, appendix C): rows of [d_i, mask x num_masks] after a clean prefix.

    d_i sees the prefix and d_0..d_i. The masks of row i see the prefix, d_0..d_i and their own row, both ways.
    Nothing sees another row's masks. Query index q = i * (num_masks + 1) + column; its position is offset + i + column.
    """
    width = num_masks + 1
    start = offset if isinstance(offset, int) else offset.max()

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        begin = offset if isinstance(offset, int) else offset[b]
        slot = k - begin
        row_q, row_k, is_mask_q, is_mask_k = q // width, slot // width, q % width > 0, slot % width > 0
        drafts = ~is_mask_k & (row_k <= row_q)
        own_row = is_mask_q & is_mask_k & (row_k == row_q)
        return (slot < 0) | (slot >= 0) & (slot < num_rows * width) & (drafts | own_row)

    length = num_rows * width
    return Pattern(
        predicate,
        batch,
        length,
        int(start) + length,
        device,
        "full" if length == 1 and isinstance(offset, int) else "masked",
        positions_are_slots=False,
    )
