"""The backbone's cached forward on its bare weights: what its modules compute, without calling modules.

One token of a small model costs more in module calls than in matrix products. Decoding asks for this forward once per
request; where a layer does anything else (LoRA, a hook, quantised or sharded weights), there is none, and the modules
themselves run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN

from .attention import attend
from .backbone import MLP, Attention, DecoderLayer, TextBackbone
from .cache import KVCache
from .patterns import Pattern


class Layer(NamedTuple):
    """The weights of a decoder layer, and its activation."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor]


class LeanForward:
    """Forward of a backbone whose layers are plain; `lean_forward` says whether they are.

    It refers to the weights and copies none: make it anew for each request, so that it never outlives a change of them.
    """

    def __init__(self, backbone: TextBackbone) -> None:
        config = backbone.config
        assert config.head_dim is not None
        self.backbone = backbone
        self.layers = [_bare(cast(DecoderLayer, layer)) for layer in backbone.layers]
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        # Of each head in [q heads, k heads, v heads]: which row of the rotary table it takes.
        repeats = torch.tensor([self.num_heads, config.num_key_value_heads, config.num_key_value_heads])
        self.table_rows = torch.arange(3).repeat_interleave(repeats).to(self.layers[0].q.device)

    def __call__(self, x: Tensor, position_ids: Tensor, pattern: Pattern, cache: KVCache) -> Tensor:
        """As TextBackbone.forward, for positions that are the cache's slots."""
        B, T, _ = x.shape
        H, K = self.num_heads, self.head_dim
        offset, implementation = cache.offset, self.backbone.implementation
        cos, sin = self._rotary(position_ids, offset, cache.capacity, x.dtype)
        for index, layer in enumerate(self.layers):
            h = self._norm(x, layer.input_norm)
            qkv = torch.cat((F.linear(h, layer.q), F.linear(h, layer.k), F.linear(h, layer.v)), -1).view(B, T, -1, K)
            qkv = torch.addcmul(qkv * cos, qkv.roll(K // 2, -1), sin).transpose(1, 2)
            k, v = cache.append(index, qkv[:, H:], offset)
            x = x + F.linear(attend(qkv[:, :H], k, v, pattern, implementation), layer.o)
            h = self._norm(x, layer.post_norm)
            x = x + F.linear(layer.act(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)
        return self._norm(x, self.backbone.norm.weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.backbone.norm.eps)

    def _rotary(
        self, position_ids: Tensor, offset: int | Tensor, capacity: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of every head, [1 or B, T, H + 2 G, K]. Values turn by nothing, so that one product does all."""
        table = self.backbone.rotary.table(capacity, dtype, position_ids.device)
        if isinstance(offset, int):
            rows = table.narrow(1, offset, position_ids.shape[1])[:, None]
        else:
            rows = table[:, position_ids]
        cos, sin = rows.index_select(-2, self.table_rows)
        return cos, sin


def lean_forward(backbone: TextBackbone) -> LeanForward | None:
    """The lean forward of a backbone, or None where its modules must be called."""
    if type(backbone) is not TextBackbone or _has_any_global_hook():
        return None
    act_class = type(ACT2FN[backbone.config.hidden_act])
    modules = [backbone.norm, *backbone.layers.modules()]
    return LeanForward(backbone) if all(_is_plain(module, act_class) for module in modules) else None


def _is_plain(module: nn.Module, act_class: type[nn.Module]) -> bool:
    """Whether a call of the module does what its class says and no more, so that its bare weights can stand for it."""
    if module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl or "forward" in vars(module):
        return False
    if type(module) in (nn.Linear, nn.RMSNorm):
        weights = [type(weight) for weight in module._parameters.values() if weight is not None]
        return weights == [nn.Parameter]  # no bias, not quantised, not sharded
    return type(module) in (nn.ModuleList, DecoderLayer, Attention, MLP, act_class)


def _bare(layer: DecoderLayer) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=layer.input_layernorm.weight,
        q=attention.q_proj.weight,
        k=attention.k_proj.weight,
        v=attention.v_proj.weight,
        o=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        act=mlp.act.forward,
    )
