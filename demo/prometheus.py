"""The engine's numbers as Prometheus reads them: gauges at the scrape, histograms of finished requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trimode_vlm.request import Request

PREFIX = "trimode_"
GAUGES = {
    "running": "rows that decode",
    "waiting": "requests in the queue",
    "encoding": "those of them whose images are encoded next",
    "kv_bytes": "keys and values of the rows that decode",
    "kv_bytes_limit": "what they may come to",
    "prefix_cache_bytes": "keys and values kept of finished conversations",
    "feature_cache_bytes": "image features kept",
}
COUNTERS = {
    "tokens": "emitted tokens",
    "forwards": "calls of the backbone, each for all rows of a batch",
    "prefill_forwards": "those that read prompts",
    "steps": "rounds of decoding",
    "prefix_hit_tokens": "prompt tokens found in the prefix cache",
    "prefix_miss_tokens": "prompt tokens computed",
    "image_hits": "images found in the feature cache",
    "image_misses": "images encoded",
}


class Metrics:
    """What /metrics gives. `observe` is the engine's on_finish."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats
        self.registry = CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]
        labels: dict[str, Any] = {"labelnames": ["mode"], "registry": self.registry}
        seconds = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
        self._finished = Counter(
            PREFIX + "requests", "ended requests", labelnames=["mode", "reason"], registry=self.registry
        )
        self._seconds = Histogram(PREFIX + "request_seconds", "from submission to end", buckets=seconds, **labels)
        self._first = Histogram(
            PREFIX + "seconds_to_first_token", "from submission to the first token", buckets=seconds, **labels
        )
        self._tpf = Histogram(
            PREFIX + "tokens_per_forward",
            "of decoding, per answer",
            buckets=(0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32),
            **labels,
        )

    def observe(self, request: Request) -> None:
        """A request counts once, by its first answer's end; one that failed has taken no time worth telling."""
        rows, mode = request.generation.rows, request.mode
        reason = "error" if request.error is not None else rows[0].finish_reason
        self._finished.labels(mode, reason).inc()
        if request.error is not None:
            return
        self._seconds.labels(mode).observe(max(row.seconds for row in rows))
        first = [row.seconds_to_first_token for row in rows if row.seconds_to_first_token is not None]
        if first:
            self._first.labels(mode).observe(min(first))
        for row in rows:
            if row.nfe_decode and row.token_ids:
                self._tpf.labels(mode).observe((len(row.token_ids) - 1) / row.nfe_decode)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        stats = self._stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=stats[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=stats[name])

    def text(self) -> bytes:
        return generate_latest(self.registry)
