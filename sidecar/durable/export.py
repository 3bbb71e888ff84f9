"""Dead letters out to files and back: `{operation}/{dlq_id}.json`, large bodies beside them.

Law: an export is a copy, nothing in the store changes. An import adds an entry whole or not at all; one that exists
already is left as it is, and said to be there. Names of files come from checked ids, never from a request.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sidecar.durable import document, rows
from sidecar.durable.bodies import BodyFile
from sidecar.durable.deadletter import DeadLetters, no_such
from sidecar.durable.disk import private_directory
from sidecar.durable.document import Document
from sidecar.durable.entry import Entry, validate
from sidecar.durable.filters import Filter
from sidecar.durable.intake import prints_of, short
from sidecar.durable.listing import Listing
from sidecar.durable.payloads import opened_head
from sidecar.durable.rows import Row
from sidecar.durable.trouble import BadInput, Damaged, NotNow

_SEALED = "head, body, response, original_head, original_body, body_file, original_body_file"
_SUFFIXES = {"body_file": ".body", "original_body_file": ".original.body"}
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_OVERWRITES = frozenset({"PUT", "DELETE"})
_PAGE = 200

Progress = Callable[[int], None]


@dataclass(slots=True)
class Imported:
    """What an import did. `refused` has a reason for each file that was not taken."""

    added: int = 0
    known: int = 0
    refused: list[str] = field(default_factory=list)


class Files:
    """Export and import."""

    def __init__(self, letters: DeadLetters, listing: Listing) -> None:
        self._letters = letters
        self._listing = listing

    # ---- out -----------------------------------------------------------------------------------------------------

    async def export(self, folder: Path, wanted: Filter, progress: Progress = lambda done: None) -> int:
        """Returns how many entries were written."""
        done, cursor = 0, None
        while True:
            page = await self._listing.page(wanted, limit=_PAGE, cursor=cursor, oldest_first=True)
            for entry in page.items:
                await self._export_one(folder, entry.dlq_id)
                done += 1
            progress(done)
            cursor = page.next_cursor
            if cursor is None:
                return done

    async def document(self, dlq_id: str) -> bytes:
        """One entry as the content of its file."""
        found, _ = await self._letters.store.read(partial(self._document, dlq_id=dlq_id))
        return document.written(found)

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

    async def _export_one(self, folder: Path, dlq_id: str) -> None:
        found, files = await self._letters.store.read(partial(self._document, dlq_id=dlq_id))
        disk, bodies = self._letters.store.disk, self._letters.bodies.folder

        def work() -> None:
            place = folder / (_UNFIT.sub("_", found.entry.operation_type)[:80] or "_")
            private_directory(place)
            for name, file in files.items():
                disk.write_whole(place / (dlq_id + _SUFFIXES[name]), (bodies / file).read_bytes())
            disk.write_whole(place / f"{dlq_id}.json", document.written(found))

        await self._letters.store.in_thread(work)

    # ---- in ------------------------------------------------------------------------------------------------------

    async def bring_in(self, folder: Path, progress: Progress = lambda done: None) -> Imported:
        """Every file below `folder`. One that is refused does not hold up the others."""
        paths = await self._letters.store.in_thread(lambda: sorted(folder.glob("*/*.json")))
        result = Imported()
        for done, path in enumerate(paths, 1):
            try:
                added = await self._bring_in_one(path)
            except (BadInput, Damaged, NotNow) as refused:
                result.refused.append(str(refused))
            else:
                result.added += added
                result.known += not added
            progress(done)
        return result

    async def _bring_in_one(self, path: Path) -> bool:
        store = self._letters.store
        data = await store.in_thread(path.read_bytes)
        return await self.bring_in_document(data, path)

    async def bring_in_document(self, data: bytes, path: Path) -> bool:
        """True if it was added, False if the same entry is there already."""
        letters = self._letters
        given = await letters.store.in_thread(partial(document.read, data, str(path)))
        try:
            validate(given.entry)
        except BadInput as wrong:
            raise BadInput(f"{path}: {wrong.field}", wrong.message.partition(": ")[2]) from None
        if given.entry.dlq_id != path.stem:
            raise BadInput(str(path), f"is the file of {given.entry.dlq_id}", "give it its name back")
        if await letters.store.read(partial(self._known, entry=given.entry)):
            return False
        bodies: dict[str, BodyFile] = {}
        added = False
        try:
            for name, content in given.files.items():
                if content is not None:
                    bodies[name] = await self._copy_body(path, name, content, given.entry)
            row = await letters.store.in_thread(partial(self._row, given, bodies))
            added = await letters.store.write(
                partial(self._insert, row=row, given=given, bodies=bodies), grows=len(data)
            )
        finally:
            await letters.bodies.release([file.name for file in bodies.values()])
        letters.waiting.add(given.entry.upstream)
        return added

    async def _copy_body(self, path: Path, name: str, content: str, entry: Entry) -> BodyFile:
        """The sealed file beside the document, checked against its hash and opened once."""
        source = path.with_name(entry.dlq_id + _SUFFIXES[name])
        try:
            data = await self._letters.store.in_thread(source.read_bytes)
        except OSError as error:
            raise BadInput(str(source), f"cannot be read: {error.strerror}", "export it again") from None
        if hashlib.sha256(data).hexdigest() != content:
            raise BadInput(str(source), "was cut off or changed since it was written", "export it again")
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
