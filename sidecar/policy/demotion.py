"""Which clients are let through as a tunnel although their host is intercepted: those that refuse our certificate.

Law: pure, told the time. A client is a host it calls, the address it calls from, what it calls itself and the program
it is, or where that cannot be known how it begins TLS: one app that pins certificates must not take the sight of
another, and many apps send no name. A refusal in the handshake demotes at once: the next call shall work. A handshake
that nobody uses is weaker evidence (pins are also checked afterwards, but connections are also opened in advance): it
takes two in a row. Each demotion of the same client lasts twice as long, up to an hour.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

FIRST_FOR = 300.0
LONGEST_FOR = 3600.0
_UNUSED_IN_A_ROW = 2
_REMEMBERED = 1024


class Program(NamedTuple):
    """What a client was started as."""

    name: str
    """For people: its file and what it runs, without its arguments."""
    digest: str
    """Of its file, its whole command line and the variables that say whom it trusts."""


class Client(NamedTuple):
    """Who called what."""

    host: str
    """With its port."""
    address: str
    agent: str
    program: Program | None = None
    """None: it is not on this machine, or the kernel does not tell us."""
    hello: str = ""
    """Where the program is not known: a digest of how it begins TLS."""

    @property
    def id(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


class Demotion(NamedTuple):
    """One that is in force. Times are those that the policy was told."""

    client: Client
    since: float
    until: float
    times: int
    """How often in a row, each twice as long as the one before."""
    why: str


class _Standing:
    __slots__ = ("lasts", "since", "times", "until", "unused", "why")

    def __init__(self) -> None:
        self.since = self.until = 0.0
        self.lasts = 0.0
        self.times = 0
        self.unused = 0
        self.why = ""


class Demotions:
    """See the module's law."""

    def __init__(self) -> None:
        self._known: OrderedDict[Client, _Standing] = OrderedDict()

    def demoted(self, client: Client, now: float) -> bool:
        standing = self._known.get(client)
        return standing is not None and now < standing.until

    def in_force(self, now: float) -> list[Demotion]:
        return [
            Demotion(client, standing.since, standing.until, standing.times, standing.why)
            for client, standing in self._known.items()
            if now < standing.until
        ]

    def refused(self, client: Client, now: float, why: str = "") -> float:
        """The client said no to our certificate. For how many seconds it is demoted now."""
        standing = self._of(client)
        standing.lasts = min(LONGEST_FOR, standing.lasts * 2 or FIRST_FOR)
        standing.since, standing.until = now, now + standing.lasts
        standing.times += 1
        standing.unused = 0
        standing.why = why
        return standing.lasts

    def unused(self, client: Client, now: float, why: str = "") -> float | None:
        """The handshake went well and nothing was asked. Seconds, if that demotes it."""
        standing = self._of(client)
        standing.unused += 1
        return self.refused(client, now, why) if standing.unused >= _UNUSED_IN_A_ROW else None

    def used(self, client: Client) -> None:
        """A request came: this client trusts us."""
        self.forget((client,))

    def forget(self, clients: Iterable[Client]) -> None:
        """They start afresh, with their next call."""
        for client in clients:
            self._known.pop(client, None)

    def _of(self, client: Client) -> _Standing:
        standing = self._known.get(client)
        if standing is None:
            standing = self._known[client] = _Standing()
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(client)
        return standing
