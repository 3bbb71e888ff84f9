"""Breakers that an operator holds open or closed, as far as a restart and a reload must not forget them.

Law: by upstream and endpoint, in wall time, because no other time outlives the process. A breaker made later, for a
host that is called for the first time since, is held as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sidecar.policy.breaker import OPEN, Breaker


class ForcedState(NamedTuple):
    """Of one breaker. `state` None: held no longer. `until` is wall time, None for until `reset`."""

    upstream: str
    endpoint: str
    state: str | None
    until: float | None
    reason: str


class ForcedStates:
    """All that hold."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], ForcedState] = {}

    def note(self, one: ForcedState) -> None:
        key = _key(one.upstream, one.endpoint)
        if one.state is None:
            self._held.pop(key, None)
        else:
            self._held[key] = one

    def hold(self, breaker: Breaker, upstream: str, endpoint: str, now: float, wall: float) -> None:
        """Put a breaker into the state it was ordered to, for the rest of the time."""
        key = _key(upstream, endpoint)
        one = self._held.get(key)
        if one is None:
            return
        left = math.inf if one.until is None else one.until - wall
        if left <= 0:
            del self._held[key]
        elif one.state == OPEN:
            breaker.force_open(now, one.reason, left)
        else:
            breaker.force_close(now, one.reason, left)


def _key(upstream: str, endpoint: str) -> tuple[str, str]:
    """Which host shares the label `_other` depends on which was called first; each has one endpoint, its name."""
    return (upstream if upstream != "_other" else endpoint, endpoint)
