"""How many files and sockets this process may have open, and who may take which share.

Law: a kernel gives out the lowest free number, so the number of a new socket says how many are open. Apps stop being
accepted first, with an answer that says so; what goes on for those who are in, upstream connections, stops next; the
rest is for the store, the logs, the admin port and the probes, which never take more than their bounds. So nobody finds
out by a failed accept.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

_OWN = 48
"""Standard streams, listeners, the event loop, the store, logs, names being resolved: with a margin."""
_FOR_ATTEMPTS = 16
"""At least so many upstream connections when apps have taken the rest."""
_FEWEST_APPS = 8


class TooFew(Exception):
    """Not even a handful of connections would fit; says what to do."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Numbers from which on a new socket is refused."""

    most: int
    side_listeners: int
    """The admin port, and the probes if they have one of their own."""
    side_doors_each: int
    """How many connections each of them may have."""

    @property
    def side_doors(self) -> int:
        return self.side_listeners * self.side_doors_each

    @property
    def upstreams_below(self) -> int:
        return self.most - _OWN - self.side_doors

    @property
    def apps_below(self) -> int:
        return self.upstreams_below - max(_FOR_ATTEMPTS, self.upstreams_below // 20)

    def shortage(self, connections: int) -> str | None:
        """What to say when so many connections of apps, each with one to an upstream, do not fit."""
        needed = 2 * connections + _OWN + self.side_doors
        if self.most >= needed:
            return None
        return (
            f"limits.connections is {connections}, for which the process may need {needed} open files, and it may have "
            f"{self.most} (ulimit -n): about {max(1, self.apps_below // 2)} connections with a call under way fit, "
            "further ones are answered with 503. Raise the limit (LimitNOFILE= of systemd, ulimits of the container), "
            "or lower limits.connections"
        )


def of_process(listeners: int, connections_each: int) -> Descriptors:
    """As the process may have them now. `listeners` of the side, of which each may have `connections_each`, or an
    eighth where few fit. Raises TooFew."""
    most = soft_limit()
    each = min(connections_each, most // 8)
    found = Descriptors(most, listeners, each)
    if found.apps_below - _OWN < _FEWEST_APPS:
        least = most
        while Descriptors(least, listeners, min(connections_each, least // 8)).apps_below - _OWN < _FEWEST_APPS:
            least += 16
        raise TooFew(
            f"the process may have {most} files and sockets open at a time (ulimit -n), which is too few to serve "
            f"anybody; raise it to at least {least}, better 65536: `ulimit -n`, LimitNOFILE= of systemd, or the "
            "ulimits of the container"
        )
    return found


def number_of(transport: asyncio.BaseTransport) -> int:
    """Of its socket; 0 where there is none to be seen."""
    sock = transport.get_extra_info("socket")
    return 0 if sock is None else int(sock.fileno())


def soft_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def raise_soft_limit() -> tuple[int, int]:
    """To the hard one: the soft one is for programs that use select(). Returns what was, for those we start."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    except (OSError, ValueError):
        pass  # a kernel with a lower ceiling of its own: then it stays as it is
    return before


class Inherited(NamedTuple):
    """What the process was started with and has changed for itself: a program that it starts gets it back."""

    umask: int
    descriptors: tuple[int, int]

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """For the moment in which a program is started."""
        ours = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.descriptors)  # what is open stays open
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, ours)
