"""Events as a person reads them: many of a kind are one line with their number.

Law: pure; told what time it is. Changes of breakers are never folded away: they are apart, the newest of them always in
sight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from telemetry.names import FAILURES

_APART = 30.0
_BREAKER = "circuit_breaker_"

Event = Mapping[str, Any]


class Fold(NamedTuple):
    """Events of one kind: `newest` and `oldest` are when, in seconds since the epoch."""

    event: Event
    """The newest."""
    times: int
    newest: float
    oldest: float

    @property
    def told(self) -> str:
        """`payments: 412 × breaker_open in 30 s`; what it is that happens so often."""
        upstream, kind, why = _key(self.event)
        what = why or kind
        span = self.newest - self.oldest
        within = f" in {ago(span)}" if span >= 1 else ""
        return f"{upstream}: {self.times} × {what}{within}" if upstream else f"{self.count} × {what}{within}"


def folded(events: Iterable[Event]) -> list[Fold]:
    """From events, the newest first, the same."""
    done: list[Fold] = []
    open_ones: dict[tuple[str, str, str], int] = {}
    for event in events:
        key, at = _key(event), moment(event)
        place = open_ones.get(key)
        if place is not None and done[place].oldest - at <= _APART:
            done[place] = done[place]._replace(times=done[place].times + 1, oldest=at)
        else:
            open_ones[key] = len(done)
            done.append(Fold(event, 1, at, at))
    return done


def is_breaker(event: Event) -> bool:
    return str(event.get("event_type", "")).startswith(_BREAKER)


def moment(event: Event) -> float:
    try:
        return datetime.fromisoformat(str(event.get("timestamp", ""))).timestamp()
    except ValueError:
        return 0.0


def ago(seconds: float) -> str:
    """A span in one unit: 7 s, 12 min, 3 h, 5 d."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def _key(event: Event) -> tuple[str, str, str]:
    """Upstream, kind of event, and the outcome or code that makes it another kind."""
    context = event.get("context") or {}
    kind = str(event.get("event_type", ""))
    error = event.get("error") or context.get("last_error") or {}
    why = str(context.get("outcome") or "") if kind in FAILURES else ""
    code = str(error.get("type") or "")
    if kind == "retry_attempt":
        why = f"retry after {code}"
    elif kind in FAILURES and why not in ("", "breaker_open") and code:
        why = f"{why} {code}"
    return str(context.get("upstream") or ""), kind, why
