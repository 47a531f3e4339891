"""What a benchmark declares: where its rows are, and three pure functions of a row: images, prompt, answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimode_vlm.eval.sources import Row, Rows, Source
from trimode_vlm.eval.tasks import EvalTask, Example, Messages
from trimode_vlm.eval.tsv_rows import LETTERS, as_list

# Benchmarks' own wording, so that scores can be compared (evaluation.md; lmms-eval and VLMEvalKit use the same).
CHOICE_SUFFIX = "\nAnswer with the option's letter from the given choices directly."
SHORT_SUFFIX = "\nAnswer the question using a single word or phrase."
# Enough for a model that explains itself although it was asked not to: an answer cut short is scored as it is.
SHORT_ANSWER_TOKENS = 128
LONG_ANSWER_TOKENS = 2048
ID_COLUMNS = ("question_id", "questionId", "pid", "unique_id", "id", "index")
_PLACEHOLDER = re.compile(r"<image (\d+)>")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is right: gold and info as the metric reads them, the category that the report groups by."""

    gold: str | list[str]
    category: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


def one_image(row: Row) -> list[Any]:
    """The picture of the column `image`."""
    return [row["image"]]


def no_image(row: Row) -> list[Any]:
    """None: a question in text alone."""
    return []


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark; columns: those that a row must have.

    images: pictures in order, None where a row has no such one. prompt: the text after them; with `placeholders`, each
    `<image N>` in it is replaced by picture N, and pictures stand nowhere else.
    """

    name: str
    source: Source
    columns: tuple[str, ...]
    prompt: Callable[[Row], str]
    answer: Callable[[Row], Answer]
    metric: str
    images: Callable[[Row], Sequence[Any]] = one_image
    placeholders: bool = False
    max_new_tokens: int = SHORT_ANSWER_TOKENS
    macro: bool = False

    def task(self, data: str | None = None) -> EvalTask:
        """The benchmark as a task; data: read from there instead (Source.overridden).

        Raises:
            ValueError: `data` is a YAML file that cannot be used. Data itself is opened by the first example.
        """
        source, said = self.source.overridden(data, self.name) if data else (self.source, {})
        rows = Rows(source, self.name, self.columns)

        def example(index: int, seed: int) -> Example:
            row = rows[index]
            try:
                images = [None if picture is None else rows.picture(picture) for picture in self.images(row)]
                answer = self.answer(row)
                messages = conversation(self.prompt(row), images, self.placeholders)
            except (ValueError, TypeError, KeyError) as error:
                what = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{rows.name(index)}: {what}") from error
            info = {"question_id": question_id(row), **answer.info}
            return Example(id=index, messages=messages, gold=answer.gold, category=answer.category, info=info)

        return EvalTask(
            name=self.name,
            example=example,
            num_rows=rows.__len__,
            fingerprint=rows.fingerprint,
            metric=self.metric,
            needs_image=self.images is not no_image,
            max_new_tokens=said.get("max_new_tokens") or self.max_new_tokens,
            macro=self.macro,
        )


def question_id(row: Row) -> str | None:
    """What the data itself calls the row."""
    return next((str(row[name]) for name in ID_COLUMNS if row.get(name) is not None), None)


def conversation(prompt: str, images: Sequence[Any], placeholders: bool = False) -> Messages:
    """One user turn: the pictures and then the text, or the text with pictures at its placeholders.

    Raises:
        ValueError: a placeholder has no picture.
    """
    pieces = _PLACEHOLDER.split(prompt) if placeholders else [prompt]
    if len(pieces) == 1:
        parts = [{"type": "image", "image": image} for image in images if image is not None]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}] if parts else prompt}]
    parts = []
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            parts += [{"type": "text", "text": piece}] if piece else []
            continue
        number = int(piece)
        if not 1 <= number <= len(images) or images[number - 1] is None:
            raise ValueError(f"the text shows <image {number}>, but there is no image_{number}")
        parts.append({"type": "image", "image": images[number - 1]})
    return [{"role": "user", "content": parts}]


def lettered(options: Sequence[str], end: str = ". ") -> str:
    """The options one a line: `A. first`."""
    return "\n".join(f"{letter}{end}{option}" for letter, option in zip(LETTERS, options, strict=False))


def choices_of(row: Row, column: str = "options") -> list[str]:
    """The options of a row: a list, or one written as Python writes it."""
    return [str(option) for option in as_list(row[column])]


def choice_prompt(row: Row, column: str = "options") -> str:
    """Question, lettered options, and the suffix of multiple choice."""
    return f"{row['question']}\n{lettered(choices_of(row, column))}{CHOICE_SUFFIX}"


def choice_answer(row: Row, choices: Sequence[str], category: str | None = None, **info: Any) -> Answer:
    """The letter of the right option, which the row names by letter, by index from 0 (a number), or by its text.

    Raises:
        ValueError: it names none of the options.
    """
    answer, letters = row["answer"], LETTERS[: len(choices)]
    if isinstance(answer, int) and 0 <= answer < len(choices):
        gold = letters[answer]
    elif str(answer).strip().upper() in [*letters]:
        gold = str(answer).strip().upper()
    elif str(answer) in choices:
        gold = letters[list(choices).index(str(answer))]
    else:
        raise ValueError(f"the answer {answer!r} is none of {len(choices)} options")
    return Answer(gold=gold, category=category, info={"choices": list(choices), **info})


def listed_choices(text: str) -> list[str]:
    """The options that a text itself lists last as `A: one, B: two`, `A. one` or `(A) one`; [] where it lists none."""
    lists = []
    for marker in (r"\(([A-Z])\)\s*", r"(?:^|[\s,])([A-Z])[:.]\s+"):
        found = list(re.finditer(marker, text))
        starts = [place for place, match in enumerate(found) if match[1] == "A"]
        run = found[starts[-1] :] if starts else []
        if len(run) > 1 and LETTERS.startswith("".join(match[1] for match in run)):
            ends = [match.start() for match in run[1:]] + [len(text)]
            texts = [text[match.end() : end].strip() for match, end in zip(run, ends, strict=True)]
            lists.append((run[0].start(), [option.partition("\n")[0].rstrip(" ,") for option in texts]))
    return max(lists, default=(0, []))[1]


def text_or_none(value: Any) -> str | None:
    """Text of a column that may be empty or not there."""
    return str(value) if value not in (None, "") else None
