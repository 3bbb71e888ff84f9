"""What happened to one request, told so that nobody has to guess.

Law: from the record alone, one plain sentence per step, with the rule that decided and what would have changed it.
The sentences are for people; the words in them (codes, reasons, outcomes) are those of the metrics. Nothing secret:
addresses and messages pass through the redactor.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from telemetry.record import (
    CONNECTED,
    GOOD,
    NOT_CONNECTED,
    Attempt,
    Decision,
    Session,
    left_of,
    trace_id_of,
    unkept_of,
    unprotected_of,
)
from telemetry.redact import Redactor
from telemetry.sentences import (
    HOW_FAR,
    IDEMPOTENT,
    LAST_WORDS,
    LEFT_SERVED,
    REASON_OF,
    REASONS,
    Telling,
    counted,
    ending,
    seconds,
    unnamed,
)
from telemetry.sessions import Wall
from telemetry.timestamps import rfc3339

_WORTH_TELLING = 0.001
_WITH_ITS_BODY = "a higher dead_letter.max_body_bytes"
_A_WELL_STORE = "what `GET /readyz` says under store"
_LET_THROUGH = "a longer x-sidecar-timeout, with which it would have waited, or `rate_limit_gate: {enabled: false}`"


class Step(NamedTuple):
    """One thing that happened. `at` is in seconds since the request arrived."""

    at: float
    what: str
    rule: str = ""
    remedy: str = ""


def explain(session: Session, redactor: Redactor, slow: float = inf) -> list[Step]:
    """The whole story, in order. `slow` is the threshold above which sessions are kept for their duration alone."""
    return _Story(session, redactor, slow).steps()


def as_json(session: Session, redactor: Redactor, slow: float = inf) -> list[dict[str, Any]]:
    """For `GET /sessions/{id}`."""
    return [
        {
            "step": number,
            "at": round(step.at, 6),
            "what": step.what,
            "rule": step.rule or None,
            "remedy": step.remedy or None,
        }
        for number, step in enumerate(explain(session, redactor, slow), 1)
    ]


def as_text(session: Session, redactor: Redactor, slow: float = inf, wall: Wall | None = None) -> str:
    """For `sidecar explain`. With `wall` also when it was by the clock on the wall."""
    lines = [summary(session), *(() if wall is None else (_when(session, wall),)), ""]
    for step in explain(session, redactor, slow):
        lines.append(f"{'+' + seconds(step.at):>10}  {step.what}")
        if step.rule:
            lines.append(f"{'':>12}decided by: {step.rule}")
        if step.remedy:
            lines.append(f"{'':>12}what would change it: {step.remedy}")
    return "\n".join(lines) + "\n"


def _when(session: Session, wall: Wall) -> str:
    """From when to when, and the ids that join it to logs and traces."""
    began, ended = rfc3339(wall(session.started)), rfc3339(wall(session.ended))
    same_day = began[:10] == ended[:10]
    text = f"{began[:10]} {began[11:-1]} to {ended[11:-1] if same_day else f'{ended[:10]} {ended[11:-1]}'} UTC"
    trace_id = trace_id_of(session)
    trace = "" if trace_id is None else f", trace {trace_id}"
    return f"{text}, session {session.session_id.decode()}{trace}"


def summary(session: Session) -> str:
    """The story in one line, for logs and lists."""
    name = "no upstream" if session.upstream == "_none" else session.upstream
    if session.operation:
        name += f" {session.operation}"
    made = len(session.attempts)
    tries = f" after {counted(made, 'attempt')}" if made > 1 and session.outcome != "first_try" else ""
    what = f"{session.method} to {name} {ending(session)}{tries}"
    result = session.code or (str(session.status) if session.status else "")
    if session.suppressed is not None and session.attempts:
        result += f", not retried: {session.suppressed}"
    return f"{what}, {seconds(session.ended - session.started)}" + (f" ({result})" if result else "")


class _Story:
    def __init__(self, session: Session, redactor: Redactor, slow: float) -> None:
        self._session = session
        self._slow = slow
        self._redactor = redactor
        self._steps: list[Step] = []
        self._now = 0.0

    def steps(self) -> list[Step]:
        self._arrival()
        attempts = self._session.attempts
        for number, attempt in enumerate(attempts, 1):
            self._attempt(number, attempt)
            last = number == len(attempts)
            if attempt.code is not None:
                self._decision(attempt, None if last else attempts[number])
        self._ending()
        return self._steps

    def _tell(self, what: str, rule: str = "", remedy: str = "") -> None:
        text = self._redactor.text
        self._steps.append(Step(self._now, what, text(rule), text(remedy)))

    # ---- arrival ---------------------------------------------------------------------------------------------

    def _arrival(self) -> None:
        session = self._session
        if session.method == "CONNECT":
            self._tell(f"The app asked for a tunnel to {self._redactor.url(session.target)}.")
        else:
            operation = f", operation {session.operation}" if session.operation else ""
            stage = f", stage {session.stage}" if session.stage else ""
            asked_for = session.fallback_from or session.upstream
            where = "no upstream" if asked_for == "_none" else f"upstream {asked_for}"
            self._tell(
                f"{session.method} {self._redactor.url(session.target)} arrived for {where}{operation}{stage}, "
                f"under policy {session.policy_id}."
            )
        if session.caller_resend:
            self._tell(
                "It was here before: its client library says so, or the same idempotency key came in lately.",
                remedy="a client library that does not retry by itself: its retries come on top of the sidecar's",
            )
        if session.waited >= _WORTH_TELLING:
            self._tell(
                f"It waited {seconds(session.waited)} in a queue before an attempt could begin.",
                rule="rate_limit_gate (a 429 paused calls with the same credential) or max_in_flight",
                remedy="a higher rate limit at the provider, or a higher max_in_flight",
            )

    # ---- attempts --------------------------------------------------------------------------------------------

    def _attempt(self, number: int, attempt: Attempt) -> None:
        session = self._session
        self._now = attempt.started - session.started
        before = session.attempts[number - 2].upstream if number > 1 else session.fallback_from
        if session.fallback_from is not None and before is not None and before != attempt.upstream:
            taker = attempt.upstream or session.upstream
            self._tell(
                f"Every endpoint of {before} was refused by its breaker, so its fallback {taker} took the call.",
                rule=f"upstreams.{before}.fallback: {taker}",
            )
        via = f" through {self._redactor.url(attempt.egress_proxy)}" if attempt.egress_proxy else ""
        probing = ", let through as a probe of the half-open breaker," if attempt.breaker == "half_open" else ""
        kind = "" if attempt.kind in ("first", "retry", "probe", "stale") else f" ({attempt.kind})"
        reused = " on a kept-alive connection" if attempt.reused else ""
        took = seconds(attempt.ended - attempt.started)
        start = f"Attempt {number}{kind} to {self._redactor.url(attempt.endpoint)}{via}{reused}{probing}"
        self._tell(f"{start} {self._came_out(attempt, took)}.")

    def _came_out(self, attempt: Attempt, took: str) -> str:
        code, status = attempt.code, attempt.status
        if code == "CLIENT_DISCONNECTED":
            return f"was under way for {took} when the app went away"
        if code is None:
            return f"was answered with {status} after {took}" if status else f"was connected after {took}"
        message = self._redactor.text(attempt.message or "").rstrip(".")
        why = f"{code} ({message})" if message else code
        if not status:
            return f"failed after {took}, {HOW_FAR[attempt.phase]}: {why}"
        if self._session.outcome == "failed_streaming":
            return f"was answered with {status} and broke off after {took}: {why}"
        return f"was answered with {status} after {took}: {why}"

    # ---- decisions -------------------------------------------------------------------------------------------

    def _decision(self, attempt: Attempt, following: Attempt | None) -> None:
        self._now = attempt.ended - self._session.started
        decision = attempt.decision
        if following is not None and following.kind == "stale":
            self._tell(
                "The kept-alive connection had died before any byte of an answer, so the request was sent again "
                "at once on a fresh one. This does not count as a retry.",
                rule="a stale connection is replaced once, when the request may be resent",
            )
        elif following is not None:
            self._retried(attempt, following, decision)
        elif self._session.outcome == "cancelled":
            if decision is not None and decision.delay is not None:
                wait = seconds(decision.delay)
                self._tell(f"To be retried after {wait}, but the app went away during the wait.", decision.rule)
        elif self._session.outcome == "failed_streaming":
            self._not_retried("response_started", decision)
        elif decision is not None:
            self._not_retried(decision.reason, decision)
        elif self._session.suppressed is not None:
            self._not_retried(self._session.suppressed, None)
        elif self._session.outcome in ("not_retryable", "exhausted", "budget", "deadline", "rejected"):
            self._not_retried(REASON_OF[self._session.outcome], None)

    def _retried(self, attempt: Attempt, following: Attempt, decision: Decision | None) -> None:
        elsewhere = following.endpoint != attempt.endpoint
        where = f" at another endpoint, {self._redactor.url(following.endpoint)}" if elsewhere else ""
        wait = f"after {seconds(following.delay)}" if following.delay > 0 else "at once"
        self._tell(
            f"Retried {wait}{where}: {attempt.code} is worth a retry, and the request may be sent again "
            f"({self._why_resendable(attempt)}).",
            rule=decision.rule if decision is not None else f"policies.{following.policy_id}",
            remedy=decision.remedy if decision is not None else "",
        )

    def _why_resendable(self, attempt: Attempt) -> str:
        if attempt.phase == NOT_CONNECTED:
            return "nothing had been sent"
        if attempt.phase == CONNECTED:
            return "not a byte of it had been written"
        if attempt.status == 429:
            return "a 429 says it was not executed"
        if self._session.method in IDEMPOTENT:
            return f"{self._session.method} is idempotent"
        if attempt.decision is not None and attempt.decision.resend:
            return attempt.decision.resend
        return "it has an idempotency key that the provider honours, or the policy allows it"

    def _not_retried(self, reason: str, decision: Decision | None) -> None:
        known = REASONS.get(reason)
        telling = known(self._session) if known is not None else Telling(f"{reason}.", "", "")
        what, rule, remedy = telling
        if decision is not None:
            remedy = decision.remedy or remedy
            if reason == "not_resendable" and decision.rule:
                what = f"{decision.rule}, so it may have been executed."  # the rule is the fact; ours is the principle
            else:
                rule = decision.rule or rule
        self._tell(f"Not retried: {what}", rule, remedy)

    # ---- ending ----------------------------------------------------------------------------------------------

    def _ending(self) -> None:
        session = self._session
        if session.first_byte and session.first_byte < session.ended:
            self._now = session.first_byte - session.started
            self._tell(f"The first byte of the answer was there after {seconds(self._now)}; the rest was streamed.")
        self._now = session.ended - session.started
        rule = remedy = ""
        if session.outcome == "breaker_open" and not session.attempts:
            _, rule, remedy = REASONS["breaker_open"](session)
        elif session.outcome == "deadline" and not session.attempts and session.code == "RATE_LIMIT_EXCEEDED":
            rule, remedy = "rate_limit_gate: after a 429 all calls with the same credential wait", _LET_THROUGH
        elif session.outcome == "denied" and session.code is not None:
            remedy = f"what `GET /errors/{session.code}` says under resolution"
        self._tell(LAST_WORDS.get(session.outcome, unnamed)(session, self._redactor), rule, remedy)
        if session.outcome == "first_try" and self._now > self._slow:
            self._tell(
                f"It is kept because it took longer than {seconds(self._slow)}, although nothing went wrong.",
                rule=f"telemetry.slow_threshold: {self._slow:g}",
            )
        left = left_of(session)
        if left is not None and session.outcome in GOOD:
            self._tell(LEFT_SERVED[left.done])
        for why in (unprotected_of(session), unkept_of(session)):
            if why is not None and why is unkept_of(session) and session.dlq_id is not None:
                self._tell(
                    f"{why[0].upper()}{why[1:]}.",
                    remedy=_WITH_ITS_BODY if "max_body_bytes" in why else _A_WELL_STORE,
                )
            elif why is not None:
                self._tell(
                    f"The store did not help: {self._redactor.text(why)}.",
                    remedy=_A_WELL_STORE,
                )
        if session.dlq_id is not None and unkept_of(session) is None:
            self._tell(
                f"The request is kept as dead letter {session.dlq_id}: `sidecar dlq show {session.dlq_id}` tells "
                "whether it may be sent again, and how.",
                rule=f"upstreams.{session.upstream}.dead_letter",
            )
