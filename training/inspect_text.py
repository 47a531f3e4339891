"""A sample's view as text for a terminal: token under token, clean over noisy, one block after another."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from trimode_vlm.training.inspect_view import STREAMS, Block, SampleView, Token

COLORS = {"bold": "1", "dim": "2", "trained": "32", "masked": "33;1", "image": "35"}
PROMPT_TOKENS = 60
"""Tokens of a stretch of prompt that are shown; of a longer one, its two ends."""
LONGEST_TOKEN = 40
"""Characters of one token that are shown."""
MARGIN = 14
"""Columns of the labels before the tokens."""


@dataclass(frozen=True)
class Paint:
    """How text is drawn: in colour, and with which signs."""

    color: bool = False
    unicode: bool = True

    def __call__(self, text: str, color: str) -> str:
        return f"\x1b[{COLORS[color]}m{text}\x1b[0m" if self.color and color and text else text

    def visible(self, text: str, blanks: bool = True) -> str:
        """Text on one line: signs for blanks and line breaks, escapes for what does not print."""
        signs = {" ": "·", "\n": "⏎", "\t": "⇥"} if self.unicode else {" ": "_"}
        signs = signs if blanks else {}
        out = "".join(signs.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode()) for c in text)
        return out if self.unicode else out.encode("ascii", "backslashreplace").decode()

    def shown(self, text: str) -> str:
        """A token's text, cut where it is long; the sign of a part of a character where it has none."""
        more = "…" if self.unicode else "~"
        text = self.visible(text)
        return text[: LONGEST_TOKEN - 1] + more if len(text) > LONGEST_TOKEN else text or more

    @property
    def mask(self) -> str:
        return "▒" if self.unicode else "#"


def render(view: SampleView, width: int = 100, paint: Paint | None = None, whole: bool = False) -> str:
    """The view as lines of at most `width` columns; `whole` shows long prompts in full."""
    paint = paint or Paint()
    title, *facts = _header(view, paint)
    lines = [*_wrapped(title, width, paint, "bold"), *(line for fact in facts for line in _wrapped(fact, width, paint))]
    lines += ["", *_body(view, width, paint, whole), "", *_legend(view, paint)]
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, width: int, paint: Paint, color: str = "") -> list[str]:
    lines = textwrap.wrap(text, width, subsequent_indent=" " * 10, break_on_hyphens=False)
    return [paint(line, color) for line in lines]


def display_width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


# --- what stands above ----------------------------------------------------------------------------------------------


def _header(view: SampleView, paint: Paint) -> list[str]:
    n, noise = view.lengths, view.noise
    name = paint.visible(view.name, blanks=False)
    lines = [f"{name}   drawn with seed {noise.seed}, epoch {view.epoch}, sample {view.sample_id}"]
    other = n["text"] - n["response"]
    answers = f"{len(view.responses)} answer" + ("" if len(view.responses) == 1 else "s")
    lines.append(f"tokens    {n['tokens']} = {n['image']} image + {other} other + {n['response']} trained in {answers}")
    for number, image in enumerate(view.images, 1):
        (height, width), (rows, columns) = image.size, image.grid
        lines.append(f"image {number:<3} {height}x{width} pixels, {rows}x{columns} cells, "
                     f"{image.stop - image.start} tokens at {image.start}..{image.stop - 1}")  # fmt: skip
    if not noise.dual:
        return [*lines, f"row       {n['row']} tokens: the clean stream alone (alpha 0, AR loss only)"]
    others = ", ".join(f"{name} {length}" for name, length in view.row_lengths.items())
    lines.append(f"row       {n['row']} tokens = {n['noisy']} noisy + {n['clean']} clean   (by noisy_stream: {others})")
    ps = sorted({block.p for block in view.blocks if block.p is not None})
    drawn = "" if not ps else f"p {ps[0]:.3f}" if len(ps) == 1 else f"p {ps[0]:.3f}..{ps[-1]:.3f}"
    share = f" = {view.masked / view.maskable:.3f}" if view.maskable else ""
    lines.append(f"noise     {drawn or 'no p'} per {noise.noise}: {view.masked} of {view.maskable} masked{share}")
    longest = max((b.stop - b.start for b in view.blocks), default=0)
    options = f"block_length {noise.block_length}, alignment {noise.block_alignment}, offset {noise.block_offset}"
    return [*lines, f"blocks    {len(view.blocks)} of up to {longest} tokens ({options})"]


def _legend(view: SampleView, paint: Paint) -> list[str]:
    lines = [f"loss  a: target of the AR loss, {paint('trained text', 'trained')}"]
    if view.noise.dual:
        mask = next((token.text for token in view.tokens if token.target is not None), "the mask token")
        sign = paint(paint.mask * 3, "masked")
        lines.append(
            f"      d: target of the diffusion loss, {sign} = {paint.visible(mask)} ({view.noise.mask_token_id})"
        )
        if any(token.stream == "complement" for token in view.tokens):
            lines.append("      c: the same in the complement, the second noisy half")
    return lines


# --- the tokens -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stretch:
    """Tokens start..stop of the clean half that are shown together: an image, or text of one block."""

    start: int
    stop: int
    image: int | None
    response: int | None
    block: int | None


class _Halves:
    """The tokens of a view by where they belong: clean ones by place, noisy ones by half and source or block."""

    def __init__(self, view: SampleView) -> None:
        self.clean = [token for token in view.tokens if token.stream == "clean"]
        self.names = [name for name in STREAMS[:-1] if any(token.stream == name for token in view.tokens)]
        self.at = {(token.stream, token.source): token for token in view.tokens if token.source is not None}
        self.blocks = {(block.stream, block.number): block for block in view.blocks}
        self.tokens = view.tokens

    def of(self, stretch: _Stretch) -> list[str]:
        """The noisy halves that hold a stretch."""
        return [name for name in self.names if (name, stretch.start) in self.at]

    def block(self, name: str, stretch: _Stretch) -> Block | None:
        token = self.at.get((name, stretch.start))
        return self.blocks[name, token.block] if token and token.block is not None else None

    def padding(self, name: str, stretch: _Stretch) -> dict[int, Token]:
        """position -> the padding behind a stretch that ends its response."""
        block = self.block(name, stretch)
        members = self.tokens[block.start : block.stop] if block else []
        return {token.position: token for token in members if token.source is None}


def _body(view: SampleView, width: int, paint: Paint, whole: bool) -> Iterator[str]:
    halves = _Halves(view)
    for stretch in _stretches(view, halves):
        heading = _heading(view, halves, stretch)
        yield from _wrapped(heading, width, paint, "bold" if stretch.image is None else "image")
        if stretch.image is not None:
            continue
        names, is_answer = halves.of(stretch), stretch.response is not None
        lines = ["id", "text", *(name[:5] for name in names), *(["loss"] if is_answer else [])]
        cells = [
            _cell(i, halves.clean[i], [halves.at.get((name, i)) for name in names], paint, is_answer)
            for i in range(stretch.start, stretch.stop)
        ]
        paddings = [halves.padding(name, stretch) for name in names] if is_answer else []
        for position in sorted({position for padding in paddings for position in padding}):
            cells.append(_cell(position, None, [padding.get(position) for padding in paddings], paint, is_answer))
        ends = PROMPT_TOKENS // 2
        if not is_answer and not whole and len(cells) > PROMPT_TOKENS:
            yield from _gloss(lines, cells[:ends], width, paint)
            yield paint(f"{'':{MARGIN}}... {len(cells) - 2 * ends} more tokens (--whole shows them)", "dim")
            cells = cells[-ends:]
        yield from _gloss(lines, cells, width, paint)


def _stretches(view: SampleView, halves: _Halves) -> Iterator[_Stretch]:
    def kind(i: int) -> tuple[int | None, int | None, int | None]:
        image = next((k for k, span in enumerate(view.images) if span.start <= i < span.stop), None)
        response = next((k for k, (start, stop) in enumerate(view.responses) if start <= i < stop), None)
        noisy = halves.at.get((halves.names[0], i)) if halves.names else None
        return image, response, noisy.block if noisy and image is None else None

    for (image, response, block), members in groupby(range(len(halves.clean)), key=kind):
        places = list(members)
        yield _Stretch(places[0], places[-1] + 1, image, response, block)


def _heading(view: SampleView, halves: _Halves, stretch: _Stretch) -> str:
    last = stretch.stop - 1
    where = f"position {last}" if stretch.start == last else f"positions {stretch.start}..{last}"
    if stretch.image is not None:
        image = view.images[stretch.image]
        twice = ", in both halves" if halves.of(stretch) else ""
        grid = f"{image.grid[0]}x{image.grid[1]} cells: {image.stop - image.start} tokens"
        return f"{where}  [image {stretch.image + 1}: {grid}{twice}]"
    parts = [f"{where}  " + ("not trained" if stretch.response is None else f"answer {stretch.response + 1}")]
    for name in halves.of(stretch):
        block = halves.block(name, stretch)
        if block is None:
            continue
        padding = f", {block.padding} of them padding behind the answer" if block.padding else ""
        drawn = "never masked" if not block.maskable else f"{block.masked} of {block.maskable} masked{padding}"
        p = "" if block.p is None else f" p {block.p:.3f},"
        parts.append(f"{'' if name == 'noisy' else name + ' '}block {block.number}:{p} {drawn}")
    return "; ".join(parts)


@dataclass(frozen=True)
class _Cell:
    """One token of the sample, or padding: the text and colour of each line."""

    position: int
    lines: list[tuple[str, str]]

    @property
    def width(self) -> int:
        return max(display_width(text) for text, _ in self.lines)


def _cell(position: int, clean: Token | None, noisy: Sequence[Token | None], paint: Paint, is_answer: bool) -> _Cell:
    first = clean or next(token for token in noisy if token is not None)
    own = first.id if first.target is None else first.target
    text = paint.shown(clean.text) if clean else ""
    lines = [(str(own), "dim"), (text, "trained" if is_answer else "")]
    for token in noisy:
        if token is None:
            lines.append(("", ""))
        elif token.loss:
            lines.append((paint.mask * max(3, display_width(text)), "masked"))
        else:
            lines.append((paint.shown(token.text), ""))
    if is_answer:
        marks = [("a", clean), *zip("dc", noisy, strict=False)]
        lines.append(("".join(mark for mark, token in marks if token and token.loss), "dim"))
    return _Cell(position, lines)


def _gloss(labels: Sequence[str], cells: Sequence[_Cell], width: int, paint: Paint) -> Iterator[str]:
    """Cells side by side, as many as fit, then the next ones below; the first line's label begins with a position."""
    rest = list(cells)
    while rest:
        taken, used = [rest.pop(0)], 0
        used = MARGIN + taken[0].width
        while rest and used + 2 + rest[0].width <= width:
            used += 2 + rest[0].width
            taken.append(rest.pop(0))
        for number, label in enumerate(labels):
            position = str(taken[0].position) if number == 0 else ""
            row = [f"{position:>6} {label:>5}", *(_fill(cell, number, paint) for cell in taken)]
            yield "  ".join(row)


def _fill(cell: _Cell, number: int, paint: Paint) -> str:
    text, color = cell.lines[number]
    blank = cell.width - display_width(text)
    return paint(text, color) + " " * blank
