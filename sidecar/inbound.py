"""The listener: bytes of the app → exchanges → bytes to the app, on aiohttp's low-level server.

Law: this is the only file that touches aiohttp's private parts (the contract test names each of them), and it
decides nothing about requests. `start` awaits the exchange itself: no task and no request object per request.
What aiohttp's parser leaves open is closed here: bad chunks in later segments, trailers that would leak into the
next request, slow heads, connections that must end with a lingering close, takeover by a tunnel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp.http_exceptions import BadHttpMessage, BadHttpMethod, HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo
from aiohttp.web_server import Server

from sidecar import clock
from sidecar.exchange import Exchange

if TYPE_CHECKING:
    from sidecar.proxy import Proxy
    from sidecar.relay import AppSink

# A chunked body that ends like this had no trailers; see `may_have_trailers`.
_CLEAN_CHUNKED_END = b"\r\n0\r\n\r\n"
_LINGER = 3.0
# Only their difference matters: it tells a too long target (414) from a too long field (431).
_LINE_LESS = 1
MAX_FIELDS = 256
_LINE_OVERHEAD = 32  # method, version and line ends, which do not count towards the limit
_HEAD_TOO_LARGE = "the request head is too large"


class Downstream(RequestHandler):
    """One connection of the app."""

    __slots__ = (
        "_head_bytes",
        "_head_limit",
        "_last_bytes",
        "_payload_now",
        "_resume_upstream",
        "_sink",
        "head_since",
        "idle_since",
        "lingering",
        "proxy",
    )

    def __init__(self, manager: Listener, **options: Any) -> None:
        super().__init__(manager, **options)
        self.proxy = manager.proxy
        self._last_bytes = b""
        self._head_bytes = 0  # of a head that has not arrived whole
        self._head_limit = manager.proxy.limits.head_bytes
        self._payload_now: Any = None
        self._sink: AppSink | None = None
        self._resume_upstream: Callable[[], None] | None = None
        self.idle_since = clock.monotonic()
        self.head_since = self.idle_since  # the first head is awaited from the start
        self.lingering = False

    @property
    def busy(self) -> bool:
        return self._waiter is None or self._waiter.done() or bool(self._messages)

    # ---- bytes in --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.proxy.downstreams) > self.proxy.limits.connections:
            self._refuse_connection()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        messages = self._messages
        if self._head_bytes + len(data) > self._head_limit:
            self._check_head_size(len(data))
        if messages:
            self.head_since = 0.0
            self._head_bytes = 0
            if type(messages[-1][0]) is _ErrInfo:
                self._break_payloads()
        elif self._waiter is not None and data:
            self._head_bytes += len(data)
            if self.head_since == 0.0:
                self.head_since = clock.monotonic()
        # `data` is empty when aiohttp only wants buffered bytes parsed again.
        if len(data) >= 7:
            self._last_bytes = data[-7:]
        elif data:
            self._last_bytes = (self._last_bytes + data)[-7:]

    def _check_head_size(self, received: int) -> None:
        """aiohttp bounds each line and their number, not the head. So many bytes may also be bodies and several
        requests, so heads that are here are measured; one that is not here yet is too large already."""
        messages = self._messages
        for place, (message, _) in enumerate(messages):
            if isinstance(message, RawRequestMessage) and _head_size(message) > self._head_limit:
                while len(messages) > place:
                    messages.pop()
                break
        else:
            if messages or self._waiter is None or self._head_bytes + received <= self._head_limit + _LINE_OVERHEAD:
                return
        error = BadHttpMessage(_HEAD_TOO_LARGE)
        messages.append((_ErrInfo(status=400, exc=error, message=error.message), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break_payloads(self) -> None:
        """After a parse error no body that is still open will ever be completed: say so, or its reader hangs."""
        error = self._messages[-1][0]
        for payload in (self._payload_now, *(payload for _, payload in self._messages)):
            if payload is not None and not payload.is_eof() and payload.exception() is None:
                payload.set_exception(RequestPayloadError(getattr(error, "message", "bad request body")))

    async def start(self) -> None:
        """One request after the other until the connection ends."""
        loop, proxy = self._loop, self.proxy
        while not self._force_close:
            if not self._messages:
                self._waiter = loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            message, payload = self._messages.popleft()
            if self._parser is not None:
                self._parser.message_consumed()
            if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
                self._resume_reading_if_drained()
            if isinstance(message, _ErrInfo):
                self._answer_unparsable(message)
                await self._linger()
                break
            exchange = Exchange(proxy, self, message, payload, clock.monotonic())
            self._payload_now = payload
            await exchange.run()
            self._payload_now = None
            self.idle_since = exchange.record.ended
            if exchange.taken_over:
                return
            if not exchange.keep_alive:
                malformed = not exchange.record.outcome  # then nobody knows what else is on its way
                unread = not (payload.is_eof() or exchange.expects_continue_unanswered)
                if malformed or unread or self._messages:
                    await self._linger()
                break
            if self._paused:
                # The app does not read its answers: no further request of its own until it does.
                await self._drain_helper()
        if self.transport is not None and not self._force_close:
            self._close = True
            self.transport.close()

    def may_have_trailers(self) -> bool:
        """aiohttp's parser hands the last trailer of a chunked request to the *next* request as a header, so such
        a connection ends. What has arrived behind the request already tells nothing about how that one ended."""
        return bool(self._messages) or self._last_bytes != _CLEAN_CHUNKED_END

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
        super().resume_writing()
        if self._sink is not None and self._resume_upstream is not None:
            self._sink.full = False
            self._resume_upstream()

    # ---- refusing --------------------------------------------------------------------------------------------

    def _answer_unparsable(self, error: _ErrInfo) -> None:
        code, reason, message = _unparsable(error.exc, self.max_line_size)
        self.answer_at_once(code, reason, message)

    def answer_at_once(
        self, code: str, reason: str, message: str, *, status: int | None = None, retry_after: int | None = None
    ) -> None:
        """An error for what never became an exchange; the connection ends after it."""
        proxy = self.proxy
        self.keep_alive(False)
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

    def _refuse_connection(self) -> None:
        limit = self.proxy.limits.connections
        self.answer_at_once(
            "OVERLOADED", "connections", f"{limit} connections are open already (limits.connections)", retry_after=1
        )
        self._close = True
        if self._task_handler is not None:
            self._task_handler.cancel()
        if self.transport is not None:
            self.transport.close()

    def check(self, now: float) -> None:
        """Cut off slow heads, idle connections and apps that never read."""
        limits = self.proxy.limits
        if self.busy or self.lingering:
            return
        if self.head_since and now - self.head_since > limits.head_timeout:
            self.answer_at_once(
                "MALFORMED_REQUEST",
                "head_timeout",
                f"the request head did not arrive within {limits.head_timeout:g} s (limits.head_timeout)",
                status=408,
            )
            self.force_close()
        elif now - self.idle_since > limits.keepalive_timeout:
            self.force_close()

    def cut_off(self) -> None:
        """The grace is over: end the connection whatever it is doing."""
        if self.transport is not None:
            self.transport.abort()

    async def _linger(self) -> None:
        """Close in both directions, but read on for a moment: closing over unread bytes would reset the
        connection and could destroy the answer on its way."""
        transport = self.transport
        if transport is None:
            return
        self.lingering = True
        self._close = True  # from here on `data_received` throws everything away
        if transport.can_write_eof():
            transport.write_eof()
        self._resume_transport_reading()
        await clock.sleep(_LINGER)  # ends early, by cancellation, when the app closes its side

    # ---- takeover --------------------------------------------------------------------------------------------

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """Give the transport to a tunnel, with the bytes that arrived behind the head. Reading is paused."""
        transport, tail = self.transport, self._message_tail
        if transport is None or self._manager is None:
            raise asyncio.CancelledError  # the app is gone
        self._pause_transport_reading()
        self._message_tail = b""
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
            self._keepalive_handle = None
        self._manager.connection_lost(self, None)
        self._force_close = True
        self.transport = None
        self._parser = None
        return transport, tail


class Listener(Server):
    """aiohttp's server, making our connections. Its own `__call__` hides a wrong option behind defaults."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(_never_called, handler_cancellation=True, loop=proxy.loop)
        self.proxy = proxy
        proxy.downstreams = self._connections
        head_bytes = proxy.limits.head_bytes
        self._options: dict[str, Any] = {
            "loop": proxy.loop,
            "keepalive_timeout": 0,  # one coarse tick watches all connections instead of a timer each
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": head_bytes - _LINE_LESS,
            "max_field_size": head_bytes,
            "max_headers": MAX_FIELDS,
        }
        proxy.ticker.every(0.5, self._check_connections)

    def __call__(self) -> Downstream:
        return Downstream(self, **self._options)

    def _check_connections(self, now: float) -> None:
        for connection in tuple(self._connections):
            if isinstance(connection, Downstream):
                connection.check(now)


def _head_size(message: RawRequestMessage) -> int:
    return len(message.path) + sum(len(name) + len(value) + 4 for name, value in message.raw_headers)


async def _never_called(request: object) -> Any:
    raise AssertionError("connections run their own loop")


def _unparsable(error: BaseException, max_line_size: int) -> tuple[str, str, str]:
    """aiohttp's parse errors → code, reason word, sentence."""
    told = error.message.partition("\n")[0].rstrip(":") if isinstance(error, HttpProcessingError) else str(error)
    if isinstance(error, LineTooLong):
        if str(max_line_size) in map(str, error.args):
            return "TARGET_TOO_LONG", "target_too_long", f"the request target is longer than {max_line_size} bytes"
        return "HEADERS_TOO_LARGE", "head_too_large", "a header field is too large (limits.head_bytes)"
    if told == _HEAD_TOO_LARGE:
        return "HEADERS_TOO_LARGE", "head_too_large", "the request head is too large (limits.head_bytes)"
    if "Too many headers" in told:
        return "HEADERS_TOO_LARGE", "head_too_large", f"more than {MAX_FIELDS} header fields"
    if isinstance(error, BadHttpMethod):
        return "NOT_IMPLEMENTED", "method", "the request method is not one this proxy understands"
    if "HTTP version" in told or "HTTP version" in str(error) or "PRI/Upgrade" in told:
        return "VERSION_NOT_SUPPORTED", "version", "only HTTP/1.1 and HTTP/1.0 are understood"
    return "MALFORMED_REQUEST", "syntax", f"the request is not valid HTTP: {told[:200]}"
