"""The record → the fields of a log line, the same for JSON, ECS, text and OTLP.

Law: semantic conventions flat at the top, all attempts below, everything redacted. Runs in the writer's thread.
"""

from __future__ import annotations

from typing import Any

from telemetry.explain import summary
from telemetry.names import Attribute, Field
from telemetry.record import BAD, GOOD, PHASE_WORDS, Attempt, Errand, Session, trace_id_of
from telemetry.redact import Redactor


def level_of(session: Session) -> str:
    """How loudly a session is told: failures, then what went wrong on the way, then the rest. What the sidecar sends by
    itself is sent again by rules of its own, and told aloud when these give up."""
    if isinstance(session, Errand):
        return "warn" if session.outcome in BAD else "info"
    if session.outcome in BAD:
        return "error"
    if session.outcome in GOOD and session.outcome != "queued":
        return "warn"  # recovered, slow, or a tunnel that broke; healthy ones only reach the access log
    return "info"


def session_fields(session: Session, redactor: Redactor) -> dict[str, Any]:
    """One session with all its tries."""
    url, _, query = redactor.url(session.target).partition("?")
    authority, slash, path = url.rpartition("://")[2].partition("/")
    host, _, port = (session.host or authority).rpartition(":")
    fields: dict[str, Any] = {
        Field.BODY: summary(session),
        **trace_fields(session),
        Attribute.SESSION_ID: session.session_id.decode(),
        Attribute.SESSION_OUTCOME: session.outcome,
        Attribute.UPSTREAM: session.upstream,
        Attribute.OPERATION: session.operation,
        Attribute.POLICY: session.policy_id,
        Attribute.METHOD: session.method,
        Attribute.URL_PATH: slash + path,
        Attribute.URL_QUERY: query,
        Attribute.SERVER_ADDRESS: host or port,
        Attribute.SERVER_PORT: int(port) if host and port.isdigit() else None,
        Attribute.CLIENT_ADDRESS: session.client,
        Attribute.STATUS: session.status or None,
        Attribute.ERROR_TYPE: session.code,
        "error.message": redactor.text(session.message) if session.message else None,
        "duration_s": round(session.ended - session.started, 6),
        Attribute.SESSION_ATTEMPTS: len(session.attempts),
        "sidecar.retry.suppressed": session.suppressed,
        Attribute.DLQ_ID: session.dlq_id,
        Field.ATTEMPTS: [
            {
                "n": number,
                "endpoint": redactor.url(attempt.endpoint),
                **({"status": attempt.status} if attempt.status else {}),
                **({"error_type": attempt.code} if attempt.code is not None else {}),
                "duration_s": round(attempt.ended - attempt.started, 6),
                "backoff_s": round(attempt.delay, 6),
            }
            for number, attempt in enumerate(session.attempts, 1)
        ],
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def attempt_fields(session: Session, number: int, attempt: Attempt, redactor: Redactor) -> dict[str, Any]:
    """One try of it, for whoever looks for a fault: how far it came, over which connection, and what was decided."""
    way = "no connection" if attempt.address is None else f"a {'kept' if attempt.reused else 'new'} connection"
    address = attempt.address or ""
    result = attempt.code or attempt.status or "no end of its own"
    decision = attempt.decision
    then = ""
    if decision is not None:
        then = "; no further one" if decision.delay is None else f"; the next one in {decision.delay:.3g} s"
        then += f" ({decision.rule})"
    endpoint = redactor.url(attempt.endpoint)
    body = (
        f"attempt {number} ({attempt.kind}) at {endpoint}: {result} after {attempt.ended - attempt.started:.6f} s, "
        f"{PHASE_WORDS[attempt.phase]}, over {way}{' to ' * bool(address)}{address}{then}"
    )
    fields: dict[str, Any] = {
        Field.BODY: redactor.text(body),
        **trace_fields(session),
        Attribute.SESSION_ID: session.session_id.decode(),
        Attribute.UPSTREAM: attempt.upstream or session.upstream,
        Attribute.ATTEMPT_KIND: attempt.kind,
        Attribute.SEND_PHASE: PHASE_WORDS[attempt.phase],
        Attribute.STATUS: attempt.status or None,
        Attribute.ERROR_TYPE: attempt.code,
        "error.message": redactor.clauses(attempt.message) if attempt.message else None,
        Attribute.BREAKER_STATE: attempt.breaker,
        Attribute.POLICY: attempt.policy_id,
        "n": number,
        "reused": attempt.reused,
        Attribute.PEER_ADDRESS: attempt.address,
        "egress_proxy": attempt.egress_proxy,
    }
    return {name: value for name, value in fields.items() if value is not None}


def trace_fields(session: Session) -> dict[str, str]:
    trace = session.trace
    if trace is None:  # then no span is ours, but the caller's trace may know of this
        known = trace_id_of(session)
        return {} if known is None else {Field.TRACE_ID: known}
    return {
        Field.TRACE_ID: f"{trace.trace_id:032x}",
        Field.SPAN_ID: f"{trace.span_id:016x}",
        Field.TRACE_FLAGS: f"{int(trace.sampled):02x}",
    }
