"""One JSON line per answered sample: the only state of a run, safe against kills, duplicates and several writers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

MERGED = "samples.jsonl"

Record = dict[str, Any]


class Key(NamedTuple):
    """What makes a record unique; `image_from` is the id whose images were shown (the own id unless shuffled)."""

    run: str
    task: str
    mode: str
    id: int
    image_from: int


def key_of(record: Record) -> Key:
    """The record's key."""
    return Key(record["run"], record["task"], record["mode"], record["id"], record["image_from"])


def shard_path(folder: Path, worker: int) -> Path:
    """The file that one worker appends to."""
    return folder / f"samples.worker{worker}.jsonl"


def read_file(path: Path) -> list[Record]:
    """Records of one file; a last line without its newline was torn by a kill and is left out.

    Raises:
        ValueError: a complete line is no JSON object; names file and line.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); repair or delete that line") from None
    return records


def read(folder: Path) -> dict[Key, Record]:
    """Records of the merged file and of all shards, one per key; the first one read wins."""
    records: dict[Key, Record] = {}
    for path in [folder / MERGED, *sorted(folder.glob("samples.worker*.jsonl"))]:
        if path.exists():
            for record in read_file(path):
                records.setdefault(key_of(record), record)
    return records


class Writer:
    """Appends records to one file, each line flushed to the system; a torn tail is cut before the first append."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)

    def append(self, records: Iterable[Record]) -> None:
        """Write the records as one write call, so that a batch is torn at most once."""
        self._file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def merge(folder: Path) -> dict[Key, Record]:
    """Write all records, sorted by key, to the merged file, then remove the shards; a kill in between does no harm."""
    records = dict(sorted(read(folder).items()))
    partial = folder / (MERGED + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records.values())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MERGED)
    for path in folder.glob("samples.worker*.jsonl"):
        path.unlink()
    return records
