"""From rows to encoded samples: a source that hands each rank its share of a step, and bad samples by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimode_vlm.training.data import Encoded, Source
from trimode_vlm.training.datasets import DataSettings

ON_BAD_SAMPLE = ("raise", "skip", "report")
PARTS = ("all", "train", "eval")


def open_source(
    settings: Sequence[DataSettings],
    processor: Any,
    *,
    batch_samples: int,
    seed: int = 0,
    max_length: int | None = None,
    on_bad_sample: str = "raise",
    shuffle: bool = True,
    eval_fraction: float = 0.0,
    part: str = "all",
) -> Source:
    """Open a mixture of data sets as a source of steps of `batch_samples` samples over all ranks.

    The result also has `num_samples`, the samples of one epoch (weights counted in; None when a member streams).
    With `eval_fraction`, part "train" leaves out the rows that part "eval" holds; the choice depends on neither seed
    nor order.
    """
    raise NotImplementedError


def read_sample(
    settings: DataSettings | Sequence[DataSettings], processor: Any, index: int, max_length: int | None = None
) -> Encoded:
    """Encode row `index` of a data set, or of several counted through in order.

    Raises:
        ValueError: there is no such row, or the row is bad; the message names file, row and id.
    """
    raise NotImplementedError
