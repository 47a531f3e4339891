"""The training loop: dual-stream forward, summed gradients divided once, optimizer, log, checkpoints, exact resume."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from trimode_vlm import patterns
from trimode_vlm.training import saves
from trimode_vlm.training.collate import Batch, micro_batches
from trimode_vlm.training.data import Source
from trimode_vlm.training.distributed import Ranks
from trimode_vlm.training.objective import Counts, Terms, combine, denominators, tri_mode_terms
from trimode_vlm.training.optimizers import load_optimizer_tensors, lr_factor, make_optimizers, optimizer_tensors
from trimode_vlm.training.train_settings import TrainSettings, check_unchanged


class Trainer:
    """Trains `model` on `source` in `folder`; `fit` resumes from the newest whole checkpoint there.

    The model is moved to the rank's device, in place; batches follow it one by one. Every checkpoint holds the
    `fingerprint` of the run; resuming with another one is refused unless `allow_changed` is set.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        settings: TrainSettings,
        folder: Path,
        ranks: Ranks | None = None,
        name: str = "train",
    ) -> None:
        self.model, self.source, self.settings, self.folder = model, source, settings, Path(folder)
        self.ranks, self.name = ranks or Ranks(), name
        model.to(self.ranks.device)
        config: Any = model.config
        vision_ids = (
            config.image_token_id,
            config.image_start_token_id,
            config.image_break_token_id,
            config.image_end_token_id,
        )
        ids = () if config.vision_config is None else tuple(i for i in vision_ids if i is not None)
        end_token_id = config.eos_token_id
        if isinstance(end_token_id, list):
            end_token_id = end_token_id[0]
        if settings.response_padding == "block" and end_token_id is None:
            raise ValueError("response_padding 'block' pads with the end token, but the config has no eos_token_id")
        self.noise = settings.noise_settings(config.mask_token_id, ids, end_token_id)
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.optimizers = make_optimizers(
            self.named,
            settings.optimizer,
            settings.lr,
            settings.weight_decay,
            tuple(settings.betas),  # type: ignore[arg-type]
        )
        self.fingerprint, self.allow_changed = settings.fingerprint(), False
        self.step, self.elapsed_sec = 0, 0.0
        self.seconds: dict[str, float] = {}

    def fit(self, until: int | None = None) -> dict[str, float]:
        """Train to the end of the schedule (or to step `until`) and return the last logged metrics."""
        settings = self.settings
        self._resume()
        self.model.train()
        bar = tqdm(
            total=settings.steps, initial=self.step, desc=self.name, disable=not self.ranks.is_main, mininterval=5
        )
        saved_at = time.monotonic()
        metrics: dict[str, float] = {}
        while self.progress < 1 and (until is None or self.step < until):
            begin = time.monotonic()
            metrics = self.train_step()
            self.elapsed_sec = self.ranks.broadcast(self.elapsed_sec + time.monotonic() - begin)
            if self.step % settings.log_every == 0 or self.progress >= 1:
                self._log(metrics)
                shown = (f"{k} {v:.4f}" for k, v in metrics.items() if k.endswith(("loss", "accuracy")))
                bar.set_postfix_str(", ".join(shown), refresh=False)
            bar.update(1)
            due = self.ranks.broadcast(float(time.monotonic() - saved_at > 60 * settings.checkpoint_minutes))
            if due:
                self.save()
                saved_at = time.monotonic()
        bar.close()
        self.save()
        return metrics

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        return self.settings.progress(self.step, self.elapsed_sec)

    def train_step(self) -> dict[str, float]:
        """One optimizer step over this rank's micro-batches; returns global metrics."""
        settings = self.settings
        with self._timed("data"):
            samples = self.source.draw(self.step, self.ranks.rank, self.ranks.world)
            batches = micro_batches(samples, self.noise, settings.micro_batch_tokens, settings.micro_batch_samples)
        counts = self._global_counts(batches)
        sums = torch.zeros(4, dtype=torch.float64)
        for optimizer, _ in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            with self._timed("forward"):
                terms = self.forward(batch.to(self.ranks.device))
                loss = combine(terms.ar_sum, terms.diff_sum, counts, alpha=settings.alpha, averaging=settings.averaging)
            if not torch.isfinite(loss):
                self._stop_on_nan(batch.sample_ids)
            with self._timed("backward"):
                loss.backward()
            sums += (
                torch.stack([terms.ar_sum, terms.diff_sum, terms.ar_correct, terms.masked_correct])
                .detach()
                .double()
                .cpu()
            )
        self.ranks.sum(sums)
        norm, lr = self._update(tuple(i for batch in batches for i in batch.sample_ids))
        return self._metrics(sums, counts, norm, lr, batches)

    def _update(self, sample_ids: tuple[int, ...]) -> tuple[float, float]:
        """Sum gradients over ranks, clip, step; returns (gradient norm, learning rate)."""
        with self._timed("reduce"):
            self.ranks.sum_gradients(p for _, p in self.named)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.named], self.settings.grad_clip)
        if not torch.isfinite(norm):
            self._stop_on_nan(sample_ids)
        with self._timed("optimizer"):
            lr = self._set_lr()
            for optimizer, _ in self.optimizers:
                optimizer.step()
        self.step += 1
        return float(norm), lr

    def forward(self, batch: Batch) -> Terms:
        """Sums of both losses over one micro-batch: one pass through the backbone for both streams."""
        model: Any = self.model
        embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
        rows, length = batch.input_ids.shape
        pattern = (
            patterns.dual_stream(batch.position, batch.document, batch.block_start, batch.block_id, batch.is_noisy)
            if self.noise.dual
            # One document a row and right padding: no real token comes after a pad, plain causal is exact.
            else patterns.causal(rows, length, batch.input_ids.device)
        )
        hidden = model.hidden(embeds, batch.position, pattern)
        return tri_mode_terms(
            hidden,
            batch.target,
            batch.is_noisy,
            batch.p_mask,
            batch.sequence,
            model.diffusion_head,
            averaging=self.settings.averaging,
            weight=self.settings.weight,
            chunk_tokens=self.settings.chunk_tokens,
        )

    def save(self) -> None:
        """Write a checkpoint of model, optimizer and place in the run (rank 0; the others wait)."""
        if self.ranks.is_main:
            state = {
                "step": self.step,
                "elapsed_sec": self.elapsed_sec,
                "world": self.ranks.world,
                "name": self.name,
                "settings": self.fingerprint,
            }
            saves.write_checkpoint(
                self.folder,
                self.step,
                dict(self.model.state_dict()),
                optimizer_tensors(self.optimizers),
                state,
                self.settings.keep_checkpoints,
            )
        self.ranks.barrier()

    def _resume(self) -> None:
        found = saves.newest_checkpoint(self.folder)
        if found is None:
            return
        weights, optimizer, state = found
        changed = check_unchanged(self.folder, state.get("settings"), self.fingerprint, self.allow_changed)
        if state["world"] != self.ranks.world:
            raise ValueError(
                f"{self.folder} was trained with {state['world']} ranks; resume with as many, not {self.ranks.world}"
            )
        self.model.load_state_dict(weights)
        load_optimizer_tensors(self.optimizers, optimizer)
        self.step, self.elapsed_sec = state["step"], state["elapsed_sec"]
        if self.ranks.is_main:
            note = f" with changed settings: {'; '.join(changed)}" if changed else ""
            tqdm.write(f"{self.name}: resumed at step {self.step}{note}")

    def _global_counts(self, batches: list[Batch]) -> Counts:
        local = sum((batch.counts for batch in batches), Counts())
        total = self.ranks.sum(torch.tensor(list(asdict(local).values()), dtype=torch.float64))
        return Counts(**dict(zip(asdict(local), total.tolist(), strict=True)))

    def _set_lr(self) -> float:
        s = self.settings
        # Step 0 trains too, so the warm-up counts the step that is being taken.
        progress = max(self.progress, 1 / s.steps if s.warmup else 0.0)
        factor = lr_factor(progress, s.warmup, s.schedule, s.decay_fraction, s.min_lr_ratio)
        for optimizer, _ in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = s.lr * factor
        return s.lr * factor

    def _metrics(self, sums: Tensor, counts: Counts, norm: float, lr: float, batches: list[Batch]) -> dict[str, float]:
        ar_sum, diff_sum, ar_correct, masked_correct = sums.tolist()
        ar_count, diff_count = denominators(counts, self.settings.averaging)
        return {
            "step": self.step,
            "ar_loss": ar_sum / ar_count,
            "diff_loss": diff_sum / diff_count,
            "ar_accuracy": ar_correct / max(counts.num_supervised, 1),
            "masked_accuracy": masked_correct / max(counts.num_masked, 1),
            "supervised_tokens": counts.num_supervised,
            "maskable_tokens": counts.num_maskable,
            "masked_tokens": counts.num_masked,
            "grad_norm": norm,
            "lr": lr,
            "local_padded_tokens": float(sum(batch.input_ids.numel() for batch in batches)),
        }

    def _log(self, metrics: dict[str, float]) -> None:
        if self.ranks.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            times = {f"{name}_sec": round(value, 2) for name, value in self.seconds.items()}
            with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({**metrics, "elapsed_sec": round(self.elapsed_sec, 2), **times}) + "\n")

    def _stop_on_nan(self, sample_ids: tuple[int, ...]) -> None:
        raise FloatingPointError(f"loss or gradient is not finite at step {self.step}, samples {list(sample_ids)}")

    def _timed(self, name: str) -> _Timer:
        return _Timer(self.seconds, name)


class _Timer:
    def __init__(self, totals: dict[str, float], name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.totals, self.name, self.clock = totals, name, clock

    def __enter__(self) -> None:
        self.begin = self.clock()

    def __exit__(self, *_: object) -> None:
        self.totals[self.name] = self.totals.get(self.name, 0.0) + self.clock() - self.begin
