"""Every attention pattern: SDPA, FlexAttention and the dense reference agree, and the predicates say what facts say."""

import pytest
import torch

from trimode_vlm import patterns
from trimode_vlm.attention import attend

CPU = torch.device("cpu")


def dual_stream_metadata(num_images: int = 3, responses: tuple[int, ...] = (5, 4), block_length: int = 3):
    """One document: image tokens, then turns of two prompt tokens and a response; the noisy half holds responses."""
    clean = [(p, 0, -1, False) for p in range(num_images)]
    noisy, position, block_id = [], num_images, 0
    for length in responses:
        clean += [(position + i, 0, -1, False) for i in range(2)]
        position += 2
        for start in range(0, length, block_length):
            for i in range(start, min(start + block_length, length)):
                noisy.append((position + i, position + start, block_id, True))
            block_id += 1
        clean += [(position + i, 0, -1, False) for i in range(length)]
        position += length
    tokens = noisy + clean
    tensors = [torch.tensor([[t[i] for t in tokens]]) for i in range(4)]
    document = torch.zeros_like(tensors[0])
    return tensors[0], document, tensors[1], tensors[2], tensors[3].bool()


def padded(metadata):
    """The same row beside one with padding, so that documents of -1 are covered."""
    position, document, block_start, block_id, is_noisy = (t.repeat(2, 1) for t in metadata)
    document[1, -3:] = -1
    return position, document, block_start, block_id, is_noisy


ALL = {
    "causal": lambda: patterns.causal(2, 40, CPU),
    "causal behind a prefix": lambda: patterns.causal(2, 7, CPU, 21),
    "causal, one query": lambda: patterns.causal(2, 1, CPU, 30),
    "causal, ragged": lambda: patterns.causal(2, 7, CPU, torch.tensor([5, 21])),
    "causal, left padding": lambda: patterns.causal(2, 9, CPU, 0, torch.arange(9)[None] >= torch.tensor([[0], [4]])),
    "block": lambda: patterns.block(2, 8, CPU, 21),
    "block, ragged": lambda: patterns.block(2, 8, CPU, torch.tensor([5, 21])),
    "dual stream": lambda: patterns.dual_stream(*padded(dual_stream_metadata())),
    "quadratic": lambda: patterns.quadratic(4, 5, 2, CPU, 11),
    "quadratic, ragged": lambda: patterns.quadratic(4, 4, 2, CPU, torch.tensor([3, 11])),
    "quadratic, one row": lambda: patterns.quadratic(1, 4, 2, CPU, 11),
    "quadratic, no masks": lambda: patterns.quadratic(1, 0, 2, CPU, 11),
    "quadratic, ragged, no masks": lambda: patterns.quadratic(1, 0, 2, CPU, torch.tensor([3, 11])),
}


@pytest.mark.parametrize("name", ALL)
def test_kernels_agree_with_the_dense_reference(name):
    pattern = ALL[name]()
    g = torch.Generator().manual_seed(0)
    B, H, G, K = 2, 6, 2, 32
    q = torch.randn(B, H, pattern.query_length, K, generator=g)
    k, v = (torch.randn(B, G, pattern.key_length, K, generator=g) for _ in range(2))
    dense = attend(q, k, v, pattern, "dense")
    assert dense.shape == (B, pattern.query_length, H * K)
    torch.testing.assert_close(attend(q, k, v, pattern, "sdpa"), dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attend(q, k, v, pattern, "flex"), dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_the_kind_is_only_a_hint(name):
    """What a kernel exploits must follow from the predicate."""
    pattern = ALL[name]()
    mask = pattern.attn_mask
    if pattern.kind == "full":
        assert mask.all()
    if pattern.kind == "causal":
        assert torch.equal(mask[0, 0], torch.ones(mask.shape[-2:]).tril().bool())
    assert mask.any(-1).all(), "a query without a key would give NaN"


def test_dual_stream_follows_the_rules_token_by_token():
    """Compared with the rules of facts.md 2 written as plain loops."""
    position, document, block_start, block_id, is_noisy = padded(dual_stream_metadata())
    mask = patterns.dual_stream(position, document, block_start, block_id, is_noisy).attn_mask[:, 0]
    for b in range(2):
        for q in range(position.shape[1]):
            for k in range(position.shape[1]):
                if q == k:
                    expected = True
                elif document[b, q] < 0 or document[b, k] < 0:
                    expected = False
                elif is_noisy[b, q] and is_noisy[b, k]:
                    expected = block_id[b, q] == block_id[b, k]
                elif is_noisy[b, q]:
                    expected = position[b, k] < block_start[b, q]
                elif is_noisy[b, k]:
                    expected = False
                else:
                    expected = position[b, k] <= position[b, q]
                assert bool(mask[b, q, k]) == bool(expected), (b, q, k)


def test_packed_documents_do_not_see_each_other():
    one = dual_stream_metadata(num_images=2, responses=(4,))
    two = [torch.cat((t, t), 1) for t in one]
    two[1] = torch.cat((one[1], one[1] + 1), 1)
    alone = patterns.dual_stream(*one).attn_mask[0, 0]
    packed = patterns.dual_stream(*two).attn_mask[0, 0]
    n = alone.shape[0]
    assert torch.equal(packed[:n, :n], alone) and torch.equal(packed[n:, n:], alone)
    assert not packed[:n, n:].any() and not packed[n:, :n].any()


def test_quadratic_rows_see_their_own_masks_only():
    rows, k, prefix = 3, 4, 5
    mask = patterns.quadratic(rows, k, 1, CPU, prefix).attn_mask[0, 0]
    assert mask[:, :prefix].all()
    body = mask[:, prefix:].view(rows, k + 1, rows, k + 1)
    for i in range(rows):
        for j in range(rows):
            assert bool(body[i, :, j, 0].all()) == (j <= i), "drafts up to the own row are seen"
            assert bool(body[i, 1:, j, 1:].all()) == (i == j) and bool(body[i, 1:, j, 1:].any()) == (i == j)
        assert not body[i, 0, :, 1:].any(), "a draft sees no mask"
