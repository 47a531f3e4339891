"""Training attention on a CPU: what the dual-stream pattern forbids is never computed.

A noisy block sees a prefix of its document's clean half, and its own tokens; so does a chunk of the clean half, its own
tokens causally. Both are then one kind of segment: queries [start, end) against all of the first `prefix` clean keys
and their own, these perhaps under a small mask. Segments are planned once per pattern, from its metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .patterns import DualMetadata

# Measured with one thread on heads of 32 and 64: chunks of the clean half cost least at 64, and a call costs as
# much as about so many query-key pairs, which decides whether neighbouring short blocks share one.
CLEAN_CHUNK_TOKENS = 64
CALL_COST_PAIRS = 1024

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(eq=False)
class TailMask:
    """Which of the last keys each query of a segment sees: bool [n, m]; every earlier key is seen.

    Segments with the same rule share one mask; `width` is the largest number of keys among them.
    """

    allowed: Tensor
    width: int = 0
    _bias: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias(self, repeats: int, num_keys: int, dtype: torch.dtype) -> Tensor:
        """0 or -inf for `repeats` copies of the queries: [repeats * n, num_keys]."""
        key = (repeats, dtype)
        if key not in self._bias:
            n, m = self.allowed.shape
            bias = torch.zeros(n, self.width, dtype=dtype)
            bias[:, self.width - m :].masked_fill_(~self.allowed, float("-inf"))
            self._bias[key] = bias.repeat(repeats, 1)
        return self._bias[key][:, self.width - num_keys :]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Queries [start, end) of a row; they see `prefix` clean keys of their document, then their own tokens."""

    start: int
    end: int
    prefix: int
    tail: TailMask | None = None

    @property
    def num_keys(self) -> int:
        return self.prefix + self.end - self.start

    def bias(self, repeats: int, dtype: torch.dtype) -> Tensor | None:
        return None if self.tail is None else self.tail.bias(repeats, self.num_keys, dtype)


@dataclass(frozen=True, kw_only=True)
class Document:
    """The segments of one document of a row, longest prefix first; its clean half begins at `clean_start`."""

    row: int
    clean_start: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class DualPlan:
    """Every query of a batch, once: in a document's segments or in a run of padding (row, start, end)."""

    documents: tuple[Document, ...]
    padding: tuple[tuple[int, int, int], ...]


def make_plan(metadata: DualMetadata) -> DualPlan | None:
    """Plan the segments of a batch, or None where tokens do not lie as these kernels need them (use the mask then).

    They need, within a row: a document's clean tokens in one run with rising positions; each noisy block in one run
    with one block_start. Every layout of `training/dual_stream.py` is so, packed or not.
    """
    position, document, block_start, block_id, is_noisy = metadata
    padding = document < 0
    block = torch.where(is_noisy & ~padding, block_id, -1)
    kind = torch.where(padding, 2, is_noisy.long())
    same = (document.diff() == 0) & (kind.diff() == 0) & (block.diff() == 0)
    same |= padding[:, 1:] & padding[:, :-1]
    clean_falls = same & (kind[:, 1:] == 0) & (position.diff() <= 0)
    noisy_splits = same & (kind[:, 1:] == 1) & (block_start.diff() != 0)
    if bool((clean_falls | noisy_splits).any()):
        return None
    masks: dict[Any, TailMask] = {}
    documents, padded = [], []
    for row in range(position.shape[0]):
        edges = [0, *(torch.where(~same[row])[0] + 1).tolist(), position.shape[1]]
        begins = torch.tensor(edges[:-1])
        columns = (document[row, begins], kind[row, begins], block[row, begins], block_start[row, begins])
        runs: dict[int, list[_Run]] = {}
        for start, end, doc, what, number, first in zip(edges, edges[1:], *(c.tolist() for c in columns), strict=False):
            if what == 2:
                padded.append((row, start, end))
            else:
                runs.setdefault(doc, []).append(_Run(start, end, number, first if what else None))
        for of_document in runs.values():
            planned = _plan_document(row, of_document, position[row], masks)
            if planned is None:
                return None
            documents.append(planned)
    return DualPlan(documents=tuple(documents), padding=tuple(padded))


@dataclass
class _Run:
    """Tokens [start, end) of one noisy block, or of a clean half (no block_start)."""

    start: int
    end: int
    block_id: int
    block_start: int | None
    prefix: int = 0


def _plan_document(row: int, runs: list[_Run], position: Tensor, masks: dict[Any, TailMask]) -> Document | None:
    clean = [run for run in runs if run.block_start is None]
    noisy = [run for run in runs if run.block_start is not None]
    if len(clean) > 1 or len({run.block_id for run in noisy}) < len(noisy):
        return None
    segments, clean_start = [], 0
    if clean:
        clean_start, clean_end = clean[0].start, clean[0].end
        places = position[clean_start:clean_end].contiguous()
        firsts = torch.tensor([run.block_start for run in noisy], dtype=places.dtype)
        for run, prefix in zip(noisy, torch.searchsorted(places, firsts).tolist(), strict=True):
            run.prefix = prefix
        # The short chunk comes first: all others then share one mask.
        first_end = clean_start + (clean_end - clean_start - 1) % CLEAN_CHUNK_TOKENS + 1
        for end in range(first_end, clean_end + 1, CLEAN_CHUNK_TOKENS):
            start = max(end - CLEAN_CHUNK_TOKENS, clean_start)
            tail = _shared(masks, torch.ones(end - start, end - start, dtype=torch.bool).tril())
            segments.append(Segment(start=start, end=end, prefix=start - clean_start, tail=tail))
    segments += [_block_segment(group, masks) for group in _groups(noisy)]
    for segment in segments:
        if segment.tail is not None:
            segment.tail.width = max(segment.tail.width, segment.num_keys)
    segments.sort(key=lambda segment: -segment.prefix)
    return Document(row=row, clean_start=clean_start, segments=tuple(segments))


def _groups(blocks: list[_Run]) -> list[list[_Run]]:
    """Neighbouring blocks that one call serves: while the pairs it computes in vain cost less than another call."""
    groups: list[list[_Run]] = []
    for block in blocks:
        if groups and groups[-1][-1].end == block.start:
            group = groups[-1]
            num_tokens, new_tokens = block.start - group[0].start, block.end - block.start
            longest = max(run.prefix for run in group)
            in_vain = new_tokens * (2 * num_tokens + max(0, longest - block.prefix))
            in_vain += num_tokens * max(0, block.prefix - longest)
            if in_vain <= CALL_COST_PAIRS:
                group.append(block)
                continue
        groups.append([block])
    return groups


def _block_segment(group: list[_Run], masks: dict[Any, TailMask]) -> Segment:
    start, end, prefix = group[0].start, group[-1].end, max(run.prefix for run in group)
    if len(group) == 1:
        return Segment(start=start, end=end, prefix=prefix)
    shortest = min(run.prefix for run in group)
    lengths = torch.tensor([run.end - run.start for run in group])
    seen = torch.tensor([run.prefix - shortest for run in group]).repeat_interleave(lengths)
    number = torch.arange(len(group)).repeat_interleave(lengths)
    allowed = torch.cat((torch.arange(prefix - shortest) < seen[:, None], number == number[:, None]), 1)
    return Segment(start=start, end=end, prefix=prefix, tail=_shared(masks, allowed))


def _shared(masks: dict[Any, TailMask], allowed: Tensor) -> TailMask:
    return masks.setdefault((allowed.shape, allowed.numpy().tobytes()), TailMask(allowed))


def dual_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, plan: DualPlan) -> Tensor:
    """Grouped-query attention along a plan: [B, H, T, K], on a CPU, with gradients."""
    return _DualAttention.apply(q_BHTK, k_BGTK, v_BGTK, plan)  # type: ignore[no-any-return]


class _DualAttention(torch.autograd.Function):
    """One node of the graph for all segments: as nodes of their own, each would pad its gradients to whole tensors.

    The kernels are those behind scaled_dot_product_attention on a CPU. Query heads of a group are more queries of it.
    """

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, plan: DualPlan) -> Tensor:
        B, H, T, K = q_BHTK.shape
        G = k_BGTK.shape[1]
        out = q_BHTK.new_empty(B, T, H, K).transpose(1, 2)
        lse_BHT = q_BHTK.new_empty(B, H, T, dtype=_accumulator(q_BHTK.dtype))
        for document, segment, keys, values in _walk(plan, k_BGTK, v_BGTK):
            own = (document.row, slice(None), slice(segment.start, segment.end))
            bias = segment.bias(H // G, keys.dtype)
            found, lse = _forward_kernel(_fold(q_BHTK[own], G), keys, values, attn_mask=bias)
            out[own], lse_BHT[own] = found.reshape(out[own].shape), lse.reshape(H, -1)
        for row, start, end in plan.padding:
            out[row, :, start:end] = v_BGTK[row, :, start:end].repeat_interleave(H // G, 0)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, out, lse_BHT)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q_BHTK, k_BGTK, v_BGTK, out, lse_BHT = ctx.saved_tensors
        H, G = q_BHTK.shape[1], k_BGTK.shape[1]
        grad_q = torch.zeros_like(q_BHTK)
        grad_k, grad_v = (torch.zeros_like(x, dtype=_accumulator(x.dtype)) for x in (k_BGTK, v_BGTK))
        for document, segment, keys, values in _walk(ctx.plan, k_BGTK, v_BGTK):
            own = (document.row, slice(None), slice(segment.start, segment.end))
            prefix = (document.row, slice(None), slice(document.clean_start, document.clean_start + segment.prefix))
            grad_own, q, out_own = (_fold(x[own], G) for x in (grad_out, q_BHTK, out))
            lse, bias = lse_BHT[own].reshape(1, G, -1), segment.bias(H // G, keys.dtype)
            found = _backward_kernel(grad_own, q, keys, values, out_own, lse, 0.0, False, attn_mask=bias)
            grad_q[own] = found[0].reshape(grad_q[own].shape)
            for grad, part in zip((grad_k, grad_v), found[1:], strict=True):
                grad[prefix] += part[0, :, : segment.prefix]
                grad[own] += part[0, :, segment.prefix :]
        for row, start, end in ctx.plan.padding:
            grad_v[row, :, start:end] = grad_out[row, :, start:end].unflatten(0, (G, -1)).sum(1)
        return grad_q, grad_k.to(k_BGTK.dtype), grad_v.to(v_BGTK.dtype), None


def _walk(plan: DualPlan, k_BGTK: Tensor, v_BGTK: Tensor) -> Iterator[tuple[Document, Segment, Tensor, Tensor]]:
    """Every segment with its keys and values [1, G, prefix + own tokens, K], views that the next segment overwrites."""
    for document in plan.documents:
        longest = document.segments[0].prefix
        num_keys = max(segment.num_keys for segment in document.segments)
        row, clean = document.row, slice(document.clean_start, document.clean_start + longest)
        buffers = [x.new_empty(1, x.shape[1], num_keys, x.shape[3]) for x in (k_BGTK, v_BGTK)]
        for buffer, x in zip(buffers, (k_BGTK, v_BGTK), strict=True):
            buffer[0, :, :longest] = x[row, :, clean]
        for segment in document.segments:
            # Own tokens go behind the prefix, over clean ones that no later segment, with a shorter prefix, will see.
            for buffer, x in zip(buffers, (k_BGTK, v_BGTK), strict=True):
                buffer[0, :, segment.prefix : segment.num_keys] = x[row, :, segment.start : segment.end]
            keys, values = (buffer[:, :, : segment.num_keys] for buffer in buffers)
            yield document, segment, keys, values


def _fold(x_HnK: Tensor, num_groups: int) -> Tensor:
    """The query heads of a group as more queries of it: [H, n, K] -> [1, G, H / G * n, K]."""
    return x_HnK.reshape(1, num_groups, -1, x_HnK.shape[-1])


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Where many segments add up, and for log-sum-exp: at least fp32."""
    return torch.promote_types(dtype, torch.float32)
