"""One JSON line per answered sample: the only state of a run, safe against kills, duplicates and several writers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MERGED = "samples.jsonl"
# Samples that gave an error where `on_error` is "skip"; they are tried again whenever the run is continued.
SKIPPED = "skipped.jsonl"

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


def shard_path(folder: Path, worker: int, merged: str = MERGED) -> Path:
    """The file that one worker appends to."""
    return folder / f"{Path(merged).stem}.worker{worker}.jsonl"


def shards(folder: Path, merged: str = MERGED) -> list[Path]:
    """The files that workers have appended to since the last merge."""
    return sorted(folder.glob(f"{Path(merged).stem}.worker*.jsonl"))


def read_file(path: Path) -> list[Record]:
    """Records of one file; a last line without its newline was torn by a kill and is left out.

    Raises:
        ValueError: a complete line is no record; names file and line.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            key_of(record)
        except (ValueError, TypeError, KeyError) as error:
            problem = f"not JSON ({error})" if isinstance(error, ValueError) else f"no record ({error})"
            raise ValueError(f"{path}, line {number}: {problem}; repair or delete that line") from None
        records.append(record)
    return records


def read(folder: Path, merged: str = MERGED) -> dict[Key, Record]:
    """Records of the merged file and of all shards, one per key; the first one read wins."""
    records: dict[Key, Record] = {}
    for path in [folder / merged, *shards(folder, merged)]:
        if path.exists():
            for record in read_file(path):
                records.setdefault(key_of(record), record)
    return records


class Writer:
    """Appends records to one file, each line flushed to the system; a torn tail is cut before the first append."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a full disk refused must not be tried again when the file is closed.
        self._file = path.open("ab+", buffering=0)
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)
        self._path = path

    def append(self, records: Iterable[Record]) -> None:
        """Write the records as one write call, so that a batch is torn at most once.

        Raises:
            OSError: the disk is full; the file then ends in a torn line.
        """
        content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Follower:
    """Reads what workers append, from where it left off; lines that are not complete yet wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def new_records(self) -> list[Record]:
        """Records of all shards, skipped samples included, that came since the last call."""
        records = []
        for path in [*shards(self._folder), *shards(self._folder, SKIPPED)]:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            records += [json.loads(line) for line in whole.splitlines()]
        return records


def merge(folder: Path, change: Callable[[Record], Record] | None = None) -> dict[Key, Record]:
    """Write all records, sorted by key and changed, to the merged file, then remove the shards.

    A kill in between does no harm: a record is in a shard until it is in the merged file.
    """
    records = dict(sorted(read(folder).items()))
    if change is not None:
        records = {key: change(record) for key, record in records.items()}
    replace(folder / MERGED, records.values())
    for path in shards(folder):
        path.unlink()
    return records


def merge_skipped(folder: Path, answered: Iterable[Key]) -> dict[Key, Record]:
    """Keep what was skipped and has no answer yet in skipped.jsonl; no such file where nothing was."""
    done = set(answered)
    left = {key: record for key, record in sorted(read(folder, SKIPPED).items()) if key not in done}
    if left:
        replace(folder / SKIPPED, left.values())
    else:
        (folder / SKIPPED).unlink(missing_ok=True)
    for path in shards(folder, SKIPPED):
        path.unlink()
    return left


def replace(path: Path, records: Iterable[Record]) -> None:
    """Write a file of records whole or not at all."""
    replace_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def replace_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old file stays as it was.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the folder for one evaluation; the system frees it when the process ends, however that happens.

    Raises:
        ValueError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"{folder}: another evaluation is writing here; wait for it, or take another --output"
            raise ValueError(message) from error
        except OSError:  # a file system without locks
            pass
        yield
