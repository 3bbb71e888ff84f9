"""S1's RetryMetrics with S2's hours: what happened in the last minutes and hours, exactly.

Law: a session counts in the minute in which it ended. Minutes are kept for an hour, hours for a day; a finished minute
is folded into its hour. A healthy session costs three additions. When the wall clock is set, everything stays as long
ago as it was, and is shown by the clock as it is now. Runs on the event loop's thread; told the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from telemetry.record import BAD, GOOD, Session
from telemetry.sessions import retry_count
from telemetry.timestamps import rfc3339

MINUTES = 60
HOURS = 24


class Cell:
    """What one (upstream, policy) did in one span of time."""

    __slots__ = (
        "attempts",
        "bad",
        "duration",
        "failed_attempts",
        "good",
        "healthy",
        "latency",
        "most_attempts",
        "neutral",
        "retries",
        "success_by_attempt",
    )

    def __init__(self) -> None:
        self.healthy = 0  # answered by the only attempt; in none of the counts below, only in the two sums
        self.duration = 0.0
        self.latency = 0.0
        self.good = self.bad = self.neutral = 0
        self.attempts = self.retries = 0
        self.most_attempts = 0
        self.success_by_attempt: Counter[int] = Counter()
        self.failed_attempts: Counter[str] = Counter()

    def add(self, session: Session) -> None:
        outcome, attempts = session.outcome, session.attempts
        if outcome in GOOD:
            self.good += 1
            self.success_by_attempt[len(attempts)] += 1
        elif outcome in BAD:
            self.bad += 1
        else:
            self.neutral += 1
        self.duration += session.ended - session.started
        self.attempts += len(attempts)
        self.retries += retry_count(attempts)
        self.most_attempts = max(self.most_attempts, len(attempts))
        for attempt in attempts:
            self.latency += attempt.ended - attempt.started
            if attempt.code is not None:
                self.failed_attempts[attempt.code] += 1

    def fold(self, other: Cell) -> None:
        self.healthy += other.healthy
        self.duration += other.duration
        self.latency += other.latency
        self.good += other.good
        self.bad += other.bad
        self.neutral += other.neutral
        self.attempts += other.attempts
        self.retries += other.retries
        self.most_attempts = max(self.most_attempts, other.most_attempts)
        self.success_by_attempt.update(other.success_by_attempt)
        self.failed_attempts.update(other.failed_attempts)

    # ---- with the healthy ones -----------------------------------------------------------------------------------

    @property
    def sessions(self) -> int:
        return self.healthy + self.good + self.bad + self.neutral

    @property
    def successes(self) -> int:
        return self.healthy + self.good

    @property
    def all_attempts(self) -> int:
        return self.healthy + self.attempts

    @property
    def most(self) -> int:
        return max(self.most_attempts, 1 if self.healthy else 0)

    @property
    def success_rate(self) -> float | None:
        judged = self.successes + self.bad
        return self.successes / judged if judged else None


Cells = dict[tuple[str, str], Cell]


class Aggregates:
    """`wall(monotonic)` is wall time; `subsystems` names the subsystem of an upstream that is not its own."""

    def __init__(self, wall: Callable[[float], float], subsystems: Mapping[str, str] | None = None) -> None:
        self._wall = wall
        self._offset = wall(0.0)
        self.subsystems: Mapping[str, str] = subsystems or {}
        self._minutes: dict[int, Cells] = {}
        self._hours: dict[int, Cells] = {}
        self._minute = -1
        self._cells: Cells = {}
        self._begin = self._end = float("-inf")  # of the current minute, monotonic

    def observe(self, session: Session) -> None:
        ended = session.ended
        if not self._begin <= ended < self._end:
            self._observe_elsewhere(session)
            return
        key = (session.upstream, session.policy_id)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell()
        attempts = session.attempts
        if session.outcome == "first_try" and len(attempts) == 1:
            cell.healthy += 1
            cell.duration += ended - session.started
            attempt = attempts[0]
            cell.latency += attempt.ended - attempt.started
        else:
            cell.add(session)

    def _observe_elsewhere(self, session: Session) -> None:
        """The first of a new minute, or one that was late."""
        self._follow()
        minute = int((session.ended + self._offset) // 60)
        if minute > self._minute:
            self._turn(minute)
            self.observe(session)
            return
        key = (session.upstream, session.policy_id)
        if minute > self._minute - MINUTES:
            self._minutes.setdefault(minute, {}).setdefault(key, Cell()).add(session)
        if self._minute > minute > (self._minute // 60 - HOURS + 1) * 60 - 1:  # the current minute is folded later
            self._hours.setdefault(minute // 60, {}).setdefault(key, Cell()).add(session)

    def _turn(self, minute: int) -> None:
        """Begin a minute: the one before goes into its hour, and what is too old goes."""
        if self._cells:
            hour = self._hours.setdefault(self._minute // 60, {})
            for key, cell in self._cells.items():
                hour.setdefault(key, Cell()).fold(cell)
        self._minute = minute
        self._cells = self._minutes[minute] = {}
        self._begin = minute * 60 - self._offset
        self._end = self._begin + 60
        for old in [m for m in self._minutes if m <= minute - MINUTES]:
            del self._minutes[old]
        for old in [h for h in self._hours if h <= minute // 60 - HOURS]:
            del self._hours[old]

    def _follow(self) -> None:
        """The wall clock may have been set: then what was counted before is as long ago as it was, to the nearest
        minute, and hour."""
        offset = self._wall(0.0)
        by, self._offset = offset - self._offset, offset
        if self._minute < 0:
            return
        minutes, hours = round(by / 60), round(by / 3600)
        if minutes:
            self._minute += minutes
            self._minutes = {minute + minutes: cells for minute, cells in self._minutes.items()}
            self._hours = {hour + hours: cells for hour, cells in self._hours.items()}
        self._begin = self._minute * 60 - offset
        self._end = self._begin + 60

    # ---- read ----------------------------------------------------------------------------------------------------

    def retry_metrics(self, window: float, now: float) -> dict[str, Any]:
        """RetryMetrics of the last `window` seconds; `now` is monotonic. Up to an hour by minutes, else by hours; the
        current, unfinished one is included, and the answer says which span it covers."""
        self._follow()
        first, cells = self._spans(window, now)
        total = Cell()
        by_policy: dict[str, Cell] = {}
        by_upstream: dict[str, Cell] = {}
        by_subsystem: dict[str, Cell] = {}
        for span in cells:
            for (upstream, policy), cell in span.items():
                total.fold(cell)
                by_policy.setdefault(policy, Cell()).fold(cell)
                by_upstream.setdefault(upstream, Cell()).fold(cell)
                by_subsystem.setdefault(self.subsystems.get(upstream, upstream), Cell()).fold(cell)
        sessions, attempts = total.sessions, total.all_attempts
        success_by_attempt = total.success_by_attempt + Counter({1: total.healthy})
        return {
            "time_window_start": rfc3339(first),
            "time_window_end": rfc3339(now + self._offset),
            "total_sessions": sessions,
            "successful_sessions": total.successes,
            "failed_sessions": total.bad,
            "neutral_sessions": total.neutral,
            "success_rate": total.success_rate,
            "total_attempts": attempts,
            "total_retries": total.retries,
            "average_attempts_per_session": attempts / sessions if sessions else 0.0,
            "max_attempts_in_session": total.most,
            "total_duration": total.duration,
            "average_duration_per_session": total.duration / sessions if sessions else 0.0,
            "avg_latency": total.latency / attempts if attempts else 0.0,
            "success_by_attempt": {str(number): success_by_attempt[number] for number in sorted(success_by_attempt)},
            "failure_by_reason": dict(sorted(total.failed_attempts.items())),
            "by_policy": _broken_down(by_policy),
            "by_subsystem": _broken_down(by_subsystem),
            "by_upstream": _broken_down(by_upstream),
        }

    def timeseries(self, metric: str, window: float, step: float, now: float) -> list[dict[str, Any]]:
        """One point per step, oldest first; a step without traffic is there too. ValueError says what may be asked."""
        of = SERIES.get(metric)
        if of is None:
            raise ValueError(f"metric: {metric!r} is not one of {', '.join(SERIES)}")
        size = 60 if window <= MINUTES * 60 else 3600
        if step < size or step % size:
            raise ValueError(f"step: must be a multiple of {size} seconds for a window of {window:g} seconds")
        self._follow()
        first, _ = self._spans(window, now)
        last = int((now + self._offset) // size)
        points = []
        index, width = int(first // size), int(step // size)
        while index <= last:
            total = Cell()
            for span in range(index, index + width):
                for cell in self._span(size, span):
                    total.fold(cell)
            points.append({"timestamp": rfc3339(index * size), "value": of(total)})
            index += width
        return points

    def _spans(self, window: float, now: float) -> tuple[float, Iterator[Cells]]:
        """Wall time of the first minute or hour of a window, and the cells of all of them."""
        size, most = (60, MINUTES) if window <= MINUTES * 60 else (3600, HOURS)
        last = int((now + self._offset) // size)
        count = max(1, min(most, -int(-window // size)))
        first = last - count + 1
        return first * size, (self._cells_of(size, index) for index in range(first, last + 1))

    def _span(self, size: int, index: int) -> Iterable[Cell]:
        return self._cells_of(size, index).values()

    def _cells_of(self, size: int, index: int) -> Cells:
        if size == 60:
            return self._minutes.get(index, {})
        cells = self._hours.get(index, {})
        if self._cells and index == self._minute // 60:  # the current minute is not in its hour yet
            cells = {key: _copied(cell) for key, cell in cells.items()}
            for key, cell in self._cells.items():
                cells.setdefault(key, Cell()).fold(cell)
        return cells


def _copied(cell: Cell) -> Cell:
    copy = Cell()
    copy.fold(cell)
    return copy


def _broken_down(cells: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "sessions": cell.sessions,
            "success_rate": cell.success_rate,
            "average_attempts": cell.all_attempts / cell.sessions if cell.sessions else 0.0,
            "retries": cell.retries,
        }
        for name, cell in sorted(cells.items())
    }


SERIES: Mapping[str, Callable[[Cell], float | None]] = {
    "sessions": lambda cell: cell.sessions,
    "successes": lambda cell: cell.successes,
    "failures": lambda cell: cell.bad,
    "attempts": lambda cell: cell.all_attempts,
    "retries": lambda cell: cell.retries,
    "success_rate": lambda cell: cell.success_rate,
    "avg_duration": lambda cell: cell.duration / cell.sessions if cell.sessions else None,
    "avg_latency": lambda cell: cell.latency / cell.all_attempts if cell.all_attempts else None,
}
"""What `GET /timeseries?metric=` may ask for."""
