"""The oracle: decoders without a cache, written from the method's description, and a model that answers from tables.

Every forward here is `model(input_ids=..., pattern=...)` over the whole sequence, one row, greedy; nothing is shared
with trimode_vlm.decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimode_vlm.patterns import Pattern

Images = dict[str, Tensor]
# (probabilities [k, V], masked positions) -> positions to commit
Rule = Callable[[Tensor, list[int]], list[int]]


@dataclass
class Answer:
    """Emitted tokens, forwards with the prefill, and tokens per self-speculation cycle."""

    token_ids: list[int] = field(default_factory=list)
    nfe: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def emit(self, token_ids: list[int], budget: int, end_ids: Collection[int]) -> int:
        """Append up to the first end token or the budget; return how many were appended."""
        before = len(self.token_ids)
        for token in token_ids:
            if self.finish_reason:
                break
            self.token_ids.append(token)
            if token in end_ids:
                self.finish_reason = "stop"
            elif len(self.token_ids) == budget:
                self.finish_reason = "length"
        return len(self.token_ids) - before


@dataclass
class Oracle:
    """A model with the ids that end an answer and the ids that no answer may hold."""

    model: Any
    end_ids: Collection[int]
    banned_ids: Collection[int]
    images: Images = field(default_factory=dict)

    def logits(self, ids: list[int], block_start: int | None = None) -> Tensor:
        """[T, V]: causal everywhere, but from `block_start` on every token sees the whole sequence."""
        start = len(ids) if block_start is None else block_start
        pattern = Pattern(lambda b, h, q, k: (k <= q) | (q >= start), 1, len(ids), len(ids), torch.device("cpu"))
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids]), pattern=pattern, **self.images).logits[0].clone()
        logits[:, list(self.banned_ids)] = float("-inf")
        return logits

    def ar(self, prompt: list[int], budget: int) -> Answer:
        """One causal forward of everything per token."""
        answer = Answer()
        while not answer.finish_reason:
            answer.nfe += 1
            token = int(self.logits(prompt + answer.token_ids)[-1].argmax())
            answer.emit([token], budget, self.end_ids)
        return answer

    def linear_spec(self, prompt: list[int], budget: int, k: int) -> Answer:
        """Draft [seed, mask x (k-1)] both ways, verify causally, keep what the verifier says too and its next token.

        Drafting is skipped where no draft could be used: k == 1, or one token of the budget left.
        """
        mask = self.model.config.mask_token_id
        answer = Answer(nfe=1)
        answer.emit([int(self.logits(prompt)[-1].argmax())], budget, self.end_ids)
        while not answer.finish_reason:
            known = prompt + answer.token_ids
            n = len(known) - 1
            draft: list[int] = []
            if k > 1 and budget - len(answer.token_ids) > 1:
                canvas = known + [mask] * (k - 1)
                draft = self.logits(canvas, block_start=n)[n + 1 :].argmax(-1).tolist()
                answer.nfe += 1
            target = self.logits(known + draft)[n:].argmax(-1).tolist()
            answer.nfe += 1
            accepted = 0
            while accepted < len(draft) and target[accepted] == draft[accepted]:
                accepted += 1
            gave = answer.emit(draft[:accepted] + [target[accepted]], budget, self.end_ids)
            answer.accepted_lengths.append(gave)
        return answer

    def quadratic_spec(self, prompt: list[int], budget: int, k: int, verifier_mix: float = 1.0) -> Answer:
        """Per forward: verify seed and draft, and behind each of their tokens k masks that draft what follows it.

        The first cycle verifies the seed alone. Masks are left out where no draft could be used: k == 1, or one token
        of the budget left.
        """
        answer = Answer(nfe=1)
        answer.emit([int(self.logits(prompt)[-1].argmax())], budget, self.end_ids)
        draft: list[int] = []
        while not answer.finish_reason:
            drafting = k > 1 and budget - len(answer.token_ids) > 1
            rows = [answer.token_ids[-1]] + (draft if drafting else [])
            num_masks = k if drafting or verifier_mix < 1 else 0
            logits = self.quadratic_logits(prompt + answer.token_ids[:-1], rows, num_masks)
            answer.nfe += 1
            verdict = logits[:, 0]
            if verifier_mix < 1:
                verdict = verifier_mix * logits[:, 0].softmax(-1) + (1 - verifier_mix) * logits[:, 1].softmax(-1)
            target = verdict.argmax(-1).tolist()
            accepted = 0
            while accepted < len(rows) - 1 and target[accepted] == rows[accepted + 1]:
                accepted += 1
            draft = logits[accepted, 2:].argmax(-1).tolist()
            gave = answer.emit([*rows[1 : accepted + 1], target[accepted]], budget, self.end_ids)
            answer.accepted_lengths.append(gave)
        return answer

    def quadratic_logits(self, prefix: list[int], rows: list[int], num_masks: int) -> Tensor:
        """[R, num_masks + 1, V] of the rows [id, mask x num_masks], all in one forward behind the prefix.

        Each token is (row, column, position), the prefix in row -1; what sees what is asked of every pair of them.
        """
        n = len(prefix)
        tokens = [(-1, 0, p) for p in range(n)]
        tokens += [(row, column, n + row + column) for row in range(len(rows)) for column in range(num_masks + 1)]
        ids = list(prefix)
        for token in rows:
            ids += [token] + [self.model.config.mask_token_id] * num_masks
        row, column, place = torch.tensor(tokens).unbind(1)
        is_text = column == 0
        text_sees_text = is_text[:, None] & is_text & (place <= place[:, None])
        mask_sees_text = ~is_text[:, None] & is_text & (row <= row[:, None])
        mask_sees_mask = ~is_text[:, None] & ~is_text & (row == row[:, None])
        allowed = text_sees_text | mask_sees_text | mask_sees_mask
        pattern = Pattern(lambda b, h, q, k: allowed[q, k], 1, len(ids), len(ids), torch.device("cpu"))
        with torch.no_grad():
            given = {"input_ids": torch.tensor([ids]), "position_ids": place[None], "pattern": pattern}
            logits = self.model(**given, **self.images).logits[0, n:].clone()
        logits[:, list(self.banned_ids)] = float("-inf")
        return logits.view(len(rows), num_masks + 1, -1)

    def diffusion(
        self, prompt: list[int], budget: int, k: int, threshold: float | None, rule: Rule | None = None
    ) -> Answer:
        """Blocks of [seed, mask x (k-1)]; a forward commits the surest mask and all at or above the threshold.

        rule: chooses in place of that.
        """
        mask = self.model.config.mask_token_id
        answer, done = Answer(nfe=1), list(prompt)
        seed = int(self.logits(prompt)[-1].argmax())
        while True:
            block, n, shown = [seed] + [mask] * (k - 1), len(done), 0
            while True:
                run = block.index(mask) if mask in block else k
                answer.emit(block[shown:run], budget, self.end_ids)
                shown = run
                if answer.finish_reason:
                    return answer
                if run == k:
                    break
                probs = self.logits(done + block, block_start=n)[n:].softmax(-1)
                answer.nfe += 1
                best, token = (column.tolist() for column in probs.max(-1))
                masked = [i for i in range(k) if block[i] == mask]
                surest = max(masked, key=lambda i: (best[i], -i))
                sure = [i for i in masked if i == surest or (threshold is not None and best[i] >= threshold)]
                for i in rule(probs, masked) if rule else sure:
                    block[i] = token[i]
            done += block
            seed = int(self.logits(done)[-1].argmax())
            answer.nfe += 1

    def decode(self, mode: str, prompt: list[int], budget: int, k: int, threshold: float | None = 0.9) -> Answer:
        """One of the four, by name."""
        if mode == "ar":
            return self.ar(prompt, budget)
        if mode == "linear_spec":
            return self.linear_spec(prompt, budget, k)
        if mode == "quadratic_spec":
            return self.quadratic_spec(prompt, budget, k)
        return self.diffusion(prompt, budget, k, threshold)


# (positions [...], token ids seen there [...], number of the forward) -> logits [..., V]
Script = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_position(table_PV: Tensor) -> Script:
    """Logits that depend on the absolute position alone."""
    return lambda position, token, forward: table_PV[position]


def scripted_model(config: Any, causal: Script, bidirectional: Script) -> Any:
    """A TriModeVLM whose logits come from the scripts: one for causal queries, one for queries that see ahead.

    Position p of a causal script holds the logits of token p + 1, of a bidirectional script those of token p. The
    forwards are in `model.encoder.calls`: (token ids [B][T], positions [B][T], sees ahead [B][T]) of each.
    """
    from trimode_vlm import TriModeVLM

    model = TriModeVLM(config).eval()
    model.encoder = _ScriptedEncoder(config)
    model.diffusion_head = _ScriptedHead(causal, bidirectional)
    return model


class _ScriptedEncoder(nn.Module):
    """Hidden states that spell (position, sees ahead, token, number of the forward)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.zeros_(self.embed_tokens.weight)
        self.embed_tokens.weight.data[:, 0] = torch.arange(config.vocab_size)
        self.calls: list[tuple[list[list[int]], list[list[int]], list[list[bool]]]] = []

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        pattern: Pattern,
        cache: Any = None,
        lean: None = None,
        adapter: None = None,
    ) -> Tensor:
        B, T, D = inputs_embeds.shape
        sees = pattern.attn_mask.expand(B, 1, T, pattern.key_length)[:, 0]
        # Keys lie one behind the other from the first position on, with a cache and without one.
        slot = position_ids[:, :1] + torch.arange(T)
        next_slot = (slot + 1).clamp(max=sees.shape[-1] - 1)
        ahead = sees.gather(-1, next_slot[..., None]).squeeze(-1) & (slot + 1 < sees.shape[-1])
        last = slot[:, 1:, None].clamp(max=sees.shape[-1] - 1)
        ahead[:, 1:] |= sees[:, :-1].gather(-1, last).squeeze(-1)
        token = inputs_embeds[..., 0].round().long()
        self.calls.append((token.tolist(), position_ids.tolist(), ahead.tolist()))
        hidden = torch.zeros(B, T, D)
        for i, feature in enumerate((position_ids, ahead, token, torch.full_like(token, len(self.calls)))):
            hidden[..., i] = feature.float()
        return hidden


class _ScriptedHead(nn.Module):
    def __init__(self, causal: Script, bidirectional: Script) -> None:
        super().__init__()
        self.causal, self.bidirectional = causal, bidirectional

    def forward(self, hidden: Tensor) -> Tensor:
        position, ahead, token, forward = (hidden[..., i].round().long() for i in range(4))
        both = self.causal(position, token, forward), self.bidirectional(position, token, forward)
        return torch.where(ahead[..., None] > 0, both[1], both[0])


def count_forwards(model: Any) -> list[int]:
    """A list that grows by the batch size of every call of the backbone, for as long as the model lives."""
    sizes: list[int] = []
    model.encoder.register_forward_pre_hook(lambda module, args, kwargs: sizes.append(len(args[0])), with_kwargs=True)
    return sizes
