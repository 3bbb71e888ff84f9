"""Numbers that are valid each but not together: delays, timeouts, jitter, breaker times, queues.

Pure, like `config/checks.py`, whose list it belongs to. A policy is judged complete, with what the shipped policy
and `global_defaults` gave it, but the finger points at a key that somebody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from config.contradiction import Contradiction, KeyPath
from config.policy import SHIPPED, Policy

if TYPE_CHECKING:
    from config.model import Settings


def number_problems(settings: Settings) -> Iterator[Contradiction]:
    """Every pair of numbers that cannot both be meant."""
    yield from _policies(settings)
    yield from _upstreams(settings)


_BOUNDED = ("additive", "factor")


class _Pair(NamedTuple):
    """Two keys of one policy that do not go together: the first is the one to point at."""

    key: str
    other: str
    message: str


def _policies(settings: Settings) -> Iterator[Contradiction]:
    common = settings.global_defaults
    for key, other, message in (*_wrong_pairs(common), *_cut_attempts(common, common.model_fields_set)):
        place: KeyPath = ("global_defaults",)
        yield Contradiction((*place, key), message, ((*place, key), (*place, other)))
    for name, policy in settings.policies.items():
        own = policy.model_fields_set
        by_itself = own | SHIPPED.get(name, {}).keys()
        found = (*_wrong_pairs(policy), *_cut_attempts(policy, own | common.model_fields_set), *_idle_jitter(policy))
        for key, other, message in found:
            if key not in by_itself and other not in by_itself:
                continue  # all of it stands in `global_defaults`, and was told there
            place = ("policies", name)
            common_keys = (("global_defaults", key), ("global_defaults", other))
            yield Contradiction((*place, key), message, ((*place, key), (*place, other), *common_keys))


def _wrong_pairs(policy: Policy) -> Iterator[_Pair]:
    if policy.max_delay < policy.base_delay:
        message = f"must be at least base_delay ({policy.base_delay:g}); raise it, or lower base_delay"
        yield _Pair("max_delay", "base_delay", message)
    if policy.min_delay > policy.max_delay:
        message = f"must be at most max_delay ({policy.max_delay:g}); lower it, or raise max_delay"
        yield _Pair("min_delay", "max_delay", message)
    if policy.jitter_max < policy.jitter_min:
        message = f"must be at least jitter_min ({policy.jitter_min:g}); raise it, or lower jitter_min"
        yield _Pair("jitter_max", "jitter_min", message)

    if policy.jitter_type == "factor" and policy.jitter_max == 0:
        message = "must be more than 0 with `jitter_type: factor`, as in 1.5: every wait is multiplied by it"
        yield _Pair("jitter_max", "jitter_type", message)


def _cut_attempts(policy: Policy, said: set[str]) -> Iterator[_Pair]:
    # Only where somebody wrote both: a default that is cut short by what was written harms nobody.
    if {"attempt_timeout", "total_timeout"} <= said and policy.attempt_timeout > policy.total_timeout:
        message = (
            f"one attempt may not take longer than all of them (total_timeout: {policy.total_timeout:g}); "
            "raise total_timeout, or lower it"
        )
        yield _Pair("attempt_timeout", "total_timeout", message)


def _idle_jitter(policy: Policy) -> Iterator[_Pair]:
    for key in ("jitter_min", "jitter_max"):
        if key in policy.model_fields_set and getattr(policy, key) > 0 and policy.jitter_type not in _BOUNDED:
            message = (
                f"only counts with `jitter_type: additive` or `factor` (here it is {policy.jitter_type}); set that, or "
                "remove it"
            )
            yield _Pair(key, "jitter_type", message)


def _upstreams(settings: Settings) -> Iterator[Contradiction]:
    for name, upstream in settings.upstreams.items():
        place = ("upstreams", name)
        breaker = upstream.breaker
        if breaker.open_for_max < breaker.open_for:
            path: KeyPath = (*place, "breaker", "open_for_max")
            message = f"must be at least open_for ({breaker.open_for:g}); raise it, or lower open_for"
            yield Contradiction(path, message, (path, (*place, "breaker", "open_for")))
        if upstream.max_queue and upstream.max_in_flight is None:
            path = (*place, "max_queue")
            message = "nothing ever waits without `max_in_flight`; set how many may be under way at once"
            yield Contradiction(path, message, (path, (*place, "max_in_flight")))
