"""For applications: the sidecar's error answers as an exception.

    response = requests.get("http://127.0.0.1:4140/payments/v1/charges")
    if response.status_code >= 400:
        raise SidecarError.from_response(response)          # requests, httpx

    async with session.get(url) as response:
        if response.status >= 400:
            raise await SidecarError.from_async_response(response)   # aiohttp, and streamed answers of httpx

Law: standard library only and nothing of the sidecar's own, so that an application may import this file or take a copy
of it. Whatever an answer looks like, the result is a `SidecarError` and no other exception. An upstream's own error
that was passed on has the code that the sidecar gave it (`x-sidecar-error-code`) and keeps its status and its body; one
that never passed a sidecar has the code `HTTP_<status>`, unless its body has the same shape as ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

# Another try, later, may succeed: the registry's TRANSIENT codes. A test compares them.
_PASSING = frozenset(
    "DNS_FAILURE CONNECTION_REFUSED CONNECT_TIMEOUT CONNECTION_RESET NETWORK_TIMEOUT PROTOCOL_ERROR "
    "EXTERNAL_SERVICE_TIMEOUT BAD_GATEWAY TEMPORARY_UNAVAILABLE UPSTREAM_ERROR SERVICE_OVERLOADED "
    "DATABASE_CONNECTION_ERROR RATE_LIMIT_EXCEEDED QUOTA_EXCEEDED "
    "CIRCUIT_OPEN RETRY_BUDGET_EXHAUSTED DEADLINE_EXCEEDED OVERLOADED".split()
)
# … and those that pass only sometimes: worth a try when the answer says when.
_CONDITIONAL = frozenset("CONFLICT SLOT_CONFLICT VALIDATION_QUEUE_FULL IDEMPOTENCY_CONFLICT SHUTTING_DOWN".split())
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504, 529})
# What the sidecar says when the same request must not be sent again: it may have been executed, or is refused as such.
_FINAL_OUTCOMES = frozenset({"not_retryable", "rejected"})
_LARGEST_BODY = 1_048_576
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_KEPT = ("retry-after", "date")


class SyncResponse(Protocol):
    """As `requests` and `httpx` have them."""

    @property
    def status_code(self) -> int: ...
    @property
    def headers(self) -> Any: ...
    @property
    def content(self) -> bytes: ...


class SidecarError(Exception):
    """An answer that is an error. Everything the sidecar said about it is an attribute."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        fields = {str(name).lower(): str(value) for name, value in headers.items()}
        fields = {name: value for name, value in fields.items() if name in _KEPT or name.startswith("x-sidecar-")}
        document = _document(body)
        self.status = status
        """Of the answer."""
        self.shaped = isinstance(document.get("error_code"), str)
        """Whether the body has the error shape."""
        said = document["error_code"] if self.shaped else f"HTTP_{status}"
        self.code: str = fields.get("x-sidecar-error-code") or said
        """A word of the registry: `GET /errors/{code}` on the admin port explains it."""
        self.body = body[:_LARGEST_BODY]
        """Of the answer: what the upstream itself says when `by_sidecar` is False. Empty when it was not read."""
        self.document = document
        """The body, when it is a JSON object."""
        self.message = _message(document) or f"the answer has status {status}"
        details = document.get("details") if self.shaped else None
        self.details: dict[str, Any] = details if isinstance(details, dict) else {}
        self.request_id = _text(document.get("request_id")) or fields.get("x-sidecar-session")
        """The session: `sidecar explain REQUEST_ID` tells its story."""
        self.trace_id = _text(document.get("trace_id"))
        self.timestamp = _text(document.get("timestamp"))
        self.documentation_url = _text(document.get("documentation_url"))
        self.by_sidecar = self.shaped and self.request_id == fields.get("x-sidecar-session")
        """True: the sidecar's own answer. False: the upstream's, passed on."""
        self.upstream = fields.get("x-sidecar-upstream") or _text(self.details.get("upstream"))
        self.outcome = fields.get("x-sidecar-outcome") or _text(self.details.get("outcome"))
        self.attempts = _count(fields.get("x-sidecar-attempts"))
        """How often the request was sent; None when the answer does not say."""
        self.dlq_id = fields.get("x-sidecar-dlq-id") or _text(self.details.get("dlq_id"))
        """Set when the request is kept as a dead letter: it can be replayed, and need not be sent by you."""
        self.retry_after = _retry_after(document.get("retry_after"), fields)
        """Seconds to wait before another try, when the answer says so."""
        self._rebuilt_from = (status, fields, self.body)
        known = f" (request {self.request_id})" if self.request_id else ""
        super().__init__(f"{self.code}: {self.message}{known}")

    @property
    def retryable(self) -> bool:
        """Whether the same request, sent again later, may succeed and does no harm. The sidecar has already done what
        it could, so wait for `retry_after`, or some seconds. False for a request that may have been executed: only
        you can find out whether it was."""
        if self.outcome in _FINAL_OUTCOMES:
            return False
        if self.code.startswith("HTTP_"):
            return self.status in _PASSING_STATUS
        return self.code in _PASSING or (self.code in _CONDITIONAL and self.retry_after is not None)

    @classmethod
    def from_response(cls, response: SyncResponse) -> SidecarError:
        """From an answer of `requests` or `httpx`. One that was streamed and not read has no body to look into."""
        status = getattr(response, "status_code", None)
        if status is None:
            raise TypeError(
                f"{type(response).__name__} is not an answer of requests or httpx; "
                "for aiohttp write `await SidecarError.from_async_response(response)`"
            )
        try:
            body = response.content
        except Exception:  # httpx.ResponseNotRead, and whatever a broken connection raises: the head is here
            body = b""
        return cls(int(status), response.headers, body if isinstance(body, bytes) else b"")

    @classmethod
    async def from_async_response(cls, response: Any) -> SidecarError:
        """From an answer of `aiohttp`, or a streamed one of `httpx.AsyncClient`. Reads the body, so do it before the
        answer is released."""
        status = getattr(response, "status_code", None)
        read = response.read if status is None else response.aread
        try:
            body = await read()
        except Exception:  # the connection broke, or the answer was released: the head is here
            body = b""
        return cls(int(response.status if status is None else status), response.headers, body)

    def __reduce__(self) -> tuple[type[SidecarError], tuple[int, dict[str, str], bytes]]:
        """Between processes: task queues pickle what a task raises."""
        return type(self), self._rebuilt_from


def _document(body: bytes) -> dict[str, Any]:
    if not body or len(body) > _LARGEST_BODY:
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _message(document: dict[str, Any]) -> str | None:
    """As we write it, and as most upstreams do: `message`, `error.message` or `error`."""
    error = document.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    return _text(document.get("message")) or _text(inner)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


def _retry_after(said: object, fields: Mapping[str, str]) -> float | None:
    """The body's word, else the header's; a date is measured against the answer's own, so clocks need not agree."""
    if isinstance(said, (int, float)) and not isinstance(said, bool) and 0 <= said < 1e9:
        return float(said)
    value = fields.get("retry-after", "").strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    try:
        until, sent = parsedate_to_datetime(value), parsedate_to_datetime(fields["date"])
        return max(0.0, (until - sent).total_seconds())
    except (KeyError, ValueError, TypeError, OverflowError):
        return None
