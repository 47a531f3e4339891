"""The Ministral-3 text decoder: embeddings, positions, pattern and cache in, hidden states out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PixtralVisionConfig
from transformers.activations import ACT2FN

from .attention import Implementation, Rotary, attend, rotate
from .cache import KVCache
from .config import TriModeConfig
from .patterns import Pattern

if TYPE_CHECKING:
    from .draft_adapter import Delta, Deltas
    from .lean_forward import LeanForward

IMPLEMENTATIONS: dict[str | None, Implementation] = {"flex_attention": "flex", "eager": "dense"}
RotaryPairs = tuple[Tensor, Tensor, Tensor, Tensor]


class TextBackbone(nn.Module):
    """Token embeddings, decoder layers and the final norm, under the released names (`encoder.*`)."""

    # Only with images; the model sets them.
    vision_tower: nn.Module
    multi_modal_projector: nn.Module

    def __init__(self, config: TriModeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.config = config
        self.gradient_checkpointing = False

    @property
    def implementation(self) -> Implementation:
        """The kernel, by transformers' `attn_implementation` of the model."""
        return IMPLEMENTATIONS.get(getattr(self.config, "_attn_implementation", None), "sdpa")

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        pattern: Pattern,
        cache: KVCache | None = None,
        lean: LeanForward | None = None,
        adapter: Deltas | None = None,
    ) -> Tensor:
        """[B, T, D], [B, T] -> hidden states [B, T, D]. With a cache the new keys are written behind its lengths.

        Args:
            lean: computes the same without calling the layers' modules (lean_forward.py); decoding passes it.
            adapter: what each layer adds to the output of its o_proj, in this forward alone (draft_adapter.py).
        """
        if lean is not None:
            assert cache is not None
            return lean(inputs_embeds, position_ids, pattern, cache, adapter)
        rotary = self.rotary(position_ids, inputs_embeds.dtype)
        offset = cache.offset if cache is not None else 0
        implementation = self.implementation
        hidden = inputs_embeds
        for layer, delta in zip(self.layers, adapter or [None] * len(self.layers), strict=True):
            given = (hidden, rotary, pattern, cache, offset, implementation, delta)
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(layer, *given, use_reentrant=False)
            else:
                hidden = layer(*given)
        return self.norm(hidden)


class DecoderLayer(nn.Module):
    def __init__(self, config: TriModeConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryPairs,
        pattern: Pattern,
        cache: KVCache | None,
        offset: int | Tensor,
        implementation: Implementation,
        delta: Delta | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, pattern, cache, offset, implementation, delta)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    def __init__(self, config: TriModeConfig, index: int) -> None:
        super().__init__()
        self.index = index
        assert config.head_dim is not None
        self.head_dim = config.head_dim
        D, K = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(D, config.num_attention_heads * K, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * K, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * K, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * K, D, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryPairs,
        pattern: Pattern,
        cache: KVCache | None,
        offset: int | Tensor,
        implementation: Implementation,
        delta: Delta | None = None,
    ) -> Tensor:
        B, T, _ = x.shape
        q_cos, q_sin, k_cos, k_sin = rotary
        q_BHTK = rotate(self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2), q_cos, q_sin)
        k_BGTK = rotate(self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2), k_cos, k_sin)
        v_BGTK = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        if cache is not None:
            k_BGTK, v_BGTK = cache.append(self.index, torch.cat((k_BGTK, v_BGTK), 1), offset)
        heads = attend(q_BHTK, k_BGTK, v_BGTK, pattern, implementation)
        return self.o_proj(heads) if delta is None else self.o_proj(heads) + delta(heads)


class MLP(nn.Module):
    """SwiGLU, of the text layers and of the Pixtral tower alike."""

    def __init__(self, config: TriModeConfig | PixtralVisionConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
