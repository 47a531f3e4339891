"""Biases, bans, penalties and minimum lengths: transformers' tokens in ar, the same in self-speculation, an oracle's
in diffusion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import END, MASK, MODES, PROMPT, V, answers, generate, options, padded, prompts, says, speaker
from foreign_models import images, mistral3, saved, span, text_ids
from naive import Oracle, by_position, scripted_model
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from trimode_vlm import TriModeGenerationConfig, load

AR_TEXT = ("linear_spec", "quadratic_spec", "auto")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    theirs = mistral3()
    return load(saved(theirs, tmp_path_factory.mktemp("mistral3")))[0], theirs


# From the tokens of an answer without any option, options that must change it.
RULES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "repetition penalty": lambda free: {"repetition_penalty": 1.4},
    "repetition reward": lambda free: {"repetition_penalty": 0.8},
    "suppressed": lambda free: {"suppress_tokens": free[1:4]},
    "bad words": lambda free: {"bad_words_ids": [[free[1]], free[4:6], free[7:10]]},
    "sequence bias": lambda free: {"sequence_bias": {(free[2],): -6.0, (free[0], 99): 40.0, (*free[:1], 99, 77): 40.0}},
    "minimum length": lambda free: {"min_new_tokens": 17, "eos_token_id": [*free[3:7], *range(20, 90)]},
    "all of them": lambda free: {
        "sequence_bias": [[[free[2]], -6.0], [[55, 56], 7.5]],
        "repetition_penalty": 1.2,
        "bad_words_ids": [[free[1]], free[4:6]],
        "min_new_tokens": 9,
        "eos_token_id": free[:3],
        "suppress_tokens": free[8:9],
    },
}


@pytest.mark.parametrize("with_image", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_ar_gives_the_tokens_of_transformers(vlm: tuple[Any, Any], rule: str, with_image: bool) -> None:
    ours, theirs = vlm
    ids = torch.tensor([[1, 30, *span(2, 3), 40, 41]]) if with_image else text_ids(1, 30)
    inputs = images((2, 3)) if with_image else {}
    start, budget = ids.shape[1], 24
    free = ours.generate(ids, mode="ar", max_new_tokens=budget, eos_token_id=-1, **inputs).sequences[0, start:].tolist()
    asked = RULES[rule](free)
    never = sorted({*ours.config.never_sampled_ids, *asked.get("suppress_tokens", [])})
    expected = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget, do_sample=False,
        **{"eos_token_id": -1} | asked | {"suppress_tokens": never}, **inputs,
    )[0, start:].tolist()  # fmt: skip
    out = ours.generate(ids, mode="ar", max_new_tokens=budget, **{"eos_token_id": -1} | asked, **inputs)
    assert out.sequences[0, start:].tolist() == expected != free
    if "eos_token_id" in asked:
        assert asked["min_new_tokens"] <= len(expected) < budget and out.finish_reasons == ["stop"]
    for mode in AR_TEXT:
        same = ours.generate(
            ids, mode=mode, block_length=5, max_new_tokens=budget, **{"eos_token_id": -1} | asked, **inputs
        )
        assert same.sequences[0, start:].tolist() == expected, mode


def test_a_padded_batch_gives_the_tokens_of_transformers(vlm: tuple[Any, Any]) -> None:
    """Padding is no context: a penalty must not see it."""
    ours, theirs = vlm
    inputs = padded([text_ids(1, n, seed=n)[0].tolist() for n in (20, 5, 11)])
    never = ours.config.never_sampled_ids
    asked = {"repetition_penalty": 1.4, "sequence_bias": {(30, 31): 5.0}}
    expected = theirs.generate(
        **inputs, max_new_tokens=15, do_sample=False, suppress_tokens=never, eos_token_id=-1, **asked
    )
    out = ours.generate(**inputs, mode="ar", max_new_tokens=15, eos_token_id=-1, **asked)
    assert out.sequences[:, 20:].tolist() == expected[:, 20:].tolist()


EVERYWHERE: list[dict[str, Any]] = [
    {"logit_bias": {20: 3.0, "21": -100, 40: 2}},
    {"suppress_tokens": [20, 24, 25, 30, 31, 49, 53]},
    {"bad_words_ids": [[24], [25], [49]]},
    {"sequence_bias": [[[47], 3.0], [[24], -4.0]]},
    {"min_new_tokens": 9, "eos_token_id": [END, *range(20, 44)]},
]  # fmt: skip
IN_CONTEXT: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"bad_words_ids": [[24, 25], [53, 49], [8, 9, 10]]},
    {"sequence_bias": [[[24, 25], -9.0], [[24, 30, 31], 9.0], [[33], 2.0]]},
    {"repetition_penalty": 1.2, "min_new_tokens": 5, "eos_token_id": [END, *range(40, 60)], "logit_bias": {24: -5.0}},
]


@pytest.mark.parametrize("mode", AR_TEXT)
@pytest.mark.parametrize("asked", EVERYWHERE + IN_CONTEXT, ids=lambda asked: "+".join(asked))
def test_self_speculation_gives_the_tokens_of_ar(mode: str, asked: dict[str, Any]) -> None:
    """A ragged batch of 25 prompts, none of which answers as without the option."""
    model, rows = make_tiny_model(seed=2, vision=False), prompts(25, seed=2)
    expected, _ = generate(model, rows, mode="ar", max_new_tokens=20, **asked)
    assert expected != generate(model, rows, mode="ar", max_new_tokens=20)[0]
    assert generate(model, rows, mode=mode, block_length=6, max_new_tokens=20, **asked)[0] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
def test_a_row_gives_what_it_gives_alone(mode: str, sampling: dict[str, Any]) -> None:
    model, rows = make_tiny_model(seed=3, vision=False), prompts(5, seed=3)
    for asked in EVERYWHERE + IN_CONTEXT:
        if mode == "diffusion" and asked in IN_CONTEXT:
            continue
        chosen = {"max_new_tokens": 14, **asked, **options(mode, 4, 0.3), **sampling}
        together, out = generate(model, rows, seed=50, **chosen)
        for i, row in enumerate(rows):
            [alone], single = generate(model, [row], seed=50 + i, **chosen)
            assert alone == together[i] and single.nfe[0] == out.nfe[i]


class RuledOracle(Oracle):
    """The cacheless oracle with a bias [V] and end tokens that are banned at the first places of the answer."""

    bias: Tensor
    prompt_length: int
    min_new_tokens: int = 0

    def logits(self, ids: list[int], block_start: int | None = None) -> Tensor:
        logits = super().logits(ids, block_start) + self.bias
        for i in range(len(ids)):
            self.hold_ends(logits[i], i if block_start is not None and i >= block_start else i + 1)
        return logits

    def quadratic_logits(self, prefix: list[int], rows: list[int], num_masks: int) -> Tensor:
        logits = super().quadratic_logits(prefix, rows, num_masks) + self.bias
        for row in range(len(rows)):
            for column in range(num_masks + 1):
                self.hold_ends(logits[row, column], len(prefix) + row + max(column, 1))
        return logits

    def hold_ends(self, logits: Tensor, position: int) -> None:
        if position - self.prompt_length < self.min_new_tokens:
            logits[list(self.end_ids)] = float("-inf")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asked", EVERYWHERE, ids=lambda asked: "+".join(asked))
def test_what_concerns_single_tokens_holds_for_drafts_and_denoising_too(mode: str, asked: dict[str, Any]) -> None:
    """The oracle's tokens and forwards: a draft that knew nothing of a ban or bias would be accepted less often."""
    model = make_tiny_model(seed=2, vision=False)
    ends = asked.get("eos_token_id", [END])
    oracle = RuledOracle(model, ends, model.config.never_sampled_ids)
    oracle.bias = torch.zeros(V)
    for token, value in asked.get("logit_bias", {}).items():
        oracle.bias[int(token)] += value
    for ids, value in asked.get("sequence_bias", []):
        oracle.bias[ids] += value
    for token in [*asked.get("suppress_tokens", []), *[t for word in asked.get("bad_words_ids", []) for t in word]]:
        oracle.bias[token] = float("-inf")
    oracle.min_new_tokens = asked.get("min_new_tokens", 0)
    for prompt in prompts(3, seed=4):
        oracle.prompt_length = len(prompt)
        expected = oracle.decode(mode, prompt, 18, 6, 0.3)
        [tokens], out = generate(model, [prompt], max_new_tokens=18, **asked, **options(mode, 6, 0.3))
        assert tokens == expected.token_ids and out.finish_reasons[0] == expected.finish_reason
        assert out.nfe == [expected.nfe] and out.accepted_lengths == [expected.accepted_lengths]


@pytest.mark.parametrize("mode", MODES)
def test_what_no_answer_may_hold_stays_banned(mode: str) -> None:
    model = speaker([20 + i for i in range(8)], vision_config=None)
    banned = model.config.never_sampled_ids
    assert MASK in banned
    for asked in ({"logit_bias": dict.fromkeys(banned, 100)}, {"sequence_bias": [[[i], 1e6] for i in banned]}):
        assert generate(model, [PROMPT], max_new_tokens=8, **asked, **options(mode, 4))[0] == [
            [20 + i for i in range(8)]
        ]


@pytest.mark.parametrize("mode", MODES)
def test_bans_fall_on_the_next_likeliest_token(mode: str) -> None:
    """Every place wants 20 + i, then 40: banned words give way to it, in drafts as in verdicts."""
    tables = [says([20 + i for i in range(8)], shift=shift) for shift in (1, 0)]
    for table in tables:
        table[:, 40] = 10.0
    model = scripted_model(speaker([20]).config, *map(by_position, tables))
    for asked in ({"suppress_tokens": [22, 25]}, {"bad_words_ids": [[22], [25]]}, {"logit_bias": {22: -100, 25: -11}}):
        [tokens], out = generate(model, [PROMPT], max_new_tokens=8, **asked, **options(mode, 8))
        assert tokens == [20, 21, 40, 23, 24, 40, 26, 27]
        if mode == "linear_spec":
            assert out.accepted_lengths == [[7]], "drafts obey the ban, so the verifier takes all of them"


@pytest.mark.parametrize(("mode", "lengths"), [("linear_spec", [4, 4, 3]), ("quadratic_spec", [1, 4, 4, 2])])
def test_drafts_know_how_long_the_answer_must_be(mode: str, lengths: list[int]) -> None:
    model = speaker([20 + i for i in range(12)])
    asked = {"min_new_tokens": 12, "max_new_tokens": 12, "logit_bias": {END: 50}}
    [tokens], out = generate(model, [PROMPT], **asked, **options(mode, 4))
    assert tokens == [20 + i for i in range(12)] and out.accepted_lengths == [lengths]


def test_processors_of_options_run_once_per_forward_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per position, as a user's own processors have to."""
    calls: list[tuple[int, int]] = []
    process = RepetitionPenaltyLogitsProcessor.__call__

    def counted(self: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
        calls.append((len(input_ids), len(scores)))
        return process(self, input_ids, scores)

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", counted)
    model = speaker([20 + i for i in range(17)])
    _, out = generate(model, [PROMPT], mode="linear_spec", block_length=8, max_new_tokens=17, repetition_penalty=1.01)
    assert calls == [(1, 1), (8, 8), (8, 8)] and out.accepted_lengths == [[8, 8]]


def test_generation_config_files_may_hold_them(tmp_path: Path) -> None:
    model = make_tiny_model(seed=2, vision=False)
    asked = {
        "logit_bias": {"24": -5, "30": 2.5}, "repetition_penalty": 1.3, "suppress_tokens": [25], "min_new_tokens": 4,
        "bad_words_ids": [[53], [8, 9]], "sequence_bias": [[[47, 48], 2.0]], "thinking_budget": 3,
        "end_of_thought_token_id": 50, "output_logprobs": True, "top_logprobs": 2, "max_new_tokens": 12,
    }  # fmt: skip
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    loaded, _ = load(tmp_path)
    assert {name: getattr(loaded.generation_config, name) for name in asked} == asked
    stored = loaded.generate(torch.tensor([PROMPT]), mode="ar")
    model.generation_config = TriModeGenerationConfig(eos_token_id=END)
    expected = model.generate(torch.tensor([PROMPT]), mode="ar", **asked)
    assert stored.sequences.tolist() == expected.sequences.tolist() and stored.logprobs == expected.logprobs
    loaded.save_pretrained(tmp_path / "again")
    again, _ = load(tmp_path / "again")
    assert again.generate(torch.tensor([PROMPT]), mode="ar").sequences.tolist() == expected.sequences.tolist()
    with pytest.raises(ValueError, match="repetition_penalty=1.3"):
        loaded.generate(torch.tensor([PROMPT]), mode="diffusion", output_logprobs=False, top_logprobs=0)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"logit_bias": {64: 1.0}}, "logit_bias names token 64, but the vocabulary has the ids 0 to 63"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias names token '-1'"),
        ({"logit_bias": {20: 100.5}}, "between -100 and 100, got 100.5 for token 20"),
        ({"logit_bias": {20: float("nan")}}, "between -100 and 100"),
        ({"logit_bias": {20: "high"}}, "between -100 and 100"),
        ({"logit_bias": [20]}, "must be a dictionary"),
        ({"suppress_tokens": [99]}, "suppress_tokens names token 99"),
        ({"suppress_tokens": 20}, "must be a list of token ids"),
        ({"suppress_tokens": list(range(64))}, "leave no token"),
        ({"suppress_tokens": [*range(2), *range(4, 64)], "min_new_tokens": 1}, "leave no token"),
        ({"bad_words_ids": [[20, 70]]}, "bad_words_ids names token 70"),
        ({"bad_words_ids": [20]}, "bad_words_ids"),
        ({"sequence_bias": {(20, 70): 1.0}}, "sequence_bias names token 70"),
        ({"sequence_bias": [[[20], float("inf")]]}, "sequence_bias must be at most 1e"),
        ({"mode": "quadratic_spec", "block_length": 65}, "65 is too long for quadratic_spec"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": "much"}, "repetition_penalty must be a number"),
        ({"min_new_tokens": -1}, "min_new_tokens must be a whole number"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens 9 exceeds the 8 new tokens"),
        ({"min_new_tokens": 9, "max_length": 13}, "min_new_tokens 9 exceeds the 8 new tokens"),
        ({"mode": "diffusion", "repetition_penalty": 1.1}, "'diffusion' cannot honour repetition_penalty=1.1"),
        ({"mode": "diffusion", "bad_words_ids": [[20], [20, 21]]}, "cannot honour bad_words_ids of several"),
        ({"mode": "diffusion", "sequence_bias": {(20, 21): 1.0}}, "cannot honour sequence_bias of several"),
        ({"logit_bais": {20: 1.0}}, "did you mean 'logit_bias'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(chosen: dict[str, Any], message: str) -> None:
    model = speaker([20])
    with pytest.raises(ValueError, match=message) as caught:
        model.generate(torch.tensor([PROMPT]), **chosen)
    assert "\n" not in str(caught.value) and model.encoder.calls == []


def test_neutral_values_are_no_wish() -> None:
    model = speaker([20, 21, 22])
    for mode in MODES:
        neutral = {"repetition_penalty": 1.0, "logit_bias": {}, "suppress_tokens": [], "min_new_tokens": 0}
        out = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=3, num_return_sequences=1, **neutral, **options(mode, 2)
        )
        assert answers(out, len(PROMPT)) == [[20, 21, 22]]
