"""The parts of the page that are drawn as HTML: counts, the canvas or draft, the session's table, the comparison.

Everything that a model or a user wrote is escaped. Colours come from the page's own variables, light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from trimode_vlm.eval.tpf import bucketed, totals
from trimode_vlm.output import StreamEvent

CSS = """
.tm-stats { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); gap: .5rem; margin: 0; }
.tm-stats div { border: 1px solid var(--border-color-primary); border-radius: .5rem; padding: .35rem .6rem; }
.tm-stats dt { font-size: .75rem; color: var(--body-text-color-subdued); }
.tm-stats dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; }
.tm-canvas { font-family: var(--font-mono); font-size: .82rem; line-height: 1.7; white-space: pre-wrap;
  overflow-wrap: anywhere; border: 1px solid var(--border-color-primary); border-radius: .5rem; padding: .5rem .6rem;
  max-height: 16rem; overflow-y: auto; }
.tm-canvas span { border-radius: .2rem; padding: .05rem 0; }
.tm-mask { color: var(--body-text-color-subdued); opacity: .55; }
.tm-new { background: rgba(56, 132, 255, .28); }
.tm-yes { background: rgba(34, 160, 84, .30); }
.tm-no { background: rgba(214, 60, 60, .25); text-decoration: line-through; }
.tm-legend { font-size: .75rem; color: var(--body-text-color-subdued); margin: .3rem 0 0; }
.tm-legend b { font-weight: 500; padding: 0 .3rem; border-radius: .2rem; }
.tm-scroll { overflow-x: auto; }
.tm-table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
.tm-table th, .tm-table td { text-align: right; padding: .25rem .5rem; white-space: nowrap;
  border-bottom: 1px solid var(--border-color-primary); }
.tm-table th:first-child, .tm-table td:first-child { text-align: left; }
.tm-same { color: #1f8f4d; } .tm-other { color: #c5483a; }
.dark .tm-same { color: #5fd08d; } .dark .tm-other { color: #ff8d80; }
"""
MASK = "░"
# Characters of the emitted text that stand before the block, for its place in the answer.
CONTEXT_TOKENS = 24


def stats(record: Mapping[str, Any] | None) -> str:
    """Counts of one answer, as far as it has come."""
    if record is None:
        return "<p class='tm-legend'>Ask something: tokens, forwards and tokens per forward appear here.</p>"
    total = totals([record])
    first = record["seconds_to_first_token"]
    accepted = record["accepted_lengths"]
    cells = [
        ("mode", escape(record["mode"])),
        ("tokens", f"{total.num_tokens}"),
        ("forwards", f"{total.num_forwards}"),
        ("TPF (decode)", _number(total.tpf_decode)),
        ("TPF (with prefill)", _number(total.tpf_end_to_end)),
        ("tokens/s", _number(total.num_tokens / record["seconds"] if record["seconds"] else None, 0)),
        ("time to first token", "–" if first is None else f"{first * 1000:.0f} ms"),
        ("seconds", f"{record['seconds']:.2f}"),
        ("accepted length", _number(sum(accepted) / len(accepted) if accepted else None, 1)),
        ("ended by", escape(record["finish_reason"] or "…")),
    ]
    return "<dl class='tm-stats'>" + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in cells) + "</dl>"


def canvas(
    token_ids: Sequence[int], event: StreamEvent | None, decode: Callable[[int], str], mask_token_id: int | None
) -> str:
    """The block under way: diffusion's canvas, or the last draft with the verifier's verdict; else the text's end."""
    if event is None:
        return "<div class='tm-canvas tm-mask'>the block under way appears here</div>"

    def piece(token: int, kind: str = "", style: str = "") -> str:
        text = escape(decode(token)).replace("\n", "⏎\n")
        attributes = (f" class='{kind}'" if kind else "") + (f" style='{style}'" if style else "")
        return f"<span{attributes}>{text}</span>"

    if event.canvas is not None and not event.finish_reason:
        # What of the canvas is emitted stands in token_ids too.
        done = next((i for i, t in enumerate(event.canvas) if t == mask_token_id), len(event.canvas))
        before = token_ids[: len(token_ids) - done][-CONTEXT_TOKENS:]
        confidence = event.confidence or [None] * len(event.canvas)
        cells = [
            f"<span class='tm-mask'>{MASK}</span>" if t == mask_token_id else piece(t, "tm-new", _shade(c))
            for t, c in zip(event.canvas, confidence, strict=True)
        ]
        legend = f"<b class='tm-new'>committed</b> stronger is surer · <b class='tm-mask'>{MASK}</b> masked"
    elif event.draft:
        emitted = len(event.token_ids)
        before = token_ids[: len(token_ids) - emitted][-CONTEXT_TOKENS:]
        accepted = event.num_accepted or 0
        cells = [piece(t, "tm-yes") for t in event.draft[:accepted]]
        cells += [piece(t, "tm-new") for t in event.token_ids[accepted:]]
        cells += [piece(t, "tm-no") for t in event.draft[accepted:]]
        legend = "<b class='tm-yes'>accepted</b> <b class='tm-new'>the verifier's own</b> <b class='tm-no'>rejected</b>"
    else:
        before, cells, legend = token_ids[-3 * CONTEXT_TOKENS :], [], "the last tokens"
    text = "".join(piece(t) for t in before) + "".join(cells)
    return f"<div class='tm-canvas'>{text}</div><p class='tm-legend'>{legend}</p>"


def _shade(confidence: float | None) -> str:
    return "" if confidence is None else f"background: rgba(56, 132, 255, {0.12 + 0.5 * confidence**2:.2f})"


def session_table(records: Sequence[Mapping[str, Any]]) -> str:
    """TPF by answer length over the session, one row per mode and bucket that has an answer."""
    if not records:
        return "<p class='tm-legend'>No answers yet.</p>"
    head = ("mode", "answers of", "answers", "tokens", "forwards", "TPF", "with prefill", "tokens/s")
    rows = []
    for mode, chosen in by_mode(records).items():
        for bucket, total in bucketed(chosen).items():
            if total.num_samples:
                rows.append((
                    escape(mode), "any length" if bucket == "all" else f"{escape(bucket)} tokens",
                    str(total.num_samples), str(total.num_tokens), str(total.num_forwards),
                    _number(total.tpf_decode), _number(total.tpf_end_to_end),
                    _number(total.num_tokens / total.seconds if total.seconds else None, 0),
                ))  # fmt: skip
    return table(head, rows)


def session_points(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same as points of a bar plot: mode, answers, TPF."""
    return [
        {"mode": mode, "answers": "all" if bucket == "all" else f"{bucket} tokens", "TPF": total.tpf_decode}
        for mode, chosen in by_mode(records).items()
        for bucket, total in bucketed(chosen).items()
        if total.num_samples and total.tpf_decode is not None
    ]


def comparison_table(records: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> str:
    """One row per mode, each text compared with the first mode's."""
    head = ("mode", "tokens", "forwards", "TPF", "with prefill", "seconds", "tokens/s", "accepted", "text")
    rows = []
    for record, text in zip(records, texts, strict=True):
        total, accepted = totals([record]), record["accepted_lengths"]
        same = "the first" if not rows else "identical" if text == texts[0] else "not identical"
        rows.append((
            escape(record["mode"]), str(total.num_tokens), str(total.num_forwards), _number(total.tpf_decode),
            _number(total.tpf_end_to_end), f"{record['seconds']:.2f}",
            _number(total.num_tokens / record["seconds"] if record["seconds"] else None, 0),
            _number(sum(accepted) / len(accepted) if accepted else None, 1),
            f"<span class='{'tm-other' if same.startswith('not') else 'tm-same'}'>{same}</span>",
        ))  # fmt: skip
    return table(head, rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table of cells that are HTML already, in a box of its own that scrolls."""
    top = "".join(f"<th scope='col'>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='tm-scroll'><table class='tm-table'><tr>{top}</tr>{body}</table></div>"


def by_mode(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["mode"], []).append(record)
    return groups


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
