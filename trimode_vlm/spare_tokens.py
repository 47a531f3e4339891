"""Which token ids an autoregressive model can lend to the mask and to images: its spare special tokens.

A language model that becomes tri-mode needs a mask token that no text ever contains. Order of choice: the caller's
`mask_token_id`; a token that the tokenizer calls a mask; for Mistral's vocabularies id 100, as in the released models;
the first reserved token (`<|reserved_special_token_0|>`); the first special token without a role. SmolLM2, for
example, never uses ids 3..16, so its mask is 3. Image ids are chosen the same way from what is left.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MASK_NAMES = ("<|mask|>", "<|mask_token|>", "<|mdm_mask|>", "<mask>", "[MASK]", "<|MASK|>")
IMAGE_NAMES = {
    "image_token_id": ("<|image_pad|>", "[IMG]", "<|image|>", "<image>"),
    "image_start_token_id": ("<|image_start|>", "<|vision_start|>"),
    "image_break_token_id": ("<|image_break|>", "[IMG_BREAK]"),
    "image_end_token_id": ("<|image_end|>", "[IMG_END]", "<|vision_end|>"),
}
RELEASED_MASK_ID = 100
MINISTRAL_IMAGE_IDS = {"image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13}
_RESERVED = re.compile(r"reserved|unused|SPECIAL_|placeholder|extra_id", re.IGNORECASE)


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a tokenizer by text, and the texts that have a role (ends, padding, chat template)."""

    ids: dict[str, int]
    roles: frozenset[str]

    def find(self, names: Iterable[str]) -> int | None:
        return next((self.ids[name] for name in names if name in self.ids), None)

    def spare(self, used_ids: Iterable[int | list[int] | None]) -> list[int]:
        """Ids without a role, reserved ones first, ascending; `used_ids` come from the model's config."""
        used = {i for entry in used_ids for i in (entry if isinstance(entry, list) else [entry])}
        named = {name for names in (MASK_NAMES, *IMAGE_NAMES.values()) for name in names}
        free = [(text, i) for text, i in self.ids.items() if i not in used and text not in self.roles | named]
        return [i for text, i in sorted(free, key=lambda item: (_RESERVED.search(item[0]) is None, item[1]))]


def read_special_tokens(folder: Path, vocab_size: int) -> SpecialTokens:
    """Read the special tokens from tokenizer.json, tokenizer_config.json or tekken.json; none of them: no tokens.

    Tokens outside the embedding are left out.
    """
    fast, config, tekken = (_load(folder / f"{name}.json") for name in ("tokenizer", "tokenizer_config", "tekken"))
    ids = {token["content"]: int(token["id"]) for token in fast.get("added_tokens", []) if token.get("special")}
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        if token.get("special"):
            ids.setdefault(token["content"], int(token_id))
    if not ids:
        ids = {token["token_str"]: int(token["rank"]) for token in tekken.get("special_tokens") or []}
    template = folder / "chat_template.jinja"
    texts = json.dumps(config.get("chat_template") or "", ensure_ascii=False)
    texts += template.read_text(encoding="utf-8") if template.is_file() else ""
    declared = {**config, **_load(folder / "special_tokens_map.json")}
    roles = {_content(declared.get(f"{role}_token")) for role in ("bos", "eos", "pad", "unk", "sep", "cls")}
    roles |= {text for text in ids if text in texts}
    return SpecialTokens({text: i for text, i in ids.items() if i < vocab_size}, frozenset(roles - {""}))


def choose_mask_token(special: SpecialTokens, spare: list[int], is_ministral: bool, vocab_size: int) -> int | None:
    """The mask id by the order in this file's docstring; None, with a warning, where nothing is spare."""
    named = special.find(MASK_NAMES)
    if named is not None:
        return named
    if RELEASED_MASK_ID in spare or (is_ministral and not special.ids and vocab_size > RELEASED_MASK_ID):
        return RELEASED_MASK_ID
    if not spare:
        warnings.warn(
            "no spare special token for the mask: pass mask_token_id=; until then only mode='ar' can decode",
            stacklevel=5,
        )
        return None
    return spare[0]


def choose_image_tokens(
    special: SpecialTokens, spare: list[int], declared: int | None, vocab_size: int
) -> dict[str, int | None]:
    """Image, start, break and end ids. `declared` is the config's own image id: nothing is invented beside it."""
    ids = {field: special.find(names) for field, names in IMAGE_NAMES.items()}
    if declared is not None:
        ids["image_token_id"] = declared
        if not special.ids and declared == MINISTRAL_IMAGE_IDS["image_token_id"]:
            ids |= {field: i for field, i in MINISTRAL_IMAGE_IDS.items() if i < vocab_size}
        return ids
    if ids["image_token_id"] is None and len(spare) >= len(ids):
        return dict(zip(ids, spare, strict=False))
    return ids


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""
