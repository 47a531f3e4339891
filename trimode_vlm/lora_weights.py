"""A fine-tuned LoRA folder as a model: the weights of its base with the adapter merged in, one tensor at a time.

PEFT's layout: `adapter_config.json` names the base model, `adapter_model.safetensors` holds the factors and, whole, the
modules that were trained beside them (`modules_to_save`). The draft adapter of draft_adapter.py is another thing: it
lies inside a model folder and is never merged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import TriModeConfig
from .key_maps import HEAD, to_ours
from .processor_files import read_json
from .source_configs import read_source
from .source_weights import SourceWeights
from .weight_files import INDEX_NAME, PICKLE_PATTERNS, SINGLE_NAME, StoredTensor, is_match, read, scan_file

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Each changes what the factors mean; PEFT itself can merge such an adapter.
_REFUSED = (
    "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "lora_bias", "layer_replication",
)  # fmt: skip
# Initialisations that take the adapter's first value out of the base weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def is_lora_folder(folder: Path) -> bool:
    """Whether a folder is a fine-tuned adapter: it says so, and holds no weights of a whole model."""
    has_model = any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    return (folder / ADAPTER_CONFIG).is_file() and not has_model


def base_of(folder: Path) -> str:
    """The base model that an adapter folder names: "nano", a hub id or a folder, given from its own place or absolute.

    Raises:
        ValueError: it names none, or itself.
    """
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is missing; write the base model there")
    beside = folder / base
    if beside.is_dir() and beside.resolve() == folder.resolve():
        raise ValueError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path is this folder itself")
    return str(beside) if beside.is_dir() else base


class MergedWeights(SourceWeights):
    """The weights of `base` under our names, with the adapter of `folder` added: W + scale * B A, in float32.

    Modules that were trained whole replace the base's. A `config.json` of ours in the folder replaces its config,
    since training may have set fields of it (the mask token, a new tower).

    Raises:
        ValueError: an adapter that is no plain LoRA, or factors that do not fit the base (all listed).
    """

    def __init__(
        self,
        folder: Path,
        base: SourceWeights,
        mask_token_id: int | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.base = folder, base
        config = read_json(folder / ADAPTER_CONFIG)
        self._scale = _scale(folder, config)
        self.factors: dict[str, tuple[StoredTensor, StoredTensor]] = {}
        whole = self._sort(_adapter_tensors(folder), config)
        self.stored = base.stored | whole
        self._scales = {name: scale for name, scale in base._scales.items() if name not in whole}
        self.is_tied = base.is_tied
        self.source = base.source
        if (folder / "config.json").is_file():
            own = read_source(folder, mask_token_id, overrides).config
            self.source = dataclasses.replace(base.source, config=own)
            self.source.config.tie_word_embeddings = self.is_tied

    def read(self, name: str, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
        """One weight, merged where the adapter changes it."""
        if name not in self.factors:
            is_whole = name in self.stored and self.stored[name] is not self.base.stored.get(name)
            return read(self.stored[name], device, dtype) if is_whole else self.base.read(name, dtype, device)
        a, b = (read(factor, device, torch.float32) for factor in self.factors[name])
        weight = self.base.read(name, torch.float32, device)
        return weight.add_(b @ a, alpha=self._scale).to(dtype)

    def _sort(self, tensors: list[StoredTensor], config: dict[str, Any]) -> dict[str, StoredTensor]:
        """Fill `factors`; returns the tensors that are whole weights. Lists everything that does not fit the base."""
        halves: dict[str, dict[str, StoredTensor]] = {}
        whole: dict[str, StoredTensor] = {}
        for tensor in tensors:
            module, is_factor, factor = tensor.name.removeprefix(_PREFIX).partition(".lora_")
            name = self._ours(f"{module}.weight" if is_factor else module)
            if is_factor:
                halves.setdefault(name, {})[factor] = tensor
            else:
                whole[name] = tensor
        saved = tuple(config.get("modules_to_save") or ())
        problems = [f"{name}: no module of modules_to_save" for name in whole if not _is_inside(name, saved)]
        if self.base.is_tied and HEAD in {*whole, *halves}:
            problems.append(f"{HEAD}: the base's head is tied to its embedding")
        rank = int(config["r"])
        for name, pair in halves.items():
            problem = _misfit(pair, rank, self.base.stored.get(name))
            if problem:
                problems.append(f"{name}: {problem}")
            else:
                self.factors[name] = pair["A.weight"], pair["B.weight"]
        if not halves:
            problems.append("it holds no LoRA factors")
        if problems:
            listing = "\n  ".join([*problems[:50], *([f"and {len(problems) - 50} more"] if len(problems) > 50 else [])])
            raise ValueError(f"{self.folder}: the adapter does not fit its base {self.base.folder}:\n  {listing}")
        return whole

    def _ours(self, name: str) -> str:
        """Adapters that were trained on transformers' own class bear its names."""
        is_ours = name.startswith(("encoder.", "diffusion_head."))
        return name if is_ours else to_ours(name, self.base.source.layout)

    @property
    def config(self) -> TriModeConfig:
        return self.source.config


def is_based_on(weights: SourceWeights, folder: Path) -> bool:
    """Whether these are the merged weights of an adapter whose base, or base's base, is this model folder."""
    if not isinstance(weights, MergedWeights):
        return False
    return weights.base.folder == folder or is_based_on(weights.base, folder)


def _adapter_tensors(folder: Path) -> list[StoredTensor]:
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        hint = "; pickled adapters are never opened" if is_match(folder, PICKLE_PATTERNS) else ""
        raise ValueError(f"{folder}: no {ADAPTER_WEIGHTS}{hint}")
    return scan_file(path)


def _scale(folder: Path, config: dict[str, Any]) -> float:
    """What B A is multiplied by; refuses an adapter whose factors mean something else."""
    found = [name for name in _REFUSED if config.get(name)]
    if str(config.get("init_lora_weights")).startswith(_CHANGES_BASE):
        found.append(f"init_lora_weights {config['init_lora_weights']!r}")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or found:
        what = ", ".join(found) or f"peft_type {config.get('peft_type')!r}, bias {config.get('bias', 'none')!r}"
        raise ValueError(
            f"{folder}: only plain LoRA can be merged here, this adapter has {what}; merge it with PEFT "
            "(PeftModel.from_pretrained(...).merge_and_unload()) and load the result"
        )
    rank = int(config["r"])
    return float(config.get("lora_alpha", rank)) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _misfit(pair: dict[str, StoredTensor], rank: int, weight: StoredTensor | None) -> str | None:
    if pair.keys() != {"A.weight", "B.weight"}:
        return f"has {', '.join(f'lora_{factor}' for factor in sorted(pair))}, expected lora_A.weight and lora_B.weight"
    if weight is None or len(weight.shape) != 2:
        return "no such layer"
    rows, columns = weight.shape
    shapes = pair["A.weight"].shape, pair["B.weight"].shape
    if shapes != ((rank, columns), (rows, rank)):
        return f"lora_A {list(shapes[0])} and lora_B {list(shapes[1])} do not fit a weight of [{rows}, {columns}]"
    return None


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(f".{module}." in f".{name}" for module in modules)
