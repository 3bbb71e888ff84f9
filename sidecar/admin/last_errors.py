"""The newest failed session of each upstream, and the newest that failed by more than an open breaker.

Law: looks only at sessions that ended since it last looked, in slices, so that asking often costs little however many
are kept.
"""

from __future__ import annotations

from sidecar import clock
from telemetry.record import Session
from telemetry.sessions import Sessions

_SLICE = 2_000


class LastErrors:
    """`refresh`, then `of`."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._newest_seen: Session | None = None
        self._of: dict[str, Session] = {}
        self._causes: dict[str, Session] = {}

    def of(self, upstream: str) -> Session | None:
        return self._of.get(upstream)

    def cause_of(self, upstream: str) -> Session | None:
        """The newest in which the upstream itself was heard to fail: what opened a breaker, not who was refused."""
        return self._causes.get(upstream)

    async def refresh(self) -> None:
        found: dict[str, Session] = {}
        causes: dict[str, Session] = {}
        newest: Session | None = None
        cursor = None
        while True:
            page = self._sessions.page(limit=_SLICE, cursor=cursor)
            for session in page.items:
                if session is self._newest_seen:
                    break
                newest = newest or session
                if session.upstream not in found and _failed(session):
                    found[session.upstream] = session
                if session.upstream not in causes and cause_in(session) is not None:
                    causes[session.upstream] = session
            else:
                if page.next_cursor is not None:
                    cursor = page.next_cursor
                    await clock.sleep(0)
                    continue
            break
        self._newest_seen = newest or self._newest_seen
        for known, news in ((self._of, found), (self._causes, causes)):
            for upstream, session in news.items():
                before = known.get(upstream)
                if before is None or before.ended <= session.ended:  # another refresh may have overtaken this one
                    known[upstream] = session


def cause_in(session: Session) -> tuple[str, str] | None:
    """Code and message of its newest failure that is no refusal of a breaker."""
    tried = ((attempt.code, attempt.message) for attempt in reversed(session.attempts))
    for code, message in (*tried, (session.code, session.message)):
        if code is not None and code != "CIRCUIT_OPEN":
            return code, message or ""
    return None


def _failed(session: Session) -> bool:
    return session.code is not None or any(attempt.code is not None for attempt in session.attempts)
