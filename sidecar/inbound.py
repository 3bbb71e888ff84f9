"""One connection of an app: bytes of the app → exchanges → bytes to the app, on aiohttp's low-level server.

Law: with `listener.py` the only file that touches aiohttp's private parts (the contract test names them), and it
decides nothing about requests. One exchange at a time per connection, in the order of their heads; it is started
and resumed by the bytes themselves (`drive.py`), so a request costs no task. aiohttp's own parser is replaced by
llhttp through httptools (`request.py`): it loses trailers into the next request and hangs on a bad chunk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import httptools

from sidecar import clock
from sidecar.body import RequestBody
from sidecar.exchange import Exchange
from sidecar.failures import Malformed, Refused
from sidecar.incoming import find_destination, find_tunnel
from sidecar.request import Request, RequestReader, head_too_large, request_parser, unparsable
from sidecar.turn import Gathering, released

if TYPE_CHECKING:
    from sidecar.listener import Listener
    from sidecar.relay import AppSink

_LINGER = 3.0
# A pipelined burst is parsed in pieces, and not further than this many requests ahead of the one being answered.
_PIECE = 16_384
_BODY_PIECE = 65_536
_MOST_WAITING = 32
_NO_PARSER = httptools.HttpRequestParser(object())
_MOST_EARLY_BYTES = 65_536  # behind a CONNECT or Upgrade, before its tunnel begins


class Downstream(RequestReader):
    """One connection of the app."""

    __slots__ = (
        "_deaf",
        "_early",
        "_exchange",
        "_heard",
        "_holding",
        "_linger_until",
        "_resume_upstream",
        "_running",
        "_sink",
        "_switched",
        "_unparsed",
        "idle_since",
        "proxy",
    )

    def __init__(self, manager: Listener, **options: Any) -> None:
        super().__init__(manager, **options)
        self.proxy = manager.proxy
        self._held = manager.proxy.held
        self._parser = None  # aiohttp's own
        self.parser = request_parser(self)
        self._arriving = None
        self._begun = b""
        self._stands_for = None
        self._body = None
        self._body_again = None
        self._chunk_lines = None
        self._of_head = 0
        self._last = None
        self._head_bytes = 0
        self.take_limits()
        self._waiting = deque()
        self._unparsed = b""
        self._early = b""
        self._heard: asyncio.Future[None] | None = None  # `early` waits for more
        self._switched = False  # what follows belongs to a tunnel
        self._deaf = False  # what follows is thrown away
        self._holding = False  # the app is not read from
        self._running = False
        self._exchange: Exchange | None = None
        self._sink: AppSink | None = None
        self._resume_upstream: Callable[[], None] | None = None
        self._linger_until = 0.0
        self.idle_since = clock.monotonic()
        self.head_since = self.idle_since  # the first head is awaited from the start

    def take_limits(self) -> None:
        """At the start, and when settings have changed: from the next request on."""
        self._head_limit = self.proxy.limits.head_bytes
        self._replay_limit = self.proxy.limits.replay_body_bytes

    find_destination = staticmethod(find_destination)
    """Of a request that arrived here, and of a CONNECT. Connections of other kinds have other ways."""
    find_tunnel = staticmethod(find_tunnel)

    @property
    def exchange(self) -> Exchange | None:
        """The request that is being served."""
        return self._exchange

    @property
    def busy(self) -> bool:
        return self._exchange is not None or bool(self._waiting)

    @property
    def needs_store(self) -> bool:
        return bool(self._waiting) or (self._exchange is not None and self._exchange.needs_store)

    @property
    def lingering(self) -> bool:
        return self._linger_until > 0.0

    async def start(self) -> None:
        """aiohttp makes a task of this for each connection. There is nothing for it to do."""

    # ---- bytes in --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        turn = self.proxy.turn
        self.transport = Gathering(cast(asyncio.Transport, transport), turn, turn.answers)
        refused = self.proxy.refusal_of_connection(len(self.proxy.downstreams), transport)
        if refused is not None:
            self._refuse_connection(refused)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._deaf = True
        left_behind, exchange = self._left_behind(), self._exchange
        by_app = exchange is None or exchange.keep_alive  # else it was to end here, or has been cut off
        if exchange is not None:
            exchange.cancel()
        self._never_begun(left_behind, "CLIENT_DISCONNECTED" if by_app else None)
        self._let_go()

    def _left_behind(self) -> list[Request]:
        """Nobody else begins with those that wait."""
        left_behind = list(self._waiting)
        self._waiting.clear()
        return left_behind

    def _never_begun(self, requests: list[Request], code: str | None) -> None:
        """They have arrived, so each of them has an outcome too."""
        for request in requests:
            Exchange(self.proxy, self, request, clock.monotonic()).never_begun(code)

    def _let_go(self) -> None:
        """Nothing more will be read here. The parser and the last body point back at this connection: left to the
        collector, the circle would keep whole bodies for as long as it is not run."""
        self.parser = _NO_PARSER
        self._last = self._body = self._arriving = self._body_again = self._chunk_lines = None

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if len(data) > _PIECE or self._unparsed or self._switched:
            self._unparsed += data
            self._parse_on()
            return
        self._parse(data)
        if self._waiting:
            if self._exchange is None:
                self._run_waiting()
                if not self._waiting:
                    return
            self.regulate()

    def _parse_on(self) -> None:
        """Take up what was received but not parsed, as far as it is wanted now."""
        while self._unparsed and len(self._waiting) < _MOST_WAITING and not self._deaf:
            if self._switched:
                self._early += self._unparsed
                self._unparsed = b""
                if self._heard is not None and not self._heard.done():
                    self._heard.set_result(None)
                break
            # What looks like one request may be hundreds, so only a body is taken in large pieces.
            size = _PIECE if self._body is None else _BODY_PIECE
            piece, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            self._parse(piece)
        if self._waiting and self._exchange is None:
            self._run_waiting()
        self.regulate()

    def _parse(self, data: bytes) -> None:
        body = self._body
        taken, wanted = 0, data
        if body is None:
            self._head_bytes += len(data)
        else:
            taken = body.total
            if self._chunk_lines is not None:
                wanted = self._chunk_lines.follow(data)
        try:
            self.parser.feed_data(wanted)
        except httptools.HttpParserUpgrade as switch:
            self._switch(data[switch.args[0] :])
        except httptools.HttpParserError as error:
            self._parse_otherwise(data, error)
        if self._arriving is not None:
            self._head_goes_on(data)
            return
        if self._body is not None:
            self._body_goes_on(data, body, taken)
        self.head_since = 0.0

    def _body_goes_on(self, data: bytes, before: RequestBody | None, taken: int) -> None:
        """A body is being read; `before` is the one that was before `data`, of which `taken` bytes were here."""
        body = self._body
        assert body is not None
        if body is before:
            # Between pieces of the body, and behind it, are chunk sizes and trailers: bounded like a head.
            self._head_bytes = self._head_bytes + len(data) if body.total == taken else 0
            if self._head_bytes > self._head_limit:
                self._parse_failed(head_too_large())
        elif body.chunked and self._chunk_lines is None:
            self.follow_chunks(data, stopped=False)

    def _parse_otherwise(self, data: bytes, error: httptools.HttpParserError) -> None:
        """llhttp has stopped. What follows cannot be parsed, or only in other words."""
        instead = self.read_with_stand_in(data, error)
        if instead is not None:
            try:
                if instead:
                    self.parser.feed_data(instead)
                return
            except httptools.HttpParserUpgrade as switch:
                self._switch(instead[switch.args[0] :])
                return
            except httptools.HttpParserError as failed:
                error = failed
        body = self._body
        try:
            if body is not None and body.chunked and self.follow_chunks(data, stopped=True):
                return
        except httptools.HttpParserError as failed:
            error = failed
        self._parse_failed(unparsable(error))

    def _head_goes_on(self, data: bytes) -> None:
        """The beginning of a head is here."""
        if self.head_since == 0.0:
            self.head_since = clock.monotonic()
            self._begun = b""
        if self._begun is not None:
            on_its_own = self._head_bytes == len(self._begun) + len(data)
            self._begun = self._begun + data if on_its_own else None
        too_long = self.head_too_long()
        if too_long is not None and not self._deaf:
            self._parse_failed(too_long)

    def _parse_failed(self, error: Malformed) -> None:
        """Nothing behind this is looked at. An open body will never be complete: its upload hears of it."""
        self._deaf = True
        if self._body is not None:
            self._body.fail(f"the request body is not valid: {error.message}")
        elif self._last is None or self._last.keep_alive:  # else what follows the last one is no request at all
            refused = Request()
            refused.refuse(error)
            refused.keep_alive = False
            self._waiting.append(refused)

    def _switch(self, tail: bytes) -> None:
        """llhttp stops behind a CONNECT and behind every Upgrade, as if no body could follow."""
        request = self._last
        assert request is not None
        if request.switches or request.method == "CONNECT":
            request.switches = self._switched = True
            self._early = tail
            return
        if request.body is not None:
            self.read_body_behind(request)
        if tail:
            self._parse(tail)

    def regulate(self) -> None:
        """Read from the app only while what has been read is being used up."""
        body = self._body
        hold = (
            bool(self._unparsed)
            or len(self._waiting) >= _MOST_WAITING
            or len(self._early) > _MOST_EARLY_BYTES
            or (body is not None and body.held)
        )
        if hold != self._holding:
            self._holding = hold
            if hold:
                self._pause_transport_reading()
            else:
                self._resume_transport_reading()

    # ---- one exchange after the other ------------------------------------------------------------------------

    def _run_waiting(self) -> None:
        """Start the next exchange; go on here, not deeper, when it has ended already."""
        proxy = self.proxy
        waiting = self._waiting
        self._running = True
        while waiting and self._exchange is None and not self._paused and self.transport is not None:
            self._exchange = exchange = Exchange(proxy, self, waiting.popleft(), clock.monotonic())
            exchange.start(exchange.run(), self._exchange_ended)
        self._running = False

    def _run_on(self) -> None:
        self._run_waiting()
        if self._unparsed:
            self._parse_on()
        else:
            self.regulate()

    def _exchange_ended(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        self.idle_since = exchange.record.ended
        if exchange.taken_over:
            return
        if not exchange.keep_alive:
            self._end(exchange)
            return
        if self.head_since:
            self.head_since = self.idle_since  # a pipelined head: its time begins now
        if (self._waiting or self._unparsed) and not self._running:
            # From the loop, so that a long pipeline does not grow the stack.
            self._loop.call_soon(self._run_on)

    def _end(self, exchange: Exchange) -> None:
        """The last answer of this connection has been written."""
        transport = self.transport
        if transport is None:
            return
        self._deaf = True
        malformed = not exchange.record.outcome  # then nobody knows what else is on its way
        unread = exchange.has_unread_body and not exchange.expects_continue_unanswered
        if malformed or unread or self._waiting or self._unparsed:
            self._linger(transport)
        else:
            transport.close()
        self._never_begun(self._left_behind(), None)

    def _linger(self, transport: asyncio.Transport) -> None:
        """Close in both directions, but read on for a moment: closing over unread bytes would reset the
        connection and could destroy the answer on its way."""
        self._linger_until = clock.monotonic() + _LINGER
        self._unparsed = b""
        if transport.can_write_eof():
            transport.write_eof()
            self._resume_transport_reading()
        else:
            transport.close()  # TLS says so itself, and reads on until the app has

    # ---- bytes out -------------------------------------------------------------------------------------------

    def stream_through(self, sink: AppSink, resume_upstream: Callable[[], None]) -> None:
        self._sink = sink
        self._resume_upstream = resume_upstream
        sink.full = self._paused

    def stream_ended(self) -> None:
        self._sink = None
        self._resume_upstream = None

    def pause_writing(self) -> None:
        self._paused = True
        if self._sink is not None:
            self._sink.full = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._sink is not None and self._resume_upstream is not None:
            self._sink.full = False
            self._resume_upstream()
        elif self._exchange is None and self._waiting:
            self._run_on()  # the app reads its answers again: it may have further ones

    # ---- refusing --------------------------------------------------------------------------------------------

    def answer_at_once(
        self, code: str, reason: str, message: str, *, status: int | None = None, retry_after: int | None = None
    ) -> None:
        """An error for what never became an exchange; the connection ends after it."""
        proxy = self.proxy
        proxy.metrics.malformed(reason)
        if self.transport is None:
            return
        _, answer = proxy.answers.error(
            code,
            message,
            request_id=proxy.next_session_id().decode(),
            wall=proxy.wall(clock.monotonic()),
            details={"reason": reason},
            status=status,
            retry_after=retry_after,
            close=True,
        )
        self.transport.write(answer)

    def _refuse_connection(self, refused: Refused) -> None:
        self.answer_at_once(refused.code, refused.reason, refused.message, retry_after=refused.retry_after)
        self._deaf = True
        if self.transport is not None:
            self.transport.close()

    def check(self, now: float) -> None:
        """Cut off slow heads, idle connections and apps that never read."""
        limits = self.proxy.limits
        if self.lingering:
            if now > self._linger_until:
                self.cut_off()
        elif self._exchange is not None:
            return
        elif self._paused:
            if now - self.idle_since > limits.keepalive_timeout:
                self.cut_off()  # its answers lie here unread
        elif self.head_since and now - self.head_since > limits.head_timeout:
            self.answer_at_once(
                "MALFORMED_REQUEST",
                "head_timeout",
                f"the request head did not arrive within {limits.head_timeout:g} s (limits.head_timeout)",
                status=408,
            )
            self._deaf = True
            self.force_close()
        elif now - self.idle_since > limits.keepalive_timeout:
            self.force_close()

    def cut_exchange_off(self) -> None:
        """The grace is over: what is under way ends with an answer that says so, or visibly broken off."""
        if self._exchange is not None:
            self._exchange.cut_off()

    def cut_off(self) -> None:
        """End the connection whatever it is doing."""
        if self.transport is not None:
            self.transport.abort()

    async def early(self, enough: Callable[[bytes], bool]) -> bytes:
        """What comes behind a CONNECT that was answered before anybody takes it over, as soon as it is enough."""
        while not enough(self._early) and len(self._early) <= _MOST_EARLY_BYTES:
            self._heard = self._loop.create_future()
            try:
                await self._heard
            finally:
                self._heard = None
        return self._early

    # ---- takeover --------------------------------------------------------------------------------------------

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """Give the transport to a tunnel, with the bytes that arrived behind the head. Reading is paused."""
        transport, tail = self.transport, self._early
        if transport is None or self._manager is None:
            raise asyncio.CancelledError  # the app is gone
        self._pause_transport_reading()
        self._early = b""
        self._deaf = True
        self._holding = True
        self._manager.connection_lost(self, None)
        self._force_close = True
        self.transport = None
        self._let_go()
        return released(transport), tail
