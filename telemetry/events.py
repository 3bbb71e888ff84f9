"""S1's RetryEvents: told live to whoever listens, and to a file when one is set.

Law: publishing never waits. An event is a small tuple that points at its session; it is put into words only for
those who read it. A reader that does not keep up is cut off and counted, it can come back with the last id it saw. The
file is written by the writer's thread, in batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import orjson

from telemetry.names import FAILURES
from telemetry.record import BAD, Session, words_of
from telemetry.redact import Redactor
from telemetry.sessions import Wall, correlation_id, retry_count
from telemetry.timestamps import rfc3339

_RING = 1_000
_CHANGES = 100
_BREAKER = "circuit_breaker_"
_READER_QUEUE = 1_000
_COMPONENT = "sidecar"
_NONE: Mapping[str, Any] = {}


class RetryEvent(NamedTuple):
    """One event. `attempt` is 0 unless it is about one; `facts` is what a state change brings instead of a session."""

    number: int
    type: str
    at: float
    session: Session | None = None
    attempt: int = 0
    facts: Mapping[str, Any] = _NONE

    @property
    def event_id(self) -> str:
        return f"evt_{int(self.at * 1000)}_{self.number}"


class Subscription:
    """One reader. Iterate over it; it ends when the reader was too slow or the sidecar stops."""

    def __init__(self, events: Events, size: int) -> None:
        self._events = events
        self._queue: asyncio.Queue[RetryEvent | None] = asyncio.Queue(size + 1)  # room for the end mark
        self._size = size
        self.too_slow = False
        self.ends_with = "the sidecar stops"
        """Why the stream is over when the reader has kept up."""
        self.missed = False
        """The last id it saw is not known any more, or of an earlier process: events after it may be gone."""

    def offer(self, event: RetryEvent) -> bool:
        if self._queue.qsize() >= self._size:
            self.too_slow = True
            self.end()
            return False
        self._queue.put_nowait(event)
        return True

    def end(self) -> None:
        if not self._queue.full():
            self._queue.put_nowait(None)

    def close(self) -> None:
        self._events.unsubscribe(self)

    async def __aiter__(self) -> AsyncIterator[RetryEvent]:
        while (event := await self._queue.get()) is not None:
            yield event


class Events:
    """Publishes. `to_file` gets each event when a file is set; runs on the event loop's thread."""

    def __init__(self, wall: Wall, to_file: Callable[[RetryEvent], None] | None = None) -> None:
        self._wall = wall
        self._to_file = to_file
        self._ring: deque[RetryEvent] = deque(maxlen=_RING)
        self._older_changes: deque[RetryEvent] = deque(maxlen=_CHANGES)
        """Of breakers, from before the ring begins: what an open one refuses must not push out why it opened."""
        self._readers: set[Subscription] = set()
        self._count = 0
        self.slow_readers = 0

    # ---- publish -------------------------------------------------------------------------------------------------

    def attempt_begun(self, session: Session) -> None:
        """A running session tries again, now."""
        number = len(session.attempts)
        self._publish("retry_attempt", self._wall(session.attempts[-1].started), session, number)

    def session_ended(self, session: Session) -> None:
        """How a finished session came out."""
        if session.outcome in BAD:
            kind = "retry_failure" if retry_count(session.attempts) else "request_failure"
            self._publish(kind, self._wall(session.ended), session, len(session.attempts))
        elif len(session.attempts) > 1 and session.outcome == "recovered":
            self._publish("retry_success", self._wall(session.ended), session, len(session.attempts))

    def state_changed(
        self, event_type: str, at: float, facts: Mapping[str, Any], session: Session | None = None
    ) -> None:
        """A breaker, a dead letter, a replay, the configuration; `at` is wall time."""
        self._publish(event_type, at, session, 0, facts)

    def _publish(
        self, event_type: str, at: float, session: Session | None, attempt: int, facts: Mapping[str, Any] = _NONE
    ) -> None:
        self._count += 1
        event = RetryEvent(self._count, event_type, at, session, attempt, facts)
        if len(self._ring) == _RING and self._ring[0].type.startswith(_BREAKER):
            self._older_changes.append(self._ring[0])
        self._ring.append(event)
        if self._to_file is not None:
            self._to_file(event)
        if self._readers:
            slow = [reader for reader in self._readers if not reader.offer(event)]
            self._readers.difference_update(slow)
            self.slow_readers += len(slow)

    # ---- read ----------------------------------------------------------------------------------------------------

    def subscribe(
        self, last_event_id: str | None = None, size: int = _READER_QUEUE, *, follow: bool = True
    ) -> Subscription:
        """From now on, or from the event after `last_event_id`, as far back as events are known. Who does not follow
        gets what is known at this moment and the end behind it."""
        reader = Subscription(self, size)
        known = [] if last_event_id is None else self._after(last_event_id)
        reader.missed = known is None
        if known is None or (last_event_id is None and not follow):
            known = self._known()
        for event in known[-size:]:
            reader.offer(event)
        if follow:
            self._readers.add(reader)
        else:
            reader.ends_with = "that is all so far"
            reader.end()
        return reader

    def _known(self) -> list[RetryEvent]:
        """The ring, in which older changes of breakers take the places of its oldest other events."""
        known, taken = list(self._older_changes), len(self._older_changes)
        for event in self._ring:
            if taken and not event.type.startswith(_BREAKER):
                taken -= 1
            else:
                known.append(event)
        return known

    def _after(self, last_event_id: str) -> list[RetryEvent] | None:
        """What came after an event that is still known; None when it is not. Numbers start again with each process, so
        the whole id has to be the same: what an earlier life called 5 says nothing about our 5."""
        after: list[RetryEvent] = []
        for event in reversed(self._ring):
            if event.event_id == last_event_id:
                return after[::-1]
            after.append(event)
        return None

    def unsubscribe(self, reader: Subscription) -> None:
        self._readers.discard(reader)

    def recent(self, limit: int = 100) -> list[RetryEvent]:
        """The newest, newest first."""
        return [event for _, event in zip(range(limit), reversed(self._ring), strict=False)]

    @property
    def readers(self) -> int:
        return len(self._readers)

    def close(self) -> None:
        for reader in tuple(self._readers):
            reader.end()
        self._readers.clear()


# ---- S1's shape --------------------------------------------------------------------------------------------------


def serialise(event: RetryEvent, redactor: Redactor) -> dict[str, Any]:
    """A RetryEvent as it may be shown."""
    session, facts = event.session, event.facts
    shown: dict[str, Any] = {
        "event_id": event.event_id,
        "event_type": event.type,
        "timestamp": rfc3339(event.at),
        "correlation_id": event.event_id if session is None else redactor.text(correlation_id(session)),
        "session_id": "" if session is None else session.session_id.decode(),
        "policy_id": "" if session is None else session.policy_id,
        "operation": str(facts.get("operation") or facts.get("upstream") or event.type),
        "component": _COMPONENT,
        "context": {name: _shown(value, redactor) for name, value in facts.items()},
    }
    if session is not None:
        shown["operation"] = session.operation or f"{session.method} {session.upstream}"
        shown["context"].update(_session_context(session))
        if 0 < event.attempt <= len(session.attempts):  # the last may have been taken back: refused before it was made
            _describe_attempt(shown, session, event, redactor)
        if event.type in FAILURES:  # also without an attempt: an open breaker lets none through
            last = session.attempts[-1] if session.attempts else None
            said = "" if last is None or last.code != session.code else words_of(last.message, last.status)
            shown["error"] = _error(session.code, session.message or said, redactor)
    return shown


def _session_context(session: Session) -> dict[str, Any]:
    context: dict[str, Any] = {
        "upstream": session.upstream,
        "outcome": session.outcome or None,  # it goes on
        "status": session.status or None,
    }
    for name, value in (("suppressed", session.suppressed), ("stage", session.stage), ("dlq_id", session.dlq_id)):
        if value is not None:
            context[name] = value
    return context


def _describe_attempt(shown: dict[str, Any], session: Session, event: RetryEvent, redactor: Redactor) -> None:
    attempt = session.attempts[event.attempt - 1]
    shown["attempt"] = event.attempt
    if event.type == "retry_attempt":
        previous = session.attempts[event.attempt - 2]
        shown["policy_id"] = attempt.policy_id
        shown["delay"] = round(attempt.delay, 6)
        if previous.decision is not None and previous.decision.limit:
            shown["max_attempts"] = previous.decision.limit
        shown["context"] |= {
            "endpoint": redactor.url(attempt.endpoint),
            "kind": attempt.kind,
            "last_error": _error(previous.code, words_of(previous.message, previous.status), redactor),
        }


def _error(code: str | None, message: str | None, redactor: Redactor) -> dict[str, str] | None:
    return None if code is None else {"type": code, "message": redactor.text(message or "")}


def _shown(value: Any, redactor: Redactor) -> Any:
    return redactor.text(value) if isinstance(value, str) else value


def as_line(event: RetryEvent, redactor: Redactor) -> bytes:
    """One line of the file."""
    return orjson.dumps(serialise(event, redactor), default=str)


def as_sse(event: RetryEvent, redactor: Redactor) -> bytes:
    """One server-sent event."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (
        event.event_id.encode(),
        event.type.encode(),
        as_line(event, redactor),
    )
