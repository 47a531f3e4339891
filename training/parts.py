"""Which parts of a model train: text, vision and projector, whole or by LoRA, each with its own learning rate."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

PARTS = ("text", "vision", "projector")
MODULES = {"vision": "encoder.vision_tower", "projector": "encoder.multi_modal_projector"}
_TEXT = ("encoder.embed_tokens.", "encoder.layers.", "encoder.norm.", "diffusion_head.")
# What PEFT puts around our names: in front of all, around a wrapped layer, around a module that is trained whole.
_WRAPPERS = re.compile(
    r"^(?:module\.)?(?:base_model\.model\.)?|\.base_layer|\.original_module|\.modules_to_save\.[^.]+"
)


def part_of(name: str) -> str:
    """The part that a parameter or module belongs to, by its name, also inside PEFT's wrappers; "other" for none."""
    name = f"{plain_name(name)}."
    for part, prefix in MODULES.items():
        if name.startswith(f"{prefix}."):
            return part
    return "text" if name.startswith(_TEXT) else "other"


def plain_name(name: str) -> str:
    """Our name of a parameter or module, without PEFT's wrappers."""
    return _WRAPPERS.sub("", name)


def parts_in(model: nn.Module) -> tuple[str, ...]:
    """The parts that a model has."""
    found = {part_of(name) for name, _ in model.named_parameters()}
    return tuple(part for part in PARTS if part in found)


def select_parts(model: nn.Module, train: Collection[str] | None = None) -> None:
    """Train these parts (None: all that the model has) and freeze the others.

    Raises:
        ValueError: no part, an unknown one, or one that the model does not have.
    """
    train = parts_in(model) if train is None else train
    check_parts(model, train, "train")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) in train)
    hold_statistics(model)


def parameter_groups(
    model: nn.Module,
    lr: float,
    lr_vision: float | None = None,
    lr_projector: float | None = None,
    weight_decay: float = 0.1,
) -> list[dict[str, Any]]:
    """The trained parameters as optimizer groups: "params", "lr", "weight_decay" and "name" ("vision", or "vision-").

    A part without its own rate takes `lr`. Norms, biases and other 1-D parameters ("vision-") do not decay. A tied
    head is the embedding, and counts once.

    Raises:
        ValueError: nothing trains, or a rate is given for a part that does not.
    """
    rates = {"vision": lr_vision, "projector": lr_projector}
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        part, decays = part_of(name), _num_dims(parameter) > 1
        own = rates.get(part)
        key = part if decays else f"{part}-"
        own_lr = lr if own is None else own
        new = {"params": [], "lr": own_lr, "weight_decay": weight_decay if decays else 0.0, "name": key}
        groups.setdefault(key, new)["params"].append(parameter)
    if not groups:
        raise ValueError("no parameter trains: choose parts to train, or LoRA")
    trained = {key.removesuffix("-") for key in groups}
    for part, rate in rates.items():
        if rate is not None and part not in trained:
            raise ValueError(f"lr_{part} is set, but {part} does not train here")
    return list(groups.values())


def describe(model: Any) -> str:
    """What trains, in one line per part: "text: 1.2 M of 8.0 B by LoRA on 182 layers (encoder.layers.0..., ...)"."""
    lines = []
    parameters = [
        (plain_name(name), name, p) for name, p in model.named_parameters() if ".original_module." not in name
    ]
    for part in (*PARTS, "other"):
        own = [(plain, p) for plain, _, p in parameters if part_of(plain) == part]
        if not own:
            continue
        total = sum(_numel(p) for plain, p in own if ".lora_" not in plain)
        trained = sum(_numel(p) for _, p in own if p.requires_grad)
        layers = list(dict.fromkeys(plain.partition(".lora_")[0] for plain, _ in own if ".lora_" in plain))
        if layers:
            shown = ", ".join([*layers[:2], *(["..."] if len(layers) > 2 else [])])
            lines.append(f"{part}: {trained:,} for {total:,} by LoRA on {len(layers)} layers ({shown})")
        else:
            lines.append(f"{part}: {'frozen' if not trained else f'{trained:,} train'} of {total:,}")
    return "\n".join(lines)


def check_parts(model: nn.Module, names: Collection[str], setting: str) -> None:
    if not names:
        raise ValueError(f"{setting} must name at least one of {', '.join(PARTS)}")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"{setting}: unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    has = parts_in(model)
    if absent := [name for name in names if name not in has]:
        only = " (it is text only)" if has == ("text",) else ""
        raise ValueError(f"{setting}: this model has no {' and no '.join(absent)}{only}; its parts: {', '.join(has)}")


def hold_statistics(model: nn.Module) -> None:
    """Keep the running statistics of frozen batch norms (in some timm towers) as they are, whatever `train()` says."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and _hold not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_hold)


def _hold(module: nn.Module, _: Any) -> None:
    if module.training and not any(p.requires_grad for p in module.parameters()):
        module.eval()


def _num_dims(parameter: nn.Parameter) -> int:
    # ZeRO-3 leaves an empty parameter behind and keeps the shape.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())
