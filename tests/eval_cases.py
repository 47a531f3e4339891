"""A scripted model, processor and tasks in place of real ones, for the tests of the evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimode_vlm.eval import nano_tasks, ranks, report_html, run, state
from trimode_vlm.eval.tasks import EvalTask, Example

PAD = 0


def example(index: int, seed: int) -> Example:
    """The picture says which sample it is of; its answer has 3 * index + 1 letters (seed 1: 60 * index + 1)."""
    length = (60 if seed == 1 else 3) * index + 1
    content = [{"type": "image", "image": f"picture {index}"}, {"type": "text", "text": f"question {index}"}]
    return Example(id=index, messages=[{"role": "user", "content": content}], gold=chr(97 + index) * length, seed=seed)


TASKS = {
    "spell": EvalTask(name="spell", example=example, num_rows=50),
    "recite": EvalTask(name="recite", example=example, num_rows=3, needs_image=False, max_new_tokens=7),
}


class StubProcessor:
    """Characters are tokens; the prompt is the picture's number and the question's number."""

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Any]:
        assert options["add_generation_prompt"] and options["return_tensors"] == "pt"
        conversations = messages if isinstance(messages[0], list) else [messages]
        rows = []
        for conversation in conversations:
            picture, question = (part.get("image") or part["text"] for part in conversation[0]["content"])
            rows.append([int(picture.split()[1]), int(question.split()[1])])
        return {"input_ids": torch.tensor(rows)}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens and PAD not in ids
        return "".join(map(chr, ids))


class StubModel:
    """Spells the answer of the sample that the picture is of, in the forwards that each mode's rule asks for."""

    def __init__(self, seed: int = 0, fail_after: int | None = None) -> None:
        self.seed, self.fail_after, self.calls = seed, fail_after, []  # type: tuple[int, int | None, list[Any]]
        self.warm_modes: set[str] = set()

    def generate(self, input_ids: Any, *, mode: str, max_new_tokens: int, do_sample: bool, **options: Any) -> Any:
        is_warm_up = mode not in self.warm_modes  # the runner throws the first answer in each mode away
        self.warm_modes.add(mode)
        if self.fail_after is not None and not is_warm_up and len(self.calls) >= self.fail_after:
            raise KeyboardInterrupt
        assert not do_sample and ("threshold" in options) == (mode == "diffusion")
        if not is_warm_up:
            self.calls.append((mode, input_ids.tolist(), max_new_tokens, options))
        golds = [example(picture, self.seed).gold for picture, _ in input_ids.tolist()]
        if mode == "diffusion":
            golds = [gold[:-1] + "!" for gold in golds]
        ids = [[ord(c) for c in gold][:max_new_tokens] for gold in golds]
        width = max(map(len, ids)) + 2
        rows = [
            [*prompt, *row, *[PAD] * (width - len(row))] for prompt, row in zip(input_ids.tolist(), ids, strict=True)
        ]
        accepted = [[4] * ((len(row) - 1) // 4) + ([(len(row) - 1) % 4] if (len(row) - 1) % 4 else []) for row in ids]
        decode = {
            "ar": [len(row) - 1 for row in ids],
            "diffusion": [len(row) for row in ids],
            "linear_spec": [2 * len(lengths) for lengths in accepted],
        }[mode]
        return SimpleNamespace(
            sequences=torch.tensor(rows),
            num_new_tokens=[len(row) for row in ids],
            nfe=[1 + n for n in decode],
            nfe_prefill=[1] * len(ids),
            seconds=[0.5] * len(ids),
            finish_reasons=["length" if len(row) == max_new_tokens else "stop" for row in ids],
            accepted_lengths=accepted if mode == "linear_spec" else [[] for _ in ids],
        )


@pytest.fixture(autouse=True)
def stub_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks above; and no page, whose plots take longer than all else together, and no GPU."""
    monkeypatch.setattr(nano_tasks, "tasks", lambda: TASKS)
    monkeypatch.setattr(report_html, "page", lambda result: "")
    monkeypatch.setattr(ranks, "default_device", lambda: "cpu")


def settings(tmp_path: Path, **changes: Any) -> run.EvalSettings:
    base = run.EvalSettings(
        model="stub",
        tasks=("spell",),
        modes=("ar", "linear_spec"),
        output=str(tmp_path / "out"),
        limit=5,
        device="cpu",
    )
    return replace(base, **changes)


def evaluate(chosen: run.EvalSettings, model: StubModel) -> dict[str, Any]:
    return run.evaluate(chosen, loader=lambda path, dtype, device: (model, StubProcessor()))


def lines(chosen: run.EvalSettings) -> list[dict[str, Any]]:
    return state.read_file(Path(chosen.output) / "samples.jsonl")
