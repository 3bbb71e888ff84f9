"""A small model of HTTP/1.1 framing, written from RFC 9112 alone: which messages with which bodies are in these bytes.

Pure, and independent of llhttp: whole bytes in, a `Reading` out, one position that only moves forward. The numbers in
the comments are sections of RFC 9112. Where the RFC leaves a choice the model takes the strict side, because it is held
against a parser that may be stricter than the RFC but never laxer; where a strict side would say nothing about
framing, the model is lax and says so in `liberties`: what a careful recipient may refuse although the RFC lets it pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Field = tuple[bytes, bytes]

CLEAN = "clean"  # the bytes end where a message ends
INCOMPLETE = "incomplete"  # they end inside one
REFUSED = "refused"  # what follows the messages is no message
SWITCHED = "switched"  # what follows belongs to another protocol
LAST = "last"  # the last message said that none follows
SURPLUS = "surplus"  # something follows the one answer that was asked for

_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")  # RFC 9110, 5.6.2
_DIGITS = frozenset(b"0123456789")
_HEX = frozenset(b"0123456789abcdefABCDEF")
_VALUE = frozenset([0x09, *range(0x20, 0x7F), *range(0x80, 0x100)])  # RFC 9110, 5.5
_TARGET = frozenset(range(0x21, 0x7F))
_NOT_BEHIND = frozenset(b"content-length transfer-encoding connection proxy-connection upgrade".split())
_MOST_DIGITS = 18  # of a length that everybody can hold


@dataclass(frozen=True)
class Message:
    """One message. `whole` is False where the bytes end, or become wrong, inside its body."""

    start: bytes
    fields: tuple[Field, ...] = ()
    body: bytes = b""
    trailers: tuple[Field, ...] = ()
    whole: bool = True

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key.lower() == name]

    @property
    def method(self) -> bytes:
        return self.start.split(b" ")[0]

    @property
    def target(self) -> bytes:
        return self.start.split()[1]

    @property
    def status(self) -> int:
        return int(self.start[9:12])


@dataclass(frozen=True)
class Reading:
    messages: tuple[Message, ...]
    end: str
    why: str = ""
    rest: bytes = b""
    """What was not read: behind a switch, behind the last message, behind an answer."""
    liberties: frozenset[str] = frozenset()


class _Wrong(Exception):
    """These bytes are no message, whatever follows them."""


class _More(Exception):
    """The bytes end here."""


@dataclass
class _Head:
    start: bytes
    fields: list[Field]
    minor: int

    def list_of(self, name: bytes) -> list[bytes]:
        """All members of a list field (RFC 9110, 5.6.1), lower case, empty ones included."""
        found: list[bytes] = []
        for key, value in self.fields:
            if key.lower() == name:
                found += [member.strip(b" \t").lower() for member in value.split(b",")]
        return found

    def has(self, name: bytes) -> bool:
        return any(key.lower() == name for key, _ in self.fields)


@dataclass
class _Framing:
    kind: str  # "none", "length", "chunked" or "close"
    length: int = 0


@dataclass
class _Cursor:
    data: bytes
    at: int = 0
    liberties: set[str] = field(default_factory=set)

    def line(self) -> bytes:
        """Up to CRLF. A line feed alone may be taken for one (2.2); the model takes the strict side."""
        end = self.data.find(b"\n", self.at)
        upto = len(self.data) if end < 0 else end
        carriage = self.data.find(b"\r", self.at, upto)
        if end < 0:
            if 0 <= carriage < upto - 1:
                raise _Wrong("a carriage return inside a line")
            raise _More
        if carriage != end - 1:
            raise _Wrong("a line that does not end with CRLF")
        found = self.data[self.at : carriage]
        self.at = end + 1
        return found

    def skip_empty_lines(self) -> None:
        """Before a message (2.2). Whatever mixture of CR and LF it is: it belongs to no message."""
        while self.at < len(self.data) and self.data[self.at] in b"\r\n":
            self.at += 1

    def take(self, size: int) -> bytes:
        found = self.data[self.at : self.at + size]
        self.at += len(found)
        return found

    @property
    def rest(self) -> bytes:
        return self.data[self.at :]


# ---- both kinds of messages --------------------------------------------------------------------------------------


def requests(data: bytes, *, most: int | None = None) -> Reading:
    """All requests on one connection of a client, or so many of them."""
    cursor, found = _Cursor(data), list[Message]()

    def reading(end: str, why: str = "") -> Reading:
        return Reading(tuple(found), end, why, cursor.rest, frozenset(cursor.liberties))

    while True:
        if len(found) == most:
            return reading(CLEAN)
        cursor.skip_empty_lines()
        if not cursor.rest:
            return reading(CLEAN)
        try:
            head = _head(cursor, _request_line)
            framing = _request_framing(head, cursor.liberties)
        except _More:
            return reading(INCOMPLETE, "in a head")
        except _Wrong as wrong:
            return reading(REFUSED, str(wrong))
        message, why, wrong_body = _with_body(cursor, head, framing)
        found.append(message)
        if not message.whole:
            return reading(REFUSED if wrong_body else INCOMPLETE, why)
        if _switches(head):
            return reading(SWITCHED)
        if not _persists(head):
            return reading(LAST)


def answer(data: bytes, method: bytes = b"GET", *, ended: bool = False) -> Reading:
    """The answer to one request with this method: interim ones, then the final one. `ended`: a clean end follows."""
    cursor, found = _Cursor(data), list[Message]()

    def reading(end: str, why: str = "") -> Reading:
        return Reading(tuple(found), end, why, cursor.rest, frozenset(cursor.liberties))

    while True:
        cursor.skip_empty_lines()
        try:
            head = _head(cursor, _status_line)
            status = int(head.start[9:12])
            framing = _answer_framing(head, status, method, cursor.liberties)
        except _More:
            return reading(INCOMPLETE, "in a head")
        except _Wrong as wrong:
            return reading(REFUSED, str(wrong))
        message, why, wrong_body = _with_body(cursor, head, framing, ended=ended)
        found.append(message)
        if not message.whole:
            return reading(REFUSED if wrong_body else INCOMPLETE, why)
        if status == 101:
            return reading(SWITCHED)
        if status < 200:
            continue
        if cursor.rest.strip(b"\r\n"):  # empty lines belong to no message, see above
            return reading(SURPLUS)
        return reading(CLEAN if _persists(head) and framing.kind != "close" else LAST)


# ---- the head ----------------------------------------------------------------------------------------------------


def _head(cursor: _Cursor, first_line: object) -> _Head:
    start = cursor.line()
    minor = first_line(start, cursor.liberties)  # type: ignore[operator]
    return _Head(start, _fields(cursor), minor)


def _version(name: bytes, liberties: set[str]) -> int:
    """2.3"""
    if len(name) != 8 or not name.startswith(b"HTTP/") or name[5] not in _DIGITS or name[7] not in _DIGITS:
        raise _Wrong("no HTTP version")
    if name[6:7] != b"." or name[5:6] != b"1":
        raise _Wrong("another major version")
    if name[7:8] not in b"01":
        liberties.add("a minor version above 1")  # to be read as 1.1 (RFC 9110, 2.5)
    return int(name[7:8])


def _request_line(line: bytes, liberties: set[str]) -> int:
    """3: method SP request-target SP HTTP-version. More spaces than two may be taken for one each, or be refused."""
    method, first, behind = line.partition(b" ")
    target, second, version = behind.lstrip(b" ").partition(b" ")
    if not first or not second:
        raise _Wrong("a request line is three words and two spaces")
    if behind.startswith(b" ") or version.startswith(b" "):
        liberties.add("more than one space in the request line")
        version = version.lstrip(b" ")
    if not method or not _TOKEN.issuperset(method):
        raise _Wrong("a method that is no token")
    if not target or not _TARGET.issuperset(target):
        raise _Wrong("a target with bytes that no URI has")
    return _version(version, liberties)


def _status_line(line: bytes, liberties: set[str]) -> int:
    """4: HTTP-version SP status-code SP [ reason-phrase ]. The last space is often missing; nothing depends on it."""
    code, rest = line[9:12], line[12:]
    minor = _version(line[:8], liberties)
    if line[8:9] != b" " or len(code) != 3 or not _DIGITS.issuperset(code):
        raise _Wrong("no status code of three digits")
    if code[0:1] == b"0":
        raise _Wrong("a status below 100")
    if rest and not rest.startswith(b" "):
        raise _Wrong("a status line without a space before the reason")
    if not _VALUE.issuperset(rest):
        liberties.add("a control byte in the reason phrase")  # which is to be ignored
    return minor


def _fields(cursor: _Cursor) -> list[Field]:
    """5: field lines up to the empty line. A folded line (5.2) is refused; so may every recipient."""
    found: list[Field] = []
    while line := cursor.line():
        name, colon, value = line.partition(b":")
        if not colon or not name or not _TOKEN.issuperset(name):
            raise _Wrong("a field line without a name that is a token")
        if not _VALUE.issuperset(value):
            raise _Wrong("a control byte in a field value")
        found.append((name, value.strip(b" \t")))
    return found


# ---- how long it is ----------------------------------------------------------------------------------------------


def _length(head: _Head, liberties: set[str]) -> int | None:
    """6.2 and 6.3, 5. One field with one value: a list of equal ones may be taken, and may be refused."""
    values = [value for name, value in head.fields if name.lower() == b"content-length"]
    if not values:
        return None
    if len(values) > 1 or not values[0] or not _DIGITS.issuperset(values[0]):
        raise _Wrong("Content-Length is not one number")
    if len(values[0]) > _MOST_DIGITS:
        liberties.add("a length of more than 18 digits")
    return int(values[0])


def _chunked(head: _Head, liberties: set[str]) -> bool:
    """6.1: `chunked` and nothing else, in HTTP/1.1. Other codings exist; who does not know them must not go on."""
    if not head.has(b"transfer-encoding"):
        return False
    if head.minor == 0:
        raise _Wrong("Transfer-Encoding in HTTP/1.0")
    if head.has(b"content-length"):
        raise _Wrong("Transfer-Encoding and Content-Length")
    codings = head.list_of(b"transfer-encoding")
    if b"" in codings:
        liberties.add("an empty member in Transfer-Encoding")
    if [coding for coding in codings if coding] != [b"chunked"]:
        raise _Wrong("transfer codings other than chunked")
    return True


def _request_framing(head: _Head, liberties: set[str]) -> _Framing:
    """6.3, 4 to 7"""
    if _chunked(head, liberties):
        return _Framing("chunked")
    length = _length(head, liberties)
    return _Framing("none") if length is None else _Framing("length", length)


def _answer_framing(head: _Head, status: int, method: bytes, liberties: set[str]) -> _Framing:
    """6.3, 1 to 8. The first rule holds whatever the fields say, so what they say is not looked at."""
    if method == b"HEAD" or status < 200 or status in (204, 304):
        if head.has(b"transfer-encoding") or head.has(b"content-length"):
            liberties.add("a body announced where there is none")
        return _Framing("none")
    chunked, length = _chunked(head, liberties), _length(head, liberties)
    if chunked:
        return _Framing("chunked")
    return _Framing("close") if length is None else _Framing("length", length)


def _persists(head: _Head) -> bool:
    """9.3. Proxy-Connection is no standard (C.2.2): it says something where Connection does not say the contrary."""
    options, unofficial = head.list_of(b"connection"), head.list_of(b"proxy-connection")
    if b"close" in options:
        return False
    if head.minor == 0:
        return b"keep-alive" in options + unofficial
    return b"close" not in unofficial


def _switches(head: _Head) -> bool:
    """Behind a CONNECT (RFC 9110, 9.3.6) and behind an Upgrade to WebSocket that may be agreed to nothing is HTTP."""
    if head.start.startswith(b"CONNECT "):
        return True
    asked = head.minor > 0 and b"upgrade" in head.list_of(b"connection")
    return asked and head.list_of(b"upgrade") == [b"websocket"]


# ---- the body ----------------------------------------------------------------------------------------------------


def _with_body(cursor: _Cursor, head: _Head, framing: _Framing, *, ended: bool = False) -> tuple[Message, str, bool]:
    """The message, why it is not whole, and whether that is because its bytes are wrong."""
    fields = tuple(head.fields)
    if framing.kind == "chunked":
        parts: list[bytes] = []
        try:
            trailers = tuple(_chunks(cursor, parts))
        except _More:
            return Message(head.start, fields, b"".join(parts), whole=False), "in a chunked body", False
        except _Wrong as wrong:
            return Message(head.start, fields, b"".join(parts), whole=False), str(wrong), True
        return Message(head.start, fields, b"".join(parts), trailers), "", False
    if framing.kind == "close":
        body = cursor.take(len(cursor.data))
        return Message(head.start, fields, body, whole=ended), "" if ended else "in a body without an end", False
    body = cursor.take(framing.length)
    whole = len(body) == framing.length
    return Message(head.start, fields, body, whole=whole), "" if whole else "in a body", False


def _chunks(cursor: _Cursor, parts: list[bytes]) -> list[Field]:
    """7.1: chunks into `parts`, and the trailers."""
    while size := _chunk_size(cursor.line(), cursor.liberties):
        data = cursor.take(size)
        parts.append(data)
        if len(data) < size:
            raise _More
        end = cursor.take(2)
        if not b"\r\n".startswith(end):
            raise _Wrong("a chunk that is longer than its size")
        if len(end) < 2:
            raise _More
    trailers = _fields(cursor)
    if any(name.lower() in _NOT_BEHIND for name, _ in trailers):
        cursor.liberties.add(
            "a field in the trailers that frames or ends a message"
        )  # never to be sent (RFC 9110, 6.5.1)
    return trailers


def _chunk_size(line: bytes, liberties: set[str]) -> int:
    """7.1: 1*HEXDIG. What extensions say is ignored (7.1.1); that they are well formed no boundary depends on."""
    count = 0
    while count < len(line) and line[count] in _HEX:
        count += 1
    digits, extension = line[:count], line[count:]
    if not digits:
        raise _Wrong("a chunk without a size")
    if len(digits.lstrip(b"0")) > 15:
        liberties.add("a chunk size of more than 15 digits")
    if extension:
        if extension.strip(b" \t") and not extension.lstrip(b" \t").startswith(b";"):
            raise _Wrong("something between the size of a chunk and the end of its line")
        if not _VALUE.issuperset(extension):
            raise _Wrong("a control byte in a chunk extension")
        if not extension.strip(b" \t"):
            liberties.add("white space behind the size of a chunk")  # padding, as old servers have it
        elif not _well_formed(extension):
            liberties.add("a malformed chunk extension")
    return int(digits, 16)


def _well_formed(extension: bytes) -> bool:
    """7.1.1: *( BWS ";" BWS chunk-ext-name [ BWS "=" BWS chunk-ext-val ] ), one character after the other."""
    text, at = extension, 0

    def blank() -> None:
        nonlocal at
        while text[at : at + 1] in (b" ", b"\t"):
            at += 1

    def token() -> bool:
        nonlocal at
        begin = at
        while at < len(text) and text[at] in _TOKEN:
            at += 1
        return at > begin

    def quoted() -> bool:
        nonlocal at
        at += 1
        while at < len(text) and text[at : at + 1] != b'"':
            at += 2 if text[at : at + 1] == b"\\" else 1
        at += 1
        return at <= len(text)

    while at < len(text):
        blank()
        if text[at : at + 1] != b";":
            return False
        at += 1
        blank()
        if not token():
            return False
        behind_name = at
        blank()
        if text[at : at + 1] == b"=":
            at += 1
            blank()
            if not (quoted() if text[at : at + 1] == b'"' else token()):
                return False
        else:
            at = behind_name
    return True
