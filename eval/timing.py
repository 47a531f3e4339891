"""Timing that holds on a busy machine: medians of interleaved repetitions; and the bare products as a ceiling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# What auto may lose against the best fixed mode, and from how many repetitions on that can be told.
TOLERANCE = 0.05
LEAST_REPEATS = 3


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, taken in turns (A B, B A) so that a slower minute slows all; one turn warms up.

    With one repetition nothing warms up: that shows that the runs work, no more.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + (repeats > 1)):
        for name in there_and_back(list(runs), turn):
            start = time.perf_counter()
            runs[name]()
            if turn or repeats == 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def there_and_back(names: Sequence[str], turn: int) -> Sequence[str]:
    """The order of a turn: every other one goes back, so that none of two is always the later one."""
    return names[::-1] if turn % 2 else names


def repeat(call: Callable[[], object], times: int) -> Callable[[], None]:
    """A call that does `times` of another, for what is too short to time alone."""

    def many() -> None:
        for _ in range(times):
            call()

    return many


def keeps_up(ratios: Sequence[float | None], repeats: int) -> bool | None:
    """Whether auto is within TOLERANCE everywhere; None where too few repetitions, or none that answered, tell."""
    known = [ratio for ratio in ratios if ratio is not None]
    return min(known) >= 1 - TOLERANCE if known and repeats >= LEAST_REPEATS else None


def token_weights(model: Any) -> list[Tensor]:
    """The matrices that every new token is multiplied with: the layers' and the head's."""
    from torch import nn

    linears = [module for module in model.encoder.layers.modules() if isinstance(module, nn.Linear)]
    return [module.weight for module in [*linears, model.diffusion_head]]


def bare_products(weights: list[Tensor], tokens: int) -> Callable[[], None]:
    """A call that does nothing but the matrix products of one forward over `tokens` tokens."""
    import torch
    import torch.nn.functional as F

    inputs = {w.shape[1]: torch.randn(tokens, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def call() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return call
