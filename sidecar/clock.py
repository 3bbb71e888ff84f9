"""Time, waiting, background tasks and randomness, owned in one place.

Law: no other module of the product calls `time.*`, `asyncio.sleep`, `asyncio.create_task` or `random.*`.
Policies are *told* the time; whoever tells them takes it from here.

Deadlines are coarse on purpose: one tick every `TICK` seconds looks at everything in flight, which is several
microseconds cheaper per request than a timer each.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

TICK = 0.1

monotonic = time.monotonic
wall = time.time
sleep = asyncio.sleep
_chance = random.Random(secrets.randbits(128))
random_bits = _chance.getrandbits
"""So many random bits, for trace ids: unique, cheap, and nothing that has to stay secret."""
uniform = _chance.uniform
"""A number between two others, for jitter."""

_background: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """Start background work and hold on to it: asyncio alone keeps only a weak reference."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task


def heard(task: asyncio.Task[Any]) -> None:
    """For work that several wait for and that outlives them (`asyncio.shield`): its failure is told to those who still
    wait. When all of them have left it is nobody's, and asyncio would print it."""
    if not task.cancelled():
        task.exception()


def unguessable(length: int) -> str:
    """Random lower-case hex digits."""
    return secrets.token_hex((length + 1) // 2)[:length]


STEP = 1.0
"""The wall clock is slewed by less than this from one look to the next; more is a step."""


class Steady:
    """Wall time for what is kept: it goes on evenly whatever becomes of the wall clock, follows it where that is
    slewed, and is taken along by whoever has been told of a step (`durable/steps.py`)."""

    def __init__(self) -> None:
        self._offset = wall() - monotonic()
        self.began = wall()
        """The beginning of this run, by this clock."""

    def __call__(self) -> float:
        return self._offset + monotonic()

    def at(self, moment: float) -> float:
        """A moment of the monotonic clock."""
        return self._offset + moment

    def behind(self) -> float:
        """Seconds that the wall clock is ahead."""
        return wall() - self()

    def look(self) -> float | None:
        """Now and then: follow what is slewed. By how much the wall clock was stepped, None when it was not."""
        behind = self.behind()
        if abs(behind) >= STEP:
            return behind
        self._offset += behind
        return None

    def step(self, by: float) -> None:
        self._offset += by
        self.began += by


steady = Steady()


def http_date(seconds: float) -> bytes:
    """The IMF-fixdate form of RFC 9110, for `Date`; written by hand because strftime follows the locale."""
    t = time.gmtime(seconds)
    day = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[t.tm_wday]
    month = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()[t.tm_mon - 1]
    return f"{day}, {t.tm_mday:02d} {month} {t.tm_year} {t.tm_hour:02d}:{t.tm_min:02d}:{t.tm_sec:02d} GMT".encode()


class Watched(Protocol):
    """Something in flight that can run out of time."""

    def check(self, now: float) -> None:
        """Fail if the deadline has passed; called on every tick."""


class Ticker:
    """The one coarse timer. In-flight things are in `watched`; slower chores run every so many ticks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.watched: set[Watched] = set()
        self._chores: list[tuple[int, Callable[[float], None]]] = []
        self._count = 0
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self.on_lag: Callable[[float], None] | None = None

    def every(self, seconds: float, chore: Callable[[float], None]) -> None:
        self._chores.append((max(1, round(seconds / TICK)), chore))

    def start(self) -> None:
        self._due = monotonic() + TICK  # the loop's own time has the same origin, but only milliseconds
        self._handle = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _tick(self) -> None:
        now = monotonic()
        if self.on_lag is not None:
            self.on_lag(now - self._due)
        self.start()
        self._count += 1
        for thing in tuple(self.watched):
            thing.check(now)
        for period, chore in self._chores:
            if self._count % period == 0:
                chore(now)
