"""Is it safe to send a dead letter again? One word, and the sentence that explains it.

Law: pure. When in doubt the answer is no: only `safe` promises that a replay cannot have an effect twice. The first
reason that applies wins; they are asked in the order of the lines in `judge`. `until` is when time alone may change
the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from config.durable import Replay
from config.idempotency import Idempotency
from sidecar.policy.resend import READS
from telemetry.record import CONNECTED
from telemetry.timestamps import rfc3339

WORDS = (
    "safe",
    "stale",
    "needs_key",
    "key_window_expired",
    "credential_stale",
    "superseded",
    "unsafe",
    "not_replayable",
)

_OVERWRITES = frozenset({"PUT", "DELETE"})
# Codes with which an upstream says that it looked at the request and did not execute it.
_REFUSED = frozenset(
    "RATE_LIMIT_EXCEEDED QUOTA_EXCEEDED INVALID_API_KEY API_KEY_EXPIRED INSUFFICIENT_PERMISSIONS VALIDATION_ERROR "
    "MALFORMED_JSON UNSUPPORTED_CONTENT_TYPE PAYLOAD_TOO_LARGE NOT_FOUND CONTENT_POLICY VALIDATION_QUEUE_FULL".split()
)


# What the upstream may have done with a request, over all its attempts; the worst of them counts.
EXPOSURES = ("not_sent", "refused", "answered", "unanswered")


def exposure(phase: int, code: str, status: int | None) -> str:
    """Of one failed attempt. `status` is None when no answer came."""
    if phase <= CONNECTED:
        return "not_sent"
    if not status:
        return "unanswered"
    return "refused" if code in _REFUSED else "answered"


def worse(one: str, other: str) -> str:
    return max(one, other, key=EXPOSURES.index)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about a request that failed."""

    method: str
    code: str
    exposure: str
    first_failure_at: float
    last_failure_at: float
    body_problem: str = ""
    """Why the body cannot be sent; empty when it can."""
    keyed: bool = False
    key_honoured: bool = False
    later_call_at: float | None = None
    """When a later call on the same url succeeded."""
    superseded_at: float | None = None
    """When a later call with the same key or the same body succeeded."""
    credential_expires_at: float | None = None


class Verdict(NamedTuple):
    word: str
    sentence: str
    until: float | None = None


def judge(facts: Facts, replay: Replay, idempotency: Idempotency, now: float) -> Verdict:
    if facts.body_problem:
        return Verdict("not_replayable", f"it cannot be sent again: body {facts.body_problem}")
    if facts.superseded_at is not None:
        at = rfc3339(facts.superseded_at)
        return Verdict("superseded", f"a call with the same key or the same body succeeded later, at {at}")
    expires = facts.credential_expires_at if replay.credentials == "sealed" else None
    if expires is not None and expires <= now:
        return Verdict(
            "credential_stale",
            f"its signature or token expired at {rfc3339(expires)}; set `replay.credentials: live` or edit the entry",
        )
    if replay.credentials == "sealed" and facts.code == "API_KEY_EXPIRED":
        return Verdict(
            "credential_stale",
            "the upstream said that its key has expired; set `replay.credentials: live` or edit the entry",
        )
    return _first_change(_by_effect(facts, replay, idempotency, now), expires)


def _first_change(verdict: Verdict, expires: float | None) -> Verdict:
    if expires is None or (verdict.until is not None and verdict.until <= expires):
        return verdict
    return verdict._replace(until=expires)


def _by_effect(facts: Facts, replay: Replay, idempotency: Idempotency, now: float) -> Verdict:
    method = facts.method
    if method in READS:
        return Verdict("safe", f"{method} changes nothing, it can be sent again")
    if method in _OVERWRITES:
        return _overwriting(facts, replay, now)
    if facts.exposure == "not_sent":
        return Verdict("safe", f"nothing was sent, the upstream never saw it ({facts.code})")
    if facts.exposure == "refused":
        return Verdict("safe", f"the upstream refused it without executing it ({facts.code})")
    return _keyed(facts, idempotency, now)


def _overwriting(facts: Facts, replay: Replay, now: float) -> Verdict:
    method = facts.method
    if facts.later_call_at is not None:
        return Verdict(
            "stale", f"a later call changed the same url at {rfc3339(facts.later_call_at)}; {method} would undo it"
        )
    stale_at = facts.last_failure_at + replay.stale_after
    if stale_at <= now:
        return Verdict(
            "stale",
            f"{method} is older than `replay.stale_after` ({replay.stale_after:g} s); the url may have changed since",
        )
    return Verdict("safe", f"{method} has the same effect however often it is sent", stale_at)


def _keyed(facts: Facts, idempotency: Idempotency, now: float) -> Verdict:
    """Something non-idempotent was sent, partly at least."""
    method, header = facts.method, idempotency.header
    if facts.keyed and facts.key_honoured:
        forgotten_at = facts.first_failure_at + idempotency.provider_window
        if now < forgotten_at:
            return Verdict(
                "safe", f"its {header} makes the upstream execute it once, until {rfc3339(forgotten_at)}", forgotten_at
            )
        return Verdict(
            "key_window_expired",
            f"the upstream remembers its {header} for {idempotency.provider_window:g} s "
            f"(`idempotency.provider_window`), which ended at {rfc3339(forgotten_at)}; it may be executed twice",
        )
    if facts.exposure == "unanswered":
        return Verdict(
            "unsafe",
            f"{method} was sent and no answer came ({facts.code}): it may have been executed; ask the upstream",
        )
    if facts.keyed:
        return Verdict(
            "needs_key",
            f"{method} carries {header}, but the upstream is not known to honour it; if it does, set "
            "`idempotency.provider_honours: true`",
        )
    return Verdict(
        "needs_key",
        f"{method} was sent without {header} and failed ({facts.code}): a second one may be executed twice",
    )
