"""Optimizers and learning-rate schedules of the training loop."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
NO_STATE = "no_state"
NamedParameters = list[tuple[str, nn.Parameter]]


def make_optimizers(
    named: Iterable[tuple[str, nn.Parameter]],
    kind: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    momentum: float = 0.95,
) -> list[tuple[torch.optim.Optimizer, NamedParameters]]:
    """AdamW, or Muon for the 2-D matrices of the blocks (`.layers.`) and AdamW for embeddings, head and norms.

    Muon's update is scaled to AdamW's size ("match_rms_adamw", Moonlight 2502.16982), so both share one learning rate.
    Only matrices decay.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {OPTIMIZERS}, got {kind!r}")
    named = [(name, p) for name, p in named if p.requires_grad]
    matrices = [(n, p) for n, p in named if kind == "muon" and p.ndim == 2 and ".layers." in n]
    taken = {n for n, _ in matrices}
    rest = [(n, p) for n, p in named if n not in taken]
    optimizers: list[tuple[torch.optim.Optimizer, NamedParameters]] = []
    if matrices:
        muon = torch.optim.Muon(
            [p for _, p in matrices],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        optimizers.append((muon, matrices))
    if rest:
        decayed = [p for _, p in rest if p.ndim >= 2]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizers.append((torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas), rest))
    return optimizers


def lr_factor(
    progress: float, warmup: float, schedule: str = "cosine", decay_fraction: float = 0.4, min_ratio: float = 0.0
) -> float:
    """Learning rate as a share of its peak at `progress` in [0, 1] of the run; ends at min_ratio.

    cosine: from the end of the warm-up on. wsd: constant, then linear over the last decay_fraction.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    if progress < warmup:
        return progress / warmup
    if schedule == "cosine":
        done = (progress - warmup) / max(1 - warmup, 1e-9)
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    left = min((1 - progress) / max(decay_fraction, 1e-9), 1.0)
    return min_ratio + (1 - min_ratio) * max(left, 0.0)


def optimizer_tensors(optimizers: list[tuple[torch.optim.Optimizer, NamedParameters]]) -> dict[str, Tensor]:
    """Flatten optimizer state to named tensors: "{optimizer}/{parameter}/{key}".

    A parameter that never had a gradient has no state; an empty tensor under the key NO_STATE stands for it, so that
    the file names every parameter.
    """
    tensors: dict[str, Tensor] = {}
    for number, (optimizer, named) in enumerate(optimizers):
        for name, parameter in named:
            state = optimizer.state.get(parameter, {}) or {NO_STATE: torch.zeros(0)}
            for key, value in state.items():
                tensors[f"{number}/{name}/{key}"] = (
                    value.contiguous() if isinstance(value, Tensor) else torch.tensor(value)
                )
    return tensors


def load_optimizer_tensors(
    optimizers: list[tuple[torch.optim.Optimizer, NamedParameters]], tensors: dict[str, Tensor]
) -> None:
    """Put named tensors back as optimizer state; raises ValueError when a parameter is missing or unknown."""
    places = {
        f"{number}/{name}": (optimizer, p) for number, (optimizer, named) in enumerate(optimizers) for name, p in named
    }
    found = {name.rpartition("/")[0] for name in tensors}
    if unknown := sorted(found - places.keys()):
        raise ValueError(f"optimizer state for {unknown[0]!r} has no parameter in this run ({len(unknown)} such)")
    if missing := sorted(places.keys() - found):
        raise ValueError(f"the optimizer state lacks {missing[0]!r} ({len(missing)} parameters in all)")
    for full_name, value in tensors.items():
        place, _, key = full_name.rpartition("/")
        if key == NO_STATE:
            continue
        optimizer, parameter = places[place]
        # Optimizers count their steps on the CPU and keep the rest beside the parameter.
        optimizer.state[parameter][key] = value.to("cpu" if key == "step" else parameter.device, copy=True)
