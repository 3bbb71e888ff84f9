"""Counts → the text a scrape gets, a slice at a time.

Law: no slice is longer than `SLICE` samples, however many upstreams there are; whoever serves the scrape lets the
event loop run between two. Tables are copied before they are walked, because requests go on meanwhile. A family whose
feature is not there is shown with its name and help only: a zero would be a claim.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric, Sample
from prometheus_client.exposition import choose_encoder

from telemetry import names
from telemetry.tally import Histogram, Tally

if TYPE_CHECKING:
    from telemetry.metrics import Metrics

SLICE = 200

Row = tuple[tuple[str, ...], float]
# Labels, counts, and how many observations of which value are not in the counts: those of healthy requests.
HistogramRow = tuple[tuple[str, ...], Histogram, int, int]


def _family(what: names.Metric) -> Metric:
    return Metric(what.name, what.help, what.kind)


def simple(what: names.Metric, rows: Iterable[Row]) -> Iterator[Metric]:
    """A counter or gauge, in slices."""
    family = _family(what)
    for labels, value in rows:
        family.samples.append(Sample(what.exposed, dict(zip(what.labels, labels, strict=True)), value))
        if len(family.samples) >= SLICE:
            yield family
            family = _family(what)
    yield family


def timed(what: names.Metric, rows: Iterable[HistogramRow]) -> Iterator[Metric]:
    """A histogram, in slices that never cut one label combination in two."""
    family = _family(what)
    for values, histogram, uncounted, worth in rows:
        labels = dict(zip(what.labels, values, strict=True))
        count = 0
        for bound, count, kept in histogram.cumulated(uncounted):
            exemplar = None
            if kept is not None and what.exemplars:
                exemplar = Exemplar({"trace_id": kept.trace_id, "span_id": kept.span_id}, kept.value, kept.at)
            family.samples.append(Sample(what.name + "_bucket", {**labels, "le": bound}, count, None, exemplar))
        family.samples.append(Sample(what.name + "_count", labels, count))
        family.samples.append(Sample(what.name + "_sum", labels, histogram.total + uncounted * worth))
        if len(family.samples) + len(histogram.counts) + 2 > SLICE:
            yield family
            family = _family(what)
    yield family


def merged(parts: Iterable[Metric]) -> Iterator[Metric]:
    """Whole families from slices, which arrive next to each other."""
    family: Metric | None = None
    for part in parts:
        if family is not None and family.name == part.name:
            family.samples.extend(part.samples)
            continue
        if family is not None:
            yield family
        family = part
    if family is not None:
        yield family


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()]) + "}" if labels else ""


def encode(part: Metric, *, openmetrics: bool, headed: bool) -> bytes:
    """One slice as text. By hand, because prometheus_client takes 9 µs for a sample where this takes one, and cannot
    continue a family it has begun (`headed`)."""
    lines = []
    if headed:
        name = part.name + "_total" if part.type == "counter" and not openmetrics else part.name
        help_text = part.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {part.type}\n")
    for sample in part.samples:
        line = f"{sample.name}{_labels(sample.labels)} {sample.value}"
        if openmetrics and sample.exemplar is not None:
            exemplar = sample.exemplar
            line += f" # {_labels(exemplar.labels)} {exemplar.value} {exemplar.timestamp}"
        lines.append(line + "\n")
    return "".join(lines).encode()


def render(
    accept: str, collected: Callable[[], Iterable[Metric]], foreign: CollectorRegistry
) -> tuple[str, Iterator[bytes]]:
    """The content type for an Accept field, and the encoded slices; `foreign` are the process and platform metrics."""
    encode_whole, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith("application/openmetrics-text")

    def slices() -> Iterator[bytes]:
        shown = ""
        for part in collected():
            if text := encode(part, openmetrics=openmetrics, headed=part.name != shown):
                yield text
            shown = part.name
        yield encode_whole(foreign)  # … and the end mark of OpenMetrics

    return content_type, slices()


class Collected:
    """Every family of a `Metrics`, in slices; those of one family follow each other."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __iter__(self) -> Iterator[Metric]:
        missing = {what.name: what for what in names.CATALOGUE}
        for part in self._parts():
            missing.pop(part.name, None)
            yield part
        yield from map(_family, missing.values())

    def _parts(self) -> Iterator[Metric]:
        living = tuple(self._metrics.live())
        yield from self._of_requests()
        yield from self._of_attempts()
        yield from self._of_breakers(living)
        yield from self._of_stored()
        yield from self._of_itself()
        for family in living:
            for start in range(0, len(family.samples) or 1, SLICE):
                part = Metric(family.name, family.documentation, family.type)
                part.samples = family.samples[start : start + SLICE]
                yield part

    def _tallies(self, *, used: bool = True) -> Iterator[tuple[str, Tally]]:
        for label, tally in tuple(self._metrics.tallies.items()):
            if tally.used or not used:
                yield label, tally

    def _of_requests(self) -> Iterator[Metric]:
        def requests() -> Iterator[Row]:
            for label, tally in self._tallies(used=False):
                for (method, status), count in tuple(tally.requests.items()):
                    yield (label, method, str(status)), count

        def sessions() -> Iterator[Row]:
            for label, tally in self._tallies(used=False):
                for outcome, count in tally.outcomes().items():
                    yield (label, outcome), count

        def durations() -> Iterator[HistogramRow]:
            for label, tally in self._tallies(used=False):  # a refused request took its time too
                for result, histogram in (("success", tally.success), ("failure", tally.failure)):
                    if tally.used or any(histogram.counts):
                        yield (label, result), histogram, 0, 0

        def tunnels() -> Iterator[Row]:
            for label, tally in self._tallies():
                for result, count in tuple(tally.tunnels.items()):
                    yield (label, result), count

        tallies = self._tallies
        yield from simple(names.REQUESTS, requests())
        yield from simple(names.SESSIONS, sessions())
        yield from timed(names.REQUEST_DURATION, durations())
        yield from timed(
            names.TIME_TO_FIRST_BYTE,
            (((u,), t.to_first_byte(), 0, 0) for u, t in self._tallies(used=False) if t.used or any(t.success.counts)),
        )
        yield from simple(names.OPERATION_SESSIONS, self._of_operations())
        yield from timed(names.SESSION_ATTEMPTS, (((u,), t.per_session, t.healthy, 1) for u, t in tallies()))
        yield from timed(names.SESSION_BACKOFF, (((u,), t.backoff, t.healthy, 0) for u, t in tallies()))
        yield from timed(names.OVERHEAD, [((), self._metrics.overhead, 0, 0)])
        yield from simple(names.CALLER_RESENDS, (((u,), t.caller_resends) for u, t in tallies()))
        yield from simple(names.REQUEST_BYTES, (((u,), t.request_bytes) for u, t in tallies()))
        yield from simple(names.RESPONSE_BYTES, (((u,), t.response_bytes) for u, t in tallies()))
        yield from simple(names.TUNNELS, tunnels())
        yield from simple(names.MALFORMED, _words(self._metrics.malformed_requests))
        yield from simple(names.DENIED, _words(self._metrics.denials))

    def _of_attempts(self) -> Iterator[Metric]:
        def attempts() -> Iterator[Row]:
            for label, tally in self._tallies():
                for (kind, result), count in tally.attempts_made().items():
                    yield (label, kind, result), count

        def durations() -> Iterator[HistogramRow]:
            for label, tally in self._tallies():
                yield (label, "success"), tally.attempt_success, 0, 0
                yield (label, "failure"), tally.attempt_failure, 0, 0

        yield from simple(names.ATTEMPTS, attempts())
        yield from timed(names.ATTEMPT_DURATION, durations())
        yield from simple(names.RETRIES, self._per_word(lambda tally: tally.retries))
        yield from simple(names.SUPPRESSED_RETRIES, self._per_word(lambda tally: tally.suppressed))
        yield from timed(names.CONNECTION_WAIT, (((u,), t.connection_wait, 0, 0) for u, t in self._tallies()))
        yield from simple(names.UPSTREAM_SURPLUS, (((u,), t.surplus) for u, t in self._tallies()))

    def _of_breakers(self, living: Iterable[Metric]) -> Iterator[Metric]:
        tallies = self._tallies
        moves = {
            (sample.labels["upstream"], sample.labels["endpoint"], *move): 0
            for family in living
            if family.name == names.BREAKER_STATE.name
            for sample in family.samples
            for move in names.BREAKER_MOVES
        }
        yield from simple(names.BREAKER_TRANSITIONS, tuple((moves | self._metrics.transitions).items()))
        yield from simple(names.BREAKER_REJECTIONS, (((u,), t.rejections) for u, t in tallies()))
        yield from simple(names.BREAKER_PROBES, self._per_word(lambda tally: tally.probes))
        yield from simple(names.BREAKER_WOULD_OPEN, (((u,), t.would_open) for u, t in tallies()))

    def _of_stored(self) -> Iterator[Metric]:
        stored = self._metrics.stored
        # Losses are shown from the start: the first may be a store that cannot be opened, and an alert needs the 0.
        yield from simple(names.DLQ_REJECTED, _words(stored.rejected))
        yield from simple(names.DLQ_EVICTED, _words(stored.evicted))
        if "dlq" in stored.parts:
            replays = {(u, word): 0 for u, _ in self._tallies() for word in names.REPLAY_OUTCOMES}
            yield from simple(names.DLQ_ENQUEUED, tuple(stored.enqueued.items()))
            yield from simple(names.DLQ_REPLAYED, tuple((replays | stored.replayed).items()))
            escalations = dict.fromkeys((u for u, _ in self._tallies()), 0)
            yield from simple(names.DLQ_ESCALATED, _words(escalations | stored.escalations))
            yield from timed(names.DLQ_WRITE, [((), stored.write, 0, 0)])
        if "idempotency" in stored.parts:
            yield from simple(names.IDEMPOTENCY, _words(stored.lookups))
        if "outbox" in stored.parts:
            yield from simple(names.OUTBOX_DELIVERIES, tuple(stored.deliveries.items()))
            violations = dict.fromkeys((u for u, _ in self._tallies()), 0)
            yield from simple(names.OUTBOX_VIOLATIONS, _words(violations | stored.violations))

    def _of_itself(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield from timed(names.LOOP_LAG, [((), metrics.loop_lags, 0, 0)])
        yield from simple(names.SPANS, _words(metrics.spans))
        yield from simple(names.EXPORTS, tuple(metrics.exports.items()))
        yield from simple(names.LAST_EXPORT, _words(metrics.last_export))
        if metrics.queue is not None:
            size, capacity = metrics.queue()
            yield from simple(names.QUEUE_SIZE, [((), size)])
            yield from simple(names.QUEUE_CAPACITY, [((), capacity)])
        yield from simple(names.CONFIG_RELOADS, _words(metrics.reloads))
        yield from simple(names.CONFIG_RELOADED, [((), int(metrics.config_is_current))])
        if metrics.config_in_use_since is not None:
            yield from simple(names.CONFIG_RELOADED_AT, [((), metrics.config_in_use_since)])
        labels = (metrics.version, metrics.revision, platform.python_version())
        yield from simple(names.BUILD_INFO, [(labels, 1)])
        yield from simple(names.CLOCK_STEPS, [((), metrics.clock_steps)])
        yield from simple(names.INTERNAL_ERRORS, _words(metrics.internal_errors))
        yield from simple(names.LOG_SUPPRESSED, _words(metrics.log_suppressed))
        if metrics.tls_client_errors:
            yield from simple(names.TLS_CLIENT_ERRORS, _words(metrics.tls_client_errors))
        if metrics.demotions:
            yield from simple(names.INTERCEPTION_DEMOTIONS, _words(metrics.demotions))

    def _of_operations(self) -> Iterator[Row]:
        for label, tally in self._tallies(used=False):
            for (operation, outcome), count in tuple(tally.operations.items()):
                yield (label, operation, outcome), count

    def _per_word(self, of: Callable[[Tally], Mapping[str, int]]) -> Iterator[Row]:
        for label, tally in self._tallies():
            for word, count in tuple(of(tally).items()):
                yield (label, word), count


def _words(counts: Mapping[str, float]) -> Iterator[Row]:
    for word, count in tuple(counts.items()):
        yield (word,), count
