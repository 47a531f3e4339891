"""One data set of a run: a table of rows by index, or a stream of rows in order, with its slice and its parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimode_vlm.json_rows import JsonRows, parse, stream_lines
from trimode_vlm.row_files import decode_json, open_rows
from trimode_vlm.training.datasets import DataSettings

_SLICE = re.compile(r"^(?P<path>.*)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]$", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """Rows by index. rows: what holds them; indices: which of them belong to this data set, in order."""

    rows: Any
    indices: Sequence[int] | np.ndarray
    label: str
    folder: Path

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, place: int) -> Any:
        """Return the row at `place`, 0 <= place < len.

        Raises:
            BadSample: it is not valid JSON.
        """
        return self.rows[int(self.indices[place])]

    def name(self, place: int) -> str:
        """Return what messages call the row: its file and its number there."""
        return _name(self.rows, self.label, int(self.indices[place]))

    def part(self, part: str, eval_fraction: float) -> Table:
        """Return the rows of part "train" or "eval": at least one each, drawn alike in every run."""
        num_eval = min(max(1, round(len(self) * eval_fraction)), len(self) - 1)
        if num_eval < 1:
            raise ValueError(f"{self.label}: {len(self)} rows cannot be split into a train and an eval part")
        order = sorted(range(len(self)), key=lambda place: _hash(int(self.indices[place])))
        chosen = sorted(order[:num_eval] if part == "eval" else order[num_eval:])
        return replace(self, indices=np.asarray(self.indices)[chosen])


@dataclass(frozen=True)
class Stream:
    """Rows in order. source: paths of JSONL files, or a `datasets.IterableDataset`.

    start, stop: the rows that belong to this data set; kept: (part, eval fraction) of them.
    """

    source: Any
    label: str
    folder: Path
    start: int = 0
    stop: int | None = None
    kept: tuple[str, float] | None = None

    def items(self, skip: int = 0) -> Iterator[tuple[int, str, Any]]:
        """Yield (index, name, unread row) from the row after `skip` rows of this data set."""
        if self.kept is None:
            yield from self._numbered(self.start + skip)
            return
        part, fraction = self.kept
        for item in self._numbered(self.start):
            if (_hash(item[0]) < fraction * 2**64) == (part == "eval"):
                if skip <= 0:
                    yield item
                skip -= 1

    def _numbered(self, first: int) -> Iterator[tuple[int, str, Any]]:
        numbered: Iterable[tuple[int, str, Any]]
        if isinstance(self.source, list):
            lines = enumerate(stream_lines(self.source))
            numbered = ((index, f"{path.name} row {row}", line) for index, (path, row, line) in lines)
        else:
            rows = enumerate(self.source.skip(first), first)
            numbered = ((index, f"{self.label} row {index}", row) for index, row in rows)
        for index, name, row in numbered:
            if self.stop is not None and index >= self.stop:
                return
            if index >= first:
                yield index, name, row

    def read(self, row: Any) -> Any:
        """Return the row that `items` gave, parsed.

        Raises:
            BadSample: it is not valid JSON.
        """
        return parse(row) if isinstance(row, bytes) else decode_json(row, dict(self.source.features or {}))

    def part(self, part: str, eval_fraction: float) -> Stream:
        """Return the rows of part "train" or "eval", each drawn by its number alone."""
        return replace(self, kept=(part, eval_fraction))


def open_table(settings: DataSettings) -> Table | Stream:
    """Open one data set.

    Raises:
        ValueError: nothing is there, it cannot be read, it has no such split or configuration, or no rows are left.
    """
    path, start, stop = split_slice(settings.path)
    rows, label, folder = open_rows(path, config=settings.name, split=settings.split, streaming=settings.streaming)
    if settings.streaming:
        return Stream(rows, label, folder, *_stream_bounds(settings, start, stop))
    first, last = _bound(start, len(rows), 0), _bound(stop, len(rows), len(rows))
    last = last if settings.limit is None else min(last, first + settings.limit)
    if first >= last:
        raise ValueError(f"{settings.path}: no rows are left of {len(rows)}")
    return Table(rows, range(first, last), label, folder)


def split_slice(path: str) -> tuple[str, str | None, str | None]:
    """Part "train.jsonl[:10%]" into the path, and start and stop as written."""
    match = _SLICE.match(path)
    if match is None or Path(path).exists():
        return path, None, None
    return match["path"], match["start"], match["stop"]


def _bound(written: str | None, length: int, default: int) -> int:
    """Return a row number from what a slice says: 100, -100 (from the end) or 10%."""
    if written is None:
        return default
    percent = written.endswith("%")
    # As `datasets` rounds them, so that [:10%] and [10%:] meet.
    number = round(int(written[:-1]) * length / 100) if percent else int(written)
    return min(max(number + length if number < 0 else number, 0), length)


def _stream_bounds(settings: DataSettings, start: str | None, stop: str | None) -> tuple[int, int | None]:
    if any(bound is not None and not bound.isdigit() for bound in (start, stop)):
        raise ValueError(f"{settings.path}: a stream's length is unknown, so its slice needs plain numbers")
    first, last = int(start or 0), None if stop is None else int(stop)
    if settings.limit is not None:
        last = first + settings.limit if last is None else min(last, first + settings.limit)
    if last is not None and first >= last:
        raise ValueError(f"{settings.path}: no rows are left")
    return first, last


def _name(rows: Any, label: str, index: int) -> str:
    if isinstance(rows, JsonRows):
        path, row = rows.where(index)
        return f"{path.name} row {row}"
    return f"{label} row {index}"


def _hash(index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"eval/{index}".encode(), digest_size=8).digest(), "little")
