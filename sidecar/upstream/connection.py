"""One connection to an upstream and the one response being read from it, on llhttp.

Law: a connection carries one attempt at a time and knows nothing about retries, apps or telemetry. Everything
that can go wrong here becomes one `AttemptFailed` in `failure`. How an answer is read is in `answer.py`; this file
owns the transport, the time an attempt may take, and the end of a connection. A connection on which more came than was
asked for carries no further attempt, whenever it came; whoever made it is told once.

The exchange, not the connection, gives a connection back to its pool: returning it when the parser sees the end
would let another exchange reset it before the first one has read the result.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

import httptools

from sidecar.clock import Ticker
from sidecar.failures import AttemptFailed, UploadBroken
from sidecar.headers import ResponseFields
from sidecar.turn import Gathering, Turn, released
from sidecar.upstream.answer import WAITING_BODY, AnswerReader, Owner, Sink, response_parser
from telemetry.record import CONNECTED, PARTLY_SENT, SENT

_NO_PARSER = httptools.HttpResponseParser(object())
# What a server may say on a connection that nobody uses, before it closes it (RFC 9110, 15.5.9).
_GOOD_BYE = (b"HTTP/1.1 408 ", b"HTTP/1.0 408 ")


class UpstreamConnection(AnswerReader, asyncio.Protocol):
    """See the module's law. Public attributes are read by the exchange once `ready`."""

    __slots__ = (
        "_all_given",
        "_body_idle",
        "_drain_waiter",
        "_eof",
        "_idle_limit",
        "_in_one",
        "_last_pending",
        "_loop",
        "_progress",
        "_ticker",
        "_turn",
        "_write_paused",
        "_wrote",
        "address",
        "answering",
        "busy",
        "deadline",
        "failure",
        "idle_since",
        "retired",
        "reused",
        "tail",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ticker: Ticker,
        turn: Turn,
        head_limit: int,
        buffer_limit: int,
        body_idle: float,
        on_surplus: Callable[[], None],
    ) -> None:
        self._loop = loop
        self.on_surplus = on_surplus
        self._ticker = ticker
        self._turn = turn
        self.configure(head_limit, buffer_limit, body_idle)
        self._parser = response_parser(self)
        self.transport = None
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
        self.head = None
        self.keep_alive = False
        self.switched = False
        self.tail = b""
        self.owner = None
        self.ready = False
        self.failure: BaseException | None = None
        self._until_close = False
        self._eof = False
        self._in_one = False
        self._fault = None
        self.surplus = False
        self._reset_unusual()

    # ---- an attempt ------------------------------------------------------------------------------------------

    def configure(self, head_limit: int, buffer_limit: int, body_idle: float) -> None:
        """Also between two attempts, when settings have changed."""
        self._head_limit = head_limit
        self._buffer_limit = buffer_limit
        self._body_idle = body_idle

    def begin(self, owner: Owner, *, bodyless: bool, deadline: float) -> None:
        """Get ready for one request. `owner` is woken with a whole small answer, or the head of a large one."""
        self.owner = owner
        self.busy = True
        self.ready = False
        self.answering = False
        self.complete = False
        self.buffered = False
        self.reason = b""
        self.head = None
        self.body = b""
        self.received = 0
        self.deadline = deadline
        self._fields = ResponseFields()
        self._head_bytes = 0
        self._bodyless = bodyless
        self._wrote = False
        self._all_given = False
        if self._unusual:
            self._reset_unusual()
        self._ticker.watched.add(self)

    def _reset_unusual(self) -> None:
        """What only streams, trailers and interim answers touch; not worth setting for every small answer."""
        self._unusual = False
        self._ends_with_head = False
        self.trailers = []
        self._interim_seen = False
        self._left = 0
        self._chunk_lines = None
        self._chunks_begin = False
        self._end_of_head = b""
        self._sink = None
        self.waiting = []  # body bytes the exchange has not taken yet
        self._waiting_bytes = 0
        self._idle_limit = 0.0
        self._progress = False
        self._last_pending = -1

    def write_all(self, data: bytes) -> None:
        """The whole request at once."""
        self._wrote = self._all_given = self._in_one = True
        if self.transport is not None:
            self.transport.write(data)

    def write(self, data: bytes, *, last: bool) -> None:
        """Hand request bytes to the transport; `last` when none follow."""
        self._wrote = True
        self._all_given = last
        self._in_one = False
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

    def stream_to(self, sink: Sink) -> None:
        """Push the rest of the body into `sink`; `ready` again at its end, or with the failure."""
        self.ready = False
        self._sink = sink
        paused = False
        for data in self.waiting:
            paused = sink.body(data)
        self.waiting = []
        if paused:
            self._pause()
        elif not self.complete:
            self.resume()
        if self.complete or self.failure is not None:
            self.ready = True

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
        self.owner = None
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
        self.owner = None
        self.closed = True
        if self.transport is not None:
            self.transport.forget()
            self.transport.abort()

    def fail(self, failure: BaseException) -> None:
        """Give the waiting exchange this failure and close."""
        owner = self.owner
        if self.failure is None:
            self.failure = failure
        self.abort()
        self.ready = True
        if owner is not None:
            owner.wake()

    def taken_failure(self) -> BaseException:
        """The failure, to be raised. Not kept here as well: raised, it holds the frames that hold this connection, and
        only the collector would ever find that circle, with the bodies in it."""
        failure, self.failure = self.failure, None
        assert failure is not None
        return failure

    def forget_parser(self) -> None:
        """Nothing more will be read here. The two point at each other, and would wait for the collector."""
        self._parser = _NO_PARSER

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """The transport, for a tunnel, with the bytes that arrived behind the answer."""
        assert self.transport is not None
        self.forget_parser()  # as in `connection_lost`, which nobody will call now
        return released(self.transport), self.tail

    @property
    def phase(self) -> int:
        """How far the request got, judged as late as possible and in doubt as further."""
        if not self._wrote or self._all_waits():
            return CONNECTED
        transport = self.transport
        if self._all_given and (transport is None or transport.get_write_buffer_size() == 0):
            return SENT
        return PARTLY_SENT

    def _all_waits(self) -> bool:
        """The request was written in this turn, which has not ended: none of it has left."""
        return self._in_one and self.transport is not None and bool(self.transport.pending)

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
            self.fail(self._out_of_time())

    def _out_of_time(self) -> Exception:
        """Nothing moves any more: whose turn was it?"""
        if self._idle_limit and self.head is None and not self._all_given and self._nothing_to_send():
            return UploadBroken(f"the request body did not go on for {self._idle_limit:g} s (body_idle)", stalled=True)
        if self._sink is not None and (self._reading_paused or self._sink.pending() > 0):
            return UploadBroken(f"the app did not read its answer for {self._idle_limit:g} s (body_idle)", stalled=True)
        return AttemptFailed("NETWORK_TIMEOUT", self._timeout_message(), self.phase)

    def _nothing_to_send(self) -> bool:
        return self.transport is not None and self.transport.get_write_buffer_size() == 0

    def _timeout_message(self) -> str:
        if self.head is not None:
            return f"the response stopped moving after {self.received} bytes of its body"
        if self._idle_limit:
            return "the request body stopped moving"
        return "no response head arrived in time"

    def _stopped_by(self, error: httptools.HttpParserError, data: bytes) -> bool:
        """llhttp got no further. False if that is no reason to end the attempt."""
        if self._chunks_begin and not self.complete and self._fault is None:
            try:
                if self.follow_chunks(data, stopped=True):
                    return False
            except httptools.HttpParserError as again:
                error = again
        return self._broken_by(error)

    def _broken_by(self, error: httptools.HttpParserError) -> bool:
        """False if the answer was complete when the parser stopped: what is wrong lies behind it."""
        if self.complete:
            self.found_surplus()
            return False
        self.fail(AttemptFailed("PROTOCOL_ERROR", self._fault or f"not valid HTTP: {error}", self.phase))
        return True

    # ---- the transport's side --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = Gathering(cast(asyncio.Transport, transport), self._turn, self._turn.requests)
        # More than asyncio's 64 KiB: fewer pauses on fast uploads, still bounded.
        self.transport.set_write_buffer_limits(high=WAITING_BODY)

    def eof_received(self) -> None:
        self._eof = True  # over TLS only after close_notify; without it anyone on the way could have cut here
        if not self.busy:
            self.closed = True  # the loop tells of the loss only after all that arrived with this: nobody may take it

    def connection_lost(self, exc: BaseException | None) -> None:
        phase = self.phase if self.busy else CONNECTED
        self.closed = True
        self.transport = None
        self.forget_parser()
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)
        if not self.busy or self.complete:
            if isinstance(exc, ssl.SSLError) and not self.reused:  # TLS 1.3, see below, and before anything was sent
                self.failure = AttemptFailed("TLS_FAILURE", f"the upstream ended TLS at once ({exc})", phase)
            return
        if self._until_close and self.head is not None and exc is None and self._eof:
            self.complete = self.ready = True
            if self.owner is not None:
                self.owner.wake()
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
        stale = self.reused and not self.answering
        code = "CONNECTION_RESET"
        if isinstance(exc, ssl.SSLError) and not stale and not self.answering:
            code = "TLS_FAILURE"  # TLS 1.3: a client certificate is refused only after the handshake
        failed = AttemptFailed(code, told, phase, stale=stale)
        failed.__cause__ = exc
        self.fail(failed)

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
            if self.busy or not data.startswith(_GOOD_BYE):
                self.found_surplus()
            if not self.busy:
                self.abort()
            return
        self._progress = True
        if not self.answering:
            if self.reused and self._in_one and self.transport is not None and self.transport.pending:
                # Nothing was asked yet, as above.
                if not data.startswith(_GOOD_BYE):
                    self.found_surplus()
                told = "the upstream spoke on a kept connection before it was asked"
                self.fail(AttemptFailed("CONNECTION_RESET", told, CONNECTED, stale=True))
                return
            self.answering = True
            if not data.startswith(b"HTTP/1."):
                self._interim_seen = self._unusual = True  # its version is looked at once the head is complete
        if self._left:
            self.take_past_parser(data)
            if self.ready and self.owner is not None:
                self.owner.wake()
            return
        received = self.received
        wanted = data
        if self.head is None:
            self._head_bytes += len(data)
        elif self._chunk_lines is not None:
            wanted = self._chunk_lines.follow(data)
        try:
            self._parser.feed_data(wanted)
        except httptools.HttpParserUpgrade as switch:
            self.tail = data[switch.args[0] :]
        except httptools.HttpParserError as error:
            if self._stopped_by(error, data):
                return
        if self.ready:
            if not self.buffered:
                self.look_behind(data)
            if self.owner is not None:
                self.owner.wake()
            return
        if self.head is not None:
            # Between pieces of the body, and behind it, are chunk sizes and trailers: bounded like a head.
            self._head_bytes = self._head_bytes + len(data) if self.received == received else 0
        else:
            self._end_of_head = (self._end_of_head + data)[-3:]
            self._unusual = True
        if self._head_bytes > self._head_limit and not self.closed:
            self.fail(AttemptFailed("PROTOCOL_ERROR", self._endless_head(), self.phase))
