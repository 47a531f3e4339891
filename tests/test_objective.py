"""The tri-mode objective against plain forwards of single samples in double precision, and against itself laid out
in other ways: other noisy streams, packed, in parts."""

import dataclasses

import pytest
import torch
from naive_objective import naive_objective
from training_cases import EOS, MIXED, noise_settings, sample, tiny_model

from trimode_vlm.training.collate import collate, dummy_batch, first_fit, lay_out, micro_batches
from trimode_vlm.training.objective import Counts, combine, count, tri_mode_terms


def hidden_of(model, batch):
    embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
    return model.hidden(embeds, batch.position, batch.pattern())


def terms_of(model, batch, **options):
    hidden = hidden_of(model, batch)
    return tri_mode_terms(
        hidden, batch.target, batch.is_noisy, batch.p_mask, batch.sequence, model.diffusion_head, **options
    )


def batch_of(samples, **changes):
    noise = noise_settings(**changes)
    return collate(samples, [lay_out(s, noise) for s in samples])


def gradients(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    )


def loss_of(model, batches, alpha=0.3, averaging="tokens", **options):
    counts = sum((b.counts for b in batches), Counts())
    parts = [terms_of(model, b, averaging=averaging, **options) for b in batches]
    return sum(combine(t.ar_sum, t.diff_sum, counts, alpha=alpha, averaging=averaging) for t in parts)


def assert_equal(model, loss, expected, atol=1e-5):
    torch.testing.assert_close(loss, expected, atol=atol, rtol=1e-5)
    torch.testing.assert_close(gradients(model, loss), gradients(model, expected), atol=atol, rtol=1e-4)


AVERAGINGS = ["tokens", "masked", "pooled", "sequence"]
DRAWS = {
    "sequence": {},
    "block": {"noise": "block"},
    "complementary": {"complementary_masks": True, "noise": "block"},
    "aligned with the sequence": {"block_alignment": "sequence"},
    "realised": {"mask_ratio": "realised"},
}


@pytest.mark.parametrize("averaging", AVERAGINGS)
@pytest.mark.parametrize("weight", ["1/p", "1"])
@pytest.mark.parametrize("draw", DRAWS)
def test_loss_and_gradients_equal_plain_forwards(averaging, weight, draw):
    model = tiny_model().double()
    noise = noise_settings(**DRAWS[draw])
    rows = [lay_out(s, noise) for s in MIXED]
    copies = 2 if noise.complementary_masks else 1
    expected = naive_objective(model, MIXED, rows, averaging, weight, copies=copies)
    loss = loss_of(model, [collate(MIXED, rows)], averaging=averaging, weight=weight)
    assert_equal(model, loss, expected, 1e-6)  # not less: 1 / p is in fp32


def test_sums_keep_the_precision_of_the_model():
    model, double = tiny_model(), tiny_model().double()
    assert terms_of(model, batch_of(MIXED)).ar_sum.dtype == torch.float32
    assert terms_of(model.bfloat16(), batch_of(MIXED)).ar_sum.dtype == torch.float32
    assert terms_of(double, batch_of(MIXED)).ar_sum.dtype == torch.float64


@pytest.mark.parametrize("block_alignment", ["response", "sequence"])
@pytest.mark.parametrize("noisy_stream", ["text", "all"])
def test_noisy_streams_give_the_same_losses_and_gradients(noisy_stream, block_alignment):
    """L_text + L and 2 L with the images in both halves against L_resp + L: less work for the same result."""
    model = tiny_model()
    options = {"block_alignment": block_alignment, "response_padding": "block", "end_token_id": EOS}
    response, other = (batch_of(MIXED, noisy_stream=name, **options) for name in ("response", noisy_stream))
    assert len(other.image_sizes) == len(response.image_sizes) * (2 if noisy_stream == "all" else 1)
    for alpha in (0.0, 1.0):  # each loss alone
        assert_equal(model, loss_of(model, [other], alpha), loss_of(model, [response], alpha))


@pytest.mark.parametrize("noisy_stream", ["response", "text", "all"])
def test_complementary_masks_equal_two_rows_whose_ar_loss_counts_once(noisy_stream):
    """Both copies over one clean half: the AR loss of one row, the diffusion loss of two."""
    model = tiny_model().double()
    noise = noise_settings(complementary_masks=True, noisy_stream=noisy_stream)
    both = collate(MIXED, [lay_out(s, noise) for s in MIXED])
    shared = terms_of(model, both)
    alone = [terms_of(model, collate([s], [copy])) for s in MIXED for copy in copies_of(lay_out(s, noise))]
    ar = sum(t.ar_sum for t in alone) / 2
    diff = sum(t.diff_sum for t in alone)
    assert_equal(model, shared.ar_sum, ar, 1e-9)
    assert_equal(model, shared.diff_sum, diff, 1e-9)
    counts = both.counts
    assert counts.num_supervised == counts.num_masked == sum(sum(s.loss_mask) for s in MIXED), "each token once"
    assert counts.num_maskable == 2 * counts.num_supervised and counts.num_sequences == len(MIXED)


def copies_of(row):
    """The row of each copy alone: [noisy | clean] and [complement | clean], with prompt tokens in the first."""
    first_of_second = int(torch.where(row.position[row.is_noisy].diff() <= 0)[0]) + 1
    index = torch.arange(len(row.input_ids))
    for keep in (index < first_of_second, index >= first_of_second):
        keep = keep | ~row.is_noisy
        parts = {k: v[keep] for k, v in vars(row).items() if isinstance(v, torch.Tensor)}
        has_images = bool((row.is_noisy & torch.isin(row.input_ids, torch.tensor([3])))[keep].any())
        yield dataclasses.replace(row, **parts, image_copies=2 if has_images else 1)


@pytest.mark.parametrize("averaging", ["tokens", "masked", "pooled", "sequence"])
def test_one_batch_equals_accumulation(averaging):
    model, noise = tiny_model(), noise_settings()
    whole = loss_of(model, micro_batches(MIXED, noise), averaging=averaging)
    expected = gradients(model, whole)
    for size in (1, 2):
        parts = loss_of(model, micro_batches(MIXED, noise, micro_batch_samples=size), averaging=averaging)
        assert torch.allclose(gradients(model, parts), expected, atol=1e-6)


# The shortest with an image comes first, and is packed last: its image must follow it.
PACKED = [sample(5, ((4, 3), (2, 2)), images=((1, 2),)), *MIXED, sample(4, ((2, 20),)), sample(6, ((3, 3),))]


@pytest.mark.parametrize("averaging", AVERAGINGS)
@pytest.mark.parametrize("options", [{}, {"noisy_stream": "all"}, {"complementary_masks": True}, {"dual": False}])
def test_packed_samples_equal_separate_ones(averaging, options):
    model, noise = tiny_model(), noise_settings(**options)
    packed = micro_batches(PACKED, noise, micro_batch_samples=2, packing_length=120)
    rows = [row for batch in packed for row in batch.document]
    assert len(rows) < len(PACKED) and max(int(row.max()) for row in rows) > 0, "several documents in a row"
    assert {i for b in packed for i in b.sample_ids} == set(range(7))
    separate = micro_batches(PACKED, noise, micro_batch_samples=1)
    assert_equal(model, loss_of(model, packed, averaging=averaging), loss_of(model, separate, averaging=averaging))
    if averaging == "tokens" and noise.dual and not noise.complementary_masks:
        # In words: the separate losses, each weighted with its share of the trained tokens.
        shares = [b.counts.num_supervised / sum(x.counts.num_supervised for x in separate) for b in separate]
        weighted = sum(share * loss_of(model, [b]) for share, b in zip(shares, separate, strict=True))
        assert_equal(model, loss_of(model, packed), weighted)


def test_packed_rows_are_full_and_hold_whole_documents_whose_positions_restart():
    noise = noise_settings()
    lengths = {s.sample_id: len(lay_out(s, noise).input_ids) for s in PACKED}
    (batch,) = micro_batches(PACKED, noise, packing_length=70)
    samples, order = {s.sample_id: s for s in PACKED}, iter(batch.sample_ids)
    for row in range(len(batch.input_ids)):
        documents = batch.document[row]
        for number in range(int(documents.max()) + 1):
            clean = (documents == number) & ~batch.is_noisy[row]
            expected = samples[next(order)]
            assert batch.input_ids[row, clean].tolist() == expected.input_ids
            assert batch.position[row, clean].tolist() == list(range(len(expected.input_ids)))
            assert int((documents == number).sum()) == lengths[expected.sample_id]
        assert int((documents >= 0).sum()) <= 70
    assert next(order, None) is None


def test_first_fit_puts_the_longest_first_and_a_too_long_one_alone():
    assert first_fit([3, 9, 5, 4, 1, 12], 10) == [[5], [1, 4], [2, 3], [0]]
    assert first_fit([], 10) == []


def test_a_micro_batch_without_targets_counts_nothing_and_reaches_every_parameter():
    model, batch, dummy = tiny_model(), micro_batches(MIXED[:1], noise_settings())[0], dummy_batch(pad_token_id=EOS)
    counts = dummy.counts
    assert not any(dataclasses.astuple(counts)) and dummy.sample_ids == ()
    alone = loss_of(model, [dummy])
    assert alone == 0 and not gradients(model, alone).any()
    reached = torch.autograd.grad(loss_of(model, [dummy]), list(model.encoder.layers.parameters()), allow_unused=True)
    assert all(g is not None for g in reached) and model.diffusion_head.weight.requires_grad
    (head,) = torch.autograd.grad(loss_of(model, [dummy]), [model.diffusion_head.weight], allow_unused=True)
    assert head is not None and not head.any()
    assert_equal(model, loss_of(model, [batch, dummy]), loss_of(model, [batch]), 1e-7)
    terms = terms_of(model, dummy)
    assert terms.ar_correct == terms.masked_correct == 0
    assert micro_batches([], noise_settings()) == []


def test_buckets_by_tokens_change_nothing_but_the_padding():
    model, noise = tiny_model(), noise_settings()
    batches = micro_batches(MIXED, noise, micro_batch_tokens=60)
    assert len(batches) > 1 and sorted(i for b in batches for i in b.sample_ids) == [0, 1, 2, 3]
    assert torch.allclose(loss_of(model, batches), loss_of(model, micro_batches(MIXED, noise)), atol=1e-5)


def test_extra_padding_changes_nothing():
    model = tiny_model()
    short = batch_of(MIXED[:1])
    long = batch_of([MIXED[0], sample(9, ((40, 20),))])
    own = torch.arange(2)[:, None] == 0
    target = torch.where(own, long.target, -100)
    terms = tri_mode_terms(
        hidden_of(model, long), target, long.is_noisy, long.p_mask, long.sequence, model.diffusion_head
    )
    expected = terms_of(model, short)
    assert torch.allclose(terms.ar_sum, expected.ar_sum, atol=1e-5)
    assert torch.allclose(terms.diff_sum, expected.diff_sum, atol=1e-5)
    assert count(target, long.is_noisy, long.is_maskable & own, long.sequence) == short.counts


def test_chunks_equal_the_plain_form():
    model, batch = tiny_model(), batch_of(MIXED)
    plain, chunked = (loss_of(model, [batch], chunk_tokens=n) for n in (10**6, 5))
    assert torch.allclose(plain, chunked, atol=1e-6)
    assert torch.allclose(gradients(model, plain), gradients(model, chunked), atol=1e-6)


def test_weight_one_and_wrong_names():
    model, batch = tiny_model(), batch_of(MIXED[:1], full_block_fraction=1.0)
    assert torch.allclose(loss_of(model, [batch], weight="1"), loss_of(model, [batch]), atol=1e-6)
    with pytest.raises(ValueError, match="averaging must be one of"):
        loss_of(model, [batch], averaging="mean")
    with pytest.raises(ValueError, match="weight must be one of"):
        terms_of(model, batch, weight="2")


def test_ar_only_layout_gives_the_ar_loss_of_the_dual_stream():
    model = tiny_model()
    batch = batch_of(MIXED)
    alone = micro_batches(MIXED, noise_settings(dual=False))[0]
    assert alone.pattern().kind == "causal" and batch.pattern().kind != "causal"
    packed = micro_batches(MIXED, noise_settings(dual=False), packing_length=80)[0]
    assert packed.pattern().kind != "causal", "documents must not see each other"
    terms = terms_of(model, alone)
    assert torch.allclose(terms.ar_sum, terms_of(model, batch).ar_sum, atol=1e-4)
    assert terms.diff_sum.item() == 0 and alone.counts.num_masked == alone.counts.num_maskable == 0


def test_padding_behind_short_answers_is_counted_where_it_carries_loss():
    """With every position masked and all cross entropies 1, the diffusion loss is 1, however short the answer."""
    short = sample(0, ((5, 2),))
    batch = batch_of([short], block_length=32, response_padding="block", end_token_id=EOS, full_block_fraction=1.0)
    counts = batch.counts
    assert (counts.num_supervised, counts.num_maskable, counts.num_masked) == (2, 32, 32)
    diff_sum = torch.tensor(counts.num_masked)
    assert combine(torch.zeros(()), diff_sum, counts, alpha=1.0) == 1
    assert combine(torch.tensor(2.0), torch.zeros(()), counts, alpha=1.0) == 1


@pytest.mark.parametrize("clean_first_fraction", [0.0, 1.0])
@pytest.mark.parametrize("noisy_stream", ["response", "text"])
def test_without_padding_the_maskable_tokens_are_the_supervised_ones(noisy_stream, clean_first_fraction):
    counts = batch_of(MIXED, noisy_stream=noisy_stream, clean_first_fraction=clean_first_fraction).counts
    assert counts.num_maskable == counts.num_supervised == sum(sum(s.loss_mask) for s in MIXED)


def test_the_padded_diffusion_loss_is_unbiased():
    """Over many draws the sum of 1/p over masked positions, divided by num_maskable, averages to 1."""
    options = dict(block_length=16, response_padding="block", end_token_id=EOS, eps=0.05)
    means = []
    for seed in range(300):
        batch = batch_of(MIXED[:3], seed=seed, **options)
        masked = batch.is_noisy & (batch.target != -100)
        means.append(float((masked / batch.p_mask).sum()) / batch.counts.num_maskable)
    assert abs(sum(means) / len(means) - 1) < 0.05
