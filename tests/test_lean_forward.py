"""The lean forward of decoding equals the modules it stands for, and gives way where they do more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from torch import Tensor, nn

from trimode_vlm.cache import KVCache
from trimode_vlm.lean_forward import lean_forward
from trimode_vlm.model_inputs import positions
from trimode_vlm.patterns import Pattern, block, causal, quadratic

CPU = torch.device("cpu")


def both_ways(model: Any, lengths: list[int], T: int, kind: Any) -> tuple[Tensor, Tensor]:
    """Logits of T new tokens behind random prefixes: the lean forward's and the modules', each with its own cache."""
    lean = lean_forward(model.encoder)
    assert lean is not None
    B = len(lengths)
    ids = torch.randint(8, 64, (B, max(lengths) + T), generator=torch.Generator().manual_seed(1))
    results = []
    with torch.inference_mode():
        for forward in (lean, None):
            cache = KVCache(model.config, B, max(lengths) + T, model.dtype)
            prefix = model.encoder.embed_tokens(ids[:, : max(lengths)])
            place = positions(B, max(lengths), 0, None, CPU)
            model.hidden(prefix, place, causal(B, max(lengths), CPU), cache, forward)
            cache.truncate(lengths)
            pattern = kind(B, T, CPU, cache.offset)
            place = positions(B, T, cache.offset, None, CPU)
            if not pattern.positions_are_slots:
                place = place[:, :1] + torch.arange(T) // 4 + torch.arange(T) % 4
            new = model.encoder.embed_tokens(ids[:, -T:])
            results.append(model.diffusion_head(model.hidden(new, place, pattern, cache, forward)))
    return results[0], results[1]


def rows_of_four(batch: int, query_length: int, device: torch.device, offset: int | Tensor) -> Pattern:
    """The quadratic pattern, whose positions are not its slots."""
    return (
        quadratic(query_length // 4, 3, batch, device, offset) if query_length > 1 else block(batch, 1, device, offset)
    )


@pytest.mark.parametrize("kind", [causal, block, rows_of_four])
@pytest.mark.parametrize("T", [1, 8])
@pytest.mark.parametrize("lengths", [[20], [300, 300], [5, 290]])
def test_it_equals_the_modules(tiny_text_model: Any, lengths: list[int], T: int, kind: Any) -> None:
    """Lengths on both sides of 256, from where on the query scale of Ministral-3 is not 1."""
    lean, modules = both_ways(tiny_text_model, lengths, T, kind)
    # Sums in another order: some processors' kernels differ by a little more than 1e-5.
    torch.testing.assert_close(lean, modules, atol=3e-5, rtol=1e-5)


def test_large_models_copy_no_projection(tiny_text_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimode_vlm.lean_forward.JOINED_BYTES", 0)
    lean = lean_forward(tiny_text_model.encoder)
    assert lean is not None and lean.layers[1].qkv[2] is tiny_text_model.encoder.layers[1].self_attn.v_proj.weight
    lean_logits, modules = both_ways(tiny_text_model, [20], 8, causal)
    torch.testing.assert_close(lean_logits, modules, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_theta": 500.0}}])
def test_it_follows_the_config(options: dict[str, Any]) -> None:
    lean, modules = both_ways(make_tiny_model(vision=False, **options), [30], 4, causal)
    torch.testing.assert_close(lean, modules, atol=1e-5, rtol=1e-5)


def test_bf16_gives_the_modules_own_bits() -> None:
    lean, modules = both_ways(make_tiny_model(vision=False).bfloat16(), [30], 4, causal)
    assert torch.equal(lean, modules)


def test_the_table_serves_longer_caches_and_other_dtypes() -> None:
    model = make_tiny_model(vision=False)
    both_ways(model, [20], 1, causal)
    lean, modules = both_ways(model, [1500], 1, causal)
    torch.testing.assert_close(lean, modules, atol=1e-5, rtol=1e-5)
    lean, modules = both_ways(model.double(), [20], 1, causal)
    torch.testing.assert_close(lean, modules, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("mode", ["ar", "linear_spec", "diffusion", "quadratic_spec"])
def test_generate_calls_no_layer_and_gives_the_modules_answer(mode: str) -> None:
    """A hook on one projection brings the modules back; the answer is the same."""
    model = make_tiny_model(vision=False)
    ids = torch.randint(8, 64, (1, 9), generator=torch.Generator().manual_seed(2))
    calls: list[int] = []
    plain = model.generate(ids, mode=mode, max_new_tokens=24)
    hook = model.encoder.layers[1].mlp.up_proj.register_forward_hook(lambda *args: calls.append(1))
    assert lean_forward(model.encoder) is None
    hooked = model.generate(ids, mode=mode, max_new_tokens=24)
    hook.remove()
    assert len(calls) == hooked.total_nfe and hooked.sequences.tolist() == plain.sequences.tolist()
    assert lean_forward(model.encoder) is not None


def _lora(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False), model)


def _bias(model: Any) -> None:
    model.encoder.layers[0].self_attn.q_proj = nn.Linear(32, 32)


def _replaced_forward(model: Any) -> None:
    model.encoder.layers[0].mlp.down_proj.forward = lambda x: x.new_zeros(*x.shape[:-1], 32)


def _parametrized(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.encoder.layers[0].self_attn.k_proj)


def _subclass(model: Any) -> None:
    class Scaled(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.encoder.norm = Scaled(32, eps=1e-5)


@pytest.mark.parametrize("change", [_lora, _bias, _replaced_forward, _parametrized, _subclass])
def test_a_layer_that_does_more_keeps_its_modules(change: Any) -> None:
    """The cached answer then equals the plain forward's, which calls the modules."""
    model = make_tiny_model(vision=False)
    torch.manual_seed(3)
    change(model)
    assert lean_forward(model.encoder) is None
    ids = torch.randint(8, 64, (1, 9), generator=torch.Generator().manual_seed(2))
    answer = model.generate(ids, mode="ar", max_new_tokens=6, eos_token_id=-1).sequences
    with torch.no_grad():
        logits = model(input_ids=answer).logits[0, 8:-1]
    logits[:, model.config.never_sampled_ids] = float("-inf")
    assert logits.argmax(-1).tolist() == answer[0, 9:].tolist()


def test_a_training_step_between_two_answers_is_seen() -> None:
    model = make_tiny_model(vision=False)
    ids = torch.randint(8, 64, (1, 9), generator=torch.Generator().manual_seed(2))
    first = model.generate(ids, mode="ar", max_new_tokens=12, eos_token_id=-1).sequences
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).clone()
    second = model.generate(ids, mode="ar", max_new_tokens=12, eos_token_id=-1).sequences
    model.encoder.layers[0].mlp.up_proj.register_forward_hook(lambda *args: None)
    assert second.tolist() != first.tolist()
    assert model.generate(ids, mode="ar", max_new_tokens=12, eos_token_id=-1).sequences.tolist() == second.tolist()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
