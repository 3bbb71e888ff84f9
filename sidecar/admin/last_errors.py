"""The newest failed session of each upstream.

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

    def of(self, upstream: str) -> Session | None:
        return self._of.get(upstream)

    async def refresh(self) -> None:
        found: dict[str, Session] = {}
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
            else:
                if page.next_cursor is not None:
                    cursor = page.next_cursor
                    await clock.sleep(0)
                    continue
            break
        self._newest_seen = newest or self._newest_seen
        for upstream, session in found.items():
            known = self._of.get(upstream)
            if known is None or known.ended <= session.ended:  # another refresh may have overtaken this one
                self._of[upstream] = session


def _failed(session: Session) -> bool:
    return session.code is not None or any(attempt.code is not None for attempt in session.attempts)
