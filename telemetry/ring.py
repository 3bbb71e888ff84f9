"""Which finished sessions stay in memory when there are more than may: not simply the newest.

Law: bounded, and no flood of one kind pushes out another. When there are too many, the oldest of the commonest kind
(upstream, outcome, error code) go. What a breaker refuses in one open period is one row: the first, the last, and how
many. The failures that opened a breaker lie apart, where nothing pushes them out but later ones of their sort.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from telemetry.record import Errand, Session

Entry = tuple[int, Session]
_Kind = tuple[str, str, str | None]
_CAUSES_OF_ONE = 20
"""Sessions that are kept as what opened a breaker, before the opening and again after it: those still under way."""
_MOST_PERIODS = 500
_JUST_AFTER = 0.05
CAUSES_LAST = 7
"""How many times longer the failures that opened a breaker are kept."""


class Refusals:
    """What a breaker refused in one open period."""

    __slots__ = ("count", "first", "last", "number")

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self.first = self.last = session
        self.count = 1


class Ring:
    """See the module's law. Entries are numbered in the order they came."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pushed_out = 0
        self.folded = 0
        self._kinds: dict[_Kind, deque[Entry]] = {}
        """None of them is ever empty."""
        self._size = 0
        self._causes: deque[Entry] = deque()
        self._opened: dict[str, tuple[float, int]] = {}
        """Breakers that opened: when, and how many more sessions may have been the cause."""
        self._periods: deque[Refusals] = deque(maxlen=_MOST_PERIODS)
        self._open_periods: dict[str, Refusals] = {}

    def __len__(self) -> int:
        return self._size + len(self._causes) + len(self._periods)

    # ---- in ------------------------------------------------------------------------------------------------------

    def add(self, number: int, session: Session) -> None:
        if session.outcome == "breaker_open" and not session.attempts and not isinstance(session, Errand):
            self._refused(number, session)
        elif self._opened and self._was_a_cause(session):
            self._keep_cause((number, session))
        else:
            self._keep((number, session))

    def opened(self, upstream: str, at: float) -> None:
        """A breaker that was closed has opened: what failed before it is kept as the cause."""
        causes = [
            entry
            for kind, entries in self._kinds.items()
            if kind[0] == upstream
            for entry in list(entries)[-_CAUSES_OF_ONE:]
            if any(attempt.code is not None for attempt in entry[1].attempts)
        ]
        for entry in heapq.nlargest(_CAUSES_OF_ONE, causes)[::-1]:
            self._remove(entry)
            self._keep_cause(entry)
        self._opened[upstream] = (at, _CAUSES_OF_ONE)

    def closed(self, upstream: str) -> None:
        """Its period is over; the next refusal begins another row."""
        self._opened.pop(upstream, None)
        self._open_periods.pop(upstream, None)

    def _refused(self, number: int, session: Session) -> None:
        period = self._open_periods.get(session.upstream)
        if period is not None:
            period.count += 1
            period.last = session
            self.folded += period.count > 2  # the one that was last until now
            return
        period = self._open_periods[session.upstream] = Refusals(number, session)
        self._periods.append(period)

    def _was_a_cause(self, session: Session) -> bool:
        known = self._opened.get(session.upstream)
        if known is None or known[1] == 0:
            return False
        at, left = known
        failed = any(attempt.code is not None and attempt.ended <= at + _JUST_AFTER for attempt in session.attempts)
        if failed:
            self._opened[session.upstream] = (at, left - 1)
        return failed

    def _keep_cause(self, entry: Entry) -> None:
        self._causes.append(entry)
        if len(self._causes) > max(1, self.capacity // 10):
            self._causes.popleft()
            self.pushed_out += 1

    def _keep(self, entry: Entry) -> None:
        session = entry[1]
        kind = (session.upstream, session.outcome, session.code)
        entries = self._kinds.get(kind)
        if entries is None:
            entries = self._kinds[kind] = deque()
        entries.append(entry)
        self._size += 1
        if self._size > self.capacity:
            self._make_room(max(1, self.capacity // 100))

    def _make_room(self, count: int) -> None:
        """By many at once: which kind is the commonest need not be found out for each."""
        while self._size > 0 and (count > 0 or self._size > self.capacity):
            kind, entries = max(self._kinds.items(), key=lambda item: len(item[1]))
            for _ in range(min(max(1, count), max(1, len(entries) // 2))):
                entries.popleft()
                self._size -= 1
                self.pushed_out += 1
                count -= 1
            if not entries:
                del self._kinds[kind]

    def _remove(self, entry: Entry) -> None:
        session = entry[1]
        kind = (session.upstream, session.outcome, session.code)
        self._kinds[kind].remove(entry)
        if not self._kinds[kind]:
            del self._kinds[kind]
        self._size -= 1

    # ---- out -----------------------------------------------------------------------------------------------------

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._make_room(self._size - capacity)

    def expire(self, oldest: float, oldest_cause: float) -> None:
        for kind, entries in tuple(self._kinds.items()):
            while entries and entries[0][1].ended < oldest:
                entries.popleft()
                self._size -= 1
            if not entries:
                del self._kinds[kind]
        while self._causes and self._causes[0][1].ended < oldest_cause:
            self._causes.popleft()
        while self._periods and self._periods[0].last.ended < oldest_cause:
            gone = self._periods.popleft()
            if self._open_periods.get(gone.first.upstream) is gone:
                del self._open_periods[gone.first.upstream]

    def newest_first(self) -> Iterator[Entry]:
        causes = sorted(self._causes, reverse=True, key=_number)
        periods = [(period.number, period.first) for period in reversed(self._periods)]
        kinds = (reversed(entries) for entries in self._kinds.values())
        return heapq.merge(*kinds, causes, periods, key=_number, reverse=True)

    def refusals(self, session: Session) -> Refusals | None:
        """The row that this session is the first or the last of."""
        if session.outcome != "breaker_open":
            return None
        return next((period for period in self._periods if session in (period.first, period.last)), None)

    def lasts(self) -> Iterator[Session]:
        """The last ones of rows, which no list shows."""
        return (period.last for period in self._periods if period.count > 1)

    @property
    def oldest(self) -> float | None:
        """When the oldest ordinary one ended."""
        return min((entries[0][1].ended for entries in self._kinds.values()), default=None)

    @property
    def causes(self) -> int:
        return len(self._causes)


def _number(entry: Entry) -> int:
    return entry[0]
