"""From users' data sets to encoded samples: a source that hands each rank its share of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimode_vlm.bad_samples import ON_BAD_SAMPLE, BadSample
from trimode_vlm.training.data import Encoded
from trimode_vlm.training.datasets import DataSettings
from trimode_vlm.training.mixture import Drawn, Mixture, StreamMember, TableMember, quotas, sample_id_bases
from trimode_vlm.training.row_encoding import RowEncoder
from trimode_vlm.training.tables import Stream, Table, open_table, split_slice

PARTS = ("all", "train", "eval")
MAX_TRIES = 100
"""Bad rows one after another that may be replaced; more are no accident."""


@dataclass(frozen=True)
class DataSource:
    """A mixture of data sets as steps of `batch_samples` samples over all ranks; picklable.

    Sample n of the run is the same for any number of ranks. A bad row is replaced by the next good one of its data set
    (a function of the row alone, so ranks need not agree on it), unless the policy is to raise; the sample in its
    place says so in `skipped`. "skip" and "report" draw alike: whoever trains counts them, or names them as well.
    """

    members: tuple[TableMember | StreamMember, ...]
    encoders: tuple[RowEncoder, ...]
    bases: tuple[int, ...]
    mixture: Mixture
    batch_samples: int
    on_bad_sample: str = "raise"

    @property
    def num_samples(self) -> int | None:
        """Samples of one epoch, weights counted in; None when a member streams."""
        streams = any(isinstance(member, StreamMember) for member in self.members)
        return None if streams else self.mixture.epoch_samples

    def draw(self, step: int, rank: int, world: int) -> list[Encoded]:
        """Return this rank's samples of a step.

        Raises:
            BadSample: a row is bad and the policy is "raise", or MAX_TRIES rows in a row are.
        """
        first = step * self.batch_samples
        return [self.sample(number) for number in range(first + rank, first + self.batch_samples, world)]

    def sample(self, number: int) -> Encoded:
        """Return sample `number` of the run, counted over all ranks and epochs."""
        index, place = self.mixture.locate(number)
        skipped = ""
        for tries in range(MAX_TRIES):
            drawn = self.members[index].draw(place, tries)
            try:
                return encode(drawn, self.encoders[index], self.bases[index], skipped)
            except BadSample as error:
                if self.on_bad_sample == "raise":
                    raise
                skipped = skipped or str(error)
        raise BadSample(f"{MAX_TRIES} bad rows one after another, the first: {skipped}")


def encode(drawn: Drawn, encoder: RowEncoder, base: int = 0, skipped: str = "") -> Encoded:
    """Encode a drawn row.

    Raises:
        BadSample: the message begins with file, row and id.
    """
    name = drawn.name
    try:
        row = drawn.read()
        name = encoder.named(name, row)
        layout = encoder.lay_out(row)
        return Encoded(
            sample_id=base + drawn.index,
            input_ids=layout.input_ids,
            loss_mask=layout.loss_mask,
            images=encoder.pixels(layout),
            epoch=drawn.epoch,
            name=name,
            skipped=skipped,
        )
    except BadSample as error:
        raise BadSample(f"{name}: {error}", error.kind) from None


def open_source(
    settings: Sequence[DataSettings],
    processor: Any,
    *,
    batch_samples: int,
    seed: int = 0,
    max_length: int | None = None,
    on_bad_sample: str = "raise",
    shuffle: bool = True,
    eval_fraction: float = 0.0,
    part: str = "all",
) -> DataSource:
    """Open a mixture of data sets as a source of steps of `batch_samples` samples over all ranks.

    With `eval_fraction`, part "train" leaves out the rows that part "eval" holds; the choice depends on neither seed
    nor order. max_length: tokens of a sample; longer ones are cut, never inside an image.

    Raises:
        ValueError: a data set cannot be opened, or an option is unknown.
    """
    if on_bad_sample not in ON_BAD_SAMPLE:
        raise ValueError(f"on_bad_sample must be one of {', '.join(ON_BAD_SAMPLE)}, got {on_bad_sample!r}")
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    if part != "all" and not 0 < eval_fraction < 1:
        raise ValueError(f"eval_fraction must lie between 0 and 1, got {eval_fraction}")
    if batch_samples < 1:
        raise ValueError(f"batch_samples must be at least 1, got {batch_samples}")
    tables = [open_table(one) for one in settings]
    if part != "all":
        tables = [table.part(part, eval_fraction) for table in tables]
    bases = sample_id_bases([identity(one) for one in settings])
    members: list[TableMember | StreamMember] = []
    for one, table, base in zip(settings, tables, bases, strict=True):
        key = f"order/{seed}/{base}"
        if isinstance(table, Stream):
            members.append(StreamMember(table, key, one.shuffle_buffer if shuffle else 1))
        else:
            members.append(TableMember(table, key, shuffle))
    sizes = [None if isinstance(table, Stream) else len(table) for table in tables]
    return DataSource(
        members=tuple(members),
        encoders=encoders(settings, tables, processor, max_length),
        bases=bases,
        mixture=Mixture(quotas(sizes, [one.weight for one in settings]), seed, shuffle),
        batch_samples=batch_samples,
        on_bad_sample=on_bad_sample,
    )


def read_sample(
    settings: DataSettings | Sequence[DataSettings], processor: Any, index: int, max_length: int | None = None
) -> Encoded:
    """Encode row `index` of a data set, or of several counted through in order.

    Raises:
        ValueError: there is no such row, or the row is bad; the message names file, row and id.
    """
    settings = [settings] if isinstance(settings, DataSettings) else list(settings)
    tables = [open_table(one) for one in settings]
    bases = sample_id_bases([identity(one) for one in settings])
    place = index
    for table, encoder, base in zip(tables, encoders(settings, tables, processor, max_length), bases, strict=True):
        drawn = drawn_at(table, place)
        if drawn is not None:
            return encode(drawn, encoder, base)
        place -= len(table) if isinstance(table, Table) else sum(1 for _ in table.items())
    raise ValueError(f"there is no sample {index}: the data holds {index - place} rows, counted from 0")


def encoders(
    settings: Sequence[DataSettings], tables: Sequence[Table | Stream], processor: Any, max_length: int | None
) -> tuple[RowEncoder, ...]:
    """Return an encoder for each data set."""
    pairs = zip(settings, tables, strict=True)
    return tuple(RowEncoder(one, Path(table.folder), processor, max_length) for one, table in pairs)


def drawn_at(table: Table | Stream, place: int) -> Drawn | None:
    """Return the row at `place`, None where there is none."""
    if isinstance(table, Table):
        inside = 0 <= place < len(table)
        return Drawn(int(table.indices[place]), table.name(place), 0, place, table) if inside else None
    index, name, row = next(table.items(skip=place), (0, "", None)) if place >= 0 else (0, "", None)
    return Drawn(index, name, 0, row, table) if name else None


def identity(settings: DataSettings) -> str:
    """Return the name that a data set's sample ids come from: the same on every machine that holds a copy of it."""
    return f"{Path(split_slice(settings.path)[0]).name}/{settings.name}/{settings.split}"
