"""The learned sampler of diffusion: for each masked position, will its likeliest token be the final one there?

Final is what decoding the block serially, one most confident token per step, would put there. A small network reads
what the model's logits say of the whole block; it runs no forward of the model and its own time is counted in seconds.

On disk it is a folder, `learned_sampler/` beside a model's weights: the network with a PCA of the model's embeddings in
safetensors, its shape in JSON. Source: Nemotron-Labs-Diffusion (arXiv 2607.05722), appendix A.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .json_files import read_json
from .sampling import entropy
from .weight_files import PICKLE_PATTERNS, is_match, scan_file

if TYPE_CHECKING:
    from .model import TriModeVLM

SAMPLER_FOLDER = "learned_sampler"
WEIGHTS = "sampler.safetensors"
CONFIG = "sampler.json"
ARCHES = ("attention", "mlp")
TOP = 3
NUM_SCALARS = 4
"""Top-1 probability, top-1/top-2 margin, top-3 mass, entropy; committed positions read 1, 1, 1, 0."""
_STATE = 2  # whether the position is masked, and the share of the block that is


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """Shape of the network; the defaults are the released size, 144 features and 4.8M parameters.

    arch: "attention", both ways within the block, or "mlp", the control that sees each position alone and has as many
    weights (its feed-forward layers are wider). block_length: the longest block, whose positions the network knows.
    dropout: while it is trained.
    """

    arch: str = "attention"
    block_length: int = 32
    pca_width: int = 46
    num_layers: int = 4
    width: int = 384
    ffn_width: int = 768
    num_heads: int = 6
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.arch not in ARCHES:
            raise ValueError(f"arch must be one of {', '.join(ARCHES)}, got {self.arch!r}")
        for name in ("block_length", "pca_width", "num_layers", "width", "ffn_width", "num_heads"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout!r}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be a multiple of num_heads {self.num_heads}")

    @property
    def num_features(self) -> int:
        """Per position: 3 embeddings, the scalars, and the state of the block."""
        return TOP * self.pca_width + NUM_SCALARS + _STATE


PRESETS = {
    "released": SamplerConfig(),
    "nano": SamplerConfig(pca_width=16, num_layers=2, width=96, ffn_width=192, num_heads=4),
}


# Features.


def look(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] logits -> (ids of the 3 likeliest tokens [..., 3], the scalars [..., 4])."""
    probs, ids = logits.float().softmax(-1).topk(TOP, -1)
    scalars = torch.stack((probs[..., 0], probs[..., 0] - probs[..., 1], probs.sum(-1), entropy(logits)), -1)
    return ids, scalars


def features(table: Tensor, top_ids: Tensor, scalars: Tensor, canvas: Tensor, masked: Tensor) -> Tensor:
    """What the network reads [..., T, F]: embeddings of the top 3, scalars, is masked, share of the block masked.

    A committed position is its token, for certain: that embedding and no second and third, scalars 1, 1, 1, 0.

    Args:
        table: [V, pca_width], see `project`. top_ids [..., T, 3], scalars [..., T, 4]: as `look` gives them.
        canvas, masked: [..., T].
    """
    is_masked = masked[..., None]
    ids = torch.where(is_masked, top_ids, canvas[..., None])
    shown = is_masked | (torch.arange(TOP, device=ids.device) == 0)
    embeds = (table[ids] * shown[..., None]).flatten(-2)
    scalars = torch.where(is_masked, scalars, scalars.new_tensor([1.0, 1.0, 1.0, 0.0]))
    is_masked = is_masked.to(scalars.dtype)
    share = is_masked.mean(-2, keepdim=True).expand_as(is_masked)
    return torch.cat((embeds, scalars, is_masked, share), -1)


def fit_pca(embeddings: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Embeddings [V, D] -> (mean [D], components [width, D]), the largest first, scaled to unit variance altogether.

    Raises:
        ValueError: there are fewer components.
    """
    num, dim = embeddings.shape
    if width > min(num - 1, dim):
        raise ValueError(f"pca_width {width} is more than embeddings [{num}, {dim}] have components")
    x = embeddings.detach().double()
    mean = x.mean(0)
    x = x - mean
    variances, vectors = torch.linalg.eigh(x.T @ x / num)
    components = vectors.flip(-1)[:, :width].T
    # An eigenvector's sign is free: its largest entry is positive, so that one matrix has one PCA.
    sign = components.gather(-1, components.abs().argmax(-1, keepdim=True)).sign()
    scale = variances.flip(0)[:width].mean().clamp(min=1e-30).rsqrt()
    return mean.float(), (components * sign * scale).float()


def project(embeddings: Tensor, mean: Tensor, components: Tensor) -> Tensor:
    """Embeddings [V, D] -> the table [V, pca_width] that features are read from."""
    return (embeddings.detach().float() - mean.to(embeddings.device)) @ components.to(embeddings.device).T


# The network.


class SamplerNetwork(nn.Module):
    """Features [B, T, F] -> logits [B, T] of "the likeliest token is the final one"; T up to config.block_length.

    Layers correct what the model's own confidence says: its log-odds are added at the end, so that an untrained network
    is the confidence rule, and a little data is not worse than none.
    """

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__()
        self.config, D = config, config.width
        self.embed = nn.Linear(config.num_features, D)
        self.position = nn.Parameter(0.02 * torch.randn(config.block_length, D))
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.trust = nn.Parameter(torch.ones(()))

    def forward(self, features_BTF: Tensor) -> Tensor:
        confidence = features_BTF[..., TOP * self.config.pca_width]
        x = self.embed(features_BTF) + self.position[: features_BTF.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).squeeze(-1) + self.trust * confidence.logit(eps=1e-6)


class MLPLayer(nn.Module):
    """A residual feed-forward layer: every position by itself."""

    def __init__(self, width: int, ffn_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, ffn_width), nn.Linear(ffn_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x))))))


def _layer(config: SamplerConfig) -> nn.Module:
    D = config.width
    if config.arch == "mlp":
        # As many weights as attention (4 D^2) and its feed-forward layer have together.
        return MLPLayer(D, config.ffn_width + 2 * D, config.dropout)
    return nn.TransformerEncoderLayer(
        D, config.num_heads, config.ffn_width, config.dropout, activation="gelu", batch_first=True, norm_first=True
    )


# With a model.


class LearnedSampler:
    """A network with the PCA of a model's embeddings. Assign it to a model's `learned_sampler`.

    Not a module: a model that holds it is saved, counted and trained without it.
    """

    def __init__(self, network: SamplerNetwork, mean: Tensor, components: Tensor) -> None:
        self.config, self.network = network.config, network.eval().requires_grad_(False)
        self.mean, self.components = mean, components
        self._placed: dict[torch.device, tuple[SamplerNetwork, Tensor]] = {}

    def probabilities(self, model: TriModeVLM, logits_BTV: Tensor, canvas_BT: Tensor, masked_BT: Tensor) -> Tensor:
        """[B, T]: how likely each position's top-1 is final there; what it says of committed positions has no meaning.

        Args:
            logits_BTV: of a bidirectional forward of the canvas, by `model`.
        """
        network, table = self._place(model)
        ids, scalars = look(logits_BTV)
        return network(features(table, ids, scalars, canvas_BT, masked_BT)).sigmoid()

    def _place(self, model: TriModeVLM) -> tuple[SamplerNetwork, Tensor]:
        """The network and the table on the model's device, put there once."""
        if model.device not in self._placed:
            with torch.inference_mode(False):  # they outlive the request that asks first
                table = project(model.encoder.embed_tokens.weight, self.mean, self.components)
                self._placed[model.device] = copy.deepcopy(self.network).to(model.device), table
        return self._placed[model.device]

    def save(self, folder: Path, **notes: Any) -> None:
        """Write sampler.safetensors and sampler.json; `notes` go into the latter, for readers."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        tensors |= {"pca.mean": self.mean, "pca.components": self.components}
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / WEIGHTS)
        content = json.dumps({"network": asdict(self.config), **notes}, indent=2)
        (folder / CONFIG).write_text(content + "\n", encoding="utf-8")


def check_sampler(model: TriModeVLM, block_length: int) -> None:
    """Raise ValueError unless the model has a sampler that knows all positions of such a block; it may be shorter."""
    if model.learned_sampler is None:
        raise ValueError(
            "commit_rule='learned' needs a learned sampler: load(..., sampler=FOLDER), or train one "
            "(trimode-vlm train --config learned-sampler)"
        )
    longest = model.learned_sampler.config.block_length
    if block_length > longest:
        raise ValueError(
            f"the learned sampler was trained on blocks of {longest} tokens, got block_length {block_length}: "
            "give at most that"
        )


def find_sampler(sampler: str | Path, model_folder: Path) -> Path | None:
    """The sampler's folder. "auto": `learned_sampler/` beside the weights, None where there is none.

    Raises:
        ValueError: a folder was named and is no sampler.
    """
    if sampler == "auto":
        beside = model_folder / SAMPLER_FOLDER
        return beside if (beside / CONFIG).is_file() else None
    folder = Path(sampler).expanduser()
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: no {CONFIG}, so this is not the folder of a learned sampler")
    return folder


def read_sampler(folder: Path, model: TriModeVLM) -> LearnedSampler:
    """Read what `save` wrote.

    Raises:
        ValueError: a damaged file, or a sampler of other shapes than its config or this model has; all are listed.
    """
    content = read_json(folder / CONFIG).get("network")
    known = [f.name for f in fields(SamplerConfig)]
    if not isinstance(content, dict) or set(content) != set(known):
        raise ValueError(f"{folder / CONFIG}: network must hold {', '.join(known)}")
    try:
        config = SamplerConfig(**content)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    path = folder / WEIGHTS
    if not path.is_file():
        hint = "; pickled weights are never opened" if is_match(folder, PICKLE_PATTERNS) else ""
        raise ValueError(f"{folder}: no {WEIGHTS}{hint}")
    network, dim = SamplerNetwork(config), model.config.hidden_size
    expected = {f"network.{name}": tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    expected |= {"pca.mean": (dim,), "pca.components": (config.pca_width, dim)}
    found = {tensor.name: tensor.shape for tensor in scan_file(path)}
    if found != expected:
        names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        listing = "\n  ".join(f"{name}: {found.get(name)}, expected {expected.get(name)}" for name in names)
        raise ValueError(f"{folder}: the sampler does not fit the model:\n  {listing}")
    tensors = load_file(path)
    network.load_state_dict({n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")})
    return LearnedSampler(network, tensors["pca.mean"], tensors["pca.components"])
