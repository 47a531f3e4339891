"""One bar for all processes of an evaluation: what their shards hold, with the running score and TPF of each mode."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from trimode_vlm.eval.state import Follower, Record
from trimode_vlm.eval.tpf import Totals

LEAST_SEC = 0.5


class Progress:
    """A bar with `score @ tpf_decode` per mode (controls left out); only rank 0 shows one."""

    def __init__(self, folder: Path, total: int, done: Iterable[Record], is_shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="sample", dynamic_ncols=True, mininterval=1.0, disable=not is_shown)
        self._follower = Follower(folder) if is_shown else None
        self._scores: dict[str, float] = {}
        self._totals: dict[str, Totals] = {}
        self._next_look = 0.0
        done = list(done)
        self._bar.initial = self._bar.n = len(done)
        self._add(done)

    def look(self) -> None:
        """Take in what came since the last look, unless that was a moment ago."""
        if self._follower is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LEAST_SEC
            records = self._follower.new_records()
            self._add(records)
            self._bar.update(len(records))

    def _add(self, records: Iterable[Record]) -> None:
        for record in records:
            if record["run"] == "model" and "error" not in record:
                mode = record["mode"]
                self._scores[mode] = self._scores.get(mode, 0.0) + record["score"]
                self._totals.setdefault(mode, Totals()).add(record)
        shown = {
            mode: f"{self._scores[mode] / totals.num_samples:.3f} @ {totals.tpf_decode or 0:.2f}"
            for mode, totals in self._totals.items()
        }
        self._bar.set_postfix(shown, refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._next_look = 0.0
        self.look()
        self._bar.close()
