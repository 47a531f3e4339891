"""Fitting the learned sampler's network to trajectories: binary cross entropy on masked positions, with early stop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimode_vlm.learned_sampler import SamplerConfig, SamplerNetwork, features
from trimode_vlm.training.corruption import noise_generator
from trimode_vlm.training.learned_sampler_trajectories import States


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """AdamW with a cosine schedule over `epochs`, which a held-out loss that no longer falls may cut short.

    eval_fraction: of the prompts. patience: epochs without a new best one. batch_states: of a step.
    """

    epochs: int = 20
    batch_states: int = 256
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.05
    eval_fraction: float = 0.1
    patience: int = 3


def split_by_prompt(prompt: Tensor, eval_fraction: float) -> Tensor:
    """Which states [N] are held out: all states of a prompt or none, and one prompt at least.

    Each prompt has a number from 0 to 1 of its own, so that more prompts leave the choice among the others as it was.
    """
    numbers = prompt.unique().tolist()
    shares = {n: torch.rand((), generator=noise_generator(0, 0, n, "held-out")).item() for n in numbers}
    limit = max(eval_fraction, min(shares.values()))
    return torch.tensor([shares[n] < eval_fraction or shares[n] == limit for n in prompt.tolist()], dtype=torch.bool)


def batch_of(states: States, table: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(features [n, k, F], whether the likeliest token is the target [n, k], masked [n, k]) on the table's device."""
    picked = {
        name: states[name][index].to(table.device) for name in ("top_ids", "scalars", "canvas", "masked", "target")
    }
    ids = picked["top_ids"].long()
    read = features(table, ids, picked["scalars"], picked["canvas"].long(), picked["masked"])
    return read, ids[..., 0] == picked["target"], picked["masked"]


def summed_loss(network: SamplerNetwork, states: States, table: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """(summed binary cross entropy over the masked positions of these states, how many there are)."""
    read, label, masked = batch_of(states, table, index)
    losses = F.binary_cross_entropy_with_logits(network(read), label.float(), reduction="none")
    return (losses * masked).sum(), masked.sum()


@torch.no_grad()
def evaluate(network: SamplerNetwork, states: States, table: Tensor, index: Tensor, batch_states: int) -> float:
    """Mean loss per masked position."""
    network.eval()
    sums = [torch.stack(summed_loss(network, states, table, part)) for part in index.split(batch_states)]
    total, count = torch.stack(sums).double().sum(0).tolist()
    return total / max(count, 1)


def fit(
    config: SamplerConfig,
    states: States,
    table: Tensor,
    settings: FitSettings,
    seed: int,
    report: Callable[[dict[str, Any]], None],
) -> tuple[SamplerNetwork, dict[str, Any]]:
    """Train a network on the states of some prompts; the weights that fit the other prompts best, and how well.

    table: see `project`; it says on which device. report: called after every epoch.

    Raises:
        ValueError: too few prompts to hold one out.
    """
    held_out = split_by_prompt(states["prompt"], settings.eval_fraction)
    train, kept = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
    if not len(train):
        raise ValueError(
            f"eval_fraction {settings.eval_fraction} of {len(states['prompt'].unique())} prompts leaves none to train "
            "on: collect more samples"
        )
    torch.manual_seed(seed)
    network = SamplerNetwork(config).to(table.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    steps = settings.epochs * math.ceil(len(train) / settings.batch_states)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps, settings.warmup))
    best, best_epoch, best_loss = copy.deepcopy(network.state_dict()), 0, math.inf
    epoch = 0
    for epoch in range(1, settings.epochs + 1):
        order = train[torch.randperm(len(train), generator=noise_generator(seed, epoch, 0, "order"))]
        network.train()
        total = count = 0.0
        for part in order.split(settings.batch_states):
            loss, num = summed_loss(network, states, table, part)
            optimizer.zero_grad()
            (loss / num.clamp(min=1)).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total, count = total + loss.item(), count + num.item()
        eval_loss = evaluate(network, states, table, kept, settings.batch_states)
        report({"epoch": epoch, "loss": total / max(count, 1), "eval_loss": eval_loss, "lr": schedule.get_last_lr()[0]})
        if not math.isfinite(eval_loss):
            raise FloatingPointError(f"the loss is {eval_loss} after epoch {epoch}: lower lr")
        if eval_loss < best_loss:
            best, best_epoch, best_loss = copy.deepcopy(network.state_dict()), epoch, eval_loss
        elif epoch - best_epoch >= settings.patience:
            break
    network.load_state_dict(best)
    facts = {"best_epoch": best_epoch, "epochs": epoch, "eval_loss": best_loss}
    return network.eval(), facts | {"train_states": len(train), "eval_states": len(kept)}


def _rate(step: int, steps: int, warmup: float) -> float:
    rising = max(1, round(warmup * steps))
    return min(1.0, (step + 1) / rising) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
