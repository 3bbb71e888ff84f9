"""How many lines of one kind may be written per second.

Law: told the time, decides at once, keeps a bounded number of buckets.
"""

from __future__ import annotations

_MOST_BUCKETS = 1_000


class TokenBuckets:
    """One bucket per key: `burst` at once, `rate` per second after that."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: dict[object, tuple[float, float]] = {}  # key → (tokens, as of)

    def take(self, key: object, now: float) -> bool:
        """Whether one more may pass."""
        tokens, as_of = self._buckets.get(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - as_of) * self._rate)
        if key not in self._buckets and len(self._buckets) >= _MOST_BUCKETS:
            self._buckets.clear()  # keys are closed sets; so many means that they are not, and fairness is moot
        allowed = tokens >= 1
        self._buckets[key] = (tokens - 1 if allowed else tokens, now)
        return allowed
