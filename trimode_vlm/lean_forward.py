"""The backbone's cached forward on its bare weights: what its modules compute, without calling modules.

One token of a small model costs more in module calls than in matrix products. Decoding asks for this forward once per
request; where a layer does anything else (LoRA, a hook, quantised or sharded weights), there is none, and the modules
themselves run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import ACT2FN

from .attention import attend
from .backbone import MLP, Attention, DecoderLayer, TextBackbone
from .cache import KVCache
from .patterns import Pattern

if TYPE_CHECKING:
    from .draft_adapter import Deltas

# Up to this size of all q, k and v together, copying them into one matrix per layer costs less than the calls it saves.
JOINED_BYTES = 2**24


class Layer(NamedTuple):
    """What a decoder layer computes with; `qkv` is one matrix, or the three one by one."""

    input_norm: Callable[[Tensor], Tensor]
    qkv: tuple[Tensor, ...]
    o: Tensor
    post_norm: Callable[[Tensor], Tensor]
    gate: Tensor
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor]


class LeanForward:
    """Forward of a backbone whose layers are plain; `lean_forward` says whether they are.

    Make it anew for each request, so that it never outlives a change of the weights.
    """

    def __init__(self, backbone: TextBackbone) -> None:
        config = backbone.config
        assert config.head_dim is not None
        H, G, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.num_heads, self.backbone = H, backbone
        layers = [cast(DecoderLayer, layer) for layer in backbone.layers]
        joined = sum(w.nbytes for layer in layers for w in _qkv(layer)) <= JOINED_BYTES
        self.layers = [_bare(layer, joined) for layer in layers]
        self.norm = rms_norm(backbone.norm)
        # Of each head in [q heads, k heads, v heads]: which row of the rotary table it takes.
        self.table_rows = torch.tensor([0] * H + [1] * G + [2] * G, device=backbone.norm.weight.device)

    def __call__(
        self, x: Tensor, position_ids: Tensor, pattern: Pattern, cache: KVCache, adapter: Deltas | None = None
    ) -> Tensor:
        """As TextBackbone.forward, for positions within the cache's capacity."""
        B, T, _ = x.shape
        H, K = self.num_heads, self.head_dim
        offset, implementation = cache.offset, self.backbone.implementation
        run = offset if isinstance(offset, int) and pattern.positions_are_slots else None
        cos, sin = self._rotary(position_ids, run, cache.capacity, x.dtype)
        for index, layer in enumerate(self.layers):
            h = layer.input_norm(x)
            qkv = (
                F.linear(h, layer.qkv[0]) if len(layer.qkv) == 1 else torch.cat([F.linear(h, w) for w in layer.qkv], -1)
            )
            qkv = qkv.view(B, T, -1, K)
            qkv = torch.addcmul(qkv * cos, qkv.roll(K // 2, -1), sin).transpose(1, 2)
            k, v = cache.append(index, qkv[:, H:], offset)
            heads = attend(qkv[:, :H], k, v, pattern, implementation)
            x = x + F.linear(heads, layer.o)
            if adapter is not None and (delta := adapter[index]) is not None:
                x = x + delta(heads)
            h = layer.post_norm(x)
            x = x + F.linear(layer.act(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)
        return self.norm(x)

    def _rotary(
        self, position_ids: Tensor, run: int | None, capacity: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of every head, [1 or B, T, H + 2 G, K]. Values turn by nothing, so that one product does all.

        Args:
            run: the first position where all rows have the same T positions in a run, else None.
        """
        table = self.backbone.rotary.table(capacity, dtype, position_ids.device)
        if run is not None:
            rows = table.narrow(1, run, position_ids.shape[1])[:, None]
        else:
            rows = table[:, position_ids]
        cos, sin = rows.index_select(-2, self.table_rows)
        return cos, sin


def rms_norm(module: nn.RMSNorm) -> Callable[[Tensor], Tensor]:
    """What nn.RMSNorm computes; in fp32 on a CPU by half as many kernels: sqrt(D) w x / |(x, c)|, where c^2 = D eps."""
    weight, eps = module.weight, module.eps
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or eps is None:
        return partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)
    scale, c = weight * weight.numel() ** 0.5, torch.tensor((weight.numel() * eps) ** 0.5)

    def norm(x: Tensor) -> Tensor:
        return torch.div(x, torch.linalg.vector_norm(x, 2, -1, True).hypot_(c)).mul_(scale)

    return norm


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


def _qkv(layer: DecoderLayer) -> tuple[Tensor, ...]:
    attention = layer.self_attn
    return attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight


def _bare(layer: DecoderLayer, joined: bool) -> Layer:
    qkv, mlp = _qkv(layer), layer.mlp
    return Layer(
        input_norm=rms_norm(layer.input_layernorm),
        qkv=(torch.cat(qkv),) if joined else qkv,
        o=layer.self_attn.o_proj.weight,
        post_norm=rms_norm(layer.post_attention_layernorm),
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        act=mlp.act.forward,
    )
