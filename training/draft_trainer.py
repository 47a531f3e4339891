"""The training loop of the draft adapter: TriModeTrainer with its losses, and checkpoints that hold the LoRA alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimode_vlm.training.collate import Batch
from trimode_vlm.training.corruption import noise_generator
from trimode_vlm.training.draft_model import DraftModel
from trimode_vlm.training.objective import Counts
from trimode_vlm.training.progress import Window
from trimode_vlm.training.trainer import TriModeTrainer

GREEDY_SHARE = 0.1
"""Share of the slots that are drafted greedily; the others at temperature 1."""


class DraftWindow(Window):
    """LK, CE, accepted drafts and active positions of the steps since the last log."""

    def metrics(self, averaging: str, seconds: float) -> dict[str, float]:
        """Losses per active position; accepted_length: tokens that a cycle would give, the verifier's own included."""
        lk, ce, accepted, active = self.sums.tolist()
        num_slots, num_masks = num_slots_of(self.counts), self.counts.num_masked
        return {
            "lk_loss": lk / max(active, 1.0),
            "ce_loss": ce / max(active, 1.0),
            "accepted_length": 1 + accepted / max(num_slots, 1.0),
            "rejected_share": 1 - accepted / max(num_masks, 1.0),
            "active_tokens": active,
            "slots": num_slots,
            "tokens_per_sec": self.tokens / seconds if seconds > 0 else 0.0,
        }


def num_slots_of(counts: Counts) -> float:
    """Every block keeps one token, its seed."""
    return counts.num_maskable - counts.num_masked


class DraftTrainer(TriModeTrainer):
    """Trains the LoRA of a DraftModel. The loss is a sum over active positions, divided by the slots of all ranks."""

    model: DraftModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window = DraftWindow()

    def terms(self, model: nn.Module, batch: Batch, tower_calls: int = 0) -> Tensor:
        """LK sum, CE sum, accepted drafts and active positions of one micro-batch [4]."""
        step = self.state.global_step if model.training else -1
        uniform, is_greedy = draws(batch, self.settings.seed, step)
        device = self.args.device
        with self.compute_loss_context_manager():
            return model(batch.to(device), uniform.to(device), is_greedy.to(device))

    def loss(self, sums: Tensor, counts: Counts) -> Tensor:
        """LK + CE of a slot, averaged over the slots; how many positions count is known only after the drafts."""
        return (sums[0] + sums[1]) / max(num_slots_of(counts), 1.0)

    def eval_loss(self, metrics: dict[str, float]) -> float:
        """The share of drafts that is not accepted."""
        return metrics["rejected_share"]

    # Checkpoints.

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save:
            self.model.save(Path(output_dir or self.folder), self.base_name)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.restore(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        raise NotImplementedError("load_best_model_at_end is never set")


def draws(batch: Batch, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """(uniform, is_greedy) [B, T] of a batch: functions of (seed, step, sample id), whatever the rank and the batch."""
    uniform, coin = torch.zeros(batch.input_ids.shape), torch.zeros(batch.input_ids.shape)
    numbers = batch.sequence[batch.document >= 0].unique().tolist()
    for number, sample_id in zip(numbers, batch.sample_ids, strict=False):  # a dummy batch has no sample
        own = (batch.sequence == number) & batch.is_noisy
        generator = noise_generator(seed, step, sample_id, "drafts")
        uniform[own] = torch.rand(int(own.sum()), generator=generator)
        coin[own] = torch.rand(int(own.sum()), generator=generator)
    return uniform, coin < GREEDY_SHARE
