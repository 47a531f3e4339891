"""What only a GPU can show. Skipped without one; `python -m pytest -m gpu` runs these alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from PIL import Image
from test_patterns import dual_stream_metadata

from trimode_vlm import patterns
from trimode_vlm.attention import attend
from trimode_vlm.decoders import DECODERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def on_gpu(chat_model: Any) -> Any:
    return copy.deepcopy(chat_model).to("cuda")


@pytest.fixture(scope="module")
def inputs(processor: Any) -> Any:
    """Three prompts of different length: one picture, none, two."""
    conversations = []
    for number, colors in enumerate((["red"], [], ["blue", "green"])):
        parts = [{"type": "image", "image": Image.new("RGB", (60 + 20 * number, 40), color)} for color in colors]
        content = [*parts, {"type": "text", "text": "What is this? " * (number + 1)}]
        conversations.append([{"role": "user", "content": content}])
    return processor.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", padding=True
    )


def test_logits_equal_those_of_the_cpu(chat_model: Any, on_gpu: Any, inputs: Any) -> None:
    with torch.no_grad():
        expected = chat_model(**inputs).logits
        found = on_gpu(**inputs.to("cuda")).logits.cpu()
    real = inputs["attention_mask"].bool().cpu()
    torch.testing.assert_close(found[real], expected[real], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("mode", DECODERS)
def test_greedy_text_equals_that_of_the_cpu(chat_model: Any, on_gpu: Any, inputs: Any, mode: str) -> None:
    expected = chat_model.generate(**inputs.to("cpu"), mode=mode, max_new_tokens=24)
    found = on_gpu.generate(**inputs.to("cuda"), mode=mode, max_new_tokens=24)
    assert found.sequences.device.type == "cuda"
    assert found.sequences.tolist() == expected.sequences.tolist() and found.nfe == expected.nfe


def test_self_speculation_equals_ar(on_gpu: Any, inputs: Any) -> None:
    ar, linear = (on_gpu.generate(**inputs.to("cuda"), mode=m, max_new_tokens=64) for m in ("ar", "linear_spec"))
    assert ar.sequences.tolist() == linear.sequences.tolist()


@pytest.mark.parametrize("mode", DECODERS)
def test_sampling_in_bfloat16_runs_and_repeats(on_gpu: Any, inputs: Any, mode: str) -> None:
    model = copy.deepcopy(on_gpu).to(torch.bfloat16)
    options: dict[str, Any] = {"mode": mode, "max_new_tokens": 16, "do_sample": True, "temperature": 0.8, "seed": 1}
    first, again = (model.generate(**inputs.to("cuda"), **options).sequences.tolist() for _ in range(2))
    assert first == again


@pytest.mark.parametrize("implementation", ["sdpa", "flex"])
@pytest.mark.parametrize("name", ["causal", "prefix", "block", "ragged", "dual stream"])
def test_kernels_agree_with_the_dense_reference(name: str, implementation: Any) -> None:
    device = torch.device("cuda")
    offset, long_stream = torch.tensor([40, 100], device=device), dual_stream_metadata(30, (70, 90), 16)
    pattern = {
        "causal": lambda: patterns.causal(2, 130, device),
        "prefix": lambda: patterns.causal(2, 32, device, 100),
        "block": lambda: patterns.block(2, 32, device, 100),
        "ragged": lambda: patterns.block(2, 32, device, offset),
        "dual stream": lambda: patterns.dual_stream(*(x.repeat(2, 1).to(device) for x in long_stream)),
    }[name]()
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(2, 6, pattern.query_length, 32, device=device, generator=generator, requires_grad=True)
    k, v = (
        torch.randn(2, 2, pattern.key_length, 32, device=device, generator=generator, requires_grad=True)
        for _ in range(2)
    )
    dense = attend(q, k, v, pattern, "dense")
    expected = torch.autograd.grad(dense.square().sum(), (q, k, v))
    out = attend(q, k, v, pattern, implementation)
    torch.testing.assert_close(out, dense, atol=1e-4, rtol=1e-4)
    for found, wanted in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_a_training_step_lowers_the_loss() -> None:
    model = make_tiny_model(seed=1, scale=0.05).to("cuda").train()
    ids = torch.randint(8, 64, (4, 64), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_load_puts_the_weights_on_the_device(tmp_path: Any, chat_model: Any, processor: Any) -> None:
    import trimode_vlm

    chat_model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    model, _ = trimode_vlm.load(tmp_path, dtype="bfloat16", device="cuda")
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cuda", torch.bfloat16)}
