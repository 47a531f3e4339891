"""Optimizers of the training loop: torch's AdamW, or Muon for matrices beside it, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS = ("adamw", "muon")
NO_STATE = "no_state"
Groups = list[dict[str, Any]]


class Together(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters that step as one; schedulers reach the groups of all."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def make_optimizer(
    named: list[tuple[str, nn.Parameter]],
    groups: Groups,
    kind: str,
    betas: tuple[float, float] = (0.9, 0.95),
    momentum: float = 0.95,
    on_cpu: bool = False,
) -> torch.optim.Optimizer:
    """AdamW over `groups` (each with lr and weight_decay), or Muon for the 2-D matrices of the blocks (`.layers.`).

    Muon's update is scaled to AdamW's size ("match_rms_adamw", Moonlight 2502.16982), so both share one learning rate.
    on_cpu: DeepSpeed's fused CPU Adam, for a state that is offloaded to the CPU.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {OPTIMIZERS}, got {kind!r}")
    if on_cpu:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, betas=betas, adamw_mode=True)
    if kind == "adamw":
        return torch.optim.AdamW(groups, betas=betas)
    matrices = {id(p) for name, p in named if p.ndim == 2 and ".layers." in name}

    def part(of_matrices: bool) -> Groups:
        chosen = [{**g, "params": [p for p in g["params"] if (id(p) in matrices) == of_matrices]} for g in groups]
        return [group for group in chosen if group["params"]]

    muon = torch.optim.Muon(part(True), momentum=momentum, adjust_lr_fn="match_rms_adamw") if part(True) else None
    adamw = torch.optim.AdamW(part(False), betas=betas) if part(False) else None
    return Together(*(optimizer for optimizer in (muon, adamw) if optimizer is not None))


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Flatten optimizer state to named tensors: "{parameter}/{key}".

    A parameter that never had a gradient has no state; an empty tensor under the key NO_STATE stands for it, so that
    the file names every parameter.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named:
        for key, value in (_states(optimizer, parameter) or {NO_STATE: torch.zeros(0)}).items():
            tensors[f"{name}/{key}"] = value.contiguous() if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], tensors: dict[str, Tensor]
) -> None:
    """Put named tensors back as optimizer state; raises ValueError when a parameter is missing or unknown."""
    parameters = dict(named)
    found = {name.rpartition("/")[0] for name in tensors}
    if unknown := sorted(found - parameters.keys()):
        raise ValueError(f"optimizer state for {unknown[0]!r} has no parameter in this run ({len(unknown)} such)")
    if missing := sorted(parameters.keys() - found):
        raise ValueError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} parameters in all)")
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        if key == NO_STATE:
            continue
        parameter = parameters[name]
        # Optimizers count their steps on the CPU and keep the rest beside the parameter.
        value = value.to("cpu" if key == "step" else parameter.device, copy=True)
        _owner(optimizer, parameter).state[parameter][key] = value


def _states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    return _owner(optimizer, parameter).state.get(parameter, {})


def _owner(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    for part in getattr(optimizer, "parts", (optimizer,)):
        if any(parameter is p for group in part.param_groups for p in group["params"]):
            return part
    raise ValueError("the optimizer does not hold this parameter")
