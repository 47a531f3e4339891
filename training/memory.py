"""Memory of a training step on one GPU, from shapes: model states by ZeRO stage, tensors kept for the backward pass.

States (ZeRO, 1910.02054, section 3; DeepSpeed's own estimators, which a test compares): 16-bit training with DeepSpeed
keeps 2 bytes of weight for every parameter, and for those that train 2 of gradient, 4 of fp32 weight, 8 of AdamW's two
moments, and 4 of fp32 gradient at the step. Stage 1 cuts what the optimizer keeps by the number of GPUs, stage 2 the
gradients too, stage 3 the weights too, and gathers those in use. Without DeepSpeed 16 bits mean autocast over fp32
weights: 4 + 4 + 8 bytes, 2 more for every weight that a gradient goes through, and DDP's buckets of gradients.

Activations (Korthikanti et al., 2205.05198, section 4, for our layer): what autograd keeps, read off its formulas. A
linear layer keeps its input if its weight trains or LoRA sits on it; a norm its input; attention q, k, v, its output
and a log-sum for each head; SwiGLU three tensors of the inner width. Under gradient checkpointing a layer keeps its
input alone, and one layer at a time is whole again.
Not counted: fragmentation, kernels' workspace, NCCL and DeepSpeed buckets, the CUDA context: leave 10-15 % free.
"""

from __future__ import annotations

from dataclasses import replace

from trimode_vlm.config import TriModeConfig
from trimode_vlm.training.flops import Layer, Pass, Run, tower_cost, walk
from trimode_vlm.training.step_shapes import (
    EstimateInputs,
    count_parameters,
    lora_targets,
    patch_weights,
    text_layer,
    vision_width,
    whole_parts,
)

# NF4: half a byte, and an fp32 scale for every 64 weights.
BYTES_4BIT = 0.5 + 4 / 64
# Of a logit in a chunk of the loss: log-softmax, its gradient and that of the loss, in fp32.
BYTES_PER_LOGIT = 12


def trained_parameters(inputs: EstimateInputs, config: TriModeConfig) -> int:
    whole = whole_parts(inputs, config)
    counts = count_parameters(config)
    return sum(counts[part] for part in whole) + sum(lora_targets(inputs, config).values())


def state_bytes(inputs: EstimateInputs, config: TriModeConfig, gpus: int) -> tuple[dict[str, float], dict[str, float]]:
    """Weights, gradients and optimizer states: (bytes on a GPU, bytes on the CPU for each GPU)."""
    stage, is_16bit = inputs.zero_stage, inputs.precision != "fp32"
    by_deepspeed = stage is not None
    width = 2 if is_16bit and by_deepspeed else 4
    trained, weights = trained_parameters(inputs, config), weight_bytes(inputs, config)
    gpu: dict[str, float] = {
        "weights": weights / (gpus if stage == 3 else 1),
        "gradients": width * trained / (gpus if (stage or 0) >= 2 else 1),
    }
    states = {"moments": 8.0 * trained}
    if is_16bit and by_deepspeed:
        states |= {"fp32 weights": 4.0 * trained, "fp32 gradients": 4.0 * trained}
    gpu |= {name: size / (gpus if stage else 1) for name, size in states.items()}
    if not by_deepspeed and is_16bit:
        gpu["cast weights"] = 2.0 * _cast_weights(inputs, config)
    if not by_deepspeed and gpus > 1:
        gpu["DDP buckets"] = gpu["gradients"]
    if stage == 3:
        largest, total = largest_module(config), sum(count_parameters(config).values())
        gpu["gathered weights"] = float(width * max(largest, min(total, inputs.max_live_params)))
        gpu["gathered gradients"] = float(width * largest if "text" in whole_parts(inputs, config) else 0)
    cpu: dict[str, float] = {}
    if inputs.offload != "none":
        gradients = gpu.pop("gradients")
        cpu = {name: gpu.pop(name) for name in states}
        cpu |= {} if is_16bit else {"gradients": gradients}
    if inputs.offload == "all":
        cpu["weights"] = gpu.pop("weights")
    return gpu, cpu


def _cast_weights(inputs: EstimateInputs, config: TriModeConfig) -> int:
    """Linear weights of which autocast keeps a copy: all that a gradient goes through, but those in checkpointed layers
    that do not train."""
    found = walk(inputs, config)
    layers = [run for layer in (*found.vision, *found.text) for run in layer.runs]
    if inputs.gradient_checkpointing or inputs.is_4bit:
        layers = [run for run in layers if run.whole]
    runs = [*layers, *found.projector, found.head]
    return sum(run.group.params for run in runs if run.whole or run.input_grad)


def weight_bytes(inputs: EstimateInputs, config: TriModeConfig) -> float:
    """All weights, with LoRA's factors, and the frozen originals that PEFT keeps of parts which train beside LoRA."""
    counts, whole = count_parameters(config), whole_parts(inputs, config)
    originals = sum(counts[part] for part in whole) if inputs.lora else 0
    total = float(inputs.weight_bytes * (sum(counts.values()) + originals))
    if inputs.is_4bit:
        linear = sum(group.params for group in text_layer(config, 0)) * config.num_hidden_layers
        total += (BYTES_4BIT - inputs.weight_bytes) * linear
    lora_bytes = 4 if inputs.zero_stage is None else inputs.weight_bytes
    return total + lora_bytes * sum(lora_targets(inputs, config).values())


def largest_module(config: TriModeConfig) -> int:
    """Parameters of the largest single module, which ZeRO-3 gathers at once: the embedding, or a wide MLP matrix."""
    sizes = [group.width * out for group in text_layer(config, 0) for out in group.layers.values()]
    return max([*sizes, config.vocab_size * config.hidden_size])


def activation_bytes(inputs: EstimateInputs, config: TriModeConfig) -> dict[str, float]:
    """What a micro-batch keeps from forward to backward, by place, and what comes on top at the worst moment."""
    found = walk(inputs, config)
    sizes = _Sizes(inputs, config)
    kept = {"vision": 0.0, "projector": 0.0, "text layers": 0.0, "head": 0.0}
    extra = [0.0]
    vision_heads = config.vision_config.num_attention_heads if found.vision else 0
    for name, layers, heads in (
        ("vision", found.vision, vision_heads),
        ("text layers", found.text, config.num_attention_heads),
    ):
        for layer in layers:
            own = sizes.stub(layer) if inputs.gradient_checkpointing else sizes.layer(layer, heads)
            kept[name] += own
            extra.append(sizes.worst(layer, heads) - (0.0 if inputs.gradient_checkpointing else own))
    kept["vision"] += sizes.before_vision(found)
    kept["projector"] = sizes.projector(found)
    kept["text layers"] += sizes.around_text(found)
    kept["head"] = sizes.head(found.head)
    return kept | {"at the peak": max(*extra, sizes.loss(found.head))}


class _Sizes:
    """Bytes that autograd keeps of each piece of a micro-batch. value: of a matrix product's number, residual: of one
    of the residual stream, which autocast leaves in fp32."""

    def __init__(self, inputs: EstimateInputs, config: TriModeConfig) -> None:
        self.inputs, self.config = inputs, config
        self.value = 4 if inputs.precision == "fp32" else 2
        self.residual = inputs.weight_bytes

    def layer(self, layer: Layer, heads: int) -> float:
        qkv, out, gate_up, down = layer.runs
        num_tokens, inner = qkv.num_tokens, down.group.width
        kept = self.norm(qkv) + self.linear(qkv) + self.norm(gate_up) + self.linear(gate_up) + self.linear(down)
        if qkv.learns:
            features = sum(qkv.group.layers.values()) + out.group.width
            kept += num_tokens * (features * self.value + 4 * heads)
            # The output layer's input is attention's own output, unless autocast casts it for LoRA.
            has_copy = bool(out.lora) and self.residual > self.value
            kept += self.lora(out) + num_tokens * out.group.width * self.value * has_copy
        else:
            kept += self.linear(out)
        gate, up = (gate_up.whole or gate_up.input_grad or name in gate_up.lora for name in gate_up.group.layers)
        # Gate and up are kept for the gate's gradient, the activated gate for that of up.
        return kept + inner * self.value * num_tokens * (2 * gate + up)

    def stub(self, layer: Layer) -> float:
        """What a checkpointed layer keeps: its input."""
        first = layer.runs[0]
        return float(first.num_tokens * first.group.width * self.residual * layer.learns)

    def worst(self, layer: Layer, heads: int) -> float:
        """While a layer is taken back: all it computes from where it learns on, as if it trained whole, and gradients
        of its output and of its inner width."""
        if not layer.learns:
            return 0.0
        learning = [replace(run, whole=True, input_grad=True) if run.learns else run for run in layer.runs]
        as_whole = replace(layer, runs=tuple(learning))
        first, last = layer.runs[0], layer.runs[-1]
        gradients = first.group.width * self.residual + last.group.width * self.value
        return self.layer(as_whole, heads) + first.num_tokens * gradients

    def norm(self, run: Run) -> float:
        """The norm before a group: its input and one number a token; on a CPU both, and the quotient, in fp32."""
        if not run.input_grad:
            return 0.0
        if self.inputs.kernels == "fused":
            return run.num_tokens * (run.group.width * self.residual + 4)
        return run.num_tokens * (run.group.width * 4 * (1 + run.whole) + 4)

    def linear(self, run: Run) -> float:
        """The input of a group and what LoRA keeps beside it. Its layers share the input, but autocast makes each of
        them a 16-bit copy of a norm's fp32 output."""
        users = run.whole * len(run.group.layers) + len(run.lora)
        copies = users if self.residual > self.value else min(users, 1)
        return self.lora(run) + run.num_tokens * run.group.width * self.value * copies

    def lora(self, run: Run) -> float:
        lora = self.inputs.lora
        if lora is None or not run.lora:
            return 0.0
        dropped = run.group.width * (self.value + 1) if lora.dropout else 0
        return run.num_tokens * len(run.lora) * (lora.rank * self.value + dropped)

    def before_vision(self, found: Pass) -> float:
        """Pixels and the first norm of a tower that trains; all of a timm tower, checkpointed or not."""
        if "vision" not in whole_parts(self.inputs, self.config) or not found.projector:
            return 0.0
        if not found.vision:
            return tower_cost(self.inputs, self.config).kept_numbers * self.inputs.num_images * self.value
        vision, first = self.config.vision_config, found.vision[0].runs[0]
        pixels = patch_weights(vision) // vision.hidden_size
        return first.num_tokens * pixels * self.value + self.norm(first)

    def projector(self, found: Pass) -> float:
        if not found.projector:
            return 0.0
        merging, first, second = found.projector
        merge = self.config.spatial_merge_size**2
        width = merging.group.width // merge
        kept = sum(self.linear(run) for run in found.projector)
        if merging.input_grad:
            norm = width * self.residual + 4
            if self.inputs.kernels == "composite":
                norm = width * 4 * (1 + merging.whole) + 4
            kept += merge * merging.num_tokens * norm
        return kept + (second.group.width * self.value * second.num_tokens if first.learns else 0)

    def around_text(self, found: Pass) -> float:
        """The last norm, and the rotary pairs that all layers share."""
        last = found.text[-1].runs[-1]
        if not last.learns:
            return 0.0
        head = Run(found.head.group, last.num_tokens, found.head.whole, (), True)
        assert self.config.head_dim is not None
        rotary = 4 * self.config.head_dim * self.residual * last.num_tokens
        # Embeddings that transformers has told to ask for a gradient stay beside those with images in them.
        doubled = self.inputs.gradient_checkpointing and found.projector and not found.head.whole
        return self.norm(head) + rotary + head.group.width * self.residual * last.num_tokens * bool(doubled)

    def head(self, head: Run) -> float:
        return self.linear(head) + self.log_probabilities(head)

    def loss(self, head: Run) -> float:
        """On top of what is kept, while the loss is taken back: a chunk of logits, or sums of the head's gradient."""
        chunk = min(head.num_tokens, self.inputs.chunk_tokens)
        logits = float(chunk * self.config.vocab_size * BYTES_PER_LOGIT) - self.log_probabilities(head)
        # Autograd adds up a weight's gradients over its uses in a graph beside both summands, over graphs in place.
        sums = 2 if head.num_tokens > chunk else 1 if self.inputs.micro_batches > 1 else 0
        return max(logits, sums * head.whole * head.group.params * float(self.inputs.weight_bytes))

    def log_probabilities(self, head: Run) -> float:
        """Kept only where one chunk holds all labelled tokens; else each chunk is computed again."""
        is_kept = head.learns and head.num_tokens <= self.inputs.chunk_tokens
        return 4.0 * head.num_tokens * self.config.vocab_size * is_kept


def features_bytes(inputs: EstimateInputs, config: TriModeConfig) -> float:
    """The image features of a micro-batch, of patches and projected, while they are placed."""
    if config.vision_config is None:
        return 0.0
    numbers = config.spatial_merge_size**2 * vision_width(config) + config.hidden_size
    return float(inputs.weight_bytes * inputs.num_features * numbers)
