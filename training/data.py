"""Where samples come from: encoded samples and sources that hand a rank its share of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

SLOTS_PER_STEP = 1024
"""Sample ids that one rank may use in one step of a stream; ids of different steps and ranks never meet."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One sample ready for corruption: ids and loss mask of the rendered chat, its images in order of appearance.

    images: float tensors [3, h, w]. epoch: how often the sample was seen before; with sample_id it fixes the noise.
    name: what messages call it, as "train.jsonl row 17 (id abc)". skipped: what is wrong with the bad sample in whose
    place it stands, if it does.
    """

    sample_id: int
    input_ids: list[int]
    loss_mask: list[bool]
    images: list[Tensor] = field(default_factory=list)
    epoch: int = 0
    name: str = ""
    skipped: str = ""

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            name = self.name or f"sample {self.sample_id}"
            raise ValueError(f"{name}: {len(self.input_ids)} input_ids but {len(self.loss_mask)} loss_mask entries")


class Source(Protocol):
    """Hands out samples as a pure function of (step, rank, world), so that a resumed run sees the same."""

    def draw(self, step: int, rank: int, world: int) -> list[Encoded]: ...


@dataclass(frozen=True)
class ListSource:
    """A finite list of samples, shuffled anew each epoch; `batch_samples` of them make one step over all ranks."""

    samples: Sequence[Encoded]
    batch_samples: int
    seed: int = 0

    def draw(self, step: int, rank: int, world: int) -> list[Encoded]:
        drawn = []
        for number in range(step * self.batch_samples + rank, (step + 1) * self.batch_samples, world):
            epoch, place = divmod(number, len(self.samples))
            sample = self.samples[_order(len(self.samples), self.seed + epoch)[place]]
            drawn.append(replace(sample, epoch=epoch))
        return drawn


# Two: a step may end one epoch and begin the next.
@lru_cache(maxsize=2)
def _order(num_samples: int, seed: int) -> list[int]:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class StreamSource:
    """An endless stream: `make(sample_id, step)` is called until the rank's share of `batch_tokens` is reached.

    cost(sample) is the number of tokens a sample adds (both streams, as the caller trains it).
    """

    make: Callable[[int, int], Encoded]
    cost: Callable[[Encoded], int]
    batch_tokens: int

    def draw(self, step: int, rank: int, world: int) -> list[Encoded]:
        first_id = (step * world + rank) * SLOTS_PER_STEP
        drawn: list[Encoded] = []
        num_tokens = 0
        while num_tokens < self.batch_tokens // world and len(drawn) < SLOTS_PER_STEP:
            drawn.append(self.make(first_id + len(drawn), step))
            num_tokens += self.cost(drawn[-1])
        return drawn
