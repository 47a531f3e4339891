"""The draft adapter at work: it changes drafts and nothing else, whatever happens around it. PEFT is the oracle."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import MASK, padded
from foreign_models import images
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from trimode_vlm import load
from trimode_vlm.cache import KVCache
from trimode_vlm.draft_adapter import DraftAdapter, read_adapter
from trimode_vlm.lean_forward import lean_forward
from trimode_vlm.model_inputs import positions
from trimode_vlm.patterns import block, causal

CPU = torch.device("cpu")
IDS = torch.randint(8, 64, (1, 21), generator=torch.Generator().manual_seed(5))
O_PROJ = r"encoder\.layers\.\d+\.self_attn\.o_proj"


def peft_folder(folder: Path, targets: str = O_PROJ) -> Path:
    """A random adapter of `make_tiny_model`'s shapes, written by PEFT, large enough to change most tokens."""
    torch.manual_seed(7)
    config = LoraConfig(r=3, lora_alpha=12, target_modules=targets, init_lora_weights=False)
    get_peft_model(make_tiny_model(), config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peft_folder(tmp_path_factory.mktemp("peft"))


@pytest.fixture
def adapted(folder: Path) -> Any:
    model = make_tiny_model()
    model.draft_adapter = read_adapter(folder, model)
    return model


def drafts(model: Any, **options: Any) -> tuple[list[list[int]], list[int]]:
    """What every cycle of linear_spec drafted, and the answer."""
    options = {"block_length": 6, "max_new_tokens": 40, "eos_token_id": -1, **options}
    events = list(model.stream(IDS, mode="linear_spec", **options))
    return [e.draft for e in events if e.draft is not None], [t for e in events for t in e.token_ids]


def test_a_forward_with_it_equals_pefts(folder: Path, adapted: Any) -> None:
    peft = PeftModel.from_pretrained(make_tiny_model(), folder).eval()
    with torch.no_grad():
        plain = adapted(input_ids=IDS).logits
        logits = adapted(input_ids=IDS, adapter=adapted.draft_adapter.deltas(adapted)).logits
        torch.testing.assert_close(logits, peft(input_ids=IDS).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits, plain, atol=0.1)
        assert torch.equal(adapted(input_ids=IDS).logits, plain), "the next forward is without it, to the bit"


@pytest.mark.parametrize("is_lean", [True, False])
@pytest.mark.parametrize("lengths", [[12], [5, 12]])
def test_a_draft_over_the_cache_is_pefts(folder: Path, adapted: Any, is_lean: bool, lengths: list[int]) -> None:
    """The prefix by the bare weights, the block with the adapter; both paths of the forward."""
    peft = PeftModel.from_pretrained(make_tiny_model(), folder).eval()
    ids = torch.randint(8, 64, (len(lengths), 18), generator=torch.Generator().manual_seed(1))
    ids[:, 13:] = MASK

    def draft(model: Any, lean: Any, adapter: Any) -> Tensor:
        cache = KVCache(model.config, len(lengths), 20, torch.float32)
        place = positions(len(lengths), 12, 0, None, CPU)
        model.hidden(
            model.encoder.embed_tokens(ids[:, :12]), place, causal(len(lengths), 12, CPU), cache, lean, None
        )  # fmt: skip
        cache.truncate(lengths)
        place = positions(len(lengths), 6, cache.offset, None, CPU)
        pattern = block(len(lengths), 6, CPU, cache.offset)
        if model is not adapted:
            peft.base_model.enable_adapter_layers()
        return model.hidden(model.encoder.embed_tokens(ids[:, 12:]), place, pattern, cache, lean, adapter)

    with torch.no_grad():
        peft.base_model.disable_adapter_layers()
        expected = draft(peft.get_base_model(), None, None)
        lean = lean_forward(adapted.encoder) if is_lean else None
        assert (lean is not None) == is_lean
        ours = draft(adapted, lean, adapted.draft_adapter.deltas(adapted))
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(ours, draft(adapted, lean, None), atol=0.1)


@pytest.mark.parametrize("is_lean", [True, False])
def test_drafts_change_and_the_answer_does_not(adapted: Any, is_lean: bool) -> None:
    """Fails where the adapter is silently not applied, and where it leaks into the verifier."""
    if not is_lean:
        adapted.encoder.layers[0].mlp.register_forward_hook(lambda *args: None)
    adapter = adapted.draft_adapter
    ar = adapted.generate(IDS, mode="ar", max_new_tokens=40, eos_token_id=-1).sequences[0, IDS.shape[1] :].tolist()
    with_it, answer = drafts(adapted)
    adapted.draft_adapter = None
    without, plain_answer = drafts(adapted)
    assert answer == plain_answer == ar
    # The first cycle starts from the same seed and cache in both runs.
    assert with_it[0] != without[0]
    adapted.draft_adapter = adapter
    assert drafts(adapted)[0] == with_it
    adapted.draft_adapter = None
    assert drafts(adapted)[0] == without, "taking it off restores the old drafts"


def test_images_and_ragged_rows_draft_with_it_and_answer_as_before(adapted: Any) -> None:
    picture = images((2, 2), seed=3)
    with_image = torch.cat([torch.full((1, 4), 4), IDS[:, :9]], 1)
    for inputs in ({"input_ids": with_image, **picture}, padded([[10, 11, 12], [13, 14, 15, 16, 17, 18]])):
        options = {"max_new_tokens": 24, "eos_token_id": -1, "block_length": 5}
        ours = adapted.generate(**inputs, mode="linear_spec", **options)
        expected = adapted.generate(**inputs, mode="ar", max_new_tokens=24, eos_token_id=-1)
        assert torch.equal(ours.sequences, expected.sequences)


@pytest.mark.parametrize("mode", ["ar", "diffusion"])
def test_other_modes_take_no_notice(adapted: Any, mode: str) -> None:
    with_it = adapted.generate(IDS, mode=mode, max_new_tokens=20)
    adapted.draft_adapter = None
    without = adapted.generate(IDS, mode=mode, max_new_tokens=20)
    assert torch.equal(with_it.sequences, without.sequences) and with_it.nfe == without.nfe


def test_an_exception_in_a_draft_leaves_nothing_behind(adapted: Any) -> None:
    flags = {name: p.requires_grad for name, p in adapted.named_parameters()}
    with torch.no_grad():
        plain = adapted(input_ids=IDS).logits
    expected = drafts(adapted)
    real = adapted.draft_adapter.deltas(adapted)

    class Broken(DraftAdapter):
        def deltas(self, model: Any) -> Any:
            def fail(x: Tensor) -> Tensor:
                raise RuntimeError("out of memory")

            return [real[0], fail]

    good = adapted.draft_adapter
    adapted.draft_adapter = Broken(good.folder, good.rank, good.scale, good.factors)
    with pytest.raises(RuntimeError, match="out of memory"):
        drafts(adapted)
    with torch.no_grad():
        assert torch.equal(adapted(input_ids=IDS).logits, plain)
    adapted.draft_adapter = good
    stream = adapted.stream(IDS, mode="linear_spec", max_new_tokens=40)
    next(stream), next(stream)
    stream.close()
    with torch.no_grad():
        assert torch.equal(adapted(input_ids=IDS).logits, plain)
    assert drafts(adapted) == expected
    assert {name: p.requires_grad for name, p in adapted.named_parameters()} == flags


def test_a_forward_inside_a_draft_is_without_it(adapted: Any) -> None:
    with torch.no_grad():
        plain = adapted(input_ids=IDS).logits
        inner = []

        def nested(x: Tensor) -> Tensor:
            inner.append(adapted(input_ids=IDS).logits)
            return real[0](x)

        real = adapted.draft_adapter.deltas(adapted)
        expected = adapted(input_ids=IDS, adapter=real).logits
        assert torch.equal(adapted(input_ids=IDS, adapter=[nested, real[1]]).logits, expected)
    assert len(inner) == 1 and torch.equal(inner[0], plain)


def test_threads_do_not_meet(adapted: Any) -> None:
    """One thread drafts with the adapter while others want the plain logits and plain drafts of the same weights."""
    with torch.inference_mode():
        plain = adapted(input_ids=IDS).logits
    expected = drafts(adapted)
    wrong: list[str] = []

    def draft() -> None:
        for _ in range(6):
            if drafts(adapted) != expected:
                wrong.append("drafts")

    def read() -> None:
        for _ in range(60):
            with torch.inference_mode():
                if not torch.equal(adapted(input_ids=IDS).logits, plain):
                    wrong.append("logits")

    threads = [threading.Thread(target=target) for target in (draft, read, draft, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_step_walks_over_modules(adapted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    original = nn.Module.named_modules

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        walks.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    numbers = []
    for budget in (4, 40):
        walks.clear()
        drafts(adapted, max_new_tokens=budget)
        numbers.append(len(walks))
    assert numbers[0] == numbers[1]


def test_it_follows_the_models_dtype_and_is_copied_there_once(folder: Path) -> None:
    model = make_tiny_model()
    model.draft_adapter = read_adapter(folder, model)
    first = model.draft_adapter.deltas(model)
    assert model.draft_adapter.deltas(model) is first
    model.bfloat16()
    with_it, answer = drafts(model)
    model.draft_adapter = None
    assert drafts(model)[1] == answer and drafts(model)[0] != with_it


def test_checkpointed_layers_take_it_too(adapted: Any) -> None:
    deltas = adapted.draft_adapter.deltas(adapted)
    plain = adapted(input_ids=IDS, adapter=deltas).logits
    adapted.gradient_checkpointing_enable()
    assert torch.equal(adapted.train()(input_ids=IDS, adapter=deltas).logits, plain)


def test_factors_on_other_layers_are_refused(tmp_path: Path) -> None:
    other = peft_folder(tmp_path, r"encoder\.layers\.\d+\.self_attn\.(o_proj|q_proj)")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: a draft adapter goes on self_attn\.o_proj"):
        read_adapter(other, make_tiny_model())


def test_load_attaches_what_drafts_use(folder: Path, adapted: Any, tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    loaded = load(tmp_path, adapter=folder)[0]
    assert drafts(loaded) == drafts(adapted)
    assert drafts(load(tmp_path, adapter="auto")[0])[0] != drafts(adapted)[0], "no folder beside the weights"
    peft_folder(tmp_path / "linear_spec_lora")
    assert drafts(load(tmp_path, adapter="auto")[0]) == drafts(adapted)
