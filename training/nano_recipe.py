"""The recipe of the shipped nano model: from random weights to a model folder in resumable stages.

0 vision: tower and projector learn word embeddings (nano_vision). 1 ar: AR loss alone. 2 joint: AR + alpha * diffusion.
control (optional): from the end of stage 1, AR alone for as many steps as joint took, the alpha = 0 comparison.
A folder remembers its settings; a run with others is refused before anything is trained.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trimode_vlm.config import TriModeConfig, preset
from trimode_vlm.generation_config import TriModeGenerationConfig
from trimode_vlm.model import TriModeVLM
from trimode_vlm.training import distributed, saves
from trimode_vlm.training.data import Encoded, StreamSource
from trimode_vlm.training.nano_data import NanoMaker, build_processor, cell_word_ids, token_ids
from trimode_vlm.training.nano_tokenizer import twin_token_ids
from trimode_vlm.training.nano_vision import VisionTrainer, start_weights
from trimode_vlm.training.parts import select_parts
from trimode_vlm.training.presets import deepspeed_config, zero_stage
from trimode_vlm.training.settings import check_known, check_range
from trimode_vlm.training.tasks import TASKS
from trimode_vlm.training.train_settings import TrainSettings, check_unchanged
from trimode_vlm.training.trainer import TriModeTrainer

STARTS_FROM = {"ar": "vision", "joint": "ar", "control": "ar"}


@dataclass(frozen=True, kw_only=True)
class TextStage(TrainSettings):
    """A text stage: the loop's settings and the mix of samples (see NanoMaker); grow_share is a share of `steps`."""

    tasks: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TASKS, 1.0))
    qa_share: float = 0.35
    qa_turns: int = 5
    grow_share: float = 0.33
    min_scale: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, 1, "qa_share", "grow_share", "min_scale")
        check_range(self, 1, math.inf, "qa_turns")
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks must be among {', '.join(TASKS)}, got {unknown[0]!r}")
        if not all(0 <= weight < math.inf for weight in self.tasks.values()) or not any(self.tasks.values()):
            raise ValueError(f"tasks must have weights of at least 0, one of them above, got {self.tasks!r}")


@dataclass(frozen=True, kw_only=True)
class NanoSettings:
    """All settings of the nano recipe; `model` overrides fields of the preset, `out` is the run's folder.

    deepspeed: for all stages, see TrainSettings; up to ZeRO-2, since a stage starts from the whole weights before it.

    allow_changed_settings: go on in a folder that was trained with other settings, for instance with other tasks.
    """

    recipe: str = "nano"
    out: str = "runs/nano"
    seed: int = 0
    threads: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    vision: TrainSettings = field(default_factory=TrainSettings)
    ar: TextStage = field(default_factory=TextStage)
    joint: TextStage = field(default_factory=TextStage)
    control: bool = False
    deepspeed: str | None = None
    allow_changed_settings: bool = False

    def __post_init__(self) -> None:
        check_known(self, recipe=("nano",))
        check_range(self, 1, math.inf, "threads")
        check_range(self, 0, 2**63 - 1, "seed")
        known = [f.name for f in fields(TriModeConfig)]
        if unknown := [name for name in self.model if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)
            raise ValueError(f"unknown setting 'model.{unknown[0]}'; the nearest known one is 'model.{near[0]}'")
        if zero_stage(deepspeed_config(self.deepspeed)) > 2:
            raise ValueError("deepspeed: the nano recipe takes ZeRO 0 to 2, each stage starts from whole weights")
        for name in ("vision", "ar", "joint"):
            stage_settings(self, name)  # what a stage refuses is told before the first one trains


def run(settings: NanoSettings) -> Path:
    """Run or resume all stages; returns the model folder (`out`/model; the control's is `out`/control_model).

    Raises ValueError, before anything is trained, when `out` holds a run with other settings.
    """
    torch.set_num_threads(settings.threads)
    out = Path(settings.out)
    model, processor, places = start_model(settings)
    own = {"model": settings.model, "vocabulary": _digest(processor.tokenizer.get_vocab())}
    check_folder(settings, own)

    def stage(name: str) -> None:
        chosen = stage_settings(settings, name)
        select_parts(model, ("vision", "projector") if name == "vision" else ("text",))
        trainer: TriModeTrainer
        if name == "vision":
            trainer = VisionTrainer(model, processor, cell_word_ids(processor), places, chosen, out / name)
        else:
            assert isinstance(chosen, TextStage)
            trainer = text_trainer(model, processor, chosen, out / name)
        trainer.fingerprint |= own
        trainer.allow_changed = settings.allow_changed_settings
        metrics = trainer.fit()
        trainer.close()
        if distributed.rank() == 0 and metrics:
            done = {"step": chosen.steps, "metrics": metrics, "settings": trainer.fingerprint}
            (out / name / "done.json").write_text(json.dumps(done, indent=1), encoding="utf-8")

    for name in ("vision", "ar", "joint"):
        stage(name)
    _save_model(model, processor, out / "model")
    if settings.control:
        _load(model, out / "ar")
        stage("control")
        _save_model(model, processor, out / "control_model")
    return out / "model"


def stage_settings(settings: NanoSettings, name: str) -> TrainSettings:
    """One stage's settings with the run's seed; control's are joint's with alpha 0."""
    of_run: dict[str, Any] = {"seed": settings.seed, "deepspeed": settings.deepspeed}
    if name == "control":
        return replace(settings.joint, alpha=0.0, **of_run)
    stages: dict[str, TrainSettings] = {"vision": settings.vision, "ar": settings.ar, "joint": settings.joint}
    return replace(stages[name], **of_run)


def check_folder(settings: NanoSettings, own: dict[str, Any]) -> None:
    """Refuse a folder that was trained with other settings, and one whose stages would start from what is to change.

    own: what every stage's fingerprint holds beside its own settings.
    """
    out = Path(settings.out)
    for name in ("vision", "ar", "joint", *(("control",) if settings.control else ())):
        checkpoint = saves.newest_checkpoint(out / name)
        if checkpoint is None:
            continue
        now = {**stage_settings(settings, name).fingerprint(), **own}
        check_unchanged(out / name, saves.read_run(checkpoint)["settings"], now, settings.allow_changed_settings)
        start = STARTS_FROM.get(name)
        if start and not is_finished(out / start, stage_settings(settings, start)):
            raise ValueError(
                f"{out / name} was trained from {out / start}, which has yet to be trained to its end: "
                f"give another --out or delete {out / name}"
            )


def is_finished(folder: Path, stage: TrainSettings) -> bool:
    """Whether the stage in this folder has taken all its steps, which may have grown."""
    checkpoint = saves.newest_checkpoint(folder)
    return checkpoint is not None and saves.step_of(checkpoint) >= stage.steps


def start_model(settings: NanoSettings) -> tuple[Any, Any, dict[str, Any]]:
    """The untrained model with its processor, and the row and column vectors of stage 0."""
    processor = build_processor()
    config = preset("nano", **{**token_ids(processor), **settings.model})
    torch.manual_seed(settings.seed)
    model = TriModeVLM(config)
    twins = twin_token_ids(processor.tokenizer)
    places = start_weights(model, list(cell_word_ids(processor).values()), settings.seed, twins)
    return model, processor, places


def sample_maker(processor: Any, stage: TextStage, name: str) -> NanoMaker:
    """What makes the samples of stage "ar", "joint" or "control"; control sees joint's."""
    return NanoMaker(
        processor=processor,
        stage="ar" if name == "ar" else "joint",
        seed=stage.seed,
        tasks=stage.tasks,
        qa_share=stage.qa_share,
        qa_turns=stage.qa_turns,
        grow_until=stage.grow_share * stage.steps,
        min_scale=stage.min_scale,
    )


def text_trainer(model: Any, processor: Any, stage: TextStage, folder: Path) -> TriModeTrainer:
    """The trainer of stage "ar", "joint" or "control", which is the folder's name."""
    maker = sample_maker(processor, stage, folder.name)
    dual = stage.alpha > 0

    def cost(sample: Encoded) -> int:
        return len(sample.input_ids) + (sum(sample.loss_mask) if dual else 0)

    source = StreamSource(maker, cost, stage.batch_tokens)
    return TriModeTrainer(model, source, stage, folder, processor=processor, name=folder.name)


def _load(model: Any, folder: Path) -> None:
    checkpoint = saves.newest_checkpoint(folder)
    if checkpoint is None:
        raise ValueError(f"{folder} holds no whole checkpoint: train it again")
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))


def _digest(vocabulary: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:12]


def _save_model(model: Any, processor: Any, folder: Path) -> None:
    if distributed.rank() == 0:
        model.generation_config = TriModeGenerationConfig(
            mode="linear_spec",
            max_new_tokens=512,
            block_length=model.config.block_length,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
