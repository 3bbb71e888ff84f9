"""The upstream's answer on its way to the app.

Law: every head is serialised anew with our own framing (R16). An answer that is not complete never looks
complete (R13): the connection is aborted instead. Bytes are pushed as they arrive; when the app reads slowly the
upstream is paused, never buffered. What a head has announced is counted byte by byte as it is written: if more or
fewer come, that is a fault of the sidecar, and the connection is cut instead of going out of step.
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.answers import status_line
from sidecar.headers import CRLF, ResponseFields, trailer_lines
from sidecar.upstream.connection import UpstreamConnection
from telemetry.record import Session, not_kept_code

if TYPE_CHECKING:
    import asyncio

_SMALL_CHUNK = 16_384
_TAIL = 64
# How streams of language models end; their clients close the connection when they have read it.
_LAST_EVENT = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\] *[\r\n]+\Z")


def sidecar_lines(record: Session, upstream_lines: bytes) -> bytes:
    """The `x-sidecar-*` fields of an answer. `upstream_lines` are prepared once per upstream."""
    lines = b"x-sidecar-session: %b\r\nx-sidecar-attempts: %d\r\nx-sidecar-outcome: %b\r\n%b" % (
        record.session_id,
        len(record.attempts),
        record.outcome.encode(),
        upstream_lines,
    )
    if record.code is None and record.dlq_id is None:
        return lines
    if record.code is not None:
        lines = b"%bx-sidecar-error-code: %b\r\n" % (lines, record.code.encode())
    missing = not_kept_code(record)
    if missing is not None:
        return b"%bx-sidecar-dlq-error: %b\r\n" % (lines, missing.encode())
    if record.dlq_id is not None:
        return b"%bx-sidecar-dlq-id: %b\r\n" % (lines, record.dlq_id.encode())
    return lines


def response_head(connection: UpstreamConnection, own_lines: bytes, framing: bytes) -> bytes:
    head = connection.head
    assert head is not None
    # The empty last line makes the joined block end with CRLF, or be empty.
    return b"%b%b%b%b\r\n" % (
        status_line(connection.status, connection.reason),
        CRLF.join((*head.lines, b"")),
        own_lines,
        framing,
    )


class WrongLength(Exception):
    """What was about to be written is not what the head announces: a fault of ours."""


@dataclass(frozen=True, slots=True)
class Framing:
    """How the app will know where the answer ends."""

    line: bytes
    chunked: bool = False
    length: int | None = None
    """Bytes of the body; None when it says itself where it ends."""

    def check(self, count: int) -> None:
        if self.length is not None and self.length != count:
            raise WrongLength(f"the head announces {self.length} bytes, the body has {count}")


CHUNKED = Framing(b"Transfer-Encoding: chunked\r\n", chunked=True)
UNTIL_CLOSE = Framing(b"")


def framing_of(connection: UpstreamConnection, *, head_request: bool, http10: bool) -> Framing:
    """Towards the app."""
    head = connection.head
    assert head is not None
    length, bodyless = head.content_length, head_request or connection.status in (204, 304)
    if length is not None and connection.status != 204:
        return Framing(b"Content-Length: %d\r\n" % length, length=0 if bodyless else length)
    if bodyless:
        return Framing(b"", length=0)
    return UNTIL_CLOSE if http10 else CHUNKED


def interim(status: int, reason: bytes, fields: ResponseFields, via_line: bytes) -> bytes:
    """A 1xx answer, forwarded (R4)."""
    lines = fields.lines
    passed = CRLF.join(lines) + CRLF if lines else b""
    return b"%b%b%b\r\n" % (status_line(status, reason), passed, via_line)


class AppSink:
    """Pushes body bytes into the app's connection."""

    __slots__ = ("chunked", "count", "framing", "full", "tail", "transport")

    def __init__(self, transport: asyncio.Transport, framing: Framing, *, events: bool = False) -> None:
        """`events`: the answer is a stream of events, which can say itself that it is over."""
        self.tail = b"" if events else None
        self.transport = transport
        self.framing = framing
        self.chunked = framing.chunked
        self.count = 0
        self.full = False  # kept by the connection's pause_writing and resume_writing

    def body(self, data: bytes) -> bool:
        size = len(data)
        self.count += size
        length = self.framing.length
        if length is not None and self.count > length:
            return self.full  # not a byte more; `end` says what this is
        if self.tail is not None:
            self.tail = data[-_TAIL:] if size >= _TAIL else (self.tail + data)[-_TAIL:]
        transport = self.transport
        if not self.chunked:
            transport.write(data)
        elif size <= _SMALL_CHUNK:
            transport.write(b"%x\r\n%b\r\n" % (size, data))
        else:
            transport.write(b"%x\r\n" % size)
            transport.write(data)
            transport.write(CRLF)
        return self.full

    @property
    def said_done(self) -> bool:
        """The last event has been written."""
        return self.tail is not None and _LAST_EVENT.search(self.tail) is not None

    def pending(self) -> int:
        return self.transport.get_write_buffer_size()

    def end(self, trailers: list[tuple[bytes, bytes]]) -> None:
        """Raises WrongLength."""
        self.framing.check(self.count)
        if self.chunked:
            self.transport.write(b"0\r\n%b\r\n" % (trailer_lines(trailers) if trailers else b""))


class Rest(AppSink):
    """Of an answer whose app has left: goes where the rest went, for whoever keeps a copy, and no further than `most`
    bytes."""

    __slots__ = ("_most", "_sink")

    def __init__(self, sink: AppSink, most: int) -> None:
        self._sink = sink
        self._most = most
        self.count = 0

    @property
    def too_much(self) -> bool:
        return self.count > self._most

    def body(self, data: bytes) -> bool:
        self.count += len(data)
        if self.too_much:
            return True  # nothing more is read
        self._sink.body(data)
        return False

    def pending(self) -> int:
        return 0


def cut_off(transport: asyncio.Transport, *, reset: bool) -> None:
    """End a connection so that the app sees a broken message. `reset` where a plain end would look clean."""
    if reset:
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
