"""Jobs and deliveries as rows.

Law: functions of a connection, for the writer's thread. A delivery is unique per (subject, recipient, version) and a
job per idempotency key, by constraint. Recipients are personal data: they are sealed with the request, and only
their keyed hash is in a column. Every change of a delivery settles the state of its jobs in the same transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from sidecar.durable.bodies import BodyFile
from sidecar.durable.delivery import Facts, Next, job_state
from sidecar.durable.entry import Answer, Fields
from sidecar.durable.seal import Keyring
from sidecar.durable.trouble import OtherPayload

_COLUMNS = (
    "id, subject, version, upstream, host, send_key, state, boot, attempts, lookups, next_at, ambiguous, giving_up, "
    "first_started_at, started_at, notified_at, notification_id, evidence, last_error, request, body, body_file, "
    "own_key"
)
_ENDED = ("succeeded", "failed")


@dataclass(frozen=True, slots=True)
class Row:
    """A delivery as it is stored."""

    id: int
    subject: str
    version: int
    upstream: str
    host: str
    send_key: str
    state: str
    boot: str | None
    attempts: int
    lookups: int
    next_at: float | None
    ambiguous: int
    giving_up: int
    first_started_at: float | None
    started_at: float | None
    notified_at: float | None
    notification_id: str | None
    evidence: str | None
    last_error: str | None
    request: bytes
    body: bytes | None
    body_file: str | None
    own_key: int
    """The request has a key of the app's own; `send_key` is not used."""

    def facts(self) -> Facts:
        return Facts(
            state=self.state,
            started=self.started_at is not None,
            notified=self.notified_at is not None,
            evidence=self.evidence is not None,
            attempts=self.attempts,
            lookups=self.lookups,
            ambiguous=bool(self.ambiguous),
            giving_up=bool(self.giving_up),
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery opened, for sending or looking up."""

    id: int
    subject: str
    recipient: str
    version: int
    upstream: str
    host: str
    method: str
    url: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    body_file: str | None
    send_key: str
    """The idempotency key for the provider, derived from (subject, recipient, version)."""
    attempts: int
    notification_id: str | None = None
    """The provider's own id of it, where it has named one."""


def load(connection: sqlite3.Connection, delivery: int) -> Row | None:
    found = connection.execute(f"SELECT {_COLUMNS} FROM deliveries WHERE id = ?", (delivery,)).fetchone()
    return None if found is None else Row(*found)


def of_job(connection: sqlite3.Connection, job_id: str) -> list[Row]:
    statement = f"SELECT {_COLUMNS} FROM deliveries JOIN job_deliveries ON delivery = id WHERE job_id = ? ORDER BY id"
    return [Row(*found) for found in connection.execute(statement, (job_id,))]


def opened(keyring: Keyring, row: Row) -> Delivery:
    """Raises Damaged."""
    head: dict[str, Any] = orjson.loads(keyring.open("delivery", row.host, row.send_key, row.request))
    body = b"" if row.body is None else keyring.open("body", row.host, row.send_key, row.body)
    return Delivery(
        id=row.id,
        subject=row.subject,
        recipient=head["recipient"],
        version=row.version,
        upstream=row.upstream,
        host=row.host,
        method=head["method"],
        url=head["url"],
        headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]],
        body=body,
        body_file=row.body_file,
        send_key=row.send_key,
        attempts=row.attempts,
        notification_id=row.notification_id,
    )


def head_shown(keyring: Keyring, row: Row) -> tuple[str, str, str]:
    """Recipient, method and url, as they were handed in. Raises Damaged."""
    head: dict[str, Any] = orjson.loads(keyring.open("delivery", row.host, row.send_key, row.request))
    return head["recipient"], head["method"], head["url"]


def sealed_answer(keyring: Keyring, row: Row, answer: Answer, size: int, most: int) -> bytes:
    """What the provider said, with at most so many bytes of its body; `size` is how many there were. Its cookies are
    for whoever asked, who has long gone."""
    headers = [
        [name.decode("latin-1"), value.decode("latin-1")]
        for name, value in answer.headers
        if not name.lower().startswith(b"set-cookie")
    ]
    head = orjson.dumps({"status": answer.status, "headers": headers, "size": max(size, len(answer.body))})
    return keyring.seal("answer", row.host, row.send_key, head + b"\n" + answer.body[:most])


def opened_answer(keyring: Keyring, row: Row, sealed: bytes) -> tuple[dict[str, Any], bytes]:
    """Status, headers and size, and the body as far as it was kept. Raises Damaged."""
    head, _, body = keyring.open("answer", row.host, row.send_key, sealed).partition(b"\n")
    return orjson.loads(head), body


def answers_of(connection: sqlite3.Connection, job_id: str) -> dict[int, bytes]:
    """By delivery, sealed; of those that have one."""
    statement = (
        "SELECT id, answer FROM deliveries JOIN job_deliveries ON delivery = id WHERE job_id = ? AND answer IS NOT NULL"
    )
    return dict(connection.execute(statement, (job_id,)).fetchall())


def keep_answer(connection: sqlite3.Connection, delivery: int, sealed: bytes) -> None:
    connection.execute(
        "UPDATE deliveries SET size = size + ? - coalesce(length(answer), 0), answer = ? WHERE id = ?",
        (len(sealed), sealed, delivery),
    )


def jobs_of(connection: sqlite3.Connection, delivery: int) -> list[str]:
    found = connection.execute("SELECT job_id FROM job_deliveries WHERE delivery = ?", (delivery,)).fetchall()
    return [job_id for (job_id,) in found]


def first_of_job(connection: sqlite3.Connection, job_id: str) -> tuple[Row | None, int]:
    """The first delivery, for a list, and how many there are."""
    count, first = connection.execute(
        "SELECT count(*), min(delivery) FROM job_deliveries WHERE job_id = ?", (job_id,)
    ).fetchone()
    return (None if first is None else load(connection, first)), count


def head_of(recipient: str, method: str, url: str, headers: Fields) -> bytes:
    lines = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    return orjson.dumps({"recipient": recipient, "method": method, "url": url, "headers": lines})


def insert(
    connection: sqlite3.Connection,
    *,
    subject: str,
    recipient_hash: bytes,
    version: int,
    upstream: str,
    host: str,
    send_key: str,
    own_key: bool,
    payload_hash: bytes,
    request: bytes,
    body: bytes | None,
    file: BodyFile | None,
    now: float,
) -> tuple[int, bool]:
    """Its number, and whether it is new: the same intent is one row, whoever asks. Raises OtherPayload."""
    size = 500 + len(request) + len(body or b"") + (file.stored if file is not None else 0)
    cursor = connection.execute(
        "INSERT OR IGNORE INTO deliveries (subject, recipient_hash, version, upstream, host, send_key, state, next_at, "
        "request, body, body_file, own_key, payload_hash, size) "
        "VALUES (?, ?, ?, ?, ?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?)",
        (
            subject,
            recipient_hash,
            version,
            upstream,
            host,
            send_key,
            now,
            request,
            body,
            None if file is None else file.name,
            own_key,
            payload_hash,
            size,
        ),
    )
    if cursor.rowcount:
        if file is not None:
            connection.execute("INSERT INTO body_files VALUES (?, ?)", (file.name, file.stored))
        return int(cursor.lastrowid or 0), True
    found, payload = connection.execute(
        "SELECT id, payload_hash FROM deliveries WHERE subject = ? AND recipient_hash = ? AND version = ?",
        (subject, recipient_hash, version),
    ).fetchone()
    if payload not in (None, payload_hash):
        raise OtherPayload(
            f"version {version} of {subject!r} for this recipient was handed in before with another request",
            "another request needs a higher version",
        )
    return int(found), False


def same_payloads(connection: sqlite3.Connection, job_id: str, asked: dict[bytes, bytes]) -> bool:
    """Whether a job was handed in with these requests, by the hash of their recipient. Older rows do not tell."""
    known = dict(
        connection.execute(
            "SELECT recipient_hash, payload_hash FROM job_deliveries JOIN deliveries ON delivery = id WHERE job_id = ?",
            (job_id,),
        ).fetchall()
    )
    return known.keys() == asked.keys() and all(known[one] in (None, payload) for one, payload in asked.items())


def begin(connection: sqlite3.Connection, row: Row, boot: str, state: str, now: float) -> None:
    """A send (or a lookup) is about to go out: committed before it does."""
    if state == "sending":
        connection.execute(
            "UPDATE deliveries SET state = 'sending', boot = ?, next_at = NULL, attempts = attempts + 1, "
            "started_at = ?, first_started_at = coalesce(first_started_at, ?) WHERE id = ?",
            (boot, now, now, row.id),
        )
    else:
        connection.execute(
            "UPDATE deliveries SET state = 'reconcile', boot = ?, next_at = NULL, lookups = lookups + 1 WHERE id = ?",
            (boot, row.id),
        )
    settle_jobs(connection, row.id, now)


def end(
    connection: sqlite3.Connection,
    row: Row,
    following: Next,
    *,
    now: float,
    next_at: float | None,
    error: str | None = None,
    notification_id: str | None = None,
    evidence: str | None = None,
) -> None:
    """One write for all of it: the state, the markers and the evidence."""
    sent = following.state == "sent"
    connection.execute(
        "UPDATE deliveries SET state = ?, boot = NULL, next_at = ?, started_at = ?, notified_at = ?, "
        "notification_id = ?, evidence = ?, ambiguous = ?, giving_up = ?, last_error = ?, "
        "first_started_at = CASE WHEN ? THEN first_started_at END WHERE id = ?",
        (
            following.state,
            next_at,
            (row.started_at or now) if following.started else None,
            now if sent else None,
            (notification_id or row.notification_id) if following.started or following.ambiguous else None,
            (evidence or "accepted") if sent else None,
            following.ambiguous,
            following.giving_up,
            None if sent else error,
            following.started or following.ambiguous,  # a key that was never sent is not being remembered yet
            row.id,
        ),
    )
    settle_jobs(connection, row.id, now)


def settle_jobs(connection: sqlite3.Connection, delivery: int, now: float) -> None:
    for job_id in jobs_of(connection, delivery):
        settle_job(connection, job_id, now)


def settle_job(connection: sqlite3.Connection, job_id: str, now: float) -> str:
    states: Sequence[tuple[str, int]] = connection.execute(
        "SELECT state, attempts FROM deliveries JOIN job_deliveries ON delivery = id WHERE job_id = ?", (job_id,)
    ).fetchall()
    state = job_state(states)
    connection.execute(
        "UPDATE jobs SET state = ?, finished_at = ? WHERE job_id = ? AND state <> ?",
        (state, now if state in _ENDED else None, job_id, state),
    )
    return state


def remove_finished(connection: sqlite3.Connection, before: float, most: int) -> tuple[int, list[str]]:
    """Jobs that ended long ago, with deliveries no other job needs; how many, and body files to remove afterwards."""
    old = connection.execute(
        "SELECT job_id FROM jobs WHERE finished_at IS NOT NULL AND finished_at < ? LIMIT ?", (before, most)
    ).fetchall()
    files: list[str] = []
    for (job_id,) in old:
        deliveries = connection.execute("SELECT delivery FROM job_deliveries WHERE job_id = ?", (job_id,)).fetchall()
        connection.execute("DELETE FROM job_deliveries WHERE job_id = ?", (job_id,))
        connection.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))
        for (delivery,) in deliveries:
            if connection.execute("SELECT 1 FROM job_deliveries WHERE delivery = ?", (delivery,)).fetchone() is None:
                (name,) = connection.execute("SELECT body_file FROM deliveries WHERE id = ?", (delivery,)).fetchone()
                connection.execute("DELETE FROM deliveries WHERE id = ?", (delivery,))
                if name is not None:
                    connection.execute("DELETE FROM body_files WHERE name = ?", (name,))
                    files.append(name)
    return len(old), files
