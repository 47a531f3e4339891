"""What a checkpoint holds beside transformers' and DeepSpeed's own files, and which checkpoint is whole.

A plain or DDP run writes no pickle: optimizer, scheduler and random state are safetensors and JSON. DeepSpeed writes
its partitioned state in its own format. The manifest comes last, so a checkpoint that was being written is not whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MANIFEST = "manifest.json"
OPTIMIZER, SCHEDULER, RUN = "optimizer.safetensors", "scheduler.json", "run.json"
HASH_WHOLE_BYTES = 1 << 26
"""Larger files are known by their size and their first and last MiB, so that a check stays short."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; a copy with another name ("checkpoint-8-good") is none."""
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run; a torn one is skipped with a warning."""
    for path in reversed(checkpoints(folder)):
        torn = _torn_files(path)
        if not torn:
            return path
        warnings.warn(f"skipping the torn checkpoint {path.name} ({', '.join(torn)})", stacklevel=2)
    return None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was written after."""
    return int(checkpoint.name.rpartition("-")[2])


def rotate(newest: Path, keep: int, best: str | None = None) -> None:
    """Delete all checkpoints but the last `keep` up to the newest, which is whole, and the best one.

    Those of later steps go as well: they were torn, so the run went on from before them.
    """
    found = checkpoints(newest.parent)
    later = [path for path in found if step_of(path) > step_of(newest)]
    earlier = found[: len(found) - len(later)][:-keep]
    for path in [*later, *earlier]:
        if best is None or path.name != Path(best).name:
            shutil.rmtree(path, ignore_errors=True)


def write_manifest(checkpoint: Path) -> None:
    """Name every file of a checkpoint with its digest; the file appears in one rename."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != MANIFEST)
    text = json.dumps({str(p.relative_to(checkpoint)): _digest(p) for p in files}, indent=1)
    draft = checkpoint / f".{MANIFEST}"
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, checkpoint / MANIFEST)


def write_run(checkpoint: Path, **facts: Any) -> None:
    """Keep facts about the run in a checkpoint: its settings, the number of ranks."""
    (checkpoint / RUN).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_run(checkpoint: Path) -> dict[str, Any]:
    """What `write_run` kept."""
    return json.loads((checkpoint / RUN).read_text(encoding="utf-8"))


def save_weights(model: nn.Module, file: Path) -> None:
    """All weights of a module that is no transformers model, as safetensors."""
    save_file({name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}, file)


def save_random_state(checkpoint: Path, rank: int) -> None:
    """Torch's random state of one rank (nothing else draws during training); CPU and the rank's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_file(states, checkpoint / f"random-{rank}.safetensors")


def load_random_state(checkpoint: Path, rank: int) -> None:
    """Put a rank's random state back; a rank that the saved run did not have keeps its own."""
    file = checkpoint / f"random-{rank}.safetensors"
    if not file.is_file():
        return
    states = load_file(file)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def save_optimizer(tensors: dict[str, Tensor], scheduler: dict[str, Any], checkpoint: Path) -> None:
    """Optimizer state as named tensors, the scheduler's as JSON (functions, which it makes anew, left out)."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, checkpoint / OPTIMIZER)
    plain = {key: value for key, value in scheduler.items() if key != "lr_lambdas"}
    (checkpoint / SCHEDULER).write_text(json.dumps(plain), encoding="utf-8")


def load_optimizer(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_optimizer` wrote."""
    scheduler = json.loads((checkpoint / SCHEDULER).read_text(encoding="utf-8"))
    return load_file(checkpoint / OPTIMIZER), scheduler


def _torn_files(checkpoint: Path) -> list[str]:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not manifest:
            return [f"{MANIFEST} names no files"]
        return [name for name, digest in manifest.items() if _digest(checkpoint / name) != digest]
    except (OSError, ValueError) as error:
        return [str(error)]


def _digest(path: Path) -> str:
    size = path.stat().st_size
    if size <= HASH_WHOLE_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    with open(path, "rb") as file:
        head = file.read(1 << 20)
        file.seek(-(1 << 20), os.SEEK_END)
        return f"{size} bytes {hashlib.sha256(head + file.read()).hexdigest()}"
