"""Tokens per forward, pooled over samples and split by response length.

Every figure here is a ratio of sums, never a mean of ratios: a thousand one-word answers must not hide one long table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_BUCKETS = (100, 200)

CONVENTION = {
    "forward": "one call of the text backbone on one row: prefill, draft, verify, denoise or refresh; "
    "the vision tower is not counted",
    "tpf_decode": "(emitted tokens - tokens that the prefill gave) / decode forwards (draft, verify, denoise, "
    "refresh); `tokens_per_forward` in the API; AR is exactly 1",
    "tpf_end_to_end": "emitted tokens / all forwards, prefill included; AR is exactly 1",
    "emitted": "tokens up to and including the end token; tokens after it are not counted, forwards spent on them are",
    "pooling": "sum of tokens / sum of forwards over the samples of a row of the table",
    "bucket": "by the number of emitted tokens of the answer in that mode; '>100' holds answers of 101 tokens and more",
}


@dataclass
class Totals:
    """Sums over samples; seconds are wall time of `generate`, forwards as in CONVENTION."""

    num_samples: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_forwards: int = 0
    num_prefill_forwards: int = 0
    seconds: float = 0.0
    accepted_lengths: list[int] = field(default_factory=list)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one sample's record (the fields that `run.py` writes)."""
        self.num_samples += 1
        self.num_tokens += record["num_new_tokens"]
        self.num_prefill_tokens += prefill_tokens(record)
        self.num_forwards += record["nfe"]
        self.num_prefill_forwards += record["nfe_prefill"]
        self.seconds += record["seconds"]
        self.accepted_lengths += record.get("accepted_lengths") or []

    @property
    def num_decode_forwards(self) -> int:
        return self.num_forwards - self.num_prefill_forwards

    @property
    def tpf_decode(self) -> float | None:
        return _ratio(self.num_tokens - self.num_prefill_tokens, self.num_decode_forwards)

    @property
    def tpf_end_to_end(self) -> float | None:
        return _ratio(self.num_tokens, self.num_forwards)

    def as_dict(self) -> dict[str, Any]:
        """All sums and ratios, ready for JSON; a ratio over nothing is None."""
        return {
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "mean_tokens": _ratio(self.num_tokens, self.num_samples),
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_forwards": self.num_forwards,
            "num_prefill_forwards": self.num_prefill_forwards,
            "num_decode_forwards": self.num_decode_forwards,
            "tpf_decode": self.tpf_decode,
            "tpf_end_to_end": self.tpf_end_to_end,
            "seconds": self.seconds,
            "tokens_per_sec": _ratio(self.num_tokens, self.seconds),
            "mean_accepted_length": _ratio(sum(self.accepted_lengths), len(self.accepted_lengths)),
        }


def prefill_tokens(record: Mapping[str, Any]) -> int:
    """Tokens that the prefill gave: in every mode its last position predicts the first token of the answer."""
    return min(1, record["num_new_tokens"]) if record["nfe_prefill"] else 0


def totals(records: Iterable[Mapping[str, Any]]) -> Totals:
    """Sums over the records."""
    result = Totals()
    for record in records:
        result.add(record)
    return result


def bucketed(records: Iterable[Mapping[str, Any]], thresholds: Sequence[int] = DEFAULT_BUCKETS) -> dict[str, Totals]:
    """Totals of "all" and of every ">n": nested buckets, by the number of emitted tokens."""
    result = {"all": Totals(), **{f">{n}": Totals() for n in thresholds}}
    for record in records:
        result["all"].add(record)
        for n in thresholds:
            if record["num_new_tokens"] > n:
                result[f">{n}"].add(record)
    return result


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
