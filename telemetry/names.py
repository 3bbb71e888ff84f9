"""Every name seen from outside, once: metrics (labels, help, buckets), span attributes, events, log fields.

Law: no other file spells one of these words. They are a contract with dashboards, alert rules and whoever searches
the logs. A counter is named without its `_total`, which the exposition format adds.
"""

from __future__ import annotations

from typing import NamedTuple

from telemetry.record import SUPPRESSED

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
FAST_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
BACKOFF_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ATTEMPTS_BUCKETS = (1, 2, 3, 4, 5, 7, 10)

# ---- closed sets of label values ---------------------------------------------------------------------------------

RESULTS = ("success", "failure")
BREAKER_STATES = ("closed", "open", "half_open")
BREAKER_MOVES = (("closed", "open"), ("open", "half_open"), ("half_open", "closed"), ("half_open", "open"))
SPAN_FATES = ("exported", "dropped_queue_full", "export_failed", "unsampled")
SIGNALS = ("traces", "logs", "metrics")
REPLAY_OUTCOMES = ("completed", "failed", "escalated", "discarded")
DLQ_REJECTIONS = ("full", "disk_error", "too_large")
DLQ_EVICTIONS = ("ttl", "capacity", "corrupt")
LOOKUPS = ("hit", "miss", "conflict", "in_progress")
DELIVERIES = ("delivered", "failed", "reconciled", "unknown")
LEVELS = ("debug", "info", "warn", "error")
COMPONENTS = ("exchange", "admin", "telemetry", "store", "dead_letter", "reload", "loop", "thread")
SUPPRESSED_REASONS = SUPPRESSED
METHODS = frozenset("CONNECT DELETE GET HEAD OPTIONS PATCH POST PUT QUERY TRACE".split())
OTHER_METHOD = "_OTHER"
OTHER = "_other"
"""The upstream label of hosts beyond limits.auto_upstreams, and the endpoint label beyond MOST_ENDPOINTS."""
MOST_ENDPOINTS = 50
"""Of one upstream: with a wildcard in `hosts`, whoever names the host would otherwise create series."""


class Metric(NamedTuple):
    """What a metric is called and what it means."""

    name: str
    kind: str  # counter | gauge | histogram
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    exemplars: bool = False

    @property
    def exposed(self) -> str:
        """The name as dashboards write it."""
        return self.name + "_total" if self.kind == "counter" else self.name


def _counter(name: str, labels: str, text: str) -> Metric:
    return Metric(f"sidecar_{name}", "counter", tuple(labels.split()), text)


def _gauge(name: str, labels: str, text: str) -> Metric:
    return Metric(f"sidecar_{name}", "gauge", tuple(labels.split()), text)


def _histogram(
    name: str, labels: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS, *, exemplars: bool = False
) -> Metric:
    return Metric(f"sidecar_{name}", "histogram", tuple(labels.split()), text, buckets, exemplars)


# ---- what the app sees -------------------------------------------------------------------------------------------

REQUESTS = _counter(
    "requests",
    "upstream method code",
    "Responses the app got, by status (code 0: the app went away before it had one).",
)
SESSIONS = _counter("sessions", "upstream outcome", "Requests of the app, each in exactly one outcome.")
REQUEST_DURATION = _histogram(
    "request_duration_seconds",
    "upstream result",
    "App-visible time from the parsed head to the last byte, retries included.",
    exemplars=True,
)
TIME_TO_FIRST_BYTE = _histogram(
    "time_to_first_byte_seconds", "upstream", "Time until the app had the first byte of an answer that did not fail."
)
OPERATION_SESSIONS = _counter(
    "operation_sessions",
    "upstream operation outcome",
    "Requests that belong to an operation of the configuration, by outcome.",
)
SESSION_ATTEMPTS = _histogram("session_attempts", "upstream", "Attempts made per request.", ATTEMPTS_BUCKETS)
SESSION_BACKOFF = _histogram(
    "session_backoff_seconds", "upstream", "Time per request with no attempt in flight: backoff and queues.",
    BACKOFF_BUCKETS,
)  # fmt: skip
OVERHEAD = _histogram(
    "overhead_seconds", "", "App-visible time minus attempts and backoff: what the sidecar itself costs.", FAST_BUCKETS
)
CALLER_RESENDS = _counter("caller_resends", "upstream", "Requests that were here before: the caller says so, or a key.")
REQUEST_BYTES = _counter("request_bytes", "upstream", "Request body bytes sent by the app.")
RESPONSE_BYTES = _counter("response_bytes", "upstream", "Response body bytes sent to the app.")
TUNNELS = _counter("tunnels", "upstream result", "CONNECT and Upgrade tunnels that ended.")
MALFORMED = _counter(
    "malformed_requests", "reason", "Messages that could not be understood, connections that did not fit."
)
DENIED = _counter("denied", "reason", "Requests refused by the sidecar itself.")

# ---- attempts and retries ----------------------------------------------------------------------------------------

ATTEMPTS = _counter(
    "upstream_attempts", "upstream kind result", "Attempts at an upstream, by kind and by success or error code."
)
ATTEMPT_DURATION = _histogram(
    "upstream_attempt_duration_seconds", "upstream result", "Time of one attempt.", exemplars=True
)
RETRIES = _counter("retries", "upstream reason", "Retries sent, by the error code of the attempt before.")
SUPPRESSED_RETRIES = _counter(
    "retries_suppressed", "upstream reason", "Failures that could have been retried and were not, and why."
)
BUDGET_LEFT = _gauge("retry_budget_remaining_ratio", "upstream", "Share of the retry budget that is left, 0 to 1.")

# ---- breakers ----------------------------------------------------------------------------------------------------

BREAKER_STATE = _gauge("breaker_state", "upstream endpoint state", "1 for the state the breaker is in, else 0.")
BREAKER_TRANSITIONS = _counter(
    "breaker_transitions", "upstream endpoint from_state to_state", "Changes of a breaker's state."
)
BREAKER_REJECTIONS = _counter("breaker_rejections", "upstream", "Calls refused at once because breakers were open.")
BREAKER_PROBES = _counter("breaker_probes", "upstream result", "Attempts let through to test a half-open breaker.")
BREAKER_RATIO = _gauge("breaker_failure_ratio", "upstream", "Share of failures in the window, of the worst endpoint.")
BREAKER_CHANGED = _gauge("breaker_last_transition_timestamp_seconds", "upstream", "When a breaker last changed state.")
BREAKER_WOULD_OPEN = _counter("breaker_would_open", "upstream", "Openings that `monitor_only` kept from happening.")

# ---- dead letters, idempotency, outbox ---------------------------------------------------------------------------

DLQ_ENTRIES = _gauge("dlq_entries", "upstream", "Dead letters waiting.")
DLQ_OLDEST = _gauge(
    "dlq_oldest_entry_timestamp_seconds",
    "upstream",
    "When the oldest waiting dead letter was stored; absent when none.",
)
DLQ_SIZE = _gauge("dlq_size_bytes", "", "Bytes that dead letters take on disk.")
DLQ_CAPACITY = _gauge("dlq_capacity_bytes", "", "Bytes they may take: `dead_letter.max_bytes`.")
DLQ_DISK_FREE = _gauge("dlq_disk_free_bytes", "", "Bytes free on the disk that holds them.")
DLQ_ENQUEUED = _counter("dlq_enqueued", "upstream reason", "Requests stored as dead letters, by error code.")
DLQ_REPLAYED = _counter("dlq_replayed", "upstream outcome", "Replays of dead letters that ended.")
DLQ_REJECTED = _counter("dlq_rejected", "reason", "Loss at the door: requests that could not be stored.")
DLQ_EVICTED = _counter("dlq_evicted", "reason", "Loss after storage: dead letters that were removed unreplayed.")
DLQ_WRITE = _histogram("dlq_write_duration_seconds", "", "Time to write and sync a dead letter.", FAST_BUCKETS)
STORE_KEEPS = _gauge("store_keeps", "", "1 while failed requests can be kept; 0: they are lost, /readyz says why.")
STORE_INCOMPLETE = _gauge("store_incomplete", "", "1 while commits or files are known to be missing in the store.")
IDEMPOTENCY = _counter("idempotency_lookups", "result", "Questions to the idempotency store.")
DLQ_ESCALATED = _counter(
    "dlq_escalated", "upstream", "Replays that met the same fatal error again: somebody has to look."
)
OUTBOX_JOBS = _gauge("outbox_jobs", "state", "Jobs in the outbox.")
OUTBOX_DELIVERIES = _counter("outbox_deliveries", "upstream outcome", "Deliveries of the outbox that ended.")
OUTBOX_VIOLATIONS = _counter(
    "outbox_order_violations", "upstream", "Deliveries found marked as sent without evidence of the provider."
)

# ---- connections and limits --------------------------------------------------------------------------------------

IN_FLIGHT = _gauge("requests_in_flight", "upstream", "Requests and tunnels being served now.")
GATE_WAITING = _gauge("rate_limit_gate_waiting", "upstream", "Requests that wait for a rate limit to reset.")
GATE_PAUSES = _counter("rate_limit_gate_pauses", "upstream", "Times a 429 paused all calls with the same credential.")
DOWNSTREAM_CONNECTIONS = _gauge("downstream_connections", "", "Open connections of the app.")
MEMORY_HELD = _gauge("memory_held_bytes", "kind", "Held for requests under way: bodies, answers, unwritten.")
MEMORY_LIMIT = _gauge("memory_limit_bytes", "", "How much may be held: limits.memory_bytes.")
BODIES_GIVEN_UP = _counter("request_bodies_given_up", "", "Request bodies whose copy for another attempt had to go.")
UPSTREAM_CONNECTIONS = _gauge("upstream_connections", "upstream state", "Connections to an upstream, active or idle.")
UPSTREAM_CONNECTS = _counter("upstream_connects", "upstream result", "Attempts to open a connection to an upstream.")
UPSTREAM_SURPLUS = _counter(
    "upstream_surplus", "upstream", "Connections closed because an upstream sent more than its answer."
)
CONNECTION_WAIT = _histogram(
    "upstream_connection_wait_seconds", "upstream", "Time a request waited for a new connection.", FAST_BUCKETS
)
TLS_VERIFICATION_DISABLED = _gauge(
    "tls_verification_disabled", "upstream", "1 while insecure_skip_verify is on; absent otherwise."
)
INTERCEPTION_DEMOTIONS = _counter(
    "interception_demotions", "upstream", "Clients that pin certificates, let through as an opaque tunnel."
)
TLS_CLIENT_ERRORS = _counter("tls_client_errors", "reason", "Handshakes of the app that failed.")

# ---- the sidecar itself ------------------------------------------------------------------------------------------

LOOP_LAG = _histogram(
    "event_loop_lag_seconds", "", "How late the event loop woke up for a timer.", FAST_BUCKETS
)  # fmt: skip
SPANS = _counter("telemetry_spans", "result", "What became of the spans of finished requests.")
EXPORTS = _counter("telemetry_exports", "signal result", "Batches handed to the collector.")
QUEUE_SIZE = _gauge("telemetry_queue_size", "", "Finished requests waiting to be exported.")
QUEUE_CAPACITY = _gauge("telemetry_queue_capacity", "", "How many may wait before the oldest are dropped.")
LAST_EXPORT = _gauge(
    "telemetry_last_export_success_timestamp_seconds", "signal", "When the collector last took a batch."
)
CONFIG_RELOADS = _counter("config_reloads", "result", "Configuration reloads.")
CONFIG_RELOADED = _gauge("config_last_reload_successful", "", "1 if the configuration last read is the one in use.")
CONFIG_RELOADED_AT = _gauge(
    "config_last_reload_success_timestamp_seconds", "", "When the configuration in use was read."
)
BUILD_INFO = _gauge("build_info", "version revision python_version", "Always 1; the labels say what is running.")
READY = _gauge("ready", "", "1 while new requests are accepted.")
CLOCK_STEPS = _counter("clock_steps", "", "Times the wall clock of the machine was set while the sidecar ran.")
INTERNAL_ERRORS = _counter("internal_errors", "component", "Faults of the sidecar itself.")
LABEL_OVERFLOW = _counter(
    "label_overflow", "label", "Hosts counted as `_other` because limits.auto_upstreams labels were taken."
)
LOG_SUPPRESSED = _counter("log_records_suppressed", "level", "Log lines and records left out: too many, or refused.")

CATALOGUE = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
"""Every metric, in the order of this file."""


class Attribute:
    """Span attributes, of the semantic conventions and our own."""

    METHOD = "http.request.method"
    METHOD_ORIGINAL = "http.request.method_original"
    RESEND_COUNT = "http.request.resend_count"
    STATUS = "http.response.status_code"
    ROUTE = "http.route"
    URL_PATH = "url.path"
    URL_QUERY = "url.query"
    URL_SCHEME = "url.scheme"
    URL_FULL = "url.full"
    SERVER_ADDRESS = "server.address"
    SERVER_PORT = "server.port"
    CLIENT_ADDRESS = "client.address"
    PEER_ADDRESS = "network.peer.address"
    PEER_PORT = "network.peer.port"
    PROTOCOL_VERSION = "network.protocol.version"
    USER_AGENT = "user_agent.original"
    ERROR_TYPE = "error.type"
    SESSION_ID = "sidecar.session.id"
    SESSION_ATTEMPTS = "sidecar.session.attempts"
    SESSION_OUTCOME = "sidecar.session.outcome"
    UPSTREAM = "sidecar.upstream"
    OPERATION = "sidecar.operation"
    POLICY = "sidecar.policy"
    RETRY_REASON = "sidecar.retry.reason"
    RETRY_BACKOFF = "sidecar.retry.backoff_s"
    BREAKER_STATE = "sidecar.breaker.state"
    SEND_PHASE = "sidecar.send_phase"
    DLQ_ID = "sidecar.dlq.id"
    SAMPLING = "sidecar.sampling"
    ATTEMPT_KIND = "sidecar.attempt.kind"
    TUNNEL_SENT = "sidecar.tunnel.bytes_sent"
    TUNNEL_RECEIVED = "sidecar.tunnel.bytes_received"
    TUNNEL_CONNECT = "sidecar.tunnel.connect_s"
    REASON = "reason"
    DELAY = "delay_s"


RETRY_SCHEDULED = "sidecar.retry.scheduled"
"""The span event on the SERVER span for each retry that was decided."""


class Event:
    """`event_name` of log lines and OTLP log records."""

    SESSION = "sidecar.session.completed"
    ACCESS = "sidecar.access"
    ATTEMPT = "sidecar.attempt.ended"
    CONNECTION = "sidecar.upstream.connection"
    CONFIG_STEP = "sidecar.config.step"
    BREAKER = "sidecar.breaker.transition"
    DLQ_ENQUEUED = "sidecar.dlq.enqueued"
    DLQ_REJECTED = "sidecar.dlq.rejected"
    DLQ_REPLAYED = "sidecar.dlq.replayed"
    DLQ_ESCALATED = "sidecar.dlq.escalated"
    OUTBOX_GAVE_UP = "sidecar.outbox.gave_up"
    CONFIG = "sidecar.config.reloaded"
    DEMOTED = "sidecar.interception.demoted"
    SURPLUS = "sidecar.upstream.surplus"
    INTERNAL_ERROR = "sidecar.internal_error"
    TELEMETRY = "sidecar.telemetry"
    SUPPRESSED = "sidecar.log.suppressed"


RETRY_EVENTS = (
    "retry_attempt",
    "retry_success",
    "retry_failure",
    "request_failure",
    "circuit_breaker_opened",
    "circuit_breaker_half_open",
    "circuit_breaker_closed",
    "dead_lettered",
    "replayed",
    "escalated",
    "outbox_gave_up",
    "config_changed",
    "interception_demoted",
)
"""`event_type` of RetryEvent. `retry_failure` is a request that was tried again and failed all the same,
`request_failure` one that was not tried again."""
FAILURES = frozenset({"retry_failure", "request_failure"})


class Field:
    """Fields of a log line, beside the span attributes above."""

    TIMESTAMP = "timestamp"
    SEVERITY = "severity_text"
    SEVERITY_NUMBER = "severity_number"
    EVENT = "event_name"
    BODY = "body"
    TRACE_ID = "trace_id"
    SPAN_ID = "span_id"
    TRACE_FLAGS = "trace_flags"
    ATTEMPTS = "attempts"
