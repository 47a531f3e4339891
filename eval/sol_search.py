"""The search of speed of light in one block, over any model that can be asked about a canvas.

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
from dataclasses import dataclass
from typing import NamedTuple

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
