"""The shipped model: right on its examples, speculation changes no token, batches change no row, forwards count."""

import json

import pytest
import torch
from conftest import EXAMPLES, REPOSITORY

import trimode_vlm
from trimode_vlm.training.synthetic import HELD_OUT_SEED, TASKS, make_sample

MODES = ("ar", "diffusion", "linear_spec", "quadratic_spec")
SEED = HELD_OUT_SEED + 500_000_000  # away from the samples that the README's table reports


@pytest.fixture(scope="module")
def nano():
    return trimode_vlm.load("nano")


def encode(processor, samples, **options):
    conversations = [sample.messages[:1] for sample in samples]
    return processor.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", padding=True
    )


def test_the_checkpoint_is_small_and_safe():
    files = [path for path in (REPOSITORY / "trimode_vlm" / "nano").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files if path.suffix == ".safetensors") <= 16 * 2**20
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pth", ".pkl"}]


def test_the_shipped_tokenizer_is_the_one_that_the_code_builds(nano, tokenizer):
    assert nano[1].tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("mode", MODES)
def test_every_shipped_example_is_answered_right(nano, mode):
    model, processor = nano
    for example in json.loads((EXAMPLES / "questions.json").read_text()):
        content = [
            {"type": "image", "image": str(EXAMPLES / example["image"])},
            {"type": "text", "text": example["question"]},
        ]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        out = model.generate(**inputs, mode=mode)
        answer = processor.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == example["answer"], (example["image"], mode)


def test_self_speculation_equals_ar_on_300_held_out_prompts(nano):
    """In ragged batches of all tasks, compared token by token; every row ends by its end token."""
    model, processor = nano
    names = list(TASKS)
    samples = [make_sample(names[i % len(names)], SEED + i) for i in range(300)]
    for start in range(0, 300, 30):
        inputs = encode(processor, samples[start : start + 30])
        ar, spec = (model.generate(**inputs, mode=mode) for mode in ("ar", "linear_spec"))
        assert torch.equal(ar.sequences, spec.sequences)
        assert ar.num_new_tokens == spec.num_new_tokens and set(ar.finish_reasons) == {"stop"}
        assert ar.total_tokens_per_forward == 1.0 < spec.total_tokens_per_forward


def test_quadratic_self_speculation_equals_ar_in_fewer_forwards_than_linear(nano):
    """Eight held-out answers, most of over 100 tokens, as one ragged batch."""
    model, processor = nano
    samples = [make_sample(("grid_json", "receipt_json")[i % 2], SEED + i) for i in range(8)]
    inputs = encode(processor, samples)
    ar = model.generate(**inputs, mode="ar")
    linear, quadratic = (
        model.generate(**inputs, mode=mode, block_length=8) for mode in ("linear_spec", "quadratic_spec")
    )
    assert torch.equal(ar.sequences, quadratic.sequences) and ar.num_new_tokens == quadratic.num_new_tokens
    assert sum(ar.num_new_tokens) > 8 * 100
    assert quadratic.total_tokens_per_forward > 1.3 * linear.total_tokens_per_forward


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_a_ragged_batch_are_what_they_are_alone(nano, mode):
    model, processor = nano
    names = ["grid_json", "receipt_total", "text_spell", "chart_describe", "receipt_item"]
    samples = [make_sample(name, SEED + i) for i, name in enumerate(names)]
    together = encode(processor, samples)
    batch = model.generate(**together, mode=mode)
    prompt = together["input_ids"].shape[1]
    for i, sample in enumerate(samples):
        inputs = encode(processor, [sample])
        alone = model.generate(**inputs, mode=mode)
        n = alone.num_new_tokens[0]
        assert batch.num_new_tokens[i] == n and batch.nfe[i] == alone.nfe[0]
        assert torch.equal(batch.sequences[i, prompt : prompt + n], alone.sequences[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("mode", MODES)
def test_forwards_are_those_that_a_hook_counts(nano, mode):
    model, processor = nano
    calls = []
    hook = model.encoder.register_forward_hook(lambda *args: calls.append(1))
    try:
        out = model.generate(**encode(processor, [make_sample("receipt_json", SEED)]), mode=mode)
    finally:
        hook.remove()
    assert out.nfe == [len(calls)] and out.total_nfe == len(calls) and out.nfe_prefill == [1]
    decode = len(calls) - 1
    assert out.tokens_per_forward == [(out.num_new_tokens[0] - 1) / decode]


def test_a_conversation_goes_on_from_its_cache(nano):
    """Two turns about one picture; the second is answered from the cache, as it is without it."""
    model, processor = nano
    sample = make_sample("receipt_item", SEED + 3)
    messages = sample.messages[:1]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    first = model.generate(**processor.apply_chat_template(messages, **options))
    messages = [*sample.messages, {"role": "user", "content": "What is the total?"}]
    inputs = processor.apply_chat_template(messages, **options)
    fresh = model.generate(**inputs)
    continued = model.generate(**inputs, cache=first.cache)
    assert torch.equal(fresh.sequences, continued.sequences)
