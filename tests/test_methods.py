"""Methods and versions that the parser does not know pass as they are, framed like all others."""

from __future__ import annotations

import asyncio

import pytest

from tests.conftest import Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import ended, reset_after_request, until
from tests.doubles.upstream import Talk, Upstream, always, echo

PLAIN = "LIST /u/secret HTTP/1.1\r\nHost: s\r\n\r\n"
WITH_BODY = "BREW /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: 5\r\n\r\nGET /"
CHUNKED = "X-!#$%&'*+.^_`|~9 /u/x HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nLIST \r\n0\r\n\r\n"
GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"


@pytest.fixture
async def line(start_sidecar: Starter, start_upstream: UpstreamStarter) -> tuple[App, Upstream]:
    upstream = await start_upstream(echo)
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    return await sidecar.app(), upstream


def first_line(head: bytes) -> str:
    return head.partition(b"\r\n")[0].decode()


async def test_they_pass_with_their_bodies_between_others_on_one_connection(line: tuple[App, Upstream]) -> None:
    app, upstream = line
    for asked in (PLAIN, GET, WITH_BODY, CHUNKED, PLAIN, "UNBIND /u/x HTTP/1.1\r\nHost: s\r\n\r\n", GET):
        reply = await app.ask(asked)
        assert (200, asked.partition(" ")[0]) == (reply.status, reply.body.partition(b" ")[0].decode())
    assert [
        "LIST /secret HTTP/1.1",
        "GET /x HTTP/1.1",
        "BREW /x HTTP/1.1",
        "X-!#$%&'*+.^_`|~9 /x HTTP/1.1",
        "LIST /secret HTTP/1.1",
        "UNBIND /x HTTP/1.1",
        "GET /x HTTP/1.1",
    ] == list(map(first_line, upstream.requests))
    assert [b"", b"", b"GET /", b"LIST ", b"", b"", b""] == upstream.bodies
    assert 1 == upstream.connections


@pytest.mark.parametrize("asked", [PLAIN, WITH_BODY, CHUNKED, GET.replace("1.1", "1.2")])
async def test_they_may_be_cut_anywhere(line: tuple[App, Upstream], asked: str) -> None:
    app, upstream = line
    expected = first_line(asked.replace("/u/", "/").replace("1.2", "1.1").encode())
    for cut in range(1, len(asked)):
        await app.send(asked[:cut])
        await asyncio.sleep(0.001)
        assert 200 == (await app.ask(asked[cut:])).status, cut
    for byte in asked:
        await app.send(byte)
        await asyncio.sleep(0.001)
    assert 200 == (await app.reply()).status
    assert {expected} == set(map(first_line, upstream.requests))
    assert len(asked) == len(upstream.requests)


async def test_http_1_2_is_spoken_to_as_1_1(line: tuple[App, Upstream]) -> None:
    app, upstream = line
    for version in ("1.2", "1.9", "1.1"):
        reply = await app.ask(f"POST /u/x HTTP/{version}\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi")
        assert (200, None) == (reply.status, reply.get("connection"))
    assert ["POST /x HTTP/1.1"] * 3 == list(map(first_line, upstream.requests))


async def test_several_in_one_piece_are_answered_as_far_as_they_can_be_told_apart(line: tuple[App, Upstream]) -> None:
    """Where the next one begins is only known for sure when it begins a piece."""
    app, upstream = line
    await app.send(PLAIN + GET + WITH_BODY)
    assert [200, 200, 501] == [(await app.reply()).status for _ in range(3)]
    assert await app.closed()
    assert ["LIST /secret HTTP/1.1", "GET /x HTTP/1.1"] == list(map(first_line, upstream.requests))


@pytest.mark.parametrize("first", [GET, PLAIN, WITH_BODY, CHUNKED])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
async def test_the_end_of_one_that_was_cut_is_never_taken_for_a_request(
    line: tuple[App, Upstream], first: str, cut: int
) -> None:
    """`XLIST` behind another request and cut after its first letters must not become `LIST`."""
    app, upstream = line
    second = PLAIN.replace("LIST", "XLIST")
    await app.send(first + second[:cut])
    assert 200 == (await app.reply()).status
    await app.send(second[cut:])
    assert (501, True) == ((await app.reply()).status, await app.closed())
    assert 1 == len(upstream.requests)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("list\x01 /u HTTP/1.1\r\nHost: s\r\n\r\n", 501),
        ("LI(ST /u HTTP/1.1\r\nHost: s\r\n\r\n", 501),
        ("LIST  /u HTTP/1.1\r\nHost: s\r\n\r\n", 501),
        ("LIST /u  HTTP/1.1\r\nHost: s\r\n\r\n", 501),
        ("LIST /u HTTP/1.1 \r\nHost: s\r\n\r\n", 501),
        ("LIST /u HTTP/2.0\r\nHost: s\r\n\r\n", 501),
        ("LIST /u\r\nHost: s\r\n\r\n", 501),
        ("LIST /u HTTP/1.1\nHost: s\n\n", 501),
        ("LIST /u\x01 HTTP/1.1\r\nHost: s\r\n\r\n", 400),
        ("LIST /u HTTP/1.1\r\nHost : s\r\n\r\n", 400),
        ("LIST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        ("LIST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("connect /u HTTP/1.1\r\nHost: s\r\n\r\n", 501),
        ("Get /u HTTP/1.1\r\nHost: s\r\n\r\n", 501),
        ("L" * 65 + " /u HTTP/1.1\r\nHost: s\r\n\r\n", 501),
        ("GET /u HTTP/1.10\r\nHost: s\r\n\r\n", 400),
        ("GET /u HTTP/2.1\r\nHost: s\r\n\r\n", 505),
    ],
)
async def test_what_is_no_request_line_stays_refused(line: tuple[App, Upstream], asked: str, status: int) -> None:
    app, upstream = line
    await app.send(asked)
    assert (status, True, []) == ((await app.reply()).status, await app.closed(), upstream.requests)


async def test_one_that_may_have_been_executed_is_not_sent_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(reset_after_request)
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    assert 502 == (await (await sidecar.app()).ask(PLAIN)).status
    await until(lambda: len(ended(sidecar)) == 1)
    assert ("LIST", "not_retryable", 1) == (ended(sidecar)[0].method, ended(sidecar)[0].outcome, len(upstream.requests))


PADDED = ["5 ", "5\t", "0005  \t", "5 ;a", "5\t;a=b;c", '5 ;a="b; c"']


@pytest.mark.parametrize("size", PADDED)
async def test_whitespace_behind_a_chunk_size_is_read_over_in_both_directions(
    start_sidecar: Starter, start_upstream: UpstreamStarter, size: str
) -> None:
    body = f"{size}\r\nhello\r\n0 \r\n\r\n".encode()

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    head = b"POST /u/x HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n"
    for pieces in ([head + body], [head, *(bytes([byte]) for byte in body)]):
        for piece in pieces:
            await app.send(piece)
            await asyncio.sleep(0.001)
        assert (200, b"hello", True) == ((reply := await app.reply()).status, reply.body, reply.complete)
    assert ([b"hello"] * 2, 1) == (upstream.bodies, upstream.connections)


@pytest.mark.parametrize("size", ["5 5", " 5", "5 x", "5 \n", "\t5", "5\x0b", "5 \r", "5  0"])
async def test_anything_else_about_a_size_is_refused_in_both_directions(
    start_sidecar: Starter, start_upstream: UpstreamStarter, size: str
) -> None:
    body = f"{size}\r\nhello\r\n0\r\n\r\n".encode()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream = await start_upstream(always(head + body))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "policy": "once"}})
    reply = await (await sidecar.app()).ask(GET)
    assert reply.status == 502 or not reply.complete
    head = b"POST /u/x HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert 400 == (await (await sidecar.app()).ask(head + body)).status
