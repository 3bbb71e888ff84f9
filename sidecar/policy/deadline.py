"""How long a request may still take.

Law: pure. A deadline is a moment of the monotonic clock; what does not fit before it is not begun.
"""

from __future__ import annotations

MINIMAL_ATTEMPT = 0.001
"""An attempt with less time than this cannot succeed, so no delay is waited out for one."""


def fits(delay: float, now: float, session_ends: float) -> bool:
    """Whether there is time to wait, and then for an attempt."""
    return now + delay + MINIMAL_ATTEMPT <= session_ends


def left(now: float, session_ends: float) -> float:
    """Seconds until the deadline, never below 0."""
    return max(0.0, session_ends - now)
