"""Requests that have not ended: what each of them waits for, and since when.

Law: read off the living objects when somebody asks; a request pays nothing for being listed. The oldest come first:
what hangs is what somebody looks for. What is shown is redacted like everything else.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal, NamedTuple

from sidecar import clock
from sidecar.admin.fields import Answer, Limit, NoBody, Query, Text
from sidecar.admin.route import Call, Route, Told
from sidecar.exchange import Standing
from sidecar.inbound import Downstream
from sidecar.proxy import Proxy
from telemetry.record import Errand, Session
from telemetry.timestamps import rfc3339

WaitsFor = Literal[
    "routing",
    "max_in_flight",
    "rate_limit_gate",
    "store",
    "connection",
    "upload",
    "answer",
    "backoff",
    "streaming",
    "tunnel",
]


class InflightQuery(Query):
    """Which requests; the oldest first."""

    upstream: Text | None = None
    """Only those to this upstream: its name, or host:port of one that is not configured."""
    waits_for: WaitsFor | None = None
    """Only those that wait for this."""
    limit: Limit = 100


class InflightShown(Answer):
    """One request under way. Times are in seconds."""

    session_id: str
    kind: str
    """request, tunnel; or what the sidecar sends by itself: replay, outbox, reconcile."""
    upstream: str
    operation: str | None
    method: str
    url: str
    endpoint: str | None
    """Where its current attempt goes."""
    attempts: int
    """Made so far, the current one included."""
    waits_for: WaitsFor
    """max_in_flight: for a place; rate_limit_gate: a 429 paused calls with its credential; store: for the disk;
    connection; upload: its body is being sent; answer: from the upstream; backoff: until the next attempt; streaming:
    its answer is being passed on; tunnel: bytes pass both ways."""
    since: str
    waited: float
    goes_on_in: float | None
    """Until the next attempt, or the end of the pause, where that is known."""
    age: float
    """Since the request arrived."""
    last_error: str | None
    """The code of its last failed attempt."""


class Inflight(Answer):
    """Requests under way, the oldest first."""

    items: tuple[InflightShown, ...]
    total: int
    """How many there are in all."""


class _Running(NamedTuple):
    record: Session
    standing: Standing
    kind: str


class UnderWay:
    """The handlers."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET",
            "/inflight",
            "Requests that have not ended: what each waits for, and since when.",
            self.list,
            Inflight,
            InflightQuery,
        )

    async def list(self, call: Call[InflightQuery, NoBody]) -> Told:
        query = call.query
        found = [
            one
            for one in self._running()
            if query.upstream in (None, one.record.upstream) and query.waits_for in (None, one.standing.waits_for)
        ]
        oldest = heapq.nsmallest(query.limit, found, key=lambda one: one.record.started)
        return {"items": [self._shown(one) for one in oldest], "total": len(found)}

    def _running(self) -> Iterator[_Running]:
        proxy = self._proxy
        for connection in tuple(proxy.downstreams):
            if isinstance(connection, Downstream) and connection.exchange is not None:
                yield _Running(connection.exchange.record, connection.exchange.standing(), "request")
        for sending in tuple(proxy.errands):
            record = sending.record
            yield _Running(record, sending.standing(), record.errand if isinstance(record, Errand) else "request")
        for tunnel in tuple(proxy.tunnels):
            since = tunnel.record.attempts[-1].ended if tunnel.record.attempts else tunnel.record.started
            yield _Running(tunnel.record, Standing("tunnel", since), "tunnel")

    def _shown(self, one: _Running) -> InflightShown:
        record, standing, proxy = one.record, one.standing, self._proxy
        redactor, now = proxy.signals.redactor, clock.monotonic()
        codes = [attempt.code for attempt in record.attempts if attempt.code is not None]
        return InflightShown(
            session_id=record.session_id.decode(),
            kind=one.kind,
            upstream=record.upstream,
            operation=record.operation,
            method=record.method,
            url=redactor.url(record.target),
            endpoint=redactor.url(record.attempts[-1].endpoint) if record.attempts else None,
            attempts=len(record.attempts),
            waits_for=standing.waits_for,  # type: ignore[arg-type]  # pydantic checks the word
            since=rfc3339(proxy.wall(standing.since)),
            waited=round(max(0.0, now - standing.since), 6),
            goes_on_in=None if standing.until is None else round(max(0.0, standing.until - now), 6),
            age=round(now - record.started, 6),
            last_error=codes[-1] if codes else None,
        )
