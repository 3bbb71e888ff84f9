"""Breakers at work between real sockets: they open, refuse, probe, close, and no permit is ever lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sidecar.policy.breaker import Breaker, Snapshot
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.faults import (
    QUICK_POLICIES,
    ask,
    at_rest,
    cut_off,
    drop_idle,
    ended,
    last_session,
    refusing_port,
    request,
    reset_after_request,
    seen,
    silence,
    status,
    until,
)
from tests.doubles.upstream import Script, Talk, Upstream, always, answer

GET = request("GET", "/u/x")
OK = answer(b"ok")
DOWN = status("503 Service Unavailable")
ONCE = {
    "default": {"max_attempts": 1},
    "RATE_LIMIT_EXCEEDED": {"max_attempts": 1},
    "NETWORK_TIMEOUT": {"max_attempts": 1},
}
SHORT = {"open_for": 0.05, "open_for_max": 0.2}
LONG = {"open_for": 30.0}


def route(*upstreams: Upstream, breaker: dict[str, Any] = LONG, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [one.url for one in upstreams], "breaker": breaker, **keys}}


def breakers(sidecar: Running) -> list[Breaker]:
    return [breaker for _, breaker in sidecar.proxy.directory.configured["u"].breakers()]


def look(sidecar: Running, index: int = 0) -> Snapshot:
    return breakers(sidecar)[index].snapshot(asyncio.get_running_loop().time())


async def trip(sidecar: Running, times: int = 5) -> None:
    """So many failing calls, one after the other."""
    app = await sidecar.app()
    for _ in range(times):
        assert 503 == (await app.ask(GET)).status
    assert "closed" != look(sidecar).state


async def half_open(sidecar: Running) -> None:
    await until(lambda: look(sidecar).state == "half_open")


def moves_of(breaker: Breaker) -> list[tuple[str, float]]:
    """Every state it goes to from now on, and when that was due."""
    moves: list[tuple[str, float]] = []
    told = breaker._on_change

    def changed(before: str, after: str, at: float, why: str) -> None:
        moves.append((after, at))
        assert told is not None
        told(before, after, at, why)

    breaker._on_change = changed
    return moves


def now_is(upstream: Upstream, sidecar: Running, script: Script) -> None:
    upstream.script = script
    drop_idle(sidecar)


# ---- open --------------------------------------------------------------------------------------------------------


async def test_it_opens_on_a_dead_endpoint_and_refuses_with_the_time_of_the_next_probe(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    await trip(sidecar)
    for method in ("GET", "POST"):
        reply = await ask(sidecar, request(method, "/u/x", body=b"" if method == "GET" else b"hi"))
        assert (503, "CIRCUIT_OPEN", "breaker_open", "0") == (
            reply.status,
            reply.json["error_code"],
            reply.get("x-sidecar-outcome"),
            reply.get("x-sidecar-attempts"),
        )
        assert 28 <= int(reply.get("retry-after") or 0) == reply.json["retry_after"] <= 30
        details = reply.json["details"]
        assert ("u", 0, "breaker_open", "breaker_open") == tuple(
            details[name] for name in ("upstream", "attempts", "outcome", "reason")
        )
        assert "/breakers" in details["hint"]
    assert 5 == len(upstream.requests)
    assert {"exhausted": 5, "breaker_open": 2} == sidecar.outcomes
    assert [] == [
        session.attempts for session in ended(sidecar) if session.outcome == "breaker_open" and session.attempts
    ]


async def test_a_session_that_opens_it_ends_with_the_upstreams_answer_instead_of_waiting_in_vain(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("503 Service Unavailable", body=b"down"))
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"failure_threshold": 2}), policies=QUICK_POLICIES)
    assert "4" == (await ask(sidecar, GET)).get("x-sidecar-attempts"), "all its attempts are one failure"
    reply = await ask(sidecar, GET)
    assert (503, b"down", "1", "breaker_open") == (
        reply.status,
        reply.body,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    session = await last_session(sidecar)
    assert ("breaker_open", "TEMPORARY_UNAVAILABLE") == (session.suppressed, session.code)
    assert 4 + 1 == len(upstream.requests)


async def test_a_session_without_an_answer_that_opens_it_is_told_so(start_sidecar: Starter) -> None:
    with refusing_port() as port:
        upstream = {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"], "breaker": {"failure_threshold": 2}}
        sidecar = await start_sidecar(upstreams={"u": upstream}, policies=QUICK_POLICIES)
        assert "exhausted" == (await ask(sidecar, GET)).get("x-sidecar-outcome")
        reply = await ask(sidecar, GET)
        assert ("CONNECTION_REFUSED", "breaker_open", 1) == (
            reply.json["error_code"],
            reply.json["details"]["reason"],
            reply.json["details"]["attempts"],
        )
        assert "CIRCUIT_OPEN" == (await ask(sidecar, GET)).json["error_code"]
    assert {"exhausted": 1, "breaker_open": 2} == sidecar.outcomes


# ---- the voice of a request --------------------------------------------------------------------------------------


async def test_an_upstream_whose_every_failure_is_healed_by_a_retry_is_never_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    async def every_other(talk: Talk) -> None:
        while True:
            await talk.read_request()
            failing = len(talk.upstream.requests) % 2
            await talk.send(answer(b"no", "503 Service Unavailable") if failing else OK)

    upstream = await start_upstream(every_other)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    app = await sidecar.app()
    outcomes = {(await app.ask(GET)).get("x-sidecar-outcome") for _ in range(30)}
    assert {"recovered"} == outcomes
    assert (0, 30) == (look(sidecar).failure_count, look(sidecar).success_count)


async def test_a_failure_that_another_endpoint_healed_still_speaks_against_the_first(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    broken, healthy = await start_upstream(DOWN), await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(broken, healthy), policies=QUICK_POLICIES)
    app = await sidecar.app()
    for _ in range(10):
        assert 200 == (await app.ask(GET)).status
    assert ("open", "closed") == (look(sidecar, 0).state, look(sidecar, 1).state)
    assert 5 == len(broken.requests)


async def test_an_upstream_that_dies_after_a_busy_healthy_time_is_refused_after_twenty_failures(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    app = await sidecar.app()
    for _ in range(100):
        assert 200 == (await app.ask(GET)).status
    now_is(upstream, sidecar, DOWN)
    codes = [(await app.ask(GET)).get("x-sidecar-outcome") for _ in range(30)]
    assert ["exhausted"] * 20 + ["breaker_open"] * 10 == codes


# ---- a connection tells that it is back --------------------------------------------------------------------------


async def test_opened_because_nobody_could_connect_it_is_half_open_as_soon_as_somebody_can(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    with refusing_port() as port:
        keys = {
            "route": "/u",
            "endpoints": [f"http://127.0.0.1:{port}"],
            "breaker": {"open_for": 3600.0, "open_for_max": 3600.0},
        }
        sidecar = await start_sidecar(upstreams={"u": keys}, policies=ONCE)
        for _ in range(5):
            assert "CONNECTION_REFUSED" == (await ask(sidecar, GET)).json["error_code"]
        assert look(sidecar).unreachable
        assert "CIRCUIT_OPEN" == (await ask(sidecar, GET)).json["error_code"]
    back = await start_upstream(always(OK), port=port)
    await half_open(sidecar)
    assert [] == back.requests, "nothing is sent to find that out"
    for _ in range(2):
        assert 200 == (await ask(sidecar, GET)).status
    assert "closed" == look(sidecar).state


async def test_a_check_that_misled_is_not_believed_again_before_a_probe_was_due(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """What accepts connections and answers nothing would otherwise get one call of the app each second."""
    with refusing_port() as port:
        keys = {
            "route": "/u",
            "endpoints": [f"http://127.0.0.1:{port}"],
            "breaker": {"open_for": 3600.0, "open_for_max": 3600.0},
        }
        sidecar = await start_sidecar(upstreams={"u": keys}, policies=ONCE)
        for _ in range(5):
            await ask(sidecar, GET)
    await start_upstream(DOWN, port=port)
    await half_open(sidecar)
    assert 503 == (await ask(sidecar, GET)).status
    assert ("open", False) == (look(sidecar).state, look(sidecar).unreachable)


async def test_with_the_check_switched_off_time_alone_decides(start_sidecar: Starter) -> None:
    with refusing_port() as port:
        keys = {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"], "breaker": {"connect_check": False}}
        sidecar = await start_sidecar(upstreams={"u": keys}, policies=ONCE)
        for _ in range(5):
            await ask(sidecar, GET)
        assert not breakers(sidecar)[0].awaits_connection(asyncio.get_running_loop().time())


# ---- by its share ------------------------------------------------------------------------------------------------


async def test_a_half_dead_endpoint_opens_it_by_its_share_of_failures(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    async def every_other(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(OK if len(talk.upstream.requests) % 2 else answer(b"no", "500 Internal Server Error"))

    upstream = await start_upstream(every_other)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    app = await sidecar.app()
    states = []
    for _ in range(20):
        await app.ask(GET)
        states.append(look(sidecar).state)
    assert ["closed"] * 19 + ["open"] == states  # min_volume is 20, and half of them failed


@pytest.mark.parametrize(
    "script",
    [
        status("429 Too Many Requests"),
        status("404 Not Found"),
        status("401 Unauthorized"),
        status("409 Conflict"),
        status("408 Request Timeout"),
    ],
    ids=["429", "404", "401", "409", "408"],
)
async def test_what_the_caller_did_never_opens_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, script: Script
) -> None:
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    app = await sidecar.app()
    for _ in range(30):
        assert (await app.ask(GET)).status < 500
    assert ("closed", 0, 0) == (look(sidecar).state, look(sidecar).failure_count, look(sidecar).success_count)


async def test_what_comes_of_a_body_is_known_at_its_end(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(cut_off(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    for _ in range(5):
        app = await sidecar.app()
        await app.send(GET)
        await seen(app)
    await until(lambda: look(sidecar).state == "open")
    assert "CIRCUIT_OPEN" == (await ask(sidecar, GET)).json["error_code"]
    assert {"failed_streaming": 5, "breaker_open": 1} == sidecar.outcomes


async def test_monitor_only_counts_and_never_refuses(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"monitor_only": True}), policies=ONCE)
    app = await sidecar.app()
    for _ in range(10):
        assert 503 == (await app.ask(GET)).status
    assert (10, {"exhausted": 10}) == (len(upstream.requests), sidecar.outcomes)
    assert ("closed", 1) == (look(sidecar).state, look(sidecar).would_open)
    would = sidecar.proxy.metrics.registry.get_sample_value("sidecar_breaker_would_open_total", {"upstream": "u"})
    assert 1 == would


async def test_switched_off_it_lets_everything_pass(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=ONCE)
    app = await sidecar.app()
    for _ in range(30):
        await app.ask(GET)
    assert 30 == len(upstream.requests)


async def test_an_operator_may_open_it(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(upstream))
    (breaker,) = breakers(sidecar)
    breaker.force_open(asyncio.get_running_loop().time(), "maintenance", 0.2)
    reply = await ask(sidecar, GET)
    assert ("CIRCUIT_OPEN", "1") == (reply.json["error_code"], reply.get("retry-after"))
    assert "an operator holds its circuit breaker open" in reply.json["message"]
    assert "`sidecar breakers reset u` ends it" in reply.json["details"]["hint"]
    await until(lambda: look(sidecar).state == "half_open")
    assert 200 == (await ask(sidecar, GET)).status


async def test_a_tunnel_has_the_breaker_of_its_host(start_sidecar: Starter) -> None:
    with refusing_port() as port:
        sidecar = await start_sidecar(
            upstreams={"u": {"hosts": ["127.0.0.1"], "breaker": {"failure_threshold": 2}}},
            policies=ONCE,
            egress={"connect_ports": [port]},
        )
        connect = request("CONNECT", f"127.0.0.1:{port}")
        codes = [(await ask(sidecar, connect)).json["error_code"] for _ in range(3)]
    assert ["CONNECTION_REFUSED", "CONNECTION_REFUSED", "CIRCUIT_OPEN"] == codes
    await at_rest(sidecar)


async def test_hosts_nobody_listed_have_a_breaker_each(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    dead, alive = await start_upstream(DOWN), await start_upstream(always(OK))
    sidecar = await start_sidecar(policies=ONCE)
    for _ in range(5):
        await ask(sidecar, request("GET", f"{dead.url}/x"))
    assert "CIRCUIT_OPEN" == (await ask(sidecar, request("GET", f"{dead.url}/x"))).json["error_code"]
    assert b"ok" == (await ask(sidecar, request("GET", f"{alive.url}/x"))).body


# ---- half open ---------------------------------------------------------------------------------------------------


async def test_after_its_time_probes_go_and_two_good_ones_close_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    await trip(sidecar)
    now_is(upstream, sidecar, always(OK))
    await half_open(sidecar)
    states = []
    for _ in range(3):
        assert 200 == (await ask(sidecar, GET)).status
        states.append(look(sidecar).state)
    assert ["half_open", "closed", "closed"] == states
    registry = sidecar.proxy.metrics.registry
    moves = {
        (a, b): registry.get_sample_value(
            "sidecar_breaker_transitions_total",
            {"upstream": "u", "endpoint": upstream.url.removeprefix("http://"), "from_state": a, "to_state": b},
        )
        for a, b in (("closed", "open"), ("open", "half_open"), ("half_open", "closed"))
    }
    assert {("closed", "open"): 1, ("open", "half_open"): 1, ("half_open", "closed"): 1} == moves
    assert 2 == registry.get_sample_value("sidecar_breaker_probes_total", {"upstream": "u", "result": "success"})


async def test_one_probe_at_a_time_and_the_others_are_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    await trip(sidecar)
    go_on = asyncio.Event()

    async def slow(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(OK)

    now_is(upstream, sidecar, slow)
    await half_open(sidecar)
    probing = await sidecar.app()
    await probing.send(GET)
    await until(lambda: len(upstream.requests) == 6)
    refused = await ask(sidecar, GET)
    assert ("CIRCUIT_OPEN", "1") == (refused.json["error_code"], refused.get("retry-after"))
    go_on.set()
    assert 200 == (await probing.reply()).status
    assert 6 == len(upstream.requests)
    await at_rest(sidecar)


async def test_a_failed_probe_opens_it_for_twice_as_long(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    moves = moves_of(breakers(sidecar)[0])
    await trip(sidecar)
    for _ in range(4):
        await half_open(sidecar)
        assert 503 == (await ask(sidecar, GET)).status
    await half_open(sidecar)
    assert ["open", "half_open"] * 5 == [state for state, _ in moves]
    opened, probed = [at for _, at in moves[::2]], [at for _, at in moves[1::2]]
    assert [0.05, 0.1, 0.2, 0.2, 0.2] == [round(b - a, 6) for a, b in zip(opened, probed, strict=True)]
    assert 5 + 4 == len(upstream.requests)
    assert ["first"] * 5 + ["probe"] * 4 == [s.attempts[0].kind for s in ended(sidecar) if s.attempts]


async def test_a_probe_that_fails_is_not_repeated_while_it_is_open(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """The default policy would try four times; the breaker lets one of them through."""
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(
        upstreams=route(upstream, breaker={**SHORT, "failure_threshold": 2}), policies=QUICK_POLICIES
    )
    await ask(sidecar, GET)
    await ask(sidecar, GET)
    assert ("open", 5) == (look(sidecar).state, len(upstream.requests))
    await half_open(sidecar)
    reply = await ask(sidecar, GET)
    assert ("1", "breaker_open") == (reply.get("x-sidecar-attempts"), reply.get("x-sidecar-outcome"))
    assert 6 == len(upstream.requests)


@pytest.mark.parametrize("line", ["429 Too Many Requests", "404 Not Found"])
async def test_a_probe_that_says_nothing_gives_its_lease_back(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    await trip(sidecar)
    now_is(upstream, sidecar, status(line))
    await half_open(sidecar)
    for _ in range(5):
        assert int(line[:3]) == (await ask(sidecar, GET)).status
        assert ("half_open", 0) == (look(sidecar).state, look(sidecar).probes)


async def test_a_cancelled_probe_gives_its_lease_back(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    await trip(sidecar)
    now_is(upstream, sidecar, silence)
    await half_open(sidecar)
    for number in range(1, 4):
        app = await sidecar.app()
        await app.send(GET)
        await until(lambda expected=5 + number: len(upstream.requests) == expected)  # type: ignore[misc]
        assert 1 == look(sidecar).probes
        app.close()
        await at_rest(sidecar)
        assert ("half_open", 0) == (look(sidecar).state, look(sidecar).probes)
    now_is(upstream, sidecar, always(OK))
    for _ in range(2):
        assert 200 == (await ask(sidecar, GET)).status
    assert "closed" == look(sidecar).state


async def test_a_probe_that_was_streaming_when_the_app_left_gives_its_lease_back(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    await trip(sidecar)

    async def endless(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await talk.reader.read()

    now_is(upstream, sidecar, endless)
    await half_open(sidecar)
    app = await sidecar.app()
    await app.send(GET)
    await app.reader.readuntil(b"hello\r\n")
    app.close()
    await at_rest(sidecar)
    assert ("half_open", 0) == (look(sidecar).state, look(sidecar).probes)


async def test_a_probe_on_a_dead_kept_connection_goes_out_again_and_is_still_one_probe(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    (breaker,) = breakers(sidecar)

    async def dies_on_reuse(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(OK)
        if talk.upstream.connections == 1:
            await talk.read_request()
            talk.reset()
            return
        while True:
            await talk.read_request()
            await talk.send(OK)

    upstream.script = dies_on_reuse
    assert 200 == (await ask(sidecar, GET)).status  # leaves a connection that will turn out to be dead
    breaker.force_open(asyncio.get_running_loop().time(), "test", 0.02)
    await half_open(sidecar)
    reply = await ask(sidecar, GET)
    assert (200, "2") == (reply.status, reply.get("x-sidecar-attempts"))
    session = await last_session(sidecar)
    assert ["probe", "stale"] == [attempt.kind for attempt in session.attempts]
    assert ["half_open", "half_open"] == [attempt.breaker for attempt in session.attempts]
    assert ("half_open", 0) == (look(sidecar).state, look(sidecar).probes)


async def test_what_began_before_it_opened_says_nothing_afterwards(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if b"/slow" in head:
                await go_on.wait()
                await talk.send(OK)
            else:
                await talk.send(answer(b"no", "503 Service Unavailable"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=SHORT), policies=ONCE)
    slow = [await sidecar.app() for _ in range(3)]
    for app in slow:
        await app.send(request("GET", "/u/slow"))
    await until(lambda: len(upstream.requests) == 3)
    await trip(sidecar)
    await half_open(sidecar)
    go_on.set()
    assert [200] * 3 == [(await app.reply()).status for app in slow]
    assert "half_open" == look(sidecar).state  # three successes, none of them a probe


async def test_a_call_the_app_gave_up_on_counts_only_from_slow_after_on(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(silence)
    found = {}
    for slow_after in (None, 3600.0, 0.001):
        upstream.requests.clear()
        sidecar = await start_sidecar(
            upstreams=route(upstream, breaker={"failure_threshold": 2, "slow_after": slow_after}), policies=ONCE
        )
        for number in range(1, 3):
            app = await sidecar.app()
            await app.send(GET)
            await until(lambda expected=number: len(upstream.requests) == expected)  # type: ignore[misc]
            await asyncio.sleep(0.005)
            app.close()
            await at_rest(sidecar)
        found[slow_after] = look(sidecar).state
    assert {None: "closed", 3600.0: "closed", 0.001: "open"} == found


# ---- per endpoint ------------------------------------------------------------------------------------------------


async def test_each_endpoint_has_its_own(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    dead, alive = await start_upstream(reset_after_request), await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(dead, alive), policies=QUICK_POLICIES)
    app = await sidecar.app()
    for _ in range(30):
        assert 200 == (await app.ask(GET)).status
    assert ["open", "closed"] == [look(sidecar, index).state for index in (0, 1)]
    assert (5, 30) == (len(dead.requests), len(alive.requests))
