"""A client that takes too much, or too long, is told so and let go; the others do not notice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import Talk, Upstream, always, answer

ONE_ATTEMPT = True

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"


async def wait_until(true: Any, within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture
def limited(start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any) -> Any:
    """A sidecar with these limits before an upstream that always answers."""

    async def start(**limits: Any) -> tuple[Running, Upstream]:
        upstream = await start_upstream(always(answer()))
        return await start_sidecar(upstreams=route(upstream), limits=limits), upstream

    return start


def malformed(sidecar: Running, reason: str) -> float | None:
    return sidecar.proxy.metrics.registry.get_sample_value("sidecar_malformed_requests_total", {"reason": reason})


# ---- connections -------------------------------------------------------------------------------------------------


async def test_one_connection_too_many_gets_a_503_and_is_closed(limited: Any) -> None:
    sidecar, upstream = await limited(connections=2)
    kept = [await sidecar.app(), await sidecar.app()]
    for app in kept:
        assert 200 == (await app.ask(GET)).status
    refused = await sidecar.app()
    reply = await refused.reply()
    assert (503, "OVERLOADED", "1") == (reply.status, reply.json["error_code"], reply.get("retry-after"))
    assert "close" == reply.get("connection")
    assert await refused.closed()
    for app in kept:
        assert 200 == (await app.ask(GET)).status
    assert {"first_try": 4} == sidecar.outcomes
    assert 4 == len(upstream.requests)
    assert "sidecar.connections.exhausted" in sidecar.logged.getvalue()


async def test_a_refused_connection_reads_its_503_even_if_it_has_sent_its_request_already(limited: Any) -> None:
    sidecar, upstream = await limited(connections=1)
    kept = await sidecar.app()
    assert 200 == (await kept.ask(GET)).status
    for _ in range(20):
        refused = await App.connect(sidecar.address)
        await refused.send(GET)
        reply = await refused.reply()
        assert (503, True) == (reply.status, reply.complete)
        refused.close()
    assert 1 == len(upstream.requests)


async def test_there_is_room_again_when_a_connection_has_ended(limited: Any) -> None:
    sidecar, _ = await limited(connections=1)
    first = await sidecar.app()
    assert 200 == (await first.ask(GET)).status
    first.close()
    await wait_until(lambda: not sidecar.proxy.downstreams)
    assert 200 == (await (await sidecar.app()).ask(GET)).status


async def test_an_upstream_with_all_its_calls_in_flight_refuses_the_next(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    go_on = asyncio.Event()

    async def slow(talk: Talk) -> None:
        await talk.read_request()
        await go_on.wait()
        await talk.send(answer())

    upstream = await start_upstream(slow)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=1))
    first = await sidecar.app()
    await first.send(GET)
    await wait_until(lambda: upstream.requests)
    second = await sidecar.app()
    reply = await second.ask(GET)
    assert (503, "OVERLOADED", "1") == (reply.status, reply.json["error_code"], reply.get("retry-after"))
    go_on.set()
    assert 200 == (await first.reply()).status
    assert 200 == (await second.ask(GET)).status
    assert {"first_try": 2, "denied": 1} == sidecar.outcomes


# ---- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beginning", ["G", "GET /u/x HTTP/1.1\r\nHost: s\r\nX-Slow: "])
async def test_a_head_that_does_not_end_is_answered_with_408_and_cut_off(limited: Any, beginning: str) -> None:
    sidecar, upstream = await limited(head_timeout=0.3)
    slow, other = await sidecar.app(), await sidecar.app()
    await slow.send(beginning)
    answered = asyncio.create_task(slow.reply())
    while not answered.done():
        assert 200 == (await other.ask(GET)).status
        await asyncio.sleep(0.02)
    reply = await answered
    assert (408, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert "limits.head_timeout" in reply.json["message"]
    assert "close" == reply.get("connection")
    assert await slow.closed()
    assert 1 == malformed(sidecar, "head_timeout")
    assert {"first_try": len(upstream.requests)} == sidecar.outcomes


async def test_one_byte_now_and_then_does_not_buy_more_time(limited: Any) -> None:
    sidecar, _ = await limited(head_timeout=0.3)
    slow = await sidecar.app()
    answered = asyncio.create_task(slow.reply(within=5))
    for byte in "GET /u/x HTTP/1.1\r\nHost: s\r\n" + "X-Filler: 1\r\n" * 100:
        if answered.done():
            break
        slow.writer.write(byte.encode())
        await asyncio.sleep(0.02)
    assert 408 == (await answered).status


async def test_the_second_head_on_a_connection_has_the_same_time_limit(limited: Any) -> None:
    sidecar, _ = await limited(head_timeout=0.3)
    app = await sidecar.app()
    assert 200 == (await app.ask(GET)).status
    await asyncio.sleep(0.7)  # between requests the keep-alive limit holds, not this one
    assert 200 == (await app.ask(GET)).status
    assert 408 == (await app.ask("GET /u/")).status
    assert await app.closed()


async def test_a_slow_body_is_no_slow_head(limited: Any) -> None:
    sidecar, upstream = await limited(head_timeout=0.3)
    app = await sidecar.app()
    await app.send("POST /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: 4\r\n\r\n")
    for byte in "body":
        await asyncio.sleep(0.2)
        await app.send(byte)
    assert 200 == (await app.reply()).status
    assert [b"body"] == upstream.bodies


async def test_an_idle_connection_is_closed_silently_after_the_keepalive_timeout(limited: Any) -> None:
    sidecar, _ = await limited(keepalive_timeout=0.3)
    idle, used = await sidecar.app(), await sidecar.app()
    assert 200 == (await idle.ask(GET)).status
    closed = asyncio.create_task(idle.closed())
    while not closed.done():
        assert 200 == (await used.ask(GET)).status
        await asyncio.sleep(0.02)
    assert await closed
    assert 200 == (await used.ask(GET)).status


async def test_a_slow_answer_is_not_taken_for_an_idle_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def slow(talk: Talk) -> None:
        await talk.read_request()
        await asyncio.sleep(1.2)
        await talk.send(answer(b"at last"))

    upstream = await start_upstream(slow)
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"keepalive_timeout": 0.2, "head_timeout": 0.2})
    reply = await (await sidecar.app()).ask(GET)
    assert (200, b"at last") == (reply.status, reply.body)


async def test_hundreds_of_slow_heads_do_not_cost_a_probe_client_a_single_request(limited: Any) -> None:
    sidecar, _ = await limited(head_timeout=1.0, keepalive_timeout=30)
    slow = [await sidecar.app() for _ in range(500)]
    for app in slow:
        await app.send("GET /u/x HTTP/1.1\r\nHost: s\r\nX-")
    replies = [asyncio.create_task(app.reply()) for app in slow]
    probe, statuses = await sidecar.app(), []
    while not all(reply.done() for reply in replies):
        statuses.append((await probe.ask(GET)).status)
        await asyncio.sleep(0.005)
    assert {200} == set(statuses)
    assert {408} == {(await reply).status for reply in replies}
    assert {"first_try": len(statuses)} == sidecar.outcomes
    await wait_until(lambda: 1 == len(sidecar.proxy.downstreams))
    assert 500 == malformed(sidecar, "head_timeout")
