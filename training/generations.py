"""Answers of the model under training: a few prompts in every mode, what they cost, and whether they are exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trimode_vlm.compare import table
from trimode_vlm.decoders import DECODERS
from trimode_vlm.model_inputs import image_token_counts
from trimode_vlm.training.data import Encoded
from trimode_vlm.vision.images import pad_pixels

DEFAULT_MODES = ("ar", "diffusion", "linear_spec")
DEFAULT_BUCKETS = (100, 200)


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """One prompt: tensors as the processor gives them (input_ids [1, T], image keys where there are images).

    expected: the answer of the data, if there is one.
    """

    name: str
    inputs: Mapping[str, Tensor]
    expected: str | None = None


def known_modes(modes: Sequence[str]) -> tuple[str, ...]:
    """The modes, checked.

    Raises:
        ValueError: no decoder has such a name.
    """
    for mode in modes:
        if mode not in DECODERS:
            raise ValueError(f"unknown mode {mode!r} for generations; known: {', '.join(DECODERS)}")
    return tuple(modes)


def prompt_from_sample(sample: Encoded, processor: Any, config: Any) -> EvalPrompt:
    """What stands before a sample's first trained token, with its images; the first trained span is the answer.

    Of plain text, which is trained from its beginning, the first quarter is the prompt. config: the model's.
    """
    ids, mask = sample.input_ids, sample.loss_mask
    start = mask.index(True) if True in mask else len(ids)
    if start < 2:
        start = max(1, len(ids) // 4)
    end = next((i for i in range(start, len(ids)) if not mask[i]), len(ids))
    inputs = {"input_ids": torch.tensor([ids[:start]])}
    images = _images_before(sample, start, config)
    if images:
        inputs["pixel_values"] = pad_pixels(images)
        inputs["image_sizes"] = torch.tensor([image.shape[-2:] for image in images])
    expected = processor.decode(ids[start:end], skip_special_tokens=True)
    return EvalPrompt(name=sample.name or f"sample {sample.sample_id}", inputs=inputs, expected=expected)


def _images_before(sample: Encoded, start: int, config: Any) -> list[Tensor]:
    """The images whose tokens stand before `start`."""
    if not sample.images:
        return []
    counts = image_token_counts(config, [(image.shape[-2], image.shape[-1]) for image in sample.images])
    num_tokens = sum(token == config.image_token_id for token in sample.input_ids[:start])
    return [image for image, end in zip(sample.images, accumulate(counts), strict=True) if end <= num_tokens]


def generate_all(
    model: nn.Module,
    processor: Any,
    prompts: Sequence[EvalPrompt],
    modes: Sequence[str] = DEFAULT_MODES,
    *,
    max_new_tokens: int = 256,
    buckets: Sequence[int] = DEFAULT_BUCKETS,
    after_each: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Answer every prompt greedily in every mode; returns a record with "answers" (per prompt) and "totals" (per mode).

    The model is left as it was found, training flags included, and so is the global random state. A prompt that a mode
    refuses (too long, no mask token) has an "error" in place of an answer. TPF as facts.md 4 counts: the prefill and
    its token left out, pooled over prompts, also over the answers of more than n tokens.
    """
    answers = []
    with inference(model) as plain:
        for prompt in prompts:
            by_mode = {}
            for mode in modes:
                by_mode[mode] = _answer(plain, processor, prompt, mode, max_new_tokens)
                after_each()
            answers.append(_record(prompt, by_mode))
    totals = {mode: bucketed_tpf([answer["modes"][mode] for answer in answers], buckets) for mode in modes}
    return {"answers": answers, "totals": totals}


def is_partitioned(model: nn.Module) -> bool:
    """True under ZeRO 3, where each rank holds a part of every weight and a forward is a collective of all ranks.

    Gathering the weights for one rank does not help: DeepSpeed's hooks split them again after the first module.
    """
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[Any]:
    """The tri-mode model inside the wrappers of DDP, DeepSpeed and PEFT, in eval mode; its flags come back after it."""
    plain: Any = model
    while isinstance(getattr(plain, "module", None), nn.Module):
        plain = plain.module
    if hasattr(plain, "get_base_model"):
        plain = plain.get_base_model()  # PEFT puts its layers into it, so the adapter stays on
    flags = [(module, module.training) for module in plain.modules()]
    plain.eval()
    try:
        yield plain
    finally:
        for module, flag in flags:
            module.training = flag


def _answer(model: Any, processor: Any, prompt: EvalPrompt, mode: str, max_new_tokens: int) -> dict[str, Any]:
    inputs = {name: tensor.to(model.device) for name, tensor in prompt.inputs.items()}
    try:
        # A seed of its own: without one, generate() draws one from the global generator, which training needs.
        out = model.generate(**inputs, mode=mode, max_new_tokens=max_new_tokens, do_sample=False, seed=0)
    except ValueError as error:
        return {"error": str(error)}
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "text": processor.decode(ids, skip_special_tokens=True),
        "token_ids": ids,
        "tokens": out.num_new_tokens[0],
        "forwards": out.nfe[0],
        "prefill_forwards": out.nfe_prefill[0],
        "tpf": out.tokens_per_forward[0],
        "tpf_end_to_end": out.tokens_per_forward_end_to_end[0],
        "finish_reason": out.finish_reasons[0],
        "seconds": out.seconds[0],
    }


def _record(prompt: EvalPrompt, by_mode: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One prompt's answers; "linear_spec_is_ar": True if both modes gave the same token ids."""
    record: dict[str, Any] = {"prompt": prompt.name, "expected": prompt.expected, "modes": dict(by_mode)}
    if {"ar", "linear_spec"} <= by_mode.keys() and not any("error" in by_mode[m] for m in ("ar", "linear_spec")):
        record["linear_spec_is_ar"] = by_mode["linear_spec"]["token_ids"] == by_mode["ar"]["token_ids"]
    return record


def bucketed_tpf(answers: Sequence[Mapping[str, Any]], buckets: Sequence[int] = DEFAULT_BUCKETS) -> dict[str, Any]:
    """Pooled tokens per forward of "all" answers and of those of more than n tokens; None where there is no forward."""
    totals: dict[str, Any] = {}
    for name, least in [("all", 0), *((f">{n}", n + 1) for n in buckets)]:
        chosen = [answer for answer in answers if "error" not in answer and answer["tokens"] >= least]
        forwards = sum(answer["forwards"] - answer["prefill_forwards"] for answer in chosen)
        tokens = sum(answer["tokens"] for answer in chosen)
        given = sum(min(answer["tokens"], answer["prefill_forwards"]) for answer in chosen)
        tpf = (tokens - given) / forwards if forwards else None
        totals[name] = {"answers": len(chosen), "tokens": tokens, "decode_forwards": forwards, "tpf": tpf}
    return totals


def report(step: int, record: Mapping[str, Any]) -> str:
    """A short table of the modes, and the first line of each prompt's answer."""
    answers, totals = record["answers"], record["totals"]
    names = list(next(iter(totals.values()), {}))
    same = [answer["linear_spec_is_ar"] for answer in answers if "linear_spec_is_ar" in answer]
    rows = [(f"step {step}", "tokens", *("TPF" if name == "all" else f"TPF {name}" for name in names), "same as ar")]
    for mode, lengths in totals.items():
        tpf = ["–" if lengths[name]["tpf"] is None else f"{lengths[name]['tpf']:.2f}" for name in names]
        exact = f"{sum(same)} of {len(same)}" if mode == "linear_spec" and same else ""
        rows.append((mode, str(lengths["all"]["tokens"]), *tpf, exact))
    return "\n".join([table(rows), *(_first_lines(answer) for answer in answers)])


def _first_lines(answer: Mapping[str, Any], width: int = 90) -> str:
    mode, first = next(iter(answer["modes"].items()))
    text = f"error: {first['error']}" if "error" in first else first["text"]
    expected = "" if answer["expected"] is None else f" (expected: {_cut(answer['expected'], width // 2)})"
    errors = "".join(f"; {m}: {a['error']}" for m, a in answer["modes"].items() if "error" in a and m != mode)
    return f"  {answer['prompt']}: {_cut(text, width)}{expected}{errors}"


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
