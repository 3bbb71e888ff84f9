"""Finished sessions worth looking at: which ones they are, what keeps them, and how one is shown.

Law: everything but healthy sessions is kept, so many for so long, in memory (telemetry/ring.py says which go first);
healthy ones are sampled. What leaves this file is redacted. A cursor is a session's number, so a page never moves when
new sessions arrive.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from telemetry.record import GOOD, PHASE_WORDS, Attempt, Errand, Session, time_to_first_byte, trace_id_of, words_of
from telemetry.redact import Redactor
from telemetry.ring import CAUSES_LAST, Ring
from telemetry.timestamps import rfc3339

Wall = Callable[[float], float]

_QUIET = frozenset({"first_try", "deduplicated", "tunnelled"})
_TIMEOUTS = frozenset({"NETWORK_TIMEOUT", "CONNECT_TIMEOUT", "DEADLINE_EXCEEDED", "EXTERNAL_SERVICE_TIMEOUT"})
_SAMPLED = 200


def is_interesting(session: Session, slow_threshold: float) -> bool:
    """Whether a session is kept, logged and traced whatever the sampling."""
    outcome = session.outcome
    if outcome not in _QUIET or session.fallback_from is not None or isinstance(session, Errand):
        return True
    if outcome == "tunnelled":
        return session.code is not None  # a tunnel is long by nature
    return session.ended - session.started > slow_threshold


class Wanted(NamedTuple):
    """Which sessions. `since` is wall time; `code` is the session's or any attempt's; `trace` is in hex."""

    outcome: str | None = None
    upstream: str | None = None
    code: str | None = None
    trace: str | None = None
    since: float | None = None

    def fits(self, session: Session) -> bool:
        """Whatever its time."""
        outcome, upstream, code, trace, _ = self
        if outcome is not None and session.outcome != outcome:
            return False
        if upstream is not None and session.upstream != upstream:
            return False
        if trace is not None and trace != trace_id_of(session):
            return False
        return code is None or code == session.code or any(attempt.code == code for attempt in session.attempts)


ALL = Wanted()


class Page(NamedTuple):
    """Some sessions, newest first, where the next page begins (None: there is none), and with the first page how many
    there are in all."""

    items: list[Session]
    next_cursor: str | None
    total: int | None


class Retention(NamedTuple):
    """How long sessions are kept: as set, and as it turned out."""

    capacity: int
    kept: int
    ttl: float
    oldest: float | None
    """Wall time: the oldest one that is there for no special reason."""
    pushed_out: int
    """Dropped before their time, because there were too many."""
    folded: int
    """Refusals of open breakers that are only counted, in the row of their period."""
    causes: int
    """Failures that opened a breaker; they are kept `causes_ttl`."""
    causes_ttl: float


class Sessions:
    """What is kept. `wall` turns the record's times into wall time."""

    def __init__(self, capacity: int, ttl: float, wall: Wall) -> None:
        self.ring = Ring(capacity)
        self._sampled: deque[tuple[int, Session]] = deque(maxlen=min(capacity, _SAMPLED))
        self._ttl = ttl
        self._wall = wall
        self._count = 0

    def configure(self, capacity: int, ttl: float) -> None:
        """Other bounds, from now on; the newest stay."""
        self._ttl = ttl
        if capacity != self.ring.capacity:
            self.ring.resize(capacity)
            self._sampled = deque(self._sampled, maxlen=min(capacity, _SAMPLED))

    def keep(self, session: Session) -> None:
        self._count += 1
        self.ring.add(self._count, session)

    def sample(self, session: Session) -> None:
        """A healthy one, for the live view."""
        self._count += 1
        self._sampled.append((self._count, session))

    def expire(self, now: float) -> None:
        """Drop what is too old; `now` is monotonic."""
        oldest = now - self._ttl
        self.ring.expire(oldest, now - self._ttl * CAUSES_LAST)
        while self._sampled and self._sampled[0][1].ended < oldest:
            self._sampled.popleft()

    def __len__(self) -> int:
        return len(self.ring)

    def retention(self) -> Retention:
        ring, oldest = self.ring, self.ring.oldest
        return Retention(
            capacity=ring.capacity,
            kept=len(ring) + len(self._sampled),
            ttl=self._ttl,
            oldest=None if oldest is None else self._wall(oldest),
            pushed_out=ring.pushed_out,
            folded=ring.folded,
            causes=ring.causes,
            causes_ttl=self._ttl * CAUSES_LAST,
        )

    def find(self, session_id: str) -> Session | None:
        wanted = session_id.encode()
        return next((session for session in self._all() if session.session_id == wanted), None)

    def ids_like(self, part: str, limit: int) -> list[str]:
        """Ids that begin or end so, the newest first."""
        wanted = part.encode()
        ids = (session.session_id for session in self._all())
        fitting = (whole for whole in ids if whole.startswith(wanted) or whole.endswith(wanted))
        return [whole.decode() for whole in islice(fitting, limit)]

    def page(self, wanted: Wanted = ALL, *, limit: int = 100, cursor: str | None = None) -> Page:
        """Newest first. ValueError for a cursor that was never given out."""
        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
            raise ValueError("cursor: not one of this list; leave it out to begin with the newest")
        before = self._count + 1 if cursor is None else int(cursor)

        def fitting() -> Iterator[tuple[int, Session]]:
            for number, session in self._newest_first():
                if number < before and self._is_since(session, wanted.since) and wanted.fits(session):
                    yield number, session

        found = list(islice(fitting(), limit + 1))
        items = found[:limit]
        more = len(found) > limit
        total = None if cursor is not None else self._count_of(wanted) if more else len(items)
        return Page([session for _, session in items], str(items[-1][0]) if more and items else None, total)

    def _is_since(self, session: Session, since: float | None) -> bool:
        """A row of refusals is as young as its last one."""
        if since is None:
            return True
        row = self.ring.refusals(session)
        return self._wall((session if row is None else row.last).ended) >= since

    def _count_of(self, wanted: Wanted) -> int:
        if wanted == ALL:
            return len(self.ring) + len(self._sampled)
        return sum(
            self._is_since(session, wanted.since) and wanted.fits(session) for _, session in self._newest_first()
        )

    def _newest_first(self) -> Iterator[tuple[int, Session]]:
        return heapq.merge(self.ring.newest_first(), reversed(self._sampled), key=_number, reverse=True)

    def _all(self) -> Iterator[Session]:
        yield from (session for _, session in self._newest_first())
        yield from self.ring.lasts()


def _number(entry: tuple[int, Session]) -> int:
    return entry[0]


# ---- S1's shapes -------------------------------------------------------------------------------------------------


def retry_count(attempts: Sequence[Attempt]) -> int:
    """How many of them are retries: not the first, and not those that only replaced a dead connection."""
    return sum(attempt.kind != "stale" for attempt in attempts[1:])


def correlation_id(session: Session) -> str:
    """What joins this session to the caller's own records: its header, else the trace, else the session itself."""
    if session.correlation_id:
        return session.correlation_id
    return trace_id_of(session) or session.session_id.decode()


def serialise(session: Session, wall: Wall, redactor: Redactor, server_id: str = "") -> dict[str, Any]:
    """A RetrySession as it may be shown."""
    error = None
    if session.code is not None:
        last = session.attempts[-1] if session.attempts else None
        passed_on = last is not None and last.code == session.code and last.status
        message = session.message or (words_of(last.message, last.status) if last is not None and passed_on else "")
        error = {"type": session.code, "message": redactor.text(message)}
    first_byte = time_to_first_byte(session)
    return {
        "session_id": session.session_id.decode(),
        "policy_id": session.policy_id,
        "upstream": session.upstream,
        "subsystem": session.subsystem or session.upstream,
        "operation": session.operation,
        "stage": session.stage,
        "method": session.method,
        "url": redactor.url(session.target),
        "host": session.host or None,
        "start_time": rfc3339(wall(session.started)),
        "end_time": rfc3339(wall(session.ended)),
        "attempts": [serialise_attempt(n, attempt, wall, redactor) for n, attempt in enumerate(session.attempts, 1)],
        "success": session.outcome in GOOD,
        "outcome": session.outcome,
        "final_result": {"status": session.status} if session.status else None,
        "final_error": error,
        "correlation_id": redactor.text(correlation_id(session)),
        "trace_id": trace_id_of(session),
        "context": {
            "user_agent": redactor.text(session.user_agent) if session.user_agent else None,
            "server_id": server_id or None,
            "api_key_id": session.api_key_id,
            "request_source": session.client,
            "workflow": redactor.text(session.workflow) if session.workflow else None,
            "caller_resend": session.caller_resend,
            "fallback_from": session.fallback_from,
        },
        "suppressed": session.suppressed,
        "dlq_id": session.dlq_id,
        "waited": round(session.waited, 6),
        "request_bytes": session.request_bytes,
        "response_bytes": session.response_bytes,
        "total_attempts": len(session.attempts),
        "retry_count": retry_count(session.attempts),
        "total_duration": round(session.ended - session.started, 6),
        "time_to_first_byte": None if first_byte is None else round(first_byte, 6),
    }


def serialise_attempt(number: int, attempt: Attempt, wall: Wall, redactor: Redactor) -> dict[str, Any]:
    """A RetryAttempt as it may be shown."""
    code, decision = attempt.code, attempt.decision
    said = words_of(attempt.message, attempt.status)
    return {
        "attempt_number": number,
        "timestamp": rfc3339(wall(attempt.started)),
        "kind": attempt.kind,
        "endpoint": redactor.url(attempt.endpoint),
        "address": attempt.address,
        "egress_proxy": redactor.url(attempt.egress_proxy) if attempt.egress_proxy else None,
        "policy_id": attempt.policy_id,
        "delay": round(attempt.delay, 6),
        "duration": round(attempt.ended - attempt.started, 6),
        "send_phase": PHASE_WORDS[attempt.phase],
        "reused_connection": attempt.reused,
        "breaker": attempt.breaker,
        "status": attempt.status or None,
        "success": code is None,
        "outcome": attempt_outcome(code),
        "error": None if code is None else {"type": code, "message": redactor.text(said)},
        "decision": None
        if decision is None
        else {
            "retry": decision.delay is not None,
            "delay": decision.delay,
            "reason": decision.reason,
            "rule": redactor.text(decision.rule),
            "remedy": redactor.text(decision.remedy) or None,
        },
    }


def attempt_outcome(code: str | None) -> str:
    """S2's four words."""
    if code is None:
        return "success"
    if code == "CIRCUIT_OPEN":
        return "circuit_open"
    return "timeout" if code in _TIMEOUTS else "failure"
