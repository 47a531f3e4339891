"""`recipe: learned_sampler`: trajectories of a frozen model, and the network that learns from them when to commit.

Both parts resume: trajectories shard by shard; the fit, which takes minutes, starts anew from them.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import trimode_vlm
from trimode_vlm.learned_sampler import (
    SAMPLER_FOLDER,
    WEIGHTS,
    LearnedSampler,
    SamplerConfig,
    SamplerNetwork,
    fit_pca,
    project,
)
from trimode_vlm.training import distributed
from trimode_vlm.training.data import SLOTS_PER_STEP, Source, StreamSource
from trimode_vlm.training.datasets import DataSettings, data_settings
from trimode_vlm.training.draft_lora import check_place, model_folder
from trimode_vlm.training.learned_sampler_fit import FitSettings, fit
from trimode_vlm.training.learned_sampler_trajectories import Collection, collect, read_shards
from trimode_vlm.training.nano_data import NanoMaker
from trimode_vlm.training.samples import open_source
from trimode_vlm.training.settings import check_range
from trimode_vlm.training.tasks import TASKS


@dataclass(frozen=True, kw_only=True)
class LearnedSamplerSettings(FitSettings, SamplerConfig):
    """Settings of the learned sampler's training; the network's and the fit's are those of their own classes.

    data: conversations whose answers are walked; tasks: weights of nano's own tasks, made on the fly, in place of data.
    samples: how many of them (at most one epoch of the data). shard_samples: of one file of trajectories.
    states_per_block: states kept of a walk through a block. batch_blocks: walked together, each with its own copy of
    the keys before it. trajectories: their folder, which runs of other networks may share; None: out/trajectories.
    install: also put the sampler into the model's own folder, where load finds it (a local folder; the shipped nano
    stays as it is).
    """

    recipe: str = "learned_sampler"
    model: str = "nano"
    mask_token_id: int | None = None
    out: str = "runs/learned-sampler"
    data: tuple[DataSettings, ...] = ()
    eval_data: tuple[DataSettings, ...] = ()
    tasks: dict[str, float] = field(default_factory=dict)
    max_length: int = 4096
    on_bad_sample: str = "raise"
    samples: int = 10_000
    shard_samples: int = 50
    states_per_block: int = 8
    batch_blocks: int = 16
    trajectories: str | None = None
    install: bool = True
    seed: int = 0
    precision: str = "fp32"
    threads: int = 1
    workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "data", data_settings(self.data) if self.data else ())
        if bool(self.tasks) == bool(self.data):
            raise ValueError("give data (files, folders, hub ids) or tasks (nano's own): one of the two")
        if self.eval_data:
            raise ValueError("eval_data: recipe learned_sampler holds out a share of the prompts, eval_fraction")
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"tasks must be among {', '.join(TASKS)}, got {unknown[0]!r}")
        if (
            not all(0 <= weight < math.inf for weight in self.tasks.values())
            or self.tasks
            and not any(self.tasks.values())
        ):
            raise ValueError(f"tasks must have weights of at least 0, one of them above, got {self.tasks!r}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16, got {self.precision!r}")
        if self.block_length < 2:
            raise ValueError(f"block_length must be at least 2, got {self.block_length}")
        check_range(self, 1, math.inf, "samples", "states_per_block", "epochs", "batch_states")
        check_range(self, 1, SLOTS_PER_STEP, "shard_samples")
        check_range(self, 1, math.inf, "batch_blocks", "patience", "threads")
        check_range(self, 2, math.inf, "max_length")
        check_range(self, 0, math.inf, "lr", without_low=True)
        check_range(self, 0, math.inf, "weight_decay", "workers")
        check_range(self, 0, 1, "warmup", "eval_fraction", without_low=False)
        check_range(self, 0, 2**63 - 1, "seed")

    @property
    def network(self) -> SamplerConfig:
        return SamplerConfig(**{f.name: getattr(self, f.name) for f in fields(SamplerConfig)})

    @property
    def fit_settings(self) -> FitSettings:
        return FitSettings(**{f.name: getattr(self, f.name) for f in fields(FitSettings)})


def run(settings: LearnedSamplerSettings) -> Path:
    """Collect what is missing, fit, and write; returns the sampler's folder `out`/learned_sampler."""
    torch.set_num_threads(settings.threads)
    if distributed.rank() == 0:
        check_place(settings, SAMPLER_FOLDER, WEIGHTS)
    device = torch.device("cpu" if distributed.use_cpu() else f"cuda:{torch.cuda.current_device()}")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings.precision]
    model, processor = trimode_vlm.load(
        settings.model, dtype=dtype, device=device, mask_token_id=settings.mask_token_id
    )
    if processor is None:
        raise ValueError(f"{settings.model} holds no tokenizer, which reading data needs")
    model.requires_grad_(False)
    folder = Path(settings.trajectories or Path(settings.out) / "trajectories")
    made_by = collection_key(model, settings)
    collect_shards(model, samples(settings, processor), folder, settings, made_by)
    distributed.wait()
    target = Path(settings.out) / SAMPLER_FOLDER
    if distributed.rank() == 0:
        fit_sampler(model, folder, target, settings, made_by)
        if beside := model_folder(settings):
            shutil.copytree(target, beside / SAMPLER_FOLDER, dirs_exist_ok=True)
    distributed.wait()
    return target


def samples(settings: LearnedSamplerSettings, processor: Any) -> Source:
    """Conversations, `shard_samples` to a step: the user's data, or nano's tasks from training seeds."""
    if not settings.tasks:
        return open_source(
            settings.data,
            processor,
            batch_samples=settings.shard_samples,
            seed=settings.seed,
            max_length=settings.max_length,
            on_bad_sample=settings.on_bad_sample,
        )
    maker = NanoMaker(
        processor=processor, stage="sampler", seed=settings.seed, tasks=settings.tasks, qa_share=0.0, qa_turns=1,
        grow_until=0,
    )  # fmt: skip
    return StreamSource(maker, lambda sample: 1, settings.shard_samples)


def collection_key(model: Any, settings: LearnedSamplerSettings) -> str:
    """What trajectories depend on, as a text: the model's weights, the data, and how it is walked."""
    rows = model.diffusion_head.weight[:: max(1, model.config.vocab_size // 64)]
    weights = hashlib.blake2b(str(rows.double().tolist()).encode(), digest_size=8).hexdigest()
    names = (
        "model",
        "mask_token_id",
        "tasks",
        "max_length",
        "shard_samples",
        "states_per_block",
        "seed",
        "block_length",
    )
    chosen = {name: getattr(settings, name) for name in names}
    data = [asdict(one) for one in settings.data]
    return json.dumps(chosen | {"data": data, "weights": weights, "precision": settings.precision}, sort_keys=True)


def collect_shards(model: Any, source: Source, folder: Path, settings: LearnedSamplerSettings, made_by: str) -> None:
    """Every rank makes its share of the shards that are missing."""
    ends = model.generation_config.eos_token_id
    ends = model.config.eos_token_id if ends is None else ends
    how = Collection(
        block_length=settings.block_length,
        states_per_block=settings.states_per_block,
        batch_blocks=settings.batch_blocks,
        seed=settings.seed,
        end_token_ids=[] if ends is None else [ends] if isinstance(ends, int) else list(ends),
    )
    available = getattr(source, "num_samples", None)
    wanted = settings.samples if available is None else min(settings.samples, available)
    num_shards = math.ceil(wanted / settings.shard_samples)
    numbers = range(distributed.rank(), num_shards, distributed.num_ranks())
    shards = collect(model, source, folder, numbers, how, made_by, available)
    for _ in tqdm(shards, "trajectories", len(numbers), unit="shard", disable=distributed.rank() > 0):
        pass


def fit_sampler(model: Any, folder: Path, target: Path, settings: LearnedSamplerSettings, made_by: str) -> None:
    """Train the network on all shards and write it; the log is out/log.jsonl, one line per epoch."""
    states = read_shards(folder, made_by)
    embeddings = model.encoder.embed_tokens.weight
    mean, components = fit_pca(embeddings, settings.pca_width)
    table = project(embeddings, mean, components)
    size = sum(p.numel() for p in SamplerNetwork(settings.network).parameters())
    num, prompts = len(states["start"]), len(states["prompt"].unique())
    print(f"learned sampler: {size:,} parameters, {num:,} states of {prompts:,} prompts", flush=True)
    with (Path(settings.out) / "log.jsonl").open("w", encoding="utf-8") as log:

        def report(entry: dict[str, Any]) -> None:
            log.write(json.dumps(entry) + "\n")
            log.flush()
            print(f"epoch {entry['epoch']}: loss {entry['loss']:.4f}, held out {entry['eval_loss']:.4f}", flush=True)

        network, facts = fit(settings.network, states, table, settings.fit_settings, settings.seed, report)
    names = ("model", "data", "tasks", "samples", "states_per_block", "lr", "weight_decay", "batch_states", "seed")
    trained = {name: value for name in names if (value := getattr(settings, name))}
    if settings.data:
        trained["data"] = [one.path for one in settings.data]
    LearnedSampler(network.cpu(), mean.cpu(), components.cpu()).save(target, trained=trained, fit=facts)
