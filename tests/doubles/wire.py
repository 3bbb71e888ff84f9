"""A raw connection of an app, read with the model of RFC 9112: what is there, and nothing a library makes of it."""

from __future__ import annotations

import asyncio

from tests.framing import rfc9112

_PAUSE = 0.004  # between segments, so that they arrive as such


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> None:
        self._reader = reader
        self.writer = writer
        self._patience = patience
        self._left = b""
        self.ended = False
        """The other side has finished, cleanly or not."""
        self.reset = False

    @classmethod
    async def to(cls, address: tuple[str, int], patience: float = 5.0) -> Wire:
        return cls(*await asyncio.open_connection(*address, limit=2**22), patience)

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
        return await asyncio.wait_for(self._reader.readexactly(size), self._patience)

    async def answer(self, method: bytes) -> rfc9112.Reading:
        """The next answer, or what there is of it when the connection ends."""
        while True:
            reading = rfc9112.answer(self._left, method, ended=self.ended and not self.reset)
            if reading.end != rfc9112.INCOMPLETE or self.ended:
                self._left = reading.rest
                return reading
            await self._more()

    @property
    def unasked(self) -> bytes:
        """What has arrived behind the last answer that was read."""
        return self._left + bytes(self._reader._buffer)  # type: ignore[attr-defined]

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        while not self.ended:
            await self._more()
        found, self._left = self._left, b""
        return found

    async def _more(self) -> None:
        try:
            data = await asyncio.wait_for(self._reader.read(262_144), self._patience)
        except ConnectionError:
            data, self.reset = b"", True
        self._left += data
        self.ended = not data

    def close(self) -> None:
        self.writer.close()
