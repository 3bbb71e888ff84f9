"""Who may be connected to the admin port or the probes, and for how long.

Law: at most so many at once, so that descriptors stay for the data path. Whoever comes when all places are taken gets
the place of the one that has been silent longest: a health check is answered whoever else sits there. A head may take
`limits.head_timeout`, silence between requests `limits.keepalive_timeout`, as on the data path. A connection whose
request is being answered is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from sidecar import clock
from sidecar.failures import Refused
from sidecar.handshakes import Handshakes

if TYPE_CHECKING:
    from sidecar.proxy import Proxy

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
_SAID = b'{"error_code":"OVERLOADED","message":"all connections of this port are busy (limits.admin_connections)"}'


class Door:
    """One for each listener. `serve` makes what speaks HTTP; it is given when that is ready."""

    def __init__(self, proxy: Proxy, most: int) -> None:
        self._proxy = proxy
        self._most = most
        self._open: dict[asyncio.BaseTransport, Visitor] = {}
        """The oldest first."""
        self.handshakes = Handshakes(proxy, self._room_for_handshake)
        self.serve: Callable[[], Any]
        self.leaving = False
        """Another process answers here from now on: each connection ends with its next answer."""
        proxy.ticker.every(0.5, self.check)

    def __call__(self) -> Visitor:
        return Visitor(self, self.serve())

    def __len__(self) -> int:
        return len(self._open) + len(self.handshakes)

    def enter(self, visitor: Visitor, transport: asyncio.Transport) -> bool:
        """False: there is no room, and it has been told so."""
        if len(self) >= self._most and not self._show_out_the_most_silent():
            transport.write(_FULL + b"Content-Length: %d\r\n\r\n" % len(_SAID) + _SAID)
            transport.close()
            return False
        self._open[transport] = visitor
        return True

    def leave(self, transport: asyncio.BaseTransport) -> None:
        self._open.pop(transport, None)

    def _room_for_handshake(self, opening: int, transport: asyncio.BaseTransport | None) -> None:
        if opening + len(self._open) < self._most or self._show_out_the_most_silent():
            return
        raise Refused("OVERLOADED", "all connections of this port are busy", reason="connections", retry_after=1)

    def _show_out_the_most_silent(self) -> bool:
        silent = min(
            (visitor for visitor in self._open.values() if not visitor.busy),
            key=lambda visitor: visitor.silent_since,
            default=None,
        )
        if silent is None:
            return self.handshakes.end_oldest()
        silent.show_out()
        return True

    def check(self, now: float) -> None:
        limits = self._proxy.limits
        for visitor in tuple(self._open.values()):
            if not visitor.busy and visitor.overdue(now, limits.head_timeout, limits.keepalive_timeout):
                visitor.show_out()

    @web.middleware
    async def attended(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Around every handler: while it runs, its connection is not silent."""
        transport = request.transport
        visitor = None if transport is None else self._open.get(transport)
        if visitor is None:
            return await handler(request)
        visitor.busy = True
        try:
            answer = await handler(request)
            if self.leaving:
                answer.force_close()
            return answer
        finally:
            visitor.busy = False
            visitor.silent_since, visitor.head_since = clock.monotonic(), 0.0


class Visitor(asyncio.Protocol):
    """One connection; what it says goes to aiohttp's protocol as it is."""

    __slots__ = ("_door", "_served", "_transport", "busy", "head_since", "silent_since")

    def __init__(self, door: Door, served: Any) -> None:
        self._door = door
        self._served = served
        self._transport: asyncio.Transport | None = None
        self.busy = False
        """A request is being answered."""
        self.silent_since = self.head_since = clock.monotonic()  # the first head is awaited from the start

    def overdue(self, now: float, head_timeout: float, keepalive_timeout: float) -> bool:
        if self.head_since:
            return now - self.head_since > head_timeout
        return now - self.silent_since > keepalive_timeout

    def show_out(self) -> None:
        if self._transport is not None:
            self._door.leave(self._transport)
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = given = cast(asyncio.Transport, transport)
        if self._door.enter(self, given):
            self._served.connection_made(transport)
        else:
            self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if not self.busy and not self.head_since:
            self.head_since = clock.monotonic()
        self._served.data_received(data)

    def eof_received(self) -> None:
        self._served.eof_received()

    def pause_writing(self) -> None:
        self._served.pause_writing()

    def resume_writing(self) -> None:
        self._served.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._transport is not None:
            self._door.leave(self._transport)
            self._transport = None
            self._served.connection_lost(exc)
