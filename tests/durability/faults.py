"""Faults of a disk: any step of Disk, and any statement of a database connection, can be made to fail."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sidecar.durable.disk import Disk

STEPS = ("create", "write", "sync", "rename", "sync_directory", "remove")


class FaultyDisk(Disk):
    """The `failing`-th step from now on (counted from 1) fails with `error`; 0 means none."""

    def __init__(self, failing: int = 0, error: int = errno.EIO) -> None:
        self.failing = failing
        self.error = error
        self.steps = 0
        self.free: int | None = None

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.failing:
            raise OSError(self.error, os.strerror(self.error))

    def create(self, path: Path) -> int:
        self._step()
        return super().create(path)

    def write(self, descriptor: int, data: bytes) -> None:
        try:
            self._step()
        except OSError:
            super().write(descriptor, data[: len(data) // 2])  # a failing write has often written something
            raise
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free


class Wires:
    """Makes connections whose statements a test can watch, hold up or break."""

    def __init__(self) -> None:
        self.connections: list[sqlite3.Connection] = []
        self.commits = 0
        self.before: Callable[[str], None] = lambda statement: None
        self.after: Callable[[str], None] = lambda statement: None

    def connect(self, path: Path) -> sqlite3.Connection:
        wires = self

        class Watched(sqlite3.Connection):
            def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
                wires.before(statement)
                cursor = super().execute(statement, *parameters)
                wires.commits += statement == "COMMIT"
                wires.after(statement)
                return cursor

        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Watched)
        self.connections.append(connection)
        return connection

    def fail_once(self, statement: str, code: int = sqlite3.SQLITE_IOERR, *, after: bool = False) -> None:
        """The next such statement fails, before it is executed or after."""

        def check(executed: str) -> None:
            if executed == statement:
                self.before = self.after = lambda _: None
                raise disk_error(code)

        if after:
            self.after = check
        else:
            self.before = check


def disk_error(code: int = sqlite3.SQLITE_IOERR) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    return error


def desync_index(database: Path, index: str, statement: str) -> None:
    """Run a statement while an index is not looking, so that it no longer agrees with its table."""

    def alone(*statements: tuple[str, tuple[Any, ...]]) -> None:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("PRAGMA writable_schema = ON")
        for text, parameters in statements:
            connection.execute(text, parameters)
        connection.close()

    connection = sqlite3.connect(database)
    row = connection.execute("SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master WHERE name = ?", (index,))
    definition = row.fetchone()
    connection.close()
    alone(("DELETE FROM sqlite_master WHERE name = ?", (index,)))
    alone((statement, ()))
    alone(("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", definition))
