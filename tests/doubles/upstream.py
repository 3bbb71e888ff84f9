"""An upstream that does exactly what a test tells it, over a real socket.

A script is a coroutine function taking a `Talk`: one accepted connection. Every head and body it reads is kept
in `Upstream.requests`, so a test can count what really arrived.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable

Script = Callable[["Talk"], Awaitable[None]]


def answer(body: bytes = b"ok", status: str = "200 OK", *fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class Talk:
    """One accepted connection, seen from the upstream."""

    def __init__(self, upstream: Upstream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.upstream = upstream
        self.reader = reader
        self.writer = writer

    async def read_head(self) -> bytes:
        """The request line and fields, without the empty line; kept in `upstream.requests`."""
        head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4]
        self.upstream.requests.append(head)
        return head

    async def read_request(self) -> tuple[bytes, bytes]:
        head = await self.read_head()
        body = b""
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readuntil(b"\r\n")
        elif b"content-length:" in lower:
            body = await self.reader.readexactly(int(lower.split(b"content-length:")[1].split(b"\r\n")[0]))
        self.upstream.bodies.append(body)
        return head, body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


class Upstream:
    """A listening upstream. `connections` counts accepted ones, `requests` holds the heads that arrived."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> Upstream:
        self._server = await asyncio.start_server(self._accepted, host, port, ssl=tls, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.script(Talk(self, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def always(data: bytes) -> Script:
    """Answer every request on every connection with the same bytes, keeping the connection open."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(data)

    return script


def once(data: bytes) -> Script:
    """Read one request, answer, close."""

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(data)
        talk.close()

    return script


async def echo(talk: Talk) -> None:
    """Answer with the head as it arrived, followed by the body."""
    while True:
        head, body = await talk.read_request()
        await talk.send(answer(head + b"\r\n\r\n" + body))
