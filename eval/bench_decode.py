"""`trimode-vlm bench decode`: how fast decoding is, beside its ceiling and beside transformers on the same weights.

The ceiling comes first: no decoder of this model is faster per forward than the bare matrix products of its tokens, and
no mode emits more tokens per forward than its block allows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trimode_vlm.eval.prompts import inputs_of
from trimode_vlm.eval.timing import bare_products, interleaved, repeat, token_weights

if TYPE_CHECKING:
    from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "repeats": 5,
    "max_new_tokens": 128,
    "samples": 8,
    "adapter": None,
    "quantize": None,
    "dtype": None,
}
QUICK: dict[str, Any] = {"repeats": 1, "max_new_tokens": 8, "samples": 1}
BLOCK_LENGTHS = (1, 8, 16, 32)
LONG_ANSWER_TOKENS = 200
MODES = ("ar", "linear_spec", "diffusion")
# About 130M parameters: the size where, on a CPU, one token is bound by reading the weights.
RANDOM_130M: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def bench_decode(args: argparse.Namespace, note: Callable[[str, str, dict[str, Any]], None]) -> None:
    """All comparisons of `bench decode`, each handed to `note(name, title, values)` as it is measured."""
    import trimode_vlm
    from trimode_vlm.eval.answering import check_adapter

    model, processor = trimode_vlm.load(args.model, dtype=args.dtype)
    variants = {"": model}
    if args.adapter:
        variants["adapter"], _ = trimode_vlm.load(args.model, dtype=args.dtype, adapter=args.adapter)
        check_adapter(variants["adapter"], args.model, args.adapter)
    if args.quantize:
        variants[args.quantize], _ = trimode_vlm.load(args.model, dtype=args.dtype, quantize=args.quantize)
    prompts = long_prompts(processor, args.samples, args.seed)
    note("ceiling", "the ceiling", ceiling(model, args.repeats))
    title = "AR against transformers' generate on the same weights and the same prompt with its picture"
    note("model_ar", title, compare_with_transformers(model, prompts[0], args.repeats, args.max_new_tokens))
    title = "AR against transformers' generate and against bare matrix products, random 130M model"
    note("random_130m_ar", title, bench_random(args))
    title = f"modes on held-out answers of over {LONG_ANSWER_TOKENS} tokens"
    note("long_answers", title, compare_modes(variants, prompts, args.repeats))
    title = "one cached forward by block length"
    note("cost_by_block_length", title, cost_by_block_length(model, prompts[0], args.repeats))


def ceiling(model: Any, repeats: int) -> dict[str, Any]:
    """What no decoder of this model can beat: bare products per forward, and tokens per forward by mode."""
    weights = token_weights(model)
    calls = {f"block {n}": repeat(bare_products(weights, n), 20) for n in BLOCK_LENGTHS}
    seconds = {name: value / 20 for name, value in interleaved(calls, repeats).items()}
    k = model.config.block_length
    return {
        "bare_products_ms_per_forward": {name: value * 1e3 for name, value in seconds.items()},
        "ar_tokens_per_sec": 1 / seconds["block 1"],
        # A cycle of self-speculation is two forwards for at most k tokens; a diffusion block is at least one denoising
        # forward and the one that writes its cache.
        "tokens_per_forward": {"ar": 1.0, "diffusion": k / 2, "linear_spec": k / 2},
    }


def compare_with_transformers(
    model: Any, inputs: dict[str, Any], repeats: int, new_tokens: int, others: Mapping[str, Callable[[], object]] = {}
) -> dict[str, Any]:
    """AR tokens per second of ours and of transformers' own class with the same weights, whole calls on one prompt.

    transformers runs with its dynamic and its static cache; the faster one counts. `others` are timed in turn with
    these and reported as `NAME_sec`.
    """
    theirs = as_transformers(model)
    budget: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}

    def ours_call() -> Tensor:
        return model.generate(**inputs, **budget, mode="ar", eos_token_id=-1).sequences

    def transformers_call(cache: str) -> Tensor:
        return theirs.generate(**inputs, **budget, cache_implementation=cache, disable_compile=True)

    prompt = inputs["input_ids"].shape[1]
    ours_ids, their_ids = ours_call()[0, prompt:].tolist(), transformers_call("dynamic")[0, prompt:].tolist()
    if not len(ours_ids) == len(their_ids) == new_tokens:
        raise RuntimeError(f"asked for {new_tokens} tokens, ours gave {len(ours_ids)}, transformers {len(their_ids)}")
    runs = {"ours": ours_call, "dynamic": lambda: transformers_call("dynamic")}
    seconds = interleaved({**runs, "static": lambda: transformers_call("static"), **others}, repeats)
    best = min(seconds["dynamic"], seconds["static"])
    return {
        "prompt_tokens": prompt,
        "new_tokens": new_tokens,
        "same_tokens": ours_ids == their_ids,
        "ours_tokens_per_sec": new_tokens / seconds["ours"],
        "transformers_tokens_per_sec": new_tokens / best,
        "transformers_cache": "dynamic" if best == seconds["dynamic"] else "static",
        "ours_over_transformers": best / seconds["ours"],
        **{f"{name}_sec": seconds[name] for name in others},
    }


def as_transformers(model: Any) -> Any:
    """transformers' own model with this model's weights, converted through a folder; no end token stops it."""
    import tempfile

    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from trimode_vlm.checkpoints import convert

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/ours")
        convert(f"{folder}/ours", f"{folder}/theirs", to="ministral3")
        auto = AutoModelForCausalLM if model.config.vision_config is None else AutoModelForImageTextToText
        theirs = auto.from_pretrained(f"{folder}/theirs", dtype=model.dtype).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return theirs


def bench_random(args: argparse.Namespace) -> dict[str, Any]:
    """The AR comparison on a random text model of about 130M parameters, beside the bare products of its tokens."""
    import torch

    from trimode_vlm.config import TriModeTextConfig
    from trimode_vlm.model import TriModeVLM

    size = RANDOM_130M | ({"hidden_size": 96, "num_hidden_layers": 2} if args.quick else {})
    torch.manual_seed(args.seed)
    model = TriModeVLM(TriModeTextConfig(**size)).eval()
    # A short prompt: its prefill then costs about what one token does.
    inputs = {"input_ids": torch.randint(200, 1000, (1, 4))}
    new_tokens = min(args.max_new_tokens, 64)
    products = repeat(bare_products(token_weights(model), 1), new_tokens)
    others = {"bare_products": products}
    result = compare_with_transformers(model, inputs, args.repeats, new_tokens, others)
    bare, ours = result.pop("bare_products_sec") / new_tokens, 1 / result["ours_tokens_per_sec"]
    return result | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bare_products_ms_per_token": bare * 1e3,
        "ours_ms_per_token": ours * 1e3,
        "ours_over_bare_products": ours / bare,
    }


def long_prompts(processor: Any, samples: int, seed: int) -> list[dict[str, Any]]:
    """Model inputs of held-out samples whose right answers have over 200 tokens, tasks in turn."""
    from trimode_vlm.eval.tasks import select

    found: list[dict[str, Any]] = []
    index = 0
    while True:
        for task in select(["nano"]):
            example = task.example(index, seed)
            if len(processor.tokenizer(example.gold)["input_ids"]) > LONG_ANSWER_TOKENS:
                found.append(dict(inputs_of(processor, [example.messages])))
                if len(found) == samples:
                    return found
        index += 1


def compare_modes(variants: Mapping[str, Any], prompts: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Milliseconds per token of each mode over the same prompts, whole calls and without the prefill.

    Args:
        variants: models by name, the plain one under "": "linear_spec int8" is linear_spec of the variant "int8". All
            answer in turn; the variant "adapter" drafts with its adapter, so only linear_spec is asked of it.
    """
    from trimode_vlm.quantize import text_weight_bytes

    outputs: dict[str, list[Any]] = {}
    runs = {
        f"{mode} {variant}".strip(): (variant, mode)
        for variant in variants
        for mode in (("linear_spec",) if variant == "adapter" else MODES)
    }

    def answer(run: str, variant: str, mode: str, max_new_tokens: int = 1024) -> Callable[[], None]:
        def call() -> None:
            chosen: dict[str, Any] = {"mode": mode, "max_new_tokens": max_new_tokens}
            outputs[run] = [variants[variant].generate(**inputs, **chosen) for inputs in prompts]

        return call

    prefill = interleaved({name: answer("prefill", name, "ar", max_new_tokens=1) for name in variants}, repeats)
    seconds = interleaved({run: answer(run, *choice) for run, choice in runs.items()}, repeats)
    tokens = {run: sum(out.num_new_tokens[0] for out in outputs[run]) for run in runs}
    forwards = {run: sum(out.nfe[0] - out.nfe_prefill[0] for out in outputs[run]) for run in runs}
    whole = {run: seconds[run] / tokens[run] * 1e3 for run in runs}
    decode = {
        run: (seconds[run] - prefill[variant]) / (tokens[run] - len(prompts)) * 1e3
        for run, (variant, _) in runs.items()
    }
    ids = {run: [out.sequences.tolist() for out in outputs[run]] for run in runs}
    return {
        "answers": len(prompts),
        "tokens": tokens,
        "tpf_decode": {run: (tokens[run] - len(prompts)) / max(forwards[run], 1) for run in runs},
        "answers_equal_to_ar": {
            run: sum(a == b for a, b in zip(ids[run], ids["ar"], strict=True)) for run in runs if run != "ar"
        },
        "text_weights_mb": {name or "plain": text_weight_bytes(model) / 1e6 for name, model in variants.items()},
        "ms_per_token": whole,
        "ms_per_token_without_prefill": decode,
        "ar_over_linear_spec": whole["ar"] / whole["linear_spec"],
        "ar_over_linear_spec_without_prefill": decode["ar"] / decode["linear_spec"],
        "ar_over_diffusion": whole["ar"] / whole["diffusion"],
    }


def cost_by_block_length(model: Any, inputs: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Milliseconds of one cached causal forward as decoding makes it, head included, by how many tokens it takes.

    A block pays when a cycle, draft and verify, brings more tokens than two such forwards cost in one-token forwards.
    """
    import torch

    from trimode_vlm import patterns
    from trimode_vlm.cache import KVCache
    from trimode_vlm.lean_forward import lean_forward
    from trimode_vlm.model_inputs import positions

    length = inputs["input_ids"].shape[1]
    cache = KVCache(model.config, 1, length + max(BLOCK_LENGTHS), model.dtype, model.device)
    model(**inputs, cache=cache, logits_to_keep=1)
    cache.advance([length])
    lean = lean_forward(model.encoder)

    def forward(n: int) -> Callable[[], object]:
        ids = torch.randint(0, model.config.vocab_size, (1, n), device=model.device)
        position_ids = positions(1, n, length, None, ids.device)

        def call() -> object:
            pattern = patterns.causal(1, n, ids.device, length)
            embeds = model.encoder.embed_tokens(ids)
            return model.diffusion_head(model.hidden(embeds, position_ids, pattern, cache, lean))

        return call

    seconds = interleaved({f"block {n}": repeat(forward(n), 10) for n in BLOCK_LENGTHS}, repeats)
    ms = {name: value / 10 * 1e3 for name, value in seconds.items()}
    return {
        "prefix_tokens": length,
        "ms_per_forward": ms,
        "break_even_tokens_per_cycle": {name: 2 * value / ms["block 1"] for name, value in ms.items()},
    }
