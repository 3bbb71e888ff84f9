"""Facts → Prometheus.

Law: the hot path adds to plain integers, one small object per upstream label; nothing is formatted until a scrape
asks for it. Everything runs on the event loop's thread, so no locks. Labels are bounded: upstream labels by the
directory, methods and codes by the parser, reasons and outcomes by closed sets.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from telemetry import names
from telemetry.record import BAD, GOOD, OUTCOMES, Session


class _Histogram:
    __slots__ = ("buckets", "counts", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def samples(self) -> list[tuple[str, float]]:
        running, found = 0, []
        for bound, count in zip((*self.buckets, float("inf")), self.counts, strict=True):
            running += count
            found.append(("+Inf" if bound == float("inf") else str(float(bound)), float(running)))
        return found


class _Tally:
    """What is counted for one upstream label."""

    __slots__ = ("attempts", "failure", "request_bytes", "requests", "response_bytes", "sessions", "success", "tunnels")

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.sessions: dict[str, int] = dict.fromkeys(sorted(OUTCOMES), 0)
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.success = _Histogram(names.LATENCY_BUCKETS)
        self.failure = _Histogram(names.LATENCY_BUCKETS)
        self.request_bytes = 0
        self.response_bytes = 0
        self.tunnels: Counter[str] = Counter()


class Metrics:
    """Receives finished records and answers scrapes. `live` yields the gauges read from live objects."""

    def __init__(self, version: str = "") -> None:
        self._tallies: dict[str, _Tally] = {}
        self._malformed: Counter[str] = Counter()
        self._denied: Counter[str] = Counter()
        self._internal: Counter[str] = Counter()
        self._overhead = _Histogram(names.FAST_BUCKETS)
        self._loop_lag = _Histogram(names.FAST_BUCKETS)
        self._version = version
        self.live: Callable[[], Iterable[Metric]] = tuple
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(self)

    def observe(self, session: Session) -> None:
        """One finished exchange or tunnel."""
        tally = self._tallies.get(session.upstream)
        if tally is None:
            tally = self._tallies[session.upstream] = _Tally()
        outcome = session.outcome
        tally.sessions[outcome] += 1
        tally.requests[session.method, 0 if outcome == "cancelled" else session.status] += 1
        own_time = duration = session.ended - session.started
        attempts = tally.attempts
        for attempt in session.attempts:
            own_time -= attempt.ended - attempt.started
            attempts[attempt.kind, attempt.code or "success"] += 1
        if outcome == "tunnelled":
            tally.tunnels["ended"] += 1
        else:
            # `observe` twice, written out: this runs for every request.
            timing = tally.failure if outcome in BAD else tally.success
            timing.counts[bisect_left(names.LATENCY_BUCKETS, duration)] += 1
            timing.total += duration
            overhead = self._overhead
            overhead.counts[bisect_left(names.FAST_BUCKETS, own_time)] += 1
            overhead.total += own_time
        tally.request_bytes += session.request_bytes
        tally.response_bytes += session.response_bytes

    def malformed(self, reason: str) -> None:
        self._malformed[reason] += 1

    def denied(self, reason: str) -> None:
        self._denied[reason] += 1

    def internal_error(self, component: str) -> None:
        self._internal[component] += 1

    def loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(max(0.0, seconds))

    def sessions_by_outcome(self) -> Counter[str]:
        """All upstreams together."""
        total: Counter[str] = Counter()
        for tally in self._tallies.values():
            total.update(tally.sessions)
        return total

    def good_and_bad(self) -> tuple[int, int]:
        total = self.sessions_by_outcome()
        return sum(total[word] for word in GOOD), sum(total[word] for word in BAD)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client on a scrape."""
        yield from self._per_upstream()
        for what, counted in (
            (names.MALFORMED, self._malformed),
            (names.DENIED, self._denied),
            (names.INTERNAL_ERRORS, self._internal),
        ):
            family = CounterMetricFamily(what.name, what.help, labels=what.labels)
            for word, count in counted.items():
                family.add_metric([word], count)
            yield family
        for what, histogram in ((names.OVERHEAD, self._overhead), (names.LOOP_LAG, self._loop_lag)):
            timing = HistogramMetricFamily(what.name, what.help, labels=what.labels)
            timing.add_metric([], histogram.samples(), histogram.total)
            yield timing
        info = names.BUILD_INFO
        build = GaugeMetricFamily(info.name, info.help, labels=info.labels)
        build.add_metric([self._version, platform.python_version()], 1)
        yield build
        yield from self.live()

    def _per_upstream(self) -> Iterator[Metric]:
        def counter(what: names.Metric) -> CounterMetricFamily:
            return CounterMetricFamily(what.name, what.help, labels=what.labels)

        requests, sessions, attempts = counter(names.REQUESTS), counter(names.SESSIONS), counter(names.ATTEMPTS)
        sent, received, tunnels = (
            counter(names.REQUEST_BYTES),
            counter(names.RESPONSE_BYTES),
            counter(names.TUNNELS),
        )
        what = names.REQUEST_DURATION
        durations = HistogramMetricFamily(what.name, what.help, labels=what.labels)
        for upstream, tally in self._tallies.items():
            for (method, status), count in tally.requests.items():
                requests.add_metric([upstream, method, str(status)], count)
            for outcome, count in tally.sessions.items():
                sessions.add_metric([upstream, outcome], count)
            for (kind, result), count in tally.attempts.items():
                attempts.add_metric([upstream, kind, result], count)
            for word, histogram in (("success", tally.success), ("failure", tally.failure)):
                durations.add_metric([upstream, word], histogram.samples(), histogram.total)
            for result, count in tally.tunnels.items():
                tunnels.add_metric([upstream, result], count)
            sent.add_metric([upstream], tally.request_bytes)
            received.add_metric([upstream], tally.response_bytes)
        yield from (requests, sessions, attempts, durations, sent, received, tunnels)
