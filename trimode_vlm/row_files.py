"""Opening a data set: files, folders and hub ids as rows by index, or as what a stream reads in order."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from trimode_vlm.json_rows import JsonRows

JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
_HUB_ID = re.compile(r"^\w[\w.-]*(/[\w.-]+)?$")
METADATA_NAMES = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "metadata.jsonl")


def open_rows(
    path: str, *, config: str | None = None, split: str = "train", streaming: bool = False
) -> tuple[Any, str, Path]:
    """Return the rows (or their source, when streaming), what messages call them, and where image paths start.

    path: JSON, JSONL, Parquet or Arrow files (a glob), a folder of them or of `datasets.save_to_disk`, or a hub id.

    Raises:
        ValueError: nothing is there, it cannot be read, or it has no such split or configuration.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return _open_folder(place, config, split, streaming)
    files = [place] if place.is_file() else sorted(map(Path, glob.glob(str(place), recursive=True)))
    if files:
        rows = _open_files(files, split, streaming)
        return rows, place.name if len(files) == 1 else path, files[0].parent
    suffix = place.suffix.lower()
    if suffix in (*JSON_SUFFIXES, *BUILDERS) or not _HUB_ID.match(path):
        raise ValueError(f"{path}: no such file or folder")
    label = f"{path} ({split})"
    return _load(path, config, split=split, streaming=streaming, what=label), label, Path()


def _open_files(files: list[Path], split: str, streaming: bool) -> Any:
    suffixes = {file.suffix.lower() for file in files}
    if suffixes.issubset(JSON_SUFFIXES):
        return files if streaming else JsonRows(files)
    if len(suffixes) > 1 or (suffix := suffixes.pop()) not in BUILDERS:
        known = ", ".join((*JSON_SUFFIXES, *BUILDERS))
        raise ValueError(f"{files[0]}: cannot read this kind of file; known: {known}, and folders and hub ids")
    data_files = {split: [str(file) for file in files]}
    return _load(BUILDERS[suffix], data_files=data_files, split=split, streaming=streaming, what=str(files[0]))


def _open_folder(folder: Path, config: str | None, split: str, streaming: bool) -> tuple[Any, str, Path]:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _load_from_disk(folder, split, streaming), folder.name, folder
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in JSON_SUFFIXES)
    files = [file for file in files if file.name not in METADATA_NAMES]
    if files:
        of_split = [file for file in files if re.match(rf"{re.escape(split)}([-_.]|$)", file.name)]
        if not of_split and len(files) > 1:
            names = ", ".join(file.name for file in files[:5])
            raise ValueError(f"{folder}: no file begins with the split {split!r} (found {names})")
        return _open_files(of_split or files, split, streaming), folder.name, folder
    label = f"{folder.name} ({split})"
    return _load(str(folder), config, split=split, streaming=streaming, what=str(folder)), label, folder


def _load_from_disk(folder: Path, split: str, streaming: bool) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: cannot be loaded from disk ({_one_line(error)})") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise ValueError(f"{folder}: no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    return loaded.to_iterable_dataset().decode(False) if streaming else ArrowRows(loaded)


def _load(*args: Any, what: str, streaming: bool, **options: Any) -> Any:
    import datasets

    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        # On a terminal they tell of a wait.
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(*args, streaming=streaming, **options)
    except ConnectionError as error:
        raise ValueError(
            f"{what}: no such file or folder here, and the hub cannot be reached ({_one_line(error)})"
        ) from None
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{what}: cannot be loaded ({_one_line(error)})") from None
    return loaded.decode(False) if streaming else ArrowRows(loaded)


class ArrowRows:
    """Rows of a `datasets.Dataset` as plain values; images stay the {"bytes", "path"} that they are stored as."""

    def __init__(self, dataset: Any) -> None:
        self.features = dataset.features
        self.dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        (row,) = self.dataset[index : index + 1].to_pylist()
        return decode_json(row, dict(self.features))


def decode_json(value: Any, feature: Any) -> Any:
    """Decode what `datasets` stores as JSON text because its rows differ in type.

    It stores a text that is JSON itself, like "42" or "true", as it is: those stay text.
    """
    import datasets

    if isinstance(feature, datasets.features.features.Json) and isinstance(value, str):
        decoded = json.loads(value)
        return decoded if isinstance(decoded, (str, list, dict)) else value
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: decode_json(item, feature.get(key)) for key, item in value.items()}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [decode_json(item, inner) for item in value]
    return value


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
