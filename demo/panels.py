"""The parts of the page that are drawn as HTML: counts, the canvas or draft, the session's table, the comparison.

Everything that a model or a user wrote is escaped. Colours come from the page's own variables, light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trimode_vlm.demo.live_answer import LiveAnswer
from trimode_vlm.eval.tpf import Totals, bucketed, totals

MASK = "░"
# Emitted tokens that are shown before the block, for its place in the answer.
CONTEXT_TOKENS = 24


# What a column or a cell means, as its tooltip.
MEANINGS = {
    "n": "number of answers",
    "forwards": "calls of the text backbone: prefill, draft, verify, denoise or refresh",
    "TPF": "tokens per forward after the prefill; ar is exactly 1",
    **dict.fromkeys(
        ("with prefill", "TPF with prefill", "+prefill"), "tokens per forward, the prefill included; ar is exactly 1"
    ),
    "accepted": "tokens that a cycle of drafting and verifying gave, on average",
    "text": "whether the text equals the reference, letter by letter",
}
# Columns that a phone has no room for.
WIDE_ONLY = ("tokens", "forwards")


def title(title: str, name: str | None, hint: str | None) -> str:
    """The page's head: what it is, over which model, and what to know of it."""
    model = f" · <code>{escape(name)}</code>" if name else ""
    about = "One model, three ways to decode. TPF is tokens per forward: the higher, the fewer steps."
    return f"<h1>{escape(title)}{model}</h1><p>{about}</p>" + (f"<p class='tm-hint'>{escape(hint)}</p>" if hint else "")


def live_panel(live: LiveAnswer | None, decode: Callable[[int], str] = str, mask_token_id: int | None = None) -> str:
    """Counts and canvas of an answer; None: nothing was asked."""
    return stats(live.record() if live else None) + canvas(live, decode, mask_token_id)


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
        ("TPF", _decimal(total.tpf_decode)),
        ("TPF with prefill", _decimal(total.tpf_end_to_end)),
        ("tokens/s", _decimal(_per_sec(total), 0)),
        ("time to first token", "–" if first is None else f"{first * 1000:.0f} ms"),
        ("accepted", _decimal(sum(accepted) / len(accepted) if accepted else None, 1)),
        ("seconds", f"{record['seconds']:.2f}"),
        ("ended by", escape(record["finish_reason"] or "…")),
    ]
    html = "".join(f"<div{_meaning(k)}><dt>{k}</dt><dd>{v}</dd></div>" for k, v in cells)
    return f"<dl class='tm-stats'>{html}</dl>"


def canvas(live: LiveAnswer | None, decode: Callable[[int], str], mask_token_id: int | None) -> str:
    """The block under way: diffusion's canvas, or the last draft with the verifier's verdict; else the text's end.

    Args:
        decode: a token id to its text.
    """
    if live is None:
        return "<div class='tm-canvas tm-legend'>The block under way appears here.</div>"
    event, known = live.block, live.token_ids[: live.block_end]
    if event is not None and event.canvas is not None:
        confidence: Sequence[float | None] = event.confidence or [None] * len(event.canvas)
        cells = [
            Cell(token, "tm-mask") if token == mask_token_id else Cell(token, "tm-new", _shade(sure))
            for token, sure in zip(event.canvas, confidence, strict=True)
        ]
        overlap = _overlap(known, event.canvas)
        before = known[: len(known) - overlap]
        if event.finish_reason is not None:
            # The budget may end an answer within its block.
            cells = cells[:overlap]
        legend = f"<b style='{_shade(1)}'>committed</b> stronger is surer · <b class='tm-mask'>{MASK}</b> masked"
    elif event is not None and event.draft is not None:
        # The budget may end an answer within its draft.
        accepted = min(event.num_accepted or 0, len(event.token_ids))
        rejected = event.draft[accepted:] if accepted == (event.num_accepted or 0) else []
        before = known[: len(known) - len(event.token_ids)]
        cells = [Cell(token, "tm-yes") for token in event.draft[:accepted]]
        cells += [Cell(token, "tm-new") for token in event.token_ids[accepted:]]
        cells += [Cell(token, "tm-no") for token in rejected]
        legend = "<b class='tm-yes'>accepted</b> <b class='tm-new'>the verifier's own</b> <b class='tm-no'>rejected</b>"
    else:
        before, cells, legend = live.token_ids[-3 * CONTEXT_TOKENS :], [], "the last tokens"
    cells = [*(Cell(token) for token in before[-3 * CONTEXT_TOKENS :][-CONTEXT_TOKENS if cells else 0 :]), *cells]
    # What stands behind the end is no part of the answer.
    end = next((i + 1 for i, cell in enumerate(cells) if cell.token_id in live.end_token_ids), len(cells))
    text = "".join(_cell(cell, decode, live.end_token_ids) for cell in cells[:end])
    return f"<div class='tm-canvas' tabindex='0' role='region' aria-label='Block under way'>{text}</div>" + (
        f"<p class='tm-legend'>{legend}</p>"
    )


@dataclass(frozen=True)
class Cell:
    """One token of the canvas."""

    token_id: int
    kind: str = ""
    style: str = ""


def _cell(cell: Cell, decode: Callable[[int], str], end_token_ids: Collection[int]) -> str:
    if cell.token_id in end_token_ids:
        return "<span class='tm-end' title='the end of the answer'> ■ end</span>"
    text = MASK if cell.kind == "tm-mask" else escape(decode(cell.token_id)).replace("\n", "⏎\n")
    attributes = (f" class='{cell.kind}'" if cell.kind else "") + (f" style='{cell.style}'" if cell.style else "")
    return f"<span{attributes}>{text}</span>"


def _overlap(known: Sequence[int], block: Sequence[int]) -> int:
    """How many of the block's first tokens are the last known ones: those have been emitted."""
    longest = min(len(known), len(block))
    return next((n for n in range(longest, 0, -1) if list(known[-n:]) == list(block[:n])), 0)


def _shade(confidence: float | None) -> str:
    return "" if confidence is None else f"background: rgba(56, 132, 255, {0.12 + 0.5 * confidence**2:.2f})"


def session(records: Sequence[Mapping[str, Any]]) -> str:
    """TPF by answer length over the session: bars, and a table with a row per mode and bucket that has an answer."""
    return session_bars(records) + session_table(records)


def session_table(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return "<p class='tm-legend'>No answers yet.</p>"
    head = ("mode", "length", "n", "tokens", "forwards", "TPF", "+prefill", "tok/s")
    rows = [
        (
            escape(mode), escape(bucket), str(total.num_samples), str(total.num_tokens), str(total.num_forwards),
            _decimal(total.tpf_decode), _decimal(total.tpf_end_to_end), _decimal(_per_sec(total), 0),
        )
        for mode, chosen in by_mode(records).items()
        for bucket, total in bucketed(chosen).items()
        if total.num_samples
    ]  # fmt: skip
    return table(head, rows, words=(1,))


def session_bars(records: Sequence[Mapping[str, Any]]) -> str:
    """The same as bars, the modes of a bucket side by side."""
    by_bucket: dict[str, list[tuple[str, float]]] = {}
    for mode, chosen in by_mode(records).items():
        for bucket, total in bucketed(chosen).items():
            if total.tpf_decode is not None:
                by_bucket.setdefault(bucket, []).append((mode, total.tpf_decode))
    if not by_bucket:
        return ""
    # At least ar's 1, at which a line stands: a bar that is alone tells its length too.
    highest = max(1, *(value for bars in by_bucket.values() for _, value in bars))
    html = "".join(
        f"<h4>{_bucket(bucket)}</h4>"
        + "".join(
            f"<div><span>{escape(mode)}</span>"
            f"<u><i class='tm-{escape(mode)}' style='width: {100 * value / highest:.0f}%'></i></u>"
            f"<b>{_decimal(value)}</b></div>"
            for mode, value in bars
        )
        for bucket, bars in sorted(by_bucket.items(), key=lambda item: list(bucketed([])).index(item[0]))
    )
    return (
        f"<section class='tm-bars' style='--one: {100 / highest:.1f}%' aria-label='TPF by mode and answer length'>"
        f"{html}<p class='tm-legend'>The line: TPF 1, as in ar.</p></section>"
    )


def _bucket(name: str) -> str:
    return "all answers" if name == "all" else f"answers {escape(name)} tokens"


def comparison(records: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> str:
    """One row per mode, each text compared with the reference, the first mode's."""
    head = ("mode", "text", "tokens", "forwards", "TPF", "with prefill", "seconds", "tokens/s", "accepted")
    rows: list[tuple[str, ...]] = []
    for record, text in zip(records, texts, strict=True):
        total, accepted = totals([record]), record["accepted_lengths"]
        same = "reference" if not rows else "identical" if text == texts[0] else "not identical"
        rows.append((
            escape(record["mode"]),
            f"<span class='{'tm-other' if same.startswith('not') else 'tm-same'}'>{same}</span>",
            str(total.num_tokens), str(total.num_forwards), _decimal(total.tpf_decode),
            _decimal(total.tpf_end_to_end), f"{record['seconds']:.2f}", _decimal(_per_sec(total), 0),
            _decimal(sum(accepted) / len(accepted) if accepted else None, 1),
        ))  # fmt: skip
    return table(head, rows, words=(1,))


def table(head: Sequence[str], rows: Iterable[Iterable[str]], words: Collection[int] = ()) -> str:
    """An HTML table of cells that are HTML already, in a box of its own that scrolls; `words`: columns of text."""
    kinds = ["tm-word" if i in words else "tm-wide" if name in WIDE_ONLY else "" for i, name in enumerate(head)]

    def line(tag: str, cells: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{f' class={kind}' if kind else ''}{_meaning(name) if tag == 'th' else ''}>{cell}</{tag}>"
            for kind, name, cell in zip(kinds, head, cells, strict=True)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return (
        f"<div class='tm-scroll' tabindex='0'><table class='tm-table'><tr>{line('th', head)}</tr>{body}</table></div>"
    )


def _meaning(name: str) -> str:
    return f" title='{MEANINGS[name]}'" if name in MEANINGS else ""


def note(text: str) -> str:
    """One line to the visitor; nothing when empty."""
    return f"<p class='tm-note' role='status'>{escape(text)}</p>" if text else ""


def by_mode(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["mode"], []).append(record)
    return groups


def _decimal(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _per_sec(total: Totals) -> float | None:
    return total.num_tokens / total.seconds if total.seconds else None
