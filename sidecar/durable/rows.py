"""Entries as rows: written whole, with a digest over everything, and read back only if it still matches.

Law: functions of a connection, for the writer's thread (or a reader's). The record is what counts; the facet and the
other columns are copies of it for finding it, and a copy that disagrees is repaired from the record. A row whose
digest is wrong is Damaged: it is set aside in `quarantine`, never shown, never replayed.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from sidecar.durable.entry import Entry, validate
from sidecar.durable.schema import SEQ_SHIFT
from sidecar.durable.trouble import Damaged
from sidecar.durable.verdict import Verdict

Judge = Callable[[Entry], Verdict]

_COLUMNS = (
    "seq, dlq_id, facet, key_hash, fingerprint, url_hash, workflow, verdict_until, done_at, lease_owner, lease_until, "
    "size, search, record, digest"
)
_SELECT = f"SELECT {_COLUMNS} FROM dead_letters"
_INSERT = f"INSERT INTO dead_letters ({_COLUMNS}) VALUES ({', '.join('?' * 15)})"
_UPDATE = f"UPDATE dead_letters SET ({_COLUMNS}) = ({', '.join('?' * 15)}) WHERE seq = ?"
_OVERHEAD = 400  # indices and page filling, about


@dataclass(slots=True)
class Row:
    """An entry with what is stored beside it."""

    seq: int
    entry: Entry
    key_hash: int | None
    fingerprint: int
    url_hash: int | None
    payload_size: int
    lease_owner: str | None = None
    lease_until: float | None = None
    verdict_until: float | None = None


def seq_range(since: float | None, until: float | None) -> tuple[int, int]:
    """The numbers of entries created in [since, until)."""
    low = 0 if since is None else max(0, int(since * 1000)) << SEQ_SHIFT
    high = (1 << 62) if until is None else max(0, int(until * 1000)) << SEQ_SHIFT
    return low, high


def next_seq(connection: sqlite3.Connection, created_at: float) -> int:
    first = round(created_at * 1000) << SEQ_SHIFT
    found = connection.execute(
        "SELECT max(seq) FROM dead_letters WHERE seq >= ? AND seq < ?", (first, first + (1 << SEQ_SHIFT))
    ).fetchone()[0]
    return first if found is None else int(found) + 1


def facet_of(connection: sqlite3.Connection, entry: Entry) -> int:
    words = (entry.upstream, entry.error_class, entry.verdict, entry.status)
    found = connection.execute(
        "SELECT id FROM facets WHERE upstream = ? AND error_class = ? AND verdict = ? AND status = ?", words
    ).fetchone()
    if found is not None:
        return int(found[0])
    cursor = connection.execute(
        "INSERT INTO facets (upstream, error_class, verdict, status) VALUES (?, ?, ?, ?)", words
    )
    return int(cursor.lastrowid or 0)


def words_of(entry: Entry) -> str:
    """What `q` finds: ids and words that may be shown."""
    context = entry.sanitized_context
    remediation = entry.remediation or {}
    parts = [
        entry.dlq_id,
        entry.upstream,
        entry.host,
        entry.operation_type,
        entry.method,
        entry.error_class,
        entry.stage,
        entry.workflow,
        entry.idempotency_key,
        entry.error_details.get("error_message"),
        remediation.get("ticket"),
        remediation.get("evidence"),
        *(context.get(name) for name in ("request_id", "trace_id", "correlation_id")),
        *(note["text"] for note in entry.notes),
    ]
    return " ".join(str(part) for part in parts if part)


def save(connection: sqlite3.Connection, row: Row, judge: Judge, *, new: bool = False) -> None:
    """Judge anew, validate, write. The digest covers every column."""
    entry = row.entry
    verdict = judge(entry)
    entry.verdict, entry.sentence = verdict.word, verdict.sentence
    waiting = entry.status in ("pending", "failed")
    row.verdict_until = verdict.until if waiting else None
    validate(entry)
    record = orjson.dumps(entry.record())
    search = words_of(entry)
    done_at = (entry.replayed_at or entry.last_attempt) if entry.status in ("completed", "discarded") else None
    values = (
        row.seq,
        entry.dlq_id,
        facet_of(connection, entry),
        row.key_hash,
        row.fingerprint,
        row.url_hash,
        entry.workflow,
        _real(row.verdict_until),
        _real(done_at),
        row.lease_owner,
        _real(row.lease_until),
        len(record) + len(search) + row.payload_size + _OVERHEAD,
        search,
        record,
    )
    complete = (*values, _digest(values))
    if new:
        connection.execute(_INSERT, complete)
    else:
        connection.execute(_UPDATE, (*complete, row.seq))


def _real(value: float | None) -> float | None:
    """As the column gives it back, so that the digest stays the same."""
    return None if value is None else float(value)


def _digest(values: tuple[Any, ...]) -> bytes:
    """Over everything but the facet, which is a copy."""
    seq, dlq_id, _, *others, record = values
    found = hashlib.blake2b(repr((seq, dlq_id, others)).encode(), digest_size=16)
    found.update(record if isinstance(record, bytes) else repr(record).encode())
    return found.digest()


def load(connection: sqlite3.Connection, dlq_id: str) -> Row | None:
    """Raises Damaged."""
    return _row(connection.execute(f"{_SELECT} WHERE dlq_id = ?", (dlq_id,)).fetchone())


def load_seq(connection: sqlite3.Connection, seq: int) -> Row | None:
    """Raises Damaged."""
    return _row(connection.execute(f"{_SELECT} WHERE seq = ?", (seq,)).fetchone())


def _row(found: tuple[Any, ...] | None) -> Row | None:
    if found is None:
        return None
    if _digest(found[:-1]) != found[-1]:
        raise Damaged(f"the entry {found[1]} does not match its digest")
    record: bytes = found[13]
    try:
        entry = Entry.from_record(orjson.loads(record))
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"the record of the entry {found[1]} cannot be read: {error}") from None
    return Row(
        seq=found[0],
        entry=entry,
        key_hash=found[3],
        fingerprint=found[4],
        url_hash=found[5],
        payload_size=found[11] - len(record) - len(found[12]) - _OVERHEAD,
        lease_owner=found[9],
        lease_until=found[10],
        verdict_until=found[7],
    )


def delete(connection: sqlite3.Connection, seq: int) -> list[str]:
    """Remove an entry with all that is sealed; returns the names of body files to remove after the commit."""
    files = _body_files(connection, seq)
    for name in files:
        connection.execute("DELETE FROM body_files WHERE name = ?", (name,))
    connection.execute("DELETE FROM payloads WHERE seq = ?", (seq,))
    connection.execute("DELETE FROM dead_letters WHERE seq = ?", (seq,))
    return files


def _body_files(connection: sqlite3.Connection, seq: int) -> list[str]:
    found = connection.execute("SELECT body_file, original_body_file FROM payloads WHERE seq = ?", (seq,)).fetchone()
    return [] if found is None else [name for name in found if name is not None]


def quarantine(connection: sqlite3.Connection, seq: int, why: str, at: float) -> None:
    """Set a damaged row aside with what is sealed beside it; its body files stay where they are."""
    row = connection.execute(f"{_SELECT} WHERE seq = ?", (seq,)).fetchone()
    if row is None:
        return
    payload = connection.execute("SELECT * FROM payloads WHERE seq = ?", (seq,)).fetchone()
    content = repr((row, payload)).encode()
    connection.execute(
        "INSERT INTO quarantine (at, source, ident, why, content) VALUES (?, 'dead_letters', ?, ?, ?)",
        (at, str(row[1]), why, content),
    )
    connection.execute("DELETE FROM payloads WHERE seq = ?", (seq,))
    connection.execute("DELETE FROM dead_letters WHERE seq = ?", (seq,))


def bytes_kept(connection: sqlite3.Connection) -> int:
    """Dead letters and deliveries together, bodies included."""
    found = connection.execute("SELECT sum(bytes) FROM totals WHERE name IN ('dead_letters', 'deliveries')")
    return int(found.fetchone()[0])
