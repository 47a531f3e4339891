"""Sampling as a race, so that the token at a place is the same however many forwards it took to get there.

Drawing from p is taking argmax p / e with one exponential e per token of the vocabulary; torch.multinomial draws that
way. Here the e of a place in the answer are drawn once, in order, and serve the draft of that place as well as its
verification. The verifier's race is then the one that AR would hold there, so a row's sampled answer is AR's of the
same seed, whatever the block lengths were and whoever shares the batch. A draft holds with probability at least
(1 - d) / (1 + d) at total variation d, where the accept rule of arXiv 2211.17192 reaches 1 - d.
Source: drafter-invariant speculative decoding, arXiv 2408.07978.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from .sampling import SamplingParams, probabilities


class Races:
    """The exponentials of one row's next places, drawn from its generator as they are needed."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.ahead: deque[Tensor] = deque()

    def winners(self, probs_TV: Tensor) -> Tensor:
        """The tokens [T] of the next T places, each by its distribution; they stay the next places."""
        while len(self.ahead) < len(probs_TV):
            self.ahead.append(torch.empty_like(probs_TV[:1]).exponential_(1, generator=self.generator))
        return (probs_TV / torch.cat(list(islice(self.ahead, len(probs_TV))))).argmax(-1)

    def pass_over(self, count: int) -> None:
        """The next `count` places have their tokens."""
        for _ in range(count):
            self.ahead.popleft()


def pick_coupled(logits_BTV: Tensor, params: SamplingParams, races: Sequence[Races]) -> Tensor:
    """The next T tokens of each row, greedy or by its races: [B, T, V] -> [B, T]."""
    if not params.do_sample:
        return logits_BTV.argmax(-1)
    probs = probabilities(logits_BTV, params)
    return torch.stack([race.winners(p) for race, p in zip(races, probs, strict=True)])
