"""Stop strings and end tokens in every mode: cut anywhere, nothing leaks, nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decoding_cases import END, MODES, PROMPT, generate, options, speaker
from torch import Tensor

from trimode_vlm.detokenizer import IncrementalDetokenizer

BUDGET = 40


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> Tensor:
    return tokenizer("<|im_start|>user\nWhat is this?", return_tensors="pt").input_ids


def ask(model: Any, prompt: Tensor, mode: str, **asked: Any) -> tuple[list[int], Any]:
    chosen = {"max_new_tokens": BUDGET, "eos_token_id": -1, **options(mode, 6, 0.02), **asked}
    out = model.generate(prompt, **chosen)
    return out.sequences[0, prompt.shape[1] :][: out.num_new_tokens[0]].tolist(), out


def plain(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def expected_stop(tokenizer: Any, free: list[int], stops: list[str]) -> tuple[int, str]:
    """By definition: the fewest tokens whose text holds a stop string, and the text before what stopped it."""
    for n in range(1, len(free) + 1):
        text = plain(tokenizer, free[:n]).rstrip("\ufffd")
        if found := [(text.index(s) + len(s), -len(s), s) for s in stops if s in text]:
            end, _, stop = min(found)
            return n, text[: end - len(stop)]
    return len(free), plain(tokenizer, free)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_stop_strings_split_over_tokens_and_blocks(chat_model: Any, tokenizer: Any, prompt: Tensor, mode: str) -> None:
    """Three strings at a time, cut at random out of the free answer (or absent from it): tokens, text and stream."""
    free, _ = ask(chat_model, prompt, mode)
    text = plain(tokenizer, free)
    rng, lengths = random.Random(mode), set()
    for _ in range(25):
        cuts = [rng.randrange(len(text) - 12) for _ in range(2)]
        stops = [text[cut : cut + rng.randint(1, 12)] for cut in cuts] + ["never said"]
        stops = [s for s in stops if "\ufffd" not in s]
        rng.shuffle(stops)
        n, before = expected_stop(tokenizer, free, stops)
        stream = chat_model.stream(
            prompt, max_new_tokens=BUDGET, eos_token_id=-1, stop_strings=stops, tokenizer=tokenizer,
            **options(mode, 6, 0.02),
        )  # fmt: skip
        reader, pieces, ids = IncrementalDetokenizer(tokenizer, stop_strings=stops), [], []
        for event in stream:
            ids += event.token_ids
            pieces.append(reader.put(event.token_ids))
        pieces.append(reader.end())
        assert ids == free[:n] and "".join(pieces) == before
        assert not any(s in "".join(pieces) for s in stops)
        out = stream.output()
        assert out.finish_reasons == ["stop" if n < BUDGET or reader.stopped else "length"]
        assert out.num_new_tokens == [n] and out.sequences[0].tolist() == prompt[0].tolist() + ids
        lengths.add(n)
    assert len(lengths) > 5


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_may_be_the_whole_answer(chat_model: Any, tokenizer: Any, prompt: Tensor, mode: str) -> None:
    free, _ = ask(chat_model, prompt, mode)
    n = next(n for n in range(8, BUDGET) if "\ufffd" not in plain(tokenizer, free[:n])[-1:])
    whole = plain(tokenizer, free[:n])
    tokens, out = ask(chat_model, prompt, mode, stop_strings=whole, tokenizer=tokenizer)
    assert tokens == free[:n] and out.finish_reasons == ["stop"]
    reader = IncrementalDetokenizer(tokenizer, stop_strings=[whole])
    assert reader.put(tokens) + reader.end() == ""


@pytest.mark.parametrize("mode", MODES)
def test_a_special_token_may_be_a_stop_string(chat_model: Any, tokenizer: Any, prompt: Tensor, mode: str) -> None:
    """It is no text otherwise, so its name would never be read. Forced here by a bias."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked = {"logit_bias": {end: 100}, "stop_strings": ["<|im_end|>"], "tokenizer": tokenizer}
    tokens, out = ask(chat_model, prompt, mode, **asked)
    assert tokens == [end] and out.finish_reasons == ["stop"]


@pytest.mark.parametrize("mode", MODES)
def test_min_new_tokens_holds_back_end_tokens_not_stop_strings(
    chat_model: Any, tokenizer: Any, prompt: Tensor, mode: str
) -> None:
    """As in transformers."""
    free, _ = ask(chat_model, prompt, mode)
    n = next(n for n in range(5, BUDGET) if "\ufffd" not in plain(tokenizer, free[:n])[-2:])
    stop = plain(tokenizer, free[:n])[-2:]
    n, _ = expected_stop(tokenizer, free, [stop])
    tokens, out = ask(chat_model, prompt, mode, stop_strings=[stop], tokenizer=tokenizer, min_new_tokens=BUDGET)
    assert tokens == free[:n] and out.finish_reasons == ["stop"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_length", [1, 3, 4, 12])
def test_min_new_tokens_and_several_end_tokens(mode: str, block_length: int) -> None:
    """Every place wants an end token most: the words come until the least length, then the likelier of two ends."""
    model = speaker([20 + i for i in range(12)])
    asked = {"logit_bias": {END: 50, 9: 60}, "eos_token_id": [END, 9], "max_new_tokens": 12}
    for least in (0, 1, 2, 3, 4, 5, 8, 11):
        [tokens], out = generate(model, [PROMPT], min_new_tokens=least, **asked, **options(mode, block_length))
        assert tokens == [20 + i for i in range(least)] + [9] and out.finish_reasons == ["stop"]
        if mode in ("linear_spec", "quadratic_spec"):
            assert sum(out.accepted_lengths[0]) == least
    [tokens], out = generate(model, [PROMPT], min_new_tokens=12, **asked, **options(mode, block_length))
    assert tokens == [20 + i for i in range(12)] and out.finish_reasons == ["length"]


@pytest.mark.parametrize("mode", MODES)
def test_a_stopping_criterion_sees_every_token(mode: str) -> None:
    seen: list[list[int]] = []

    def rule(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] == len(PROMPT) + 7])

    words = [20 + i for i in range(12)]
    [tokens], _ = generate(speaker(words), [PROMPT], max_new_tokens=12, stopping_criteria=[rule], **options(mode, 4))
    assert tokens == words[:7] and seen == [PROMPT + words[:n] for n in range(1, 8)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stop_strings": ""}, "must be text and not empty, got ''"),
        ({"stop_strings": ["a", ""]}, "must be text and not empty"),
        ({"stop_strings": ["a", 5]}, "must be text and not empty, got 5"),
        ({"stop_strings": ["a"], "tokenizer": None}, "needs tokenizer="),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_bad_stop_strings_are_refused(
    chat_model: Any, tokenizer: Any, prompt: Tensor, mode: str, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(chat_model, prompt, mode, **{"tokenizer": tokenizer} | asked)


def test_no_stop_strings_need_no_tokenizer(chat_model: Any, prompt: Tensor) -> None:
    assert ask(chat_model, prompt, "ar", stop_strings=[])[1].num_new_tokens == [BUDGET]
