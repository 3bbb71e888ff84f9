"""What is secret about a dead letter: its url, all its headers, its body and the last answer's body, sealed.

Law: this is the only module that seals or opens them, each bound to the entry's id and its destination host. A body
that is too large for a row is in a file (see bodies.py). An edit keeps the original beside the new request.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from sidecar.durable.bodies import Bodies, BodyFile
from sidecar.durable.entry import Entry, Fields
from sidecar.durable.seal import Keyring
from sidecar.durable.trouble import Damaged

Sealed = tuple[bytes, bytes | None, str | None, bytes | None, bytes | None, bytes | None, str | None]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was, or as an operator corrected it, ready to be sent."""

    dlq_id: str
    host: str
    method: str
    url: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    body_file: str | None
    body_size: int


class Payloads:
    """Rows of the table `payloads`."""

    def __init__(self, keyring: Keyring, bodies: Bodies) -> None:
        self._keyring = keyring
        self.bodies = bodies

    # ---- sealing (in the writer's thread) ----------------------------------------------------------------------

    def insert(
        self, connection: sqlite3.Connection, seq: int, entry: Entry, head: bytes, body: bytes | BodyFile | None,
        answer: bytes | None,
    ) -> int:  # fmt: skip  # one line of what, one of where
        """Returns how many bytes that takes."""
        sealed_head = self._seal("head", entry, head)
        sealed_body = self._seal("body", entry, body) if isinstance(body, bytes) else None
        sealed_answer = None if answer is None else self._seal("answer", entry, answer)
        name = self.refer(connection, body)
        connection.execute(
            "INSERT INTO payloads (seq, head, body, body_file, response) VALUES (?, ?, ?, ?, ?)",
            (seq, sealed_head, sealed_body, name, sealed_answer),
        )
        stored = body.stored if isinstance(body, BodyFile) else len(sealed_body or b"")
        return len(sealed_head) + stored + len(sealed_answer or b"")

    def refer(self, connection: sqlite3.Connection, body: bytes | BodyFile | None) -> str | None:
        if not isinstance(body, BodyFile):
            return None
        connection.execute("INSERT INTO body_files VALUES (?, ?)", (body.name, body.stored))
        return body.name

    def refresh(
        self, connection: sqlite3.Connection, seq: int, entry: Entry, head: bytes, answer: bytes | None
    ) -> None:
        """The same request failed again: its newest headers and answer count, unless an operator edited it."""
        if not entry.edited:
            connection.execute("UPDATE payloads SET head = ? WHERE seq = ?", (self._seal("head", entry, head), seq))
        if answer is not None:
            sealed = self._seal("answer", entry, answer)
            connection.execute("UPDATE payloads SET response = ? WHERE seq = ?", (sealed, seq))

    def replace(
        self, connection: sqlite3.Connection, seq: int, entry: Entry, head: bytes, body: bytes | BodyFile | None
    ) -> tuple[int, str | None]:
        """An edit. The first one keeps the original. Returns bytes added and a body file no longer needed."""
        old = connection.execute(
            "SELECT head, body, body_file, original_head FROM payloads WHERE seq = ?", (seq,)
        ).fetchone()
        if old is None:
            raise Damaged(f"what was sealed with {entry.dlq_id} is missing")
        sealed_head = self._seal("head", entry, head)
        grown, dropped = len(sealed_head), None
        if old[3] is None:
            connection.execute(
                "UPDATE payloads SET original_head = head, original_body = body, original_body_file = body_file "
                "WHERE seq = ?",
                (seq,),
            )
        connection.execute("UPDATE payloads SET head = ? WHERE seq = ?", (sealed_head, seq))
        if body is not None:
            sealed_body = self._seal("body", entry, body) if isinstance(body, bytes) else None
            connection.execute(
                "UPDATE payloads SET body = ?, body_file = ? WHERE seq = ?",
                (sealed_body, self.refer(connection, body), seq),
            )
            grown += body.stored if isinstance(body, BodyFile) else len(sealed_body or b"")
            if old[3] is not None and old[2] is not None:
                dropped = str(old[2])
                connection.execute("DELETE FROM body_files WHERE name = ?", (dropped,))
        return grown, dropped

    def _seal(self, purpose: str, entry: Entry, data: bytes) -> bytes:
        return self._keyring.seal(purpose, entry.host, entry.dlq_id, data)

    # ---- opening (in a reader's thread) ------------------------------------------------------------------------

    def url(self, entry: Entry, head: bytes) -> str:
        """For listings, which show it redacted."""
        return str(_head(self._open("head", entry, head))["url"])

    def request(self, connection: sqlite3.Connection, seq: int, entry: Entry) -> Request:
        """Raises Damaged."""
        found = connection.execute("SELECT head, body, body_file FROM payloads WHERE seq = ?", (seq,)).fetchone()
        if found is None:
            raise Damaged(f"what was sealed with {entry.dlq_id} is missing")
        head = _head(self._open("head", entry, found[0]))
        body = b"" if found[1] is None else self._open("body", entry, found[1])
        return Request(
            dlq_id=entry.dlq_id,
            host=entry.host,
            method=entry.method,
            url=head["url"],
            headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]],
            body=body,
            body_file=found[2],
            body_size=int(entry.body["size"]),
        )

    def answer(self, connection: sqlite3.Connection, seq: int, entry: Entry) -> bytes | None:
        """The body of the last answer, None when there was none. Raises Damaged."""
        found = connection.execute("SELECT response FROM payloads WHERE seq = ?", (seq,)).fetchone()
        return None if found is None or found[0] is None else self._open("answer", entry, found[0])

    def check(self, entry: Entry, sealed: Sealed) -> None:
        """Open everything once, body files included. Raises Damaged."""
        for purpose, part in zip(("head", "body", "answer", "head", "body"), (*sealed[:2], *sealed[3:6]), strict=True):
            if part is not None:
                self._open(purpose, entry, part)
        for name in (sealed[2], sealed[6]):
            if name is not None:
                for _ in self.bodies.chunks(name, entry.host, entry.dlq_id):
                    pass

    def _open(self, purpose: str, entry: Entry, sealed: bytes) -> bytes:
        return self._keyring.open(purpose, entry.host, entry.dlq_id, sealed)

    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body in chunks, wherever it is. Raises Damaged before a wrong byte is given out."""
        if request.body_file is None:
            if request.body:
                yield request.body
            return
        async for chunk in self.bodies.read(request.body_file, request.host, request.dlq_id):
            yield chunk


def head_of(url: str, headers: Fields) -> bytes:
    lines = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    return orjson.dumps({"url": url, "headers": lines})


def opened_head(keyring: Keyring, entry: Entry, sealed: bytes) -> dict[str, Any]:
    """url and headers. Raises Damaged."""
    return _head(keyring.open("head", entry.host, entry.dlq_id, sealed))


def _head(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(data)
    return found
