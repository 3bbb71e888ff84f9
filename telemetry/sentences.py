"""The sentences of an explanation: how sessions end, and why a failure was not retried.

Law: data and small functions of the record; no order of events here, that is telemetry/explain.py. Where a decision
brings its own rule and remedy those are used; the ones here stand in when it brings none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from telemetry.record import CONNECTED, FATAL, NEVER_BEGUN, NOT_CONNECTED, PARTLY_SENT, SENT, Attempt, Session
from telemetry.redact import Redactor

ENDINGS = {
    "first_try": "was answered at the first try",
    "recovered": "recovered",
    "deduplicated": "was answered from the idempotency store",
    "queued": "was taken by the outbox",
    "tunnelled": "went through a tunnel",
    "rejected": "was rejected by the upstream",
    "denied": "was refused by the sidecar",
    "cancelled": "was given up by the app",
    "exhausted": "failed",
    "not_retryable": "failed and may not be sent again",
    "budget": "failed with the retry budget spent",
    "deadline": "failed with no time left for a retry",
    "breaker_open": "was refused by an open breaker",
    "failed_streaming": "broke off in the middle of the answer",
    "internal": "failed inside the sidecar",
}


def seconds(value: float) -> str:
    """A duration as a person says it: 1.25 s, 340 ms, 0.4 ms."""
    if value >= 1:
        return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"
    return f"{round(value * 1000, 3):.3g} ms"


def ending(session: Session) -> str:
    """How it ended, in a few words."""
    if session.outcome == "breaker_open" and session.attempts:
        return "failed and was kept from a retry by an open breaker"
    if session.outcome == "deadline" and not session.attempts:
        return "failed with no time left for an attempt"
    if session.outcome == "tunnelled" and session.code is not None:
        return "went through a tunnel that broke"
    if session.outcome == "denied" and 0 < session.status < 400:
        return "was answered by the sidecar itself"
    if session.outcome == "cancelled" and session.message == NEVER_BEGUN:
        return "was never begun"
    return ENDINGS.get(session.outcome, session.outcome)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


_MOST_ATTEMPTS = 10  # as many as a policy may allow
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
HOW_FAR = {
    NOT_CONNECTED: "there was no connection and nothing was sent",
    CONNECTED: "there was a connection but nothing was written",
    PARTLY_SENT: "the request was sent in part",
    SENT: "the request was sent whole and no answer came",
}
REASON_OF = {
    "not_retryable": "not_resendable",
    "exhausted": "attempts",
    "budget": "budget",
    "deadline": "deadline",
    "rejected": FATAL,
}


class Telling(NamedTuple):
    """Why a session was not retried."""

    what: str
    rule: str
    remedy: str


def _last(session: Session) -> Attempt | None:
    return session.attempts[-1] if session.attempts else None


def _not_resendable(session: Session) -> Telling:
    last = _last(session)
    sent = "body fully sent" if last is not None and last.phase > PARTLY_SENT else "partly sent"
    return Telling(
        f"{session.method}, {sent}, no Idempotency-Key, so it may have been executed.",
        "what may have been executed is sent again only if it is idempotent",
        "an Idempotency-Key header from the app, or retry_non_idempotent: true in the policy",
    )


def _no_attempts_left(session: Session) -> Telling:
    last = _last(session)
    policy = last.policy_id if last is not None else session.policy_id
    made = sum(attempt.kind != "stale" for attempt in session.attempts)
    if last is not None and last.decision is not None and last.decision.rule.startswith("x-sidecar-max-attempts"):
        return Telling(f"the app asked for at most {counted(made, 'attempt')}.", last.decision.rule, "")
    more = f"a higher max_attempts in policy {policy}" if made < _MOST_ATTEMPTS else ""
    return Telling(
        f"policy {policy} allows one attempt only." if made < 2 else f"policy {policy} allows {made} attempts.",
        f"policies.{policy}.max_attempts",
        more if last is None or last.code is None else CURES.get(last.code, more),
    )


CURES = {
    "DNS_FAILURE": "a name that resolves (look at `endpoints` and the name server): more attempts do not cure that",
    "CONNECTION_REFUSED": "something that listens at that address and port: more attempts only bridge a restart",
}
"""What would help with failures that no number of attempts heals."""

REASONS: dict[str, Callable[[Session], Telling]] = {
    "attempts": _no_attempts_left,
    "stage_budget": lambda s: Telling(
        f"workflow {s.workflow or '(none)'} has used up the attempts of stage {s.stage or '(none)'}.",
        f"stages.{s.stage}" if s.stage else "stages",
        "a higher number for this stage under `stages`, or a new workflow id",
    ),
    "budget": lambda s: Telling(
        f"the retry budget of {s.upstream} is spent: too many of its requests are retries already.",
        f"upstreams.{s.upstream}.retry_budget",
        "an upstream that fails less, or a higher retry_budget.ratio",
    ),
    "not_resendable": _not_resendable,
    "body_too_large": lambda s: Telling(
        f"the request body ({s.request_bytes:,} bytes) was larger than what is kept for sending again.",
        "limits.replay_body_bytes",
        "a higher limits.replay_body_bytes",
    ),
    "memory": lambda s: Telling(
        f"memory was short, so the copy of the request body ({s.request_bytes:,} bytes) was given up.",
        "limits.memory_bytes",
        "a higher limits.memory_bytes, or fewer large bodies at a time",
    ),
    "response_started": lambda s: Telling(
        "the app had already got the first bytes of the answer.",
        "after the first byte of an answer nothing is sent again",
        "an answer with a Content-Length of at most limits.buffer_response_bytes is completed first and can be retried",
    ),
    "deadline": lambda s: Telling(
        "the wait would not have fitted into the time left.",
        f"policies.{s.policy_id}.total_timeout",
        "a longer total_timeout, or an x-sidecar-timeout header",
    ),
    "breaker_open": lambda s: Telling(
        f"no endpoint of {s.upstream} was let through by its breaker.",
        f"upstreams.{s.upstream}.breaker",
        "another endpoint, a `fallback` upstream, or `sidecar breakers reset` once the upstream is well",
    ),
    "server_verdict": lambda s: Telling(
        "the upstream itself said that a retry is of no use.",
        "x-should-retry: false",
        "only the upstream can change its verdict",
    ),
    "disabled": lambda s: Telling(
        "retries are switched off.",
        "retries_enabled, policies.….enabled or x-sidecar-retry: off",
        "retries_enabled: true, `POST /retries/enable`, or leaving out x-sidecar-retry",
    ),
    "draining": lambda s: Telling(
        "the sidecar was shutting down.",
        "no retry is begun during a drain",
        "",
    ),
    FATAL: lambda s: Telling(
        f"{(_last(s) or s).code} is final, the same request would fail the same way.",
        f"the error registry: {(_last(s) or s).code} is fatal",
        f"what `GET /errors/{(_last(s) or s).code}` says under resolution",
    ),
}


def _failures(count: int) -> str:
    return "the failure" if count == 1 else f"the {counted(count, 'failure')}"


def unnamed(session: Session, redactor: Redactor) -> str:
    return f"The session ended as {session.outcome or 'unfinished'}."


def _answer(session: Session) -> str:
    return f"The app got {session.status}" if session.status else "The app got no answer"


def _with_reason(session: Session, redactor: Redactor) -> str:
    message = redactor.text(session.message or "").rstrip(".")
    return f"{session.code}" + (f": {message}" if message else "")


def _failed(session: Session, redactor: Redactor) -> str:
    last = _last(session)
    passed_on = last is not None and last.status and last.status == session.status
    source = "the upstream's own answer, passed on" if passed_on else "an answer of the sidecar"
    return f"{_answer(session)}, {source}: {_with_reason(session, redactor)}. The outcome is {session.outcome}."


def _cancelled(session: Session, redactor: Redactor) -> str:
    if session.message == NEVER_BEGUN:
        return f"It was never begun: {NEVER_BEGUN}. It can be sent again without any danger."
    return f"The app went away after {seconds(session.ended - session.started)}, and everything was stopped."


def _tunnelled(session: Session, redactor: Redactor) -> str:
    carried = (
        f"{session.request_bytes:,} bytes there and {session.response_bytes:,} back in "
        f"{seconds(session.ended - session.started)}"
    )
    if session.code is None:
        return f"The tunnel carried {carried}. What was inside cannot be seen."
    return f"The tunnel broke after {carried}: {_with_reason(session, redactor)}. What was inside cannot be seen."


def _denied(session: Session, redactor: Redactor) -> str:
    if 0 < session.status < 400:  # the one answer of ours that is no refusal
        return f"The sidecar answered it itself with {session.status}: Max-Forwards was 0, so it went no further."
    return f"The sidecar refused it with {session.status}: {_with_reason(session, redactor)}."


def _breaker_open(session: Session, redactor: Redactor) -> str:
    if session.attempts:
        return _failed(session, redactor)
    return f"{_answer(session)} at once, without a call: {_with_reason(session, redactor)}."


LEFT_SERVED = {
    True: (
        "The app closed its connection when it had been sent the last event (`data: [DONE]`): it had all that it asked "
        "for, so this is no cancelled call."
    ),
    False: (
        "The app closed its connection a moment before the upstream ended the answer: hardly anything was missing, so "
        "this is no cancelled call."
    ),
}
"""By whether the stream had said that it is over."""

LAST_WORDS: dict[str, Callable[[Session, Redactor], str]] = {
    "first_try": lambda s, r: f"The app got {s.status} after {seconds(s.ended - s.started)}.",
    "recovered": lambda s, r: (
        f"The app got {s.status} and saw nothing of {_failures(sum(a.code is not None for a in s.attempts))}."
    ),
    "deduplicated": lambda s, r: (
        f"The app got the stored answer ({s.status}) to the same idempotency key; nothing was sent."
    ),
    "queued": lambda s, r: "The outbox took the request; the app got 202 and does not wait.",
    "tunnelled": _tunnelled,
    "rejected": lambda s, r: f"The app got the upstream's verdict, {s.status}: {_with_reason(s, r)}.",
    "denied": _denied,
    "cancelled": _cancelled,
    "breaker_open": _breaker_open,
    "failed_streaming": lambda s, r: (
        f"The answer ({s.status}) broke off after {s.response_bytes:,} bytes; the app saw a broken connection, never a "
        f"short answer that looks whole: {_with_reason(s, r)}."
    ),
    "internal": lambda s, r: (
        f"The sidecar itself failed: {_with_reason(s, r)}. This is a fault to report; the log has the frames."
    ),
    **dict.fromkeys(("exhausted", "not_retryable", "budget", "deadline"), _failed),
}
