"""The dual stream against naive references: masks written as loops, plain causal and bidirectional forwards."""

import pytest
import torch
from training_cases import EOS, MASK, MIXED, noise_settings, sample, tiny_model

from trimode_vlm import patterns
from trimode_vlm.training.collate import collate, lay_out
from trimode_vlm.training.corruption import noise_generator
from trimode_vlm.training.dual_stream import IGNORE, assign_blocks, build_dual_stream, cut_blocks, pack, response_runs


def forward(model, batch):
    pattern = patterns.dual_stream(batch.position, batch.document, batch.block_start, batch.block_id, batch.is_noisy)
    embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
    return model.diffusion_head(model.hidden(embeds, batch.position, pattern))


def test_blocks_start_with_the_response_and_end_with_it():
    loss_mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool)
    block_id, block_start = assign_blocks(loss_mask, 2)
    assert block_id.tolist() == [-1, -1, 0, 0, 1, 1, 2, -1, 3, 3, -1]
    assert block_start.tolist() == [-1, -1, 2, 2, 4, 4, 6, -1, 8, 8, -1]
    assert response_runs(loss_mask) == [(2, 7), (8, 10)]


def test_random_offset_shortens_the_first_block_only():
    loss_mask = torch.arange(50) >= 10
    seen = set()
    for number in range(200):
        block_id, block_start = assign_blocks(loss_mask, 8, "random", noise_generator(0, 0, number))
        first = int((block_id == 0).sum())
        seen.add(first)
        sizes = torch.bincount(block_id[10:])
        assert (sizes[1:-1] == 8).all() and sizes[-1] <= 8
        for block in range(len(sizes)):
            places = torch.where(block_id == block)[0]
            assert (block_start[places] == places[0]).all()
    assert seen == set(range(1, 9))


def test_several_block_lengths_are_sampled_per_sample():
    loss_mask = torch.ones(64, dtype=torch.bool)
    sizes = {
        int((assign_blocks(loss_mask, (4, 16), generator=noise_generator(0, 0, i))[0] == 0).sum()) for i in range(20)
    }
    assert sizes == {4, 16}


def naive_mask(row):
    """Facts.md 2, read aloud, one pair at a time."""
    length = len(row.input_ids)
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(length):
            if row.document[q] != row.document[k]:
                continue
            if not row.is_noisy[q]:
                allowed[q, k] = not row.is_noisy[k] and row.position[k] <= row.position[q]
            elif row.is_noisy[k]:
                allowed[q, k] = row.block_id[q] == row.block_id[k]
            else:
                allowed[q, k] = row.position[k] < row.block_start[q]
    return allowed


@pytest.mark.parametrize("noisy_stream", ["response", "text"])
def test_pattern_equals_the_rules(noisy_stream):
    row = pack([lay_out(s, noise_settings(noisy_stream=noisy_stream)) for s in MIXED])
    meta = [getattr(row, n)[None] for n in ("position", "document", "block_start", "block_id", "is_noisy")]
    assert torch.equal(patterns.dual_stream(*meta).attn_mask[0, 0], naive_mask(row))


def test_lengths_positions_and_targets():
    s = MIXED[1]
    num_tokens, num_vision, num_response = len(s.input_ids), 8, 13
    response, text = (lay_out(s, noise_settings(noisy_stream=n, full_block_fraction=1.0)) for n in ("response", "text"))
    assert len(response.input_ids) == num_response + num_tokens
    assert len(text.input_ids) == num_tokens - num_vision + num_tokens
    ids, loss_mask = torch.tensor(s.input_ids), torch.tensor(s.loss_mask)
    for row in (response, text):
        clean = ~row.is_noisy
        assert torch.equal(row.position[clean], torch.arange(num_tokens))
        assert torch.equal(row.position[row.is_noisy], row.source[row.is_noisy])
        noisy_target = row.target[row.is_noisy]
        assert torch.equal(noisy_target[noisy_target != IGNORE], ids[loss_mask])
        # The token before each response predicts its first token; prompts and later user turns are never targets.
        expected = [ids[i + 1].item() if i + 1 < num_tokens and loss_mask[i + 1] else IGNORE for i in range(num_tokens)]
        assert row.target[clean].tolist() == expected


def test_one_block_without_noise_is_plain_causal_and_plain_bidirectional():
    model, s = tiny_model(), sample(0, ((5, 9),))
    ids, loss_mask = torch.tensor(s.input_ids), torch.tensor(s.loss_mask)
    none = torch.zeros_like(loss_mask)
    row = build_dual_stream(ids, loss_mask, cut_blocks(ids, loss_mask, 64), ids, none, torch.ones(len(ids)))
    with torch.no_grad():
        logits = forward(model, collate([s], [row]))[0]
        causal = model(input_ids=ids[None]).logits[0]
        # The response alone, both ways, after a causal prompt: a naive mask over the clean sequence.
        allowed = torch.ones(14, 14, dtype=torch.bool).tril()
        allowed[5:, 5:] = True
        pattern = patterns.Pattern(lambda b, h, q, k: allowed[q, k], 1, 14, 14, ids.device)
        both = model.diffusion_head(model.hidden(model.embed(ids[None]), torch.arange(14)[None], pattern))[0]
    assert torch.allclose(logits[row.is_noisy], both[5:], atol=1e-5)
    assert torch.allclose(logits[~row.is_noisy], causal, atol=1e-5)


def test_alone_equals_in_a_padded_batch_and_in_a_pack():
    model, noise = tiny_model(), noise_settings()
    rows = [lay_out(s, noise) for s in MIXED]
    with torch.no_grad():
        alone = [forward(model, collate([s], [row]))[0] for s, row in zip(MIXED, rows, strict=True)]
        padded = forward(model, collate(MIXED, rows))
        packed = forward(model, collate(MIXED, [pack(rows)]))[0]
    for number, logits in enumerate(alone):
        assert torch.allclose(padded[number, : len(logits)], logits, atol=1e-5)
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("noisy_stream", ["response", "text"])
@pytest.mark.parametrize("block_offset", ["response", "random"])
def test_response_padding_fills_the_last_block_of_every_response_in_the_noisy_half_only(noisy_stream, block_offset):
    s = MIXED[1]
    options = {"block_length": 8, "block_offset": block_offset, "noisy_stream": noisy_stream, "end_token_id": EOS}
    plain = lay_out(s, noise_settings(**options))
    padded = lay_out(s, noise_settings(**options, response_padding="block", full_block_fraction=1.0))
    assert torch.equal(plain.target[~plain.is_noisy], padded.target[~padded.is_noisy]), "one end token in the AR loss"
    assert torch.equal(plain.input_ids[~plain.is_noisy], padded.input_ids[~padded.is_noisy])
    extra = padded.source < 0
    assert (
        padded.is_noisy[extra].all() and (padded.input_ids[extra] == MASK).all() and (padded.target[extra] == EOS).all()
    )
    for start, end in response_runs(torch.tensor(s.loss_mask)):
        last = (
            padded.is_noisy & (padded.block_start >= start) & (padded.position >= end - 1) & (padded.position < end + 8)
        )
        block = padded.is_noisy & (padded.block_id == padded.block_id[last][0])
        begin = int(padded.block_start[last][0])
        assert padded.position[block].tolist() == list(range(begin, begin + 8)), "a whole block, without a gap"
        assert (padded.source[block] < 0).sum() == 8 - (end - begin)


def test_response_padding_changes_no_other_logit_of_the_clean_half():
    model, s = tiny_model(), MIXED[1]
    plain, padded = (
        lay_out(s, noise_settings(block_length=8, end_token_id=EOS, response_padding=p)) for p in ("none", "block")
    )
    with torch.no_grad():
        a, b = (forward(model, collate([s], [row]))[0][~row.is_noisy] for row in (plain, padded))
    assert torch.allclose(a, b, atol=1e-5)


def test_image_in_a_response_is_refused():
    s = MIXED[1]
    bad = type(s)(sample_id=9, input_ids=s.input_ids, loss_mask=[True] * len(s.input_ids))
    with pytest.raises(ValueError, match="sample 9"):
        lay_out(bad, noise_settings())
