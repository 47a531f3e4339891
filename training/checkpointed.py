"""transformers' Trainer with checkpoints that are whole or skipped, hold no pickle, and are model folders."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trimode_vlm.training import distributed, saves
from trimode_vlm.training.lora import save_adapter
from trimode_vlm.training.optimizers import load_optimizer_tensors, optimizer_tensors
from trimode_vlm.training.reshard import mend_groups


class CheckpointedTrainer(Trainer):
    """How a run is saved and restored; see saves.py for the files. DeepSpeed's state stays in DeepSpeed's format.

    A subclass sets these before the Trainer's own __init__. folder: of the run. fingerprint: settings that a resumed
    run must share. keep_checkpoints: how many stay, the best one not counted. base_name: what an adapter is saved with.
    processor: saved beside the weights, if there is one.
    """

    folder: Path
    fingerprint: dict[str, Any]
    keep_checkpoints: int
    base_name: str
    name: str
    processor: Any

    # What the Trainer makes in the course of its life: never None where we use it.
    model: Any
    model_wrapped: Any
    lr_scheduler: Any
    optimizer: Any
    eval_dataset: Any
    state: Any

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, as a subclass makes them."""
        raise NotImplementedError

    @property
    def _deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration as the engine will get it, empty without DeepSpeed."""
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        return {} if plugin is None else plugin.hf_ds_config.config

    @property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = self.folder / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(checkpoint, ignore_errors=True)  # a torn one, perhaps of another number of ranks
        distributed.wait()
        try:
            super()._save_checkpoint(model, trial)
        except SafetensorError as error:
            raise OSError(f"{checkpoint} could not be written ({error}); is the disk full?") from None
        distributed.wait()
        if self.args.should_save:
            saves.write_run(checkpoint, settings=self.fingerprint, world=distributed.num_ranks(), name=self.name)
            saves.write_manifest(checkpoint)
            # Only now: an older checkpoint goes when the new one is whole.
            saves.rotate(checkpoint, self.keep_checkpoints, self.state.best_model_checkpoint)
        distributed.wait()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # As the Trainer does it, without its pickled arguments.
        folder = Path(output_dir or self.folder)
        if not self.args.should_save:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if hasattr(self.model, "peft_config"):
            save_adapter(self.model, folder, self.base_name, state_dict)
        elif hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(folder, state_dict=state_dict)
        else:
            saves.save_weights(self.model, folder / "model.safetensors")
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=hasattr(self.model, "peft_config"))
        if self.args.should_save:
            tensors = {} if self.is_deepspeed_enabled else optimizer_tensors(self._torch_optimizer, self._named)
            saves.save_optimizer(tensors, self.lr_scheduler.state_dict(), Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._mend_state(Path(checkpoint))
        tensors, scheduler = saves.load_optimizer(Path(checkpoint))
        if not self.is_deepspeed_enabled:
            load_optimizer_tensors(self._torch_optimizer, self._named, tensors)
        if "checkpoint" in self._deepspeed_config:
            mend_groups(self.model_wrapped.optimizer.optimizer, self.parameter_groups())
        self._place_schedule(scheduler["last_epoch"], scheduler["_step_count"])

    def _place_schedule(self, step: int, step_count: int) -> None:
        """Put the schedule where it was, with this run's own rates, length and decay, which may have been changed."""
        schedule = self.lr_scheduler
        schedule.last_epoch, schedule._step_count = step, step_count
        schedule._last_lr = [
            base * share(step) for base, share in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        ]
        decays = {group["name"]: group["weight_decay"] for group in self.parameter_groups()}
        for group, lr in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = lr
            group["weight_decay"] = decays.get(group.get("name"), group["weight_decay"])

    def _mend_state(self, checkpoint: Path) -> None:
        """Bring up to date what a saved state says of the folder and of how often to log, save and evaluate."""
        self.state.compute_steps(self.args, self.args.max_steps)
        best = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).best_model_checkpoint
        here = None if best is None else self.folder / Path(best).name
        self.state.best_model_checkpoint = str(here) if here is not None and here.is_dir() else None

    @property
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # The Trainer reads our config as one of no particular model, and warns of what it does not know.
        rope = logging.getLogger("transformers.modeling_rope_utils")
        level = rope.level
        rope.setLevel(logging.ERROR)
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        finally:
            rope.setLevel(level)

    def _save_rng_state(self, output_dir: str) -> None:
        saves.save_random_state(Path(output_dir), distributed.rank())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            saves.load_random_state(Path(checkpoint), distributed.rank())
