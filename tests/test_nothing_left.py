"""What an exchange held goes the moment it ends, however it ends: nothing waits for the garbage collector, which runs
rarely on purpose. A circle that only the collector finds keeps whole bodies for that long, and memory rises and falls by
megabytes with nothing to show for it."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from sidecar.body import RequestBody
from sidecar.exchange import Exchange
from sidecar.inbound import Downstream
from sidecar.request import Request
from sidecar.tunnel import Side, Tunnel
from sidecar.upstream.connection import UpstreamConnection
from tests.conftest import Running, Starter
from tests.doubles.upstream import Talk, Upstream, always, answer
from tests.test_tunnel import HANDSHAKE, SWITCHED, mirror

WATCHED = (Downstream, Exchange, Request, RequestBody, Side, Tunnel, UpstreamConnection)
BODY = b"x" * 300_000
POST = b"POST /u/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
PUT = POST.replace(b"POST", b"PUT")
GET = b"GET /u/x HTTP/1.1\r\nHost: x\r\n\r\n"
DATA = b"z" * 100_000


def alive() -> Counter[str]:
    """Found by looking at every object; the collector itself is not run."""
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, WATCHED))


@pytest_asyncio.fixture
async def started(start_sidecar: Starter) -> AsyncIterator[Callable[[Any], Awaitable[Running]]]:
    """A sidecar with an upstream under `/u`, after everything from before has been collected, without a collector."""
    opened: list[Upstream] = []

    async def start(script: Any) -> Running:
        upstream = await Upstream(script).start()
        opened.append(upstream)
        sidecar = await start_sidecar(
            upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "timeouts": {"pool_idle": 0.1}}},
            policies={"default": {"base_delay": 0.001, "max_delay": 0.001, "max_attempts": 3}},
            egress={"connect_ports": [upstream.port], "deny": ["127.0.0.9"]},
        )
        sidecar.upstream_port = upstream.port  # type: ignore[attr-defined]  # only here
        gc.collect()
        gc.disable()
        return sidecar

    yield start
    gc.enable()
    for upstream in opened:
        await upstream.stop()


async def nothing_left(before: Counter[str]) -> None:
    try:
        async with asyncio.timeout(20):
            while alive() - before:
                await asyncio.sleep(0.05)
    except TimeoutError:
        pass
    assert Counter() == alive() - before


async def resets(talk: Talk) -> None:
    await talk.read_request()
    talk.reset()


async def cuts_short(talk: Talk) -> None:
    await talk.read_request()
    await talk.send(answer(b"twelve bytes")[:-6])
    talk.close()


async def cuts_long(talk: Talk) -> None:
    await talk.read_request()
    await talk.send(answer(BODY)[:-100_000])
    talk.close()


async def switches(talk: Talk) -> None:
    await talk.read_request()
    await talk.send(SWITCHED)
    await mirror(talk)


async def is_silent(talk: Talk) -> None:
    await talk.read_request()
    await asyncio.sleep(30)


async def reads_nothing(talk: Talk) -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("script", "request_", "outcome"),
    [
        (always(answer()), GET, "first_try"),
        (always(answer(BODY)), GET, "first_try"),
        (always(answer()), PUT + DATA, "first_try"),
        (always(answer(b"no", "503 Service Unavailable")), PUT + DATA, "exhausted"),
        (resets, PUT + DATA, "exhausted"),
        (resets, POST + DATA, "not_retryable"),
        (cuts_short, PUT + DATA, "exhausted"),
        (cuts_long, GET, "failed_streaming"),
        (always(b"nonsense\r\n\r\n"), GET, "exhausted"),
        (always(answer()), b"GET http://127.0.0.9/ HTTP/1.1\r\nHost: x\r\n\r\n", "denied"),
        (always(answer()), b"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\n\r\n", "exhausted"),
    ],
)
async def test_an_exchange_that_ended_is_gone(started: Any, script: Any, request_: bytes, outcome: str) -> None:
    sidecar = await started(script)
    before = alive()
    app = await sidecar.app()
    await app.ask(request_)
    app.close()
    await nothing_left(before)
    assert {outcome: 1} == sidecar.outcomes


@pytest.mark.parametrize(
    ("script", "request_"),
    [(is_silent, GET), (is_silent, PUT + DATA), (reads_nothing, PUT + DATA[:-1]), (resets, POST)],
)
async def test_an_exchange_whose_app_left_is_gone(started: Any, script: Any, request_: bytes) -> None:
    sidecar = await started(script)
    before = alive()
    app = await sidecar.app()
    await app.send(request_)
    async with asyncio.timeout(10):
        while not alive()["UpstreamConnection"] - before["UpstreamConnection"] and not sidecar.outcomes:
            await asyncio.sleep(0.01)
    app.close()
    await nothing_left(before)
    assert 1 == sum(sidecar.outcomes.values())


async def speaks_no_tls(talk: Talk) -> None:
    await talk.send(answer())
    talk.close()


async def test_a_connection_whose_handshake_failed_is_gone(start_sidecar: Starter, started: Any) -> None:
    port = (await started(speaks_no_tls)).upstream_port
    before = alive()
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [f"https://127.0.0.1:{port}"]}})
    app = await sidecar.app()
    assert "TLS_FAILURE" == (await app.ask(GET)).json["error_code"]
    app.close()
    await nothing_left(before)


async def test_a_request_that_is_not_valid_is_gone(started: Any) -> None:
    sidecar = await started(always(answer()))
    before = alive()
    app = await sidecar.app()
    assert 400 == (await app.ask(b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n")).status
    app.close()
    await nothing_left(before)


@pytest.mark.parametrize("upgrade", [False, True])
async def test_a_tunnel_that_ended_is_gone(started: Any, upgrade: bool) -> None:
    sidecar = await started(switches if upgrade else mirror)
    before = alive()
    app = await sidecar.app()
    target = f"127.0.0.1:{sidecar.upstream_port}"
    opening = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"
    await app.ask(HANDSHAKE.format(url="/u") if upgrade else opening, to_head=True)
    await app.send(b"ping")
    assert b"ping" == await asyncio.wait_for(app.reader.readexactly(4), 10)
    app.close()
    await nothing_left(before)
    assert {"tunnelled": 1} == sidecar.outcomes


async def test_a_connection_that_waits_for_its_next_request_keeps_nothing_of_the_last_body(started: Any) -> None:
    sidecar = await started(always(answer()))
    app = await sidecar.app()
    await app.ask(PUT + DATA)
    (body,) = (thing for thing in gc.get_objects() if isinstance(thing, RequestBody))
    assert (len(DATA), 0) == (body.total, sum(map(len, body._chunks)))
    del body
