"""What a delivery of the outbox may do next, and what a job is when its deliveries are in these states.

Law: pure. `started_at` is written before a send and cleared only when it is certain that nothing was executed. Set,
and nothing known: the provider is asked before anything is sent again; where it cannot be asked, only a key that it
honours makes a second send safe; otherwise an operator decides, or `outbox.unknown: resend` has decided beforehand.
Nothing is `failed` before that was tried.

queued → sending → sent | queued | reconcile | failed | unknown;   reconcile → sent | queued | failed | unknown
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from config.durable import NotificationId, Reconcile
from sidecar.durable.entry import Answer
from sidecar.durable.verdict import exposure

STATES = ("queued", "sending", "reconcile", "sent", "failed", "unknown")
JOB_STATES = ("in_progress", "succeeded", "retryable_failed", "failed", "unknown")
_MAYBE_EXECUTED = frozenset({"answered", "unanswered"})


@dataclass(frozen=True, slots=True)
class Facts:
    """A row of the outbox as the rules see it."""

    state: str
    started: bool
    notified: bool
    evidence: bool
    attempts: int
    lookups: int
    ambiguous: bool
    """Some earlier attempt may have been executed."""
    giving_up: bool
    """Only reconciliation is left before it is failed."""


@dataclass(frozen=True, slots=True)
class Means:
    """What can be done about an unknown fate at this upstream."""

    lookup: bool
    key_honoured: bool
    max_attempts: int
    max_lookups: int
    resend: bool = False
    """`outbox.unknown: resend`: what may have been executed is sent again where nothing better is known."""


@dataclass(frozen=True, slots=True)
class Sent:
    """How one send ended."""

    ok: bool
    code: str = ""
    status: int | None = None
    phase: int = 3
    message: str = ""
    fatal: bool = False
    """The error code says that it will fail the same way again."""
    held_back: bool = False
    """The sidecar itself did not let it out: nothing was tried."""
    notification_id: str | None = None
    evidence: str = ""
    """What the provider said, in short."""
    retry_after: float | None = None
    """How many seconds the provider wants to be left alone."""
    answer: Answer | None = None
    """What it said, as far as it was kept."""
    answer_size: int = 0
    """How long the body of the answer was."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the provider says about a delivery: True it has it, False it has not, None it did not say."""

    delivered: bool | None
    notification_id: str | None = None
    evidence: str = ""
    message: str = ""
    retry_after: float | None = None


class Next(NamedTuple):
    """The state to write. `again`: when to look at it again: `now`, `later` (after the backoff), or `never`."""

    state: str
    again: str
    started: bool = False
    ambiguous: bool = False
    giving_up: bool = False


def first_step(facts: Facts, means: Means) -> str:
    """send, reconcile, or none: asked again for a row that was just read."""
    if facts.notified:
        return "none" if facts.evidence else "reconcile"
    if facts.state in ("sent", "failed", "unknown"):
        return "none"
    if facts.started or facts.state == "reconcile":
        return "reconcile"
    return "send"


def after_send(facts: Facts, sent: Sent, means: Means) -> Next:
    """`facts.attempts` counts this one."""
    if sent.ok:
        return Next("sent", "never", started=True)
    if sent.held_back:
        return Next("queued", "later", ambiguous=facts.ambiguous, giving_up=facts.giving_up)
    maybe = exposure(sent.phase, sent.code, sent.status) in _MAYBE_EXECUTED
    ambiguous = facts.ambiguous or maybe
    last = sent.fatal or facts.attempts >= means.max_attempts
    if last:
        return _end(facts, means, ambiguous)
    if not maybe and not facts.ambiguous:
        return Next("queued", "later")
    if means.lookup or means.key_honoured:
        return Next("reconcile", "later", started=True, ambiguous=True)
    if means.resend:
        return Next("queued", "later", ambiguous=True)
    return Next("unknown", "never", started=True, ambiguous=True)


def _end(facts: Facts, means: Means, ambiguous: bool) -> Next:
    """No more sends. Ask the provider once more if it can be asked; else what is certain decides."""
    if means.lookup:
        return Next("reconcile", "now", started=True, ambiguous=ambiguous, giving_up=True)
    if ambiguous:
        return Next("unknown", "never", started=True, ambiguous=True)
    return Next("failed", "never")


def after_lookup(facts: Facts, found: Found | None, means: Means) -> Next:
    """`found` is None when there is nobody to ask."""
    if found is None:
        if facts.giving_up or not (means.key_honoured or means.resend):
            return Next("unknown", "never", started=True, ambiguous=True)
        return Next("queued", "now", ambiguous=True)  # safe under an honoured key, else accepted by who set `resend`
    if found.delivered:
        return Next("sent", "never", started=True)
    if found.delivered is None:
        if facts.lookups >= means.max_lookups and means.resend and not facts.giving_up:
            return Next("queued", "later", ambiguous=True)
        if facts.lookups >= means.max_lookups:
            return Next("unknown", "never", started=True, ambiguous=True, giving_up=facts.giving_up)
        return Next("reconcile", "later", started=True, ambiguous=True, giving_up=facts.giving_up)
    if facts.giving_up:
        return Next("failed", "never")
    return Next("queued", "now")


def job_state(deliveries: Iterable[tuple[str, int]]) -> str:
    """From (state, attempts) of each. What still moves comes first, then what needs somebody."""
    found = list(deliveries)
    states = {state for state, _ in found}
    if states <= {"sent"}:
        return "succeeded"
    if "sending" in states or any(state == "queued" and attempts == 0 for state, attempts in found):
        return "in_progress"
    if states & {"queued", "reconcile"}:
        return "retryable_failed"
    return "unknown" if "unknown" in states else "failed"


def patient_delay(attempts: int) -> float:
    """1 s, doubling, at most 60 s: what S4 asks for where nothing else is set."""
    return float(min(60.0, 2.0 ** min(attempts - 1, 6))) if attempts > 0 else 0.0


# ---- reading a provider's answer -------------------------------------------------------------------------------


def notification_id_of(rule: NotificationId | None, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str | None:
    """The provider's id of a message, None when the rule finds none."""
    if rule is None:
        return None
    if rule.header is not None:
        wanted = rule.header.lower().encode()
        return next((value.decode("latin-1")[:200] for name, value in headers if name.lower() == wanted), None)
    try:
        found: Any = orjson.loads(body)
        for part in (rule.json or "").split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return str(found)[:200] if isinstance(found, (str, int)) else None


def found_by(rule: Reconcile, status: int | None, notification_id: str | None = None) -> Found:
    """What the answer to a lookup means."""
    if status == rule.delivered_when.status:
        return Found(True, notification_id, f"lookup answered {status}")
    if status in (404, 410):
        return Found(False, message=f"lookup answered {status}")
    return Found(None, message=f"lookup answered {status}" if status else "no answer to the lookup")
