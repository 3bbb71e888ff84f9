"""All upstreams at a glance: how they do, what holds them back, what went wrong last.

Law: read off the living objects and telemetry's counts when asked; nothing is counted here. Rates and quantiles are
those of the metrics with the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from sidecar import clock
from sidecar.admin.fields import Answer, Limit, NoBody, Query, StateShown, Text
from sidecar.admin.last_errors import LastErrors, cause_in
from sidecar.admin.pages import in_slices, page_of
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy
from sidecar.upstream.endpoints import UpstreamState
from telemetry.record import BAD, GOOD, NEUTRAL, Session
from telemetry.tally import Histogram, Tally
from telemetry.timestamps import rfc3339

_LATELY = 300.0


class UpstreamsQuery(Query):
    """Which upstreams."""

    configured: Literal["true", "false"] | None = None
    """Only those of the configuration, or only those that were called without being in it."""
    limit: Limit = 100
    cursor: Text | None = None
    """`next_cursor` of the page before."""


class EndpointShown(Answer):
    """One address, or one parent proxy."""

    endpoint: str
    breaker: StateShown
    forced: bool


class ConnectionsShown(Answer):
    """Connections to the upstream; opened and failed since the start."""

    active: int
    idle: int
    opened: int
    failed: int


class SessionsShown(Answer):
    """Since the start, by what became of them."""

    good: int
    neutral: int
    bad: int


class LatelyShown(Answer):
    """The last five minutes."""

    sessions: int
    success_rate: float | None
    average_attempts: float
    retries: int


class BudgetShown(Answer):
    """The retry budget."""

    remaining_ratio: float
    allowance: int
    """How many retries the window may hold now."""


class GateShown(Answer):
    """The rate-limit gate."""

    waiting: int
    pauses: int
    """How often it was closed since the start."""
    next_release: str | None
    """When the first of those who wait may go."""


class LastErrorShown(Answer):
    """The newest failed attempt or request. Its session may be too old to be kept still."""

    timestamp: str
    code: str
    message: str
    outcome: str
    session_id: str


class UpstreamShown(Answer):
    """One upstream. Times are in seconds; success rate is good / (good + bad); rates and quantiles are null before
    the first request, and those of hosts without a label of their own are shared under `_other`."""

    name: str
    label: str
    """Its name in metrics, traces and logs."""
    configured: bool
    subsystem: str
    policy: str | None
    """The policy chosen for it; null: that of the error code, else `default`."""
    endpoints: tuple[EndpointShown, ...]
    in_flight: int
    queued: int
    """Requests that wait for a place under `max_in_flight`."""
    max_in_flight: int | None
    connections: ConnectionsShown
    sessions: SessionsShown
    success_rate: float | None
    p50: float | None
    p99: float | None
    lately: LatelyShown
    retry_budget: BudgetShown
    gate: GateShown
    last_error: LastErrorShown | None
    cause: LastErrorShown | None
    """The newest failure that is no refusal of a breaker: why it is open, while `last_error` is CIRCUIT_OPEN."""


class UpstreamPage(Answer):
    """Some upstreams, by name."""

    items: tuple[UpstreamShown, ...]
    next_cursor: str | None
    total: int | None
    """How many fit in all; on the first page only."""


class Upstreams:
    """The handler."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._last_errors = LastErrors(proxy.signals.sessions)

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET", "/upstreams", "Every upstream and how it does.", self.shown, UpstreamPage, query=UpstreamsQuery
        )

    async def shown(self, call: Call[UpstreamsQuery, NoBody]) -> Told:
        query = call.query
        await self._last_errors.refresh()
        now = clock.monotonic()
        lately = self._proxy.signals.aggregates.retry_metrics(_LATELY, now)["by_upstream"]
        states = (
            ((state.name,), state)
            for state in self._proxy.directory.states()
            if query.configured is None or state.configured == (query.configured == "true")
        )
        page, next_cursor, total = page_of(states, query.limit, query.cursor)
        items = await in_slices(page, lambda item: self._upstream(item[1], lately, now).model_dump())
        return {"items": items, "next_cursor": next_cursor, "total": total}

    def _upstream(self, state: UpstreamState, lately: Mapping[str, Any], now: float) -> UpstreamShown:
        tally = self._proxy.metrics.tallies.get(state.label) or Tally()
        outcomes = tally.outcomes()
        good, bad = _sum(outcomes, GOOD), _sum(outcomes, BAD)
        times = (tally.success, tally.failure)
        return UpstreamShown.model_construct(
            name=state.name,
            label=state.label,
            configured=state.configured,
            subsystem=state.settings.subsystem or state.label,
            policy=state.settings.chosen_policy,
            endpoints=tuple(_endpoints(state, now)),
            in_flight=state.requests,
            queued=0 if state.turns.bulkhead is None else state.turns.bulkhead.waiting,
            max_in_flight=state.settings.max_in_flight,
            connections=_connections(state),
            sessions=SessionsShown(good=good, neutral=_sum(outcomes, NEUTRAL), bad=bad),
            success_rate=good / (good + bad) if good + bad else None,
            p50=quantile(times, 0.5),
            p99=quantile(times, 0.99),
            lately=LatelyShown.model_validate(
                lately.get(state.label, {"sessions": 0, "success_rate": None, "average_attempts": 0.0, "retries": 0})
            ),
            retry_budget=BudgetShown(
                remaining_ratio=round(state.budget.remaining(now), 6), allowance=state.budget.allowance(now)
            ),
            gate=self._gate(state),
            last_error=self._last_error(state.label),
            cause=self._cause(state.label),
        )

    def _gate(self, state: UpstreamState) -> GateShown:
        gate = state.turns.gate
        release = gate.next_release()
        return GateShown(
            waiting=gate.waiting,
            pauses=gate.pauses,
            next_release=None if release is None else rfc3339(self._proxy.wall(release)),
        )

    def _last_error(self, label: str) -> LastErrorShown | None:
        session = self._last_errors.of(label)
        if session is None:
            return None
        tried = [(attempt.code, attempt.message) for attempt in reversed(session.attempts)]
        code, message = next(pair for pair in (*tried, (session.code, session.message)) if pair[0] is not None)
        return self._shown(session, code or "", message or "")

    def _cause(self, label: str) -> LastErrorShown | None:
        session = self._last_errors.cause_of(label)
        found = None if session is None else cause_in(session)
        return None if session is None or found is None else self._shown(session, *found)

    def _shown(self, session: Session, code: str, message: str) -> LastErrorShown:
        return LastErrorShown(
            timestamp=rfc3339(self._proxy.wall(session.ended)),
            code=code,
            message=self._proxy.signals.redactor.text(message),
            outcome=session.outcome,
            session_id=session.session_id.decode(),
        )


def _endpoints(state: UpstreamState, now: float) -> Iterator[EndpointShown]:
    for label, breaker in state.breakers():
        yield EndpointShown.model_construct(
            endpoint=label, breaker=breaker.state(now), forced=breaker.forced is not None
        )


def _connections(state: UpstreamState) -> ConnectionsShown:
    active, idle = state.connections
    opened, failed = state.connects
    return ConnectionsShown(active=active, idle=idle, opened=opened, failed=failed)


def _sum(outcomes: Mapping[str, int], words: frozenset[str]) -> int:
    return sum(outcomes[word] for word in words)


def quantile(histograms: Sequence[Histogram], share: float) -> float | None:
    """As Prometheus' `histogram_quantile` over the sum of histograms with the same buckets: evenly spread within a
    bucket, and the highest bound for what is beyond it; but never beyond the slowest that there was."""
    counts: list[int] = [sum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True)]
    bounds, slowest = histograms[0].buckets, max(histogram.highest for histogram in histograms)
    rank = share * sum(counts)
    if not rank:
        return None
    below, lower = 0, 0.0
    for count, upper in zip(counts, bounds, strict=False):
        if count and below + count >= rank:
            return min(lower + (upper - lower) * (rank - below) / count, slowest)
        below, lower = below + count, upper
    return bounds[-1]
