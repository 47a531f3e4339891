"""The key-value cache: lengths move only by the decoder, and cached passes equal passes without a cache."""

import pytest
import torch

from trimode_vlm.cache import KVCache
from trimode_vlm.patterns import block, causal

CPU = torch.device("cpu")


def test_append_leaves_the_lengths_alone_and_truncate_forgets(tiny_text_model):
    config = tiny_text_model.config
    cache = KVCache(config, 1, 16, torch.float32)
    shape = (1, config.num_key_value_heads, 3, config.head_dim)
    first, second = torch.randn(shape), torch.randn(shape)
    cache.append(0, torch.cat((first, first), 1), cache.offset)
    assert cache.lengths == [0]
    cache.advance([3])
    keys, _ = cache.append(0, torch.cat((second, second), 1), cache.offset)
    assert torch.equal(keys, torch.cat((first, second), 2)) and cache.lengths == [3]
    cache.truncate(1)
    keys, _ = cache.append(0, torch.cat((second, second), 1), cache.offset)
    assert torch.equal(keys, torch.cat((first[:, :, :1], second), 2))
    with pytest.raises(AssertionError):
        cache.advance([100])


def test_reserve_keeps_the_contents_and_select_copies_rows(tiny_text_model):
    cache = KVCache(tiny_text_model.config, 3, 4, torch.float32)
    cache.kv.normal_()
    cache.truncate([1, 4, 2])
    before = cache.kv.clone()
    cache.reserve(9)
    assert cache.capacity == 9 and torch.equal(cache.kv[..., :4, :], before)
    picked = cache.select([2, 0])
    assert picked.lengths == [2, 1] and torch.equal(picked.kv[:, 0], cache.kv[:, 2])
    picked.kv.zero_()
    assert cache.kv[:, 2, :, :4].abs().sum() > 0


@pytest.mark.parametrize("lengths", [[5, 5], [2, 7]])
def test_cached_passes_equal_a_pass_without_a_cache(tiny_text_model, lengths):
    """A ragged batch behind its prefixes: causal commit and bidirectional proposal, row by row against no cache."""
    model = tiny_text_model
    ids = torch.randint(8, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = KVCache(model.config, 2, 16, torch.float32)
    with torch.no_grad():
        model(input_ids=ids[:, : max(lengths)], cache=cache)
        cache.truncate(lengths)
        new = torch.stack([ids[b, n : n + 4] for b, n in enumerate(lengths)])
        drafted = model(input_ids=new, cache=cache, pattern=block(2, 4, CPU, cache.offset)).logits
        committed = model(input_ids=new, cache=cache).logits
        for b, n in enumerate(lengths):
            whole = ids[b : b + 1, : n + 4]
            expected = model(input_ids=whole).logits[:, n:]
            torch.testing.assert_close(committed[b : b + 1], expected, atol=1e-4, rtol=1e-4)
            prefix_then_block = causal(1, n + 4, CPU)
            both = type(prefix_then_block)(
                lambda b, h, q, k, n=n: (k <= q) | ((q >= n) & (k >= n)), 1, n + 4, n + 4, CPU
            )
            expected = model(input_ids=whole, pattern=both).logits[:, n:]
            torch.testing.assert_close(drafted[b : b + 1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[2, 2], [0, 3]])
def test_advance_with_a_stride_moves_the_kept_slots_together(tiny_text_model, lengths):
    """Slots hold their numbers; of every third new slot three are kept in row 0, one in row 1."""
    cache = KVCache(tiny_text_model.config, 2, 14, torch.float32)
    cache.kv.copy_(torch.arange(14.0)[:, None].expand(14, cache.kv.shape[-1]))
    cache.truncate(lengths)
    cache.advance([3, 1], stride=3)
    assert cache.lengths == [lengths[0] + 3, lengths[1] + 1]
    for row, (n, count) in enumerate(zip(lengths, (3, 1), strict=True)):
        kept = [*range(n), *(n + 3 * i for i in range(count))]
        assert (cache.kv[:, row, :, : n + count] == torch.tensor(kept)[:, None]).all()
