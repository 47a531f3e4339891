"""What a run tells about itself: metrics from summed counts, the progress line, the summary at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from trimode_vlm.training.objective import Counts, denominators

Logs = Mapping[str, Any]

SHOWN = {"ar_loss": "AR", "diff_loss": "diffusion", "masked_accuracy": "masked accuracy"}
"""The metrics of the progress line, with their short names."""

_EVAL_TIMING = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")


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
    """One line of the evaluation's metrics, its timings left out."""
    names = [name for name in logs if name.startswith("eval_") and not name.endswith(_EVAL_TIMING)]
    return f"step {step}: " + ", ".join(f"{name} {logs[name]:.4g}" for name in names)


def last(history: Sequence[Logs], name: str) -> Any:
    """The newest value of a metric in a trainer's log_history; None if it was never logged."""
    return next((entry[name] for entry in reversed(history) if name in entry), None)


def best(history: Sequence[Logs], name: str, greater_is_better: bool = False) -> tuple[float, int] | None:
    """(value, step) of the best evaluation; None if there was none."""
    found = [(entry[name], entry["step"]) for entry in history if name in entry]
    sign = -1 if greater_is_better else 1
    return min(found, key=lambda pair: sign * pair[0], default=None)


def tokens_so_far(history: Sequence[Logs], counted: float = 0) -> float | None:
    """Tokens of the whole run: transformers' own counter where it is used, else the logged `tokens_seen`, else None."""
    return counted or last(history, "tokens_seen")


def summary(
    history: Sequence[Logs],
    *,
    step: int,
    first_step: int,
    seconds: float,
    folder: str,
    num_tokens: float | None = None,
    session_tokens: float | None = None,
    best_name: str = "eval_loss",
    greater_is_better: bool = False,
) -> str:
    """The lines at the end of a run, from transformers' state.log_history.

    first_step: where this session began. seconds: wall time of this session, session_tokens its tokens, num_tokens
    those of the whole run (None: nobody counted). Samples are the logged `samples_seen`.
    """
    counts = [f"{step:,} steps" if first_step == 0 else f"{step:,} steps ({step - first_step:,} in this session)"]
    counts += [
        f"{value:,.0f} {name}"
        for name, value in (("samples", last(history, "samples_seen")), ("tokens", num_tokens))
        if value is not None
    ]
    counts.append(f"wall time {tqdm.format_interval(seconds)}")
    if session_tokens is not None and seconds > 0:
        counts.append(f"{session_tokens / seconds:,.0f} tokens/s")
    newest = {name: value for name in (*SHOWN, "loss") if (value := last(history, name)) is not None}
    lines = [f"trained: {', '.join(counts)}", f"  last: {losses_text(newest) or 'no loss was logged'}"]
    if (found := best(history, best_name, greater_is_better)) is not None:
        lines.append(f"  best {best_name}: {found[0]:.4g} at step {found[1]:,}")
    return "\n".join([*lines, f"  folder: {folder}"])
