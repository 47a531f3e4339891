"""Weights of a source folder under our names, checked against a model and streamed into it."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .config import TriModeConfig
from .key_maps import EMBEDDING, HEAD, SCALE_SUFFIX, is_weight, to_ours
from .model import TriModeTextLM, TriModeVLM
from .source_configs import Source
from .weight_files import FP8_DTYPES, StoredTensor, dequantize, read, scan

_LISTED = 50


class SourceWeights:
    """A folder's tensors under our names, read one at a time, FP8 multiplied out; knows whether the head is tied."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self.source = source
        self.stored: dict[str, StoredTensor] = {}
        self._scales: dict[str, StoredTensor] = {}
        for name, tensor in scan(folder).items():
            if not is_weight(name):
                continue
            ours = to_ours(name, source.layout)
            target = self._scales if ours.endswith(SCALE_SUFFIX) else self.stored
            ours = ours.removesuffix(SCALE_SUFFIX)
            if ours in target:
                raise ValueError(f"{folder}: {name} and {target[ours].name} are both {ours}")
            target[ours] = tensor
        self.is_tied = self._find_tied()
        source.config.tie_word_embeddings = self.is_tied

    @property
    def config(self) -> TriModeConfig:
        return self.source.config

    @property
    def dtype(self) -> torch.dtype:
        """The file's own: the embedding's, and for FP8 what the config declares, else bfloat16."""
        embedding = self.stored.get(EMBEDDING)
        has_fp8 = any(tensor.dtype in FP8_DTYPES for tensor in self.stored.values())
        if embedding is not None and not has_fp8:
            return embedding.dtype
        declared = self.source.dtype
        return declared if declared is not None and declared not in FP8_DTYPES else torch.bfloat16

    def read(self, name: str, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
        """One weight under our name; integers (counters of a timm tower) keep their type."""
        if name not in self._scales:
            return read(self.stored[name], device, dtype)
        weight, scale = read(self.stored[name], device), read(self._scales[name], device)
        try:
            return dequantize(weight, scale, self.source.fp8_block).to(dtype)
        except ValueError as error:
            raise ValueError(f"{self.stored[name].name}: {error}") from error

    def problems(self, expected: Mapping[str, Tensor]) -> tuple[list[str], list[str], list[str]]:
        """Our names that are missing, unexpected and mis-shaped, against a model's state dict."""
        missing = [name for name in expected if name not in self.stored]
        unexpected = [name for name in self.stored if name not in expected]
        misshaped = [n for n, t in expected.items() if n in self.stored and self.stored[n].shape != tuple(t.shape)]
        return missing, unexpected, misshaped

    def check_scales(self) -> None:
        """Every FP8 weight needs its scale, and every scale its weight."""
        fp8 = {name for name, tensor in self.stored.items() if tensor.dtype in FP8_DTYPES}
        if lonely := sorted(fp8 ^ set(self._scales)):
            what = [f"{n}: " + ("FP8 without its scale" if n in fp8 else "a scale without FP8 weight") for n in lonely]
            raise ValueError(f"{self.folder}: FP8 weights and scales do not pair up:\n  " + _listing(what))

    def _find_tied(self) -> bool:
        """Tied where no head is stored and the config allows it, or a stored head is said to be, and is, the embedding.

        Without a statement only Ministral-3 counts as tied by default; elsewhere an absent head is a missing weight.
        """
        declared = self.source.declared_tied
        head, embedding = self.stored.get(HEAD), self.stored.get(EMBEDDING)
        if head is None:
            return bool(declared) or (declared is None and self.source.layout == "mistral3")
        if not declared or embedding is None:
            return False
        if head.shape == embedding.shape and torch.equal(read(head), read(embedding)):
            return True
        warnings.warn(
            f"{self.folder}: tie_word_embeddings is true, but the stored head differs from the embedding: kept apart",
            stacklevel=4,
        )
        return False


def build(
    weights: SourceWeights,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> TriModeVLM:
    """Make the model without memory, check every name and shape, then put the weights in one by one."""
    model = skeleton(weights.config)
    expected = expected_weights(model, weights.is_tied)
    absent = check(weights, expected, allow_missing, allow_unexpected)
    _initialise(model, absent, dtype, device)
    for name in expected:
        if name not in absent:
            _assign(model, name, weights.read(name, dtype, device))
    if weights.is_tied:
        model.diffusion_head.weight = model.encoder.embed_tokens.weight
    model.config.dtype = dtype
    return model.to(device)  # type: ignore[arg-type]


def skeleton(config: TriModeConfig) -> TriModeVLM:
    """The model of a config on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return (TriModeTextLM if config.vision_config is None else TriModeVLM)(config)


def expected_weights(model: nn.Module, is_tied: bool) -> dict[str, Tensor]:
    """The model's own state dict; a tied head is no weight of its own."""
    return {name: tensor for name, tensor in model.state_dict().items() if not (is_tied and name == HEAD)}


def check(
    weights: SourceWeights,
    expected: Mapping[str, Tensor],
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
) -> set[str]:
    """Compare a file with a model; returns the allowed names that must be initialised.

    Raises:
        ValueError: one error that lists every missing, unexpected and mis-shaped weight.
    """
    weights.check_scales()
    stored = weights.stored
    missing, unexpected, misshaped = weights.problems(expected)
    absent = {name for name in (*missing, *misshaped) if _matches(allow_missing, name)}
    listings = {
        "missing": [f"{n} {list(expected[n].shape)}" for n in missing if n not in absent],
        "unexpected": [
            _unexpected(n, stored[n]) for n in unexpected if not _matches(allow_unexpected, n, stored[n].name)
        ],
        "mis-shaped": [
            f"{n}: file {list(stored[n].shape)}, model {list(expected[n].shape)}" for n in misshaped if n not in absent
        ],
    }
    if any(listings.values()):
        parts = [f"{kind} ({len(names)}):\n  {_listing(names)}" for kind, names in listings.items() if names]
        raise ValueError(
            f"{weights.folder}: the weights do not fit the config (allow_missing= and allow_unexpected= take name "
            "patterns):\n" + "\n".join(parts)
        )
    return absent


def _initialise(model: nn.Module, absent: Iterable[str], dtype: torch.dtype, device: str | torch.device) -> None:
    """Give modules with an allowed missing weight memory and the model's own initialisation."""
    for parent in {name.rpartition(".")[0] for name in absent}:
        module = model.get_submodule(parent)
        if any(tensor.is_meta for tensor in (*module.parameters(False), *module.buffers(False))):
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)  # type: ignore[operator]
        module.to(dtype)


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    is_parameter = leaf in module._parameters
    setattr(module, leaf, nn.Parameter(tensor) if is_parameter else tensor)


def _matches(patterns: str | Sequence[str], *names: str) -> bool:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _listing(lines: Sequence[str]) -> str:
    more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n  ".join([*lines[:_LISTED], *more])


def _unexpected(name: str, tensor: StoredTensor) -> str:
    origin = f" (in the file: {tensor.name})" if tensor.name != name else ""
    return f"{name} {list(tensor.shape)}{origin}"
