"""Tunnels: CONNECT and WebSocket, byte for byte, to the last byte, within their limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sidecar.clock import Ticker
from sidecar.turn import Turn
from sidecar.upstream.connection import UpstreamConnection
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.faults import QUICK_POLICIES, refusing_port, unanswering_port
from tests.doubles.upstream import Talk, Upstream

HANDSHAKE = (
    "GET {url}/chat HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n"
)


async def mirror(talk: Talk) -> None:
    """Send everything back until the other side has finished, then finish too."""
    while data := await talk.reader.read(65536):
        await talk.send(data)


async def wait_until(true: Callable[[], bool], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
def tunnelling(start_sidecar: Starter, start_upstream: UpstreamStarter) -> Callable[..., Awaitable[Any]]:
    """A sidecar that may CONNECT to an upstream with this script."""

    async def start(script: Any, **keys: Any) -> tuple[Running, Upstream]:
        upstream = await start_upstream(script)
        sidecar = await start_sidecar(egress={"connect_ports": [upstream.port]}, **keys)
        return sidecar, upstream

    return start


async def connect(sidecar: Running, upstream: Upstream, early: bytes = b"") -> tuple[App, Reply]:
    app = await sidecar.app()
    target = f"127.0.0.1:{upstream.port}"
    await app.send(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode() + early)
    return app, await app.reply(to_head=True)


async def exactly(app: App, size: int) -> bytes:
    return await asyncio.wait_for(app.reader.readexactly(size), 10)


async def rest(app: App) -> bytes:
    return await asyncio.wait_for(app.reader.read(), 10)


# ---- bytes -------------------------------------------------------------------------------------------------------


async def test_connect_opens_a_tunnel_that_carries_bytes_both_ways(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror)
    app, reply = await connect(sidecar, upstream)
    assert (200, "Connection established") == (reply.status, reply.reason)
    for data in (b"\x16\x03\x01 hello", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256))):
        await app.send(data)
        assert data == await exactly(app, len(data))


async def test_the_200_of_a_connect_has_no_framing_and_says_which_session_it_is(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror)
    _, reply = await connect(sidecar, upstream)
    assert [] == reply.all("content-length") + reply.all("transfer-encoding") + reply.all("connection")
    assert "tunnelled" == reply.get("x-sidecar-outcome")
    assert f"127.0.0.1:{upstream.port}" == reply.get("x-sidecar-upstream")
    assert reply.get("x-sidecar-session")


@pytest.mark.parametrize("size", [1, 5_000, 300_000])
async def test_bytes_sent_right_behind_the_connect_arrive_first_and_complete(tunnelling: Any, size: int) -> None:
    sidecar, upstream = await tunnelling(mirror)
    early = bytes(i % 251 for i in range(size))
    app, reply = await connect(sidecar, upstream, early)
    assert 200 == reply.status
    assert early == await exactly(app, size)
    await app.send(b"later")
    assert b"later" == await exactly(app, 5)


async def test_an_upstream_may_speak_first(tunnelling: Any) -> None:
    async def greet(talk: Talk) -> None:
        await talk.send(b"220 ready\r\n")
        await mirror(talk)

    sidecar, upstream = await tunnelling(greet)
    app, _ = await connect(sidecar, upstream)
    assert b"220 ready\r\n" == await exactly(app, 11)


async def test_an_upstream_that_only_listens_from_the_start_still_gets_the_bytes(tunnelling: Any) -> None:
    got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def only_listen(talk: Talk) -> None:
        talk.writer.write_eof()
        got.set_result(await talk.reader.read())

    sidecar, upstream = await tunnelling(only_listen)
    app, _ = await connect(sidecar, upstream)
    assert b"" == await rest(app)
    await app.send(b"for your ears")
    app.writer.write_eof()
    assert b"for your ears" == await asyncio.wait_for(got, 5)


async def test_frames_that_come_with_the_101_are_not_lost_however_many(tunnelling: Any) -> None:
    frames = bytes(range(250)) * 8_000  # more than one read brings

    async def switch(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(SWITCHED + frames)
        await mirror(talk)

    sidecar, upstream = await tunnelling(switch)
    for _ in range(5):
        app = await sidecar.app()
        assert 101 == (await app.ask(HANDSHAKE.format(url=upstream.url))).status
        assert frames == await exactly(app, len(frames))


async def test_a_connection_holds_what_comes_between_the_101_and_its_tunnel() -> None:
    loop = asyncio.get_running_loop()
    connection = UpstreamConnection(
        loop, Ticker(loop), Turn(loop), head_limit=65_536, buffer_limit=65_536, body_idle=60, on_surplus=list
    )
    woken: list[bool] = []
    owner = SimpleNamespace(wake=lambda: woken.append(connection.switched))
    connection.begin(owner, bodyless=False, deadline=loop.time() + 10)
    for arrived in (SWITCHED + b"with it, ", b"behind it, ", b"later"):
        connection.data_received(arrived)
    assert ([True], b"with it, behind it, later") == (woken, connection.tail)
    connection.finish()


async def test_when_the_app_has_finished_sending_the_upstream_may_still_answer(tunnelling: Any) -> None:
    got: list[bytes] = []

    async def answer_after_the_end(talk: Talk) -> None:
        got.append(await talk.reader.read())
        await talk.send(b"all received")

    sidecar, upstream = await tunnelling(answer_after_the_end)
    app, _ = await connect(sidecar, upstream)
    await app.send(b"everything")
    app.writer.write_eof()
    assert b"all received" == await rest(app)
    assert [b"everything"] == got


async def test_when_the_upstream_has_finished_sending_the_app_may_still_send(tunnelling: Any) -> None:
    got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def finish_first(talk: Talk) -> None:
        await talk.send(b"my last word")
        talk.writer.write_eof()
        got.set_result(await talk.reader.read())

    sidecar, upstream = await tunnelling(finish_first)
    app, _ = await connect(sidecar, upstream)
    assert b"my last word" == await rest(app)
    await app.send(b"and mine, later")
    app.writer.write_eof()
    assert b"and mine, later" == await asyncio.wait_for(got, 5)
    await wait_until(lambda: not sidecar.proxy.tunnels)


async def test_what_an_upstream_sent_before_it_closed_reaches_a_slow_app(tunnelling: Any) -> None:
    size = 3_000_000

    async def send_and_leave(talk: Talk) -> None:
        await talk.send(b"x" * size)
        talk.close()

    sidecar, upstream = await tunnelling(send_and_leave)
    app, _ = await connect(sidecar, upstream)
    await asyncio.sleep(0.1)
    assert size == len(await rest(app))
    app.close()
    await wait_until(lambda: not sidecar.proxy.tunnels)


async def test_what_an_app_sent_before_it_closed_reaches_a_slow_upstream(tunnelling: Any) -> None:
    size = 3_000_000
    got: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def read_slowly(talk: Talk) -> None:
        await asyncio.sleep(0.1)
        got.set_result(len(await talk.reader.read()))

    sidecar, upstream = await tunnelling(read_slowly)
    app, _ = await connect(sidecar, upstream)
    await app.send(b"x" * size)
    app.close()
    assert size == await asyncio.wait_for(got, 5)


async def test_an_upstream_that_resets_ends_the_tunnel_on_both_sides(tunnelling: Any) -> None:
    async def reset(talk: Talk) -> None:
        await talk.reader.readexactly(2)
        talk.reset()

    sidecar, upstream = await tunnelling(reset)
    app, _ = await connect(sidecar, upstream)
    await app.send(b"hi")
    assert await app.closed()
    await wait_until(lambda: not sidecar.proxy.tunnels)
    assert {"tunnelled": 1} == sidecar.outcomes


@pytest.mark.parametrize("fast", ["upstream", "app"])
async def test_a_side_that_does_not_read_stops_the_other_instead_of_filling_memory(tunnelling: Any, fast: str) -> None:
    sent = 0

    async def pour(write: Callable[[bytes], Awaitable[None]]) -> None:
        nonlocal sent
        for _ in range(64 * 16):  # 64 MiB unless it is stopped
            await write(b"x" * 65_536)
            sent += 65_536

    async def script(talk: Talk) -> None:
        if fast == "upstream":
            await pour(talk.send)
        else:
            await asyncio.sleep(60)

    sidecar, upstream = await tunnelling(script)
    app, _ = await connect(sidecar, upstream)
    if fast == "upstream":
        app.writer.transport.pause_reading()
        pouring = None
    else:
        pouring = asyncio.create_task(pour(app.send))
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.2)
    (tunnel,) = sidecar.proxy.tunnels
    held = [side.transport.get_write_buffer_size() for side in (tunnel._client, tunnel._upstream)]
    assert max(held) < 1_000_000
    assert sent < 32 * 2**20
    if pouring is not None:
        pouring.cancel()


# ---- targets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["host.test", "host.test:", "host.test:0", "host.test:65536", "host.test:x", ":443", "u:p@host.test:443"]
)
async def test_a_connect_without_a_valid_host_and_port_is_malformed(start_sidecar: Starter, target: str) -> None:
    sidecar = await start_sidecar()
    app = await sidecar.app()
    reply = await app.ask(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert await app.closed()
    assert {} == sidecar.outcomes


async def test_a_connect_to_a_port_that_is_not_listed_is_denied(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(mirror)
    sidecar = await start_sidecar()
    _, reply = await _refused(sidecar, upstream)
    assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])
    assert "egress.connect_ports" in reply.json["message"]
    assert 0 == upstream.connections


async def test_the_ports_of_configured_upstreams_may_be_connected_to(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(mirror)
    sidecar = await start_sidecar(upstreams={"mine": {"hosts": [f"127.0.0.1:{upstream.port}"]}})
    _, reply = await connect(sidecar, upstream)
    assert (200, "mine") == (reply.status, reply.get("x-sidecar-upstream"))


async def test_a_connect_that_nobody_accepts_gets_a_json_502(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror)
    await upstream.stop()
    app, reply = await _refused(sidecar, upstream)
    assert (502, "CONNECTION_REFUSED") == (reply.status, reply.json["error_code"])
    assert {"exhausted": 1} == sidecar.outcomes
    assert 0 == _in_flight(sidecar)
    assert await app.closed()


async def _refused(sidecar: Running, upstream: Upstream) -> tuple[App, Reply]:
    app = await sidecar.app()
    return app, await app.ask(f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: x\r\n\r\n")


def _in_flight(sidecar: Running) -> int:
    return sum(state.in_flight for state in sidecar.proxy.directory.states())


# ---- limits, counting, drain -------------------------------------------------------------------------------------


async def test_more_tunnels_than_the_limit_are_refused_until_one_ends(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror, limits={"tunnels": 2})
    first, _ = await connect(sidecar, upstream)
    await connect(sidecar, upstream)
    _, reply = await _refused(sidecar, upstream)
    assert (503, "OVERLOADED", "1") == (reply.status, reply.json["error_code"], reply.get("retry-after"))
    first.close()
    await wait_until(lambda: len(sidecar.proxy.tunnels) == 1)
    assert 200 == (await connect(sidecar, upstream))[1].status


async def test_tunnels_asked_for_at_the_same_moment_do_not_pass_the_limit_together(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror, limits={"tunnels": 2})
    replies = await asyncio.gather(*(connect(sidecar, upstream) for _ in range(6)))
    assert [200, 200, 503, 503, 503, 503] == sorted(reply.status for _, reply in replies)
    assert 2 == len(sidecar.proxy.tunnels) == _in_flight(sidecar)


async def test_a_websocket_counts_as_a_tunnel_and_carries_bytes(tunnelling: Any) -> None:
    async def switch(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(SWITCHED + b"first frame")
        await mirror(talk)

    sidecar, upstream = await tunnelling(switch, limits={"tunnels": 1})
    app = await sidecar.app()
    await app.send(HANDSHAKE.format(url=upstream.url).encode() + b"early frame")
    reply = await app.reply()
    assert (101, "websocket", "x") == (reply.status, reply.get("upgrade"), reply.get("sec-websocket-accept"))
    assert b"first frameearly frame" == await exactly(app, 22)
    assert 1 == len(sidecar.proxy.tunnels)
    for asked in (f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: x\r\n\r\n", HANDSHAKE.format(url=upstream.url)):
        refused = await (await sidecar.app()).ask(asked)
        assert (503, "OVERLOADED") == (refused.status, refused.json["error_code"])
    assert 1 == len(upstream.requests)
    app.close()
    await wait_until(lambda: not sidecar.proxy.tunnels)
    assert {"tunnelled": 1, "denied": 2} == sidecar.outcomes
    assert 0 == _in_flight(sidecar)


async def test_a_tunnel_is_one_session_with_its_bytes_when_it_has_ended(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror)
    app, _ = await connect(sidecar, upstream, early=b"12345")
    await app.send(b"678")
    assert b"12345678" == await exactly(app, 8)
    assert {} == sidecar.outcomes
    assert 1 == _in_flight(sidecar)
    app.writer.write_eof()
    assert b"" == await rest(app)
    await wait_until(lambda: not sidecar.proxy.tunnels)
    assert {"tunnelled": 1} == sidecar.outcomes
    assert 0 == _in_flight(sidecar)
    registry = sidecar.proxy.metrics.registry
    label = {"upstream": f"127.0.0.1:{upstream.port}"}
    assert 8 == registry.get_sample_value("sidecar_request_bytes_total", label)
    assert 8 == registry.get_sample_value("sidecar_response_bytes_total", label)
    assert 1 == registry.get_sample_value("sidecar_tunnels_total", {**label, "result": "ended"})
    assert 1 == registry.get_sample_value("sidecar_requests_total", {**label, "method": "CONNECT", "code": "200"})


async def test_a_silent_tunnel_is_closed_and_a_talking_one_is_not(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror, limits={"tunnel_idle_timeout": 0.4})
    silent, _ = await connect(sidecar, upstream)
    talking, _ = await connect(sidecar, upstream)
    closed = asyncio.create_task(silent.closed())
    for _ in range(10):
        await talking.send(b".")
        assert b"." == await exactly(talking, 1)
        await asyncio.sleep(0.1)
    assert closed.done()
    assert await closed
    assert 1 == len(sidecar.proxy.tunnels)


async def test_a_drain_waits_for_a_tunnel_that_is_still_used(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror)
    app, _ = await connect(sidecar, upstream)
    stopping = asyncio.create_task(sidecar.stop(grace=5))
    await asyncio.sleep(0.7)
    assert not stopping.done()
    await app.send(b"still here")
    assert b"still here" == await exactly(app, 10)
    app.close()
    assert True is await asyncio.wait_for(stopping, 3)


async def test_a_tunnel_that_outlives_the_grace_is_cut_and_counted(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror)
    app, _ = await connect(sidecar, upstream)
    assert False is await sidecar.stop(grace=0.2)
    assert await app.closed()
    assert {"tunnelled": 1} == sidecar.outcomes


async def test_an_app_that_leaves_while_the_upstream_is_dialled_is_cancelled(
    tunnelling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialling = asyncio.Event()

    async def never(*args: Any, **options: Any) -> None:
        dialling.set()
        await asyncio.sleep(60)

    sidecar, upstream = await tunnelling(mirror)
    monkeypatch.setattr("aiohappyeyeballs.start_connection", never)
    app = await sidecar.app()
    await app.send(f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: x\r\n\r\n")
    await dialling.wait()
    app.close()
    await wait_until(lambda: bool(sidecar.outcomes))
    assert {"cancelled": 1} == sidecar.outcomes
    assert 0 == _in_flight(sidecar)


# ---- what a tunnel is spared, and how it says no -----------------------------------------------------------------


async def test_a_tunnel_ends_after_its_total_time_however_much_is_said_in_it(tunnelling: Any) -> None:
    sidecar, upstream = await tunnelling(mirror, limits={"tunnel_total_timeout": 0.5})
    app, _ = await connect(sidecar, upstream)

    async def chat() -> None:
        while True:
            await app.send(b".")
            await app.reader.readexactly(1)
            await asyncio.sleep(0.02)

    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await asyncio.wait_for(chat(), 10)
    await wait_until(lambda: not sidecar.proxy.tunnels)
    assert {"tunnelled": 1} == sidecar.outcomes


async def test_a_tunnel_is_opened_to_the_first_address_that_answers(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(mirror)

    async def lookup(host: str, port: int) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, (address, port)) for address in ("127.0.0.77", "127.0.0.78", "127.0.0.1")]

    sidecar = await start_sidecar(lookup=lookup, egress={"connect_ports": [upstream.port]})
    app = await sidecar.app()
    reply = await app.ask(f"CONNECT many.test:{upstream.port} HTTP/1.1\r\nHost: x\r\n\r\n", to_head=True)
    assert (200, "1") == (reply.status, reply.get("x-sidecar-attempts"))
    await app.send(b"hello")
    assert b"hello" == await exactly(app, 5)


async def test_a_connect_that_nobody_answers_gets_a_504_in_the_error_shape(start_sidecar: Starter) -> None:
    with unanswering_port() as port:
        sidecar = await start_sidecar(
            upstreams={"slow": {"hosts": [f"127.0.0.1:{port}"], "timeouts": {"connect": 0.2}, "policy": "once"}}
        )
        app = await sidecar.app()
        reply = await app.ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (504, "CONNECT_TIMEOUT") == (reply.status, reply.json["error_code"])
    assert {"error_code", "message", "details", "request_id", "documentation_url"} <= set(reply.json)
    assert await app.closed()


async def test_connecting_is_retried_and_a_breaker_per_host_refuses_what_is_down(start_sidecar: Starter) -> None:
    with refusing_port() as port, refusing_port() as other:
        sidecar = await start_sidecar(egress={"connect_ports": [port, other]}, policies=QUICK_POLICIES)
        statuses = []
        for _ in range(6):  # each is one voice, however many attempts it makes
            app = await sidecar.app()
            reply = await app.ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n")
            statuses.append((reply.status, reply.json["error_code"], reply.json["details"]["attempts"]))
        assert (502, "CONNECTION_REFUSED", 4) == statuses[0]
        assert (503, "CIRCUIT_OPEN", 0) == statuses[-1]
        app = await sidecar.app()
        reply = await app.ask(f"CONNECT 127.0.0.1:{other} HTTP/1.1\r\nHost: x\r\n\r\n")
        assert 502 == reply.status, "another host and port has a breaker of its own"


async def test_a_websocket_client_that_uses_the_sidecar_as_its_proxy_gets_its_echo(start_sidecar: Starter) -> None:
    async def echoing(request: web.Request) -> web.WebSocketResponse:
        talk = web.WebSocketResponse()
        await talk.prepare(request)
        async for message in talk:
            await talk.send_str(f"{request.path_qs}: {message.data}")
        return talk

    serving = web.Application()
    serving.router.add_get("/chat", echoing)
    sidecar = await start_sidecar()
    async with TestServer(serving) as server, aiohttp.ClientSession() as session:
        target, proxy = f"ws://127.0.0.1:{server.port}/chat?room=1", f"http://127.0.0.1:{sidecar.address[1]}"
        async with session.ws_connect(target, proxy=proxy) as chat:
            await chat.send_str("hello")
            assert "/chat?room=1: hello" == await chat.receive_str(timeout=5)
