"""`trimode-vlm bench train`: what a training step costs by noisy stream, and what structured attention saves.

The ceiling comes first: the work that the tokens of each stream are, so no step can be faster by more than its ratio.
Rows are random tokens around a random picture, three quarters of them vision tokens: time depends on lengths alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trimode_vlm.cli import UsageError
from trimode_vlm.eval.timing import interleaved

if TYPE_CHECKING:
    from torch import Tensor

    from trimode_vlm.patterns import Pattern
    from trimode_vlm.training.collate import Batch

DEFAULTS: dict[str, Any] = {"repeats": 5, "samples": 4}
QUICK: dict[str, Any] = {"repeats": 1, "samples": 2}
# By what the noisy half holds: every token (2 L), every token but vision (L_text + L), the response (L_resp + L).
STREAMS = {"symmetric": "all", "asymmetric": "text", "response": "response"}
RESPONSE_TOKENS = 64
PICTURE_TOKENS_PER_SIDE = 16
ATTENTION = {"batch": 2, "heads": 8, "kv_heads": 2, "head_dim": 64, "half_tokens": 2048, "block_length": 32}
# A product needs one pass forward and two backward, of two operations per weight and token; so does the tower's.
FLOPS_PER_WEIGHT = 6
Note = Callable[[str, str, dict[str, Any]], None]


def bench_train(args: argparse.Namespace, note: Note) -> None:
    """All comparisons of `bench train`, each handed to `note(name, title, values)` as it is measured."""
    import torch

    import trimode_vlm

    model, processor = trimode_vlm.load(args.model)
    if model.config.vision_config is None:
        raise UsageError(f"--model {args.model}: bench train needs a model that takes images")
    model.train()
    torch.manual_seed(args.seed)
    side = 4 if args.quick else PICTURE_TOKENS_PER_SIDE
    batches, pixels = make_batches(model, processor, args.samples, side)
    note("ceiling", "the ceiling: how much less work a step is than the symmetric one", ceiling(model, batches))
    note(
        "same_result",
        "differences from the symmetric stream's losses and gradients",
        compare_results(model, batches, pixels),
    )
    title = "one step, forward and backward, of backbone and head (image features computed beforehand)"
    note("backbone_and_head", title, compare_streams(model, batches, pixels, args.repeats))
    title = "the same with the vision tower, which encodes each picture once in every stream"
    note("with_vision_tower", title, compare_streams(model, batches, pixels, args.repeats, train_tower=True))
    size = ATTENTION | ({"half_tokens": 128} if args.quick else {})
    title = f"structured attention against SDPA under a dense mask, 2 x {size['half_tokens']} tokens, both passes"
    note("attention", title, compare_attention(size, args.repeats))


def make_batches(model: Any, processor: Any, samples: int, side: int) -> tuple[dict[str, Batch], Tensor]:
    """One micro-batch per stream of the same samples, and their pictures [samples, 3, h, w]."""
    import torch

    from trimode_vlm.training.collate import NoiseSettings, micro_batches
    from trimode_vlm.training.data import Encoded

    config, layout = model.config, processor.layout
    picture = layout.tokens(side, side)
    num_text = max(len(picture) // 3, 2)
    num_response = min(RESPONSE_TOKENS, num_text - 1)
    mask = [False] * (len(picture) + num_text - num_response) + [True] * num_response
    stride = config.vision_config.patch_size * config.spatial_merge_size
    pixels = torch.randn(samples, 3, side * stride, side * stride)
    encoded = []
    for number in range(samples):
        # The middle of the vocabulary holds no image, mask or end token.
        text = torch.randint(config.vocab_size // 4, config.vocab_size // 2, (num_text,)).tolist()
        encoded.append(Encoded(sample_id=number, input_ids=[*picture, *text], loss_mask=mask))
    vision = tuple(i for i in (layout.image, layout.start, layout.row_break, layout.end) if i is not None)
    fixed: dict[str, Any] = {"mask_token_id": config.mask_token_id, "vision_token_ids": vision}
    batches = {}
    for name, stream in STREAMS.items():
        noise = NoiseSettings(**fixed, block_length=config.block_length, noisy_stream=stream)
        (batches[name],) = micro_batches(encoded, noise)
    return batches, pixels


def ceiling(model: Any, batches: dict[str, Batch]) -> dict[str, Any]:
    """Tokens and floating-point operations per step; the ratios are what the streams are measured against.

    Counted: FLOPS_PER_WEIGHT x weights x tokens of the backbone's layers (all tokens) and of the head (tokens with a
    target only). Attention and norms are not, as the criterion is about tokens.
    """
    from torch import nn

    from trimode_vlm.training.dual_stream import IGNORE

    layers = [module for module in model.encoder.layers.modules() if isinstance(module, nn.Linear)]
    backbone_weights, head_weights = sum(m.weight.numel() for m in layers), model.diffusion_head.weight.numel()
    tokens = {name: batch.input_ids.numel() for name, batch in batches.items()}
    targets = {name: int((batch.target != IGNORE).sum()) for name, batch in batches.items()}
    flops = {n: FLOPS_PER_WEIGHT * (backbone_weights * tokens[n] + head_weights * targets[n]) for n in batches}
    pairs = {name: int(batch.pattern().attn_mask.sum()) for name, batch in batches.items()}
    return {
        "formula": f"{FLOPS_PER_WEIGHT} x (backbone weights x tokens + head weights x tokens with a target)",
        "backbone_weights": backbone_weights,
        "head_weights": head_weights,
        "tokens_backbone": tokens,
        "tokens_head": targets,
        "gflops_per_step": {name: value / 1e9 for name, value in flops.items()},
        "allowed_speedup": {name: flops["symmetric"] / value for name, value in flops.items()},
        "attention_pairs_ratio": {name: pairs["symmetric"] / value for name, value in pairs.items()},
    }


def step(model: Any, batch: Batch, features: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Forward and backward of one micro-batch, its pattern planned anew as in training; the sums of both losses."""
    import torch

    from trimode_vlm.training.objective import combine, tri_mode_terms

    # A stream with vision in both halves holds each picture's tokens twice in a row.
    per_row = int((batch.input_ids[0] == model.config.image_token_id).sum()) // len(features[0])
    placed = torch.cat([feature for feature in features for _ in range(per_row)])
    embeds = model.place(model.encoder.embed_tokens(batch.input_ids), batch.input_ids, placed)
    hidden = model.hidden(embeds, batch.position, batch.pattern())
    labels = (batch.target, batch.is_noisy, batch.p_mask, batch.sequence)
    terms = tri_mode_terms(hidden, *labels, model.diffusion_head)
    combine(terms.ar_sum, terms.diff_sum, batch.counts, alpha=0.3).backward()
    return terms.ar_sum.detach(), terms.diff_sum.detach()


def compare_results(model: Any, batches: dict[str, Batch], pixels: Tensor) -> dict[str, Any]:
    """Relative differences of each stream's losses and gradients from those of the symmetric stream."""
    import torch

    results = {}
    for name, batch in batches.items():
        model.zero_grad()
        losses = step(model, batch, model.encode_images(pixels))
        results[name] = [*losses, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]
    model.zero_grad()
    names = ("ar_loss", "diffusion_loss", "gradients")
    return {
        what: {
            name: float((results[name][i] - results["symmetric"][i]).norm() / results["symmetric"][i].norm())
            for name in batches
        }
        for i, what in enumerate(names)
    }


def compare_streams(
    model: Any, batches: dict[str, Batch], pixels: Tensor, repeats: int, train_tower: bool = False
) -> dict[str, Any]:
    """Seconds and peak memory of one step by stream, and their gain over the symmetric one beside the allowed gain."""
    import torch

    with torch.no_grad():
        known = model.encode_images(pixels)

    def call(batch: Batch) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            step(model, batch, model.encode_images(pixels) if train_tower else known)

        return run

    calls = {name: call(batch) for name, batch in batches.items()}
    seconds = interleaved(calls, repeats)
    peak = {name: peak_bytes(run, model.zero_grad) for name, run in calls.items()}
    speedup, less = ({n: v["symmetric"] / v[n] for n in v} for v in (seconds, peak))
    values = {
        "seconds": seconds,
        "tokens_per_sec": {name: batches[name].input_ids.numel() / value for name, value in seconds.items()},
        "speedup": speedup,
        "peak_megabytes": {name: value / 1e6 for name, value in peak.items()},
        "memory_ratio": less,
    }
    if not train_tower:
        allowed = ceiling(model, batches)["allowed_speedup"]
        values["speedup_over_allowed"] = {name: speedup[name] / allowed[name] for name in speedup}
        values["memory_ratio_over_allowed"] = {name: less[name] / allowed[name] for name in less}
    return values


def peak_bytes(call: Callable[[], object], clear: Callable[[], object]) -> int:
    """The most memory that tensors took at once during a call, beyond what they took after `clear`."""
    from torch.profiler import ProfilerActivity, profile

    clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    clear()
    peak = total = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def compare_attention(size: dict[str, int], repeats: int) -> dict[str, Any]:
    """The structured path and SDPA under the same pattern's dense mask: seconds forward + backward, and agreement."""
    import torch

    from trimode_vlm.attention import attend

    pattern, dense = attention_patterns(size)
    T, K = pattern.query_length, size["head_dim"]
    shapes = [(size["batch"], T, heads, K) for heads in (size["heads"], size["kv_heads"], size["kv_heads"])]
    q, k, v = (torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes)
    grad_out = torch.randn(size["batch"], T, size["heads"] * K)

    def both_passes(pattern: Pattern) -> list[Tensor]:
        out = attend(q, k, v, pattern)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]

    pairs = zip(both_passes(pattern), both_passes(dense), strict=True)
    difference = max(float((ours - reference).abs().max()) for ours, reference in pairs)
    seconds = interleaved({"structured": lambda: both_passes(pattern), "dense": lambda: both_passes(dense)}, repeats)
    return {
        **size,
        "allowed_speedup": dense.attn_mask.numel() / int(dense.attn_mask.sum()),
        "largest_difference": difference,
        "ms": {name: value * 1e3 for name, value in seconds.items()},
        "dense_over_structured": seconds["dense"] / seconds["structured"],
    }


def attention_patterns(size: dict[str, int]) -> tuple[Pattern, Pattern]:
    """The dual stream of one long response, planned; and the same predicate with its mask evaluated."""
    import torch

    from trimode_vlm.patterns import Pattern, dual_stream

    B, L, block_length = size["batch"], size["half_tokens"], size["block_length"]
    place = torch.arange(L)
    is_noisy = torch.arange(2 * L) < L
    block = torch.where(is_noisy, place.repeat(2) // block_length, -1)
    rows = (place.repeat(2), torch.zeros(2 * L, dtype=torch.long), block * block_length, block, is_noisy)
    pattern = dual_stream(*(row.repeat(B, 1) for row in rows))
    dense = Pattern(pattern.predicate, B, 2 * L, 2 * L, pattern.device)
    return pattern, dense
