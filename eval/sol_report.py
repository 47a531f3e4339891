"""Records of `trimode-vlm sol` as sums, tables and a plot; the oracle is labelled in each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimode_vlm.eval import plotting, tables
from trimode_vlm.eval.metrics import mean

ORACLE = "speed of light (oracle)"
LABEL = (
    "Speed of light is an oracle against the model's own serial output: it knows the block's final tokens while it "
    "commits, and no sampler can run it. The real samplers decide from what they see."
)
CONVENTION = {
    "acceptance": "tokens per denoising step: (emitted tokens - the prefill's one) / denoising forwards (drafting "
    "forwards in self-speculation); refresh and verify forwards are not counted, their tokens are (the seeds, and the "
    "verifier's own)",
    "committed_per_step": "the same without seeds and verifier's own tokens: tokens committed by the denoising or "
    "drafting forwards / these forwards",
    "tpf_decode": "(emitted tokens - the prefill's one) / all decode forwards: denoise and refresh, draft and verify; "
    "the simulations of the oracle are not counted",
    "equals_target": "answers whose token ids are those of serial diffusion (one top-confidence token per step) at the "
    "same block length; a sampler that leaves the target may need fewer forwards than the oracle",
    "quadratic_spec": "drafts and verifies in one forward of k (k + 1) tokens, so it pays no refresh: the oracle, a "
    "denoiser that pays one per block, is no bound for its TPF",
    "serial": "one token per step; its TPF falls below 1 where it also fills positions behind the end token",
    "search": "bisection over prefixes of the confidence ranking, the whole ranking first; safety is not monotone, so "
    "it finds a safe prefix, not always the largest. probes >= block length tries all",
    "simulated forwards": "rows that the search ran per block; a canvas seen before in the block is not run again",
    "pooling": "sums over prompts, then one ratio",
}
LONG = 100

Record = dict[str, Any]
Result = dict[str, Any]


def build(settings: Mapping[str, Any], records: Sequence[Record]) -> Result:
    """Pooled figures: groups[group][block length][sampler], a group being all prompts, the long answers, or a task."""
    names = list(dict.fromkeys(r["sampler"] for r in records))
    lengths = list(dict.fromkeys(r["block_length"] for r in records))
    tasks = list(dict.fromkeys(r["task"] for r in records))
    targets = {_prompt(r): r["num_tokens"] for r in records if r["sampler"] == ORACLE}
    groups = {"all": list(records), f">{LONG} tokens": [r for r in records if targets[_prompt(r)] > LONG]}
    groups |= {task: [r for r in records if r["task"] == task] for task in tasks}

    def by_length(chosen: Sequence[Record]) -> dict[str, Any]:
        return {
            str(length): {name: pool(_only(chosen, length, name)) for name in names}
            for length in lengths
            if _only(chosen, length, ORACLE)
        }

    pooled = {name: by_length(chosen) for name, chosen in groups.items() if chosen}
    same = {str(n): {name: _same_answers(records, n, name) for name in names if name != ORACLE} for n in lengths}
    return {
        "label": LABEL,
        "settings": dict(settings),
        "convention": CONVENTION,
        "groups": pooled,
        "oracle": {str(n): _oracle(_only(records, n, ORACLE)) for n in lengths},
        "same_answers": same,
        "checks": _checks(pooled["all"], records, same),
    }


def pool(records: Iterable[Record]) -> dict[str, Any]:
    """Sums over records, and the ratios of CONVENTION; a ratio over nothing is None."""
    records = list(records)
    names = ("num_tokens", "steps", "decode_forwards", "committed", "equals_target")
    sums = {name: sum(r[name] for r in records) for name in names}
    decoded = sums["num_tokens"] - len(records)
    return {
        "prompts": len(records),
        **sums,
        "acceptance": _ratio(decoded, sums["steps"]),
        "committed_per_step": _ratio(sums["committed"], sums["steps"]),
        "tpf_decode": _ratio(decoded, sums["decode_forwards"]),
        "score": mean([r["score"] for r in records]),
    }


def _oracle(records: Sequence[Record]) -> dict[str, Any]:
    simulations = [n for r in records for n in r["simulation_forwards"]]
    names = ("blocks", "replayed_blocks", "serial_steps", "steps", "over_budget_blocks")
    return {name: sum(r[name] for r in records) for name in names} | {
        "simulation_forwards_per_block": mean(simulations),
        "most_simulation_forwards": max(simulations, default=0),
    }


def _same_answers(records: Sequence[Record], length: int, sampler: str) -> dict[str, Any]:
    """Sampler and oracle on the prompts where the sampler gave the target: the only ones where they did the same."""
    same = [r for r in _only(records, length, sampler) if r["equals_target"]]
    prompts = {_prompt(r) for r in same}
    oracle = [r for r in _only(records, length, ORACLE) if _prompt(r) in prompts]
    return {
        "prompts": len(same),
        "tpf_decode": pool(same)["tpf_decode"],
        "oracle_tpf_decode": pool(oracle)["tpf_decode"],
    }


def _checks(everything: Mapping[str, Any], records: Sequence[Record], same: Mapping[str, Any]) -> dict[str, Any]:
    """What an oracle must show: it grows with the block, its commits replay, and which samplers it does not exceed."""
    ordered = [everything[n][ORACLE]["acceptance"] or 0 for n in sorted(everything, key=int)]
    oracle = [r for r in records if r["sampler"] == ORACLE]

    def more(found: Any, bound: Any) -> bool:
        return (found or 0) > (bound or 0) + 1e-9

    return {
        "acceptance_grows_with_block_length": all(a < b for a, b in zip(ordered, ordered[1:], strict=False)),
        "replayed_share": _ratio(sum(r["replayed_blocks"] for r in oracle), sum(r["blocks"] for r in oracle)),
        "samplers_with_more_tpf_than_the_oracle": [
            f"{name} at {n}"
            for n, cells in everything.items()
            for name, cell in cells.items()
            if more(cell["tpf_decode"], cells[ORACLE]["tpf_decode"])
        ],
        "of_these_on_answers_equal_to_the_target": [
            f"{name} at {n}"
            for n, cells in same.items()
            for name, cell in cells.items()
            if more(cell["tpf_decode"], cell["oracle_tpf_decode"])
        ],
    }


def markdown(result: Result) -> str:
    """The label, samplers by block length over all and over long answers, the tasks, and the conventions."""
    groups = result["groups"]
    parts = [f"**{LABEL}**"]
    parts += [f"{name}:\n\n{_sampler_table(groups[name])}" for name in ("all", f">{LONG} tokens") if name in groups]
    parts += [f"by task:\n\n{_task_table(groups)}", _search_table(result), _notes(result)]
    return "\n\n".join(parts)


def _sampler_table(lengths: Mapping[str, Any]) -> str:
    rows = []
    for length, cells in lengths.items():
        for name, c in cells.items():
            if not c["prompts"]:
                continue  # a learned sampler beyond the blocks that it knows
            row = [
                length,
                name,
                f"{c['prompts']}",
                f"{c['num_tokens']:,}",
                f"{c['steps']:,}",
                f"{c['decode_forwards']:,}",
            ]
            row += [tables.number(c[key]) for key in ("acceptance", "committed_per_step", "tpf_decode")]
            rows.append([*row, f"{c['equals_target']}/{c['prompts']}", tables.number(c["score"], 3)])
    head = ["block", "sampler", "prompts", "tokens", "denoise or draft forwards", "decode forwards"]
    head += ["acceptance (tokens per denoise step)", "committed per step (no seeds)", "TPF", "equals target", "score"]
    return tables.markdown(head, rows)


def _task_table(groups: Mapping[str, Any]) -> str:
    lengths = list(groups["all"])
    last = max(lengths, key=int)
    others = [name for name in groups["all"][last] if name not in (ORACLE, "serial")]
    head = ["task", *[f"oracle acceptance at {n}" for n in lengths], f"oracle TPF at {last}"]
    head += [f"{name}: TPF at {last}" for name in others]
    rows = []
    for task, cells in groups.items():
        row = [task, *[tables.number(cells[n][ORACLE]["acceptance"]) for n in lengths]]
        rows.append(row + [tables.number(cells[last][name]["tpf_decode"]) for name in (ORACLE, *others)])
    return tables.markdown(head, rows)


def _search_table(result: Result) -> str:
    head = [
        "block",
        "blocks",
        "replayed",
        "serial steps",
        "oracle steps",
        "simulated forwards per block",
        "most",
        "over budget",
    ]
    rows = []
    for length, o in result["oracle"].items():
        row = [length, *[f"{o[key]:,}" for key in ("blocks", "replayed_blocks", "serial_steps", "steps")]]
        row += [tables.number(o["simulation_forwards_per_block"], 1), f"{o['most_simulation_forwards']:,}"]
        rows.append([*row, f"{o['over_budget_blocks']}"])
    budget = result["settings"]["budget"]
    return f"the oracle's search (budget {budget} forwards per block):\n\n{tables.markdown(head, rows)}"


def _notes(result: Result) -> str:
    lines = [f"{name}: {text}." for name, text in CONVENTION.items()]
    for name in result["checks"]["samplers_with_more_tpf_than_the_oracle"]:
        sampler, length = name.rsplit(" at ", 1)
        same = result["same_answers"][length][sampler]
        lines.append(
            f"{name} has more TPF than the oracle; on the {same['prompts']} prompts where it gives the target it has "
            f"{tables.number(same['tpf_decode'])} and the oracle {tables.number(same['oracle_tpf_decode'])}."
        )
    return "\n".join(f"- {line}" for line in lines)


def plot(result: Result, path: Path) -> None:
    """Acceptance and TPF by block length for every sampler, and acceptance by task at the longest block, as a PNG."""
    groups = result["groups"]
    figure = plotting.new_figure(13, 9)
    figure.suptitle("Speed of light: an oracle against the model's own serial output, beside real samplers")
    axes = figure.subplot_mosaic([["acceptance", "tasks"], ["tpf_decode", "tasks"]], width_ratios=[3, 2])
    lengths = sorted(groups["all"], key=int)
    labels = {"acceptance": "acceptance: tokens per denoising step", "tpf_decode": "TPF: tokens per decode forward"}
    for key, label in labels.items():
        for i, (name, (color, style)) in enumerate(_styles(list(groups["all"][lengths[0]])).items()):
            values = [groups["all"][n][name][key] for n in lengths]
            points = [(int(n), v) for n, v in zip(lengths, values, strict=True) if v is not None]
            # Curves that coincide stay visible: the oracle lies broad beneath, markers shrink from one to the next.
            width, size = (5, 12) if name == ORACLE else (1.5, max(3, 9 - i))
            look: dict[str, Any] = {
                "color": color,
                "linewidth": width,
                "marker": "o",
                "markersize": size,
                "label": name,
            }
            axes[key].plot(*zip(*points, strict=True), style, **look)
        axes[key].set_xscale("log", base=2)
        axes[key].set_xticks([int(n) for n in lengths], lengths)
        axes[key].set(xlabel="block length", ylabel=label)
        axes[key].grid(alpha=0.25)
    axes["acceptance"].legend(fontsize=8)
    _draw_tasks(axes["tasks"], groups, lengths[-1])
    plotting.save(figure, path)


def _draw_tasks(axis: Any, groups: Mapping[str, Any], length: str) -> None:
    tasks = [name for name in groups if name != "all" and not name.startswith(">")][::-1]
    names = [n for n in groups["all"][length] if n != "serial"]
    firsts = [[n for n in names if n.startswith(kind)][:1] for kind in ("threshold", "learned", "linear_spec")]
    shown = [ORACLE, *sum(firsts, [])]
    height = 0.8 / len(shown)
    for i, name in enumerate(shown):
        values = [groups[task][length][name]["acceptance"] or 0 for task in tasks]
        places = [y + 0.4 - (i + 0.5) * height for y in range(len(tasks))]
        axis.barh(places, values, height, color=_styles(names)[name][0], label=name)
    axis.set_yticks(range(len(tasks)), tasks, fontsize=8)
    axis.set(xlabel=f"acceptance at block length {length}")
    axis.legend(fontsize=8)


# Of Okabe and Ito too, as those of the modes.
_THRESHOLD_COLORS = ("#D55E00", "#E69F00", "#CC79A7", "black")
_LEARNED_COLORS = ("#882255", "#999933", "#44AA99", "#332288")


def _styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and line of each sampler."""
    fixed = {ORACLE: ("#BBBBBB", "-"), "serial": ("#56B4E9", ":")} | {
        mode: (color, "--") for mode, color in plotting.MODE_COLORS.items()
    }
    colors: dict[str, tuple[str, str]] = {}
    for kind, palette, line in (("threshold", _THRESHOLD_COLORS, "-"), ("learned", _LEARNED_COLORS, "-.")):
        own = [name for name in names if name.startswith(kind)]
        colors |= {name: (palette[i % 4], line) for i, name in enumerate(own)}
    return {name: fixed.get(name) or colors[name] for name in names}


def _only(records: Iterable[Record], length: int, sampler: str) -> list[Record]:
    return [r for r in records if r["block_length"] == length and r["sampler"] == sampler]


def _prompt(record: Record) -> tuple[str, int, int]:
    return record["task"], record["id"], record["block_length"]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
