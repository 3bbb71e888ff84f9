"""Moments as people say them: how long ago, and how long from now."""

from __future__ import annotations

from datetime import UTC, datetime

from sidecar import clock

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def ago(timestamp: str, now: float | None = None) -> str:
    """Of an RFC 3339 time: `3 h ago`, in whole units of the largest that fits."""
    seconds = int(_since(timestamp, now))
    return f"{_counted(seconds)} ago" if seconds >= 1 else "now" if seconds >= -1 else "in the future"


def left(timestamp: str, now: float | None = None) -> str:
    """The same of one to come: `9 min left`."""
    seconds = round(-_since(timestamp, now))
    return f"{_counted(seconds)} left" if seconds >= 1 else "ending"


def distance(timestamp: str, now: float | None = None) -> str:
    """The same of either: `3 h ago`, `in 9 min`."""
    seconds = round(-_since(timestamp, now))
    return ago(timestamp, now) if seconds < 1 else f"in {_counted(seconds)}"


def _since(timestamp: str, now: float | None) -> float:
    moment = datetime.fromisoformat(timestamp)
    at = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return (clock.wall() if now is None else now) - at.timestamp()


def _counted(seconds: int) -> str:
    return next(f"{seconds // size} {unit}" for size, unit in _UNITS if seconds >= size)
