"""The text layers frozen in 4 bits by bitsandbytes: for QLoRA (arXiv 2305.14314) and for small GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn


def check_quantize(kind: str) -> None:
    """Raise ValueError, in one line, for another word than "4bit", and where 4-bit layers cannot be had."""
    if kind != "4bit":
        raise ValueError(f"quantize must be '4bit' or left out, got {kind!r}")
    has = {
        "the bitsandbytes package": find_spec("bitsandbytes") is not None,
        "a CUDA device": torch.cuda.is_available(),
    }
    if missing := [what for what, is_here in has.items() if not is_here]:
        raise ValueError(f"4-bit weights need {' and '.join(missing)}, not found here: leave quantize out")


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
    model.requires_grad_(False)
