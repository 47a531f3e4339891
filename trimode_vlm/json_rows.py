"""Rows of JSON and JSONL files by index, read where they stand: nothing but their places is held in memory.

`datasets` is not used for JSON: it turns texts that look like dates into timestamps, adds every row's columns to every
other, and stops at the first row that is not valid JSON.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimode_vlm.bad_samples import BadSample


class JsonRows:
    """The rows of one or several files: a JSON list, or one JSON value in each line that is not blank.

    Raises:
        ValueError: a file is empty, or it is neither of the two; the message names it.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        found = [_places(path) for path in paths]
        self.starts = np.concatenate([starts for starts, _ in found])
        self.stops = np.concatenate([stops for _, stops in found])
        self.firsts = np.cumsum([0, *(len(starts) for starts, _ in found)])

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, index: int) -> tuple[Path, int]:
        """Return the file of row `index` and the row's number in it."""
        file = int(np.searchsorted(self.firsts, index, side="right")) - 1
        return self.paths[file], index - int(self.firsts[file])

    def __getitem__(self, index: int) -> Any:
        """Read one row.

        Raises:
            BadSample: it is not valid JSON.
        """
        path, _ = self.where(index)
        # Opened anew each time: an open file would share its place with the workers that are forked from here.
        with path.open("rb") as file:
            file.seek(int(self.starts[index]))
            return parse(file.read(int(self.stops[index] - self.starts[index])))


def stream_lines(paths: Sequence[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """Yield (file, row, line) of JSONL files from their beginning, blank lines left out.

    Raises:
        ValueError: a file holds a JSON list, which cannot be read row by row.
    """
    for path in paths:
        if _is_list(path):
            raise ValueError(f"{path}: a JSON list cannot be streamed; leave out streaming, or write one row per line")
        with path.open("rb") as file:
            yield from ((path, row, line) for row, line in enumerate(line for line in file if line.strip()))


def parse(line: bytes) -> Any:
    """Return the value of one row.

    Raises:
        BadSample: it is not valid JSON, or not UTF-8.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSample(f"not valid JSON ({error})", "JSON") from None


def _is_list(path: Path) -> bool:
    """A .json file that starts with [ is a list of rows; in a .jsonl file, [ may start a row."""
    with path.open("rb") as file:
        head = file.read(4096).decode("utf-8-sig", errors="replace").lstrip()
    return head.startswith("[") and path.suffix.lower() == ".json"


def _places(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte ranges (starts, stops) of a file's rows."""
    starts, stops = _element_places(path) if _is_list(path) else _line_places(path)
    if not len(starts):
        raise ValueError(f"{path} holds no rows")
    return np.frombuffer(starts, dtype=np.int64), np.frombuffer(stops, dtype=np.int64)


def _line_places(path: Path) -> tuple[array[int], array[int]]:
    starts, stops, place = array("q"), array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(place)
                stops.append(place + len(line))
            place += len(line)
        if path.suffix.lower() == ".json" and starts:
            file.seek(starts[0])
            try:
                parse(file.read(stops[0] - starts[0]))
            except BadSample:
                raise ValueError(f"{path}: expected a list of rows [...], or one row per line (.jsonl)") from None
    return starts, stops


def _element_places(path: Path) -> tuple[array[int], array[int]]:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from None
    starts, stops = array("q"), array("q")
    decoder = json.JSONDecoder()
    at = _skip_blank(text, text.index("[") + 1)
    # Bytes before text[at]; counted piece by piece.
    num_bytes = len(data) - len(text.encode()) + len(text[:at].encode())
    try:
        while at < len(text) and text[at] != "]":
            end = decoder.raw_decode(text, at)[1]
            starts.append(num_bytes)
            num_bytes += len(text[at:end].encode())
            stops.append(num_bytes)
            comma = _skip_blank(text, end)
            following = _skip_blank(text, comma + 1) if text[comma : comma + 1] == "," else comma
            if following == comma and text[comma : comma + 1] != "]":
                raise json.JSONDecodeError("expected , or ] after a row", text, comma)
            num_bytes += len(text[end:following].encode())
            at = following
        if at >= len(text):
            raise json.JSONDecodeError("the list is not closed", text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON in row {len(starts)} ({error})") from None
    return starts, stops


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
