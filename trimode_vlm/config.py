"""The architecture of a tri-mode model: one transformers config, and presets for the known sizes.

Keys are those of the released checkpoints: the text model's numbers lie flat at the root, the vision tower's in
`vision_config`. Source: the public config.json files of Nemotron-Labs-Diffusion and Ministral-3.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PixtralVisionConfig, PreTrainedConfig


@strict
class TimmVisionConfig(PreTrainedConfig):
    """A vision tower taken from timm by name; `hidden_size` 0 means: read it from the tower."""

    model_type = "timm_encoder"

    architecture: str = "vit_tiny_patch16_224"
    hidden_size: int = 0
    patch_size: int = 16
    image_size: int = 224
    num_channels: int = 3


VISION_CONFIGS = {"pixtral": PixtralVisionConfig, "timm_encoder": TimmVisionConfig}


@strict
class TriModeConfig(PreTrainedConfig):
    """Config of the vision-language model (`nemotron_labs_diffusion_vlm`); without `vision_config` it is text only.

    `rope_parameters` is transformers' dictionary (any `rope_type` of its ROPE_INIT_FUNCTIONS, or "default") plus
    `llama_4_scaling_beta`, the query scale of Ministral-3. `block_size` keeps its released name in the file; the code
    says `block_length`.
    """

    model_type = "nemotron_labs_diffusion_vlm"
    ignore_keys_at_rope_validation = {"llama_4_scaling_beta", "max_position_embeddings", "type"}

    vocab_size: int = 131073
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 11
    pad_token_id: int | None = None
    mask_token_id: int | None = 100
    block_size: int = 32
    # PixtralVisionConfig, TimmVisionConfig or None; a dict on its way in.
    vision_config: Any = None
    image_token_id: int | None = 19
    image_start_token_id: int | None = 18
    image_break_token_id: int | None = 20
    image_end_token_id: int | None = 21
    spatial_merge_size: int = 2
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = False
    vision_feature_layer: int = -1

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rope_parameters is None and not kwargs.get("rope_scaling") and "rope_theta" not in kwargs:
            self.rope_parameters = dict(RELEASED_ROPE)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if isinstance(self.vision_config, dict):
            vision = dict(self.vision_config)
            vision_type = vision.pop("model_type", "pixtral")
            if vision_type not in VISION_CONFIGS:
                raise ValueError(f"vision_config.model_type is {vision_type!r}; known: {', '.join(VISION_CONFIGS)}")
            self.vision_config = VISION_CONFIGS[vision_type](**vision)
        super().__post_init__(**kwargs)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )

    @property
    def block_length(self) -> int:
        """Tokens per diffusion block that the checkpoint was trained with."""
        return self.block_size

    @property
    def never_sampled_ids(self) -> list[int]:
        """Ids that no decoder may emit: the mask, the tokens that stand for images, and padding and beginning."""
        return self.banned_ids()

    def banned_ids(self, end_token_ids: Collection[int] = ()) -> list[int]:
        """`never_sampled_ids` where answers may end with `end_token_ids` beside the model's own end tokens.

        In many models the pad or bos token is an end token too; then it may be sampled.
        """
        images = (
            []
            if self.vision_config is None
            else [self.image_token_id, self.image_start_token_id, self.image_break_token_id, self.image_end_token_id]
        )
        own_ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        fillers = {self.pad_token_id, self.bos_token_id} - {*own_ends, *end_token_ids}
        ids = {self.mask_token_id, *images, *fillers}
        return sorted(i for i in ids if i is not None and 0 <= i < self.vocab_size)


@strict
class TriModeTextConfig(TriModeConfig):
    """Config of the text-only model (`nemotron_labs_diffusion`)."""

    model_type = "nemotron_labs_diffusion"

    vocab_size: int = 131072


RELEASED_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_NANO_ROPE = RELEASED_ROPE | {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
_PIXTRAL = {"model_type": "pixtral", "patch_size": 14, "image_size": 1540, "hidden_act": "silu"}
_NANO_VISION = _PIXTRAL | {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 448,
}

PRESETS: dict[str, dict[str, Any]] = {
    "nano": dict(
        vocab_size=640,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters=_NANO_ROPE,
        vision_config=_NANO_VISION,
    ),
    "3b": dict(hidden_size=3072, intermediate_size=9216, num_hidden_layers=26, head_dim=128, vision_config=_PIXTRAL),
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=34, head_dim=128, vision_config=_PIXTRAL),
    "14b": dict(
        hidden_size=5120,
        intermediate_size=16384,
        num_hidden_layers=40,
        head_dim=128,
        vision_config=_PIXTRAL,
        rope_parameters=RELEASED_ROPE | {"rope_theta": 1e9},
    ),
}


def preset(name: str, **overrides: Any) -> TriModeConfig:
    """Return the config of a known size; `overrides` replace single fields (`vision_config=None`: text only).

    Raises:
        ValueError: the name is not a preset.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    fields = {**PRESETS[name], **overrides}
    fields = {k: dict(v) if isinstance(v, dict) else v for k, v in fields.items()}
    config_class = TriModeConfig if fields.get("vision_config") else TriModeTextConfig
    return config_class(**fields)


AutoConfig.register(TriModeConfig.model_type, TriModeConfig)
AutoConfig.register(TriModeTextConfig.model_type, TriModeTextConfig)
