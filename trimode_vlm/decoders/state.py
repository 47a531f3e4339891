"""What all decoders share: the three primitives over a cache, and the rows that are still running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache import KVCache
from ..lean_forward import LeanForward
from ..model_inputs import positions
from ..patterns import Pattern, block, causal
from ..sampling import SamplingParams

if TYPE_CHECKING:
    from ..model import TriModeVLM


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One request's decoding parameters, checked and complete."""

    block_length: int = 32
    threshold: float | None = 0.9
    commit_rule: str = "confidence"
    entropy_bound: float = 0.1
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a round brought to one row.

    `token_ids` are final and follow those of earlier steps. `num_forwards` counts the decode forwards that the row
    took part in since its last step. Diffusion shows its `canvas` (the mask token where nothing is committed);
    self-speculation shows its `draft` and how many of it were accepted.
    """

    row: int
    token_ids: list[int]
    num_forwards: int
    canvas: list[int] | None = None
    draft: list[int] | None = None
    num_accepted: int | None = None


LogitsHook = Callable[[int, Tensor, Tensor], Tensor]


@dataclass
class DecodeState:
    """The running rows of one request: their cache, their sampling state and the logits after their last token.

    `rows[i]` is the request's row that stands at batch index i. Finished rows are dropped between rounds, so they
    cost nothing. A decoder keeps per-row tensors of its own and filters them by what `drop_finished` returns.
    """

    model: TriModeVLM
    cache: KVCache
    rows: list[int]
    next_logits: Tensor
    generators: list[torch.Generator]
    remaining: list[int]
    settings: Settings
    banned: Tensor
    logits_hook: LogitsHook | None = None
    lean: LeanForward | None = None
    finished: set[int] = field(default_factory=set)
    num_forwards: int = 0

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def mask_token_id(self) -> int:
        """The mask; a request whose mode needs one is refused before it comes here without."""
        token_id = self.model.config.mask_token_id
        assert token_id is not None
        return token_id

    def commit(self, ids_BT: Tensor) -> Tensor:
        """One causal forward, its keys written behind the lengths: logits [B, T, V] of each next token."""
        return self._forward(ids_BT, causal(self.batch, ids_BT.shape[1], ids_BT.device, self.cache.offset))

    def propose(self, ids_BT: Tensor) -> Tensor:
        """One bidirectional forward of a block over the prefix, not kept: logits [B, T, V] of each own token."""
        return self._forward(ids_BT, block(self.batch, ids_BT.shape[1], ids_BT.device, self.cache.offset))

    def _forward(self, ids_BT: Tensor, pattern: Pattern) -> Tensor:
        B, T = ids_BT.shape
        self.num_forwards += 1
        self.cache.reserve(max(self.cache.lengths) + T)
        position_ids = positions(B, T, self.cache.offset, None, ids_BT.device)
        embeds = self.model.encoder.embed_tokens(ids_BT)
        hidden = self.model.hidden(embeds, position_ids, pattern, self.cache, self.lean)
        logits = self.model.diffusion_head(hidden)
        return logits.index_fill(-1, self.banned, float("-inf")) if self.banned.numel() else logits

    def process(self, logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        """Apply the user's logits processors to causal logits; position t has seen ids_BT[:, : t + 1] after the row."""
        if self.logits_hook is None:
            return logits_BTV
        rows = [
            self.logits_hook(row, ids, logits) for row, ids, logits in zip(self.rows, ids_BT, logits_BTV, strict=True)
        ]
        return torch.stack(rows)

    def drop_finished(self) -> Tensor | None:
        """Remove the rows that the driver marked as finished; return the kept batch indices, None if all stay."""
        if not self.finished:
            return None
        keep = [i for i, row in enumerate(self.rows) if row not in self.finished]
        index = torch.tensor(keep, dtype=torch.long, device=self.next_logits.device)
        self.rows = [self.rows[i] for i in keep]
        self.generators = [self.generators[i] for i in keep]
        self.remaining = [self.remaining[i] for i in keep]
        if keep:
            self.cache = self.cache.select(keep)
        self.next_logits = self.next_logits[index]
        self.finished.clear()
        return index
