"""From a rendered conversation to an update: one test or more for each public pitfall of labels and losses.

Packing against separate samples stands in test_objective.py, two real ranks in test_trainer.py.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processor_cases import CHATML_THINKING, chatml_tokenizer, mistral_tokenizer, random_text
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import EOS, MIXED, noise_settings, sample, tiny_model
from transformers.loss.loss_utils import ForCausalLMLoss

from trimode_vlm.processor import TriModeProcessor
from trimode_vlm.training.blocks import response_runs
from trimode_vlm.training.collate import Batch, NoiseSettings, collate, lay_out, micro_batches
from trimode_vlm.training.data import Encoded, ListSource
from trimode_vlm.training.dual_stream import IGNORE
from trimode_vlm.training.nano_data import build_processor
from trimode_vlm.training.objective import Counts, combine, tri_mode_terms

# --- labels come from spans of the rendered template ----------------------------------------------------------------

PROCESSORS = {
    "nano": build_processor,
    "mistral": lambda: TriModeProcessor(tokenizer=mistral_tokenizer()),
    "chatml with thinking": lambda: TriModeProcessor(tokenizer=chatml_tokenizer(CHATML_THINKING)),
}


@pytest.fixture(scope="module", params=list(PROCESSORS))
def processor(request: pytest.FixtureRequest) -> TriModeProcessor:
    return PROCESSORS[request.param]()


def random_conversation(rng: random.Random, special: list[str]) -> list[dict[str, Any]]:
    """A chat of one to four turns; texts have leading spaces, any script, and literals of special tokens in them."""

    def text(length: int = 8) -> str:
        return random_text(rng, length) + (rng.choice(special) + random_text(rng, 3) if rng.random() < 0.2 else "")

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        parts: list[dict[str, Any]] = [{"type": "text", "text": text()}]
        for _ in range(rng.choice([0, 0, 1, 2])):
            pixels = np.full((rng.choice([20, 28, 60]), rng.choice([28, 90]), 3), rng.randrange(256), dtype=np.uint8)
            parts.insert(rng.randint(0, len(parts)), {"type": "image", "image": Image.fromarray(pixels)})
        messages.append({"role": "user", "content": parts})
        answer = rng.choice(["", " ", "  ", "\n", "é"]) + text(12)
        messages.append({"role": "assistant", "content": answer} | ({"train": False} if rng.random() < 0.15 else {}))
    return messages


def settings_of(processor: TriModeProcessor, **changes: Any) -> NoiseSettings:
    layout = processor.layout
    assert layout is not None
    vision = tuple(i for i in (layout.image, layout.start, layout.row_break, layout.end) if i is not None)
    # No token of these vocabularies has this id, so a mask cannot be mistaken for text.
    return NoiseSettings(mask_token_id=len(processor.tokenizer), vision_token_ids=vision, **changes)


def test_what_is_trained_decodes_to_the_answers_and_their_end_tokens(processor: TriModeProcessor) -> None:
    """300 conversations: the targets of both losses, past the labels, the shift and the layout of the streams."""
    rng = random.Random(7)
    tokenizer, end = processor.tokenizer, processor.tokenizer.eos_token
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    noise = settings_of(processor, full_block_fraction=1.0)
    trained, literals, images = 0, 0, 0
    for number in range(300):
        messages = random_conversation(rng, special)
        chat = processor.encode_chat(messages)
        encoded = Encoded(sample_id=number, input_ids=chat["input_ids"], loss_mask=chat["loss_mask"])
        answers = [m["content"] + end for m in messages if m["role"] == "assistant" and m.get("train") is not False]
        row = lay_out(encoded, noise)
        for half in (~row.is_noisy, row.is_noisy):  # next tokens for AR, own tokens for diffusion
            assert decoded_runs(tokenizer, row.target[half], row.position[half]) == answers
        trained, images = trained + len(answers), images + len(chat["images"])
        literals += sum(any(token in answer[: -len(end)] for token in special) for answer in answers)
    assert trained > 500 and literals > 50 and images > 100, "the cases are in the draw"


def decoded_runs(tokenizer: Any, target: torch.Tensor, position: torch.Tensor) -> list[str]:
    """The text of each run of labels at consecutive positions, in order of position."""
    runs: list[list[int]] = []
    last = -2
    for place, token in sorted(zip(position.tolist(), target.tolist(), strict=True)):
        if token == IGNORE:
            continue
        if place != last + 1:
            runs.append([])
        runs[-1].append(token)
        last = place
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def test_the_first_trained_token_is_the_first_that_inference_would_emit(processor: TriModeProcessor) -> None:
    rng = random.Random(8)
    checked = 0
    for number in range(100):
        messages = random_conversation(rng, ["<unk>"])
        answer = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        if messages[answer].get("train") is False:
            continue
        chat = processor.encode_chat(messages)
        prompt = processor.apply_chat_template(
            messages[:answer], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"][0].tolist()
        encoded = Encoded(sample_id=number, input_ids=chat["input_ids"], loss_mask=chat["loss_mask"])
        row = lay_out(encoded, settings_of(processor, dual=False))
        first = int(torch.where(row.target != IGNORE)[0][0])
        assert row.input_ids[: first + 1].tolist() == prompt, "its target is predicted by the prompt's last token"
        checked += 1
    assert checked > 50


# --- one shift --------------------------------------------------------------------------------------------------------


def terms_of(model: Any, batch: Batch, **options: Any) -> Any:
    embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
    hidden = model.hidden(embeds, batch.position, batch.pattern())
    return tri_mode_terms(
        hidden, batch.target, batch.is_noisy, batch.p_mask, batch.sequence, model.diffusion_head, **options
    )


def test_the_ar_loss_is_that_of_transformers() -> None:
    """Prompts and later user turns never count; the first answer token does; the shift happens once."""
    model = tiny_model().double()
    for s in MIXED:
        batch = collate([s], [lay_out(s, noise_settings())])
        images = {"pixel_values": batch.pixel_values, "image_sizes": batch.image_sizes} if s.images else {}
        ids = torch.tensor([s.input_ids])
        labels = torch.where(torch.tensor([s.loss_mask]), ids, IGNORE)
        expected = ForCausalLMLoss(model(input_ids=ids, **images).logits, labels, model.config.vocab_size)
        own = terms_of(model, batch).ar_sum / batch.counts.num_supervised
        torch.testing.assert_close(own.float(), expected.float(), atol=1e-6, rtol=1e-6)


def test_image_tokens_are_never_targets_also_without_a_noisy_half() -> None:
    for dual in (True, False):
        s = replace(MIXED[1], loss_mask=[True] * len(MIXED[1].input_ids), name="train.jsonl row 17")
        with pytest.raises(ValueError, match="train.jsonl row 17: an image token"):
            lay_out(s, noise_settings(dual=dual))


# --- padding ----------------------------------------------------------------------------------------------------------


def test_padding_with_the_end_token_is_not_trained_and_moves_neither_loss_nor_mask_ratio() -> None:
    model = tiny_model().double()
    long = replace(sample(9, ((80, 9),)), loss_mask=[False] * 89)
    for options in ({}, {"complementary_masks": True}, {"noisy_stream": "text"}):
        noise = noise_settings(**options)
        alone = collate(MIXED[:1], [lay_out(MIXED[0], noise)], pad_token_id=EOS)
        padded = collate([MIXED[0], long], [lay_out(s, noise) for s in (MIXED[0], long)], pad_token_id=EOS)
        pads = padded.input_ids[0, alone.input_ids.shape[1] :]
        assert len(pads) > 50 and (pads == EOS).all() and (padded.target[0, -len(pads) :] == IGNORE).all()
        end_targets = padded.target[0][~padded.is_noisy[0]].tolist().count(EOS)
        assert end_targets == 1, "the answer's own end token is trained"
        assert padded.counts == alone.counts, "supervised, maskable and masked tokens, hence the mask ratio"
        for one, two in zip(vars(terms_of(model, alone)).values(), vars(terms_of(model, padded)).values(), strict=True):
            torch.testing.assert_close(one, two, atol=1e-9, rtol=0)


def moved(batch: Batch, to_the_left: bool) -> Batch:
    """The batch with its padding on the left instead of the right."""
    shifts = (batch.document < 0).sum(1).tolist() if to_the_left else [0] * len(batch.document)
    tokens = {k: v for k, v in vars(batch).items() if isinstance(v, torch.Tensor) and v.shape == batch.document.shape}
    rolled = {k: torch.stack([r.roll(n) for r, n in zip(v, shifts, strict=True)]) for k, v in tokens.items()}
    return replace(batch, **rolled)


@pytest.mark.parametrize("to_the_left", [False, True])
@pytest.mark.parametrize("options", [{}, {"noisy_stream": "all"}, {"complementary_masks": True}, {"dual": False}])
@pytest.mark.parametrize("mask_only", [False, True])
def test_padding_keys_are_invisible_on_either_side(
    options: dict[str, Any], to_the_left: bool, mask_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clean tokens, noisy blocks and their prefix: a sample alone equals the sample in a batch, by every kernel."""
    if mask_only:
        monkeypatch.setattr("trimode_vlm.patterns.Pattern.dual_plan", None)
    model, noise = tiny_model(), noise_settings(**options)
    rows = [lay_out(s, noise) for s in MIXED]
    batch = moved(replace(collate(MIXED, rows, pad_token_id=EOS), is_plain=False), to_the_left)

    def hidden_of(batch: Batch) -> torch.Tensor:
        embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
        return model.hidden(embeds, batch.position, batch.pattern())

    with torch.no_grad():
        together = hidden_of(batch)
        for number, (s, row) in enumerate(zip(MIXED, rows, strict=True)):
            alone = hidden_of(collate([s], [row]))[0]
            torch.testing.assert_close(together[number, batch.document[number] >= 0], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("to_the_left", [False, True])
def test_padding_of_the_plain_forward_is_invisible_on_either_side(to_the_left: bool) -> None:
    model = tiny_model()
    texts = [s.input_ids for s in MIXED if not s.images]
    width = max(map(len, texts)) + 3
    ids, valid = torch.full((len(texts), width), EOS), torch.zeros(len(texts), width, dtype=torch.long)
    for number, text in enumerate(texts):
        place = slice(width - len(text), None) if to_the_left else slice(0, len(text))
        ids[number, place], valid[number, place] = torch.tensor(text), 1
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=valid).logits
        for number, text in enumerate(texts):
            alone = model(input_ids=torch.tensor([text])).logits[0]
            torch.testing.assert_close(together[number, valid[number].bool()], alone, atol=1e-5, rtol=1e-4)


# --- the same update, however a batch is cut ----------------------------------------------------------------------


def updated(parts: list[list[Batch]], averaging: str) -> torch.Tensor:
    """The weights after one AdamW step on micro-batches of several ranks: counts are summed first, then gradients."""
    # In double precision: AdamW's first step is the sign of the gradient, also where that is rounding noise.
    model = tiny_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts = sum((batch.counts for part in parts for batch in part), Counts())
    for part in parts:
        for batch in part:
            terms = terms_of(model, batch, averaging=averaging)
            combine(terms.ar_sum, terms.diff_sum, counts, alpha=0.3, averaging=averaging).backward()
    optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("averaging", ["tokens", "masked", "pooled", "sequence"])
@pytest.mark.parametrize("complementary_masks", [False, True])
def test_four_samples_give_one_update_in_one_batch_in_parts_packed_and_on_two_ranks(
    averaging: str, complementary_masks: bool
) -> None:
    noise, source = noise_settings(complementary_masks=complementary_masks), ListSource(MIXED, batch_samples=4)
    whole = source.draw(0, 0, 1)
    expected = updated([micro_batches(whole, noise)], averaging)
    assert not torch.equal(expected, updated([micro_batches(whole, replace(noise, seed=1))], averaging))
    ways = {
        "2 x 2": [micro_batches(whole, noise, micro_batch_samples=2)],
        "1 x 4": [micro_batches(whole, noise, micro_batch_samples=1)],
        "packed": [micro_batches(whole, noise, packing_length=110)],
        "two ranks": [micro_batches(source.draw(0, rank, 2), noise) for rank in range(2)],
    }
    for name, parts in ways.items():
        torch.testing.assert_close(updated(parts, averaging), expected, atol=1e-6, rtol=0, msg=name)


# --- noise ------------------------------------------------------------------------------------------------------------


def rows_by_sample(world: int, steps: int = 3, **options: Any) -> dict[tuple[int, int], Any]:
    """(epoch, sample id) -> what the noise made of it, over all ranks."""
    source = ListSource([*MIXED, sample(4), sample(5)], batch_samples=4)
    drawn = [s for step in range(steps) for rank in range(world) for s in source.draw(step, rank, world)]
    return {(s.epoch, s.sample_id): lay_out(s, noise_settings(**options)) for s in drawn}


def test_noise_of_a_sample_does_not_depend_on_the_number_of_ranks_or_on_other_random_numbers() -> None:
    options = {"block_offset": "random", "noise": "block", "block_length": (2, 4, 8)}
    alone = rows_by_sample(1, **options)
    assert len(alone) == 12, "two epochs"
    for world in (2, 4):
        torch.manual_seed(world)
        for key, row in rows_by_sample(world, **options).items():
            for name, value in vars(alone[key]).items():
                assert not isinstance(value, torch.Tensor) or torch.equal(value, getattr(row, name)), (world, name)


def test_noise_does_not_depend_on_the_place_in_a_batch() -> None:
    noise = noise_settings()
    forwards = micro_batches(MIXED, noise)[0]
    backwards = micro_batches(MIXED[::-1], noise)[0]
    assert torch.equal(forwards.p_mask, backwards.p_mask.flip(0)) and torch.equal(
        forwards.target, backwards.target.flip(0)
    )


def test_every_rank_epoch_and_seed_has_its_own_mask_ratios() -> None:
    def levels(rank: int, step: int = 0, seed: int = 0) -> set[float]:
        source = ListSource([sample(n) for n in range(4)], batch_samples=4)
        rows = [lay_out(s, noise_settings(seed=seed)) for s in source.draw(step, rank, 2)]
        return {float(row.p_mask.min()) for row in rows}

    assert all(len(levels(rank)) == 2 for rank in (0, 1))
    assert not levels(0) & levels(1), "two data-parallel ranks draw different t"
    assert not (levels(0) | levels(1)) & (levels(0, step=1) | levels(1, step=1)), "and so do two epochs"
    assert not (levels(0) | levels(1)) & (levels(0, seed=1) | levels(1, seed=1))


# --- the response padding rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noisy_stream", ["response", "text", "all"])
@pytest.mark.parametrize("complementary_masks", [False, True])
def test_exactly_one_end_token_of_a_padded_response_is_in_the_ar_loss(
    noisy_stream: str, complementary_masks: bool
) -> None:
    options = {"noisy_stream": noisy_stream, "complementary_masks": complementary_masks, "block_length": 16}
    for s in MIXED:
        num_answers = len(response_runs(torch.tensor(s.loss_mask)))
        row = lay_out(s, noise_settings(**options, response_padding="block", end_token_id=EOS))
        assert row.target[~row.is_noisy].tolist().count(EOS) == num_answers
        copies = 2 if complementary_masks else 1
        assert int(row.is_maskable.sum()) == 16 * num_answers * copies, "whole blocks, padding included"
        assert row.input_ids[~row.is_noisy].tolist() == s.input_ids


# --- chunked logits ---------------------------------------------------------------------------------------------------


class LargestLogits(TorchDispatchMode):
    """Records the most rows of any tensor [rows, vocabulary] that an operation makes."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor) and self.vocabulary in tensor.shape:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


def test_no_tensor_of_tokens_times_vocabulary_beyond_a_chunk() -> None:
    width, vocabulary, tokens, chunk = 4, 997, 300, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens, width, generator=generator, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    target = torch.randint(vocabulary, (2, tokens), generator=generator)
    target[torch.rand(2, tokens, generator=generator) < 0.3] = IGNORE
    is_noisy = torch.rand(2, tokens, generator=generator) < 0.5
    rest = (is_noisy, torch.ones(2, tokens) / 2, torch.zeros(2, tokens, dtype=torch.long), head)
    saved = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel() if vocabulary in tensor.shape and tensor.data_ptr() != head.weight.data_ptr() else 0
        return tensor

    with LargestLogits(vocabulary) as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        terms = tri_mode_terms(hidden, target, *rest, chunk_tokens=chunk)
        chunked = torch.autograd.grad(terms.ar_sum + 2 * terms.diff_sum, (hidden, head.weight))
    assert 0 < largest.rows <= chunk and saved == 0, "nor are the chunks' logits kept for the backward pass"

    logits, labelled = head(hidden).double(), target != IGNORE
    losses = torch.nn.functional.cross_entropy(logits[labelled], target[labelled], reduction="none")
    ar_sum, diff_sum = losses[~is_noisy[labelled]].sum(), 2 * losses[is_noisy[labelled]].sum()
    torch.testing.assert_close(terms.ar_sum.double(), ar_sum, atol=0, rtol=1e-6)
    torch.testing.assert_close(terms.diff_sum.double(), diff_sum, atol=0, rtol=1e-6)
    plain = torch.autograd.grad(ar_sum + 2 * diff_sum, (hidden, head.weight))
    for one, two in zip(chunked, plain, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-5)


def test_only_labelled_positions_reach_the_head() -> None:
    model, batch = tiny_model(), collate(MIXED, [lay_out(s, noise_settings()) for s in MIXED])
    seen: list[int] = []
    head = copy.deepcopy(model.diffusion_head)
    head.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    hidden = model.hidden(model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes), batch.position,
                          batch.pattern())  # fmt: skip
    tri_mode_terms(hidden, batch.target, batch.is_noisy, batch.p_mask, batch.sequence, head)
    assert seen == [batch.counts.num_supervised + batch.counts.num_masked]
