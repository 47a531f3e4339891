"""What lies beside the weights: tokenizer, processor and generation settings, read from and written for any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .chat import check_template
from .config import TriModeConfig
from .generation_config import TriModeGenerationConfig
from .json_files import read_json

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_LICENCE_PATTERNS = ("LICENSE*", "NOTICE*")
# What every transformers model understands; our own options would make other tools warn.
_COMMON_OPTIONS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
)


def check_json_files(folder: Path) -> None:
    """Look at tokenizer, processor and generation files before others read them.

    Raises:
        ValueError: a file is no JSON object, or holds a chat template that is no Jinja; one line with its path.
    """
    for name in (*_TOKENIZER_FILES, *_PROCESSOR_FILES, "generation_config.json"):
        if name.endswith(".json"):
            found = _read(folder / name).get("chat_template") or []
            named = [{"template": found}] if isinstance(found, str) else found
            _check_templates(folder / name, [entry.get("template") for entry in named if isinstance(entry, dict)])
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if path.is_file():
            try:
                _check_templates(path, [path.read_text(encoding="utf-8")])
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: damaged, this is no text ({error})") from error


def _check_templates(path: Path, sources: list[Any]) -> None:
    for source in sources:
        try:
            check_template(source)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def load_processor(folder: Path, config: TriModeConfig, layout: str) -> Any:
    """The folder's TriModeProcessor, or one built around its tokenizer; None where there is no tokenizer.

    A Ministral-3 folder keeps its own image layout and resize rule (PixtralProcessor's), a released NLD folder gets the
    released ones, a language model the tokens that its config names.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json")):
        return None
    from .processor import TriModeImageProcessor, TriModeProcessor

    if _has_own_processor(folder):
        return TriModeProcessor.from_pretrained(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    names: dict[str, Any] = {
        f"{part}_token": _token(tokenizer, getattr(config, f"{part}_token_id"))
        for part in ("image", "image_start", "image_break", "image_end")
    }
    if config.vision_config is None:
        names = {"image_token": ""}  # no images, even where the tokenizer knows image tokens
    elif names["image_token"] is None:
        names = {}
    settings = _image_settings(folder) if layout == "mistral3" else {}
    if config.vision_config is not None:
        settings |= {"patch_size": config.vision_config.patch_size, "spatial_merge_size": config.spatial_merge_size}
        if layout == "mistral3":
            settings.setdefault("size", {"longest_edge": config.vision_config.image_size})
    return TriModeProcessor(
        TriModeImageProcessor(**settings), tokenizer, **names, mask_token=_token(tokenizer, config.mask_token_id)
    )


def load_generation_config(folder: Path) -> TriModeGenerationConfig | None:
    """The folder's generation settings, if it has any."""
    settings = _read(folder / "generation_config.json")
    return TriModeGenerationConfig.from_settings(settings) if settings else None


def save_companions(folder: Path, target: Path, config: TriModeConfig, layout: str, to: str) -> None:
    """Write tokenizer, processor, generation settings and licence of a source folder into a converted one."""
    ours = to in ("trimode", "nld")
    keeps_processor = ours and _has_own_processor(folder)
    names = [*_TOKENIZER_FILES, *(_PROCESSOR_FILES if keeps_processor else ())]
    for path in [folder / name for name in names] + [p for pattern in _LICENCE_PATTERNS for p in folder.glob(pattern)]:
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    settings = _read(folder / "generation_config.json")
    if not ours:
        settings = {k: v for k, v in settings.items() if k in _COMMON_OPTIONS}
    if settings:
        (target / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    processor = None if keeps_processor else load_processor(folder, config, layout)
    if processor is None:
        return
    if ours:
        processor.save_pretrained(target)
    elif config.vision_config is not None:
        _save_pixtral_processor(processor, target)


def _save_pixtral_processor(processor: Any, target: Path) -> None:
    """transformers' processor for Ministral-3, where it can say the same image layout; else nothing is written.

    It knows no start token: where the layout has one, the chat template is made to write it before every image.
    """
    layout = processor.layout
    if layout is None or layout.row_break is None or layout.end is None or layout.break_after_last:
        return
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = processor.image_processor
    image_processor = PixtralImageProcessor(
        size=dict(images.size),
        patch_size={"height": images.patch_size, "width": images.patch_size},
        image_mean=images.image_mean,
        image_std=images.image_std,
    )
    theirs = PixtralProcessor(
        image_processor,
        processor.tokenizer,
        patch_size=images.patch_size,
        spatial_merge_size=images.spatial_merge_size,
        chat_template=_with_start_token(processor),
        image_token=processor.image_token,
        image_break_token=processor.image_break_token,
        image_end_token=processor.image_end_token,
    )
    if layout.start is None or _agree(processor, theirs):
        theirs.save_pretrained(target)


def _with_start_token(processor: Any) -> Any:
    """The chat template, with the start token before each image token that its text holds."""
    template, start, image = processor.chat_template, processor.image_start_token, processor.image_token
    if not start or not isinstance(template, str):
        return template
    return template.replace(start + image, image).replace(image, start + image)


def _agree(ours: Any, theirs: Any) -> bool:
    """Whether two processors make the same ids of a chat with two pictures."""
    if ours.chat_template is None:
        return False
    from PIL import Image

    cell = ours.image_processor.cell
    parts = [{"type": "image", "image": Image.new("RGB", (columns * cell, 2 * cell))} for columns in (3, 1)]
    chat = [{"role": "user", "content": [parts[0], {"type": "text", "text": "What is it?"}, parts[1]]}]
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    mine, other = (p.apply_chat_template(chat, **options, return_tensors="pt")["input_ids"] for p in (ours, theirs))
    return mine.tolist() == other.tolist()


def _has_own_processor(folder: Path) -> bool:
    return _read(folder / "processor_config.json").get("processor_class") == "TriModeProcessor"


def _image_settings(folder: Path) -> dict[str, Any]:
    """Size cap and normalisation of a PixtralProcessor, from the file of either transformers generation."""
    nested = _read(folder / "processor_config.json").get("image_processor") or {}
    stored = {**_read(folder / "preprocessor_config.json"), **nested}
    settings = {name: stored[name] for name in ("image_mean", "image_std", "rescale_factor") if stored.get(name)}
    if "longest_edge" in (stored.get("size") or {}):
        settings["size"] = {"longest_edge": stored["size"]["longest_edge"]}
    return settings | {"resize_rule": "pixtral"}


def _token(tokenizer: Any, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
