"""`trimode-vlm eval --compare A B`: two runs side by side, paired sample by sample, with 95 % intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimode_vlm.eval import state, tables
from trimode_vlm.eval.aggregates import summarise
from trimode_vlm.eval.metrics import mean
from trimode_vlm.eval.tables import number
from trimode_vlm.eval.tpf import totals

RESAMPLES = 5000
METHOD = (
    "95 % intervals are percentile bootstrap intervals: pairs (same task, mode and sample in both runs) are drawn with "
    f"replacement {RESAMPLES:,} times, within each task where tasks are put together. With few pairs they are too "
    "narrow, and where no pair differs they have no width: that rules out no more than differences above 3 / pairs."
)

Record = Mapping[str, Any]
Pairs = Sequence[tuple[Record, Record]]
# Of two runs that can be compared, a sample has these alike.
ALIKE = ("question_hash", "seed", "question_id", "gold", "metric", "metric_style")
# Columns of what is resampled: score difference, and what TPF is made of.
DIFFERENCE, TOKENS_A, FORWARDS_A, TOKENS_B, FORWARDS_B = range(5)


def compare(folder_a: Path, folder_b: Path) -> dict[str, Any]:
    """Run B against run A: score differences B - A and TPF ratios B / A over the samples that both answered.

    Raises:
        ValueError: a folder without answers, no sample in common, or a common sample that is not the same question,
            right answer or rule of scoring in both.
    """
    records_a, records_b = _read(folder_a), _read(folder_b)
    both = [key for key in records_a if key in records_b]
    if not both:
        raise ValueError(f"{folder_a} and {folder_b} have no task, mode and sample in common, so nothing can be paired")
    for key in both:
        _check_alike(records_a[key], records_b[key], folder_a, folder_b)
    groups: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    for key in both:
        groups.setdefault((key.task, key.mode), []).append((records_a[key], records_b[key]))
    random = np.random.default_rng(0)
    draws = {group: _resampled(pairs, random) for group, pairs in groups.items()}
    tasks: dict[str, dict[str, Any]] = {}
    for (task, mode), pairs in groups.items():
        tasks.setdefault(task, {})[mode] = _cell(pairs, draws[task, mode]) | _reported(pairs)
    modes = list(dict.fromkeys(mode for _, mode in groups))
    pooled, mean_of_tasks = {}, {}
    for mode in modes:
        members = [group for group in groups if group[1] == mode]
        together = np.sum([draws[group] for group in members], axis=0)
        pooled[mode] = _cell([pair for group in members for pair in groups[group]], together)
        mean_of_tasks[mode] = _mean_of_tasks([tasks[task][mode] for task, _ in members], [draws[g] for g in members])
    return {
        "a": {"folder": str(folder_a)},
        "b": {"folder": str(folder_b)},
        "different_settings": _different_settings(folder_a, folder_b),
        "method": METHOD,
        "tasks": tasks,
        "pooled": pooled,
        "mean_of_tasks": mean_of_tasks,
        "unpaired": {"a": _alone(records_a, records_b), "b": _alone(records_b, records_a)},
    }


def _read(folder: Path) -> dict[state.Key, Record]:
    """The model's own answers in a folder, sorted; controls are left out."""
    records: dict[state.Key, Record] = {
        key: record for key, record in sorted(state.read(folder).items()) if key.run == "model"
    }
    if not records:
        raise ValueError(f"{folder} holds no answers of a run ({state.MERGED}); give the --output folder of `eval`")
    return records


def _check_alike(a: Record, b: Record, folder_a: Path, folder_b: Path) -> None:
    for name in ALIKE:
        if name in a and name in b and a[name] != b[name]:
            hint = "compare runs over the same data and --seed"
            if name == "metric_style":
                hint = f"the first run's command again with --metric-style {b[name]} scores its answers anew"
            elif name == "metric":
                hint = "compare runs over the same metric"
            raise ValueError(
                f"{a['task']}, mode {a['mode']}, sample {a['id']}: {name} is {_short(a[name])} in {folder_a} and "
                f"{_short(b[name])} in {folder_b}; {hint}"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _values(pairs: Pairs) -> np.ndarray:
    """One row a pair: score of b - score of a, decoded tokens and decode forwards of a, of b."""

    def counts(record: Record) -> tuple[int, int]:
        t = totals([record])
        return t.num_tokens - t.num_prefill_tokens, t.num_decode_forwards

    return np.array([(b["score"] - a["score"], *counts(a), *counts(b)) for a, b in pairs], dtype=np.float64)


def _resampled(pairs: Pairs, random: np.random.Generator) -> np.ndarray:
    """Sums over `len(pairs)` draws with replacement, [RESAMPLES, 5]."""
    # Short answers make many pairs alike, and drawing how often each kind comes is drawing pairs.
    kinds, counts = np.unique(_values(pairs), axis=0, return_counts=True)
    rows = max(1, 4_000_000 // len(kinds))  # resamples at a time, to bound the memory
    parts = [
        random.multinomial(len(pairs), counts / len(pairs), min(rows, RESAMPLES - start)) @ kinds
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(parts)


def _cell(pairs: Pairs, draws: np.ndarray) -> dict[str, Any]:
    """Scores, their paired difference, TPF and its ratio over the pairs; `draws`: resampled sums."""
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    tpf_a, tpf_b = totals(a).tpf_decode, totals(b).tpf_decode
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (draws[:, TOKENS_B] / draws[:, FORWARDS_B]) / (draws[:, TOKENS_A] / draws[:, FORWARDS_A])
    score_a, score_b = mean([r["score"] for r in a]), mean([r["score"] for r in b])
    return {
        "num_pairs": len(pairs),
        "score_a": score_a,
        "score_b": score_b,
        "difference": mean([q["score"] - p["score"] for p, q in pairs]),
        "interval": _interval(draws[:, DIFFERENCE] / len(pairs)),
        "b_better": sum(q["score"] > p["score"] for p, q in pairs),
        "a_better": sum(q["score"] < p["score"] for p, q in pairs),
        "identical": sum(p["ids_hash"] == q["ids_hash"] for p, q in pairs),
        "tpf_a": tpf_a,
        "tpf_b": tpf_b,
        "tpf_ratio": tpf_b / tpf_a if tpf_a and tpf_b is not None else None,
        "tpf_interval": _interval(ratios) if tpf_a and tpf_b is not None else None,
    }


def _reported(pairs: Pairs) -> dict[str, Any]:
    """The benchmark's own scores over the pairs, which need not be the means of the samples' scores."""
    metric = pairs[0][0].get("metric") or "exact_match"
    a, b = (summarise(metric, [p[i] for p in pairs])["score"] for i in (0, 1))
    return {"metric": metric, "reported_a": a, "reported_b": b}


def _mean_of_tasks(cells: Sequence[Mapping[str, Any]], draws: Sequence[np.ndarray]) -> dict[str, Any]:
    """Differences of tasks, each task with the same weight."""
    means = [d[:, DIFFERENCE] / cell["num_pairs"] for cell, d in zip(cells, draws, strict=True)]
    return {
        "num_tasks": len(cells),
        "score_a": mean([cell["score_a"] for cell in cells]),
        "score_b": mean([cell["score_b"] for cell in cells]),
        "difference": mean([cell["difference"] for cell in cells]),
        "interval": _interval(np.mean(means, axis=0)),
    }


def _interval(samples: np.ndarray) -> list[float] | None:
    """2.5th and 97.5th percentile of the finite samples."""
    finite = samples[np.isfinite(samples)]
    return np.percentile(finite, [2.5, 97.5]).tolist() if len(finite) else None


def _alone(records: Mapping[state.Key, Record], others: Mapping[state.Key, Record]) -> dict[str, dict[str, list[int]]]:
    """Samples without a partner: task -> mode -> ids."""
    alone: dict[str, dict[str, list[int]]] = {}
    for key in records:
        if key not in others:
            alone.setdefault(key.task, {}).setdefault(key.mode, []).append(key.id)
    return alone


def _different_settings(folder_a: Path, folder_b: Path) -> dict[str, list[Any]]:
    """What the two runs were told differently: name -> [a, b]."""
    a, b = (_settings(folder) for folder in (folder_a, folder_b))
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    return {name: [a.get(name), b.get(name)] for name in names}


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of a finished run's report, and the hash of its weights that its folder keeps."""
    found = {}
    for name in ("report.json", "settings.json"):
        path = folder / name
        found[name] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    told = found["report.json"].get("settings", {})
    ours = {name: value for name, value in told.items() if name not in ("output", "num_examples", "skipped")}
    return ours | {"weights": found["settings.json"].get("model")}


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Write compare.json and compare.md."""
    folder.mkdir(parents=True, exist_ok=True)
    state.replace_text(folder / "compare.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    state.replace_text(folder / "compare.md", markdown(result) + "\n")


def markdown(result: Mapping[str, Any]) -> str:
    """Who was compared, the table of differences, what has no partner, and how the intervals were made."""
    head = ["task", "mode", "pairs", "A", "B", "B - A", "95 %", "better in A / B", "same ids"]
    head += ["TPF A", "TPF B", "B / A", "95 %"]
    rows = [[task, f"`{mode}`", *_row(cell)] for task, cells in result["tasks"].items() for mode, cell in cells.items()]
    if len(result["tasks"]) > 1:
        rows += [["**all samples**", f"`{mode}`", *_row(cell)] for mode, cell in result["pooled"].items()]
        rows += [["**mean of tasks**", f"`{mode}`", *_row(cell)] for mode, cell in result["mean_of_tasks"].items()]
    settings = [f"{name} {_short(a)} / {_short(b)}" for name, (a, b) in result["different_settings"].items()]
    lines = [f"A is {result['a']['folder']}, B is {result['b']['folder']}."]
    lines += [f"Different in A / B: {'; '.join(settings)}."] if settings else []
    for name in ("a", "b"):
        if alone := result["unpaired"][name]:
            count = sum(len(ids) for modes in alone.values() for ids in modes.values())
            lines.append(f"Left out, {count:,} answers that only {name.upper()} has: {_listed(alone)}.")
    lines += _own_scores(result)
    lines.append(result["method"])
    return "\n\n".join([tables.markdown(head, rows), "\n".join(f"- {line}" for line in lines)])


def _row(cell: Mapping[str, Any]) -> list[str]:
    row = [f"{cell['num_pairs']:,}" if "num_pairs" in cell else f"{cell['num_tasks']} tasks"]
    row += [number(cell["score_a"], 3), number(cell["score_b"], 3), f"{cell['difference']:+.3f}"]
    row.append(_range(cell["interval"], "+.3f"))
    if "num_pairs" not in cell:
        return row + [""] * 6
    row += [f"{cell['a_better']:,} / {cell['b_better']:,}", f"{cell['identical']:,}"]
    row += [number(cell[name]) for name in ("tpf_a", "tpf_b", "tpf_ratio")]
    return [*row, _range(cell["tpf_interval"], ".2f")]


def _range(interval: Sequence[float] | None, form: str) -> str:
    return tables.NONE if interval is None else f"{interval[0]:{form}} to {interval[1]:{form}}"


def _listed(alone: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Tasks, modes and ranges of ids; modes that lack the same ids stand together."""
    words = []
    for task, modes in alone.items():
        together: dict[str, list[str]] = {}
        for mode, ids in modes.items():
            together.setdefault(_ranges(ids), []).append(f"`{mode}`")
        words += [f"{task} {', '.join(names)} {ids}" for ids, names in together.items()]
    return "; ".join(words)


def _ranges(ids: Sequence[int], most: int = 8) -> str:
    """Sorted ids as ranges: 0-9, 12."""
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1] + 1]
    ends = [i - 1 for i in [*starts[1:], len(ids)]]
    found = [str(ids[a]) if a == b else f"{ids[a]}-{ids[b]}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(found[:most]) + (f" and {len(ids) - starts[most]:,} more" if len(found) > most else "")


def _own_scores(result: Mapping[str, Any]) -> list[str]:
    """Benchmarks whose own score is no mean over samples, such as a mean over categories."""
    found = []
    for task, cells in result["tasks"].items():
        for mode, c in cells.items():
            own = (c["reported_a"], c["reported_b"])
            if None not in own and not all(map(math.isclose, own, (c["score_a"], c["score_b"]))):
                found.append(f"{task} `{mode}` {own[0]:.3f} / {own[1]:.3f}")
    intro = "The table pairs samples, so its scores are means over them; these benchmarks' own scores are"
    return [f"{intro} (A / B): {', '.join(found)}."] if found else []
