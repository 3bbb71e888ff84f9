"""How many requests of an upstream are under way at once, and who waits for a place.

Law: pure. At most `max_in_flight` places are taken; whoever finds none waits in order, up to `max_queue`; beyond that
the request is refused. A place that is given up goes straight to the first who waits, so that nobody who comes later
can take it. Waiting itself is done by the exchange.
"""

from __future__ import annotations


class Place:
    """A place, or one in the queue for it: `granted` says which."""

    __slots__ = ("granted",)

    def __init__(self, *, granted: bool) -> None:
        self.granted = granted


_TAKEN = Place(granted=True)
"""Whoever need not wait gets this one: a place that was granted at once needs no identity."""


class Bulkhead:
    """The places of one upstream. Only for upstreams with a `max_in_flight`; others need not ask."""

    __slots__ = ("_max_in_flight", "_max_queue", "_waiting", "in_flight")

    def __init__(self, max_in_flight: int, max_queue: int = 0) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._waiting: dict[Place, None] = {}
        """In the order they came; a dict, so that leaving the middle is cheap."""
        self.in_flight = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Who comes now has to wait."""
        return self.in_flight >= self._max_in_flight

    def enter(self) -> Place | None:
        """A place (`granted`), a place in the queue (not yet `granted`), or None: refused."""
        if self.in_flight < self._max_in_flight:
            self.in_flight += 1
            return _TAKEN
        if len(self._waiting) >= self._max_queue:
            return None
        place = Place(granted=False)
        self._waiting[place] = None
        return place

    def leave(self, place: Place) -> Place | None:
        """Give a place up, or stop waiting for one. Exactly once for each `enter`. Returns the place that was granted
        by this: its holder has to be woken."""
        if place in self._waiting:
            del self._waiting[place]
            return None
        if not self._waiting or self.in_flight > self._max_in_flight:  # the limit may have been lowered
            self.in_flight -= 1
            return None
        return self._grant_next()

    def configure(self, max_in_flight: int, max_queue: int) -> list[Place]:
        """Other limits, from now on; whoever has a place keeps it. Returns the places granted by this."""
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        granted = []
        while self._waiting and self.in_flight < max_in_flight:
            self.in_flight += 1
            granted.append(self._grant_next())
        return granted

    def _grant_next(self) -> Place:
        following = next(iter(self._waiting))
        del self._waiting[following]
        following.granted = True
        return following
