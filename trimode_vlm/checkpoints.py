"""Load a model of any known layout, and convert between layouts.

Known: our own folders (that is, the released NLD layout, text and VLM), Ministral-3, Llama-like language models as
starting points, and fine-tuned LoRA folders on top of any of them, which are merged. Weights are streamed: while
loading, memory holds the model and one tensor beside it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .draft_adapter import ADAPTER_FOLDER, find_adapter, read_adapter
from .key_maps import EMBEDDING, HEAD, from_ours
from .learned_sampler import CONFIG, SAMPLER_FOLDER, find_sampler, read_sampler
from .lora_weights import MergedWeights, base_of, is_based_on, is_lora_folder
from .model import TriModeVLM
from .processor_files import check_json_files, load_generation_config, load_processor, save_companions
from .quantize import check_quantize, quantize_model
from .source_configs import read_source
from .source_weights import SourceWeights, build, check, expected_weights, skeleton
from .target_configs import target_config, target_name, weight_layout
from .weight_files import ShardWriter, parse_bytes

NANO = "nano"
# Said where somebody begins a conversation with it.
NANO_HINT = (
    "nano reads boards, receipts and charts, and answers one question at a time: clear the chat before the next."
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*"]
# The same weights once more, in their makers' own layouts.
_HUB_DUPLICATES = ["consolidated*", "original/*"]


def load(
    path_or_id: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    adapter: str | Path | None = None,
    sampler: str | Path | None = "auto",
    quantize: str | None = None,
    mask_token_id: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> tuple[TriModeVLM, Any]:
    """Load a model, in evaluation mode, and its processor (None where the folder holds no tokenizer).

    Args:
        path_or_id: "nano" (shipped with the package), a folder, or a hub id. A folder with a fine-tuned LoRA
            (`adapter_config.json`) is merged into the base model that it names.
        dtype: of the weights; None: as in the file ("nano": float32). FP8 files become bfloat16.
        device: where the weights go; None: the CPU.
        adapter: a PEFT folder with the draft adapter (a fine-tuned one goes into `path_or_id`), or "auto" for
            `linear_spec_lora/` beside the weights. It is checked and attached as `model.draft_adapter` (else None),
            which drafts of self-speculation use.
        sampler: a folder with a learned sampler, "auto" for `learned_sampler/` beside the weights, or None. It is
            checked and attached as `model.learned_sampler` (else None), which diffusion uses with
            commit_rule="learned".
        quantize: keeps the linear layers of the text decoder in fewer bits: "int8" or "int4" (torchao), or "4bit"
            (bitsandbytes, on a CUDA device). Such a model answers, and cannot be saved.
        mask_token_id: the mask of a model that has none; None: a spare special token (see spare_tokens).
        overrides: config fields to set, for example `vision_config` to give a language model a new tower.
        allow_missing: patterns of our weight names ("encoder.vision_tower.*") that may be missing or of another shape
            and are then initialised at random.
        allow_unexpected: patterns of names, ours or the file's, to leave out.

    Raises:
        ValueError: the folder cannot be found or held; weights that do not fit are listed with both shapes.
    """
    wanted = parse_dtype(dtype) if dtype is not None else None
    if quantize is not None:
        check_quantize(quantize, device, wanted)
    folder = resolve(path_or_id)
    weights = open_weights(folder, mask_token_id, overrides)
    if wanted is None and (str(path_or_id) == NANO or is_based_on(weights, resolve(NANO))):
        wanted = torch.float32
    model = build(weights, wanted or weights.dtype, device or "cpu", allow_missing, allow_unexpected)
    companions = companions_of(folder)
    model.generation_config = load_generation_config(companions) or model.generation_config
    if adapter is not None:
        found = find_adapter(adapter, folder)
        model.draft_adapter = read_adapter(found, model) if found else None
    if sampler is not None:
        found = find_sampler(sampler, folder)
        model.learned_sampler = read_sampler(found, model) if found else None
    if quantize is not None:
        quantize_model(model, quantize, device)
    return model.eval(), load_processor(companions, model.config, weights.source.layout)


def open_processor(path_or_id: str | Path, mask_token_id: int | None = None) -> tuple[Any, Any]:
    """The config and processor of what `load` takes, without its weights; of those only headers are read.

    Raises:
        ValueError: no such model, or it holds no tokenizer.
    """
    folder = resolve(path_or_id)
    weights = open_weights(folder, mask_token_id)
    processor = load_processor(companions_of(folder), weights.config, weights.source.layout)
    if processor is None:
        raise ValueError(f"{path_or_id} holds no tokenizer, so there is nothing to read data with")
    return weights.config, processor


def convert(
    source: str | Path,
    target_dir: str | Path,
    to: str = "trimode",
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    *,
    max_shard_size: int | str = "5GB",
    mask_token_id: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model that `load` reads in another layout, with its tokenizer and processor; weights stay bit for bit.

    Args:
        source: as `load` takes it.
        target_dir: the folder to make. It appears when it is complete; a failure leaves nothing behind.
        to: "trimode" (ours), "nld" (as released: own head even where the source ties it), "ministral3" (with images
            Mistral3ForConditionalGeneration, else a causal LM; "mistral3" means the same) or "llama".
        dtype: of the weights; None: as in the source, FP8 as bfloat16.
        overwrite: replace a model folder that is there.
        max_shard_size: bytes, or as transformers writes it ("5GB").

    Raises:
        ValueError: the source cannot be loaded, the target cannot hold it, or `target_dir` must not be replaced.
    """
    to = target_name(to)
    target = Path(target_dir).expanduser().absolute()
    _check_target(target, overwrite)
    folder = resolve(source)
    weights = open_weights(folder, mask_token_id, overrides)
    wanted = parse_dtype(dtype) if dtype is not None else weights.dtype
    config = target_config(weights.config, to, wanted)
    expected = expected_weights(skeleton(weights.config), weights.is_tied)
    check(weights, expected)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        layout = weight_layout(to, weights.config)
        writer = ShardWriter(made, parse_bytes(max_shard_size))
        for name in expected:
            writer.add(from_ours(name, layout), weights.read(name, wanted))
        if weights.is_tied and not config.tie_word_embeddings:
            writer.add(from_ours(HEAD, layout), weights.read(EMBEDDING, wanted))
        writer.close()
        config.save_pretrained(made)
        save_companions(companions_of(folder), made, weights.config, weights.source.layout, to)
        if layout == "trimode" and (folder / ADAPTER_FOLDER / "adapter_config.json").is_file():
            shutil.copytree(folder / ADAPTER_FOLDER, made / ADAPTER_FOLDER)
        if layout == "trimode" and (folder / SAMPLER_FOLDER / CONFIG).is_file():
            shutil.copytree(folder / SAMPLER_FOLDER, made / SAMPLER_FOLDER)
        if target.exists():
            target.rename(Path(scratch) / "replaced")
        made.rename(target)
    return target


def open_weights(
    folder: Path, mask_token_id: int | None = None, overrides: Mapping[str, Any] | None = None
) -> SourceWeights:
    """The weights and config of a model folder, or of a fine-tuned LoRA folder together with its base.

    Raises:
        ValueError: no model or adapter that can be read, or a base that cannot be found.
    """
    check_json_files(folder)
    if not is_lora_folder(folder):
        return SourceWeights(folder, read_source(folder, mask_token_id, overrides))
    base = open_weights(_base_folder(folder), mask_token_id, overrides)
    return MergedWeights(folder, base, mask_token_id, overrides)


def companions_of(folder: Path) -> Path:
    """The folder whose tokenizer and settings go with a model: its own, or its base's where an adapter brings none."""
    has_own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json"))
    return folder if has_own or not is_lora_folder(folder) else companions_of(_base_folder(folder))


def _base_folder(folder: Path) -> Path:
    try:
        return resolve(base_of(folder))
    except ValueError as error:
        raise ValueError(f"{folder / 'adapter_config.json'}: the base model cannot be found: {error}") from error


def resolve(path_or_id: str | Path) -> Path:
    """The local folder of a model: "nano", a folder, or a hub id, which is downloaded (no code, no pickles).

    Raises:
        ValueError: no such folder, and no hub model that can be reached.
    """
    if str(path_or_id) == NANO:
        return Path(__file__).resolve().parent / NANO
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{folder} is a file; give the folder that holds config.json")
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(path_or_id):
        raise ValueError(f"no folder {str(path_or_id)!r} (and a hub id has the form owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES))
    except Exception as error:
        # Whatever the client raises (offline, not found, gated, no route), the user needs the same one line.
        raise ValueError(
            f"no folder {path_or_id!r}, and the hub model of that name cannot be fetched ({type(error).__name__}); "
            "check the name and the connection, or download it first and give its folder"
        ) from error


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A floating dtype by torch's name ("bfloat16", "bf16", "torch.float32").

    Raises:
        ValueError: not a dtype that weights can have.
    """
    short = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "float": "float32"}
    names = ("float32", "bfloat16", "float16", "float64")
    name = str(dtype).removeprefix("torch.")
    name = short.get(name, name)
    if name not in names:
        raise ValueError(f"dtype {str(dtype)!r} is not one of {', '.join(names)}")
    return getattr(torch, name)


def _check_target(target: Path, overwrite: bool) -> None:
    """Write to an absent or empty folder, or with `overwrite` over a model: never over a home folder."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{target} exists; choose another folder or overwrite it")
    if not (target / "config.json").is_file():
        raise ValueError(f"{target} is not a model folder (no config.json), so it is not overwritten")
