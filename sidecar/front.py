"""A listener with TLS: a connection waits here for its first byte, then TLS begins.

Law: nothing but waiting. A connection that says nothing is closed after `limits.head_timeout` and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from sidecar import clock
from sidecar.failures import Refused
from sidecar.handshakes import CLOSED, TIMEOUT, Handshakes

if TYPE_CHECKING:
    from sidecar.certificates import Shown
    from sidecar.proxy import Proxy


class Front(asyncio.Protocol):
    """One connection that has not said anything yet."""

    __slots__ = ("_accept", "_deadline", "_handshakes", "_proxy", "_shown", "_transport")

    def __init__(
        self, proxy: Proxy, handshakes: Handshakes, accept: Callable[[], asyncio.Protocol], shown: Shown
    ) -> None:
        self._proxy = proxy
        self._handshakes = handshakes
        self._accept = accept
        self._shown = shown
        self._deadline = clock.monotonic() + proxy.limits.head_timeout
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        try:
            self._handshakes.check_room(transport)
        except Refused:
            self._proxy.metrics.malformed("connections")
            self._transport.abort()  # it speaks TLS: there is no way to tell it
            return
        self._handshakes.awaited(self._transport)
        self._proxy.ticker.watched.add(self)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        self._proxy.ticker.watched.discard(self)
        self._transport = None
        transport.pause_reading()
        self._handshakes.begin(transport, data, self._shown.context, self._accept(), self._failed)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._give_up(CLOSED)

    def check(self, now: float) -> None:
        if now > self._deadline and self._transport is not None:
            transport = self._transport
            self._give_up(TIMEOUT)
            transport.abort()

    def _give_up(self, word: str) -> None:
        self._proxy.ticker.watched.discard(self)
        if self._transport is not None:
            self._handshakes.gave_up(self._transport, word)
            self._transport = None

    def _failed(self, word: str, why: str) -> None:
        self._handshakes.tell(word, f"TLS with the listener failed: {why}")
