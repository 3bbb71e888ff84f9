"""What protects an upstream from us and us from it: breaker, retry budget, rate-limit gate.

Plain data; the state machines that follow it are in `sidecar/policy/`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from config.fields import Count, Flag, Length, Rate, Seconds, Section, Share

_Ratio = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]


class Breaker(Section):
    """When calls to an endpoint are refused at once because they would fail, and when they are let through again.
    Each endpoint of an upstream has a breaker of its own."""

    enabled: Flag = True
    """false: calls always go through."""
    failure_ratio: _Ratio = 0.5
    """The share of failures within the window that opens the breaker, above 0 and up to 1."""
    min_volume: Count = 20
    """… with at least this many calls in the window."""
    failure_threshold: Count = 5
    """It also opens after this many failures in a row, while the share of failures is over failure_ratio."""
    failures_in_a_row: Count = 20
    """… or after this many whatever the share is: an upstream that dies after a busy healthy minute. All attempts of
    one request are one call."""
    window: Seconds = 60.0
    """How far back calls count, in seconds."""
    open_for: Seconds = 10.0
    """How long calls are refused before the first probe, in seconds. Doubles each time a probe fails."""
    open_for_max: Seconds = 60.0
    """The longest time without a probe, in seconds; at least open_for."""
    connect_check: Flag = True
    """While it is open because no connection could be made, one is tried each second; when that succeeds probes may go
    at once. Nothing is sent on it."""
    half_open_probes: Count = 1
    """How many probes may be under way at once."""
    success_threshold: Count = 2
    """How many probes must succeed before all calls go through again."""
    slow_after: Seconds | None = None
    """A call that the application gave up on counts as a failure when it had waited this long for a response head, in
    seconds. Not set: it never counts."""
    monitor_only: Flag = False
    """Only count and log when it would have opened; never refuse a call."""


class RetryBudget(Section):
    """How much of the traffic to an upstream may be retries, so that retries cannot bury it."""

    ratio: Share = 0.2
    """Retries may be at most this share of the requests in the window, from 0 to 1."""
    window: Seconds = 10.0
    """How far back requests count, in seconds."""
    min_per_second: Rate = 3.0
    """So many retries per second are always allowed, however little traffic there is."""


class RateLimitGate(Section):
    """After a 429 with a wait, every call with the same credential waits, not only the one that was refused."""

    enabled: Flag = True
    """false: each call finds out for itself."""
    max_queue: Length = 1_000
    """How many calls may wait at the gate; more are refused with OVERLOADED."""
