"""Synthetic samples for the nano model: conversations about pictures whose contents are known.

Everything is a pure function of its seed. Seeds below HELD_OUT_SEED are for training, seeds from it on for
evaluation; they draw from the same distribution.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from trimode_vlm.training.glyphs import CELL
from trimode_vlm.training.pictures import KINDS, Picture, make_picture
from trimode_vlm.training.tasks import TASKS, Task

__all__ = [
    "CELL",
    "HELD_OUT_SEED",
    "KINDS",
    "TASKS",
    "Picture",
    "Sample",
    "Task",
    "all_texts",
    "examples",
    "make_conversation",
    "make_picture",
    "make_sample",
    "questions",
]

HELD_OUT_SEED = 1_000_000_000


@dataclass(frozen=True)
class Sample:
    """A conversation for the processor; the picture, if there is one, is in the first user turn.

    answer: the last assistant turn.
    """

    task: str
    seed: int
    image: Image.Image | None
    messages: list[dict[str, Any]]
    answer: str

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) in pixels, None for text only."""
        return None if self.image is None else (self.image.height, self.image.width)

    @property
    def question(self) -> str:
        """The last user turn without its picture."""
        content = self.messages[-2]["content"]
        return content if isinstance(content, str) else content[-1]["text"]


def make_sample(task: str, seed: int, max_scale: float = 1.0) -> Sample:
    """One question of this task; max_scale in 0..1 bounds the size of its picture."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}, expected one of {', '.join(TASKS)}")
    kind = TASKS[task].kind
    rng = random.Random(f"{task}-{seed}")
    # The tasks of one seed show different pictures.
    picture = None if kind is None else make_picture(kind, _picture_seed(rng, seed), max_scale)
    turn = TASKS[task].pose(picture.facts if picture else {}, rng)
    return _sample(task, seed, picture, [turn])


def make_conversation(kind: str, seed: int, num_turns: int = 5, max_scale: float = 1.0) -> Sample:
    """Several short questions about one picture (task name "<kind>_turns")."""
    rng = random.Random(f"{kind}-turns-{seed}")
    picture = make_picture(kind, _picture_seed(rng, seed), max_scale)
    turns = [(question, answer) for _, question, answer in questions(picture, rng, num_turns)]
    return _sample(f"{kind}_turns", seed, picture, turns)


def questions(
    picture: Picture, rng: random.Random, num_questions: int, tasks: Sequence[str] | None = None
) -> list[tuple[str, str, str]]:
    """Up to num_questions different (task, question, answer) about one picture, cycling over the tasks in random order.

    tasks: names to draw from; by default the look-ups of the picture's kind.
    """
    names = [t.name for t in TASKS.values() if t.kind == picture.kind and t.is_lookup] if tasks is None else list(tasks)
    wrong = [name for name in names if TASKS[name].kind != picture.kind]
    if wrong:
        raise ValueError(f"{wrong[0]} does not ask about a {picture.kind}")
    asked: dict[tuple[str, str], tuple[str, str, str]] = {}
    # A look-up asked twice in other words would teach nothing, so small pictures run out of questions.
    for _ in range(4 * num_questions):
        rng.shuffle(names)
        for name in names:
            fields, answer = TASKS[name].ask(picture.facts, rng)
            question = rng.choice(TASKS[name].questions).format(**fields)
            asked.setdefault((name, repr(fields)), (name, question, answer))
            if len(asked) == num_questions:
                return list(asked.values())
    return list(asked.values())


def _picture_seed(rng: random.Random, seed: int) -> int:
    """A seed on the same side of HELD_OUT_SEED."""
    held_out = seed >= HELD_OUT_SEED
    return rng.randrange(HELD_OUT_SEED) + (HELD_OUT_SEED if held_out else 0)


def _sample(task: str, seed: int, picture: Picture | None, turns: list[tuple[str, str]]) -> Sample:
    image = picture.image if picture else None
    messages: list[dict[str, Any]] = []
    for question, answer in turns:
        content: Any = question
        if image is not None and not messages:
            content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Sample(task, seed, image, messages, turns[-1][1])


def all_texts(num_samples_per_task: int = 40) -> Iterator[str]:
    """Questions and answers of training seeds, enough of them to hold every word and piece that can occur."""
    for task in TASKS.values():
        rng = random.Random(task.name)
        for seed in range(num_samples_per_task):
            facts = make_picture(task.kind, seed).facts if task.kind else {}
            fields, answer = task.ask(facts, rng)
            yield from (question.format(**fields) for question in task.questions)
            yield answer


_EXAMPLES = (
    ("board-1", "grid_markdown", 16), ("board-2", "grid_describe", 32),
    ("receipt-1", "receipt_json", 2), ("receipt-2", "receipt_markdown", 10),
    ("chart-1", "chart_json", 14), ("chart-2", "chart_describe", 10),
)  # fmt: skip


def examples() -> list[tuple[str, Sample]]:
    """Six held-out samples with file names, two of each kind."""
    return [(name, make_sample(task, HELD_OUT_SEED + seed)) for name, task, seed in _EXAMPLES]


def write_examples(folder: Path) -> None:
    """Write the examples' pictures and questions.json: a list of image, task, question and answer."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, sample in examples():
        assert sample.image is not None
        sample.image.save(folder / f"{name}.png", optimize=True)
        entry = {"image": f"{name}.png", "task": sample.task, "question": sample.question, "answer": sample.answer}
        entries.append(entry)
    (folder / "questions.json").write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]))
