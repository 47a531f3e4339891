"""From a row to ids, loss mask and images: the text is rendered first, pixels are decoded for what is kept only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from trimode_vlm.bad_samples import BadSample
from trimode_vlm.control_tokens import Shield
from trimode_vlm.image_tokens import expand_images, truncate
from trimode_vlm.row_images import fetched
from trimode_vlm.training.datasets import DataSettings
from trimode_vlm.training.rows import Example, read_row
from trimode_vlm.vision.images import image_size


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """A sample before its pixels are read, already cut to its length.

    images: sources of the images that are kept, as `open_image` takes them; sizes: their (height, width) in the model.
    num_cut: tokens that max_length cost it.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    images: list[Any]
    sizes: list[tuple[int, int]]
    num_cut: int


@dataclass(frozen=True)
class RowEncoder:
    """Encodes the rows of one data set. folder: where relative image paths start."""

    settings: DataSettings
    folder: Path
    processor: Any
    max_length: int | None = None

    def named(self, name: str, row: Any) -> str:
        """Return `name` with the row's own id, if it has one."""
        row_id = row.get(self.settings.columns.get("id", "id")) if isinstance(row, dict) else None
        return name if row_id is None else f"{name} (id {str(row_id)[:60]})"

    def lay_out(self, row: Any) -> RowLayout:
        """Turn a row into tokens; of its images only the headers are read.

        Raises:
            BadSample: see `read_row`; or the chat template refuses the messages, an image cannot be opened, or the row
                is longer than max_length and what is left holds no answer.
        """
        example = read_row(row, self.settings, self.folder)
        images = [fetched(source) for source in example.images]
        sizes = [self._size(source, number) for number, source in enumerate(images)]
        cell = self.processor.image_processor.cell
        try:
            ids, mask = self._text_ids(example) if example.plain else self._chat_ids(example)
            grids = [(height // cell, width // cell) for height, width in sizes]
            ids, spans, (mask,) = expand_images(ids, grids, self.processor.layout, [mask])
        except ValueError as error:
            raise BadSample(str(error), "template") from None
        _, stop = truncate(len(ids), self.max_length, spans, side="right")
        if not any(mask[:stop]):
            raise BadSample(
                f"{len(ids)} tokens cut to {stop} (max_length {self.max_length}) leave no answer token to train; "
                "raise max_length or use smaller images",
                "too long",
            )
        num_images = sum(last <= stop for _, last in spans)
        return RowLayout(
            input_ids=ids[:stop],
            loss_mask=mask[:stop],
            images=images[:num_images],
            sizes=sizes[:num_images],
            num_cut=len(ids) - stop,
        )

    def pixels(self, layout: RowLayout) -> list[Tensor]:
        """Decode a sample's images: float tensors [3, h, w].

        Raises:
            BadSample: an image is damaged.
        """
        return [
            self._pixels(*pair, number) for number, pair in enumerate(zip(layout.images, layout.sizes, strict=True))
        ]

    def _size(self, source: Any, number: int) -> tuple[int, int]:
        processor = self.processor.image_processor
        try:
            return processor.model_size(
                *image_size(source, max_pixels=processor.max_pixels, name=_name(source, number))
            )
        except (ValueError, OSError) as error:
            raise BadSample(str(error), "image") from None

    def _pixels(self, source: Any, size: tuple[int, int], number: int) -> Tensor:
        processor = self.processor.image_processor
        try:
            image = processor.open(source, name=_name(source, number))
        except (ValueError, OSError) as error:
            raise BadSample(str(error), "image") from None
        if (decoded := processor.model_size(image.height, image.width)) != size:
            raise BadSample(f"{_name(source, number)}: its header promises {size} pixels, it has {decoded}", "image")
        return processor(images=[image], return_tensors="pt")["pixel_values"][0]

    def _chat_ids(self, example: Example) -> tuple[list[int], list[bool]]:
        """Return the ids and loss mask of a chat, one image token per image."""
        small = Image.new("RGB", (1, 1))
        messages = [
            {**message, "content": [{**part, "image": small} if part["type"] == "image" else part for part in content]}
            if isinstance(content := message["content"], list)
            else message
            for message in example.messages
        ]
        chat = self.processor.encode_chat(messages)
        ids, mask = chat["input_ids"], chat["loss_mask"]
        for start, stop in reversed(chat["image_spans"]):
            ids[start:stop], mask[start:stop] = [self.processor.image_token_id], [False]
        return ids, mask

    def _text_ids(self, example: Example) -> tuple[list[int], list[bool]]:
        """Return the ids and loss mask of plain text: an end token closes it, BOS is not trained."""
        tokenizer, layout = self.processor.tokenizer, self.processor.layout
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token), which closes a plain text")
        (message,) = example.messages
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if layout is None and example.images:
            raise ValueError(f"the text holds {len(example.images)} images, but this checkpoint reads text only")
        encoder = self.processor._control_encoder()
        shield = Shield(encoder)
        covered = shield.cover([{"type": part["type"], "text": part.get("text", "")} for part in parts])
        rendered = "".join(layout.image_token if part["type"] == "image" else part["text"] for part in covered)
        ids, _ = encoder.encode(rendered, shield.restore)
        # Tokenizers that put BOS before every text do so here.
        before = tokenizer("")["input_ids"][:1] if tokenizer.bos_token_id is not None else []
        before = [i for i in before if i == tokenizer.bos_token_id]
        return [*before, *ids, tokenizer.eos_token_id], [False] * len(before) + [True] * (len(ids) + 1)


def _name(source: Any, number: int) -> str:
    if isinstance(source, dict):
        source = source.get("path")
    if isinstance(source, str) and source[:5].lower() != "data:":
        return source
    return f"image {number}"
