"""A report as one HTML page that needs nothing else: no script, no font, no picture from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from trimode_vlm.eval import report_plots, report_tables
from trimode_vlm.eval.tables import NONE, number, score

NO_PLOTS = "No plots: matplotlib is not installed (pip install 'trimode-vlm[eval]')."

# Okabe and Ito's colours, which stay apart for colour-blind eyes; lighter ones of the same hues on dark.
COLORS = (
    ("#0072B2", "#56B4E9"),
    ("#D55E00", "#F0924A"),
    ("#009E73", "#2CC79B"),
    ("#A8548A", "#DE9BC4"),
    ("#8A7200", "#E3C740"),
    ("#555555", "#BBBBBB"),
)

_NUMBER = re.compile(r"[\d.,]+( ± [\d.,]+)?( %)?|\d+/\d+|–|")


def page(report: Mapping[str, Any]) -> str:
    """The page; without matplotlib it has no plots and says so."""
    try:
        plots = report_plots.draw(report)
    except ImportError:
        plots = None
    # autoescape: answers, names and categories are other people's text.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"marked": marked, "breakable": breakable, "text": as_text}
    template = environment.from_string((files("trimode_vlm.eval") / "report.html").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        samples={task: _without_repeats(samples) for task, samples in report["samples"].items()},
        modes=list(report["pooled"]),
        cards=_cards(report),
        colors=COLORS,
        plots=[{**vars(plot), "svg": Markup(plot.svg)} for plot in plots] if plots is not None else None,
        no_plots=NO_PLOTS,
        main_tables=[report_tables.task_table(report), report_tables.length_table(report)],
        notes=report_tables.notes(report),
        published=report_tables.published_table(report),
        more_tables=[
            report_tables.cell_table(report),
            report_tables.bucket_table(report),
            *report_tables.category_tables(report),
        ],
        numeric=numeric_columns,
    )


def marked(text: str) -> Markup:
    """Escaped text in which `x` is code and **x** is strong."""
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", safe))


def breakable(text: str) -> Markup:
    """The same, in which a line may also end behind an underscore."""
    return Markup(str(marked(text)).replace("_", "_<wbr>"))


def as_text(value: Any) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def numeric_columns(table: report_tables.Table) -> list[bool]:
    """Which columns hold numbers only."""
    return [all(_NUMBER.fullmatch(row[i].strip("*")) for row in table.rows) for i in range(len(table.head))]


def _without_repeats(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Samples in which a mode's answer that another mode gave before names that mode."""
    shown = []
    for sample in samples:
        first: dict[str, str] = {}
        answers = {}
        for mode, answer in sample["answers"].items():
            other = first.setdefault(answer["prediction"], mode)
            answers[mode] = answer if other == mode else {**answer, "same_as": other}
        shown.append({**sample, "answers": answers})
    return shown


def _cards(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a reader wants first, mode by mode."""
    cards = []
    for mode, lengths in report["pooled"].items():
        everything = lengths["all"]
        facts = [(f"TPF, {name}", number(t["tpf_decode"])) for name, t in lengths.items() if t["num_samples"]]
        if report_tables.is_timed(report):
            facts.append(("tokens/s", number(everything["tokens_per_sec"], 0)))
            if first := everything["seconds_to_first_token"]:
                facts.append(("first token", f"{1000 * first['median']:,.0f} ms"))
        if same := report["same_as_ar"].get(mode):
            facts.append(("as ar", f"{same['identical']:,}/{same['of']:,}"))
        mean = report["mean_of_tasks"][mode]
        cards.append({"mode": mode, "score": score(mean) if mean["score"] is not None else NONE, "facts": facts})
    return cards
