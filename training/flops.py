"""Floating-point operations of one micro-batch on one GPU, from shapes.

A linear layer of n inputs and m outputs costs 2nm operations a token forward, as much for the gradient of its input
(needed where anything before it trains) and as much for that of its weight (needed where the weight trains): the 6
operations per parameter and token of Kaplan et al., 2001.08361, told apart so that frozen parts count what they cost.
LoRA adds two thin layers of its own. Attention costs 4 x head width x heads for every pair of tokens that the pattern
allows, and 2.5 times that backward, since the fused kernels compute the scores again (FlashAttention-2, 2307.08691,
section 4.1; torch.utils.flop_counter counts the same). Gradient checkpointing repeats a layer's forward up to the last
tensor that its backward needs (1604.06174; torch stops there), so its last matrix product is not repeated.
A timm tower is measured on one image (timm_cost.py).
Not counted: norms, activations, softmax, the optimizer, all below one percent at real widths.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PixtralVisionConfig

from trimode_vlm.config import TriModeConfig
from trimode_vlm.training.parts import part_of
from trimode_vlm.training.step_shapes import (
    EstimateInputs,
    Group,
    head_layer,
    layers_run,
    lora_targets,
    patch_weights,
    projector_layers,
    text_layer,
    vision_layer,
    vision_width,
    whole_parts,
)
from trimode_vlm.training.timm_cost import TowerCost, measure_tower

ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Flops:
    """Operations forward, backward, and forward once more under gradient checkpointing."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Flops(*(a + b for a, b in pairs))

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True)
class Run:
    """A group of linear layers in a micro-batch.

    whole: its weights train. lora: its layers with LoRA. input_grad: its input needs a gradient. is_last: the last
    group of a layer that is checkpointed.
    """

    group: Group
    num_tokens: int
    whole: bool
    lora: tuple[str, ...]
    input_grad: bool
    is_last: bool = False

    @property
    def learns(self) -> bool:
        """Whether what comes out of it needs a gradient."""
        return self.whole or self.input_grad or bool(self.lora)


@dataclass(frozen=True)
class Layer:
    """A transformer layer in a micro-batch: its four groups in order, the attention after the first."""

    runs: tuple[Run, ...]
    heads_width: int
    num_pairs: int

    @property
    def learns(self) -> bool:
        return self.runs[-1].learns


@dataclass(frozen=True)
class Pass:
    """A micro-batch through the model: vision layers, projector, text layers, head."""

    vision: tuple[Layer, ...]
    projector: tuple[Run, ...]
    text: tuple[Layer, ...]
    head: Run


def walk(inputs: EstimateInputs, config: TriModeConfig) -> Pass:
    """Follow a micro-batch forward, noting from where on gradients are needed."""
    lora, whole = set(lora_targets(inputs, config)), whole_parts(inputs, config)
    learns = False

    def run(group: Group, num_tokens: int, is_last: bool = False) -> Run:
        nonlocal learns
        own = tuple(name for name in group.layers if name in lora)
        is_whole = part_of(next(iter(group.layers))) in whole
        # A part that trains whole has a norm, or an embedding, before its first layer.
        found = Run(group, num_tokens, is_whole, own, learns or is_whole, is_last)
        learns = found.learns
        return found

    def layer(groups: list[Group], num_tokens: int, num_pairs: int) -> Layer:
        runs = [run(group, num_tokens, i == len(groups) - 1) for i, group in enumerate(groups)]
        return Layer(tuple(runs), groups[1].width, num_pairs)

    vision_layers: list[Layer] = []
    projector: list[Run] = []
    vision = config.vision_config
    if vision is not None and inputs.num_images:
        num_patches = inputs.num_features * config.spatial_merge_size**2
        if isinstance(vision, PixtralVisionConfig):
            pairs = num_patches**2 // inputs.num_images
            vision_layers = [layer(vision_layer(vision, i), num_patches, pairs) for i in range(layers_run(config))]
        else:
            learns = "vision" in whole
        projector = [run(group, inputs.num_features) for group in projector_layers(config, vision_width(config))]
    # transformers makes the embeddings' output ask for a gradient when it switches checkpointing on.
    learns = learns or inputs.gradient_checkpointing
    num_tokens, pairs = inputs.rows * inputs.row_tokens, inputs.rows * attention_pairs(inputs)
    text = [layer(text_layer(config, i), num_tokens, pairs) for i in range(config.num_hidden_layers)]
    head = run(head_layer(config), inputs.labelled_tokens)
    return Pass(tuple(vision_layers), tuple(projector), tuple(text), head)


def attention_pairs(inputs: EstimateInputs) -> int:
    """Pairs of one row that the dual-stream pattern allows: clean sees clean before it; a noisy block sees itself, both
    ways, and the clean tokens before it."""
    length, response = inputs.sequence_tokens, inputs.response_tokens
    answer = _block_pairs(length - response, response + inputs.padding_tokens, inputs.block_length)
    noisy = 0
    if inputs.noisy_stream != "none":
        # Prompt tokens have blocks of their own: after the images, or from the start where those stand there too.
        begin = {"text": inputs.vision_tokens, "all": 0}.get(inputs.noisy_stream, length - response)
        noisy = answer + _block_pairs(begin, length - response - begin, inputs.block_length)
        noisy += answer if inputs.complementary_masks else 0
    return length * (length + 1) // 2 + noisy


def _block_pairs(start: int, num_tokens: int, block_length: int) -> int:
    """Pairs of `num_tokens` noisy tokens from position `start` on, cut into blocks."""
    full, rest = divmod(num_tokens, block_length)
    before = full * start + block_length * (full * (full - 1) // 2)
    return block_length * (before + full * block_length) + rest * (start + full * block_length + rest)


def count_flops(
    inputs: EstimateInputs,
    config: TriModeConfig,
    attention_backward: float = ATTENTION_BACKWARD,
    num_pairs: int | None = None,
) -> dict[str, Flops]:
    """Operations of one micro-batch on one GPU: vision, projector, text (linear), attention, head.

    num_pairs: of a row, where a kernel computes more than the pattern allows (a dense mask: row_tokens squared).
    """
    found = walk(inputs, config)
    lora_rank = inputs.lora.rank if inputs.lora else 0
    repeats = inputs.gradient_checkpointing
    parts = {name: Flops() for name in ("vision", "projector", "text", "attention", "head")}
    for layer in found.vision:
        for run in layer.runs:
            parts["vision"] += _linear(run, lora_rank, repeats and layer.learns)
        parts["vision"] += _attention(layer, layer.num_pairs, attention_backward, repeats)
    if found.projector:
        parts["vision"] += _rest_of_tower(inputs, config, found)
    for run in found.projector:
        parts["projector"] += _linear(run, lora_rank, False)
    for layer in found.text:
        for run in layer.runs:
            parts["text"] += _linear(run, lora_rank, repeats and layer.learns)
        pairs = layer.num_pairs if num_pairs is None else inputs.rows * num_pairs
        parts["attention"] += _attention(layer, pairs, attention_backward, repeats)
    is_cut = found.head.num_tokens > inputs.chunk_tokens
    parts["head"] = _linear(found.head, lora_rank, is_cut and found.head.learns)
    return parts


def _linear(run: Run, lora_rank: int, is_repeated: bool) -> Flops:
    """A group of linear layers, with the thin layers of LoRA beside some of them."""
    base = 2.0 * run.group.params * run.num_tokens
    forward, backward = base, base * (run.input_grad + run.whole)
    recompute = base * is_repeated
    for name in run.lora:
        into, out = (2.0 * lora_rank * size * run.num_tokens for size in (run.group.width, run.group.layers[name]))
        forward += into + out
        backward += 2 * out + into * (1 + run.input_grad)
        recompute += (into + out * (not run.is_last)) * is_repeated
    if run.is_last and not run.lora:
        recompute = 0.0
    return Flops(forward, backward, recompute)


def _attention(layer: Layer, num_pairs: int, backward: float, repeats: bool) -> Flops:
    forward = 4.0 * layer.heads_width * num_pairs
    learns = layer.runs[0].learns
    return Flops(forward, backward * forward * learns, forward * (repeats and layer.learns))


def _rest_of_tower(inputs: EstimateInputs, config: TriModeConfig, found: Pass) -> Flops:
    """The convolution over pixels, whose input needs no gradient; a timm tower is measured as a whole."""
    is_whole = "vision" in whole_parts(inputs, config)
    if found.vision:
        forward = 2.0 * patch_weights(config.vision_config) * found.vision[0].runs[0].num_tokens
        return Flops(forward, forward * is_whole)
    forward = tower_cost(inputs, config).forward_flops * inputs.num_images
    return Flops(forward, 2 * forward * is_whole, forward * (is_whole and inputs.gradient_checkpointing))


def tower_cost(inputs: EstimateInputs, config: TriModeConfig) -> TowerCost:
    """What each image costs in a timm tower."""
    num_patches = inputs.num_features * config.spatial_merge_size**2 // inputs.num_images
    return measure_tower(config.vision_config, num_patches)
