"""Small facts about a model's inputs that need no weights: positions and how many tokens an image takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import TriModeConfig


def positions(batch: int, length: int, offset: int | Tensor, valid: Tensor | None, device: torch.device) -> Tensor:
    """Position ids [B, T]: counted from the offset, and over real tokens only where padding is marked."""
    if valid is not None:
        return (valid.long().cumsum(-1) - 1).clamp(min=0) + offset
    if isinstance(offset, int):
        return torch.arange(offset, offset + length, device=device).expand(batch, length)
    return torch.arange(length, device=device) + offset[:, None]


def image_token_counts(config: TriModeConfig, sizes: list[tuple[int, int]]) -> list[int]:
    """Image tokens of images of the given (height, width) in pixels: one per merged square of patches."""
    cell = config.vision_config.patch_size * config.spatial_merge_size
    return [(h // cell) * (w // cell) for h, w in sizes]
