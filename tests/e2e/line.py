"""The line to a peer: a TCP relay on a port of its own that can be cut, held up or filled with noise, and mended."""

from __future__ import annotations

import asyncio
import contextlib

NOISE = b"\x00\xff\x13HTTP/0.7 what?\r\n\r\n" * 20


class Line:
    """Leads to `port`. Change `state` with `cut`, `hold`, `refuse`, `babble` and `mend`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.state = "fine"
        self.port = 0
        self.accepted = 0

    async def start(self) -> Line:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def cut(self) -> None:
        """As if the peer was killed: connections end, and nobody listens any more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._drop()

    async def fail(self, state: str) -> None:
        """`hold`: nothing arrives. `refuse`: every connection is closed at once. `babble`: only noise comes back."""
        self.state = state
        await self._drop()

    async def mend(self) -> None:
        self.state = "fine"
        await self._drop()
        if self._server is None:
            await self.start()

    async def _drop(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.state == "hold":
            while await reader.read(65_536):
                pass
        elif self.state == "babble":
            writer.write(NOISE)
            await writer.drain()
            await reader.read(65_536)
        elif self.state == "fine":
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
            try:
                await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))
            finally:
                far_writer.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
