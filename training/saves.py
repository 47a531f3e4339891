"""Checkpoints of a running stage: safetensors and JSON, complete or absent, never half-loaded, no pickles."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

MANIFEST = "manifest.json"


def write_checkpoint(
    folder: Path,
    step: int,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    state: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write folder/step-N with model.safetensors, optimizer.safetensors and trainer.json; keep the newest `keep`.

    The manifest with sizes and hashes is written last, and the folder appears under its name in one rename.
    """
    target = folder / f"step-{step:08d}"
    draft = folder / f".writing-{step:08d}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({k: v.detach().contiguous() for k, v in model.items()}, draft / "model.safetensors")
    save_file({k: v.detach().contiguous() for k, v in optimizer.items()}, draft / "optimizer.safetensors")
    (draft / "trainer.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    names = ("model.safetensors", "optimizer.safetensors", "trainer.json")
    (draft / MANIFEST).write_text(json.dumps({name: _digest(draft / name) for name in names}), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(draft, target)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def newest_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]] | None:
    """Load the newest whole checkpoint as (model, optimizer, state); a torn one is skipped with a warning."""
    path = _newest_whole(folder)
    if path is None:
        return None
    return load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"), _state(path)


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The state alone of the newest whole checkpoint."""
    path = _newest_whole(folder)
    return None if path is None else _state(path)


def _newest_whole(folder: Path) -> Path | None:
    for path in reversed(checkpoints(folder)):
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            torn = [name for name, digest in manifest.items() if _digest(path / name) != digest]
        except (OSError, json.JSONDecodeError) as error:
            torn = [str(error)]
        if torn:
            warnings.warn(f"skipping the torn checkpoint {path.name} ({', '.join(torn)})", stacklevel=2)
            continue
        return path
    return None


def _state(path: Path) -> dict[str, Any]:
    return json.loads((path / "trainer.json").read_text(encoding="utf-8"))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
