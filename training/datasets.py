"""Users' data sets: what a run is told about each of them, and opening files, folders and hub ids as tables of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trimode_vlm.training.settings import build, check_known, check_range

FORMATS = ("conversations", "messages", "prompt", "text")
COLUMNS = ("conversations", "messages", "prompt", "completion", "text", "image", "images", "system", "id")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """One data set of a mixture.

    path: a .json, .jsonl or .parquet file, a folder (of `datasets.save_to_disk`, or of data files) or a hub id; it may
        end in a slice of its rows: "train.jsonl[:1000]", "[1000:]", "[:10%]".
    weight: how often each row is seen in an epoch; 0.5 takes half of the rows, another half in the next epoch. Where a
        member of the mixture streams, weights are shares of the samples instead.
    format: one of FORMATS; None finds it row by row. columns: our name (COLUMNS) -> the column's name in the data.
    images: folder that relative image paths start from; None: the folder of the file, then `images` in it.
    image_placeholder: what stands for an image in a text. images_first: images of a row without any placeholder stand
        before its first user text, instead of being an error.
    name, split: configuration and split of a hub id or folder. limit: at most so many rows.
    streaming: read on and on instead of by index; rows are shuffled within windows of `shuffle_buffer` rows.
    allow_urls: fetch http(s) images, which are refused otherwise.
    """

    path: str
    weight: float = 1.0
    format: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    images: str | None = None
    image_placeholder: str = "<image>"
    images_first: bool = False
    name: str | None = None
    split: str = "train"
    streaming: bool = False
    shuffle_buffer: int = 1000
    limit: int | None = None
    allow_urls: bool = False

    def __post_init__(self) -> None:
        if self.format is not None:
            check_known(self, format=FORMATS)
        check_range(self, 0, float("inf"), "weight", without_low=True)
        check_range(self, 1, float("inf"), "shuffle_buffer", "limit")
        if not self.path:
            raise ValueError("path must name a file, a folder or a hub id")
        if unknown := [key for key in self.columns if key not in COLUMNS]:
            raise ValueError(f"columns renames {unknown[0]!r}, which is none of {', '.join(COLUMNS)}")


def data_settings(value: Any, where: str = "data") -> tuple[DataSettings, ...]:
    """Read the `data` entry of a YAML file: a path, a mapping of DataSettings, or a list of both.

    Raises:
        ValueError: no entry, an unknown field, or a wrong value.
    """
    entries = list(value) if isinstance(value, (list, tuple)) else [value]
    if not entries or entries == [None]:
        raise ValueError(f"{where} names no data set")
    built = []
    for i, entry in enumerate(entries):
        place = f"{where}[{i}]" if len(entries) > 1 else where
        if isinstance(entry, DataSettings):
            built.append(entry)
        elif isinstance(entry, (str, dict)):
            layer = {"path": entry} if isinstance(entry, str) else entry
            if "path" not in layer:
                raise ValueError(f"{place} has no path")
            built.append(build(DataSettings, layer, where=f"{place}."))
        else:
            raise ValueError(f"{place} must be a path or a mapping of settings, got {entry!r}")
    return tuple(built)
