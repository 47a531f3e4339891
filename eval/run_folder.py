"""What a run's folder belongs to: one model, one way of answering, one state of each task's data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimode_vlm.eval import state
from trimode_vlm.eval.settings import EvalSettings
from trimode_vlm.eval.state import Key, Record
from trimode_vlm.eval.tasks import EvalTask, Example

FILE = "settings.json"
# What is read of a weight file to tell it from others.
NUM_SAMPLES, SAMPLE_BYTES = 1024, 1 << 12
# A folder belongs to one value of each of these (and to one model): they change answers or seconds. Metric style,
# limit, tasks, modes, controls and the number of processes may change: the answers stay what they are.
FIXED = (
    *("seed", "batch_size", "threshold", "commit_rule", "entropy_bound", "block_length", "verifier_mix"),
    *("verification", "temperature", "top_p", "top_k", "quantize", "dtype", "device"),
)


def claim(folder: Path, settings: EvalSettings, tasks: Sequence[EvalTask], records: Mapping[Key, Record]) -> None:
    """Write or compare settings.json, so that lines of two different runs never meet in one folder.

    Without a record there is nothing to protect, and what a failed run left there is overwritten.

    Raises:
        ValueError: the folder holds another run, or a task's data has changed since.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    stored = _read(path) if records else {}
    mine = {name: getattr(settings, name) for name in FIXED}
    checkpoints = {"model": settings.model, "control": settings.control, **companions(settings)}
    mine |= {name: fingerprint(checkpoint) or checkpoint for name, checkpoint in checkpoints.items() if checkpoint}
    different = [
        f"{name} {stored[name]!r}, not {mine[name]!r}" for name in mine if stored.get(name, mine[name]) != mine[name]
    ]
    budgets = {task.name: settings.budget(task) for task in tasks}
    before: dict[str, int] = stored.get("budgets", {})
    different += [
        f"budget of {name} {n}, not {budgets[name]}" for name, n in before.items() if budgets.get(name, n) != n
    ]
    if different:
        raise ValueError(f"{folder} holds another run: {'; '.join(different)}; choose another --output")
    data: dict[str, str] = stored.get("data", {})
    for task in tasks:
        now = task.fingerprint() if task.fingerprint else None
        answered = (record for record in records.values() if record["task"] == task.name)
        # The first row always: it shows other prompts too, and data without a fingerprint that is another altogether.
        check_rows(folder, task, answered, settings.seed, only_first=data.get(task.name) == now)
        if now is not None:
            data[task.name] = now
    content = stored | mine | {"budgets": before | budgets, "data": data}
    state.replace_text(path, json.dumps(content, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else "is damaged"
        raise ValueError(
            f"{path} {problem}, so nothing says which run the answers in {path.parent} are of; "
            f"restore it, or choose another --output"
        ) from error


def check_rows(folder: Path, task: EvalTask, records: Iterable[Record], seed: int, only_first: bool) -> None:
    """Compare the answered rows with what the task's data says now; rows behind them may have come or gone.

    Raises:
        ValueError: a row has another question, picture or gold answer.
    """
    num = task.num_examples
    answered = {r["id"]: r for r in records if r["image_from"] == r["id"] and (num is None or r["id"] < num)}
    for index in sorted(answered)[: 1 if only_first else None]:
        record, example = answered[index], task.example(index, seed)
        now = {"gold": json.loads(json.dumps(example.gold)), "question_hash": question_hash(example)}
        changed = [name.removesuffix("_hash") for name in now if record.get(name, now[name]) != now[name]]
        if changed:
            raise ValueError(
                f"{folder}: {task.name}, row {index}: {' and '.join(changed)} changed since it was answered; "
                "choose another --output, or give back the data of that run"
            )


def question_hash(example: Example) -> str:
    """Over roles, texts and pictures: their bytes or pixels, of a file its name (a data set may move)."""
    digest = hashlib.sha256()
    for message in example.messages:
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        digest.update(f"{message['role']} {len(parts)}\0".encode())
        for part in parts:
            value = part["image"] if "image" in part else part.get("text")
            digest.update(value.encode() if "text" in part and isinstance(value, str) else _picture_bytes(value))
            digest.update(b"\0")
    return digest.hexdigest()[:16]


def _picture_bytes(picture: Any) -> bytes:
    if isinstance(picture, dict):  # as `datasets` gives it, unread
        return picture["bytes"] if picture.get("bytes") else _picture_bytes(picture.get("path"))
    if isinstance(picture, bytes):
        return picture
    if hasattr(picture, "tobytes"):
        return f"{picture.mode} {picture.size} ".encode() + picture.tobytes()
    text = str(picture)
    return (text if text.startswith("data:") else Path(text).name).encode()


def companions(settings: EvalSettings) -> dict[str, str]:
    """Folders of the draft adapter and the learned sampler, where the settings use such.

    Raises:
        ValueError: there is none.
    """
    from trimode_vlm.checkpoints import resolve
    from trimode_vlm.draft_adapter import ADAPTER_FOLDER, find_adapter
    from trimode_vlm.learned_sampler import SAMPLER_FOLDER, find_sampler

    wanted: dict[str, tuple[str, Callable[..., Path | None], str]] = {}
    if settings.adapter is not None:
        wanted["adapter"] = (settings.adapter, find_adapter, ADAPTER_FOLDER)
    if settings.commit_rule == "learned" and "diffusion" in settings.modes:
        wanted["sampler"] = (settings.sampler or "auto", find_sampler, SAMPLER_FOLDER)
    found = {}
    for name, (where, find, beside) in wanted.items():
        folder = find(where, resolve(settings.model))
        if folder is None:
            raise ValueError(f"{settings.model} has no {beside}/ beside its weights: give --{name} FOLDER")
        found[name] = str(folder)
    return found


def fingerprint(checkpoint: str) -> str | None:
    """Hash over names, sizes and samples of the weight files; None for what is not a folder here (a hub id).

    Samples lie all over a file: a fine-tuned copy may differ from its base in late layers alone.
    """
    folder = Path(checkpoint).expanduser()
    if checkpoint == "nano":
        import trimode_vlm

        folder = Path(trimode_vlm.__file__).parent / "nano"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name} {size_bytes} ".encode())
        with path.open("rb") as file:
            for start in range(0, size_bytes, max(SAMPLE_BYTES, size_bytes // NUM_SAMPLES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
