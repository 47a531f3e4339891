"""The structured CPU path of training attention against the dense reference, over random layouts of the objective."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from training_cases import EOS, MIXED, noise_settings, sample, tiny_model

from trimode_vlm import attention, dual_attention, patterns
from trimode_vlm.attention import attend
from trimode_vlm.dual_attention import make_plan
from trimode_vlm.training.collate import collate, lay_out, micro_batches
from trimode_vlm.training.dual_stream import pack

FIELDS = ("position", "document", "block_start", "block_id", "is_noisy")


def metadata_of(batch):
    return patterns.DualMetadata(*(getattr(batch, name) for name in FIELDS))


def random_batch(seed):
    """Any batch that training may make: every option of the layout, ragged, packed or not, with or without noise."""
    draw = random.Random(seed)
    samples = [
        sample(
            1000 * seed + number,
            tuple((draw.randint(1, 9), draw.choice([1, 2, 7, 40])) for _ in range(draw.randint(1, 4))),
            tuple((draw.randint(1, 3), draw.randint(1, 5)) for _ in range(draw.choice([0, 0, 1, 2]))),
        )
        for number in range(draw.randint(1, 5))
    ]
    stream = draw.choice(["response", "text", "all"])
    noise = noise_settings(
        dual=draw.random() > 0.1,
        end_token_id=EOS,
        seed=seed,
        block_length=draw.choice([1, 2, 3, 4, 8, 32, 100, (4, 16)]),
        block_offset=draw.choice(["response", "random"]),
        block_alignment=draw.choice(["response", "sequence"]),
        response_padding=draw.choice(["none", "block"]),
        noisy_stream=stream,
        complementary_masks=draw.random() < 0.4,
        full_block_fraction=draw.choice([0.0, 0.5]),
        noise=draw.choice(["sequence", "block"]),
    )
    packing = draw.choice([None, 200, 1000])
    return micro_batches(samples, noise, packing_length=packing)[0]


def attention_inputs(batch, seed=0, heads=6, groups=2, width=16, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    B, T = batch.position.shape
    # Laid out as the projections leave them.
    shapes = ((B, T, heads, width), (B, T, groups, width), (B, T, groups, width))
    qkv = [torch.randn(s, generator=g, dtype=dtype).transpose(1, 2).requires_grad_() for s in shapes]
    return qkv, torch.randn(B, T, heads * width, generator=g, dtype=dtype)


def out_and_gradients(qkv, grad_out, pattern, implementation="sdpa"):
    out = attend(*qkv, pattern, implementation)
    return out, *torch.autograd.grad(out, qkv, grad_out)


def assert_equals_dense(batch, seed=0, **sizes):
    pattern = patterns.dual_stream(*metadata_of(batch))
    qkv, grad_out = attention_inputs(batch, seed, **sizes)
    found = out_and_gradients(qkv, grad_out, pattern)
    assert "attn_mask" not in pattern.__dict__, "the dense mask was built"
    for name, a, b in zip("oqkv", found, out_and_gradients(qkv, grad_out, pattern, "dense"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_equal_the_dense_reference(seed):
    batch = random_batch(seed)
    assert_equals_dense(batch, seed)


@pytest.mark.parametrize("seed", range(6))
def test_flex_attention_agrees(seed):
    """Forward only: on a CPU it has no backward pass."""
    batch = random_batch(seed)
    pattern = patterns.dual_stream(*metadata_of(batch))
    qkv = [x.detach() for x in attention_inputs(batch, seed)[0]]
    torch.testing.assert_close(attend(*qkv, pattern, "flex"), attend(*qkv, pattern), atol=1e-5, rtol=1e-5)


def test_the_random_layouts_hold_every_case():
    """What the property test promises to cover is really among its layouts."""
    seen = set()
    for seed in range(40):
        batch = random_batch(seed)
        plan = make_plan(metadata_of(batch))
        segments = [segment for document in plan.documents for segment in document.segments]
        seen |= {"packed"} if int(batch.document.max()) > 0 else set()
        seen |= {"padding"} if plan.padding else set()
        seen |= {"no noise"} if not batch.is_noisy.any() else set()
        seen |= {"several chunks"} if len(segments) > 20 else set()
        for document in plan.documents:
            blocks = [s for s in document.segments if batch.is_noisy[document.row, s.start]]
            seen |= {"one block"} if any(s.tail is None for s in blocks) else set()
            seen |= {"blocks that share a call"} if any(s.tail is not None for s in blocks) else set()
            seen |= {"nothing before a block"} if any(s.prefix == 0 for s in blocks) else set()
    assert seen == {
        "packed", "padding", "no noise", "several chunks", "one block", "blocks that share a call",
        "nothing before a block",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_each_query_is_computed_once(seed):
    batch = random_batch(seed)
    plan = make_plan(metadata_of(batch))
    times = torch.zeros_like(batch.document)
    for document in plan.documents:
        for segment in document.segments:
            times[document.row, segment.start : segment.end] += 1
    for row, start, end in plan.padding:
        times[row, start:end] += 1
    assert (times == 1).all()


@pytest.mark.parametrize("cost", [0, 10**9])
def test_how_blocks_are_grouped_changes_nothing(cost, monkeypatch):
    """Every block alone, or all neighbours in one call."""
    monkeypatch.setattr(dual_attention, "CALL_COST_PAIRS", cost)
    for seed in range(12):
        assert_equals_dense(random_batch(seed), seed)


def test_long_rows_equal_the_dense_reference():
    """Longer than the kernels' own tiles: 480 tokens of two turns beside a short row."""
    samples = [sample(1, ((150, 90), (60, 180))), sample(2, ((40, 100),))]
    for changes in ({}, {"noisy_stream": "all"}, {"complementary_masks": True}, {"dual": False}):
        noise = noise_settings(block_length=32, **changes)
        batch = collate(samples, [lay_out(s, noise) for s in samples])
        assert_equals_dense(batch, width=64)


@pytest.mark.parametrize("heads, groups", [(4, 4), (8, 1), (6, 2)])
def test_any_grouping_of_heads(heads, groups):
    assert_equals_dense(random_batch(3), heads=heads, groups=groups)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_in_double_precision(seed):
    """Far below what rounding could hide."""
    batch = random_batch(seed)
    pattern = patterns.dual_stream(*metadata_of(batch))
    qkv, grad_out = attention_inputs(batch, dtype=torch.double)
    dense = out_and_gradients(qkv, grad_out, pattern, "dense")
    for a, b in zip(out_and_gradients(qkv, grad_out, pattern), dense, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_bfloat16_gradients_add_up_in_fp32():
    """Many blocks add to the gradient of one early key: their sum is not rounded each time."""
    s = sample(0, ((8, 400),))
    batch = collate([s], [lay_out(s, noise_settings(block_length=2))])
    pattern = patterns.dual_stream(*metadata_of(batch))
    qkv, grad_out = attention_inputs(batch)
    exact = torch.autograd.grad(attend(*qkv, pattern, "dense"), qkv, grad_out)
    low = [x.detach().bfloat16().requires_grad_() for x in qkv]
    found = torch.autograd.grad(attend(*low, pattern), low, grad_out.bfloat16())
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() / b.norm() < 0.02


def test_autocast_mixes_no_dtypes():
    """Under autocast the values come in bf16 from their projection, queries and keys in fp32 from the rotation."""
    model, batch = tiny_model(), collate(MIXED, [lay_out(s, noise_settings()) for s in MIXED])
    with torch.autocast("cpu", torch.bfloat16):
        embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
        low = model.hidden(embeds, batch.position, patterns.dual_stream(*metadata_of(batch)))
    low.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.encoder.layers.parameters())


def scrambled():
    """Layouts that the plan does not know: shuffled tokens, a block in two places, equal positions."""
    whole = random_batch(2)
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(whole.position.shape[1], generator=g)
    shuffled = patterns.DualMetadata(*(x[:, order] for x in metadata_of(whole)))
    base = collate([MIXED[0]], [lay_out(MIXED[0], noise_settings())])
    twice = metadata_of(base)._replace(block_id=base.block_id.masked_fill(base.block_id == 2, 0))
    equal = metadata_of(base)._replace(position=base.position.masked_fill(~base.is_noisy & (base.position == 3), 2))
    starts = metadata_of(base)._replace(block_start=torch.where(base.position == 6, 6, base.block_start))
    return {"shuffled": shuffled, "block in two places": twice, "equal positions": equal, "two block starts": starts}


@pytest.mark.parametrize("name", scrambled())
def test_layouts_without_structure_fall_back_to_the_mask(name):
    metadata = scrambled()[name]
    assert make_plan(metadata) is None
    pattern = patterns.dual_stream(*metadata)
    g = torch.Generator().manual_seed(0)
    B, T = metadata.position.shape
    q, k, v = (torch.randn(B, n, T, 8, generator=g) for n in (4, 2, 2))
    torch.testing.assert_close(attend(q, k, v, pattern), attend(q, k, v, pattern, "dense"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_plan_serves_all_layers_and_both_passes(checkpointing, monkeypatch):
    plans = []
    monkeypatch.setattr(dual_attention, "make_plan", lambda m: plans.append(make_plan(m)) or plans[-1])
    model = tiny_model().train()
    model.encoder.gradient_checkpointing = checkpointing
    batch = collate(MIXED, [lay_out(s, noise_settings()) for s in MIXED])
    pattern = patterns.dual_stream(*metadata_of(batch))
    embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
    model.hidden(embeds, batch.position, pattern).sum().backward()
    assert len(plans) == 1 and "attn_mask" not in pattern.__dict__


def test_padding_sees_itself_and_nothing_sees_it():
    """What stands in the padding changes no real token, and no gradient reaches it from there."""
    batch = collate(MIXED, [lay_out(s, noise_settings()) for s in MIXED])
    pattern, pad = patterns.dual_stream(*metadata_of(batch)), batch.document < 0
    (q, k, v), _ = attention_inputs(batch)
    changed = [torch.where(pad[:, None, :, None], 100.0, x) for x in (q, k, v)]
    assert torch.equal(attend(q, k, v, pattern)[~pad], attend(*changed, pattern)[~pad])
    grads = torch.autograd.grad(attend(q, k, v, pattern)[~pad].square().sum(), (q, k, v))
    for grad in grads:
        assert not grad.transpose(1, 2)[pad].any()


def test_packed_rows_without_noise_are_separate_causal_rows():
    """AR-only batches: several documents in one row give what each gives alone under plain causal attention."""
    model, noise = tiny_model().eval(), noise_settings(dual=False)
    samples = [sample(n, ((3 + n, 80 - 9 * n),)) for n in range(4)]
    batch = collate(samples, [pack([lay_out(s, noise) for s in samples])])
    pattern = patterns.dual_stream(*metadata_of(batch))
    assert len(pattern.dual_plan.documents) == 4
    with torch.no_grad():
        packed = model.hidden(model.embed(batch.input_ids), batch.position, pattern)[0]
        alone = [model.hidden(model.embed(ids), position, patterns.causal(1, ids.shape[1], ids.device))[0]
                 for ids in (torch.tensor([s.input_ids]) for s in samples)
                 for position in [torch.arange(ids.shape[1])[None]]]  # fmt: skip
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("tile", [8, 16])
def test_tiles_of_the_block_mask_hold_every_allowed_pair(seed, tile):
    """Small tiles, so that small batches have many: what is left out is forbidden, what counts as full is allowed."""
    batch = random_batch(seed)
    pattern = patterns.dual_stream(*metadata_of(batch))
    tiles = patterns.dual_block_mask(metadata_of(batch), pattern.predicate, tile)
    B, T = batch.position.shape
    n = -(-T // tile)
    padded = torch.zeros(B, n * tile, n * tile, dtype=torch.bool)
    padded[:, :T, :T] = pattern.attn_mask[:, 0]
    by_tile = padded.unflatten(2, (n, tile)).unflatten(1, (n, tile))
    some, every = by_tile.any(4).any(2), by_tile.all(4).all(2)

    def listed(counts, indices):
        mask = torch.zeros(B, n, n, dtype=torch.bool)
        for b in range(B):
            for q in range(n):
                mask[b, q, indices[b, 0, q, : counts[b, 0, q]].long()] = True
        return mask

    partial = listed(tiles.kv_num_blocks, tiles.kv_indices)
    full = listed(tiles.full_kv_num_blocks, tiles.full_kv_indices)
    assert not (partial & full).any() and not (full & ~every).any()
    assert not (some & ~(partial | full)).any()


def test_the_block_mask_skips_what_is_forbidden():
    """On a long single document hardly a tile is listed in vain, and most of the clean prefix needs no mask."""
    s = sample(0, ((64, 448),))
    row = lay_out(s, noise_settings(block_length=8))
    batch = collate([s], [row])
    pattern = patterns.dual_stream(*metadata_of(batch))
    T = batch.position.shape[1]
    best = create_block_mask(pattern.predicate, 1, None, T, T, device="cpu", BLOCK_SIZE=16)
    ours = patterns.dual_block_mask(metadata_of(batch), pattern.predicate, 16)
    assert int(ours.full_kv_num_blocks.sum()) == int(best.full_kv_num_blocks.sum())
    assert int(ours.kv_num_blocks.sum()) == int(best.kv_num_blocks.sum())


def test_cuda_takes_flex_attention_for_training(monkeypatch):
    """Without a GPU: tensors that only say that they are on one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch = collate(MIXED, [lay_out(s, noise_settings()) for s in MIXED])
    pattern = patterns.dual_stream(*metadata_of(batch))
    called = []

    def flex(q, k, v, *, block_mask, enable_gqa):
        called.append((q.device.type, block_mask.shape, enable_gqa, {q.dtype, k.dtype, v.dtype}))
        return q

    monkeypatch.setattr(attention, "_flex_attention", lambda device_type: flex)
    B, T = batch.position.shape
    pattern.block_mask  # noqa: B018, as the fake mode could not build it
    with FakeTensorMode():
        q, k = torch.empty(B, 4, T, 16, device="cuda"), torch.empty(B, 2, T, 16, device="cuda")
        attend(q, k, k.bfloat16(), pattern)  # as under autocast
    assert called == [("cuda", (B, 1, T, T), True, {torch.bfloat16})]
