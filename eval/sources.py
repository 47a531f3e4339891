"""Where a benchmark's rows come from: a hub id, or a local copy in any of the common forms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trimode_vlm.cli import nearest
from trimode_vlm.eval.tsv_rows import TsvRows, as_picture
from trimode_vlm.row_files import JSON_SUFFIXES, METADATA_NAMES, open_rows
from trimode_vlm.row_images import ImageFinder

Row = dict[str, Any]
# Renamed on the hub; either name may be the one that a cache or a mirror holds.
RENAMED = {"lmms-lab/": "lmms-lab-encoder/", "gsm8k": "openai/gsm8k"}
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set: path is a hub id, a file (.parquet, .arrow, .json, .jsonl, .tsv) or a folder.

    config, split: of a hub id or a folder that has them. columns: our name -> the column's name in the data.
    images: folder that relative image paths start from; None: the data's folder, then `images` in it.
    """

    path: str
    config: str | None = None
    split: str = "test"
    columns: Mapping[str, str] = field(default_factory=dict)
    images: str | None = None

    def overridden(self, value: str, task: str) -> tuple[Source, Row]:
        """This source read from elsewhere, and what else was said: value is a path or hub id, or a YAML file of fields.

        Raises:
            ValueError: the YAML file is not there, or holds an unknown field.
        """
        if not value.lower().endswith(YAML_SUFFIXES):
            return replace(self, path=value), {}
        said = read_yaml(value, ("path", "config", "split", "columns", "images", "max_new_tokens"), f"--data {task}=")
        rest = {name: said.pop(name) for name in ("max_new_tokens",) if name in said}
        return replace(self, **{name: value for name, value in said.items() if value is not None}), rest


class Rows:
    """Rows of one source by index, under our column names; opened when first asked, in every process for itself."""

    def __init__(self, source: Source, task: str, needed: tuple[str, ...]) -> None:
        self.source, self.task, self.needed = source, task, needed

    def __len__(self) -> int:
        return len(self._opened()[0])

    def __getitem__(self, index: int) -> Row:
        """Return one row with its pictures unread.

        Raises:
            ValueError: the data cannot be opened, or a needed column is not there; the message says how to map it.
        """
        rows, label, _ = self._opened()
        row = rows[index]
        if not isinstance(row, dict):
            raise ValueError(f"{self.task}: {label} row {index} must be a mapping of columns")
        names = self.source.columns
        found = row | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}
        for column in self.needed:
            if column not in found:
                theirs = names.get(column, column)
                raise ValueError(
                    f"{self.task}: {label} row {index} has no column {theirs!r} (columns: {', '.join(map(str, row))}); "
                    f"map it with --data {self.task}=FILE.yaml that holds path: and columns: {{{column}: THEIRS}}"
                )
        return found

    def name(self, index: int) -> str:
        """What messages call a row."""
        return f"{self.task}: {self._opened()[1]} row {index}"

    def picture(self, value: Any) -> Any:
        """What a row calls an image as something that `open_image` opens; nothing is decoded.

        Raises:
            ValueError: there is no such file, or it is a URL.
        """
        return ImageFinder(self._opened()[2], self.source.images).find(as_picture(value))

    def fingerprint(self) -> str:
        """Changes when the source does, or its files by size and time, or the data set that the hub gives."""
        place = Path(self.source.path).expanduser()
        if place.exists():
            files = sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
            state = repr([(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])
        else:
            state = str(getattr(getattr(self._opened()[0], "dataset", None), "_fingerprint", None))
        return hashlib.sha256(f"{self.source} {state}".encode()).hexdigest()[:16]

    def _opened(self) -> tuple[Any, str, Path]:
        source = self.source
        file = Path(source.path).expanduser()
        changed = file.stat().st_mtime_ns if file.exists() else 0
        return _open(source.path, source.config, source.split, self.task, changed)


# Tasks are selected several times in a process; the data is opened once, unless its file has changed.
@cache
def _open(path: str, config: str | None, split: str, task: str, changed: int) -> tuple[Any, str, Path]:
    """(rows, what messages call them, the folder of relative paths)."""
    place = Path(path).expanduser()
    tables = sorted(place.glob("*.tsv")) if place.is_dir() else [place]
    if len(tables) == 1 and tables[0].suffix.lower() == ".tsv":
        return _open_tsv(tables[0], split, task)
    if place.is_dir():
        return _open_folder(place, config, split, task)
    others = [path.replace(old, new, 1) for old, new in RENAMED.items() if path.startswith(old)]
    tried = [path, *others] if not place.exists() else [path]
    messages = []
    for one in tried:
        try:
            return open_rows(one, config=config, split=split)
        except ValueError as error:
            messages.append(str(error))
    advice = f"; offline, or your own copy: --data {task}=FOLDER_OR_FILE" if not place.exists() else ""
    raise ValueError(f"{task}: {'; '.join(messages)}{advice}")


def _open_tsv(path: Path, split: str, task: str) -> tuple[Any, str, Path]:
    if not path.is_file():
        raise ValueError(f"{task}: {path}: no such file")
    try:
        return TsvRows(path, split), path.name, path.parent
    except UnicodeDecodeError as error:
        raise ValueError(f"{task}: {path}: not UTF-8 text ({error})") from None


def _open_folder(folder: Path, config: str | None, split: str, task: str) -> tuple[Any, str, Path]:
    """Open a local copy: of the hub's repository, of `save_to_disk`, or files that name neither config nor split."""
    import datasets

    if (folder / "dataset_dict.json").is_file():
        splits = list(datasets.load_from_disk(str(folder)))
    elif (folder / "state.json").is_file() or any(_is_json(file) for file in folder.iterdir()):
        splits = [split]
    else:
        try:
            configs = datasets.get_dataset_config_names(str(folder))
            if config and config not in configs:
                if (folder / config).is_dir():
                    # Without a card that tells them apart, `datasets` would mix the folders of all configurations.
                    return _open_folder(folder / config, None, split, task)
                config = None
            if config is None and len(configs) > 1:
                raise ValueError(f"it has the configurations {', '.join(configs)}; name one by config: in a YAML file")
            splits = datasets.get_dataset_split_names(str(folder), config)
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f"{task}: {folder}: cannot be opened ({' '.join(str(error).split())[:300]})") from None
    # `datasets` calls files whose names say nothing "train".
    chosen = "train" if splits == ["train"] else split
    try:
        return open_rows(str(folder), config=config, split=chosen)
    except ValueError as error:
        raise ValueError(f"{task}: {error} (splits: {', '.join(splits)})") from None


def _is_json(file: Path) -> bool:
    return file.suffix.lower() in JSON_SUFFIXES and file.name not in METADATA_NAMES


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_columns(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_budget(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_renaming(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, [*value, *value.values()]))


# Fields that are not text.
FIELD_KINDS = {
    "max_new_tokens": (_is_budget, "a whole number of at least 1"),
    "columns": (_is_renaming, "a mapping from our column names to the data's"),
    "image": (lambda value: _is_text(value) or _is_columns(value), "a column or a list of columns"),
    "info": (_is_columns, "a list of columns"),
}


def read_yaml(path: str, known: tuple[str, ...], what: str) -> Row:
    """The fields of a YAML file; a relative `path` or `images` that lies beside the file starts there.

    Raises:
        ValueError: it is not there, not a mapping, or has a field that is none of `known` or of another kind.
    """
    file = Path(path).expanduser()
    try:
        said = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{what}{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{what}{path}: not YAML ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(said, dict):
        raise ValueError(f"{what}{path}: expected fields such as path: and columns:")
    for name in said:
        if name not in known:
            raise ValueError(
                f"{what}{path}: unknown field {name!r}{nearest(str(name), known)}; known: {', '.join(known)}"
            )
        is_right, wanted = FIELD_KINDS.get(name, (_is_text, "text"))
        if said[name] is not None and not is_right(said[name]):
            raise ValueError(f"{what}{path}: {name} must be {wanted}, got {said[name]!r}")
    for name in ("path", "images"):
        if isinstance(said.get(name), str) and (file.parent / said[name]).exists():
            said[name] = str(file.parent / said[name])
    return said
