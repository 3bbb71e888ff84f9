"""The last changes of state of all breakers.

Law: the newest thousand, in memory, whatever else happens. They are kept apart from the events, where a storm of
retries would push out the very change that explains it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from telemetry.signals import Signals

KEPT = 1_000


class Transition(NamedTuple):
    """One change; `at` is wall time."""

    at: float
    upstream: str
    endpoint: str
    from_state: str
    to_state: str
    why: str


class Transitions:
    """`wall_now` says what time it is."""

    def __init__(self, wall_now: Callable[[], float]) -> None:
        self._wall_now = wall_now
        self._kept: deque[Transition] = deque(maxlen=KEPT)

    def follow(self, signals: Signals) -> None:
        """Hear of every change that is told to telemetry. Breakers look up whom to tell at each change, so this holds
        for those that exist already too."""
        tell = signals.breaker_changed

        def tell_and_keep(upstream: str, endpoint: str, from_state: str, to_state: str, why: str = "") -> None:
            self._kept.append(Transition(self._wall_now(), upstream, endpoint, from_state, to_state, why))
            tell(upstream, endpoint, from_state, to_state, why)

        signals.breaker_changed = tell_and_keep  # type: ignore[method-assign]  # the one place all changes pass

    def newest_first(self, upstream: str | None = None) -> list[Transition]:
        return [one for one in reversed(self._kept) if upstream is None or one.upstream == upstream]
