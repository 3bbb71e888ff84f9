"""What is counted, as plain integers: histograms and one tally per upstream label.

Law: adding is all that happens here while requests run; words and formats come later, at a scrape. A healthy request
(answered at the first try, no queue, breaker closed) is one integer that stands for what it would have added to five
families; `attempts_made` and its neighbours add it back in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from telemetry import names
from telemetry.record import ATTEMPT_KINDS, OUTCOMES, Session

_OPERATIONS = 256  # of (operation, outcome): more than any configuration names is folded
_PAIRS = 64  # (method, status) pairs an upstream may bring; more is abuse, and folded


class Exemplar(NamedTuple):
    """The trace of one observation."""

    trace_id: str
    span_id: str
    value: float
    at: float


class Histogram:
    """Counts per bucket, not cumulated until shown."""

    __slots__ = ("buckets", "counts", "exemplars", "highest", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0
        self.highest = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value
        if value > self.highest:
            self.highest = value

    def exemplify(self, exemplar: Exemplar) -> None:
        """Remember whose observation this was; the newest of each bucket is kept."""
        self.exemplars[bisect_left(self.buckets, exemplar.value)] = exemplar

    def cumulated(self, extra: int = 0) -> Iterator[tuple[str, int, Exemplar | None]]:
        """(upper bound, count, exemplar) as the exposition format wants them; `extra` belongs to the first bucket."""
        running = extra
        for index, bound in enumerate((*self.buckets, float("inf"))):
            running += self.counts[index]
            yield "+Inf" if index == len(self.buckets) else str(float(bound)), running, self.exemplars.get(index)


class Tally:
    """What is counted for one upstream label."""

    __slots__ = (
        "attempt_failure",
        "attempt_success",
        "attempts",
        "backoff",
        "caller_resends",
        "configured",
        "connection_wait",
        "failure",
        "first_byte",
        "healthy",
        "late",
        "operations",
        "per_session",
        "probes",
        "rejections",
        "request_bytes",
        "requests",
        "response_bytes",
        "retries",
        "sessions",
        "success",
        "suppressed",
        "surplus",
        "surplus_told",
        "tunnels",
        "would_open",
    )

    def __init__(self) -> None:
        self.configured = False
        self.healthy = 0
        self.requests: dict[tuple[str, int | str], int] = {}
        self.sessions: dict[str, int] = dict.fromkeys(sorted(OUTCOMES), 0)
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.success = Histogram(names.LATENCY_BUCKETS)
        self.failure = Histogram(names.LATENCY_BUCKETS)
        self.attempt_success = Histogram(names.LATENCY_BUCKETS)
        self.attempt_failure = Histogram(names.LATENCY_BUCKETS)
        self.late = Histogram(names.LATENCY_BUCKETS)
        """Durations at whose end the first byte had long gone out, or never went: see `to_first_byte`."""
        self.first_byte = Histogram(names.LATENCY_BUCKETS)
        """… and when it went out instead."""
        self.operations: Counter[tuple[str, str]] = Counter()
        self.per_session = Histogram(names.ATTEMPTS_BUCKETS)
        self.backoff = Histogram(names.BACKOFF_BUCKETS)
        self.connection_wait = Histogram(names.FAST_BUCKETS)
        self.retries: Counter[str] = Counter()
        self.suppressed: dict[str, int] = dict.fromkeys(names.SUPPRESSED_REASONS, 0)
        self.rejections = 0
        self.probes: dict[str, int] = dict.fromkeys(names.RESULTS, 0)
        self.would_open = 0
        self.surplus = 0
        self.surplus_told: float | None = None
        """When it was in the log last."""
        self.caller_resends = 0
        self.request_bytes = 0
        self.response_bytes = 0
        self.tunnels: Counter[str] = Counter()

    @property
    def used(self) -> bool:
        """False for a label that only ever stood for refusals: it gets no attempts, not even zeros."""
        return bool(
            self.configured
            or self.healthy
            or self.attempts
            or self.rejections
            or self.would_open
            or self.surplus
            or self.caller_resends
            or any(self.suppressed.values())
        )

    def streamed(self, duration: float, first_byte: float) -> None:
        """An answer that began before it ended."""
        self.late.observe(duration)
        self.first_byte.observe(first_byte)

    def of_operation(self, operation: str, outcome: str) -> None:
        pair = (operation, outcome)
        if pair not in self.operations and len(self.operations) >= _OPERATIONS:
            pair = (names.OTHER, outcome)
        self.operations[pair] += 1

    def to_first_byte(self) -> Histogram:
        """Most answers go out whole: their first byte is as late as their last, and they cost nothing here. Only what
        was streamed has both times of its own."""
        made = Histogram(names.LATENCY_BUCKETS)
        for index in range(len(made.counts)):
            made.counts[index] = self.success.counts[index] - self.late.counts[index] + self.first_byte.counts[index]
        made.total = self.success.total - self.late.total + self.first_byte.total
        return made

    def new_pair(self, method: str, status: int) -> None:
        """A method and status not seen before at this upstream: bounded, so that a peer cannot create series."""
        pair: tuple[str, int | str] = (method if method in names.METHODS else names.OTHER_METHOD, status)
        if pair not in self.requests and len(self.requests) >= _PAIRS:
            pair = (names.OTHER_METHOD, f"{status // 100}xx")
        self.requests[pair] = self.requests.get(pair, 0) + 1

    def add_attempts(self, session: Session, upstream: str | None = None) -> float:
        """Count the attempts of a session, or those that went to another upstream before a fallback took over; returns
        the seconds spent in them."""
        spent, previous = 0.0, None
        for attempt in session.attempts:
            if attempt.upstream != upstream:
                previous = attempt.code
                continue
            took = attempt.ended - attempt.started
            spent += took
            code = attempt.code
            kind = attempt.kind
            self.attempts[kind, code or "success"] += 1
            (self.attempt_success if code is None else self.attempt_failure).observe(took)
            if kind != "stale" and previous is not None:  # a probe after a failure is a retry too
                self.retries[previous] += 1
            if kind == "probe" or attempt.breaker == "half_open":
                self.probes["success" if code is None else "failure"] += 1
            previous = code
        return spent

    # ---- read at a scrape ----------------------------------------------------------------------------------------

    def outcomes(self) -> dict[str, int]:
        return {**self.sessions, "first_try": self.sessions["first_try"] + self.healthy}

    def attempts_made(self) -> dict[tuple[str, str], int]:
        """By kind and result, with the zeros that dashboards divide by."""
        made: dict[tuple[str, str], int] = {(kind, "success"): 0 for kind in ATTEMPT_KINDS[:2]}
        for key, count in tuple(self.attempts.items()):
            made[key] = count
        made["first", "success"] += self.healthy
        return made
