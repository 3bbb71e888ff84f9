"""A sidecar in front of an upstream that notes what reaches it, and apps that write raw bytes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from config.loader import Loaded
from config.model import Settings
from telemetry.logs import Log
from tests.conftest import ONCE, Running
from tests.doubles.upstream import Script, Upstream
from tests.framing import rfc9112

HOST = "origin.test"
PATIENCE = 5.0
_PAUSE = 0.004  # between segments, so that they arrive as such


@asynccontextmanager
async def sidecar_before(script: Script, folder: Path) -> AsyncIterator[tuple[Running, Upstream]]:
    """One attempt for each request, no breaker, nothing kept: what becomes of one message is not mixed with others."""
    upstream = await Upstream(script).start()
    keys = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "state_dir": str(folder),
        "policies": {"once": {"max_attempts": 1}},
        "upstreams": {
            "u": {
                "hosts": [HOST],
                "endpoints": [upstream.url],
                "rewrite_host": False,
                "dead_letter": {"enabled": False},
                **ONCE,
            }
        },
    }
    stream = io.StringIO()
    sidecar = Running(Loaded(Settings.model_validate(keys), None, {}, b""), Log(stream))
    sidecar.stream = stream
    sidecar.apps = []
    await sidecar.start()
    try:
        yield sidecar, upstream
        assert "sidecar.internal_error" not in sidecar.logged.getvalue(), sidecar.logged.getvalue()
    finally:
        await sidecar.stop(grace=0.1)
        await upstream.stop()


class Wire:
    """A raw connection, read with the model of RFC 9112."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._left = b""
        self.ended = False

    @classmethod
    async def to(cls, address: tuple[str, int]) -> Wire:
        return cls(*await asyncio.open_connection(*address, limit=2**22))

    async def send(self, *segments: bytes) -> None:
        """A sidecar that has refused what came before may close over the rest."""
        try:
            for number, segment in enumerate(segments):
                if number:
                    await asyncio.sleep(_PAUSE)
                self.writer.write(segment)
                await self.writer.drain()
        except ConnectionError:
            pass

    async def exactly(self, size: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(size), PATIENCE)

    async def answer(self, method: bytes) -> rfc9112.Reading:
        """The next answer, or what there is of it when the connection ends."""
        while True:
            reading = rfc9112.answer(self._left, method, ended=self.ended)
            if reading.end != rfc9112.INCOMPLETE or self.ended:
                self._left = reading.rest
                return reading
            await self._more()

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        while not self.ended:
            await self._more()
        found, self._left = self._left, b""
        return found

    async def _more(self) -> None:
        try:
            data = await asyncio.wait_for(self._reader.read(65_536), PATIENCE)
        except ConnectionError:
            data = b""
        self._left += data
        self.ended = not data

    def close(self) -> None:
        self.writer.close()
