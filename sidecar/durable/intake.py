"""A failed request → an entry and its secrets, apart.

Law: pure but for the keyed hashes. What may be shown is decided here: headers on the allowlist, redacted texts, ids,
numbers and hashes. Everything else goes into the head that will be sealed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

from config.credentials import is_credential_name
from config.durable import DeadLetter
from config.idempotency import Idempotency
from sidecar import clock
from sidecar.durable import credential
from sidecar.durable.bodies import BodyFile
from sidecar.durable.entry import CONTEXT_KEYS, Answer, Entry, Failure, Fields, host_of, ms, not_kept, shorten
from sidecar.durable.payloads import head_of
from sidecar.durable.rows import Row
from sidecar.durable.seal import Keyring
from sidecar.durable.verdict import EXPOSURES, exposure, worse
from telemetry.record import NOT_CONNECTED, PHASE_WORDS
from telemetry.redact import Redactor

_TRACE_HEADERS = frozenset({"traceparent", "tracestate", "b3", "x-request-id", "x-correlation-id"})
_OVERWRITES = frozenset({"PUT", "DELETE"})

LEAST = 4_000
"""Bytes that an entry takes on disk, whatever is in it."""


@dataclass(frozen=True, slots=True)
class Prints:
    """What makes calls comparable, as keyed hashes."""

    key: bytes | None
    """Method, url and idempotency key: of every caller, because who renews his credentials looks like another one."""
    whole: bytes
    """Caller, method, url and body."""
    url: bytes


def prints_of(
    keyring: Keyring, upstream: str, api_key_id: str, method: str, url: str, body_sha256: str, key: str | None
) -> Prints:
    place = keyring.digest("url", upstream, url)
    return Prints(
        key=None if key is None else keyring.digest("key", method, place, key),
        whole=keyring.digest("whole", api_key_id, method, place, body_sha256),
        url=place,
    )


def short(digest: bytes) -> int:
    """For an index: 64 bits. Whoever finds a match compares the whole afterwards."""
    return int.from_bytes(digest[:8], "big", signed=True)


def sha256_of(body: bytes | BodyFile | None) -> str:
    if body is None:
        return clock.unguessable(64)  # equal to nothing
    return body.sha256 if isinstance(body, BodyFile) else hashlib.sha256(body).hexdigest()


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that has to be written for one failure."""

    row: Row
    head: bytes
    body: bytes | BodyFile | None
    answer: bytes | None

    @property
    def grows(self) -> int:
        inline = len(self.body) if isinstance(self.body, bytes) else 0
        return LEAST + len(self.head) + inline + len(self.answer or b"")


def prepare(
    failure: Failure,
    dlq_id: str,
    body: bytes | BodyFile | None,
    size: int,
    keyring: Keyring,
    rules: DeadLetter,
    idempotency: Idempotency,
    redactor: Redactor,
) -> Prepared:
    """`body` is what is kept of it, `size` how large it was."""
    body_sha256 = sha256_of(body)
    prints = prints_of(
        keyring, failure.upstream, failure.api_key_id, failure.method, failure.url, body_sha256, failure.idempotency_key
    )
    host, first = host_of(failure.url), ms(failure.first_failure_at)
    last = max(first, ms(failure.last_failure_at))  # a wall clock that was set back must not lose the entry
    shown, hidden = split_headers(failure.headers, rules, idempotency, redactor)
    operation = failure.operation or failure.upstream
    entry = Entry(
        dlq_id=dlq_id,
        upstream=failure.upstream,
        host=host,
        operation_type=operation,
        method=failure.method,
        error_class=failure.error_class,
        category=failure.category,
        error_details={
            "error_type": failure.error_type or failure.error_class,
            "error_message": redactor.clauses(failure.error_message),
            "retry_count": max(0, len(failure.attempts) - 1),
        },
        first_failure_at=first,
        last_failure_at=last,
        created_at=first,
        last_attempt=last,
        send_phase=PHASE_WORDS[max((tried.phase for tried in failure.attempts), default=NOT_CONNECTED)],
        exposure=reduce(worse, (exposure(*tried) for tried in failure.attempts), EXPOSURES[0]),
        body={
            "kept": body is not None,
            "size": size,
            "note": "" if body is not None else not_kept(size, rules.max_body_bytes),
        },
        stage=failure.stage,
        workflow=failure.workflow,
        last_stack=shorten(redactor.lines(failure.last_stack)),
        sanitized_context=_context(failure, host, operation, prints, keyring.digest("body", body_sha256), size),
        headers=shown,
        sealed_headers=hidden,
        response=_answer_shown(failure.response, redactor),
        api_key_id=failure.api_key_id,
        idempotency_key=failure.idempotency_key,
        key_injected=failure.key_injected,
        key_honoured=failure.key_honoured,
        credential_expires_at=_whole_ms(credential.expires_at(failure.url, failure.headers)),
        identity=prints.whole.hex(),
    )
    entry.happened(last, "dead_lettered", code=failure.error_class, attempts=len(failure.attempts))
    row = Row(
        seq=0,
        entry=entry,
        key_hash=None if prints.key is None else short(prints.key),
        fingerprint=short(prints.whole),
        url_hash=short(prints.url) if failure.method in _OVERWRITES else None,
        payload_size=0,
    )
    answer = None if failure.response is None else failure.response.body[: rules.max_response_bytes]
    return Prepared(row, head_of(failure.url, failure.headers), body, answer)


def split_headers(
    headers: Fields, rules: DeadLetter, idempotency: Idempotency, redactor: Redactor
) -> tuple[list[list[str]], list[str]]:
    """Those that may be read, and the names of those that may not."""
    allowed = _TRACE_HEADERS | {idempotency.header.lower()} | {name.lower() for name in rules.keep_headers}
    shown, hidden = [], []
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1").lower()
        if name in allowed or (_generally_shown(name) and not is_credential_name(name)):
            shown.append([name, _value_shown(redactor, raw_value)])
        else:
            hidden.append(name)
    return shown, hidden


@lru_cache(1024)  # content types and user agents are few
def _value_shown(redactor: Redactor, value: bytes) -> str:
    return redactor.text(value.decode("latin-1"))


def _generally_shown(name: str) -> bool:
    return name.startswith(("accept", "content-", "x-b3-")) or name == "user-agent"


def _answer_shown(answer: Answer | None, redactor: Redactor) -> dict[str, object] | None:
    if answer is None:
        return None
    fields = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answer.headers}
    return {"status": answer.status, "headers": redactor.headers(fields), "body_bytes": len(answer.body)}


def _context(
    failure: Failure, host: str, operation: str, prints: Prints, body_hash: bytes, size: int
) -> dict[str, object]:
    given = {name: value for name, value in failure.context.items() if name in CONTEXT_KEYS and _plain(value)}
    return {
        **given,
        "host": host,
        "operation": operation,
        "attempts": len(failure.attempts),
        "status": failure.response.status if failure.response is not None else _last_status(failure),
        "request_bytes": size,
        "body_hash": body_hash[:8].hex(),
        "url_hash": prints.url[:8].hex(),
        **({"stage": failure.stage} if failure.stage else {}),
    }


def _whole_ms(seconds: float | None) -> float | None:
    return None if seconds is None else ms(seconds)


def _last_status(failure: Failure) -> int | None:
    statuses: Sequence[int | None] = [tried.status for tried in failure.attempts]
    return statuses[-1] if statuses else None


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 200)
