"""One SQLite file below `state_dir`: every write through one thread, every read through others, none on the loop.

Law: `await store.write(work)` returns after `work` is durable, or raises NotKept, and then nothing of it is there.
`work` is a function of a connection; it runs in the writer's thread inside a transaction that it shares with
whatever else waits, so it is quick and touches nothing but the connection. Trouble with the disk never stops the
process: the store is degraded, says so in `health`, and recovers by itself.

This is the whole interface that the layers above use; another backend has to offer `write`, `read`, `in_thread`,
`health` and `boot_id`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from sidecar import clock
from sidecar.durable.account import Account, Loss, accept
from sidecar.durable.disk import Disk, volatile_file_system
from sidecar.durable.opening import (
    Connect,
    Opener,
    Report,
    connect_file,
    integrity_check,
    is_damage,
    lenient,
    primary_code,
    quick_check,
)
from sidecar.durable.presence import Guard, Presence
from sidecar.durable.trouble import NotKept, Trouble
from sidecar.durable.writer import Health, OnOpen, Writer

T = TypeVar("T")

# What may wait for its commit at once; past this a write that needs room is refused, so that memory is bounded.
_MOST_WAITING_BYTES = 64 * 1024 * 1024
_READERS = 2
_LONGEST_READ = 10.0


def silent(event: str, sentence: str) -> None:
    """For tests and tools that have no log."""


def unheard(what: str, error: BaseException) -> None:
    """The same."""


class Store:
    """Made by `Store.open`, ended by `close`."""

    def __init__(
        self,
        state_dir: Path,
        *,
        min_free_bytes: int = 0,
        report: Report = silent,
        hooks: Sequence[OnOpen] = (),
        disk: Disk | None = None,
        connect: Connect = connect_file,
        guards: Sequence[Guard] = (),
    ) -> None:
        self.directory = state_dir
        self.disk = disk or Disk()
        self.boot_id = clock.unguessable(16)
        """Names this run of the process: what another run left in flight is not trusted."""
        self.on_fault: Callable[[str, BaseException], None] = unheard
        self._loop = asyncio.get_running_loop()
        self._tell = report
        self._opener = Opener(state_dir, self.disk, self.report, connect)
        self.min_free_bytes = min_free_bytes
        self._account = Account(self._opener.path)
        presence = Presence(self._opener.path, [*guards, self._account], self.report)
        self._writer = Writer(self._opener, self.report, self.room, list(hooks), presence, self._account, self.fault)
        self._readers = ThreadPoolExecutor(_READERS, "store-reader")
        self._workers = ThreadPoolExecutor(_READERS, "store-files")
        self._local = threading.local()
        self._open_readers: list[sqlite3.Connection] = []
        self._check: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(cls, state_dir: Path, **options: Any) -> Store:
        """Raises CannotUse when the sidecar must not start with this directory."""
        store = cls(state_dir, **options)
        await store._writer.start()
        kind = await store.in_thread(lambda: volatile_file_system(state_dir))
        if kind is not None:
            store.report(
                "sidecar.store.volatile",
                f"state_dir {state_dir} is on {kind}, which does not outlive this machine or container; "
                "mount a volume there if dead letters are to survive",
            )
        if not store._writer.checked:
            store._check = clock.spawn(store._check_later(), "store check")
        return store

    @property
    def health(self) -> Health:
        return self._writer.health

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What should be in it and is not, until somebody has answered for it."""
        return self._account.losses

    @property
    def exact(self) -> bool:
        """For certain nothing is missing: what no row refers to was never promised."""
        return self._account.exact

    async def accept_losses(self) -> None:
        await self.write(accept)
        self._account.losses = ()

    @property
    def waiting_bytes(self) -> int:
        """Of what waits for its commit."""
        return self._writer.waiting_bytes

    @property
    def running(self) -> bool:
        return not self._closed

    @property
    def path(self) -> Path:
        return self._opener.path

    def report(self, event: str, sentence: str) -> None:
        """Told on the event loop, whichever thread it comes from."""
        try:
            self._loop.call_soon_threadsafe(self._tell, event, sentence)
        except RuntimeError:
            pass  # the event loop has gone

    def fault(self, what: str, error: BaseException) -> None:
        """Something of ours is wrong, not the disk; told on the event loop, whichever thread it comes from."""
        with contextlib.suppress(RuntimeError):  # the event loop has gone
            self._loop.call_soon_threadsafe(self.on_fault, what, error)

    def room(self) -> int:
        """How many bytes may still be added. Blocks: for threads."""
        return self.disk.free_bytes(self.directory) - self.min_free_bytes

    # ---- writing ---------------------------------------------------------------------------------------------

    def write(self, work: Callable[[sqlite3.Connection], T], *, grows: int = 0) -> asyncio.Future[T]:
        """`grows`: about how many bytes this adds; 0 for what must be possible on a nearly full disk too."""
        if self._closed or (grows and self._writer.waiting_bytes + grows > _MOST_WAITING_BYTES):
            failed: asyncio.Future[T] = self._loop.create_future()
            failed.set_exception(self._refusal())
            return failed
        return cast("asyncio.Future[T]", self._writer.submit(work, grows))

    def _refusal(self) -> NotKept:
        if self._closed:
            return NotKept("disk_error", f"{self.path} is closed", "the sidecar is stopping")
        return NotKept(
            "full", f"more is waiting to be written to {self.path} than memory allows", "the disk is too slow"
        )

    # ---- reading ---------------------------------------------------------------------------------------------

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """In a thread, on a connection that cannot write."""
        if self._closed:
            raise self._refusal()
        return await self._loop.run_in_executor(self._readers, self._read, work)

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection = self._reader()
            deadline = clock.monotonic() + _LONGEST_READ
            connection.set_progress_handler(lambda: clock.monotonic() > deadline, 50_000)
            try:
                return work(connection)
            finally:
                connection.set_progress_handler(None, 0)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if isinstance(error, sqlite3.Error) and primary_code(error) == sqlite3.SQLITE_INTERRUPT:
                raise Trouble(f"the answer took longer than {_LONGEST_READ:.0f} s", "narrow the filter") from None
            if is_damage(error):
                self._opener.suspect()
            self._local.generation = -1  # a new connection next time
            raise Trouble(f"{self.path} cannot be read: {error}", "look at the disk") from error

    def _reader(self) -> sqlite3.Connection:
        generation = self._writer.generation
        if getattr(self._local, "generation", None) == generation:
            return cast(sqlite3.Connection, self._local.connection)
        old: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if old is not None:
            self._open_readers.remove(old)
            old.close()
            self._local.connection = None
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = lenient
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA cache_size = -8000")
        self._open_readers.append(connection)
        self._local.connection, self._local.generation = connection, generation
        return connection

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Other blocking work: body files, keys."""
        return await self._loop.run_in_executor(self._workers, work)

    # ---- chores ----------------------------------------------------------------------------------------------

    async def _check_later(self) -> None:
        """A large file, after the start. Damage is told, and dealt with at the next opening."""
        problem = await self.problem(quick_check)
        if problem is not None:
            self.damaged(problem)

    def damaged(self, problem: str) -> None:
        self._opener.suspect()
        self.report(
            "sidecar.store.damaged",
            f"{self.path} is damaged ({problem}). Export what is needed (`sidecar dlq export`), then restart: "
            "what cannot be repaired will be set aside and an empty one started",
        )

    async def problem(self, check: Callable[[sqlite3.Connection], str | None] = integrity_check) -> str | None:
        """What is wrong with the structure of the file, however long the look takes; None if nothing is."""

        def work() -> str | None:
            try:
                connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)
            except sqlite3.Error as error:
                raise Trouble(self.health.reason or f"{self.path} cannot be read: {error}") from error
            connection.set_progress_handler(lambda: self._closed, 50_000)  # do not hold up the end
            try:
                return check(connection)
            except (sqlite3.Error, UnicodeDecodeError) as error:
                return str(error) if is_damage(error) else None
            finally:
                connection.close()

        return await self.in_thread(work)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._check is not None:
            await self._check
        for executor in (self._readers, self._workers):
            await self._loop.run_in_executor(None, executor.shutdown)
        for connection in self._open_readers:
            connection.close()
        self._open_readers.clear()
        await self._writer.stop()  # last, so that closing it folds the log into the database
