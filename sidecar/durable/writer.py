"""The one thread that writes: group commit, and what happens when the disk says no.

Law: a write's future resolves after the commit that holds it is durable, never before. Whatever waits while one
commit is being synced goes into the next one together. After a failed commit nothing of it counts as kept, the
connection is closed, and a new one has to prove itself with a write of its own before it is trusted. Files that are
no longer in their places are no promise: nothing is committed into them, and a commit that they vanished under is
told as a failure. The connection is kept then, because it alone still holds what was in them.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sidecar import clock
from sidecar.durable.account import Account
from sidecar.durable.opening import Opener, Report, is_damage, primary_code
from sidecar.durable.presence import Presence
from sidecar.durable.trouble import NotKept

Work = Callable[[sqlite3.Connection], Any]
OnOpen = Callable[[sqlite3.Connection], None]

_MOST_AT_ONCE = 256
_RETRY_AFTER = 0.5  # seconds between attempts to open a store that is in trouble
_LOOK_AFTER = 2.0  # seconds without a write after which it is asked whether the files are still there
_WHAT_TO_DO = (
    "Bodies that belong to no entry are left where they are. Restore a backup, or look for the missing files; then "
    "say that you know of it: `sidecar dlq verify --accept --reason TEXT`"
)
# Errors that speak about one statement; every other one speaks about the disk or the connection.
_OF_THE_STATEMENT = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
    }
)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether writes are kept at the moment."""

    ok: bool
    reason: str = ""
    since: float = 0.0
    """Wall time of the last change."""
    gone: bool = False
    """The files are not in their places: what was kept may be lost, so it is more than a disk in trouble."""


class _Write:
    __slots__ = ("future", "grows", "work")

    def __init__(self, work: Work, future: asyncio.Future[Any], grows: int) -> None:
        self.work = work
        self.future = future
        self.grows = grows


class Writer:
    """`submit` on the event loop; everything else happens in the thread."""

    def __init__(
        self,
        opener: Opener,
        report: Report,
        room: Callable[[], int],
        hooks: list[OnOpen],
        presence: Presence,
        account: Account,
        fault: Callable[[str, BaseException], None],
    ) -> None:
        self._fault = fault
        self._opener = opener
        self._account = account
        self._presence = presence
        self._report = report
        self._room = room
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._connection: sqlite3.Connection | None = None
        self._next_try = 0.0
        self._full = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self.health = Health(False, "not open yet", clock.wall())
        self.generation = 0
        """Counts connections; readers open anew when it changes."""
        self.checked = True
        self.waiting_bytes = 0
        """Bytes of bodies and records that wait for their commit; touched on the event loop only."""

    # ---- on the event loop -----------------------------------------------------------------------------------

    def submit(self, work: Work, grows: int) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self.waiting_bytes += grows
        self._queue.put(_Write(work, future, grows))
        return future

    async def start(self) -> None:
        """Open and start. A disk in trouble starts degraded; only CannotUse is raised."""
        await self._loop.run_in_executor(None, self._open_first)
        self._thread.start()

    async def stop(self) -> None:
        """Everything submitted so far is committed (or refused) first."""
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _resolve(self, batch: list[_Write], outcomes: list[Any]) -> None:
        for write, outcome in zip(batch, outcomes, strict=True):
            self.waiting_bytes -= write.grows
            if write.future.done():
                continue  # whoever asked has gone; the write stands
            if isinstance(outcome, _Failed):
                write.future.set_exception(outcome.error)
            else:
                write.future.set_result(outcome)

    # ---- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            batch, more = self._next_batch()
            if batch or more:
                self._handle(batch)
            if not more:
                break
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._account.close(in_order=self.health.ok)
        self.health = Health(False, "the store is closed", clock.wall())

    def _next_batch(self) -> tuple[list[_Write], bool]:
        """What waits, and whether there will be more. Empty when it is time to look at the files again."""
        batch: list[_Write] = []
        try:
            first = self._queue.get(timeout=_LOOK_AFTER if self.health.ok else _RETRY_AFTER)
            while first is not None:
                batch.append(first)
                if len(batch) == _MOST_AT_ONCE:
                    return batch, True
                first = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        return batch, False

    def _handle(self, batch: list[_Write]) -> None:
        if self._connection is None:
            self._reopen()
        elif (gone := self._presence.missing()) is not None:
            self._vanished(gone)
        elif self.health.gone:
            self._back()
        if self._connection is None or self.health.gone:
            outcomes: list[Any] = [_Failed(self._not_kept()) for _ in batch]
        else:
            outcomes = self._commit(self._connection, batch) if batch else []
        if batch:
            try:
                self._loop.call_soon_threadsafe(self._resolve, batch, outcomes)
            except RuntimeError:
                pass  # the event loop has gone, and with it everybody who waited

    def _commit(self, connection: sqlite3.Connection, batch: list[_Write]) -> list[Any]:
        outcomes: list[Any] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            changes = connection.total_changes
            room = self._room()
            for write in batch:
                if write.grows and write.grows > room:
                    outcomes.append(_Failed(self._no_room()))
                    continue
                room -= write.grows
                outcomes.append(_run_one(connection, write.work))
            changed = connection.total_changes > changes
            if changed:
                self._account.count(connection)
            connection.execute("COMMIT")
        except Exception as error:  # whatever it is, those who wait must hear of it
            if not isinstance(error, (sqlite3.Error, OSError)):
                self._fault("a group of writes failed inside the sidecar", error)
            self._give_up(error)
            return [_Failed(self._not_kept()) for _ in batch]
        if (gone := self._presence.missing()) is not None:
            self._vanished(gone)
            return [_Failed(self._not_kept()) for _ in batch]
        if changed:
            self._account.note()
        return outcomes

    def _no_room(self) -> NotKept:
        return NotKept(
            "full",
            f"the disk below {self._opener.directory} has less room than `dead_letter.min_free_bytes` asks for",
            "make room, or lower that limit",
        )

    def _not_kept(self) -> NotKept:
        reason = "full" if self._full else "disk_error"
        if self.health.gone:
            return NotKept("disk_error", self.health.reason)
        return NotKept(reason, f"{self._opener.path} cannot be written: {self.health.reason}", "look at the disk")

    def _give_up(self, error: BaseException) -> None:
        """Close what failed. Nothing is tried again on a handle that has lied once."""
        connection, self._connection = self._connection, None
        if is_damage(error):
            self._opener.suspect()
        if connection is not None:
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            except sqlite3.Error:
                pass  # closing drops it as well
            connection.close()
        self._degraded(error)

    def _degraded(self, error: BaseException) -> None:
        self._next_try = clock.monotonic() + _RETRY_AFTER
        reason = str(error) or type(error).__name__
        self._full = isinstance(error, sqlite3.Error) and primary_code(error) == sqlite3.SQLITE_FULL
        if self.health.ok or self.health.reason != reason:
            self.health = Health(False, reason, clock.wall())
            self._report(
                "sidecar.store.degraded",
                f"{self._opener.path} cannot be written: {reason}. Traffic goes on, nothing is kept until the disk "
                "works again; it is tried every half second",
            )

    # ---- files that are no longer there ----------------------------------------------------------------------

    def _vanished(self, problem: str) -> None:
        if not self.health.gone or self.health.reason != problem:
            self.health = Health(False, problem, clock.wall(), gone=True)
            self._report("sidecar.store.gone", f"{problem}. Traffic goes on, nothing is kept until then")
        if self._connection is not None and self._presence.log_to_replace:
            self._take_over(self._connection)

    def _take_over(self, connection: sqlite3.Connection) -> None:
        """Only the log was removed, and is still open here: everything in it goes into the database, and another log
        is begun. Readers open anew, because theirs is the old log."""
        try:
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            self._give_up(error)
            return
        if busy:
            return  # somebody reads; the next look tries again
        self.generation += 1
        self._connection = None
        connection.close()
        self._next_try = 0.0
        self._reopen()

    def _back(self) -> None:
        """The very same files are in their places again. A write of our own has to succeed first."""
        assert self._connection is not None
        try:
            self._prove(self._connection)
        except sqlite3.Error as error:
            self._give_up(error)
            return
        self._account.note()
        self._recovered()

    def _recovered(self) -> None:
        self._report("sidecar.store.recovered", f"{self._opener.path} can be written again")
        self.health = Health(True, "", clock.wall())

    # ---- opening ---------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        if clock.monotonic() < self._next_try:
            return
        foreign = self._presence.foreign()
        if foreign is not None:  # an empty one would be made in its place
            self._next_try = clock.monotonic() + _RETRY_AFTER
            self._vanished(foreign)
            return
        try:
            self._open()
        except Exception as error:  # whatever it is, the thread that writes must go on
            self._degraded(error)

    def _open_first(self) -> None:
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            self._degraded(error)

    def _open(self) -> None:
        opened = self._opener.open()
        connection = opened.connection
        try:
            for hook in self._hooks:
                hook(connection)
            missing = self._prove(connection, first=True)
        except BaseException:
            connection.close()
            raise
        self._presence.note()
        self._account.opened()
        if missing is not None:
            self._report("sidecar.store.incomplete", f"{missing}. {_WHAT_TO_DO}")
        self._connection, self.checked = connection, opened.checked
        self.generation += 1
        if self.generation > 1:
            self._recovered()
        self.health = Health(True, "", clock.wall())

    def _prove(self, connection: sqlite3.Connection, *, first: bool = False) -> str | None:
        """A commit of its own, with its fsync. What the store has lost since it was open before."""
        connection.execute("BEGIN IMMEDIATE")
        missing = self._account.compare(connection) if first else None
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('opened_at', ?)", (clock.wall(),))
        self._account.count(connection)
        connection.execute("COMMIT")
        return missing


class _Failed:
    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def _run_one(connection: sqlite3.Connection, work: Work) -> Any:
    """One write within the group: its own mistakes undo it alone, a disk error ends the group."""
    connection.execute("SAVEPOINT one")
    try:
        outcome = work(connection)
    except sqlite3.Error as error:
        if primary_code(error) not in _OF_THE_STATEMENT:
            raise
        outcome = _Failed(error)
    except Exception as error:
        outcome = _Failed(error)
    if isinstance(outcome, _Failed):
        connection.execute("ROLLBACK TO one")
    connection.execute("RELEASE one")
    return outcome
