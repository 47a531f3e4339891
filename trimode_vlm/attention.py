"""Rotary positions and one attention call for every pattern and kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .config import TriModeConfig
from .dual_attention import dual_attention
from .patterns import Pattern

Implementation = Literal["sdpa", "flex", "dense"]


class Rotary:
    """Rotary embedding of a config: positions -> the (cos, sin) pairs of queries and keys.

    The query's pair carries Ministral-3's position-dependent scale 1 + beta * ln(1 + floor(position / original)), so
    no layer needs to know it. Not a module: it has no weight to load, and moves to the device of its input.
    """

    def __init__(self, config: TriModeConfig) -> None:
        self.config = config
        rope = config.rope_parameters or {}
        self.beta = rope.get("llama_4_scaling_beta")
        self.original_length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        self._inv_freq: Tensor | None = None
        self._scaling = 1.0
        self._table: Tensor | None = None

    def _frequencies(self, device: torch.device) -> Tensor:
        if self._inv_freq is None or self._inv_freq.device != device:
            rope = self.config.rope_parameters or {}
            rope_type = rope.get("rope_type", "default")
            if rope_type == "default":
                assert self.config.head_dim is not None
                exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float, device=device)
                self._inv_freq = 1.0 / rope.get("rope_theta", 1e4) ** (exponents / self.config.head_dim)
            else:
                self._inv_freq, self._scaling = ROPE_INIT_FUNCTIONS[rope_type](self.config, device)
        return self._inv_freq

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[B, T] -> (query cos, query sin, key cos, key sin), each [B, 1, T, K]; sin has its first half negated."""
        angles = position_ids[:, None, :, None].float() * self._frequencies(position_ids.device)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if not self.beta:
            cos, sin = cos.to(dtype), sin.to(dtype)
            return cos, sin, cos, sin
        steps = torch.floor(position_ids[:, None, :, None] / self.original_length)
        scale = 1 + self.beta * torch.log1p(steps)
        return (cos * scale).to(dtype), (sin * scale).to(dtype), cos.to(dtype), sin.to(dtype)

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The pairs of positions 0, 1, ... looked up instead of computed: [2, length or more, 3, K].

        First cos, then sin; at each position those of queries, of keys, and of values, which do not turn. Kept, and
        grown by doubling.
        """
        table = self._table
        if table is None or table.shape[1] < length or table.dtype != dtype or table.device != device:
            positions = torch.arange(max(1024, 1 << (length - 1).bit_length()), device=device)
            q_cos, q_sin, k_cos, k_sin = (pair[0, 0] for pair in self(positions[None], dtype))
            cos = torch.stack((q_cos, k_cos, torch.ones_like(k_cos)), 1)
            sin = torch.stack((q_sin, k_sin, torch.zeros_like(k_sin)), 1)
            self._table = table = torch.stack((cos, sin))
        return table


def rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary pairs whose sin already carries the sign of rotate-half."""
    return torch.addcmul(x_BHTK * cos, x_BHTK.roll(x_BHTK.shape[-1] // 2, -1), sin)


def attend(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, pattern: Pattern, implementation: Implementation = "sdpa"
) -> Tensor:
    """Grouped-query attention under a pattern -> [B, T, H * K].

    "dense" is the plain softmax reference, "sdpa" torch's fused kernels, "flex" FlexAttention (on CPU: forward only).
    """
    B, H, T, K = q_BHTK.shape
    if pattern.kind == "dual":
        # Autocast leaves rotated queries and keys in fp32 beside values in bf16.
        q_BHTK, k_BGSK = q_BHTK.to(v_BGSK.dtype), k_BGSK.to(v_BGSK.dtype)
    if implementation == "sdpa" and pattern.kind == "dual" and q_BHTK.device.type == "cuda" and K >= 16:
        # A mask of a long dual stream has T x T entries; FlexAttention skips what it forbids, for heads from 16 on.
        implementation = "flex"
    if implementation == "flex":
        flex = _flex_attention(q_BHTK.device.type)
        out = flex(q_BHTK, k_BGSK, v_BGSK, block_mask=pattern.block_mask, enable_gqa=True)
    elif implementation == "dense":
        out = _dense(q_BHTK, k_BGSK, v_BGSK, pattern)
    elif pattern.kind == "full" or (pattern.kind != "dual" and T == 1):
        # Where all queries see the same keys, the heads of a group are just more queries: its keys are read once.
        G = k_BGSK.shape[1]
        mask = None if pattern.kind == "full" else pattern.attn_mask
        folded = F.scaled_dot_product_attention(q_BHTK.reshape(B, G, H // G * T, K), k_BGSK, v_BGSK, attn_mask=mask)
        out = folded.view(B, H, T, K)
    elif pattern.kind == "causal":
        out = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=True)
    elif pattern.kind == "dual" and pattern.dual_plan is not None:
        out = dual_attention(q_BHTK, k_BGSK, v_BGSK, pattern.dual_plan)
    else:
        out = F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=pattern.attn_mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(B, T, H * K)


@lru_cache
def _flex_attention(device_type: str) -> Callable[..., Tensor]:
    """FlexAttention, compiled where it is meant to be fast; uncompiled it still gives the right numbers."""
    from torch.nn.attention.flex_attention import flex_attention

    flex: Callable[..., Any] = flex_attention
    return torch.compile(flex) if device_type == "cuda" else flex


def _dense(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, pattern: Pattern) -> Tensor:
    repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = k_BGSK.repeat_interleave(repeats, 1), v_BGSK.repeat_interleave(repeats, 1)
    scores = q_BHTK @ k_BHSK.transpose(-1, -2) * q_BHTK.shape[-1] ** -0.5
    return scores.masked_fill(~pattern.attn_mask, float("-inf")).softmax(-1) @ v_BHSK
