"""What the learned sampler learns from: states of blocks under way, and the tokens that serial decoding ends in.

Every block of an answer starts behind the answer's own text, as decoding would start it, and is walked twice: serially,
one most confident token per step, which also gives the target; and with the ground truth at hand, committing at each
step all that already equals it. Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), appendix A.

On disk they are numbered shards of safetensors. A shard is a function of the settings and its number, and appears when
it is whole: a run that was killed makes those that are missing or torn.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimode_vlm.cache import KVCache
from trimode_vlm.decoders import DecodeState, Settings
from trimode_vlm.lean_forward import lean_forward
from trimode_vlm.learned_sampler import look
from trimode_vlm.model_inputs import image_token_counts
from trimode_vlm.prefill import Prompt, prefill
from trimode_vlm.sampling import SamplingParams, confidence
from trimode_vlm.training.blocks import response_runs
from trimode_vlm.training.corruption import noise_generator
from trimode_vlm.training.data import Encoded, Source

POLICIES = ("serial", "truth")

States = dict[str, Tensor]
"""N states of blocks of k tokens.

top_ids [N, k, 3], scalars [N, k, 4]: what `look` says of the state's logits; canvas, masked, target [N, k]; prompt [N]:
a fingerprint, the same for the same question; start [N]: the block's position; policy [N]: index into POLICIES; step
[N]: how many steps came before it.
"""


@dataclass(frozen=True, kw_only=True)
class Collection:
    """How trajectories are made.

    states_per_block: at most so many states of each walk, the first among them. batch_blocks: walked together, each
    with a copy of what stands before it.
    """

    block_length: int
    states_per_block: int
    batch_blocks: int
    seed: int
    end_token_ids: Sequence[int]


@dataclass(frozen=True)
class Block:
    """A block of an answer before it is walked: the cache of its whole sample, and where it begins in it.

    truth: its tokens in the data [k], -1 behind the answer's end, where all is as good.
    """

    cache: KVCache
    start: int
    truth: Tensor
    sample_id: int
    prompt: int


@torch.inference_mode()
def walk(model: Any, samples: Sequence[Encoded], how: Collection) -> States:
    """The states of all blocks of the samples' answers."""
    lean = lean_forward(model.encoder)
    parts: list[States] = []
    waiting: list[Block] = []
    for number, sample in enumerate(samples, start=1):
        waiting += _blocks_of(model, sample, how, lean)
        while len(waiting) >= how.batch_blocks or (waiting and number == len(samples)):
            batch, waiting = waiting[: how.batch_blocks], waiting[how.batch_blocks :]
            parts += _walk_blocks(_decode_state(model, batch, how, lean), batch, how)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _blocks_of(model: Any, sample: Encoded, how: Collection, lean: Any) -> list[Block]:
    """One causal forward of the sample, and the blocks of its answers as decoding would cut them."""
    sizes = [(int(pixels.shape[-2]), int(pixels.shape[-1])) for pixels in sample.images]
    counts = image_token_counts(model.config, sizes) if sizes else []
    prompt = Prompt(sample.input_ids, list(sample.images), counts)
    runs = response_runs(torch.tensor(sample.loss_mask))
    cache, _ = prefill(model, [prompt], None, how.block_length, lean)
    fingerprint = _fingerprint(sample.input_ids[: runs[0][0]], prompt.digests)
    blocks = []
    for first, end in runs:
        for start in range(first, end, how.block_length):
            tokens = sample.input_ids[start : min(end, start + how.block_length)]
            truth = torch.tensor(tokens + [-1] * (how.block_length - len(tokens)))
            blocks.append(Block(cache, start, truth.to(model.device), sample.sample_id, fingerprint))
    return blocks


def _decode_state(model: Any, blocks: Sequence[Block], how: Collection, lean: Any) -> DecodeState:
    """A row for each block, over what stands before it."""
    cache = blocks[0].cache.select([0])
    for block in blocks[1:]:
        cache.join(block.cache)
    cache.set_lengths([block.start for block in blocks])
    banned = torch.tensor(model.config.banned_ids(how.end_token_ids), dtype=torch.long, device=model.device)
    return DecodeState(
        model=model,
        cache=cache,
        rows=list(range(len(blocks))),
        next_logits=torch.empty(0, device=model.device),
        generators=[],
        remaining=[how.block_length] * len(blocks),
        settings=Settings(block_length=how.block_length, threshold=None),
        banned=banned,
        lean=lean,
    )


def _walk_blocks(state: DecodeState, blocks: Sequence[Block], how: Collection) -> Iterator[States]:
    """The states of both walks of each block."""
    truth = torch.stack([block.truth for block in blocks])

    def surest(tokens: Tensor, sure: Tensor) -> Tensor:
        return torch.zeros_like(tokens, dtype=torch.bool).scatter(-1, sure.argmax(-1, keepdim=True), True)

    def true_ones(tokens: Tensor, sure: Tensor) -> Tensor:
        """All that is true; the surest too, which decoding always commits."""
        return surest(tokens, sure) | (tokens == truth) | (truth < 0)

    serial, target = _walk(state, truth[:, 0], surest)
    for policy, steps in enumerate((serial, _walk(state, truth[:, 0], true_ones)[0])):
        for row, block in enumerate(blocks):
            # Both walks begin with the same state: it is kept of the serial one.
            own = [n for n, step in enumerate(steps) if bool(step["masked"][row].any())][policy:]
            generator = noise_generator(how.seed, policy, block.sample_id, f"states/{block.start}")
            order = torch.randperm(max(len(own) - 1, 0), generator=generator)[: how.states_per_block - 1]
            kept = [own[i] for i in [0, *sorted((order + 1).tolist())]] if own else []
            if not kept:
                continue
            yield {name: torch.stack([steps[n][name][row] for n in kept]).cpu() for name in serial[0]} | {
                "target": target[row].int().cpu().expand(len(kept), -1),
                "prompt": torch.full((len(kept),), block.prompt),
                "start": torch.full((len(kept),), block.start, dtype=torch.int32),
                "policy": torch.full((len(kept),), policy, dtype=torch.uint8),
                "step": torch.tensor(kept, dtype=torch.int32),
            }


def _walk(state: DecodeState, seed: Tensor, choose: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[States], Tensor]:
    """Decode the blocks [seed, mask x (k - 1)] in step: (every state, with all rows, and the tokens [R, k]).

    choose: (likeliest tokens [R, k], their confidence, -inf where committed) -> what to commit; at least the surest.
    """
    canvas = seed.new_full((len(seed), state.settings.block_length), state.mask_token_id)
    canvas[:, 0] = seed
    masked = torch.ones_like(canvas, dtype=torch.bool)
    masked[:, 0] = False
    states = []
    while masked.any():
        logits = state.propose(canvas)
        tokens = logits.argmax(-1)
        top_ids, scalars = look(logits)
        states.append({"top_ids": top_ids.int(), "scalars": scalars, "canvas": canvas.int(), "masked": masked})
        sure = confidence(logits, tokens, SamplingParams()).masked_fill(~masked, float("-inf"))
        chosen = choose(tokens, sure) & masked
        canvas, masked = torch.where(chosen, tokens, canvas), masked & ~chosen
    return states, canvas


def _fingerprint(token_ids: list[int], digests: list[str]) -> int:
    text = f"{token_ids}/{digests}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


# Shards.


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def is_whole(path: Path, made_by: str) -> bool:
    """Whether a shard is there and whole; a torn one is named in a warning.

    Raises:
        ValueError: it was made with other settings.
    """
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:  # refuses a file that is shorter than its header says
            found = (file.metadata() or {}).get("made_by")
    except (SafetensorError, OSError):
        warnings.warn(f"{path}: a torn shard, not used", stacklevel=2)
        return False
    if found != made_by:
        raise ValueError(f"{path} was made by other settings: give another folder for trajectories, or remove it")
    return True


def collect(
    model: Any, source: Source, folder: Path, numbers: Sequence[int], how: Collection, made_by: str, limit: int | None
) -> Iterator[tuple[int, int]]:
    """Make the shards that are missing: shard n from step n of the source; none holds a sample behind the `limit`th.

    Yields (shard, states in it), 0 states for a shard that was there. made_by: what the shards depend on, as a text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        path = shard_path(folder, number)
        if is_whole(path, made_by):
            yield number, 0
            continue
        samples = source.draw(number, 0, 1)
        if limit is not None:
            samples = samples[: limit - number * len(samples)]
        states = walk(model, samples, how)
        scratch = path.with_suffix(".tmp")
        save_file(states, scratch, metadata={"made_by": made_by})
        os.replace(scratch, path)
        yield number, len(states["start"])


def read_shards(folder: Path, made_by: str) -> States:
    """All whole shards of a folder, joined.

    Raises:
        ValueError: there is none.
    """
    paths = [path for path in sorted(folder.glob("shard-*.safetensors")) if is_whole(path, made_by)]
    if not paths:
        raise ValueError(f"{folder}: no trajectories (shard-*.safetensors)")
    parts = [load_file(path) for path in paths]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
