"""A request body too large to be kept in memory, written to disk while it is being sent, in case the request fails.

Law: never in the way of the request: whatever the disk says, the upload goes on, and only the body is not kept then.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sidecar.durable.trouble import Trouble

if TYPE_CHECKING:
    from sidecar.durable.bodies import BodyFile, Spool
    from sidecar.durable.kept import Kept


class Tee:
    """Made for a body whose size allows it; used once the body is larger than what is kept for sending again."""

    def __init__(self, kept: Kept, upstream: str, url: str) -> None:
        self._kept = kept
        self._upstream = upstream
        self._url = url
        self._spool: Spool | None = None
        self._writing: asyncio.Task[None] | None = None
        self.before: list[bytes] = []
        """What had been sent before the body became too large."""
        self.dlq_id: str | None = None
        """The entry it would belong to: what is sealed is bound to it."""
        self.lost = False
        self.trouble: Trouble | None = None
        """Why it was lost."""

    def add(self, data: bytes) -> None:
        """Written in this order, also when whoever brings it is stopped in the middle."""
        if not self.lost:
            self._writing = self._kept.background(self._write(self._writing, data), "spool a body")

    async def caught_up(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self, earlier: asyncio.Task[None] | None, data: bytes) -> None:
        if earlier is not None:
            await earlier
        if self.lost:
            return
        try:
            if self._spool is None:
                letters = (await self._kept.open()).letters
                self.dlq_id = letters.new_id()
                self._spool = letters.spool(self.dlq_id, self._upstream, self._url)
                before, self.before = self.before, []
                for piece in before:
                    await self._spool.write(piece)
            await self._spool.write(data)
        except Trouble as trouble:
            self.lost, self.trouble = True, trouble
            self.before = []

    async def finish(self) -> bytes | BodyFile | None:
        """The whole body, None when it was not kept."""
        await self.caught_up()
        if self.lost or self._spool is None:
            return None
        try:
            return await self._spool.finish()
        except Trouble as trouble:
            self.lost, self.trouble = True, trouble
            return None

    async def abort(self) -> None:
        """It is not needed."""
        await self.caught_up()
        self.lost = True
        if self._spool is not None:
            await self._spool.abort()
