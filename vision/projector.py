"""From patch features to text embeddings: norm, merge neighbouring patches, two linear layers.

Names and order of operations as in Ministral-3 (transformers' Mistral3MultiModalProjector).
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN

from trimode_vlm.config import TriModeConfig


class MultiModalProjector(nn.Module):
    """[n, rows * cols, vision width] -> [n, (rows // m) * (cols // m), text width] for merge size m."""

    def __init__(self, config: TriModeConfig, vision_size: int) -> None:
        super().__init__()
        D, bias = config.hidden_size, config.multimodal_projector_bias
        self.norm = nn.RMSNorm(vision_size, eps=config.rms_norm_eps)
        self.patch_merger = PatchMerger(vision_size, config.spatial_merge_size)
        self.linear_1 = nn.Linear(vision_size, D, bias=bias)
        self.act = ACT2FN[config.projector_hidden_act]
        self.linear_2 = nn.Linear(D, D, bias=bias)

    def forward(self, features: Tensor, rows: int, cols: int) -> Tensor:
        merged = self.patch_merger(self.norm(features), rows, cols)
        return self.linear_2(self.act(self.linear_1(merged)))


class PatchMerger(nn.Module):
    """Joins each m x m square of patches, channel-major (the order of torch's unfold), into one vector."""

    def __init__(self, vision_size: int, merge_size: int) -> None:
        super().__init__()
        self.merge_size = merge_size
        self.merging_layer = nn.Linear(vision_size * merge_size**2, vision_size, bias=False)

    def forward(self, x: Tensor, rows: int, cols: int) -> Tensor:
        n, m, D = x.shape[0], self.merge_size, x.shape[-1]
        squares = x.view(n, rows // m, m, cols // m, m, D).permute(0, 1, 3, 5, 2, 4)
        return self.merging_layer(squares.reshape(n, -1, D * m * m))
