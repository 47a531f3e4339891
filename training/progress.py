"""What a run tells about itself: metrics from summed counts, the progress line, the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from trimode_vlm.training.objective import Counts, denominators

Logs = Mapping[str, Any]

SHOWN = {
    "ar_loss": "AR",
    "diff_loss": "diffusion",
    "masked_accuracy": "masked accuracy",
    "lk_loss": "LK",
    "ce_loss": "CE",
    "accepted_length": "accepted length",
}
"""The metrics of the progress line, with their short names."""


def metrics_from(
    sums: Sequence[float], counts: Counts, seconds: float, *, averaging: str = "tokens", num_tokens: float = 0.0
) -> dict[str, float]:
    """Global metrics of one step, or of several whose sums and counts were added.

    sums: ar_sum, diff_sum, ar_correct, masked_correct (objective.Terms) over all ranks. seconds: wall time of the
    steps. num_tokens: tokens that went through the backbone in them, padding left out. Where no token may be masked
    (alpha 0) the diffusion metrics are left out.
    """
    ar_sum, diff_sum, ar_correct, masked_correct = sums
    ar_count, diff_count = denominators(counts, averaging)
    metrics = {"ar_loss": ar_sum / ar_count, "ar_accuracy": ar_correct / max(counts.num_supervised, 1.0)}
    if counts.num_maskable:
        metrics |= {
            "diff_loss": diff_sum / diff_count,
            "masked_accuracy": masked_correct / max(counts.num_masked, 1.0),
            "mask_ratio": counts.num_masked / counts.num_maskable,
        }
    metrics |= {"supervised_tokens": counts.num_supervised, "masked_tokens": counts.num_masked}
    return metrics | {"tokens_per_sec": num_tokens / seconds if seconds > 0 else 0.0}


class Window:
    """Sums, counts and tokens of the steps since the last log, over all ranks."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self.sums, self.counts = torch.zeros(4, dtype=torch.float64), Counts()
        self.tokens = self.skipped = 0.0
        self.begin = time.monotonic()

    def add(self, sums: Tensor, counts: Counts) -> None:
        self.sums, self.counts = self.sums + sums, self.counts + counts

    def drain(self, averaging: str) -> dict[str, float]:
        """The metrics of everything added, which is forgotten then."""
        seconds = time.monotonic() - self.begin
        metrics = self.metrics(averaging, seconds)
        totals = {"samples": self.counts.num_sequences, "tokens": self.tokens, "skipped": self.skipped}
        self._clear()
        self.last = metrics | totals
        return self.last

    def metrics(self, averaging: str, seconds: float) -> dict[str, float]:
        """What the sums mean; a recipe with other sums says it anew."""
        return metrics_from(self.sums.tolist(), self.counts, seconds, averaging=averaging, num_tokens=self.tokens)


def is_evaluation(logs: Logs) -> bool:
    """True for what transformers logs after an evaluation."""
    return any(name.startswith("eval_") for name in logs)


def is_training(logs: Logs) -> bool:
    """True for the log of a training step; transformers' last log (train_runtime, train_loss) is none."""
    return not is_evaluation(logs) and not any(name.startswith("train_") for name in logs)


def losses_text(logs: Logs) -> str:
    """The loss terms and the speed, as far as they are logged: "AR 1.234, diffusion 2.345, ..., 12,345 tokens/s"."""
    parts = [f"{short} {logs[name]:.4g}" for name, short in SHOWN.items() if name in logs]
    if not parts and "loss" in logs:
        parts = [f"loss {logs['loss']:.4g}"]
    if "tokens_per_sec" in logs:
        parts.append(f"{logs['tokens_per_sec']:,.0f} tokens/s")
    return ", ".join(parts)


def progress_line(name: str, step: int, total: int, first: int, elapsed_sec: float, logs: Logs) -> str:
    """One plain line for a log file: step, losses, elapsed time and tqdm's estimate of the rest."""
    bar_format = "{desc}: step {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"
    return tqdm.format_meter(
        step, total, elapsed_sec, prefix=name, initial=first, postfix=losses_text(logs), bar_format=bar_format
    )


def evaluation_line(step: int, logs: Logs) -> str:
    """One line of the evaluation's losses and accuracies, its counts and timings left out."""
    names = [name for name in logs if name.startswith("eval_") and name.endswith(("loss", "accuracy"))]
    return f"step {step}: " + ", ".join(f"{name} {logs[name]:.4g}" for name in names)


def last(history: Sequence[Logs], name: str) -> Any:
    """The newest value of a metric in a trainer's log_history; None if it was never logged."""
    return next((entry[name] for entry in reversed(history) if name in entry), None)


def best(history: Sequence[Logs], name: str, greater_is_better: bool = False) -> tuple[float, int] | None:
    """(value, step) of the best evaluation; None if there was none."""
    found = [(entry[name], entry["step"]) for entry in history if name in entry]
    sign = -1 if greater_is_better else 1
    return min(found, key=lambda pair: sign * pair[0], default=None)


def training_speed(history: Sequence[Logs], first_step: int) -> float | None:
    """Tokens per second of the logged steps behind first_step, evaluations and saves left out; None if not logged."""
    tokens = seconds = before = 0.0
    for entry in history:
        if "tokens_seen" not in entry:
            continue
        if entry["step"] > first_step and entry.get("tokens_per_sec"):
            tokens += entry["tokens_seen"] - before
            seconds += (entry["tokens_seen"] - before) / entry["tokens_per_sec"]
        before = entry["tokens_seen"]
    return tokens / seconds if seconds else None


def summary(
    history: Sequence[Logs],
    *,
    step: int,
    first_step: int,
    seconds: float,
    folder: str,
    best_name: str = "eval_loss",
    greater_is_better: bool = False,
) -> str:
    """The lines at the end of a run, from transformers' state.log_history.

    first_step: where this session began. seconds: its wall time, with evaluations and saves. Samples and tokens are
    those of the whole run, the logged `samples_seen` and `tokens_seen`.
    """
    counts = [f"{step:,} steps" if first_step == 0 else f"{step:,} steps ({step - first_step:,} in this session)"]
    totals = ((name, last(history, f"{name}_seen")) for name in ("samples", "tokens"))
    counts += [f"{value:,.0f} {name}" for name, value in totals if value is not None]
    counts.append(f"wall time {tqdm.format_interval(seconds)}")
    if (speed := training_speed(history, first_step)) is not None:
        counts.append(f"{speed:,.0f} tokens/s in training steps")
    newest = {name: value for name in (*SHOWN, "loss") if (value := last(history, name)) is not None}
    lines = [f"trained: {', '.join(counts)}", f"  last: {losses_text(newest) or 'no loss was logged'}"]
    if (found := best(history, best_name, greater_is_better)) is not None:
        lines.append(f"  best {best_name}: {found[0]:.4g} at step {found[1]:,}")
    return "\n".join([*lines, f"  folder: {folder}"])
