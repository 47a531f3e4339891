"""Settings of one training run, checked when they are made; what of them a run must keep when it resumes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimode_vlm.training.blocks import BLOCK_ALIGNMENTS, BLOCK_OFFSETS, RESPONSE_PADDINGS, block_length_at
from trimode_vlm.training.collate import NoiseSettings
from trimode_vlm.training.corruption import MASK_RATIOS, NOISE_KINDS
from trimode_vlm.training.dual_stream import NOISY_STREAMS
from trimode_vlm.training.objective import AVERAGINGS, WEIGHTS
from trimode_vlm.training.optimizers import OPTIMIZERS
from trimode_vlm.training.presets import deepspeed_config, zero_stage
from trimode_vlm.training.settings import check_known, check_range

FREE = frozenset(
    (
        "log_every",
        "save_every",
        "eval_every",
        "eval_answers",
        "keep_checkpoints",
        "chunk_tokens",
        "micro_batch_tokens",
        "micro_batch_samples",
        "packing_length",
        "gradient_checkpointing",
        "workers",
        "report_to",
        "stall_minutes",
        "on_bad_sample",
        "merge",
        "export",
        "out",
        "threads",
        "allow_changed_settings",
    )
)
"""Settings that a resumed run may change: they say how it is cut, logged and saved, not what it computes."""

MAY_GROW = ("steps", "epochs")
SCHEDULES = ("cosine", "wsd")
PRECISIONS = ("fp32", "bf16", "fp16")
REPORTS = ("tensorboard", "wandb")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of one training run; see facts.md 1 and 2 for the objective's options.

    steps: optimizer steps. ar_share: share of them at the start with the AR loss alone (stage 1), before alpha holds.
    batch_tokens, batch_samples: size of a step over all ranks, in tokens of both streams or in samples.
    micro_batch_tokens, micro_batch_samples: padded tokens, or samples, of one forward. packing_length: join samples
    into rows of at most so many tokens. block_length_schedule: [[progress from 0 to 1, block length], ...] in place of
    block_length. deepspeed: "zero0" .. "zero3", "zero2-offload", "zero3-offload", "zero3-nvme" or a JSON file of
    DeepSpeed's. eval_answers: how many evaluation samples are also answered in every mode.
    Raises ValueError for an unknown name or a number out of range, in one line that begins with the setting.
    """

    steps: int = 1000
    seed: int = 0
    alpha: float = 0.3
    ar_share: float = 0.0
    averaging: str = "tokens"
    weight: str = "1/p"
    block_length: int | tuple[int, ...] = 32
    block_length_schedule: tuple[tuple[float, ...], ...] | None = None
    block_alignment: str = "response"
    block_offset: str = "response"
    noisy_stream: str = "response"
    response_padding: str = "none"
    complementary_masks: bool = False
    noise: str = "sequence"
    mask_ratio: str = "drawn"
    eps: float = 1e-3
    full_block_fraction: float = 0.0
    clean_first_fraction: float = 0.0
    optimizer: str = "adamw"
    lr: float = 1e-3
    lr_vision: float | None = None
    lr_projector: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    warmup: float = 0.03
    schedule: str = "cosine"
    decay_fraction: float = 0.4
    min_lr_ratio: float = 0.0
    grad_clip: float = 1.0
    batch_tokens: int = 4000
    micro_batch_tokens: int | None = 1000
    micro_batch_samples: int | None = None
    packing_length: int | None = None
    chunk_tokens: int = 2048
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    deepspeed: str | None = None
    workers: int = 0
    log_every: int = 10
    save_every: int = 250
    keep_checkpoints: int = 2
    eval_every: int | None = None
    eval_answers: int = 2
    report_to: tuple[str, ...] = ()
    stall_minutes: float = 30.0

    def __post_init__(self) -> None:
        check_known(
            self,
            averaging=AVERAGINGS,
            weight=WEIGHTS,
            block_alignment=BLOCK_ALIGNMENTS,
            block_offset=BLOCK_OFFSETS,
            noisy_stream=NOISY_STREAMS,
            response_padding=RESPONSE_PADDINGS,
            noise=NOISE_KINDS,
            mask_ratio=MASK_RATIOS,
            optimizer=OPTIMIZERS,
            schedule=SCHEDULES,
            precision=PRECISIONS,
        )
        if unknown := [name for name in self.report_to if name not in REPORTS]:
            raise ValueError(f"report_to must be among {', '.join(REPORTS)}, got {unknown[0]!r}")
        check_range(self, 1, math.inf, "steps", "batch_tokens", "micro_batch_tokens", "micro_batch_samples")
        check_range(self, 1, math.inf, "chunk_tokens", "log_every", "keep_checkpoints", "save_every", "eval_every")
        check_range(self, 2, math.inf, "packing_length")
        check_range(self, 0, 2**63 - 1, "seed")
        check_range(self, 0, math.inf, "alpha", "weight_decay", "workers", "eval_answers")
        check_range(self, 0, math.inf, "lr", "lr_vision", "lr_projector", without_low=True)
        # Infinity switches these off; so does stall_minutes 0.
        check_range(self, 0, math.inf, "grad_clip", without_low=True, finite=False)
        check_range(self, 0, math.inf, "stall_minutes", finite=False)
        check_range(self, 0, 1, "eps", "full_block_fraction", "clean_first_fraction", "ar_share")
        check_range(self, 0, 1, "warmup", "decay_fraction", "min_lr_ratio")
        lengths = (self.block_length,) if isinstance(self.block_length, int) else self.block_length
        if not lengths or min(lengths) < 1:
            raise ValueError(f"block_length must be at least 1, got {self.block_length!r}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas!r}")
        if self.block_length_schedule is not None:
            block_length_at(self.block_length_schedule, 0.0)
        if zero_stage(deepspeed_config(self.deepspeed)) and self.optimizer == "muon":
            raise ValueError("optimizer 'muon' needs whole matrices: use deepspeed zero0 or optimizer adamw")

    def alpha_at(self, step: int) -> float:
        """The weight of the diffusion loss in the step after `step` finished ones."""
        return self.alpha if step >= round(self.ar_share * self.steps) else 0.0

    def fingerprint(self) -> dict[str, Any]:
        """The settings that decide what the run computes, as JSON gives them back."""
        return {k: v for k, v in json.loads(json.dumps(asdict(self))).items() if k not in FREE}

    def noise_settings(
        self, step: int, mask_token_id: int, vision_token_ids: tuple[int, ...], end_token_id: int | None = None
    ) -> NoiseSettings:
        """What decides a sample's blocks and noise after `step` finished steps; alpha 0 leaves the noisy half out."""
        block_length = self.block_length
        if self.block_length_schedule is not None:
            block_length = block_length_at(self.block_length_schedule, step / self.steps)
        return NoiseSettings(
            mask_token_id=mask_token_id,
            vision_token_ids=vision_token_ids,
            end_token_id=end_token_id,
            seed=self.seed,
            dual=self.alpha_at(step) > 0,
            block_length=block_length,
            **{name: getattr(self, name) for name in _NOISE_OPTIONS},
        )


_NOISE_OPTIONS = (
    "block_alignment",
    "block_offset",
    "noisy_stream",
    "response_padding",
    "complementary_masks",
    "noise",
    "mask_ratio",
    "eps",
    "full_block_fraction",
    "clean_first_fraction",
)


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two fingerprints, as "seed was 0, is 1".

    Grown steps and budgets are no difference, nor is a setting that only one of them knows (another version's).
    """
    found = []
    for name, value in now.items():
        old = saved.get(name, value)
        if old == value or (name in MAY_GROW and (value is None or (old is not None and value > old))):
            continue
        if isinstance(old, dict) and isinstance(value, dict):
            parts = {f"{name}.{key}": (old.get(key), value.get(key)) for key in {**old, **value}}
        else:
            parts = {name: (old, value)}
        found += [f"{part} was {a}, is {b}" for part, (a, b) in parts.items() if a != b]
    return found


def check_unchanged(folder: Path, saved: dict[str, Any] | None, now: dict[str, Any], allow: bool = False) -> list[str]:
    """Return what changed since the folder's checkpoint was written; `saved` is None for one that does not tell.

    Raises:
        ValueError: something changed and `allow` is False.
    """
    found = changes(saved or {}, now)
    if found and not allow:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"{folder} was trained with other settings ({'; '.join(found[:3])}{more}): give another --out, "
            "delete that folder, or go on all the same with --allow_changed_settings true"
        )
    return found
