"""The tables of a report, for its Markdown and for its page; and the Markdown itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimode_vlm.eval import tables
from trimode_vlm.eval.tables import Table, number, percent, score

Report = Mapping[str, Any]

_CONTROL = {"shuffled": "shuffled images", "control": "control checkpoint"}


def markdown(report: Report) -> str:
    """The tables: one row per task, pooled TPF by response length, what was compared, and how it was counted."""
    parts = [tables.markdown(t.head, t.rows) for t in (task_table(report), length_table(report))]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in notes(report))])


def details(report: Report) -> str:
    """The rest of report.md: published numbers, every cell, response lengths by task, categories, conventions."""
    chosen = [published_table(report), cell_table(report), bucket_table(report), *category_tables(report)]
    parts = [
        f"## {t.title}\n\n{tables.markdown(t.head, t.rows)}" + (f"\n\n{t.note}" if t.note else "")
        for t in chosen
        if t is not None
    ]
    conventions = "\n".join(f"- {name}: {text}." for name, text in report["convention"].items())
    return "\n\n".join([*parts, f"## How it was counted\n\n{conventions}"])


def task_table(report: Report) -> Table:
    """One row per task: score and TPF of each mode, the controls; pooled over all samples; mean of tasks."""
    modes, controls, what = report["settings"]["modes"], report["controls"], score_name(report)
    head = ["task", "answer tokens"]
    for mode in modes:
        head += [f"`{mode}` {what}"] + ([] if mode == "ar" else [f"`{mode}` TPF"])
    head += [f"{_CONTROL[run]} (`{next(iter(controls[run]['pooled']))}`)" for run in controls]
    head += ["commonest answer"] if "shuffled" in controls else []
    rows = []
    for task, cells in report["tasks"].items():
        row = [task, number(next(iter(cells.values()))["mean_tokens"], 0)]
        for mode in modes:
            cell = cells.get(mode)
            row += [score(cell)] + ([] if mode == "ar" else [number(cell and cell["tpf_decode"])])
        for control in controls.values():
            row.append(score(next(iter(control["tasks"].get(task, {"": None}).values()))))
        row += [number(report["baseline"][task])] if "shuffled" in controls else []
        rows.append(row)
    row = ["**all**", number(report["pooled"][modes[0]]["all"]["mean_tokens"], 0)]
    for mode in modes:
        pooled = report["pooled"][mode]["all"]
        row += [score(pooled)] + ([] if mode == "ar" else [number(pooled["tpf_decode"])])
    row += [score(next(iter(control["pooled"].values()))["all"]) for control in controls.values()]
    rows.append(row + ([""] if "shuffled" in controls else []))
    if _means_differ(report):
        row = ["**mean of tasks**", ""]
        for mode in modes:
            row += [score(report["mean_of_tasks"][mode])] + ([] if mode == "ar" else [""])
        rows.append(row + [""] * (len(head) - len(row)))
    return Table(title="Scores", head=head, rows=rows)


def length_table(report: Report) -> Table:
    """Counts, TPF in both conventions and score by mode, over all answers and over the long ones."""
    timed = is_timed(report)
    head = ["answers", "mode", "samples", "tokens", "forwards", "TPF", "TPF with prefill", "accepted length"]
    head += [score_name(report)] + (["seconds", "tokens/s"] if timed else [])
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
                row += [number(t[name]) for name in ("tpf_decode", "tpf_end_to_end", "mean_accepted_length")]
                row += [score(t)] + ([number(t["seconds"], 1), number(t["tokens_per_sec"], 0)] if timed else [])
                rows.append(row)
    return Table(title="Tokens per forward by response length", head=head, rows=rows)


def notes(report: Report) -> list[str]:
    """What was compared, with which settings, and what the numbers mean."""
    lines = [
        f"`{mode}` gives the token ids of `ar` on {same['identical']}/{same['of']} samples."
        for mode, same in report["same_as_ar"].items()
    ]
    lines += [*_gaps(report), _how(report)]
    if _means_differ(report):
        lines.append("'all' pools samples, so large tasks weigh more; 'mean of tasks' weighs every task alike.")
    if "shuffled" in report["controls"]:
        lines.append(
            "Shuffled images: every sample sees another sample's picture; 'commonest answer' is the share of the "
            "task's most frequent right answer, the most that guessing one fixed answer could score."
        )
    return lines


def _how(report: Report) -> str:
    """Settings, and what TPF and the errors are."""
    settings = report["settings"]
    counts = sorted({cell["num_samples"] for cells in report["tasks"].values() for cell in cells.values()})
    seed = f"Held-out seed {settings['seed']}, " if report["generated"] else ""
    how = [f"{seed}{'-'.join(f'{n}' for n in counts)} samples per task", f"batch {settings['batch_size']}"]
    how.append(f"{settings['workers']} process(es) of {report['machine']['threads']} thread(s)")
    if "diffusion" in settings["modes"] and settings["threshold"] is not None:
        how.append(f"diffusion threshold {settings['threshold']}")
    how += [f"temperature {settings['temperature']}"] if settings.get("temperature") else []
    how += [] if score_name(report) == "exact match" else [f"metric style {settings.get('metric_style')}"]
    return (
        f"{', '.join(how)}. ± is one standard error. TPF = tokens per forward after the prefill, pooled (sum of "
        "tokens / sum of forwards); the prefill gives the first token and counts as one forward in 'TPF with prefill'. "
        "Answers cut by their budget are scored as they are."
    )


def _gaps(report: Report) -> Iterator[str]:
    """Answers that nothing could be read out of, and samples that are in no figure."""
    unparsed = [
        f"{task} {' / '.join(number(100 * cell['unparsed_rate'], 1) for cell in cells.values())} %"
        for task, cells in report["tasks"].items()
        if any(cell["unparsed_rate"] for cell in cells.values())
    ]
    if unparsed:
        modes = " / ".join(f"`{mode}`" for mode in report["pooled"])
        intro = "Nothing could be read out of these shares of the answers, which score 0"
        yield f"{intro} ({modes}): {', '.join(unparsed)}."
    available = report["settings"].get("num_examples") or {}
    parts = []
    for task, cells in report["tasks"].items():
        answered, count = max(cell["num_samples"] for cell in cells.values()), available.get(task)
        if count is not None and answered < count and task not in report["generated"]:
            parts.append(f"{task} {answered:,}/{count:,}")
    if parts:
        yield f"Not all samples were asked: {', '.join(parts)}."
    skipped = report["settings"].get("skipped") or {}
    counts = [f"{task} `{mode}` {n:,}" for task, modes in skipped.items() for mode, n in modes.items()]
    if counts:
        yield f"Samples that could not be read or answered, which are in no figure: {', '.join(counts)}."


def published_table(report: Report) -> Table | None:
    """The paper's numbers beside the measured ones; None where it has none for these benchmarks and modes."""
    if (beside := report["published"]) is None:
        return None
    head = ["benchmark", "mode", beside["label"], "measured here", "samples"]
    rows = []
    for r in beside["rows"]:
        digits = 1 if r["unit"] == "percent" else 2
        error = "" if r["standard_error"] is None else f" ± {r['standard_error']:.{digits}f}"
        row = [r["what"], f"`{r['mode']}`", number(r["published"], digits)]
        rows.append([*row, number(r["measured"], digits) + error, f"{r['num_samples']:,}"])
    names = " and ".join(dict.fromkeys(r["table"] for r in beside["rows"]))
    note = (
        f"The third column is {beside['label']}: the paper's {names}, by other software. Scores in percent; TPF in "
        "tokens per forward. Compare only the same model on the whole benchmark."
    )
    return Table(title="Beside the published table", head=head, rows=rows, note=note)


def cell_table(report: Report) -> Table:
    """One row per task and mode with everything that was counted."""
    timed = is_timed(report)
    head = ["task", "mode", "samples", "score", "unparsed", "tokens", "forwards", "TPF", "TPF with prefill"]
    head += ["accepted length", "as `ar`"] + (["seconds", "tokens/s"] if timed else [])
    head += ["first token, median ms", "95 %, ms"] if timed else []
    head += ["ended by", "metric", "also"]
    rows = []
    for task, cells in report["tasks"].items():
        for mode, c in cells.items():
            row = [task, f"`{mode}`", f"{c['num_samples']:,}", score(c), percent(c["unparsed_rate"])]
            row += [f"{c[name]:,}" for name in ("num_tokens", "num_forwards")]
            row += [number(c[name]) for name in ("tpf_decode", "tpf_end_to_end", "mean_accepted_length")]
            row.append(f"{c['same_as_ar']['identical']}/{c['same_as_ar']['of']}" if c["same_as_ar"] else tables.NONE)
            if timed:
                first = c["seconds_to_first_token"] or {"median": None, "p95": None}
                row += [number(c["seconds"], 1), number(c["tokens_per_sec"], 0)]
                row += [number(None if s is None else 1000 * s, 0) for s in (first["median"], first["p95"])]
            row.append(", ".join(f"{reason} {n:,}" for reason, n in sorted(c["finish_reasons"].items())))
            rows.append([*row, c["metric"], extras(c["extra"])])
    note = "as `ar`: answers whose token ids are those of `ar`. Forwards hold one prefill per answer."
    return Table(title="Every task in every mode", head=head, rows=rows, note=note)


def bucket_table(report: Report) -> Table:
    """TPF by response length, task by task."""
    buckets = list(next(iter(report["pooled"].values())))
    head = ["task", "mode"]
    for bucket in buckets:
        head += [f"{bucket}: samples", "TPF", "TPF with prefill", "score"]
    rows = []
    for task, cells in report["tasks"].items():
        for mode, cell in cells.items():
            row = [task, f"`{mode}`"]
            for bucket in buckets:
                b = cell["buckets"][bucket]
                row += [f"{b['num_samples']:,}", number(b["tpf_decode"]), number(b["tpf_end_to_end"]), score(b)]
            rows.append(row)
    note = "The score here is the mean over samples, also where the benchmark's own score is another."
    return Table(title="Response lengths, task by task", head=head, rows=rows, note=note)


def category_tables(report: Report) -> Iterator[Table]:
    """Score by category of each task that has categories."""
    for task, cells in report["tasks"].items():
        names = list(dict.fromkeys(name for cell in cells.values() for name in cell["categories"]))
        if names:
            head = ["category", "samples", *[f"`{mode}`" for mode in cells]]
            yield Table(title=f"{task} by category", head=head, rows=[_category(name, cells) for name in names])


def _category(name: str, cells: Mapping[str, Any]) -> list[str]:
    found = [cell["categories"].get(name) for cell in cells.values()]
    row = [name, str(max(c["num_samples"] for c in found if c))]
    for c in found:
        more = extras({k: v for k, v in (c or {}).items() if k not in ("score", "standard_error", "num_samples")})
        row.append(score(c) + (f"; {more}" if more else ""))
    return row


def extras(values: Mapping[str, Any]) -> str:
    """What a metric reports beside its score, each value with its standard error where it has one."""
    suffix = "_standard_error"
    shown = {name: value for name, value in values.items() if not name.endswith(suffix) and value is not None}
    return ", ".join(f"{name} {_plain(value, values.get(name + suffix))}" for name, value in shown.items())


def score_name(report: Report) -> str:
    """The column's name: exact match where all tasks are scored by it."""
    metrics = {cell["metric"] for cells in report["tasks"].values() for cell in cells.values()}
    return "exact match" if metrics == {"exact_match"} else "score"


def is_timed(report: Report) -> bool:
    """Whether seconds mean something: rows of a batch share theirs."""
    return report["settings"]["batch_size"] == 1


def _means_differ(report: Report) -> bool:
    """Whether pooling samples and pooling tasks give different scores."""
    pairs = [
        (report["mean_of_tasks"][mode]["score"], lengths["all"]["score"]) for mode, lengths in report["pooled"].items()
    ]
    return any(a is not None and b is not None and abs(a - b) > 1e-9 for a, b in pairs)


def _plain(value: Any, error: float | None) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if error is None else f"{text} ± {error:.3f}"
