"""What training computes in one dual-stream pass is what the decoders compute block by block over a cache."""

import pytest
import torch
from training_cases import EOS, MIXED, noise_settings, tiny_model

from trimode_vlm import patterns
from trimode_vlm.cache import KVCache
from trimode_vlm.training.blocks import response_runs
from trimode_vlm.training.collate import collate, lay_out

CPU = torch.device("cpu")


@pytest.mark.parametrize("response_padding", ["none", "block"])
@pytest.mark.parametrize("block_alignment", ["response", "sequence"])
@pytest.mark.parametrize("number", range(len(MIXED)))
def test_cached_block_decoding_equals_the_training_forward(number, block_alignment, response_padding):
    """Each noisy block is proposed over the causal cache of what precedes it, then its clean tokens are committed."""
    model, sample = tiny_model().eval(), MIXED[number]
    options = {"response_padding": response_padding, "block_alignment": block_alignment, "end_token_id": EOS}
    row = lay_out(sample, noise_settings(**options))
    batch = collate([sample], [row])
    pattern = patterns.dual_stream(batch.position, batch.document, batch.block_start, batch.block_id, batch.is_noisy)
    ids = torch.tensor([sample.input_ids])
    with torch.no_grad():
        embeds = model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
        trained = model.diffusion_head(model.hidden(embeds, batch.position, pattern))[0]
        clean = model.embed(ids, batch.pixel_values, batch.image_sizes)
        cache = KVCache(model.config, 1, 100, torch.float32)

        def run(x, kind):
            T = x.shape[1]
            place = torch.arange(cache.lengths[0], cache.lengths[0] + T)[None]
            return model.diffusion_head(model.hidden(x, place, kind(1, T, CPU, cache.lengths[0]), cache))[0]

        blocks = 0
        for start, end in response_runs(torch.tensor(sample.loss_mask)):
            in_response = row.is_noisy & (row.block_start >= start) & (row.block_start < end)
            for block in row.block_id[in_response].unique(sorted=True):
                members = in_response & (row.block_id == block)
                first = int(row.block_start[members][0])
                committed = run(clean[:, cache.lengths[0] : first], patterns.causal)
                expected = trained[~row.is_noisy][cache.lengths[0] : first]
                torch.testing.assert_close(committed, expected, atol=1e-5, rtol=1e-4)
                cache.truncate(first)
                proposed = run(model.embed(row.input_ids[members][None]), patterns.block)
                torch.testing.assert_close(proposed, trained[members], atol=1e-5, rtol=1e-4)
                blocks += 1
        assert blocks == int(row.block_id.max()) + 1
