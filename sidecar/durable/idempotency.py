"""The idempotency gate: a key is executed once, and its repeats get the first answer.

Law: a database constraint makes a key unique per (upstream, caller, method, path, version); one thread writes, so of
two calls at the same moment exactly one goes through. The mark `in_flight` is durable before the request is sent. A
mark left by a process that is gone proves nothing: it is `interrupted`, and the call that repeats it goes through
only if a second execution is impossible or the provider honours the key. Answers are stored sealed and bounded, and
without what they gave to one client alone: a cookie is never set again.

in_flight → succeeded | failed; in_flight of a dead process → interrupted; failed, interrupted → in_flight again.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from sidecar import clock
from sidecar.durable.entry import Fields
from sidecar.durable.seal import Keyring
from sidecar.durable.store import Store
from sidecar.durable.trouble import Damaged, NotKept
from telemetry.metrics import Stored

_SCOPE = "upstream = ? AND api_key_id = ? AND method = ? AND path_hash = ? AND key_hash = ?"
_ROW_BYTES = 400
_PER_SWEEP = 500
_WRITE_AGAIN = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """A request with a key, before it is sent."""

    upstream: str
    api_key_id: str
    method: str
    path: str
    """With its query."""
    key: str
    payload_sha256: str
    version: int = 0
    ttl: float = 86_400.0
    may_resend: bool = True
    """Executing it twice is impossible or harmless: the provider honours the key, or the method is idempotent."""
    lasts: float = 300.0
    """No call takes longer than this; a mark that is older belongs to nobody any more."""


class Response(NamedTuple):
    """An answer as it is given again."""

    status: int
    headers: Fields
    body: bytes


class Proceed(NamedTuple):
    """Send it, then call `succeeded` or `failed` with this."""

    row: int
    call: Call
    interrupted: bool
    """An earlier call with this key was cut off by the end of its process: it may have been executed."""


class Hit(NamedTuple):
    """Send nothing: this is the answer."""

    response: Response
    version: int


class Refuse(NamedTuple):
    """Send nothing: tell the app why. 409 or 422, both IDEMPOTENCY_CONFLICT."""

    status: int
    message: str
    retry_after: int | None
    result: str
    """The label of `idempotency_lookups_total`."""


class _Row(NamedTuple):
    id: int
    version: int
    state: str
    boot: str
    started_at: float
    expires_at: float
    payload_hash: bytes
    response: bytes | None
    not_stored: str | None


class Gate:
    """One for all upstreams."""

    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        *,
        counts: Stored | None = None,
        max_bytes: int = 268_435_456,
        now: Callable[[], float] = clock.steady,
        sleep: Callable[[float], Awaitable[None]] = clock.sleep,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._counts = counts or Stored()
        self._max_bytes = max_bytes
        self._now = now
        self._sleep = sleep

    # ---- before the send -----------------------------------------------------------------------------------------

    async def begin(self, call: Call) -> Proceed | Hit | Refuse:
        """Durable when it returns. Raises NotKept when the disk is in trouble: the call is then not protected."""
        found = await self._store.write(lambda connection: self._decide(connection, call), grows=_ROW_BYTES)
        words = {Proceed: "miss", Hit: "hit"}
        self._counts.looked_up(found.result if isinstance(found, Refuse) else words[type(found)])
        return found

    def _decide(self, connection: sqlite3.Connection, call: Call) -> Proceed | Hit | Refuse:
        scope, now = self._scope(call), self._now()
        rows = self._rows(connection, scope, now)
        mine = rows.get(call.version)
        done = [row for row in rows.values() if row.state == "succeeded"]
        newest = max(done, key=lambda row: row.version, default=None)
        payload = self._keyring.digest("payload", call.payload_sha256)
        if newest is not None and call.version <= newest.version:
            chosen = mine if mine is not None and mine.state == "succeeded" else newest
            if chosen is mine and mine.payload_hash != payload:
                return _another_payload(call)
            return self._answer(chosen, scope, call)
        if mine is None:
            return self._insert(connection, scope, call, payload, now)
        if mine.payload_hash != payload:
            return _another_payload(call)
        cut_off = mine.state == "interrupted" or (mine.state == "in_flight" and not self._alive(mine, call, now))
        if mine.state == "in_flight" and not cut_off:
            return Refuse(
                409,
                f"a call with the same {_KEY} is under way; send this again when it has ended, and get its answer",
                1,
                "in_progress",
            )
        if cut_off and not call.may_resend:
            return Refuse(
                409,
                f"an earlier call with the same {_KEY} was cut off by a crash, and the upstream is not known to honour "
                "the key (`idempotency.provider_honours`): look there whether it was executed, then use another key",
                None,
                "conflict",
            )
        connection.execute(
            "UPDATE idempotency SET state = 'in_flight', boot = ?, started_at = ?, expires_at = ? WHERE id = ?",
            (self._store.boot_id, now, now + max(call.ttl, call.lasts), mine.id),
        )
        return Proceed(mine.id, call, cut_off)

    def _scope(self, call: Call) -> tuple[Any, ...]:
        path, key = self._keyring.digest("path", call.path), self._keyring.digest("idempotency", call.key)
        return (call.upstream, call.api_key_id, call.method, path, key)

    def _rows(self, connection: sqlite3.Connection, scope: tuple[Any, ...], now: float) -> dict[int, _Row]:
        """By version; what has expired is gone."""
        found = connection.execute(
            "SELECT id, version, state, boot, started_at, expires_at, payload_hash, response, not_stored "
            f"FROM idempotency WHERE {_SCOPE}",
            scope,
        ).fetchall()
        rows = [_Row(*row) for row in found]
        for row in rows:
            if row.expires_at <= now:
                connection.execute("DELETE FROM idempotency WHERE id = ?", (row.id,))
        return {row.version: row for row in rows if row.expires_at > now}

    def _alive(self, row: _Row, call: Call, now: float) -> bool:
        return row.boot == self._store.boot_id and now < row.started_at + call.lasts

    def _insert(
        self, connection: sqlite3.Connection, scope: tuple[Any, ...], call: Call, payload: bytes, now: float
    ) -> Proceed:
        cursor = connection.execute(
            "INSERT INTO idempotency (upstream, api_key_id, method, path_hash, key_hash, version, state, boot, "
            "started_at, expires_at, payload_hash, size) VALUES (?, ?, ?, ?, ?, ?, 'in_flight', ?, ?, ?, ?, ?)",
            (*scope, call.version, self._store.boot_id, now, now + max(call.ttl, call.lasts), payload, _ROW_BYTES),
        )
        return Proceed(int(cursor.lastrowid or 0), call, interrupted=False)

    def _answer(self, row: _Row, scope: tuple[Any, ...], call: Call) -> Hit | Refuse:
        why = row.not_stored or "it was not stored"
        if row.response is not None:
            try:
                sealed = self._keyring.open("answer", call.upstream, _ident(scope, row.version), row.response)
                return Hit(_unpacked(sealed), row.version)
            except Damaged as damaged:
                why = damaged.message
        return Refuse(
            409,
            f"a call with the same {_KEY} succeeded before, but its answer cannot be given again: {why}",
            None,
            "hit",
        )

    # ---- after the send ------------------------------------------------------------------------------------------

    async def succeeded(
        self, proceed: Proceed, response: Response | None, limit: int = 65_536, why_not: str = ""
    ) -> None:
        """`response` is None when it was too large to be held, `why_not` says so."""
        call = proceed.call
        packed = None if response is None else _packed(response)
        if packed is not None and len(packed) > limit:
            packed, why_not = None, f"it is larger than `idempotency.max_response_bytes` ({limit})"
        scope = self._scope(call)

        def work(connection: sqlite3.Connection) -> None:
            sealed, why = None, why_not or None
            if packed is not None:
                (used,) = connection.execute("SELECT bytes FROM totals WHERE name = 'idempotency'").fetchone()
                if used + len(packed) > self._max_bytes:
                    why = "there was no room for it"
                else:
                    sealed = self._keyring.seal("answer", call.upstream, _ident(scope, call.version), packed)
            connection.execute(
                "UPDATE idempotency SET state = 'succeeded', response = ?, not_stored = ?, expires_at = ?, size = ? "
                "WHERE id = ? AND boot = ? AND state = 'in_flight'",
                (
                    sealed,
                    why,
                    self._now() + call.ttl,
                    _ROW_BYTES + len(sealed or b""),
                    proceed.row,
                    self._store.boot_id,
                ),
            )

        await self._until_written(work, call.lasts)

    async def failed(self, proceed: Proceed) -> None:
        """A repeat may go through."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE idempotency SET state = 'failed' WHERE id = ? AND boot = ? AND state = 'in_flight'",
                (proceed.row, self._store.boot_id),
            )

        await self._until_written(work, proceed.call.lasts)

    async def _until_written(self, work: Callable[[sqlite3.Connection], None], lasts: float) -> None:
        """Goes on when the caller is cancelled. What cannot be written in time is found interrupted later."""
        await asyncio.shield(clock.spawn(self._write(work, lasts), "idempotency"))

    async def _write(self, work: Callable[[sqlite3.Connection], None], lasts: float) -> None:
        waited = 0.0
        while True:
            try:
                return await self._store.write(work)
            except NotKept:
                if waited >= lasts or not self._store.running:
                    return None
            await self._sleep(_WRITE_AGAIN)
            waited += _WRITE_AGAIN

    # ---- looking after -------------------------------------------------------------------------------------------

    async def recover(self) -> int:
        """After a start: what earlier runs left in flight is not trusted."""

        def work(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "UPDATE idempotency SET state = 'interrupted' WHERE state = 'in_flight' AND boot <> ?",
                (self._store.boot_id,),
            ).rowcount

        return await self._store.write(work)

    async def sweep(self) -> int:
        """Forget what has expired; call it now and then."""
        removed = 0
        while True:
            some = await self._store.write(
                lambda connection: (
                    connection.execute(
                        "DELETE FROM idempotency WHERE id IN "
                        "(SELECT id FROM idempotency WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)",
                        (self._now(), _PER_SWEEP),
                    ).rowcount
                )
            )
            removed += some
            if some < _PER_SWEEP:
                return removed


_KEY = "idempotency key"


def _another_payload(call: Call) -> Refuse:
    return Refuse(
        422,
        f"this {_KEY} was used before with another payload; use a new key for a new request"
        + (", or a higher x-sidecar-version" if call.version else ""),
        None,
        "conflict",
    )


def _ident(scope: tuple[Any, ...], version: int) -> str:
    _, api_key_id, method, path, key = scope
    return f"{api_key_id}:{method}:{path.hex()}:{key.hex()}:{version}"


_GIVEN_ONCE = frozenset({b"set-cookie", b"set-cookie2", b"authentication-info"})


def _to_be_given_again(headers: Fields) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _GIVEN_ONCE]


def _packed(response: Response) -> bytes:
    lines = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in _to_be_given_again(response.headers)]
    head = orjson.dumps([response.status, lines])
    return len(head).to_bytes(4, "big") + head + response.body


def _unpacked(data: bytes) -> Response:
    end = 4 + int.from_bytes(data[:4], "big")
    status, lines = orjson.loads(data[4:end])
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
    return Response(status, _to_be_given_again(headers), data[end:])  # also of those that were stored before
