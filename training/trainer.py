"""The training loop: transformers' Trainer with the tri-mode objective, whose sums are divided once over all ranks.

One item of its data loader is one optimizer step of this rank: a list of micro-batches. So the Trainer accumulates
nothing by itself; launchers, DeepSpeed, DDP, logging, evaluation and checkpoints are its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trimode_vlm.model import num_sizes
from trimode_vlm.training import distributed, saves
from trimode_vlm.training.arguments import training_arguments
from trimode_vlm.training.callbacks import LogFile, LossCurves, StallWatch, TrainingProgress, install, say
from trimode_vlm.training.checkpointed import CheckpointedTrainer
from trimode_vlm.training.collate import Batch, dummy_batch
from trimode_vlm.training.data import Source
from trimode_vlm.training.objective import Counts, combine, tri_mode_terms
from trimode_vlm.training.optimizers import make_optimizer
from trimode_vlm.training.parts import parameter_groups, part_of
from trimode_vlm.training.presets import offloads_optimizer, without_shared_memory_op, zero_stage
from trimode_vlm.training.progress import Window, last
from trimode_vlm.training.reshard import to_universal
from trimode_vlm.training.steps import MakeBatches, Steps, noise_token_ids
from trimode_vlm.training.train_settings import TrainSettings, check_unchanged
from trimode_vlm.training.watch import not_finite_message


class TriModeTrainer(CheckpointedTrainer):
    """Trains `model` on `source` in `folder`; `fit` resumes from the newest whole checkpoint there.

    Every checkpoint holds the `fingerprint` of the run; resuming with another one is refused unless `allow_changed`.
    A checkpoint is itself a model folder. eval_source: held-out samples, of which `evaluate` takes one epoch.
    base_name: what the model was loaded from, which an adapter is saved with.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        settings: TrainSettings,
        folder: Path,
        *,
        eval_source: Source | None = None,
        processor: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
        name: str = "train",
        base_name: str = "",
    ) -> None:
        self.source, self.settings, self.folder, self.name = source, settings, Path(folder), name
        self.fingerprint: dict[str, Any] = settings.fingerprint()
        self.allow_changed = False
        self.first_step = 0
        self.keep_checkpoints, self.base_name = settings.keep_checkpoints, base_name
        # Kept from the Trainer, which would write the tokenizer's special tokens into the model's config.
        self.processor, self.reports_skipped = processor, False
        self._window = Window()
        if settings.deepspeed:
            distributed.stand_alone()
            if distributed.use_cpu():
                without_shared_memory_op()
        super().__init__(
            model,
            training_arguments(settings, self.folder, evaluates=eval_source is not None),
            train_dataset=source,  # type: ignore[arg-type]
            eval_dataset=eval_source,  # type: ignore[arg-type]
        )
        self.stall = StallWatch(self.folder, settings.stall_minutes)
        log = (LogFile(self.folder), LossCurves(self.folder))
        install(self, [LogWhole(), *log, *callbacks, self.stall, KeepBest(), TrainingProgress(self.folder, name)])

    def fit(self) -> dict[str, float]:
        """Train to the last step, from the newest whole checkpoint on if there is one; returns the last metrics."""
        checkpoint = saves.newest_checkpoint(self.folder)
        if checkpoint is not None:
            changed = check_unchanged(
                self.folder, saves.read_run(checkpoint)["settings"], self.fingerprint, self.allow_changed
            )
            self.first_step = saves.step_of(checkpoint)
            world = saves.read_run(checkpoint)["world"]
            if world != distributed.num_ranks() and zero_stage(self._deepspeed_config):
                to_universal(checkpoint)
                self._deepspeed_config["checkpoint"] = {"load_universal": True}
            if changed and distributed.rank() == 0:
                print(f"{self.name}: going on with changed settings: {'; '.join(changed)}", flush=True)
        if checkpoint is not None and self.first_step >= self.settings.steps:
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            self._mend_state(checkpoint)
        else:
            try:
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            finally:
                self.stall.stop()
        return self._window.last

    def close(self) -> None:
        """Let go of the model: DeepSpeed's hooks on it would reach into another trainer's backward pass."""
        if self.is_deepspeed_enabled and hasattr(self.model_wrapped, "destroy"):
            self.model_wrapped.destroy()

    # One step.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of all micro-batches of a step; returns the step's loss over all ranks."""
        self.stall.running(_sample_names(inputs))
        if self.reports_skipped:
            for message in (text for batch in inputs for text in batch.skipped):
                say(f"{self.name}: skipped {message}")
        model.train()
        counts, tower_calls = self._agree(inputs)
        sums = torch.zeros(4, dtype=torch.float64)
        for number, batch in enumerate(_fill_up(inputs, len(tower_calls))):
            is_last = number == len(tower_calls) - 1
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last or self.is_deepspeed_enabled else self.accelerator.no_sync(model):
                terms = self.terms(model, batch, tower_calls[number])
                loss = self.loss(terms, counts)
                # Gradients are averaged over ranks, the objective is a sum over them.
                scale = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
                self.accelerator.backward(loss * distributed.num_ranks(), **scale)
            sums += terms.detach().double().cpu()
        is_finite_here = bool(sums.isfinite().all())
        distributed.reduce_(sums, self.args.device)
        if not sums.isfinite().all():
            what = "the loss" if is_finite_here else "this rank's loss"
            raise FloatingPointError(not_finite_message(self.state.global_step + 1, _sample_names(inputs), what))
        self._window.add(sums, counts)
        return self.loss(sums, counts).to(self.args.device)

    def loss(self, sums: Tensor, counts: Counts) -> Tensor:
        """The objective from sums over any part of a step (see `terms`) and the counts of the whole of it."""
        alpha = self.settings.alpha_at(self.state.global_step)
        return combine(sums[0], sums[1], counts, alpha=alpha, averaging=self.settings.averaging)

    def terms(self, model: nn.Module, batch: Batch, tower_calls: int = 0) -> Tensor:
        """AR sum, diffusion sum, AR hits and masked hits of one micro-batch [4]: one pass for both streams."""
        batch = batch.to(self.args.device)

        def objective(hidden: Tensor, head: nn.Module) -> Tensor:
            terms = tri_mode_terms(
                hidden,
                batch.target,
                batch.is_noisy,
                batch.p_mask,
                batch.sequence,
                head,
                averaging=self.settings.averaging,
                weight=self.settings.weight,
                chunk_tokens=self.settings.chunk_tokens,
            )
            return torch.stack([terms.ar_sum, terms.diff_sum, terms.ar_correct, terms.masked_correct])

        with self.compute_loss_context_manager():
            return model(
                input_ids=batch.input_ids,
                position_ids=batch.position,
                pixel_values=batch.pixel_values,
                image_sizes=batch.image_sizes,
                pattern=batch.pattern(),
                objective=objective,
                tower_calls=tower_calls,
            )

    def _agree(self, batches: Sequence[Batch]) -> tuple[Counts, list[int]]:
        """The step's counts over all ranks; and how often each micro-batch runs the tower, for as many as any rank has.

        DDP and ZeRO share the gradients of the tower, so where it learns it runs for a batch without images as well;
        ZeRO-3 gathers its weights anew in each run, so there every rank must run it as often as the others (and adds to
        the last step's gradient what comes in a later micro-batch only, so it runs in each).
        """
        local = sum((batch.counts for batch in batches), Counts())
        num_tokens = sum(float((batch.document >= 0).sum()) for batch in batches)
        num_skipped = sum(len(batch.skipped) for batch in batches)
        values = torch.tensor([*asdict(local).values(), num_tokens, num_skipped], dtype=torch.float64)
        *total, num_tokens, num_skipped = distributed.reduce_(values, self.args.device).tolist()
        counts = Counts(**dict(zip(asdict(local), total, strict=True)))
        self._window.tokens += num_tokens
        self._window.skipped += num_skipped
        most = int(distributed.reduce_(torch.tensor(max(len(batches), 1)), self.args.device, "max"))
        least = int(self._tower_learns)
        if zero_stage(self._deepspeed_config) < 3:
            return counts, [least] * most
        runs = [max(num_sizes(batch.pixel_values, batch.image_sizes), least) for batch in batches]
        runs += [least] * (most - len(batches))
        return counts, distributed.reduce_(torch.tensor(runs), self.args.device, "max").tolist()

    @property
    def _tower_learns(self) -> bool:
        return any(p.requires_grad and part_of(name) in ("vision", "projector") for name, p in self._named)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        norm = super()._get_grad_norm(model, grad_norm)
        # In fp16 the loss scale is too large at times: the step is skipped and the scale falls.
        if norm is not None and self.settings.precision != "fp16" and not torch.isfinite(torch.as_tensor(norm)):
            step = self.state.global_step + 1
            raise FloatingPointError(not_finite_message(step, self.stall.sample_names, "the gradient"))
        return None if norm is None else float(norm)

    # Data.

    def get_train_dataloader(self) -> DataLoader:
        """Steps of this rank from `first_step` on; made by worker processes if the settings ask for them."""
        steps = Steps(self.make_batches(self.source), self.first_step, self.settings.steps)
        # A generator of its own: the loader draws a seed when it starts, also where a run resumes.
        return DataLoader(steps, batch_size=None, num_workers=self.settings.workers, generator=torch.Generator())

    def make_batches(self, source: Source) -> MakeBatches:
        """How this rank makes its part of a step from samples of `source`."""
        config = getattr(self.model, "config", None)
        token_ids = noise_token_ids(config, self.settings)
        pad_token_id = getattr(config, "pad_token_id", None) or 0
        return MakeBatches(source, self.settings, token_ids, pad_token_id, distributed.rank(), distributed.num_ranks())

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """One item is one step."""
        return [next(epoch_iterator)], None

    # Evaluation and logs.

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Losses over one epoch of the evaluation samples, with the noise of epoch 0 each time."""
        make = self.make_batches(eval_dataset or self.eval_dataset)
        last_step = self.settings.steps - 1  # its alpha and block length, whenever it is asked
        model = self.model_wrapped
        model.eval()
        training, self._window = self._window, type(self._window)()
        # One epoch; in a mixture whole steps may hold what is seen for the second time, so a known end is kept to.
        num_samples = getattr(make.source, "num_samples", None)
        end = None if num_samples is None else -(-num_samples // make.source.batch_samples)  # type: ignore[attr-defined]
        step = 0
        while end is None or step < end:
            samples = make.source.draw(step, make.rank, make.world)
            batches = make.cut([sample for sample in samples if sample.epoch == 0], last_step)
            counts, tower_calls = self._agree(batches)
            if end is None and not counts.num_sequences:
                break
            sums = torch.zeros(4, dtype=torch.float64)
            for batch, runs in zip(_fill_up(batches, len(tower_calls)), tower_calls, strict=True):
                sums += self.terms(model, batch, runs).double().cpu()
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            self._window.add(distributed.reduce_(sums, self.args.device), counts)
            step += 1
        evaluated, self._window = self._window, training
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in evaluated.drain(self.settings.averaging).items()}
        metrics = {f"{metric_key_prefix}_loss": self.eval_loss(evaluated.last), **metrics}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        model.train()
        self._window.begin = time.monotonic()
        return metrics

    def eval_loss(self, metrics: dict[str, float]) -> float:
        """What the best checkpoint has the least of."""
        return metrics["ar_loss"] + self.settings.alpha * metrics.get("diff_loss", 0.0)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the loss terms since the last log to the Trainer's own numbers, and totals of the run."""
        if "learning_rate" in logs:
            terms = self._window.drain(self.settings.averaging)
            history = self.state.log_history
            totals = {"samples": "samples_seen", "tokens": "tokens_seen", "skipped": "samples_skipped"}
            seen = {total: (last(history, total) or 0.0) + terms.pop(name) for name, total in totals.items()}
            logs = {**logs, **terms, **seen}
        self.state.epoch = None
        if num_samples := getattr(self.source, "num_samples", None):
            self.state.epoch = self.state.global_step * self.source.batch_samples / num_samples  # type: ignore[attr-defined]
        super().log(logs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: `--estimate` has the formulas."""
        return 0

    # Optimizer.

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW or Muon over the parameters that train, with a learning rate for each part of the model."""
        s = self.settings
        if self.optimizer is None:
            on_cpu = offloads_optimizer(self._deepspeed_config) and torch.cuda.is_available()
            betas = (s.betas[0], s.betas[1])
            self.optimizer = make_optimizer(self._named, self.parameter_groups(), s.optimizer, betas, on_cpu=on_cpu)
        return self.optimizer

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameters that train, each part with its learning rate."""
        s = self.settings
        rates = {"lr_vision": s.lr_vision, "lr_projector": s.lr_projector}
        return parameter_groups(self.model, s.lr, **rates, weight_decay=s.weight_decay)


class LogWhole(TrainerCallback):
    """Logs wherever a run is saved, evaluated or ends: no step is missing in the totals that a checkpoint hands on."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save or control.should_evaluate or state.global_step >= state.max_steps:
            control.should_log = True


class KeepBest(TrainerCallback):
    """Writes a checkpoint whenever the evaluation loss is the lowest so far; the Trainer then keeps that one."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if metrics and (state.best_metric is None or metrics["eval_loss"] < state.best_metric):
            control.should_save = True


def _fill_up(batches: Sequence[Batch], num_batches: int) -> list[Batch]:
    """As many micro-batches as the rank with the most has: DDP and ZeRO need every rank in every forward."""
    return [*batches, *(dummy_batch() for _ in range(num_batches - len(batches)))]


def _sample_names(batches: Sequence[Batch]) -> list[str]:
    return [name for batch in batches for name in batch.sample_names]
