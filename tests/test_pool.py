"""Connections to upstreams: kept, reused, aged, replaced; names followed when they move."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sidecar.failures import AttemptFailed
from sidecar.upstream.pool import Pool
from sidecar.upstream.resolve import FORGET_AFTER, FRESH_FOR, Resolver
from tests.conftest import ONCE, Running, Starter, UpstreamStarter
from tests.doubles.upstream import Talk, Upstream, always, answer

ONE_ATTEMPT = True

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
Route = Callable[..., dict[str, Any]]


def the_pool(sidecar: Running) -> Pool:
    (pool,) = sidecar.proxy.directory.configured["u"].pools.values()
    return pool


def attempts(sidecar: Running, kind: str, result: str) -> float:
    registry: CollectorRegistry = sidecar.proxy.metrics.registry
    labels = {"upstream": "u", "kind": kind, "result": result}
    return registry.get_sample_value("sidecar_upstream_attempts_total", labels) or 0


def address(host: str, port: int) -> tuple[int, int, int, str, tuple[Any, ...]]:
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))


async def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


# ---- reuse -------------------------------------------------------------------------------------------------------


async def test_a_connection_that_has_said_good_bye_is_not_taken_although_the_loop_has_not_told_of_its_loss(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    sidecar = await start_sidecar(upstreams=route(upstream))
    assert 200 == (await (await sidecar.app()).ask(GET)).status
    pool = the_pool(sidecar)
    (connection,) = pool._idle
    connection.eof_received()
    assert (None, 0) == (pool.take(), pool.idle)


async def test_one_connection_serves_requests_one_after_the_other(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    sidecar = await start_sidecar(upstreams=route(upstream))
    for _ in range(3):  # the apps' connections differ, the upstream's does not
        app = await sidecar.app()
        for _ in range(3):
            assert b"ok" == (await app.ask(GET)).body
    assert (1, 9) == (upstream.connections, len(upstream.requests))
    assert 1 == the_pool(sidecar).idle


@pytest.mark.parametrize(("behind", "connections"), [(b"", 1), (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", 2)])
async def test_behind_a_long_body_the_next_answer_is_read_and_nothing_else_is_taken_for_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, behind: bytes, connections: int
) -> None:
    long = bytes(range(256)) * 1200  # comes in pieces, and is no HTTP

    first = True

    async def script(talk: Talk) -> None:
        nonlocal first
        if first:
            first, sent = False, answer(long) + behind
            await talk.read_request()
            for start in range(0, len(sent), 90_000):
                await talk.send(sent[start : start + 90_000])
                await asyncio.sleep(0.01)
        while True:
            await talk.read_request()
            await talk.send(answer(b"good"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    assert long == (await app.ask(GET)).body
    assert b"good" == (await app.ask(GET)).body
    assert connections == the_pool(sidecar).connects


async def test_requests_at_the_same_time_get_a_connection_each(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    all_here = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        if len(talk.upstream.requests) == 3:
            all_here.set()
        await all_here.wait()
        await talk.send(answer())
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    apps = [await sidecar.app() for _ in range(3)]
    replies = await asyncio.gather(*(app.ask(GET) for app in apps))
    assert [200, 200, 200] == [reply.status for reply in replies]
    assert (3, 3) == (upstream.connections, the_pool(sidecar).idle)


async def test_the_connection_used_last_is_used_first(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    async def script(talk: Talk) -> None:
        number = talk.upstream.connections
        await talk.read_request()
        await gates[number - 1].wait()
        await talk.send(answer(b"%d" % number))
        while True:
            await talk.read_request()
            await talk.send(answer(b"%d" % number))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    one, two = await sidecar.app(), await sidecar.app()
    await one.send(GET)
    await until(lambda: upstream.connections == 1)
    await two.send(GET)
    await until(lambda: upstream.connections == 2)
    gates[1].set()
    assert b"2" == (await two.reply()).body
    gates[0].set()
    assert b"1" == (await one.reply()).body
    assert [b"1", b"1", b"1"] == [(await two.ask(GET)).body for _ in range(3)]


@pytest.mark.parametrize(
    "data",
    [
        answer(b"ok", "200 OK", "Connection: close"),
        answer(b"ok", "200 OK", "connection: X-A, CLOSE"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
    ids=["close", "close among others", "HTTP/1.0"],
)
async def test_an_upstream_that_will_close_is_not_asked_again_on_that_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, data: bytes
) -> None:
    upstream = await start_upstream(always(data))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    for _ in range(2):
        reply = await app.ask(GET)
        assert (200, b"ok", None) == (reply.status, reply.body, reply.get("connection"))
    assert (2, 0) == (upstream.connections, the_pool(sidecar).idle)


async def test_an_http_1_0_upstream_may_ask_to_keep_the_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    data = b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok"
    upstream = await start_upstream(always(data))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    assert [b"ok", b"ok"] == [(await app.ask(GET)).body for _ in range(2)]
    assert 1 == upstream.connections


async def test_a_connection_idle_for_too_long_is_closed_by_the_sweep(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    ended = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(answer())
        await talk.reader.read()
        ended.set()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"pool_idle": 20.0}))
    app = await sidecar.app()
    await app.ask(GET)
    pool, now = the_pool(sidecar), asyncio.get_running_loop().time()
    sidecar.proxy.directory.sweep(now + 19)
    assert 1 == pool.idle
    sidecar.proxy.directory.sweep(now + 21)
    assert 0 == pool.idle
    await asyncio.wait_for(ended.wait(), 5)
    await app.ask(GET)
    assert 2 == upstream.connections


async def test_a_connection_the_upstream_closed_while_idle_is_not_used(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(answer())

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(GET)
    await asyncio.sleep(0.05)
    assert (200, "1") == ((reply := await app.ask(GET)).status, reply.get("x-sidecar-attempts"))
    assert 0 == attempts(sidecar, "stale", "success")


# ---- limits ------------------------------------------------------------------------------------------------------


async def test_a_request_beyond_max_in_flight_is_refused_with_retry_after(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(answer(b"ok"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=2))
    busy = [await sidecar.app() for _ in range(2)]
    for app in busy:
        await app.send(GET)
    await until(lambda: len(upstream.requests) == 2)
    third = await sidecar.app()
    refused = await third.ask(GET)
    assert (503, "OVERLOADED") == (refused.status, refused.json["error_code"])
    assert int(refused.get("retry-after") or 0) >= 1
    assert "max_in_flight" in refused.json["message"]
    assert 2 == len(upstream.requests)
    go_on.set()
    assert [b"ok", b"ok"] == [(await app.reply()).body for app in busy]
    assert b"ok" == (await third.ask(GET)).body  # the same connection of the app goes on
    assert {"first_try": 3, "denied": 1} == sidecar.outcomes


async def test_labels_for_unlisted_hosts_are_bounded(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(answer(b"ok")))

    async def lookup(host: str, port: int) -> list[Any]:
        return [address("127.0.0.1", port)]

    sidecar = await start_sidecar(lookup=lookup, limits={"auto_upstreams": 2})
    app = await sidecar.app()
    labels = []
    for name in ("a.test", "b.test", "c.test", "d.test", "a.test"):
        reply = await app.ask(f"GET http://{name}:{upstream.port}/ HTTP/1.1\r\nHost: {name}\r\n\r\n")
        assert 200 == reply.status
        labels.append((reply.get("x-sidecar-upstream") or "").partition(":")[0])
    assert ["a.test", "b.test", "_other", "_other", "a.test"] == labels
    assert 4 == upstream.connections  # a label may be shared, a pool is not
    assert 2 == sidecar.proxy.directory.label_overflows


async def test_endpoints_take_turns(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstreams = [await start_upstream(always(answer(b"%d" % number))) for number in range(3)]
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [u.url for u in upstreams]}})
    app = await sidecar.app()
    assert [b"0", b"1", b"2"] * 2 == [(await app.ask(GET)).body for _ in range(6)]
    assert [1, 1, 1] == [u.connections for u in upstreams]


# ---- stale connections -------------------------------------------------------------------------------------------


class DiesOnReuse:
    """The first connection answers once and dies when the second request has arrived; later ones answer."""

    def __init__(self, *, reset: bool = False, answer_begins: bytes = b"") -> None:
        self.reset = reset
        self.answer_begins = answer_begins

    async def __call__(self, talk: Talk) -> None:
        first = talk.upstream.connections == 1
        await talk.read_request()
        await talk.send(answer(b"ok"))
        if first:
            await talk.read_request()
            await talk.send(self.answer_begins)
            talk.reset() if self.reset else talk.close()
            return
        while True:
            await talk.read_request()
            await talk.send(answer(b"ok"))


POST = "POST /u/x HTTP/1.1\r\nHost: s\r\n{}Content-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT"])
async def test_an_idempotent_request_is_sent_once_more_when_its_kept_connection_was_dead(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, method: str, reset: bool
) -> None:
    upstream = await start_upstream(DiesOnReuse(reset=reset))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(GET)
    reply = await app.ask(f"{method} /u/y HTTP/1.1\r\nHost: s\r\n\r\n", to_head=method == "HEAD")
    assert (200, "2", "recovered") == (
        reply.status,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    assert 2 == sum(head.startswith(f"{method} /y ".encode()) for head in upstream.requests)
    assert (2, 1) == (upstream.connections, attempts(sidecar, "stale", "success"))
    assert 1 == attempts(sidecar, "first", "CONNECTION_RESET")


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_request_that_may_have_been_executed_is_not_sent_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, method: str
) -> None:
    upstream = await start_upstream(DiesOnReuse())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(GET)
    reply = await app.ask(POST.format("").replace("POST", method))
    assert (502, "CONNECTION_RESET") == (reply.status, reply.json["error_code"])
    assert [b"", b"hello"] == upstream.bodies
    assert {"first_try": 1, "not_retryable": 1} == sidecar.outcomes


async def test_a_post_with_an_idempotency_key_is_sent_again_with_the_same_bytes(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(DiesOnReuse())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(GET)
    reply = await app.ask(POST.format("Idempotency-Key: k1\r\n"))
    assert (200, "2") == (reply.status, reply.get("x-sidecar-attempts"))
    assert [b"", b"hello", b"hello"] == upstream.bodies
    assert upstream.requests[1] == upstream.requests[2]
    assert b"\r\nIdempotency-Key: k1\r\n" in upstream.requests[2]


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [3, 70_000, 900_000])
async def test_a_body_that_came_in_pieces_is_replayed_byte_for_byte(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, chunked: bool, size: int
) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    upstream = await start_upstream(DiesOnReuse())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(GET)
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    await app.send(f"PUT /u/x HTTP/1.1\r\nHost: s\r\n{framing}\r\n\r\n")
    for start in range(0, size, 50_000):
        piece = body[start : start + 50_000]
        await app.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        await asyncio.sleep(0.002)
    await app.send(b"0\r\n\r\n" if chunked else b"")
    reply = await app.reply()
    assert (200, "2") == (reply.status, reply.get("x-sidecar-attempts"))
    assert [b"", body, body] == upstream.bodies


async def test_a_body_too_large_to_keep_is_not_sent_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(DiesOnReuse())
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"replay_body_bytes": 1000})
    app = await sidecar.app()
    await app.ask(GET)
    reply = await app.ask(b"PUT /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000)
    assert (502, "CONNECTION_RESET") == (reply.status, reply.json["error_code"])
    assert [0, 2000] == [len(body) for body in upstream.bodies]


async def test_a_connection_that_dies_within_the_answer_is_not_stale(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(DiesOnReuse(answer_begins=b"HTTP/1.1 2"))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(GET)
    assert 502 == (await app.ask(GET)).status
    assert 2 == len(upstream.requests)


async def test_a_stale_connection_is_replaced_only_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        if talk.upstream.connections == 1:
            await talk.send(answer(b"ok"))
            await talk.read_request()
        talk.close()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(GET)
    reply = await app.ask(GET)
    assert (502, "2") == (reply.status, reply.get("x-sidecar-attempts"))
    assert (3, 2) == (len(upstream.requests), upstream.connections)


async def test_a_resend_takes_a_fresh_connection_even_when_others_are_idle(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    """The others were idle as long: where one was dead they may all be."""
    both_here = asyncio.Event()

    async def script(talk: Talk) -> None:
        number = talk.upstream.connections
        await talk.read_request()
        if number == 2:
            both_here.set()
        await both_here.wait()
        await talk.send(answer(b"%d" % number))
        await talk.read_request()
        talk.close()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    one, two = await sidecar.app(), await sidecar.app()
    await asyncio.gather(one.ask(GET), two.ask(GET))
    assert b"3" == (await one.ask(GET)).body
    assert 3 == upstream.connections


# ---- names -------------------------------------------------------------------------------------------------------


class Names:
    """A resolver's upstream and its clock, both in the test's hand."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.time = 1000.0
        self.failing = False

    async def lookup(self, host: str, port: int) -> list[Any]:
        self.asked += 1
        if self.failing:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [address(where, port) for where in self.answers]

    def now(self) -> float:
        return self.time

    def resolver(self) -> Resolver:
        return Resolver(self.lookup, self.now)


async def found(resolver: Resolver) -> list[str]:
    return [info[4][0] for info in await resolver.addresses("a.test", 80)]


async def test_a_fresh_answer_is_used_again_and_an_old_one_refreshed() -> None:
    names = Names("192.0.2.1")
    resolver = names.resolver()
    assert ["192.0.2.1"] == await found(resolver)
    names.answers = ["192.0.2.2"]
    names.time += FRESH_FOR - 0.1
    assert (["192.0.2.1"], 1) == (await found(resolver), names.asked)
    names.time += 0.2
    assert (["192.0.2.2"], 2) == (await found(resolver), names.asked)


async def test_a_failed_connection_makes_the_answer_old_at_once() -> None:
    names = Names("192.0.2.1")
    resolver = names.resolver()
    await found(resolver)
    names.answers = ["192.0.2.2"]
    resolver.failed("a.test", 80)
    assert (["192.0.2.2"], 2) == (await found(resolver), names.asked)


async def test_many_who_ask_at_once_cause_one_question() -> None:
    names = Names("192.0.2.1")
    resolver = names.resolver()
    answers = await asyncio.gather(*(found(resolver) for _ in range(20)))
    assert ([["192.0.2.1"]] * 20, 1) == (answers, names.asked)


async def test_one_who_stops_waiting_does_not_take_the_answer_from_the_others() -> None:
    names = Names("192.0.2.1")
    gate = asyncio.Event()

    async def slow(host: str, port: int) -> list[Any]:
        await gate.wait()
        return await names.lookup(host, port)

    resolver = Resolver(slow, names.now)
    gone, waiting = (asyncio.create_task(found(resolver)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    gate.set()
    assert ["192.0.2.1"] == await waiting
    assert 1 == names.asked


async def test_a_question_that_fails_when_nobody_waits_for_it_any_more_leaves_nothing_behind() -> None:
    names = Names()
    names.failing = True
    gate, told = asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))

    async def slow(host: str, port: int) -> list[Any]:
        await gate.wait()
        return await names.lookup(host, port)

    resolver = Resolver(slow, names.now)
    gone = asyncio.create_task(found(resolver))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    gate.set()
    for _ in range(5):
        await asyncio.sleep(0)
    del resolver, gone
    gc.collect()
    assert (1, []) == (names.asked, told)


async def test_a_failed_question_is_asked_again_next_time() -> None:
    names = Names("192.0.2.1")
    names.failing = True
    resolver = names.resolver()
    with pytest.raises(AttemptFailed, match=r"a\.test could not be resolved") as failure:
        await found(resolver)
    assert "DNS_FAILURE" == failure.value.code
    names.failing = False
    assert ["192.0.2.1"] == await found(resolver)


async def test_an_address_counts_as_gone_when_the_name_has_left_it_for_a_while() -> None:
    names = Names("192.0.2.1", "192.0.2.2")
    resolver = names.resolver()
    await found(resolver)
    names.answers = ["192.0.2.2"]
    gone_after = []
    for _ in range(5):
        names.time += FRESH_FOR
        await found(resolver)
        gone_after.append(resolver.gone("a.test", 80, "192.0.2.1"))
        assert not resolver.gone("a.test", 80, "192.0.2.2")
    assert [FRESH_FOR * (n + 1) > FORGET_AFTER for n in range(5)] == gone_after


async def test_no_address_is_gone_while_the_name_cannot_be_resolved() -> None:
    names = Names("192.0.2.1")
    resolver = names.resolver()
    await found(resolver)
    names.failing = True
    for _ in range(5):
        names.time += FRESH_FOR
        resolver.refresh("a.test", 80)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not resolver.gone("a.test", 80, "192.0.2.1")


async def named(start_sidecar: Starter, upstream: Upstream, names: Names) -> tuple[Running, str]:
    """A sidecar whose upstream `u` is reached as a.test, with the names and their clock in the test's hand."""
    sidecar = await start_sidecar(lookup=names.lookup, upstreams={"u": {"hosts": ["a.test"], **ONCE}})
    sidecar.proxy.dialler.resolver._now = names.now
    return sidecar, f"GET http://a.test:{upstream.port}/ HTTP/1.1\r\nHost: a.test\r\n\r\n"


async def test_idle_connections_to_an_address_the_name_has_left_are_dropped(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    old = await start_upstream(always(answer(b"old")))
    new = await start_upstream(always(answer(b"new")), host="127.0.0.2", port=old.port)
    names = Names("127.0.0.1")
    sidecar, get = await named(start_sidecar, old, names)
    app = await sidecar.app()
    assert b"old" == (await app.ask(get)).body
    names.answers = ["127.0.0.2"]
    for _ in range(4):
        names.time += FRESH_FOR
        assert b"old" == (await app.ask(get)).body
        sidecar.proxy.directory.sweep(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
    sidecar.proxy.directory.sweep(asyncio.get_running_loop().time())
    assert b"new" == (await app.ask(get)).body
    assert (1, 1) == (old.connections, new.connections)


async def test_a_connection_in_constant_use_follows_the_name_too(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """A connection that is never idle when the sweep comes by would otherwise stay with the old address for good."""
    new = await start_upstream(always(answer(b"new")), host="127.0.0.2")
    names = Names("127.0.0.1")

    async def busy(talk: Talk) -> None:
        while True:
            await talk.read_request()
            names.answers = ["127.0.0.2"]
            for _ in range(4):
                names.time += FRESH_FOR
                sidecar.proxy.directory.sweep(asyncio.get_running_loop().time())
                await asyncio.sleep(0.01)
            await talk.send(answer(b"old"))

    old = await start_upstream(busy, port=new.port)
    sidecar, get = await named(start_sidecar, old, names)
    app = await sidecar.app()
    assert b"old" == (await app.ask(get)).body
    assert b"new" == (await app.ask(get)).body
    assert (1, 1) == (old.connections, new.connections)


async def test_when_the_first_address_refuses_the_second_is_used(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer(b"ok")), host="127.0.0.3")
    names = Names("127.0.0.2", "127.0.0.3")
    sidecar, get = await named(start_sidecar, upstream, names)
    reply = await (await sidecar.app()).ask(get)
    assert (200, b"ok", "1") == (reply.status, reply.body, reply.get("x-sidecar-attempts"))
    pools = sidecar.proxy.directory.configured["u"].pools.values()
    assert ["127.0.0.3"] == [connection.address for pool in pools for connection in pool._idle]


async def test_a_service_that_moved_is_found_after_one_failed_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer(b"ok")), host="127.0.0.3")
    names = Names("127.0.0.2")
    sidecar, get = await named(start_sidecar, upstream, names)
    app = await sidecar.app()
    assert 502 == (await app.ask(get)).status
    names.answers = ["127.0.0.3"]
    assert (200, 2) == ((await app.ask(get)).status, names.asked)
