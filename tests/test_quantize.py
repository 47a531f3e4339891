"""Weight-only int8 and int4: which weights change, by how much, that decoding uses them, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXAMPLES, make_tiny_model
from decoding_cases import MODES, PROMPT, SELF_SPECULATION, generate, options, prompts
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimode_vlm import load
from trimode_vlm.draft_adapter import DraftAdapter
from trimode_vlm.quantize import check_quantize, quantize_model, text_weight_bytes

pytest.importorskip("torchao")

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BITS = {"int8": 8, "int4": 4}
# int4 in float32 works and is slow, which is what the warning says.
pytestmark = pytest.mark.filterwarnings("ignore:int4 layers in float32")


def quantised(kind: str, **fields: Any) -> tuple[Any, Any]:
    """(plain, quantised) of the same weights; inner widths that the int4 kernels take too."""
    models = [make_tiny_model(seed=7, **fields) for _ in range(2)]
    quantize_model(models[1], kind)
    return models[0], models[1]


def text_linears(model: Any) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if n.startswith("encoder.layers.") and n.endswith(LINEARS)}


def weight_of(linear: nn.Linear) -> Tensor:
    """The matrix that a layer multiplies with, read off its answers to unit vectors."""
    with torch.no_grad():
        return linear(torch.eye(linear.in_features)).T


def stored_bytes(weight: Tensor) -> int:
    if type(weight) in (Tensor, nn.Parameter):
        return weight.nbytes
    parts = [getattr(weight, name, None) for name in (*weight.tensor_data_names, *weight.optional_tensor_data_names)]
    return sum(part.nbytes for part in parts if part is not None)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_text_linears_change_by_half_a_step_at_most_and_nothing_else_does(kind: str) -> None:
    """A step is the row's largest weight over 127.5 (int8), or a group of 32's range over 15 (int4)."""
    plain, model = quantised(kind)
    linears = text_linears(model)
    assert len(linears) == 2 * len(LINEARS) and model.quantized == kind and plain.quantized is None
    for name, linear in linears.items():
        assert type(linear) is nn.Linear and type(linear.weight) is not nn.Parameter
        before, after = plain.get_submodule(name).weight.detach(), weight_of(linear)
        if kind == "int8":
            step = before.abs().amax(-1, keepdim=True) / 127.5
        else:
            groups = before.unflatten(-1, (-1, 32))
            step = ((groups.amax(-1) - groups.amin(-1)) / 15).repeat_interleave(32, -1)
        assert ((after - before).abs() <= 0.51 * step + 1e-6).all()
        assert (after - before).abs().max() > 0.3 * step.min()
    others = {n: p for n, p in model.named_parameters() if n.removesuffix(".weight") not in linears}
    assert {"encoder.embed_tokens.weight", "diffusion_head.weight"} < others.keys()
    assert any("vision_tower" in name for name in others) and any("projector" in name for name in others)
    for name, parameter in others.items():
        assert type(parameter) is nn.Parameter and torch.equal(parameter, plain.get_parameter(name))


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.05), ("int4", 0.6)])
def test_logits_stay_near_and_are_those_of_the_rounded_weights(kind: str, tolerance: float) -> None:
    """Random weights of this size carry an error on; nano's logits move by 0.7 % and 9 %."""
    plain, model = quantised(kind, vision=False)
    ids = torch.randint(8, 64, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, logits = plain(input_ids=ids).logits, model(input_ids=ids).logits
        for name, linear in text_linears(plain).items():
            linear.weight.copy_(weight_of(model.get_submodule(name)))
        torch.testing.assert_close(logits, plain(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    error = (logits - exact).norm() / exact.norm()
    assert 1e-4 < error < tolerance


class CountsQuantised(TorchFunctionMode):
    """Calls of F.linear on a weight that is no plain tensor."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and type(args[1]) not in (Tensor, nn.Parameter):
            self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_decoding_computes_with_them(kind: str, mode: str) -> None:
    """The lean forward, which holds bare weights, gives way: every forward calls every quantised layer."""
    plain, model = quantised(kind, vision=False)
    chosen: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": [], **options(mode, 4, 0.3)}
    ids = torch.tensor([PROMPT])
    with CountsQuantised() as counted:
        out = model.generate(ids, **chosen)
    assert counted.calls == 2 * len(LINEARS) * out.total_nfe
    with CountsQuantised() as counted:
        plain.generate(ids, **chosen)
    assert counted.calls == 0


@pytest.mark.parametrize("mode", SELF_SPECULATION)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_self_speculation_still_equals_ar(kind: str, mode: str) -> None:
    _, model = quantised(kind, vision=False)
    rows = prompts(12, seed=7)
    expected, _ = generate(model, rows, mode="ar", max_new_tokens=20)
    assert generate(model, rows, max_new_tokens=20, **options(mode, 5))[0] == expected


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_draft_adapter_works_on_top(kind: str) -> None:
    _, model = quantised(kind, vision=False)
    rows = prompts(6, seed=8)
    chosen: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [], **options("linear_spec", 5)}
    expected, without = generate(model, rows, **chosen)
    g = torch.Generator().manual_seed(0)
    factors = {
        name.removesuffix(".weight"): (torch.randn(2, 32, generator=g), torch.randn(32, 2, generator=g))
        for name in text_linears(model)
        if name.endswith("o_proj")
    }
    model.draft_adapter = DraftAdapter(Path(), 2, 1.0, factors)
    tokens, adapted = generate(model, rows, **chosen)
    assert tokens == expected and adapted.accepted_lengths != without.accepted_lengths


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_load_quantises_after_the_adapter_and_the_weights_are_small(kind: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    plain = make_tiny_model(seed=7, vision=False)
    plain.save_pretrained(tmp_path / "model")
    config = LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    get_peft_model(make_tiny_model(seed=7, vision=False), config).save_pretrained(tmp_path / "adapter")
    model, _ = load(tmp_path / "model", quantize=kind, adapter=tmp_path / "adapter")
    assert model.quantized == kind and not model.training
    assert len(model.draft_adapter.factors) == 2
    linears = [f"{name}.weight" for name in text_linears(plain)]
    before, after = plain.state_dict(), model.state_dict()
    assert after.keys() == before.keys()
    weights = sum(before[name].numel() for name in linears)
    stored = sum(stored_bytes(after[name]) for name in linears)
    assert text_weight_bytes(model) - stored == text_weight_bytes(plain) - 4 * weights == 4 * 4 * 32
    # int8 keeps a scale and a zero (5 bytes) for each row of 32 or 64; int4 both (8 bytes) for each 32 weights.
    overhead = weights / 32 * (5 if kind == "int8" else 8)
    assert weights * BITS[kind] / 8 < stored <= weights * BITS[kind] / 8 + overhead
    assert stored < 0.45 * sum(before[name].nbytes for name in linears)
    chosen: dict[str, Any] = {"max_new_tokens": 12, **options("linear_spec", 4)}
    ids = torch.tensor([PROMPT])
    assert (
        model.generate(ids, **chosen).sequences.tolist()
        == model.generate(ids, max_new_tokens=12, mode="ar").sequences.tolist()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_half_precision_computes_in_its_own_dtype(kind: str, dtype: torch.dtype) -> None:
    model = make_tiny_model(seed=7, vision=False).to(dtype)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        quantize_model(model, kind)
        logits = model(input_ids=ids).logits
    assert logits.dtype == dtype and (logits - exact).norm() / exact.norm() < 0.6


def test_nano_in_int8_reads_the_receipt() -> None:
    model, processor = load("nano", quantize="int8")
    [case] = [
        question for question in json.loads((EXAMPLES / "questions.json").read_text())
        if question["image"] == "receipt-1.png" and "JSON" in question["question"]
    ]  # fmt: skip
    content = [
        {"type": "image", "image": str(EXAMPLES / case["image"])},
        {"type": "text", "text": case["question"]},
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    out = model.generate(**inputs, mode="linear_spec", max_new_tokens=400)
    answer = processor.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.strip() == case["answer"].strip()


@pytest.mark.parametrize("kind", ["int8", "int4", "4bit"])
def test_quantised_weights_are_not_saved(kind: str, tmp_path: Path) -> None:
    if kind == "4bit":
        model = make_tiny_model(vision=False)
        model.quantized = kind
    else:
        _, model = quantised(kind, vision=False)
    with pytest.raises(ValueError, match=f"{kind} weights cannot be saved: load the model without quantize="):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_torch_keeps_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's own defaults change those of torch.compile, for all of the process."""
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "coordinate_descent_tuning", False)
    for kind in ("int8", "int4"):
        quantised(kind, vision=False)
    assert inductor.coordinate_descent_tuning is False


def test_slow_int4_is_said(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(UserWarning, match="use dtype bfloat16"):
        quantize_model(make_tiny_model(vision=False), "int4")
    recwarn.clear()
    quantize_model(make_tiny_model(vision=False).bfloat16(), "int4")
    quantize_model(make_tiny_model(vision=False), "int8")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("fields", "found"), [({"intermediate_size": 48}, "48"), ({"num_key_value_heads": 1}, "32 and 8")]
)
def test_int4_refuses_layers_that_do_not_fit(fields: dict[str, int], found: str) -> None:
    model = make_tiny_model(vision=False, **fields)
    with pytest.raises(ValueError, match=rf"multiples of 32 and outputs in multiples of 16; encoder\.layers.*{found}"):
        quantize_model(model, "int4")
    assert all(type(p) is nn.Parameter for p in model.parameters()) and model.quantized is None
    quantize_model(model, "int8")


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "words"),
    [
        ("int2", None, None, "quantize must be 'int8', 'int4', '4bit' or left out, got 'int2'"),
        ("int8", "cpu", torch.float64, "int8 weights compute in 16 or 32 bits, not in float64"),
        ("int4", "xpu", None, "int4 weights run on cpu and cuda, not on xpu"),
        ("int4", "cuda", torch.float32, "int4 weights on CUDA need dtype bfloat16, got float32"),
    ],
)
def test_what_cannot_be_had_is_refused(kind: str, device: str | None, dtype: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_quantize(kind, device, dtype)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_without_torchao_one_line_says_what_to_install(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["trimode_vlm.quantize"], "find_spec", lambda name: None)
    with pytest.raises(ValueError) as error:
        load("no/such-model", quantize=kind)
    expected = f"{kind} weights need the torchao package (pip install 'trimode-vlm[quantize]'), not found here"
    assert str(error.value) == f"{expected}: leave quantize out"
