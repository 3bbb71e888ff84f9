"""Moments as people say them: how long ago."""

from __future__ import annotations

from datetime import UTC, datetime

from sidecar import clock

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def ago(timestamp: str, now: float | None = None) -> str:
    """Of an RFC 3339 time: `3 h ago`, in whole units of the largest that fits."""
    moment = datetime.fromisoformat(timestamp)
    at = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    seconds = int((clock.wall() if now is None else now) - at.timestamp())
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return "now" if seconds >= -1 else "in the future"
