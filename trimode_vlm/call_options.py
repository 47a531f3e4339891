"""The keyword arguments of one processor call, sorted into those for text and those for images."""

from __future__ import annotations

import difflib
from typing import Any

TEXT_OPTIONS = (
    "padding",
    "padding_side",
    "pad_to_multiple_of",
    "truncation",
    "truncation_side",
    "max_length",
    "add_special_tokens",
    "return_tensors",
    "return_attention_mask",
)
_GROUPS = ("text_kwargs", "images_kwargs", "common_kwargs")


def split_options(kwargs: dict[str, Any], image_processor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (text options, image options); transformers' groups such as `images_kwargs` are opened.

    Raises:
        ValueError: an option is unknown; names the nearest known one.
    """
    known_image = image_processor.valid_kwargs.__annotations__
    flat = {k: v for k, v in kwargs.items() if k not in _GROUPS}
    for group in ("common_kwargs", "text_kwargs"):
        flat = {**(kwargs.get(group) or {}), **flat}
    image_options = dict(kwargs.get("images_kwargs") or {})
    image_options.pop("return_tensors", None)
    options = {}
    for key, value in flat.items():
        if key in TEXT_OPTIONS:
            options[key] = value
        elif key in known_image:
            image_options[key] = value
        else:
            near = difflib.get_close_matches(key, [*TEXT_OPTIONS, *known_image], n=1)
            raise ValueError(f"unknown processor option {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return options, image_options
