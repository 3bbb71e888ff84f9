"""One connection to an upstream and the one response being read from it, on llhttp.

Law: a connection carries one attempt at a time and knows nothing about retries, apps or telemetry. Everything
that can go wrong here becomes one `AttemptFailed` on `waiter`. What llhttp does not do is done here and nowhere
else: bodyless answers (HEAD, 204, 304), the size of the head, status and version checks, the end by close.

The exchange, not the connection, gives a connection back to its pool: returning it when the parser sees the end
would let another exchange reset it before the first one has read the result.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from sidecar.clock import Ticker
from sidecar.failures import AttemptFailed
from sidecar.headers import ResponseFields
from telemetry.record import CONNECTED, PARTLY_SENT, SENT

# Body bytes that may wait here between the head and the moment the exchange takes over.
_WAITING_BODY = 262_144
_FIELD_OVERHEAD = 4  # ": " and CRLF


class Sink(Protocol):
    """Where streamed body bytes go."""

    def body(self, data: bytes) -> bool:
        """Take the bytes; True asks to pause until `resume` is called."""

    def pending(self) -> int:
        """Bytes taken but not yet read by the other side; a change means progress."""


class Interim(Protocol):
    """Who hears about 1xx answers."""

    def __call__(self, status: int, reason: bytes, fields: list[tuple[bytes, bytes]]) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """See the module's law. Public attributes are read by the exchange after `waiter` is done."""

    __slots__ = (
        "_all_given",
        "_body_idle",
        "_bodyless",
        "_buffer_limit",
        "_collect",
        "_drain_waiter",
        "_failure",
        "_fault",
        "_fields",
        "_head_bytes",
        "_head_limit",
        "_idle_limit",
        "_interim_seen",
        "_last_pending",
        "_loop",
        "_parser",
        "_progress",
        "_reading_paused",
        "_sink",
        "_ticker",
        "_until_close",
        "_unusual",
        "_waiting_bytes",
        "_write_paused",
        "_wrote",
        "address",
        "answering",
        "body",
        "buffered",
        "busy",
        "closed",
        "complete",
        "deadline",
        "head",
        "idle_since",
        "keep_alive",
        "on_interim",
        "reason",
        "received",
        "retired",
        "reused",
        "status",
        "switched",
        "tail",
        "trailers",
        "transport",
        "waiter",
        "waiting",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ticker: Ticker, head_limit: int, buffer_limit: int, body_idle: float
    ) -> None:
        self._loop = loop
        self._ticker = ticker
        self._head_limit = head_limit
        self._buffer_limit = buffer_limit
        self._body_idle = body_idle
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.address = ""
        self.closed = False
        self.busy = False
        self.reused = False
        self.retired = False  # this attempt is its last: set by the pool when the name has left the address
        self.idle_since = 0.0
        self._reading_paused = False
        self._write_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        # One answer. What `begin` does not set again belongs to connections that are not used again.
        self.status = 0
        self.head: ResponseFields | None = None
        self.keep_alive = False
        self.switched = False
        self.tail = b""
        self.waiter: asyncio.Future[None] = loop.create_future()
        self._until_close = False
        self._fault: str | None = None
        self._failure: BaseException | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._reset_unusual()

    # ---- an attempt ------------------------------------------------------------------------------------------

    def begin(self, *, bodyless: bool, deadline: float) -> asyncio.Future[None]:
        """Get ready for one request. The future resolves with a whole small answer, or the head of a large one."""
        self.busy = True
        self.answering = False
        self.complete = False
        self.buffered = False
        self.reason = b""
        self.head = None
        self.body = b""
        self.received = 0
        self.deadline = deadline
        self._fields = []
        self._collect = self._fields.append
        self._head_bytes = 0
        self._bodyless = bodyless
        self._wrote = False
        self._all_given = False
        if self._unusual:
            self._reset_unusual()
        self.waiter = self._loop.create_future()
        self._ticker.watched.add(self)
        return self.waiter

    def _reset_unusual(self) -> None:
        """What only streams, trailers and interim answers touch; not worth setting for every small answer."""
        self._unusual = False
        self.trailers: list[tuple[bytes, bytes]] = []
        self.on_interim: Interim | None = None
        self._interim_seen = False
        self._sink: Sink | None = None
        self.waiting: list[bytes] = []  # body bytes the exchange has not taken yet
        self._waiting_bytes = 0
        self._idle_limit = 0.0
        self._progress = False
        self._last_pending = -1

    def write(self, data: bytes, *, last: bool) -> None:
        """Hand request bytes to the transport; `last` when none follow."""
        self._wrote = True
        self._all_given = last
        self._progress = True
        if self.transport is not None:
            self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the transport takes more."""
        if self._write_paused and not self.closed:
            self._drain_waiter = self._loop.create_future()
            await self._drain_waiter

    def expect_progress(self, idle_limit: float, now: float) -> None:
        """From now on time runs out only when nothing moves for `idle_limit` seconds (bodies in either direction)."""
        self._unusual = True
        self._idle_limit = idle_limit
        self.deadline = now + idle_limit

    def expect_head_by(self, deadline: float) -> None:
        self._idle_limit = 0.0
        self.deadline = deadline

    def stream_to(self, sink: Sink) -> asyncio.Future[None]:
        """Push the rest of the body into `sink`; the future resolves at its end, or with the failure."""
        self.waiter = self._loop.create_future()
        self._sink = sink
        paused = False
        for data in self.waiting:
            paused = sink.body(data)
        self.waiting = []
        if paused:
            self._pause()
        elif not self.complete:
            self.resume()
        if self.complete:
            self.waiter.set_result(None)
        elif self._failure is not None:
            self.waiter.set_exception(self._failure)
        return self.waiter

    def resume(self) -> None:
        """The sink takes bytes again."""
        self._progress = True
        if self._reading_paused and self.transport is not None and not self.closed:
            self._reading_paused = False
            self.transport.resume_reading()

    def finish(self) -> bool:
        """The exchange is done with this attempt. True if the connection may carry another."""
        self._ticker.watched.discard(self)
        self.busy = False
        self.on_interim = None
        reusable = (
            self.complete
            and self.keep_alive
            and self._all_given
            and not self.closed
            and not self._until_close
            and not self.switched
            and not self._write_paused
            and not self.retired
        )
        if reusable:
            self.reused = True
            if self._reading_paused:
                self.resume()
        return reusable

    def abort(self) -> None:
        """Close now, without a clean end of what was being sent."""
        self._ticker.watched.discard(self)
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def fail(self, failure: BaseException) -> None:
        """Give the waiting exchange this failure and close."""
        if not self.waiter.done():
            self.waiter.set_exception(failure)
        elif self._failure is None:
            self._failure = failure  # between head and `stream_to`: told then
        self.abort()

    @property
    def phase(self) -> int:
        """How far the request got, judged as late as possible and in doubt as further."""
        if not self._wrote:
            return CONNECTED
        transport = self.transport
        if self._all_given and (transport is None or transport.get_write_buffer_size() == 0):
            return SENT
        return PARTLY_SENT

    def check(self, now: float) -> None:
        """Called on every tick while an attempt is in flight."""
        if self.head is not None and not self._idle_limit:
            # A small body is being completed: the attempt's time ended with the head, now only silence counts.
            self.expect_progress(self._body_idle, now)
        if self._idle_limit:
            pending = self._sink.pending() if self._sink is not None else -1
            if self.transport is not None:
                pending += self.transport.get_write_buffer_size()
            if self._progress or pending != self._last_pending:
                self._progress = False
                self._last_pending = pending
                self.deadline = now + self._idle_limit
                return
        if now >= self.deadline:
            self.fail(AttemptFailed("NETWORK_TIMEOUT", self._timeout_message(), self.phase))

    def _timeout_message(self) -> str:
        if self.head is not None:
            return f"the response stopped moving after {self.received} bytes of its body"
        if self._idle_limit:
            return "the request body stopped moving"
        return "no response head arrived in time"

    # ---- the transport's side --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # More than asyncio's 64 KiB: fewer pauses on fast uploads, still bounded.
        self.transport.set_write_buffer_limits(high=_WAITING_BODY)

    def connection_lost(self, exc: BaseException | None) -> None:
        phase = self.phase if self.busy else CONNECTED
        self.closed = True
        self.transport = None
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)
        if not self.busy or self.complete:
            return
        if self._until_close and self.head is not None and exc is None:
            self.complete = True
            self._wake()
            return
        if self.head is not None:
            told = f"the upstream closed after {self.received} bytes of the body"
            if self.head.content_length is not None:
                told += f", {self.head.content_length} were announced"
        elif self.answering:
            told = "the upstream closed in the middle of the response head"
        else:
            told = "the upstream closed the connection without answering"
        if exc is not None:
            told += f" ({exc})"
        self.fail(AttemptFailed("CONNECTION_RESET", told, phase, stale=self.reused and not self.answering))

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._progress = True
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self.busy or self.complete:
            if self.busy and self.switched:
                self.tail += data  # the new protocol speaks before the tunnel has taken over
                return
            # Nothing was asked: whatever this is, it must not become the answer to the next request.
            self.keep_alive = False
            if not self.busy:
                self.abort()
            return
        self._progress = True
        if not self.answering:
            self.answering = True
            if not data.startswith(b"HTTP/1."):
                self._interim_seen = self._unusual = True  # its version is looked at once the head is complete
        if self.head is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            self.tail = data[switch.args[0] :]
        except httptools.HttpParserError as error:
            if not self.complete:
                self.fail(AttemptFailed("PROTOCOL_ERROR", self._fault or f"not valid HTTP: {error}", self.phase))
            self.keep_alive = False
            return
        if self.head is None and self._head_bytes > self._head_limit and not self.closed:
            self.fail(AttemptFailed("PROTOCOL_ERROR", self._endless_head(), self.phase))

    def _endless_head(self) -> str:
        return f"the response head is larger than {self._head_limit} bytes (limits.head_bytes)"

    # ---- llhttp's side ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # the beginning of something nobody asked for, already inside the parser

    def on_status(self, reason: bytes) -> None:
        if not self.complete:
            self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self._collect((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim_seen = self._unusual = True
            if status != 101:
                if status < 100:
                    raise self._refuse(f"the response status {status} is not between 100 and 599")
                return  # its bytes count towards the head, so their number is bounded too
            self.switched = True
        elif status > 599:
            raise self._refuse(f"the response status {status} is not between 100 and 599")
        if self._interim_seen and self._parser.get_http_version() not in ("1.0", "1.1"):
            raise self._refuse(f"the response claims HTTP/{self._parser.get_http_version()}")
        head = ResponseFields(self._fields)
        if self._head_bytes > self._head_limit:
            self._check_head_size()
        self.status = status
        self.head = head
        self._collect = self.trailers.append
        self.keep_alive = self._parser.should_keep_alive()
        if self._bodyless or status == 204 or status == 304 or self.switched:
            # llhttp would wait for the announced body; a new parser reads the next answer instead.
            self._parser = httptools.HttpResponseParser(self)
            self.complete = True
            self._wake()
            return
        self._frame(head)

    def _frame(self, head: ResponseFields) -> None:
        length = head.content_length
        if length is not None:
            if length <= self._buffer_limit and not head.event_stream:
                self.buffered = True
                return  # the exchange hears of it when it is complete
        elif head.transfer_encoding is not None:
            if head.transfer_encoding.strip().lower() != b"chunked":
                raise self._refuse("the response uses a transfer coding other than chunked")
            if self._parser.get_http_version() == "1.0":
                raise self._refuse("an HTTP/1.0 response cannot be chunked")
        else:
            self._until_close = True
        self._unusual = True
        self._wake()

    def _check_head_size(self) -> None:
        if sum(len(n) + len(v) + _FIELD_OVERHEAD for n, v in self._fields) > self._head_limit:
            raise self._refuse(self._endless_head())

    def on_body(self, data: bytes) -> None:
        self.received += len(data)
        sink = self._sink
        if sink is not None:
            if sink.body(data):
                self._pause()
        elif self.buffered:
            self.body = self.body + data if self.body else data
        elif not self.complete:
            self.waiting.append(data)
            self._waiting_bytes += len(data)
            if self._waiting_bytes > _WAITING_BODY:
                # Here and not in the exchange: whole bodies would arrive before its coroutine runs.
                self._pause()
        else:
            self.keep_alive = False  # body bytes behind a bodyless answer

    def on_message_complete(self) -> None:
        if self.complete:
            return
        if self.head is None:  # a 1xx
            fields, reason, self._fields, self.reason = self._fields, self.reason, [], b""
            self._collect = self._fields.append
            if any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in fields):
                raise self._refuse("an interim (1xx) response announces a body")
            if self.on_interim is not None:
                self.on_interim(self._parser.get_status_code(), reason, fields)
            return
        self.complete = True
        self._wake()

    def _refuse(self, fault: str) -> ValueError:
        """llhttp stops at any exception; `data_received` turns the fault into the failure."""
        self._fault = fault
        return ValueError(fault)

    def _wake(self) -> None:
        if not self.waiter.done():
            self.waiter.set_result(None)

    def _pause(self) -> None:
        if not self._reading_paused and self.transport is not None and not self.closed:
            self._reading_paused = True
            self.transport.pause_reading()
