"""Stage 0 of the nano recipe: teach the vision tower, through the projector, to speak in word embeddings.

The feature of a merged cell is trained to be (sum of the word embeddings of what the cell shows + a row vector + a
column vector) / 2. Loss: cross entropy per slot on inner products, plus the squared error. Tower and projector are
frozen afterwards, so the text model meets images as sums of words that it already knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from trimode_vlm.training import distributed
from trimode_vlm.training.data import SLOTS_PER_STEP
from trimode_vlm.training.nano_data import picture_seed, pixels
from trimode_vlm.training.pictures import COLORS, KINDS, MAX_CELLS, Picture, make_picture
from trimode_vlm.training.synthetic import HELD_OUT_SEED
from trimode_vlm.training.train_settings import TrainSettings
from trimode_vlm.training.trainer import TriModeTrainer
from trimode_vlm.training.watch import not_finite_message
from trimode_vlm.vision.images import pad_pixels

LOSSES = ("color_loss", "content_loss", "row_loss", "col_loss", "square_loss")
ACCURACIES = ("color_accuracy", "content_accuracy", "row_accuracy", "col_accuracy")
NONE_LOGIT = 0.5
"""Logit of "this cell holds no such word", as a share of the logit that a present word has at the optimum."""

HELD_OUT_CELLS = 600
"""At least so many cells of held-out pictures are checked at the end of the stage."""

TWIN_NOISE = 0.4
"""Length of the difference between "red" and " red" at the start, as a share of an embedding's length."""


def start_weights(
    model: Any, slot_ids: Sequence[int], seed: int, twins: Sequence[tuple[int, int]] = ()
) -> dict[str, Tensor]:
    """Initialise a nano model in place and return the fixed row and column vectors, {"row"|"col": [MAX_CELLS, D]}.

    Words that pictures show, rows and columns get orthonormal vectors times 0.5 * sqrt(D), as far as D reaches; other
    tokens random ones of that length. twins are (token, other token) pairs of one meaning ("red", " red"): the first
    starts near the second, TWIN_NOISE away. The head starts as a copy of the embedding. Matrices are scaled by fan-in,
    and the block outputs further by the depth.
    """
    generator = torch.Generator().manual_seed(seed)
    D, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    norm = 0.5 * D**0.5
    embedding = model.encoder.embed_tokens.weight
    with torch.no_grad():
        basis = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
        chosen = torch.randn(len(slot_ids) + 2 * MAX_CELLS, D, generator=generator)
        chosen[:D] = basis[: len(chosen)]
        chosen = F.normalize(chosen, dim=-1) * norm
        others = torch.randn(embedding.shape, generator=generator)
        embedding.copy_(F.normalize(others, dim=-1) * norm)
        embedding[torch.tensor(list(slot_ids))] = chosen[: len(slot_ids)]
        for token, other in twins:
            noise = F.normalize(torch.randn(D, generator=generator), dim=-1) * norm * TWIN_NOISE
            embedding[token] = F.normalize(embedding[other] + noise, dim=-1) * norm
        model.diffusion_head.weight.copy_(embedding)
        for name, p in model.named_parameters():
            if p.ndim < 2 or p is embedding or p is model.diffusion_head.weight:
                continue
            std = p[0].numel() ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * num_layers) ** 0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    row, col = chosen[len(slot_ids) :].split(MAX_CELLS)
    return {"row": row.clone(), "col": col.clone()}


@dataclass(frozen=True)
class PictureSource:
    """Pictures of all kinds in turn, small and large, a pure function of (step, rank, world)."""

    seed: int
    batch_cells: int

    def draw(self, step: int, rank: int, world: int) -> list[Any]:
        first = (step * world + rank) * SLOTS_PER_STEP
        drawn: list[Picture] = []
        cells = 0
        while cells < self.batch_cells // world:
            number = first + len(drawn)
            # The kinds alternate over ranks and steps too, not only inside one draw.
            kind = KINDS[(number + step + rank) % len(KINDS)]
            drawn.append(make_picture(kind, picture_seed("vision", self.seed, number), 1.0))
            cells += _num_cells(drawn[-1])
        return drawn


def held_out_pictures(num_cells: int) -> list[Picture]:
    """Pictures of all kinds in turn that training never draws, until they have num_cells cells."""
    pictures: list[Picture] = []
    while sum(map(_num_cells, pictures)) < num_cells:
        pictures.append(make_picture(KINDS[len(pictures) % len(KINDS)], HELD_OUT_SEED + len(pictures)))
    return pictures


def _num_cells(picture: Picture) -> int:
    return len(picture.cells) * len(picture.cells[0])


class Features(nn.Module):
    """The tower and the projector alone, as what DDP or DeepSpeed wraps: images -> features [cells, D]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        """Features of all cells, picture by picture, row by row."""
        return torch.cat(self.model.encode_images(pixel_values, image_sizes))


@dataclass(frozen=True)
class Pictures:
    """One rank's pictures of a step: pixels as encode_images takes them, labels [cells, 4], targets [cells, D]."""

    pixel_values: Tensor
    image_sizes: Tensor
    labels: Tensor
    targets: Tensor
    seeds: tuple[int, ...]


class VisionTrainer(TriModeTrainer):
    """Trainer of tower and projector against the word embeddings, which stay fixed.

    `fit` ends with a check on held-out pictures, in the metrics that it returns.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        word_ids: dict[str, int],
        places: dict[str, Tensor],
        settings: TrainSettings,
        folder: Path,
    ) -> None:
        source: Any = PictureSource(settings.seed, settings.batch_tokens)
        super().__init__(Features(model), source, settings, folder, name="vision")
        self.pixel_processor, self.places = processor, places
        embedding = model.encoder.embed_tokens.weight.detach().cpu()
        colors = [word for word in word_ids if word in COLORS]
        contents = [word for word in word_ids if word not in COLORS]
        self.slots = [
            ({word: i for i, word in enumerate(words)}, embedding[[word_ids[word] for word in words]])
            for words in (colors, contents)
        ]
        self.norm2 = float(embedding[word_ids[colors[0]]].square().sum())

    def fit(self) -> dict[str, float]:
        """Train to the end; held-out accuracies beside the last metrics."""
        return {**super().fit(), **self.held_out()}

    @torch.no_grad()
    def held_out(self, num_cells: int = HELD_OUT_CELLS) -> dict[str, float]:
        """Accuracies over the cells of held-out pictures: each slot, and colour with content where a cell shows any."""
        batch = self.prepare(held_out_pictures(num_cells))
        _, hits = self.losses(self.model, batch)
        hits = hits.cpu()
        no_color, no_content = (len(table) for table, _ in self.slots)
        is_filled = (batch.labels[:, 0] != no_color) | (batch.labels[:, 1] != no_content)
        values = dict(zip((f"held_out_{name}" for name in ACCURACIES), hits.float().mean(0).tolist(), strict=True))
        values["held_out_filled_accuracy"] = float(hits[is_filled, :2].all(1).float().mean())
        return {**values, "held_out_cells": float(len(hits)), "held_out_filled_cells": float(is_filled.sum())}

    def make_batches(self, source: Any) -> Any:
        """Pictures in place of chats."""
        rank, world = distributed.rank(), distributed.num_ranks()
        return lambda step: self.prepare(source.draw(step, rank, world))

    def prepare(self, pictures: Sequence[Picture]) -> Pictures:
        """Pixels, labels of (colour, content, row, column), the last index: none, and targets of pictures."""
        images = [pixels(self.pixel_processor, picture.image) for picture in pictures]
        labels, vectors = [], []
        none = [len(table) for table, _ in self.slots]
        for picture in pictures:
            for r, cells in enumerate(picture.cells):
                for c, cell in enumerate(cells):
                    label = [*none, r, c]
                    vector = self.places["row"][r] + self.places["col"][c]
                    for word in cell:
                        slot = 0 if word in self.slots[0][0] else 1
                        label[slot] = self.slots[slot][0][word]
                        vector = vector + self.slots[slot][1][label[slot]]
                    labels.append(label)
                    vectors.append(vector / 2)
        sizes = torch.tensor([image.shape[-2:] for image in images])
        seeds = tuple(picture.seed for picture in pictures)
        return Pictures(pad_pixels(images), sizes, torch.tensor(labels), torch.stack(vectors), seeds)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward over this rank's pictures; the loss is a mean over all ranks' cells."""
        model.train()
        num_cells = distributed.reduce_(torch.tensor(float(len(inputs.labels))), self.args.device).item()
        losses, hits = self.losses(model, inputs)
        self.accelerator.backward(losses.sum() / num_cells * distributed.num_ranks())
        sums = torch.cat([losses.detach(), hits.float().sum(0)]).double().cpu()
        values = distributed.reduce_(sums, self.args.device) / num_cells
        if not values.isfinite().all():
            raise FloatingPointError(not_finite_message(self.state.global_step + 1, [str(s) for s in inputs.seeds]))
        self._values = dict(zip((*LOSSES, *ACCURACIES), values.tolist(), strict=True))
        return values[: len(LOSSES)].sum().to(self.args.device, torch.float32)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Losses and accuracies of the last step in place of the text stages' terms."""
        Trainer.log(self, {**logs, **self._values} if "learning_rate" in logs else logs)

    def losses(self, model: nn.Module, batch: Pictures) -> tuple[Tensor, Tensor]:
        """Losses [5], summed over cells (four slots, squared error relative to the norm), and hits, bool [cells, 4]."""
        device = self.args.device
        features = model(batch.pixel_values.to(device), batch.image_sizes)
        labels, targets = batch.labels.to(device), batch.targets.to(device)
        none = features.new_full((len(features), 1), NONE_LOGIT * self.norm2 / 2)
        logits = [torch.cat([features @ table.to(device).T, none], 1) for _, table in self.slots]
        logits += [features @ self.places[name].to(device).T for name in ("row", "col")]
        slot_losses = [F.cross_entropy(x, labels[:, i], reduction="sum") for i, x in enumerate(logits)]
        square = (features - targets).square().sum() / self.norm2
        hits = torch.stack([x.argmax(1) == labels[:, i] for i, x in enumerate(logits)], 1)
        return torch.stack([*slot_losses, square]), hits
