"""How the attempts of one request are made: the model, the policies that are shipped, and how they are layered.

Law: a policy in `Settings.policies` is complete. What it does not say itself comes from the shipped policy of the
same name, then from `global_defaults`, then from the defaults written here; nobody has to look anything up later.
`model_fields_set` of such a policy holds the keys of the user's own file, so it still shows who said what.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from config.fields import CodeName, Delay, Flag, Seconds, Section, Share

DEFAULT_POLICY = "default"
DEFAULT_STAGE_ATTEMPTS = 5
"""What a stage gets that `stages` does not name."""

_MOST_ATTEMPTS = 10
_RETRYABLE_4XX = (408, 425, 429)


def _at_least_the_first(given: Any) -> Any:
    # "No retry" is written 0 by those who count retries instead of attempts.
    return 1 if type(given) is int and given == 0 else given


def _retryable_status(status: int) -> int:
    if status not in _RETRYABLE_4XX and not 500 <= status <= 999:
        raise ValueError(
            "only 408, 425, 429 and 500 to 999 may be tried again; any other status is an answer, not a failure"
        )
    return status


Attempts = Annotated[
    int,
    Field(strict=True, ge=1, le=_MOST_ATTEMPTS),
    BeforeValidator(_at_least_the_first, json_schema_input_type=Annotated[int, Field(ge=0, le=_MOST_ATTEMPTS)]),
]
RetryableStatus = Annotated[
    int,
    Field(strict=True),
    AfterValidator(_retryable_status),
    WithJsonSchema({"anyOf": [{"enum": list(_RETRYABLE_4XX)}, {"type": "integer", "minimum": 500, "maximum": 999}]}),
]


class Policy(Section):
    """How the attempts of one request are made."""

    name: str | None = None
    """A name for people. Not set: the key it stands under."""
    description: str | None = None
    """When and why to use this policy."""
    enabled: Flag = True
    """false: one attempt, whatever else is said here."""
    max_attempts: Attempts = 4
    """How often a request is sent at most, the first time included, from 1 (never again) to 10. 0 is read as 1."""
    backoff_type: Literal["exponential", "linear", "fixed", "immediate"] = "exponential"
    """How the wait grows from one attempt to the next. `exponential`: base_delay times multiplier for each failure.
    `linear`: base_delay more for each failure. `fixed`: always base_delay. `immediate`: no wait at all."""
    base_delay: Delay = 0.1
    """The wait before the second attempt, in seconds, before jitter."""
    multiplier: Annotated[float, Field(strict=True, ge=1, le=100, allow_inf_nan=False)] = 2.0
    """What an exponential wait is multiplied by with each failure."""
    min_delay: Delay = 0.0
    """No wait is shorter than this, in seconds, jitter included."""
    max_delay: Delay = 10.0
    """No wait is longer than this, in seconds, jitter included; at least base_delay. Only Retry-After may ask for
    more."""
    jitter_type: Literal["none", "full", "equal", "decorrelated", "additive", "factor"] = "full"
    """How chance spreads the waits of many callers. `full`: the share jitter_amount of the wait is random. `equal`:
    half of that share. `decorrelated`: between base_delay and three times the previous wait. `additive`: between
    jitter_min and jitter_max seconds on top. `factor`: the wait times something between jitter_min and jitter_max, as
    in 0.5 and 1.5 for half to one and a half of it, or 1 and 1.1 for up to a tenth on top. `none`: no chance at all."""
    jitter_amount: Share = 1.0
    """The share of the wait that is random, from 0 to 1, for `full` and `equal`."""
    jitter_min: Delay = 0.0
    """The least that `additive` jitter adds, in seconds; the least that `factor` multiplies with."""
    jitter_max: Delay = 0.0
    """The most that `additive` jitter adds, in seconds; the most that `factor` multiplies with."""
    respect_retry_after: Flag = True
    """Wait at least as long as the upstream's Retry-After says."""
    retry_after_ceiling: Delay = 300.0
    """A Retry-After beyond this many seconds is cut to it."""
    attempt_timeout: Seconds = 30.0
    """How long one attempt may take until the head of the response is complete, in seconds."""
    total_timeout: Seconds = 60.0
    """How long the whole request may take until a response is accepted, waits included, in seconds. Not set: 60, or
    attempt_timeout where that is longer."""
    retry_status_codes: tuple[RetryableStatus, ...] | None = None
    """Only these statuses are tried again: any of 408, 425, 429 and 500 to 999. Not set: the registry of error codes
    decides."""
    retryable_errors: tuple[CodeName, ...] | None = None
    """Only these error codes are tried again. Not set: the registry of error codes decides."""
    retry_non_idempotent: Flag = False
    """Send a POST or PATCH again even though the upstream may have executed it already. Only where executing twice
    does no harm."""


SHIPPED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        DEFAULT_POLICY: {
            "name": "Default",
            "description": "What an upstream gets when nothing else is said.",
        },
        "patient": {
            "name": "Patient",
            "description": "For work in the background: few, long waits.",
            "max_attempts": 5,
            "base_delay": 1.0,
            "multiplier": 2.0,
            "max_delay": 60.0,
        },
        "unhurried": {
            "name": "Unhurried",
            "description": "For deliveries to a provider that has had enough: from a minute to a quarter of an hour.",
            "max_attempts": 5,
            "base_delay": 60.0,
            "multiplier": 2.0,
            "max_delay": 900.0,
            "jitter_amount": 0.1,
            "retry_after_ceiling": 3600.0,
        },
        "NETWORK_TIMEOUT": {
            "name": "After a timeout",
            "description": "An answer that did not come in time is often there at once the next time.",
            "max_attempts": 5,
            "base_delay": 0.1,
            "multiplier": 1.5,
            "max_delay": 5.0,
            "attempt_timeout": 10.0,
        },
        "DATABASE_CONNECTION_ERROR": {
            "name": "Database away",
            "description": "A database takes a while to come back.",
            "max_attempts": 3,
            "base_delay": 1.0,
            "multiplier": 2.0,
            "max_delay": 60.0,
        },
        "RATE_LIMIT_EXCEEDED": {
            "name": "Rate limited",
            "description": "As long as Retry-After says; without one, from a second on.",
            "max_attempts": 3,
            "base_delay": 1.0,
            "multiplier": 2.0,
            "max_delay": 60.0,
            "respect_retry_after": True,
        },
    }
)
"""The policies that always exist, by name, with the keys each of them says itself."""


def complete_policies(given: Mapping[str, Policy], defaults: Policy | None) -> dict[str, Policy]:
    """Every shipped and every given policy, each with all of its keys."""
    common = _said(defaults) if defaults is not None else {}
    nothing = Policy()
    names = dict.fromkeys((*SHIPPED, *given))  # shipped ones first, then in the order of the file
    return {name: _complete(name, given.get(name, nothing), common) for name in names}


def _complete(name: str, own: Policy, common: Mapping[str, Any]) -> Policy:
    said = {**common, **SHIPPED.get(name, {}), **_said(own)}
    values = {key: said.get(key, field.default) for key, field in Policy.model_fields.items()}
    if "total_timeout" not in said:
        # Whoever allows an attempt more than a minute does not mean to cut it off after one.
        values["total_timeout"] = max(values["total_timeout"], values["attempt_timeout"])
    return Policy.model_construct(_fields_set=set(own.model_fields_set), **values)


def _said(policy: Policy) -> dict[str, Any]:
    return {key: getattr(policy, key) for key in Policy.model_fields if key in policy.model_fields_set}
