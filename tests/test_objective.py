"""The tri-mode objective against plain loops over tokens and full logits."""

import pytest
import torch
import torch.nn.functional as F
from training_cases import EOS, MIXED, noise_settings, sample, tiny_model

from trimode_vlm import patterns
from trimode_vlm.training.collate import collate, lay_out, micro_batches
from trimode_vlm.training.dual_stream import pack
from trimode_vlm.training.objective import Counts, combine, count, tri_mode_terms


def hidden_of(model, batch):
    pattern = patterns.dual_stream(batch.position, batch.document, batch.block_start, batch.block_id, batch.is_noisy)
    embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
    return model.hidden(embeds, batch.position, pattern)


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
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, grads, strict=True)]
    )


def loss_of(model, batches, alpha=0.3, averaging="tokens", **options):
    counts = sum((b.counts for b in batches), Counts())
    parts = [terms_of(model, b, averaging=averaging, **options) for b in batches]
    return sum(combine(t.ar_sum, t.diff_sum, counts, alpha=alpha, averaging=averaging) for t in parts)


def naive(model, samples, rows, averaging, alpha=0.3):
    """Each sample alone, full logits, one token at a time."""
    ar, diff, ar_means, diff_means, supervised, masked = 0.0, 0.0, [], [], 0, 0
    for s, row in zip(samples, rows, strict=True):
        logits = model.diffusion_head(hidden_of(model, collate([s], [row])))[0]
        noisy = torch.where(row.is_noisy)[0]
        clean = torch.where(~row.is_noisy)[0]
        sample_ar, sample_diff = [], []
        for place, is_answer in enumerate(s.loss_mask):
            if is_answer:  # logit i predicts token i + 1
                sample_ar.append(F.cross_entropy(logits[clean[place - 1]], torch.tensor(s.input_ids[place])))
        for index in noisy:  # logit i predicts its own token
            if row.input_ids[index] == 6:
                own = torch.tensor(s.input_ids[int(row.position[index])])
                sample_diff.append(F.cross_entropy(logits[index], own) / row.p_mask[index])
        ar, diff = ar + sum(sample_ar), diff + sum(sample_diff)
        ar_means.append(sum(sample_ar) / len(sample_ar))
        diff_means.append(sum(sample_diff) / max(len(sample_diff), 1))
        supervised, masked = supervised + len(sample_ar), masked + len(sample_diff)
    return {
        "tokens": (ar + alpha * diff) / supervised,
        "masked": ar / supervised + alpha * diff / masked,
        "pooled": (ar + alpha * diff) / (supervised + masked),
        "sequence": (sum(ar_means) + alpha * sum(diff_means)) / len(samples),
    }[averaging]


@pytest.mark.parametrize("averaging", ["tokens", "masked", "pooled", "sequence"])
def test_loss_and_gradients_equal_the_naive_form(averaging):
    model = tiny_model()
    batch = batch_of(MIXED)
    rows = [lay_out(s, noise_settings()) for s in MIXED]
    expected = naive(model, MIXED, rows, averaging)
    loss = loss_of(model, [batch], averaging=averaging)
    assert torch.allclose(loss, expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(gradients(model, loss), gradients(model, expected), atol=1e-5, rtol=1e-4)


def test_response_and_text_streams_give_the_same_losses_and_gradients():
    model = tiny_model()
    response, text = (loss_of(model, [batch_of(MIXED, noisy_stream=name)]) for name in ("response", "text"))
    assert torch.allclose(response, text, atol=1e-5)
    assert torch.allclose(gradients(model, response), gradients(model, text), atol=1e-5)


@pytest.mark.parametrize("averaging", ["tokens", "masked", "pooled", "sequence"])
def test_one_batch_equals_accumulation(averaging):
    model, noise = tiny_model(), noise_settings()
    whole = loss_of(model, micro_batches(MIXED, noise), averaging=averaging)
    expected = gradients(model, whole)
    for size in (1, 2):
        parts = loss_of(model, micro_batches(MIXED, noise, micro_batch_samples=size), averaging=averaging)
        assert torch.allclose(gradients(model, parts), expected, atol=1e-6)
    packed = collate(MIXED, [pack([lay_out(s, noise) for s in MIXED])])
    assert torch.allclose(loss_of(model, [packed], averaging=averaging), whole, atol=1e-5)


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
    hidden = model.hidden(
        model.embed(alone.input_ids, alone.pixel_values, alone.image_sizes),
        alone.position,
        patterns.causal(*alone.input_ids.shape, device=alone.input_ids.device),
    )
    terms = tri_mode_terms(hidden, alone.target, alone.is_noisy, alone.p_mask, alone.sequence, model.diffusion_head)
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
