"""What operators ordered and a restart must not forget: policies, the kill switch, forced breakers.

Law: plain rows, read once at the start, written before the order is answered.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.runtime import Runtime
from sidecar.durable.schema import VERSION
from sidecar.durable.store import Store
from sidecar.durable.trouble import CannotUse
from sidecar.forced import ForcedState

_POLICY = "policies."
_RETRIES = "retries_enabled"
_UNTIL = "until"


class Orders:
    """The rows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_runtime(self) -> Runtime:
        return await self._store.read(_runtime)

    async def keep_runtime(self, runtime: Runtime, now: float) -> None:
        """All of it: it is little. Returns when it is on disk. Raises NotKept."""
        rows: list[tuple[str, Any]] = [(f"{_POLICY}{name}", given) for name, given in runtime.policies.items()]
        if runtime.retries_enabled is not None:
            rows.append((_RETRIES, runtime.retries_enabled))
        if runtime.until:
            rows.append((_UNTIL, dict(runtime.until)))

        def replace(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM runtime_settings")
            connection.executemany(
                "INSERT INTO runtime_settings (key, value, set_at) VALUES (?, ?, ?)",
                [(key, json.dumps(value), now) for key, value in rows],
            )

        await self._store.write(replace)

    async def read_forced(self, now: float) -> list[ForcedState]:
        """Those that still hold."""

        return await self._store.read(lambda connection: _forced(connection, now))

    async def keep_forced(self, kept: Sequence[ForcedState], now: float) -> None:
        """A state of None: forced no longer. What has run out since goes with it. Raises NotKept."""

        def replace(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM forced_breakers WHERE until <= ?", (now,))
            for one in kept:
                connection.execute(
                    "DELETE FROM forced_breakers WHERE upstream = ? AND endpoint = ?", (one.upstream, one.endpoint)
                )
                if one.state is not None:
                    connection.execute("INSERT INTO forced_breakers VALUES (?, ?, ?, ?, ?)", one)

        await self._store.write(replace)


def read_beside(path: Path, now: float) -> tuple[Runtime, list[ForcedState]]:
    """What is ordered, while another process still owns the store. Raises CannotUse. Blocks."""
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found > VERSION:
                raise CannotUse(
                    f"{path} was written by a newer sidecar (format {found}, this one knows up to {VERSION})",
                    "start that release again",
                )
            return _runtime(connection), _forced(connection, now)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise CannotUse(f"{path} cannot be read: {error}", "look at the disk") from error


def _runtime(connection: sqlite3.Connection) -> Runtime:
    policies: dict[str, Any] = {}
    retries: bool | None = None
    until: dict[str, float] = {}
    for key, text in connection.execute("SELECT key, value FROM runtime_settings ORDER BY key"):
        value = json.loads(text)
        if key == _RETRIES:
            retries = bool(value)
        elif key == _UNTIL:
            until = value
        elif key.startswith(_POLICY):
            policies[key.removeprefix(_POLICY)] = value
    return Runtime(policies, retries, until)


def _forced(connection: sqlite3.Connection, now: float) -> list[ForcedState]:
    found = connection.execute(
        "SELECT upstream, endpoint, state, until, reason FROM forced_breakers WHERE until IS NULL OR until > ?", (now,)
    )
    return [ForcedState(*row) for row in found]
