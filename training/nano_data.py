"""Samples of the nano recipe: synthetic tasks and multi-turn questions, encoded by the processor, made on the fly."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from trimode_vlm.processor import TriModeImageProcessor, TriModeProcessor
from trimode_vlm.training import synthetic
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.nano_tokenizer import build_tokenizer, cell_token_ids
from trimode_vlm.training.pictures import COLORS, ITEMS, KINDS, SHAPES


def picture_seed(stage: str, seed: int, number: int) -> int:
    """A training seed (below synthetic.HELD_OUT_SEED) for sample `number` of a stage."""
    digest = hashlib.blake2b(f"{stage}/{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % synthetic.HELD_OUT_SEED


def pixels(processor: Any, image: Image.Image) -> Tensor:
    """One image as the processor prepares it: float [3, h, w]."""
    out = processor.image_processor(images=[image], return_tensors="pt")
    height, width = out["image_sizes"][0].tolist()
    return out["pixel_values"][0, :, :height, :width]


def encode(processor: Any, messages: list[dict[str, Any]], sample_id: int) -> Encoded:
    """Render a chat with the processor's template and keep ids, loss mask and pixels."""
    chat = processor.encode_chat(messages)
    return Encoded(
        sample_id=sample_id,
        input_ids=list(chat["input_ids"]),
        loss_mask=[bool(flag) for flag in chat["loss_mask"]],
        images=[pixels(processor, image) for image in chat["images"]],
    )


def build_processor() -> TriModeProcessor:
    """The nano model's processor: its own tokenizer, pictures up to 448 pixels."""
    image_processor = TriModeImageProcessor(size={"longest_edge": 448})
    return TriModeProcessor(image_processor, build_tokenizer(), mask_token="<|mask|>")


def token_ids(processor: TriModeProcessor) -> dict[str, Any]:
    """The config fields that name tokens, read from the processor's tokenizer."""
    tokenizer, layout = processor.tokenizer, processor.layout
    assert layout is not None
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "mask_token_id": tokenizer.mask_token_id,
        "image_token_id": layout.image,
        "image_start_token_id": layout.start,
        "image_break_token_id": layout.row_break,
        "image_end_token_id": layout.end,
    }


def cell_word_ids(processor: TriModeProcessor) -> dict[str, int]:
    """The token of every word that a picture's cell may hold."""
    words = (*COLORS, *SHAPES, *ITEMS, *"0123456789.x", *sorted(set("RECEIPTTOTAL")))
    return dict(zip(words, cell_token_ids(processor.tokenizer, words), strict=True))


@dataclass(frozen=True, kw_only=True)
class NanoMaker:
    """Makes sample `sample_id` of a stage at `step`: pictures grow from smallest to full until `grow_until` steps.

    tasks: sampling weight per task name. qa_share: share of chats with qa_turns short questions about one picture.
    """

    processor: Any
    stage: str
    seed: int
    tasks: dict[str, float]
    qa_share: float
    qa_turns: int
    grow_until: float
    min_scale: float = 0.0

    def __call__(self, sample_id: int, step: int) -> Encoded:
        seed = picture_seed(self.stage, self.seed, sample_id)
        rng = random.Random(f"mix-{seed}")
        grown = min(1.0, step / self.grow_until) if self.grow_until else 1.0
        scale = self.min_scale + (1 - self.min_scale) * grown
        if rng.random() < self.qa_share:
            messages = synthetic.make_conversation(rng.choice(KINDS), seed, self.qa_turns, scale).messages
        else:
            task = rng.choices(list(self.tasks), weights=list(self.tasks.values()))[0]
            messages = synthetic.make_sample(task, seed, scale).messages
        return encode(self.processor, messages, sample_id)
