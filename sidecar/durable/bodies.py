"""Bodies too large for a row, each in a file that is named after its content.

Law: a body's file is whole, synced and under its final name before the row that refers to it is committed; a row
therefore never points at half a body. A file no row refers to is garbage from a crash and is collected, but only when
it is certain that no row is missing; else it stays until somebody has said that it may go. Files hold
sealed bytes only, in chunks, so that writing and reading need little memory whatever the size.
"""

from __future__ import annotations

import errno
import hashlib
import re
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from sidecar import clock
from sidecar.durable.disk import TEMPORARY, Disk, tightened
from sidecar.durable.opening import BODIES
from sidecar.durable.seal import CHUNK, STREAM_HEADER, TAG, Keyring, StreamSealer
from sidecar.durable.store import Store
from sidecar.durable.trouble import Damaged, NotKept

_T = TypeVar("_T")

INLINE = 256 * 1024
"""Bodies up to this size stay in the database."""
_NAME = re.compile(r"[0-9a-f]{64}\.body")
_PER_HOP = 8  # chunks read or written each time a thread is asked


@dataclass(frozen=True, slots=True)
class BodyFile:
    """A body that is safely on disk."""

    name: str
    size: int
    """Of the body itself."""
    stored: int
    """Of the file."""
    sha256: str
    """Of the body itself."""


class Unclaimed(NamedTuple):
    """Files that no row refers to."""

    files: int
    bytes: int


class Spool:
    """Takes a body as it comes. Small ones stay in memory, larger ones go to a file as they arrive."""

    def __init__(self, bodies: Bodies, host: str, ident: str, limit: int) -> None:
        self._bodies = bodies
        self._host = host
        self._ident = ident
        self._limit = limit
        self._buffer = bytearray()
        self._file: _Writing | None = None
        self._hash = hashlib.sha256()
        self.size = 0
        self._counted = 0

    async def write(self, data: bytes) -> None:
        """Raises NotKept when the body is too large or the disk in trouble; the spool is then gone."""
        self.size += len(data)
        if self.size > self._limit:
            await self.abort()
            raise NotKept("too_large", f"the body is larger than {self._limit} bytes", "raise `max_body_bytes`")
        self._hash.update(data)
        self._buffer += data
        if self._file is None and len(self._buffer) > INLINE:
            self._file = await self._guarded(lambda: self._bodies.begin(self._host, self._ident))
        if self._file is not None:
            await self._count()
        if self._file is not None and len(self._buffer) >= CHUNK * _PER_HOP:
            await self._flush(last=False)

    async def _count(self) -> None:
        bodies = self._bodies
        bodies.spooled += self.size - self._counted
        self._counted = self.size
        if bodies.spooled + bodies.used > bodies.most():
            await self.abort()
            raise NotKept(
                "full",
                f"what is kept and being written takes more than `dead_letter.max_bytes` ({bodies.most()})",
                "replay or discard entries, let the outbox drain, or raise the limit",
            )

    def _uncount(self) -> None:
        self._bodies.spooled -= self._counted
        self._counted = 0

    async def finish(self) -> bytes | BodyFile:
        """The body: its bytes, or its file, which is kept if a row that refers to it is committed."""
        if self._file is None:
            return bytes(self._buffer)
        await self._flush(last=True)
        file = self._file
        name, stored = await self._guarded(file.finish)
        self._uncount()
        self._file = None
        return BodyFile(name, self.size, stored, self._hash.hexdigest())

    async def abort(self) -> None:
        file, self._file = self._file, None
        self._uncount()
        self._buffer.clear()
        if file is not None:
            await self._bodies.store.in_thread(file.abort)

    async def _flush(self, *, last: bool) -> None:
        file, data = self._file, bytes(self._buffer)
        assert file is not None
        whole = len(data) if last else len(data) - len(data) % CHUNK
        del self._buffer[:whole]
        await self._guarded(lambda: file.write(data[:whole], last=last))

    async def _guarded(self, work: Callable[[], _T]) -> _T:
        try:
            return await self._bodies.store.in_thread(work)
        except OSError as error:
            await self.abort()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            message = f"the body of {self._ident} cannot be written: {error.strerror or error}"
            raise NotKept("full" if full else "disk_error", message, "look at the disk") from error


class Bodies:
    """The folder of bodies."""

    def __init__(self, store: Store, keyring: Keyring, most: Callable[[], int] = lambda: sys.maxsize) -> None:
        """`most`: how many bytes may be kept in all, `dead_letter.max_bytes`."""
        self.most = most
        self.used = 0
        """Of these, as it was last counted."""
        self.spooled = 0
        """Bytes of bodies that are being written and belong to no row yet."""
        self.store = store
        self.keyring = keyring
        self.folder = store.directory / BODIES
        self._unreferenced: set[str] = set()  # finished, but the row is not committed yet

    def spool(self, host: str, ident: str, limit: int) -> Spool:
        return Spool(self, host, ident, limit)

    async def keep(self, host: str, ident: str, body: bytes) -> bytes | BodyFile:
        """For a body that is in memory already."""
        spool = self.spool(host, ident, len(body))
        for start in range(0, len(body), CHUNK * _PER_HOP):
            await spool.write(body[start : start + CHUNK * _PER_HOP])
        return await spool.finish()

    async def adopt(self, data: bytes, sha256: str, host: str, ident: str) -> BodyFile:
        """A sealed file from elsewhere, already checked against the hash of its content. Raises Damaged."""
        name = f"{sha256}.body"

        def work() -> BodyFile:
            self._make_folder()
            self.hold(name)
            self.store.disk.write_whole(self.folder / name, data)
            size, content = 0, hashlib.sha256()
            for chunk in self.chunks(name, host, ident):
                size += len(chunk)
                content.update(chunk)
            return BodyFile(name, size, len(data), content.hexdigest())

        try:
            return await self.store.in_thread(work)
        except OSError as error:
            await self.remove([name])
            raise NotKept(
                "disk_error", f"the body of {ident} cannot be written: {error}", "look at the disk"
            ) from error
        except Damaged:
            await self.remove([name])
            raise

    def begin(self, host: str, ident: str) -> _Writing:
        self._make_folder()
        return _Writing(self, self.keyring.stream_sealer("body", host, ident))

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)  # without its parents: a state directory that was removed is gone
        tightened(self.folder)

    def hold(self, name: str) -> None:
        self._unreferenced.add(name)

    def settled(self, name: str) -> None:
        """The row that refers to it is committed, or never will be."""
        self._unreferenced.discard(name)

    async def remove(self, names: Iterable[str | None]) -> None:
        """After the commit that dropped the last reference. What cannot be removed now is collected later."""
        gone = [name for name in names if name is not None]

        def work() -> None:
            for name in gone:
                self._unreferenced.discard(name)
                try:
                    self.store.disk.remove(self.folder / name)
                except OSError:
                    pass

        if gone:
            await self.store.in_thread(work)

    async def release(self, names: Iterable[str]) -> None:
        """After a commit or its failure: keep the files that a row refers to, remove the others."""
        wanted = list(names)

        def known(connection: sqlite3.Connection) -> set[str]:
            statement = "SELECT name FROM body_files WHERE name = ?"
            return {name for name in wanted if connection.execute(statement, (name,)).fetchone() is not None}

        if wanted:
            kept = await self.store.read(known)
            self._unreferenced -= kept
            await self.remove(set(wanted) - kept)

    async def read(self, name: str, host: str, ident: str) -> AsyncIterator[bytes]:
        """The body, chunk by chunk, each one verified before it is given out. Raises Damaged."""
        chunks = self.chunks(name, host, ident)

        def some() -> bytes:
            return b"".join(chunk for _, chunk in zip(range(_PER_HOP), chunks, strict=False))

        while data := await self.store.in_thread(some):
            yield data

    def chunks(self, name: str, host: str, ident: str) -> Iterator[bytes]:
        """As `read`, for code that already runs in a thread."""
        if not _NAME.fullmatch(name):
            raise Damaged(f"{name!r} is not the name of a body")
        try:
            with (self.folder / name).open("rb") as file:
                opened = self.keyring.stream_opener(file.read(STREAM_HEADER), "body", host, ident)
                number, sealed = 0, file.read(CHUNK + TAG)
                while True:
                    following = file.read(CHUNK + TAG)
                    data = opened(number, sealed, not following)
                    if data:
                        yield data
                    if not following:
                        return
                    number, sealed = number + 1, following
        except OSError as error:
            raise Damaged(f"the body file {self.folder / name} cannot be read: {error.strerror}") from error

    def size_of(self, name: str) -> int:
        """How large the body itself is. Raises Damaged."""
        try:
            sealed = (self.folder / name).stat().st_size - STREAM_HEADER
        except OSError as error:
            raise Damaged(f"the body {name} cannot be read: {error.strerror or error}") from error
        return sealed - TAG * -(-sealed // (CHUNK + TAG))

    def key_of(self, name: str) -> str:
        """The id of the key that sealed it, for code that already runs in a thread."""
        try:
            with (self.folder / name).open("rb") as file:
                return file.read(STREAM_HEADER)[4:8].hex()
        except OSError as error:
            raise Damaged(f"the body file {self.folder / name} cannot be read: {error.strerror}") from error

    async def collect(self) -> int:
        """Remove what no row refers to; at the start only, when nothing is being written. How many files."""

        def work() -> int:
            half = [path for path in self._files() if path.name.endswith(TEMPORARY)]
            for path in half:
                self.store.disk.remove(path)
            return len(half)

        removed = await self.store.in_thread(work)
        if self.store.exact:
            return removed + (await self.release_unclaimed()).files
        left = await self.unclaimed()
        if left.files:
            self.store.report(
                "sidecar.store.unclaimed",
                f"{left.files} files in {self.folder} ({left.bytes} bytes) belong to no entry of the store, and it is "
                "not certain that none is missing; they stay until `sidecar dlq verify --accept --reason TEXT`",
            )
        return removed

    async def unclaimed(self) -> Unclaimed:
        """Whole bodies that no row refers to."""
        paths = await self._unclaimed()
        return await self.store.in_thread(lambda: Unclaimed(len(paths), sum(map(_size, paths))))

    async def release_unclaimed(self) -> Unclaimed:
        """Remove them."""
        paths = await self._unclaimed()

        def work() -> Unclaimed:
            size = sum(map(_size, paths))
            for path in paths:
                self.store.disk.remove(path)
            return Unclaimed(len(paths), size)

        return await self.store.in_thread(work)

    async def _unclaimed(self) -> list[Path]:
        """Looked for before it is asked what is known: a body gets its row after its file, and is held until then."""
        there = await self.store.in_thread(lambda: [path for path in self._files() if _NAME.fullmatch(path.name)])
        held = set(self._unreferenced)
        known = await self.store.read(
            lambda connection: {name for (name,) in connection.execute("SELECT name FROM body_files")}
        )
        return [path for path in there if path.name not in known | held]

    def _files(self) -> list[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _Writing:
    """One file being written, in a thread."""

    def __init__(self, bodies: Bodies, sealer: StreamSealer) -> None:
        self._bodies = bodies
        self._disk: Disk = bodies.store.disk
        self._sealer = sealer
        self._path = bodies.folder / (clock.unguessable(32) + TEMPORARY)
        self._hash = hashlib.sha256()
        self._stored = 0
        self._descriptor: int | None = self._disk.create(self._path)
        self._put(sealer.header)

    def write(self, data: bytes, *, last: bool) -> None:
        if self._bodies.store.room() < len(data):
            raise OSError(errno.ENOSPC, "the disk has less to spare than `dead_letter.min_free_bytes`")
        for start in range(0, len(data), CHUNK):
            self._put(self._sealer.chunk(data[start : start + CHUNK], last=last and start + CHUNK >= len(data)))
        if last and not data:
            self._put(self._sealer.chunk(b"", last=True))

    def _put(self, sealed: bytes) -> None:
        assert self._descriptor is not None
        self._hash.update(sealed)
        self._stored += len(sealed)
        self._disk.write(self._descriptor, sealed)

    def finish(self) -> tuple[str, int]:
        assert self._descriptor is not None
        self._disk.sync(self._descriptor)
        self._close()
        name = self._hash.hexdigest() + ".body"
        self._bodies.hold(name)
        try:
            self._disk.rename(self._path, self._bodies.folder / name)
            self._disk.sync_directory(self._bodies.folder)
        except OSError:
            self._bodies.settled(name)
            raise
        return name, self._stored

    def abort(self) -> None:
        try:
            self._close()
            self._disk.remove(self._path)
        except OSError:
            pass  # collected at the next start

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._disk.close(descriptor)
