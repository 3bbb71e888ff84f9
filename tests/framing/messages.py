"""Messages for the fuzzer: real ones and hostile ones, put together from pieces, then damaged and cut."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

METHODS = [b"GET", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"M-SEARCH", b"QUERY"]
ODD_METHODS = [b"LIST", b"get", b"BREW", b"G ET", b"", b"GE\tT", b"PRI", b"CONNECT"]
TARGETS = [
    *(b"/", b"/a", b"/a/b?c=d&e", b"/%00%2f..", b"//a//b", b"/a;b=c,d", b"http://a.test/x", b"http://a.test"),
    *(b"/?", b"*", b'/a|b{c}^`"<>', b"/" + b"x" * 300),
]
ODD_TARGETS = [b"", b"/a b", b"/\xc3\xa9", b"a.test:80", b"/a#b", b"/\x00", b"/\x7f", b"http://a@b/", b"\\", b"/a\rb"]
VERSIONS = [b"HTTP/1.1"] * 12 + [b"HTTP/1.0", b"HTTP/1.0"]
ODD_VERSIONS = [b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.", b"HTTP/11", b"HTTP/1.1 ", b""]
STATUSES = [b"200 OK"] * 8 + [
    b"204 No Content",
    b"304 Not Modified",
    b"404 Not Found",
    b"206 ",
    b"500",
    b"299 \xe9",
    b"205 R",
]
ODD_STATUSES = [
    b"099 L",
    b"20 OK",
    b"2000 OK",
    b"600 H",
    b"999 H",
    b"200\tOK",
    b"200 a\x00b",
    b"200 a\x1bb",
    b"+20 x",
    b"101 S",
]

PLAIN_FIELDS = [
    *(
        b"X-A: 1",
        b"x-b:2",
        b"X-C:",
        b"X-D: \t v \t",
        b"X-E: \xe9\xff",
        b"X-F: a, b",
        b"Cookie: a=b; c",
        b"TE: trailers",
    ),
    *(
        b"Accept: */*",
        b"X-G: " + b"y" * 200,
        b"Trailer: X-T",
        b"Date: x",
        b"Set-Cookie: a=1",
        b"Content-Type: text/plain",
    ),
    *(b"Connection: keep-alive", b"Connection: close", b"Connection: X-A", b"connection: Keep-Alive, x-b"),
    *(b"Proxy-Connection: keep-alive", b"Keep-Alive: timeout=5", b"Upgrade: h2c", b"Expect: 100-continue"),
    *(b"Content-Type: text/event-stream", b"Location: /x", b"Via: 1.1 a", b"!#$%&'*+-.^_`|~: t"),
]
ODD_FIELDS = [
    *(b"Content-Length: 0", b"Content-Length: 3", b"Content-Length: 5", b"Content-Length: 005", b"Content-Length: +5"),
    *(
        b"Content-Length: 5, 5",
        b"Content-Length: 5 ",
        b"Content-Length:",
        b"Content-Length: 0x5",
        b"Content-Length: -1",
    ),
    *(b"Content-Length: 99999999999999999999", b"Content-Length: 5 5", b"Content-Length : 5", b"Content_Length: 5"),
    *(
        b"Transfer-Encoding: chunked",
        b"transfer-encoding:chunked",
        b"Transfer-Encoding: Chunked",
        b"Transfer-Encoding:",
    ),
    *(b"Transfer-Encoding: gzip", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, chunked"),
    *(b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: , chunked", b"Transfer-Encoding: chunked,"),
    *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked;q=1", b"Transfer-Encoding: \x0bchunked"),
    *(b"Transfer-Encoding : chunked", b"Transfer-Encoding: identity", b'Transfer-Encoding: "chunked"', b" X-A: 1"),
    *(
        b"X-A: 1\r\n 2",
        b"X-A: 1\r\n\t2",
        b"X-A : 1",
        b"X A: 1",
        b": 1",
        b"X-A",
        b"X-A: a\rb",
        b"X-A: a\nb",
        b"X-A: \x00",
    ),
    *(b"X-\xe9: 1", b"X-A: \x7f", b"X-A: \x01", b"X(A): 1", b"Host: b", b"Host:", b"Upgrade: websocket"),
    *(
        b"Connection: upgrade",
        b"Connection: close, keep-alive",
        b"Connection: \tclose",
        b"Connection: closed",
        b"Connection:",
    ),
    *(b"Proxy-Connection: close", b"Max-Forwards: 0", b"Connection: Upgrade, close", b"\x00: 1", b"X-A: 1\r"),
]
BODIES = [
    b"",
    b"a",
    b"hello",
    b"0\r\n\r\n",
    b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"\r\n",
    b"x" * 700,
]
EXTENSIONS = [b""] * 6 + [
    b";a",
    b";a=b",
    b';a="b c"',
    b"; a=b",
    b" ;a",
    b" ",
    b";",
    b";a=",
    b";=b",
    b';a="',
    b";a\x00",
    b";a\rb",
    b"\t",
    b";a;b=c",
    b";a =b",
    b"; a= b",
    b"\t;\ta\t=\tb",
    b"; a ; b",
    b'; a = "b;\\" c" ;d',
    b"; a=b ",
    b" ; a b",
    b'; a="b" c',
    b"; a\n",
]
TRAILERS = [b""] * 6 + [
    b"X-T: 1\r\n",
    b"X-T:\r\nX-U: 2\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Proxy-Connection: close\r\n",
    b"X T: 1\r\n",
    b" folded\r\n",
    b"X-T: a\nb\r\n",
    b"X-T: \xe9\r\n",
]
SURPLUS = [b""] * 8 + [
    b"x",
    b"\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
    b"0\r\n\r\n",
    b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n",
]
SHRAPNEL = [
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b"\n\n",
        b"\r\r\n",
        b" ",
        b"\t",
        b"\x00",
        b"\x0b",
        b"\x7f",
        b"\xff",
        b":",
        b";",
        b",",
        b"0",
    ),
    *(
        b"1",
        b"f",
        b"-",
        b"+",
        b"=",
        b'"',
        b"0\r\n\r\n",
        b"5\r\nhello\r\n",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ),
    *(b"\r\n ", b"HTTP/1.1 ", b"chunked", b"GET / HTTP/1.1\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 C\r\n\r\n"),
]

_rarely = st.integers(0, 9)
_pick = {id(choices): st.sampled_from(choices) for choices in (
    METHODS, ODD_METHODS, TARGETS, ODD_TARGETS, VERSIONS, ODD_VERSIONS, STATUSES, ODD_STATUSES, BODIES, EXTENSIONS, TRAILERS, SURPLUS, SHRAPNEL,
)}  # fmt: skip
_fields = st.lists(st.one_of(st.sampled_from(PLAIN_FIELDS), st.sampled_from(PLAIN_FIELDS + ODD_FIELDS)), max_size=5)


class Answer(NamedTuple):
    method: bytes
    data: bytes
    ended: bool


def _of(draw: st.DrawFn, usual: list[bytes], odd: list[bytes]) -> bytes:
    return draw(_pick[id(odd if draw(_rarely) == 9 else usual)])


@st.composite
def _framed(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """Field lines that announce a body, and the body; mostly they fit."""
    kind = draw(st.sampled_from(["none", "length", "length", "chunked", "chunked", "misfit", "unannounced"]))
    if kind == "none":
        return [], b""
    body = draw(_pick[id(BODIES)])
    if kind == "chunked":
        return [b"Transfer-Encoding: chunked"], _chunked(draw, body)
    if kind == "unannounced":
        return [], body
    length = len(body) + (draw(st.integers(-3, 3)) if kind == "misfit" else 0)
    return [b"Content-Length: %d" % max(0, length)], body


def _chunked(draw: st.DrawFn, body: bytes) -> bytes:
    size = draw(st.sampled_from([1, 3, 1000]))
    spelled = draw(st.sampled_from([b"%x", b"%X", b"00%x"]))
    pieces = [body[at : at + size] for at in range(0, min(len(body), 20 * size), size)]
    extension = draw(_pick[id(EXTENSIONS)])
    chunks = b"".join(spelled % len(piece) + extension + b"\r\n" + piece + b"\r\n" for piece in pieces)
    return chunks + b"0" + draw(_pick[id(EXTENSIONS)]) + b"\r\n" + draw(_pick[id(TRAILERS)]) + b"\r\n"


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    start = b" ".join([
        _of(draw, METHODS, ODD_METHODS), _of(draw, TARGETS, ODD_TARGETS), _of(draw, VERSIONS, ODD_VERSIONS)
    ])  # fmt: skip
    framing, body = draw(_framed())
    return b"\r\n".join([start, b"Host: a.test", *draw(_fields), *framing, b"", b""]) + body


@st.composite
def _answer(draw: st.DrawFn) -> bytes:
    start = _of(draw, VERSIONS, ODD_VERSIONS) + b" " + _of(draw, STATUSES, ODD_STATUSES)
    framing, body = draw(_framed())
    interim = b""
    if draw(_rarely) >= 8:
        interim = draw(
            st.sampled_from([b"100 Continue\r\n", b"103 E\r\nLink: <a>\r\n", b"102 P\r\nContent-Length: 2\r\n"])
        )
        interim = b"HTTP/1.1 " + interim + b"\r\n"
    return interim + b"\r\n".join([start, *draw(_fields), *framing, b"", b""]) + body + draw(_pick[id(SURPLUS)])


def _damaged(draw: st.DrawFn, data: bytes) -> bytes:
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.integers(0, 3))
        if how == 0:
            data = data[:at] + draw(_pick[id(SHRAPNEL)]) + data[at:]
        elif how == 1:
            data = data[:at] + data[at + draw(st.integers(1, 8)) :]
        elif how == 2:
            data = data[:at] + draw(_pick[id(SHRAPNEL)]) + data[at + 1 :]
        else:
            data = data[:at] + data[max(0, at - draw(st.integers(1, 60))) :]
    return data


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes in random segments; now and then one by one."""
    if draw(_rarely) == 9:
        return [data[at : at + 1] for at in range(len(data))]
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What one app sends on one connection, in segments."""
    data = _damaged(draw, b"".join(draw(st.lists(_request(), min_size=1, max_size=3))))
    return draw(cuts(data))


@st.composite
def answers(draw: st.DrawFn) -> list[tuple[Answer, list[bytes]]]:
    """What one upstream answers to one request after the other, each in segments."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        method = draw(st.sampled_from([b"GET", b"GET", b"GET", b"HEAD", b"POST"]))
        one = Answer(method, _damaged(draw, draw(_answer())), draw(st.booleans()))
        found.append((one, draw(cuts(one.data))))
    return found
