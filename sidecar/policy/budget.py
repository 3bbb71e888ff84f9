"""How many retries an upstream may get, so that retries cannot bury it.

Law: pure, told the time. Within the window there are never more retries than `ratio` of its requests, or than
`min_per_second` times the window, whichever is more. A retry is charged when it enters backoff, and a charge is not
given back: a retry that is then not sent was still planned. Requests are first attempts; retries are not among them,
or retries would pay for more retries.
"""

from __future__ import annotations

from config.breaker import RetryBudget as Settings
from sidecar.policy.window import RollingCount


class RetryBudget:
    """The budget of one upstream."""

    __slots__ = ("_floor", "_ratio", "_requests", "_retries", "_window", "request")

    def __init__(self, settings: Settings) -> None:
        self._window = 0.0
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Also while it is in use: what was counted stays, unless it is counted over another `window` now."""
        self._ratio = settings.ratio
        # The allowance must not hang on the last bit of a product such as 0.1 * 30.
        self._floor = settings.min_per_second * settings.window + 1e-9
        if settings.window != self._window:
            self._window = settings.window
            self._requests = RollingCount(settings.window)
            self._retries = RollingCount(settings.window)
            self.request = self._requests.add
            """`request(now)`: a first attempt is sent. Bound, because it is on the path of every request."""

    def try_charge(self, now: float) -> bool:
        """Take one retry out of the budget; False, and nothing taken, when it is spent."""
        if self._retries.total(now) >= self.allowance(now):
            return False
        self._retries.add(now)
        return True

    def allowance(self, now: float) -> int:
        """How many retries the window may hold at this moment."""
        return int(max(self._ratio * self._requests.total(now) + 1e-9, self._floor))

    def remaining(self, now: float) -> float:
        """The share of the allowance that is left, from 0 to 1; 0 when nothing is allowed at all."""
        allowed = self.allowance(now)
        return max(0.0, 1.0 - self._retries.total(now) / allowed) if allowed else 0.0
