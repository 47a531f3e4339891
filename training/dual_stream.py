"""The dual stream: one row [noisy | clean] whose per-token metadata is the single source of the attention pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100
NOISY_STREAMS = ("response", "text")
BLOCK_OFFSETS = ("response", "random")
RESPONSE_PADDINGS = ("none", "block")


@dataclass(frozen=True, kw_only=True)
class DualStream:
    """One row of the dual stream; every tensor is [T] with T = noisy tokens + clean tokens.

    position: the token's place in its clean document, kept by noisy tokens (so gaps appear where images were).
    block_start: position of the first token of the block (noisy) or the token's own position (clean).
    block_id: number of the block within its document (noisy), -1 (clean).
    source: index of the token in the clean half (-1: padding behind a response). is_maskable: True for the noisy
    tokens that noise may mask, answer tokens and padding. p_mask: masking probability of a token that may be masked
    in this draw, else 1. target: the next token for a clean token, the own token for a masked one, IGNORE elsewhere.
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


def response_runs(loss_mask: Tensor) -> list[tuple[int, int]]:
    """Return the (start, end) of each contiguous run of True in loss_mask [T], that is of each response."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int())
    return list(zip(torch.where(edges == 1)[0].tolist(), torch.where(edges == -1)[0].tolist(), strict=True))


def sample_block_length(block_length: int | Sequence[int], generator: torch.Generator | None = None) -> int:
    """One of several block lengths, drawn uniformly; a single one takes no random number."""
    lengths = [block_length] if isinstance(block_length, int) else list(block_length)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"block_length must be at least 1, got {block_length}")
    if len(lengths) == 1:
        return lengths[0]
    if generator is None:
        raise ValueError("a generator is needed for several block lengths")
    return lengths[int(torch.randint(len(lengths), (), generator=generator))]


def assign_blocks(
    loss_mask: Tensor,
    block_length: int | Sequence[int],
    block_offset: str = "response",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Cut each response into blocks: loss_mask [T] -> (block_id [T], block_start [T]), -1 outside responses.

    Blocks count from the first token of each response and never cross its end. block_offset="random" shortens the first
    block of each response to 1..block_length tokens, so that drafts which start anywhere are trained for. A list of
    block lengths is sampled once per sample.
    """
    if block_offset not in BLOCK_OFFSETS:
        raise ValueError(f"block_offset must be one of {BLOCK_OFFSETS}, got {block_offset!r}")
    if generator is None and block_offset == "random":
        raise ValueError("a generator is needed for block_offset='random'")
    length = sample_block_length(block_length, generator)
    block_id = torch.full(loss_mask.shape, -1, dtype=torch.long)
    block_start = torch.full(loss_mask.shape, -1, dtype=torch.long)
    next_block = 0
    for start, end in response_runs(loss_mask):
        shift = int(torch.randint(length, (), generator=generator)) if block_offset == "random" else 0
        local_block = (torch.arange(end - start) + shift) // length
        block_id[start:end] = next_block + local_block
        block_start[start:end] = start + (local_block * length - shift).clamp(min=0)
        next_block += int(local_block[-1]) + 1
    return block_id, block_start


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The tokens that a noisy half is cut from, [T'] each: the sample's own, and padding behind its responses.

    token_ids: what a masked position is to be; loss_mask: True where a token may be masked; position: its place in the
    clean sequence, or where it would stand there (padding); block_id and block_start: see DualStream, -1 outside.
    source: index of the token in the clean half, -1 for padding.
    """

    token_ids: Tensor
    loss_mask: Tensor
    position: Tensor
    block_id: Tensor
    block_start: Tensor
    source: Tensor


def cut_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    block_length: int,
    block_offset: str = "response",
    generator: torch.Generator | None = None,
    padding_id: int | None = None,
) -> Blocks:
    """Blocks of a sample (see assign_blocks); with a padding id, the last block of every response is filled up with it.

    A decoder always denoises whole blocks, so the positions behind an answer's end are masks there too. Padding (with
    the end token) teaches them; it stands in the noisy half only, and the AR loss keeps its one end token.
    """
    block_id, block_start = assign_blocks(loss_mask, block_length, block_offset, generator)
    position = torch.arange(input_ids.shape[0])
    if padding_id is None:
        return Blocks(token_ids=input_ids, loss_mask=loss_mask, position=position, block_id=block_id,
                      block_start=block_start, source=position)  # fmt: skip
    index, places, padded = [], [], []
    done = 0
    for _, end in response_runs(loss_mask):
        missing = block_length - (end - int(block_start[end - 1]))
        # A block shortened by a random offset is still followed by masks up to a whole block when it is the last one.
        index += [torch.arange(done, end), torch.full((missing,), end - 1)]
        places += [torch.arange(done, end), torch.arange(end, end + missing)]
        padded += [torch.zeros(end - done, dtype=torch.bool), torch.ones(missing, dtype=torch.bool)]
        done = end
    rest = torch.arange(done, input_ids.shape[0])
    take, is_padding = torch.cat([*index, rest]), torch.cat([*padded, torch.zeros(len(rest), dtype=torch.bool)])
    return Blocks(
        token_ids=torch.where(is_padding, padding_id, input_ids[take]),
        loss_mask=loss_mask[take],
        position=torch.cat([*places, rest]),
        block_id=block_id[take],
        block_start=block_start[take],
        source=torch.where(is_padding, -1, take),
    )


def build_dual_stream(
    input_ids: Tensor,
    loss_mask: Tensor,
    blocks: Blocks | None = None,
    noisy_input_ids: Tensor | None = None,
    noise_mask: Tensor | None = None,
    p_mask: Tensor | None = None,
    *,
    is_vision: Tensor | None = None,
    noisy_stream: str = "response",
    block_length: int = 32,
    document: int = 0,
) -> DualStream:
    """Lay out one sample as [noisy | clean]; without `blocks` the clean half alone (AR only).

    input_ids, loss_mask: [T]. noisy_input_ids, noise_mask, p_mask: [T'], the corruption of blocks.token_ids.

    noisy_stream="response": the noisy half holds the response tokens, L_resp + L in all. "text": every token that is no
    vision token (the paper's L_text + L); prompt tokens stand there unmasked, in blocks of block_length that end
    with their segment, and give the same losses because no response block sees them.
    """
    if noisy_stream not in NOISY_STREAMS:
        raise ValueError(f"noisy_stream must be one of {NOISY_STREAMS}, got {noisy_stream!r}")
    num_tokens = input_ids.shape[0]
    position = torch.arange(num_tokens)
    # The shift happens here and nowhere else: the clean token before a supervised token carries it as its target.
    next_target = torch.full_like(input_ids, IGNORE)
    next_target[:-1] = torch.where(loss_mask[1:], input_ids[1:], IGNORE)
    ones, minus, no = torch.ones(num_tokens), torch.full_like(input_ids, -1), torch.zeros_like(loss_mask)
    clean = (input_ids, position, position, minus, no, no, next_target, ones)
    if blocks is None:
        return _row([clean], [position], document)
    assert noisy_input_ids is not None and noise_mask is not None and p_mask is not None
    keep, block_id, block_start = blocks.loss_mask, blocks.block_id, blocks.block_start
    if noisy_stream == "text":
        # A padding token is no vision token; its source stands for the last token of its response.
        is_text = torch.ones_like(loss_mask) if is_vision is None else ~is_vision
        keep = is_text[blocks.source] | blocks.loss_mask
        prompt_id, prompt_start = assign_blocks(is_text & ~loss_mask, block_length)
        first_free = int(block_id.max()) + 1
        block_id = torch.where(blocks.loss_mask, block_id, prompt_id[blocks.source] + first_free)
        block_start = torch.where(blocks.loss_mask, block_start, prompt_start[blocks.source])
    own_target = torch.where(noise_mask, blocks.token_ids, IGNORE)
    yes = torch.ones_like(keep)
    noisy = (noisy_input_ids, blocks.position, block_start, block_id, yes, blocks.loss_mask, own_target, p_mask)
    return _row([tuple(part[keep] for part in noisy), clean], [blocks.source[keep], position], document)


def _row(halves: list[tuple[Tensor, ...]], sources: list[Tensor], document: int) -> DualStream:
    ids, position, block_start, block_id, is_noisy, is_maskable, target, p_mask = (
        torch.cat(parts) for parts in zip(*halves, strict=True)
    )
    return DualStream(
        input_ids=ids,
        position=position,
        document=torch.full_like(ids, document),
        block_start=block_start,
        block_id=block_id,
        is_noisy=is_noisy,
        source=torch.cat(sources),
        is_maskable=is_maskable,
        target=target,
        p_mask=p_mask,
    )


def pack(rows: Sequence[DualStream]) -> DualStream:
    """Join samples into one row with documents 0, 1, ...; positions restart, sources index the joined clean half."""
    documents, sources, num_clean = [], [], 0
    for number, row in enumerate(rows):
        documents.append(torch.full_like(row.document, number))
        sources.append(torch.where(row.source >= 0, row.source + num_clean, -1))
        num_clean += int((~row.is_noisy).sum())
    names = ("input_ids", "position", "block_start", "block_id", "is_noisy", "is_maskable", "target", "p_mask")
    joined = {name: torch.cat([getattr(row, name) for row in rows]) for name in names}
    return DualStream(document=torch.cat(documents), source=torch.cat(sources), **joined)
