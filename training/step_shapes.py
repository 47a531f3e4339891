"""What a training step runs through, by shape alone: tokens of both streams, linear layers, parameters of each part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PixtralVisionConfig

from trimode_vlm.config import TriModeConfig
from trimode_vlm.training.lora import LoraSettings, match_targets
from trimode_vlm.training.parts import PARTS
from trimode_vlm.training.timm_cost import measure_tower

NOISY_STREAMS = ("none", "response", "text", "all")
PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = ("none", "optimizer", "all")


@dataclass(frozen=True, kw_only=True)
class EstimateInputs:
    """What an estimate needs to know of a run.

    sequence_tokens: clean tokens of a row, of which vision_tokens are image features (images_per_row images of equal
    size) and response_share are answers; the answer is taken as one, at the end. padding_tokens: end tokens that fill
    up its last block in the noisy half, as trained as the answer (response_padding). rows: of a micro-batch on one GPU;
    micro_batches: of a step on one GPU. noisy_stream: "none" is AR training. mask_share: of the answer tokens, masked.
    precision: of weights and activations. zero_stage: None is training without DeepSpeed, in 16 bits by autocast over
    fp32 weights. offload: "optimizer" states or "all" to the CPU. max_live_params: DeepSpeed's
    stage3_max_live_parameters. kernels: "fused" (CUDA) or "composite" (CPU) norms, which keep other tensors.
    """

    sequence_tokens: int = 4096
    vision_tokens: int = 0
    images_per_row: int = 1
    response_share: float = 0.25
    padding_tokens: int = 0
    rows: int = 1
    micro_batches: int = 1
    noisy_stream: str = "response"
    complementary_masks: bool = False
    block_length: int = 32
    mask_share: float = 0.5
    chunk_tokens: int = 2048
    precision: str = "bf16"
    zero_stage: int | None = 2
    offload: str = "none"
    gradient_checkpointing: bool = True
    train: tuple[str, ...] = ("text", "projector")
    lora: LoraSettings | None = None
    max_live_params: int = 1_000_000_000
    kernels: str = "fused"

    def __post_init__(self) -> None:
        for name, known in (
            ("noisy_stream", NOISY_STREAMS),
            ("precision", PRECISIONS),
            ("offload", OFFLOADS),
            ("zero_stage", (None, 0, 1, 2, 3)),
            ("kernels", ("fused", "composite")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
        for name in ("sequence_tokens", "images_per_row", "rows", "micro_batches", "block_length", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if not 0 < self.response_share <= 1 or not 0 <= self.mask_share <= 1:
            raise ValueError("response_share must be above 0 and at most 1, mask_share between 0 and 1")
        if self.vision_tokens + self.response_tokens > self.sequence_tokens:
            raise ValueError(
                f"{self.vision_tokens} vision tokens and {self.response_tokens} answer tokens do not fit "
                f"{self.sequence_tokens} tokens"
            )
        if self.offload != "none" and not self.zero_stage:
            raise ValueError(f"offload {self.offload!r} needs a zero_stage of 1 to 3")
        if self.offload == "all" and self.zero_stage != 3:
            raise ValueError("offload 'all' needs zero_stage 3")

    @property
    def is_4bit(self) -> bool:
        return self.lora is not None and self.lora.quantize == "4bit"

    @property
    def weight_bytes(self) -> int:
        """Of a weight, and of a number of the residual stream: autocast keeps both in fp32."""
        return 2 if self.precision != "fp32" and (self.zero_stage is not None or self.is_4bit) else 4

    @property
    def response_tokens(self) -> int:
        return max(1, round(self.response_share * self.sequence_tokens))

    @property
    def noisy_tokens(self) -> int:
        """Tokens of a row's noisy half, or halves where masks are complementary."""
        prompt = {"text": self.sequence_tokens - self.vision_tokens, "all": self.sequence_tokens}
        if self.noisy_stream == "none":
            return 0
        copies = 2 if self.complementary_masks else 1
        others = prompt.get(self.noisy_stream, self.response_tokens) - self.response_tokens
        return others + copies * (self.response_tokens + self.padding_tokens)

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, noisy and clean."""
        return self.sequence_tokens + self.noisy_tokens

    @property
    def labelled_tokens(self) -> int:
        """Positions of a micro-batch that reach the head: every answer token once, and what is masked."""
        share = 0.0 if not self.noisy_tokens else 1.0 if self.complementary_masks else self.mask_share
        answers, padding = self.rows * self.response_tokens, self.rows * self.padding_tokens
        return answers + round(share * (answers + padding))

    @property
    def image_copies(self) -> int:
        """How often the tower sees an image: its tokens stand in both halves of the symmetric stream."""
        return 0 if not self.vision_tokens else 2 if self.noisy_stream == "all" else 1

    @property
    def num_images(self) -> int:
        """Of a micro-batch, as often as the tower sees them."""
        return self.rows * self.images_per_row * self.image_copies

    @property
    def num_features(self) -> int:
        """Image features of a micro-batch, as often as they are made."""
        return self.rows * self.vision_tokens * self.image_copies


@dataclass(frozen=True)
class Group:
    """Linear layers that read the same tensor, of `width` features: name -> number of outputs."""

    width: int
    layers: dict[str, int]

    @property
    def params(self) -> int:
        return self.width * sum(self.layers.values())


def text_layer(config: TriModeConfig, index: int) -> list[Group]:
    """The linear layers of a decoder layer, in order: queries, keys and values; output; gate and up; down."""
    assert config.head_dim is not None
    name = f"encoder.layers.{index}"
    D, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    return _decoder_layer(f"{name}.self_attn", f"{name}.mlp", D, inner, heads, kv_heads)


def vision_layer(config: PixtralVisionConfig, index: int) -> list[Group]:
    """The same for a layer of the Pixtral tower."""
    name = f"encoder.vision_tower.transformer.layers.{index}"
    D = config.hidden_size
    return _decoder_layer(f"{name}.attention", f"{name}.feed_forward", D, config.intermediate_size, D, D)


def _decoder_layer(attention: str, mlp: str, D: int, inner: int, heads: int, kv_heads: int) -> list[Group]:
    sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    return [
        Group(D, {f"{attention}.{leaf}": size for leaf, size in sizes.items()}),
        Group(heads, {f"{attention}.o_proj": D}),
        Group(D, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}),
        Group(inner, {f"{mlp}.down_proj": D}),
    ]


def projector_layers(config: TriModeConfig, vision_width: int) -> list[Group]:
    """The linear layers of the projector, in order."""
    name, D = "encoder.multi_modal_projector", config.hidden_size
    return [
        Group(vision_width * config.spatial_merge_size**2, {f"{name}.patch_merger.merging_layer": vision_width}),
        Group(vision_width, {f"{name}.linear_1": D}),
        Group(D, {f"{name}.linear_2": D}),
    ]


def head_layer(config: TriModeConfig) -> Group:
    return Group(config.hidden_size, {"diffusion_head": config.vocab_size})


def vision_width(config: TriModeConfig) -> int:
    vision = config.vision_config
    return vision.hidden_size if isinstance(vision, PixtralVisionConfig) else measure_tower(vision).width


def layers_run(config: TriModeConfig) -> int:
    """How many of the Pixtral tower's layers a forward runs."""
    layer = config.vision_feature_layer
    return layer if layer >= 0 else config.vision_config.num_hidden_layers + 1 + layer


def groups(config: TriModeConfig) -> Iterator[Group]:
    """Every group of linear layers of a model, but those of a timm tower."""
    vision = config.vision_config
    if isinstance(vision, PixtralVisionConfig):
        for i in range(vision.num_hidden_layers):
            yield from vision_layer(vision, i)
    if vision is not None:
        yield from projector_layers(config, vision_width(config))
    for i in range(config.num_hidden_layers):
        yield from text_layer(config, i)
    yield head_layer(config)


def count_parameters(config: TriModeConfig) -> dict[str, int]:
    """Parameters of each part; a tied head counts once."""
    D, V, vision = config.hidden_size, config.vocab_size, config.vision_config
    layers = config.num_hidden_layers
    text = sum(group.params for group in text_layer(config, 0)) * layers + (2 * layers + 1) * D
    counts = {"text": text + V * D * (1 if config.tie_word_embeddings else 2)}
    if vision is None:
        return counts
    width = vision_width(config)
    if isinstance(vision, PixtralVisionConfig):
        per_layer = sum(group.params for group in vision_layer(vision, 0)) + 2 * width
        counts["vision"] = per_layer * vision.num_hidden_layers + patch_weights(vision) + width
    else:
        counts["vision"] = measure_tower(vision).params
    biases = 2 * D if config.multimodal_projector_bias else 0
    counts["projector"] = sum(group.params for group in projector_layers(config, width)) + width + biases
    return counts


def patch_weights(vision: PixtralVisionConfig) -> int:
    """Weights of the convolution that turns a patch of pixels into a vector."""
    assert isinstance(vision.patch_size, int)
    return vision.num_channels * vision.patch_size**2 * vision.hidden_size


def lora_targets(inputs: EstimateInputs, config: TriModeConfig) -> dict[str, int]:
    """The layers that carry LoRA, by name, with the parameters of their factors."""
    if inputs.lora is None:
        return {}
    sizes = {name: (group.width, out) for group in groups(config) for name, out in group.layers.items()}
    names = match_targets(list(sizes), inputs.lora, config.tie_word_embeddings)
    return {name: inputs.lora.rank * sum(sizes[name]) for name in names}


def whole_parts(inputs: EstimateInputs, config: TriModeConfig) -> tuple[str, ...]:
    """The parts that train whole: those of `train` that the model has, the text part not beside LoRA."""
    has = PARTS if config.vision_config is not None else ("text",)
    return tuple(part for part in inputs.train if part in has and not (inputs.lora and part == "text"))
