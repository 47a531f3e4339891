"""DeepSpeed presets: JSON files in DeepSpeed's format beside this file, "auto" where the run's settings decide."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OURS = {
    "gradient_accumulation_steps": "a step is the whole global batch already: batch_samples, micro_batch_tokens",
    "train_micro_batch_size_per_gpu": "batch_samples, micro_batch_tokens",
    "train_batch_size": "batch_samples",
    "gradient_clipping": "grad_clip",
}
"""Keys of DeepSpeed's that must be "auto", and the settings that decide in their place."""


def deepspeed_config(name: str | None) -> dict[str, Any] | None:
    """A preset by its bare name ("zero2") or a JSON file by its path; None stays None.

    What a file leaves out of OURS and of the precision becomes "auto": DeepSpeed would take its own defaults.

    Raises:
        ValueError: no such preset or file, no JSON object in it, or it decides what the run's settings do.
    """
    if name is None:
        return None
    folder = Path(__file__).parent
    path = Path(name) if Path(name).is_file() else folder / f"{name}.json"
    if not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in folder.glob("zero*.json")))
        raise ValueError(f"deepspeed must be a JSON file or one of {shipped}, got {name!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"deepspeed: {path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"deepspeed: {path} must hold a JSON object, found {type(content).__name__}")
    for section in ("optimizer", "scheduler"):
        if section in content:
            raise ValueError(
                f"deepspeed: {path} has its own {section!r} section, which would not know the rates of each part: "
                "take it out, and set optimizer, lr, weight_decay, betas, schedule and warmup in the settings"
            )
    for key, setting in OURS.items():
        if content.setdefault(key, "auto") not in ("auto", None if key == "gradient_clipping" else 1):
            raise ValueError(f'deepspeed: {path} sets {key} to {content[key]!r}: write "auto" there ({setting})')
    for precision in ("bf16", "fp16"):
        content.setdefault(precision, {}).setdefault("enabled", "auto")
    return content


def zero_stage(config: dict[str, Any] | None) -> int:
    """The ZeRO stage of a DeepSpeed configuration, 0 without one."""
    return int((config or {}).get("zero_optimization", {}).get("stage", 0))


def offloads_optimizer(config: dict[str, Any] | None) -> bool:
    """Whether the optimizer's state lies on the CPU or on NVMe."""
    offload = (config or {}).get("zero_optimization", {}).get("offload_optimizer", {})
    return offload.get("device", "none") != "none"


def without_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its CPU collective at the first run (minutes); gloo does the same work."""
    # Said before DeepSpeed looks for an accelerator, and warns that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops

    # A private table: without it nothing is lost but the minutes.
    ops = getattr(deepspeed.ops, "__compatible_ops__", {})
    if "deepspeed_shm_comm" in ops:
        ops["deepspeed_shm_comm"] = False
