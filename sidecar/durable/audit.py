"""Who changed what, when, from where, before and after: written once, never changed.

Law: rows are only ever added; the database itself refuses anything else. Newest first, in pages whose cursor is a
row's number, so that new rows move nothing.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from sidecar.durable.store import Store
from sidecar.durable.trouble import BadInput

_PER_STEP = 500
_LONGEST_VALUE = 65_536
_COLUMNS = "seq, at, who, claimed, client, agent, what, about, before, after, reason"


@dataclass(frozen=True, slots=True)
class Entry:
    """One row. `who` is a token's name, `local` where none is needed, or the sidecar's own `signal` and `file`;
    `claimed` is the user that the command line says it runs as, which nobody has checked."""

    at: float
    who: str
    what: str
    about: str
    before: Any = None
    after: Any = None
    reason: str | None = None
    claimed: str | None = None
    client: str | None = None
    agent: str | None = None
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows: times are wall time, `about` and `what` are parts of the text."""

    since: float | None = None
    until: float | None = None
    who: str | None = None
    what: str | None = None
    about: str | None = None


class Audit:
    """The table."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, entry: Entry) -> None:
        """Returns when it is on disk. Raises NotKept."""
        before, after = _written(entry.before), _written(entry.after)
        values = (entry.at, entry.who, entry.claimed, entry.client, entry.agent, entry.what, entry.about)

        def insert(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO audit (at, who, claimed, client, agent, what, about, before, after, reason) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, before, after, entry.reason),
            )

        await self._store.write(insert)

    async def expire(self, before: float) -> int:
        """Remove what is older: small steps, so that live writes never wait long. How many rows."""

        def delete(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('audit_kept_from', ?)", (before,))
            return connection.execute(
                "DELETE FROM audit WHERE seq IN (SELECT seq FROM audit WHERE at < ? ORDER BY at LIMIT ?)",
                (before, _PER_STEP),
            ).rowcount

        def due(connection: sqlite3.Connection) -> bool:
            return connection.execute("SELECT 1 FROM audit WHERE at < ? LIMIT 1", (before,)).fetchone() is not None

        removed = 0
        while await self._store.read(due):
            removed += await self._store.write(delete)
        return removed

    async def page(self, wanted: Wanted, limit: int, cursor: str | None = None) -> tuple[list[Entry], str | None]:
        """The newest first, and the cursor of the page that follows (None: there is none)."""
        conditions, values = _conditions(wanted)
        if cursor is not None:
            if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
                raise BadInput("cursor", "is not one that was given out", "leave it out to begin anew")
            conditions.append("seq < ?")
            values.append(int(cursor))
        where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
        query = f"SELECT {_COLUMNS} FROM audit {where}ORDER BY seq DESC LIMIT ?"  # words of this file only

        def select(connection: sqlite3.Connection) -> list[Entry]:
            return [_entry(row) for row in connection.execute(query, (*values, limit + 1))]

        found = await self._store.read(select)
        return found[:limit], str(found[limit - 1].seq) if len(found) > limit else None

    async def count(self, wanted: Wanted) -> int:
        """How many fit."""
        conditions, values = _conditions(wanted)
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        query = f"SELECT count(*) FROM audit{where}"  # words of this file only
        return int(await self._store.read(lambda connection: connection.execute(query, values).fetchone()[0]))


def _conditions(wanted: Wanted) -> tuple[list[str], list[Any]]:
    given = {
        "at >= ?": wanted.since,
        "at <= ?": wanted.until,
        "who = ?": wanted.who,
        "instr(what, ?) > 0": wanted.what,
        "instr(about, ?) > 0": wanted.about,
    }
    chosen = {condition: value for condition, value in given.items() if value is not None}
    return list(chosen), list(chosen.values())


def _written(value: Any) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else json.dumps(f"{len(text)} characters, too many to keep")


def _entry(row: tuple[Any, ...]) -> Entry:
    seq, at, who, claimed, client, agent, what, about, before, after, reason = row
    return Entry(at, who, what, about, _read(before), _read(after), reason, claimed, client, agent, seq)


def _read(text: str | None) -> Any:
    return None if text is None else json.loads(text)
