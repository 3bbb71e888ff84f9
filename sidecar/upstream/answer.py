"""Reading one answer with llhttp.

Law: what llhttp does not do is done here and nowhere else: bodyless answers (HEAD, 204, 304), the size of the
head, status and version checks, which answers are completed before they are relayed, the pause when nobody takes
the body yet. Callbacks run inside `feed_data`: they only take notes. A fault is raised there and told by the
connection, and the exchange is woken when the parser has seen all bytes, so that nobody uses a connection before
what came behind the answer is known.

One connection, one answer at a time: llhttp would go on with whatever lies behind the end of an answer, as if it were
the next one. Its first byte is surplus. It stops the parser there, belongs to nobody, and is the last that is read from
that connection. Only line ends are none: parsers skip them between messages (RFC 9112, 2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import httptools

from sidecar.chunks import ChunkLines, behind_head
from sidecar.headers import (
    CONNECTION,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    DATE,
    LOCATION,
    RESPONSE_KINDS,
    ResponseFields,
    names_close,
)
from sidecar.turn import Gathering

# Body bytes that may wait here between the head and the moment the exchange takes over.
WAITING_BODY = 262_144
_LINE_END = 2
_KEEP_ALIVE = frozenset({b"", b"keep-alive", b"Keep-Alive"})
"""What `Connection` says most often, and what the parser knows anyway."""
_BODYLESS = frozenset({204, 304})
_HEAD_END = b"\r\n\r\n"
_INTERIM = re.compile(rb"HTTP/1\.[0-9] 1[0-9][0-9][ \r]")
_HEAD_OF_ITS_OWN = b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n"


def response_parser(protocol: object) -> httptools.HttpResponseParser:
    parser = httptools.HttpResponseParser(protocol)
    parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)  # by RFC 9112, 7.1.1; old servers pad sizes
    return parser


class _RestOfAnswer:
    """Where a parser tells what it finds that gets the chunks of an answer behind a head of our own."""

    __slots__ = ("_begun", "on_body", "reader")

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.on_body = reader.on_body
        self._begun = False

    def on_message_begin(self) -> None:
        if self._begun:
            self.reader.on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:
            self.reader.on_header(name, value)

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_message_complete(self) -> None:
        self.reader.on_message_complete()
        self.reader.read_heads_again()


class Sink(Protocol):
    """Where streamed body bytes go."""

    def body(self, data: bytes) -> bool:
        """Take the bytes; True asks to pause until `resume` is called."""

    def pending(self) -> int:
        """Bytes taken but not yet read by the other side; a change means progress."""


class Owner(Protocol):
    """The exchange that waits for an answer."""

    def wake(self) -> None:
        """There is a whole small answer, the head of a large one, the end of a stream, or a failure."""

    def interim(self, status: int, reason: bytes, fields: ResponseFields) -> None:
        """A 1xx answer has arrived."""

    def location(self, value: bytes) -> bytes:
        """How a `Location` is written for whoever asked."""


class AnswerReader:
    """The parser's side of a connection: state of one answer, and llhttp's callbacks that fill it."""

    __slots__ = (
        "_bodyless",
        "_buffer_limit",
        "_chunk_lines",
        "_chunks_begin",
        "_end_of_head",
        "_ends_with_head",
        "_fault",
        "_fields",
        "_head_bytes",
        "_head_limit",
        "_interim_seen",
        "_left",
        "_parser",
        "_reading_paused",
        "_sink",
        "_until_close",
        "_unusual",
        "_waiting_bytes",
        "body",
        "buffered",
        "closed",
        "complete",
        "head",
        "keep_alive",
        "on_surplus",
        "owner",
        "ready",
        "reason",
        "received",
        "status",
        "surplus",
        "switched",
        "trailers",
        "transport",
        "waiting",
    )

    _bodyless: bool
    _buffer_limit: int
    _chunk_lines: ChunkLines | None
    """In front of the parser, where the answer is one in chunks that did not end with its head."""
    _chunks_begin: bool
    """In the segment that has just been read."""
    _end_of_head: bytes
    """The last bytes of a head that has not arrived whole: its empty line may have begun."""
    _ends_with_head: bool
    """The answer is one without a body, whatever its head announces."""
    _fault: str | None
    _fields: ResponseFields
    _head_bytes: int
    _head_limit: int
    _interim_seen: bool
    _left: int
    """Bytes of a long body that are still to come, past the parser; 0 for all other answers."""
    _parser: httptools.HttpResponseParser
    _reading_paused: bool
    _sink: Sink | None
    _unusual: bool
    _until_close: bool
    _waiting_bytes: int
    body: bytes
    buffered: bool
    closed: bool
    complete: bool
    head: ResponseFields | None
    keep_alive: bool
    on_surplus: Callable[[], None]
    owner: Owner | None
    ready: bool
    reason: bytes
    received: int
    status: int
    surplus: bool
    """The upstream has sent more than its answer."""
    switched: bool
    trailers: list[tuple[bytes, bytes]]
    transport: Gathering | None
    waiting: list[bytes]

    def on_message_begin(self) -> None:
        if self.complete:
            raise self.found_surplus()

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head is not None:
            if self.complete:
                raise self.found_surplus()
            if RESPONSE_KINDS[name] > LOCATION:
                self.keep_alive = False  # Connection, for example, takes effect in llhttp even behind a body
            self.trailers.append((name, value))
            self._unusual = True
            return
        fields = self._fields
        kind = RESPONSE_KINDS[name]
        if kind <= LOCATION:
            fields.lines.append(b"%b: %b" % (name, value))
            if not kind:  # PASS
                return
            if kind == DATE:
                fields.dated = True
            elif kind == CONTENT_TYPE:
                fields.event_stream = value[:17].lower() == b"text/event-stream"
            elif self.owner is not None:
                fields.lines[-1] = b"%b: %b" % (name, self.owner.location(value))
        elif kind == CONTENT_LENGTH:
            fields.content_length = int(value)  # digits only: llhttp has checked
        elif kind != CONNECTION or value not in _KEEP_ALIVE:
            fields.special(kind, value)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._interim_seen = self._unusual = True
            if status != 101:
                if status < 100:
                    raise self._refuse(f"the response status {status} is below 100")
                return  # its bytes count towards the head, so their number is bounded too
            self.switched = True
        if self._interim_seen and self._parser.get_http_version() not in ("1.0", "1.1"):
            raise self._refuse(f"the response claims HTTP/{self._parser.get_http_version()}")
        head = self._fields
        keep_alive = self._parser.should_keep_alive()
        if head.connection is not None:
            head.finish()
            if names_close(head.connection):
                keep_alive = False  # in HTTP/1.0 llhttp lets `keep-alive` beside it win (RFC 9112, 9.3)
        if self._head_bytes > self._head_limit:
            self._check_head_size()
        self.status = status
        self.head = head
        self._head_bytes = 0
        self.keep_alive = keep_alive
        if self._bodyless or status in _BODYLESS or self.switched:
            # llhttp would wait for the announced body; a new parser reads the next answer instead.
            self._parser = response_parser(self)
            self._ends_with_head = not self.switched
            self._unusual = True
            self.complete = True
            self.ready = True
            return
        length = head.content_length
        if length is not None and length <= self._buffer_limit and not head.event_stream:
            self.buffered = True  # the exchange hears of it when it is complete
        else:
            self._begin_stream(head)

    def _begin_stream(self, head: ResponseFields) -> None:
        if head.content_length is not None:
            pass  # large, or events
        elif head.transfer_encoding is not None:
            if head.transfer_encoding.strip().lower() != b"chunked":
                raise self._refuse("the response uses a transfer coding other than chunked")
            if self._parser.get_http_version() == "1.0":
                raise self._refuse("an HTTP/1.0 response cannot be chunked")
            self._chunks_begin = True
        else:
            self._until_close = True
        self._unusual = True
        self.ready = True

    def _check_head_size(self) -> None:
        if sum(len(line) + _LINE_END for line in self._fields.lines) > self._head_limit:
            raise self._refuse(self._endless_head())

    def on_body(self, data: bytes) -> None:
        self.received += len(data)
        sink = self._sink
        if sink is not None:
            if sink.body(data):
                self._pause()
        elif self.buffered:
            self.body = self.body + data if self.body else data
        elif not self.complete:
            self.waiting.append(data)
            self._waiting_bytes += len(data)
            if self._waiting_bytes > WAITING_BODY:
                # Here and not in the exchange: whole bodies would arrive before its coroutine runs.
                self._pause()
        else:
            raise self.found_surplus()

    def on_message_complete(self) -> None:
        if self.complete:
            if self._ends_with_head and self._fields.transfer_encoding is not None and self.status not in _BODYLESS:
                self.found_surplus()  # the last chunk of a body that a HEAD does not have
            return
        if self.head is None:  # a 1xx
            fields, reason, self._fields, self.reason = self._fields, self.reason, ResponseFields(), b""
            if fields.content_length is not None or fields.transfer_encoding is not None:
                raise self._refuse("an interim (1xx) response announces a body")
            fields.finish()
            if self.owner is not None:
                self.owner.interim(self._parser.get_status_code(), reason, fields)
            return
        self.complete = True
        self.ready = True

    def follow_chunks(self, data: bytes, *, stopped: bool) -> bool:
        """`data` has brought the end of a head and what comes behind it, in chunks: from now on it is known where a
        size stands. `stopped`: the parser did not get through. True where another one did, or another word for it."""
        self._chunks_begin = False
        known, data = not self._end_of_head, self._end_of_head + data
        began, end = 0, behind_head(data, 0)
        while end is not None and data.startswith(b"HTTP/1.", end):
            if not known or not _INTERIM.match(data, began):
                return False  # no interim answer, or not for sure: then this is a size that is none
            began, end = end, behind_head(data, end)
        if end is None:
            return False
        lines = ChunkLines()
        rest = lines.follow(data, end)
        if stopped and rest == data[end:]:
            return False  # no line is shorter now: what is wrong is something else
        self._chunk_lines = lines
        if stopped or lines.begun:
            self._parser = response_parser(_RestOfAnswer(self))
            self._parser.feed_data(_HEAD_OF_ITS_OWN)
        if stopped:
            self.received = self._waiting_bytes = 0
            self.waiting, self.trailers = [], []
            self._parser.feed_data(rest)
        return True

    def read_heads_again(self) -> None:
        self._parser = response_parser(self)

    def take_past_parser(self, data: bytes) -> None:
        """A piece of a long body of known length: nothing in it is to be understood, and llhttp would copy it."""
        left = self._left
        if len(data) < left:
            self._left = left - len(data)
            self.on_body(data)
            return
        self._left = 0
        self.read_heads_again()  # the old parser still waits for this body
        if len(data) > left:
            self.found_surplus()
        self.on_body(data[:left])
        self.on_message_complete()

    def found_surplus(self) -> ValueError:
        """Tells of it, once. The exception is for callbacks, where it stops llhttp."""
        self.keep_alive = False
        if not self.surplus:
            self.surplus = True
            self.on_surplus()
        return ValueError("bytes behind the end of the answer")

    def look_behind(self, data: bytes) -> None:
        """`data` has brought an answer that is more than a small body: what comes next is not for the parser, if its
        end is known without it."""
        head = self.head
        if self._ends_with_head:
            # The parser takes what follows for a body: it may keep the beginning of a chunk without a word.
            if not _HEAD_END.endswith(data[-len(_HEAD_END) :]):
                self.found_surplus()
        elif self.complete or head is None:
            pass
        elif head.content_length is not None:
            self._left = head.content_length - self.received
        elif self._chunks_begin:
            self.follow_chunks(data, stopped=False)

    def _refuse(self, fault: str) -> ValueError:
        """llhttp stops at any exception; `data_received` turns the fault into the failure."""
        self._fault = fault
        return ValueError(fault)

    def _pause(self) -> None:
        if not self._reading_paused and self.transport is not None and not self.closed:
            self._reading_paused = True
            self.transport.pause_reading()

    def _endless_head(self) -> str:
        what = "head is" if self.head is None else "trailers are"
        return f"the response {what} larger than {self._head_limit} bytes (limits.head_bytes)"
