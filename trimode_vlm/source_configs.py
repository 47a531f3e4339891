"""config.json of other models -> TriModeConfig: released NLD, Ministral-3, and Llama-like language models.

What our backbone cannot hold is refused here, by name, before a weight is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.activations import ACT2FN

from .config import TriModeConfig, TriModeTextConfig
from .json_files import read_json
from .spare_tokens import choose_image_tokens, choose_mask_token, read_special_tokens

OUR_TYPES = (TriModeTextConfig.model_type, TriModeConfig.model_type)
TEXT_TYPES = ("llama", "mistral", "ministral3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_REASONS = {
    "qwen2": "its attention has biases",
    "qwen3": "it normalises queries and keys",
    "gemma3": "it normalises queries and keys and slides its window",
    "phi3": "it fuses its projections",
    "ministral": "it alternates sliding-window layers",
    "mixtral": "it is a mixture of experts",
}
TEXT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
PROJECTOR_FIELDS = ("projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size")
_FILE_KEYS = (
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "tie_word_embeddings",
    "_name_or_path",
)


@dataclass(frozen=True)
class Source:
    """What a folder's config.json says, in our terms.

    `layout` names the weight layout (see key_maps). `declared_tied` is what the file says about a tied head, None where
    it says nothing: transformers' default is no statement, and has silently tied heads that were trained apart.
    """

    config: TriModeConfig
    layout: str
    declared_tied: bool | None
    dtype: torch.dtype | None
    fp8_block: tuple[int, int] | None


def read_source(folder: Path, mask_token_id: int | None = None, overrides: Mapping[str, Any] | None = None) -> Source:
    """Read a model folder's config.json; `overrides` set single fields of the result.

    Raises:
        ValueError: no config.json, an unknown kind of model, or a part that our backbone cannot hold.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json, so this is not a model folder")
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type in OUR_TYPES:
        layout, fields = "trimode", {k: v for k, v in raw.items() if k not in _FILE_KEYS}
        _check_flags(raw)
    elif model_type == "mistral3":
        layout, fields = "mistral3", _from_mistral3(raw)
    elif model_type in TEXT_TYPES:
        layout, fields = "causal_lm", _from_text(CONFIG_MAPPING[model_type].from_dict(_architecture(raw)))
    else:
        reason = f" ({_REASONS[model_type]})" if model_type in _REASONS else ""
        known = ", ".join((*OUR_TYPES, "mistral3", *TEXT_TYPES))
        raise ValueError(f"{path}: model_type {model_type!r} cannot be loaded{reason}; known: {known}")
    if layout != "trimode":
        fields |= _special_ids(folder, layout, model_type, fields)
    if mask_token_id is not None:
        fields["mask_token_id"] = mask_token_id
    fields |= _checked_overrides(overrides or {})
    config_class = TriModeTextConfig if fields.get("vision_config") is None else TriModeConfig
    config = config_class(**fields)
    _check_rope(config.rope_parameters or {}, path)
    return Source(config, layout, _declared_tied(raw), _declared_dtype(raw), _fp8_block(raw, path))


def _from_text(text: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a Llama, Mistral or Ministral-3 text config; transformers fills in what the file leaves out."""
    _check_flags(text.to_dict())
    fields = {name: getattr(text, name) for name in TEXT_FIELDS}
    rope = dict(fields["rope_parameters"])
    rope.pop("type", None)
    fields["rope_parameters"] = rope
    window = getattr(text, "sliding_window", None)
    if window is not None and window < text.max_position_embeddings:
        warnings.warn(
            f"sliding_window {window} is smaller than max_position_embeddings {text.max_position_embeddings}: this "
            f"backbone attends to everything, which is the same up to {window} tokens only, so "
            f"max_position_embeddings becomes {window}",
            stacklevel=4,
        )
        fields["max_position_embeddings"] = window
    return fields


def _from_mistral3(raw: dict[str, Any]) -> dict[str, Any]:
    full = CONFIG_MAPPING["mistral3"].from_dict(_architecture(raw))
    if full.text_config.model_type not in TEXT_TYPES:
        raise ValueError(f"text_config.model_type {full.text_config.model_type!r} cannot be loaded")
    if full.vision_config.model_type != "pixtral":
        raise ValueError(f"vision_config.model_type {full.vision_config.model_type!r} cannot be loaded; known: pixtral")
    layers = full.vision_feature_layer
    if isinstance(layers, list):
        if len(layers) != 1:
            raise ValueError(f"vision_feature_layer {layers} joins several layers; one can be held")
        layers = layers[0]
    fields = _from_text(full.text_config) | {name: getattr(full, name) for name in PROJECTOR_FIELDS}
    vision = full.vision_config.to_dict()
    return fields | {"vision_config": vision, "vision_feature_layer": layers, "image_token_id": full.image_token_index}


def _special_ids(folder: Path, layout: str, model_type: str, fields: dict[str, Any]) -> dict[str, int | None]:
    """Mask and image ids of a model that has no mask token yet."""
    special = read_special_tokens(folder, fields["vocab_size"])
    spare = special.spare([fields[f"{name}_token_id"] for name in ("bos", "eos", "pad")])
    is_ministral = layout == "mistral3" or model_type == "ministral3"
    mask = choose_mask_token(special, spare, is_ministral, fields["vocab_size"])
    spare = [i for i in spare if i != mask]
    images = choose_image_tokens(special, spare, fields.get("image_token_id"), fields["vocab_size"])
    return {"mask_token_id": mask, **images}


def _check_flags(text: Mapping[str, Any]) -> None:
    for flag, what in (
        ("attention_bias", "attention biases"),
        ("mlp_bias", "MLP biases"),
        ("use_qk_norm", "normalised queries and keys"),
    ):
        if text.get(flag):
            raise ValueError(f"{flag} is true: {what} cannot be held by this backbone")
    if "sliding_attention" in (text.get("layer_types") or []):
        raise ValueError("layer_types lists sliding_attention: sliding-window layers cannot be held by this backbone")
    if (text.get("hidden_act") or "silu") not in ACT2FN:
        raise ValueError(f"hidden_act {text['hidden_act']!r} is not known to transformers")


def _check_rope(rope: Mapping[str, Any], path: Path) -> None:
    rope_type = rope.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{path}: rope_type {rope_type!r} cannot be held; known: {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor {rope['partial_rotary_factor']} cannot be held (only 1)")


def _architecture(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in ("auto_map", "quantization_config")}


def _checked_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    known = [field.name for field in dataclasses.fields(TriModeConfig)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"unknown config field {name!r}" + (f"; nearest: {near[0]!r}" if near else ""))
    return dict(overrides)


def _declared_tied(raw: dict[str, Any]) -> bool | None:
    """True when either level says so: files of tied models may carry the key in `text_config` alone."""
    levels = [raw, raw.get("text_config") or {}]
    said = [bool(level["tie_word_embeddings"]) for level in levels if level.get("tie_word_embeddings") is not None]
    return any(said) if said else None


def _declared_dtype(raw: dict[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype") or (raw.get("text_config") or {}).get("dtype")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _fp8_block(raw: dict[str, Any], path: Path) -> tuple[int, int] | None:
    quantization = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if not quantization:
        return None
    if quantization.get("quant_method") != "fp8":
        raise ValueError(
            f"{path}: weights quantised by {quantization.get('quant_method')!r} cannot be loaded; known: 'fp8'"
        )
    block = quantization.get("weight_block_size")
    return (int(block[0]), int(block[1])) if block else None
