"""What is written within one turn of the event loop leaves at its end, together: requests first, then answers.

A send wakes whoever waits for it, and to wake a process on another core costs more than the send itself. Bytes that
leave one by one, with work between them, find the other side asleep each time; bytes that leave together wake it once.
Requests go first: the upstream has the longer way to go.

Law: nothing waits for bytes that may come, only for the end of the turn it was written in. The bytes of a connection
keep their order: whatever else a transport is told, it does after what was written before. Large pieces do not wait.
What is written to a connection that has ended is dropped: its protocol is told of the end, and whoever writes may have
had no turn since (asyncio drops such bytes too, uvloop raises).
"""

from __future__ import annotations

import asyncio
from typing import Any

_SMALL = 16_384


class Turn:
    """One per event loop: who has written in this turn, in order."""

    __slots__ = ("_loop", "answers", "requests", "under_way")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.under_way = False
        """Its end will come."""
        self.requests: list[Gathering] = []
        self.answers: list[Gathering] = []

    def begin(self) -> None:
        """Something was written for the first time in this turn."""
        self.under_way = True
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        self.under_way = False
        self.send()

    def send(self) -> None:
        """Everything that was written."""
        for writers in (self.requests, self.answers):
            for writer in writers:
                try:
                    writer.flush()
                except Exception:  # it takes no bytes any more: its own protocol is told, the others are served
                    writer.abort()
            writers.clear()


class Gathering(asyncio.Transport):
    """A transport that sends small pieces at the end of the turn. All else goes through it unchanged."""

    __slots__ = ("_transport", "_turn", "_writers", "pending")

    def __init__(self, transport: asyncio.Transport, turn: Turn, writers: list[Gathering]) -> None:
        """`writers` is `turn.requests` or `turn.answers`."""
        self._transport = transport
        self._turn = turn
        self._writers = writers
        self.pending = b""

    def write(self, data: Any) -> None:
        if self.pending:
            if len(self.pending) + len(data) <= _SMALL:
                self.pending += data
                return
            self.flush()
            self._write(data)
        elif len(data) > _SMALL:
            self._write(data)
        else:
            self.pending = data
            self._writers.append(self)
            if not self._turn.under_way:
                self._turn.begin()

    def _write(self, data: Any) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def flush(self) -> None:
        if self.pending and not self._transport.is_closing():  # else it stays here, as a sign that it never left
            pending, self.pending = self.pending, b""
            self._transport.write(pending)

    def forget(self) -> None:
        """What waits for the end of the turn is not sent any more."""
        self.pending = b""

    def release(self) -> asyncio.Transport:
        """The transport itself, with nothing left to send."""
        self.flush()
        return self._transport

    def get_write_buffer_size(self) -> int:
        return len(self.pending) + self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self.flush()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


def released(transport: asyncio.Transport) -> asyncio.Transport:
    """What a tunnel takes over, which sends everything at once."""
    return transport.release() if isinstance(transport, Gathering) else transport
