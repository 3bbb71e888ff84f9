"""A request that no app waits for: a replay, a delivery of the outbox, a question to a provider.

Law: it is an exchange like any other, through the same rules, breakers, policies, pools and egress checks, and its
record feeds the same signals; it only answers to whoever sent it out. It is counted as attempts, never as a session:
those are the requests of apps. It is never kept a second time. It never goes to a fallback: whether it was executed
before is known, or can be asked, only where it was meant to go. A delivery is sent once per attempt of its row, also
over a connection that turns out to be dead: what follows is for the rules of the outbox to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from sidecar import clock
from sidecar.body import RequestBody
from sidecar.exchange import Exchange
from sidecar.failures import SHUTTING_DOWN, AnsweredHere, AttemptFailed, Malformed
from sidecar.headers import field_of
from sidecar.policy.resend import NO_KEY
from sidecar.relay import AppSink
from sidecar.request import Request
from sidecar.routing import DEFAULT_PORTS, Origin, origin_path, parse_authority, split_absolute
from telemetry.record import CONNECTED, NOT_CONNECTED, Attempt, Errand, Trace

if TYPE_CHECKING:
    from config.errors import ErrorCode
    from sidecar.durable.entry import Answer
    from sidecar.inbound import Downstream
    from sidecar.proxy import Proxy
    from sidecar.upstream.connection import UpstreamConnection
    from sidecar.upstream.destination import Destination
    from sidecar.upstream.endpoints import UpstreamState

Fields = list[tuple[bytes, bytes]]

_ANSWER_KEPT = 65_536
_LOOK_AGAIN = 0.05
_GOOD = frozenset({"first_try", "recovered", "deduplicated"})
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host", b"connection", b"expect"})
_OURS = b"x-sidecar-"


class Nobody:
    """Stands where the app's connection would. `upstream` is whom the request is for."""

    transport = None

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._room = asyncio.Event()
        self.body: RequestBody | None = None

    def find_destination(self, request: Request, proxy: Proxy) -> tuple[Destination, bytes]:
        """The upstream it was for, if that still exists; else wherever its url leads."""
        scheme, authority, rest = split_absolute(request.target)
        target, directory = origin_path(rest, request.method), proxy.directory
        host, port = parse_authority(authority.decode("latin-1"))
        named = directory.configured.get(self._upstream)
        found = directory.router.by_host(host, port or DEFAULT_PORTS[scheme])
        if named is not None and named.settings.endpoints and found != self._upstream:
            destination = directory.named(self._upstream)
        else:
            destination = directory.forward(scheme, authority)
        names = {
            b"x-sidecar-policy": proxy.settings.policies,
            b"x-sidecar-operation": destination.upstream.rules.choice.operations.names(),
        }
        request.overrides = [  # what it was to follow may have gone since
            (name, value)
            for name, value in request.overrides or ()
            if name.lower() not in names or value.decode("latin-1") in names[name.lower()]
        ]
        return destination, target

    def find_tunnel(self, request: Request, proxy: Proxy) -> Origin:
        raise Malformed("MALFORMED_REQUEST", "there is no app that could use a tunnel", reason="target")

    def regulate(self) -> None:
        if self.body is not None and not self.body.held:
            self._room.set()

    async def feed(self, body: RequestBody, pieces: AsyncIterator[bytes]) -> None:
        """A body from disk, no faster than it is sent."""
        self.body = body
        try:
            async for piece in pieces:
                body.feed(piece)
                while body.held:
                    self._room.clear()
                    await self._room.wait()
            body.finish()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # damaged, or gone: the upstream must not take what it got for the whole
            body.fail(f"the stored body cannot be read: {error}")

    def stream_through(self, sink: AppSink, resume_upstream: object) -> None:
        sink.full = False

    def stream_ended(self) -> None:
        """Nobody read it."""


class Captured(AppSink):
    """Keeps the beginning of an answer."""

    __slots__ = ("_limit", "pieces")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.pieces = b""
        self.count = 0
        self.full = False

    said_done = False

    def body(self, data: bytes) -> bool:
        if self.count < self._limit:
            self.pieces += data[: self._limit - self.count]
        self.count += len(data)
        return False

    @property
    def whole(self) -> bool:
        return self.count == len(self.pieces)

    def pending(self) -> int:
        return 0

    def end(self, trailers: list[tuple[bytes, bytes]]) -> None:
        """Nobody waits for it."""


class Sending(Exchange):
    """`kind` is replay, outbox or reconcile. After `go`, `answer` is what the upstream said, if anything."""

    __slots__ = (
        "_caller",
        "_captured",
        "_errand",
        "_feeding",
        "_guarded",
        "_injected_key",
        "_kind",
        "_secret",
        "answer",
    )

    def __init__(
        self,
        proxy: Proxy,
        kind: str,
        upstream: str,
        method: str,
        url: str,
        headers: Fields,
        body: bytes | AsyncIterator[bytes],
        size: int,
        *,
        injected: str | None = None,
        guarded: bool = False,
        retries: bool = False,
        origin: Trace | None = None,
        caller: str | None = None,
        secret: bool = False,
    ) -> None:
        """`injected` names the header of a key that was added here; `guarded`: the idempotency gate is asked. `caller`
        is the hash of who asked first: the request stays his, whatever credential it goes out with. `secret`: the url
        is one, and only its host is recorded."""
        client, now = Nobody(upstream), clock.monotonic()
        request = _request(method, url, headers, injected, retries)
        if size or method not in ("GET", "HEAD", "DELETE", "OPTIONS", "TRACE"):
            request.content_length = size
        super().__init__(proxy, cast("Downstream", client), request, now)
        self._kind = kind
        self._guarded = guarded
        self._caller = caller
        self._injected_key = None
        self._captured: Captured | None = None
        self._feeding: asyncio.Task[Any] | None = None
        self.answer: Answer | None = None
        self.keep_alive = False
        self.record = errand = Errand(kind, self.record.session_id, method, _host_of(url) if secret else url, now)
        self._secret = secret
        errand.origin = origin
        self._errand = errand
        if injected is not None:
            self._injected_key = next((value for name, value in headers if name.lower() == injected.encode()), None)
        if size:
            request.body = stored = RequestBody(client, False, proxy.limits.replay_body_bytes, proxy.held)
            if isinstance(body, bytes):
                stored.feed(body)
                stored.finish()
            else:
                self._feeding = clock.spawn(client.feed(stored, body), "feed a stored body")

    async def go(self) -> None:
        """Whatever comes of it is in the record and in `answer`."""
        self._future = None
        self._parked = False
        self._task = cast("asyncio.Task[None]", asyncio.current_task())  # this is one already
        self._proxy.errands.add(self)
        try:
            await self.run()
        finally:
            self._proxy.errands.discard(self)
            self._task = None
            if self._feeding is not None:
                self._feeding.cancel()

    # ---- how it ended --------------------------------------------------------------------------------------------

    @property
    def ok(self) -> bool:
        return self.record.outcome in _GOOD

    @property
    def code(self) -> str:
        return "" if self.ok else self.record.code or "SIDECAR_INTERNAL"

    @property
    def known(self) -> ErrorCode | None:
        return self._proxy.registry.get(self.code)

    @property
    def held_back(self) -> bool:
        """Nothing was tried: the sidecar itself did not let it out, or ended before any of it was."""
        if self.code == SHUTTING_DOWN and self.phase <= CONNECTED:
            return True
        return not self.ok and not self.record.attempts

    @property
    def phase(self) -> int:
        return max((attempt.phase for attempt in self.record.attempts), default=NOT_CONNECTED)

    @property
    def status(self) -> int | None:
        return (self.answer.status if self.answer is not None else 0) or None

    @property
    def message(self) -> str:
        told = [attempt.message for attempt in self.record.attempts if attempt.message]
        fallback = f"the upstream answered {self.status}" if self.status else ""
        return self.record.message or (told[-1] if told else fallback)

    # ---- where it differs from an app's request ------------------------------------------------------------------

    def _begin_attempt(self, kind: str, now: float) -> Attempt:
        attempt = super()._begin_attempt(kind, now)
        if kind != "stale":
            attempt.kind = self._kind
        return attempt

    def _look_at_key(self, upstream: UpstreamState) -> None:
        """It has the key it always had; the app does not resend anything here."""
        header = upstream.settings.idempotency.header.lower()
        if self._injected_key is not None and self._injected is None:
            self._injected = header
            self._own_lines += b"%b: %b\r\n" % (upstream.settings.idempotency.header.encode(), self._injected_key)
        elif self._key() == NO_KEY:
            super()._look_at_key(upstream)
        self._involved = self._guarded

    def _may_replace(self, failed: AttemptFailed) -> bool:
        if self._kind == "outbox" and failed.phase > CONNECTED:
            return False
        return super()._may_replace(failed)

    def _fallback(self) -> None:
        """See the module's law."""

    def _caller_id(self, headers: Fields) -> str:
        return super()._caller_id(headers) if self._caller is None else self._caller

    async def _take_part(self) -> None:
        if self._guarded:
            await super()._take_part()

    async def _take_place(self) -> None:
        """A replay takes a place that is left over; it stands in no queue where an app could stand."""
        assert self._upstream is not None
        turns = self._upstream.turns
        while self._kind == "replay" and turns.bulkhead is not None and turns.bulkhead.full:
            if clock.monotonic() > self._ends_at:
                raise self._out_of_time("DEADLINE_EXCEEDED", "live calls took every place under max_in_flight")
            await clock.sleep(_LOOK_AGAIN)
        await super()._take_place()

    def _complete_record(self) -> None:
        super()._complete_record()
        if self._secret:
            self.record.forwarded = ""

    def _worth_keeping(self, code: str) -> ErrorCode | None:
        return None

    def _begin_answer(self) -> AppSink | None:
        connection, record = self._connection, self.record
        assert connection is not None and connection.head is not None
        record.status = connection.status
        self._answered = True
        self._note_answer(connection.status, connection.head.lines, connection.body)
        if connection.complete and not connection.waiting:
            record.response_bytes = len(connection.body)
            self._give_back(connection)
            return None
        limit = _ANSWER_KEPT
        if self._ticket is not None and self._upstream is not None:
            limit = max(limit, self._upstream.settings.idempotency.max_response_bytes)
        self._captured = Captured(limit)
        return self._captured

    def _note_answer(self, status: int, lines: list[bytes], body: bytes) -> None:
        from sidecar.durable.entry import Answer

        self.answer = Answer(status, [field_of(line) for line in lines], body[:_ANSWER_KEPT])

    async def _seen_out(self, connection: UpstreamConnection, sink: AppSink) -> bool:
        return False  # nobody has left: it was stopped

    async def _stream(self, sink: AppSink) -> None:
        await super()._stream(sink)
        if self._captured is not None and self.answer is not None:
            self.answer = self.answer._replace(body=self._captured.pieces[:_ANSWER_KEPT])

    async def _stream_and_remember(self, sink: AppSink) -> None:
        """Nobody reads it, so its end is not held back from anybody."""
        connection, captured = self._connection, self._captured
        assert connection is not None and captured is not None
        await self._stream(sink)
        if self.ok:
            await self._remember_streamed(connection, captured.pieces if captured.whole else None)

    def _answer_here(self, here: AnsweredHere) -> None:
        super()._answer_here(here)
        self._note_answer(here.status, here.lines.split(b"\r\n")[:-1], here.body)

    def _write_error(self, *_: object, **__: object) -> None:
        """Nobody reads it; the record says the same."""

    def _settle(self, now: float) -> None:
        record = self.record
        outcome, record.outcome = record.outcome, ""  # not a session of an app: not counted as one
        super()._settle(now)
        record.outcome = outcome
        if outcome:
            self._proxy.signals.errand_ended(self._errand, self._complete_record)


def _host_of(url: str) -> str:
    scheme, authority, _ = split_absolute(url.encode("latin-1"))
    return f"{scheme}://{authority.decode('latin-1')}/"


def _request(method: str, url: str, headers: Fields, injected: str | None, retries: bool) -> Request:
    request = Request()
    request.method, request.verb = method, method.encode()
    request.target = url.encode("latin-1")
    request.asks = True
    asked = [(name, value) for name, value in headers if name.lower().startswith(_OURS)]
    if not retries:
        asked.append((b"x-sidecar-retry", b"off"))
    request.overrides = asked
    left_out = _FRAMING | ({injected.encode()} if injected is not None else set())
    request.lines = [
        b"%b: %b" % (name, value)
        for name, value in headers
        if name.lower() not in left_out and not name.lower().startswith(_OURS)
    ]
    return request
