"""Whole ids from a part of them, so that nobody has to copy all of one.

Law: looks among sessions and what is kept; says every id that it can be, up to a few, and chooses none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from sidecar.admin.fields import Answer, NoBody, NoQuery
from sidecar.admin.problem import wrong
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy

_PART = re.compile(r"[A-Za-z0-9_]{4,80}")
_MOST = 10


class IdShown(Answer):
    """Something with this id."""

    kind: Literal["session", "dead_letter", "job", "replay"]
    id: str


class IdsShown(Answer):
    """All that a part can mean, up to ten of each kind."""

    items: tuple[IdShown, ...]
    next_cursor: None = None


class Ids:
    """The handler."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET",
            "/ids/{part}",
            "Ids of sessions, dead letters, jobs and replays that begin or end so.",
            self.shown,
            IdsShown,
            parts={"part": "Four characters of an id or more, from its beginning or its end."},
            refusals=(503,),
        )

    async def shown(self, call: Call[NoQuery, NoBody]) -> Told:
        part, durable = call.named("part"), self._proxy.kept.durable
        if not _PART.fullmatch(part):
            raise wrong("part", part, "must be four or more letters, digits or `_`, the beginning or end of an id")
        found = [("session", whole) for whole in self._proxy.signals.sessions.ids_like(part, _MOST)]
        if durable is not None:
            from sidecar.durable.ids import like  # loaded with the store, not before

            found += await like(durable.letters.store, part, _MOST)
        earlier = self._proxy.signals.earlier
        if not found and earlier is not None:  # read from the disk: only for what nothing else has
            ids = await self._proxy.loop.run_in_executor(None, earlier.ids_like, part, _MOST)
            found = [("session", whole) for whole in ids]
        return {"items": [{"kind": kind, "id": whole} for kind, whole in found], "next_cursor": None}
