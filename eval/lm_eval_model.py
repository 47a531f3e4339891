"""Our model as a model of lm-eval (EleutherAI's harness), for its whole task list.

Install lm-eval beside this package, then, with lm-eval's own arguments::

    python -m trimode_vlm.eval.lm_eval_model run --model trimode_vlm \\
        --model_args pretrained=MODEL,mode=linear_spec,block_length=32,tpf_output=reports/tpf.json \\
        --tasks gsm8k,ifeval,mmlu --apply_chat_template --batch_size 8

From Python, importing this module is enough for `lm_eval.simple_evaluate(model="trimode_vlm", model_args=...)`. lm-eval
finds models by import only, so that its own `lm-eval` command does not know this one.

Model arguments: those of `HarnessModel`, and of lm-eval's HFLM (max_length, prefix_token_id, think_end_token ...).
Log-likelihoods are those of the AR path, a plain causal forward, in every mode; tasks with pictures (`mmmu_val`) are
answered through the processor. Prompts are rendered text here, so a special token that a task's text spells out is one.
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate import Accelerator
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from trimode_vlm.eval.harness import HarnessModel, batches, counted, device_of, num_ranks

IMAGE_PLACEHOLDER = "<image>"
"""What lm-eval's tasks write where a picture stands."""

HFLM_OPTIONS = (
    *("batch_size", "max_batch_size", "max_length", "truncation", "add_bos_token", "prefix_token_id", "logits_cache"),
    *("softmax_dtype", "think_end_token", "enable_thinking", "chat_template_args"),
)


@register_model("trimode_vlm")
class TriModeLM(HFLM):
    """HFLM's tokenising and log-likelihoods on our model; answers by `generate` in the chosen mode."""

    MULTIMODAL = True

    def __init__(self, pretrained: str = "nano", device: str | None = None, **options: Any) -> None:
        hflm = {name: options.pop(name) for name in HFLM_OPTIONS if name in options}
        if str(hflm.get("think_end_token", "")).isdigit():
            raise ValueError("think_end_token takes the token's text, such as </think>, not its id")
        self.answers = HarnessModel(pretrained, device=device_of(device), **options)
        super().__init__(
            pretrained=self.answers.model, tokenizer=self.answers.processor.tokenizer, backend="causal", **hflm
        )
        if num_ranks() > 1:
            # HFLM gathers by it; of a model that is loaded already it takes for granted that it is alone.
            self.accelerator = Accelerator(cpu=self.device.type == "cpu")
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers in the order of the requests, batched by generation options; then the counts, once per call."""
        arguments = [request.args for request in requests]
        generation = [args[1] for args in arguments]
        texts, counts = [""] * len(requests), counted(requests)
        progress = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="generate_until")
        size = 1 if self.batch_size == "auto" else int(self.batch_size)
        for chosen in batches(arguments, generation, [len(args[0]) for args in arguments], size):
            inputs = self._inputs([arguments[index] for index in chosen])
            answers = self.answers.answer(inputs, generation[chosen[0]], [counts[index] for index in chosen])
            for index, text in zip(chosen, answers, strict=True):
                texts[index] = self._after_thinking(text)
                self.cache_hook.add_partial("generate_until", arguments[index], texts[index])
            progress.update(len(chosen))
        progress.close()
        self.answers.report()
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The rendered chat; where the task's text marks a picture, the mark stays until the picture is there."""
        return self.answers.processor.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )

    def _inputs(self, arguments: list[tuple[Any, ...]]) -> Any:
        """Tensors of rendered prompts and of the pictures that requests of multimodal tasks carry."""
        processor = self.answers.processor
        images: list[Any] = []
        texts: list[str] = []
        for text, _, *more in arguments:
            pictures = more[0]["visual"] if more else []
            images += pictures
            # Without a picture the mark is text that somebody wrote.
            texts.append(text.replace(IMAGE_PLACEHOLDER, processor.image_token) if pictures else text)
        special = {} if self.add_bos_token is None else {"add_special_tokens": bool(self.add_bos_token)}
        return processor(text=texts, images=images or None, padding=True, padding_side="left", **special)

    def _after_thinking(self, text: str) -> str:
        if isinstance(self.think_end_token, str):
            return text.rpartition(self.think_end_token)[2].lstrip()
        return text

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the results."""
        model = self.answers.model
        return {
            "model_num_parameters": sum(p.numel() for p in model.parameters()),
            "model_dtype": str(model.dtype),
            "model_revision": "",
            "model_sha": "",
            "trimode_vlm": self.answers.decoding,
        }


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
