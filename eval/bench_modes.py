"""`trimode-vlm bench modes`: AR, self-speculation and auto by how many requests decode together.

Held-out requests in batches of 1 to 16 rows, each batch by every run in turn, so that a slower second slows all; the
median of each batch, without the prefill, which all share, and without what happens in fewer than half of the turns,
such as most of auto's probes (policy.py bounds them). Larger batches, which are done sooner, take more turns, and block
lengths that only show the formula's curve one. Twice: with the drafts that the model makes, and with drafts that are
worth nothing, since auto has to find out. Beside each measurement stands what the policy's formula says of it with one
acceptance rate for all rows and places, where auto goes by those of each.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from trimode_vlm.eval import tables
from trimode_vlm.eval.prompts import inputs_of
from trimode_vlm.eval.timing import keeps_up, there_and_back

DEFAULTS: dict[str, Any] = {"repeats": 5, "samples": 16, "adapter": None, "dtype": None, "plot": None}
QUICK: dict[str, Any] = {"repeats": 1, "samples": 2}
PARALLEL = (1, 2, 4, 8, 16)
BLOCK_LENGTHS = (4, 8, 16, 32)
# The longest right answer has about 420 tokens.
MAX_NEW_TOKENS = 640


def bench_modes(args: argparse.Namespace, note: Callable[..., None]) -> None:
    """Measure both models, each handed to `note(name, title, values, text)`; then whether auto keeps its promise."""
    import trimode_vlm
    from trimode_vlm.eval.answering import check_adapter

    model, processor = trimode_vlm.load(args.model, dtype=args.dtype, adapter=args.adapter)
    check_adapter(model, args.model, args.adapter)
    requests = held_out(args.samples, args.seed)
    results = {}
    for name, title, chosen in (
        ("own_drafts", "with the model's own drafts", model),
        (
            "poor_drafts",
            "with drafts from a random mask embedding; the text of ar is the same",
            with_poor_drafts(model),
        ),
    ):
        results[name] = measure(chosen, processor, requests, args.repeats)
        note(name, f"{title}: acceptance rate {results[name]['rate']:.3f}", results[name], text_of(results[name]))
    by_drafts = {name: result["parallel"].values() for name, result in results.items()}
    ratios = {name: [cell["auto_over_better"] for cell in cells] for name, cells in by_drafts.items()}
    verdict = {
        "least_auto_over_better": {name: min(values) for name, values in ratios.items()},
        "within_5_percent": {name: keeps_up(values, args.repeats) for name, values in ratios.items()},
        "same_text_in_all_runs": all(cell["same_text"] for cells in by_drafts.values() for cell in cells),
    }
    note("verdict", "auto against the better of ar and linear_spec", verdict)
    if args.plot:
        plot(results, Path(args.plot))


def held_out(samples: int, seed: int) -> list[Any]:
    """Conversations of the held-out tasks in turn, so that short and long answers share a batch."""
    from trimode_vlm.eval.tasks import select

    tasks = select(["nano"])
    return [tasks[i % len(tasks)].example(i // len(tasks), seed).messages for i in range(samples)]


def with_poor_drafts(model: Any) -> Any:
    """The same weights, but the mask's embedding is noise. No AR forward reads it."""
    import torch

    spoilt = copy.deepcopy(model)
    weights = spoilt.encoder.embed_tokens.weight
    noise = torch.randn(weights.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weights[model.config.mask_token_id] = noise.to(weights) * weights.std()
    return spoilt


def measure(model: Any, processor: Any, requests: Sequence[Any], repeats: int) -> dict[str, Any]:
    """Tokens per second of every run at every number of parallel requests, and what the policy makes of each."""
    from trimode_vlm.calibration import costs_for, policy_for

    parallel = [n for n in PARALLEL if n <= len(requests)]
    policy = policy_for(model, parallel[-1])
    own = model.config.block_length
    lengths = sorted({k for k in BLOCK_LENGTHS if k < own} | {own})
    runs: dict[str, dict[str, Any]] = {"ar": {"mode": "ar"}, "auto": {"mode": "auto"}}
    runs |= {f"linear_spec {k}": {"mode": "linear_spec", "block_length": k} for k in lengths}
    cells, rate = {}, 0.0
    for n in parallel:
        batches = [dict(inputs_of(processor, requests[i : i + n])) for i in range(0, len(requests), n)]
        compared, turns = ("ar", "auto", f"linear_spec {own}"), round(repeats * math.sqrt(n))
        outputs, seconds = time_runs(model, batches, runs, compared, turns)
        rate = acceptance(outputs[f"linear_spec {own}"])
        answers = [out.num_new_tokens for out in outputs["ar"]]
        tokens = sum(map(sum, answers)) - len(requests)
        per_sec = {run: tokens / sec for run, sec in seconds.items()}
        better = max(per_sec["ar"], per_sec[f"linear_spec {own}"])
        cells[str(n)] = {
            "turns": turns,
            "tokens_per_sec": per_sec,
            "auto_over_better": per_sec["auto"] / better,
            "predicted_tokens_per_sec": {
                "ar" if k == 1 else f"linear_spec {k}": tokens / predicted_sec(answers, rate, k, policy.cost)
                for k in (1, *lengths)
            },
            "chosen_at_full_batch": policy.choose([[rate]] * n, [own] * n, own),
            "cycles_by_block_length": dict(
                sorted(Counter(k for out in outputs["auto"] for row in out.block_lengths for k in row).items())
            ),
            "same_text": all(
                out.sequences.tolist() == ar.sequences.tolist()
                for outs in outputs.values()
                for out, ar in zip(outs, outputs["ar"], strict=True)
            ),
        }
    costs = costs_for(model, parallel[-1]).seconds_per_forward
    ms = {rows: {k: sec * 1e3 for k, sec in by_tokens.items()} for rows, by_tokens in costs.items()}
    return {"block_length": own, "tokens": tokens, "rate": rate, "ms_per_forward": ms, "parallel": cells}


def time_runs(
    model: Any,
    batches: Sequence[dict[str, Any]],
    runs: Mapping[str, dict[str, Any]],
    compared: Sequence[str],
    turns: int,
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Of each run the last outputs, and its decode seconds: the sum over the batches of their medians.

    All but the `compared` runs take one turn. One more in front warms up, unless there is one only.
    """
    outputs: dict[str, list[Any]] = {}
    seconds: dict[str, list[list[float]]] = {run: [[] for _ in batches] for run in runs}
    warm = int(turns > 1)
    for turn in range(turns + warm):
        names = list(runs) if turn <= warm else list(compared)
        outputs |= {run: [] for run in names}
        for i, inputs in enumerate(batches):
            for run in there_and_back(names, turn):
                out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **runs[run])
                outputs[run].append(out)
                seconds[run][i].append(out.total_seconds - max(out.seconds_to_first_token))
    return outputs, {run: sum(statistics.median(sec[warm:]) for sec in by) for run, by in seconds.items()}


def acceptance(outputs: Sequence[Any]) -> float:
    """The rate of policy.py over all cycles of a run, one for all places of a draft."""
    from trimode_vlm.policy import Acceptance

    seen = Acceptance()
    for out in outputs:
        cycles = zip(chain(*out.accepted_lengths), chain(*out.block_lengths), strict=True)
        for tokens, block_length in cycles:
            seen.observe(tokens, block_length, decay=1.0)
    return seen.held / max(seen.held + seen.failed, 1)


def predicted_sec(answers: Sequence[Sequence[int]], rate: float, k: int, cost: Callable[[int, int], float]) -> float:
    """What the policy expects batches of answers of so many tokens to take: a row leaves when its cycles are done."""
    from trimode_vlm.policy import expected_tokens

    total = 0.0
    for tokens in answers:
        cycles = [math.ceil((n - 1) / expected_tokens([rate], [k])[0]) for n in tokens]
        total += sum(cost(sum(c > i for c in cycles), k) for i in range(max(cycles)))
    return total


def text_of(result: Mapping[str, Any]) -> str:
    """Modes by parallel requests; below, measured beside predicted tokens per second by block length."""
    own, rows, curve = f"linear_spec {result['block_length']}", [], []
    for n, cell in result["parallel"].items():
        per_sec, said = cell["tokens_per_sec"], cell["predicted_tokens_per_sec"]
        chosen = ", ".join(f"{k}: {count}" for k, count in cell["cycles_by_block_length"].items())
        speeds = [tables.number(per_sec[run], 0) for run in ("ar", own, "auto")]
        rows.append([n, *speeds, tables.number(cell["auto_over_better"], 3), str(cell["chosen_at_full_batch"]), chosen])
        curve.append([n, *(f"{per_sec[run]:,.0f} / {value:,.0f}" for run, value in said.items())])
    head = ["requests", "ar", own, "auto", "auto / better", "formula at full batch"]
    runs = list(next(iter(result["parallel"].values()))["predicted_tokens_per_sec"])
    return (
        f"tokens per second after the prefill; cycles of auto by block length\n"
        f"{tables.markdown([*head, 'cycles'], rows)}\n\nmeasured / predicted\n"
        f"{tables.markdown(['requests', *runs], curve)}"
    )


def plot(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Left tokens per second by parallel requests, right by block length; dashed is what the formula says."""
    from trimode_vlm.eval import plotting

    figure = plotting.new_figure(12, 4.6 * len(results))
    grid = figure.subplots(len(results), 2, squeeze=False)
    for (left, right), (name, result) in zip(grid, results.items(), strict=True):
        cells, own = result["parallel"], f"linear_spec {result['block_length']}"
        parallel = [int(n) for n in cells]
        colors = plotting.colors_of(["ar", "linear_spec", "auto"])
        for run, color in zip(("ar", own, "auto"), colors.values(), strict=True):
            left.plot(parallel, [c["tokens_per_sec"][run] for c in cells.values()], color=color, marker="o", label=run)
            if run != "auto":
                said = [c["predicted_tokens_per_sec"][run] for c in cells.values()]
                left.plot(parallel, said, color=color, linestyle="--")
        for color, (n, cell) in zip(plotting.OTHER_COLORS, cells.items(), strict=False):
            said = cell["predicted_tokens_per_sec"]
            lengths = [1 if run == "ar" else int(run.split()[1]) for run in said]
            right.plot(lengths, [cell["tokens_per_sec"][run] for run in said], color=color, marker="o", label=n)
            right.plot(lengths, list(said.values()), color=color, linestyle="--")
        left.set(title=f"{name.replace('_', ' ')} (dashed: predicted)", xlabel="parallel requests")
        right.set(title="fixed block lengths, by parallel requests", xlabel="block length (1 is ar)")
        for axis, ticks in ((left, parallel), (right, lengths)):
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set_yscale("log")
            axis.set_ylabel("tokens per second after the prefill")
            axis.grid(alpha=0.25, which="both")
            axis.legend(fontsize=8)
    plotting.save(figure, path)
