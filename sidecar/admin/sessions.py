"""Finished requests: the list of those worth looking at, and one with its explanation.

Law: what is kept, how it is shown and what is hidden is telemetry's; here it is only asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field

from sidecar import clock
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Limit, Moment, NoBody, NoQuery, Query, Text
from sidecar.admin.negotiation import JSON, PLAIN, preferred
from sidecar.admin.pages import in_slices
from sidecar.admin.problem import Problem, wrong, wrong_choice
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy
from telemetry.sessions import Wanted
from telemetry.timestamps import rfc3339

Outcome = Literal[
    "first_try",
    "recovered",
    "deduplicated",
    "queued",
    "tunnelled",
    "rejected",
    "denied",
    "cancelled",
    "exhausted",
    "not_retryable",
    "budget",
    "deadline",
    "breaker_open",
    "failed_streaming",
    "internal",
]


class SessionsQuery(Query):
    """Which sessions; newest first."""

    outcome: Outcome | None = None
    """Only those that ended so."""
    upstream: Text | None = None
    """Only those of this upstream: its name, or host:port of one that is not configured."""
    code: Text | None = None
    """Only those with this error code, at the end or in an attempt."""
    trace: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    """Only those of this trace."""
    since: Moment | None = None
    """Only those that ended since: a time (2026-01-29T12:00:00Z), or how long ago (15m)."""
    earlier: Literal["true", "false"] = "false"
    """true: those of earlier runs instead, from the disk; the newest 8 MiB or so, of a flood a part."""
    limit: Limit = 100
    cursor: Text | None = None
    """`next_cursor` of the page before."""


class ErrorShown(Answer):
    """An error code and what was said about it."""

    type: str
    message: str


class DecisionShown(Answer):
    """What was decided after a failed attempt."""

    retry: bool
    delay: float | None
    reason: str
    rule: str
    remedy: str | None


class AttemptShown(Answer):
    """One try at one endpoint. Times are in seconds."""

    attempt_number: int
    timestamp: str
    kind: str
    endpoint: str
    address: str | None
    egress_proxy: str | None
    policy_id: str
    delay: float
    duration: float
    send_phase: str
    reused_connection: bool
    breaker: str
    status: int | None
    success: bool
    outcome: str
    error: ErrorShown | None
    decision: DecisionShown | None


class RefusalsShown(Answer):
    """What a breaker refused in one open period: one row in the list, the first of them."""

    count: int
    first_session_id: str
    first_at: str
    last_session_id: str
    """The only other one that can be looked at."""
    last_at: str


class RetentionShown(Answer):
    """How long sessions are kept: as set (`telemetry.sessions`, `telemetry.sessions_ttl`), and as it turned out."""

    capacity: int
    kept: int
    ttl: float
    """Seconds."""
    oldest: str | None
    """When the oldest one ended that is there for no special reason. Younger than `ttl`, and something pushed out: that
    far back the list goes. Kinds (upstream, outcome, code) that are rare go further back than common ones."""
    pushed_out: int
    """Dropped before their time since the start, because there were too many of their kind."""
    folded: int
    """Refusals of open breakers that are only counted, in the row of their period."""
    causes: int
    """Failures that opened a breaker."""
    causes_ttl: float
    """Seconds that these are kept, whatever comes after them."""


class SessionShown(Answer):
    """One request of the app, with all its attempts."""

    session_id: str
    policy_id: str
    upstream: str
    subsystem: str
    operation: str | None
    stage: str | None
    method: str
    url: str
    host: str | None
    start_time: str
    end_time: str
    attempts: tuple[AttemptShown, ...]
    success: bool
    outcome: Outcome
    final_result: Mapping[str, Any] | None
    final_error: ErrorShown | None
    correlation_id: str
    trace_id: str | None
    context: Mapping[str, Any]
    suppressed: str | None
    dlq_id: str | None
    waited: float
    request_bytes: int
    response_bytes: int
    total_attempts: int
    retry_count: int
    total_duration: float
    time_to_first_byte: float | None
    """Until the app had the first byte of its answer."""
    refusals: RefusalsShown | None
    """Of a row that stands for all that a breaker refused in one open period."""


class StepShown(Answer):
    """One thing that happened, with the rule that decided and what would have changed it."""

    step: int
    at: float
    """Seconds since the request arrived."""
    what: str
    rule: str | None
    remedy: str | None


class SessionExplained(SessionShown):
    """With its story."""

    summary: str
    explanation: tuple[StepShown, ...]


class SessionPage(Answer):
    """Some sessions, newest first."""

    items: tuple[SessionShown, ...]
    next_cursor: str | None
    total: int | None
    """How many fit in all; on the first page only."""
    retention: RetentionShown


class Sessions:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET", "/sessions", "Requests worth looking at, newest first.", self.page, SessionPage, SessionsQuery
        )
        yield Route(
            "GET",
            "/sessions/{id}",
            "One request with its explanation.",
            self.one,
            SessionExplained,
            parts={"id": "The id of a session, as in `x-sidecar-session`."},
            also=(PLAIN,),
            refusals=(404,),
        )

    async def page(self, call: Call[SessionsQuery, NoBody]) -> Told:
        await self._changes.note_reading(call.request, "sessions")
        query, proxy = call.query, self._proxy
        if query.code is not None and query.code not in proxy.registry:
            raise wrong_choice(
                "code",
                query.code,
                proxy.registry,
                f"{query.code[:60]!r} is not an error code; GET /errors lists what there is",
            )
        since = None if query.since is None else query.since.wall(proxy.wall(clock.monotonic()))
        try:
            wanted = Wanted(query.outcome, query.upstream, query.code, query.trace, since)
            if query.earlier == "true":
                return await self._earlier_page(wanted, query)
            page = proxy.signals.sessions.page(wanted, limit=query.limit, cursor=query.cursor)
        except ValueError as refused:
            raise wrong("cursor", query.cursor, str(refused).partition(": ")[2]) from None
        return {
            "items": await in_slices(page.items, proxy.signals.show),
            "next_cursor": page.next_cursor,
            "total": page.total,
            "retention": self._retention(),
        }

    async def _earlier_page(self, wanted: Wanted, query: SessionsQuery) -> Told:
        earlier, loop = self._proxy.signals.earlier, self._proxy.loop
        if earlier is None:
            return {"items": [], "next_cursor": None, "total": 0, "retention": self._retention()}
        page = await loop.run_in_executor(None, earlier.page, wanted, query.limit, query.cursor)
        items = [
            {name: value for name, value in one.items() if name in SessionShown.model_fields} for one in page.items
        ]
        return {
            "items": items,
            "next_cursor": page.next_cursor,
            "total": page.total if query.cursor is None else None,
            "retention": self._retention(),
        }

    async def _earlier_one(self, session_id: str, *, plain: bool) -> Told | None:
        earlier = self._proxy.signals.earlier
        if earlier is None:
            return None
        found = await self._proxy.loop.run_in_executor(None, earlier.find, session_id)
        if found is None:
            return None
        told = found.pop("told")
        return web.Response(text=told, content_type=PLAIN) if plain else found

    def _retention(self) -> RetentionShown:
        found = self._proxy.signals.sessions.retention()
        oldest = None if found.oldest is None else rfc3339(found.oldest)
        return RetentionShown.model_validate({**found._asdict(), "oldest": oldest})

    async def one(self, call: Call[NoQuery, NoBody]) -> Told:
        await self._changes.note_reading(call.request, f"session {call.named('id')[:60]}")
        session_id = call.named("id")
        signals = self._proxy.signals
        session = signals.sessions.find(session_id)
        plain = preferred(call.request.headers.get("Accept", ""), (JSON, PLAIN)) == PLAIN
        if session is None:
            earlier = await self._earlier_one(session_id, plain=plain)
            if earlier is not None:
                return earlier
            kept = (
                "retried, failed, refused and slow ones are kept and a sample of the others, of what an open breaker "
                "refused the first and the last; GET /sessions says how far back"
            )
            raise Problem(404, "NOT_FOUND", f"session {session_id[:60]!r} is not known: {kept}")
        if plain:
            return web.Response(text=signals.explain(session), content_type=PLAIN)
        return signals.show(session, explained=True)
