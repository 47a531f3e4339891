"""What `trimode-vlm bench serve` says of its runs: latencies, throughput, mismatches, tables, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trimode_vlm.eval import tables
from trimode_vlm.eval.load_generator import SERVER_DEFAULT, Answer, Run
from trimode_vlm.eval.timing import keeps_up

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first, of an answer",
    "itl": "time between two arrivals of tokens, which a block shares",
    "e2el": "end-to-end latency",
}
# What 8 users must win over one after the other.
SPEEDUP_OF_8 = 2.5


def cell(runs: Sequence[Run], singles: Sequence[Run], alone: Mapping[int, str]) -> dict[str, Any]:
    """A mode under a load: medians of the repetitions' throughput, percentiles over all answers."""
    answers = [answer for run in runs for answer in run.answers]
    ok = [answer for answer in answers if answer.status == "ok"]
    wrong = [answer for answer in ok if answer.text != alone[answer.job]]
    per_sec = [run.tokens_per_sec for run in runs]
    values: dict[str, Any] = {
        "requests": len(answers),
        "tokens": sum(answer.tokens for answer in ok),
        "failed": sum(answer.status == "failed" for answer in answers),
        "refused": sum(answer.status == "refused" for answer in answers),
        "mismatches": len(wrong),
        "mismatched_jobs": sorted({answer.job for answer in wrong})[:20],
        "tokens_per_sec": statistics.median(per_sec),
        "tokens_per_sec_by_repetition": per_sec,
        "requests_per_sec": statistics.median(len(run.answered) / run.seconds for run in runs),
        "latency_ms": {name: percentiles(seconds) for name, seconds in latencies(ok).items()},
    }
    # Of each repetition: its own single requests were made in the same minute. Where all of those failed, nothing is.
    pairs = zip(runs, singles, strict=True) if singles else ()
    ratios = [run.tokens_per_sec / one.tokens_per_sec for run, one in pairs if one.tokens_per_sec]
    if ratios:
        values["over_single_requests"] = statistics.median(ratios)
    return values


def latencies(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Milliseconds by name; see LATENCIES."""
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for answer in answers:
        found["e2el"].append(1e3 * (answer.done - answer.sent))
        if not answer.arrivals:
            continue
        first, last = answer.arrivals[0], answer.arrivals[-1]
        found["ttft"].append(1e3 * (first - answer.sent))
        found["itl"] += [1e3 * (b - a) for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        if answer.tokens > 1:
            found["tpot"].append(1e3 * (last - first) / (answer.tokens - 1))
    return found


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles, between two values on the line through them; None without values."""
    import numpy

    if not values:
        return None
    named = {f"p{q}": float(numpy.percentile(values, q)) for q in (50, 95, 99)}
    return {"mean": statistics.fmean(values)} | named


def memory_over_time(watched: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """At the start, after a third of the time (warm by then), at the most, and at the end."""
    warm = watched[len(watched) // 3]
    return {
        name: {
            "start": watched[0][name],
            "after_a_third": warm[name],
            "most": max(w[name] for w in watched),
            "end": watched[-1][name],
        }
        for name in watched[0]
    }


def verdict(cells: Mapping[str, Mapping[str, Any]], alone: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """What the numbers say, each where it was measured."""
    every = [value for row in cells.values() for value in row.values()]
    said: dict[str, Any] = {name: sum(v[name] for v in every) for name in ("failed", "refused", "mismatches")}
    ar = alone.get("ar")
    if ar is not None and len(alone) > 1:
        said["questions_that_differ_from_ar"] = {
            mode: sum(text != ar[job] for job, text in texts.items()) for mode, texts in alone.items() if mode != "ar"
        }
    if "over_single_requests" in cells.get("8", {}).get("ar", {}):
        ratio = cells["8"]["ar"]["over_single_requests"]
        said |= {"ar_8_users_over_single_requests": ratio, "at_least_2.5": ratio >= SPEEDUP_OF_8}
    fixed = [mode for mode in alone if mode not in ("auto", SERVER_DEFAULT)]
    if "auto" in alone and fixed:
        said["auto_over_best_fixed"] = ratios = {load: over_best(row, fixed) for load, row in cells.items()}
        repeats = min(len(row["auto"]["tokens_per_sec_by_repetition"]) for row in cells.values())
        said["auto_within_5_percent"] = keeps_up(list(ratios.values()), repeats)
    return said


def over_best(row: Mapping[str, Any], fixed: Sequence[str]) -> float | None:
    """Auto's throughput over that of the best fixed mode: the median of the repetitions, each in one minute.

    None where that mode answered nothing.
    """
    best = max(fixed, key=lambda mode: float(row[mode]["tokens_per_sec"]))
    pairs = zip(*(row[mode]["tokens_per_sec_by_repetition"] for mode in ("auto", best)), strict=True)
    ratios = [auto / other for auto, other in pairs if other]
    return statistics.median(ratios) if ratios else None


def text_of(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Two tables: throughput and what went wrong; latencies in ms as p50 / p95 / p99."""
    speed, late = [], []
    for load, row in cells.items():
        for mode, value in row.items():
            counts = [str(value[name]) for name in ("requests", "failed", "refused", "mismatches")]
            speeds = [value["tokens_per_sec"], value["requests_per_sec"], value.get("over_single_requests")]
            speed.append([load, mode, *(tables.number(number) for number in speeds), *counts])
            late.append([load, mode, *(_three(value["latency_ms"][name]) for name in LATENCIES)])
    head = ["load", "mode", "tokens/s", "requests/s", "x single", "requests", "failed", "refused", "mismatches"]
    explained = "; ".join(f"{name}: {text}" for name, text in LATENCIES.items())
    return f"{tables.markdown(head, speed)}\n\nms, p50 / p95 / p99 ({explained})\n\n" + tables.markdown(
        ["load", "mode", *LATENCIES], late
    )


def _three(values: Mapping[str, float] | None) -> str:
    return tables.NONE if values is None else " / ".join(f"{values[q]:.3g}" for q in ("p50", "p95", "p99"))
