"""Finished records for tests of what is derived from them: a session is told in one call."""

from __future__ import annotations

from typing import Any

from telemetry.record import NOT_CONNECTED, SENT, Attempt, Decision, Errand, Session

ARRIVED = 1_000.0
OFFSET = 1_700_000_000.0


def wall(monotonic: float) -> float:
    return monotonic + OFFSET


def attempt(
    endpoint: str = "a.test:443",
    *,
    status: int = 0,
    code: str | None = None,
    took: float = 0.1,
    decision: Decision | None = None,
    **facts: Any,
) -> Attempt:
    """`facts` are attributes of the record; `started` and `ended` are set by `session`."""
    made = Attempt(facts.pop("kind", "first"), endpoint, 0.0)
    made.ended = took
    made.status = status
    made.code = code
    made.phase = SENT if status else NOT_CONNECTED
    made.decision = decision
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def session(
    outcome: str,
    *attempts: Attempt,
    method: str = "GET",
    target: str = "/pay/v1/charges",
    status: int | None = None,
    at: float = ARRIVED,
    extra: float = 0.001,
    **facts: Any,
) -> Session:
    """The attempts follow each other, each after its `delay`; `extra` is the time beside them."""
    session_id = facts.pop("session_id", b"5e55107100000001")
    made = Session(session_id, method, target, at)
    if "errand" in facts:
        made = Errand(facts.pop("errand"), session_id, method, target, at)
    made.upstream = "payments"
    made.outcome = outcome
    now = at + facts.get("waited", 0.0)
    for number, each in enumerate(attempts):
        if number and each.kind == "first":
            each.kind = "retry"
        took = each.ended
        now += each.delay
        each.started, each.ended = now, now + took
        now = each.ended
        made.attempts.append(each)
    made.ended = now + extra
    last = attempts[-1] if attempts else None
    made.status = (last.status if last is not None else 0) if status is None else status
    if last is not None and last.code is not None and outcome not in ("recovered", "first_try"):
        made.code, made.message = last.code, last.message
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def healthy(**facts: Any) -> Session:
    return session("first_try", attempt(status=200, took=facts.pop("took", 0.01)), **facts)


def retry(code: str, delay: float, rule: str = "policies.default", remedy: str = "") -> Decision:
    return Decision(delay, code, rule, remedy)


def stop(reason: str, rule: str = "", remedy: str = "") -> Decision:
    return Decision(None, reason, rule, remedy)


def recovered(**facts: Any) -> Session:
    """A 503, a wait, a 200."""
    return session(
        "recovered",
        attempt(status=503, code="TEMPORARY_UNAVAILABLE", decision=retry("TEMPORARY_UNAVAILABLE", 0.2)),
        attempt(status=200, delay=0.2),
        **facts,
    )


def exhausted(**facts: Any) -> Session:
    """Refused twice."""
    return session(
        "exhausted",
        attempt(code="CONNECTION_REFUSED", took=0.001, decision=retry("CONNECTION_REFUSED", 0.1)),
        attempt(
            code="CONNECTION_REFUSED",
            took=0.001,
            delay=0.1,
            message="nothing listens on a.test:443",
            decision=stop("attempts", "policies.default.max_attempts: 2", "a higher max_attempts"),
        ),
        status=502,
        suppressed="attempts",
        **facts,
    )


def lived(told: Any, made: Session) -> Session:
    """`told` hears of a session's attempts as they begin, as the exchange tells of them. Its end is not told."""
    attempts, made.attempts = made.attempts, made.attempts[:1]
    outcome, made.outcome = made.outcome, ""
    for each in attempts[1:]:
        made.attempts.append(each)
        told.attempt_begun(made)
    made.outcome = outcome
    return made
