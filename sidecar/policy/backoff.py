"""How long to wait before the next attempt.

Law: pure; chance comes in as `uniform(low, high)`. The raw delay grows as `backoff_type` says and is capped by
`max_delay`; jitter is applied to the capped value; then `min_delay` and, last, `max_delay` hold again. No setting
makes it negative, infinite or an error.
"""

from __future__ import annotations

from collections.abc import Callable

from config.policy import Policy

Uniform = Callable[[float, float], float]


def delay(policy: Policy, failures: int, previous: float, uniform: Uniform) -> float:
    """The wait after the `failures`-th failed attempt, counted from 1. `previous` is the wait before that attempt,
    0 if there was none."""
    kind = policy.jitter_type
    if kind == "decorrelated" and policy.backoff_type != "immediate":
        # It replaces the growth: the next delay is drawn from what the last one was.
        low = policy.base_delay
        wait = uniform(low, max(low, 3.0 * (previous or low)))
    else:
        wait = raw_delay(policy, failures)
        if kind == "full":
            wait = _spread(wait, policy.jitter_amount, uniform)
        elif kind == "equal":
            wait = _spread(wait, policy.jitter_amount / 2.0, uniform)
        elif kind == "additive":
            wait += uniform(policy.jitter_min, policy.jitter_max)
        elif kind == "factor":
            wait *= uniform(policy.jitter_min, policy.jitter_max)
    return min(max(wait, policy.min_delay), policy.max_delay)


def raw_delay(policy: Policy, failures: int) -> float:
    """Before jitter, capped by `max_delay`."""
    kind = policy.backoff_type
    base = policy.base_delay
    if kind == "immediate" or not base:
        return 0.0
    if kind == "exponential":
        try:
            base *= policy.multiplier ** (failures - 1)
        except OverflowError:
            return policy.max_delay
    elif kind == "linear":
        base *= failures
    return min(base, policy.max_delay)


def effective_delay(policy: Policy, backoff: float, retry_after: float | None) -> float:
    """The upstream may ask for a longer wait than the backoff, up to `retry_after_ceiling`, never for a shorter one."""
    if retry_after is None or not policy.respect_retry_after:
        return backoff
    return max(backoff, min(retry_after, policy.retry_after_ceiling))


def _spread(wait: float, share: float, uniform: Uniform) -> float:
    """The part `share` of the wait becomes random; it never gets longer."""
    return wait * (1.0 - share) + uniform(0.0, wait * share)
