"""The shapes of a fine-tuning run's steps, for its estimate: from the settings and from samples of its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trimode_vlm.training.collate import lay_out
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.finetune import FinetuneSettings, sources
from trimode_vlm.training.presets import deepspeed_config, zero_stage
from trimode_vlm.training.step_shapes import EstimateInputs
from trimode_vlm.training.steps import noise_token_ids


def estimate_inputs(settings: FinetuneSettings, config: Any, processor: Any, gpus: int) -> EstimateInputs:
    """What `--estimate` needs to know, with the sizes of the samples of one step as the sizes of all.

    Rows are as long as the longest of these samples, since padding and packing fill them up; images and answers take
    their mean share.
    """
    samples = sources(settings, processor)[0].draw(0, 0, 1)
    lengths = [len(sample.input_ids) for sample in samples]
    images = [sum(token == config.image_token_id for token in sample.input_ids) for sample in samples]
    longest, total = max(lengths), sum(lengths)
    vision_tokens = round(longest * sum(images) / total)
    deepspeed = deepspeed_config(settings.deepspeed)
    zero = (deepspeed or {}).get("zero_optimization", {})
    offloads = [zero.get(name, {}).get("device", "none") != "none" for name in ("offload_param", "offload_optimizer")]
    inputs = EstimateInputs(
        sequence_tokens=longest,
        vision_tokens=vision_tokens,
        images_per_row=max(1, round(sum(len(sample.images) for sample in samples) / len(samples))),
        response_share=min(sum(sum(sample.loss_mask) for sample in samples) / total, 1 - vision_tokens / longest),
        padding_tokens=round(longest * sum(_padding_tokens(settings, config, samples)) / total),
        noisy_stream=settings.noisy_stream if settings.alpha else "none",
        complementary_masks=settings.complementary_masks,
        block_length=settings.block_length if isinstance(settings.block_length, int) else max(settings.block_length),
        chunk_tokens=settings.chunk_tokens,
        precision=settings.precision,
        zero_stage=zero_stage(deepspeed) if deepspeed else None,
        offload="all" if offloads[0] else "optimizer" if offloads[1] else "none",
        gradient_checkpointing=settings.gradient_checkpointing,
        train=settings.train,
        lora=settings.lora,
    )
    per_gpu = math.ceil(settings.batch_samples / gpus)
    rows = settings.micro_batch_samples or per_gpu
    if settings.micro_batch_tokens:
        rows = max(1, settings.micro_batch_tokens // inputs.row_tokens)
    rows = min(rows, per_gpu)
    return replace(inputs, rows=rows, micro_batches=math.ceil(per_gpu / rows))


def _padding_tokens(settings: FinetuneSettings, config: Any, samples: Sequence[Encoded]) -> Iterator[int]:
    """What fills the last blocks of each sample's answers in its noisy half."""
    if not settings.alpha or settings.response_padding == "none":
        return
    # Where block lengths grow, the last ones count.
    noise = settings.noise_settings(settings.steps - 1, **noise_token_ids(config, settings))
    for sample in samples:
        yield int((lay_out(sample, replace(noise, complementary_masks=False)).source == -1).sum())
