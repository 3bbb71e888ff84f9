"""The facts about one exchange, filled while it runs and read once after the app has its answer.

Law: standard library only, no behaviour, no signals. Every word here (outcome, kind, phase, code, reason) is the
same word in metrics, spans, logs and dead letters.

Times are seconds of the monotonic clock; the offset kept by the proxy turns them into wall time.
"""

from __future__ import annotations

from typing import NamedTuple

# Send phases: how far a request got towards the upstream. Ordered; the first two are safe for every method.
NOT_CONNECTED = 0
CONNECTED = 1
PARTLY_SENT = 2
SENT = 3
PHASE_WORDS = ("not_connected", "connected", "partly_sent", "sent")

GOOD = frozenset({"first_try", "recovered", "deduplicated", "queued", "tunnelled"})
NEUTRAL = frozenset({"rejected", "denied", "cancelled"})
BAD = frozenset({"exhausted", "not_retryable", "budget", "deadline", "breaker_open", "failed_streaming", "internal"})
OUTCOMES = GOOD | NEUTRAL | BAD

ATTEMPT_KINDS = ("first", "retry", "stale", "probe", "replay", "outbox", "reconcile")

# Why a failure that could have been retried was not: the label of `retries_suppressed_total`.
SUPPRESSED = (
    "attempts",
    "stage_budget",
    "budget",
    "not_resendable",
    "body_too_large",
    "memory",
    "response_started",
    "deadline",
    "breaker_open",
    "server_verdict",
    "disabled",
    "draining",
)
# … and why one that could not was not: no retry was suppressed, there was none to make.
FATAL = "fatal"


class Decision(NamedTuple):
    """What was decided after a failed attempt. `delay` is None when the session ends here."""

    delay: float | None
    reason: str
    """Retry: the error code that was retried. End: one of SUPPRESSED, or FATAL."""
    rule: str
    """Where the decision comes from, for a person: `policies.default.max_attempts: 4`, `x-should-retry: false`."""
    remedy: str = ""
    """What would have changed it; empty when nothing the user can set would have."""
    limit: int = 0
    """Retry: how many attempts there may be at most, by the policy that was followed."""
    resend: str = ""
    """Retry: why the request may be sent again."""


class Left(NamedTuple):
    """The app closed its connection in the middle of the answer."""

    at: float
    bytes: int
    """Of the body, that it had been sent."""
    done: bool
    """The stream had said that it is over."""


class Attempt:
    """One try at one endpoint."""

    __slots__ = (
        "address",
        "breaker",
        "code",
        "decision",
        "delay",
        "egress_proxy",
        "ended",
        "endpoint",
        "frames",
        "kind",
        "message",
        "phase",
        "policy_id",
        "reused",
        "span_id",
        "started",
        "status",
        "upstream",
    )

    def __init__(self, kind: str, endpoint: str, started: float) -> None:
        self.kind = kind
        self.endpoint = endpoint
        self.started = started
        self.ended = started
        self.phase = NOT_CONNECTED
        self.reused = False
        self.status = 0
        self.code: str | None = None
        self.message: str | None = None
        self.delay = 0.0
        """Seconds waited before it."""
        self.policy_id = "default"
        """The policy that gave that wait; of a first attempt, the one that gave its timeouts."""
        self.egress_proxy: str | None = None
        self.address: str | None = None
        """The address connected to, once there is one."""
        self.breaker = "closed"
        """State of the endpoint's breaker when the attempt was let through."""
        self.span_id = 0
        self.decision: Decision | None = None
        self.upstream: str | None = None
        """The upstream it went to, when that is not the session's: before a fallback took over."""
        self.frames: str
        """Where the failure was raised, and what it was made of. Set only at `telemetry.log.level: debug`: see
        `frames_of`."""


class Trace(NamedTuple):
    """The trace a session belongs to. Ids are integers; 0 for `parent_id` means the session is the root."""

    trace_id: int
    span_id: int
    parent_id: int
    sampled: bool
    tracestate: bytes = b""


class Session:
    """One request of the app, from its parsed head to its last byte."""

    __slots__ = (
        "api_key_id",
        "attempts",
        "caller_resend",
        "caller_trace",
        "client",
        "code",
        "correlation_id",
        "dlq_id",
        "ended",
        "fallback_from",
        "first_byte",
        "forwarded",
        "host",
        "left",
        "message",
        "method",
        "operation",
        "origin",
        "outcome",
        "policy_id",
        "request_bytes",
        "response_bytes",
        "route",
        "scheme",
        "session_id",
        "stage",
        "started",
        "status",
        "subsystem",
        "suppressed",
        "target",
        "trace",
        "unkept",
        "unprotected",
        "upstream",
        "user_agent",
        "waited",
        "workflow",
    )

    def __init__(self, session_id: bytes, method: str, target: str, started: float) -> None:
        self.session_id = session_id
        self.method = method
        self.target = target
        """As the app wrote it: may hold secrets, so it is redacted by whoever shows it."""
        self.started = started
        self.ended = started
        self.attempts: list[Attempt] = []
        self.upstream = "_none"
        self.outcome = ""
        self.status = 0
        """What the app got; 0 when it got nothing."""
        self.code: str | None = None
        self.message: str | None = None
        self.request_bytes = 0
        self.response_bytes = 0
        self.first_byte = 0.0
        """When the first byte of a streamed answer was there. 0 for answers that went out whole, at the end."""
        self.policy_id = "default"
        self.operation: str | None = None
        self.trace: Trace | None = None
        self.waited = 0.0
        """Seconds in queues: the rate-limit gate, the concurrency limit."""
        self.suppressed: str | None = None
        """The reason, one of SUPPRESSED, why a failure that could have been retried was not."""
        self.caller_resend = False
        self.fallback_from: str | None = None
        """The upstream that was asked for, when its `fallback` answered."""
        self.dlq_id: str | None = None
        self.unkept: str | None
        """Why it should have been kept as a dead letter and was not, in words. Set only then: see `unkept_of`."""
        self.unprotected: str | None
        """Why its key was not checked, or the outbox did not take it. Set only then: see `unprotected_of`."""
        self.left: Left
        """Set only when the app left in the middle of its answer: see `left_of`."""
        self.origin: Trace | None = None
        """Of a replay: the trace in which the request was first made."""
        # Filled only for sessions that are kept (see telemetry/sessions.py), so that healthy ones pay nothing.
        self.forwarded = ""
        """Path and query as sent upstream, where a stripped prefix makes them differ from the target's."""
        self.scheme = ""
        """What it was sent upstream with, http or https, which need not be what the app asked with."""
        self.host = ""
        """`host:port` of the target."""
        self.route: str | None = None
        """The path pattern of its operation."""
        self.subsystem: str | None = None
        self.stage: str | None = None
        self.workflow: str | None = None
        self.correlation_id: str | None = None
        self.client: str | None = None
        """Address of the app."""
        self.caller_trace: str
        """The trace that the app said it belongs to, in hex, where the session has none of its own. Set only then: see
        `trace_id_of`."""
        self.user_agent: str | None = None
        self.api_key_id: str | None = None
        """Keyed hash of the credential, never the credential."""


NEVER_BEGUN = "its connection ended behind a request before it, so it was never sent anywhere"
"""What is said of a request that was pipelined and had no turn."""
NOTHING_KEPT = "DLQ_FULL"
BODY_NOT_KEPT = "DLQ_BODY_NOT_KEPT"


class Errand(Session):
    """What the sidecar sends by itself: `errand` is replay, outbox or reconcile."""

    __slots__ = ("errand",)

    def __init__(self, errand: str, session_id: bytes, method: str, target: str, started: float) -> None:
        super().__init__(session_id, method, target, started)
        self.errand = errand


def not_kept_code(session: Session) -> str | None:
    """What the app is told about a failed request that cannot be replayed; None when it can, or was not to be kept."""
    if unkept_of(session) is None:
        return None
    return BODY_NOT_KEPT if session.dlq_id is not None else NOTHING_KEPT


def trace_id_of(session: Session) -> str | None:
    """In hex: the session's own trace, else the caller's, else that of the request it replays."""
    trace = session.trace or session.origin
    return f"{trace.trace_id:032x}" if trace is not None else getattr(session, "caller_trace", None)


def time_to_first_byte(session: Session) -> float | None:
    """Seconds until the app had the first byte of its answer; None where it got none, or opened a tunnel."""
    if session.first_byte:
        return session.first_byte - session.started
    if not session.status or session.outcome in ("cancelled", "tunnelled"):
        return None
    return session.ended - session.started


def words_of(message: str | None, status: int) -> str:
    """What was said about a failure; an answer with an error status speaks for itself."""
    return message or (f"the upstream answered {status}" if status else "")


def unkept_of(session: Session) -> str | None:
    """None for nearly all of them, which do not pay for saying so."""
    return getattr(session, "unkept", None)


def unprotected_of(session: Session) -> str | None:
    """The same."""
    return getattr(session, "unprotected", None)


def frames_of(attempt: Attempt) -> str | None:
    """The same; as it was raised: may hold secrets, so it is redacted by whoever shows it."""
    return getattr(attempt, "frames", None)


def left_of(session: Session) -> Left | None:
    """The same."""
    return getattr(session, "left", None)
