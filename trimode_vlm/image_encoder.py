"""The images of waiting requests, encoded while others decode: a thread that runs the vision tower and projector."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .prefill import Prompt, encode
from .serving_caches import FeatureCache

if TYPE_CHECKING:
    from .model import TriModeVLM


class Encoding(NamedTuple):
    """Features [N, D] of a prompt's images from number `first` on, done or to come."""

    first: int
    features: Future[list[Tensor]]


class ImageEncoder:
    """Encodes prompt by prompt, in the order in which they are asked for.

    Args:
        cache: used by the encoder's thread alone.
        on_done: called when a prompt's images are done, or cancelled.
    """

    def __init__(self, model: TriModeVLM, cache: FeatureCache, on_done: Callable[[], None]) -> None:
        self.model, self.cache, self.on_done = model, cache, on_done
        self._asked: queue.SimpleQueue[tuple[Prompt, Encoding] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trimode-images", daemon=True)
        self._thread.start()

    def ask(self, prompt: Prompt, first: int) -> Encoding:
        """Have the images from number `first` on encoded; returns at once."""
        encoding = Encoding(first, Future())
        if first == len(prompt.images):
            encoding.features.set_result([])
            return encoding
        encoding.features.add_done_callback(lambda _: self.on_done())
        self._asked.put((prompt, encoding))
        return encoding

    def stop(self) -> None:
        """End the thread behind the prompt under way, without waiting for it; those behind it are forgotten."""
        self._stopped.set()
        self._asked.put(None)

    def join(self) -> None:
        """Wait for the end of a thread that was stopped."""
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        torch.get_num_threads()  # a new thread takes over what set_num_threads said only when asked
        while (asked := self._asked.get()) is not None and not self._stopped.is_set():
            prompt, (first, features) = asked
            if not features.set_running_or_notify_cancel():
                continue
            try:
                images = [(prompt, i) for i in range(first, len(prompt.images))]
                features.set_result(encode(self.model, images, self.cache))
            except BaseException as error:  # for whoever asks for the features
                features.set_exception(error)
            del asked, prompt, features  # not held while there is nothing to do
