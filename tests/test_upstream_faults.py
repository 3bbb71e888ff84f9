"""Whatever an upstream does wrong, the app never sees an answer that looks complete and is not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.faults import in_turn, last_session
from tests.doubles.upstream import Script, Talk, Upstream, always, answer

ONE_ATTEMPT = True

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
QUICK = {"default": {"attempt_timeout": 0.3}}
SMALL = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\nabc\r\n0\r\n\r\n"
LARGE_BODY = bytes(range(256)) * 800
LARGE = answer(LARGE_BODY)

Route = Callable[..., dict[str, Any]]


def cut_at(data: bytes, positions: Iterator[int], end: Callable[[Talk], None] = Talk.close) -> Script:
    """Each connection answers one request with the bytes up to the next position, then ends."""

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(data[: next(positions)])
        end(talk)

    return script


async def seen(app: App) -> Reply | None:
    """What the app gets; None when the connection ended before a whole head."""
    try:
        return await app.reply()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def assert_error(reply: Reply, status: int, code: str) -> None:
    assert (status, code) == (reply.status, reply.json["error_code"]), reply.body
    assert reply.complete


# ---- truncation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Talk.close, Talk.reset], ids=["closed", "reset"])
async def test_a_small_answer_cut_at_any_byte_is_a_502(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, end: Callable[[Talk], None]
) -> None:
    upstream = await start_upstream(cut_at(SMALL, iter(range(len(SMALL))), end))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    for _ in range(len(SMALL)):
        assert_error(await app.ask(GET), 502, "CONNECTION_RESET")
    assert len(SMALL) == len(upstream.requests) == upstream.connections
    assert {"exhausted": len(SMALL)} == sidecar.outcomes


@pytest.mark.parametrize("end", [Talk.close, Talk.reset], ids=["closed", "reset"])
async def test_a_chunked_answer_cut_at_any_byte_never_looks_complete(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, end: Callable[[Talk], None]
) -> None:
    head_ends = CHUNKED.index(b"\r\n\r\n") + 4
    upstream = await start_upstream(cut_at(CHUNKED, iter(range(len(CHUNKED))), end))
    sidecar = await start_sidecar(upstreams=route(upstream))
    for position in range(len(CHUNKED)):
        app = await sidecar.app()
        await app.send(GET)
        reply = await seen(app)
        if reply is not None and reply.status == 502:
            # A reset overtakes what was sent before it, so the head may be lost although it was sent.
            assert position < head_ends or end is Talk.reset
            assert_error(reply, 502, "CONNECTION_RESET")
        else:
            assert position >= head_ends
            assert reply is None or not reply.complete, position
            assert await app.closed()
    outcomes = sidecar.outcomes
    assert len(CHUNKED) == outcomes.get("exhausted", 0) + outcomes.get("failed_streaming", 0)


@pytest.mark.parametrize("position", [0, 1, 65_536, 100_000, len(LARGE_BODY) - 1])
async def test_a_large_answer_cut_in_its_body_is_broken_off(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, position: int
) -> None:
    cut = len(LARGE) - len(LARGE_BODY) + position
    upstream = await start_upstream(cut_at(LARGE, iter([cut])))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    reply = await seen(app)
    assert reply is None or (200, False) == (reply.status, reply.complete)
    assert reply is None or LARGE_BODY.startswith(reply.body)
    assert await app.closed()
    assert {"failed_streaming": 1} == sidecar.outcomes


async def test_a_large_answer_cut_in_its_head_is_a_502(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(cut_at(LARGE, iter([20])))
    sidecar = await start_sidecar(upstreams=route(upstream))
    assert_error(await (await sidecar.app()).ask(GET), 502, "CONNECTION_RESET")


async def test_an_http_1_0_app_gets_a_reset_because_a_plain_end_would_look_complete(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(CHUNKED[:-5])
        await go_on.wait()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send("GET /u/x HTTP/1.0\r\nHost: s\r\n\r\n")
    head = await app.reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"helloabc" == await app.reader.readexactly(8)
    go_on.set()
    with pytest.raises(ConnectionResetError):
        await app.reader.read()
    assert {"failed_streaming": 1} == sidecar.outcomes


async def test_a_body_longer_than_announced_ends_where_it_was_announced(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(always(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello, world"))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    for _ in range(2):
        assert b"hello" == (await app.ask(GET)).body
    assert 2 == upstream.connections  # what follows the answer is not taken for the next one


async def test_an_answer_that_ends_with_the_connection_is_complete_when_the_end_is_clean(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(cut_at(b"HTTP/1.1 200 OK\r\n\r\nall of it", iter([28, 28])))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    reply = await app.ask(GET)
    assert (200, b"all of it", True) == (reply.status, reply.body, reply.complete)
    assert "chunked" == reply.get("transfer-encoding")
    assert b"all of it" == (await app.ask(GET)).body


async def test_an_answer_that_ends_with_a_reset_is_broken_off(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\n\r\nsome of it")
        await go_on.wait()
        talk.reset()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    await app.reader.readuntil(b"some of it")
    go_on.set()
    assert b"0\r\n\r\n" not in await rest_of(app)
    assert {"failed_streaming": 1} == sidecar.outcomes


async def rest_of(app: App) -> bytes:
    """Everything up to the end of the connection, however it ends."""
    found = b""
    try:
        while data := await asyncio.wait_for(app.reader.read(65_536), 10):
            found += data
    except ConnectionError:
        pass
    return found


# ---- garbage -----------------------------------------------------------------------------------------------------

INVALID = {
    "not http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "binary": bytes(range(256)),
    "http/2 preface of a server": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18),
    "status 099": b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
    "status 000": b"HTTP/1.1 000 Low\r\nContent-Length: 0\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\nContent-Length: 0\r\n\r\n",
    "status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "version 2.0": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "version 0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    "version 1.7": b"HTTP/1.7 200 OK\r\nContent-Length: 0\r\n\r\n",
    "version 2.0 behind an interim answer": b"HTTP/1.1 103 E\r\n\r\nHTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "an interim answer of version 2.0": b"HTTP/2.0 103 E\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "an interim answer with a body": b"HTTP/1.1 103 E\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n",
    "unknown coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nxx",
    "coding before chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding behind chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "two codings": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding and length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok",
    "chunked and length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "length and chunked": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked in version 1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "one length twice": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok",
    "a signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
    "a length beyond 64 bits": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nok",
    "an empty length": b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\nok",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
    "a NUL in a value": b"HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 2\r\n\r\nok",
    "a lone CR in a value": b"HTTP/1.1 200 OK\r\nX-A: a\rb\r\nContent-Length: 2\r\n\r\nok",
    "a line without a colon": b"HTTP/1.1 200 OK\r\nnonsense\r\nContent-Length: 2\r\n\r\nok",
    "one field larger than the head may be": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 8192 + b"\r\n\r\n",
    "many fields larger than the head may be": b"HTTP/1.1 200 OK\r\n" + b"X-A: aaaaaaaaaa\r\n" * 512 + b"\r\n",
    "a switch of protocols nobody asked for": b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID)
async def test_an_invalid_answer_is_a_502_and_its_connection_is_not_used_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, data: bytes
) -> None:
    upstream = await start_upstream(always(data))
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"head_bytes": 4096}, policies=QUICK)
    app = await sidecar.app()
    for _ in range(2):
        reply = await app.ask(GET)
        while reply.status == 103:
            reply = await app.reply()
        assert_error(reply, 502, "PROTOCOL_ERROR")
    assert 2 == upstream.connections
    assert {"exhausted": 2} == sidecar.outcomes


@pytest.mark.parametrize("reason", ["a\0b", "\x1b]0;owned\x07", "O\x7fK", "\x01"])
async def test_a_reason_phrase_with_control_characters_is_replaced_by_the_usual_one(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, reason: str
) -> None:
    upstream = await start_upstream(in_turn(*(answer(b"ok", f"{status} {reason}") for status in (200, 299))))
    app = await (await start_sidecar(upstreams=route(upstream))).app()
    replies = [await app.ask(GET), await app.ask(GET)]
    assert [(200, "OK", b"ok"), (299, "", b"ok")] == [(reply.status, reply.reason, reply.body) for reply in replies]


@pytest.mark.parametrize("status", [600, 625, 777, 999])
async def test_a_status_of_no_class_passes_as_it_is_and_is_a_server_error(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, status: int
) -> None:
    upstream = await start_upstream(always(answer(b"go away", f"{status} Denied", "X-A: b")))
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"once": {"max_attempts": 2, "base_delay": 0}})
    reply = await (await sidecar.app()).ask(GET)
    assert (status, "Denied", b"go away", "b") == (reply.status, reply.reason, reply.body, reply.get("x-a"))
    assert ("2", "exhausted") == (reply.get("x-sidecar-attempts"), reply.get("x-sidecar-outcome"))
    session = await last_session(sidecar)
    assert ["UPSTREAM_ERROR"] * 2 == [attempt.code for attempt in session.attempts]
    assert 1 == upstream.connections


@pytest.mark.parametrize("name", ["status 099", "version 2.0", "chunked and length", "two lengths", "unknown coding"])
async def test_an_invalid_answer_is_found_out_when_it_comes_byte_by_byte(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, name: str
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        for byte in INVALID[name]:
            await talk.send(bytes([byte]))
            await asyncio.sleep(0)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    assert_error(await (await sidecar.app()).ask(GET), 502, "PROTOCOL_ERROR")


@pytest.mark.parametrize(
    "piece", [b"X-A: b\r\n", b"a", b"HTTP/1.1 103 Early\r\nLink: <a>\r\n\r\n"], ids=["fields", "one field", "interim"]
)
async def test_a_head_without_an_end_is_a_502(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, piece: bytes
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nX-A: " if not piece.startswith(b"HTTP") else b"")
        while True:
            await talk.send(piece * 100)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"head_bytes": 16_384})
    app = await sidecar.app()
    reply = await app.ask(GET)
    while reply.status == 103:
        reply = await app.reply()
    assert_error(reply, 502, "PROTOCOL_ERROR")
    assert "head_bytes" in reply.json["message"]


@pytest.mark.parametrize(
    "bad", [b"zz\r\n", b"5\r\nhelloXX", b"-1\r\n", b"5 5\r\n", b"fffffffffffffffff\r\n", b"\0\r\n"]
)
async def test_a_bad_chunk_breaks_the_answer_off(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, bad: bytes
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await go_on.wait()
        await talk.send(bad)
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    await app.reader.readuntil(b"ok\r\n")
    go_on.set()
    assert not (await rest_of(app)).endswith(b"0\r\n\r\n")
    assert {"failed_streaming": 1} == sidecar.outcomes


# ---- no connection, no answer, no end ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Talk.close, Talk.reset], ids=["closed", "reset"])
@pytest.mark.parametrize("read", [True, False], ids=["after the request", "at once"])
async def test_a_connection_that_ends_without_an_answer_is_a_502(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, end: Callable[[Talk], None], read: bool
) -> None:
    async def script(talk: Talk) -> None:
        if read:
            await talk.read_request()
        end(talk)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    reply = await (await sidecar.app()).ask(GET)
    assert_error(reply, 502, "CONNECTION_RESET")
    assert 1 == upstream.connections
    assert "1" == reply.get("x-sidecar-attempts")


async def test_no_answer_is_a_504_after_the_attempt_timeout(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    app = await sidecar.app()
    for _ in range(2):
        assert_error(await app.ask(GET), 504, "NETWORK_TIMEOUT")
    assert 2 == upstream.connections
    assert {"exhausted": 2} == sidecar.outcomes


async def test_a_post_that_got_no_answer_is_reported_as_not_retryable(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    reply = await (await sidecar.app()).ask("POST /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi")
    assert_error(reply, 504, "NETWORK_TIMEOUT")
    assert {"not_retryable": 1} == sidecar.outcomes
    assert [b"hi"] == upstream.bodies


async def test_a_head_that_trickles_is_a_504_after_the_attempt_timeout(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await talk.send(b"X-A: b\r\n")
            await asyncio.sleep(0.02)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    assert_error(await (await sidecar.app()).ask(GET), 504, "NETWORK_TIMEOUT")


async def test_a_small_body_that_stalls_is_a_504_after_body_idle(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(SMALL[:-2])
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"body_idle": 0.3}), policies=QUICK)
    reply = await (await sidecar.app()).ask(GET)
    assert_error(reply, 504, "NETWORK_TIMEOUT")
    assert "after 3 bytes of its body" in reply.json["message"]


async def test_a_small_body_may_take_longer_than_the_attempt_timeout_while_it_moves(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        for _ in range(8):
            await talk.send(b"x")
            await asyncio.sleep(0.1)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    reply = await (await sidecar.app()).ask(GET)
    assert (200, b"xxxxxxxx") == (reply.status, reply.body)


async def test_a_streamed_body_that_stalls_is_broken_off_after_body_idle(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(LARGE[:-10])
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"body_idle": 0.3}))
    app = await sidecar.app()
    reply = await app.ask(GET)
    assert (200, False, LARGE_BODY[:-10]) == (reply.status, reply.complete, reply.body)
    assert {"failed_streaming": 1} == sidecar.outcomes


async def test_a_refused_connection_is_a_502(start_sidecar: Starter, route: Route) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        sidecar = await start_sidecar(
            upstreams={"u": {"route": "/u", "endpoints": [f"http://127.0.0.1:{unused.getsockname()[1]}"]}}
        )
        assert_error(await (await sidecar.app()).ask(GET), 502, "CONNECTION_REFUSED")
    assert {"exhausted": 1} == sidecar.outcomes


async def test_a_refused_post_is_reported_as_safe_to_send_again(start_sidecar: Starter) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        sidecar = await start_sidecar()
        app = await sidecar.app()
        port = unused.getsockname()[1]
        reply = await app.ask(f"POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi")
        assert_error(reply, 502, "CONNECTION_REFUSED")
        assert {"exhausted": 1} == sidecar.outcomes


async def unresolvable(host: str, port: int) -> list[Any]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def without_address(host: str, port: int) -> list[Any]:
    return []


@pytest.mark.parametrize("lookup", [unresolvable, without_address])
async def test_a_name_without_an_address_is_a_502(start_sidecar: Starter, lookup: Any) -> None:
    sidecar = await start_sidecar(lookup=lookup)
    app = await sidecar.app()
    reply = await app.ask("GET http://nowhere.test/ HTTP/1.1\r\nHost: nowhere.test\r\n\r\n")
    assert_error(reply, 502, "DNS_FAILURE")
    assert "nowhere.test" in reply.json["message"]
    assert {"exhausted": 1} == sidecar.outcomes


async def test_a_resolver_that_does_not_answer_is_a_failure_of_the_name(start_sidecar: Starter) -> None:
    async def silent(host: str, port: int) -> list[Any]:
        await asyncio.sleep(3600)
        return []

    hosts = {"u": {"hosts": ["slow.test"], "timeouts": {"connect": 0.2}}}
    sidecar = await start_sidecar(lookup=silent, upstreams=hosts)
    reply = await (await sidecar.app()).ask("GET http://slow.test/ HTTP/1.1\r\nHost: slow.test\r\n\r\n")
    assert_error(reply, 502, "DNS_FAILURE")
    assert "the name server has not answered" in reply.json["message"]


@pytest.fixture
def unanswering_port() -> Iterator[int]:
    """A port whose backlog is full: the kernel drops every further attempt to connect."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
        for filler in fillers:
            filler.close()


async def test_a_connection_that_takes_too_long_is_a_504(start_sidecar: Starter, unanswering_port: int) -> None:
    upstream = {"route": "/u", "endpoints": [f"http://127.0.0.1:{unanswering_port}"], "timeouts": {"connect": 0.2}}
    sidecar = await start_sidecar(upstreams={"u": upstream})
    assert_error(await (await sidecar.app()).ask(GET), 504, "CONNECT_TIMEOUT")
    assert {"exhausted": 1} == sidecar.outcomes


# ---- bytes nobody asked for --------------------------------------------------------------------------------------


async def idle_again(sidecar: Running, wanted: int) -> None:
    """Wait until the pool of `u` has this many idle connections that are still open."""
    pools = sidecar.proxy.directory.configured["u"].pools
    for _ in range(200):
        if wanted == sum(not c.closed for pool in pools.values() for c in pool._idle):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the connection did not get there")


async def test_unsolicited_bytes_on_an_idle_connection_end_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    unsolicited = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(answer(b"mine %d" % talk.upstream.connections))
        await unsolicited.wait()
        await talk.send(answer(b"not yours"))
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    assert b"mine 1" == (await app.ask(GET)).body
    unsolicited.set()
    await idle_again(sidecar, 0)
    assert b"mine 2" == (await app.ask(GET)).body
    assert 2 == upstream.connections


BEHIND = {
    "HEAD": ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"hello"),
    "HEAD with a second answer": ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", answer(b"poison")),
    "204": ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", b"hello"),
    "204 with a second answer": ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", answer(b"poison")),
    "204 with the beginning of one": ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1."),
    "304": ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"hello"),
    "304 with a second answer": ("GET", b"HTTP/1.1 304 Not Modified\r\n\r\n", answer(b"poison")),
    "200 with a second answer": ("GET", answer(b"ok"), answer(b"poison")),
    "200 with the beginning of one": ("GET", answer(b"ok"), b"HTTP/1."),
    "chunked with a second answer": ("GET", CHUNKED, answer(b"poison")),
    "chunked with the beginning of one": ("GET", CHUNKED, b"HT"),
}


@pytest.mark.parametrize(("method", "proper", "behind"), BEHIND.values(), ids=BEHIND)
async def test_bytes_behind_an_answer_never_reach_the_next_request(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, method: str, proper: bytes, behind: bytes
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        if talk.upstream.connections == 1:
            await talk.send(proper + behind)
            await talk.read_request()
        await talk.send(answer(b"fresh"))
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    app = await sidecar.app()
    first = await app.ask(f"{method} /u/x HTTP/1.1\r\nHost: s\r\n\r\n", to_head=method == "HEAD")
    assert first.complete
    assert proper.startswith(f"HTTP/1.1 {first.status} ".encode())
    second = await app.ask(GET)
    assert (200, b"fresh") == (second.status, second.body)
    assert 2 == upstream.connections


async def test_a_head_request_and_a_304_keep_the_announced_length_and_the_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(always(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    for _ in range(3):
        reply = await app.ask("HEAD /u/x HTTP/1.1\r\nHost: s\r\n\r\n", to_head=True)
        assert (200, "500") == (reply.status, reply.get("content-length"))
    assert 1 == upstream.connections


async def test_after_every_fault_nothing_is_left_in_flight(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    positions = iter(range(0, len(CHUNKED), 7))
    upstream: Upstream = await start_upstream(cut_at(CHUNKED, positions))
    sidecar = await start_sidecar(upstreams=route(upstream))
    for _ in range(0, len(CHUNKED), 7):
        app = await sidecar.app()
        await app.send(GET)
        await seen(app)
        app.close()
    await asyncio.sleep(0.05)
    state = sidecar.proxy.directory.configured["u"]
    assert 0 == state.in_flight
    assert [(0, set())] == [(pool.idle, pool.active) for pool in state.pools.values()]
    assert set() == sidecar.proxy.ticker.watched
