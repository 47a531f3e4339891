"""`bench decode`: all that it says beside the clock."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model

from trimode_vlm import cli
from trimode_vlm.draft_adapter import DraftAdapter
from trimode_vlm.eval.bench_decode import compare_modes
from trimode_vlm.quantize import quantize_model

PROMPTS = [{"input_ids": torch.tensor([[20, 21, 22, 30 + i]])} for i in range(3)]


@pytest.fixture
def variants() -> dict[str, Any]:
    plain = make_tiny_model(seed=3, vision=False, max_position_embeddings=64)
    adapted, small = copy.deepcopy(plain), copy.deepcopy(plain)
    g = torch.Generator().manual_seed(0)
    shapes = {
        f"encoder.layers.{i}.self_attn.o_proj": (torch.randn(2, 32, generator=g), torch.randn(32, 2, generator=g))
        for i in range(2)
    }
    adapted.draft_adapter = DraftAdapter(Path(), 2, 1.0, shapes)
    quantize_model(small, "int8")
    return {"": plain, "adapter": adapted, "int8": small}


def test_variants_stand_beside_the_plain_modes(variants: dict[str, Any]) -> None:
    """Counts are those of the answers themselves; the adapter changes the drafts and no answer."""
    values = compare_modes(variants, PROMPTS, repeats=1)
    runs = {"ar", "linear_spec", "diffusion", "linear_spec adapter", "ar int8", "linear_spec int8", "diffusion int8"}
    for name in ("tokens", "tpf_decode", "ms_per_token", "ms_per_token_without_prefill"):
        assert values[name].keys() == runs
    for run in runs:
        mode, _, variant = run.partition(" ")
        outs = [variants[variant].generate(**p, mode=mode, max_new_tokens=1024) for p in PROMPTS]
        assert values["tokens"][run] == sum(out.num_new_tokens[0] for out in outs)
        forwards = sum(out.nfe[0] - out.nfe_prefill[0] for out in outs)
        assert values["tpf_decode"][run] == (values["tokens"][run] - 3) / forwards
    assert values["answers_equal_to_ar"]["linear_spec"] == values["answers_equal_to_ar"]["linear_spec adapter"] == 3
    assert values["tpf_decode"]["linear_spec adapter"] != values["tpf_decode"]["linear_spec"]
    assert values["answers_equal_to_ar"]["diffusion"] < 3
    weights = values["text_weights_mb"]
    assert weights["adapter"] == weights["plain"] > 2.5 * weights["int8"]


@pytest.mark.parametrize("what", ["decode", "modes", "serve"])
def test_an_adapter_that_is_not_there_is_no_measurement(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", what, "--quick", "--adapter", "auto"]) == 1
    assert "nano has no draft adapter beside its weights: name its folder with --adapter" in capsys.readouterr().err
