"""Speed of light: how few denoising steps would give the block that serial diffusion gives, if one knew that block.

An oracle against the model's own output, not a sampler: it looks at the block's final tokens before it commits.

1. Target: the block decoded one top-confidence token per step, no threshold.
2. At each step the masked positions whose likeliest token is already the target's are ranked by confidence.
3. Bisection finds a prefix of that ranking that is safe: continuing greedily from there, one token per step, still ends
   in the target. The surest position alone is always safe, for that is the serial step itself.

Safety is not monotone in the prefix: 2 positions may be unsafe and 3 safe again. Bisection then finds a safe prefix,
not always the largest, as in the paper; `probes` as large as the block tries all and finds the largest. Even the
largest prefix at each step is a greedy choice: the figure is a lower bound on what knowing the target could save.

Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trimode_vlm.cache import KVCache
from trimode_vlm.decoders import DecodeState, Settings
from trimode_vlm.lean_forward import lean_forward
from trimode_vlm.prefill import prefill, read_prompts
from trimode_vlm.sampling import SamplingParams, confidence

if TYPE_CHECKING:
    from trimode_vlm.model import TriModeVLM

BUDGET = 5000
"""Simulated forwards per block, as in the paper."""

Canvas = tuple[int, ...]
"""A block under way: token ids, the mask token where nothing is committed."""


class Look(NamedTuple):
    """What one bidirectional forward says of a canvas: the likeliest token of each position, and its probability."""

    tokens: list[int]
    confidence: list[float]


Forward = Callable[[Sequence[Canvas]], list[Look]]


@dataclass(frozen=True, kw_only=True)
class SolBlock:
    """One block of an answer.

    Attributes:
        target: the tokens that serial decoding gave, up to the answer's end; what lies behind it is free.
        commits: positions committed together, per denoising step.
        canvas: the block as the commits left it.
        serial_steps: denoising steps of the serial decode.
        simulation_forwards: forwards that the search ran, as rows; a canvas seen before costs none.
        cut_simulations: simulations that the budget ended; they count as not safe.
    """

    target: list[int]
    commits: list[list[int]]
    canvas: Canvas
    serial_steps: int
    simulation_forwards: int
    cut_simulations: int


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


class BlockSearch:
    """The search in one block over a fixed prefix.

    Every canvas is looked at once and remembered, so that the serial decode, the simulations and the steps see the same
    numbers: a forward in another batch could rank two equal confidences otherwise.

    Args:
        forward: bidirectional forwards of canvases.
        start: the canvas with its seed. room: tokens that the answer may still have, at least 1.
        probes: prefixes tried together as one batch; 1 is bisection.
    """

    def __init__(
        self,
        forward: Forward,
        start: Canvas,
        *,
        mask_token_id: int,
        end_token_ids: Collection[int] = (),
        room: int | None = None,
        budget: int = BUDGET,
        probes: int = 1,
    ) -> None:
        self.forward, self.start, self.mask_token_id = forward, start, mask_token_id
        self.end_token_ids, self.room = end_token_ids, len(start) if room is None else room
        self.budget, self.probes = budget, probes
        self.simulation_forwards = self.cut_simulations = 0
        self._looks: dict[Canvas, Look] = {}
        self.target: list[int] = []

    def run(self) -> SolBlock:
        """Decode serially, then again with as many positions per step as are found safe."""
        self.target, serial_steps = self._serial()
        canvas, commits = self.start, []
        while not self._is_target(canvas):
            ranked = self._ranked(canvas)
            canvases = [self._commit(canvas, ranked[:n]) for n in range(1, len(ranked) + 1)]
            chosen = largest_safe(canvases, self._are_safe, self.probes)
            commits.append(ranked[:chosen])
            canvas = canvases[chosen - 1]
        return SolBlock(
            target=self.target,
            commits=commits,
            canvas=canvas,
            serial_steps=serial_steps,
            simulation_forwards=self.simulation_forwards,
            cut_simulations=self.cut_simulations,
        )

    def _serial(self) -> tuple[list[int], int]:
        canvas, steps = self.start, 0
        while (end := self._answer_end(canvas)) is None:
            canvas, steps = self._greedy_step(canvas), steps + 1
        return list(canvas[:end]), steps

    def _answer_end(self, canvas: Canvas) -> int | None:
        """How many of the block's tokens belong to the answer; None while the masks leave that open."""
        for i, token in enumerate(canvas[: self.room]):
            if token == self.mask_token_id:
                return None
            if token in self.end_token_ids:
                return i + 1
        return min(self.room, len(canvas))

    def _is_target(self, canvas: Canvas) -> bool:
        return list(canvas[: len(self.target)]) == self.target

    def _may_become_target(self, canvas: Canvas) -> bool:
        pairs = zip(canvas, self.target, strict=False)
        return all(token in (self.mask_token_id, wanted) for token, wanted in pairs)

    def _look(self, canvas: Canvas) -> Look:
        if canvas not in self._looks:
            self._looks[canvas] = self.forward([canvas])[0]
        return self._looks[canvas]

    def _commit(self, canvas: Canvas, places: Iterable[int]) -> Canvas:
        """The canvas with its own likeliest tokens at these places."""
        filled, tokens = list(canvas), self._look(canvas).tokens
        for i in places:
            filled[i] = tokens[i]
        return tuple(filled)

    def _by_confidence(self, canvas: Canvas) -> list[int]:
        """Masked positions, the surest first; of equals the leftmost, as the decoder's argmax has it."""
        sure = self._look(canvas).confidence
        return sorted((i for i, token in enumerate(canvas) if token == self.mask_token_id), key=lambda i: (-sure[i], i))

    def _greedy_step(self, canvas: Canvas) -> Canvas:
        return self._commit(canvas, self._by_confidence(canvas)[:1])

    def _ranked(self, canvas: Canvas) -> list[int]:
        """The positions that could be committed now: already the target's token, or behind the answer's end."""
        tokens, n = self._look(canvas).tokens, len(self.target)
        return [i for i in self._by_confidence(canvas) if i >= n or tokens[i] == self.target[i]]

    def _are_safe(self, canvases: Sequence[Canvas]) -> list[bool]:
        """Continue each greedily, all in step; safe is what ends in the target within the budget."""
        safe = [False] * len(canvases)
        running = dict(enumerate(canvases))
        while running:
            for i, canvas in list(running.items()):
                safe[i] = self._is_target(canvas)
                if safe[i] or not self._may_become_target(canvas):
                    del running[i]  # a committed token never changes, so a wrong one decides it
            self._simulate(running)
            running = {i: self._greedy_step(canvas) for i, canvas in running.items()}
        return safe

    def _simulate(self, running: dict[int, Canvas]) -> None:
        """Look at the running canvases in one batch; drop those that the budget has no forward for."""
        new: list[Canvas] = []
        for i, canvas in list(running.items()):
            if canvas in self._looks or canvas in new:
                continue
            if self.simulation_forwards + len(new) < self.budget:
                new.append(canvas)
            else:
                self.cut_simulations += 1
                del running[i]
        if new:
            self.simulation_forwards += len(new)
            self._looks.update(zip(new, self.forward(new), strict=True))


def largest_safe(
    canvases: Sequence[Canvas], are_safe: Callable[[Sequence[Canvas]], list[bool]], probes: int = 1
) -> int:
    """How many candidates of a ranking to commit, found by halving (or by cutting in probes + 1 parts).

    canvases[n - 1] has the first n committed; canvases[0] is known to be safe. All together is tried first, then the
    range between the last safe and the first unsafe number is cut until nothing lies between.
    """
    low, high = 1, len(canvases) + 1  # low is safe; high is unsafe, or behind the last
    while high - low > 1:
        span = high - low - 1
        if high > len(canvases) and span > probes:
            tried = [len(canvases)]
        else:
            count = min(probes, span)
            tried = [low + (i + 1) * (span + 1) // (count + 1) for i in range(count)]
        verdicts = are_safe([canvases[n - 1] for n in tried])
        safe = [n for n, is_safe in zip(tried, verdicts, strict=True) if is_safe]
        low = max([low, *safe])
        high = min([high, *(n for n in tried if n > low)])
    return low


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
    state = _start(model, inputs, block_length, max_new_tokens, end_token_ids)
    token_ids: list[int] = []
    blocks: list[SolBlock] = []
    replayed: list[bool] = []
    while True:
        start = (int(state.next_logits.argmax(-1)), *[state.mask_token_id] * (block_length - 1))
        search = BlockSearch(
            _forward_over(state, probes),
            start,
            mask_token_id=state.mask_token_id,
            end_token_ids=end_token_ids,
            room=max_new_tokens - len(token_ids),
            budget=budget,
            probes=probes,
        )
        block = search.run()
        blocks.append(block)
        replayed.append(replay(_forward_over(state), start, block.commits)[: len(block.target)] == block.target)
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


def _start(
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


def _forward_over(state: DecodeState, probes: int = 1) -> Forward:
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
