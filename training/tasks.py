"""Questions about synthetic pictures and the one right answer to each.

Answers name row or bar numbers as they go: a short anchor before each look-up is what a small model needs to keep
its place, and a reader too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimode_vlm.training.glyphs import COLORS, ITEMS, SHAPES

Facts = dict[str, Any]
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SPELLED = (*ITEMS, *COLORS, *SHAPES, *NUMBERS)


@dataclass(frozen=True)
class Task:
    """One kind of question.

    kind: the picture kind that it is about, None for text only.
    questions: phrasings, with the fields that `ask` returns beside the answer.
    ask: (facts, rng) -> (fields for the phrasing, answer); a function of both alone.
    is_lookup: short questions that a conversation may ask several times about one picture.
    """

    name: str
    kind: str | None
    questions: tuple[str, ...]
    ask: Callable[[Facts, random.Random], tuple[dict[str, str], str]]
    is_lookup: bool = False

    @property
    def needs_image(self) -> bool:
        return self.kind is not None

    def pose(self, facts: Facts, rng: random.Random) -> tuple[str, str]:
        """Draw one question about these facts: (question, answer)."""
        fields, answer = self.ask(facts, rng)
        return rng.choice(self.questions).format(**fields), answer


def _transcript(answer: Callable[[Facts], str]) -> Callable[[Facts, random.Random], tuple[dict[str, str], str]]:
    return lambda facts, rng: ({}, answer(facts))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, *rows]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]])


def _a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _list(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def _grid_markdown(facts: Facts) -> str:
    board = facts["board"]
    header = ["row", *(str(column) for column in range(1, len(board[0]) + 1))]
    return _table(header, [[str(row), *map(" ".join, cells)] for row, cells in enumerate(board, start=1)])


def _grid_json(facts: Facts) -> str:
    rows = []
    for row, cells in enumerate(facts["board"], start=1):
        rows.append({"row": row, "cells": [{"column": i, "shape": " ".join(c)} for i, c in enumerate(cells, start=1)]})
    return json.dumps(rows)


def _grid_describe(facts: Facts) -> str:
    rows = enumerate(facts["board"], start=1)
    return "\n".join(f"Row {row} shows {_list([_a(' '.join(cell)) for cell in cells])}." for row, cells in rows)


def _grid_size(facts: Facts) -> str:
    return f"The board has {len(facts['board'])} rows and {len(facts['board'][0])} columns."


def _grid_cell(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    row, column = rng.randrange(len(facts["board"])), rng.randrange(len(facts["board"][0]))
    answer = _a(" ".join(facts["board"][row][column]))
    return {"row": str(row + 1), "column": str(column + 1)}, answer


def _receipt_rows(facts: Facts) -> list[list[str]]:
    return [[str(row), item, str(quantity), price] for row, (item, quantity, price) in enumerate(facts["lines"], 1)]


_RECEIPT_HEADER = ["row", "item", "quantity", "price"]


def _receipt_markdown(facts: Facts) -> str:
    return _table(_RECEIPT_HEADER, _receipt_rows(facts)) + f"\nTotal: {facts['total']}"


def _receipt_csv(facts: Facts) -> str:
    lines = [_RECEIPT_HEADER, *_receipt_rows(facts), ["total", "", "", facts["total"]]]
    return "\n".join(",".join(line) for line in lines)


def _receipt_json(facts: Facts) -> str:
    items = [
        {"row": row, "text": f"{item} {quantity} x {price}", "item": item, "quantity": quantity, "price": price}
        for row, (item, quantity, price) in enumerate(facts["lines"], start=1)
    ]
    return json.dumps({"items": items, "total": facts["total"]})


def _receipt_item(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    row = rng.randrange(len(facts["lines"]))
    return {"row": str(row + 1)}, facts["lines"][row][0]


def _receipt_describe_row(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    row = rng.randrange(len(facts["lines"]))
    item, _, price = facts["lines"][row]
    return {"row": str(row + 1)}, f"The {item} in row {row + 1} costs {price}."


def _receipt_line(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    row = rng.randrange(len(facts["lines"]))
    return {"row": str(row + 1)}, facts["lines"][row][2]


def _chart_bar(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    bar = rng.randrange(len(facts["bars"]))
    return {"bar": str(bar + 1)}, str(facts["bars"][bar][2])


def _chart_rows(facts: Facts) -> list[list[str]]:
    return [[str(bar), color, item, str(value)] for bar, (color, item, value) in enumerate(facts["bars"], start=1)]


def _chart_json(facts: Facts) -> str:
    bars = [
        {"bar": bar, "color": color, "item": item, "value": value}
        for bar, (color, item, value) in enumerate(facts["bars"], start=1)
    ]
    return json.dumps({"bars": bars})


def _chart_describe(facts: Facts) -> str:
    return "\n".join(
        f"Bar {bar} is {color} and stands for {item} with a value of {value}."
        for bar, color, item, value in _chart_rows(facts)
    )


def _chart_describe_bar(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    bar = rng.randrange(len(facts["bars"]))
    _, item, value = facts["bars"][bar]
    return {"bar": str(bar + 1)}, f"Bar {bar + 1} stands for {item} and has a value of {value}."


def _count(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    first = rng.randint(10, 60)
    return {"first": str(first)}, " ".join(map(str, range(first, 0, -1)))


def _spell(facts: Facts, rng: random.Random) -> tuple[dict[str, str], str]:
    word = rng.choice(SPELLED)
    return {"word": word}, " ".join(word)


_ALL = (
    Task("grid_markdown", "grid", (
        "Write the board as a Markdown table.",
        "Show this picture as a Markdown table.",
        "What is on the board? Answer with a Markdown table.",
        "Give me the shapes as a table in Markdown.",
    ), _transcript(_grid_markdown)),
    Task("grid_json", "grid", (
        "Write the board as JSON.",
        "Read all the shapes of the board into JSON.",
        "What is on the board? Answer in JSON.",
        "Give me the shapes of this picture as JSON.",
    ), _transcript(_grid_json)),
    Task("grid_describe", "grid", (
        "Describe the board.",
        "Describe this picture row by row.",
        "What does the board show in each row?",
        "Tell me what you see on the board.",
    ), _transcript(_grid_describe)),
    Task("grid_cell", "grid", (
        "What is in row {row}, column {column}?",
        "Which shape is in row {row}, column {column}?",
        "What do you see in row {row} and column {column}?",
        "Name the shape in row {row}, column {column}.",
    ), _grid_cell, is_lookup=True),
    Task("grid_size", "grid", (
        "How large is the board?",
        "How many rows and columns are there?",
        "What is the size of the board?",
        "Count the rows and columns of the board.",
    ), _transcript(_grid_size), is_lookup=True),
    Task("receipt_markdown", "receipt", (
        "Write the receipt as a Markdown table.",
        "Show this picture as a Markdown table.",
        "What is on the receipt? Answer with a Markdown table.",
        "Give me the items as a table in Markdown.",
    ), _transcript(_receipt_markdown)),
    Task("receipt_json", "receipt", (
        "Write the receipt as JSON.",
        "Read all the items of the receipt into JSON.",
        "What is on the receipt? Answer in JSON.",
        "Give me the items of this picture as JSON.",
    ), _transcript(_receipt_json)),
    Task("receipt_csv", "receipt", (
        "Write the receipt as CSV.",
        "Read all the items of the receipt into CSV.",
        "What is on the receipt? Answer in CSV.",
        "Give me the items of this picture as CSV.",
    ), _transcript(_receipt_csv)),
    Task("receipt_item", "receipt", (
        "Which item is in row {row}?",
        "What is item {row} on the receipt?",
        "Name the item in row {row} of the receipt.",
        "What did I buy in row {row}?",
    ), _receipt_item, is_lookup=True),
    Task("receipt_describe_row", "receipt", (
        "Describe row {row}.",
        "Describe row {row} of the receipt.",
        "What does row {row} of the receipt show?",
        "Tell me what you see in row {row}.",
    ), _receipt_describe_row, is_lookup=True),
    Task("receipt_line", "receipt", (
        "What is the price in row {row}?",
        "How much is the item in row {row}?",
        "What does item {row} cost?",
        "Find the price in row {row} of the receipt.",
    ), _receipt_line, is_lookup=True),
    Task("receipt_total", "receipt", (
        "What is the total?",
        "How much did I pay in total?",
        "What is the total of the receipt?",
        "Read the total of the receipt.",
    ), lambda facts, rng: ({}, facts["total"]), is_lookup=True),
    Task("chart_markdown", "chart", (
        "Write the chart as a Markdown table.",
        "Show this picture as a Markdown table.",
        "What is on the chart? Answer with a Markdown table.",
        "Give me the values as a table in Markdown.",
    ), _transcript(lambda facts: _table(["bar", "color", "item", "value"], _chart_rows(facts)))),
    Task("chart_json", "chart", (
        "Write the chart as JSON.",
        "Read all the bars of the chart into JSON.",
        "What is on the chart? Answer in JSON.",
        "Give me the bars of this picture as JSON.",
    ), _transcript(_chart_json)),
    Task("chart_describe", "chart", (
        "Describe the chart.",
        "Describe this picture bar by bar.",
        "What does each bar of the chart show?",
        "Tell me what you see on the chart.",
    ), _transcript(_chart_describe)),
    Task("chart_bar", "chart", (
        "What is the value of bar {bar}?",
        "How high is bar {bar}?",
        "Read the value of bar {bar} on the chart.",
        "Which value does the chart show for bar {bar}?",
    ), _chart_bar, is_lookup=True),
    Task("chart_describe_bar", "chart", (
        "Describe bar {bar}.",
        "Describe bar {bar} of the chart.",
        "What does bar {bar} of the chart show?",
        "Tell me what bar {bar} stands for.",
    ), _chart_describe_bar, is_lookup=True),
    Task("text_count", None, (
        "Count from {first} to 1.",
        "Please count from {first} to 1.",
        "Write all the numbers from {first} to 1.",
    ), _count),
    Task("text_spell", None, (
        "Spell {word}.",
        "Please spell {word}.",
        "Write the letters of {word}.",
    ), _spell),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
