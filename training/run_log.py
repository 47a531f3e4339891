"""A file of one JSON object per line that a run appends to: whole lines only, and no step twice after a resume."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOG_NAME = "log.jsonl"

Record = dict[str, Any]


def read_log(path: Path) -> list[Record]:
    """The objects of a log, oldest first; a missing file is an empty log.

    A last line without its newline was torn by a kill and is left out; any other broken line (after a power cut) is
    left out with a warning.
    """
    if not path.exists():
        return []
    records, broken = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        else:
            broken.append(number)
    if broken:
        warnings.warn(f"{path}: line {broken[0]} is no JSON object with a step; {len(broken)} skipped", stacklevel=2)
    return records


class RunLog:
    """Appends records to a file, each as one line in one write call. One process may write."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._seen: set[tuple[int, frozenset[str]]] = set()

    def start(self, step: int) -> list[Record]:
        """Drop what the run will do again, the lines behind `step` (all of them at step 0), and return the rest."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A run that begins anew evaluates at step 0 again, so nothing of an earlier start may stay.
        kept = [record for record in read_log(self.path) if step and record["step"] <= step]
        self._seen = {_key(record) for record in kept}
        text = "".join(map(_line, kept)).encode()
        if not self.path.exists() or self.path.read_bytes() != text:
            partial = self.path.with_name(self.path.name + ".partial")
            with partial.open("wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
        return kept

    def append(self, record: Mapping[str, Any]) -> bool:
        """Write one record with its "step"; False if the log already has a line of this step with these keys."""
        key = _key(record)
        if key in self._seen:
            return False
        line = _line(record).encode()
        with open(self.path, "ab", buffering=0) as file:
            before = file.tell()
            if file.write(line) != len(line):
                file.truncate(before)
                raise OSError(f"{self.path}: a line could not be written whole; is the disk full?")
        self._seen.add(key)
        return True


def _key(record: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    return record["step"], frozenset(record)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """The value as JSON has it: tensors of one number become numbers; nan and inf, which JSON lacks, become null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
