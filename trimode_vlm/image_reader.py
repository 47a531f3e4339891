"""Images of waiting requests become features while others decode: the vision tower has a thread of its own.

Only that thread runs the tower and the projector of an engine's model, as only the engine's runs all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .prefill import Prompt, encode
from .serving_caches import FeatureCache

if TYPE_CHECKING:
    from .model import TriModeVLM


class Reading(NamedTuple):
    """Features [N, D] of a prompt's images from number `first` on, done or to come."""

    first: int
    features: Future[list[Tensor]]


class ImageReader:
    """`ask` it from any thread; `close` it when done.

    Args:
        cache: used by the reader's thread alone.
        on_read: called, mostly from the reader's thread, when a prompt's images are done.
    """

    def __init__(self, model: TriModeVLM, cache: FeatureCache, on_read: Callable[[], None]) -> None:
        self.model, self.cache, self.on_read = model, cache, on_read
        self._thread = ThreadPoolExecutor(1, "trimode-images")

    def ask(self, prompt: Prompt, first: int) -> Reading:
        """Have the images from number `first` on encoded, behind those asked for before; returns at once."""
        reading = Reading(first, self._thread.submit(self._read, prompt, first))
        reading.features.add_done_callback(lambda _: self.on_read())
        return reading

    def close(self) -> None:
        """Finish the prompt under way, forget the others."""
        self._thread.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _read(self, prompt: Prompt, first: int) -> list[Tensor]:
        return encode(self.model, [(prompt, i) for i in range(first, len(prompt.images))], self.cache)
