"""Rows of VLMEvalKit's TSV files: base64 images in cells, options in columns A, B, C and so on, lists as text."""

from __future__ import annotations

import ast
import csv
import string
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# No picture is this short: such a cell is the index of the row whose picture it shares, as VLMEvalKit writes it.
MAX_INDEX_CHARS = 64
LETTERS = string.ascii_uppercase


class TsvRows:
    """Rows by index, read where they stand; a file of many gigabytes costs a few bytes per row.

    split: where the file has a column `split` with this value in it, only those rows belong to the data set.

    Raises:
        ValueError: the file is empty, or its header names a column twice.
    """

    def __init__(self, path: Path, split: str | None = None) -> None:
        # csv's bound of 128 KiB per cell is below a picture's size.
        csv.field_size_limit(sys.maxsize)
        self.path = path
        self.starts: array[int] = array("q")
        self.places: dict[str, int] = {}
        splits: list[str] = []
        with path.open("rb") as file:
            records = _records(file)
            _, self.header = next(records, (0, []))
            if len(set(self.header)) < len(self.header):
                raise ValueError(f"{path}: its header names a column twice")
            for start, cells in records:
                row = dict(zip(self.header, cells, strict=False))
                self.places.setdefault(row.get("index", ""), len(self.starts))
                self.starts.append(start)
                splits.append(row.get("split", ""))
        if not self.starts:
            raise ValueError(f"{path} holds no rows")
        chosen = [place for place, name in enumerate(splits) if name == split]
        self.order = chosen or range(len(self.starts))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one row; empty cells are left out, and what the hub's schema calls otherwise is added.

        Raises:
            ValueError: its picture refers to a row that is not there, or a list in it cannot be read.
        """
        row = self._read(self.order[index])
        if "image" in row:
            row["images"] = as_list(self._resolved(row["image"]))
        elif "image_path" in row:
            row["images"] = as_list(row["image_path"])
        if row.get("images"):
            row["image"] = row["decoded_image"] = row["images"][0]
            row |= {f"image_{n}": picture for n, picture in enumerate(row["images"], 1)}
        options = [row[letter] for letter in LETTERS if letter in self.header and letter in row]
        if options:
            row = {"options": options, **row}
        # The hub's names of the same things.
        for ours, theirs in (("l2_category", "l2-category"), ("choices", "options"), ("answers", "answer")):
            if theirs in row:
                row.setdefault(ours, row[theirs])
        return row

    def _read(self, place: int) -> dict[str, Any]:
        with self.path.open("rb") as file:
            file.seek(self.starts[place])
            _, cells = next(_records(file))
        if len(cells) != len(self.header):
            raise ValueError(f"{self.path} row {place}: {len(cells)} cells, but the header has {len(self.header)}")
        return {name: cell for name, cell in zip(self.header, cells, strict=True) if cell}

    def _resolved(self, cell: str) -> str:
        """The cell itself, or that of the row it refers to."""
        if len(cell) > MAX_INDEX_CHARS or cell.startswith("[") or (_is_path(cell) and cell not in self.places):
            return cell
        place = self.places.get(cell)
        found = self._read(place).get("image", "") if place is not None else ""
        if len(found) <= MAX_INDEX_CHARS and not _is_path(found):
            raise ValueError(f"the image is {cell!r}: no picture, no file, and not the index of a row that has one")
        return found


def as_list(cell: Any) -> list[Any]:
    """The list that a cell holds as a Python literal; any other value as the only element.

    Raises:
        ValueError: it begins like a list and is none.
    """
    if isinstance(cell, list):
        return cell
    if not (isinstance(cell, str) and cell.lstrip().startswith("[")):
        return [cell]
    try:
        found = ast.literal_eval(cell.strip())
    except (ValueError, SyntaxError):
        found = None
    if not isinstance(found, list):
        raise ValueError(f"expected a list written as Python writes it, got {cell[:80]!r}")
    return found


def as_picture(cell: Any) -> Any:
    """Base64 as a data URI; anything else, such as a path, as it is."""
    if not isinstance(cell, str) or len(cell) <= MAX_INDEX_CHARS or cell.startswith("data:") or _is_path(cell):
        return cell
    return f"data:;base64,{cell}"


def _is_path(cell: str) -> bool:
    """Base64 has no full stop."""
    return "." in cell and not cell.startswith("data:")


def _records(file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    """(byte offset, cells) of every record from here on; quoted cells may hold line breaks and tabs."""
    consumed = file.tell()

    def lines() -> Iterator[str]:
        nonlocal consumed
        for line in file:
            consumed += len(line)
            yield line.decode("utf-8-sig" if consumed == len(line) else "utf-8")

    start = consumed
    for cells in csv.reader(lines(), delimiter="\t"):
        if cells:
            yield start, cells
        start = consumed
