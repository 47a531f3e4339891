"""What an answer says of itself: log-probabilities, samples behind one prefill, seconds to the first token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import END, MODES, PROMPT, SELF_SPECULATION, answers, generate, options, padded, prompts, speaker
from naive import count_forwards
from transformers.generation.streamers import BaseStreamer

from trimode_vlm.engine import Engine, EngineSettings

AR_TEXT = ("ar", *SELF_SPECULATION, "auto")


@torch.no_grad()
def teacher_forced(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of the plain causal forward at the places of the answer's tokens."""
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 9}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("mode", AR_TEXT)
def test_logprobs_are_those_of_the_plain_model(mode: str, sampling: dict[str, Any]) -> None:
    """A ragged batch with penalties, biases and bans: the report is of the model, not of what these made of it."""
    model, rows = make_tiny_model(seed=2, vision=False), prompts(9, seed=2)
    asked = {"repetition_penalty": 1.3, "logit_bias": {24: -3.0}, "suppress_tokens": [30, 31], "seed": 4}
    asked |= {"max_new_tokens": 13, "eos_token_id": [END, 17, 40, 41], **options(mode, 4), **sampling}
    tokens, out = generate(model, rows, output_logprobs=True, top_logprobs=3, **asked)
    assert len(set(out.num_new_tokens)) > 2
    for row, ids, got, top in zip(rows, tokens, out.logprobs, out.top_logprobs, strict=True):
        expected = teacher_forced(model, row, ids)
        assert len(got) == len(top) == len(ids)
        values = expected.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        assert (torch.tensor(got) - values).abs().max() < 1e-4
        best, best_ids = expected.topk(3, -1)
        assert [[i for i, _ in place] for place in top] == best_ids.tolist()
        assert (torch.tensor([[value for _, value in place] for place in top]) - best).abs().max() < 1e-4
    without, plain = generate(model, rows, **asked)
    assert without == tokens and plain.logprobs is None and plain.top_logprobs is None
    assert mode == "auto" or plain.nfe == out.nfe


@pytest.mark.parametrize("mode", AR_TEXT)
def test_streams_carry_logprobs(mode: str) -> None:
    model = make_tiny_model(seed=2, vision=False)
    asked = {"max_new_tokens": 11, "output_logprobs": True, **options(mode, 4)}
    stream = model.stream(torch.tensor([PROMPT]), top_logprobs=2, **asked)
    events = list(stream)
    assert all(len(e.token_ids) == len(e.logprobs) == len(e.top_logprobs) for e in events)
    out = stream.output()
    assert [x for e in events for x in e.logprobs] == out.logprobs[0] and len(out.logprobs[0]) == 11
    assert [x for e in events for x in e.top_logprobs] == out.top_logprobs[0]
    events = list(model.stream(torch.tensor([PROMPT]), **asked))
    assert all(e.logprobs is not None and e.top_logprobs is None for e in events)
    assert all(e.logprobs is None for e in model.stream(torch.tensor([PROMPT]), mode="diffusion", max_new_tokens=5))


def test_logprobs_of_a_forced_token_are_the_models_too() -> None:
    model = make_tiny_model(seed=2, vision=False)
    for mode in AR_TEXT:
        asked = {"thinking_budget": 3, "end_of_thought_token_id": 50, "max_new_tokens": 6, **options(mode, 4)}
        [tokens], out = generate(model, [PROMPT], output_logprobs=True, **asked)
        expected = teacher_forced(model, PROMPT, tokens)
        assert tokens[3] == 50 and abs(out.logprobs[0][3] - float(expected[3, 50])) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_requests_with_rules_of_their_own_share_a_batch(mode: str, processor: Any) -> None:
    """In the engine rows of many requests decode together and come and go: rules and reports stay with their row."""
    model = make_tiny_model(seed=2, vision=False)
    several: list[dict[str, Any]] = [
        {}, {"logit_bias": {24: -9.0, 40: 3.0}}, {"min_new_tokens": 8}, {"suppress_tokens": [20, 24, 25, 49]},
        {"thinking_budget": 4, "end_of_thought_token_id": 50},
    ]  # fmt: skip
    chosen = {"eos_token_id": [END, 17, 40, 41], **options(mode, 4, 0.3)}
    several.append({"num_return_sequences": 3})
    chosen |= {"do_sample": True, "temperature": 0.7}
    if mode != "diffusion":
        several += [{"output_logprobs": True, "top_logprobs": 2}, {"repetition_penalty": 1.5, "output_logprobs": True}]
    asked = [
        (torch.tensor([row]), {"seed": i, "max_new_tokens": 9 + i % 5, **several[i % len(several)], **chosen})
        for i, row in enumerate(prompts(24, seed=5))
    ]
    with Engine(model, processor, EngineSettings(max_rows=9)) as engine:
        requests = [engine.submit({"input_ids": ids}, **given) for ids, given in asked]
        shared = [request.result() for request in requests]
    for (ids, given), out in zip(asked, shared, strict=True):
        alone = model.generate(ids, **given)
        for name in ("num_new_tokens", "finish_reasons", "num_thinking_tokens"):
            assert getattr(out, name) == getattr(alone, name), name
        assert answers(out, ids.shape[1]) == answers(alone, ids.shape[1])
        assert (out.logprobs is None) == (alone.logprobs is None)
        if out.logprobs is not None:
            assert (torch.tensor(out.logprobs) - torch.tensor(alone.logprobs)).abs().max() < 1e-4


# --- Samples


def sample(model: Any, rows: list[list[int]], mode: str, samples: int, **asked: Any) -> tuple[list[list[int]], Any]:
    chosen = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": [END, 17, 40], **options(mode, 4, 0.3), **asked}
    return generate(model, rows, num_return_sequences=samples, **chosen)


@pytest.mark.parametrize("mode", MODES)
def test_samples_are_the_rows_of_single_requests(mode: str) -> None:
    """Three of each of four prompts; row b draws from the stream of seed + b and counts the prefill that it shares."""
    model, rows = make_tiny_model(seed=9, vision=False), prompts(4, seed=9)
    sizes = count_forwards(model)
    together, out = sample(model, rows, mode, 3, seed=30)
    assert sizes[0] == 4 and max(sizes[1:]) == 12, "one prefill of each prompt, then twelve rows"
    assert out.total_nfe == len(sizes) and out.nfe_prefill == [1] * 12
    starts = out.sequences[:, : max(map(len, rows))].tolist()
    assert starts == [row for row in padded(rows)["input_ids"].tolist() for _ in range(3)]
    assert len({tuple(tokens) for tokens in together}) > 8
    for b in range(12):
        [alone], single = sample(model, [rows[b // 3]], mode, 1, seed=30 + b)
        assert together[b] == alone
        for name in ("nfe", "num_new_tokens", "finish_reasons", "tokens_per_forward", "accepted_lengths"):
            assert getattr(out, name)[b] == getattr(single, name)[0], name


def test_the_images_of_a_prompt_are_encoded_once(tiny_model: Any) -> None:
    batches = []
    hook = tiny_model.encoder.vision_tower.register_forward_pre_hook(lambda module, args: batches.append(len(args[0])))
    inputs = {"pixel_values": torch.randn(1, 3, 28, 56), "image_sizes": torch.tensor([[28, 56]])}
    ids = torch.tensor([[20, 5, 4, 4, 7, 21]])
    asked = {"do_sample": True, "max_new_tokens": 5, "eos_token_id": -1}
    try:
        out = tiny_model.generate(ids, num_return_sequences=4, seed=1, **inputs, **asked)
    finally:
        hook.remove()
    assert batches == [1]
    alone = [tiny_model.generate(ids, seed=1 + b, **inputs, **asked).sequences[0].tolist() for b in range(4)]
    assert out.sequences.tolist() == alone


@pytest.mark.parametrize("mode", MODES)
def test_samples_continue_a_conversation(mode: str) -> None:
    """The cache serves all of them and holds the prompt afterwards, for the next turn."""
    model = make_tiny_model(seed=4, vision=False)
    chosen = {"max_new_tokens": 6, "eos_token_id": [], **options(mode, 4, 0.3)}
    first = model.generate(torch.tensor([PROMPT]), **chosen)
    ids = torch.tensor([first.sequences[0].tolist() + [30, 31]])
    asked = {"do_sample": True, "num_return_sequences": 3, "seed": 2, **chosen}
    fresh = model.generate(ids, **asked)
    out = model.generate(ids, cache=first.cache, **asked)
    assert out.sequences.tolist() == fresh.sequences.tolist() and fresh.cache is None
    assert out.cache is first.cache and out.cache.token_ids == ids[0].tolist()
    longer = torch.tensor([out.sequences[1].tolist() + [32]])
    again = model.generate(longer, cache=out.cache, **chosen)
    assert again.sequences.tolist() == model.generate(longer, **chosen).sequences.tolist()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences=2 needs do_sample=True"),
        ({"num_return_sequences": 0, "do_sample": True}, "num_return_sequences must be a whole number of at least 1"),
        (
            {"num_return_sequences": 2, "do_sample": True, "streamer": BaseStreamer()},
            "takes one row; this request has 2",
        ),
        ({"mode": "diffusion", "output_logprobs": True}, "'diffusion' has no log-probabilities"),
        ({"top_logprobs": 2}, "no effect without output_logprobs=True"),
        ({"top_logprobs": 65, "output_logprobs": True}, "top_logprobs 65 exceeds the vocabulary of 64"),
        ({"top_logprobs": -1, "output_logprobs": True}, "top_logprobs must be a whole number"),
    ],
)
def test_what_cannot_be_reported_is_refused(asked: dict[str, Any], message: str) -> None:
    model = speaker([20])
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([PROMPT]), **asked)
    assert model.encoder.calls == []


# --- Seconds


@pytest.mark.parametrize("mode", MODES)
def test_seconds_to_the_first_token(mode: str) -> None:
    """The first event's, so before the last token's; None before there is one."""
    model = make_tiny_model(seed=1, vision=False)
    stream = model.stream(**padded(prompts(3, seed=1)), max_new_tokens=9, eos_token_id=[], **options(mode, 3, 0.3))
    assert stream.output().seconds_to_first_token == [None] * 3
    first: dict[int, float] = {}
    for event in stream:
        if event.token_ids:
            first.setdefault(event.row, event.seconds)
    out = stream.output()
    assert out.seconds_to_first_token == [first[row] for row in range(3)]
    assert all(0 < a < b for a, b in zip(out.seconds_to_first_token, out.seconds, strict=True))
