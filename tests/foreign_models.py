"""Tiny random models of transformers' own classes, their inputs, and how they save themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

VOCAB = 160
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
# 64 original positions, so that short tests run past them, through YaRN's and the query scale's interesting part.
YARN: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
    mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1, max_position_embeddings=512,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    patch_size=14, image_size=280, hidden_act="silu",
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
IMG, BREAK, END = 10, 12, 13


def randomise(model: Any, seed: int = 0, scale: float = 0.2) -> Any:
    """Weights large enough that layers matter and greedy answers vary."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(values if parameter.dim() > 1 else 1 + values)
    return model.eval()


def mistral3(tie: bool = False, **text: Any) -> Any:
    config = Mistral3Config(
        text_config={"model_type": "ministral3", **TEXT, "rope_parameters": dict(YARN), **text},
        vision_config=dict(VISION),
        image_token_index=IMG,
        tie_word_embeddings=tie,
    )
    return randomise(Mistral3ForConditionalGeneration(config))


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def span(rows: int, columns: int) -> list[int]:
    """Ministral's image span: rows of image tokens, each closed by a break, the last by the end token."""
    return [token for _ in range(rows) for token in [IMG] * columns + [BREAK]][:-1] + [END]


def images(*grids: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random images of (rows, columns) cells of 28 pixels, padded to the largest."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(28 * rows, 28 * columns) for rows, columns in grids]
    canvas = torch.zeros(len(sizes), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for image, (height, width) in zip(canvas, sizes, strict=True):
        image[:, :height, :width] = torch.randn(3, height, width, generator=generator)
    return {"pixel_values": canvas, "image_sizes": torch.tensor(sizes)}


def text_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, VOCAB, (batch, length), generator=generator)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, whatever the number of shards."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_bitwise(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of ... removes its key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def edit_weights(folder: Path, remove: str = "", **add: torch.Tensor) -> None:
    stored = load_file(folder / "model.safetensors") | add
    save_file({k: v for k, v in stored.items() if k != remove}, folder / "model.safetensors")
