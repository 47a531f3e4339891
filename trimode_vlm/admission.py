"""Whether a request fits beside those that run: rows, and bytes of keys and values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import torch

from .generation import Generation

if TYPE_CHECKING:
    from .model import TriModeVLM


class Admission:
    """The memory rule of an engine: a batch's buffers are as long as its longest row may become.

    Args:
        kv_bytes: of all batches together; None is a quarter of the memory that is free now.
    """

    def __init__(self, model: TriModeVLM, max_rows: int, kv_bytes: int | None) -> None:
        config = model.config
        assert config.head_dim is not None
        self.max_rows = max_rows
        self.kv_bytes = free_bytes(model.device) // 4 if kv_bytes is None else kv_bytes
        self.bytes_per_slot = (
            2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
        )

    def check(self, generation: Generation) -> None:
        """Raise ValueError for a request that could never run."""
        num_rows, row = len(generation.rows), generation.rows[0]
        if num_rows > self.max_rows:
            raise ValueError(f"{num_rows} answers to one prompt; this engine decodes {self.max_rows} rows together")
        needed = num_rows * generation.most_slots * self.bytes_per_slot
        if needed > self.kv_bytes:
            raise ValueError(
                f"the prompt of {len(row.prompt.token_ids)} tokens with {row.budget} new ones needs "
                f"{needed / 2**20:.0f} MiB of keys and values, more than the {self.kv_bytes / 2**20:.0f} MiB there "
                "are: lower max_new_tokens or shorten the prompt"
            )

    def fits(self, generation: Generation, key: Hashable, running: Mapping[Hashable, tuple[int, int]]) -> bool:
        """Whether the request may start now in the batch `key`; `running`: rows and slots of each batch."""
        num_new, length = len(generation.rows), generation.most_slots
        if sum(rows for rows, _ in running.values()) + num_new > self.max_rows:
            return False
        rows, longest = running.get(key, (0, 0))
        after = {**running, key: (rows + num_new, max(longest, length))}
        return sum(rows * length for rows, length in after.values()) * self.bytes_per_slot <= self.kv_bytes


def free_bytes(device: torch.device) -> int:
    """Memory that is free now where the model lies."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available
