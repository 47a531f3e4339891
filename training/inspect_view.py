"""What a training sample is to the model: its tokens, images, blocks and noise, read from the row that it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch

from trimode_vlm.detokenizer import IncrementalDetokenizer
from trimode_vlm.training.blocks import response_runs
from trimode_vlm.training.collate import NoiseSettings, lay_out
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.dual_stream import IGNORE, NOISY_STREAMS, DualStream

STREAMS = ("noisy", "complement", "clean")


@dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """Tokens start..stop of the clean half that are one image. size: (height, width) in pixels, grid: in cells."""

    size: tuple[int, int]
    grid: tuple[int, int]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token of the row [noisy | clean].

    stream: "noisy", "complement" (the second noisy half of complementary masks) or "clean". source: the token's place
    in the clean half, None for padding behind a response. loss: "ar" or "diffusion" where this token is a target: in
    the clean half the token before it predicts it, in a noisy half it is masked and predicts itself. target: what a
    masked token is to become.
    """

    stream: str
    id: int
    text: str
    position: int
    source: int | None
    block: int | None
    loss: str | None
    target: int | None
    p: float | None


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a noisy half: tokens start..stop of the row, from `first_position` on.

    p: the masking probability that was drawn, None where none of its tokens may be masked. padding: tokens behind the
    response's end.
    """

    number: int
    stream: str
    start: int
    stop: int
    first_position: int
    p: float | None
    masked: int
    maskable: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class SampleView:
    """A sample as the model sees it; `row` is the training row, everything else is counted from it.

    lengths: tokens of the sample, of its text, images and responses, of the two streams, and of the whole row for
    every choice of noisy_stream. responses: token ranges of the clean half.
    """

    name: str
    sample_id: int
    epoch: int
    noise: NoiseSettings
    lengths: dict[str, int]
    row_lengths: dict[str, int]
    responses: list[tuple[int, int]]
    images: list[ImageSpan]
    blocks: list[Block]
    tokens: list[Token]
    row: DualStream

    @property
    def masked(self) -> int:
        """Masked tokens of all noisy halves."""
        return sum(block.masked for block in self.blocks)

    @property
    def maskable(self) -> int:
        """Tokens of all noisy halves that noise may mask."""
        return sum(block.maskable for block in self.blocks)

    def as_json(self) -> dict[str, Any]:
        """The view as plain lists and mappings."""
        plain = {name: value for name, value in asdict(self).items() if name != "row"}
        ratio = self.masked / self.maskable if self.maskable else None
        return {**plain, "masked": self.masked, "maskable": self.maskable, "mask_ratio": ratio}


def view_sample(sample: Encoded, noise: NoiseSettings, processor: Any) -> SampleView:
    """Lay a sample out as training does and describe the row.

    Raises:
        ValueError: the sample cannot be trained on, or its images are not where their tokens are.
    """
    row = lay_out(sample, noise)
    texts = token_texts(processor, sample.input_ids)
    images = image_spans(sample, processor)
    tokens = _tokens(row, texts, processor)
    num_image = sum(i in noise.vision_token_ids for i in sample.input_ids)
    num_noisy = int(row.is_noisy.sum())
    streams = NOISY_STREAMS if noise.dual else ()
    return SampleView(
        name=sample.name or f"sample {sample.sample_id}",
        sample_id=sample.sample_id,
        epoch=sample.epoch,
        noise=noise,
        lengths={
            "tokens": len(sample.input_ids),
            "text": len(sample.input_ids) - num_image,
            "image": num_image,
            "response": sum(sample.loss_mask),
            "noisy": num_noisy,
            "clean": len(tokens) - num_noisy,
            "row": len(tokens),
        },
        row_lengths={name: len(lay_out(sample, replace(noise, noisy_stream=name)).input_ids) for name in streams},
        responses=response_runs(torch.tensor(sample.loss_mask, dtype=torch.bool)),
        images=images,
        blocks=_blocks(row, tokens),
        tokens=tokens,
        row=row,
    )


def token_texts(processor: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are the processor's decoding of all.

    A token that ends within a character has none, and the one that completes it has the whole character.
    """
    detokenizer = IncrementalDetokenizer(processor, skip_special_tokens=False)
    texts = [detokenizer.put(i) for i in ids]
    rest = detokenizer.end()
    return [*texts[:-1], texts[-1] + rest] if texts else []


def image_spans(sample: Encoded, processor: Any) -> list[ImageSpan]:
    """Where the tokens of each of a sample's images stand.

    Raises:
        ValueError: the ids do not hold the tokens of an image of that size.
    """
    if not sample.images:
        return []
    layout, cell = processor.layout, processor.image_processor.cell
    spans: list[ImageSpan] = []
    place = 0
    for number, image in enumerate(sample.images):
        height, width = image.shape[-2:]
        rows, columns = height // cell, width // cell
        expected = layout.tokens(rows, columns)
        found = (k for k in range(place, len(sample.input_ids)) if sample.input_ids[k : k + len(expected)] == expected)
        start = next(found, None)
        if start is None:
            name = sample.name or f"sample {sample.sample_id}"
            raise ValueError(
                f"{name}: image {number} has {rows}x{columns} cells, and its {len(expected)} tokens are not in the ids"
            )
        place = start + len(expected)
        spans.append(ImageSpan(size=(height, width), grid=(rows, columns), start=start, stop=place))
    return spans


def _tokens(row: DualStream, texts: list[str], processor: Any) -> list[Token]:
    tokens: list[Token] = []
    num_noisy = int(row.is_noisy.sum())
    predicted = [False, *(row.target[num_noisy:-1] != IGNORE).tolist()]
    fields = zip(
        _streams(row), row.input_ids.tolist(), row.position.tolist(), row.source.tolist(), row.block_id.tolist(),
        row.is_noisy.tolist(), row.is_maskable.tolist(), row.target.tolist(), row.p_mask.tolist(), strict=True,
    )  # fmt: skip
    for stream, token_id, position, source, block, is_noisy, is_maskable, target, p in fields:
        is_masked = is_noisy and target != IGNORE
        own_text = source >= 0 and not is_masked
        loss = "diffusion" if is_masked else "ar" if not is_noisy and predicted[source] else None
        tokens.append(
            Token(
                stream=stream,
                id=token_id,
                text=texts[source] if own_text else processor.tokenizer.decode([token_id]),
                position=position,
                source=source if source >= 0 else None,
                block=block if is_noisy else None,
                loss=loss,
                target=target if is_masked else None,
                p=p if is_maskable else None,
            )
        )
    return tokens


def _blocks(row: DualStream, tokens: list[Token]) -> list[Block]:
    blocks: list[Block] = []
    for number, group in groupby((token for token in tokens if token.block is not None), key=lambda token: token.block):
        members, start = list(group), blocks[-1].stop if blocks else 0
        maskable = [token for token in members if token.p is not None]
        # 1 also stands at tokens that this draw keeps; what can be masked beside them has the block's own p.
        could_mask = [token.p for token in maskable if token.p is not None and (token.p < 1 or token.loss)]
        blocks.append(
            Block(
                number=number or 0,
                stream=members[0].stream,
                start=start,
                stop=start + len(members),
                first_position=int(row.block_start[start]),
                p=min(could_mask, default=None),
                masked=sum(token.loss is not None for token in members),
                maskable=len(maskable),
                padding=sum(token.source is None for token in members),
            )
        )
    return blocks


def _streams(row: DualStream) -> list[str]:
    """The half that each token of a row belongs to."""
    names, half, last_source = [], 0, -1
    for is_noisy, source in zip(row.is_noisy.tolist(), row.source.tolist(), strict=True):
        if is_noisy and source >= 0:
            # Within a half the sources grow: one that does not is the beginning of the next.
            half += source <= last_source
            last_source = source
        names.append(STREAMS[half] if is_noisy else STREAMS[-1])
    return names
