"""What a training step is made of: samples of a source, corrupted and cut into micro-batches, step after step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from trimode_vlm.training.collate import Batch, micro_batches
from trimode_vlm.training.data import Encoded, Source
from trimode_vlm.training.train_settings import TrainSettings


class Steps(IterableDataset):
    """What `make` gives for each step, in order; worker w of n makes every n-th of them."""

    def __init__(self, make: Callable[[int], Any], first: int, end: int) -> None:
        self.make, self.first, self.end = make, first, end

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        offset, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(self.first + offset, self.end, stride):
            yield self.make(step)


@dataclass(frozen=True)
class MakeBatches:
    """The micro-batches of a step of one rank; goes to worker processes, so it holds no model.

    token_ids: the mask, vision and end tokens as `TrainSettings.noise_settings` takes them.
    """

    source: Source
    settings: TrainSettings
    token_ids: dict[str, Any]
    pad_token_id: int
    rank: int
    world: int

    def __call__(self, step: int) -> list[Batch]:
        return self.cut(self.source.draw(step, self.rank, self.world), step)

    def cut(self, samples: Sequence[Encoded], step: int) -> list[Batch]:
        """Samples with the noise of a step as micro-batches."""
        s = self.settings
        return micro_batches(
            samples,
            s.noise_settings(step, **self.token_ids),
            s.micro_batch_tokens,
            s.micro_batch_samples,
            self.pad_token_id,
            packing_length=s.packing_length,
        )


def noise_token_ids(config: Any, settings: TrainSettings) -> dict[str, Any]:
    """The tokens that noise must know: the mask, image tokens that are never masked, the end token for padding.

    Raises:
        ValueError: the model has no mask token, or no end token where responses are padded with it.
    """
    names = ("image_token_id", "image_start_token_id", "image_break_token_id", "image_end_token_id")
    vision = (
        () if config.vision_config is None else tuple(i for i in (getattr(config, n) for n in names) if i is not None)
    )
    end = config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    if settings.response_padding == "block" and end is None:
        raise ValueError("response_padding 'block' pads with the end token, but the config has no eos_token_id")
    if config.mask_token_id is None and settings.alpha > 0:
        raise ValueError(
            "the model has no mask_token_id, which the diffusion loss needs: convert it with one, or alpha 0"
        )
    return {"mask_token_id": config.mask_token_id, "vision_token_ids": vision, "end_token_id": end}
