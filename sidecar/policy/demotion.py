"""Which clients are let through as a tunnel although their host is intercepted: those that refuse our certificate.

Law: pure, told the time. A client is a host it calls, the address it calls from and what it calls itself, since one
app that pins certificates must not take the sight of another. A refusal in the handshake demotes at once: the next
call shall work. A handshake that nobody uses is weaker evidence (pins are also checked afterwards, but connections are
also opened in advance): it takes two in a row. Each demotion of the same client lasts twice as long, up to an hour.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

FIRST_FOR = 300.0
LONGEST_FOR = 3600.0
_UNUSED_IN_A_ROW = 2
_REMEMBERED = 1024


class Client(NamedTuple):
    """Who called what."""

    host: str
    """With its port."""
    address: str
    agent: str


class _Standing:
    __slots__ = ("lasts", "until", "unused")

    def __init__(self) -> None:
        self.until = 0.0
        self.lasts = 0.0
        self.unused = 0


class Demotions:
    """See the module's law."""

    def __init__(self) -> None:
        self._known: OrderedDict[Client, _Standing] = OrderedDict()

    def demoted(self, client: Client, now: float) -> bool:
        standing = self._known.get(client)
        return standing is not None and now < standing.until

    def refused(self, client: Client, now: float) -> float:
        """The client said no to our certificate. For how many seconds it is demoted now."""
        standing = self._of(client)
        standing.lasts = min(LONGEST_FOR, standing.lasts * 2 or FIRST_FOR)
        standing.until = now + standing.lasts
        standing.unused = 0
        return standing.lasts

    def unused(self, client: Client, now: float) -> float | None:
        """The handshake went well and nothing was asked. Seconds, if that demotes it."""
        standing = self._of(client)
        standing.unused += 1
        return self.refused(client, now) if standing.unused >= _UNUSED_IN_A_ROW else None

    def used(self, client: Client) -> None:
        """A request came: this client trusts us."""
        if client in self._known:
            del self._known[client]

    def _of(self, client: Client) -> _Standing:
        standing = self._known.get(client)
        if standing is None:
            standing = self._known[client] = _Standing()
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(client)
        return standing
