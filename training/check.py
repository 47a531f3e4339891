"""The pre-flight check of users' data: everything is read once, counted, and its faults are grouped by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimode_vlm.training.datasets import DataSettings


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What a check found; str() is the report for the terminal."""

    num_bad: int

    @property
    def ok(self) -> bool:
        """True when no sample is bad."""
        return self.num_bad == 0


def check_data(
    settings: Sequence[DataSettings],
    processor: Any,
    *,
    max_length: int | None = None,
    workers: int = 0,
    decode_images: bool = False,
    progress: bool = True,
) -> DataReport:
    """Read every row once and report; images by their headers unless `decode_images`."""
    raise NotImplementedError
