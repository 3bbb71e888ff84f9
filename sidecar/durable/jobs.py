"""Jobs of the outbox: how they get in, how they are looked at, and how an operator ends an `unknown` one.

Law: a job is answered for (202) after all its deliveries are durable rows. The same idempotency key returns the first
job; the same (subject, recipient, version) is one delivery, whichever job asks for it; either with another request is
refused. A version that succeeded is
not run again; only a strictly higher one is.
"""

from __future__ import annotations

import base64
import binascii
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sidecar import clock
from sidecar.durable import outbox_rows
from sidecar.durable.bodies import INLINE, BodyFile
from sidecar.durable.delivery import JOB_STATES, Next
from sidecar.durable.entry import Fields, host_of
from sidecar.durable.outbox import Outbox
from sidecar.durable.outbox_rows import Row
from sidecar.durable.trouble import BadInput, Damaged, NoSuchThing, NotNow, OtherPayload
from telemetry.timestamps import rfc3339

_MOST_DELIVERIES = 1000
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Wanted:
    """One delivery that is asked for."""

    recipient: str
    upstream: str
    method: str
    url: str
    headers: Fields = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Submission:
    idempotency_key: str
    subject: str
    deliveries: Sequence[Wanted]
    version: int = 0

    def check(self) -> None:
        for name in ("idempotency_key", "subject"):
            if not 1 <= len(getattr(self, name)) <= _LONGEST:
                raise BadInput(name, f"must have 1 to {_LONGEST} characters")
        if self.version < 0:
            raise BadInput("version", "must be 0 or more")
        if not 1 <= len(self.deliveries) <= _MOST_DELIVERIES:
            raise BadInput("deliveries", f"must have 1 to {_MOST_DELIVERIES} entries")
        seen: set[str] = set()
        for number, wanted in enumerate(self.deliveries):
            if not 1 <= len(wanted.recipient) <= _LONGEST:
                raise BadInput(f"deliveries[{number}].recipient", f"must have 1 to {_LONGEST} characters")
            if wanted.recipient in seen:
                raise BadInput(f"deliveries[{number}].recipient", "is named twice")
            seen.add(wanted.recipient)
            try:
                host_of(wanted.url)
            except BadInput as wrong:
                raise BadInput(f"deliveries[{number}].request.url", "must be an absolute http or https url") from wrong


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A delivery ready to be written."""

    wanted: Wanted
    host: str
    send_key: str
    own_key: bool
    payload_hash: bytes
    recipient_hash: bytes
    request: bytes
    body: bytes | None
    file: BodyFile | None


def _grows(one: _Sealed) -> int:
    return 500 + len(one.request) + len(one.body or b"") + (one.file.stored if one.file is not None else 0)


class Jobs:
    """For the admin port and for `Prefer: respond-async`."""

    def __init__(
        self, outbox: Outbox, check_room: Callable[[sqlite3.Connection, int], None] = lambda connection, grows: None
    ) -> None:
        """`check_room` raises NotKept when so many bytes more are too many: what is kept shares one budget."""
        self._outbox = outbox
        self._check_room = check_room

    # ---- in ------------------------------------------------------------------------------------------------------

    async def submit(self, submission: Submission) -> tuple[dict[str, Any], bool]:
        """The job, and whether it is new (202) or was known already (200)."""
        submission.check()
        outbox = self._outbox
        sealed = [await self._seal(submission, wanted) for wanted in submission.deliveries]
        files = {one.file.name for one in sealed if one.file is not None}
        used: set[str] = set()
        try:
            job_id, created, used = await outbox.store.write(
                lambda connection: self._insert(connection, submission, sealed),
                grows=sum(map(_grows, sealed)),
            )
        finally:
            for name in used:
                outbox.bodies.settled(name)
            await outbox.bodies.remove(files - used)
        outbox.wake()
        return await self.get(job_id), created

    async def _seal(self, submission: Submission, wanted: Wanted) -> _Sealed:
        outbox, keyring, host = self._outbox, self._outbox.keyring, host_of(wanted.url)
        version = str(submission.version)
        send_key = keyring.digest("send", submission.subject, wanted.recipient, version)[:16].hex()
        header = outbox.terms_of(wanted.upstream).idempotency.header.lower().encode()
        head = outbox_rows.head_of(wanted.recipient, wanted.method, wanted.url, wanted.headers)
        body: bytes | BodyFile = wanted.body
        if len(wanted.body) > INLINE:
            body = await outbox.bodies.keep(host, send_key, wanted.body)
        return _Sealed(
            wanted=wanted,
            host=host,
            send_key=send_key,
            own_key=any(name.lower() == header for name, _ in wanted.headers),
            payload_hash=keyring.digest("payload", wanted.method, wanted.url, sha256(wanted.body).hexdigest()),
            recipient_hash=keyring.digest("recipient", wanted.recipient),
            request=keyring.seal("delivery", host, send_key, head),
            body=keyring.seal("body", host, send_key, body) if isinstance(body, bytes) and body else None,
            file=body if isinstance(body, BodyFile) else None,
        )

    def _insert(
        self, connection: sqlite3.Connection, submission: Submission, sealed: list[_Sealed]
    ) -> tuple[str, bool, set[str]]:
        known = connection.execute(
            "SELECT job_id FROM jobs WHERE idempotency_key = ?", (submission.idempotency_key,)
        ).fetchone()
        if known is not None:
            if not outbox_rows.same_payloads(
                connection, known[0], {one.recipient_hash: one.payload_hash for one in sealed}
            ):
                raise OtherPayload(
                    f"job {known[0]} has this key already, with another request", "use another key for another request"
                )
            return known[0], False, set()
        self._check_version(connection, submission)
        self._check_room(connection, sum(map(_grows, sealed)))
        job_id, now, used = f"job_{clock.unguessable(16)}", self._outbox.now(), set[str]()
        connection.execute(
            "INSERT INTO jobs (job_id, idempotency_key, subject, version, state, created_at) "
            "VALUES (?, ?, ?, ?, 'in_progress', ?)",
            (job_id, submission.idempotency_key, submission.subject, submission.version, now),
        )
        for one in sealed:
            delivery, new = outbox_rows.insert(
                connection,
                subject=submission.subject,
                recipient_hash=one.recipient_hash,
                version=submission.version,
                upstream=one.wanted.upstream,
                host=one.host,
                send_key=one.send_key,
                own_key=one.own_key,
                payload_hash=one.payload_hash,
                request=one.request,
                body=one.body,
                file=one.file,
                now=now,
            )
            if new and one.file is not None:
                used.add(one.file.name)
            connection.execute("INSERT INTO job_deliveries VALUES (?, ?)", (job_id, delivery))
        outbox_rows.settle_job(connection, job_id, now)
        return job_id, True, used

    def _check_version(self, connection: sqlite3.Connection, submission: Submission) -> None:
        (last,) = connection.execute(
            "SELECT max(version) FROM jobs WHERE subject = ? AND state = 'succeeded'", (submission.subject,)
        ).fetchone()
        if last is not None and submission.version < last:
            raise NotNow(
                f"version {last} of {submission.subject!r} has succeeded already, {submission.version} is older",
                "a rerun needs a strictly higher version",
            )

    # ---- looking -------------------------------------------------------------------------------------------------

    async def get(self, job_id: str) -> dict[str, Any]:
        return await self._outbox.store.read(lambda connection: self._shown(connection, job_id))

    def _shown(self, connection: sqlite3.Connection, job_id: str) -> dict[str, Any]:
        found = connection.execute(
            "SELECT job_id, idempotency_key, subject, version, state, created_at, finished_at FROM jobs "
            "WHERE job_id = ?",
            (job_id,),
        ).fetchone()
        if found is None:
            raise _no_such_job(job_id)
        deliveries = [self._delivery_shown(row) for row in outbox_rows.of_job(connection, job_id)]
        first = {name: deliveries[0][name] for name in ("upstream", "method", "url")}
        return {**_job_shown(found), **first, "delivery_count": len(deliveries), "deliveries": deliveries}

    def _listed(self, connection: sqlite3.Connection, found: tuple[Any, ...]) -> dict[str, Any]:
        first, count = outbox_rows.first_of_job(connection, found[0])
        method, url, upstream = "-", "-", "-"
        if first is not None:
            upstream = first.upstream
            _, method, url = self._head_shown(first)
        return {**_job_shown(found), "upstream": upstream, "method": method, "url": url, "delivery_count": count}

    def _delivery_shown(self, row: Row) -> dict[str, Any]:
        recipient, method, url = self._head_shown(row)
        return {
            "delivery_id": row.id,
            "recipient": recipient,
            "upstream": row.upstream,
            "method": method,
            "url": url,
            "state": row.state,
            "attempts": row.attempts,
            "lookups": row.lookups,
            "started_at": _time(row.started_at),
            "notified_at": _time(row.notified_at),
            "notification_id": row.notification_id,
            "next_at": _time(row.next_at),
            "last_error": row.last_error,
        }

    def _head_shown(self, row: Row) -> tuple[str, str, str]:
        """Recipient, method, and the url without its secrets."""
        try:
            recipient, method, url = outbox_rows.head_shown(self._outbox.keyring, row)
        except Damaged:
            return "(damaged)", "(damaged)", "(damaged)"
        return recipient, method, self._outbox.terms_of(row.upstream).redactor.url(url)

    async def result(self, job_id: str) -> dict[str, Any]:
        """What the provider said last about each delivery."""

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            found = connection.execute("SELECT state FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
            if found is None:
                raise _no_such_job(job_id)
            answers = outbox_rows.answers_of(connection, job_id)
            rows = outbox_rows.of_job(connection, job_id)
            results = [self._result_shown(row, answers.get(row.id)) for row in rows]
            return {"job_id": job_id, "state": found[0], "results": results}

        return await self._outbox.store.read(work)

    def _result_shown(self, row: Row, sealed: bytes | None) -> dict[str, Any]:
        shown: dict[str, Any] = {"delivery_id": row.id, "state": row.state, "answer": None}
        if sealed is None:
            return shown
        try:
            head, body = outbox_rows.opened_answer(self._outbox.keyring, row, sealed)
        except Damaged as damaged:
            return {**shown, "problem": damaged.message}
        told: dict[str, Any] = {"status": head["status"], "headers": head["headers"], "body_bytes": head["size"]}
        told["complete"] = len(body) == head["size"]
        try:
            told["body"] = body.decode()
        except UnicodeDecodeError:
            told["body_base64"] = base64.b64encode(body).decode()
        return {**shown, "answer": told}

    async def page(
        self, *, state: str | None = None, since: float | None = None, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        """The newest first, and with the first page how many there are in all."""
        if state is not None and state not in JOB_STATES:
            raise BadInput("state", f"must be one of {', '.join(JOB_STATES)}")
        if not 1 <= limit <= 500:
            raise BadInput("limit", "must be from 1 to 500")
        before, last_id = (1e12, "~") if cursor is None else _read_cursor(cursor)
        given = {" AND state = ?": state, " AND created_at >= ?": since}
        condition = "".join(text for text, value in given.items() if value is not None)
        words = [value for value in given.values() if value is not None]

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            total: int | None = None
            if cursor is None:
                (total,) = connection.execute(f"SELECT count(*) FROM jobs WHERE 1{condition}", words).fetchone()
            found = connection.execute(
                "SELECT job_id, idempotency_key, subject, version, state, created_at, finished_at FROM jobs "
                f"WHERE (created_at, job_id) < (?, ?){condition} ORDER BY created_at DESC, job_id DESC LIMIT ?",
                (before, last_id, *words, limit + 1),
            ).fetchall()
            following = _write_cursor(found[limit - 1]) if len(found) > limit else None
            items = [self._listed(connection, row) for row in found[:limit]]
            return {"items": items, "next_cursor": following, "total": total}

        return await self._outbox.store.read(work)

    async def counts(self) -> dict[str, int]:
        """Jobs by state, for the gauge."""
        return await self._outbox.store.read(
            lambda connection: dict(connection.execute("SELECT state, n FROM job_counts").fetchall())
        )

    # ---- operators -----------------------------------------------------------------------------------------------

    async def resolve(
        self, job_id: str, delivery: int, by: str, reason: str, *, delivered: bool, notification_id: str | None = None
    ) -> dict[str, Any]:
        """Somebody looked at the provider: it has the delivery, or it has not and it goes out again."""
        if not reason.strip():
            raise BadInput("reason", "must not be empty", "say where it was looked up")

        def work(connection: sqlite3.Connection) -> None:
            row = next((row for row in outbox_rows.of_job(connection, job_id) if row.id == delivery), None)
            if row is None:
                raise NoSuchThing(
                    f"job {job_id[:80]!r} has no delivery {delivery}", f"`sidecar jobs show {job_id[:80]}` tells theirs"
                )
            if row.state not in ("unknown", "failed"):
                raise NotNow(f"delivery {delivery} is {row.state}", "only unknown and failed ones are resolved by hand")
            now, note = self._outbox.now(), f"{by}: {reason}"[:_LONGEST]
            following = Next("sent", "never", started=True) if delivered else Next("queued", "now")
            connection.execute("UPDATE deliveries SET attempts = 0, lookups = 0 WHERE id = ?", (delivery,))
            outbox_rows.end(
                connection,
                row,
                following,
                now=now,
                next_at=None if delivered else now,
                error=None if delivered else f"sent again, {note}",
                notification_id=notification_id,
                evidence=f"resolved by {note}",
            )

        await self._outbox.store.write(work)
        self._outbox.wake()
        return await self.get(job_id)


def _no_such_job(job_id: str) -> NoSuchThing:
    return NoSuchThing(f"there is no job {job_id[:80]!r}", "list them with `sidecar jobs`")


def _job_shown(row: tuple[Any, ...]) -> dict[str, Any]:
    names = ("job_id", "idempotency_key", "subject", "version", "state", "created_at", "finished_at")
    found = dict(zip(names, row, strict=True))
    return {**found, "created_at": _time(found["created_at"]), "finished_at": _time(found["finished_at"])}


def _time(value: float | None) -> str | None:
    return None if value is None else rfc3339(value)


def _write_cursor(row: tuple[Any, ...]) -> str:
    return base64.urlsafe_b64encode(f"{row[5]!r} {row[0]}".encode()).decode()


def _read_cursor(cursor: str) -> tuple[float, str]:
    try:
        at, job_id = base64.urlsafe_b64decode(cursor).decode("ascii").split(" ")
        return float(at), job_id
    except (ValueError, binascii.Error):
        raise BadInput("cursor", "is not a cursor that a list gave out", "leave it out to begin anew") from None
