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

from trimode_vlm.training.data import SLOTS_PER_STEP
from trimode_vlm.training.distributed import Ranks
from trimode_vlm.training.nano_data import picture_seed, pixels
from trimode_vlm.training.pictures import COLORS, KINDS, MAX_CELLS, Picture, make_picture
from trimode_vlm.training.trainer import Trainer, TrainSettings

NONE_LOGIT = 0.5
"""Logit of "this cell holds no such word", as a share of the logit that a present word has at the optimum."""

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
            cells += len(drawn[-1].cells) * len(drawn[-1].cells[0])
        return drawn


class VisionTrainer(Trainer):
    """Trainer of tower and projector against the word embeddings, which stay fixed."""

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        word_ids: dict[str, int],
        places: dict[str, Tensor],
        settings: TrainSettings,
        folder: Path,
        ranks: Ranks,
    ) -> None:
        source: Any = PictureSource(settings.seed, settings.batch_tokens)
        super().__init__(model, source, settings, folder, ranks, "vision")
        self.processor, self.places = processor, places
        embedding = model.encoder.embed_tokens.weight.detach()  # type: ignore[union-attr, operator]
        colors = [word for word in word_ids if word in COLORS]
        contents = [word for word in word_ids if word not in COLORS]
        self.slots = [
            ({word: i for i, word in enumerate(words)}, embedding[[word_ids[word] for word in words]])
            for words in (colors, contents)
        ]
        self.norm2 = float(embedding[word_ids[colors[0]]].square().sum())

    def targets(self, pictures: Sequence[Picture]) -> tuple[Tensor, Tensor]:
        """Labels [cells, 4] of (colour, content, row, column), the last index: none; and targets [cells, D]."""
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
        return torch.tensor(labels), torch.stack(vectors)

    def train_step(self) -> dict[str, float]:
        model: Any = self.model
        with self._timed("data"):
            drawn: Any = self.source.draw(self.step, self.ranks.rank, self.ranks.world)
            # Equal grids lie together, so that the tower runs them as one batch.
            pictures = sorted(drawn, key=lambda picture: picture.image.size)
            labels, vectors = self.targets(pictures)
            images = [pixels(self.processor, picture.image) for picture in pictures]
        for optimizer, _ in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        num_cells = self.ranks.sum(torch.tensor(float(len(labels)))).item()
        with self._timed("forward"):
            features = torch.cat(encode_by_size(model, images))
            losses, hits = self.losses(features, labels, vectors)
        loss = losses.sum() / num_cells
        if not torch.isfinite(loss):
            self._stop_on_nan(tuple(picture.seed for picture in pictures))
        with self._timed("backward"):
            loss.backward()
        sums = self.ranks.sum(torch.cat([losses.detach(), hits])) / num_cells
        norm, lr = self._update(tuple(picture.seed for picture in pictures))
        names = ("color_loss", "content_loss", "row_loss", "col_loss", "square_loss")
        accuracies = ("color_accuracy", "content_accuracy", "row_accuracy", "col_accuracy")
        values = dict(zip((*names, *accuracies), sums.tolist(), strict=True))
        return {"step": self.step, **values, "grad_norm": norm, "lr": lr, "cells": num_cells}

    def losses(self, features: Tensor, labels: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Summed losses [5] (four slots, squared error relative to the norm) and hits [4] over all cells."""
        none = features.new_full((len(features), 1), NONE_LOGIT * self.norm2 / 2)
        logits = [torch.cat([features @ table.T, none], 1) for _, table in self.slots]
        logits += [features @ self.places["row"].T, features @ self.places["col"].T]
        slot_losses = [F.cross_entropy(x, labels[:, i], reduction="sum") for i, x in enumerate(logits)]
        square = (features - vectors).square().sum() / self.norm2
        hits = torch.stack([(x.argmax(1) == labels[:, i]).sum() for i, x in enumerate(logits)]).float()
        return torch.stack([*slot_losses, square]), hits


def encode_by_size(model: Any, images: list[Tensor]) -> list[Tensor]:
    """Features of images that lie sorted by size: one call per size, without padding one to another."""
    features: list[Tensor] = []
    start = 0
    while start < len(images):
        end = start
        while end < len(images) and images[end].shape == images[start].shape:
            end += 1
        features += model.encode_images(torch.stack(images[start:end]))
        start = end
    return features
