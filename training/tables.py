"""Opening one data set: files, folders and hub ids as a table of rows by index, or as a stream of rows in order."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimode_vlm.training import distributed
from trimode_vlm.training.datasets import DataSettings
from trimode_vlm.training.json_rows import JsonRows, parse, stream_lines

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
_SLICE = re.compile(r"^(?P<path>.*)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]$", re.DOTALL)
_HUB_ID = re.compile(r"^\w[\w.-]*(/[\w.-]+)?$")
_METADATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "metadata.jsonl")


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
        return parse(row) if isinstance(row, bytes) else _decode_json(row, dict(self.source.features or {}))

    def part(self, part: str, eval_fraction: float) -> Stream:
        """Return the rows of part "train" or "eval", each drawn by its number alone."""
        return replace(self, kept=(part, eval_fraction))


def open_table(settings: DataSettings) -> Table | Stream:
    """Open one data set.

    Raises:
        ValueError: nothing is there, it cannot be read, it has no such split or configuration, or no rows are left.
    """
    path, start, stop = split_slice(settings.path)
    rows, label, folder = _open(settings, path)
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


def _open(settings: DataSettings, path: str) -> tuple[Any, str, Path]:
    """Return the rows (or their source, when streaming), what messages call them, and where image paths start."""
    place = Path(path).expanduser()
    if place.is_dir():
        return _open_folder(settings, place)
    files = [place] if place.is_file() else sorted(map(Path, glob.glob(str(place), recursive=True)))
    if files:
        return _open_files(settings, files), place.name if len(files) == 1 else path, files[0].parent
    suffix = place.suffix.lower()
    if suffix in (*JSON_SUFFIXES, *BUILDERS) or not _HUB_ID.match(path):
        raise ValueError(f"{path}: no such file or folder")
    label = f"{path} ({settings.split})"
    return _load(settings, path, settings.name, split=settings.split, what=label), label, Path()


def _open_files(settings: DataSettings, files: list[Path]) -> Any:
    suffixes = {file.suffix.lower() for file in files}
    if suffixes.issubset(JSON_SUFFIXES):
        return files if settings.streaming else JsonRows(files)
    if len(suffixes) > 1 or (suffix := suffixes.pop()) not in BUILDERS:
        known = ", ".join((*JSON_SUFFIXES, *BUILDERS))
        raise ValueError(f"{files[0]}: cannot read this kind of file; known: {known}, and folders and hub ids")
    data_files = {settings.split: [str(file) for file in files]}
    return _load(settings, BUILDERS[suffix], data_files=data_files, split=settings.split, what=str(files[0]))


def _open_folder(settings: DataSettings, folder: Path) -> tuple[Any, str, Path]:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _load_from_disk(settings, folder), folder.name, folder
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in JSON_SUFFIXES)
    files = [file for file in files if file.name not in _METADATA]
    if files:
        of_split = [file for file in files if re.match(rf"{re.escape(settings.split)}([-_.]|$)", file.name)]
        if not of_split and len(files) > 1:
            names = ", ".join(file.name for file in files[:5])
            raise ValueError(f"{folder}: no file begins with the split {settings.split!r} (found {names})")
        return _open_files(settings, of_split or files), folder.name, folder
    label = f"{folder.name} ({settings.split})"
    return _load(settings, str(folder), settings.name, split=settings.split, what=str(folder)), label, folder


def _load_from_disk(settings: DataSettings, folder: Path) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: cannot be loaded from disk ({_one_line(error)})") from None
    if isinstance(loaded, datasets.DatasetDict):
        if settings.split not in loaded:
            raise ValueError(f"{folder}: no split {settings.split!r}; it has {', '.join(loaded)}")
        loaded = loaded[settings.split]
    return loaded.to_iterable_dataset().decode(False) if settings.streaming else ArrowRows(loaded)


def _load(settings: DataSettings, *args: Any, what: str, **options: Any) -> Any:
    import datasets

    if distributed.rank() or not sys.stderr.isatty():
        # On a terminal they tell of a wait.
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(*args, streaming=settings.streaming, **options)
    except ConnectionError as error:
        raise ValueError(
            f"{what}: no such file or folder here, and the hub cannot be reached ({_one_line(error)})"
        ) from None
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{what}: cannot be loaded ({_one_line(error)})") from None
    return loaded.decode(False) if settings.streaming else ArrowRows(loaded)


class ArrowRows:
    """Rows of a `datasets.Dataset` as plain values; images stay the {"bytes", "path"} that they are stored as."""

    def __init__(self, dataset: Any) -> None:
        self.features = dataset.features
        self.dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self.dataset[index : index + 1].to_pylist()
        return _decode_json(row, dict(self.features))


def _decode_json(value: Any, feature: Any) -> Any:
    """Decode what `datasets` stores as JSON text because its rows differ in type.

    It stores a text that is JSON itself, like "42" or "true", as it is: those stay text.
    """
    import datasets

    if isinstance(feature, datasets.features.features.Json) and isinstance(value, str):
        decoded = json.loads(value)
        return decoded if isinstance(decoded, (str, list, dict)) else value
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _decode_json(item, feature.get(key)) for key, item in value.items()}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [_decode_json(item, inner) for item in value]
    return value


def _name(rows: Any, label: str, index: int) -> str:
    if isinstance(rows, JsonRows):
        path, row = rows.where(index)
        return f"{path.name} row {row}"
    return f"{label} row {index}"


def _hash(index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"eval/{index}".encode(), digest_size=8).digest(), "little")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
