"""What users reported about one row: ends, budgets, exactness, the cache; sections follow pitfalls.md, Decoding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import make_tiny_model, tiny_config
from decoding_cases import (
    END,
    MASK,
    MODES,
    PROMPT,
    SELF_SPECULATION,
    V,
    answers,
    generate,
    options,
    prompts,
    says,
    speaker,
)
from naive import Answer, Oracle, by_position, count_forwards, scripted_model
from torch import Tensor
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor


def check_against(oracle: Answer, token_ids: list[int], out: Any, row: int = 0) -> None:
    assert token_ids == oracle.token_ids
    assert out.finish_reasons[row] == oracle.finish_reason
    assert out.nfe[row] == oracle.nfe and out.nfe_prefill[row] == 1
    assert out.accepted_lengths[row] == oracle.accepted_lengths
    assert out.num_new_tokens[row] == len(token_ids)


# --- An end token inside a block ends the output there, in all modes; what follows is neither returned nor counted.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end_at", [0, 1, 2, 3, 4, 5, 7, 8, 11])
def test_an_end_token_ends_the_output_where_it_stands(mode: str, end_at: int) -> None:
    """Block length 4, so `end_at` is a seed, inside a block, at its last place, and in later blocks."""
    words = [20 + i for i in range(12)]
    words[end_at] = END
    model = speaker(words)
    sizes = count_forwards(model)
    [tokens], out = generate(model, [PROMPT], max_new_tokens=12, **options(mode, 4))
    assert tokens == words[: end_at + 1]
    assert out.sequences[0].tolist() == PROMPT + tokens
    assert (out.finish_reasons, out.num_new_tokens) == (["stop"], [end_at + 1])
    assert out.nfe == [len(sizes)] == [out.total_nfe]
    decode_forwards = len(sizes) - 1
    assert out.tokens_per_forward == [end_at / decode_forwards if decode_forwards else 1.0]
    assert out.tokens_per_forward_end_to_end == [(end_at + 1) / len(sizes)]
    assert sum(out.accepted_lengths[0]) == (end_at if mode in SELF_SPECULATION else 0)


@pytest.mark.parametrize("mode", MODES)
def test_any_of_several_end_tokens_ends_the_output(mode: str) -> None:
    [tokens], out = generate(
        speaker([20, 21, 9, 22, END]), [PROMPT], max_new_tokens=5, eos_token_id=[END, 9], **options(mode, 4)
    )
    assert tokens == [20, 21, 9] and out.finish_reasons == ["stop"]


@pytest.mark.parametrize("threshold", [0.9, None])
def test_diffusion_does_not_stop_at_an_end_token_behind_an_open_mask(threshold: float | None) -> None:
    """The end token is committed first, being surest; the words before it still come."""
    table = says([20, 21, 22, 23], sure=1.0)
    table[len(PROMPT) + 3] = says([END], first=len(PROMPT) + 3)[len(PROMPT) + 3]
    model = scripted_model(tiny_config(vision=False), by_position(says([20], shift=1)), by_position(table))
    out = model.generate(
        torch.tensor([PROMPT]), mode="diffusion", block_length=4, threshold=threshold, max_new_tokens=9
    )
    assert answers(out, len(PROMPT)) == [[20, 21, 22, END]] and out.nfe == [1 + 3]


@pytest.mark.parametrize("mode", MODES)
def test_a_stopping_criterion_ends_the_output_inside_a_block(mode: str) -> None:
    words = [20 + i for i in range(12)]

    def rule(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == 25

    [tokens], out = generate(speaker(words), [PROMPT], max_new_tokens=12, stopping_criteria=[rule], **options(mode, 4))
    assert tokens == words[:6] and out.finish_reasons == ["stop"]


# --- Any prompt length, any max_new_tokens, any block_length: the oracle's tokens, forwards and finish reason.


@pytest.mark.parametrize("block_length", [1, 2, 5, 32])
@pytest.mark.parametrize("mode", MODES)
def test_decoders_equal_the_cacheless_oracle(mode: str, block_length: int) -> None:
    model = make_tiny_model(seed=1, vision=False)
    end_ids = [END, 17, 30]
    oracle = Oracle(model, end_ids, model.config.never_sampled_ids)
    reasons = set()
    for prompt, budget in itertools.product(prompts(3, seed=1, longest=9), (1, 2, 7, 17)):
        expected = oracle.decode(mode, prompt, budget, block_length, 0.3)
        chosen = options(mode, block_length, 0.3)
        [tokens], out = generate(model, [prompt], max_new_tokens=budget, eos_token_id=end_ids, **chosen)
        check_against(expected, tokens, out)
        reasons.add(expected.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("mode", MODES)
def test_decoders_equal_the_cacheless_oracle_with_images(mode: str, tiny_model: Any) -> None:
    images = {"pixel_values": torch.randn(2, 3, 56, 84), "image_sizes": torch.tensor([[56, 84], [28, 28]])}
    prompt = [20, 5, 4, 4, 4, 6, 4, 4, 4, 7, 21, 5, 4, 7, 22]
    oracle = Oracle(tiny_model, [END], tiny_model.config.never_sampled_ids, images)
    out = tiny_model.generate(torch.tensor([prompt]), max_new_tokens=11, **images, **options(mode, 4, 0.3))
    check_against(oracle.decode(mode, prompt, 11, 4, 0.3), answers(out, len(prompt))[0], out)


@pytest.mark.parametrize("threshold", [1e-6, 0.05, 0.2, 0.9, 1.0, None])
def test_diffusion_commits_by_the_rule(threshold: float | None, tiny_text_model: Any) -> None:
    oracle = Oracle(tiny_text_model, [], tiny_text_model.config.never_sampled_ids)
    expected = oracle.diffusion(PROMPT, 16, 8, threshold)
    out = tiny_text_model.generate(
        torch.tensor([PROMPT]),
        mode="diffusion",
        block_length=8,
        threshold=threshold,
        max_new_tokens=16,
        eos_token_id=[],
    )
    check_against(expected, answers(out, len(PROMPT))[0], out)
    if threshold is None:
        assert out.tokens_per_forward == [15 / 15] and out.nfe == [1 + 7 + 1 + 7]


@pytest.mark.parametrize("mode", MODES)
def test_the_budget_is_exact(mode: str) -> None:
    model = speaker([20 + i % 9 for i in range(60)])
    for budget, block_length in itertools.product((1, 3, 4, 5, 8, 31), (1, 2, 4, 7, 40)):
        [tokens], out = generate(model, [PROMPT], max_new_tokens=budget, **options(mode, block_length))
        assert tokens == [20 + i % 9 for i in range(budget)] and out.finish_reasons == ["length"]


@pytest.mark.parametrize("mode", MODES)
def test_the_models_positions_bound_the_budget(mode: str) -> None:
    model = make_tiny_model(vision=False, max_position_embeddings=24)
    [tokens], out = generate(model, [[9] * 20], max_new_tokens=50, eos_token_id=[], **options(mode, 8))
    assert len(tokens) == 4 and out.finish_reasons == ["length"]
    with pytest.raises(ValueError, match="24 tokens but the model has 24 positions"):
        model.generate(torch.full((1, 24), 9), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_mask_image_and_filler_ids_are_never_returned_even_when_likeliest(mode: str) -> None:
    """Every position wants the mask most, then image tokens, padding, bos, then a word; drafts and verdicts alike."""
    words = [20 + i for i in range(12)]
    banned = [MASK, 4, 5, 6, 7, 0, 1]
    causal, ahead = says(words, shift=1), says(words)
    for table in (causal, ahead):
        table[:, banned] = torch.tensor([60.0, *[50.0] * 6])
    model = scripted_model(tiny_config(), by_position(causal), by_position(ahead))
    for sampling in ({}, {"do_sample": True, "temperature": 0.5, "seed": 3}):
        [tokens], _ = generate(model, [PROMPT], max_new_tokens=12, **options(mode, 5), **sampling)
        assert tokens == words


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filler", ["pad_token_id", "bos_token_id"])
def test_a_filler_that_is_an_end_token_ends_the_answer(mode: str, filler: str) -> None:
    """Padding or bos that ends answers, by the config or by the request, is sampled like any end token."""
    for config, request in (({filler: 9, "eos_token_id": 9}, {}), ({filler: 9}, {"eos_token_id": [END, 9]})):
        model = speaker([20, 21, 22, 9, 23], **config)
        [tokens], out = generate(model, [PROMPT], max_new_tokens=8, **request, **options(mode, 4))
        assert tokens == [20, 21, 22, 9] and out.finish_reasons == ["stop"]


def test_ids_that_no_decoder_may_emit() -> None:
    config = {"mask_token_id": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert tiny_config(vision=False, **config).never_sampled_ids == [0, 1, 3]
    assert tiny_config(**config).never_sampled_ids == [0, 1, 3, 4, 5, 6, 7]
    assert tiny_config(vision=False, **config | {"eos_token_id": [0, 2]}).never_sampled_ids == [1, 3]
    assert tiny_config(vision=False, **config | {"pad_token_id": None, "bos_token_id": 2}).never_sampled_ids == [3]
    assert tiny_config(vision=False, **config | {"pad_token_id": -1, "bos_token_id": 64}).never_sampled_ids == [3]
    assert tiny_config(vision=False, **config).banned_ids([1]) == [0, 3]


# --- Greedy self-speculation equals greedy AR, token for token, in fp32, also with exact ties.


@pytest.mark.parametrize("mode", SELF_SPECULATION)
@pytest.mark.parametrize("seed", range(4))
def test_greedy_self_speculation_equals_ar_on_200_prompts(seed: int, mode: str) -> None:
    """Four random models, 50 prompts each in ragged batches, block lengths that do not divide the budget."""
    model = make_tiny_model(seed=seed, vision=False)
    rows = prompts(50, seed)
    expected, _ = generate(model, rows, mode="ar", max_new_tokens=24)
    longest = 32 if mode == "linear_spec" else 11
    tokens, out = generate(model, rows, mode=mode, block_length=(3, 7, 8, longest)[seed], max_new_tokens=24)
    assert tokens == expected
    assert all(1 + sum(lengths) == n for lengths, n in zip(out.accepted_lengths, out.num_new_tokens, strict=True))


@pytest.mark.parametrize("mode", SELF_SPECULATION)
def test_exact_ties_of_real_weights(mode: str) -> None:
    """The head has every row twice, so the two likeliest tokens of every position tie bit for bit."""
    model = make_tiny_model(seed=5, vision=False)
    with torch.no_grad():
        model.diffusion_head.weight[36:] = model.diffusion_head.weight[8:36]
    for block_length in (2, 8):
        rows = prompts(20, seed=5)
        expected, _ = generate(model, rows, mode="ar", max_new_tokens=16)
        tokens, _ = generate(model, rows, mode=mode, block_length=block_length, max_new_tokens=16)
        assert tokens == expected
    assert Oracle(model, [END], model.config.never_sampled_ids).ar(rows[0], 16).token_ids == expected[0]


def test_exact_ties_of_scripted_logits() -> None:
    """All words tie everywhere: all modes must break the tie alike, whatever the draft says."""
    causal = torch.zeros(80, V)
    causal[:, :8] = -5.0
    for draft in (causal, says([20 + i for i in range(16)])):
        model = scripted_model(tiny_config(vision=False), by_position(causal), by_position(draft))
        results = [
            generate(model, [PROMPT], max_new_tokens=16, **options(mode, 4))[0] for mode in ("ar", *SELF_SPECULATION)
        ]
        assert results[0] == results[1] == results[2]


def test_disagreement_keeps_the_verifiers_token() -> None:
    """The draft is wrong at answer places 3 and 4: cycles give 3, 1 and 4 tokens (k 4), never a drafted error."""
    words = [20 + i for i in range(9)]
    drafted = [*words[:3], 50, 51, *words[5:]]
    [tokens], out = generate(speaker(words, drafted), [PROMPT], max_new_tokens=9, **options("linear_spec", 4))
    assert tokens == words
    assert out.accepted_lengths == [[3, 1, 4]] and out.nfe == [1 + 6] and out.tokens_per_forward == [8 / 6]


def test_logits_processors_act_alike_in_ar_and_self_speculation() -> None:
    model = make_tiny_model(seed=2, vision=False)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)])
    for prompt in prompts(10, seed=2):
        chosen: dict[str, Any] = {"max_new_tokens": 20, "logits_processor": processors}
        expected, _ = generate(model, [prompt], mode="ar", **chosen)
        for mode in SELF_SPECULATION:
            assert generate(model, [prompt], mode=mode, block_length=6, **chosen)[0] == expected
    assert generate(model, [prompt], mode="ar", max_new_tokens=20)[0] != expected


# --- After each cycle the cached logits equal a cacheless recomputation.


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "quadratic_spec"])
def test_cached_logits_equal_a_cacheless_recomputation(mode: str) -> None:
    """Those of quadratic_spec: test_quadratic_spec.py."""
    model = make_tiny_model(seed=3, vision=False)
    encoder = model.encoder
    seen: dict[str, Any] = {}
    calls: list[tuple[list[int], int, bool, Tensor]] = []

    def see_pattern(module: Any, args: Any) -> None:
        position_ids, pattern = args[1:3]
        first = int(position_ids[0, 0])
        mask = pattern.attn_mask[0, 0]
        seen.update(offset=first, ahead=bool(mask.shape[0] > 1 and mask[0, first + 1]))

    hooks = [
        encoder.embed_tokens.register_forward_hook(lambda module, args, out: seen.update(ids=args[0][0].tolist())),
        encoder.register_forward_pre_hook(see_pattern),
        model.diffusion_head.register_forward_hook(
            lambda module, args, out: calls.append(
                (seen["ids"], seen["offset"], seen["ahead"], out.view(-1, V).clone())
            )
        ),
    ]
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, eos_token_id=[], **options(mode, 5, 0.3))
    for hook in hooks:
        hook.remove()
    known = out.sequences[0].tolist()
    assert len(calls) == out.nfe[0] and any(ahead for *_, ahead, _ in calls) == (mode != "ar")
    oracle = Oracle(model, [], [])
    for ids, offset, ahead, logits in calls:
        expected = oracle.logits(known[:offset] + ids, block_start=offset if ahead else None)[-len(logits) :]
        allowed = expected.isfinite() & logits.isfinite()
        assert (logits - expected)[allowed].abs().max() < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_a_conversations_cache_gives_the_answer_of_a_fresh_call(mode: str) -> None:
    """Three turns, the second after a cut answer; the cache saves work and changes nothing."""
    model = make_tiny_model(seed=4, vision=False)
    ids, cache = list(PROMPT), None
    for turn in range(3):
        chosen = {"max_new_tokens": 6 + turn, **options(mode, 4, 0.3)}
        fresh = model.generate(torch.tensor([ids]), **chosen)
        out = model.generate(torch.tensor([ids]), cache=cache, **chosen)
        assert out.sequences.tolist() == fresh.sequences.tolist() and out.nfe == fresh.nfe
        ids, cache = out.sequences[0].tolist() + [30 + turn, 31], out.cache


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_survives_an_edited_history_and_a_closed_stream(mode: str) -> None:
    """One cache serves another branch, a stream that is closed at once, and then the first branch again."""
    model = make_tiny_model(seed=4, vision=False)
    chosen = {"max_new_tokens": 7, "eos_token_id": [], **options(mode, 4, 0.3)}
    first = model.generate(torch.tensor([PROMPT]), **chosen)
    longer, edited = first.sequences[0].tolist() + [40, 41], [*PROMPT[:2], 30, 31, 32, 33]
    branch = model.generate(torch.tensor([edited]), cache=first.cache, **chosen)
    stream = model.stream(torch.tensor([[*PROMPT[:3], 50, 51, 52]]), cache=first.cache, **chosen)
    next(iter(stream))
    stream.close()
    for ids, cache in ((longer, first.cache), (edited, branch.cache), (longer, first.cache)):
        fresh = model.generate(torch.tensor([ids]), **chosen)
        assert model.generate(torch.tensor([ids]), cache=cache, **chosen).sequences.tolist() == fresh.sequences.tolist()
