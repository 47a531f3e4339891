"""Safetensors on disk: list tensors from the headers, read one at a time, write shards. Pickles are never opened."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .json_files import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": FP8_DTYPES[0], "F8_E5M2": FP8_DTYPES[1], "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what its header says."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def scan(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of a model folder by the names in its files; only headers are read.

    Raises:
        ValueError: no safetensors (pickles are never opened), a missing or damaged shard, or one name in two shards.
    """
    stored: dict[str, StoredTensor] = {}
    for path in _shards(folder):
        for tensor in scan_file(path):
            if tensor.name in stored:
                raise ValueError(f"{tensor.name} lies in both {stored[tensor.name].path.name} and {path.name}")
            stored[tensor.name] = tensor
    return stored


def scan_file(path: Path) -> list[StoredTensor]:
    """List the tensors of one safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}
            return [
                StoredTensor(path, name, tuple(part.get_shape()), _DTYPES[part.get_dtype()])
                for name, part in slices.items()
            ]
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or incomplete safetensors file ({error})") from error
    except KeyError as error:
        raise ValueError(f"{path}: tensor type {error} is not known to this loader") from error


def read(stored: StoredTensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Tensor:
    """Read one tensor into memory of its own, cast to `dtype` on the way; integers keep their type.

    The file is opened per tensor: a mapping kept open counts every page read from it, so a whole shard would stay
    resident beside the model.
    """
    with safe_open(stored.path, framework="pt") as file:
        tensor = file.get_tensor(stored.name)
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, copy=True)


def dequantize(weight: Tensor, scale_inv: Tensor, block: tuple[int, int] | None) -> Tensor:
    """FP8 weight [out, in] times its `_scale_inv` -> float32: one number, or one per block of [rows, columns].

    Raises:
        ValueError: the scale's shape is not the grid of blocks that covers the weight.
    """
    weight = weight.float()
    if scale_inv.numel() == 1:
        return weight.mul_(scale_inv.float().reshape(()))
    rows, columns = block or (128, 128)
    grid = tuple(math.ceil(size / step) for size, step in zip(weight.shape, (rows, columns), strict=False))
    if weight.ndim != 2 or tuple(scale_inv.shape) != grid:
        raise ValueError(
            f"FP8 weight {list(weight.shape)} in blocks of [{rows}, {columns}] needs scales {list(grid)}, "
            f"found {list(scale_inv.shape)}"
        )
    for row, scales in enumerate(scale_inv.float()):
        per_column = scales.repeat_interleave(columns)[: weight.shape[1]]
        weight[row * rows : (row + 1) * rows].mul_(per_column)
    return weight


class ShardWriter:
    """Writes tensors in the order given, one shard in memory at a time, in the layout that transformers reads."""

    def __init__(self, folder: Path, max_shard_bytes: int = 5 * 10**9) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size_bytes > self.max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().contiguous()
        self._pending_bytes += size_bytes
        self._total_bytes += size_bytes

    def close(self) -> None:
        """Write what is pending, give the shards their final names and write the index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._temporary(0).rename(self.folder / SINGLE_NAME)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            shard_name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._temporary(i).rename(self.folder / shard_name)
            weight_map |= dict.fromkeys(names, shard_name)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if self._pending:
            save_file(self._pending, self._temporary(len(self._shards)), metadata={"format": "pt"})
            self._shards.append(list(self._pending))
            self._pending, self._pending_bytes = {}, 0

    def _temporary(self, index: int) -> Path:
        return self.folder / f"shard-{index}.tmp"


def parse_bytes(size: int | str) -> int:
    """Read a shard size as transformers writes it: 5000000, "5GB", "20KB" (decimal units).

    Raises:
        ValueError: not a number of bytes.
    """
    if isinstance(size, int):
        return size
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size.upper().endswith(unit) and size[:-2].strip().isdigit():
            return int(size[:-2]) * factor
    raise ValueError(f"max_shard_size {size!r}: write bytes as a number, or as '5GB', '200MB', '20KB'")


def is_match(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index}: damaged or incomplete, it has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
        if unsafe := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index}: shard names must lie in the folder itself, found {unsafe[0]!r}")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{folder}: {len(absent)} of {len(names)} weight shards are missing: {', '.join(absent)}")
        return [folder / name for name in names]
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if is_match(folder, ("model-*-of-*.safetensors",)):
        raise ValueError(f"{folder}: weight shards without their index {INDEX_NAME}; copy or download it too")
    if is_match(folder, PICKLE_PATTERNS):
        raise ValueError(
            f"{folder}: only pickled weights (.bin, .pt) found; they can run code and are never opened: "
            "convert them to safetensors first"
        )
    raise ValueError(f"{folder}: no weights found (expected {SINGLE_NAME} or {INDEX_NAME})")
