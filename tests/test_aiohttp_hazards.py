"""What bites in aiohttp's server and parser, and that it does not bite here.

The private parts that `sidecar/inbound.py` leans on are named below, one by one: a release of aiohttp that moves
one of them fails here first, and not under load.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import aiohttp.http_parser
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_server import Server

from config.loader import Loaded
from config.model import Settings
from sidecar.assembly import CannotStart, Sidecar
from sidecar.inbound import Downstream
from sidecar.listener import Listener
from sidecar.request import RequestReader
from telemetry.logs import Log
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import Talk, Upstream, always, answer, echo

ONE_ATTEMPT = True

ROOT = Path(__file__).parent.parent
GET = "GET /u HTTP/1.1\r\nHost: s\r\n\r\n"


@pytest.fixture
def connect(start_sidecar: Starter, start_upstream: UpstreamStarter, route):
    """A sidecar in front of one scripted upstream under /u, and an app connected to it."""

    async def start(script=echo, **keys) -> tuple[App, Upstream, Running]:
        upstream = await start_upstream(script)
        sidecar = await start_sidecar(upstreams=route(upstream), **keys)
        return await sidecar.app(), upstream, sidecar

    return start


def lines_of(head: bytes, name: str) -> list[str]:
    """The values of one field in a head as an upstream saw it, in order."""
    split = (line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:])
    return [value for key, _, value in split if key.lower() == name.lower()]


# ---- the contract with aiohttp's private parts -------------------------------------------------------------------

PRIVATE_ATTRIBUTES = frozenset("_force_close _loop _manager _parser _paused".split())
PRIVATE_METHODS = frozenset("_pause_transport_reading _resume_transport_reading".split())
PRIVATE_OF_THE_SERVER = frozenset({"_connections"})


def private_names_used(owner: type) -> set[str]:
    """What a class of `inbound.py` or `listener.py` takes from `self` without defining it there."""
    tree = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    (body,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__]
    used = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    own = {*owner.__dict__, *RequestReader.__dict__}
    return {name for name in used if name.startswith("_") and name not in own}


async def test_every_private_attribute_that_is_used_is_named_here() -> None:
    assert PRIVATE_ATTRIBUTES | PRIVATE_METHODS == private_names_used(Downstream)
    assert PRIVATE_OF_THE_SERVER == private_names_used(Listener)


async def test_every_private_attribute_that_is_used_exists_in_aiohttp() -> None:
    async def handler(request: object) -> None:
        raise AssertionError

    loop = asyncio.get_running_loop()
    server = Server(handler, handler_cancellation=True, loop=loop)
    plain = RequestHandler(server, loop=loop)
    assert set() == {name for name in PRIVATE_ATTRIBUTES if not hasattr(plain, name)}
    assert set() == {name for name in PRIVATE_METHODS if not callable(getattr(plain, name, None))}
    assert set() == {name for name in PRIVATE_OF_THE_SERVER if not hasattr(server, name)}
    assert issubclass(RequestHandler, BaseProtocol)
    assert inspect.iscoroutinefunction(plain.start), "what aiohttp makes a task of, per connection"


def test_aiohttp_is_pinned_to_the_version_this_was_written_for() -> None:
    assert "3.14.5" == version("aiohttp")
    assert '"aiohttp==3.14.5"' in (ROOT / "pyproject.toml").read_text()


def test_the_options_of_the_listener_are_ones_aiohttp_knows() -> None:
    """Its server hides an unknown option behind defaults; ours passes them straight on, so they must be right."""
    known = set(inspect.signature(RequestHandler.__init__).parameters)
    tree = ast.parse(inspect.getsource(Listener))
    (options,) = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    assert set() == {key.value for key in options.keys} - known


# ---- the C parser ------------------------------------------------------------------------------------------------


async def test_a_sidecar_without_the_c_parser_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(aiohttp.http_parser, "HttpRequestParserC")
    with pytest.raises(CannotStart, match="without its C parser"):
        Sidecar(Loaded(Settings(), None, {}), Log())


def test_the_process_says_that_it_needs_the_c_parser(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "AIOHTTP_NO_EXTENSIONS": "1",
        "SIDECAR__LISTEN__PORT": "0",
        "SIDECAR__ADMIN__PORT": "0",
        "SIDECAR__STATE_DIR": str(tmp_path / "state"),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "sidecar", "run"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert 1 == ended.returncode
    assert "C parser" in ended.stdout + ended.stderr


# ---- the last trailer becomes a header of the next request -------------------------------------------------------

WITH_TRAILER = (
    "POST /u/one HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\nTrailer: X-Evil\r\n\r\n"
    "2\r\nhi\r\n0\r\nX-Evil: 1\r\n\r\n"
)
CLEAN = "POST /u/two HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"


async def trailers_of(talk: Talk) -> None:
    """Answers with what stands behind the last chunk."""
    while True:
        await talk.read_head()
        await talk.reader.readuntil(b"\r\n0\r\n")
        behind = b""
        while (line := await talk.reader.readuntil(b"\r\n")) != b"\r\n":
            behind += line
        await talk.send(answer(behind))


async def test_a_trailer_is_passed_on_behind_the_body(connect) -> None:
    app, upstream, _ = await connect(trailers_of)
    for _ in range(2):
        reply = await app.ask(WITH_TRAILER)
        assert (200, b"X-Evil: 1\r\n", None) == (reply.status, reply.body, reply.get("Connection"))
    assert ["X-Evil"] == lines_of(upstream.requests[0], "Trailer")


async def test_a_trailer_that_would_change_what_the_message_means_stays_here(connect) -> None:
    app, _, _ = await connect(trailers_of)
    reply = await app.ask(WITH_TRAILER.replace("X-Evil: 1", "Authorization: x\r\nX-Good: 1\r\nSet-Cookie: y"))
    assert b"X-Good: 1\r\n" == reply.body


@pytest.mark.parametrize("follows", [GET, CLEAN, WITH_TRAILER], ids=["plain", "chunked", "chunked with a trailer"])
@pytest.mark.parametrize("apart", [False, True], ids=["one segment", "two segments"])
async def test_a_trailer_never_becomes_a_header_of_the_next_request(connect, follows: str, apart: bool) -> None:
    """The next request is here, and parsed, before the first one is answered."""
    both_sent = asyncio.Event()

    async def waits(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await both_sent.wait()
            await talk.send(answer())

    app, upstream, _ = await connect(waits)
    for part in (WITH_TRAILER, follows) if apart else (WITH_TRAILER + follows,):
        await app.send(part)
        await asyncio.sleep(0.02)
    both_sent.set()
    assert [200, 200] == [(await app.reply()).status for _ in range(2)]
    assert [] == [head for head in upstream.requests if lines_of(head, "X-Evil")]


async def test_a_trailer_that_arrives_byte_by_byte_never_becomes_a_header_either(connect) -> None:
    app, upstream, _ = await connect(trailers_of)
    for byte in (WITH_TRAILER + WITH_TRAILER).encode():
        await app.send(bytes([byte]))
        await asyncio.sleep(0)
    assert [b"X-Evil: 1\r\n"] * 2 == [(await app.reply()).body for _ in range(2)]
    assert [] == [head for head in upstream.requests if lines_of(head, "X-Evil")]


async def test_a_chunked_request_without_trailers_keeps_its_connection(connect) -> None:
    app, upstream, _ = await connect()
    for _ in range(3):
        reply = await app.ask(CLEAN)
        assert (200, None) == (reply.status, reply.get("Connection"))
    assert (1, [b"hi"] * 3) == (upstream.connections, upstream.bodies)


# ---- a bad chunk in a later segment ------------------------------------------------------------------------------


async def test_a_bad_chunk_in_a_later_segment_does_not_leave_the_exchange_hanging(connect) -> None:
    async def reads_on(talk: Talk) -> None:
        await talk.read_head()
        await talk.reader.read()

    app, upstream, sidecar = await connect(reads_on)
    await app.send("POST /u HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
    async with asyncio.timeout(5):
        while not upstream.requests:
            await asyncio.sleep(0.01)
    reply = await app.ask("nonsense\r\n")
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert await app.closed()
    assert {"denied": 1} == sidecar.outcomes


# ---- fields and bodies as they are -------------------------------------------------------------------------------


async def test_duplicate_fields_in_different_case_are_all_kept(connect) -> None:
    app, upstream, _ = await connect()
    await app.ask("GET /u HTTP/1.1\r\nHost: s\r\nX-Twice: 1\r\nx-twice: 2\r\nX-TWICE: 3\r\n\r\n")
    assert ["1", "2", "3"] == lines_of(upstream.requests[0], "x-twice")


async def test_value_bytes_that_are_not_utf8_pass(connect) -> None:
    app, upstream, _ = await connect()
    await app.ask(b"GET /u HTTP/1.1\r\nHost: s\r\nX-Raw: \xff\xfe\x80caf\xe9\r\nX-Utf8: caf\xc3\xa9\r\n\r\n")
    assert b"\r\nX-Raw: \xff\xfe\x80caf\xe9\r\nX-Utf8: caf\xc3\xa9\r\n" in upstream.requests[0]


async def test_compressed_bodies_are_inflated_in_neither_direction(connect) -> None:
    packed = gzip.compress(b"hello" * 100)
    app, upstream, _ = await connect(always(answer(packed, "200 OK", "Content-Encoding: gzip")))
    head = f"POST /u HTTP/1.1\r\nHost: s\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    reply = await app.ask(head.encode() + packed)
    assert ([packed], packed) == (upstream.bodies, reply.body)
    assert (["gzip"], "gzip") == (lines_of(upstream.requests[0], "Content-Encoding"), reply.get("Content-Encoding"))


async def test_a_broken_gzip_body_is_the_upstreams_business(connect) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask("POST /u HTTP/1.1\r\nHost: s\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nzip")
    assert (200, [b"zip"]) == (reply.status, upstream.bodies)


# ---- many requests at once, apps that leave ----------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(connect) -> None:
    async def slow_first(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            target = head.split(b" ", 2)[1]
            if target == b"/0":
                await asyncio.sleep(0.05)
            await talk.send(answer(target))

    app, upstream, _ = await connect(slow_first)
    count = 60  # more than aiohttp queues before it stops reading
    await app.send("".join(f"GET /u/{n} HTTP/1.1\r\nHost: s\r\n\r\n" for n in range(count)))
    expected = [f"/{n}".encode() for n in range(count)]
    assert expected == [(await app.reply()).body for _ in range(count)]
    assert count == len(upstream.requests)


async def test_pipelined_bodies_stay_with_their_requests(connect) -> None:
    app, upstream, _ = await connect()
    await app.send("".join(f"POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\n{n:02}" for n in range(20)))
    for _ in range(20):
        assert 200 == (await app.reply()).status
    assert [b"%02d" % n for n in range(20)] == upstream.bodies


@pytest.mark.parametrize("leave", ["FIN", "half-close", "RST"])
async def test_an_app_that_goes_away_cancels_the_call_to_the_upstream(connect, leave: str) -> None:
    gone = asyncio.Event()

    async def never_answers(talk: Talk) -> None:
        await talk.read_request()
        try:
            await talk.reader.read()
        finally:
            gone.set()

    app, upstream, sidecar = await connect(never_answers)
    await app.send(GET)
    async with asyncio.timeout(5):
        while not upstream.requests:
            await asyncio.sleep(0.01)
        if leave == "FIN":
            app.close()
        elif leave == "half-close":
            app.writer.write_eof()
        else:
            app.writer.transport.abort()
        await gone.wait()  # long before attempt_timeout (30 s)
        while not sidecar.outcomes:
            await asyncio.sleep(0.01)
    assert {"cancelled": 1} == sidecar.outcomes
    assert 0 == sidecar.proxy.directory.configured["u"].in_flight


async def test_an_idle_connection_is_closed_and_a_slow_head_is_answered(connect) -> None:
    limits = {"keepalive_timeout": 0.2, "head_timeout": 0.2}
    app, _, sidecar = await connect(limits=limits)
    assert 200 == (await app.ask(GET)).status
    assert await app.closed(within=5)
    slow = await sidecar.app()
    await slow.send("GET /u HTTP/1.1\r\nHost:")
    reply = await slow.reply(within=5)
    assert (408, "head_timeout") == (reply.status, reply.json["details"]["reason"])
    assert await slow.closed(within=5)


# ---- 100-continue and other interim answers ----------------------------------------------------------------------


async def continues(talk: Talk) -> None:
    await talk.read_head()
    await talk.send(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    )
    await talk.send(answer(await talk.reader.readexactly(2)))


async def test_expect_is_forwarded_and_no_100_is_made_up(connect) -> None:
    asked = asyncio.Event()

    async def waits_then_continues(talk: Talk) -> None:
        await asked.wait()
        await continues(talk)

    app, upstream, _ = await connect(waits_then_continues)
    await app.send("POST /u HTTP/1.1\r\nHost: s\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    with pytest.raises(TimeoutError):
        await app.reply(within=0.1)
    asked.set()
    assert [100, 102, 103] == [(await app.reply()).status for _ in range(3)]
    final = await app.ask("hi")
    assert (200, b"hi", None) == (final.status, final.body, final.get("Connection"))
    assert ["100-continue"] == lines_of(upstream.requests[0], "Expect")


async def test_interim_answers_are_not_sent_to_an_http10_app(connect) -> None:
    app, _, _ = await connect(continues)
    reply = await app.ask("POST /u HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi")
    assert (200, b"hi") == (reply.status, reply.body)
    assert await app.closed()


# ---- answers without a body --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n", "500"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\n\r\n", None),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n", "9"),
    ],
)
async def test_an_answer_to_head_has_its_length_and_no_body(connect, given: bytes, shown: str | None) -> None:
    app, upstream, _ = await connect(always(given))
    for _ in range(2):
        reply = await app.ask("HEAD /u HTTP/1.1\r\nHost: s\r\n\r\n", to_head=True)
        assert (int(given[9:12]), shown, None) == (reply.status, reply.get("Content-Length"), reply.get("Connection"))
    assert 2 == len(upstream.requests)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", None),
        (b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", None),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 500\r\n\r\n", "500"),
    ],
)
async def test_204_and_304_have_no_body_and_keep_both_connections(connect, given: bytes, shown: str | None) -> None:
    app, upstream, _ = await connect(always(given))
    for _ in range(3):
        reply = await app.ask(GET)
        assert (int(given[9:12]), shown) == (reply.status, reply.get("Content-Length"))
        assert (None, None) == (reply.get("Transfer-Encoding"), reply.get("Connection"))
    assert 1 == upstream.connections


async def test_an_error_of_our_own_to_head_has_no_body(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    app = await sidecar.app()
    for _ in range(2):
        assert 404 == (await app.ask("HEAD /nowhere HTTP/1.1\r\nHost: s\r\n\r\n", to_head=True)).status


# ---- Upgrade -----------------------------------------------------------------------------------------------------

HANDSHAKE = "GET /u HTTP/1.1\r\nHost: s\r\nConnection: Upgrade\r\nUpgrade: {}\r\n\r\n"


async def test_a_websocket_upgrade_becomes_a_tunnel_in_both_directions(connect) -> None:
    async def parrot(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await talk.reader.read(1000):
            await talk.send(data)

    app, _, _ = await connect(parrot)
    assert 101 == (await app.ask(HANDSHAKE.format("WebSocket"))).status
    for frame in (b"\x81\x01a", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100):
        await app.send(frame)
        assert frame == await asyncio.wait_for(app.reader.readexactly(len(frame)), 5)


async def test_bytes_behind_a_websocket_upgrade_are_held_until_the_101(connect) -> None:
    before_the_101 = []

    async def hesitates(talk: Talk) -> None:
        await talk.read_head()
        try:
            before_the_101.append(await asyncio.wait_for(talk.reader.read(100), 0.05))
        except TimeoutError:
            pass
        await talk.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        await talk.send(await talk.reader.readexactly(9))

    app, _, _ = await connect(hesitates)
    await app.send(HANDSHAKE.format("websocket") + "same")
    await app.send("later")
    assert 101 == (await app.reply()).status
    assert b"samelater" == await asyncio.wait_for(app.reader.readexactly(9), 5)
    assert [] == before_the_101


async def test_a_declined_upgrade_is_an_ordinary_answer_and_ends_the_connection(connect) -> None:
    app, upstream, sidecar = await connect(always(answer(b"no", "400 Bad Request")))
    reply = await app.ask(HANDSHAKE.format("websocket") + "GET /u/smuggled HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (400, b"no", "close") == (reply.status, reply.body, reply.get("Connection"))
    assert await app.closed()
    assert (1, set()) == (len(upstream.requests), sidecar.proxy.tunnels)


async def test_an_upgrade_answered_with_200_is_an_ordinary_answer(connect) -> None:
    app, _, _ = await connect()
    reply = await app.ask(HANDSHAKE.format("websocket"))
    assert (200, "close") == (reply.status, reply.get("Connection"))
    assert await app.closed()


@pytest.mark.parametrize("protocol", ["h2c", "TLS/1.0", "websocket, h2c", "foo"])
async def test_another_upgrade_is_an_ordinary_request_without_it_and_the_connection_goes_on(
    connect, protocol: str
) -> None:
    app, upstream, _ = await connect()
    await app.send(HANDSHAKE.format(protocol) + "GET /u/next HTTP/1.1\r\nHost: s\r\n\r\n")
    for _ in range(2):
        reply = await app.reply()
        assert (200, None) == (reply.status, reply.get("Connection"))
    assert [b"GET / HTTP/1.1", b"GET /next HTTP/1.1"] == [head.split(b"\r\n")[0] for head in upstream.requests]
    assert ([], []) == (lines_of(upstream.requests[0], "Upgrade"), lines_of(upstream.requests[0], "Connection"))


@pytest.mark.parametrize(
    "body", ["Content-Length: 5\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("apart", [False, True], ids=["one segment", "byte by byte"])
async def test_another_upgrade_keeps_its_body(connect, body: str, apart: bool) -> None:
    app, upstream, _ = await connect()
    head = "POST /u HTTP/1.1\r\nHost: s\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"
    everything = (head + body) * 2
    for part in everything if apart else (everything,):
        await app.send(part)
        await asyncio.sleep(0)
    assert [200, 200] == [(await app.reply()).status for _ in range(2)]
    assert ([b"hello"] * 2, []) == (upstream.bodies, lines_of(upstream.requests[0], "HTTP2-Settings"))


# ---- HTTP/1.0 apps -----------------------------------------------------------------------------------------------


async def test_an_http10_app_gets_a_dechunked_body_and_a_closed_connection(connect) -> None:
    app, _, _ = await connect(
        always(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n")
    )
    reply = await app.ask("GET /u HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert ("close", None, b"hello!") == (reply.get("Connection"), reply.get("Transfer-Encoding"), reply.body)


async def test_an_http10_app_without_a_host_field_is_served(connect) -> None:
    app, upstream, _ = await connect()
    assert 200 == (await app.ask("GET /u HTTP/1.0\r\n\r\n")).status
    assert [f"127.0.0.1:{upstream.port}"] == lines_of(upstream.requests[0], "Host")


# ---- targets -----------------------------------------------------------------------------------------------------


async def test_options_asterisk_is_routed_by_host(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(echo)
    sidecar = await start_sidecar(upstreams={"u": {"hosts": ["api.test"], "endpoints": [upstream.url]}})
    app = await sidecar.app()
    assert 200 == (await app.ask("OPTIONS * HTTP/1.1\r\nHost: api.test\r\n\r\n")).status
    assert upstream.requests[0].startswith(b"OPTIONS * HTTP/1.1\r\nHost: api.test\r\n")
    reply = await app.ask("OPTIONS * HTTP/1.1\r\nHost: other.test\r\n\r\n")
    assert (404, "NO_ROUTE") == (reply.status, reply.json["error_code"])


async def test_the_admin_port_is_not_reached_by_an_absolute_target(start_sidecar: Starter) -> None:
    """A router on the parsed request would match the path and forget the host."""
    sidecar = await start_sidecar()
    app = await sidecar.app()
    reply = await app.ask("GET /livez HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (404, "NO_ROUTE") == (reply.status, reply.json["error_code"])
    reply = await app.ask(f"GET http://127.0.0.1:{sidecar.admin_address[1]}/livez HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])


async def test_a_loop_is_detected_by_via_and_told(connect) -> None:
    app, upstream, sidecar = await connect()
    reply = await app.ask(f"GET /u HTTP/1.1\r\nHost: s\r\nVia: 1.1 {sidecar.proxy.pseudonym.decode()}\r\n\r\n")
    assert (508, "LOOP_DETECTED", "denied") == (reply.status, reply.json["error_code"], reply.get("x-sidecar-outcome"))
    assert [] == upstream.requests


async def test_two_sidecars_in_a_row_are_not_a_loop(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route
) -> None:
    upstream = await start_upstream(echo)
    inner = await start_sidecar(upstreams=route(upstream))
    outer = await start_sidecar(
        upstreams={"inner": {"route": "/inner", "endpoints": [f"http://127.0.0.1:{inner.address[1]}"]}}
    )
    app = await outer.app()
    reply = await app.ask("GET /inner/u HTTP/1.1\r\nHost: s\r\n\r\n")
    ours = ["1.1 " + sidecar.proxy.pseudonym.decode() for sidecar in (outer, inner)]
    assert (200, ours, ours[::-1]) == (reply.status, lines_of(upstream.requests[0], "Via"), reply.all("Via"))
    assert 1 == len(reply.all("x-sidecar-session"))


# ---- lingering ---------------------------------------------------------------------------------------------------


async def test_an_early_refusal_arrives_although_the_app_keeps_sending(connect) -> None:
    """Closing over unread bytes would reset the connection and destroy the answer."""
    app, _, _ = await connect()
    await app.send("POST /nowhere HTTP/1.1\r\nHost: s\r\nContent-Length: 10000000\r\n\r\n")
    try:
        for _ in range(20):
            await app.send(b"x" * 100_000)
            await asyncio.sleep(0)
    except ConnectionError:
        pytest.fail("the connection was reset while the app was sending")
    reply = await app.reply()
    assert (404, "NO_ROUTE", "close") == (reply.status, reply.json["error_code"], reply.get("Connection"))
    assert await app.closed()


async def test_nothing_lingers_for_a_body_that_was_never_asked_for(connect) -> None:
    app, _, sidecar = await connect()
    reply = await app.ask("POST /nowhere HTTP/1.1\r\nHost: s\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert (404, "close") == (reply.status, reply.get("Connection"))
    assert await app.closed()
    async with asyncio.timeout(1):  # lingering would take three seconds
        while sidecar.proxy.downstreams:
            await asyncio.sleep(0.01)
