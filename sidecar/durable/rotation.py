"""A new key: it seals from now on, and everything older is sealed anew in the background.

Law: the new key is durably in its file, and the store knows that it needs it, before anything is sealed with it. An
old key is given up by the store only after a whole pass found nothing under it; its file stays for old backups until
somebody deletes it. A crash in the middle loses nothing: both keys are at hand, and the next pass goes on.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from functools import partial
from typing import Any

from sidecar.durable.bodies import Bodies, BodyFile
from sidecar.durable.seal import Keyring, next_key
from sidecar.durable.store import Store
from sidecar.durable.trouble import Damaged

_PER_STEP = 20


@dataclass(slots=True)
class Resealed:
    values: int = 0
    files: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """A table with sealed columns, and how its values are bound."""

    table: str
    key: str
    binding: str
    """SQL for host and id, in this order."""
    source: str
    columns: tuple[tuple[str, str], ...]
    """(column, purpose)."""
    files: tuple[str, ...] = ()


_RECORD = "CAST(dead_letters.record AS TEXT)"
# The host of a dead letter is in its record; JSON1 reads it out, so that no other module is needed here.
_PLACES = (
    _Place(
        "payloads",
        "seq",
        f"CASE WHEN json_valid({_RECORD}) THEN json_extract({_RECORD}, '$.host') ELSE '' END, dead_letters.dlq_id",
        "payloads JOIN dead_letters USING (seq)",
        (
            ("head", "head"),
            ("body", "body"),
            ("response", "answer"),
            ("original_head", "head"),
            ("original_body", "body"),
        ),
        ("body_file", "original_body_file"),
    ),
    _Place(
        "idempotency",
        "id",
        "upstream, api_key_id || ':' || method || ':' || lower(hex(path_hash)) || ':' || lower(hex(key_hash)) || ':' "
        "|| version",
        "idempotency",
        (("response", "answer"),),
    ),
    _Place(
        "deliveries",
        "id",
        "host, send_key",
        "deliveries",
        (("request", "delivery"), ("body", "body"), ("answer", "answer")),
        ("body_file",),
    ),
)


class Rotation:
    """`rotate`, then `reseal` as often as needed."""

    def __init__(self, store: Store, keyring: Keyring, bodies: Bodies) -> None:
        self._store = store
        self._keyring = keyring
        self._bodies = bodies

    async def rotate(self) -> str:
        """Make a new key and seal with it from now on. Returns its id."""
        key, file = await self._store.in_thread(lambda: next_key(self._keyring, self._store.disk))
        key_id = self._keyring.add(key, file)
        await self._store.write(lambda connection: self._keyring.enroll(connection, key_id))
        self._keyring.active = key_id
        return key_id

    async def needed(self) -> list[str]:
        """Ids of the keys that the store cannot do without."""
        found = await self._store.read(
            lambda connection: connection.execute("SELECT key_id FROM seal_keys ORDER BY key_id").fetchall()
        )
        return [key_id for (key_id,) in found]

    async def reseal(self, done: Resealed | None = None) -> Resealed:
        """One pass over everything, counted in `done` as it goes. Afterwards old keys are no longer needed by the
        store, unless something is damaged, which only they could open."""
        done = done if done is not None else Resealed()
        active = self._keyring.active
        for place in _PLACES:
            after = -1
            while True:
                last = await self._store.write(partial(self._reseal_some, place=place, after=after, done=done))
                if last is None:
                    break
                after = last
            await self._reseal_files(place, done)
        if not done.damaged:
            await self._store.write(
                lambda connection: connection.execute("DELETE FROM seal_keys WHERE key_id <> ?", (active,)) and None
            )
            self._keyring.needed = {active}
        return done

    def _reseal_some(self, connection: sqlite3.Connection, place: _Place, after: int, done: Resealed) -> int | None:
        names = ", ".join(name for name, _ in place.columns)
        some = connection.execute(
            f"SELECT {place.key}, {place.binding}, {names} FROM {place.source} WHERE {place.key} > ? "
            f"ORDER BY {place.key} LIMIT {_PER_STEP}",
            (after,),
        ).fetchall()
        for number, host, ident, *values in some:
            for (column, purpose), sealed in zip(place.columns, values, strict=True):
                if sealed is None or self._keyring.key_of(sealed) == self._keyring.active:
                    continue
                try:
                    fresh = self._keyring.seal(purpose, host, ident, self._keyring.open(purpose, host, ident, sealed))
                except Damaged:
                    done.damaged += 1  # found and set aside by the check
                    continue
                connection.execute(f"UPDATE {place.table} SET {column} = ? WHERE {place.key} = ?", (fresh, number))
                done.values += 1
        return int(some[-1][0]) if some else None

    async def _reseal_files(self, place: _Place, done: Resealed) -> None:
        for column in place.files:
            found = await self._store.read(partial(_files, place=place, column=column))
            for number, host, ident, name in found:
                try:
                    await self._reseal_file(place, column, number, host, ident, name, done)
                except Damaged:
                    done.damaged += 1

    async def _reseal_file(
        self, place: _Place, column: str, number: int, host: str, ident: str, name: str, done: Resealed
    ) -> None:
        if await self._store.in_thread(lambda: self._bodies.key_of(name)) == self._keyring.active:
            return
        spool = self._bodies.spool(host, ident, 1 << 62)
        async for chunk in self._bodies.read(name, host, ident):
            await spool.write(chunk)
        fresh = await spool.finish()
        assert isinstance(fresh, BodyFile)

        def work(connection: sqlite3.Connection) -> bool:
            changed = connection.execute(
                f"UPDATE {place.table} SET {column} = ? WHERE {place.key} = ? AND {column} = ?",
                (fresh.name, number, name),
            ).rowcount
            if changed:
                connection.execute("DELETE FROM body_files WHERE name = ?", (name,))
                connection.execute("INSERT INTO body_files VALUES (?, ?)", (fresh.name, fresh.stored))
            return bool(changed)

        if await self._store.write(work):
            self._bodies.settled(fresh.name)
            await self._bodies.remove([name])
            done.files += 1
        else:  # removed or edited meanwhile
            await self._bodies.remove([fresh.name])


def _files(connection: sqlite3.Connection, place: _Place, column: str) -> list[tuple[Any, ...]]:
    return connection.execute(
        f"SELECT {place.key}, {place.binding}, {column} FROM {place.source} WHERE {column} IS NOT NULL"
    ).fetchall()
