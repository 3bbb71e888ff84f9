"""How much should be in the store, noted in a second place: what is missing after a crash is then missed.

A database that lost its log, or its last commits, looks whole. So every commit counts itself in the database, and its
number and what it held are noted in a small file of their own.

Law: the note is written after the commit is durable, never before, and needs no sync of its own: after a kill the
kernel still has it, after a power cut it may be older than the store. It is therefore never newer than a store that
lost nothing, and who finds a newer note has found a loss. Two places are written in turn, each with a checksum, so that
half a note is none. That nothing at all is missing is only known (`exact`) if the process alone ended, or in order.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from sidecar import clock
from sidecar.durable.opening import BODIES
from sidecar.durable.presence import Identity, identity_of

FILE = "account"
_PLACE = 512
_MOST_LOSSES = 20
_MAGIC = b"sidecar account "


class Loss(NamedTuple):
    """Something that should be in the store and is not."""

    at: float
    """When that was found."""
    what: str


@dataclass(frozen=True, slots=True)
class Sheet:
    """What the store held after a commit."""

    store: str
    """Which store: a random name that it got when it was made."""
    commits: int
    letters: int
    deliveries: int
    answers: int = 0
    """Of the idempotency store."""
    run: str = ""
    """Of the kernel: the same as long as the machine did not restart."""
    closed: bool = False
    """The process ended in order, and this was synced."""


class Account:
    """`compare`, then `count` in each commit and `note` after it; in the end `close`. In the writer's thread."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._notes = Notes(database.with_name(FILE))
        self._store = ""
        self._run = run_of_kernel()
        self._counted: Sheet | None = None
        self._older = False
        self.exact = False
        """Nothing is missing for certain, so what no row refers to was never promised."""
        self.losses: tuple[Loss, ...] = ()
        """What was found missing and nobody has answered for yet."""

    def compare(self, connection: sqlite3.Connection) -> str | None:
        """On every opening, in its first transaction: what is newly missing, in words."""
        connection.execute("INSERT OR IGNORE INTO meta VALUES ('store_id', lower(hex(randomblob(8))))")
        (self._store,) = connection.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()
        found, noted = self._sheet(connection), self._notes.read()
        known = connection.execute("SELECT value FROM meta WHERE name = 'losses'").fetchone()
        losses = [] if known is None else [Loss(*each) for each in orjson.loads(known[0])]
        what = loss(noted, found, self._database)
        if noted is not None and what is not None:
            losses.append(Loss(clock.wall(), what))
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('losses', ?)", (_written(losses),))
        self.losses = tuple(losses)
        self.exact = not losses and (exact(noted, found) or (not found.commits and self._nothing_else()))
        self._older = noted is not None and (noted.store != found.store or noted.commits > found.commits)
        return what

    def _nothing_else(self) -> bool:
        """A store that was made just now, where nothing was before."""
        bodies = self._database.with_name(BODIES)
        return not bodies.is_dir() or not any(bodies.iterdir())

    def opened(self) -> None:
        """That transaction is durable."""
        self._notes.open()
        if self._older:
            self._notes.begin_anew()
        self.note()

    def count(self, connection: sqlite3.Connection) -> None:
        """As the last thing in a transaction that changes something."""
        connection.execute("UPDATE totals SET n = n + 1 WHERE name = 'commits'")
        self._counted = self._sheet(connection)

    def note(self) -> None:
        """After its commit."""
        if self._counted is not None:
            self._notes.write(self._counted)

    def close(self, *, in_order: bool) -> None:
        """After the database was closed."""
        if in_order and self._counted is not None:
            self._notes.write(replace(self._counted, closed=True))
            self._notes.sync()
        self._notes.close()

    def _sheet(self, connection: sqlite3.Connection) -> Sheet:
        n = dict(connection.execute("SELECT name, n FROM totals").fetchall())
        return Sheet(self._store, n["commits"], n["dead_letters"], n["deliveries"], n["idempotency"], self._run)

    # ---- as a guard ----------------------------------------------------------------------------------------------

    def missing(self) -> str | None:
        return self._notes.missing()

    def mend(self) -> str | None:
        self._notes.open()
        self.note()
        if self._notes.missing() is not None:
            return None
        return f"{self._notes.path} was removed or replaced while the sidecar runs; it was written again"


def _written(losses: list[Loss]) -> bytes:
    return orjson.dumps([list(each) for each in losses[-_MOST_LOSSES:]])


def accept(connection: sqlite3.Connection) -> None:
    """A person has looked into what is missing."""
    connection.execute("DELETE FROM meta WHERE name = 'losses'")


class Notes:
    """The file. All calls block, and none raises: a note that cannot be written is only older than it could be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._identity: Identity | None = None
        self._turn = 0

    def read(self) -> Sheet | None:
        """The newest note that is whole."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return None
        found = [_sheet(data[start : start + _PLACE]) for start in (0, _PLACE)]
        whole = [(sheet, turn) for turn, sheet in enumerate(found) if sheet is not None]
        if not whole:
            return None
        newest, turn = max(whole, key=lambda each: (each[0].commits, each[0].closed))
        self._turn = turn + 1
        return newest

    def open(self) -> None:
        self.close()
        with suppress(OSError):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            found = os.fstat(self._descriptor)
            self._identity = found.st_dev, found.st_ino

    def write(self, sheet: Sheet) -> None:
        if self._descriptor is None:
            return
        data = orjson.dumps(asdict(sheet))
        data = _MAGIC + b"%08x " % zlib.crc32(data) + data
        with suppress(OSError):
            os.pwrite(self._descriptor, data.ljust(_PLACE, b" "), self._turn % 2 * _PLACE)
            self._turn += 1

    def begin_anew(self) -> None:
        """For another store than the one of the notes: theirs must not be taken for newer."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)

    def sync(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def missing(self) -> str | None:
        if self._descriptor is None or identity_of(self.path) == self._identity:
            return None
        return f"{self.path} was removed or replaced while the sidecar runs; it is written again"


def run_of_kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def exact(noted: Sheet | None, found: Sheet) -> bool:
    """Nothing whatever is missing, whatever else may be lying about."""
    if noted is None or noted.store != found.store or noted.commits > found.commits:
        return False
    return noted.closed or (noted.run != "" and noted.run == found.run)


def loss(noted: Sheet | None, found: Sheet, path: Path) -> str | None:
    """What is missing in the store, in words; None if nothing is known to be."""
    if noted is None:
        return None
    held = f"{noted.letters} dead letters, {noted.deliveries} deliveries and {noted.answers} stored answers"
    if noted.store != found.store:
        if not noted.letters and not noted.deliveries:
            return None
        return f"{path} is not the store that was here before: that one held {held}, and is missing"
    if noted.commits <= found.commits:
        return None
    missing = noted.commits - found.commits
    return (
        f"the last {missing} commits of {path} are missing, maybe more: it held {held} after its last one, now "
        f"{found.letters}, {found.deliveries} and {found.answers}"
    )


def _sheet(place: bytes) -> Sheet | None:
    if not place.startswith(_MAGIC):
        return None
    check, _, data = place[len(_MAGIC) :].rstrip(b" ").partition(b" ")
    try:
        if int(check, 16) != zlib.crc32(data):
            return None
        fields: dict[str, Any] = orjson.loads(data)
        return Sheet(**fields)
    except (ValueError, TypeError):
        return None
