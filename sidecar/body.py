"""The app's request body on its way to the upstream, kept for sending again while it is small enough.

Law: the parser feeds it, one upload at a time takes from it. Up to `limit` bytes are kept; past that the current
attempt goes on and only the possibility of another is lost. No more than `HELD` bytes wait for the upstream: the
app is not read from until they are fewer. Memory is short at times (`held.py`): then less is kept. A broken body never
looks complete to the upstream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from sidecar.failures import UploadBroken
from sidecar.headers import trailer_lines
from sidecar.upstream.connection import UpstreamConnection

if TYPE_CHECKING:
    from sidecar.durable.tee import Tee
    from sidecar.held import Held

HELD = 262_144
HELD_WHEN_SHORT = 16_384
_READ_ON_BELOW = HELD // 2
_SMALL_CHUNK = 16_384
_MOST_PIECES = 1024


class Source(Protocol):
    """The connection that the body comes from."""

    def regulate(self) -> None:
        """Look at `held` again: read on, or not."""


class RequestBody:
    """Created only when the request has a body."""

    __slots__ = (
        "_chunks",
        "_failure",
        "_ledger",
        "_limit",
        "_next",
        "_source",
        "_unkept",
        "_waiter",
        "_waiting",
        "chunked",
        "finished",
        "given_up",
        "gone",
        "held",
        "kept",
        "replayable",
        "tee",
        "total",
        "trailers",
        "wanted_again",
    )

    def __init__(self, source: Source, chunked: bool, limit: int, ledger: Held) -> None:
        self._source = source
        self._ledger = ledger
        self._unkept = ledger.short  # from the start: there is no memory for it
        self._limit = 0 if self._unkept else limit
        self._chunks: deque[bytes] = deque()
        self._next = 0  # of `_chunks`, for the current attempt; earlier ones are kept for another
        self._waiting = 0  # bytes the current attempt has not taken
        self.held = False
        self._waiter: asyncio.Future[None] | None = None
        self._failure: str | None = None
        self.chunked = chunked
        self.total = 0
        self.finished = False
        """All of it has arrived."""
        self.kept = 0
        """Bytes held here."""
        self.gone = False
        """Its exchange is over: what still comes is nobody's."""
        self.replayable = True
        self.given_up = False
        """It could have been sent again, had there been memory for it."""
        self.wanted_again = False
        """An attempt has failed and the next one has not begun: all of it may be needed."""
        self.trailers: list[tuple[bytes, bytes]] = []
        self.tee: Tee | None = None
        """Gets what is sent of a body that is too large to be kept."""

    # ---- the parser's side -----------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        if self.gone:
            return
        size = len(data)
        self.total += size
        self.kept += size
        self._waiting += size
        chunks = self._chunks
        if len(chunks) > self._next and len(chunks[-1]) + size <= _SMALL_CHUNK:
            chunks[-1] += data  # not taken yet: a drip of tiny chunks must not cost an object each
        else:
            chunks.append(data)
            if self._next > _MOST_PIECES:
                self._join_what_was_taken()
        if self.replayable and self.total > self._limit:
            self.given_up = self._unkept
            self._forget_what_was_taken()
        if self._waiting > (HELD if not self._ledger.short else HELD_WHEN_SHORT) and not self.held:
            self.held = True
            self._source.regulate()
        self._ledger.grow(self, size)
        self._wake()

    def _forget_what_was_taken(self) -> None:
        self.replayable = False
        taken = [self._chunks.popleft() for _ in range(self._next)]
        self._next = 0
        self._let_go_of(sum(map(len, taken)))
        if self.tee is not None:
            self.tee.before = taken

    def _let_go_of(self, size: int) -> None:
        self.kept -= size
        self._ledger.shrink(self, size)

    def give_up(self) -> bool:
        """Memory is short: the copy of what the upstream has already is dropped, and with it the possibility of
        another attempt. False: there is none that can be missed."""
        if not self.replayable or self.wanted_again or self.tee is not None or not self._next:
            return False
        self.given_up = True
        self._forget_what_was_taken()
        return True

    def _join_what_was_taken(self) -> None:
        taken = b"".join([self._chunks.popleft() for _ in range(self._next)])
        self._chunks.appendleft(taken)
        self._next = 1

    def finish(self) -> None:
        self.finished = True
        self._wake()

    def fail(self, why: str) -> None:
        """It will never be completed."""
        self._failure = why
        self._wake()

    def let_go(self) -> None:
        """The exchange is over. Its connection remembers the request until the next one: without what was kept."""
        self.gone = True
        self._chunks.clear()
        self._next = 0
        self._let_go_of(self.kept)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- the upload's side -----------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        return self._failure is not None

    def arrived_whole(self) -> bytes | None:
        """The whole framed body if it is here, which is the common case for small ones."""
        if not self.finished or not self.replayable:
            return None
        self._next = len(self._chunks)
        self._waiting = 0
        self.wanted_again = False
        if self.held:
            self.held = False
            self._source.regulate()
        if self.chunked:
            return b"".join([self._framed(data) for data in self._chunks]) + self._end()
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)

    @property
    def content(self) -> bytes:
        """Without framing; of a body that is kept and has arrived."""
        return b"".join(self._chunks)

    async def whole(self, patience: float) -> bool:
        """Wait until all of it is here, before anything is sent or when nothing will be. False: it is too large to be
        kept. Raises UploadBroken if it ends wrongly, or does not go on for `patience` seconds."""
        self._next = 0
        while self.replayable and not self.finished:
            self._waiting = 0
            await self._more(patience)
        self._read_on()
        return self.replayable

    async def pour(self, tee: Tee, patience: float) -> None:
        """Give the rest of a body that is too large to be kept to `tee` alone."""
        while True:
            while self._chunks:
                tee.add(self._take())
                await tee.caught_up()
            if self.finished:
                return
            await self._more(patience)

    def _read_on(self) -> None:
        if self.held:
            self.held = False
            self._source.regulate()

    async def _more(self, patience: float) -> None:
        self._read_on()
        if self._failure is not None:
            raise UploadBroken(self._failure)
        if self.finished:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(patience):
                await self._waiter
        except TimeoutError:
            message = f"the request body did not go on for {patience:g} s (body_idle)"
            raise UploadBroken(message, stalled=True) from None

    async def stream(self, connection: UpstreamConnection) -> None:
        """Send what was kept, then the rest as it comes. Raises UploadBroken if the app's body is."""
        self._next = 0
        self.wanted_again = False
        self._waiting = sum(map(len, self._chunks))
        while True:
            while self._next < len(self._chunks):
                tee = None if self.replayable else self.tee
                data = self._take()
                self._write(connection, data)
                if tee is not None:
                    tee.add(data)
                    await tee.caught_up()
                await connection.drain()
            if self._failure is not None:
                raise UploadBroken(self._failure)
            if self.finished:
                break
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        connection.write(self._end(), last=True)

    def _take(self) -> bytes:
        if self.replayable:
            data = self._chunks[self._next]
            self._next += 1
        else:
            data = self._chunks.popleft()
            self._let_go_of(len(data))
        self._waiting -= len(data)
        if self.held and self._waiting < _READ_ON_BELOW:
            self.held = False
            self._source.regulate()
        return data

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def _end(self) -> bytes:
        if not self.chunked:
            return b""
        return b"0\r\n%b\r\n" % trailer_lines(self.trailers) if self.trailers else b"0\r\n\r\n"

    def _write(self, connection: UpstreamConnection, data: bytes) -> None:
        if self.chunked and len(data) > _SMALL_CHUNK:
            connection.write(b"%x\r\n" % len(data), last=False)
            connection.write(data, last=False)
            connection.write(b"\r\n", last=False)
        else:
            connection.write(self._framed(data), last=False)
