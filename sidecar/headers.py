"""Header fields between app and upstream: what is dropped, what is ours, what passes untouched.

Law: pure. One pass over the fields of a message turns them into lines ready to be sent plus the few facts the
exchange needs. Framing and hop-by-hop fields are never copied (R1, R16); everything else keeps its bytes, its
case and its order (R7). Field names are classified once and remembered in a bounded table, so a request costs
one dictionary look-up per field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CRLF = b"\r\n"
UPGRADE_LINES = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"

(
    PASS,
    DATE,
    CONTENT_TYPE,
    LOCATION,
    CONTENT_LENGTH,
    CONNECTION,
    DROP,
    HOST,
    TRANSFER_ENCODING,
    UPGRADE,
    VIA,
    EXPECT,
    MAX_FORWARDS,
    IDEMPOTENCY_KEY,
    TRACEPARENT,
    TRACESTATE,
    OVERRIDE,
    CALLER,
    PREFER,
    PROXY_CONNECTION,
) = range(20)

_REMEMBERED_NAMES = 2048
PLAIN_CONNECTION = frozenset({b"", b"keep-alive", b"close", b"Keep-Alive", b"Close"})
# Never acceptable behind the last chunk: they would change how the message is framed, routed or authorised.
_NOT_IN_TRAILERS = frozenset(
    b"transfer-encoding content-length host connection te upgrade trailer content-encoding content-type "
    b"content-range authorization proxy-authorization set-cookie cache-control max-forwards".split()
)


class FieldKinds(dict[bytes, int]):
    """Raw field name → kind. Remembers names as written; emptied when full so a peer cannot grow it."""

    def __init__(self, special: dict[bytes, int], ours: int) -> None:
        super().__init__()
        self._special = special
        self._ours = ours  # the kind of `x-sidecar-*`

    def __missing__(self, name: bytes) -> int:
        lower = name.lower()
        kind = self._ours if lower.startswith(b"x-sidecar-") else self._special.get(lower, PASS)
        if len(self) >= _REMEMBERED_NAMES:
            self.clear()
        if len(name) <= 64:
            self[name] = kind
        return kind


REQUEST_KINDS = FieldKinds(
    {
        b"proxy-connection": PROXY_CONNECTION,
        b"keep-alive": DROP,
        b"te": DROP,
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
        b"tracestate": TRACESTATE,
        b"amz-sdk-request": CALLER,
        b"x-stainless-retry-count": CALLER,
        b"prefer": PREFER,
    },
    ours=OVERRIDE,
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
        b"location": LOCATION,
    },
    ours=DROP,
)


class ResponseFields:
    """What was found in a response's fields, each classified when the parser hands it over."""

    __slots__ = ("connection", "content_length", "dated", "event_stream", "lines", "transfer_encoding", "upgrade")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.connection: bytes | None = None
        self.content_length: int | None = None
        self.transfer_encoding: bytes | None = None
        self.upgrade: bytes | None = None
        self.event_stream = False
        self.dated = False

    def special(self, kind: int, value: bytes) -> None:
        """A field that is not passed on and says something unusual."""
        if kind == CONNECTION:
            self.connection = joined(self.connection, value)
        elif kind == TRANSFER_ENCODING:
            self.transfer_encoding = joined(self.transfer_encoding, value)
        elif kind == UPGRADE:
            self.upgrade = joined(self.upgrade, value)

    def finish(self) -> None:
        """All fields are here: drop those that `Connection` names."""
        if self.connection is not None:
            self.lines = without_named(self.lines, self.connection)
            self.dated = self.dated and self.value(b"date") is not None

    def value(self, name: bytes) -> bytes | None:
        """The first field of this lower-case name. For unusual moments: a scan."""
        return value_of(self.lines, name)


def field_of(line: bytes) -> tuple[bytes, bytes]:
    """A line as name and value."""
    name, _, value = line.partition(b":")
    return name, value.strip(b" \t")


def value_of(lines: Sequence[bytes], name: bytes) -> bytes | None:
    """The first field of this lower-case name among lines as they are sent."""
    prefix = name + b":"
    size = len(prefix)
    for line in lines:
        if line[:size].lower() == prefix:
            return line[size:].strip(b" \t")
    return None


def without_named(lines: Sequence[bytes], connection: bytes) -> list[bytes]:
    """Drop the fields that `Connection` names: they were meant for this hop only."""
    named = {token.strip().lower() for token in connection.split(b",")}
    return [line for line in lines if line.partition(b":")[0].lower() not in named]


def names_close(connection: bytes) -> bool:
    """Whether `Connection` ends the connection behind this message, whatever else it says."""
    return any(token.strip().lower() == b"close" for token in connection.split(b","))


def joined(before: bytes | None, value: bytes) -> bytes:
    return value if before is None else before + b", " + value


def request_head(
    method: bytes, target: bytes, host: bytes, lines: Sequence[bytes], own_lines: bytes, framing: bytes
) -> bytes:
    """The head as sent upstream. `own_lines` and `framing` end with CRLF or are empty."""
    passed = CRLF.join(lines) + CRLF if lines else b""
    return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b%b\r\n" % (method, target, host, passed, own_lines, framing)


def trailer_lines(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The trailers that may be passed on, as lines; empty when there are none."""
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in fields
        if name.lower() not in _NOT_IN_TRAILERS and RESPONSE_KINDS[name] == PASS
    )
