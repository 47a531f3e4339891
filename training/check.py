"""The pre-flight check of users' data: everything is read once, counted, and its faults are grouped by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from trimode_vlm.bad_samples import BadSample
from trimode_vlm.training.datasets import DataSettings
from trimode_vlm.training.mixture import Drawn
from trimode_vlm.training.row_encoding import RowEncoder
from trimode_vlm.training.samples import drawn_at, encoders
from trimode_vlm.training.tables import Stream, Table, open_table

SHOWN = 3
"""Examples that a report names for each kind of fault."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class RowCheck:
    """What one row adds to a report; `kind` and `message` are set for a bad row."""

    name: str = ""
    num_tokens: int = 0
    num_supervised: int = 0
    num_images: int = 0
    num_cut: int = 0
    kind: str | None = None
    message: str = ""


@dataclass
class SetReport:
    """Counts of one data set."""

    path: str
    weight: float
    lengths: list[int] = field(default_factory=list)
    num_supervised: int = 0
    num_images: int = 0
    num_cut_samples: int = 0
    num_cut_tokens: int = 0
    bad: dict[str, list[str]] = field(default_factory=dict)
    num_bad: dict[str, int] = field(default_factory=dict)

    def add(self, row: RowCheck) -> None:
        """Count one row."""
        if row.kind is not None:
            self.num_bad[row.kind] = self.num_bad.get(row.kind, 0) + 1
            examples = self.bad.setdefault(row.kind, [])
            if len(examples) < SHOWN:
                examples.append(f"{row.name}: {row.message}")
            return
        self.lengths.append(row.num_tokens)
        self.num_supervised += row.num_supervised
        self.num_images += row.num_images
        self.num_cut_samples += row.num_cut > 0
        self.num_cut_tokens += row.num_cut

    @property
    def num_rows(self) -> int:
        """Rows read, good and bad."""
        return len(self.lengths) + sum(self.num_bad.values())

    def lines(self) -> Iterator[str]:
        """The set's part of the report."""
        weight = "" if self.weight == 1 else f", weight {self.weight:g}"
        yield f"{self.path}: {self.num_rows} rows{weight}, {sum(self.num_bad.values())} bad"
        if self.lengths:
            lengths, total = sorted(self.lengths), sum(self.lengths)
            at = ", ".join(f"{p} % {lengths[min(len(lengths) - 1, len(lengths) * p // 100)]}" for p in PERCENTILES)
            yield f"  tokens       {total}; per sample: least {lengths[0]}, {at}, most {lengths[-1]}"
            yield f"  supervised   {self.num_supervised} tokens ({100 * self.num_supervised / total:.1f} %)"
            yield f"  images       {self.num_images}"
        if self.num_cut_samples:
            yield f"  cut          {self.num_cut_samples} samples are too long and lose {self.num_cut_tokens} tokens"
        for kind, number in sorted(self.num_bad.items(), key=lambda item: -item[1]):
            yield f"  {number} x {kind}"
            yield from (f"    {example}" for example in self.bad[kind])
            if number > SHOWN:
                yield f"    and {number - SHOWN} more"


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What a check found; str() is the report for the terminal."""

    sets: tuple[SetReport, ...]
    decoded_images: bool = True

    @property
    def num_bad(self) -> int:
        """Samples that training would refuse or skip."""
        return sum(sum(one.num_bad.values()) for one in self.sets)

    @property
    def ok(self) -> bool:
        """True when no sample is bad."""
        return self.num_bad == 0

    def __str__(self) -> str:
        lines = [line for one in self.sets for line in one.lines()]
        total = sum(one.num_rows for one in self.sets)
        verdict = "data check: every sample can be trained on" if self.ok else f"data check: {self.num_bad} bad samples"
        of_images = "" if self.decoded_images else ", of images the headers: --check-images reads them whole"
        return "\n".join([*lines, f"{verdict} ({total} rows read{of_images})"])


def check_data(
    settings: Sequence[DataSettings],
    processor: Any,
    *,
    max_length: int | None = None,
    workers: int = 0,
    decode_images: bool = False,
    progress: bool = True,
) -> DataReport:
    """Read every row once and report; images by their headers unless `decode_images`.

    workers: processes that read; a stream is read by one.

    Raises:
        ValueError: a data set cannot be opened.
    """
    settings = list(settings)
    tables = [open_table(one) for one in settings]
    reports = []
    for one, table, encoder in zip(settings, tables, encoders(settings, tables, processor, max_length), strict=True):
        report = SetReport(one.path, one.weight)
        total = len(table) if isinstance(table, Table) else None
        rows = _checks(table, encoder, decode_images, workers)
        for row in tqdm(
            rows, total=total, desc=f"check {table.label}", disable=None if progress else True, mininterval=1
        ):
            report.add(row)
        reports.append(report)
    return DataReport(
        sets=tuple(reports), decoded_images=decode_images or not any(report.num_images for report in reports)
    )


def _checks(table: Table | Stream, encoder: RowEncoder, decode_images: bool, workers: int) -> Iterable[RowCheck]:
    if isinstance(table, Table):
        return DataLoader(_Checks(table, encoder, decode_images), batch_size=None, num_workers=workers)
    drawn = (Drawn(index, name, 0, row, table) for index, name, row in table.items())
    return (check_row(row, encoder, decode_images) for row in drawn)


class _Checks(Dataset[RowCheck]):
    """The checks of a table's rows, for workers to compute."""

    def __init__(self, table: Table, encoder: RowEncoder, decode_images: bool) -> None:
        self.table, self.encoder, self.decode_images = table, encoder, decode_images

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, place: int) -> RowCheck:
        drawn = drawn_at(self.table, place)
        assert drawn is not None
        return check_row(drawn, self.encoder, self.decode_images)


def check_row(drawn: Drawn, encoder: RowEncoder, decode_images: bool = False) -> RowCheck:
    """Encode one row as training would, and count it or say what is wrong with it."""
    name = drawn.name
    try:
        row = drawn.read()
        name = encoder.named(name, row)
        layout = encoder.lay_out(row)
        if decode_images:
            encoder.pixels(layout)
    except BadSample as error:
        return RowCheck(name=name, kind=error.kind, message=str(error))
    return RowCheck(
        name=name,
        num_tokens=len(layout.input_ids),
        num_supervised=sum(layout.loss_mask),
        num_images=len(layout.images),
        num_cut=layout.num_cut,
    )
