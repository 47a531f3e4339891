"""The text layers' linear weights in 8 or 4 bits; embedding, head and vision stay as they are.

"int8" and "int4" are torchao's weight-only layers: activations keep their dtype. "4bit" is bitsandbytes' NF4, which
QLoRA trains on (arXiv 2305.14314).
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

KINDS = ("int8", "int4", "4bit")
# int4: one scale and zero for so many inputs. The CPU kernel wants outputs in multiples of the second.
INT4_GROUP, INT4_OUTPUTS = 32, 16


def check_quantize(kind: str, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError, in one line, for an unknown kind, and where such layers cannot be had; None: not known yet."""
    if kind not in KINDS:
        raise ValueError(f"quantize must be {', '.join(map(repr, KINDS))} or left out, got {kind!r}")
    if kind == "4bit":
        return _need(
            "4-bit",
            {
                "the bitsandbytes package": find_spec("bitsandbytes") is not None,
                "a CUDA device": torch.cuda.is_available(),
            },
        )
    has_torchao = {"the torchao package (pip install 'trimode-vlm[quantize]')": find_spec("torchao") is not None}
    _need(kind, has_torchao)
    if dtype == torch.float64:
        raise ValueError(f"{kind} weights compute in 16 or 32 bits, not in float64: give another dtype")
    if kind == "int4":
        where = torch.device(device or "cpu").type
        if where not in ("cpu", "cuda"):
            raise ValueError(f"int4 weights run on cpu and cuda, not on {where}: leave quantize out")
        if where == "cuda" and dtype not in (None, torch.bfloat16):
            raise ValueError(f"int4 weights on CUDA need dtype bfloat16, got {str(dtype).removeprefix('torch.')}")


def _need(kind: str, has: dict[str, bool]) -> None:
    if missing := [what for what, is_here in has.items() if not is_here]:
        raise ValueError(f"{kind} weights need {' and '.join(missing)}, not found here: leave quantize out")


def quantize_model(model: Any, kind: str, device: str | torch.device | None = None) -> None:
    """Quantise the linear layers of the text decoder, in place; `model.quantized` says how.

    Args:
        kind: one of KINDS. device: where "4bit" moves the model (None: CUDA); the others quantise it where it is.

    Raises:
        ValueError: as check_quantize; layers whose shape the int4 kernels do not take.
    """
    if kind == "4bit":
        return quantize_4bit(model, device)
    check_quantize(kind, model.device, model.dtype)
    linears = {name: m for name, m in model.encoder.layers.named_modules() if isinstance(m, nn.Linear)}
    if kind == "int4":
        _check_int4(linears, model.device, model.dtype)
    from torchao.quantization import quantize_

    config = _torchao_config(kind, model.device.type)
    quantize_(model.encoder.layers, config, filter_fn=lambda module, name: name in linears)
    assert all(type(linear.weight) is not nn.Parameter for linear in linears.values())
    model.quantized = kind


def text_weight_bytes(model: Any) -> int:
    """What the weights of the text decoder's layers take in memory, scales and zeros included."""
    return sum(_bytes(parameter) for parameter in model.encoder.layers.parameters())


def _bytes(weight: torch.Tensor) -> int:
    names = [*getattr(weight, "tensor_data_names", []), *getattr(weight, "optional_tensor_data_names", [])]
    parts = [part for name in names if (part := getattr(weight, name, None)) is not None]
    return sum(part.nbytes for part in parts) if parts else weight.nbytes


def _torchao_config(kind: str, device_type: str) -> Any:
    """Without torchao's settings for torch.compile, which would hold for all of the process."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig(set_inductor_config=False)
    if device_type == "cpu":
        # The only int4 layers that torchao 0.18 has for a CPU.
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=INT4_GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    packing: Any = "tile_packed_to_4d"
    return Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format=packing, set_inductor_config=False)


def _check_int4(linears: dict[str, nn.Linear], device: torch.device, dtype: torch.dtype) -> None:
    """torchao would leave a layer that does not fit as it is, and say so in a log at most."""
    for name, linear in linears.items():
        if linear.in_features % INT4_GROUP or linear.out_features % INT4_OUTPUTS:
            raise ValueError(
                f"int4 weights need inputs in multiples of {INT4_GROUP} and outputs in multiples of {INT4_OUTPUTS}; "
                f"encoder.layers.{name} has {linear.in_features} and {linear.out_features}: use int8"
            )
    if device.type == "cpu" and dtype == torch.float32:
        warnings.warn(
            "int4 layers in float32 on a CPU take up to 60 times as long as plain ones; use dtype bfloat16",
            stacklevel=3,
        )


def quantize_4bit(model: Any, device: str | torch.device | None = None) -> None:
    """Turn the linear layers of the text decoder into frozen NF4 layers, in place; embedding, head and vision stay.

    The model moves to the GPU, where they are quantised; they compute in the dtype that the model has now.

    Raises:
        ValueError: no bitsandbytes or no CUDA device.
    """
    check_quantize("4bit")
    replace_linears(model)
    model.to(torch.device(device or "cuda"))


def replace_linears(model: Any) -> None:
    """The layers of `encoder.layers` as bitsandbytes' Linear4bit, not yet quantised; marks the model as PEFT asks."""
    import bitsandbytes as bnb

    for parent in list(model.encoder.layers.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear:
                continue
            with torch.device("meta"):
                layer = bnb.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=linear.bias is not None,
                    compute_dtype=linear.weight.dtype,
                    quant_type="nf4",
                )
            layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=layer)
            setattr(parent, name, layer)
    model.is_loaded_in_4bit = True
    model.quantized = "4bit"
    model.requires_grad_(False)
