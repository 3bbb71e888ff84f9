"""How the database file is opened, checked, brought up to date, or set aside.

Law: a file is trusted after its check, never before. A damaged one is renamed, together with its log and its
bodies, and a fresh one started; nothing is ever deleted. A file of a newer release is refused, because this one
would not know what it must not touch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sidecar import clock
from sidecar.durable import wal
from sidecar.durable.disk import Disk, private_directory, tightened
from sidecar.durable.schema import MIGRATIONS, VERSION
from sidecar.durable.trouble import CannotUse
from telemetry.timestamps import rfc3339

Report = Callable[[str, str], None]
"""(event name, sentence for a person)."""
Connect = Callable[[Path], sqlite3.Connection]

FILE = "store.db"
BODIES = "bodies"
_SUSPECT = "store.suspect"
_SIDES = ("", "-wal", "-shm")
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# The check reads the whole file; a larger one is checked in the background after the start.
CHECKED_AT_ONCE = 128 * 1024 * 1024

_SHRINKABLE = "PRAGMA auto_vacuum = INCREMENTAL"
_SETTINGS = (
    "PRAGMA synchronous = FULL",  # a commit returns after its fsync
    "PRAGMA fullfsync = ON",  # … which on macOS otherwise stops at the drive's cache
    "PRAGMA cache_size = -16000",  # 16 MB
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA wal_autocheckpoint = 4000",  # every 16 MB; entries touch many pages, so 4 MB would be all the time
    "PRAGMA secure_delete = OFF",  # some builds overwrite what is deleted; what is secret here is sealed
)


def primary_code(error: sqlite3.Error) -> int:
    return (getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR) & 0xFF


def is_damage(error: BaseException) -> bool:
    if isinstance(error, UnicodeDecodeError):  # the library cannot even say what is wrong with the schema
        return True
    return isinstance(error, sqlite3.Error) and primary_code(error) in _DAMAGE


def lenient(text: bytes) -> str:
    """Text that is not UTF-8 any more must reach the digest that finds it, not stop at the reading."""
    return text.decode("utf-8", "replace")


def connect_file(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)


@dataclass(frozen=True, slots=True)
class Opened:
    connection: sqlite3.Connection
    checked: bool
    """False: the file is large, and has to be checked in the background."""


class Opener:
    """Opens the one database below a directory, as often as needed."""

    def __init__(self, directory: Path, disk: Disk, report: Report, connect: Connect = connect_file) -> None:
        self.directory = directory
        self.path = directory / FILE
        self._disk = disk
        self._report = report
        self._connect = connect
        self._first = True

    def suspect(self) -> None:
        """The next opening checks the whole file, however long that takes."""
        try:
            (self.directory / _SUSPECT).touch(0o600)
        except OSError:
            pass  # the disk is in trouble anyway, and says so

    def open(self) -> Opened:
        """Raises CannotUse for a file that is not ours to touch, OSError or sqlite3.Error for a disk in trouble."""
        self._prepare_files()
        try:
            return self._open_checked()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not is_damage(error):
                raise
            self._set_aside(str(error))
        self._prepare_files()
        return self._open_checked()

    # ---- files -----------------------------------------------------------------------------------------------

    def _prepare_files(self) -> None:
        tight = [self.directory] if private_directory(self.directory) else []
        if not self.path.exists():
            for left_over in (self.path.with_name(FILE + side) for side in _SIDES[1:]):
                if left_over.exists():  # a log without its database would be taken for the new one's
                    left_over.rename(self._aside(left_over.name))
            self._disk.close(self._disk.create(self.path))
            self._disk.sync_directory(self.directory)
        tight += [path for side in _SIDES if (path := self.path.with_name(FILE + side)).exists() and tightened(path)]
        for path in tight:
            self._report("sidecar.store.permissions", f"{path} could be read by others; its mode is now private")

    def _aside(self, name: str) -> Path:
        stamp = rfc3339(clock.wall()).replace(":", "").replace("-", "").replace(".", "")
        path = self.directory / f"{name}.damaged-{stamp}"
        number = 1
        while path.exists():
            number += 1
            path = self.directory / f"{name}.damaged-{stamp}-{number}"
        return path

    def _set_aside(self, why: str) -> None:
        """Rename everything that belongs to the damaged file, the database last: a crash in between repeats this."""
        kept = self._aside(FILE)
        suffix = kept.name.removeprefix(FILE)
        for name in (BODIES, *(FILE + side for side in reversed(_SIDES))):
            path = self.directory / name
            if path.exists():
                path.rename(self.directory / (name + suffix))
        (self.directory / _SUSPECT).unlink(missing_ok=True)
        self._disk.sync_directory(self.directory)
        self._report(
            "sidecar.store.set_aside",
            f"{self.path} is damaged ({why}); it is kept as {kept} with its bodies, and an empty one was started. "
            f"What can be read in it can be brought back with `sqlite3 {kept} .recover`, or restore a backup",
        )

    # ---- the database ----------------------------------------------------------------------------------------

    def _open_checked(self) -> Opened:
        log = self.path.with_name(FILE + "-wal")
        # Only a crash leaves a log to compare. In a running process it may end with frames of a commit that failed.
        promised, self._first = wal.last_commit(log) if self._first else 0, False
        copy = self._copy_log(log) if promised else None
        connection = self._connect(self.path)
        connection.text_factory = lenient
        try:
            connection.execute(_SHRINKABLE)  # of effect in a file that has nothing in it yet
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise CannotUse(
                    f"{self.path} lies on a file system without shared memory (journal mode is {mode})",
                    "set `state_dir` to a local disk",
                )
            for setting in _SETTINGS:
                connection.execute(setting)
            self._compare_log(connection, promised, copy)
            checked = self._check(connection)
            self._migrate(connection)
            if checked:
                self._make_shrinkable(connection)
        except BaseException:
            connection.close()
            raise
        return Opened(connection, checked)

    def _copy_log(self, log: Path) -> Path | None:
        """SQLite overwrites its log; should part of it be unreadable, this copy is what is left."""
        copy = log.with_name(log.name + ".before")
        try:
            self._disk.remove(copy)
            descriptor = self._disk.create(copy)
            try:
                with log.open("rb") as file:
                    while data := file.read(1 << 20):
                        self._disk.write(descriptor, data)
            finally:
                self._disk.close(descriptor)
        except OSError:
            return None
        return copy

    def _compare_log(self, connection: sqlite3.Connection, promised: int, copy: Path | None) -> None:
        taken_back = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1] if promised else 0
        if promised > taken_back:
            kept = self._aside(FILE + "-wal")
            if copy is not None:
                copy.rename(kept)
            self._report(
                "sidecar.store.log_damaged",
                f"{promised - taken_back} of {promised} frames of {self.path}-wal could not be taken back after a "
                f"crash: the last commits may be missing. The log is kept as {kept}; compare its entries with the "
                "callers' records",
            )
        elif copy is not None:
            self._disk.remove(copy)

    def _check(self, connection: sqlite3.Connection) -> bool:
        suspect = (self.directory / _SUSPECT).exists()
        if not suspect and self.path.stat().st_size > CHECKED_AT_ONCE:
            return False
        problem = repaired(connection) if suspect else quick_check(connection)
        if problem is not None:
            raise damage(problem)
        if suspect:
            (self.directory / _SUSPECT).unlink(missing_ok=True)
        return True

    def _migrate(self, connection: sqlite3.Connection) -> None:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > VERSION:
            raise CannotUse(
                f"{self.path} was written by a newer sidecar (format {found}, this one knows up to {VERSION})",
                "start that release again, or set another `state_dir`",
            )
        if 0 < found < VERSION:
            self._report(
                "sidecar.store.upgraded",
                f"{self.path} was written by an earlier release and is brought from format {found} to {VERSION}, which "
                "that release cannot read; to go back to it, restore a backup that it made",
            )
        for number in range(found, VERSION):
            connection.execute("BEGIN IMMEDIATE")
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")

    def _make_shrinkable(self, connection: sqlite3.Connection) -> None:
        """A file of an earlier release is written anew once, while it is small; a large one only reuses its room."""
        if connection.execute("PRAGMA auto_vacuum").fetchone()[0] or self.path.stat().st_size > CHECKED_AT_ONCE:
            return
        try:
            connection.execute(_SHRINKABLE)
            connection.execute("VACUUM")
        except sqlite3.Error as error:
            if is_damage(error):
                raise  # else there was no room for it: it goes on as it is


def damage(problem: str) -> sqlite3.DatabaseError:
    """An error as SQLite itself would raise it."""
    error = sqlite3.DatabaseError(problem)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def repaired(connection: sqlite3.Connection) -> str | None:
    """The thorough check, indices included. Those can be made anew; what is wrong after that stays wrong."""
    problem = integrity_check(connection)
    if problem is not None:
        try:
            connection.execute("REINDEX")
        except sqlite3.Error as error:
            return f"{problem}; {error}"
        problem = integrity_check(connection)
    return problem


def integrity_check(connection: sqlite3.Connection) -> str | None:
    (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    return None if answer == "ok" else str(answer)


def quick_check(connection: sqlite3.Connection) -> str | None:
    """What is wrong with the structure of the file, None if nothing is."""
    (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return None if answer == "ok" else str(answer)
