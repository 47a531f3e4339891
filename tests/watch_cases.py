"""A toy model in a real transformers Trainer that logs like ours: the host of the callbacks' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from trimode_vlm.training.callbacks import install


class Clock:
    """A clock that a test sets; each reading adds `tick` seconds."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.dropout(self.layer(x)) - labels) ** 2).mean()}


class ToyTrainer(Trainer):
    """Adds to each step's log what our trainer logs, as plain functions of the step."""

    tokens_per_step = 100

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            step = self.state.global_step
            logs |= {
                "ar_loss": 4.0 / step,
                "diff_loss": 8.0 / step,
                "masked_accuracy": 1 - 1 / step,
                "mask_ratio": 0.5,
                "tokens_per_sec": 1234.5,
                "tokens_seen": self.tokens_per_step * step,
                "samples_seen": 2 * step,
            }
        super().log(logs, start_time)


def data(number: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(number, 2, generator=generator)
    return [{"x": row, "labels": row.sum()[None]} for row in rows]


def toy_trainer(
    folder: Path, callbacks: list[Any], model: nn.Module | None = None, rows: Any = None, **options: Any
) -> Trainer:
    """A trainer of 6 steps that logs each one, with our callbacks in the place of transformers' own."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "max_steps": 6, "logging_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no",
        "lr_scheduler_type": "constant", "report_to": "none", "use_cpu": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    rows = data(32) if rows is None else rows
    trainer = ToyTrainer(model=model or Toy(), args=args, train_dataset=rows, eval_dataset=rows[:4])
    install(trainer, callbacks)
    return trainer
