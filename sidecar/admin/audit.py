"""The audit: who changed what.

Law: reads only. Nothing was ever changed where there is no store yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sidecar import clock
from sidecar.admin.fields import Answer, Limit, Moment, NoBody, Query, Text
from sidecar.admin.route import Call, Route, Told
from sidecar.admin.settings import of_trouble
from sidecar.durable.trouble import Trouble
from sidecar.proxy import Proxy
from telemetry.timestamps import rfc3339


class AuditQuery(Query):
    """Which entries."""

    since: Moment | None = None
    """Only those since: 15m ago, or a moment."""
    until: Moment | None = None
    """Only those until then."""
    who: Text | None = None
    """Only those of this token, or of `local`, `signal` or `file`."""
    what: Text | None = None
    """Only those with this in what was done, as in `set`."""
    about: Text | None = None
    """Only those with this in the name of the thing, as in `policy careful`."""
    limit: Limit = 100
    cursor: Text | None = None
    """`next_cursor` of the page before."""


class AuditShown(Answer):
    """One change."""

    id: int
    timestamp: str
    who: str
    """The name of a token; `local` where none is needed; `signal` and `file` for reloads nobody asked for here."""
    claimed_user: str | None
    """The user that the command line says it runs as. Nobody has checked it."""
    client: str | None
    """The address it came from."""
    user_agent: str | None
    what: str
    about: str
    before: Any
    after: Any
    reason: str | None


class AuditPage(Answer):
    """Some changes, newest first."""

    items: tuple[AuditShown, ...]
    next_cursor: str | None
    total: int | None
    """How many fit in all; on the first page only."""


class AuditTrail:
    """The handler."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET", "/audit", "Who changed what, newest first.", self.shown, AuditPage, AuditQuery, refusals=(500, 503)
        )

    async def shown(self, call: Call[AuditQuery, NoBody]) -> Told:
        query, kept, now = call.query, self._proxy.kept, clock.wall()
        if kept.durable is None and not kept.exists:
            return AuditPage(items=(), next_cursor=None, total=0)
        try:
            durable = await kept.open()
            from sidecar.durable.audit import Wanted  # loaded with the store, not before

            wanted = Wanted(
                since=None if query.since is None else query.since.wall(now),
                until=None if query.until is None else query.until.wall(now),
                who=query.who,
                what=query.what,
                about=query.about,
            )
            entries, next_cursor = await durable.audit.page(wanted, query.limit, query.cursor)
            total = await durable.audit.count(wanted) if query.cursor is None else None
        except Trouble as trouble:
            raise of_trouble(trouble) from None
        items = tuple(
            AuditShown(
                id=entry.seq,
                timestamp=rfc3339(entry.at),
                who=entry.who,
                claimed_user=entry.claimed,
                client=entry.client,
                user_agent=entry.agent,
                what=entry.what,
                about=entry.about,
                before=entry.before,
                after=entry.after,
                reason=entry.reason,
            )
            for entry in entries
        )
        return AuditPage(items=items, next_cursor=next_cursor, total=total)
