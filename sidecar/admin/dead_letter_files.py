"""Dead letters as files: all that fit a filter as one tar stream, and files back in.

Law: secrets stay sealed on the way; whoever gets the stream learns no more than a listing shows. The stream ends with
a list of what is in it and what could not be read, so that one that was cut off is never taken for whole. Each file
of an import is taken in whole or refused, with file and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from sidecar import clock
from sidecar.admin.changes import Changes
from sidecar.admin.dead_letters import codes_known
from sidecar.admin.fields import NoBody, NoQuery
from sidecar.admin.letters_asked import ExportQuery, FileGiven, Import
from sidecar.admin.letters_shown import FileTaken, Imported
from sidecar.admin.route import Call, Route, Told
from sidecar.durable.filters import Filter
from sidecar.durable.trouble import BadInput, Damaged, NotNow, Trouble
from sidecar.proxy import Proxy

if TYPE_CHECKING:
    from sidecar.durable.layers import Durable

TAR = "application/x-tar"
SUMMARY = "sidecar-export.json"
ENTRIES = "x-sidecar-entries"
_IMPORT_LIMIT = 32 * 1024 * 1024
_BLOCK = 512
_END = bytes(2 * _BLOCK)


class DeadLetterFiles:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET", "/dlq/export", "Dead letters as files in a tar stream, oldest first, secrets sealed.",
            self.export, None, ExportQuery, also=(TAR,), refusals=(503,),
        )  # fmt: skip
        yield Route(
            "POST", "/dlq/import", "Take exported dead letters in.", self.bring_in, Imported, NoQuery, Import,
            refusals=(503,), body_limit=_IMPORT_LIMIT,
        )  # fmt: skip

    async def export(self, call: Call[ExportQuery, NoBody]) -> Told:
        wanted, durable = call.query.chosen(clock.wall(), codes_known(self._proxy)), self._proxy.kept.durable
        await self._changes.note_reading(call.request, "an export of dead letters")
        expected = 0 if durable is None else sum((await durable.listing.count(wanted)).values())
        response = web.StreamResponse(headers={"Content-Type": TAR, ENTRIES: str(expected)})
        await response.prepare(call.request)
        if call.request.method == "HEAD":
            return response
        try:
            await self._write(response, durable, wanted)
        except Trouble as trouble:
            self._proxy.log.warn("sidecar.dlq.export_broken", f"an export broke off: {trouble}")
            if call.request.transport is not None:
                call.request.transport.abort()  # without an end it cannot be taken for whole
        return response

    async def _write(self, response: web.StreamResponse, durable: Durable | None, wanted: Filter) -> None:
        entries, damaged = 0, list[str]()
        if durable is not None:
            async for files in durable.files.export(wanted, damaged):
                for file in files:
                    await response.write(_member(file.path, file.content))
                entries += 1
        summary = orjson.dumps({"entries": entries, "damaged": damaged})
        await response.write(_member(SUMMARY, summary) + _END)
        await response.write_eof()

    async def bring_in(self, call: Call[NoQuery, Import]) -> Told:
        durable = await self._proxy.kept.open()
        items: list[FileTaken] = []
        try:
            for file in call.body.files:
                beside = {"body_file": file.body_file, "original_body_file": file.original_body_file}
                try:
                    added = await durable.files.bring_in(file.name, file.document, beside)
                except (BadInput, Damaged, NotNow) as refused:
                    items.append(_taken(file, "refused", _told(file, refused)))
                else:
                    items.append(_taken(file, "added" if added else "known"))
        finally:
            counts = {word: sum(item.result == word for item in items) for word in ("added", "known", "refused")}
            if counts["added"]:
                await self._changes.note(call.request, "imported", about="dead letters", before=None, after=counts)
        return Imported(items=tuple(items))


def _taken(file: FileGiven, result: str, why: str | None = None) -> FileTaken:
    return FileTaken(name=file.name, result=result, why=why)


def _told(file: FileGiven, refused: Exception) -> str:
    """With the file, which those reasons leave out that are about the entry in it."""
    why = str(refused)
    return why if why.startswith(file.name) or isinstance(refused, BadInput) else f"{file.name}: {why}"


def _member(path: str, content: bytes) -> bytes:
    from tarfile import TarInfo  # only for who exports

    info = TarInfo(path)
    info.size, info.mode = len(content), 0o600
    return info.tobuf() + content + bytes(-len(content) % _BLOCK)
