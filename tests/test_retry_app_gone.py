"""The app goes away: whatever the sidecar was doing for it stops at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from telemetry.record import NOT_CONNECTED, PARTLY_SENT, SENT, Session
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import (
    NO_BREAKER,
    QUICK_POLICIES,
    at_rest,
    ended,
    last_session,
    request,
    unanswering_port,
    until,
)
from tests.doubles.upstream import Script, Talk, Upstream, always, answer
from tests.test_dead_letters_live import busy_store

GET = request("GET", "/u/x")


def route(upstream: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER, **keys}}


class Holding:
    """A script that answers the way a test says and notices when the sidecar closes."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.closed = asyncio.Event()

    async def __call__(self, talk: Talk) -> None:
        try:
            await talk.read_head()
            for data in self._answers:
                await talk.send(data)
            while await talk.reader.read(65_536):
                pass
        finally:
            self.closed.set()


async def gone(sidecar: Running, app: App) -> Session:
    """Leave, and wait until the sidecar has cleared up; how the session ended."""
    app.close()
    await at_rest(sidecar)
    session = await last_session(sidecar)
    assert ("cancelled", "CLIENT_DISCONNECTED") == (session.outcome, session.code)
    assert 1 == sidecar.outcomes["cancelled"]
    return session


def only(session: Session) -> tuple[str | None, int, int]:
    (attempt,) = session.attempts
    return attempt.code, attempt.status, attempt.phase


# ---- the attempt -------------------------------------------------------------------------------------------------


async def test_while_connecting(start_sidecar: Starter) -> None:
    with unanswering_port() as port:
        sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"]}})
        app = await sidecar.app()
        await app.send(GET)
        await until(lambda: sidecar.proxy.directory.configured["u"].in_flight == 1)
        await asyncio.sleep(0.02)
        session = await gone(sidecar, app)
    assert ("CLIENT_DISCONNECTED", 0, NOT_CONNECTED) == only(session)
    assert session.attempts[0].ended > session.attempts[0].started


async def test_while_a_name_is_looked_up(start_sidecar: Starter) -> None:
    asked = asyncio.Event()

    async def never(host: str, port: int) -> list[Any]:
        asked.set()
        await asyncio.sleep(3600)
        return []

    sidecar = await start_sidecar(lookup=never, upstreams={"u": {"hosts": ["slow.test"]}})
    app = await sidecar.app()
    await app.send(request("GET", "http://slow.test/x"))
    await asked.wait()
    assert ("CLIENT_DISCONNECTED", 0, NOT_CONNECTED) == only(await gone(sidecar, app))


@pytest.mark.parametrize("warm", [False, True], ids=["new connection", "kept connection"])
async def test_while_waiting_for_the_answer(
    start_sidecar: Starter, start_upstream: UpstreamStarter, warm: bool
) -> None:
    closed = asyncio.Event()

    async def script(talk: Talk) -> None:
        head = await talk.read_head()
        if b"/warm" in head:
            await talk.send(answer(b"ok"))
            await talk.read_head()
        await talk.reader.read()
        closed.set()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    if warm:
        assert b"ok" == (await app.ask(request("GET", "/u/warm"))).body
    await app.send(GET)
    await until(lambda: len(upstream.requests) == 1 + warm)
    assert ("CLIENT_DISCONNECTED", 0, SENT) == only(await gone(sidecar, app))
    await asyncio.wait_for(closed.wait(), 5)
    attempts = sidecar.proxy.metrics.registry.get_sample_value(
        "sidecar_upstream_attempts_total", {"upstream": "u", "kind": "first", "result": "CLIENT_DISCONNECTED"}
    )
    assert 1 == attempts


async def test_while_the_body_of_the_request_is_on_its_way(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    script = Holding()
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(request("PUT", "/u/x", "Content-Length: 1000") + b"half of it")
    await until(lambda: len(upstream.requests) == 1)
    assert ("CLIENT_DISCONNECTED", 0, PARTLY_SENT) == only(await gone(sidecar, app))
    await asyncio.wait_for(script.closed.wait(), 5)


@pytest.mark.parametrize(
    "begun",
    [b"HTTP/1.1 200 OK\r\nX-A", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"],
    ids=["head", "small body"],
)
async def test_while_a_small_answer_is_being_completed(
    start_sidecar: Starter, start_upstream: UpstreamStarter, begun: bytes
) -> None:
    script = Holding(begun)
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    await until(lambda: len(upstream.requests) == 1)
    await asyncio.sleep(0.02)
    await gone(sidecar, app)
    await asyncio.wait_for(script.closed.wait(), 5)


async def test_while_the_answer_streams(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    script = Holding(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    await app.reader.readuntil(b"hello\r\n")
    session = await gone(sidecar, app)
    assert (None, 200, SENT) == only(session)  # the attempt was good; it is the app that did not stay
    await asyncio.wait_for(script.closed.wait(), 5)


# ---- between attempts --------------------------------------------------------------------------------------------


async def test_in_backoff(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    script = Holding(answer(b"no", "503 Service Unavailable", "Retry-After: 50"))
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    app = await sidecar.app()
    await app.send(GET)
    await until(lambda: len(sidecar.proxy.backoffs) == 1)
    session = await gone(sidecar, app)
    assert ("TEMPORARY_UNAVAILABLE", 503, SENT) == only(session)
    assert session.ended - session.started < 20
    assert 1 == len(upstream.requests)


# ---- in a queue --------------------------------------------------------------------------------------------------


async def test_at_the_gate(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(Holding(answer(b"no", "429 Too Many Requests", "Retry-After: 50")))
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"RATE_LIMIT_EXCEEDED": {"max_attempts": 1}})
    limited = await sidecar.app()
    assert 429 == (await limited.ask(GET)).status
    apps = [await sidecar.app() for _ in range(3)]
    for app in apps:
        await app.send(GET)
    gate = sidecar.proxy.directory.configured["u"].turns.gate
    await until(lambda: gate.waiting == 3)
    apps[1].close()
    await until(lambda: gate.waiting == 2)
    for app in (apps[0], apps[2]):
        app.close()
    await at_rest(sidecar)
    assert {"exhausted": 1, "cancelled": 3} == sidecar.outcomes
    assert 1 == len(upstream.requests)
    assert [] == (await last_session(sidecar, 4)).attempts


@asynccontextmanager
async def full(
    start_sidecar: Starter, start_upstream: UpstreamStarter, **keys: Any
) -> AsyncIterator[tuple[Running, Upstream, App, Callable[[], None]]]:
    """One place, which is taken; `release` lets its holder go."""
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(answer(b"ok"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=1, **keys))
    holder = await sidecar.app()
    await holder.send(GET)
    await until(lambda: len(upstream.requests) == 1)
    yield sidecar, upstream, holder, go_on.set


async def test_in_the_queue_for_a_place(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    async with full(start_sidecar, start_upstream, max_queue=3) as (sidecar, upstream, holder, release):
        turns = sidecar.proxy.directory.configured["u"].turns
        apps = [await sidecar.app() for _ in range(3)]
        for number, app in enumerate(apps, 1):
            await app.send(request("GET", f"/u/{number}"))
            await until(lambda expected=number: turns.waiting == expected)  # type: ignore[misc]
        apps[0].close()
        await until(lambda: turns.waiting == 2)
        apps[1].close()
        await until(lambda: turns.waiting == 1)
        release()
        assert b"ok" == (await holder.reply()).body
        assert b"ok" == (await apps[2].reply()).body  # the place went past those who had left
        await at_rest(sidecar)
        assert {"first_try": 2, "cancelled": 2} == sidecar.outcomes
        assert [b"/x", b"/3"] == [head.split(b" ")[1] for head in upstream.requests]
        assert b"ok" == (await holder.ask(GET)).body  # and it is free again


async def test_a_queue_left_by_the_deadline_leaves_no_trace_either(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    async with full(start_sidecar, start_upstream, max_queue=3) as (sidecar, upstream, holder, release):
        impatient = await sidecar.app()
        reply = await impatient.ask(request("GET", "/u/late", "x-sidecar-timeout: 0.05"))
        assert (504, "DEADLINE_EXCEEDED", "deadline") == (
            reply.status,
            reply.json["error_code"],
            reply.get("x-sidecar-outcome"),
        )
        release()
        assert b"ok" == (await holder.reply()).body
        await at_rest(sidecar)
        for _ in range(3):  # the one place is there for whoever comes
            assert b"ok" == (await impatient.ask(GET)).body
        assert {"first_try": 4, "deadline": 1} == sidecar.outcomes
        assert all(b"/late" not in head for head in upstream.requests)


async def test_many_at_once_in_every_place_leave_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    async with full(start_sidecar, start_upstream, max_queue=100) as (sidecar, upstream, holder, _release):
        turns = sidecar.proxy.directory.configured["u"].turns
        apps = [await sidecar.app() for _ in range(50)]
        for app in apps:
            await app.send(GET)
        await until(lambda: turns.waiting == 50)
        for app in (*apps, holder):
            app.close()
        await at_rest(sidecar)
        assert {"cancelled": 51} == sidecar.outcomes
        # Places that were granted in the same moment as their app left may have sent their request.
        assert len(upstream.requests) <= 51


# ---- in the middle of an answer ----------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def raw_tracebacks() -> AsyncIterator[list[dict[str, Any]]]:
    """What the event loop would print between the lines of the log."""
    caught: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: caught.append(context))
    yield caught
    loop.set_exception_handler(None)


async def pouring(talk: Talk) -> None:
    """An answer without an end, as fast as it is taken."""
    await talk.read_request()
    await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await talk.send(b"8000\r\n" + bytes(0x8000) + b"\r\n")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_while_a_stream_pours_in(
    start_sidecar: Starter, start_upstream: UpstreamStarter, raw_tracebacks: list[dict[str, Any]], method: str
) -> None:
    """With a key the exchange runs as a task, which hears of the end a turn later than the bytes that still come."""
    upstream = await start_upstream(pouring)
    sidecar = await start_sidecar(upstreams=route(upstream))
    key = "Idempotency-Key: k{number}" if method == "POST" else "X-A: {number}"
    apps = [await sidecar.app() for _ in range(20)]
    for number, app in enumerate(apps):
        await app.send(request(method, "/u/x", key.format(number=number), body=b"b" if method == "POST" else b""))
    for app in apps:
        await app.reader.readexactly(100_000)
    for app in apps:
        app.writer.transport.abort()
    await at_rest(sidecar)
    await until(lambda: sum(sidecar.outcomes.values()) == len(apps))
    assert ({"cancelled": 20}, []) == (sidecar.outcomes, raw_tracebacks)


async def test_while_the_end_of_a_keyed_answer_waits_for_the_store(
    start_sidecar: Starter, start_upstream: UpstreamStarter, raw_tracebacks: list[dict[str, Any]]
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n")
            await go_on.wait()
            await talk.send(b"5\r\nended\r\n0\r\n\r\n")

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    ask = request("POST", "/u/x", "Idempotency-Key: k", body=b"b")
    app = await sidecar.app()
    await app.send(ask)
    await app.reader.readuntil(b"begun")
    durable = await sidecar.proxy.kept.open()
    with busy_store(durable):
        go_on.set()
        await until(lambda: sidecar.proxy.directory.configured["u"].connections == (0, 1))
        app.close()
        await until(lambda: not sidecar.proxy.downstreams)
    await at_rest(sidecar)
    assert ({"cancelled": 1}, []) == (sidecar.outcomes, raw_tracebacks)
    again = await (await sidecar.app()).ask(ask)
    assert (201, b"begunended", "true") == (again.status, again.body, again.get("idempotent-replayed"))
    assert 1 == len(upstream.requests)


async def test_requests_behind_one_that_runs_are_cancelled_with_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Holding())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    behind = [request("POST", "/u/x", body=b"b"), request("GET", "/nobody"), request("OPTIONS", "*"), GET]
    await app.send(b"".join([GET, *behind]))
    await until(lambda: len(upstream.requests) == 1)
    app.close()
    await at_rest(sidecar)
    await until(lambda: sum(sidecar.outcomes.values()) == 5)
    assert ({"cancelled": 5}, 1) == (sidecar.outcomes, len(upstream.requests))
    labels = {session.upstream for session in ended(sidecar)}
    assert ({"u", "_none"}, 0) == (labels, sidecar.proxy.directory.configured["u"].requests)


# ---- a connection that ends with an answer, and what was pipelined behind it -------------------------------------


async def broken_off(talk: Talk) -> None:
    await talk.read_request()
    await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
    talk.close()


@pytest.mark.parametrize(
    ("first", "script", "outcome"),
    [
        (b"GET /u/x HTTP/1.0\r\nHost: s\r\nConnection: keep-alive\r\n\r\n", always(answer(b"ok")), "first_try"),
        (GET, broken_off, "failed_streaming"),
        (request("GET", "/u/x", "Host: s"), always(answer(b"ok")), None),
    ],
)
async def test_a_request_behind_the_last_answer_of_a_connection_is_told_to_have_never_begun(
    start_sidecar: Starter, start_upstream: UpstreamStarter, first: bytes, script: Script, outcome: str | None
) -> None:
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    behind = request("POST", "/u/behind", body=b"five!")
    await app.send(first + behind + behind + GET)
    assert (await app.reply()).status
    assert await app.closed()
    await at_rest(sidecar)
    await until(lambda: {"cancelled": 3, **({outcome: 1} if outcome else {})} == sidecar.outcomes)
    session = next(session for session in ended(sidecar) if session.method == "POST")
    assert ("u", None, [], 0) == (session.upstream, session.code, session.attempts, session.status)
    told = sidecar.proxy.signals.explain(session)
    assert "POST to u was never begun" in told
    assert "its connection ended behind a request before it, so it was never sent anywhere" in told
    assert (1 if outcome else 0) == len(upstream.requests)
    assert 0 == sidecar.proxy.held.all
