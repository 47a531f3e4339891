"""The key-value cache: fixed buffers and a length per row. Only the decoder moves the lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import TriModeConfig


class KVCache:
    """Keys and values of all layers for B rows, each row with its own length.

    A forward writes its keys behind the lengths and leaves the lengths alone, so a draft is forgotten by doing nothing
    and a commit is one move of the lengths. Slot s of a row holds the token at position s.
    """

    def __init__(
        self, config: TriModeConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        assert config.head_dim is not None
        shape = (config.num_hidden_layers, batch, 2 * config.num_key_value_heads, capacity, config.head_dim)
        self._set_buffer(torch.zeros(shape, dtype=dtype, device=device))
        self.lengths: list[int] = [0] * batch
        self.most_slots = capacity  # that any row is expected to come to; growth in advance stops there

    def _set_buffer(self, buffer: Tensor, rows: int | None = None) -> None:
        """[layers, B, 2 G, capacity, K]: the keys of all heads, then their values; a layer writes both at once.

        With `rows`, only the first are in use, and the others wait for rows to come.
        """
        self._buffer = buffer
        self.kv = buffer if rows is None else buffer.narrow(1, 0, rows)
        self._layers = self.kv.unbind(0)

    @property
    def batch(self) -> int:
        return self.kv.shape[1]

    @property
    def capacity(self) -> int:
        return self.kv.shape[3]

    @property
    def nbytes(self) -> int:
        """What the buffers take, unused rows included."""
        return self._buffer.nbytes

    @property
    def offset(self) -> int | Tensor:
        """The lengths as patterns take them: one number when all rows agree, else a LongTensor [B]."""
        first = self.lengths[0]
        if all(n == first for n in self.lengths):
            return first
        return torch.tensor(self.lengths, device=self.kv.device)

    def append(self, layer: int, kv_BJTK: Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor]:
        """Write T new slots behind each row's length; return views of all slots up to the longest row's end.

        Args:
            kv_BJTK: the keys of all G heads, then their values: J = 2 G.
        """
        buffer, T = self._layers[layer], kv_BJTK.shape[2]
        if isinstance(offset, int):
            buffer.narrow(2, offset, T).copy_(kv_BJTK)
            end = offset + T
        else:
            slots = offset[:, None] + torch.arange(T, device=buffer.device)
            rows = torch.arange(self.batch, device=buffer.device)[:, None]
            buffer[rows, :, slots] = kv_BJTK.transpose(1, 2)
            end = max(self.lengths) + T
        keys, values = buffer.narrow(2, 0, end).chunk(2, 1)
        return keys, values

    def advance(self, counts: list[int], stride: int = 1) -> None:
        """Keep the next counts[b] slots of each row; with a stride, every stride-th of them, moved together."""
        if stride > 1:
            steps = torch.arange(max(counts), device=self.kv.device)
            starts = torch.tensor(self.lengths, device=self.kv.device)[:, None]
            rows = torch.arange(self.batch, device=self.kv.device)[:, None]
            # Indexing copies before it writes, so source and target may overlap.
            self.kv[:, rows, :, starts + steps] = self.kv[:, rows, :, starts + stride * steps]
        self.set_lengths([n + c for n, c in zip(self.lengths, counts, strict=True)])

    def truncate(self, length: int | list[int]) -> None:
        """Forget everything behind `length`, one number or one per row."""
        self.set_lengths([length] * self.batch if isinstance(length, int) else length)

    def set_lengths(self, lengths: list[int]) -> None:
        assert len(lengths) == self.batch and max(lengths) <= self.capacity and min(lengths) >= 0
        self.lengths = list(lengths)

    def reserve(self, capacity: int) -> None:
        """Grow the buffers to hold at least `capacity` slots; contents stay.

        They grow by half, so copies stay few, up to `most_slots`.
        """
        if capacity <= self.capacity:
            return
        pad = (0, 0, 0, max(capacity, min(self.capacity * 3 // 2, self.most_slots)) - self.capacity)
        self._set_buffer(torch.nn.functional.pad(self.kv, pad))

    def select(self, rows: list[int], length: int | None = None) -> KVCache:
        """A cache of the given rows only (a copy), and of their first `length` slots only where that is given."""
        kept = object.__new__(KVCache)
        buffer = self.kv if length is None else self.kv[:, :, :, :length]
        kept._set_buffer(buffer.index_select(1, torch.tensor(rows, device=self.kv.device)))
        kept.most_slots = self.most_slots
        kept.lengths = [self.lengths[r] if length is None else min(self.lengths[r], length) for r in rows]
        return kept

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these, which are in order; what they hold moves up in place."""
        for to, row in enumerate(rows):
            if to != row:
                length = self.lengths[row]
                self._buffer[:, to, :, :length] = self._buffer[:, row, :, :length]
        self.lengths = [self.lengths[row] for row in rows]
        self._set_buffer(self._buffer, len(rows))

    def join(self, other: KVCache) -> None:
        """Take in the other's rows behind these: copied where rows are unused, else all move to larger buffers."""
        rows, longest = self.batch + other.batch, max(other.lengths)
        if rows > self._buffer.shape[1] or longest > self.capacity:
            self._move(rows, max(self.capacity, longest))
        self._buffer[:, self.batch : rows, :, :longest] = other.kv[:, :, :, :longest]
        self.lengths = self.lengths + other.lengths
        self.most_slots = max(self.most_slots, other.most_slots)
        self._set_buffer(self._buffer, rows)

    def trim(self) -> None:
        """Give back the memory of unused rows."""
        if self.batch < self._buffer.shape[1]:
            self._move(self.batch, self.capacity)

    def _move(self, rows: int, capacity: int) -> None:
        """To new buffers, all finite: what masks hide is still multiplied, by zero."""
        layers, _, heads, _, width = self._buffer.shape
        batch, longest = self.batch, max(self.lengths)
        buffer = self._buffer.new_zeros((layers, rows, heads, capacity, width))
        buffer[:, :batch, :, :longest] = self.kv[:, :, :, :longest]
        self._set_buffer(buffer, batch)
