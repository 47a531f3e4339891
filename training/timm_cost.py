"""What an image costs in a timm tower: measured on one, since each architecture has formulas of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trimode_vlm.config import TimmVisionConfig
from trimode_vlm.vision.timm_encoder import TimmEncoder


@dataclass(frozen=True)
class TowerCost:
    """Of a whole tower: parameters and width of its features; of one image: operations forward, and numbers that
    autograd keeps when all of it trains."""

    params: int
    width: int
    forward_flops: float
    kept_numbers: float


def measure_tower(config: TimmVisionConfig, num_patches: int = 0) -> TowerCost:
    """Run one square image of about so many patches through the tower, on the CPU; 0: only count its parameters."""
    side = max(1, round(math.sqrt(num_patches)))
    cost = _measure(config.architecture, config.image_size, config.patch_size, config.hidden_size, side)
    scale = num_patches / side**2
    return TowerCost(cost.params, cost.width, cost.forward_flops * scale, cost.kept_numbers * scale)


@lru_cache
def _measure(architecture: str, image_size: int, patch_size: int, hidden_size: int, side: int) -> TowerCost:
    tower = TimmEncoder(
        TimmVisionConfig(
            architecture=architecture, image_size=image_size, patch_size=patch_size, hidden_size=hidden_size
        )
    ).train()
    own = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor
        return tensor

    # Two, since batch norm refuses a single value.
    images = torch.zeros(2, 3, side * patch_size, side * patch_size)
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        tower(images)
    numbers = sum(tensor.untyped_storage().nbytes() / tensor.element_size() for tensor in kept.values())
    params = sum(p.numel() for p in tower.parameters())
    return TowerCost(params, tower.output_size, counter.get_total_flops() / 2, numbers / 2)
