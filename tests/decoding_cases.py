"""Prompts, options and scripted models for the tests of the decoders."""

from __future__ import annotations

from typing import Any

import torch
from conftest import tiny_config
from naive import by_position, scripted_model
from torch import Tensor

MODES = ("ar", "diffusion", "linear_spec", "quadratic_spec")
SELF_SPECULATION = ("linear_spec", "quadratic_spec")
V, END, MASK = 64, 2, 3
PROMPT = [10, 11, 12, 13, 14]


def options(mode: str, block_length: int | None = None, threshold: float | None = None) -> dict[str, Any]:
    """Only what the mode uses."""
    chosen: dict[str, Any] = {"mode": mode}
    if mode != "ar" and block_length is not None:
        chosen["block_length"] = block_length
    if mode == "diffusion" and threshold is not None:
        chosen["threshold"] = threshold
    return chosen


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(8, V, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: list[list[int]], left: bool = True) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    fill = [[0] * (longest - len(row)) for row in rows]
    ids = [f + row if left else row + f for f, row in zip(fill, rows, strict=True)]
    ones = [
        [0] * len(f) + [1] * len(row) if left else [1] * len(row) + [0] * len(f)
        for f, row in zip(fill, rows, strict=True)
    ]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(ones)}


def answers(out: Any, prompt_length: int) -> list[list[int]]:
    return [
        ids[prompt_length : prompt_length + n].tolist()
        for ids, n in zip(out.sequences, out.num_new_tokens, strict=True)
    ]


def generate(model: Any, rows: list[list[int]], **chosen: Any) -> tuple[list[list[int]], Any]:
    inputs = padded(rows)
    out = model.generate(**inputs, **chosen)
    return answers(out, inputs["input_ids"].shape[1]), out


def says(tokens: list[int], first: int = len(PROMPT), shift: int = 0, sure: float = 20.0, length: int = 160) -> Tensor:
    """A table [P, V] that wants tokens[i] at position first + i; the causal one speaks a position earlier (shift 1)."""
    table = torch.zeros(length, V)
    for i, token in enumerate(tokens):
        table[first + i - shift, token] = sure
    return table


def speaker(causal: list[int], bidirectional: list[int] | None = None, **config: Any) -> Any:
    """A scripted model that says `causal` behind PROMPT in causal forwards and `bidirectional` in the others."""
    ahead = causal if bidirectional is None else bidirectional
    scripts = by_position(says(causal, shift=1)), by_position(says(ahead))
    return scripted_model(tiny_config(**{"vision": False} | config), *scripts)
