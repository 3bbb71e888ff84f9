"""Every metric once: name, kind, labels, help.

Law: no other file spells a metric's name. These names are a contract with dashboards and alert rules.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """What a metric is called and what it means."""

    name: str
    kind: str  # counter | gauge | histogram
    labels: tuple[str, ...]
    help: str


LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
FAST_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

REQUESTS = Metric(
    "sidecar_requests",
    "counter",
    ("upstream", "method", "code"),
    "Responses the app got, by status (code 0: the app went away before it had one).",
)
SESSIONS = Metric(
    "sidecar_sessions",
    "counter",
    ("upstream", "outcome"),
    "Requests of the app, each in exactly one outcome.",
)
REQUEST_DURATION = Metric(
    "sidecar_request_duration_seconds",
    "histogram",
    ("upstream", "result"),
    "App-visible time from the parsed head to the last byte.",
)
ATTEMPTS = Metric(
    "sidecar_upstream_attempts",
    "counter",
    ("upstream", "kind", "result"),
    "Attempts at an upstream, by kind and by success or error code.",
)
OVERHEAD = Metric(
    "sidecar_overhead_seconds",
    "histogram",
    (),
    "App-visible time minus the attempts: what the sidecar itself costs.",
)
REQUEST_BYTES = Metric("sidecar_request_bytes", "counter", ("upstream",), "Request body bytes sent by the app.")
RESPONSE_BYTES = Metric("sidecar_response_bytes", "counter", ("upstream",), "Response body bytes sent to the app.")
MALFORMED = Metric("sidecar_malformed_requests", "counter", ("reason",), "Messages that could not be understood.")
DENIED = Metric("sidecar_denied", "counter", ("reason",), "Requests refused by the sidecar itself.")
INTERNAL_ERRORS = Metric("sidecar_internal_errors", "counter", ("component",), "Faults of the sidecar itself.")
LABEL_OVERFLOW = Metric(
    "sidecar_label_overflow",
    "counter",
    ("label",),
    "Hosts counted as `_other` because limits.auto_upstreams labels were taken.",
)
LOOP_LAG = Metric("sidecar_event_loop_lag_seconds", "histogram", (), "How late the event loop woke up for a timer.")
IN_FLIGHT = Metric("sidecar_requests_in_flight", "gauge", ("upstream",), "Requests and tunnels being served now.")
DOWNSTREAM_CONNECTIONS = Metric("sidecar_downstream_connections", "gauge", (), "Open connections of the app.")
UPSTREAM_CONNECTIONS = Metric(
    "sidecar_upstream_connections", "gauge", ("upstream", "state"), "Connections to an upstream, active or idle."
)
UPSTREAM_CONNECTS = Metric(
    "sidecar_upstream_connects", "counter", ("upstream", "result"), "Attempts to open a connection to an upstream."
)
TUNNELS = Metric("sidecar_tunnels", "counter", ("upstream", "result"), "CONNECT and Upgrade tunnels that ended.")
TLS_VERIFICATION_DISABLED = Metric(
    "sidecar_tls_verification_disabled", "gauge", ("upstream",), "1 while insecure_skip_verify is on."
)
READY = Metric("sidecar_ready", "gauge", (), "1 while new requests are accepted.")
BUILD_INFO = Metric(
    "sidecar_build_info", "gauge", ("version", "python_version"), "Always 1; the labels say what is running."
)
