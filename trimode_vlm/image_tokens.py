"""How images lie among tokens: the layout, its expansion from one placeholder, truncation between images, padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# image, start, break, end. Source: the released VLM's and Ministral-3's tokenizers.
IMAGE_LAYOUTS: dict[str, dict[str, str | None]] = {
    "nld": {
        "image_token": "<|image_pad|>", "image_start_token": "<|image_start|>",
        "image_break_token": "<|image_break|>", "image_end_token": "<|image_end|>",
    },
    "ministral": {
        "image_token": "[IMG]", "image_start_token": None,
        "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
    },
}  # fmt: skip


@dataclass(frozen=True)
class ImageLayout:
    """Token ids around and in an image: start, rows of `image` parted by `row_break`, end; None leaves one out.

    strings: the same tokens as text, `image_token` first.
    """

    image: int
    start: int | None = None
    row_break: int | None = None
    end: int | None = None
    break_after_last: bool = False
    strings: tuple[str, ...] = ()

    @property
    def image_token(self) -> str:
        """The placeholder as text."""
        return self.strings[0]

    @classmethod
    def from_tokens(
        cls, tokenizer: Any, image: str | None, start: str | None, row_break: str | None, end: str | None,
        break_after_last: bool,
    ) -> ImageLayout | None:  # fmt: skip
        """Look the tokens up; None without an image token.

        Raises:
            ValueError: a token is not one of the tokenizer's.
        """
        if image is None:
            return None
        for token in filter(None, (image, start, row_break, end)):
            token_id = tokenizer.convert_tokens_to_ids(token)
            if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != token:
                raise ValueError(f"image token {token!r} is not in the tokenizer")

        def look_up(token: str | None) -> int | None:
            return None if token is None else tokenizer.convert_tokens_to_ids(token)

        return cls(
            image=tokenizer.convert_tokens_to_ids(image),
            start=look_up(start),
            row_break=look_up(row_break),
            end=look_up(end),
            break_after_last=break_after_last,
            strings=tuple(token for token in (image, start, row_break, end) if token is not None),
        )

    def tokens(self, rows: int, columns: int) -> list[int]:
        """Return the ids of one image of rows x columns image tokens."""
        closing = [] if self.row_break is None else [self.row_break]
        body = ([self.image] * columns + closing) * rows
        if closing and not self.break_after_last:
            body.pop()
        before = [] if self.start is None else [self.start]
        return [*before, *body, *([] if self.end is None else [self.end])]


def expand_images(
    ids: list[int], grids: list[tuple[int, int]], layout: ImageLayout | None, parallel: list[list[bool]]
) -> tuple[list[int], list[tuple[int, int]], list[list[bool]]]:
    """Replace each placeholder by the tokens of its image.

    A start or end token that the template already wrote beside the placeholder is part of it, not doubled.

    Args:
        ids: one row with one `layout.image` per image.
        grids: (rows, columns) per image, in order.
        parallel: masks as long as `ids`, expanded with False.

    Returns:
        The ids, the token range (start, stop) of each image, and the masks.

    Raises:
        ValueError: placeholders and images differ in number.
    """
    places = [k for k, i in enumerate(ids) if layout is not None and i == layout.image]
    if len(places) != len(grids):
        raise ValueError(f"found {len(places)} image placeholders but received {len(grids)} images")
    out: list[int] = []
    masks: list[list[bool]] = [[] for _ in parallel]
    spans: list[tuple[int, int]] = []
    last = 0
    for place, (rows, columns) in zip(places, grids, strict=True):
        assert layout is not None
        first, stop = place, place + 1
        if layout.start is not None and place > last and ids[place - 1] == layout.start:
            first -= 1
        if layout.end is not None and ids[place + 1 : place + 2] == [layout.end]:
            stop += 1
        image = layout.tokens(rows, columns)
        out += ids[last:first]
        spans.append((len(out), len(out) + len(image)))
        out += image
        for mask, source in zip(masks, parallel, strict=True):
            mask += [*source[last:first], *[False] * len(image)]
        last = stop
    for mask, source in zip(masks, parallel, strict=True):
        mask += source[last:]
    return out + ids[last:], spans, masks


def truncate(length: int, limit: int | None, spans: list[tuple[int, int]], side: str = "right") -> tuple[int, int]:
    """Return the range (start, stop) of at most `limit` tokens to keep; it never ends inside one of `spans`.

    Cutting at the right keeps the beginning, cutting at the left the end; an image on the edge is dropped whole.
    """
    if limit is None or length <= limit:
        return 0, length
    start, stop = (0, limit) if side == "right" else (length - limit, length)
    for first, last in spans:
        if first < stop < last:
            stop = first
        if first < start < last:
            start = last
    return start, stop


def pad_rows(
    rows: list[list[int]], masks: list[list[bool]] | None, tokenizer: Any, options: dict[str, Any]
) -> dict[str, list[list[int]]]:
    """Return input_ids and attention_mask (and assistant_masks), padded on the left unless told otherwise.

    Several rows for tensors are padded to the longest without being asked.
    """
    padding = options.get("padding")
    if padding is None:
        padding = len(rows) > 1 and options.get("return_tensors", "pt") is not None
    target = max(map(len, rows))
    if padding == "max_length":
        target = max(target, options.get("max_length") or 0)
    multiple = options.get("pad_to_multiple_of")
    if padding and multiple:
        target = -(-target // multiple) * multiple
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    left = options.get("padding_side", "left") == "left"

    def pad(row: list[Any], value: Any) -> list[Any]:
        fill = [value] * (target - len(row)) if padding and padding != "do_not_pad" else []
        return fill + row if left else row + fill

    out = {"input_ids": [pad(row, pad_id) for row in rows]}
    if options.get("return_attention_mask", True):
        out["attention_mask"] = [pad([1] * len(row), 0) for row in rows]
    if masks is not None:
        out["assistant_masks"] = [pad([int(flag) for flag in mask], 0) for mask in masks]
    return out
