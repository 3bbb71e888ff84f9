"""Malformed requests: an answer in the error shape, a closed connection, and nothing smuggled to the upstream.

Every message of the tables is sent twice, in one segment and byte by byte: what a parser makes of a message must
not depend on how the network cuts it.
"""

from __future__ import annotations

import asyncio
import json
from datetime import datetime

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.upstream import Talk, echo

ONE_ATTEMPT = True

HEAD_BYTES = 1024  # the smallest limit that can be set: byte by byte has to stay quick

# name → (status, code, message). `{port}` is the upstream's; the route /u leads to it too.
Table = dict[str, tuple[int, str, str | bytes]]

FRAMING: Table = {
    "content-length and transfer-encoding": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "transfer-encoding and content-length": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    ),
    "differing content-lengths": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    ),
    "a list of differing content-lengths": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 5, 6\r\n\r\nhello!",
    ),
    "a signed content-length": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: +5\r\n\r\nhello",
    ),
    "a negative content-length": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: -5\r\n\r\nhello",
    ),
    "a content-length with a digit separator": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 1_0\r\n\r\nhellohello",
    ),
    "a hexadecimal content-length": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 0x5\r\n\r\nhello",
    ),
    "an empty content-length": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: \r\n\r\n",
    ),
    "a content-length beyond 64 bits": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 18446744073709551617\r\n\r\nx",
    ),
    "chunked not last": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    ),
    "chunked twice": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    ),
    "identity alone": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    ),
    "a coding that only looks like chunked": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    ),
    "quoted chunked": (
        400,
        "MALFORMED_REQUEST",
        'POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    ),
    "an empty transfer-encoding": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding:\r\n\r\n",
    ),
    "gzip, chunked": (
        501,
        "NOT_IMPLEMENTED",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    ),
    "gzip and chunked on two lines": (
        501,
        "NOT_IMPLEMENTED",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "http/1.0 with transfer-encoding": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.0\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "an upgrade with a body": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\nhi",
    ),
    "an upgrade with a chunked body": (
        400,
        "MALFORMED_REQUEST",
        (
            "POST /u HTTP/1.1\r\nHost: s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
        ),
    ),
}

SYNTAX: Table = {
    "garbage": (501, "NOT_IMPLEMENTED", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    "words": (501, "NOT_IMPLEMENTED", "what is this\r\n\r\n"),
    "http/0.9": (505, "VERSION_NOT_SUPPORTED", "GET /u\r\n\r\n"),
    "http/0.9 spelled out": (505, "VERSION_NOT_SUPPORTED", "GET /u HTTP/0.9\r\nHost: s\r\n\r\n"),
    "http/2.0": (505, "VERSION_NOT_SUPPORTED", "GET /u HTTP/2.0\r\nHost: s\r\n\r\n"),
    "http/2.1": (505, "VERSION_NOT_SUPPORTED", "GET /u HTTP/2.1\r\nHost: s\r\n\r\n"),
    "http/3.0": (505, "VERSION_NOT_SUPPORTED", "GET /u HTTP/3.0\r\nHost: s\r\n\r\n"),
    "the http/2 preface": (505, "VERSION_NOT_SUPPORTED", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "a lower-case protocol": (400, "MALFORMED_REQUEST", "GET /u http/1.1\r\nHost: s\r\n\r\n"),
    "a method that is no word": (501, "NOT_IMPLEMENTED", "BR,EW /u HTTP/1.1\r\nHost: s\r\n\r\n"),
    "a lower-case method": (501, "NOT_IMPLEMENTED", "get /u HTTP/1.1\r\nHost: s\r\n\r\n"),
    "a space in the target": (400, "MALFORMED_REQUEST", "GET /u /x HTTP/1.1\r\nHost: s\r\n\r\n"),
    "a bare CR in the target": (400, "MALFORMED_REQUEST", "GET /u\r/x HTTP/1.1\r\nHost: s\r\n\r\n"),
    "raw bytes in the target": (400, "MALFORMED_REQUEST", b"GET /u/\xc3\xa9 HTTP/1.1\r\nHost: s\r\n\r\n"),
    "obs-fold": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nX-A: 1\r\n 2\r\n\r\n"),
    "obs-fold with a tab": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nX-A: 1\r\n\t2\r\n\r\n"),
    "a folded first field": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\n X-A: 1\r\nHost: s\r\n\r\n"),
    "a space before the colon": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nX-A : 1\r\n\r\n"),
    "a space before the colon of framing": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    ),
    "a field without a colon": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nX-A\r\n\r\n"),
    "a field without a name": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\n: 1\r\n\r\n"),
    "a name with a bracket": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nX[A]: 1\r\n\r\n"),
    "a name with raw bytes": (400, "MALFORMED_REQUEST", b"GET /u HTTP/1.1\r\nHost: s\r\nX-\xe9: 1\r\n\r\n"),
    "NUL in a value": (400, "MALFORMED_REQUEST", b"GET /u HTTP/1.1\r\nHost: s\r\nX-A: 1\x002\r\n\r\n"),
    "CR in a value": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nX-A: 1\r2\r\n\r\n"),
    "LF in a value": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nX-A: 1\n2\r\n\r\n"),
    "a value that hides a field behind a LF": (
        400,
        "MALFORMED_REQUEST",
        "POST /u HTTP/1.1\r\nHost: s\r\nX-A: 1\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "lines that end with LF alone": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\nHost: s\n\n"),
    "a head that ends with LF alone": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\n\nX"),
    "no host": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nX-A: 1\r\n\r\n"),
    "an empty host": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost:\r\n\r\n"),
    "an empty host in front of an absolute target": (
        400,
        "MALFORMED_REQUEST",
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost:\r\n\r\n",
    ),
    "two hosts": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nHost: t\r\n\r\n"),
    "the same host twice": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s\r\nhost: s\r\n\r\n"),
    "a list of hosts": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s, t\r\n\r\n"),
    "a host with a path": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s/admin\r\n\r\n"),
    "a host with credentials": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: a@s\r\n\r\n"),
    "a host with a word for a port": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: s:http\r\n\r\n"),
    "a host with an endless port": (
        400,
        "MALFORMED_REQUEST",
        "GET /u HTTP/1.1\r\nHost: s:" + "9" * 300 + "\r\n\r\n",
    ),
    "a host that is half an address": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: [::1\r\n\r\n"),
    "a host with a zone": (400, "MALFORMED_REQUEST", "GET /u HTTP/1.1\r\nHost: [fe80::1%x]\r\n\r\n"),
    "max-forwards that is no number": (
        400,
        "MALFORMED_REQUEST",
        "OPTIONS /u HTTP/1.1\r\nHost: s\r\nMax-Forwards: -1\r\n\r\n",
    ),
}

TARGETS: Table = {
    "a target that is too long": (
        414,
        "TARGET_TOO_LONG",
        "GET /u/" + "x" * HEAD_BYTES + " HTTP/1.1\r\nHost: s\r\n\r\n",
    ),
    "a target that never ends": (414, "TARGET_TOO_LONG", "GET /u/" + "x" * 2 * HEAD_BYTES),
    "a field that is too large": (
        431,
        "HEADERS_TOO_LARGE",
        "GET /u HTTP/1.1\r\nHost: s\r\nX-A: " + "x" * (HEAD_BYTES + 1) + "\r\n\r\n",
    ),
    "a field that never ends": (
        431,
        "HEADERS_TOO_LARGE",
        "GET /u HTTP/1.1\r\nHost: s\r\nX-A: " + "x" * 2 * HEAD_BYTES,
    ),
    "a name that never ends": (431, "HEADERS_TOO_LARGE", "GET /u HTTP/1.1\r\nHost: s\r\n" + "x" * 2 * HEAD_BYTES),
    "too many fields": (
        431,
        "HEADERS_TOO_LARGE",
        "GET /u HTTP/1.1\r\nHost: s\r\n" + "".join(f"X{n}: 1\r\n" for n in range(300)) + "\r\n",
    ),
    "a head that is too large altogether": (
        431,
        "HEADERS_TOO_LARGE",
        "GET /u HTTP/1.1\r\nHost: s\r\n" + ("X-A: " + "x" * 500 + "\r\n") * 4 + "\r\n",
    ),
    "credentials in the target": (
        400,
        "MALFORMED_REQUEST",
        "GET http://a:b@127.0.0.1:{port}/ HTTP/1.1\r\nHost: s\r\n\r\n",
    ),
    "a user in the target": (400, "MALFORMED_REQUEST", "GET http://a@127.0.0.1:{port}/ HTTP/1.1\r\nHost: s\r\n\r\n"),
    "a fragment in an absolute target": (
        400,
        "MALFORMED_REQUEST",
        "GET http://127.0.0.1:{port}/#x HTTP/1.1\r\nHost: s\r\n\r\n",
    ),
    "a fragment in a path": (400, "MALFORMED_REQUEST", "GET /u/a#x HTTP/1.1\r\nHost: s\r\n\r\n"),
    "an absolute target without a host": (400, "MALFORMED_REQUEST", "GET http:///x HTTP/1.1\r\nHost: s\r\n\r\n"),
    "an absolute target with a port alone": (400, "MALFORMED_REQUEST", "GET http://:80/ HTTP/1.1\r\nHost: s\r\n\r\n"),
    "a port that is too large": (400, "MALFORMED_REQUEST", "GET http://a.test:65536/ HTTP/1.1\r\nHost: s\r\n\r\n"),
    "port zero": (400, "MALFORMED_REQUEST", "GET http://a.test:0/ HTTP/1.1\r\nHost: s\r\n\r\n"),
    "another scheme": (400, "MALFORMED_REQUEST", "GET ftp://a.test/ HTTP/1.1\r\nHost: s\r\n\r\n"),
    "a scheme without slashes": (400, "MALFORMED_REQUEST", "GET http:a.test HTTP/1.1\r\nHost: s\r\n\r\n"),
    "an authority in place of a path": (400, "MALFORMED_REQUEST", "GET a.test:80 HTTP/1.1\r\nHost: s\r\n\r\n"),
    "an asterisk for another method": (400, "MALFORMED_REQUEST", "GET * HTTP/1.1\r\nHost: s\r\n\r\n"),
    "a backslash for a slash": (
        400,
        "MALFORMED_REQUEST",
        "GET http://127.0.0.1:{port}\\@a.test/ HTTP/1.1\r\nHost: s\r\n\r\n",
    ),
}

CONNECTS: Table = {
    "no port": (400, "MALFORMED_REQUEST", "CONNECT a.test HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "an empty port": (400, "MALFORMED_REQUEST", "CONNECT a.test: HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "a word for a port": (400, "MALFORMED_REQUEST", "CONNECT a.test:https HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "port zero": (400, "MALFORMED_REQUEST", "CONNECT a.test:0 HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "a port that is too large": (400, "MALFORMED_REQUEST", "CONNECT a.test:65979 HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "a negative port": (400, "MALFORMED_REQUEST", "CONNECT a.test:-443 HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "no host": (400, "MALFORMED_REQUEST", "CONNECT :443 HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "credentials": (400, "MALFORMED_REQUEST", "CONNECT a:b@a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "a url": (400, "MALFORMED_REQUEST", "CONNECT http://a.test:443/ HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "a path": (400, "MALFORMED_REQUEST", "CONNECT /u HTTP/1.1\r\nHost: a.test\r\n\r\n"),
    "no host field": (400, "MALFORMED_REQUEST", "CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n"),
    "a malformed host field": (400, "MALFORMED_REQUEST", "CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: a b\r\n\r\n"),
    "a body": (
        400,
        "MALFORMED_REQUEST",
        "CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhello",
    ),
    "a chunked body": (
        400,
        "MALFORMED_REQUEST",
        "CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "http/2.0": (505, "VERSION_NOT_SUPPORTED", "CONNECT 127.0.0.1:{port} HTTP/2.0\r\nHost: a.test\r\n\r\n"),
    "a port that is not allowed": (403, "EGRESS_DENIED", "CONNECT a.test:25 HTTP/1.1\r\nHost: a.test\r\n\r\n"),
}


async def send_whole(app: App, data: bytes) -> None:
    await app.send(data)


async def send_byte_by_byte(app: App, data: bytes) -> None:
    """The sidecar may well answer and close before the last byte: that is not the app's mistake."""
    try:
        for position in range(len(data)):
            await app.send(data[position : position + 1])
            await asyncio.sleep(0)
    except ConnectionError:
        pass


def fault_in_shape(reply: Reply) -> str | None:
    """What is wrong with an error answer, or None."""
    try:
        told = json.loads(reply.body)
    except ValueError:
        return f"not JSON: {reply.body[:100]!r}"
    expected = {"error_code", "message", "details", "request_id", "timestamp", "documentation_url"}
    if missing := expected - set(told):
        return f"without {sorted(missing)}"
    if not (told["message"] and told["request_id"] and isinstance(told["details"], dict)):
        return f"empty parts: {told}"
    if not told["documentation_url"].endswith("/errors/" + told["error_code"]):
        return f"documented at {told['documentation_url']}"
    if datetime.fromisoformat(told["timestamp"]).utcoffset() is None:
        return f"time without a zone: {told['timestamp']}"
    if "application/json" != reply.get("content-type"):
        return f"content type {reply.get('content-type')}"
    return None


async def try_out(sidecar: Running, data: bytes, send, status: int, code: str) -> str | None:
    """Send one bad message; what is wrong with the reaction, or None."""
    app = await sidecar.app()
    await send(app, data)
    try:
        reply = await app.reply(within=3)
    except TimeoutError:
        return "hangs"
    except (asyncio.IncompleteReadError, ConnectionError) as cut:
        return f"no answer: {cut!r}"
    if not reply.complete or (fault := fault_in_shape(reply)):
        return f"{reply.status}, {fault or 'cut off'}"
    if (status, code) != (reply.status, reply.json["error_code"]):
        return f"{reply.status} {reply.json['error_code']}: {reply.json['message']}"
    refused_by_rule = status == 403  # understood, but not allowed: the connection may go on
    if not refused_by_rule and "close" != reply.get("connection"):
        return f"Connection: {reply.get('connection')}"
    if not refused_by_rule and not await app.closed(within=3):
        return "more bytes after the answer"
    app.close()
    return None


@pytest.mark.parametrize("send", [send_whole, send_byte_by_byte])
@pytest.mark.parametrize("table", [FRAMING, SYNTAX, TARGETS, CONNECTS], ids=["framing", "syntax", "targets", "connect"])
async def test_a_malformed_request_gets_its_code_and_a_closed_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route, table: Table, send
) -> None:
    upstream = await start_upstream(echo)
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"head_bytes": HEAD_BYTES})
    reactions = {}
    for name, (status, code, message) in table.items():
        data = message if isinstance(message, bytes) else message.encode("latin-1")
        data = data.replace(b"{port}", b"%d" % upstream.port)
        reactions[name] = await try_out(sidecar, data, send, status, code)
    assert {} == {name: wrong for name, wrong in reactions.items() if wrong}
    assert [] == upstream.requests


BAD_CHUNKS = {
    "a size that is no number": b"zz\r\nhello\r\n",
    "a negative size": b"-5\r\nhello\r\n",
    "a size with a prefix": b"0x5\r\nhello\r\n",
    "a size beyond 64 bits": b"10000000000000005\r\nhello\r\n",
    "an empty size": b"\r\nhello\r\n",
    "more data than announced": b"3\r\nhello\r\n",
    "data without its line end": b"5\r\nhelloXX0\r\n\r\n",
    "a size line that ends with LF": b"5\nhello\r\n",
    "a space before the size": b" 5\r\nhello\r\n",
    "a NUL in the extension": b"5;a=\x00\r\nhello\r\n",
    "a LF in the extension": b"5;a=\nb\r\nhello\r\n",
    "a broken trailer": b"0\r\nno colon\r\n\r\n",
}
CHUNKED_HEAD = b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n"


class Listening:
    """An upstream that never answers and keeps every byte it is sent, until the sidecar closes."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.ended = 0

    async def script(self, talk: Talk) -> None:
        place = len(self.received)
        self.received.append(b"")
        try:
            while data := await talk.reader.read(65536):
                self.received[place] += data
        except ConnectionError:
            pass
        self.ended += 1


async def send_later(app: App, data: bytes) -> None:
    """The head first, and what follows only when the exchange is under way."""
    head, _, rest = data.partition(b"\r\n\r\n")
    await app.send(head + b"\r\n\r\n" + b"4\r\ngood\r\n")
    await asyncio.sleep(0.02)
    await app.send(rest)


@pytest.mark.parametrize("send", [send_whole, send_later, send_byte_by_byte])
async def test_a_bad_chunk_is_answered_and_the_upstream_never_sees_a_clean_end(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route, send
) -> None:
    listening = Listening()
    upstream = await start_upstream(listening.script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    reactions = {}
    for name, chunk in BAD_CHUNKS.items():
        reactions[name] = await try_out(sidecar, CHUNKED_HEAD + chunk, send, 400, "MALFORMED_REQUEST")
    assert {} == {name: wrong for name, wrong in reactions.items() if wrong}
    async with asyncio.timeout(3):
        while listening.ended < len(listening.received):
            await asyncio.sleep(0.01)
    assert [] == [bytes_ for bytes_ in listening.received if bytes_.endswith(b"0\r\n\r\n")]
    assert all(bytes_.count(b"POST ") == 1 for bytes_ in listening.received if bytes_)


async def test_a_bad_chunk_after_the_answer_has_begun_breaks_the_answer_off(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route
) -> None:
    async def answers_early(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await talk.reader.read()

    upstream = await start_upstream(answers_early)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(CHUNKED_HEAD + b"4\r\ngood\r\n")
    assert b"one\r\n" in await app.reader.readuntil(b"one\r\n")
    await app.send(b"zz\r\n")
    assert await app.closed(within=3)


async def test_a_connection_ends_after_a_body_that_was_cut_short_by_the_app(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route
) -> None:
    listening = Listening()
    upstream = await start_upstream(listening.script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(CHUNKED_HEAD + b"4\r\ngood\r\n")
    async with asyncio.timeout(3):
        while not (listening.received and listening.received[0].endswith(b"good\r\n")):
            await asyncio.sleep(0.01)
        app.close()
        while not listening.ended:
            await asyncio.sleep(0.01)
    assert not listening.received[0].endswith(b"0\r\n\r\n")


# What hides behind the first message must never become a request of its own.
SMUGGLED = b"GET /u/smuggled HTTP/1.1\r\nHost: s\r\n\r\n"
SMUGGLING = {
    "CL.TE": b"POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE.CL": b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "TE.TE": b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    "TE with a tab": b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding:\tchunked, x\r\n\r\n0\r\n\r\n",
    "TE with a vertical tab": b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "TE in a folded line": b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "TE behind a space": b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "an empty TE": b"POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding:\r\n\r\n0\r\n\r\n",
    "CL.CL": b"POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 0\r\nContent-Length: 44\r\n\r\n",
    "CL with a list": b"POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 0, 0\r\n\r\n",
    "an upgrade with a length": b"POST /u HTTP/1.1\r\nHost: s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Content-Length: 1\r\n\r\nx",
    "a zero chunk cut short": CHUNKED_HEAD + b"0\r\n\rX",
    "a chunk that lies about its size": CHUNKED_HEAD + b"1\r\nZZ\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("send", [send_whole, send_byte_by_byte])
async def test_a_smuggled_request_never_reaches_the_upstream(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route, send
) -> None:
    listening = Listening()
    upstream = await start_upstream(listening.script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"default": {"attempt_timeout": 0.3}})
    statuses = {}
    for name, message in SMUGGLING.items():
        app = await sidecar.app()
        await send(app, message + SMUGGLED)
        reply = await app.reply(within=3)
        closed = await app.closed(within=3)
        statuses[name] = (reply.status, closed)
        app.close()
    assert {} == {name: seen for name, seen in statuses.items() if seen not in ((400, True), (501, True))}
    assert [] == [bytes_ for bytes_ in listening.received if b"smuggled" in bytes_]


@pytest.mark.parametrize("send", [send_whole, send_byte_by_byte])
async def test_nothing_behind_a_parse_error_is_looked_at(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route, send
) -> None:
    upstream = await start_upstream(echo)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await send(app, b"GET /u/first HTTP/1.1\r\nHost: s\r\n\r\n" + b"GET /u HTTP/9\r\n\r\n" + SMUGGLED)
    reply = await app.reply()
    if reply.status == 200:  # the good one was complete before the bad one was seen
        reply = await app.reply()
    assert reply.status in (400, 505)
    assert await app.closed()
    assert [] == [head for head in upstream.requests if not head.startswith(b"GET /first HTTP/1.1\r\n")]
    assert len(upstream.requests) <= 1


async def test_malformed_requests_are_counted_apart_from_the_outcomes(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    for message in (b"GET /u HTTP/1.1\r\n: 1\r\n\r\n", b"GET /u HTTP/1.1\r\nHost:\r\n\r\n"):
        app = await sidecar.app()
        assert 400 == (await app.ask(message)).status
    counted = {
        sample.labels["reason"]: sample.value
        for family in sidecar.proxy.metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith("malformed_requests_total")
    }
    assert ({"syntax": 1.0, "target": 1.0}, {}) == (counted, sidecar.outcomes)
