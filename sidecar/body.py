"""The app's request body on its way to the upstream, kept for sending again while it is small enough.

Law: bytes are read with `readany` (anything larger lifts the parser's watermark and with it the bound on
memory), written, and drained before more are read. Up to `limit` bytes are kept; past that the current attempt
goes on and only the possibility of another is lost. A broken body never looks complete to the upstream.
"""

from __future__ import annotations

from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestPayloadError

from sidecar.failures import UploadBroken
from sidecar.upstream.connection import UpstreamConnection

_SMALL_CHUNK = 16_384


class RequestBody:
    """Created only when the request has a body."""

    __slots__ = ("_kept", "_kept_bytes", "_limit", "_payload", "chunked", "finished", "replayable", "total")

    def __init__(self, payload: StreamReader, *, chunked: bool, limit: int) -> None:
        self._payload = payload
        self._limit = limit
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.chunked = chunked
        self.total = 0
        self.finished = False
        self.replayable = True

    def arrived_whole(self) -> bytes | None:
        """The whole framed body if it is already here, which is the common case for small ones."""
        if self.finished:
            return b"".join(self._framed(data) for data in self._kept) + self._end() if self.replayable else None
        payload = self._payload
        if payload.exception() is not None or not payload.is_eof():
            return None
        data = payload.read_nowait(-1)
        self._keep(data)
        self.finished = True
        return (self._framed(data) if data else b"") + self._end()

    async def stream(self, connection: UpstreamConnection) -> None:
        """Send what was kept, then the rest as it comes. Raises UploadBroken if the app's body is."""
        for data in self._kept:
            self._write(connection, data)
            await connection.drain()
        while not self.finished:
            try:
                data = await self._payload.readany()
            except RequestPayloadError as error:
                raise UploadBroken("the request body is not valid: " + str(error).partition("\n")[0]) from error
            if not data:
                self.finished = True
                break
            self._keep(data)
            self._write(connection, data)
            await connection.drain()
        connection.write(self._end(), last=True)

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        if not self.replayable:
            return
        if self._kept_bytes + len(data) > self._limit:
            self.replayable = False
            self._kept.clear()
            return
        self._kept_bytes += len(data)
        self._kept.append(data)

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def _end(self) -> bytes:
        return b"0\r\n\r\n" if self.chunked else b""

    def _write(self, connection: UpstreamConnection, data: bytes) -> None:
        if self.chunked and len(data) > _SMALL_CHUNK:
            connection.write(b"%x\r\n" % len(data), last=False)
            connection.write(data, last=False)
            connection.write(b"\r\n", last=False)
        else:
            connection.write(self._framed(data), last=False)
