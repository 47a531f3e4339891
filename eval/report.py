"""From sample lines to report.json, report.md, report.html, and the block between the README's nano-table marks."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimode_vlm.eval import published, report_html, report_plots
from trimode_vlm.eval.aggregates import summarise
from trimode_vlm.eval.metrics import mean, standard_error
from trimode_vlm.eval.report_tables import details, markdown
from trimode_vlm.eval.state import replace_text
from trimode_vlm.eval.tpf import CONVENTION, bucketed, totals

START, END = "<!-- nano-table -->", "<!-- /nano-table -->"

Report = dict[str, Any]
Records = Sequence[Mapping[str, Any]]

# Samples of a task that the page shows, and how much of an answer.
SHOWN, SHOWN_WRONG, SHOWN_CHARACTERS = 3, 2, 2000


def build(settings: Mapping[str, Any], records: Records) -> Report:
    """The report of a finished run, made from the records alone; ratios are ratios of sums (tpf.CONVENTION)."""
    tasks, modes, buckets = settings["tasks"], settings["modes"], settings["buckets"]
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["run"], record["mode"], record["task"]), []).append(record)

    def select(run: str, mode: str, task: str | None = None) -> list[Mapping[str, Any]]:
        return [r for name in ([task] if task else tasks) for r in groups.get((run, mode, name), [])]

    def table(run: str) -> dict[str, Any]:
        present = [mode for mode in modes if select(run, mode)]
        by_task: dict[str, dict[str, Any]] = {task: {} for task in tasks}
        for task, mode in itertools.product(tasks, present):
            if rows := select(run, mode, task):
                same = agreement(select(run, "ar", task), rows) if mode != "ar" and "ar" in modes else None
                by_task[task][mode] = cell(rows, buckets) | {"same_as_ar": same}
        filled = {task: cells for task, cells in by_task.items() if cells}
        return {"tasks": filled, "pooled": {mode: by_bucket(select(run, mode), buckets) for mode in present}}

    measured = {mode: select("model", mode) for mode in modes}
    report = {
        "settings": dict(settings),
        "convention": CONVENTION | {"percentile": "of samples, interpolated linearly between neighbours"},
        "machine": _machine(settings),
        **table("model"),
        "generated": [
            task for task in tasks if any(r.get("seed") is not None for r in select("model", modes[0], task))
        ],
        "baseline": {task: most_frequent(select("model", modes[0], task)) for task in tasks},
        "same_as_ar": {mode: agreement(measured["ar"], measured[mode]) for mode in modes if mode != "ar"}
        if "ar" in modes
        else {},
        "controls": {run: table(run) for run in ("shuffled", "control") if any(r["run"] == run for r in records)},
        "tpf_by_length": {mode: report_plots.length_bins(rows) for mode, rows in measured.items() if rows},
        "accepted_lengths": {mode: report_plots.accepted_counts(rows) for mode, rows in measured.items()},
        "samples": {task: shown_samples({m: select("model", m, task) for m in modes}) for task in tasks},
    }
    return report | {"mean_of_tasks": _mean_of_tasks(report), "published": published.beside(report)}


def cell(records: Records, buckets: Sequence[int]) -> dict[str, Any]:
    """Everything about one task in one mode."""
    metric = records[0].get("metric") or "exact_match"
    return {
        "metric": metric,
        **summarise(metric, records),
        **totals(records).as_dict(),
        "seconds_to_first_token": first_token(records),
        "finish_reasons": dict(Counter(r["finish_reason"] for r in records)),
        "buckets": by_bucket(records, buckets),
    }


def by_bucket(records: Records, buckets: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Counts, TPF, mean score per sample and time to the first token, by response length."""
    found = {}
    for name, value in bucketed(records, buckets).items():
        least = 0 if name == "all" else int(name[1:]) + 1
        chosen = [r for r in records if r["num_new_tokens"] >= least]
        found[name] = value.as_dict() | scores(chosen) | {"seconds_to_first_token": first_token(chosen)}
    return found


def scores(records: Records) -> dict[str, Any]:
    """Mean score and its standard error."""
    values = [r["score"] for r in records]
    return {"score": mean(values), "standard_error": standard_error(values)}


def first_token(records: Records) -> dict[str, float] | None:
    """Median and 95th percentile of the seconds to the first token; None where no record has them."""
    seconds = [s for r in records if (s := r.get("seconds_to_first_token")) is not None]
    if not seconds:
        return None
    median, p95 = np.percentile(seconds, [50, 95]).tolist()
    return {"median": median, "p95": p95}


def most_frequent(records: Records) -> float | None:
    """Share of the commonest right answer: what a guess without the picture could score at best."""
    golds = Counter(json.dumps(r["gold"], sort_keys=True) for r in records)
    return golds.most_common(1)[0][1] / len(records) if records else None


def agreement(left: Records, right: Records) -> dict[str, int]:
    """How many samples answered in both modes have the same token ids."""
    hashes = {(r["task"], r["id"]): r["ids_hash"] for r in left}
    both = [r for r in right if (r["task"], r["id"]) in hashes]
    return {"identical": sum(r["ids_hash"] == hashes[r["task"], r["id"]] for r in both), "of": len(both)}


def shown_samples(by_mode: Mapping[str, Records]) -> list[dict[str, Any]]:
    """A few samples with every mode's answer: at most two that a mode got wrong, then the first that none did."""
    answers: dict[int, dict[str, Mapping[str, Any]]] = {}
    for mode, records in by_mode.items():
        for record in records:
            answers.setdefault(record["id"], {})[mode] = record
    wrong = [i for i, modes in answers.items() if any(r["score"] < 1 for r in modes.values())]
    right = [i for i in answers if i not in set(wrong)]
    chosen = wrong[:SHOWN_WRONG] + right
    chosen = sorted((chosen + wrong[SHOWN_WRONG:])[:SHOWN])
    return [_shown(answers[i]) for i in chosen]


def _shown(by_mode: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    first = next(iter(by_mode.values()))
    info = first.get("info") or {}
    shared = {name: first.get(name, info.get(name)) for name in ("id", "question_id", "category", "question", "gold")}
    names = ("score", "parsed", "num_new_tokens", "nfe", "finish_reason")
    answers = {
        mode: {"prediction": _cut(record["prediction"])} | {name: record[name] for name in names if name in record}
        for mode, record in by_mode.items()
    }
    return {name: value for name, value in shared.items() if value is not None} | {"answers": answers}


def _cut(text: str) -> str:
    more = len(text) - SHOWN_CHARACTERS
    return text if more <= 0 else f"{text[:SHOWN_CHARACTERS]} … ({more:,} more characters)"


def _mean_of_tasks(report: Report) -> dict[str, Any]:
    means = {}
    for mode in report["pooled"]:
        cells = [cells[mode] for cells in report["tasks"].values() if mode in cells]
        centre, error = published.mean_of(cells)
        means[mode] = {"score": centre, "standard_error": error, "num_tasks": len(cells)}
    return means


def _machine(settings: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    import trimode_vlm

    on_gpu = str(settings.get("device") or "").startswith("cuda") and torch.cuda.is_available()
    return {
        "machine": platform.machine(),
        **({"gpu": torch.cuda.get_device_name()} if on_gpu else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": 1 if settings["workers"] > 1 else torch.get_num_threads(),
        "trimode_vlm": getattr(trimode_vlm, "__version__", None),
    }


def write(report: Report, folder: Path) -> None:
    """Write report.json, report.md and report.html."""
    replace_text(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    replace_text(folder / "report.md", f"{markdown(report)}\n\n{details(report)}\n")
    replace_text(folder / "report.html", report_html.page(report))


def update(path: Path, report: Report) -> None:
    """Replace what stands between the two nano-table marks of a Markdown file.

    Raises:
        ValueError: the file has not exactly one pair of marks, in order.
    """
    text = path.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end or START in rest or END in before + after:
        raise ValueError(f"{path} needs one pair of the marks {START} and {END}")
    path.write_text(f"{before}{START}\n{markdown(report)}\n{END}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m trimode_vlm.eval.report`."""
    parser = argparse.ArgumentParser("python -m trimode_vlm.eval.report", description=__doc__)
    parser.add_argument("report", type=Path, help="a report.json")
    parser.add_argument("--update", type=Path, nargs="+", default=[], help="Markdown files with the nano-table marks")
    args = parser.parse_args(argv)
    try:
        report = json.loads(args.report.read_text(encoding="utf-8"))
        for path in args.update:
            update(path, report)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not args.update:
        print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
