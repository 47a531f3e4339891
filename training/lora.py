"""LoRA by PEFT: settings, the layers it goes on, training other parts whole beside it, saving and merging."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimode_vlm.checkpoints import NANO
from trimode_vlm.quantize import quantize_4bit
from trimode_vlm.training.parts import MODULES, PARTS, check_parts, hold_statistics, part_of
from trimode_vlm.training.settings import check_range

TEXT_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA: each target layer W becomes W + alpha / rank * B A, and only A and B train.

    parts: where targets are looked for. targets: the last name of a layer ("q_proj", in every layer of `parts`), or its
    whole name from the start, * for one step of it ("encoder.layers.*.self_attn.q_proj").
    quantize: "4bit" keeps the frozen text layers in 4 bits (QLoRA).
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = TEXT_LINEARS
    parts: tuple[str, ...] = ("text",)
    quantize: str | None = None

    def __post_init__(self) -> None:
        check_range(self, 1, math.inf, "rank")
        check_range(self, 0, math.inf, "alpha", without_low=True)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")
        if not self.targets:
            raise ValueError("targets must name at least one layer")
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise ValueError(f"parts must be among {', '.join(PARTS)}, got {unknown[0]!r}")
        if self.quantize not in (None, "4bit"):
            raise ValueError(f"quantize must be '4bit' or left out, got {self.quantize!r}")


def lora_layers(model: nn.Module, lora: LoraSettings) -> list[str]:
    """The names of the linear layers that LoRA goes on.

    Raises:
        ValueError: a target that matches nothing in `lora.parts`, with what is near; a tied head.
    """
    check_parts(model, lora.parts, "lora.parts")
    return match_targets(_linears(model), lora, getattr(model.config, "tie_word_embeddings", False))


def match_targets(linears: Sequence[str], lora: LoraSettings, is_tied: bool = False) -> list[str]:
    """Those of these names that `lora` means; see `lora_layers`."""
    chosen = set()
    for target in lora.targets:
        found = [name for name in linears if _is_match(target, name)]
        inside = [name for name in found if part_of(name) in lora.parts]
        if not inside:
            raise ValueError(_nothing_matched(target, found, linears, lora.parts))
        chosen |= set(inside)
    if "diffusion_head" in chosen and is_tied:
        raise ValueError("lora.targets: diffusion_head is tied to the embedding in this model, so it cannot take LoRA")
    return [name for name in linears if name in chosen]


def add_lora(model: Any, lora: LoraSettings, train: Collection[str] = ()) -> Any:
    """Put LoRA on a model, in place; returns the PEFT model, where LoRA and the parts of `train` alone learn.

    The parts of `train` (such as the projector) train whole beside it; PEFT saves them with the adapter
    (`modules_to_save`) and keeps the frozen originals.

    Raises:
        ValueError: as `lora_layers`, or a part that would train both whole and by LoRA.
    """
    from peft import LoraConfig, get_peft_model

    layers = lora_layers(model, lora)
    if train:
        check_parts(model, train, "train")
    if both := [part for part in train if part in {*lora.parts, "text"}]:
        raise ValueError(f"train: {both[0]} cannot train whole beside LoRA; take it out, or leave LoRA out")
    if lora.quantize is not None and not getattr(model, "is_loaded_in_4bit", False):
        quantize_4bit(model)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=_pattern(layers, _linears(model)),
        modules_to_save=[MODULES[part] for part in train] or None,
    )
    wrapped = get_peft_model(model, config)
    hold_statistics(wrapped)
    return wrapped


def merge(model: Any) -> Any:
    """The plain model under its released names, with the adapter in its weights; a model without one stays as it is.

    Raises:
        ValueError: the base is quantised: its own rounding would stay in the result.
    """
    if not hasattr(model, "merge_and_unload"):
        return model
    base = model.get_base_model()
    if getattr(base, "is_loaded_in_4bit", False):
        raise ValueError(
            "a 4-bit base takes no merge: save the adapter and merge it into the full weights "
            "(trimode-vlm convert ADAPTER OUT)"
        )
    return model.merge_and_unload()


def save_adapter(model: Any, folder: Path, base: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter as PEFT does, with the name of its base and our config.json beside it.

    base: what `trimode_vlm.load` was given; a folder is written as an absolute path. state_dict: the gathered weights,
    under the PEFT model's names, where ZeRO-3 has cut them up.
    """
    is_folder = str(base) != NANO and Path(base).expanduser().is_dir()
    name = str(Path(base).expanduser().absolute()) if is_folder else str(base)
    for config in model.peft_config.values():
        config.base_model_name_or_path = name
    card = Path(folder) / "README.md"
    had_card = card.exists()
    gathered = None if state_dict is None else dict(state_dict)
    model.save_pretrained(folder, state_dict=gathered, save_embedding_layers=False)
    base_model = model.get_base_model()
    base_model.config.save_pretrained(folder)
    base_model.generation_config.save_pretrained(folder)
    if not had_card:
        card.unlink(missing_ok=True)  # PEFT's template, full of gaps


def _linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def _is_match(target: str, name: str) -> bool:
    """Whether a target names a layer: by its last name, or by its whole name, where * is one step of it."""
    if "." not in target and target != "diffusion_head":
        return name.rpartition(".")[2] == target
    return re.fullmatch(re.escape(target).replace(r"\*", r"[^.]+"), name) is not None


def _pattern(layers: Collection[str], linears: Collection[str]) -> str:
    """A regular expression for exactly these layers; PEFT matches it from start to end of a name, a list by its end."""
    families: dict[str, list[str]] = {}
    for name in linears:
        families.setdefault(re.sub(r"\d+", "0", name), []).append(name)
    parts = []
    for names in families.values():
        chosen = [name for name in names if name in layers]
        if len(names) > 1 and chosen == names:
            parts.append(re.sub(r"\d+", r"\\d+", re.escape(names[0])))
        else:
            parts += [re.escape(name) for name in chosen]
    return "|".join(parts)


def _nothing_matched(target: str, found: Sequence[str], linears: Sequence[str], parts: tuple[str, ...]) -> str:
    where = ", ".join(parts)
    if found:
        others = ", ".join(dict.fromkeys(part_of(name) for name in found))
        return f"lora.targets: {target!r} is found in {others} only ({found[0]}); lora.parts is {where}"
    names = [name for name in linears if part_of(name) in parts]
    known = sorted({name if "." in target else name.rpartition(".")[2] for name in names})
    near = difflib.get_close_matches(target, known, n=1, cutoff=0.3) or known[:1]
    return f"lora.targets: {target!r} matches no linear layer of {where}; near: {', '.join(near) or 'none'}"
