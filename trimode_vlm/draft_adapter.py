"""The draft adapter: a LoRA on the o_proj layers that drafts of self-speculation use and nothing else does.

It goes through a draft's forward as an argument, one function per layer; the model's layers hold and know nothing of
it. So other forwards, threads and whatever comes after an exception run on the bare weights.

On disk it is a PEFT folder. Source of the layout: facts about the released `linear_spec_lora/` folders, keys
`base_model.model.encoder.layers.{i}.self_attn.o_proj.lora_{A,B}.weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .json_files import read_json
from .weight_files import PICKLE_PATTERNS, StoredTensor, is_match, read, scan_file

ADAPTER_FOLDER = "linear_spec_lora"
_PREFIX = "base_model.model."
_O_PROJ = re.compile(r"encoder\.layers\.(\d+)\.self_attn\.o_proj")

Delta = Callable[[Tensor], Tensor]
"""What a layer adds to the output of its o_proj, given the input of that: [..., H K] -> [..., D]."""
Deltas = Sequence[Delta | None]
"""One for each layer; None where there is nothing to add."""


@dataclass(frozen=True)
class DraftAdapter:
    """LoRA factors by module name: output += scale * B(A(x)), A [rank, in], B [out, rank].

    Assign it to a model's `draft_adapter`, or None to draft without.
    """

    folder: Path
    rank: int
    scale: float
    factors: dict[str, tuple[Tensor, Tensor]]
    _placed: dict[tuple[torch.device, torch.dtype], Deltas] = field(default_factory=dict, repr=False, compare=False)

    def deltas(self, model: Any) -> Deltas:
        """What the layers of `model` add, on its device and in its dtype; copied there once, the scale in B."""
        key = (model.device, model.dtype)
        if key not in self._placed:
            made: list[Delta | None] = [None] * model.config.num_hidden_layers
            with torch.inference_mode(False):  # they outlive the request that asks first
                for name, (a, b) in self.factors.items():
                    made[layer_index(name)] = partial(_low_rank, a=a.to(*key), b=(b.float() * self.scale).to(*key))
            self._placed[key] = made
        return self._placed[key]


def _low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, a), b)


def layer_index(name: str) -> int:
    """The layer whose o_proj a module name means."""
    found = _O_PROJ.fullmatch(name)
    assert found is not None, name
    return int(found[1])


def find_adapter(adapter: str | Path, model_folder: Path) -> Path | None:
    """The adapter's folder. "auto": `linear_spec_lora/` beside the weights, None where there is none.

    Raises:
        ValueError: a folder was named and is not an adapter.
    """
    if adapter == "auto":
        beside = model_folder / ADAPTER_FOLDER
        return beside if (beside / "adapter_config.json").is_file() else None
    folder = Path(adapter)
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder}: no adapter_config.json, so this is not a PEFT adapter folder")
    return folder


def read_adapter(folder: Path, model: nn.Module) -> DraftAdapter:
    """Read a LoRA folder and check every factor against the model's layers.

    Raises:
        ValueError: not a plain LoRA, pickled weights, or factors that match no layer or do not fit it (all listed).
    """
    config = read_json(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("bias", "none") != "none":
        raise ValueError(f"{folder}: only plain LoRA without DoRA and biases can be a draft adapter")
    for option in ("rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(option):
            raise ValueError(f"{folder}: {option} is not supported in a draft adapter")
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        hint = "; pickled adapters are never opened" if is_match(folder, PICKLE_PATTERNS) else ""
        raise ValueError(f"{folder}: no adapter_model.safetensors{hint}")
    rank, alpha = config.get("r"), config.get("lora_alpha", config.get("r"))
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)):
        where = folder / "adapter_config.json"
        raise ValueError(f"{where}: r and lora_alpha must be numbers, found {rank!r}, {alpha!r}")
    pairs, problems = _pairs({t.name: t for t in scan_file(path)}, rank, model)
    if problems or not pairs:
        listing = "\n  ".join(problems) or "it holds no LoRA factors"
        raise ValueError(f"{folder}: the adapter does not fit the model:\n  {listing}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    factors = {name: (read(a), read(b)) for name, (a, b) in pairs.items()}
    return DraftAdapter(folder, rank, scale, factors)


def _pairs(
    stored: dict[str, StoredTensor], rank: int, model: nn.Module
) -> tuple[dict[str, tuple[StoredTensor, StoredTensor]], list[str]]:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    pairs, problems = {}, []
    modules = sorted({name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in stored})
    for name in modules:
        a, b = (stored.get(f"{_PREFIX}{name}.lora_{factor}.weight") for factor in "AB")
        if name in linears and not _O_PROJ.fullmatch(name):
            problems.append(f"{name}: a draft adapter goes on self_attn.o_proj of the text layers only")
            continue
        if a is None or b is None or name not in linears:
            problems.append(f"{name}: " + ("no such layer" if name not in linears else "lora_A or lora_B is missing"))
            continue
        layer = linears[name]
        expected = (rank, layer.in_features), (layer.out_features, rank)
        if (a.shape, b.shape) != expected:
            problems.append(
                f"{name}: lora_A {list(a.shape)} and lora_B {list(b.shape)}, "
                f"expected {list(expected[0])} and {list(expected[1])}"
            )
        pairs[name] = a, b
    return pairs, problems
