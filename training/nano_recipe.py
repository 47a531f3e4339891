"""The recipe of the shipped nano model: from random weights to a model folder in four resumable stages.

0 vision: tower and projector learn word embeddings (nano_vision). 1 ar: AR loss alone. 2 joint: AR + alpha * diffusion.
control (optional): from the end of stage 1, AR alone for as many steps as joint took, the alpha = 0 comparison.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trimode_vlm.config import preset
from trimode_vlm.generation_config import TriModeGenerationConfig
from trimode_vlm.model import TriModeVLM
from trimode_vlm.training import saves
from trimode_vlm.training.data import Encoded, StreamSource
from trimode_vlm.training.distributed import Ranks
from trimode_vlm.training.nano_data import NanoMaker, build_processor, cell_word_ids, token_ids
from trimode_vlm.training.nano_tokenizer import twin_token_ids
from trimode_vlm.training.nano_vision import VisionTrainer, start_weights
from trimode_vlm.training.trainer import Trainer, TrainSettings


@dataclass(frozen=True, kw_only=True)
class TextStage(TrainSettings):
    """A text stage: the loop's settings and the mix of samples (see NanoMaker); grow_share is a share of `steps`."""

    tasks: dict[str, float] = field(default_factory=dict)
    qa_share: float = 0.35
    qa_turns: int = 5
    grow_share: float = 0.33
    min_scale: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NanoSettings:
    """All settings of the nano recipe; `model` overrides fields of the preset, `out` is the run's folder."""

    recipe: str = "nano"
    out: str = "runs/nano"
    seed: int = 0
    threads: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    vision: TrainSettings = field(default_factory=TrainSettings)
    ar: TextStage = field(default_factory=TextStage)
    joint: TextStage = field(default_factory=TextStage)
    control: bool = False


def run(settings: NanoSettings, ranks: Ranks) -> Path:
    """Run or resume all stages; returns the model folder (`out`/model; the control's is `out`/control_model)."""
    torch.set_num_threads(settings.threads)
    out = Path(settings.out)
    model, processor, places = start_model(settings)
    word_ids = cell_word_ids(processor)
    _train_only(model, "encoder.vision_tower.", "encoder.multi_modal_projector.")
    vision = replace(settings.vision, seed=settings.seed)
    _stage(
        model,
        out / "vision",
        ranks,
        lambda: VisionTrainer(model, processor, word_ids, places, vision, out / "vision", ranks),
    )
    _train_only(model, "encoder.embed_tokens.", "encoder.layers.", "encoder.norm.", "diffusion_head.")
    _stage(model, out / "ar", ranks, lambda: text_trainer(model, processor, settings, "ar", ranks))
    _stage(model, out / "joint", ranks, lambda: text_trainer(model, processor, settings, "joint", ranks))
    _save_model(model, processor, out / "model", ranks)
    if settings.control:
        steps = _done(out / "joint")["step"]
        _load(model, out / "ar")
        _stage(model, out / "control", ranks, lambda: text_trainer(model, processor, settings, "control", ranks, steps))
        _save_model(model, processor, out / "control_model", ranks)
    return out / "model"


def start_model(settings: NanoSettings) -> tuple[Any, Any, dict[str, Any]]:
    """The untrained model with its processor, and the row and column vectors of stage 0."""
    processor = build_processor()
    config = preset("nano", **{**token_ids(processor), **settings.model})
    torch.manual_seed(settings.seed)
    model = TriModeVLM(config)
    twins = twin_token_ids(processor.tokenizer)
    places = start_weights(model, list(cell_word_ids(processor).values()), settings.seed, twins)
    return model, processor, places


def text_trainer(
    model: Any, processor: Any, settings: NanoSettings, name: str, ranks: Ranks, steps: int | None = None
) -> Trainer:
    """The trainer of stage "ar", "joint" or "control" (joint's samples, alpha 0, a given number of steps)."""
    stage = settings.ar if name == "ar" else settings.joint
    if name == "control":
        stage = replace(stage, alpha=0.0, steps=steps or stage.steps, budget_sec=None)
    stage = replace(stage, seed=settings.seed)
    maker = NanoMaker(
        processor=processor,
        stage="ar" if name == "ar" else "joint",
        seed=stage.seed,
        tasks=stage.tasks,
        qa_share=stage.qa_share,
        qa_turns=stage.qa_turns,
        grow_until=stage.grow_share * stage.steps,
        min_scale=stage.min_scale,
    )
    dual = stage.alpha > 0

    def cost(sample: Encoded) -> int:
        return len(sample.input_ids) + (sum(sample.loss_mask) if dual else 0)

    source = StreamSource(maker, cost, stage.batch_tokens)
    return Trainer(model, source, stage, Path(settings.out) / name, ranks, name)


def _stage(model: Any, folder: Path, ranks: Ranks, make: Any) -> None:
    """Run a stage unless its folder says that it is done; the model ends with the stage's weights either way."""
    if (folder / "done.json").is_file():
        _load(model, folder)
        return
    trainer = make()
    metrics = trainer.fit()
    if ranks.is_main:
        done = {"step": trainer.step, "elapsed_sec": trainer.elapsed_sec, "metrics": metrics}
        (folder / "done.json").write_text(json.dumps(done, indent=1), encoding="utf-8")
    ranks.barrier()


def _done(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "done.json").read_text(encoding="utf-8"))


def _load(model: Any, folder: Path) -> None:
    found = saves.newest_checkpoint(folder)
    if found is None:
        raise ValueError(
            f"{folder} is marked as done but holds no whole checkpoint: delete its done.json to train it again"
        )
    model.load_state_dict(found[0])


def _train_only(model: Any, *prefixes: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))


def _save_model(model: Any, processor: Any, folder: Path, ranks: Ranks) -> None:
    if ranks.is_main:
        model.generation_config = TriModeGenerationConfig(
            mode="linear_spec",
            max_new_tokens=512,
            block_length=model.config.block_length,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    ranks.barrier()
