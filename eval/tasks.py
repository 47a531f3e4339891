"""What a task is: numbered examples, a metric, a token budget; and the table of task names."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question: chat messages up to the user's turn (image parts hold the picture), and the right answer.

    gold: a JSON value, the answer or a list of accepted ones; the letter of a multiple-choice question.
    category: what the report groups by. info: JSON values that the metric reads beside gold, such as `choices`.
    """

    id: int
    messages: Messages
    gold: Any
    seed: int | None = None
    category: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A named set of examples; `example(index, seed)` is pure, so that any worker can make any of them at any time.

    num_rows: how many there are, or a function that opens the data to see; None: as many as asked for.
    macro: the score is the mean over categories, not over samples.
    default_limit: how many to answer where no limit is given; None: all.
    fingerprint: changes when the data does (sizes and times of its files, say); a resumed run then compares the rows.
    """

    name: str
    example: Callable[[int, int], Example]
    num_rows: int | Callable[[], int] | None = None
    metric: str = "exact_match"
    needs_image: bool = True
    max_new_tokens: int = 1024
    macro: bool = False
    default_limit: int | None = None
    fingerprint: Callable[[], str] | None = None

    @property
    def num_examples(self) -> int | None:
        """How many examples there are; opens the data of a task that is read from a data set.

        Raises:
            ValueError: the data is not there, or cannot be read.
        """
        return self.num_rows() if callable(self.num_rows) else self.num_rows


def select(names: Sequence[str], data: Mapping[str, str] = {}) -> list[EvalTask]:
    """The named tasks in the order given, groups expanded, each once.

    data: task -> a local path or hub id to read instead of the task's own source.

    Raises:
        ValueError: an unknown name; names the nearest known one.
    """
    from trimode_vlm.eval import nano_tasks

    tasks = nano_tasks.tasks()
    groups = {"nano": list(tasks)}
    chosen: dict[str, EvalTask] = {}
    for name in names:
        if name not in tasks and name not in groups:
            near = difflib.get_close_matches(name, [*tasks, *groups], n=1, cutoff=0.0)
            raise ValueError(f"unknown task {name!r}, did you mean {near[0]!r}? Known: {', '.join([*groups, *tasks])}")
        chosen |= {member: tasks[member] for member in groups.get(name, [name])}
    return list(chosen.values())


def images_of(messages: Messages) -> list[Any]:
    """The pictures of the image parts, in order."""
    return [part["image"] for part in _parts(messages) if part.get("type") == "image"]


def with_images(example: Example, images: Sequence[Any]) -> Example:
    """The same question about other pictures.

    Raises:
        ValueError: the number of pictures differs from the number of image parts.
    """
    wanted = len(images_of(example.messages))
    if len(images) != wanted:
        raise ValueError(f"example {example.id} has {wanted} images but received {len(images)}")
    rest = iter(images)

    def swap(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [{**part, "image": next(rest)} if part.get("type") == "image" else part for part in content]

    return replace(example, messages=[{**message, "content": swap(message["content"])} for message in example.messages])


def derangement(n: int, seed: int) -> list[int]:
    """A random cyclic permutation of range(n) (Sattolo): no element keeps its place.

    Raises:
        ValueError: fewer than two elements.
    """
    if n < 2:
        raise ValueError(f"shuffling images needs at least 2 samples per task, found {n}")
    generator = random.Random(seed)
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = generator.randrange(i)
        order[i], order[j] = order[j], order[i]
    return order


def _parts(messages: Messages) -> list[dict[str, Any]]:
    return [part for message in messages if not isinstance(message["content"], str) for part in message["content"]]
