"""Tiny micro-batches and models of every kind of training, and what they keep in memory, for the tests of estimates."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch
from conftest import TINY_VISION, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from trimode_vlm import TriModeVLM, patterns
from trimode_vlm.training.collate import NoiseSettings, micro_batches
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.estimate import EstimateInputs
from trimode_vlm.training.lora import LoraSettings, add_lora
from trimode_vlm.training.objective import tri_mode_terms
from trimode_vlm.training.parts import select_parts

IMAGE, MASK = 4, 3
LORA = LoraSettings(rank=3, alpha=6)


def config_of(**changes):
    """Wide enough that matrix products, and not small change, make up the cost."""
    vision = {**TINY_VISION, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
    return tiny_config(**{"hidden_size": 48, "intermediate_size": 112, "vision_config": vision, **changes})


def batch_of(inputs):
    """Rows of [image, prompt, one answer] with the lengths of `inputs`."""
    grid = (2, inputs.vision_tokens // 2)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(inputs.rows):
        num_text = inputs.sequence_tokens - inputs.vision_tokens
        text = torch.randint(8, 64, (num_text,), generator=generator).tolist()
        loss_mask = [
            position >= inputs.sequence_tokens - inputs.response_tokens for position in range(inputs.sequence_tokens)
        ]
        images = [torch.randn(3, 28 * grid[0], 28 * grid[1], generator=generator)] if inputs.vision_tokens else []
        samples.append(
            Encoded(
                sample_id=number, input_ids=[IMAGE] * inputs.vision_tokens + text, loss_mask=loss_mask, images=images
            )
        )
    noise = NoiseSettings(
        mask_token_id=MASK,
        vision_token_ids=(IMAGE,),
        dual=inputs.noisy_stream != "none",
        block_length=inputs.block_length,
        noisy_stream=inputs.noisy_stream if inputs.noisy_stream != "none" else "response",
        complementary_masks=inputs.complementary_masks,
        response_padding="block" if inputs.padding_tokens else "none",
        end_token_id=1,
    )
    (batch,) = micro_batches(samples, noise)
    return batch


def inputs_of(vision_tokens=6, prompt=7, response=21, **changes):
    length = vision_tokens + prompt + response
    defaults = dict(
        sequence_tokens=length, vision_tokens=vision_tokens, response_share=response / length, rows=2, block_length=8,
        precision="fp32", zero_stage=None, gradient_checkpointing=False, kernels="composite",
    )  # fmt: skip
    return EstimateInputs(**{**defaults, **changes})


def measured_share(inputs, batch):
    """The same inputs with the share of tokens that this batch happens to mask."""
    share = batch.counts.num_masked / max(batch.counts.num_maskable, 1)
    return EstimateInputs(**{**vars(inputs), "mask_share": share}) if not inputs.complementary_masks else inputs


def model_of(inputs, config, implementation="sdpa"):
    torch.manual_seed(0)
    model = TriModeVLM(config)
    model.set_attn_implementation(implementation)
    if inputs.lora:
        model = add_lora(model, inputs.lora, [part for part in inputs.train if part != "text"])
    else:
        select_parts(model, inputs.train)
    if inputs.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model, batch, inputs):
    """What the trainer does with a micro-batch."""
    rows, length = batch.input_ids.shape
    metadata = (batch.position, batch.document, batch.block_start, batch.block_id, batch.is_noisy)
    plain = inputs.noisy_stream == "none"
    pattern = patterns.causal(rows, length, batch.input_ids.device) if plain else patterns.dual_stream(*metadata)

    def objective(hidden: Tensor, head: torch.nn.Module) -> Tensor:
        terms = tri_mode_terms(
            hidden, batch.target, batch.is_noisy, batch.p_mask, batch.sequence, head, chunk_tokens=inputs.chunk_tokens
        )
        return terms.ar_sum + terms.diff_sum

    return model(
        input_ids=batch.input_ids, position_ids=batch.position, pixel_values=batch.pixel_values,
        image_sizes=batch.image_sizes, pattern=pattern, objective=objective,
    )  # fmt: skip


STREAMS = [
    dict(noisy_stream="none"),
    dict(noisy_stream="response"),
    dict(noisy_stream="text"),
    dict(noisy_stream="all"),
    dict(noisy_stream="response", complementary_masks=True),
]


TRAINING = {
    "whole": dict(train=("text", "vision", "projector")),
    "text": dict(train=("text",)),
    "text and projector": dict(train=("text", "projector")),
    "projector": dict(train=("projector",)),
    "vision": dict(train=("vision",)),
    "lora": dict(train=(), lora=LORA),
    "lora on one layer": dict(train=(), lora=LoraSettings(rank=2, targets=("encoder.layers.1.mlp.up_proj",))),
    "lora and projector": dict(train=("projector",), lora=LORA),
    "lora on vision": dict(train=(), lora=LoraSettings(rank=2, parts=("vision",), targets=("q_proj", "gate_proj"))),
    "lora on everything": dict(
        train=(), lora=LoraSettings(rank=2, parts=("text", "vision", "projector"),
                                    targets=("v_proj", "down_proj", "linear_2", "diffusion_head")),
    ),
}  # fmt: skip


# Sizes at which what does not grow with them (random states, plans of attention) no longer counts.
LARGER = dict(vision_tokens=20, prompt=40, response=90)


def larger_config(**changes):
    vision = {**TINY_VISION, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "head_dim": 32}
    return tiny_config(**{**sizes, "vision_config": vision, **changes})


@contextmanager
def saved_tensors(model):
    """Bytes of the storages that autograd keeps for the backward pass, each once, without the weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: list[Tensor] = []
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that operations have made and that are still there: now, and at the most without gradients
    of weights."""

    def __init__(self, model):
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.parameters = list(model.parameters())
        self.weights = {p.untyped_storage()._cdata for p in self.parameters}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        key = storage._cdata
        if key in self.sizes or key in self.weights:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self.remove, key)
        gradients = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        self.peak = max(self.peak, self.now - gradients)

    def remove(self, key):
        self.now -= self.sizes.pop(key)
