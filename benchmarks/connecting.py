"""A relay that sends a CONNECT for clients that know no proxies: wrk speaks TLS to it, and the proxy opens that.

    python -m benchmarks.connecting PORT PROXY_PORT AUTHORITY

Both sides of a comparison go through one like this, on the load's core; it costs the faster proxy more.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from benchmarks.processes import LOOPBACK


class End(asyncio.Protocol):
    """One side of a connection; what it reads goes to the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Client(End):
    """A connection of the load."""

    def __init__(self, proxy_port: int, authority: str) -> None:
        super().__init__()
        self._proxy_port = proxy_port
        self._opening = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._task = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        proxy = Proxy(self, self._opening)
        await asyncio.get_running_loop().create_connection(lambda: proxy, LOOPBACK, self._proxy_port)


class Proxy(End):
    """The connection to the proxy: the answer to the CONNECT ends here."""

    def __init__(self, client: Client, opening: bytes) -> None:
        super().__init__()
        self._client = client
        self._opening = opening

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).write(self._opening)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            super().data_received(data)
            return
        self.early += data
        head, end, rest = self.early.partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")) or self._client.transport is None:
            assert self.transport is not None
            self.transport.abort()
            return
        self.other, self._client.other = self._client, self
        if rest:
            self._client.transport.write(rest)
        if self._client.early and self.transport is not None:
            self.transport.write(self._client.early)


async def serve(port: int, proxy_port: int, authority: str) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Client(proxy_port, authority), LOOPBACK, port, backlog=1024
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
