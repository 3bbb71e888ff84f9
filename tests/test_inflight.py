"""What is under way: each request with what it waits for, read off it when somebody asks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.upstream import Talk, answer
from tests.test_admin import admin, at_fault
from tests.test_cli_admin import here, url

GET = "GET /u/x?token=canary HTTP/1.1\r\nHost: s\r\n\r\n"


async def waiting(sidecar: Running, waits_for: str, **query: str) -> dict[str, Any]:
    """The one request that waits for this, as soon as there is one."""
    words = "&".join(f"{name}={value}" for name, value in {"waits_for": waits_for, **query}.items())
    async with asyncio.timeout(10):
        while not (found := (await admin(sidecar, f"/inflight?{words}")).json)["items"]:
            await asyncio.sleep(0.01)
    (one,) = found["items"]
    assert 1 == found["total"]
    return dict(one)


@pytest.fixture
def never() -> asyncio.Event:
    return asyncio.Event()


async def test_a_request_that_waits_for_its_answer_is_shown_without_its_secrets(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, never: asyncio.Event
) -> None:
    async def silent(talk: Talk) -> None:
        await talk.read_request()
        await never.wait()

    upstream = await start_upstream(silent)
    operations = [{"name": "look", "methods": ["GET"], "path": "/x"}]
    sidecar = await start_sidecar(upstreams=route(upstream, operations=operations))
    await (await sidecar.app()).send(GET)
    one = await waiting(sidecar, "answer", upstream="u")
    assert ("request", "u", "look", "GET", "/u/x?token=REDACTED", 1, None, None) == tuple(
        one[name] for name in ("kind", "upstream", "operation", "method", "url", "attempts", "last_error", "goes_on_in")
    )
    assert 0 <= one["waited"] <= one["age"]
    assert upstream.url.removeprefix("http://") == one["endpoint"]
    assert [] == (await admin(sidecar, "/inflight?upstream=other")).json["items"]
    assert ["waits_for"] == at_fault(await admin(sidecar, "/inflight?waits_for=luck"))


async def test_a_backoff_says_when_it_goes_on_and_after_what(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def busy(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"", "503 Service Unavailable"))

    upstream = await start_upstream(busy)
    patient = {"default": {"base_delay": 10, "max_delay": 10, "jitter_type": "none"}}
    sidecar = await start_sidecar(upstreams=route(upstream), policies=patient)
    await (await sidecar.app()).send(GET)
    one = await waiting(sidecar, "backoff")
    assert (1, "TEMPORARY_UNAVAILABLE") == (one["attempts"], one["last_error"])
    assert 0 < one["goes_on_in"] <= 10


async def test_whoever_stands_in_the_queue_waits_for_a_place(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, never: asyncio.Event
) -> None:
    async def silent(talk: Talk) -> None:
        await talk.read_request()
        await never.wait()

    upstream = await start_upstream(silent)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=1, max_queue=5))
    await (await sidecar.app()).send(GET)
    first = await waiting(sidecar, "answer")
    await (await sidecar.app()).send(GET)
    second = await waiting(sidecar, "max_in_flight")
    shown = (await admin(sidecar, "/inflight?limit=1")).json
    assert ([first["session_id"]], 2) == ([one["session_id"] for one in shown["items"]], shown["total"])
    assert (0, None) == (second["attempts"], second["endpoint"])


async def test_a_429_makes_the_next_one_wait_at_the_gate(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def limited(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"", "429 Too Many Requests", "Retry-After: 20"))

    upstream = await start_upstream(limited)
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"RATE_LIMIT_EXCEEDED": {"max_attempts": 1}})
    known = GET.replace("Host: s", "Host: s\r\nAuthorization: Bearer canary")
    assert 429 == (await (await sidecar.app()).ask(known)).status
    await (await sidecar.app()).send(known)
    one = await waiting(sidecar, "rate_limit_gate")
    assert 0 == one["attempts"]
    assert 0 < one["goes_on_in"] <= 20


async def test_an_upload_and_a_stream_are_told_apart_and_so_are_tunnels(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, never: asyncio.Event
) -> None:
    async def streaming(talk: Talk) -> None:
        head = await talk.read_head()
        if b"POST" not in head:
            await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await never.wait()

    upstream = await start_upstream(streaming)
    sidecar = await start_sidecar(
        upstreams=route(upstream), egress={"connect_ports": [int(upstream.url.rpartition(":")[2])]}
    )
    app = await sidecar.app()
    await app.send("POST /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: 100000\r\n\r\nabc")
    assert 1 == (await waiting(sidecar, "upload"))["attempts"]
    app = await sidecar.app()
    await app.send(GET)
    streamed = await waiting(sidecar, "streaming")
    assert streamed["waited"] <= streamed["age"]
    address = upstream.url.removeprefix("http://")
    await (await sidecar.app()).send(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n")
    assert "tunnel" == (await waiting(sidecar, "tunnel"))["kind"]


async def test_a_delivery_of_the_outbox_is_listed_too_and_the_command_shows_a_table(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    route: Any,
    never: asyncio.Event,
) -> None:
    async def silent(talk: Talk) -> None:
        await talk.read_request()
        await never.wait()

    upstream = await start_upstream(silent)
    sidecar = await start_sidecar(upstreams=route(upstream))
    given = "POST /u/send HTTP/1.1\r\nHost: s\r\nPrefer: respond-async\r\nContent-Length: 5\r\n\r\nhello"
    assert 202 == (await (await sidecar.app()).ask(given)).status
    assert "outbox" == (await waiting(sidecar, "answer"))["kind"]
    where = ("--admin", url(sidecar))
    shown = await here("inflight", *where)
    assert (0, True) == (shown.code, "(outbox)" in shown.out)
    assert 1 == json.loads((await here("inflight", "--json", *where)).out)["total"]
    assert "Nothing is under way.\n" == (await here("inflight", "--waits-for", "backoff", *where)).out
    wrong = await here("inflight", "--upstream", "uu", *where)
    assert (2, True) == (wrong.code, 'did you mean "u"?' in wrong.err)
