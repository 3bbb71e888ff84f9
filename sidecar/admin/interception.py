"""Clients that are let through unopened for a while, and an operator's word that they may be opened again.

Law: read off the living policy, nothing is kept here. Whoever is cleared starts afresh: their next CONNECT is opened,
and their next refusal demotes them for the shortest time again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sidecar import clock
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, Limit, NoBody, NoQuery, Prose, Query, Text
from sidecar.admin.pages import in_slices, page_of
from sidecar.admin.problem import wrong
from sidecar.admin.route import Call, Route, Told
from sidecar.intercept import intercepted_hosts
from sidecar.policy.demotion import Demotion
from sidecar.proxy import Proxy
from sidecar.routing import Origin, parse_authority
from telemetry.timestamps import rfc3339

_LEAST_OF_AN_ID = 4


class InterceptionQuery(Query):
    """Which clients."""

    host: Text | None = None
    """Only those that call this host; with a port, only there."""
    limit: Limit = 100
    cursor: Text | None = None
    """`next_cursor` of the page before."""


class Clearing(Body):
    """Exactly one of `which` and `all`."""

    which: Text | None = None
    """An id of `GET /interception`, four characters of its beginning or more, a host, or host:port."""
    all: bool = False
    reason: Prose = ""
    """For the audit."""


class DemotedShown(Answer):
    """One client whose calls to one host pass as a tunnel, unseen, because it did not trust our certificate."""

    id: str
    host: str
    """With its port."""
    upstream: str | None
    """null: the configuration names none for this host any more."""
    address: str
    user_agent: str | None
    program: str | None
    """Its file and what it runs, on this machine; null where that cannot be known."""
    program_digest: str | None
    """Of its file, whole command line and trusted authorities: tells two programs of the same name apart."""
    client_hello: str | None
    """Where the program is not known: a digest of how it begins TLS."""
    since: str
    until: str
    times: int
    """How often in a row; each time lasts twice as long as the one before, up to an hour."""
    why: str


class DemotedPage(Answer):
    """What is intercepted, and the clients that are let through now, by host and id."""

    hosts: tuple[str, ...]
    """That are intercepted, by the configuration in force."""
    impossible: str | None
    """Why none of them could be opened when it was last tried; null: nothing was in the way."""
    items: tuple[DemotedShown, ...]
    next_cursor: str | None
    total: int | None
    """How many there are in all; on the first page only."""


class Cleared(Answer):
    """Who will be opened again."""

    items: tuple[DemotedShown, ...]
    total: int


class Interceptions:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET",
            "/interception",
            "Clients that refused our certificate: their calls to an intercepted host pass as a tunnel for a while.",
            self.shown,
            DemotedPage,
            InterceptionQuery,
        )
        yield Route(
            "POST",
            "/interception/clear",
            "Open the calls of such clients again, from their next one on.",
            self.clear,
            Cleared,
            NoQuery,
            Clearing,
            refusals=(413, 415),
        )

    async def shown(self, call: Call[InterceptionQuery, NoBody]) -> Told:
        query = call.query
        found = [
            ((one.client.host, one.client.id), one)
            for one in self._in_force()
            if query.host is None or _calls(one, query.host)
        ]
        page, next_cursor, total = page_of(found, query.limit, query.cursor)
        items = await in_slices(page, lambda item: self._demoted(item[1]))
        proxy = self._proxy
        impossible = proxy.interception.impossible
        return {
            "hosts": sorted(intercepted_hosts(proxy.settings.upstreams.values())),
            "impossible": None if impossible is None else proxy.signals.redactor.text(impossible),
            "items": items,
            "next_cursor": next_cursor,
            "total": total,
        }

    async def clear(self, call: Call[NoQuery, Clearing]) -> Told:
        given = call.body
        if (given.which is None) is not given.all:
            raise wrong("which", given.which, "give an id or a host in `which`, or `all: true`, and not both")
        found = self._in_force()
        if given.which is not None:
            found = _meant(found, given.which)
        shown = tuple(self._demoted(one) for one in found)
        self._proxy.interception.demotions.forget(one.client for one in found)
        for one in shown:
            await self._changes.note(
                call.request,
                "cleared the demotion of",
                about=f"{one.program or one.user_agent or 'a client without a name'} at {one.address} to {one.host}",
                before=f"passes as a tunnel until {one.until}",
                after="intercepted",
                reason=given.reason,
            )
        return Cleared(items=shown, total=len(shown))

    def _in_force(self) -> list[Demotion]:
        return self._proxy.interception.demotions.in_force(clock.monotonic())

    def _demoted(self, one: Demotion) -> DemotedShown:
        proxy, client = self._proxy, one.client
        text = proxy.signals.redactor.text
        host, port = parse_authority(client.host)
        upstream = proxy.interception.upstream_of(Origin("https", host, port))
        program = client.program
        return DemotedShown(
            id=client.id,
            host=client.host,
            upstream=None if upstream is None else upstream.name,
            address=client.address,
            user_agent=text(client.agent) or None,
            program=None if program is None else text(program.name),
            program_digest=None if program is None else program.digest,
            client_hello=client.hello or None,
            since=rfc3339(proxy.wall(one.since)),
            until=rfc3339(proxy.wall(one.until)),
            times=one.times,
            why=text(one.why),
        )


def _calls(one: Demotion, host: str) -> bool:
    called = one.client.host
    return host.lower() in (called, called.rpartition(":")[0], called.rpartition(":")[0].strip("[]"))


def _meant(found: Iterable[Demotion], which: str) -> list[Demotion]:
    """A host goes before an id that begins so."""
    found = list(found)
    of_host = [one for one in found if _calls(one, which)]
    if of_host or len(which) < _LEAST_OF_AN_ID:
        return of_host
    by_id = [one for one in found if one.client.id.startswith(which)]
    if len(by_id) > 1:
        raise wrong("which", which, f"more than one id begins so: {', '.join(one.client.id for one in by_id)}")
    return by_id
