"""One request of the app as it is read, on llhttp.

Law: a field is classified once, when the parser hands it over; after the head a `Request` holds lines ready to be
sent and the few facts an exchange asks for. Framing and hop-by-hop fields are never copied (R1, R16), everything
else keeps its bytes, its case and its order (R7). What llhttp accepts and a proxy must not is refused here, as
`Malformed`; raised out of a callback, where the parser must not go on, it comes back through `unparsable`.

llhttp knows a list of methods and three versions. How a request is framed depends on neither (but for CONNECT, which it
knows), so a head that begins with another method, or that says HTTP/1.2, is read with a stand-in
(`read_with_stand_in`).
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

import httptools
from aiohttp.web_protocol import RequestHandler

from sidecar.body import RequestBody
from sidecar.chunks import ChunkLines, behind_head
from sidecar.failures import Malformed, Refused
from sidecar.headers import (
    CALLER,
    CONNECTION,
    CONTENT_LENGTH,
    CRLF,
    DROP,
    EXPECT,
    HOST,
    IDEMPOTENCY_KEY,
    MAX_FORWARDS,
    OVERRIDE,
    PLAIN_CONNECTION,
    PREFER,
    PROXY_CONNECTION,
    REQUEST_KINDS,
    TRACEPARENT,
    TRACESTATE,
    TRANSFER_ENCODING,
    UPGRADE,
    VIA,
    joined,
    value_of,
    without_named,
)
from sidecar.policy.caller import aws_says_resend, stainless_says_resend

if TYPE_CHECKING:
    from sidecar.held import Held

MAX_FIELDS = 256
LINE_OVERHEAD = 32  # method, version and line ends, which do not count towards the limit
_FIELD_OVERHEAD = 4  # ": " and CRLF
_PADDING = frozenset((b" ", b"\t"))
# llhttp lets some of them take effect there; Content-Length it refuses by itself.
_NEVER_BEHIND_A_BODY = frozenset((CONNECTION, PROXY_CONNECTION, UPGRADE, TRANSFER_ENCODING))
_METHODS = {
    name.encode(): name
    for name in (
        "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT ACL BIND CHECKOUT COPY LINK LOCK M-SEARCH MERGE "
        "MKACTIVITY MKCALENDAR MKCOL MOVE NOTIFY PRI PROPFIND PROPPATCH PURGE QUERY REBIND REPORT SEARCH SOURCE "
        "SUBSCRIBE UNBIND UNLINK UNLOCK UNSUBSCRIBE"
    ).split()
}
_STAND_IN = b"UNBIND"
"""Read in the place of methods that llhttp does not know. Whoever sends it gets it too."""
_METHODS[_STAND_IN] = ""
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}) ([^ \r\n]+) HTTP/1\.([0-9])")
_BEGUN_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}( ([^ \r\n]+( (HTTP/1\.[0-9]|[HTP/1.]{0,7})\r?)?)?)?")


def request_parser(protocol: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)  # by RFC 9112, 7.1.1
    return parser


class Request:
    """A parsed head. `body` is None when there is none; `error` says why the request must be refused."""

    __slots__ = (
        "asks",
        "body",
        "caller_resend",
        "chunked",
        "connection",
        "content_length",
        "error",
        "expects_continue",
        "host",
        "http10",
        "idempotency_key",
        "keep_alive",
        "lines",
        "max_forwards",
        "method",
        "overrides",
        "switches",
        "target",
        "traceparent",
        "transfer_encoding",
        "unusual",
        "upgrade",
        "verb",
        "via",
    )

    def __init__(self) -> None:
        self.method = ""
        self.verb = b""
        """The method as it is sent."""
        self.target = b""
        self.lines: list[bytes] = []
        self.host: bytes | None = None
        self.connection: bytes | None = None
        self.content_length: int | None = None
        self.transfer_encoding: bytes | None = None
        self.upgrade: bytes | None = None
        self.via: bytes | None = None
        self.expects_continue = False
        self.max_forwards: bytes | None = None
        self.idempotency_key: bytes | None = None
        self.traceparent: bytes | None = None
        self.caller_resend = False
        """The caller's library says that this is a retry of its own."""
        self.overrides: list[tuple[bytes, bytes]] | None = None
        self.http10 = False
        self.keep_alive = True
        self.switches = False
        """What follows is WebSocket, if the upstream agrees."""
        self.chunked = False
        self.body: RequestBody | None = None
        self.error: Refused | None = None
        self.asks = False
        """It carries something that its attempts depend on: overrides, a key, a trace. See `prepared.py`."""
        self.unusual = False
        """Something has to be looked at before the request can be sent: see `incoming.py`."""

    @property
    def path(self) -> str:
        """The target as text, for people and records; llhttp lets only ASCII through."""
        return self.target.decode("latin-1")

    @property
    def sender(self) -> bytes:
        """Who sent it, where the listener asks and has checked the answer."""
        return b""

    def value(self, name: bytes) -> bytes | None:
        """The first field of this lower-case name among those that are passed on. For unusual moments: a scan."""
        return value_of(self.lines, name)

    def special(self, kind: int, name: bytes, value: bytes) -> None:
        """A field that means something to a proxy."""
        if kind == CONTENT_LENGTH:
            # Digits only: llhttp has checked, and refuses a second one.
            self.content_length = int(value)
        elif kind == TRANSFER_ENCODING:
            self.transfer_encoding = joined(self.transfer_encoding, value)
            self.unusual = True
        elif kind == CONNECTION:
            self.connection = joined(self.connection, value)
        elif kind == PROXY_CONNECTION:
            # Not passed on and nothing is read from it, but llhttp takes it for a Connection field: with it an
            # HTTP/1.0 request looks as persistent as an HTTP/1.1 one, and has to be looked at as closely (R20).
            self.connection = self.connection or b""
        elif kind == HOST:
            self.refuse(Malformed("MALFORMED_REQUEST", "a request has one Host field only", reason="host"))
        elif kind == UPGRADE:
            self.upgrade = joined(self.upgrade, value)
            self.unusual = True
        elif kind == MAX_FORWARDS:
            self.max_forwards = value
            self.unusual = True
        elif kind == OVERRIDE:
            self.asks = True
            if self.overrides is None:
                self.overrides = []
            self.overrides.append((name, value))
        elif kind == PREFER:
            self.lines.append(b"%b: %b" % (name, value))
            if b"respond-async" in value.lower():
                self.asks = True
                self.overrides = [*(self.overrides or ()), (name, value)]
        elif kind != DROP:
            self.lines.append(b"%b: %b" % (name, value))
            if kind == VIA:
                self.via = joined(self.via, value)
                self.unusual = True
            elif kind == EXPECT:
                self.expects_continue = value.strip().lower() == b"100-continue"
            elif kind == IDEMPOTENCY_KEY:
                self.idempotency_key = value
                self.asks = True
            elif kind == TRACEPARENT:
                self.traceparent = joined(self.traceparent, value)
                self.asks = True
            elif kind == TRACESTATE:
                self.asks = True
            elif kind == CALLER:
                self.asks = True
                says_resend = aws_says_resend if name.lower() == b"amz-sdk-request" else stainless_says_resend
                self.caller_resend = self.caller_resend or says_resend(value)

    def refuse(self, error: Refused) -> None:
        self.error = error
        self.unusual = True

    def size(self) -> int:
        """About what the head took on the wire; fields that are not passed on are not counted."""
        return len(self.target) + sum(map(len, self.lines)) + _FIELD_OVERHEAD * len(self.lines)


class RequestReader(RequestHandler):
    """The parser's side of an app's connection: llhttp's callbacks, which fill requests and their bodies."""

    __slots__ = (
        "_arriving",
        "_begun",
        "_body",
        "_body_again",
        "_chunk_lines",
        "_head_bytes",
        "_head_limit",
        "_held",
        "_last",
        "_of_head",
        "_replay_limit",
        "_stands_for",
        "_waiting",
        "head_since",
        "parser",
    )

    _arriving: Request | None
    """The request whose head is being read."""
    _begun: bytes | None
    """What has arrived of that head, as far as it began with a piece of its own; None when it did not."""
    _body: RequestBody | None
    """The body being read."""
    _body_again: RequestBody | None
    """The body that a second parser is told about; see `read_body_behind`."""
    _chunk_lines: ChunkLines | None
    """In front of the parser, where the body is one in chunks whose beginning is known."""
    _head_bytes: int
    """Bytes received since the last complete head."""
    _head_limit: int
    _held: Held
    _last: Request | None
    """The newest complete head."""
    _of_head: int
    """What `_head_bytes` was when the head of the body arrived whole, in the piece that is being read."""
    _replay_limit: int
    _stands_for: bytes | None
    """The method of the head being read with a stand-in."""
    head_since: float
    """When the beginning of a head came that has not arrived whole; 0 when there is none."""
    _waiting: deque[Request]
    """Complete heads whose exchange has not begun, in order."""
    parser: httptools.HttpRequestParser

    def regulate(self) -> None:
        """Read on from the app, or not: something that holds bytes has changed."""

    def on_message_begin(self) -> None:
        self._arriving = Request()

    def on_url(self, part: bytes) -> None:
        if self._arriving is not None:
            self._arriving.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._arriving
        if request is None:
            if REQUEST_KINDS[name] in _NEVER_BEHIND_A_BODY:
                told = f"the field {name.decode('latin-1')} cannot stand behind a body: it says how a message goes on"
                raise Malformed("MALFORMED_REQUEST", told, reason="framing")
            if self._body is not None:
                self._body.trailers.append((name, value))
            return
        if value[-1:] in _PADDING:
            value = value.rstrip(b" \t")  # llhttp leaves it there
        kind = REQUEST_KINDS[name]
        if not kind:  # PASS
            request.lines.append(b"%b: %b" % (name, value))
        elif kind is HOST and request.host is None:
            request.host = value
        else:
            request.special(kind, name, value)

    def on_headers_complete(self) -> None:
        request, self._arriving = self._arriving, None
        assert request is not None
        if self._body_again is not None:
            self._body, self._body_again = self._body_again, None
            return
        parser = self.parser
        request.verb = verb = parser.get_method()
        request.method = method = _METHODS[verb]
        if not method:
            request.verb, self._stands_for = self._stands_for or verb, None
            request.method = request.verb.decode("ascii")
        request.keep_alive = keep_alive = parser.should_keep_alive()
        if not keep_alive or request.connection is not None:
            # Only then can it be anything but HTTP/1.1: asking for the version costs more than the rest of this.
            self._look_closer(request, parser.get_http_version())
        if request.transfer_encoding is not None or request.content_length:
            request.chunked = request.transfer_encoding is not None
            self._of_head = self._head_bytes
            request.body = self._new_body(request)
            # Behind an Upgrade llhttp reads no body.
            self._body = None if parser.should_upgrade() else request.body
        if len(request.lines) > MAX_FIELDS:
            message = f"more than {MAX_FIELDS} header fields"
            request.refuse(Malformed("HEADERS_TOO_LARGE", message, reason="head_too_large"))
        if self._head_bytes > self._head_limit:
            self._measure(request)
        self._head_bytes = 0
        self._last = request
        self._waiting.append(request)

    def _new_body(self, request: Request) -> RequestBody:
        refused = self._held.refusal()
        if refused is not None:
            request.refuse(refused)
        return RequestBody(self, request.chunked, self._replay_limit, self._held)

    def on_body(self, data: bytes) -> None:
        if self._body is not None:
            self._body.feed(data)

    def on_message_complete(self) -> None:
        if self._body is not None:
            self._body.finish()
            self._body = self._chunk_lines = None
            self._head_bytes = 0

    def read_with_stand_in(self, data: bytes, error: BaseException) -> bytes | None:
        """llhttp has stopped in a request line. What a parser is to be fed instead of `data`, nothing while the line is
        not whole, or None where the error stands.

        Only for a head whose first byte is known: that began with a piece of its own, not behind another message. A
        guess would make a request out of the end of something else."""
        begun = self._begun if self.head_since else b""
        unknown = isinstance(error, httptools.HttpParserInvalidMethodError) or "HTTP version" in str(error)
        if not unknown or begun is None or self._arriving is None or self._head_bytes != len(begun) + len(data):
            return None
        line, whole, rest = (begun + data).lstrip(CRLF).partition(CRLF)
        if not whole:
            return b"" if _BEGUN_LINE.fullmatch(line) else None
        said = _REQUEST_LINE.fullmatch(line)
        if said is None:
            return None
        method, target, minor = said.groups()
        known = method in _METHODS
        if not known:
            if method.upper() in _METHODS:
                return None  # some would take it for the one in capitals
            self._stands_for = method
        self.parser = request_parser(self)
        self._arriving = None
        version = b"1.0" if minor == b"0" else b"1.1"
        return b"%b %b HTTP/%b\r\n%b" % (method if known else _STAND_IN, target, version, rest)

    def read_body_behind(self, request: Request) -> None:
        """The request asks for an upgrade that is not made, and has a body. llhttp takes what follows for the other
        protocol, so a second parser is told by a head of our own how the body is framed."""
        self.parser = request_parser(self)
        self._body_again = request.body
        framing = b"Content-Length: %d" % (request.content_length or 0)
        if request.chunked:
            framing, self._chunk_lines = b"Transfer-Encoding: chunked", ChunkLines()
        closing = b"" if request.keep_alive else b"Connection: close\r\n"  # so that nothing is read behind it
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b%b\r\n\r\n" % (closing, framing))

    def follow_chunks(self, data: bytes, *, stopped: bool) -> bool:
        """`data` has brought the end of a head and what comes behind it, in chunks: from now on it is known where a
        size stands, if it is known where the head began. `stopped`: the parser did not get through. True if another one
        did, or another word for it.

        Only for a head that began with a piece of its own, as above."""
        begun, request = self._begun if self.head_since else b"", self._last
        of_head, self._of_head = self._of_head, 0
        if begun is None or request is None or of_head != len(begun) + len(data):
            return False
        data = (begun + data).lstrip(CRLF)
        end = behind_head(data, 0)
        if end is None:
            return False
        lines = ChunkLines()
        rest = lines.follow(data, end)
        if stopped:
            if rest == data[end:]:
                return False  # no line is shorter now: what is wrong is something else
            if request.body is not None:
                request.body.let_go()
            request.body = self._new_body(request)
        if stopped or lines.begun:
            self.read_body_behind(request)
        self._chunk_lines = lines
        if stopped:
            self.parser.feed_data(rest)
        return True

    def _look_closer(self, request: Request, version: str) -> None:
        if version != "1.1":
            request.http10 = True
            request.expects_continue = False  # it does not know what a 100 is (RFC 9110, 10.1.1)
            if version != "1.0":
                message = f"HTTP/{version} is not supported; use HTTP/1.1"
                request.refuse(Malformed("VERSION_NOT_SUPPORTED", message, reason="version"))
        if request.connection is not None and request.connection not in PLAIN_CONNECTION:
            request.lines = without_named(request.lines, request.connection)
            if request.upgrade is not None and self.parser.should_upgrade() and not request.http10:  # RFC 9110, 7.8
                request.switches = request.upgrade.strip().lower() == b"websocket"

    def _measure(self, request: Request) -> None:
        """So many bytes may also be the end of a body and several requests, so the head itself is measured."""
        if len(request.target) >= self._head_limit:
            request.refuse(target_too_long(self._head_limit))
        elif request.size() > self._head_limit:
            request.refuse(head_too_large())

    def head_too_long(self) -> Malformed | None:
        """Asked while a head has not arrived whole: is it too large already?"""
        if self._head_bytes <= self._head_limit + LINE_OVERHEAD:
            return None
        arriving = self._arriving
        if arriving is not None and len(arriving.target) >= self._head_limit:
            return target_too_long(self._head_limit)
        return head_too_large()


def target_too_long(limit: int) -> Malformed:
    message = f"the request target is longer than {limit - 1} bytes (limits.head_bytes)"
    return Malformed("TARGET_TOO_LONG", message, reason="target_too_long")


def head_too_large() -> Malformed:
    return Malformed("HEADERS_TOO_LARGE", "the request head is too large (limits.head_bytes)", reason="head_too_large")


def unparsable(error: BaseException) -> Malformed:
    """llhttp's refusal → ours. One of ours that stopped it is told as it is."""
    if isinstance(error.__context__, Malformed):
        return error.__context__
    told = str(error)
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return Malformed("NOT_IMPLEMENTED", "the request method is not one this proxy understands", reason="method")
    if "HTTP version" in told or "PRI/" in told:
        return Malformed("VERSION_NOT_SUPPORTED", "only HTTP/1.1 and HTTP/1.0 are understood", reason="version")
    return Malformed("MALFORMED_REQUEST", f"the request is not valid HTTP: {told[:200]}", reason="syntax")
