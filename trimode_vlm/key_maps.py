"""Weight names of the layouts that we read and write. Ours are the released ones, so that layout maps to itself."""

from __future__ import annotations

import re

HEAD = "diffusion_head.weight"
EMBEDDING = "encoder.embed_tokens.weight"

# First match wins. `language_model.model.` is what Ministral-3 files hold and what transformers' save_pretrained
# writes; `model.language_model.` is transformers' name in memory (save_original_format=False writes it).
_MISTRAL3_TO_OURS = [
    (r"^language_model\.lm_head\.|^lm_head\.", "diffusion_head."),
    (r"^language_model\.model\.|^model\.language_model\.|^language_model\.", "encoder."),
    (r"^(?:model\.)?(vision_tower|multi_modal_projector)\.", r"encoder.\1."),
]
_CAUSAL_LM_TO_OURS = [
    (r"^lm_head\.", "diffusion_head."),
    (r"^model\.", "encoder."),
    (r"^(embed_tokens|layers|norm)\.", r"encoder.\1."),
]
_OURS_TO_MISTRAL3 = [
    (r"^diffusion_head\.", "language_model.lm_head."),
    (r"^encoder\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^encoder\.", "language_model.model."),
]
_OURS_TO_CAUSAL_LM = [(r"^diffusion_head\.", "lm_head."), (r"^encoder\.", "model.")]
_RULES = {
    "trimode": [],
    "mistral3": _MISTRAL3_TO_OURS,
    "causal_lm": _CAUSAL_LM_TO_OURS,
    "to_trimode": [],
    "to_mistral3": _OURS_TO_MISTRAL3,
    "to_causal_lm": _OURS_TO_CAUSAL_LM,
}

# Rotary frequencies are computed from the config; activation scales serve FP8 arithmetic, which we do not run.
_NOT_WEIGHTS = re.compile(r"\.(?:inv_freq|activation_scale|input_scale)$")
SCALE_SUFFIX = "_scale_inv"


def to_ours(name: str, layout: str) -> str:
    """A name in a file of `layout` ("trimode", "mistral3", "causal_lm") -> our name; an unknown name stays as it is."""
    return _rename(name, _RULES[layout])


def from_ours(name: str, layout: str) -> str:
    """Our name -> the name in a file of `layout`; the opposite of `to_ours`."""
    return _rename(name, _RULES[f"to_{layout}"])


def is_weight(name: str) -> bool:
    """Whether a tensor belongs to the model, and is not an aid of a quantised or old file."""
    return _NOT_WEIGHTS.search(name) is None


def _rename(name: str, rules: list[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        renamed, count = re.subn(pattern, replacement, name, count=1)
        if count:
            return renamed
    return name
