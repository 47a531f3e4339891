"""A user's own task: a YAML file that names columns and a metric, or just a file of rows.

```yaml
path: rows.parquet            # hub id, folder or file beside this one; config:, split:, images: as for benchmarks
template: "{question} Answer in one word."    # or prompt: COLUMN
image: [front, back]          # one column or several, each with a picture or a list of them; null: text alone
answer: label                 # the right answer, or a list of accepted ones
choices: options              # a list; the answer is then a letter, an index from 0 or an option's text
category: kind
metric: anls
max_new_tokens: 64
```
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimode_vlm.cli import nearest
from trimode_vlm.eval.declarations import (
    CHOICE_SUFFIX,
    Answer,
    Benchmark,
    choice_answer,
    choices_of,
    lettered,
    no_image,
    text_or_none,
)
from trimode_vlm.eval.metrics import METRICS
from trimode_vlm.eval.sources import YAML_SUFFIXES, Row, Rows, Source, read_yaml
from trimode_vlm.eval.tasks import EvalTask
from trimode_vlm.row_files import BUILDERS, JSON_SUFFIXES

SUFFIXES = (*YAML_SUFFIXES, ".tsv", *JSON_SUFFIXES, *BUILDERS)
SOURCE_FIELDS = ("path", "config", "split", "images")
COLUMN_FIELDS = ("prompt", "image", "answer", "choices", "category")
FIELDS = ("name", *SOURCE_FIELDS, "template", *COLUMN_FIELDS, "info", "metric", "max_new_tokens")
# Where nothing is said, the first of these that the first row has.
USUAL_COLUMNS = {
    "prompt": ("question", "prompt", "problem", "query"),
    "image": ("images", "image", "decoded_image"),
    "answer": ("answers", "answer", "label", "gold"),
    "choices": ("choices", "options"),
    "category": ("category",),
}
LETTER_METRICS = ("multiple_choice", "multiple_choice_cot")
MAX_NEW_TOKENS = 1024


def is_own(name: str) -> bool:
    """Whether a task is named by its file."""
    return name.lower().endswith(SUFFIXES)


def load(path: str, data: str | None = None) -> EvalTask:
    """The task that a file describes; data: rows from there instead. Opens the data to find its columns.

    Raises:
        ValueError: the file or its data cannot be read, or a field, column or metric is unknown; one line.
    """
    said: Row = read_yaml(path, FIELDS, "") if path.lower().endswith(YAML_SUFFIXES) else {"path": path}
    if data is not None:
        said["path"] = data
    if not isinstance(said.get("path"), str):
        raise ValueError(f"{path}: path: must name the data, a file, folder or hub id")
    name = str(said.get("name") or Path(path).stem)
    source = Source(**{field: said[field] for field in SOURCE_FIELDS if said.get(field) is not None})
    rows = Rows(source, name, ())
    if not len(rows):
        raise ValueError(f"{path}: {source.path} holds no rows")
    first = rows[0]
    columns = {field: _column(said, field, first, path) for field in COLUMN_FIELDS}
    metric = said.get("metric") or first.get("metric")
    metric = metric or ("multiple_choice" if columns["choices"] else "exact_match")
    if metric not in METRICS:
        raise ValueError(
            f"{path}: unknown metric {metric!r}{nearest(str(metric), METRICS)}; known: {', '.join(METRICS)}"
        )
    own = OwnColumns(
        **columns,
        template=said.get("template"),
        info=said.get("info") or (),
        metric=metric,
        metric_column=None if said.get("metric") else "metric",
    )
    own.check(first, path)
    return Benchmark(
        name=name,
        source=source,
        columns=tuple(own.needed()),
        images=own.images if own.image else no_image,
        placeholders=True,
        prompt=own.text,
        answer=own.right,
        metric=metric,
        max_new_tokens=said.get("max_new_tokens") or MAX_NEW_TOKENS,
    ).task()


def _column(said: Row, field: str, first: Row, path: str) -> Any:
    """The column (or columns) of a field: as said, else the usual one that is there; None where there is none."""
    if field in said:
        return said[field]
    if field == "prompt" and said.get("template"):
        return None
    found = next((name for name in USUAL_COLUMNS[field] if first.get(name) is not None), None)
    if found is None and field in ("prompt", "answer"):
        raise ValueError(
            f"{path}: no column {' or '.join(USUAL_COLUMNS[field])} (columns: {', '.join(map(str, first))}); "
            f"a YAML file names it: {field}: COLUMN"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class OwnColumns:
    """Which columns of a row hold what; the three functions of a benchmark by them."""

    prompt: str | None
    image: str | Sequence[str] | None
    answer: str
    choices: str | None
    category: str | None
    template: str | None
    info: Sequence[str]
    metric: str
    metric_column: str | None = None

    def needed(self) -> list[str]:
        """The columns without which there is no question."""
        # {choices} in a template is the lettered options, whatever their column is called.
        used = [column for column in _template_columns(self.template) if not (column == "choices" and self.choices)]
        return [column for column in (self.prompt, self.answer, self.choices, *used) if column]

    def check(self, first: Row, path: str) -> None:
        """Raise ValueError for a named column that the first row has not."""
        for column in [*self.needed(), *self._image_columns(), *([self.category] if self.category else []), *self.info]:
            if column not in first:
                raise ValueError(f"{path}: no column {column!r} (columns: {', '.join(map(str, first))})")

    def images(self, row: Row) -> list[Any]:
        """Pictures of the image columns, each one or a list."""
        values = [row.get(column) for column in self._image_columns()]
        return [item for value in values for item in (value if isinstance(value, list) else [value]) if item]

    def text(self, row: Row) -> str:
        """The template filled in; or the prompt's column, lettered options and the suffix of multiple choice."""
        options = lettered(choices_of(row, self.choices)) if self.choices else ""
        if self.template:
            values = {name: row[name] for name in _template_columns(self.template) if name in row}
            values |= {"choices": options, str(self.choices): options} if self.choices else {}
            return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), self.template)
        question = str(row[str(self.prompt)])
        return f"{question}\n{options}{CHOICE_SUFFIX}" if options else question

    def right(self, row: Row) -> Answer:
        """The letter for metrics of letters; else the answer as it is.

        Raises:
            ValueError: a row names another metric than the first one.
        """
        other = row.get(self.metric_column) if self.metric_column else None
        if other not in (None, "", self.metric):
            raise ValueError(f"metric {other!r}, but this task is scored by {self.metric!r}: a file for each metric")
        category = text_or_none(row.get(self.category)) if self.category else None
        info = {name: row[name] for name in self.info if row.get(name) is not None}
        answer = row[self.answer]
        if self.choices:
            choices = choices_of(row, self.choices)
            if self.metric in LETTER_METRICS:
                return choice_answer({"answer": answer}, choices, category, **info)
            info["choices"] = choices
        gold = [str(one) for one in answer] if isinstance(answer, (list, tuple)) else str(answer)
        return Answer(gold=gold, category=category, info=info)

    def _image_columns(self) -> list[str]:
        return [self.image] if isinstance(self.image, str) else list(self.image or ())


def _template_columns(template: str | None) -> list[str]:
    return re.findall(r"\{(\w+)\}", template or "")
