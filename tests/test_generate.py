"""generate() and stream(): the transformers conventions around the decoders."""

import re

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextDiffusionStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from trimode_vlm import TriModeGenerationConfig

MODES = ["ar", "diffusion", "linear_spec", "quadratic_spec"]


@pytest.fixture(scope="module")
def inputs(chat_model, processor):
    from PIL import Image

    image = Image.new("RGB", (84, 56), "teal")
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


class Recorder(BaseStreamer):
    def __init__(self):
        self.final, self.drafts, self.ended = [], [], False

    def put(self, value):
        self.final.append(value.flatten().tolist())

    def put_draft(self, value, **kwargs):
        self.drafts.append(value.flatten().tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("mode", MODES)
def test_streamer_gets_the_prompt_then_exactly_the_answer(chat_model, inputs, mode):
    recorder = Recorder()
    out = chat_model.generate(**inputs, mode=mode, max_new_tokens=30, streamer=recorder)
    prompt = inputs["input_ids"][0].tolist()
    assert recorder.final[0] == prompt and recorder.ended
    assert prompt + sum(recorder.final[1:], []) == out.sequences[0].tolist()
    assert bool(recorder.drafts) == (mode != "ar")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("streamer", [TextStreamer, TextDiffusionStreamer])
def test_transformers_streamers_print_the_answer(chat_model, processor, inputs, streamer, mode, capsys):
    """What is left on a terminal: drafts are drawn behind the answer and wiped, so no token stands there twice."""
    out = chat_model.generate(
        **inputs, mode=mode, max_new_tokens=40, streamer=streamer(processor.tokenizer, skip_prompt=True)
    )
    answer = processor.tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :])
    # TextDiffusionStreamer saves the cursor, prints the draft, and later restores the cursor and clears.
    left = re.sub(r"\x1b7.*?\x1b8\x1b\[J", "", capsys.readouterr().out, flags=re.DOTALL)
    assert left.strip("\n") == answer.strip("\n")


@pytest.mark.parametrize("mode", ["diffusion", "linear_spec", "quadratic_spec"])
def test_drafts_hold_nothing_that_is_already_final(chat_model, inputs, mode):
    class Log(Recorder):
        def put(self, value):
            super().put(value)
            self.drafts.append(None)

    log = Log()
    options = {"threshold": 0.02} if mode == "diffusion" else {}
    chat_model.generate(**inputs, mode=mode, max_new_tokens=40, block_length=8, streamer=log, **options)
    drafts = [d for d in log.drafts if d is not None]
    assert drafts and all(len(d) < 8 for d in drafts)
    if mode == "diffusion":
        assert all(d[0] == chat_model.config.mask_token_id for d in drafts)


@pytest.mark.parametrize("mode", MODES)
def test_stream_events_add_up_to_the_output(chat_model, inputs, mode):
    out = chat_model.generate(**inputs, mode=mode, max_new_tokens=30)
    stream = chat_model.stream(**inputs, mode=mode, max_new_tokens=30)
    events = list(stream)
    assert sum((e.token_ids for e in events), []) == out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert events[-1].finish_reason == out.finish_reasons[0] and events[-1].num_forwards == out.nfe[0]
    assert all(e.finish_reason is None for e in events[:-1])
    assert stream.output().num_new_tokens == out.num_new_tokens
    if mode == "diffusion":
        assert all(chat_model.config.mask_token_id not in e.token_ids for e in events)
        assert any(chat_model.config.mask_token_id in e.canvas for e in events)


@pytest.mark.parametrize("mode", MODES)
def test_closing_a_stream_ends_the_forwards(chat_model, inputs, mode):
    calls = []
    hook = chat_model.encoder.register_forward_hook(lambda *a: calls.append(1))
    try:
        stream = chat_model.stream(**inputs, mode=mode, max_new_tokens=200)
        next(stream), next(stream)
        before = len(calls)
        stream.close()
        assert list(stream) == [] and len(calls) == before
        assert stream.output().num_new_tokens[0] >= 1 and stream.output().finish_reasons == [None]
    finally:
        hook.remove()


@pytest.mark.parametrize("mode", MODES)
def test_cache_continues_a_conversation_without_computing_it_again(chat_model, processor, inputs, mode):
    lengths = []
    hook = chat_model.encoder.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    try:
        first = chat_model.generate(**inputs, mode=mode, max_new_tokens=20)
        more = processor.tokenizer("And this?", return_tensors="pt").input_ids
        longer = {**inputs, "input_ids": torch.cat((first.sequences, more), 1)}
        longer["attention_mask"] = torch.ones_like(longer["input_ids"])
        lengths.clear()
        again = chat_model.generate(**longer, mode=mode, max_new_tokens=20)
        whole = lengths[0]
        lengths.clear()
        continued = chat_model.generate(**longer, mode=mode, max_new_tokens=20, cache=first.cache)
        assert torch.equal(again.sequences, continued.sequences)
        # What the last causal pass wrote is held; the tokens emitted since then, and the new turn, are not.
        assert lengths[0] <= more.shape[1] + chat_model.config.block_length + 1 < whole
    finally:
        hook.remove()


def test_cache_notices_another_picture_and_another_history(chat_model, inputs):
    first = chat_model.generate(**inputs, mode="ar", max_new_tokens=8)
    longer = {**inputs, "input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    other = {**longer, "pixel_values": longer["pixel_values"] + 1}
    expected = chat_model.generate(**other, mode="ar", max_new_tokens=8)
    got = chat_model.generate(**other, mode="ar", max_new_tokens=8, cache=first.cache)
    assert torch.equal(expected.sequences, got.sequences)
    changed = {**longer, "input_ids": longer["input_ids"].clone()}
    changed["input_ids"][0, -5] += 1
    expected = chat_model.generate(**changed, mode="ar", max_new_tokens=8)
    got = chat_model.generate(**changed, mode="ar", max_new_tokens=8, cache=got.cache)
    assert torch.equal(expected.sequences, got.sequences)


def test_branches_from_one_cache_do_not_mix(chat_model, inputs):
    """A, then an edited history B from A's cache, then A's cache again: each answer equals that of a fresh call."""
    first = chat_model.generate(**inputs, mode="ar", max_new_tokens=12, eos_token_id=-1)

    def ask(ids, **options):
        whole = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return chat_model.generate(**whole, mode="ar", max_new_tokens=8, eos_token_id=-1, **options).sequences

    kept, edited = first.sequences, first.sequences.clone()
    edited[0, -9:] = torch.randint(20, 60, (9,))
    for ids in (edited, kept, edited, kept):
        assert torch.equal(ask(ids, cache=first.cache), ask(ids))


def test_unseeded_samples_differ_and_obey_the_global_seed(chat_model, inputs):
    options = {"mode": "ar", "max_new_tokens": 20, "do_sample": True, "temperature": 1.5, "eos_token_id": -1}
    a, b = (chat_model.generate(**inputs, **options).sequences for _ in range(2))
    assert not torch.equal(a, b)
    torch.manual_seed(3)
    a = chat_model.generate(**inputs, **options).sequences
    torch.manual_seed(3)
    assert torch.equal(a, chat_model.generate(**inputs, **options).sequences)


def test_the_cache_is_copied_seldom(chat_model, inputs, monkeypatch):
    from trimode_vlm import prefill
    from trimode_vlm.cache import KVCache

    grown = []
    reserve = KVCache.reserve
    monkeypatch.setattr(prefill, "FIRST_ROOM", 4)
    monkeypatch.setattr(
        KVCache, "reserve", lambda self, n: (grown.append(1) if n > self.capacity else None, reserve(self, n))[1]
    )
    chat_model.generate(**inputs, mode="ar", max_new_tokens=200, eos_token_id=-1)
    assert 1 <= len(grown) <= 6


def test_images_of_equal_size_run_as_one_batch(chat_model, inputs):
    batches = []
    hook = chat_model.encoder.vision_tower.register_forward_pre_hook(lambda m, args: batches.append(len(args[0])))
    try:
        three = {k: inputs[k].repeat(3, 1) for k in ("input_ids", "attention_mask", "image_sizes")}
        three["pixel_values"] = inputs["pixel_values"].repeat(3, 1, 1, 1)
        chat_model.generate(**three, mode="ar", max_new_tokens=2)
    finally:
        hook.remove()
    assert batches == [3]


def test_totals_are_pooled_over_rows(chat_model, inputs):
    two = {k: inputs[k].repeat(2, 1) for k in ("input_ids", "attention_mask", "image_sizes")}
    two["pixel_values"] = inputs["pixel_values"].repeat(2, 1, 1, 1)
    out = chat_model.generate(**two, mode="linear_spec", max_new_tokens=15, eos_token_id=-1, block_length=4)
    tokens, decode = sum(out.num_new_tokens), sum(out.nfe) - sum(out.nfe_prefill)
    assert out.total_tokens_per_forward == (tokens - 2) / decode
    assert out.total_tokens_per_forward_end_to_end == tokens / sum(out.nfe)


def test_output_before_the_first_event_is_an_empty_answer(chat_model, inputs):
    stream = chat_model.stream(**inputs, mode="ar")
    out = stream.output()
    assert torch.equal(out.sequences, inputs["input_ids"]) and out.num_new_tokens == [0] and out.nfe == [0]


def test_peft_for_causal_language_models_wraps_and_generates(chat_model, inputs):
    import copy

    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(chat_model)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"], r=2))
    out = wrapped.generate(**inputs, mode="linear_spec", max_new_tokens=5)
    expected = chat_model.generate(**inputs, mode="linear_spec", max_new_tokens=5)
    assert torch.equal(out.sequences, expected.sequences), "a fresh LoRA changes nothing"


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_attn_implementation_chooses_the_kernel(chat_model, inputs, tmp_path, name):
    from trimode_vlm import TriModeVLM

    chat_model.save_pretrained(tmp_path)
    model = TriModeVLM.from_pretrained(tmp_path, attn_implementation=name)
    assert model.encoder.implementation == {"eager": "dense", "flex_attention": "flex"}[name]
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, chat_model(**inputs).logits, atol=1e-3, rtol=1e-4)


def test_settings_of_other_libraries_are_left_out_with_a_warning(chat_model, inputs, tmp_path):
    import json

    from trimode_vlm import TriModeVLM

    chat_model.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"no_repeat_ngram_size": 3, "max_new_tokens": 3, "eos_token_id": -1}))
    with pytest.warns(UserWarning, match="no_repeat_ngram_size"):
        model = TriModeVLM.from_pretrained(tmp_path)
    assert model.generate(**inputs).num_new_tokens == [3]


def test_max_length_counts_the_prompt(chat_model, inputs):
    n = inputs["input_ids"].shape[1]
    out = chat_model.generate(**inputs, mode="ar", max_length=n + 4, eos_token_id=-1)
    assert out.num_new_tokens == [4]
    with pytest.raises(ValueError, match="leaves no room"):
        chat_model.generate(**inputs, mode="ar", max_length=n)


@pytest.mark.parametrize("mode", MODES)
def test_stop_string_and_stopping_criterion_end_the_answer(chat_model, processor, inputs, mode):
    free = chat_model.generate(**inputs, mode=mode, max_new_tokens=30, eos_token_id=-1)
    new = free.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    tokenizer = processor.tokenizer
    text = tokenizer.decode(new[:7])
    stop = text[len(tokenizer.decode(new[:5])) :]
    first = next(i for i in range(1, 31) if stop in tokenizer.decode(new[:i]))
    out = chat_model.generate(
        **inputs, mode=mode, max_new_tokens=30, eos_token_id=-1, stop_strings=[stop], tokenizer=tokenizer
    )
    assert out.num_new_tokens == [first] and out.finish_reasons == ["stop"]

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= inputs["input_ids"].shape[1] + 9])

    out = chat_model.generate(
        **inputs, mode=mode, max_new_tokens=30, eos_token_id=-1, stopping_criteria=StoppingCriteriaList([After()])
    )
    assert out.num_new_tokens == [9] and out.sequences[0, -9:].tolist() == new[:9]
    with pytest.raises(ValueError, match="tokenizer="):
        chat_model.generate(**inputs, mode=mode, stop_strings=[stop])


def test_logits_processors_act_alike_in_ar_and_self_speculation(chat_model, inputs):
    """A repetition penalty looks at all earlier ids, so it tells whether each position gets its own context."""
    seen = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids[0].tolist())
            return scores

    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), Spy()])
    options = {"max_new_tokens": 25, "eos_token_id": -1, "logits_processor": processors}
    ar = chat_model.generate(**inputs, mode="ar", **options)
    contexts = list(seen)
    spec = chat_model.generate(**inputs, mode="linear_spec", block_length=5, **options)
    plain = chat_model.generate(**inputs, mode="ar", max_new_tokens=25, eos_token_id=-1)
    assert torch.equal(ar.sequences, spec.sequences) and not torch.equal(ar.sequences, plain.sequences)
    answer = ar.sequences[0].tolist()
    n = inputs["input_ids"].shape[1]
    assert contexts == [answer[: n + i] for i in range(25)]
    with pytest.raises(ValueError, match="logits_processor"):
        chat_model.generate(**inputs, mode="diffusion", **options)


def test_seed_makes_a_sampled_answer_repeatable_and_rows_differ(chat_model, inputs):
    options = {"mode": "linear_spec", "max_new_tokens": 20, "do_sample": True, "eos_token_id": -1}
    two = {**{k: v.repeat(2, 1) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}}
    two |= {k: torch.cat((inputs[k], inputs[k])) for k in ("pixel_values", "image_sizes")}
    a, b = (chat_model.generate(**two, seed=5, **options).sequences for _ in range(2))
    assert torch.equal(a, b) and not torch.equal(a[0], a[1])
    alone = chat_model.generate(**inputs, seed=6, **options).sequences
    assert torch.equal(alone[0], a[1]), "row b draws from the stream of seed + b"


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("ar", {}),
        ("diffusion", {"block_length": 6, "threshold": 0.03}),
        ("diffusion", {"block_length": 6, "commit_rule": "entropy", "entropy_bound": 9.0}),
        ("linear_spec", {"block_length": 4}),
    ],
)
def test_sampled_rows_in_a_batch_are_what_they_are_alone(chat_model, mode, options):
    """Rows finish their blocks and budgets at different times; none may use up random numbers of its own meanwhile."""
    rows = torch.randint(20, 600, (6, 9), generator=torch.Generator().manual_seed(4))
    options = {"mode": mode, "do_sample": True, "temperature": 0.7, "max_new_tokens": 11, "eos_token_id": -1, **options}
    together = chat_model.generate(rows, seed=100, **options)
    assert mode == "ar" or len(set(together.nfe)) > 1, "the rows must differ in pace, or nothing is tested"
    for i in range(6):
        alone = chat_model.generate(rows[i : i + 1], seed=100 + i, **options)
        assert torch.equal(alone.sequences[0], together.sequences[i]) and alone.nfe[0] == together.nfe[i]


def test_the_released_models_calls_return_ids_and_forwards(chat_model, inputs):
    ids, nfe = chat_model.ar_generate(inputs["input_ids"][:, -5:], max_new_tokens=10, eos_token_id=-1)
    assert ids.shape == (1, 15) and nfe == 10
    spec, spec_nfe = chat_model.linear_spec_generate(
        inputs["input_ids"][:, -5:], max_new_tokens=10, block_length=4, eos_token_id=-1
    )
    out = chat_model.generate(
        inputs["input_ids"][:, -5:], mode="linear_spec", max_new_tokens=10, block_length=4, eos_token_id=-1
    )
    assert torch.equal(spec, ids) and spec_nfe == out.nfe[0]


def test_generation_config_travels_with_the_model(chat_model, inputs, tmp_path):
    from trimode_vlm import TriModeVLM

    before = chat_model.generation_config
    try:
        chat_model.generation_config = TriModeGenerationConfig(
            mode="diffusion", threshold=0.5, block_length=6, max_new_tokens=13, eos_token_id=4
        )
        chat_model.save_pretrained(tmp_path)
    finally:
        chat_model.generation_config = before
    loaded = TriModeVLM.from_pretrained(tmp_path)
    config = loaded.generation_config
    assert isinstance(config, TriModeGenerationConfig)
    assert (config.mode, config.threshold, config.block_length, config.eos_token_id) == ("diffusion", 0.5, 6, 4)
    out = loaded.generate(**inputs)
    assert out.num_new_tokens[0] <= 13
    assert len(loaded.generate(**inputs, mode="ar", max_new_tokens=3, eos_token_id=-1).sequences[0]) == 3 + len(
        inputs["input_ids"][0]
    )


def test_image_text_pipeline_answers(chat_model, processor):
    from PIL import Image

    pipe = pipeline("image-text-to-text", model=chat_model, processor=processor)
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": Image.new("RGB", (56, 56))}, {"type": "text", "text": "?"}],
        }
    ]
    answer = pipe(text=messages, max_new_tokens=6, return_full_text=False)
    assert isinstance(answer[0]["generated_text"], str)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "linear"}, "did you mean 'linear_spec'"),
        ({"treshold": 0.5}, "did you mean 'threshold'"),
        ({"mode": "ar", "threshold": 0.5}, "mode 'ar' does not use 'threshold'"),
        ({"mode": "linear_spec", "commit_rule": "entropy"}, "does not use 'commit_rule'"),
        ({"mode": "diffusion", "threshold": 1.5}, "threshold must lie in"),
        ({"mode": "diffusion", "commit_rule": "surest"}, "unknown commit_rule"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"mode": "linear_spec", "block_length": 5000}, "at most 1024"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature"),
        ({"do_sample": True, "temperature": float("inf")}, "temperature"),
        ({"do_sample": True, "temperature": 1e-300}, "temperature"),
        ({"do_sample": True, "temperature": "hot"}, "must be a number"),
        ({"do_sample": True, "top_k": 1.5}, "top_k must be a whole number"),
        ({"seed": "x"}, "seed"),
        ({"mode": "diffusion", "threshold": float("nan")}, "threshold"),
        ({"cache": 5}, "cache= takes"),
        ({"mode": "diffusion", "block_length": 0}, "block_length"),
        ({"do_sample": True, "temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": 0.5}, "do_sample=True"),
        ({"top_k": 5}, "do_sample=True"),
        ({"top_p": 0.5}, "do_sample=True"),
        ({"mode": "diffusion", "commit_rule": "entropy", "threshold": 0.5}, "threshold has no effect"),
        ({"mode": "diffusion", "entropy_bound": 0.5}, "entropy_bound has no effect"),
        ({"top_p": 0.0}, "top_p"),
        ({"num_beams": 4}, "unknown generation option"),
    ],
)
def test_bad_options_are_refused_in_one_line(chat_model, inputs, options, message):
    with pytest.raises(ValueError, match=message) as error:
        chat_model.generate(**inputs, **options)
    assert "\n" not in str(error.value)


def test_a_foreign_generation_config_with_unsupported_wishes_is_refused(chat_model, inputs):
    from transformers import GenerationConfig

    with pytest.raises(ValueError, match="num_beams"):
        chat_model.generate(**inputs, generation_config=GenerationConfig(num_beams=3))


def test_a_text_only_model_takes_no_images(tiny_text_model, inputs):
    with pytest.raises(ValueError, match="text only"):
        tiny_text_model.generate(**inputs)


def test_a_cache_and_padding_are_refused_together(chat_model, inputs):
    from trimode_vlm.cache import KVCache

    mask = inputs["attention_mask"].clone()
    mask[0, 0] = 0
    cache = KVCache(chat_model.config, 1, 100, torch.float32)
    with pytest.raises(ValueError, match="rows without padding"):
        chat_model(input_ids=inputs["input_ids"], attention_mask=mask, cache=cache)


def test_bad_inputs_are_refused(chat_model, inputs):
    limit = chat_model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"{limit} positions"):
        chat_model.generate(torch.full((1, limit), 20))
    with pytest.raises(ValueError, match="no pixel_values"):
        chat_model.generate(inputs["input_ids"])
    with pytest.raises(ValueError, match="shape of input_ids"):
        chat_model.generate(inputs["input_ids"], attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        chat_model.generate(torch.tensor([[5, 100_000]]))
    with pytest.raises(ValueError, match="pixel_values must have"):
        chat_model.generate(**{**inputs, "pixel_values": inputs["pixel_values"][0]})
    with pytest.raises(ValueError, match="2 image_sizes for 1 images"):
        chat_model.generate(**{**inputs, "image_sizes": inputs["image_sizes"].repeat(2, 1)})
    doubled = {**inputs, "pixel_values": inputs["pixel_values"].repeat(2, 1, 1, 1)}
    doubled["image_sizes"] = inputs["image_sizes"].repeat(2, 1)
    with pytest.raises(ValueError, match="found 6 image tokens in input_ids but the 2 images need 12"):
        chat_model.generate(**doubled)
