"""Header fields between app and upstream: what is dropped, what is ours, what passes untouched.

Law: pure. One pass over the fields of a message turns them into lines ready to be sent plus the few facts the
exchange needs. Framing and hop-by-hop fields are never copied (R1, R16); everything else keeps its bytes, its
case and its order (R7). Field names are classified once and remembered in a bounded table, so a request costs
one dictionary look-up per field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidecar.failures import Malformed

CRLF = b"\r\n"
UPGRADE_LINES = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"

(
    PASS,
    DROP,
    CONNECTION,
    HOST,
    CONTENT_LENGTH,
    TRANSFER_ENCODING,
    UPGRADE,
    VIA,
    EXPECT,
    MAX_FORWARDS,
    IDEMPOTENCY_KEY,
    TRACEPARENT,
    DATE,
    CONTENT_TYPE,
) = range(14)

_REMEMBERED_NAMES = 2048
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close"})
# Never acceptable behind the last chunk: they would change how the message is framed, routed or authorised.
_NOT_IN_TRAILERS = frozenset(
    b"transfer-encoding content-length host connection te upgrade trailer content-encoding content-type "
    b"content-range authorization proxy-authorization set-cookie cache-control max-forwards".split()
)


class FieldKinds(dict[bytes, int]):
    """Raw field name → kind. Remembers names as written; emptied when full so a peer cannot grow it."""

    def __init__(self, special: dict[bytes, int]) -> None:
        super().__init__()
        self._special = special

    def __missing__(self, name: bytes) -> int:
        lower = name.lower()
        kind = DROP if lower.startswith(b"x-sidecar-") else self._special.get(lower, PASS)
        if len(self) >= _REMEMBERED_NAMES:
            self.clear()
        if len(name) <= 64:
            self[name] = kind
        return kind


REQUEST_KINDS = FieldKinds(
    {
        b"proxy-connection": DROP,
        b"keep-alive": DROP,
        b"te": DROP,
        b"trailer": DROP,  # the trailers of a chunked request are not forwarded, so they are not announced
        b"proxy-authorization": DROP,
        b"connection": CONNECTION,
        b"host": HOST,
        b"content-length": CONTENT_LENGTH,
        b"transfer-encoding": TRANSFER_ENCODING,
        b"upgrade": UPGRADE,
        b"via": VIA,
        b"expect": EXPECT,
        b"max-forwards": MAX_FORWARDS,
        b"idempotency-key": IDEMPOTENCY_KEY,
        b"traceparent": TRACEPARENT,
    }
)
RESPONSE_KINDS = FieldKinds(
    {
        b"proxy-connection": DROP,
        b"keep-alive": DROP,
        b"te": DROP,
        b"connection": CONNECTION,
        b"content-length": CONTENT_LENGTH,
        b"transfer-encoding": TRANSFER_ENCODING,
        b"upgrade": UPGRADE,
        b"date": DATE,
        b"content-type": CONTENT_TYPE,
    }
)


class RequestFields:
    """What one pass over a request's fields found."""

    __slots__ = (
        "content_length",
        "expects_continue",
        "host",
        "keyed",
        "lines",
        "max_forwards",
        "traceparent",
        "transfer_encoding",
        "upgrade",
        "via",
    )

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        self.lines: list[bytes] = []
        self.host: bytes | None = None
        self.content_length: int | None = None
        self.transfer_encoding: bytes | None = None
        self.upgrade: bytes | None = None
        self.via: bytes | None = None
        self.expects_continue = False
        self.max_forwards: bytes | None = None
        self.keyed = False
        self.traceparent: bytes | None = None
        named_by_connection: bytes | None = None
        add = self.lines.append
        kinds = REQUEST_KINDS
        for field in fields:
            kind = kinds[field[0]]
            if kind == PASS:
                add(b": ".join(field))
            elif kind == HOST:
                self.host = field[1]
            elif kind == CONNECTION:
                if field[1] not in _PLAIN_CONNECTION:
                    named_by_connection = _joined(named_by_connection, field[1])
            elif kind != DROP:
                self._special(kind, field)
        if named_by_connection is not None:
            self.lines = without_named(self.lines, named_by_connection)

    def _special(self, kind: int, field: tuple[bytes, bytes]) -> None:
        value = field[1]
        if kind == CONTENT_LENGTH:
            self.content_length = int(value)  # digits only: llhttp has checked
        elif kind == TRANSFER_ENCODING:
            self.transfer_encoding = value
        elif kind == UPGRADE:
            self.upgrade = value
        elif kind == MAX_FORWARDS:
            self.max_forwards = value
        else:
            self.lines.append(b": ".join(field))
            if kind == VIA:
                self.via = _joined(self.via, value)
            elif kind == EXPECT:
                self.expects_continue = value.strip().lower() == b"100-continue"
            elif kind == IDEMPOTENCY_KEY:
                self.keyed = True
            elif kind == TRACEPARENT:
                self.traceparent = value


class ResponseFields:
    """What one pass over a response's fields found."""

    __slots__ = ("content_length", "dated", "event_stream", "lines", "transfer_encoding", "upgrade")

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        self.lines: list[bytes] = []
        self.content_length: int | None = None
        self.transfer_encoding: bytes | None = None
        self.upgrade: bytes | None = None
        self.event_stream = False
        self.dated = False
        named_by_connection: bytes | None = None
        add = self.lines.append
        kinds = RESPONSE_KINDS
        for field in fields:
            kind = kinds[field[0]]
            if kind == PASS:
                add(b": ".join(field))
            elif kind == CONTENT_LENGTH:
                self.content_length = int(field[1])  # digits only: llhttp has checked
            elif kind == CONTENT_TYPE:
                add(b": ".join(field))
                self.event_stream = field[1][:17].lower() == b"text/event-stream"
            elif kind == DATE:
                add(b": ".join(field))
                self.dated = True
            elif kind == CONNECTION:
                if field[1] not in _PLAIN_CONNECTION:
                    named_by_connection = _joined(named_by_connection, field[1])
            elif kind == TRANSFER_ENCODING:
                self.transfer_encoding = _joined(self.transfer_encoding, field[1])
            elif kind == UPGRADE:
                self.upgrade = field[1]
        if named_by_connection is not None:
            self.lines = without_named(self.lines, named_by_connection)


def without_named(lines: Sequence[bytes], connection: bytes) -> list[bytes]:
    """Drop the fields that `Connection` names: they were meant for this hop only."""
    named = {token.strip().lower() for token in connection.split(b",")}
    return [line for line in lines if line.partition(b":")[0].lower() not in named]


def _joined(before: bytes | None, value: bytes) -> bytes:
    return value if before is None else before + b", " + value


def request_head(
    method: bytes, target: bytes, host: bytes, fields: RequestFields, own_lines: bytes, framing: bytes
) -> bytes:
    """The head as sent upstream. `own_lines` and `framing` end with CRLF or are empty."""
    lines = fields.lines
    passed = CRLF.join(lines) + CRLF if lines else b""
    return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b%b\r\n" % (method, target, host, passed, own_lines, framing)


def trailer_lines(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The trailers that may be passed on, as lines; empty when there are none."""
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in fields
        if name.lower() not in _NOT_IN_TRAILERS and RESPONSE_KINDS[name] == PASS
    )


def check_request_codings(fields: RequestFields, *, http10: bool, chunked: bool) -> None:
    """R10 beyond what llhttp refuses by itself."""
    coding = fields.transfer_encoding
    if coding is None:
        return
    if http10:
        raise Malformed("MALFORMED_REQUEST", "an HTTP/1.0 request cannot have Transfer-Encoding", reason="framing")
    if coding.strip().lower() != b"chunked":
        if chunked:
            raise Malformed(
                "NOT_IMPLEMENTED",
                f"transfer coding {coding.decode('latin-1')!r} is not supported; send the body as plain 'chunked'",
                reason="transfer_coding",
            )
        raise Malformed("MALFORMED_REQUEST", "'chunked' must be the last transfer coding", reason="framing")
