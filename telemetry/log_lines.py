"""The record → the fields of a log line, the same for JSON, ECS, text and OTLP.

Law: semantic conventions flat at the top, all attempts below, everything redacted. Runs in the writer's thread.
"""

from __future__ import annotations

from typing import Any

from telemetry.explain import summary
from telemetry.names import Attribute, Field
from telemetry.record import BAD, GOOD, Errand, Session, trace_id_of
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
