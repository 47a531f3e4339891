"""From planned samples to records: examples, one generate() call per batch, scores."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trimode_vlm.cli import one_line
from trimode_vlm.eval import ranks
from trimode_vlm.eval.metrics import score
from trimode_vlm.eval.prompts import inputs_of
from trimode_vlm.eval.run_folder import question_hash
from trimode_vlm.eval.settings import EvalSettings
from trimode_vlm.eval.state import Key, Record
from trimode_vlm.eval.tasks import EvalTask, Example, images_of, select, with_images

Loader = Callable[..., tuple[Any, Any]]
# Of a first answer in each mode that is thrown away: a few, so that every kind of forward runs once.
WARM_UP_TOKENS = 8


class SampleError(ValueError):
    """One sample could not be read or answered; the message names task, row and file."""


def batches(keys: Sequence[Key], batch_size: int) -> list[list[Key]]:
    """Rows of one task in one mode with successive ids, at most `batch_size`.

    A row's batch is a matter of its id alone, so the number of ranks and what was answered before do not change which
    rows are padded together, and row b may draw from the random stream of its first id + b.
    """
    result: list[list[Key]] = []
    for key in keys:
        last = result[-1][-1] if result else None
        if last is not None and last[:3] == key[:3] and last.id == key.id - 1 and key.id % batch_size:
            result[-1].append(key)
        else:
            result.append([key])
    return result


def share(keys: Sequence[Key], batch_size: int, index: int, count: int) -> list[Key]:
    """What process `index` of `count` answers: every `count`-th batch; nobody receives a sample twice."""
    return [key for batch in batches(keys, batch_size)[index::count] for key in batch]


def answers(settings: EvalSettings, keys: Sequence[Key], loader: Loader) -> Iterator[list[Record]]:
    """Records of `keys`, batch by batch, in order; one model is in memory at a time.

    A record with `error` stands for a sample that was skipped.

    Raises:
        SampleError: a sample cannot be read or answered, and `on_error` is "raise".
    """
    tasks = {task.name: task for task in select(settings.tasks, settings.data)}
    answerer = None
    for batch in batches(keys, settings.batch_size):
        path = checkpoint(settings, batch[0])
        if answerer is None or answerer.path != path:
            answerer = None  # frees the other model first
            answerer = Answerer(settings, path, loader, is_control=batch[0].run == "control")
        yield from answerer.answer_in_parts(tasks[batch[0].task], batch)


def checkpoint(settings: EvalSettings, key: Key) -> str:
    """The model folder or hub id that answers a sample."""
    return settings.control if key.run == "control" and settings.control else settings.model


def load(path: str, **options: Any) -> tuple[Any, Any]:
    """`trimode_vlm.load`, with a processor.

    Raises:
        ValueError: the folder holds no tokenizer.
    """
    import trimode_vlm

    model, processor = trimode_vlm.load(path, **options)
    if processor is None:
        raise ValueError(f"{path} holds no tokenizer, so there is no way to ask it anything")
    return model, processor


def check_adapter(model: Any, path: str, adapter: str | None) -> None:
    """Raise ValueError where an adapter was asked for and `auto` found none: there would be nothing to measure."""
    if adapter and model.draft_adapter is None:
        raise ValueError(f"{path} has no draft adapter beside its weights: name its folder with --adapter")


class Answerer:
    """One loaded model, and what it answers."""

    def __init__(self, settings: EvalSettings, path: str, loader: Loader, is_control: bool) -> None:
        self.settings, self.path = settings, path
        self.device = ranks.own_device(settings.device or "cpu")
        options = settings.load_options(is_control) | {"device": self.device}
        self.model, self.processor = loader(path, **options)
        self._warm_modes: set[str] = set()

    def answer_in_parts(self, task: EvalTask, keys: list[Key]) -> Iterator[list[Record]]:
        """Answer a batch; where that fails, its halves, until the one sample is found that cannot be answered."""
        import torch

        try:
            records = self.answer(task, keys)
        except Exception as error:
            if len(keys) == 1:
                yield [_failed(task, keys[0], error, self.settings)]
                return
            if isinstance(error, torch.OutOfMemoryError):
                message = f"{task.name}: out of memory with {len(keys)} rows, answering them in halves"
                warnings.warn(message, stacklevel=2)
        else:
            yield records
            return
        # Outside the handler, whose traceback would keep the failed batch's tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = len(keys) // 2
        yield from self.answer_in_parts(task, keys[:middle])
        yield from self.answer_in_parts(task, keys[middle:])

    def answer(self, task: EvalTask, keys: Sequence[Key]) -> list[Record]:
        """Records of one batch of samples of one task in one mode."""
        settings, mode = self.settings, keys[0].mode
        examples = [_example(task, key, settings.seed) for key in keys]
        inputs = inputs_of(self.processor, [example.messages for example in examples])
        if self.device != "cpu":
            inputs = inputs.to(self.device)
        budget = settings.budget(task)
        if mode not in self._warm_modes:
            # Whoever comes first would pay for the first touch of weights and kernels, and `auto` for its measurement.
            self.model.generate(**inputs, **settings.generate_options(mode, min(budget, WARM_UP_TOKENS)))
            self._warm_modes.add(mode)
        out = self.model.generate(**inputs, **settings.generate_options(mode, budget, keys[0].id))
        width = inputs["input_ids"].shape[1]
        to_first_token = getattr(out, "seconds_to_first_token", None) or [None] * len(keys)
        records = []
        for row, (key, example) in enumerate(zip(keys, examples, strict=True)):
            ids = out.sequences[row, width : width + out.num_new_tokens[row]].tolist()
            record = {
                **key._asdict(),
                "question_id": example.info.get("question_id"),
                "seed": example.seed,
                "category": example.category,
                **({"macro": True} if task.macro else {}),
                "question": question_text(example),
                "prediction": self.processor.decode(ids, skip_special_tokens=True),
                "gold": example.gold,
                # All that the metric reads, so that a line can be scored again without its data set.
                "info": dict(example.info),
                "num_new_tokens": int(out.num_new_tokens[row]),
                "nfe": int(out.nfe[row]),
                "nfe_prefill": int(out.nfe_prefill[row]),
                "prompt_tokens": int(inputs["attention_mask"][row].sum()) if "attention_mask" in inputs else width,
                "seconds": float(out.seconds[row]),
                "seconds_to_first_token": to_first_token[row],
                "finish_reason": out.finish_reasons[row],
                "accepted_lengths": [int(n) for n in out.accepted_lengths[row] or []],
                "ids_hash": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
                "question_hash": question_hash(example),
            }
            records.append(scored(record, task.metric, settings.metric_style))
        return records


def _failed(task: EvalTask, key: Key, error: Exception, settings: EvalSettings) -> Record:
    """The record of a skipped sample; of an error that says nothing about the sample, the error again."""
    import torch

    message = one_line(error)
    is_of_sample = isinstance(error, (ValueError, OSError, torch.OutOfMemoryError))
    if settings.on_error == "skip" and is_of_sample:
        return {**key._asdict(), "error": message}
    hint = "; --on-error skip leaves such samples out" if is_of_sample else ""
    if not message.startswith(f"{task.name}: "):  # what reads a data set says the row itself
        message = f"{task.name}, row {key.id}: {message}"
    raise SampleError(f"{message}{_file(task, key, settings)}{hint}") from error


def _file(task: EvalTask, key: Key, settings: EvalSettings) -> str:
    """The picture files of a sample, where it has such."""
    try:
        images = images_of(task.example(key.id, settings.seed).messages)
    except Exception:  # what is wrong with the example is being told already
        return ""
    paths = [image.get("path") if isinstance(image, dict) else image for image in images]
    names = [path for path in paths if isinstance(path, str) and not path.startswith("data:")]
    return f" ({', '.join(names)})" if names else ""


def scored(record: Mapping[str, Any], metric: str, style: str) -> Record:
    """The record with its score by a metric; the answer is the state, the score follows from it.

    Raises:
        ValueError: a gold answer or info that the metric cannot use.
    """
    result = score(metric, record["prediction"], record["gold"], record.get("info"), style)
    return {**record, "metric": metric, "metric_style": style, "score": result.score, "parsed": result.parsed}


def question_text(example: Example) -> str:
    """The text of the last message; pictures in it are left out."""
    content = example.messages[-1]["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    return "\n".join(part["text"] for part in parts if "text" in part)


def _example(task: EvalTask, key: Key, seed: int) -> Example:
    example = task.example(key.id, seed)
    if key.image_from == key.id:
        return example
    return with_images(example, images_of(task.example(key.image_from, seed).messages))
