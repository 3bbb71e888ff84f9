"""The rate-limit gate of one upstream: after a 429 with a wait, every call with the same credential waits.

Law: pure, told the time, bounded. A key is the keyed hash of a credential. Calls queue in the order they came and are
released in that order, all at once, at the reset; whoever comes while others still wait queues behind them. Waiting
itself is done by the exchange: here are only the order, and who may go.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from config.breaker import RateLimitGate as Settings

_FEWEST_KEYS = 1024


class Ticket:
    """A place in the queue. `released` becomes True when its holder may go."""

    __slots__ = ("key", "released")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.released = False


class _Pause:
    __slots__ = ("until", "waiting")

    def __init__(self, until: float) -> None:
        self.until = until
        self.waiting: dict[Ticket, None] = {}
        """In the order they came; a dict, so that leaving the middle is cheap."""


class Gate:
    """See the module's law."""

    __slots__ = ("_enabled", "_max_keys", "_max_queue", "_pauses", "_waiting", "paused", "pauses")

    def __init__(self, settings: Settings) -> None:
        self._pauses: dict[bytes, _Pause] = {}
        self.paused: Collection[bytes] = self._pauses
        """The keys that wait; empty while nothing is paused, and then the exchange need not even work out a key."""
        self._waiting = 0
        self.pauses = 0
        """How often a key was paused that was not."""
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Also while it is in use: who waits goes on waiting, unless there is no gate any more."""
        self._enabled = settings.enabled
        self._max_queue = settings.max_queue
        # More keys than can have somebody waiting, so that there is always one to drop that nobody waits for.
        self._max_keys = max(_FEWEST_KEYS, settings.max_queue + 1, self._waiting + 1)
        if not self._enabled:
            for pause in self._pauses.values():
                pause.until = -inf

    @property
    def waiting(self) -> int:
        """How many calls wait, over all keys."""
        return self._waiting

    def pause(self, key: bytes, until: float, now: float) -> None:
        """The upstream asked this credential to wait. A pause is only ever made longer."""
        if not self._enabled or until <= now:
            return
        pause = self._pauses.get(key)
        if pause is not None:
            if pause.until <= now:
                self.pauses += 1
            pause.until = max(pause.until, until)
            return
        if len(self._pauses) >= self._max_keys:
            self._drop_one()
        self._pauses[key] = _Pause(until)
        self.pauses += 1

    def closed_until(self, key: bytes, now: float) -> float | None:
        """When calls with this key may go again, or None when they may go now."""
        pause = self._pauses.get(key)
        if pause is None:
            return None
        if pause.until > now or pause.waiting:
            return pause.until
        del self._pauses[key]
        return None

    def enter(self, key: bytes) -> Ticket | None:
        """Queue for a key that is closed; None when the queue is full."""
        if self._waiting >= self._max_queue:
            return None
        ticket = Ticket(key)
        self._pauses[key].waiting[ticket] = None
        self._waiting += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The holder does not wait any longer: cancelled, or out of time. Harmless after its release."""
        pause = self._pauses.get(ticket.key)
        if pause is not None and ticket in pause.waiting:
            del pause.waiting[ticket]
            self._waiting -= 1

    def release(self, now: float) -> list[Ticket]:
        """Everyone who may go by now: by key in the order of the resets, within a key in the order they came. Also what
        ends a pause that nobody waits for, so it is worth calling now and then while there are `paused` keys."""
        due = sorted((pause.until, key) for key, pause in self._pauses.items() if pause.until <= now)
        free: list[Ticket] = []
        for _, key in due:
            free.extend(self._pauses.pop(key).waiting)
        for ticket in free:
            ticket.released = True
        self._waiting -= len(free)
        return free

    def next_release(self) -> float | None:
        """When `release` will let somebody go; None while nobody waits."""
        return min((pause.until for pause in self._pauses.values() if pause.waiting), default=None)

    def _drop_one(self) -> None:
        """Make room: forget the pause that ends first among those nobody waits for."""
        _, key = min((pause.until, key) for key, pause in self._pauses.items() if not pause.waiting)
        del self._pauses[key]
