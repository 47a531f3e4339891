"""The dual stream against naive references: masks written as loops, plain causal and bidirectional forwards."""

import pytest
import torch
from training_cases import EOS, IMAGE, MASK, MIXED, VISION_IDS, noise_settings, sample, tiny_model

from trimode_vlm import patterns
from trimode_vlm.training.blocks import assign_blocks, block_length_at, cut_blocks, response_runs
from trimode_vlm.training.collate import collate, lay_out
from trimode_vlm.training.corruption import noise_generator
from trimode_vlm.training.dual_stream import IGNORE, build_dual_stream, pack


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


def test_blocks_of_a_sequence_count_from_its_start_and_stay_within_a_response():
    loss_mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    block_id, block_start = assign_blocks(loss_mask, 4, block_alignment="sequence")
    #                                  cells: 0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13
    assert block_id.tolist() == [-1, -1, -1, 0, 1, 1, 1, -1, -1, 2, 2, 2, -1, 3]
    assert block_start.tolist() == [-1, -1, -1, 3, 4, 4, 4, -1, -1, 9, 9, 9, -1, 13]


def test_one_random_offset_moves_all_blocks_of_a_sequence():
    loss_mask = torch.zeros(200, dtype=torch.bool)
    loss_mask[10:71] = loss_mask[90:93] = loss_mask[101:180] = True
    seen = set()
    for number in range(100):
        block_id, _ = assign_blocks(loss_mask, 8, "random", noise_generator(0, 0, number), "sequence")
        inside = loss_mask[1:] & loss_mask[:-1]
        edges = torch.where(inside & (block_id[1:] != block_id[:-1]))[0] + 1
        (shift,) = {int(edge) % 8 for edge in edges}
        seen.add(shift)
        assert torch.bincount(block_id[loss_mask]).max() <= 8
    assert seen == set(range(8))


@pytest.mark.parametrize("progress, expected", [(0, 2), (0.19, 2), (0.2, 4), (0.5, (8, 16)), (0.99, (8, 16)), (1, 32)])
def test_block_lengths_follow_a_schedule(progress, expected):
    schedule = [[0, 2], [0.2, 4.0], [0.5, 8, 16], [1, 32]]
    assert block_length_at(schedule, progress) == expected
    assert type(block_length_at(schedule, 0.3)) is int


@pytest.mark.parametrize(
    "schedule, reason",
    [
        ([], "entries"), ([[0]], "entries"), ([[0.1, 2]], "begin at progress 0"), ([[0, 2], [0, 4]], "rise"),
        ([[0, 2], [0.5, 4], [0.4, 8]], "rise"), ([[0, 2], [1.5, 4]], "to 1 at most"), ([[0, 0]], "got 0"),
        ([[0, 2], [0.5, 2.5]], "got 2.5"),
    ],
)  # fmt: skip
def test_wrong_schedules_are_named(schedule, reason):
    with pytest.raises(ValueError, match=f"block_length_schedule .*{reason}"):
        block_length_at(schedule, 0)


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


@pytest.mark.parametrize("noisy_stream", ["response", "text", "all"])
@pytest.mark.parametrize("complementary_masks", [False, True])
def test_pattern_equals_the_rules(noisy_stream, complementary_masks):
    noise = noise_settings(noisy_stream=noisy_stream, complementary_masks=complementary_masks)
    row = pack([lay_out(s, noise) for s in MIXED])
    meta = [getattr(row, n)[None] for n in ("position", "document", "block_start", "block_id", "is_noisy")]
    assert torch.equal(patterns.dual_stream(*meta).attn_mask[0, 0], naive_mask(row))


def test_lengths_positions_and_targets():
    s = MIXED[1]
    num_tokens, num_vision, num_response = len(s.input_ids), 8, 13
    response, text, everything = (
        lay_out(s, noise_settings(noisy_stream=n, full_block_fraction=1.0)) for n in ("response", "text", "all")
    )
    assert len(response.input_ids) == num_response + num_tokens
    assert len(text.input_ids) == num_tokens - num_vision + num_tokens
    assert len(everything.input_ids) == 2 * num_tokens
    ids, loss_mask = torch.tensor(s.input_ids), torch.tensor(s.loss_mask)
    for row in (response, text, everything):
        clean = ~row.is_noisy
        assert torch.equal(row.position[clean], torch.arange(num_tokens))
        assert torch.equal(row.position[row.is_noisy], row.source[row.is_noisy])
        noisy_target = row.target[row.is_noisy]
        assert torch.equal(noisy_target[noisy_target != IGNORE], ids[loss_mask])
        # The token before each response predicts its first token; prompts and later user turns are never targets.
        expected = [ids[i + 1].item() if i + 1 < num_tokens and loss_mask[i + 1] else IGNORE for i in range(num_tokens)]
        assert row.target[clean].tolist() == expected


def test_images_stand_clean_in_both_halves_of_the_symmetric_stream_and_no_response_block_sees_the_noisy_ones():
    model = tiny_model()
    rows = [lay_out(s, noise_settings(noisy_stream="all")) for s in MIXED]
    batch = collate(MIXED, [pack(rows)])
    (ids, noisy), meta = (batch.input_ids[0], batch.is_noisy[0]), batch.pattern().attn_mask[0, 0]
    embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)[0]
    is_vision = torch.isin(ids, torch.tensor(VISION_IDS))
    assert 0 < (is_vision & noisy).sum() == (is_vision & ~noisy).sum()
    for number in range(len(MIXED)):
        halves = [(ids == IMAGE) & (batch.document[0] == number) & half for half in (noisy, ~noisy)]
        torch.testing.assert_close(embeds[halves[0]], embeds[halves[1]])  # the features of the same image
    assert len(embeds[ids == IMAGE].unique(dim=0)) == sum(i.count(IMAGE) for i in (s.input_ids for s in MIXED))
    assert not meta[batch.is_maskable[0]][:, is_vision & noisy].any()
    assert not batch.is_maskable[0][is_vision].any() and (batch.target[0][is_vision & noisy] == IGNORE).all()


@pytest.mark.parametrize("noisy_stream", ["response", "text", "all"])
@pytest.mark.parametrize("response_padding", ["none", "block"])
def test_complementary_halves_share_the_clean_one(noisy_stream, response_padding):
    s = MIXED[1]
    options = dict(noisy_stream=noisy_stream, response_padding=response_padding, end_token_id=EOS, block_length=8)
    plain = lay_out(s, noise_settings(**options))
    row = lay_out(s, noise_settings(**options, complementary_masks=True))
    num_response = int(plain.is_maskable.sum())
    assert len(row.input_ids) == len(plain.input_ids) + num_response
    clean, maskable = ~row.is_noisy, row.is_maskable
    assert torch.equal(row.target[clean], plain.target[~plain.is_noisy]), "the AR targets are there once"
    first, second = torch.where(maskable)[0].split(num_response)
    for name in ("position", "block_start", "source"):
        assert torch.equal(getattr(row, name)[first], getattr(row, name)[second]), name
    assert ((row.target[first] != IGNORE) ^ (row.target[second] != IGNORE)).all(), "masked in one of the two"
    assert ((row.input_ids[first] == MASK) ^ (row.input_ids[second] == MASK)).all()
    assert not set(row.block_id[first].tolist()) & set(row.block_id[second].tolist())
    prompt = row.is_noisy & ~maskable
    assert not set(row.block_id[prompt].tolist()) & set(row.block_id[maskable].tolist())


def test_blocks_that_the_first_copy_masks_as_a_whole_have_no_second_one():
    s, noise = MIXED[1], noise_settings(complementary_masks=True, full_block_fraction=1.0)
    row = lay_out(s, noise)
    assert len(row.input_ids) == 13 + len(s.input_ids) and (row.p_mask[row.is_maskable] == 1).all()
    sizes = set()
    for seed in range(20):
        some = lay_out(s, noise_settings(complementary_masks=True, full_block_fraction=0.5, noise="block", seed=seed))
        second = torch.arange(len(some.input_ids)) >= 13
        assert torch.equal(some.is_maskable[second & some.is_noisy], some.p_mask[second & some.is_noisy] < 1)
        sizes.add(int((second & some.is_noisy).sum()))
        assert int((some.target[some.is_noisy] != IGNORE).sum()) == 13, "still each token once"
    assert min(sizes) < 13 and len(sizes) > 3


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


@pytest.mark.parametrize("noisy_stream", ["response", "text", "all"])
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


@pytest.mark.parametrize("block_offset", ["response", "random"])
def test_response_padding_of_a_sequence_ends_with_the_block_that_the_sequence_counts(block_offset):
    for number in range(20):
        s = sample(number, ((3, 7), (4, 6), (2, 1)))
        options = dict(block_length=8, block_offset=block_offset, block_alignment="sequence", end_token_id=EOS)
        row = lay_out(s, noise_settings(**options, response_padding="block"))
        ends = {
            int(row.position[row.is_noisy & (row.block_id == b)].max()) + 1 for b in row.block_id.unique() if b >= 0
        }
        assert len({end % 8 for end in ends}) == 1, "every block, filled up or not, ends on the grid"


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
