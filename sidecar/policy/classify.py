"""A response status → success, or exactly one error code of the registry.

Law: pure.
"""

from __future__ import annotations

_BY_STATUS = {
    400: "VALIDATION_ERROR",
    401: "INVALID_API_KEY",
    403: "INSUFFICIENT_PERMISSIONS",
    404: "NOT_FOUND",
    408: "EXTERNAL_SERVICE_TIMEOUT",
    409: "CONFLICT",
    410: "NOT_FOUND",
    413: "PAYLOAD_TOO_LARGE",
    415: "UNSUPPORTED_CONTENT_TYPE",
    422: "VALIDATION_ERROR",
    429: "RATE_LIMIT_EXCEEDED",
    451: "CONTENT_POLICY",
    502: "BAD_GATEWAY",
    503: "TEMPORARY_UNAVAILABLE",
    504: "EXTERNAL_SERVICE_TIMEOUT",
    529: "SERVICE_OVERLOADED",
}
# 4xx statuses that speak of the moment, not of the request: a failure of the upstream, not its verdict.
_TRANSIENT_4XX = frozenset({408, 429})


def code_of(status: int) -> str | None:
    """None for success."""
    if status < 400:
        return None
    return _BY_STATUS.get(status) or ("CLIENT_ERROR" if status < 500 else "UPSTREAM_ERROR")


def is_verdict(status: int) -> bool:
    """The upstream understood the request and said no: the caller's business, not a failure."""
    return 400 <= status < 500 and status not in _TRANSIENT_4XX
