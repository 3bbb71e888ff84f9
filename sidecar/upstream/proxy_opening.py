"""Asking a parent proxy for a tunnel: CONNECT, its answer, and then the transport is free for TLS.

Law: exactly the head of the answer is read; a proxy that sends more before TLS begins is not trusted.
"""

from __future__ import annotations

import asyncio
import re
from typing import cast

from sidecar.failures import AttemptFailed
from telemetry.record import NOT_CONNECTED

_LARGEST_ANSWER = 16_384
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")


class ProxyOpening(asyncio.Protocol):
    """The protocol of a connection to a parent proxy until its tunnel is open."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self.target_unreachable = False
        """The proxy itself is well, it says, but it does not reach the target."""
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._answer.done() and (b"\r\n\r\n" in self._received or len(self._received) > _LARGEST_ANSWER):
            self._answer.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        if not self._answer.done():
            self._answer.set_result(None)

    async def open(self, target: str, lines: bytes) -> asyncio.Transport:
        """Send CONNECT and wait for a 2xx. `lines` are the proxy's credentials."""
        if self._transport is None:
            raise AttemptFailed("CONNECTION_RESET", "it closed the connection at once", NOT_CONNECTED)
        authority = target.encode("ascii")
        self._transport.write(b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (authority, authority, lines))
        try:
            await self._answer
        except asyncio.CancelledError:
            if self._transport is not None:
                self._transport.abort()
            raise
        fault = self._fault()
        transport = self._transport
        if fault is not None or transport is None:
            if transport is not None:
                transport.abort()
            raise fault or AttemptFailed("CONNECTION_RESET", "it closed the connection after CONNECT", NOT_CONNECTED)
        return transport

    def _fault(self) -> AttemptFailed | None:
        head, end, behind = self._received.partition(b"\r\n\r\n")
        status = _STATUS.match(head + b"\r")
        if not end or status is None:
            what = "it closed the connection after CONNECT" if self._transport is None else "its answer is not HTTP"
            return AttemptFailed("CONNECTION_RESET", what, NOT_CONNECTED)
        code = int(status[1])
        if 200 <= code < 300:
            if behind:
                return AttemptFailed("PROTOCOL_ERROR", "it sent bytes before the tunnel was used", NOT_CONNECTED)
            return None
        self.target_unreachable = code in (502, 504)
        hint = "; give `egress_proxy` a user and password it accepts" if code == 407 else ""
        kind = "CONNECT_TIMEOUT" if code == 504 else "CONNECTION_REFUSED"
        return AttemptFailed(kind, f"it answered CONNECT with {code}{hint}", NOT_CONNECTED)
