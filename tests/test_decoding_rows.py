"""What users reported about batches, streams, counts and options (pitfalls.md, Decoding)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import make_tiny_model, tiny_config
from decoding_cases import END, MASK, MODES, PROMPT, V, answers, generate, options, padded, prompts, says, speaker
from naive import by_position, count_forwards, scripted_model
from transformers import RepetitionPenaltyLogitsProcessor

# --- A row in a batch gives what it gives alone, whatever else is in the batch; finished rows cost and count nothing.


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_in_a_batch_gives_what_it_gives_alone(mode: str, left: bool, sampling: dict[str, Any]) -> None:
    model = make_tiny_model(seed=7, vision=False)
    rows = prompts(12, seed=7)
    chosen = {"max_new_tokens": 15, "eos_token_id": [END, 17, 30, 41], **options(mode, 4, 0.3), **sampling}
    inputs = padded(rows, left)
    out = model.generate(**inputs, seed=100, **chosen)
    together = answers(out, inputs["input_ids"].shape[1])
    assert len(set(out.num_new_tokens)) > 3
    for i, row in enumerate(rows):
        [alone], single = generate(model, [row], seed=100 + i, **chosen)
        assert together[i] == alone
        assert (out.nfe[i], out.finish_reasons[i]) == (single.nfe[0], single.finish_reasons[0])
        assert out.accepted_lengths[i] == single.accepted_lengths[0]


@pytest.mark.parametrize("mode", MODES)
def test_rows_with_other_images_do_not_touch_each_other(mode: str, tiny_model: Any) -> None:
    """Rows with two images, none and one, of different sizes."""
    one, two = torch.randn(3, 28, 56), torch.randn(3, 56, 28)
    third = torch.randn(3, 56, 56)
    rows = [[20, 5, 4, 4, 7, 5, 4, 6, 4, 7, 21], [22, 23], [24, 5, 4, 4, 6, 4, 4, 7]]
    pixels = torch.zeros(3, 3, 56, 56)
    for i, image in enumerate((one, two, third)):
        pixels[i, :, : image.shape[1], : image.shape[2]] = image
    sizes = torch.tensor([[28, 56], [56, 28], [56, 56]])
    chosen = {"max_new_tokens": 9, "eos_token_id": [], **options(mode, 4, 0.3)}
    inputs = padded(rows)
    out = tiny_model.generate(**inputs, pixel_values=pixels, image_sizes=sizes, **chosen)
    together = answers(out, inputs["input_ids"].shape[1])
    for row, images in ((0, [0, 1]), (1, []), (2, [2])):
        given = {"pixel_values": pixels[images], "image_sizes": sizes[images]} if images else {}
        alone = tiny_model.generate(torch.tensor([rows[row]]), **given, **chosen)
        assert answers(alone, len(rows[row])) == [together[row]]


@pytest.mark.parametrize("mode", MODES)
def test_finished_rows_cost_and_count_nothing(mode: str) -> None:
    """Row 0 ends with its first token, row 1 inside the second block, row 2 runs to the budget."""
    starts, first = [[10] * 5, [10] * 25, [10] * 45], (5, 25, 45)
    words = [[END], [20, 21, 22, 23, 24, END], [30 + i for i in range(12)]]
    tables = [
        torch.stack([says(w, first=f, shift=shift) for w, f in zip(words, first, strict=True)]).sum(0)
        for shift in (1, 0)
    ]
    model = scripted_model(tiny_config(vision=False), by_position(tables[0]), by_position(tables[1]))
    sizes = count_forwards(model)
    tokens, out = generate(model, starts, max_new_tokens=12, **options(mode, 4))
    assert tokens == words
    assert sizes[0] == 3 and sizes[1:] == sorted(sizes[1:], reverse=True)
    assert sum(sizes) == sum(out.nfe) and out.nfe[0] == 1
    assert out.total_nfe == len(sizes) == max(out.nfe)
    assert out.sequences[0, 46:].tolist() == [0] * 11  # padded with the pad token behind the end


# --- A committed token is never resampled.


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 2.0, "seed": 5}], ids=["greedy", "sampled"]
)
def test_a_committed_token_is_never_changed(sampling: dict[str, Any]) -> None:
    """The script changes its mind at every forward, and is surest about what is already committed."""
    generator = torch.Generator().manual_seed(0)
    drafts = 3.0 * torch.randn(64, 80, V, generator=generator)
    model = scripted_model(
        tiny_config(vision=False),
        by_position(says([20 + i for i in range(24)], shift=1)),
        lambda position, token, forward: drafts[forward % 64, position] * (1 + 9 * (token != MASK))[..., None],
    )
    stream = model.stream(
        torch.tensor([PROMPT]),
        mode="diffusion",
        block_length=8,
        threshold=0.5,
        max_new_tokens=24,
        eos_token_id=[],
        **sampling,
    )
    canvases = [event.canvas for event in stream]
    for before, after in itertools.pairwise(canvases):
        if MASK in before:
            assert all(old in (MASK, new) for old, new in zip(before, after, strict=True))
    committed: dict[int, int] = {}
    for ids, positions, ahead in model.encoder.calls[1:]:
        for token, position in zip(ids[0], positions[0], strict=True):
            if position in committed:
                assert committed[position] == token
            elif token != MASK:
                committed[position] = token
        assert MASK not in ids[0] or all(ahead[0])
    final = stream.output().sequences[0].tolist()
    assert all(final[position] == token for position, token in committed.items() if position < len(final))
    assert len(final) == len(PROMPT) + 24 and len(committed) >= 16


@pytest.mark.parametrize("mode", MODES)
def test_streamed_tokens_are_final_and_equal_generates(mode: str) -> None:
    model = make_tiny_model(seed=8, vision=False)
    chosen = {"max_new_tokens": 20, **options(mode, 6, 0.3)}
    [expected], out = generate(model, [PROMPT], **chosen)
    events = list(model.stream(torch.tensor([PROMPT]), **chosen))
    assert [token for event in events for token in event.token_ids] == expected
    forwards = [event.num_forwards for event in events]
    assert forwards == sorted(forwards) and forwards[-1] == out.nfe[0]
    assert [event.finish_reason for event in events][-1] == out.finish_reasons[0]
    assert all(event.finish_reason is None for event in events[:-1])


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_stream_makes_no_more_forwards(mode: str) -> None:
    model = speaker([20 + i for i in range(40)])
    sizes = count_forwards(model)
    stream = model.stream(torch.tensor([PROMPT]), max_new_tokens=40, **options(mode, 4))
    next(stream)
    before = len(sizes)
    stream.close()
    assert len(sizes) == before and list(stream) == []
    [tokens], _ = generate(model, [PROMPT], max_new_tokens=8, **options(mode, 4))
    assert tokens == [20 + i for i in range(8)]


# --- Counting: NFE is the number of backbone calls, and AR has exactly one token per forward.


@pytest.mark.parametrize("mode", MODES)
def test_nfe_is_the_number_of_backbone_calls(mode: str) -> None:
    model = make_tiny_model(seed=9, vision=False)
    sizes = count_forwards(model)
    for prompt, budget, block_length in itertools.product(prompts(3, seed=9), (1, 2, 9, 20), (1, 3, 8)):
        sizes.clear()
        _, out = generate(model, [prompt], max_new_tokens=budget, **options(mode, block_length, 0.3))
        assert out.nfe == [len(sizes)] and out.total_nfe == len(sizes) and out.nfe_prefill == [1]
    sizes.clear()
    _, out = generate(model, prompts(6, seed=9), max_new_tokens=20, **options(mode, 4, 0.3))
    assert out.total_nfe == len(sizes) >= max(out.nfe)


def test_ar_has_exactly_one_token_per_forward() -> None:
    model = make_tiny_model(seed=10, vision=False)
    _, out = generate(model, prompts(20, seed=10), mode="ar", max_new_tokens=20)
    assert set(out.tokens_per_forward) == set(out.tokens_per_forward_end_to_end) == {1.0}
    assert out.nfe == out.num_new_tokens


# --- Options that cannot be honoured are refused in one line that names the nearest known one.


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"mode": "difusion"}, "unknown mode 'difusion'.*diffusion"),
        ({"mode": "ar", "block_length": 8}, "ar.*block_length"),
        ({"mode": "ar", "threshold": 0.5}, "ar.*threshold"),
        ({"mode": "linear_spec", "threshold": 0.5}, "linear_spec.*threshold"),
        ({"mode": "linear_spec", "commit_rule": "entropy"}, "linear_spec.*commit_rule"),
        ({"mode": "diffusion", "commit_rule": "entropic"}, "commit_rule 'entropic'"),
        ({"mode": "diffusion", "treshold": 0.5}, "treshold.*threshold"),
        ({"mode": "diffusion", "threshold": 0.0}, "threshold"),
        ({"mode": "diffusion", "threshold": 1.5}, "threshold"),
        ({"mode": "diffusion", "block_length": 0}, "block_length"),
        ({"mode": "ar", "max_new_tokens": 0}, "max_new_tokens"),
        ({"mode": "ar", "max_new_tokens": -3}, "max_new_tokens"),
        ({"mode": "ar", "temperature": 0.5}, "do_sample"),
        ({"mode": "ar", "top_k": 5}, "do_sample"),
        ({"mode": "ar", "top_p": 0.5}, "do_sample"),
        ({"mode": "ar", "do_sample": True, "temperature": 0.0}, "temperature"),
        ({"mode": "ar", "do_sample": True, "temperature": -1.0}, "temperature"),
        ({"mode": "ar", "do_sample": True, "top_p": 0.0}, "top_p"),
        ({"mode": "ar", "do_sample": True, "top_k": -1}, "top_k"),
        ({"mode": "ar", "num_beams": 4}, "num_beams"),
        (
            {"mode": "diffusion", "logits_processor": [RepetitionPenaltyLogitsProcessor(1.2)]},
            "diffusion.*logits_processor",
        ),
        ({"mode": "ar", "stop_strings": ["x"]}, "tokenizer"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(chosen: dict[str, Any], message: str) -> None:
    model = speaker([20])
    with pytest.raises(ValueError, match=message) as caught:
        model.generate(torch.tensor([PROMPT]), **chosen)
    assert "\n" not in str(caught.value) and model.encoder.calls == []
