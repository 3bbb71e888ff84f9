"""How often something happened within the last so many seconds.

Law: pure, told the time. Time is read in ticks, 1/200 of the window each: an event belongs to the tick it falls in and
stops counting 200 ticks later, at once and with its whole tick. Within that grid the count is exact: there is no
estimate and no weighted bucket. An event counts for no longer than the window, and for at most one tick less.
Memory is bounded by one entry per tick. A time before the newest one seen is taken as the newest: clocks do not go
back, but callers may hand in a moment they noted a little earlier.
"""

from __future__ import annotations

from collections import deque

TICKS = 200


class RollingCount:
    """A count that forgets. `add` is on the path of every request: it touches the present tick only."""

    __slots__ = ("_current", "_past", "_past_sum", "_rate", "_tick")

    def __init__(self, window: float) -> None:
        self._rate = TICKS / window
        self._tick = float("-inf")
        self._current = 0
        self._past: deque[tuple[float, int]] = deque()
        """Earlier ticks with something in them, oldest first."""
        self._past_sum = 0
        """The sum of `_past`."""

    def add(self, now: float) -> None:
        tick = now * self._rate // 1
        if tick > self._tick:
            self._advance(tick)
        self._current += 1

    def remove(self, now: float) -> None:
        """One event less, the newest: it turned out not to have been one."""
        if not self.total(now):
            return
        if not self._current:
            self._tick, self._current = self._past.pop()  # its tick is the present one again, until time moves on
            self._past_sum -= self._current
        self._current -= 1

    def total(self, now: float) -> int:
        tick = now * self._rate // 1
        if tick > self._tick:
            self._advance(tick)
        return self._past_sum + self._current

    def clear(self) -> None:
        self._past.clear()
        self._past_sum = self._current = 0

    def _advance(self, tick: float) -> None:
        past = self._past
        if self._current:
            past.append((self._tick, self._current))
            self._past_sum += self._current
            self._current = 0
        self._tick = tick
        oldest = tick - TICKS
        while past and past[0][0] <= oldest:
            self._past_sum -= past.popleft()[1]


class Window:
    """Successes and failures within the last so many seconds."""

    __slots__ = ("failures", "successes")

    def __init__(self, window: float) -> None:
        self.successes = RollingCount(window)
        self.failures = RollingCount(window)

    def ratio(self, now: float) -> float:
        """The share of failures; 0 when nothing happened."""
        failed = self.failures.total(now)
        return failed / (failed + self.successes.total(now)) if failed else 0.0

    def clear(self) -> None:
        self.successes.clear()
        self.failures.clear()
