"""Dead letters as files and back: `{operation}/{dlq_id}.json`, large bodies beside them.

Law: an export is a copy, nothing in the store changes. An import adds an entry whole or not at all; one that exists
already is left as it is, and said to be there. Names of files come from checked ids, never from a request. Where the
files lie is not known here.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import NamedTuple, cast

from sidecar.durable import document, rows
from sidecar.durable.bodies import BodyFile
from sidecar.durable.deadletter import DeadLetters, no_such
from sidecar.durable.document import Document
from sidecar.durable.entry import Entry, validate
from sidecar.durable.filters import Filter, mark_of, read_cursor
from sidecar.durable.intake import prints_of, short
from sidecar.durable.listing import Listing
from sidecar.durable.payloads import Sealed, opened_head
from sidecar.durable.rows import Row
from sidecar.durable.trouble import BadInput, Damaged, NoSuchThing, NotNow

_SEALED = "head, body, response, original_head, original_body, body_file, original_body_file"
_SUFFIXES = {"body_file": ".body", "original_body_file": ".original.body"}
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_OVERWRITES = frozenset({"PUT", "DELETE"})
_PAGE = 200


class File(NamedTuple):
    """One file of an export: `{operation}/{dlq_id}.json`, or a body beside it."""

    path: str
    content: bytes


class Files:
    """Export and import."""

    def __init__(self, letters: DeadLetters, listing: Listing) -> None:
        self._letters = letters
        self._listing = listing

    # ---- out -----------------------------------------------------------------------------------------------------

    async def export(self, wanted: Filter, damaged: list[str]) -> AsyncIterator[list[File]]:
        """Entry by entry, oldest first: its files, the document last. Those that cannot be read are named in
        `damaged` and set aside. It ends with what was the newest when it began: in an outage entries may come faster
        than they are written out."""
        mark, cursor = mark_of(wanted, oldest_first=True), None
        newest = await self._letters.store.read(_newest)
        while True:
            page = await self._listing.page(wanted, limit=_PAGE, cursor=cursor, oldest_first=True)
            for entry in page.items:
                try:
                    yield await self.files(entry.dlq_id)
                except Damaged as problem:
                    await self._letters.set_aside(entry.dlq_id, problem.message)
                    damaged.append(entry.dlq_id)
                except NoSuchThing:
                    pass  # its stay ended between the page and now
            cursor = page.next_cursor
            if cursor is None or read_cursor(cursor, mark) >= newest:
                return

    async def files(self, dlq_id: str) -> list[File]:
        """One entry."""
        store, bodies = self._letters.store, self._letters.bodies.folder
        found, names = await store.read(partial(self._document, dlq_id=dlq_id))
        await store.in_thread(partial(self._check, found, names))
        place = _UNFIT.sub("_", found.entry.operation_type)[:80] or "_"

        def work() -> list[File]:
            try:
                beside = [
                    File(f"{place}/{dlq_id}{_SUFFIXES[name]}", (bodies / file).read_bytes())
                    for name, file in names.items()
                ]
            except OSError as error:
                raise Damaged(f"a body file of {dlq_id} cannot be read: {error.strerror}") from error
            return [*beside, File(f"{place}/{dlq_id}.json", document.written(found))]

        return await store.in_thread(work)

    def _check(self, found: Document, names: dict[str, str]) -> None:
        """A copy of something damaged is no copy. Raises Damaged."""
        sealed = {**found.sealed, **{name: names.get(name) for name in _SUFFIXES}}
        in_order = ("head", "body", "body_file", "response", "original_head", "original_body", "original_body_file")
        self._letters.payloads.check(found.entry, cast(Sealed, tuple(sealed[name] for name in in_order)))

    def _document(self, connection: sqlite3.Connection, dlq_id: str) -> tuple[Document, dict[str, str]]:
        row = rows.load(connection, dlq_id)
        if row is None:
            raise no_such(dlq_id)
        sealed = connection.execute(f"SELECT {_SEALED} FROM payloads WHERE seq = ?", (row.seq,)).fetchone()
        if sealed is None:
            raise Damaged(f"what was sealed with {dlq_id} is missing")
        names = [name.strip() for name in _SEALED.split(",")]
        found = dict(zip(names, sealed, strict=True))
        files = {name: found.pop(name) for name in _SUFFIXES}
        hashes = {name: None if file is None else file.removesuffix(".body") for name, file in files.items()}
        return Document(row.entry, found, hashes), {name: file for name, file in files.items() if file is not None}

    # ---- in ------------------------------------------------------------------------------------------------------

    async def bring_in(self, name: str, data: bytes, beside: Mapping[str, bytes | None]) -> bool:
        """True if it was added, False if the same entry is there already. `beside` has the content of `body_file` and
        `original_body_file`, as far as there are such files."""
        letters, path = self._letters, PurePath(name)
        given = await letters.store.in_thread(partial(document.read, data, name))
        try:
            validate(given.entry)
        except BadInput as wrong:
            raise BadInput(f"{name}: {wrong.field}", wrong.message.partition(": ")[2]) from None
        if given.entry.dlq_id != path.stem:
            raise BadInput(name, f"is the file of {given.entry.dlq_id}", "give it its name back")
        if await letters.store.read(partial(self._known, entry=given.entry)):
            return False
        bodies: dict[str, BodyFile] = {}
        added = False
        try:
            for part, content in given.files.items():
                if content is not None:
                    source = str(path.with_name(given.entry.dlq_id + _SUFFIXES[part]))
                    bodies[part] = await self._body(source, beside.get(part), content, given.entry)
            row = await letters.store.in_thread(partial(self._row, given, bodies))
            added = await letters.store.write(
                partial(self._insert, row=row, given=given, bodies=bodies), grows=len(data)
            )
        finally:
            await letters.bodies.release([file.name for file in bodies.values()])
        letters.waiting.add(given.entry.upstream)
        return added

    async def _body(self, source: str, data: bytes | None, content: str, entry: Entry) -> BodyFile:
        """The sealed file beside the document, checked against its hash and opened once."""
        if data is None:
            raise BadInput(source, "is missing", "export it again")
        if await self._letters.store.in_thread(lambda: hashlib.sha256(data).hexdigest()) != content:
            raise BadInput(source, "was cut off or changed since it was written", "export it again")
        return await self._letters.bodies.adopt(data, content, entry.host, entry.dlq_id)

    def _row(self, given: Document, bodies: dict[str, BodyFile]) -> Row:
        """Opens everything, so that nothing is taken in that could never be replayed. Raises Damaged."""
        letters, entry, sealed = self._letters, given.entry, given.sealed
        head = sealed["head"]
        if head is None:
            raise BadInput(entry.dlq_id, "has no sealed head")
        files = (bodies.get("body_file"), bodies.get("original_body_file"))
        letters.payloads.check(
            entry,
            (
                head,
                sealed["body"],
                files[0].name if files[0] is not None else None,
                sealed["response"],
                sealed["original_head"],
                sealed["original_body"],
                files[1].name if files[1] is not None else None,
            ),
        )
        url = opened_head(letters.keyring, entry, sealed["original_head"] or head)["url"]
        prints = prints_of(
            letters.keyring, entry.upstream, entry.api_key_id, entry.method, url, "", entry.idempotency_key
        )
        return Row(
            seq=0,
            entry=entry,
            key_hash=None if prints.key is None else short(prints.key),
            fingerprint=short(bytes.fromhex(entry.identity)),
            url_hash=short(prints.url) if entry.method in _OVERWRITES else None,
            payload_size=sum(len(part or b"") for part in sealed.values())
            + sum(file.stored for file in bodies.values()),
        )

    def _insert(self, connection: sqlite3.Connection, row: Row, given: Document, bodies: dict[str, BodyFile]) -> bool:
        letters, entry = self._letters, row.entry
        if self._known(connection, entry):
            return False
        if entry.status == "replaying":  # whoever held it is not here; it may have been sent
            entry.status, entry.state, entry.exposure = "pending", "triage", "unanswered"
        letters.check_room(connection, row.payload_size)
        row.seq = rows.next_seq(connection, entry.created_at)
        for file in bodies.values():
            letters.payloads.refer(connection, file)
        names = {name: bodies[name].name if name in bodies else None for name in _SUFFIXES}
        values = {**given.sealed, **names}
        columns = [name.strip() for name in _SEALED.split(",")]
        connection.execute(
            f"INSERT INTO payloads (seq, {_SEALED}) VALUES (?{', ?' * len(columns)})",
            (row.seq, *(values[name] for name in columns)),
        )
        rows.save(connection, row, letters.judge, new=True)
        return True

    def _known(self, connection: sqlite3.Connection, entry: Entry) -> bool:
        known = rows.load(connection, entry.dlq_id)
        if known is not None and known.entry.record() != entry.record():
            raise NotNow(f"{entry.dlq_id} is here already and differs", "the one here was kept as it is")
        return known is not None


def _newest(connection: sqlite3.Connection) -> int:
    (seq,) = connection.execute("SELECT COALESCE(MAX(seq), 0) FROM dead_letters").fetchone()
    return int(seq)
