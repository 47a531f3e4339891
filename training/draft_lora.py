"""`recipe: draft_lora`: train the draft adapter of a frozen model on its own drafts, and put it beside the weights."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trimode_vlm.checkpoints import NANO
from trimode_vlm.draft_adapter import ADAPTER_FOLDER
from trimode_vlm.training import distributed
from trimode_vlm.training.data import Source, StreamSource
from trimode_vlm.training.draft_model import WEIGHTS, DraftModel
from trimode_vlm.training.draft_trainer import DraftTrainer
from trimode_vlm.training.finetune import FinetuneSettings, load_model, sources, with_steps
from trimode_vlm.training.lora import LoraSettings
from trimode_vlm.training.nano_data import NanoMaker
from trimode_vlm.training.tasks import TASKS

# How a slot looks: [seed, mask x (k - 1)], whole blocks from any place of an answer on, also over its end.
LAYOUT: dict[str, Any] = {
    "block_alignment": "response",
    "block_offset": "random",
    "noisy_stream": "response",
    "response_padding": "block",
    "full_block_fraction": 1.0,
    "clean_first_fraction": 1.0,
    "complementary_masks": False,
    "ar_share": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class DraftLora(LoraSettings):
    """Rank and alpha of the released adapters; they go on o_proj and nowhere else."""

    rank: int = 128
    alpha: float = 512.0
    targets: tuple[str, ...] = ("o_proj",)


@dataclass(frozen=True, kw_only=True)
class DraftLoraSettings(FinetuneSettings):
    """Settings of the draft adapter's training; those of the data and of the loop are those of fine-tuning.

    lora: rank and alpha; the LoRA goes on the o_proj of every text layer. block_length: of the drafts, as decoding will
    ask for. tasks: weights of nano's own tasks, made on the fly, in place of data. install: also put the adapter into
    the model's own folder, where load(adapter="auto") finds it (a local folder; the shipped nano stays as it is).
    """

    recipe: str = "draft_lora"
    out: str = "runs/draft-lora"
    tasks: dict[str, float] = field(default_factory=dict)
    lora: DraftLora = field(default_factory=DraftLora)
    install: bool = True
    train: tuple[str, ...] = ("text",)
    lr: float = 1e-4
    weight_decay: float = 0.0
    block_offset: str = "random"
    response_padding: str = "block"
    full_block_fraction: float = 1.0
    clean_first_fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.lora.targets, self.lora.parts) != (("o_proj",), ("text",)):
            raise ValueError("lora.targets must be [o_proj] in recipe draft_lora: a draft adapter goes nowhere else")
        if self.lora.dropout or self.lora.quantize:
            raise ValueError("lora.dropout and lora.quantize are not for recipe draft_lora: leave them out")
        for name, value in LAYOUT.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} is {value!r} in recipe draft_lora, got {getattr(self, name)!r}: leave it out")
        if not self.alpha > 0:
            raise ValueError("alpha has no meaning in recipe draft_lora: leave it out")
        if self.deepspeed:
            raise ValueError(
                "deepspeed: recipe draft_lora trains few weights beside frozen ones; run it under torchrun"
            )
        if not isinstance(self.block_length, int) or self.block_length < 2 or self.block_length_schedule:
            raise ValueError(f"block_length must be one number of at least 2 here, got {self.block_length!r}")
        if self.tasks and self.data:
            raise ValueError("tasks are nano's own, in place of data: give one of the two")
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks must be among {', '.join(TASKS)}, got {unknown[0]!r}")
        if not all(0 <= weight < math.inf for weight in self.tasks.values()):
            raise ValueError(f"tasks must have weights of at least 0, got {self.tasks!r}")

    @property
    def needs_data(self) -> bool:
        return not self.tasks


def run(settings: DraftLoraSettings) -> Path:
    """Train, resume or finish a run; returns the adapter's folder `out`/linear_spec_lora."""
    torch.set_num_threads(settings.threads)
    out = Path(settings.out)
    if distributed.rank() == 0:
        check_place(settings)
    model, processor = load_model(settings)
    source, eval_source = samples(settings, processor)
    settings = with_steps(settings, source) if settings.epochs else settings  # type: ignore[assignment]
    torch.manual_seed(settings.seed)
    drafting = DraftModel(model, settings.lora.rank, settings.lora.alpha, settings.chunk_tokens)
    if distributed.rank() == 0:
        trained = sum(p.numel() for p in drafting.lora.parameters())
        total = sum(p.numel() for p in model.parameters())
        print(f"draft adapter: {trained:,} train on {len(drafting.lora)} o_proj layers, {total:,} stay", flush=True)
    trainer = DraftTrainer(
        drafting, source, settings, out, eval_source=eval_source, name="draft-lora", base_name=base_name(settings.model)
    )
    trainer.allow_changed = settings.allow_changed_settings
    trainer.reports_skipped = settings.on_bad_sample == "report"
    trainer.fit()
    return export(trainer, settings)


def samples(settings: DraftLoraSettings, processor: Any) -> tuple[Source, Source | None]:
    """The user's data, or nano's tasks."""
    if not settings.tasks:
        return sources(settings, processor)
    maker = NanoMaker(
        processor=processor, stage="draft", seed=settings.seed, tasks=settings.tasks, qa_share=0.0, qa_turns=1,
        grow_until=0,
    )  # fmt: skip
    return StreamSource(maker, lambda sample: 1, settings.batch_samples), None


def base_name(model: str) -> str:
    """What the adapter names as its base: a folder by its absolute path."""
    is_folder = model != NANO and Path(model).expanduser().is_dir()
    return str(Path(model).expanduser().absolute()) if is_folder else model


def model_folder(settings: Any) -> Path | None:
    """The folder of the model that a run's result is put into; None where it stays as it is."""
    folder = Path(settings.model).expanduser()
    return folder if settings.install and settings.model != NANO and folder.is_dir() else None


def check_place(settings: Any, name: str = ADAPTER_FOLDER, weights: str = WEIGHTS) -> None:
    """Raise ValueError if the model has an adapter (or what else `name` is) that this run did not make."""
    folder = model_folder(settings)
    if folder is None or not (folder / name).exists():
        return
    theirs, ours = folder / name / weights, Path(settings.out) / name / weights
    if not (theirs.is_file() and ours.is_file() and theirs.read_bytes() == ours.read_bytes()):
        raise ValueError(f"{folder / name} is there already: move it away, or leave it with --install false")


def export(trainer: DraftTrainer, settings: DraftLoraSettings) -> Path:
    """Write the adapter into out/linear_spec_lora and, with `install`, beside the model's weights."""
    target = Path(settings.out) / ADAPTER_FOLDER
    if distributed.rank() == 0:
        best = trainer.state.best_model_checkpoint if settings.export == "best" else None
        if best is not None:
            trainer.model.restore(Path(best))
        trainer.model.save(target, trainer.base_name)
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(target / WEIGHTS).values())
        if folder := model_folder(settings):
            shutil.copytree(target, folder / ADAPTER_FOLDER, dirs_exist_ok=True)
    distributed.wait()
    return target
