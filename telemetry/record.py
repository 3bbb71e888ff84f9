"""The facts about one exchange, filled while it runs and read once after the app has its answer.

Law: standard library only, no behaviour, no signals. Every word here (outcome, kind, phase, code) is the same
word in metrics, spans, logs and dead letters.

Times are seconds of the monotonic clock; `wall_offset` (set once at start) turns them into wall time.
"""

from __future__ import annotations

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


class Attempt:
    """One try at one endpoint."""

    __slots__ = ("code", "ended", "endpoint", "kind", "message", "phase", "reused", "started", "status")

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


class Session:
    """One request of the app, from its parsed head to its last byte."""

    __slots__ = (
        "attempts",
        "client",
        "code",
        "ended",
        "message",
        "method",
        "number",
        "outcome",
        "request_bytes",
        "response_bytes",
        "session_id",
        "started",
        "status",
        "target",
        "trace_id",
        "upstream",
    )

    def __init__(self, session_id: bytes, method: str, target: str, started: float) -> None:
        self.session_id = session_id
        self.method = method
        self.target = target
        self.started = started
        self.ended = started
        self.attempts: list[Attempt] = []
        self.upstream = "_none"
        self.outcome = ""
        self.status = 0
        self.code: str | None = None
        self.message: str | None = None
        self.request_bytes = 0
        self.response_bytes = 0
        self.trace_id: str | None = None
