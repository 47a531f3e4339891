"""What the adapters for lm-eval and lmms-eval share: answers by a harness's generation options, and their TPF."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimode_vlm.eval.answering import load
from trimode_vlm.eval.tpf import CONVENTION, bucketed
from trimode_vlm.generation_config import SHARED_OPTIONS, TriModeGenerationConfig

DEFAULT_BUDGET = 1024
"""Tokens of an answer whose task names no budget."""

NEUTRAL = {
    "num_beams": 1,
    "use_cache": True,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "top_k": 0,
    "top_p": 1.0,
}
"""Options of transformers with the value that asks for nothing."""


class HarnessModel:
    """A loaded model that answers batches and keeps the counts of every answer.

    Args:
        pretrained: as `trimode_vlm.load` takes it.
        mode: "ar", "diffusion", "linear_spec" ...
        max_new_tokens: budget of every answer, whatever the task says; None: the task's.
        adapter, quantize: as in `load`; adapter="auto" takes the draft adapter beside the weights.
        tpf_output: a JSON file for the counts; None: only the line that is printed after each set of requests.
        decoding: further options of `generate`, such as block_length and threshold.

    Raises:
        ValueError: an option that the mode does not take, or a folder without a tokenizer.
    """

    def __init__(
        self,
        pretrained: str,
        mode: str = "ar",
        device: str | None = None,
        dtype: str | None = None,
        max_new_tokens: int | None = None,
        tpf_output: str | None = None,
        adapter: str | None = None,
        quantize: str | None = None,
        **decoding: Any,
    ) -> None:
        self.decoding = {"mode": mode, **decoding}
        TriModeGenerationConfig().override(self.decoding)
        self.max_new_tokens, self.tpf_output, self.name = max_new_tokens, tpf_output, pretrained
        self.model, self.processor = load(
            pretrained, device=device, dtype=None if dtype == "auto" else dtype, adapter=adapter, quantize=quantize
        )
        self.records: list[dict[str, Any]] = []
        self._warned: set[str] = set()

    def answer(self, inputs: Any, generation: Mapping[str, Any], counted: Sequence[bool]) -> list[str]:
        """Answers to a batch of prompts, each cut before the first stop string.

        Args:
            inputs: what the processor returns, padded on the left.
            generation: the task's generation options, as in the harnesses: until, max_gen_toks, temperature ...
            counted: per row, whether its tokens and forwards count.
        """
        options, stops = self.options(generation)
        tokenizer = {"tokenizer": self.processor.tokenizer} if stops else {}
        out = self.model.generate(**inputs.to(self.model.device), **options, **tokenizer)
        width = inputs["input_ids"].shape[1]
        # Rows decode at once: each has its share of the batch's time, by how long it was under way.
        share = max(out.seconds) / (sum(out.seconds) or 1.0)
        texts = []
        for row, count in enumerate(out.num_new_tokens):
            text = self.processor.decode(out.sequences[row, width : width + count].tolist(), skip_special_tokens=True)
            texts.append(text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)])
            if not counted[row]:
                continue
            self.records.append(
                {
                    "num_new_tokens": int(count),
                    "nfe": int(out.nfe[row]),
                    "nfe_prefill": int(out.nfe_prefill[row]),
                    "seconds": float(out.seconds[row]) * share,
                    "accepted_lengths": [int(n) for n in out.accepted_lengths[row] or []],
                }
            )
        return texts

    def options(self, generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """generate()'s options and the stop strings.

        A temperature of 0 or do_sample=False is greedy; a temperature alone samples. What nothing here takes is named
        in a warning, once.

        Raises:
            ValueError: beam search, or an option with a value out of its range.
        """
        given = {name: value for name, value in generation.items() if value is not None}
        until = given.pop("until", [])
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        budgets = [given.pop(name) for name in ("max_new_tokens", "max_gen_toks", "max_tokens") if name in given]
        budget = self.max_new_tokens or (budgets[0] if budgets else DEFAULT_BUDGET)
        temperature = float(given.pop("temperature", 1.0 if given.get("do_sample") else 0.0))
        if given.pop("do_sample", temperature > 0) and temperature > 0:
            given |= {"do_sample": True, "temperature": temperature}
        else:
            given = {name: value for name, value in given.items() if name not in ("top_p", "top_k")}
            given["do_sample"] = False
        if given.get("num_beams", 1) != 1:
            raise ValueError(f"num_beams={given['num_beams']}: no mode searches with beams")
        given = {name: value for name, value in given.items() if NEUTRAL.get(name) != value}
        ignored = sorted(set(given) - SHARED_OPTIONS - self._warned)
        if ignored:
            self._warned.update(ignored)
            warnings.warn(f"trimode_vlm does not use these options of the task: {', '.join(ignored)}", stacklevel=2)
        used = {name: value for name, value in given.items() if name in SHARED_OPTIONS}
        return used | self.decoding | {"max_new_tokens": budget} | ({"stop_strings": stops} if stops else {}), stops

    def report(self) -> dict[str, Any] | None:
        """TPF of the answers of all ranks so far, by length; the first rank prints and writes it, others get None."""
        import torch.distributed as dist

        records, rank = self.records, 0
        if dist.is_available() and dist.is_initialized():
            rank = dist.get_rank()
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, records)
            records = [record for part in parts for record in part]
        if rank:
            return None
        lengths = bucketed(records)
        summary = {
            "model": self.name,
            "decoding": self.decoding,
            "convention": CONVENTION,
            "by_length": {name: totals.as_dict() for name, totals in lengths.items()},
        }
        total = lengths["all"]
        ratios = [f"{ratio:.2f}" if ratio is not None else "-" for ratio in (total.tpf_decode, total.tpf_end_to_end)]
        print(
            f"trimode_vlm, {self.decoding['mode']}: {total.num_samples} answers, {total.num_tokens} tokens, "
            f"{total.num_forwards} forwards; TPF {ratios[0]}, with prefill {ratios[1]}",
            file=sys.stderr,
        )
        if self.tpf_output:
            Path(self.tpf_output).parent.mkdir(parents=True, exist_ok=True)
            Path(self.tpf_output).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        return summary


def num_ranks() -> int:
    """Processes of this run, as torchrun and accelerate say in the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_of(asked: str | None) -> str:
    """The device to load on: the one asked for, of several ranks each its own, else CUDA where there is one.

    lm-eval asks for CUDA by default, so that without a driver this means the CPU, with a warning.
    """
    import torch

    if torch.cuda.is_available():
        own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if num_ranks() > 1 else "cuda"
        return own if asked is None or (num_ranks() > 1 and asked.startswith("cuda")) else asked
    if asked and asked.startswith("cuda"):
        warnings.warn(f"there is no CUDA device for device={asked}: using the CPU", stacklevel=2)
        return "cpu"
    return asked or "cpu"


def counted(requests: Sequence[Any]) -> list[bool]:
    """False for the copies that the harnesses append so that all ranks have as many requests."""
    seen: Counter[int] = Counter()
    flags = []
    for request in requests:
        seen[id(request)] += 1
        metadata = getattr(request, "metadata", None)
        padding = isinstance(metadata, dict) and metadata.get("__padding_only__", False)
        flags.append(not padding and seen[id(request)] <= getattr(request, "repeats", 1))
    return flags


def batches(
    items: Sequence[Any], generation: Sequence[Mapping[str, Any]], lengths: Sequence[int], batch_size: int
) -> Iterator[list[int]]:
    """Indices in batches of equal generation options, the longest prompts first, so that a batch pads little."""
    groups: dict[str, list[int]] = {}
    for index in range(len(items)):
        groups.setdefault(json.dumps(generation[index], sort_keys=True, default=str), []).append(index)
    for members in groups.values():
        members.sort(key=lambda index: -lengths[index])
        for start in range(0, len(members), batch_size):
            yield members[start : start + batch_size]
