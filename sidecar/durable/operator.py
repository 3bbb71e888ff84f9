"""What an operator does to a dead letter: note, remediate, validate, edit, verify, close, discard.

Law: every change is one durable write that goes through the workflow's rules and leaves a line in the entry's
history with who made it. An edit never changes the destination: what is sealed is bound to it, and a credential must
not be led to another host. Nothing is deleted here; discarding marks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from sidecar.durable import credential, rows
from sidecar.durable.bodies import INLINE, BodyFile
from sidecar.durable.deadletter import DeadLetters, no_such
from sidecar.durable.entry import Entry, Fields, host_of, ms, shorten
from sidecar.durable.intake import split_headers
from sidecar.durable.payloads import head_of
from sidecar.durable.rows import Row
from sidecar.durable.trouble import BadInput, Damaged, NotNow
from sidecar.durable.workflow import Ask, Refusal, move, refuse_close, refuse_remediation, refuse_replay


@dataclass(frozen=True, slots=True)
class Edit:
    """None: as it is."""

    url: str | None = None
    headers: Fields | None = None
    body: bytes | None = None


class Operator:
    """`by` is the name of whoever asks, as the admin port knows it."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters

    async def annotate(self, dlq_id: str, by: str, text: str) -> Entry:
        return await self.change(dlq_id, lambda entry, at: entry.annotate(at, by, text))

    async def remediate(
        self, dlq_id: str, by: str, kind: str, evidence: str, ticket: str = "", note: str = ""
    ) -> Entry:
        """What was wrong and where it can be seen that it is fixed."""
        _raise(refuse_remediation(kind, evidence), "remediation")

        def work(entry: Entry, at: float) -> None:
            self._act(entry, "remediate", at, by, note, kind=kind)
            given = {"kind": kind, "evidence": shorten(evidence, 4000), "ticket": shorten(ticket, 200)}
            entry.remediation = {**given, "by": by, "at": at}

        return await self.change(dlq_id, work)

    async def validate(self, dlq_id: str, by: str, note: str = "") -> Entry:
        """The rules find nothing against a replay."""

        def work(entry: Entry, at: float) -> None:
            against = refuse_replay(self._letters.view(entry), self._letters.terms_of(entry.upstream).replay, Ask())
            if against is not None:
                raise NotNow(f"{entry.dlq_id}: {against.why}", against.what_to_do)
            self._act(entry, "validate", at, by, note)

        return await self.change(dlq_id, work)

    async def verify(self, dlq_id: str, by: str, note: str = "") -> Entry:
        """The effect of a successful replay was seen downstream."""

        def work(entry: Entry, at: float) -> None:
            if entry.status != "completed":
                raise NotNow(f"{entry.dlq_id} has not succeeded yet, it is {entry.status}", "replay it first")
            self._act(entry, "verify", at, by, note)

        return await self.change(dlq_id, work)

    async def close(self, dlq_id: str, by: str, note: str) -> Entry:
        _raise(refuse_close(note), "note")

        return await self.change(dlq_id, lambda entry, at: self._act(entry, "close", at, by, note))

    async def discard(self, dlq_id: str, by: str, reason: str = "") -> Entry:
        """It will never be sent. It stays to be looked at until `keep_completed` has passed."""
        done = False

        def work(entry: Entry, at: float) -> None:
            nonlocal done
            if entry.status in ("completed", "replaying"):
                raise NotNow(f"{entry.dlq_id} is {entry.status}", "only what waits can be discarded")
            if entry.status == "discarded":
                return
            self._act(entry, "discard", at, by, reason=reason or None)
            entry.status = "discarded"
            entry.last_attempt = max(entry.last_attempt, at)  # from here on its stay is counted
            done = True

        entry = await self.change(dlq_id, work)
        if done:
            self._letters.counts.dead_letter_replayed(entry.upstream, "discarded")
        return entry

    def _act(self, entry: Entry, action: str, at: float, by: str, note: str = "", **facts: object) -> None:
        following = move(entry.state, action)
        if isinstance(following, Refusal):
            raise NotNow(f"{entry.dlq_id}: {following.why}", following.what_to_do)
        entry.state = following
        entry.happened(at, action, by=by, **facts)
        if note:
            entry.annotate(at, by, note)

    async def change(self, dlq_id: str, work: Callable[[Entry, float], None]) -> Entry:
        """One entry, changed as a whole or not at all."""
        letters = self._letters

        def writing(connection: sqlite3.Connection) -> Row | Damaged:
            try:
                row = rows.load(connection, dlq_id)
            except Damaged as damaged:
                return damaged
            if row is None:
                raise no_such(dlq_id)
            work(row.entry, ms(letters.now()))
            rows.save(connection, row, letters.judge)
            return row

        found = await letters.store.write(writing)
        if isinstance(found, Damaged):
            await letters.set_aside(dlq_id, found.message)
            raise found
        return found.entry

    # ---- edits ---------------------------------------------------------------------------------------------------

    async def edit(self, dlq_id: str, by: str, edit: Edit, note: str = "") -> Entry:
        """Correct the request before a replay. The original is kept beside it."""
        letters = self._letters
        entry, request = await letters.get(dlq_id), await letters.request(dlq_id)
        url = request.url if edit.url is None else edit.url
        headers = request.headers if edit.headers is None else list(edit.headers)
        if host_of(url) != entry.host or _scheme(url) != _scheme(request.url):
            there = f"{_scheme(request.url)}://{entry.host}"
            raise BadInput("url", f"an edit must stay on {there}", "send a new request to reach another host")
        body: bytes | BodyFile | None = edit.body
        limit = letters.terms_of(entry.upstream).dead_letter.max_body_bytes
        if edit.body is not None and len(edit.body) > limit:
            raise BadInput("body", f"is larger than `dead_letter.max_body_bytes` ({limit})")
        if edit.body is not None and len(edit.body) > INLINE:
            body = await letters.bodies.keep(entry.host, dlq_id, edit.body)
        head, done = head_of(url, headers), False
        try:
            changed, dropped = await letters.store.write(
                lambda connection: self._write_edit(
                    connection, dlq_id, by, note, edit, url, request.headers, headers, head, body
                ),
                grows=len(head) + (len(edit.body) if isinstance(body, bytes) and edit.body else 0),
            )
            done = True
        finally:
            if isinstance(body, BodyFile):
                if done:
                    letters.bodies.settled(body.name)
                else:
                    await letters.bodies.remove([body.name])
        await letters.bodies.remove([dropped])
        return changed

    def _write_edit(
        self,
        connection: sqlite3.Connection,
        dlq_id: str,
        by: str,
        note: str,
        edit: Edit,
        url: str,
        old_headers: Fields,
        headers: Fields,
        head: bytes,
        body: bytes | BodyFile | None,
    ) -> tuple[Entry, str | None]:
        letters = self._letters
        row = rows.load(connection, dlq_id)
        if row is None:
            raise no_such(dlq_id)
        entry = row.entry
        if entry.status not in ("pending", "failed"):
            raise NotNow(f"{dlq_id} is {entry.status}", "only what waits can be edited")
        letters.check_room(connection, len(head) + (len(edit.body) if edit.body else 0))
        grown, dropped = letters.payloads.replace(connection, row.seq, entry, head, body)
        row.payload_size += grown
        terms = letters.terms_of(entry.upstream)
        entry.headers, entry.sealed_headers = split_headers(
            headers, terms.dead_letter, terms.idempotency, terms.redactor
        )
        expires = credential.expires_at(url, headers)
        entry.credential_expires_at = None if expires is None else ms(expires)
        self._follow_key(entry, old_headers, headers)
        if edit.body is not None:
            entry.body = {"kept": True, "size": len(edit.body), "note": ""}
        entry.edited = True
        changed = [name for name in ("url", "headers", "body") if getattr(edit, name) is not None]
        at = letters.now()
        entry.happened(at, "edited", by=by, changed=changed)
        if note:
            entry.annotate(at, by, note)
        rows.save(connection, row, letters.judge)
        return entry, dropped

    def _follow_key(self, entry: Entry, old_headers: Fields, headers: Fields) -> None:
        """Another key says nothing to the upstream about what it may have executed under the first one."""
        name = self._letters.terms_of(entry.upstream).idempotency.header
        before, after = _key_in(old_headers, name), _key_in(headers, name)
        if before != after and after != entry.idempotency_key:
            entry.idempotency_key, entry.key_honoured = after, False


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _key_in(headers: Fields, name: str) -> str | None:
    wanted = name.lower().encode()
    return next((value.decode("latin-1") for field, value in headers if field.lower() == wanted), None)


def _raise(refusal: Refusal | None, field: str) -> None:
    if refusal is not None:
        raise BadInput(field, refusal.why, refusal.what_to_do)
