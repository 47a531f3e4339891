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
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths: list[int] = [0] * batch

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def offset(self) -> int | Tensor:
        """The lengths as patterns take them: one number when all rows agree, else a LongTensor [B]."""
        first = self.lengths[0]
        if all(n == first for n in self.lengths):
            return first
        return torch.tensor(self.lengths, device=self.keys.device)

    def append(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor, offset: int | Tensor) -> tuple[Tensor, Tensor]:
        """Write T new slots behind each row's length; return views of all slots up to the longest row's end."""
        keys, values, T = self.keys[layer], self.values[layer], k_BGTK.shape[2]
        if isinstance(offset, int):
            keys[:, :, offset : offset + T] = k_BGTK
            values[:, :, offset : offset + T] = v_BGTK
            return keys[:, :, : offset + T], values[:, :, : offset + T]
        slots = offset[:, None] + torch.arange(T, device=keys.device)
        rows = torch.arange(self.batch, device=keys.device)[:, None]
        keys[rows, :, slots] = k_BGTK.transpose(1, 2)
        values[rows, :, slots] = v_BGTK.transpose(1, 2)
        end = max(self.lengths) + T
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, counts: list[int]) -> None:
        """Keep the next counts[b] slots of each row."""
        self.set_lengths([n + c for n, c in zip(self.lengths, counts, strict=True)])

    def truncate(self, length: int | list[int]) -> None:
        """Forget everything behind `length`, one number or one per row."""
        self.set_lengths([length] * self.batch if isinstance(length, int) else length)

    def set_lengths(self, lengths: list[int]) -> None:
        assert len(lengths) == self.batch and max(lengths) <= self.capacity and min(lengths) >= 0
        self.lengths = list(lengths)

    def reserve(self, capacity: int) -> None:
        """Grow the buffers to hold at least `capacity` slots; contents stay. They grow by half, so copies stay few."""
        if capacity <= self.capacity:
            return
        pad = (0, 0, 0, max(capacity, self.capacity * 3 // 2) - self.capacity)
        self.keys = torch.nn.functional.pad(self.keys, pad)
        self.values = torch.nn.functional.pad(self.values, pad)

    def select(self, rows: list[int]) -> KVCache:
        """A cache of the given rows only (a copy)."""
        kept = object.__new__(KVCache)
        index = torch.tensor(rows, device=self.keys.device)
        kept.keys, kept.values = self.keys.index_select(1, index), self.values.index_select(1, index)
        kept.lengths = [self.lengths[r] for r in rows]
        return kept
