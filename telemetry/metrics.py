"""Facts → Prometheus.

Law: the hot path adds to plain integers, one tally per upstream label; nothing is formatted until a scrape asks for
it, and then in slices, so that a scrape never holds the event loop for long. Everything runs on the event loop's
thread, so no locks. Labels are bounded: upstream labels by the directory, methods and codes by the tally, reasons
and outcomes by closed sets. What can be asked of a live object is asked at the scrape (telemetry/live.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric

from telemetry import names
from telemetry.exposition import Collected, merged, render
from telemetry.record import BAD, GOOD, Errand, Session
from telemetry.tally import Exemplar, Histogram, Tally

_LATENCY = names.LATENCY_BUCKETS
_FAST = names.FAST_BUCKETS


class Metrics:
    """Receives finished records and answers scrapes. `live` yields the families read from live objects."""

    def __init__(self, version: str = "", revision: str = "", upstreams: Iterable[str] = ()) -> None:
        self.version = version
        self.revision = revision
        self.tallies: dict[str, Tally] = {}
        self.overhead = Histogram(_FAST)
        self.loop_lags = Histogram(_FAST)
        self.malformed_requests: Counter[str] = Counter()
        self.denials: Counter[str] = Counter()
        self.internal_errors: dict[str, int] = dict.fromkeys(names.COMPONENTS, 0)
        self.transitions: Counter[tuple[str, str, str, str]] = Counter()
        self._endpoints: dict[str, set[str]] = {}
        self.spans: dict[str, int] = dict.fromkeys(names.SPAN_FATES, 0)
        self.exports: Counter[tuple[str, str]] = Counter()
        self.last_export: dict[str, float] = {}
        self.reloads: dict[str, int] = dict.fromkeys(names.RESULTS, 0)
        self.config_in_use_since: float | None = None
        self.config_is_current = True
        self.queue: Callable[[], tuple[int, int]] | None = None
        """Size and capacity of the export queue, when there is one."""
        self.log_suppressed: dict[str, int] = dict.fromkeys(names.LEVELS[1:], 0)
        self.tls_client_errors: Counter[str] = Counter()
        self.demotions: Counter[str] = Counter()
        self.clock_steps = 0
        self.stored = Stored()
        self.live: Callable[[], Iterable[Metric]] = tuple
        self.registry = CollectorRegistry(auto_describe=False)
        self._foreign = CollectorRegistry(auto_describe=False)
        for registry in (self.registry, self._foreign):
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            GCCollector(registry=registry)
        self.registry.register(self)
        self.configure(upstreams)

    def configure(self, upstreams: Iterable[str]) -> None:
        """These upstreams are shown, with zeros, before their first request."""
        for label in upstreams:
            self.tally(label).configured = True

    def tally(self, label: str) -> Tally:
        tally = self.tallies.get(label)
        if tally is None:
            tally = self.tallies[label] = Tally()
        return tally

    # ---- the hot path --------------------------------------------------------------------------------------------

    def observe(self, session: Session) -> None:
        """One finished exchange or tunnel. Written out instead of calling `Histogram.observe`: every request pays."""
        tally = self.tallies.get(session.upstream)
        if tally is None:
            tally = self.tally(session.upstream)
        outcome = session.outcome
        status = session.status if outcome != "cancelled" else 0
        try:
            tally.requests[session.method, status] += 1
        except KeyError:
            tally.new_pair(session.method, status)
        tally.request_bytes += session.request_bytes
        tally.response_bytes += session.response_bytes
        duration = session.ended - session.started
        attempts = session.attempts
        if outcome == "first_try" and len(attempts) == 1:
            attempt = attempts[0]
            if attempt.breaker == "closed" and not (session.waited or session.caller_resend or session.fallback_from):
                tally.healthy += 1
                if session.first_byte:
                    tally.streamed(duration, session.first_byte - session.started)
                if session.operation is not None:
                    tally.of_operation(session.operation, outcome)
                histogram = tally.success
                histogram.counts[bisect_left(_LATENCY, duration)] += 1
                histogram.total += duration
                took = attempt.ended - attempt.started
                histogram = tally.attempt_success
                histogram.counts[bisect_left(_LATENCY, took)] += 1
                histogram.total += took
                histogram = self.overhead
                own = duration - took
                histogram.counts[bisect_left(_FAST, own)] += 1
                histogram.total += own
                return
        self._observe_eventful(tally, session, duration)

    def _observe_eventful(self, tally: Tally, session: Session, duration: float) -> None:
        outcome = session.outcome
        tally.sessions[outcome] += 1
        if session.operation is not None:
            tally.of_operation(session.operation, outcome)
        spent = tally.add_attempts(session)
        idle = session.waited + sum(attempt.delay for attempt in session.attempts)
        if session.attempts:
            tally.per_session.observe(len(session.attempts))
            tally.backoff.observe(idle)
        spent += idle
        if session.suppressed is not None:
            tally.suppressed[session.suppressed] += 1
        if session.caller_resend:
            tally.caller_resends += 1
        if outcome == "breaker_open" and not session.attempts:  # else a call was made, and its retry refused
            tally.rejections += 1
        for upstream in {attempt.upstream for attempt in session.attempts if attempt.upstream is not None}:
            spent += self.tally(upstream).add_attempts(session, upstream)
        if session.fallback_from is not None and all(one.upstream != session.fallback_from for one in session.attempts):
            self.tally(session.fallback_from).rejections += 1
        if outcome == "tunnelled":
            tally.tunnels[session.code or "ended"] += 1
            return  # its time is the app's, neither latency nor overhead
        if session.method == "CONNECT" and session.attempts:
            tally.tunnels[session.code or outcome] += 1
        if outcome in BAD:
            tally.failure.observe(duration)
        else:
            tally.success.observe(duration)
            if session.first_byte:
                tally.streamed(duration, session.first_byte - session.started)
            elif outcome == "cancelled":
                tally.late.observe(duration)  # there was no first byte
        self.overhead.observe(max(0.0, duration - spent))

    def errand(self, errand: Errand) -> None:
        """Nobody's request: only its attempts count."""
        self.tally(errand.upstream).add_attempts(errand)
        for upstream in {attempt.upstream for attempt in errand.attempts if attempt.upstream is not None}:
            self.tally(upstream).add_attempts(errand, upstream)

    def exemplify(self, session: Session, at: float) -> None:
        """The session's trace is kept: let the latency histograms point at it. `at` is wall time."""
        tally, trace = self.tallies.get(session.upstream), session.trace
        if tally is None or trace is None or session.outcome == "tunnelled":
            return
        trace_id = f"{trace.trace_id:032x}"
        timing = tally.failure if session.outcome in BAD else tally.success
        timing.exemplify(Exemplar(trace_id, f"{trace.span_id:016x}", session.ended - session.started, at))
        for attempt in session.attempts:
            timing = tally.attempt_success if attempt.code is None else tally.attempt_failure
            timing.exemplify(Exemplar(trace_id, f"{attempt.span_id:016x}", attempt.ended - attempt.started, at))

    # ---- what is not part of a session ---------------------------------------------------------------------------

    def malformed(self, reason: str) -> None:
        self.malformed_requests[reason] += 1

    def denied(self, reason: str) -> None:
        self.denials[reason] += 1

    def internal_error(self, component: str) -> None:
        self.internal_errors[component] += 1  # all of them are there from the start, with 0

    def loop_lag(self, seconds: float) -> None:
        self.loop_lags.observe(max(0.0, seconds))

    def connection_wait(self, upstream: str, seconds: float) -> None:
        self.tally(upstream).connection_wait.observe(seconds)

    def breaker_moved(self, upstream: str, endpoint: str, from_state: str, to_state: str) -> None:
        known = self._endpoints.setdefault(upstream, set())
        if endpoint not in known:
            if upstream == names.OTHER or len(known) >= names.MOST_ENDPOINTS:
                endpoint = names.OTHER
            known.add(endpoint)
        self.transitions[upstream, endpoint, from_state, to_state] += 1

    def breaker_would_open(self, upstream: str) -> None:
        self.tally(upstream).would_open += 1

    def config_reloaded(self, ok: bool, at: float) -> None:
        """A reload; `at` is wall time. The first configuration is not a reload: see `config_read`."""
        self.reloads["success" if ok else "failure"] += 1
        self.config_is_current = ok
        if ok:
            self.config_in_use_since = at

    def config_read(self, at: float) -> None:
        self.config_in_use_since = at

    def exported(self, signal: str, ok: bool, at: float) -> None:
        self.exports[signal, "success" if ok else "failure"] += 1
        if ok:
            self.last_export[signal] = at

    # ---- read ----------------------------------------------------------------------------------------------------

    def sessions_by_outcome(self) -> Counter[str]:
        """All upstreams together."""
        total: Counter[str] = Counter()
        for tally in self.tallies.values():
            total.update(tally.outcomes())
        return total

    def good_and_bad(self) -> tuple[int, int]:
        total = self.sessions_by_outcome()
        return sum(total[word] for word in GOOD), sum(total[word] for word in BAD)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client when something reads the registry in one go."""
        yield from merged(Collected(self))

    def render(self, accept: str) -> tuple[str, Iterator[bytes]]:
        """The content type that suits an Accept field, and the scrape in slices: let the loop run between them."""
        return render(accept, lambda: Collected(self), self._foreign)


class Stored:
    """Counts of the durable parts: dead letters, idempotency, outbox. Each is shown once its owner calls `begin`."""

    def __init__(self) -> None:
        self.parts: set[str] = set()
        self.enqueued: Counter[tuple[str, str]] = Counter()
        self.replayed: Counter[tuple[str, str]] = Counter()
        self.rejected: dict[str, int] = dict.fromkeys(names.DLQ_REJECTIONS, 0)
        self.evicted: dict[str, int] = dict.fromkeys(names.DLQ_EVICTIONS, 0)
        self.write = Histogram(_FAST)
        self.lookups: dict[str, int] = dict.fromkeys(names.LOOKUPS, 0)
        self.deliveries: Counter[tuple[str, str]] = Counter()
        self.violations: Counter[str] = Counter()
        self.escalations: Counter[str] = Counter()

    def begin(self, part: str) -> None:
        """`part` (dlq, idempotency or outbox) exists from now on, so its zeros mean something."""
        self.parts.add(part)

    def dead_lettered(self, upstream: str, reason: str) -> None:
        self.enqueued[upstream, reason] += 1

    def dead_letter_replayed(self, upstream: str, outcome: str) -> None:
        self.replayed[upstream, outcome] += 1

    def dead_letter_escalated(self, upstream: str) -> None:
        self.escalations[upstream] += 1

    def dead_letter_rejected(self, reason: str) -> None:
        self.rejected[reason] += 1

    def dead_letter_evicted(self, reason: str) -> None:
        self.evicted[reason] += 1

    def written(self, seconds: float) -> None:
        self.write.observe(seconds)

    def looked_up(self, result: str) -> None:
        self.lookups[result] += 1

    def delivered(self, upstream: str, outcome: str) -> None:
        self.deliveries[upstream, outcome] += 1

    def order_violated(self, upstream: str) -> None:
        self.violations[upstream] += 1
