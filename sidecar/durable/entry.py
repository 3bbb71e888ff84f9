"""A dead letter: what failed, as far as it may be shown, and everything that happened to it since.

Law: nothing in an Entry is a secret; what is secret is sealed beside it (see deadletter.py). Whoever writes an Entry,
be it the exchange, an operator or an import, goes through `validate`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sidecar import clock
from sidecar.durable.bodies import BodyFile
from sidecar.durable.trouble import BadInput
from sidecar.durable.verdict import EXPOSURES, WORDS, Facts
from sidecar.durable.workflow import KINDS, STATES, STATUSES
from telemetry.record import PHASE_WORDS
from telemetry.timestamps import rfc3339

Fields = Sequence[tuple[bytes, bytes]]

_ID = re.compile(r"dlq_[0-9]{8}_[0-9]{6}_[A-Za-z0-9]{4,40}")
_CLASS = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_METHOD = re.compile(r"[A-Z0-9!#$%&'*+.^_`|~-]{1,32}")
_LONGEST_HISTORY = 100
_LONGEST_NOTES = 200
_LONGEST_TEXT = 4_000
_LONGEST_STACK = 16_000
# The context is for support tickets and chat rooms: ids, numbers and hashes only.
CONTEXT_KEYS = frozenset(
    "request_id trace_id span_id correlation_id host operation attempts status outcome policy_id endpoint "
    "request_bytes response_bytes body_hash url_hash stage workflow server_id request_source".split()
)


class Tried(NamedTuple):
    """One attempt that failed."""

    phase: int
    code: str
    status: int | None
    """None: no answer came."""


class Answer(NamedTuple):
    """What the upstream said last."""

    status: int
    headers: Fields
    body: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that finally failed, as the exchange knows it: secrets included, so it is never stored like this."""

    upstream: str
    method: str
    url: str
    headers: Fields
    attempts: Sequence[Tried]
    error_class: str
    category: str
    error_message: str
    first_failure_at: float
    last_failure_at: float
    body: bytes | BodyFile | None = b""
    """None: not kept."""
    body_size: int = 0
    """Of the whole body, when it was not kept."""
    error_type: str = ""
    operation: str | None = None
    stage: str | None = None
    workflow: str | None = None
    last_stack: str = ""
    context: Mapping[str, object] = field(default_factory=dict)
    response: Answer | None = None
    api_key_id: str = ""
    idempotency_key: str | None = None
    key_injected: bool = False
    key_honoured: bool = False
    dlq_id: str | None = None
    """Given when the body was spooled under it."""


@dataclass(slots=True)
class Entry:
    """One dead letter, without its secrets. Times are wall time in whole milliseconds."""

    dlq_id: str
    upstream: str
    host: str
    operation_type: str
    method: str
    error_class: str
    category: str
    error_details: dict[str, Any]
    first_failure_at: float
    last_failure_at: float
    created_at: float
    last_attempt: float
    send_phase: str
    exposure: str
    body: dict[str, Any]
    """kept, size, note."""
    stage: str | None = None
    workflow: str | None = None
    status: str = "pending"
    state: str = "triage"
    escalated: bool = False
    processed: bool = False
    replayed_at: float | None = None
    replays: int = 0
    occurrences: int = 1
    last_stack: str = ""
    sanitized_context: dict[str, Any] = field(default_factory=dict)
    headers: list[list[str]] = field(default_factory=list)
    """Those on the allowlist."""
    sealed_headers: list[str] = field(default_factory=list)
    """Names of those that are not."""
    response: dict[str, Any] | None = None
    api_key_id: str = ""
    idempotency_key: str | None = None
    key_injected: bool = False
    key_honoured: bool = False
    credential_expires_at: float | None = None
    later_call_at: float | None = None
    superseded_at: float | None = None
    edited: bool = False
    remediation: dict[str, Any] | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    verdict: str = "unsafe"
    sentence: str = ""
    identity: str = ""
    """Hash of what makes two failures the same."""

    def happened(self, at: float, event: str, **facts: object) -> None:
        """Add to the history; the oldest events but the first go when it gets long."""
        self.history.append({"at": ms(at), "event": event, **{k: v for k, v in facts.items() if v is not None}})
        if len(self.history) > _LONGEST_HISTORY:
            del self.history[1]

    def annotate(self, at: float, by: str, text: str) -> None:
        if not text.strip() or len(text) > _LONGEST_TEXT:
            raise BadInput("notes", f"a note has 1 to {_LONGEST_TEXT} characters")
        if len(self.notes) >= _LONGEST_NOTES:
            raise BadInput("notes", f"there are {_LONGEST_NOTES} notes already", "put the rest into the ticket")
        self.notes.append({"at": ms(at), "by": by, "text": text})

    def facts(self) -> Facts:
        return Facts(
            method=self.method,
            code=self.error_class,
            exposure=self.exposure,
            first_failure_at=self.first_failure_at,
            last_failure_at=self.last_failure_at,
            body_problem="" if self.body["kept"] else str(self.body["note"]),
            keyed=self.idempotency_key is not None,
            key_honoured=self.key_honoured,
            later_call_at=self.later_call_at,
            superseded_at=self.superseded_at,
            credential_expires_at=self.credential_expires_at,
        )

    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Entry:
        """Raises TypeError or KeyError when it is not the record of an entry."""
        return cls(**{name: record[name] for name in _NAMES if name in record})

    def shown(self) -> dict[str, Any]:
        """For people and programs: as the record, times as text, internal fields left out."""
        found = self.record()
        del found["identity"], found["exposure"]
        for name in TIMES:
            found[name] = None if found[name] is None else rfc3339(found[name])
        for name in ("history", "notes"):
            found[name] = [{**item, "at": rfc3339(item["at"])} for item in found[name]]
        if self.remediation is not None:
            found["remediation"] = {**self.remediation, "at": rfc3339(self.remediation["at"])}
        return found


_NAMES = tuple(field.name for field in fields(Entry))
TIMES = (
    *("first_failure_at", "last_failure_at", "created_at", "last_attempt", "replayed_at"),
    *("credential_expires_at", "later_call_at", "superseded_at"),
)


def ms(seconds: float) -> float:
    """Whole milliseconds, so that times survive being written as text."""
    return round(seconds, 3)


def new_id(now: float) -> str:
    return time.strftime("dlq_%Y%m%d_%H%M%S_", time.gmtime(now)) + clock.unguessable(8)


def host_of(url: str) -> str:
    """The destination that sealed values are bound to."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise BadInput("url", "this is not an absolute url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("url", "this is not an absolute http or https url")
    host = parts.hostname.lower()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def not_kept(size: int, limit: int) -> str:
    return f"not kept, {_amount(size - limit)} over the limit" if size > limit else "not kept, the disk refused it"


def _amount(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def shorten(text: str, length: int = _LONGEST_STACK) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def validate(entry: Entry) -> None:
    """Raises BadInput with the field that cannot be right."""
    for right, name, message in (
        (_ID.fullmatch(entry.dlq_id), "dlq_id", "must look like dlq_20260129_120000_1a2b3c4d"),
        (entry.operation_type, "operation_type", "must not be empty"),
        (entry.upstream, "upstream", "must not be empty"),
        (_METHOD.fullmatch(entry.method), "method", "must be an HTTP method"),
        (_CLASS.fullmatch(entry.error_class), "error_class", "must be an error code, as in NETWORK_TIMEOUT"),
        (entry.body.keys() >= {"kept", "size", "note"}, "body", "must say kept, size and note"),
    ):
        if not right:
            raise BadInput(name, message)
    for name, words in _CLOSED:
        if getattr(entry, name) not in words:
            raise BadInput(name, f"must be one of {', '.join(words)}")
    for name in ("error_type", "error_message", "retry_count"):
        if name not in entry.error_details:
            raise BadInput(f"error_details.{name}", "is missing")
    retries = entry.error_details["retry_count"]
    if type(retries) is not int or retries < 0:
        raise BadInput("error_details.retry_count", "must be a number, 0 or more")
    if entry.remediation is not None and entry.remediation.get("kind") not in KINDS:
        raise BadInput("remediation.kind", f"must be one of {', '.join(KINDS)}")
    _check_times(entry)


_CLOSED = (
    ("status", STATUSES),
    ("state", STATES),
    ("verdict", WORDS),
    ("exposure", EXPOSURES),
    ("send_phase", PHASE_WORDS),
)


def _check_times(entry: Entry) -> None:
    for name in TIMES:
        value = getattr(entry, name)
        if value is not None and not (isinstance(value, (float, int)) and 0 <= value < 1e11):
            raise BadInput(name, "must be a time")
    if entry.first_failure_at > entry.last_failure_at:
        raise BadInput("last_failure_at", "must not be before first_failure_at")
    if entry.created_at > entry.last_attempt:
        raise BadInput("last_attempt", "must not be before created_at")
    if entry.replayed_at is not None and entry.last_attempt > entry.replayed_at:
        raise BadInput("replayed_at", "must not be before last_attempt")
