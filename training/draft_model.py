"""A frozen model and the draft LoRA that learns from its drafts: one forward of a batch gives the summed losses."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimode_vlm import patterns
from trimode_vlm.draft_adapter import DraftAdapter
from trimode_vlm.training.collate import Batch
from trimode_vlm.training.draft_loss import FLOOR, draft_terms, draw_drafts, positions_that_count, slots_of

WEIGHTS = "adapter_model.safetensors"
NAME = "encoder.layers.{}.self_attn.o_proj"


class LowRank(nn.Module):
    """scale * B(A(x)), which starts as zero; A [rank, in] and B [out, rank] are fp32, as in the released adapters."""

    def __init__(self, in_features: int, out_features: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(rank, in_features))
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        """[B, T, in] -> [B, T, out], zero where `where` [B, T, 1] is False."""
        low = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        return (where * (self.scale * low)).to(x.dtype)


class DraftModel(nn.Module):
    """The model, which stays as it is, and a LoRA on the o_proj of each of its layers; what DDP wraps.

    end_ids: tokens that end an answer. chunk_tokens: positions whose logits live at one time.
    """

    def __init__(self, model: Any, rank: int, alpha: float, chunk_tokens: int = 2048) -> None:
        super().__init__()
        self.model, self.config = model.requires_grad_(False), model.config
        self.rank, self.alpha, self.chunk_tokens = rank, alpha, chunk_tokens
        projections = [layer.self_attn.o_proj for layer in model.encoder.layers]
        self.lora = nn.ModuleList(LowRank(o.in_features, o.out_features, rank, alpha / rank) for o in projections)
        end = self.config.eos_token_id
        self.end_ids = [i for i in (end if isinstance(end, list) else [end]) if i is not None]
        self.banned_ids = self.config.banned_ids(self.end_ids)

    def forward(self, batch: Batch, uniform_BT: Tensor, is_greedy_BT: Tensor) -> Tensor:
        """Sums over the slots of a batch [4]: LK loss, CE loss, accepted drafts, active positions.

        uniform_BT: what a draft is drawn by, in [0, 1); is_greedy_BT: whether a slot is drafted greedily, at its seed.
        """
        # 1. Embeddings and drafts: the noisy half with the LoRA, the clean half as it is.
        with torch.no_grad():
            embeds = self.model.embed(batch.input_ids, batch.pixel_values, batch.image_sizes)
        where = batch.is_noisy[..., None]
        adapter = [partial(layer, where=where) for layer in self.lora]
        pattern = batch.pattern()
        drafting = self.model.hidden(embeds, batch.position, pattern, adapter=adapter).flatten(0, 1)
        slots = slots_of(batch.target, batch.is_noisy)
        with torch.no_grad():
            # 2. Draw the drafts of all slots and put them in the place of the masks.
            is_greedy = is_greedy_BT.flatten()[slots.seed][slots.slot]
            uniform = uniform_BT.flatten()[slots.mask]
            chunks = range(0, len(slots.mask), self.chunk_tokens)
            parts = [slice(start, start + self.chunk_tokens) for start in chunks]
            draft_ids = torch.cat(
                [slots.mask[:0]]
                + [draw_drafts(self.logits(drafting[slots.mask[p]]), uniform[p], is_greedy[p]) for p in parts]
            )
            ids = batch.input_ids.flatten().index_put((slots.mask,), draft_ids)
            drafted = self.model.encoder.embed_tokens(ids.view_as(batch.input_ids))
            # 3. The verifier reads them: the bare weights, causal within each block.
            verified = torch.where(where, drafted, embeds)
            verifier = self.model.hidden(verified, batch.position, patterns.causal_blocks(pattern)).flatten(0, 1)
            # The token before a draft stands before it in the row, too: causal logits there are about the draft.
            target_ids = torch.cat(
                [slots.mask[:0]] + [self.logits(verifier[slots.mask[p] - 1]).argmax(-1) for p in parts]
            )
            is_end = torch.isin(ids, ids.new_tensor(self.end_ids))
            accepted, active = positions_that_count(
                draft_ids, target_ids, slots.slot, is_end[slots.mask], is_end[slots.seed]
            )
        # 4. The loss where it counts.
        losses = self._losses(drafting, verifier, slots.mask[active])
        return torch.cat([losses, torch.stack([accepted.sum(), active.sum()]).to(losses)])

    def logits(self, hidden: Tensor) -> Tensor:
        """The head, without the ids that no answer may hold."""
        logits = self.model.diffusion_head(hidden)
        return logits.index_fill(-1, torch.tensor(self.banned_ids, device=logits.device), FLOOR)

    def _losses(self, drafting: Tensor, verifier: Tensor, index: Tensor) -> Tensor:
        """Summed LK and CE [2] at these flat indices, chunk by chunk, recomputed in the backward pass."""

        def one_chunk(draft: Tensor, before: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.logits(before)
            return draft_terms(self.logits(draft), target)

        losses = one_chunk(drafting[index[:0]], verifier[index[:0]])
        for part in index.split(self.chunk_tokens):
            chunk = (drafting[part], verifier[part - 1])
            if torch.is_grad_enabled() and len(index) > self.chunk_tokens:
                losses = losses + checkpoint(one_chunk, *chunk, use_reentrant=False)
            else:
                losses = losses + one_chunk(*chunk)
        return losses

    def save(self, folder: Path, base_name: str) -> None:
        """Write the LoRA in PEFT's layout, which `load(adapter=)` and PEFT read."""
        from peft import LoraConfig

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for number, layer in enumerate(self.lora):
            for factor in ("lora_A", "lora_B"):
                name = f"base_model.model.{NAME.format(number)}.{factor}.weight"
                tensors[name] = getattr(layer, factor).detach().contiguous().cpu()
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            target_modules=r"encoder\.layers\.\d+\.self_attn\.o_proj",
            base_model_name_or_path=base_name,
            inference_mode=True,
        ).save_pretrained(str(folder))

    def restore(self, folder: Path) -> None:
        """Read what `save` wrote."""
        tensors = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for number, layer in enumerate(self.lora):
                for factor in ("lora_A", "lora_B"):
                    stored = tensors[f"base_model.model.{NAME.format(number)}.{factor}.weight"]
                    getattr(layer, factor).copy_(stored)

    def as_adapter(self, folder: Path = Path("")) -> DraftAdapter:
        """A copy of the present LoRA that a model can draft with."""
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        for number, layer in enumerate(self.lora):
            assert isinstance(layer, LowRank)
            factors[NAME.format(number)] = layer.lora_A.detach().clone(), layer.lora_B.detach().clone()
        return DraftAdapter(folder, self.rank, self.alpha / self.rank, factors)
