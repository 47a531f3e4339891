"""Fine-tuning of a checkpoint on the user's own data: settings, the run, and the folder that comes out of it."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import trimode_vlm
from trimode_vlm.checkpoints import convert
from trimode_vlm.training import distributed
from trimode_vlm.training.callbacks import SampleGenerations
from trimode_vlm.training.data import Source
from trimode_vlm.training.datasets import DataSettings, data_settings
from trimode_vlm.training.generations import prompt_from_sample
from trimode_vlm.training.lora import LoraSettings, add_lora
from trimode_vlm.training.parts import PARTS, describe, select_parts
from trimode_vlm.training.samples import ON_BAD_SAMPLE, open_source
from trimode_vlm.training.settings import check_known, check_range
from trimode_vlm.training.train_settings import TrainSettings
from trimode_vlm.training.trainer import TriModeTrainer

EXPORTS = ("last", "best")


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(TrainSettings):
    """Settings of a fine-tuning run.

    model, mask_token_id: what `trimode_vlm.load` takes. data, eval_data: a path or a mapping (see DataSettings), or a
    list of them; eval_fraction: share of `data` that is held out when there is no eval_data. batch_samples: samples
    of a step over all ranks. epochs: passes over the data, in place of `steps`. max_length: tokens of a sample
    (prompt, images, answers); longer ones are cut or dropped. train: the parts that train. lora: settings of LoRA in
    place of training the text model whole; merge: write its result into full weights as well. export: which weights
    become out/model.
    """

    recipe: str = "finetune"
    model: str = "nano"
    mask_token_id: int | None = None
    out: str = "runs/finetune"
    data: tuple[DataSettings, ...] = ()
    eval_data: tuple[DataSettings, ...] = ()
    eval_fraction: float = 0.0
    batch_samples: int = 16
    epochs: float | None = None
    max_length: int = 4096
    on_bad_sample: str = "raise"
    train: tuple[str, ...] = ("text", "projector")
    lora: LoraSettings | None = None
    merge: bool = True
    export: str = "last"
    threads: int = 1
    allow_changed_settings: bool = False
    lr: float = 1e-5
    micro_batch_tokens: int | None = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data", "eval_data"):
            if value := getattr(self, name):
                object.__setattr__(self, name, data_settings(value, name))
        if not self.data and self.needs_data:
            raise ValueError("data names no data set: give a file, a folder or a hub id")
        check_known(self, recipe=(type(self).recipe,), export=EXPORTS, on_bad_sample=ON_BAD_SAMPLE)
        check_range(self, 1, math.inf, "batch_samples", "threads")
        check_range(self, 0, math.inf, "epochs", without_low=True)
        check_range(self, 2, math.inf, "max_length")
        check_range(self, 0, 0.9, "eval_fraction")
        if unknown := [part for part in self.train if part not in PARTS]:
            raise ValueError(f"train must be among {', '.join(PARTS)}, got {unknown[0]!r}")
        if self.packing_length is not None and self.packing_length < self.max_length:
            raise ValueError(f"packing_length {self.packing_length} is below max_length {self.max_length}")
        if self.export == "best" and not self.eval_every:
            raise ValueError("export 'best' needs eval_every and eval_data or eval_fraction")
        if self.eval_every and not (self.eval_data or self.eval_fraction):
            raise ValueError("eval_every needs eval_data or eval_fraction")

    @property
    def needs_data(self) -> bool:
        """Whether the samples come from `data`."""
        return True


def run(settings: FinetuneSettings) -> Path:
    """Train, resume or finish a run; returns the exported model folder `out`/model."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)  # for what a checkpoint does not hold: LoRA's start
    out = Path(settings.out)
    model, processor = load_model(settings)
    source, eval_source = sources(settings, processor)
    settings = with_steps(settings, source)
    model = choose_parts(model, settings)
    if distributed.rank() == 0:
        print(describe(model), length_of_run(settings, source), sep="\n", flush=True)
    trainer = TriModeTrainer(
        model,
        source,
        settings,
        out,
        eval_source=eval_source,
        processor=processor,
        name="finetune",
        base_name=settings.model,
    )
    trainer.allow_changed = settings.allow_changed_settings
    trainer.reports_skipped = settings.on_bad_sample == "report"
    if eval_source is not None and settings.eval_answers:
        answered = eval_source.draw(0, 0, 1)[: settings.eval_answers]
        prompts = [prompt_from_sample(sample, processor, trimode_config(model)) for sample in answered]
        shown = SampleGenerations(out, prompts, processor, beat=trainer.stall.beat)
        trainer.add_callback(shown)
    trainer.fit()
    return export(trainer, settings)


def load_model(settings: FinetuneSettings) -> tuple[Any, Any]:
    """The checkpoint and its processor, on the CPU.

    Weights that an optimizer updates are fp32; 16 bits are for a base that LoRA leaves alone, and for DeepSpeed, which
    keeps an fp32 copy of its own.
    """
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)
    dtype = half if half and (settings.deepspeed or settings.lora) else torch.float32
    quantize = settings.lora.quantize if settings.lora else None
    model, processor = trimode_vlm.load(
        settings.model, dtype=dtype, quantize=quantize, mask_token_id=settings.mask_token_id
    )
    if processor is None:
        raise ValueError(f"{settings.model} holds no tokenizer, which reading data needs")
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model, processor


def trimode_config(model: Any) -> Any:
    """The model's own config, also inside PEFT."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).config


def choose_parts(model: Any, settings: FinetuneSettings) -> Any:
    """Freeze what does not train; LoRA in place of the whole text model where it is asked for."""
    if settings.lora is None:
        select_parts(model, settings.train)
    else:
        model = add_lora(model, settings.lora, [part for part in settings.train if part != "text"])
        if not settings.deepspeed:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    return model


def sources(settings: FinetuneSettings, processor: Any) -> tuple[Source, Source | None]:
    """Training samples, and evaluation samples if there are any, in their own order."""
    options: dict[str, Any] = {
        "batch_samples": settings.batch_samples,
        "seed": settings.seed,
        "max_length": settings.max_length,
        "on_bad_sample": settings.on_bad_sample,
    }
    held_out = settings.eval_fraction if not settings.eval_data else 0.0
    train = open_source(
        settings.data, processor, **options, eval_fraction=held_out, part="train" if held_out else "all"
    )
    if not settings.eval_every:
        return train, None
    data, part = (settings.data, "eval") if held_out else (settings.eval_data, "all")
    return train, open_source(data, processor, **options, shuffle=False, eval_fraction=held_out, part=part)


def with_steps(settings: FinetuneSettings, source: Any) -> FinetuneSettings:
    """The settings with `steps` for the asked epochs."""
    if settings.epochs is None:
        return settings
    if source.num_samples is None:
        raise ValueError("epochs needs data of known size: give steps for streaming data")
    return replace(settings, steps=max(1, math.ceil(settings.epochs * source.num_samples / settings.batch_samples)))


def length_of_run(settings: FinetuneSettings, source: Any) -> str:
    """One line: how many steps, and how often they go through the data where its size is known."""
    text = f"{settings.steps:,} steps of {settings.batch_samples:,} samples"
    if source.num_samples is None:
        return text
    epochs = settings.steps * settings.batch_samples / source.num_samples
    return f"{text}: {epochs:.3g} {'epoch' if epochs == 1 else 'epochs'} of {source.num_samples:,} samples"


def export(trainer: TriModeTrainer, settings: FinetuneSettings) -> Path:
    """Write out/model, which `trimode_vlm.load`, transformers and the released names' readers open.

    LoRA: the adapter alone in out/adapter, and with `merge` the full weights in out/model.
    """
    out = Path(settings.out)
    best = trainer.state.best_model_checkpoint if settings.export == "best" else None
    target = out / ("model" if settings.lora is None else "adapter")
    draft = out / f".writing-{target.name}"
    if distributed.rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
    if best is None:
        trainer.save_model(str(draft))
    elif distributed.rank() == 0:
        shutil.copytree(best, draft, ignore=_run_files)
    distributed.wait()
    if distributed.rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
        if settings.lora is not None and settings.merge:
            convert(target, out / "model", overwrite=True)
    distributed.wait()
    return out / "model" if settings.lora is None or settings.merge else target


def _run_files(folder: str, names: list[str]) -> list[str]:
    """What a checkpoint holds for the run alone."""
    run = (
        "optimizer",
        "scheduler",
        "random-",
        "trainer_state",
        "run.json",
        "manifest",
        "global_step",
        "latest",
        "zero_to",
    )
    return [name for name in names if name.startswith(run)]
