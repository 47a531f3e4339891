"""Settings of a run: a frozen dataclass filled from YAML and `--key value`; unknown keys name the nearest known one."""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Collection
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

S = TypeVar("S")


def read_yaml(name: str) -> dict[str, Any]:
    """Read a YAML file by path, or one that ships with the package by its bare name ("nano")."""
    path = Path(name)
    if not path.is_file():
        shipped = sorted(p.stem for p in Path(__file__).parent.glob("*.yaml"))
        path = Path(__file__).parent / f"{name}.yaml"
        if not path.is_file():
            raise ValueError(f"no config {name!r}: give a YAML file or one of {', '.join(shipped)}")
    try:
        content = _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error})") from None
    if content is None:
        raise ValueError(f"{path} is empty: write settings into it, or {{}} for the defaults")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of settings, found {type(content).__name__}")
    return content


def parse_overrides(argv: list[str]) -> dict[str, Any]:
    """Turn `--joint.alpha 0.5 --seed=1` into a nested mapping; values are read as YAML, so types follow."""
    overrides: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        key = rest.pop(0)
        if not key.startswith("--"):
            raise ValueError(f"expected --key value, found {key!r}")
        key, equals, value = key[2:].partition("=")
        if not equals:
            if not rest:
                raise ValueError(f"--{key} needs a value")
            value = rest.pop(0)
        *parents, leaf = key.replace("-", "_").split(".")
        node = overrides
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"--{parent} is given twice, as {node!r} and by --{key}")
        node[leaf] = _number_or(_parse(value, f"--{key}"))
    return overrides


def _parse(text: str, name: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None


def _number_or(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 as text; people mean the number.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def build(cls: type[S], *layers: dict[str, Any], where: str = "") -> S:
    """Build a settings dataclass from mappings, later ones win; nested dataclasses merge field by field.

    Raises ValueError for an unknown key (with the nearest known one) and for a value of the wrong kind.
    """
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name in known:
        given = [layer[name] for layer in layers if name in layer]
        if not given:
            continue
        kind = hints[name]
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
        nested = next((k for k in kinds if isinstance(k, type) and is_dataclass(k)), None)
        if nested is None:
            values[name] = _convert(given[-1], kind, where + name)
        elif given[-1] is None and nested is not kind:
            values[name] = None
        else:
            given = [value for value in given if value is not None or nested is kind]
            if wrong := [value for value in given if not isinstance(value, dict)]:
                raise ValueError(f"{where}{name} must be a mapping of settings, got {wrong[0]!r}")
            values[name] = build(nested, *given, where=f"{where}{name}.")  # type: ignore[arg-type]
    for layer in layers:
        for name in map(str, layer):
            if name not in known:
                near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
                raise ValueError(f"unknown setting {where + name!r}; the nearest known one is {where + near[0]!r}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def check_known(settings: Any, **known: Collection[str]) -> None:
    """Raise ValueError unless each named field holds one of its known values."""
    for name, names in known.items():
        if getattr(settings, name) not in names:
            raise ValueError(f"{name} must be one of {', '.join(names)}, got {getattr(settings, name)!r}")


def check_range(
    settings: Any, low: float, high: float, *names: str, without_low: bool = False, finite: bool = True
) -> None:
    """Raise ValueError unless low <= value <= high for each named field that is not None; nan is in no range.

    finite: infinity is refused as well, where it would mean something only by accident.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None or (low <= value <= high and not (without_low and value == low)):
            if value is None or not finite or math.isfinite(value):
                continue
        wanted = f"between {low} and {high}" if high < math.inf else f"{'above' if without_low else 'at least'} {low}"
        wanted += ", and finite" if finite and value == math.inf else ""
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def make_folder(path: str | Path, option: str = "out") -> Path:
    """Make the folder that a run writes to, before anything slow.

    Raises:
        ValueError: it cannot be made or written to; one line that names the option.
    """
    folder = Path(path).expanduser()
    if not str(path).strip():
        raise ValueError(f"{option} must name a folder, got {path!r}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {path}: not a folder that can be made ({error.strerror}); name another") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: this folder is not writable; name another")
    return folder


def _convert(value: Any, kind: Any, name: str) -> Any:
    if kind is Any:
        return value
    value = _number_or(value) if kind is not str else value
    options = typing.get_args(kind) if typing.get_origin(kind) not in (tuple, list, dict) else (kind,)
    for option in options or (kind,):
        origin = typing.get_origin(option) or option
        if origin is tuple and is_dataclass(typing.get_args(option)[0]):
            return value  # the settings class reads it
        if origin is tuple and isinstance(value, str) and typing.get_args(option)[0] is str:
            return (value,)
        if origin is tuple and isinstance(value, (list, tuple)):
            return tuple(_convert(item, typing.get_args(option)[0], name) for item in value)
        if origin is dict and isinstance(value, dict):
            return {k: _convert(item, typing.get_args(option)[1], f"{name}.{k}") for k, item in value.items()}
        if origin is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if origin is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if origin is int and isinstance(value, bool):
            continue
        if origin is str and isinstance(value, int) and not isinstance(value, bool):
            return str(value)  # --joint.weight 1
        if origin is type(None) and value is None:
            return None
        if isinstance(origin, type) and isinstance(value, origin):
            return value
    raise ValueError(f"setting {name!r}: {value!r} is not a {kind if options else getattr(kind, '__name__', kind)}")


def resolved(settings: Any) -> str:
    """All settings as YAML, as a config file would hold them."""
    plain = {k: _plain(v) for k, v in asdict(settings).items()}
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=120)


def chosen(settings: Any) -> str:
    """The settings that are not their defaults, as YAML: what this run was asked for."""
    return yaml.safe_dump(_chosen(settings), sort_keys=False, default_flow_style=None, width=120)


def _chosen(settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for f in fields(settings):
        value = getattr(settings, f.name)
        default = (
            f.default if f.default is not MISSING else f.default_factory() if callable(f.default_factory) else MISSING
        )
        if value == default:
            continue
        if isinstance(value, (list, tuple)) and value and all(map(is_dataclass, value)):
            found[f.name] = [_chosen(item) for item in value]
        else:
            found[f.name] = _chosen(value) if is_dataclass(value) else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
