"""The Pixtral vision transformer: images of one size in, one feature per patch out.

Images of equal grid form one batch, so no attention mask is ever needed. Weight names are the released ones.
Source: Pixtral 12B (arXiv 2410.07073); rotary layout as in transformers' PixtralVisionModel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PixtralVisionConfig

from trimode_vlm.attention import rotate
from trimode_vlm.backbone import MLP


class PixtralEncoder(nn.Module):
    """[n, 3, height, width] (multiples of the patch size) -> patch features [n, N, D], N = rows * columns."""

    def __init__(self, config: PixtralVisionConfig, feature_layer: int = -1) -> None:
        super().__init__()
        self.config = config
        # As transformers counts hidden states: 0 is the embedding, -1 the last layer's output.
        layers_run = feature_layer if feature_layer >= 0 else config.num_hidden_layers + 1 + feature_layer
        self.num_layers_run = layers_run
        assert isinstance(config.patch_size, int)
        self.patch_conv = nn.Conv2d(
            config.num_channels, config.hidden_size, config.patch_size, stride=config.patch_size, bias=False
        )
        self.ln_pre = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.transformer: Any = nn.Module()
        self.transformer.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.gradient_checkpointing = False

    @property
    def output_size(self) -> int:
        return self.config.hidden_size

    def forward(self, images: Tensor) -> Tensor:
        grid = self.patch_conv(images.to(self.patch_conv.weight.dtype))
        cos, sin = self._rotary(grid.shape[-2], grid.shape[-1], grid.device, grid.dtype)
        x = self.ln_pre(grid.flatten(2).transpose(1, 2))
        for layer in self.transformer.layers[: self.num_layers_run]:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return x

    def _rotary(self, rows: int, cols: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """2-D rotary pairs [1, 1, N, K]: even frequencies turn with the row, odd ones with the column."""
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        rope: dict[str, Any] = dict(self.config.rope_parameters or {})
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float, device=device) / head_dim
        inv_freq = 1.0 / rope.get("rope_theta", 1e4) ** exponents
        row = torch.arange(rows, device=device).repeat_interleave(cols)[:, None] * inv_freq[0::2]
        col = torch.arange(cols, device=device).repeat(rows)[:, None] * inv_freq[1::2]
        angles = torch.cat((row, col), -1)[None, None]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


class VisionLayer(nn.Module):
    def __init__(self, config: PixtralVisionConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.attention = VisionAttention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        self.feed_forward = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class VisionAttention(nn.Module):
    def __init__(self, config: PixtralVisionConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_dim = D // config.num_attention_heads
        self.q_proj = nn.Linear(D, D, bias=False)
        self.k_proj = nn.Linear(D, D, bias=False)
        self.v_proj = nn.Linear(D, D, bias=False)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = (p(x).view(B, N, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).reshape(B, N, D))
