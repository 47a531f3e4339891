"""What all decoders share: the four primitives over a cache, and the rows that are still running."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache import KVCache
from ..draft_adapter import Delta, Deltas
from ..lean_forward import LeanForward
from ..logit_rules import RowRules, stacked_bias
from ..model_inputs import positions
from ..patterns import Pattern, block, causal, causal_or_block, quadratic
from ..sampling import SamplingParams, TokenLogprob, token_logprobs

if TYPE_CHECKING:
    from ..model import TriModeVLM


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One request's decoding parameters, checked and complete."""

    block_length: int = 32
    # linear_spec: block_length is the most that the policy may choose, not what every cycle has.
    adaptive: bool = False
    threshold: float | None = 0.9
    commit_rule: str = "confidence"
    entropy_bound: float = 0.1
    verifier_mix: float = 1.0
    verification: str = "token"
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a round brought to one row.

    `token_ids` are final and follow those of earlier steps. `num_forwards` counts the decode forwards that the row
    took part in since its last step. Diffusion shows its `canvas` (the mask token where nothing is committed) and the
    `confidence` with which each token was committed;
    self-speculation shows its `draft` and how many of it were accepted. `logprobs` has an entry per token
    where they are asked for.
    """

    row: int
    token_ids: list[int]
    num_forwards: int
    canvas: list[int] | None = None
    confidence: list[float] | None = None
    draft: list[int] | None = None
    num_accepted: int | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass
class DecodeState:
    """The running rows of a request, or of an engine's batch: cache, sampling state, logits after the last token.

    `rows[i]` is the number of the row that stands at batch index i. Finished rows are dropped between rounds, so they
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
    lean: LeanForward | None = None
    adapter: Deltas | None = None
    finished: set[int] = field(default_factory=set)
    # Rows prefilled elsewhere that come in at the next border between rounds; see `join`.
    joining: list[DecodeState] = field(default_factory=list)
    num_forwards: int = 0
    # One per row, or none at all.
    rules: list[RowRules] = field(default_factory=list)
    # Where an engine collects the faults of single rows, so that the others go on; without, they are raised.
    faults: dict[int, Exception] | None = None
    # What the head gave in the last causal forward [B, T, V], where log-probabilities are reported.
    raw_logits: Tensor | None = None

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
        pattern = causal(self.batch, ids_BT.shape[1], ids_BT.device, self.cache.offset)
        return self.causal_logits(self._block_hidden(ids_BT, pattern))

    def propose(self, ids_BT: Tensor, adapter: Deltas | None = None) -> Tensor:
        """One bidirectional forward of a block over the prefix, not kept: logits [B, T, V] of each own token."""
        pattern = block(self.batch, ids_BT.shape[1], ids_BT.device, self.cache.offset)
        return self.process_own(self.logits(self._block_hidden(ids_BT, pattern, adapter)), ids_BT)

    def propose_or_commit(self, ids_BT: Tensor, is_commit_B: Tensor) -> Tensor:
        """One forward that is `commit` and `process` for the rows where `is_commit_B`, `propose` for the others."""
        if is_commit_B.all():
            return self.process(self.commit(ids_BT), ids_BT)
        if not is_commit_B.any():
            return self.propose(ids_BT)
        pattern = causal_or_block(is_commit_B, ids_BT.shape[1], ids_BT.device, self.cache.offset)
        logits = self.logits(self._block_hidden(ids_BT, pattern))
        causal_logits, own_logits = self.process(logits, ids_BT), self.process_own(logits, ids_BT)
        if causal_logits is own_logits:
            return logits
        return torch.where(is_commit_B[:, None, None], causal_logits, own_logits)

    def propose_from_each(self, ids_BR: Tensor, num_masks: int, adapter: Deltas | None = None) -> Tensor:
        """One quadratic forward of R rows [id, mask x num_masks]: hidden states [B, R, num_masks + 1, D].

        Column 0 is causal over the ids; the masks of row i continue the text after id i. The keys are written in this
        order, so `cache.advance(counts, stride=num_masks + 1)` keeps those of the ids. An adapter acts on masks alone.
        """
        B, R = ids_BR.shape
        device, offset = ids_BR.device, self.cache.offset
        rows = ids_BR[..., None]
        ids = torch.cat((rows, rows.new_full((B, R, num_masks), self.mask_token_id)), -1).flatten(1)
        steps = (torch.arange(R, device=device)[:, None] + torch.arange(num_masks + 1, device=device)).flatten()
        place = steps.expand(B, -1) + (offset if isinstance(offset, int) else offset[:, None])
        if adapter is not None:
            is_mask = (torch.arange(ids.shape[1], device=device) % (num_masks + 1) > 0)[:, None]
            adapter = [delta and partial(_where, is_mask, delta) for delta in adapter]
        hidden = self._hidden(ids, place, quadratic(R, num_masks, B, device, offset), adapter)
        return hidden.unflatten(1, (R, num_masks + 1))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head, biased, without the ids that no answer may hold: [B, ..., D] -> [B, ..., V]."""
        return self._allowed(self.model.diffusion_head(hidden))

    def causal_logits(self, hidden: Tensor) -> Tensor:
        """`logits` of a causal forward [B, T, D], by which tokens are emitted."""
        raw = self.model.diffusion_head(hidden)
        if any(rules.num_top is not None for rules in self.rules):
            self.raw_logits = raw
        return self._allowed(raw)

    def first_logits(self, raw_BV: Tensor) -> Tensor:
        """What the head gave behind the prompts, biased and processed, for the first token of each row."""
        for rules, raw in zip(self.rules, raw_BV, strict=True):
            rules.first_logits = raw if rules.num_top is not None else None
        no_ids = torch.empty(self.batch, 0, dtype=torch.long, device=raw_BV.device)
        return self.process(self._allowed(raw_BV)[:, None], no_ids)[:, 0]

    def _allowed(self, logits: Tensor) -> Tensor:
        bias = stacked_bias(self.rules)
        if bias is not None:
            # In float32, as transformers adds it.
            logits = logits + (bias if bias.dim() == 1 else bias.view(len(bias), *[1] * (logits.dim() - 2), -1))
        return logits.index_fill(-1, self.banned, float("-inf")) if self.banned.numel() else logits

    def _block_hidden(self, ids_BT: Tensor, pattern: Pattern, adapter: Deltas | None = None) -> Tensor:
        B, T = ids_BT.shape
        place = positions(B, T, self.cache.offset, None, ids_BT.device)
        return self._hidden(ids_BT, place, pattern, adapter)

    def _hidden(self, ids_BT: Tensor, position_ids: Tensor, pattern: Pattern, adapter: Deltas | None = None) -> Tensor:
        self.num_forwards += 1
        self.cache.reserve(max(self.cache.lengths) + ids_BT.shape[1])
        embeds = self.model.encoder.embed_tokens(ids_BT)
        return self.model.hidden(embeds, position_ids, pattern, self.cache, self.lean, adapter)

    def process(self, logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        """What asks for the place or the tokens before it, on causal logits that have seen the block `ids_BT`.

        Like `process_own`, to be called before the cache moves on: the block stands behind the lengths.
        """
        return self._by_row(RowRules.behind, logits_BTV, ids_BT)

    def process_own(self, logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        """What asks for the place, on logits of the last places of the block `ids_BT`, each of its own token."""
        return self._by_row(RowRules.own, logits_BTV, ids_BT)

    def _by_row(self, rule: Callable[..., Tensor], logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        if not any(rules.act for rules in self.rules):
            return logits_BTV
        out = []
        for i, (logits, ids) in enumerate(zip(logits_BTV.float(), ids_BT.tolist(), strict=True)):
            try:
                out.append(rule(self.rules[i], logits, ids, self.cache.lengths[i]))
            except Exception as error:  # of a user's processor
                if self.faults is None:
                    raise
                self.faults[self.rows[i]] = error
                out.append(logits)
        return torch.stack(out)

    def held(self, canvas_BT: Tensor) -> Tensor:
        """Places of a canvas that must stay open for now: bool [B, T]; see RowRules.held."""
        held = torch.zeros_like(canvas_BT, dtype=torch.bool)
        if any(rules.thought and rules.act for rules in self.rules):
            for i, (rules, ids) in enumerate(zip(self.rules, canvas_BT.tolist(), strict=True)):
                place = rules.held(ids, self.cache.lengths[i], self.mask_token_id)
                if place is not None:
                    held[i, place] = True
        return held

    def report(self, steps: list[Step]) -> list[Step]:
        """The steps with the log-probabilities of their tokens, where a row asks for them."""
        if all(rules.num_top is None for rules in self.rules):
            return steps
        return [replace(step, logprobs=self._logprobs(self.rows.index(step.row), step.token_ids)) for step in steps]

    def _logprobs(self, index: int, token_ids: list[int]) -> list[TokenLogprob] | None:
        rules = self.rules[index]
        if rules.num_top is None:
            return None
        if rules.first_logits is not None:
            logits, rules.first_logits = rules.first_logits[None], None
        else:
            assert self.raw_logits is not None
            logits = self.raw_logits[index, : len(token_ids)]
        return token_logprobs(logits, token_ids, rules.num_top)

    def drop_finished(self) -> Tensor | None:
        """Remove the rows that the driver marked as finished; return the kept batch indices, None if all stay."""
        if not self.finished:
            return None
        keep = [i for i, row in enumerate(self.rows) if row not in self.finished]
        index = torch.tensor(keep, dtype=torch.long, device=self.next_logits.device)
        self.rows = [self.rows[i] for i in keep]
        self.generators = [self.generators[i] for i in keep]
        self.remaining = [self.remaining[i] for i in keep]
        self.rules = [self.rules[i] for i in keep] if self.rules else []
        if keep:
            self.cache.keep(keep)
        self.next_logits = self.next_logits[index]
        self.finished.clear()
        return index

    def join(self) -> int:
        """Take in the rows that wait in `joining`, behind those that are here; return how many came."""
        before = self.batch
        for new in self.joining:
            if self.rows:
                self.cache.join(new.cache)
            else:
                self.cache = new.cache
            self.rows = self.rows + new.rows
            self.generators = self.generators + new.generators
            self.remaining = self.remaining + new.remaining
            self.rules = self.rules + new.rules
            self.next_logits = torch.cat((self.next_logits, new.next_logits))
        self.joining.clear()
        return self.batch - before


def _where(is_active: Tensor, delta: Delta, x_BTD: Tensor) -> Tensor:
    """An adapter's delta at the active tokens [T, 1], nothing at the others."""
    return delta(x_BTD) * is_active
