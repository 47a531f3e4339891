"""What a task is: numbered examples, a metric, a token budget; and the table of task names."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimode_vlm.cli import nearest

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
    """The named tasks in the order given, groups expanded, each once; a file's name is a user's own task.

    data: task -> what to read instead of the task's own source: a local path, a hub id, or a YAML file of its fields.

    Raises:
        ValueError: an unknown name in `names` or `data`, with the nearest known one; an own task that cannot be read.
    """
    from trimode_vlm.eval import benchmarks, nano_tasks, own_tasks

    nano = nano_tasks.tasks()
    groups = {"nano": list(nano), **benchmarks.GROUPS}
    known = [*groups, *benchmarks.BENCHMARKS, *nano]
    chosen: dict[str, EvalTask] = {}
    for name in names:
        if own_tasks.is_own(name):
            task = own_tasks.load(name)
            if task.name in known:
                hint = f"{name}: {task.name!r} is a task already; give the file another name"
                raise ValueError(f"{hint}, or read that task from it: --tasks {task.name} --data {task.name}={name}")
            chosen[task.name] = task
            continue
        if name not in known:
            hint = "a file (.yaml, .jsonl, .tsv ...) is a task of your own"
            raise ValueError(f"unknown task {name!r}{nearest(name, known)}; {hint}; known: {', '.join(known)}")
        for member in groups.get(name, [name]):
            chosen[member] = nano[member] if member in nano else benchmarks.BENCHMARKS[member].task(data.get(member))
    for name in data:
        if name not in chosen or name not in benchmarks.BENCHMARKS:
            usable = [task for task in chosen if task in benchmarks.BENCHMARKS]
            what = f"the tasks that read data are {', '.join(usable)}" if usable else "no task here reads data"
            raise ValueError(f"--data {name}={data[name]}: {what}{nearest(name, usable)}")
    return list(chosen.values())


def list_tasks() -> str:
    """The table of known tasks, a line each: name, metric, budget of tokens, data; then the groups."""
    from trimode_vlm.eval import benchmarks, nano_tasks

    lines = [("task", "metric", "tokens", "data")]
    for name, benchmark in benchmarks.BENCHMARKS.items():
        source = ", ".join(filter(None, (benchmark.source.path, benchmark.source.config, benchmark.source.split)))
        lines.append((name, benchmark.metric, str(benchmark.max_new_tokens), source))
    for name, task in nano_tasks.tasks().items():
        lines.append((name, task.metric, str(task.max_new_tokens), "made here, held out from nano's training"))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    groups = {**benchmarks.GROUPS, "nano": ["all held-out synthetic tasks"]}
    return "\n".join([*table, "", *(f"{name}: {', '.join(members)}" for name, members in groups.items())])


def images_of(messages: Messages) -> list[Any]:
    """The pictures of the image parts, in order."""
    return [part["image"] for part in _parts(messages) if part.get("type") == "image"]


def with_images(example: Example, images: Sequence[Any]) -> Example:
    """The same question about other pictures; too few of them are shown again, too many are left out.

    Raises:
        ValueError: there is an image part and no picture.
    """
    if not images and images_of(example.messages):
        raise ValueError(f"example {example.id} has {len(images_of(example.messages))} images but received 0")
    rest = itertools.cycle(images)

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
