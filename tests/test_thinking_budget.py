"""The thinking budget: the end of a thought is forced once, at its place, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from decoding_cases import MASK, MODES, PROMPT, SELF_SPECULATION, V, generate, options, prompts, says, speaker
from naive import by_position, scripted_model

THINK, CLOSE = 50, 51
MARKS = {"start_of_thought_token_id": THINK, "end_of_thought_token_id": CLOSE}
OPEN = [*PROMPT[:4], THINK]
WORDS = [20 + i for i in range(14)]


def answer(words: list[int], mode: str, block_length: int, **asked: Any) -> tuple[list[int], Any]:
    """What a model that wants `words` says behind a prompt of five tokens."""
    prompt = asked.pop("prompt", OPEN)
    chosen = options(mode, block_length)
    [tokens], out = generate(speaker(words), [prompt], max_new_tokens=len(words), **chosen, **asked)
    return tokens, out


@pytest.mark.parametrize("block_length", [1, 3, 4, 8, 20])
@pytest.mark.parametrize("mode", MODES)
def test_the_end_is_forced_where_the_budget_ends(mode: str, block_length: int) -> None:
    """The prompt ends in an open thought; N words later it is closed, and the answer goes on where it is."""
    for budget in (0, 1, 2, 3, 4, 5, 7, 8, 12, 13):
        tokens, out = answer(WORDS, mode, block_length, thinking_budget=budget, **MARKS)
        assert tokens == WORDS[:budget] + [CLOSE] + WORDS[budget + 1 :]
        assert out.num_thinking_tokens == [budget + 1] and out.num_new_tokens == [len(WORDS)]
        # It stands in the draft as well, so that no cycle ends there.
        assert out.accepted_lengths == answer(WORDS, mode, block_length)[1].accepted_lengths


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_that_does_not_end_changes_nothing(mode: str) -> None:
    for budget in (14, 100, 10_000):
        tokens, out = answer(WORDS, mode, 4, thinking_budget=budget, **MARKS)
        assert tokens == WORDS and out.num_thinking_tokens == [14]


@pytest.mark.parametrize("block_length", [2, 5, 8])
@pytest.mark.parametrize("mode", MODES)
def test_a_thought_that_closes_in_time_is_left_alone(mode: str, block_length: int) -> None:
    """Also when it closes with its last token, and when the answer opens another one later."""
    for end in (0, 3, 6):
        words = [CLOSE if i == end else THINK if i == end + 2 else word for i, word in enumerate(WORDS)]
        for budget in (end, end + 1, end + 3):
            tokens, out = answer(words, mode, block_length, thinking_budget=budget, **MARKS)
            assert tokens == words and out.num_thinking_tokens == [end + 1]


@pytest.mark.parametrize("mode", MODES)
def test_no_thought_no_end(mode: str) -> None:
    """A prompt without a thought, with a closed one, and with one of an earlier turn."""
    for prompt in (PROMPT, [*PROMPT[:3], THINK, CLOSE], [THINK, 30, CLOSE, 31, 32]):
        tokens, out = answer(WORDS, mode, 4, prompt=prompt, thinking_budget=2, **MARKS)
        assert tokens == WORDS and out.num_thinking_tokens == [0]
    tokens, out = answer(WORDS, mode, 4, prompt=[THINK, CLOSE, 30, THINK, 31], thinking_budget=2, **MARKS)
    assert tokens == [*WORDS[:2], CLOSE, *WORDS[3:]] and out.num_thinking_tokens == [3]


@pytest.mark.parametrize("block_length", [1, 3, 4, 8])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "diffusion"])
def test_a_thought_that_the_answer_opens(mode: str, block_length: int) -> None:
    for opened, budget in ((0, 0), (0, 3), (1, 2), (3, 0), (5, 4)):
        words = [THINK if i == opened else word for i, word in enumerate(WORDS)]
        tokens, out = answer(words, mode, block_length, prompt=PROMPT, thinking_budget=budget, **MARKS)
        place = opened + 1 + budget
        assert tokens == words[:place] + [CLOSE] + words[place + 1 :]
        assert out.num_thinking_tokens == [budget + 1]


def test_a_thought_that_the_answer_opens_in_diffusion() -> None:
    """Opened by the seed, it closes at its place; in the middle of a block, at the first place that is still open."""
    words = [THINK, *WORDS[1:]]
    tokens, out = answer(words, "diffusion", 8, prompt=PROMPT, thinking_budget=3, **MARKS)
    assert tokens == [*words[:4], CLOSE, *words[5:]] and out.num_thinking_tokens == [4]
    # All of the first block is sure at once, so the thought runs on to its end.
    words = [*WORDS[:2], THINK, *WORDS[3:]]
    tokens, out = answer(words, "diffusion", 8, prompt=PROMPT, thinking_budget=1, **MARKS)
    assert tokens == [*words[:8], CLOSE, *words[9:]] and out.num_thinking_tokens == [6]
    # One by one from the left, every place is open when its turn comes.
    tables = [says([60], shift=1), says([60])]
    for table, shift in zip(tables, (1, 0), strict=True):
        for i, word in enumerate(words):
            table[len(PROMPT) + i - shift] = 0
            table[len(PROMPT) + i - shift, word] = 12.0 - i / 2
    model = scripted_model(speaker([20]).config, *map(by_position, tables))
    asked = {"thinking_budget": 1, "max_new_tokens": 14, **MARKS}
    [tokens], _ = generate(model, [PROMPT], mode="diffusion", block_length=8, threshold=None, **asked)
    assert tokens == [*words[:4], CLOSE, *words[5:]]
    # Its place is committed before the thought opens, the next one is not.
    tables[1][len(PROMPT) + 4] *= 2
    model = scripted_model(speaker([20]).config, *map(by_position, tables))
    [tokens], out = generate(model, [PROMPT], mode="diffusion", block_length=8, threshold=None, **asked)
    assert tokens == [*words[:5], CLOSE, *words[6:]] and out.num_thinking_tokens == [3]


def test_diffusion_waits_for_what_decides_whether_to_force() -> None:
    """The place of the forced end is surest, but a place before it closes the thought by itself, last of all."""
    words = [20, 21, CLOSE, 23, 24, 25, 26, 27]
    tables = [says(words[:1], shift=1), torch.zeros(80, V)]
    sure = [0, 9.0, 2.0, 9.0, 20.0, 9.0, 9.0, 9.0]  # place 4 would be forced with budget 4
    for i, word in enumerate(words):
        tables[1][len(PROMPT) + i, word] = sure[i]
    model = scripted_model(speaker([20]).config, *map(by_position, tables))
    asked = {"mode": "diffusion", "block_length": 8, "threshold": None, "max_new_tokens": 8, **MARKS}
    stream = model.stream(torch.tensor([OPEN]), thinking_budget=4, **asked)
    canvases = [event.canvas for event in stream]
    assert stream.output().sequences[0, 5:].tolist() == words and stream.output().num_thinking_tokens == [3]
    assert all(canvas[4] == MASK for canvas in canvases if MASK in canvas[:4])
    # Without that token the place is forced, and nothing beside it closes the thought a second time.
    tables[1][len(PROMPT) + 2] = says([22], sure=2.0, first=len(PROMPT) + 2)[len(PROMPT) + 2]
    tables[1][len(PROMPT) + 5, CLOSE] = 15.0
    model = scripted_model(speaker([20]).config, *map(by_position, tables))
    [tokens], out = generate(model, [OPEN], thinking_budget=4, **asked)
    assert tokens == [20, 21, 22, 23, CLOSE, 25, 26, 27] and out.num_thinking_tokens == [5]


@pytest.mark.parametrize("mode", [*SELF_SPECULATION, "auto"])
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_self_speculation_equals_ar_with_the_same_budget(mode: str, seed: int) -> None:
    """Random weights whose answers open and close thoughts by themselves, in ragged batches."""
    model, rows = make_tiny_model(seed=seed, vision=False), prompts(16, seed)
    seen = set()
    for budget in (0, 2, 5):
        for marks in (MARKS, {"start_of_thought_token_id": 25, "end_of_thought_token_id": 47}):
            asked = {"max_new_tokens": 24, "thinking_budget": budget, **marks}
            given = [row + [marks["start_of_thought_token_id"]] if i % 2 else row for i, row in enumerate(rows)]
            expected, ar = generate(model, given, mode="ar", **asked)
            tokens, out = generate(model, given, mode=mode, block_length=7, **asked)
            assert tokens == expected and out.num_thinking_tokens == ar.num_thinking_tokens
            seen |= set(ar.num_thinking_tokens)
            assert max(ar.num_thinking_tokens) <= budget + 1
    assert {0, 1, 3, 6} <= seen and len(seen) > 4


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_random_answers_keep_to_the_budget_and_rows_to_themselves(mode: str, sampling: dict[str, Any]) -> None:
    """Open from the prompt on: closed at place N at the latest, by force or by itself; a row is what it is alone."""
    model, rows = make_tiny_model(seed=6, vision=False), [[*row, THINK] for row in prompts(12, seed=6)]
    closed = set()
    for budget in (1, 4, 6, 9):  # 6 is where diffusion's second block begins
        asked = {"max_new_tokens": 16, "thinking_budget": budget, **MARKS, **options(mode, 6, 0.2), **sampling}
        together, out = generate(model, rows, seed=5, **asked)
        for i, tokens in enumerate(together):
            end = tokens.index(CLOSE) if CLOSE in tokens else None
            assert end is not None or len(tokens) <= budget
            assert out.num_thinking_tokens[i] == (len(tokens) if end is None else end + 1) <= budget + 1
            closed.add(end)
        for i in (0, 5, 11):
            assert generate(model, [rows[i]], seed=5 + i, **asked)[0] == [together[i]]
    assert {1, 4, 6, 9} <= closed


def test_without_the_opening_token_the_answer_thinks_from_its_start() -> None:
    for mode in MODES:
        tokens, _ = answer(WORDS, mode, 4, prompt=PROMPT, thinking_budget=3, end_of_thought_token_id=CLOSE)
        assert tokens == [*WORDS[:3], CLOSE, *WORDS[4:]]


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_the_tokenizers_marks_are_found(chat_model: Any, tokenizer: Any, mode: str) -> None:
    """Given the tokenizer alone, or the closing id and the tokenizer; `</think>` is one of its tokens."""
    close = tokenizer.convert_tokens_to_ids("</think>")
    ids = tokenizer("<|im_start|>assistant\n<think>\n", return_tensors="pt").input_ids
    chosen = {"max_new_tokens": 12, "eos_token_id": -1, "thinking_budget": 4, **options(mode, 5)}
    for given in ({"tokenizer": tokenizer}, {"tokenizer": tokenizer, "end_of_thought_token_id": close}):
        out = chat_model.generate(ids, **chosen, **given)
        assert out.sequences[0, ids.shape[1] + 4] == close and out.num_thinking_tokens == [5]
        closed = torch.cat((ids, torch.tensor([[close]])), 1)
        assert chat_model.generate(closed, **chosen, **given).num_thinking_tokens == [0]


@pytest.mark.parametrize("mode", MODES)
def test_a_forced_end_goes_before_bans_and_is_streamed(mode: str) -> None:
    """Before min_new_tokens too, when it is an end token: then it ends the answer."""
    asked = {"thinking_budget": 3, "eos_token_id": CLOSE, "min_new_tokens": 6, "max_new_tokens": 14, **MARKS}
    stream = speaker(WORDS).stream(torch.tensor([OPEN]), **asked, **options(mode, 4))
    assert [token for event in stream for token in event.token_ids] == [*WORDS[:3], CLOSE]
    assert stream.output().finish_reasons == ["stop"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"thinking_budget": 3}, "needs end_of_thought_token_id=, or tokenizer="),
        ({"thinking_budget": -1, **MARKS}, "thinking_budget must be a whole number of at least 0"),
        ({"thinking_budget": 2.5, **MARKS}, "thinking_budget must be a whole number"),
        ({"end_of_thought_token_id": CLOSE}, "no effect without thinking_budget"),
        ({"start_of_thought_token_id": CLOSE}, "no effect without thinking_budget"),
        ({"thinking_budget": 3, "end_of_thought_token_id": MASK}, f"end_of_thought_token_id {MASK} is banned"),
        ({"thinking_budget": 3, "end_of_thought_token_id": 64}, "64 is banned or no token"),
        ({"thinking_budget": 3, **MARKS, "suppress_tokens": [CLOSE]}, f"{CLOSE} is banned"),
        ({"thinking_budget": 3, "start_of_thought_token_id": CLOSE, "end_of_thought_token_id": CLOSE}, "both 51"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(asked: dict[str, Any], message: str) -> None:
    model = speaker(WORDS)
    with pytest.raises(ValueError, match=message) as caught:
        model.generate(torch.tensor([PROMPT]), **asked)
    assert "\n" not in str(caught.value) and model.encoder.calls == []
