"""Extensions of chunks are read over in both directions, and what is none of them stays the parser's to refuse."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.chunks import ChunkLines
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import Talk, Upstream, always

CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
POST = b"POST /u/x HTTP/1.1\r\nHost: s\r\n" + CHUNKED
ANSWER = b"HTTP/1.1 200 OK\r\n" + CHUNKED
GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"

EXTENDED = [
    "5; a=b",
    "5;a = b",
    "5 ;\ta\t=\tb",
    '0005 ; a = "b;\\" c" ; d',
    "5; a; b; c",
    '5; a="\xff\t"',
    "5;a;b ;c",
    '5;a="0\\\\"; b',
]
NO_EXTENSION = [
    "5; a=b ",
    "5; a b",
    "5; a=",
    "5; =b",
    "5; ",
    "5 ; ;a",
    "5; a\x00",
    "5; a\x7f",
    "5; a\n",
    "5; a\rb",
    "5; a\r",
    "5\n; a",
    '5; a="b',
    '5; a="b" c',
    '5; a="b\\',
    "5, a",
    "0x5; a",
    "+5; a",
    "-5; a",
    "; a",
    " 5; a",
    "5_0; a",
    "5 5; a",
    "10000000000000005; a",
    "8000000000000005; a",
]


def fed(*pieces: bytes) -> bytes:
    lines = ChunkLines()
    return b"".join(map(lines.follow, pieces))


# ---- what the parser gets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", EXTENDED)
def test_a_size_line_goes_on_as_the_size_however_it_is_cut(size: str) -> None:
    body = f"{size}\r\n;a; b\r\nA ; x\r\n5; a=b\r\n01\r\n0; y\r\nX-A: 5; a\r\n\r\n5; a\r\n".encode("latin-1")
    digits = size[: 4 if size[:2] == "00" else 1]
    expected = f"{digits}\r\n;a; b\r\nA\r\n5; a=b\r\n01\r\n0\r\nX-A: 5; a\r\n\r\n5; a\r\n".encode()
    assert expected == fed(body) == fed(*(bytes([byte]) for byte in body))
    for cut in range(len(body)):
        assert expected == fed(body[:cut], body[cut:]), cut


@pytest.mark.parametrize("size", NO_EXTENSION)
def test_from_a_line_that_is_not_well_formed_on_nothing_is_changed(size: str) -> None:
    wrong = f"{size}\r\nhello\r\n0; a\r\n\r\n".encode("latin-1")
    body = b"1; a\r\nx\r\n" + wrong
    assert b"1\r\nx\r\n" + wrong == fed(body) == fed(*(bytes([byte]) for byte in body))


def test_data_is_never_kept_back_and_a_size_only_until_its_line_ends() -> None:
    lines = ChunkLines()
    whole = b"5\r\nhello\r\n"
    assert whole is lines.follow(whole)
    assert [b"", b"", b"5\r\n", b"he", b"llo\r", b"\n"] == [
        lines.follow(piece) for piece in (b"5", b" ;a\r", b"\n", b"he", b"llo\r", b"\n")
    ]
    assert b"zz" == lines.follow(b"zz")


def test_behind_a_hundred_chunks_without_any_no_extension_is_expected() -> None:
    plain, extended = b"1\r\nx\r\n", b"1; a\r\nx\r\n"
    read_over = plain * 99 + plain + plain * 99 + plain
    assert read_over == fed(plain * 99 + extended + plain * 99 + extended)
    assert plain * 100 + extended == fed(plain * 100 + extended) == fed(*[plain] * 100, extended)


def test_a_line_that_does_not_end_is_not_kept_for_long() -> None:
    lines = ChunkLines()
    given = b"".join(lines.follow(piece) for piece in [b"5; a=", *[b"b" * 100] * 100])
    assert (b"5; a=" + b"b" * 10_000, b"") == (given, lines.begun)
    long = b"5; a=" + b"b" * 5000 + b"\r\n"
    assert long == fed(long)


# ---- through the sidecar -----------------------------------------------------------------------------------------


@pytest.fixture
def pieces() -> list[bytes]:
    return []


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter, pieces: list[bytes]) -> Upstream:
    """Answers with `pieces`, one after the other."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            for piece in list(pieces):
                await talk.send(piece)
                await asyncio.sleep(0.002)

    return await start_upstream(script)


def in_pieces(head: bytes, body: bytes) -> list[list[bytes]]:
    """Whole, at every place near the end of the head, by lines, and byte by byte."""
    both, at = head + body, len(head)
    cuts = [[both[:cut], both[cut:]] for cut in range(at - 5, at + 12)]
    lines = [line + b"\n" for line in both.split(b"\n")[:-1]]
    return [[both], *cuts, lines, [both[at : at + 1] for at in range(len(both))]]


@pytest.mark.parametrize("size", EXTENDED)
async def test_extensions_are_read_over_in_both_directions(
    start_sidecar: Starter, upstream: Upstream, pieces: list[bytes], size: str
) -> None:
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    body = f"3\r\n5; \r\n{size}\r\nhello\r\n0 ; z\r\nX-T: 1; a\r\n\r\n".encode("latin-1")
    asked, answers = in_pieces(POST, body), in_pieces(ANSWER, body)
    for sent, answered in zip(asked, answers, strict=True):
        pieces[:] = answered
        for piece in sent:
            await app.send(piece)
            await asyncio.sleep(0.001)
        reply = await app.reply()
        assert (200, b"5; hello", True) == (reply.status, reply.body, reply.complete), (sent, answered)
    assert ({b"5; hello"}, len(asked), 1) == (set(upstream.bodies), len(upstream.bodies), upstream.connections)
    assert {"first_try": len(asked)} == sidecar.outcomes


@pytest.mark.parametrize("size", NO_EXTENSION)
@pytest.mark.parametrize("apart", [False, True])
async def test_anything_else_is_refused_in_both_directions(
    start_sidecar: Starter, upstream: Upstream, pieces: list[bytes], size: str, apart: bool
) -> None:
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "policy": "once"}})
    body = f"{size}\r\nhello\r\n0\r\n\r\n".encode("latin-1")
    pieces[:] = [ANSWER, body] if apart else [ANSWER + body]
    reply = await (await sidecar.app()).ask(GET)
    assert reply.status == 502 or not reply.complete
    app = await sidecar.app()
    for piece in [POST, body] if apart else [POST + body]:
        await app.send(piece)
        await asyncio.sleep(0.002)
    assert (400, True) == ((await app.reply()).status, await app.closed())
    assert not any(upstream.bodies[1:])


@pytest.mark.parametrize("interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 E\r\nLink: <a>\r\n\r\n" * 3])
async def test_interim_answers_may_stand_in_front(
    start_sidecar: Starter, upstream: Upstream, pieces: list[bytes], interim: bytes
) -> None:
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    for pieces[:] in in_pieces(interim + ANSWER, b"5; a\r\nhello\r\n0; b\r\n\r\n"):
        await app.send(GET)
        while (reply := await app.reply()).status < 200:
            pass
        assert (200, b"hello", True) == (reply.status, reply.body, reply.complete), pieces


async def test_what_lies_behind_an_answer_with_extensions_reaches_nobody(
    start_sidecar: Starter, upstream: Upstream, pieces: list[bytes]
) -> None:
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    body, forged = b"5; a\r\nhello\r\n0; b\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    ways = [[ANSWER + body + forged], [ANSWER, body + forged], [ANSWER + body[:9], body[9:] + forged]]
    for pieces[:] in ways:
        reply = await app.ask(GET)
        assert (b"hello", True) == (reply.body, reply.complete)
    assert len(ways) == upstream.connections, "each of them was the last answer of its connection"


@pytest.mark.parametrize("method", ["POST", "BREW"])
async def test_requests_behind_one_with_extensions_are_requests_of_their_own(
    start_sidecar: Starter, upstream: Upstream, pieces: list[bytes], method: str
) -> None:
    pieces[:] = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    body = b"2; a\r\nhi\r\n0; b\r\n\r\n"
    await app.send(POST.replace(b"POST", method.encode()) + body + GET.encode() * 2)
    assert [200] * 3 == [(await app.reply()).status for _ in range(3)]
    assert [b"hi", b"", b""] == upstream.bodies
    # Where its body begins is only known where its head begins a piece.
    await app.send(GET.encode() + POST + body)
    assert [200, 400] == [(await app.reply()).status for _ in range(2)]
    assert await app.closed()


async def test_nothing_is_read_behind_the_last_request(
    start_sidecar: Starter, upstream: Upstream, pieces: list[bytes]
) -> None:
    pieces[:] = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    last = POST.replace(b"Host", b"Connection: close\r\nHost")
    await app.send(last + b"2; a\r\nhi\r\n0; b\r\n\r\n" + GET.encode())
    assert (200, True, [b"hi"]) == ((await app.reply()).status, await app.closed(), upstream.bodies)


async def test_a_size_line_that_never_ends_is_bounded(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    endless = b"5; a=" + b"b" * 200_000
    upstream = await start_upstream(always(ANSWER + endless))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "policy": "once"}})
    reply = await (await sidecar.app()).ask(GET)
    assert reply.status == 502 or not reply.complete
    assert 400 <= (await (await sidecar.app()).ask(POST + endless)).status < 500
