"""What operators ordered and a restart must not forget: policies, the kill switch, forced breakers.

Law: plain rows, read once at the start, written before the order is answered.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from config.runtime import Runtime
from sidecar.durable.store import Store
from sidecar.forced import ForcedState

_POLICY = "policies."
_RETRIES = "retries_enabled"


class Orders:
    """The rows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read_runtime(self) -> Runtime:
        def select(connection: sqlite3.Connection) -> list[tuple[str, str]]:
            return connection.execute("SELECT key, value FROM runtime_settings ORDER BY key").fetchall()

        policies: dict[str, Any] = {}
        retries: bool | None = None
        for key, text in await self._store.read(select):
            value = json.loads(text)
            if key == _RETRIES:
                retries = bool(value)
            elif key.startswith(_POLICY):
                policies[key.removeprefix(_POLICY)] = value
        return Runtime(policies, retries)

    async def keep_runtime(self, runtime: Runtime, now: float) -> None:
        """All of it: it is little. Returns when it is on disk. Raises NotKept."""
        rows: list[tuple[str, Any]] = [(f"{_POLICY}{name}", given) for name, given in runtime.policies.items()]
        if runtime.retries_enabled is not None:
            rows.append((_RETRIES, runtime.retries_enabled))

        def replace(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM runtime_settings")
            connection.executemany(
                "INSERT INTO runtime_settings (key, value, set_at) VALUES (?, ?, ?)",
                [(key, json.dumps(value), now) for key, value in rows],
            )

        await self._store.write(replace)

    async def read_forced(self, now: float) -> list[ForcedState]:
        """Those that still hold."""

        def select(connection: sqlite3.Connection) -> list[ForcedState]:
            found = connection.execute(
                "SELECT upstream, endpoint, state, until, reason FROM forced_breakers WHERE until IS NULL OR until > ?",
                (now,),
            )
            return [ForcedState(*row) for row in found]

        return await self._store.read(select)

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
