"""Speed of light: how few denoising steps would give the block that serial diffusion gives, if one knew that block.

An oracle against the model's own output, not a sampler: it looks at the block's final tokens before it commits. What it
commits is found in sol_search.py; here a model decodes block by block with these commits, as diffusion does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trimode_vlm.cache import KVCache
from trimode_vlm.decoders import DecodeState, Settings
from trimode_vlm.eval.sol_search import BUDGET, BlockSearch, Canvas, Forward, Look, SolBlock
from trimode_vlm.lean_forward import lean_forward
from trimode_vlm.prefill import prefill, read_prompts
from trimode_vlm.sampling import SamplingParams, confidence

if TYPE_CHECKING:
    from trimode_vlm.model import TriModeVLM


@dataclass(frozen=True, kw_only=True)
class SolAnswer:
    """An answer in the fewest steps found. `replayed[b]`: whether block b's commits, run anew, gave its target."""

    token_ids: list[int]
    blocks: list[SolBlock]
    replayed: list[bool]

    @property
    def denoise_steps(self) -> int:
        return sum(len(block.commits) for block in self.blocks)

    @property
    def refreshes(self) -> int:
        """Causal passes that keep a full block's keys and give the next seed: none behind the last block."""
        return len(self.blocks) - 1


@torch.inference_mode()
def speed_of_light(
    model: TriModeVLM,
    inputs: dict[str, Any],
    *,
    block_length: int,
    max_new_tokens: int,
    end_token_ids: Collection[int] = (),
    budget: int = BUDGET,
    probes: int = 1,
) -> SolAnswer:
    """Answer one prompt in the fewest denoising steps found; the tokens are those of serial diffusion.

    Args:
        inputs: one row as the processor gives it, on the model's device.
        end_token_ids: as `generate` has them; the answer ends with the first.

    Raises:
        ValueError: more than one row, or a model without a mask token.
    """
    state = start_state(model, inputs, block_length, max_new_tokens, end_token_ids)
    token_ids: list[int] = []
    blocks: list[SolBlock] = []
    replayed: list[bool] = []
    while True:
        start = (int(state.next_logits.argmax(-1)), *[state.mask_token_id] * (block_length - 1))
        search = BlockSearch(
            forward_over(state, probes),
            start,
            mask_token_id=state.mask_token_id,
            end_token_ids=end_token_ids,
            room=max_new_tokens - len(token_ids),
            budget=budget,
            probes=probes,
        )
        block = search.run()
        blocks.append(block)
        replayed.append(replay(forward_over(state), start, block.commits)[: len(block.target)] == block.target)
        token_ids += block.target
        if len(token_ids) >= max_new_tokens or token_ids[-1] in end_token_ids:
            return SolAnswer(token_ids=token_ids, blocks=blocks, replayed=replayed)
        logits = state.commit(torch.tensor([block.canvas], device=model.device))
        state.cache.advance([block_length])
        state.next_logits = logits[:, -1]


def replay(forward: Forward, start: Canvas, commits: Sequence[Sequence[int]]) -> list[int]:
    """The canvas that the commits give, every step a forward of its own: what a sampler with these choices would do."""
    canvas = list(start)
    for places in commits:
        tokens = forward([tuple(canvas)])[0].tokens
        for i in places:
            canvas[i] = tokens[i]
    return canvas


def start_state(
    model: TriModeVLM,
    inputs: dict[str, Any],
    block_length: int,
    max_new_tokens: int,
    end_token_ids: Collection[int],
) -> DecodeState:
    """The prompt in a cache and the logits behind it, as diffusion has them before its first block."""
    prompts = read_prompts(model, **inputs)
    if len(prompts) != 1:
        raise ValueError(f"speed of light takes one row at a time; input_ids has {len(prompts)}")
    if model.config.mask_token_id is None:
        raise ValueError("speed of light needs a mask token; this model's config has no mask_token_id")
    lean = lean_forward(model.encoder)
    cache, logits = prefill(model, prompts, None, max_new_tokens + block_length, lean)
    banned = torch.tensor(model.config.banned_ids(end_token_ids), dtype=torch.long, device=logits.device)
    return DecodeState(
        model=model,
        cache=cache,
        rows=[0],
        next_logits=logits.index_fill(-1, banned, float("-inf")),
        generators=[torch.Generator(model.device)],
        remaining=[max_new_tokens],
        settings=Settings(block_length=block_length, threshold=None),
        banned=banned,
        lean=lean,
    )


def forward_over(state: DecodeState, probes: int = 1) -> Forward:
    """Bidirectional forwards over the state's prefix: one canvas alone, several in batches of `probes` rows."""
    wide: KVCache | None = None

    def forward(canvases: Sequence[Canvas]) -> list[Look]:
        nonlocal wide
        if len(canvases) == 1:
            return _looks(state, canvases)
        if wide is None:
            wide = state.cache.select([0] * probes)
        # Rows to spare repeat the last canvas, so that the copied prefix serves every number of rows.
        padded = [*canvases, *[canvases[-1]] * (probes - len(canvases))]
        return _looks(replace(state, cache=wide), padded)[: len(canvases)]

    return forward


def _looks(state: DecodeState, canvases: Sequence[Canvas]) -> list[Look]:
    logits = state.propose(torch.tensor(canvases, device=state.next_logits.device))
    tokens = logits.argmax(-1)
    sure = confidence(logits, tokens, SamplingParams())
    return [Look(ids, probs) for ids, probs in zip(tokens.tolist(), sure.tolist(), strict=True)]
