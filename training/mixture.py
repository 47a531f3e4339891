"""Which row of which data set is sample n of a run: a pure function of n, the seed and the sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from trimode_vlm.training.tables import Stream, Table

STREAM_EPOCH = 1000
"""Samples after which a mixture with streams has given each member its share."""

ROW_BITS = 40


@dataclass(frozen=True)
class Mixture:
    """Parts the samples of a run among data sets. quotas: samples of each in one epoch."""

    quotas: tuple[int, ...]
    seed: int = 0
    shuffle: bool = True

    @property
    def epoch_samples(self) -> int:
        """Samples of one epoch of the mixture."""
        return sum(self.quotas)

    def locate(self, number: int) -> tuple[int, int]:
        """Return (member, how many of its samples came before) for sample `number` of the run."""
        epoch, place = divmod(number, self.epoch_samples)
        if len(self.quotas) == 1:
            return 0, number
        members, before = _arrangement(self.quotas, f"mixture/{self.seed}/{epoch}" if self.shuffle else None)
        member = int(members[place])
        return member, epoch * self.quotas[member] + int(before[place])


def quotas(sizes: Sequence[int | None], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of each member in an epoch: size times weight, or shares of STREAM_EPOCH if a size is None."""
    if any(size is None for size in sizes):
        total = sum(weights)
        return tuple(max(1, round(STREAM_EPOCH * weight / total)) for weight in weights)
    return tuple(max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True) if size is not None)


# Two: a step may end one epoch and begin the next.
@lru_cache(maxsize=2)
def _arrangement(quotas: tuple[int, ...], key: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return (member, number of the same member's earlier places) for every place of an epoch."""
    members = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)
    if key is not None:
        members = members[_permutation(len(members), key)]
    before = np.empty(len(members), dtype=np.int64)
    for member, quota in enumerate(quotas):
        before[members == member] = np.arange(quota)
    return members, before


@lru_cache(maxsize=8)
def _permutation(length: int, key: str) -> np.ndarray:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little"))).permutation(length)


@dataclass(frozen=True)
class Drawn:
    """A row on its way to a sample. epoch: how often it was drawn before; read(): its columns, or BadSample."""

    index: int
    name: str
    epoch: int
    place: Any
    rows: Any

    def read(self) -> Any:
        """Return the row.

        Raises:
            BadSample: it is not valid JSON.
        """
        return self.rows.read(self.place)


@dataclass(frozen=True)
class TableMember:
    """A table seen again and again, each time in another order."""

    table: Table
    key: str
    shuffle: bool = True

    def draw(self, number: int, tries: int = 0) -> Drawn:
        """Return draw `number` of this member; after `tries` bad rows the next one of the table stands in."""
        epoch, place = divmod(number, len(self.table))
        if self.shuffle:
            place = int(_permutation(len(self.table), f"{self.key}/{epoch}")[place])
        place = (place + tries) % len(self.table)
        return Drawn(int(self.table.indices[place]), self.table.name(place), epoch, place, self.table)


@dataclass
class StreamMember:
    """A stream read in order, shuffled within windows of `window` rows, and from its start again at its end.

    What it keeps (an iterator and one window of rows) saves reading again; what it returns does not depend on it.
    """

    stream: Stream
    key: str
    window: int
    _length: int | None = None
    _iterator: Iterator[tuple[int, str, Any]] | None = field(default=None, repr=False)
    _place: int = 0
    _held: tuple[int, list[tuple[int, str, Any]]] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None, "_place": 0, "_held": None}

    def draw(self, number: int, tries: int = 0) -> Drawn:
        """Return draw `number` of this member; after `tries` bad rows a later one stands in."""
        number += tries
        epoch, place = 0, number
        if self._length is None and place % self.window >= len(self._window(place // self.window)):
            self._length = self._count()
        if self._length is not None:
            epoch, place = divmod(number, self._length)
        rows = self._window(place // self.window)
        order = _permutation(len(rows), f"{self.key}/{epoch}/{place // self.window}") if self.window > 1 else [0]
        index, name, row = rows[order[place % self.window]]
        return Drawn(index, name, epoch, row, self.stream)

    def _window(self, number: int) -> list[tuple[int, str, Any]]:
        """Return the rows of window `number`: fewer or none at the stream's end."""
        if self._held is None or self._held[0] != number:
            start = number * self.window
            if self._iterator is None or self._place > start:
                self._iterator, self._place = self.stream.items(skip=start), start
            skipped = sum(1 for _ in islice(self._iterator, start - self._place))
            rows = list(islice(self._iterator, self.window))
            self._place += skipped + len(rows)
            self._held = number, rows
        return self._held[1]

    def _count(self) -> int:
        """Return the rows of the stream; read to its end when a draw is beyond it."""
        length = sum(1 for _ in self.stream.items())
        if not length:
            raise ValueError(f"{self.stream.label} holds no rows")
        return length


def sample_id_bases(names: Sequence[str]) -> tuple[int, ...]:
    """Return a number for each data set; with a row's index added, no two samples share an id.

    It comes from the name, so that a sample keeps its id, and with it its noise, when the mixture around it changes.
    """
    bases: list[int] = []
    for name in names:
        attempt = 0
        while True:
            digest = hashlib.blake2b(f"{name}/{attempt}".encode(), digest_size=8).digest()
            base = int.from_bytes(digest, "little") >> (ROW_BITS + 1) << ROW_BITS
            if base not in bases:
                break
            attempt += 1
        bases.append(base)
    return tuple(bases)
