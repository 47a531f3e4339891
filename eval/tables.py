"""A table of a report as plain strings, its Markdown, and how numbers are written in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells are text in which `mode` and **total** are marked as in Markdown."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; a pipe or a line end inside a cell is escaped."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_escape, line)) + " |" for line in lines)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def number(value: float | None, digits: int = 2) -> str:
    """The value with a thousands separator; a dash for None."""
    return NONE if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of 1 as percent; a dash for None."""
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def score(result: Mapping[str, Any] | None) -> str:
    """Score and its standard error, where it has them."""
    if result is None or result["score"] is None:
        return NONE
    error = result["standard_error"]
    return f"{result['score']:.3f}" + ("" if error is None else f" ± {error:.3f}")
