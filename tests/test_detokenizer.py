"""The incremental detokeniser: whatever the cut of the ids, the pieces are those of one decode."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from processor_cases import chatml_tokenizer, mistral_tokenizer, random_text, sentencepiece_tokenizer

from trimode_vlm.detokenizer import IncrementalDetokenizer

TOKENIZERS = {
    "byte-level": chatml_tokenizer,
    "mistral": mistral_tokenizer,
    "llama": lambda: sentencepiece_tokenizer("llama"),
    "metaspace": lambda: sentencepiece_tokenizer("metaspace"),
}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def pieces(detokenizer: IncrementalDetokenizer, ids: list[int], rng: random.Random, longest: int) -> list[str]:
    out, at = [], 0
    while at < len(ids):
        step = rng.randint(1, longest)
        out.append(detokenizer.put(ids[at : at + step]))
        at += step
    return [*out, detokenizer.end()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("longest", [1, 3, 40])
def test_pieces_join_to_the_final_decode(tokenizer: Any, skip: bool, longest: int) -> None:
    rng = random.Random(longest)
    for trial in range(150):
        if trial % 2:
            ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 40))]
        else:
            ids = tokenizer(random_text(rng, 12), add_special_tokens=False)["input_ids"]
        expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        got = pieces(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), ids, rng, longest)
        assert "".join(got) == expected, ids


def test_no_piece_holds_half_a_character(tokenizer: Any) -> None:
    text = "a 👩‍👩‍👧 世界 é " * 5
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    got = pieces(IncrementalDetokenizer(tokenizer), ids, random.Random(0), 1)
    assert not any("\ufffd" in piece for piece in got)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True)


def test_text_before_half_a_character_is_not_held_back() -> None:
    tokenizer = chatml_tokenizer()
    ids = tokenizer("Hello 🇩", add_special_tokens=False)["input_ids"]
    assert IncrementalDetokenizer(tokenizer).put(ids[:-1]) == "Hello "


@pytest.mark.parametrize("unit", [[1], None, "half"])
def test_work_is_linear_in_the_tokens(tokenizer: Any, unit: Any) -> None:
    """Count decoded tokens, for text, for special tokens only, and for bytes that never become a character."""
    token = tokenizer("é👩", add_special_tokens=False)["input_ids"][0]
    text_ids = tokenizer("Hello world " * 40, add_special_tokens=False)["input_ids"]
    unit = text_ids if unit is None else [token] if unit == "half" else unit
    ids = (unit * 2000)[:2000]

    class Counting:
        decoded = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **options: Any) -> str:
            Counting.decoded += len(ids)
            return tokenizer.decode(ids, **options)

    detokenizer = IncrementalDetokenizer(Counting(), skip_special_tokens=False)
    got = "".join(detokenizer.put(i) for i in ids) + detokenizer.end()
    assert got == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert Counting.decoded < 40 * len(ids)


def test_put_takes_ints_lists_and_tensors() -> None:
    tokenizer = chatml_tokenizer()
    ids = tokenizer("Hello world", add_special_tokens=False)["input_ids"]
    for form in (ids, torch.tensor(ids), torch.tensor([ids]), iter(ids)):
        assert IncrementalDetokenizer(tokenizer).put(form) == "Hello world"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.put(i) for i in ids) == "Hello world"


def expected_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow rule: add characters one by one until some stop string is complete; the longest one wins a tie."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("longest", [1, 2, 30])
def test_stop_strings_end_the_text_wherever_the_ids_are_cut(tokenizer: Any, longest: int) -> None:
    rng = random.Random(longest)
    for _ in range(150):
        text = "".join(rng.choice("aabc\n é世") for _ in range(rng.randint(0, 30)))
        stops = ["".join(rng.choice("abc\né世") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        detokenizer = IncrementalDetokenizer(tokenizer, stop_strings=stops)
        got = pieces(detokenizer, ids, rng, longest)
        expected, stop = expected_stop(whole, stops)
        assert ("".join(got), detokenizer.stop_string, detokenizer.stopped) == (expected, stop, stop is not None)


def test_nothing_leaks_before_or_after_a_stop() -> None:
    tokenizer = chatml_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, stop_strings="</answer>")
    ids = tokenizer("yes</answ", add_special_tokens=False)["input_ids"]
    assert "".join(detokenizer.put(i) for i in ids) == "yes"
    assert detokenizer.put(tokenizer("er> more", add_special_tokens=False)["input_ids"]) == ""
    assert detokenizer.stopped and detokenizer.put(ids) == "" and detokenizer.end() == ""
    other = IncrementalDetokenizer(tokenizer, stop_strings=["</answer>"])
    assert other.put(ids) + other.end() == "yes</answ" and not other.stopped
    with pytest.raises(ValueError, match="empty"):
        IncrementalDetokenizer(tokenizer, stop_strings=[""])
