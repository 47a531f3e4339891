"""TriModeConfig -> the config.json of the layout that `convert` writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedConfig,
)

from .config import TriModeConfig
from .source_configs import PROJECTOR_FIELDS, TEXT_FIELDS

TARGETS = ("trimode", "nld", "ministral3", "llama")
_ALIASES = {"mistral3": "ministral3", "nemotron_labs_diffusion": "nld", "ours": "trimode"}
_NLD_ARCHITECTURES = ("NemotronLabsDiffusionModel", "NemotronLabsDiffusionVLMModel")


def target_name(to: str) -> str:
    """The target that a user's word means.

    Raises:
        ValueError: not a known target.
    """
    name = _ALIASES.get(to, to)
    if name not in TARGETS:
        raise ValueError(f"cannot convert to {to!r}; known: {', '.join((*TARGETS, *_ALIASES))}")
    return name


def weight_layout(to: str, config: TriModeConfig) -> str:
    """The names of key_maps that a target's weights bear."""
    if to in ("trimode", "nld"):
        return "trimode"
    return "mistral3" if config.vision_config is not None else "causal_lm"


def target_config(config: TriModeConfig, to: str, dtype: torch.dtype) -> PreTrainedConfig:
    """The config that goes with a target's weights.

    Raises:
        ValueError: the target's architecture cannot hold this model.
    """
    if to == "ministral3":
        target = _ministral3(config)
    elif to == "llama":
        target = _llama(config)
    else:
        target = copy.deepcopy(config)
        has_vision = config.vision_config is not None
        ours = "TriModeVLM" if has_vision else "TriModeTextLM"
        target.architectures = [_NLD_ARCHITECTURES[has_vision] if to == "nld" else ours]
        target.tie_word_embeddings = config.tie_word_embeddings and to == "trimode"
    target.dtype = dtype
    return target


def _ministral3(config: TriModeConfig) -> PreTrainedConfig:
    """Ministral-3 where the query scale is on; without it the text part is Mistral's, which is the same model."""
    fields = _text_fields(config)
    rope = fields["rope_parameters"]
    has_query_scale = bool(rope.get("llama_4_scaling_beta"))
    text_class = Ministral3Config if has_query_scale else MistralConfig
    if has_query_scale:
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    else:
        rope.pop("llama_4_scaling_beta", None)
    text = text_class(**fields, sliding_window=None, tie_word_embeddings=config.tie_word_embeddings)
    if config.vision_config is None:
        text.architectures = ["Ministral3ForCausalLM" if has_query_scale else "MistralForCausalLM"]
        return text
    if not isinstance(config.vision_config, PixtralVisionConfig):
        raise ValueError(f"ministral3 holds a Pixtral tower only, not a {type(config.vision_config).__name__}")
    if config.image_token_id is None:
        raise ValueError("ministral3 needs an image token and this model's config has no image_token_id")
    full = Mistral3Config(
        text_config=text,
        vision_config=copy.deepcopy(config.vision_config),
        image_token_index=config.image_token_id,
        vision_feature_layer=config.vision_feature_layer,
        tie_word_embeddings=config.tie_word_embeddings,
        **{name: getattr(config, name) for name in PROJECTOR_FIELDS},
    )
    full.architectures = ["Mistral3ForConditionalGeneration"]
    return full


def _llama(config: TriModeConfig) -> LlamaConfig:
    fields = _text_fields(config)
    if config.vision_config is not None:
        raise ValueError("llama is text only and this model has a vision tower; convert to ministral3")
    if fields["rope_parameters"].pop("llama_4_scaling_beta", None):
        raise ValueError("llama has no query scale (llama_4_scaling_beta); convert to ministral3")
    target = LlamaConfig(**fields, tie_word_embeddings=config.tie_word_embeddings)
    target.architectures = ["LlamaForCausalLM"]
    return target


def _text_fields(config: TriModeConfig) -> dict[str, Any]:
    return copy.deepcopy({name: getattr(config, name) for name in TEXT_FIELDS})
