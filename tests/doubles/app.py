"""An app that writes the bytes it wants to, and reads what comes back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """One response as the app sees it. `complete` is False when the connection ended in the middle of it."""

    status: int
    reason: str
    fields: list[tuple[str, str]]
    body: bytes = b""
    complete: bool = True
    trailers: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key.lower() == name.lower()]

    def get(self, name: str) -> str | None:
        found = self.all(name)
        return found[0] if found else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class App:
    """A raw connection to the sidecar."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: tuple[str, int]) -> App:
        return cls(*await asyncio.open_connection(*address, limit=2**22))

    async def send(self, data: bytes | str) -> None:
        self.writer.write(data.encode("latin-1") if isinstance(data, str) else data)
        await self.writer.drain()

    async def reply(self, *, to_head: bool = False, within: float = 10.0) -> Reply:
        """Read one response, 1xx included as responses of their own."""
        return await asyncio.wait_for(self._reply(to_head), within)

    async def ask(self, data: bytes | str, *, to_head: bool = False) -> Reply:
        await self.send(data)
        return await self.reply(to_head=to_head)

    async def closed(self, within: float = 10.0) -> bool:
        """True when the sidecar closed (or reset) the connection without sending anything more."""
        try:
            return await asyncio.wait_for(self.reader.read(1), within) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()

    async def _reply(self, to_head: bool) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1")
        first, *lines = head.split("\r\n")
        _, status, reason = (first + " ").split(" ", 2)
        fields = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        reply = Reply(int(status), reason.strip(), fields)
        try:
            if reply.status < 200 or reply.status in (204, 304) or to_head:
                return reply
            if (length := reply.get("content-length")) is not None:
                reply.body = await self.reader.readexactly(int(length))
            elif reply.get("transfer-encoding") == "chunked":
                await self._chunks(reply)
            else:
                reply.body = await self.reader.read()
        except asyncio.IncompleteReadError as cut:
            reply.body += cut.partial
            reply.complete = False
        except ConnectionError:
            reply.complete = False
        return reply

    async def _chunks(self, reply: Reply) -> None:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            reply.body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.decode("latin-1").strip().partition(":")
            reply.trailers.append((name, value.strip()))
