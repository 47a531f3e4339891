"""`trimode-vlm bench decode`: how fast decoding is, beside its ceiling and beside transformers on the same weights.

The ceiling comes first: no decoder of this model is faster per token than the bare matrix products of one token, and no
mode emits more tokens per forward than its block allows. All comparisons are medians of interleaved repetitions
(A B A B), so that a machine that slows down slows both. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXAMPLES = """examples:
  trimode-vlm bench decode
  trimode-vlm bench decode --threads 1 --repeats 7 --json reports/decode.json
  trimode-vlm bench decode --quick
"""
BLOCK_LENGTHS = (1, 8, 16, 32)
LONG_ANSWER_TOKENS = 200
# About 130M parameters: the size where one token is bound by memory on a CPU.
RANDOM_130M = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm bench`."""
    add = parser.add_argument
    add("what", choices=["decode"], help="what to measure")
    add("--model", default="nano", help="checkpoint with images and held-out tasks (default: the shipped nano)")
    add("--threads", type=int, default=1, help="CPU threads (default 1)")
    add("--repeats", type=int, default=5, help="interleaved repetitions of every comparison (default 5)")
    add("--new-tokens", type=int, default=128, help="tokens per AR answer in the comparisons (default 128)")
    add("--samples", type=int, default=8, help="held-out answers of over 200 tokens to decode (default 8)")
    add("--seed", type=int, default=0, help="which held-out samples (default 0)")
    add("--json", metavar="FILE", help="also write the JSON document to this file")
    add("--quick", action="store_true", help="one repetition of everything, small sizes: shows that it runs, no more")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and end with the JSON document; returns the exit code."""
    # Read when torch loads: set later, it would change nothing.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    from trimode_vlm.cli import print_settings

    torch.set_num_threads(args.threads)
    if args.quick:
        args.repeats, args.new_tokens, args.samples = 1, 8, 1
    print_settings(vars(args))
    with torch.inference_mode():
        result = bench_decode(args)
    text = json.dumps(result)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    return 0


def bench_decode(args: argparse.Namespace) -> dict[str, Any]:
    """All comparisons of `bench decode` as one document; prints each as it is measured."""
    import torch
    import transformers

    import trimode_vlm

    model, processor = trimode_vlm.load(args.model)
    prompts = long_prompts(processor, args.samples, args.seed)
    result: dict[str, Any] = {
        "machine": {
            "threads": torch.get_num_threads(),
            "cpu_count": os.cpu_count(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "repeats": args.repeats,
        },
        "ceiling": ceiling(model, args.repeats),
    }
    report("ceiling", result["ceiling"])
    result["nano_ar"] = compare_with_transformers(model, prompts[0], args.repeats, args.new_tokens)
    report("AR against transformers' generate, same weights, same prompt with its image", result["nano_ar"])
    result["random_130m_ar"] = bench_random(args)
    report("AR against transformers' generate and bare matrix products, random 130M model", result["random_130m_ar"])
    result["linear_spec"] = compare_modes(model, prompts, args.repeats)
    report(f"linear_spec against AR, held-out answers of over {LONG_ANSWER_TOKENS} tokens", result["linear_spec"])
    result["cost_by_block_length"] = cost_by_block_length(model, prompts[0], args.repeats)
    report("cost of one forward by block length", result["cost_by_block_length"])
    return result


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, measured in turns after one unmeasured turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, call in runs.items():
            start = time.perf_counter()
            call()
            if turn or repeats == 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def token_weights(model: Any) -> list[torch.Tensor]:
    """The matrices that every new token is multiplied with: the layers' and the head's."""
    import torch

    linears = [module for module in model.encoder.layers.modules() if isinstance(module, torch.nn.Linear)]
    return [module.weight for module in [*linears, model.diffusion_head]]


def bare_products(weights: list[torch.Tensor], tokens: int) -> Callable[[], None]:
    """A call that does nothing but the matrix products of one forward over `tokens` tokens."""
    import torch
    import torch.nn.functional as F

    inputs = {w.shape[1]: torch.randn(tokens, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def call() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return call


def ceiling(model: Any, repeats: int) -> dict[str, Any]:
    """What no decoder of this model can beat: bare products per forward, and tokens per forward by mode and block."""
    weights = token_weights(model)
    calls = {f"block {n}": bare_products(weights, n) for n in BLOCK_LENGTHS}
    seconds = interleaved({name: repeat(call, 20) for name, call in calls.items()}, repeats)
    k = model.config.block_length
    return {
        "bare_products_ms_per_forward": {name: value / 20 * 1e3 for name, value in seconds.items()},
        "ar_tokens_per_sec": 20 / seconds["block 1"],
        # A cycle of self-speculation is two forwards for at most k tokens; a diffusion block at least one denoising
        # forward and the one that writes its cache.
        "tokens_per_forward": {"ar": 1.0, "diffusion": k / 2, "linear_spec": k / 2},
    }


def repeat(call: Callable[[], object], times: int) -> Callable[[], None]:
    """A call that does `times` of another, for what is too short to time alone."""

    def many() -> None:
        for _ in range(times):
            call()

    return many


def compare_with_transformers(model: Any, inputs: dict[str, Any], repeats: int, new_tokens: int) -> dict[str, Any]:
    """AR tokens per second of ours and of transformers' Mistral3 with the same weights on one prompt.

    transformers runs with its dynamic and its static cache; the faster one counts.
    """
    theirs = as_transformers(model)
    inputs = dict(inputs)
    prompt = inputs["input_ids"].shape[1]
    budget: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}

    def transformers_call(cache: str) -> torch.Tensor:
        options = {**budget, "min_new_tokens": new_tokens, "cache_implementation": cache, "disable_compile": True}
        return theirs.generate(**inputs, **options, pad_token_id=0)

    ours_out = exactly(model, inputs, new_tokens)
    same = bool((ours_out[:, prompt:] == transformers_call("dynamic")[:, prompt:]).all())
    seconds = interleaved(
        {
            "ours": lambda: exactly(model, inputs, new_tokens),
            "dynamic": lambda: transformers_call("dynamic"),
            "static": lambda: transformers_call("static"),
        },
        repeats,
    )
    best = min(seconds["dynamic"], seconds["static"])
    return {
        "new_tokens": new_tokens,
        "prompt_tokens": prompt,
        "same_tokens": same,
        "ours_tokens_per_sec": new_tokens / seconds["ours"],
        "transformers_tokens_per_sec": new_tokens / best,
        "transformers_cache": "dynamic" if best == seconds["dynamic"] else "static",
        "ours_over_transformers": best / seconds["ours"],
    }


def exactly(model: Any, inputs: dict[str, Any], new_tokens: int) -> torch.Tensor:
    """Greedy AR sequences of exactly `new_tokens` new tokens: no end token stops them."""
    out = model.generate(**inputs, mode="ar", max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return out.sequences


def as_transformers(model: Any) -> Any:
    """transformers' own model with this model's weights, converted through a folder."""
    import tempfile

    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from trimode_vlm.checkpoints import convert

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/ours")
        convert(f"{folder}/ours", f"{folder}/theirs", to="mistral3")
        auto = AutoModelForCausalLM if model.config.vision_config is None else AutoModelForImageTextToText
        return auto.from_pretrained(f"{folder}/theirs", dtype=model.dtype).eval()


def bench_random(args: argparse.Namespace) -> dict[str, Any]:
    """The AR comparison on a random text model of about 130M parameters, with the bare products of one token."""
    import torch

    from trimode_vlm.config import TriModeTextConfig
    from trimode_vlm.model import TriModeVLM

    size = (
        {**RANDOM_130M, "hidden_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
        if args.quick
        else RANDOM_130M
    )
    torch.manual_seed(args.seed)
    model = TriModeVLM(TriModeTextConfig(**size)).eval()
    inputs = {"input_ids": torch.randint(200, 1000, (1, 64))}
    result = compare_with_transformers(model, inputs, args.repeats, min(args.new_tokens, 64))
    products = (
        interleaved({"products": repeat(bare_products(token_weights(model), 1), 5)}, args.repeats)["products"] / 5
    )
    ours = 1 / result["ours_tokens_per_sec"]
    result |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bare_products_ms_per_token": products * 1e3,
        "ours_ms_per_token": ours * 1e3,
        "ours_over_bare_products": ours / products,
    }
    return result


def long_prompts(processor: Any, samples: int, seed: int) -> list[dict[str, Any]]:
    """Model inputs of held-out samples whose right answers have over 200 tokens, tasks in turn."""
    from trimode_vlm.eval import tasks

    found: list[dict[str, Any]] = []
    index = 0
    while len(found) < samples:
        for task in tasks.select(["nano"]):
            example = task.example(index, seed)
            if len(processor.tokenizer(example.gold)["input_ids"]) > LONG_ANSWER_TOKENS and len(found) < samples:
                options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
                found.append(dict(processor.apply_chat_template(example.messages, **options)))
        index += 1
    return found


def compare_modes(model: Any, prompts: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    """Seconds per token of each mode over the long answers, every mode in turn."""
    modes = ("ar", "linear_spec", "diffusion")
    outs: dict[str, list[Any]] = {mode: [] for mode in modes}

    def decode(mode: str) -> Callable[[], None]:
        def call() -> None:
            outs[mode] = [
                model.generate(**inputs, mode=mode, max_new_tokens=1024, do_sample=False) for inputs in prompts
            ]

        return call

    seconds = interleaved({mode: decode(mode) for mode in modes}, repeats)
    tokens = {mode: sum(sum(out.num_new_tokens) for out in outs[mode]) for mode in modes}
    forwards = {mode: sum(sum(out.nfe) - sum(out.nfe_prefill) for out in outs[mode]) for mode in modes}
    per_token = {mode: seconds[mode] / tokens[mode] for mode in modes}
    same = [a.sequences.tolist() == b.sequences.tolist() for a, b in zip(outs["ar"], outs["linear_spec"], strict=True)]
    return {
        "answers": len(prompts),
        "tokens": tokens,
        "ms_per_token": {mode: value * 1e3 for mode, value in per_token.items()},
        "tpf_decode": {mode: (tokens[mode] - len(prompts)) / max(forwards[mode], 1) for mode in modes},
        "linear_spec_equals_ar": all(same),
        "ar_over_linear_spec": per_token["ar"] / per_token["linear_spec"],
        "ar_over_diffusion": per_token["ar"] / per_token["diffusion"],
    }


def cost_by_block_length(model: Any, inputs: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Milliseconds of one cached causal forward (head included) by how many tokens it takes.

    A block pays when it brings more tokens than its cost over that of one token, twice: draft and verify.
    """
    import torch

    from trimode_vlm import patterns
    from trimode_vlm.cache import KVCache

    length = inputs["input_ids"].shape[1]
    cache = KVCache(model.config, 1, length + max(BLOCK_LENGTHS), model.dtype, model.device)
    model(**inputs, cache=cache, logits_to_keep=1)
    cache.advance([length])

    def forward(n: int) -> Callable[[], object]:
        ids = torch.randint(0, model.config.vocab_size, (1, n))
        position_ids = length + torch.arange(n)[None]

        def call() -> object:
            pattern = patterns.causal(1, n, ids.device, length)
            return model.diffusion_head(model.hidden(model.encoder.embed_tokens(ids), position_ids, pattern, cache))

        return call

    seconds = interleaved({f"block {n}": repeat(forward(n), 10) for n in BLOCK_LENGTHS}, repeats)
    ms = {name: value / 10 * 1e3 for name, value in seconds.items()}
    return {
        "prefix_tokens": length,
        "ms_per_forward": ms,
        "break_even_tokens_per_cycle": {name: 2 * value / ms["block 1"] for name, value in ms.items()},
    }


def report(title: str, values: Mapping[str, Any]) -> None:
    """Print one comparison as `name: value` lines, numbers to four digits."""
    print(f"\n{title}")
    for name, value in values.items():
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, item in items:
            label = f"{name} [{key}]" if key else name
            print(f"  {label}: {format(item, '.4g') if isinstance(item, float) else item}")
    sys.stdout.flush()
