"""From sample lines to report.json, a Markdown page, and the block between the README's nano-table marks."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimode_vlm.eval.metrics import mean, standard_error
from trimode_vlm.eval.tpf import CONVENTION, bucketed, totals

START, END = "<!-- nano-table -->", "<!-- /nano-table -->"

Report = dict[str, Any]
Records = Sequence[Mapping[str, Any]]


def build(settings: Mapping[str, Any], records: Records) -> Report:
    """The report of a finished run, made from the records alone; ratios are ratios of sums (tpf.CONVENTION)."""
    tasks, modes, buckets = settings["tasks"], settings["modes"], settings["buckets"]

    def select(run: str, mode: str, task: str | None = None) -> list[Mapping[str, Any]]:
        return [r for r in records if r["run"] == run and r["mode"] == mode and task in (None, r["task"])]

    def pooled(run: str, mode: str) -> dict[str, Any]:
        chosen = select(run, mode)
        lengths = {name: value.as_dict() for name, value in bucketed(chosen, buckets).items()}
        return {name: value | scores(_longer(chosen, name)) for name, value in lengths.items()}

    def table(run: str) -> dict[str, Any]:
        present = [mode for mode in modes if select(run, mode)]
        by_task = {task: {mode: cell(rows) for mode in present if (rows := select(run, mode, task))} for task in tasks}
        filled = {task: cells for task, cells in by_task.items() if cells}
        return {"tasks": filled, "pooled": {mode: pooled(run, mode) for mode in present}}

    return {
        "settings": dict(settings),
        "convention": CONVENTION,
        "machine": _machine(settings["workers"]),
        **table("model"),
        "baseline": {task: most_frequent(select("model", modes[0], task)) for task in tasks},
        "same_as_ar": {mode: agreement(select("model", "ar"), select("model", mode)) for mode in modes if mode != "ar"}
        if "ar" in modes
        else {},
        "controls": {run: table(run) for run in ("shuffled", "control") if any(r["run"] == run for r in records)},
    }


def cell(records: Records) -> dict[str, Any]:
    """Score, counts and finish reasons of one task in one mode."""
    reasons = dict(Counter(r["finish_reason"] for r in records))
    return scores(records) | totals(records).as_dict() | {"finish_reasons": reasons}


def scores(records: Records) -> dict[str, Any]:
    """Mean score and its standard error."""
    values = [r["score"] for r in records]
    return {"score": mean(values), "standard_error": standard_error(values)}


def most_frequent(records: Records) -> float | None:
    """Share of the commonest right answer: what a guess without the picture could score at best."""
    return Counter(r["gold"] for r in records).most_common(1)[0][1] / len(records) if records else None


def agreement(left: Records, right: Records) -> dict[str, int]:
    """How many samples answered in both modes have the same token ids."""
    hashes = {(r["task"], r["id"]): r["ids_hash"] for r in left}
    both = [r for r in right if (r["task"], r["id"]) in hashes]
    return {"identical": sum(r["ids_hash"] == hashes[r["task"], r["id"]] for r in both), "of": len(both)}


def _longer(records: Records, bucket: str) -> list[Mapping[str, Any]]:
    least = 0 if bucket == "all" else int(bucket[1:]) + 1
    return [r for r in records if r["num_new_tokens"] >= least]


def _machine(workers: int) -> dict[str, Any]:
    import torch

    import trimode_vlm

    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": 1 if workers > 1 else torch.get_num_threads(),
        "trimode_vlm": getattr(trimode_vlm, "__version__", None),
    }


def markdown(report: Report) -> str:
    """The tables: one row per task, pooled TPF by response length, what was compared, and how it was counted."""
    return "\n\n".join([_task_table(report), _length_table(report), _notes(report)])


def _task_table(report: Report) -> str:
    modes, controls = report["settings"]["modes"], report["controls"]
    head = ["task", "answer tokens"]
    for mode in modes:
        head += [f"`{mode}` exact match"] + ([] if mode == "ar" else [f"`{mode}` TPF"])
    head += [f"{_CONTROL[run]} (`{next(iter(controls[run]['pooled']))}`)" for run in controls]
    head += ["commonest answer"] if "shuffled" in controls else []
    rows = []
    for task, cells in report["tasks"].items():
        row = [task, _number(next(iter(cells.values()))["mean_tokens"], 0)]
        for mode in modes:
            row += [_score(cells[mode])] + ([] if mode == "ar" else [_number(cells[mode]["tpf_decode"])])
        for control in controls.values():
            row.append(_score(next(iter(control["tasks"].get(task, {"": None}).values()))))
        row += [_number(report["baseline"][task])] if "shuffled" in controls else []
        rows.append(row)
    row = ["**all**", _number(report["pooled"][modes[0]]["all"]["mean_tokens"], 0)]
    for mode in modes:
        pooled = report["pooled"][mode]["all"]
        row += [_score(pooled)] + ([] if mode == "ar" else [_number(pooled["tpf_decode"])])
    row += [_score(next(iter(control["pooled"].values()))["all"]) for control in controls.values()]
    rows.append(row + ([""] if "shuffled" in controls else []))
    return _table(head, rows)


_CONTROL = {"shuffled": "shuffled images", "control": "control checkpoint"}


def _length_table(report: Report) -> str:
    timed = report["settings"]["batch_size"] == 1
    head = ["answers", "mode", "samples", "tokens", "forwards", "TPF", "TPF with prefill", "accepted length"]
    head += ["exact match"] + (["seconds", "tokens/s"] if timed else [])
    sources = [("", report["pooled"])] + [(f" ({_CONTROL[run]})", t["pooled"]) for run, t in report["controls"].items()]
    rows = []
    for bucket in next(iter(report["pooled"].values())):
        for suffix, pooled in sources:
            for mode, lengths in pooled.items():
                t = lengths[bucket]
                if not t["num_samples"]:
                    continue
                row = [bucket if bucket == "all" else f"{bucket} tokens", f"`{mode}`{suffix}"]
                row += [f"{t[name]:,}" for name in ("num_samples", "num_tokens", "num_forwards")]
                row += [_number(t[name]) for name in ("tpf_decode", "tpf_end_to_end", "mean_accepted_length")]
                row += [_score(t)] + ([_number(t["seconds"], 1), _number(t["tokens_per_sec"], 0)] if timed else [])
                rows.append(row)
    return _table(head, rows)


def _notes(report: Report) -> str:
    settings = report["settings"]
    lines = [
        f"`{mode}` gives the token ids of `ar` on {same['identical']}/{same['of']} samples."
        for mode, same in report["same_as_ar"].items()
    ]
    counts = sorted({cell["num_samples"] for cells in report["tasks"].values() for cell in cells.values()})
    lines.append(
        f"Held-out seed {settings['seed']}, {'-'.join(map(str, counts))} samples per task, "
        f"batch {settings['batch_size']}, {settings['workers']} process(es) of {report['machine']['threads']} "
        f"thread(s), diffusion threshold {settings['threshold']}. ± is one standard error. TPF = tokens per forward "
        "after the prefill, pooled (sum of tokens / sum of forwards); the prefill gives the first token and counts as "
        "one forward in 'TPF with prefill'. Answers cut by their budget are scored as they are."
    )
    if "shuffled" in report["controls"]:
        lines.append(
            "Shuffled images: every sample sees another sample's picture; 'commonest answer' is the share of the "
            "task's most frequent right answer, the most that guessing one fixed answer could score."
        )
    return "\n".join(f"- {line}" for line in lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _score(result: Mapping[str, Any] | None) -> str:
    if result is None or result["score"] is None:
        return "–"
    error = result["standard_error"]
    return f"{result['score']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def write(report: Report, folder: Path) -> None:
    """Write report.json and report.md."""
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report) + "\n", encoding="utf-8")


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
