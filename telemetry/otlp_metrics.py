"""The registry → OTLP metrics, when OTEL_METRICS_EXPORTER asks for them.

Law: one bridge that reads what a scrape reads, so that both tell the same; nothing is counted twice. The families are
gathered on the event loop's thread a few slices per tick, because they are read from living objects, and put into the
collector's words in the courier's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric, Sample

from telemetry.courier import Courier
from telemetry.delivery import Delivery, tell
from telemetry.export import Surroundings
from telemetry.exposition import Collected, merged
from telemetry.otel_settings import OtelSettings

_SLICES_PER_TICK = 10


class Bridge:
    """Families → data points → the collector, every so often."""

    def __init__(
        self, exporter: Any, resource: Mapping[str, str], wanted: OtelSettings, surroundings: Surroundings
    ) -> None:
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope("sidecar", surroundings.metrics.version)
        self._surroundings = surroundings
        self._interval = wanted.metric_interval
        self._due: float | None = None
        self._started = int(surroundings.wall_now() * 1_000_000) * 1_000
        self._gathering: Iterator[Metric] | None = None
        self._gathered: list[Metric] = []
        self.delivery = Delivery("metrics", exporter, surroundings)
        self.courier: Courier[list[Metric]] = Courier("telemetry-metrics", 2, 1, 5.0, self._deliver, lambda lost: None)

    def tick(self, now: float) -> None:
        if self._due is None:
            self._due = now + self._interval
        if self._gathering is None:
            if now < self._due:
                return
            self._due = max(self._due + self._interval, now)  # late by up to a tick each time, never more and more
            self._gathering, self._gathered = iter(Collected(self._surroundings.metrics)), []
        taken = list(islice(self._gathering, _SLICES_PER_TICK))
        self._gathered.extend(taken)
        if len(taken) < _SLICES_PER_TICK:
            self._gathering = None
            self.courier.put(self._gathered)

    def gather_last(self) -> None:
        """At the end, on the event loop's thread: what a process did in its last seconds, or in all of a short life."""
        self._gathering = None
        try:
            self.courier.put(list(Collected(self._surroundings.metrics)))
        except Exception as error:  # half of it is closed already; that must not keep the end from coming
            tell(self._surroundings, "error", f"the last metrics could not be gathered: {error!r}")

    def _deliver(self, batch: list[list[Metric]]) -> None:
        for parts in batch:
            try:
                data = self._data(merged(parts))
            except Exception as error:  # a family that cannot be put into words must not end the bridge
                tell(self._surroundings, "error", f"metrics could not be put into OTLP: {error!r}")
                continue
            self.delivery.export(data)

    def _data(self, families: Iterable[Metric]) -> MetricsData:
        now = int(self._surroundings.wall_now() * 1_000_000) * 1_000
        metrics = [metric for family in families if (metric := self._metric(family, now)) is not None]
        scope = ScopeMetrics(self._scope, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, family: Metric, now: int) -> OtlpMetric | None:
        if not family.samples:
            return None
        if family.type == "histogram":
            points = [self._histogram(labels, samples, now) for labels, samples in _by_labels(family)]
            return OtlpMetric(
                family.name, family.documentation, "", Histogram(points, AggregationTemporality.CUMULATIVE)
            )
        numbers = [NumberDataPoint(sample.labels, self._started, now, sample.value) for sample in family.samples]
        if family.type == "counter":
            data: Sum | Gauge = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(numbers)
        return OtlpMetric(family.name, family.documentation, "", data)

    def _histogram(self, labels: Mapping[str, str], samples: list[Sample], now: int) -> HistogramDataPoint:
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
        counts, before = [], 0
        for bucket in buckets:
            counts.append(int(bucket.value) - before)
            before = int(bucket.value)
        bounds = [float(bucket.labels["le"]) for bucket in buckets[:-1]]
        unknown: Any = None  # the registry keeps neither the least nor the most; the encoder leaves them out
        return HistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=self._started,
            time_unix_nano=now,
            count=before,
            sum=total,
            bucket_counts=counts,
            explicit_bounds=bounds,
            min=unknown,
            max=unknown,
        )


def _by_labels(family: Metric) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """The samples of each histogram of a family."""
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        key = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        groups.setdefault(key, []).append(sample)
    for key, samples in groups.items():
        yield dict(key), samples
