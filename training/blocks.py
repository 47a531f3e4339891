"""Cutting the responses of a sample into the blocks that are denoised, and filling the last block of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ALIGNMENTS = ("response", "sequence")
BLOCK_OFFSETS = ("response", "random")
RESPONSE_PADDINGS = ("none", "block")


def response_runs(loss_mask: Tensor) -> list[tuple[int, int]]:
    """Return the (start, end) of each contiguous run of True in loss_mask [T], that is of each response."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int())
    return list(zip(torch.where(edges == 1)[0].tolist(), torch.where(edges == -1)[0].tolist(), strict=True))


def block_length_at(schedule: Sequence[Sequence[float]], progress: float) -> int | tuple[int, ...]:
    """The block length at `progress` (0 to 1) of a run: that of the last entry which has begun.

    schedule: [progress, length] or [progress, length, length, ...] (one is drawn per sample), from 0 on upwards, for
    instance [[0, 2], [0.2, 4], [0.4, 8], [0.6, 16], [0.8, 32]] (Fast-dVLM anneals 2..32).

    Raises:
        ValueError: the schedule is empty, does not begin at 0 or does not rise, or a length is no whole number from 1.
    """
    name = "block_length_schedule"
    if not schedule or any(len(entry) < 2 for entry in schedule):
        raise ValueError(f"{name} must hold entries [progress, block length], got {schedule!r}")
    starts = [entry[0] for entry in schedule]
    if starts[0] != 0 or starts[-1] > 1 or any(a >= b for a, b in zip(starts, starts[1:], strict=False)):
        raise ValueError(f"{name} must begin at progress 0 and rise, to 1 at most, got {starts}")
    if wrong := [length for entry in schedule for length in entry[1:] if length < 1 or length != int(length)]:
        raise ValueError(f"{name} needs block lengths that are whole numbers from 1, got {wrong[0]!r}")
    entry = [entry for entry in schedule if entry[0] <= progress or entry is schedule[0]][-1]
    lengths = tuple(int(length) for length in entry[1:])
    return lengths[0] if len(lengths) == 1 else lengths


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
    block_alignment: str = "response",
) -> tuple[Tensor, Tensor]:
    """Cut each response into blocks: loss_mask [T] -> (block_id [T], block_start [T]), -1 outside responses.

    block_alignment="response": blocks count from the first token of each response. "sequence": they count from the
    document's first token, so that a response's first block is what is left of the one that began in the prompt. In
    both, a block holds tokens of one response only: it never crosses its end, and its tokens see the whole prompt.
    block_offset="random" moves the origin by 0..block_length - 1 tokens, per response or per document, which shortens
    the first block, so that drafts which start anywhere are trained for. A list of block lengths is sampled once per
    sample.
    """
    length = sample_block_length(block_length, generator)
    runs = response_runs(loss_mask)
    return _assign(loss_mask, length, runs, _shifts(runs, length, block_offset, generator, block_alignment))


def _shifts(
    runs: list[tuple[int, int]],
    length: int,
    block_offset: str,
    generator: torch.Generator | None,
    block_alignment: str,
) -> list[int]:
    """How many tokens of each response's first block lie before the response, and are left out."""
    if block_alignment not in BLOCK_ALIGNMENTS:
        raise ValueError(f"block_alignment must be one of {BLOCK_ALIGNMENTS}, got {block_alignment!r}")
    if block_offset not in BLOCK_OFFSETS:
        raise ValueError(f"block_offset must be one of {BLOCK_OFFSETS}, got {block_offset!r}")
    if generator is None and block_offset == "random":
        raise ValueError("a generator is needed for block_offset='random'")

    def offset() -> int:
        return int(torch.randint(length, (), generator=generator)) if block_offset == "random" else 0

    if block_alignment == "response":
        return [offset() for _ in runs]
    origin = offset()
    return [(start + origin) % length for start, _ in runs]


def _assign(loss_mask: Tensor, length: int, runs: list[tuple[int, int]], shifts: list[int]) -> tuple[Tensor, Tensor]:
    block_id = torch.full(loss_mask.shape, -1, dtype=torch.long)
    block_start = torch.full(loss_mask.shape, -1, dtype=torch.long)
    next_block = 0
    for (start, end), shift in zip(runs, shifts, strict=True):
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
    block_alignment: str = "response",
) -> Blocks:
    """Blocks of a sample (see assign_blocks); with a padding id, the last block of every response is filled up with it.

    A decoder always denoises whole blocks, so the positions behind an answer's end are masks there too. Padding (with
    the end token) teaches them; it stands in the noisy half only, and the AR loss keeps its one end token.
    """
    runs = response_runs(loss_mask)
    shifts = _shifts(runs, block_length, block_offset, generator, block_alignment)
    block_id, block_start = _assign(loss_mask, block_length, runs, shifts)
    position = torch.arange(input_ids.shape[0])
    if padding_id is None:
        return Blocks(token_ids=input_ids, loss_mask=loss_mask, position=position, block_id=block_id,
                      block_start=block_start, source=position)  # fmt: skip
    index, places, padded = [], [], []
    done = 0
    for (start, end), shift in zip(runs, shifts, strict=True):
        # A block shortened by a random offset is still followed by masks up to a whole block when it is the last one;
        # blocks aligned with the sequence end where the next one would begin.
        first = int(block_start[end - 1])
        missing = (
            block_length - (end - first) if block_alignment == "response" else -(end - start + shift) % block_length
        )
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
