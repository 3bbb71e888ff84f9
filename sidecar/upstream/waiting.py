"""Waiting for a turn: at the rate-limit gate of an upstream, or for a place under its `max_in_flight`.

Law: who may go, and in which order, is decided by the pure policies (`policy/gate.py`, `policy/concurrency.py`);
here is only the waiting. Nobody waits past their deadline, and whoever leaves early, by deadline or because the app
went away, leaves no trace.
"""

from __future__ import annotations

import asyncio
import sys

from config.model import Upstream
from sidecar import clock
from sidecar.policy.concurrency import Bulkhead, Place
from sidecar.policy.gate import Gate, Ticket


class OutOfTime(Exception):
    """The deadline came first."""


class Turns:
    """The queues of one upstream."""

    __slots__ = ("_futures", "_loop", "_timer", "bulkhead", "gate")

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: Upstream) -> None:
        self._loop = loop
        self._futures: dict[Ticket | Place, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.gate = Gate(settings.rate_limit_gate)
        self.bulkhead: Bulkhead | None = None
        if settings.max_in_flight is not None:
            self.bulkhead = Bulkhead(settings.max_in_flight, settings.max_queue)

    def under(self, settings: Upstream) -> Turns:
        """The same queues under other settings: whoever stands in one keeps their turn."""
        turns = Turns(self._loop, settings)
        turns._futures = self._futures
        turns.gate = self.gate
        turns.gate.configure(settings.rate_limit_gate)
        if self.bulkhead is not None:
            # Without a limit all who wait may go; those inside give their places back to the old one.
            most = sys.maxsize if settings.max_in_flight is None else settings.max_in_flight
            for place in self.bulkhead.configure(most, settings.max_queue):
                self._wake(place)
            if settings.max_in_flight is not None:
                turns.bulkhead = self.bulkhead
        turns.release()
        return turns

    @property
    def waiting(self) -> int:
        """Calls in either queue."""
        return len(self._futures)

    @property
    def busy(self) -> bool:
        """Somebody waits, or would have to: what can wait had better."""
        return bool(self._futures) or (self.bulkhead is not None and self.bulkhead.full)

    # ---- the gate --------------------------------------------------------------------------------------------

    async def at_gate(self, ticket: Ticket, ends_at: float) -> None:
        """Wait until the ticket is released. Raises OutOfTime."""
        self._set_timer()
        try:
            await self._wait(ticket, ends_at)
        finally:
            self.gate.leave(ticket)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.gate.next_release()
        if due is not None:
            self._timer = self._loop.call_later(max(0.0, due - clock.monotonic()), self._release)

    def _release(self) -> None:
        self._timer = None
        self.release()
        self._set_timer()

    def release(self) -> None:
        """Let those go whose time has come, and forget pauses that nobody waits for."""
        for ticket in self.gate.release(clock.monotonic()):
            self._wake(ticket)

    # ---- places ----------------------------------------------------------------------------------------------

    async def for_place(self, place: Place, ends_at: float) -> None:
        """Wait until the place is granted. Raises OutOfTime; the caller gives the place up then, as in any case."""
        if not place.granted:
            await self._wait(place, ends_at)

    def leave(self, place: Place) -> None:
        """Give a place back; the next in the queue gets it."""
        assert self.bulkhead is not None
        following = self.bulkhead.leave(place)
        if following is not None:
            self._wake(following)

    async def _wait(self, turn: Ticket | Place, ends_at: float) -> None:
        future = self._futures[turn] = self._loop.create_future()
        try:
            async with asyncio.timeout(max(0.0, ends_at - clock.monotonic())):
                await future
        except TimeoutError:
            raise OutOfTime from None
        finally:
            del self._futures[turn]

    def _wake(self, turn: Ticket | Place) -> None:
        future = self._futures.get(turn)
        if future is not None and not future.done():
            future.set_result(None)
