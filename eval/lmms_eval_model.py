"""Our model as a model of lmms-eval, for its whole task list.

Install lmms-eval beside this package, then::

    lmms-eval --model trimode_vlm --model_args pretrained=MODEL,mode=linear_spec,tpf_output=reports/tpf.json \\
        --tasks ai2d,chartqa,docvqa_val,mmmu_val --batch_size 1 --output_path reports/lmms

lmms-eval finds the model by the entry point `lmms_eval.models` of this package; from a checkout that is not installed,
`python -m trimode_vlm.eval.lmms_eval_model` takes the same arguments. Two traps of lmms-eval 0.7.3: it needs
`filelock<4`, and its dependency latex2sympy2 wants another antlr4 than math-verify of our extra `eval`, so that
the two go into one environment with `--no-deps` only.

Model arguments: those of `HarnessModel`. Chat messages are used where a task can make them; `--force_simple` gives the
older interface of a text and its pictures, which tasks by log-likelihood need. Those are the AR path's, a plain causal
forward, in every mode.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from tqdm import tqdm

from trimode_vlm.eval.harness import HarnessModel, batches, counted, device_of, num_ranks
from trimode_vlm.eval.prompts import inputs_of


class TriModeSimple(lmms):
    """A text and its pictures as one user message; answers by `generate` in the chosen mode."""

    is_simple = True

    def __init__(
        self,
        pretrained: str = "nano",
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        system_prompt: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.answers = HarnessModel(pretrained, device=device_of(device), **options)
        self.system_prompt = self._resolve_system_prompt(system_prompt) if system_prompt else None
        self.batch_size_per_gpu = 1 if str(batch_size).startswith("auto") else int(batch_size)
        # lmms-eval's evaluator, which sets rank and world size, puts its own tensors there.
        self.device = self.answers.model.device

    @property
    def tokenizer(self) -> Any:
        """lmms-eval asks for it where a task counts tokens."""
        return self.answers.processor.tokenizer

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Answers in the order of the requests, batched by generation options; then the counts, once per call."""
        conversations = [self._with_system(self.messages(request.args)) for request in requests]
        generation = [self.generation(request.args) for request in requests]
        lengths = [len(str(request.args[0])) for request in requests]
        texts, counts = [""] * len(requests), counted(requests)
        progress = tqdm(total=len(requests), disable=self.rank != 0, desc="Model Responding")
        for chosen in batches(conversations, generation, lengths, self.batch_size_per_gpu):
            inputs = inputs_of(self.answers.processor, [conversations[index] for index in chosen])
            answers = self.answers.answer(inputs, generation[chosen[0]], [counts[index] for index in chosen])
            for index, text in zip(chosen, answers, strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
            progress.update(len(chosen))
        progress.close()
        self.answers.report()
        return texts

    def messages(self, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        """A request's conversation: pictures first, as lmms-eval's own chat models have it."""
        text, _, doc_to_visual, doc_id, task, split = arguments
        pictures = doc_to_visual(self.task_dict[task][split][doc_id]) or []
        return [{"role": "user", "content": [*map(_image, pictures), {"type": "text", "text": text}]}]

    def generation(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """A request's generation options."""
        return arguments[1]

    @torch.inference_mode()
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Sum of the log-probabilities of each continuation, and whether greedy AR would write it."""
        results = []
        for request in tqdm(requests, disable=self.rank != 0, desc="loglikelihood"):
            _, target, _, doc_id, task, split = request.args
            continuation = target if isinstance(target, str) else target(self.task_dict[task][split][doc_id])
            conversation = self._with_system(self.messages(request.args))
            inputs = inputs_of(self.answers.processor, [conversation]).to(self.answers.model.device)
            ids = self.tokenizer(str(continuation), add_special_tokens=False, return_tensors="pt")["input_ids"]
            ids = ids.to(self.answers.model.device)
            width = inputs["input_ids"].shape[1]
            inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            logits = self.answers.model(**inputs).logits[:, width - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(-1, ids[..., None])
            results.append((float(chosen.sum()), bool((logits.argmax(-1) == ids).all())))
        return results

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        """Not offered: its tasks hold the conversation in the task's own code."""
        raise NotImplementedError("trimode_vlm answers single-round tasks; leave multi-round tasks out of --tasks")

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._apply_system_prompt(messages, self.system_prompt) if self.system_prompt else messages


class TriModeChat(TriModeSimple):
    """The same on the messages that a task makes."""

    is_simple = False

    def messages(self, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
        """A request's conversation, as the task's doc_to_messages gives it."""
        _, doc_to_messages, _, doc_id, task, split = arguments
        messages = doc_to_messages(self.task_dict[task][split][doc_id])
        return [message | {"content": [_part(part) for part in message["content"]]} for message in messages]

    def generation(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """A request's generation options."""
        return arguments[2]


def manifest() -> ModelManifest:
    """What the entry point `lmms_eval.models` gives lmms-eval."""
    return ModelManifest(
        model_id="trimode_vlm",
        simple_class_path=f"{MODULE}.TriModeSimple",
        chat_class_path=f"{MODULE}.TriModeChat",
    )


MODULE = "trimode_vlm.eval.lmms_eval_model"


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    if part["type"] != "image":
        raise ValueError(f"trimode_vlm takes text and pictures, and this task has a part of type {part['type']!r}")
    return _image(part["url"])


def _image(picture: Any) -> dict[str, Any]:
    """A picture as a part of a message; a path stands for a file that is one."""
    return {"type": "image", "image": picture}


def run_command() -> int:
    """lmms-eval's command; returns the exit code, which is 1 where it only prints that an evaluation died."""
    from lmms_eval import __main__ as command

    evaluate, has_died = command.cli_evaluate_single, []

    def watched(*args: Any) -> Any:
        try:
            return evaluate(*args)
        except Exception:
            has_died.append(True)
            raise

    command.cli_evaluate_single = watched
    command.cli_evaluate()
    return 1 if has_died else 0


if __name__ == "__main__":
    from lmms_eval.models import MODEL_REGISTRY_V2

    MODEL_REGISTRY_V2.register_manifest(manifest(), overwrite=True)
    if num_ranks() > 1 and not torch.cuda.is_available():
        # lmms-eval would leave this to accelerate, which finds ranks on a CPU only when told to.
        torch.distributed.init_process_group("gloo")
    sys.exit(run_command())
