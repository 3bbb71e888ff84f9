"""The part of an exchange that sees to it that a key is executed once, and that tells the store of successes.

Law: the gate is asked before anything is sent, and told how the call ended before the app has all of its answer: a
repeat a moment later finds what it should. Only calls that change something and carry the app's own key are asked
about; no other call pays. A store in trouble lets the call through unprotected, and the record says so.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from sidecar import clock
from sidecar.durable.trouble import Trouble
from sidecar.failures import AnsweredHere, Refused, UploadBroken
from sidecar.headers import field_of
from sidecar.keeping import Keeping
from sidecar.policy.resend import APP_KEY, IDEMPOTENT, READS, honoured
from sidecar.relay import AppSink
from telemetry.record import left_of

if TYPE_CHECKING:
    from sidecar.durable.idempotency import Call, Gate, Hit, Proceed, Refuse, Response
    from sidecar.durable.layers import Durable
    from sidecar.durable.successes import Success
    from sidecar.upstream.connection import UpstreamConnection
    from telemetry.record import Session

_PAUSE = 3.0  # the longest silence in the middle of a body that the check of its key waits for
_LASTS = 300.0
_LONGER_THAN_ITS_DEADLINE = 60.0
_DONE = frozenset({"first_try", "recovered"})
# Not given again: they speak about the connection or the moment of the first answer.
_OF_THE_MOMENT = frozenset({b"date", b"age", b"via"})


class Once(Keeping):
    """See the module's law."""

    __slots__ = ("_ticket",)

    _ticket: tuple[Gate, Proceed] | None
    """The gate waits to hear how this call ended."""

    # ---- before the first attempt --------------------------------------------------------------------------------

    async def _take_part(self) -> None:
        """Ask whoever has a say in it before it is sent. Raises AnsweredHere or Refused where that is the end."""
        upstream = self._upstream
        assert upstream is not None
        if upstream.settings.idempotency.enabled and self._key() == APP_KEY and self.record.method not in READS:
            await self._pass_gate()

    async def _pass_gate(self) -> None:
        """Raises AnsweredHere with the first answer, or Refused."""
        await self.become_task()
        try:
            digest = await self._payload_digest()
        except UploadBroken as broken:
            if not broken.stalled:
                raise
            self.record.unprotected = "its idempotency key was not checked, because the body came too slowly"
            return
        try:
            durable = await self._proxy.kept.open()
            found = await self._begin(durable.gate, self._call(digest))
        except Trouble as trouble:
            self.record.unprotected = f"its idempotency key was not checked, because {trouble.message}"
            return
        from sidecar.durable.idempotency import Hit, Refuse

        if isinstance(found, Refuse):
            raise Refused(
                "IDEMPOTENCY_CONFLICT",
                found.message,
                reason="idempotency",
                status=found.status,
                retry_after=found.retry_after,
            )
        if isinstance(found, Hit):
            response = found.response
            lines = b"".join([b"%b: %b\r\n" % field for field in response.headers])
            raise AnsweredHere(
                lines + b"idempotent-replayed: true\r\n",
                response.body,
                "idempotency",
                status=response.status,
                outcome="deduplicated",
            )
        self._ticket = durable.gate, found

    async def _begin(self, gate: Gate, call: Call) -> Proceed | Hit | Refuse:
        asking = self._proxy.kept.background(gate.begin(call), "ask about a key")
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:  # the app has gone; its mark must not keep a repeat waiting
            self._proxy.kept.beside(_withdrawn(gate, asking), "withdraw a call")
            raise

    async def _payload_digest(self) -> str:
        """Of the whole body, which is waited for; of one that is too large to be kept only its size counts."""
        body = self._request.body
        if body is None:
            return hashlib.sha256().hexdigest()
        self._ask_for_body()
        if await body.whole(_PAUSE):
            return hashlib.sha256(body.content).hexdigest()
        return hashlib.sha256(b"size %d" % (self._request.content_length or 0)).hexdigest()

    def _call(self, digest: str) -> Call:
        from sidecar.durable.idempotency import Call

        upstream, headers = self._upstream, self._headers()
        assert upstream is not None
        settings = upstream.settings.idempotency
        key, _ = self._key_of(headers, settings.header)
        assert key is not None
        return Call(
            upstream=upstream.name,
            api_key_id=self._caller_id(headers),
            method=self.record.method,
            path=self._target.decode("latin-1"),
            key=key.decode("latin-1"),
            payload_sha256=digest,
            version=self._overrides.version or 0,
            ttl=settings.ttl,
            may_resend=honoured(APP_KEY, settings) or self.record.method in IDEMPOTENT,
            lasts=max(_LASTS, self._ends_at - self._started + _LONGER_THAN_ITS_DEADLINE),
        )

    # ---- before the answer ---------------------------------------------------------------------------------------

    async def _before_answer(self) -> None:
        code, connection = self.record.code, self._connection
        if code is not None:
            await self._keep_answered(code)
        elif connection is not None and connection.complete and not connection.waiting:
            await self._remember(connection.body)

    async def _keep(self, code: str, message: str) -> AnsweredHere | None:
        accepted = await super()._keep(code, message)
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            gate, proceed = ticket
            await self._unhurried(gate.failed(proceed))
        return accepted

    async def _remember(self, body: bytes | None) -> None:
        """The call succeeded; `body` is None when there was too much of it."""
        from sidecar.durable.idempotency import Response

        ticket, self._ticket = self._ticket, None
        upstream, connection = self._upstream, self._connection
        if ticket is None or upstream is None or connection is None or connection.head is None:
            return
        gate, proceed = ticket
        limit = upstream.settings.idempotency.max_response_bytes
        fields = [field_of(line) for line in connection.head.lines]
        fields = [(name, value) for name, value in fields if name.lower() not in _OF_THE_MOMENT]
        response: Response | None = None if body is None else Response(connection.status, fields, body)
        why_not = f"it is larger than `idempotency.max_response_bytes` ({limit})" if body is None else ""
        await self._unhurried(gate.succeeded(proceed, response, limit, why_not))

    async def _stream_and_remember(self, sink: AppSink) -> None:
        """The end of the answer is held back until the store has it."""
        upstream, connection = self._upstream, self._connection
        assert upstream is not None and connection is not None and connection.head is not None
        limit = upstream.settings.idempotency.max_response_bytes
        copying = CopyingSink(sink, limit)
        await self._stream(copying)
        if self.record.outcome in _DONE:
            await self._remember_streamed(connection, copying.copy)
            if self._client.transport is not None:
                copying.finish()
            elif left_of(self.record) is None and not copying.said_done:
                raise asyncio.CancelledError  # the app left while the end of its answer was held back

    async def _remember_streamed(self, connection: UpstreamConnection, body: bytes | None) -> None:
        self._connection = connection  # for its head only: it was given back
        try:
            await self._remember(body)
        finally:
            self._connection = None

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def _aftermath(self, record: Session) -> None:
        """What the store has to hear of, beside the traffic."""
        kept = self._proxy.kept
        if self._tee is not None and record.dlq_id is None:
            kept.beside(self._tee.abort(), "drop a spooled body")
        if self._ticket is not None:
            (gate, proceed), self._ticket = self._ticket, None
            kept.beside(gate.failed(proceed), "note a failed call")
        durable = kept.durable
        if durable is None or record.outcome not in _DONE or self._upstream is None:
            return
        upstream = self._whose()
        if upstream.settings.replay.credentials == "live":
            headers = self._headers()
            kept.credentials().seen(upstream.label, self._caller_id(headers), headers)
        keyed = self._request.idempotency_key is not None
        if durable.successes.worth_telling(upstream.label, record.method, keyed=keyed):
            self._tell_success(durable, upstream.label, upstream.settings.idempotency.header)

    def _tell_success(self, durable: Durable, label: str, key_header: str) -> None:
        from sidecar.durable.successes import Success

        body, headers = self._request.body, self._headers()
        if body is None:
            digest = hashlib.sha256().hexdigest()
        else:
            digest = hashlib.sha256(body.content).hexdigest() if body.replayable else clock.unguessable(64)
        key, _ = self._key_of(headers, key_header)
        success = Success(
            upstream=label,
            method=self.record.method,
            url=self._url(),
            body_sha256=digest,
            started_at=clock.steady.at(self._started),
            api_key_id=self._caller_id(headers),
            idempotency_key=None if key is None else key.decode("latin-1"),
            session_id=self._session_id(),
        )
        self._proxy.kept.beside(_told(durable, success), "tell of a success")


async def _withdrawn(gate: Gate, asking: asyncio.Task[Proceed | Hit | Refuse]) -> None:
    from sidecar.durable.idempotency import Proceed

    try:
        found = await asking
    except Trouble:
        return
    if isinstance(found, Proceed):
        await gate.failed(found)


async def _told(durable: Durable, success: Success) -> None:
    try:
        await durable.successes.tell(success)
    except Trouble:
        pass  # the store says so itself; the entry stays, and its verdict is asked again before any replay


class CopyingSink(AppSink):
    """Passes an answer on, keeps a copy of it while it is small, and its end until `finish`."""

    __slots__ = ("_held", "_limit", "_pieces", "_trailers")

    def __init__(self, sink: AppSink, limit: int) -> None:
        super().__init__(sink.transport, sink.framing, events=sink.tail is not None)
        self._limit = limit
        self._pieces: list[bytes] | None = []
        self._held = b""
        self._trailers: list[tuple[bytes, bytes]] | None = None

    def body(self, data: bytes) -> bool:
        if self._pieces is not None:
            self._pieces.append(data)
            if self.count + len(data) > self._limit:
                self._pieces = None
        if self.count + len(data) == self.framing.length:
            self._held = data
            self.count += len(data)
            return self.full
        return super().body(data)

    def end(self, trailers: list[tuple[bytes, bytes]]) -> None:
        self.framing.check(self.count)
        self._trailers = trailers

    @property
    def copy(self) -> bytes | None:
        return None if self._pieces is None else b"".join(self._pieces)

    def finish(self) -> None:
        if self._held:
            self.count -= len(self._held)
            super().body(self._held)
        if self._trailers is not None:
            super().end(self._trailers)
