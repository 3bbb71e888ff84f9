"""Waiting for a turn: after a 429 for the credential it was about, and under `max_in_flight`."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import NO_BREAKER, TINY, ask, at_rest, ended, field, last_session, request, until
from tests.doubles.upstream import Talk, Upstream, always, answer

OK = answer(b"ok")
ONCE = {"RATE_LIMIT_EXCEEDED": {"max_attempts": 1}}


def route(upstream: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER, **keys}}


def get(credential: str = "one", *fields: str, path: str = "/u/x") -> bytes:
    return request("GET", path, f"Authorization: Bearer {credential}", *fields)


class Limiter:
    """A script: the first request of each credential in `limited` gets a 429 with a wait, all others a 200."""

    def __init__(self, *limited: str, wait: str = "retry-after-ms: 150", line: str = "429 Too Many Requests") -> None:
        self._limited = {f"Bearer {name}".encode() for name in limited}
        self._refusal = answer(b"slow down", line, wait)

    async def __call__(self, talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            credential = field(head, b"authorization") or field(head, b"x-api-key") or b""
            if credential in self._limited:
                self._limited.discard(credential)
                await talk.send(self._refusal)
            else:
                await talk.send(OK)


def paths(upstream: Upstream) -> list[str]:
    return [head.split(b" ")[1].decode() for head in upstream.requests]


def gate(sidecar: Running) -> Any:
    return sidecar.proxy.directory.configured["u"].turns.gate


# ---- the gate ----------------------------------------------------------------------------------------------------


async def test_calls_with_the_same_credential_wait_and_all_others_pass(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Limiter("one"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    assert 429 == (await ask(sidecar, get("one"))).status
    waiting = await sidecar.app()
    await waiting.send(get("one", path="/u/waiting"))
    await until(lambda: gate(sidecar).waiting == 1)
    for fields in (["Authorization: Bearer two"], ["x-api-key: one"], []):
        assert 200 == (await ask(sidecar, request("GET", "/u/other", *fields))).status
    assert 1 == gate(sidecar).waiting
    assert ["/x", "/other", "/other", "/other"] == paths(upstream)
    reply = await waiting.reply()
    assert (200, "1", "first_try") == (
        reply.status,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    assert "/waiting" == paths(upstream)[-1]
    live = sidecar.proxy.metrics.registry.get_sample_value("sidecar_rate_limit_pauses_total", {"upstream": "u"})
    assert live in (None, 1.0)  # shown once the admin port collects living objects
    assert 1 == gate(sidecar).pauses
    await at_rest(sidecar)


async def test_nobody_goes_before_the_reset_and_then_they_go_in_the_order_they_came(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Limiter("one", wait="retry-after-ms: 200"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE, telemetry={"slow_threshold": 0.01})
    assert 429 == (await ask(sidecar, get())).status
    apps = [await sidecar.app() for _ in range(8)]
    for number, app in enumerate(apps):
        await app.send(get(path=f"/u/{number}"))
        await until(lambda expected=number + 1: gate(sidecar).waiting == expected)  # type: ignore[misc]
    assert ["/x"] == paths(upstream)
    assert [200] * 8 == [(await app.reply()).status for app in apps]
    limited, *waited = ended(sidecar)
    reset = limited.attempts[0].ended + 0.2
    assert all(session.attempts[0].started >= reset - 0.002 for session in waited)  # timers are whole milliseconds
    started = {session.target: session.attempts[0].started for session in waited}
    assert [f"/u/{number}" for number in range(8)] == sorted(started, key=started.__getitem__)
    assert all(0.0 < session.waited <= session.ended - session.started for session in waited)


async def test_the_call_that_was_refused_comes_back_after_the_wait_as_well(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Limiter("one", wait="retry-after-ms: 50"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"RATE_LIMIT_EXCEEDED": TINY})
    reply = await ask(sidecar, request("POST", "/u/x", "Authorization: Bearer one", body=b"hi"))
    assert (200, "2", "recovered") == (reply.status, reply.get("x-sidecar-attempts"), reply.get("x-sidecar-outcome"))
    assert 0.05 == (await last_session(sidecar)).attempts[1].delay


@pytest.mark.parametrize("wait", ["X-Other: 1", "Retry-After: 0", "Retry-After: never"])
async def test_a_429_that_names_no_wait_pauses_nobody(
    start_sidecar: Starter, start_upstream: UpstreamStarter, wait: str
) -> None:
    upstream = await start_upstream(Limiter("one", wait=wait))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    assert 429 == (await ask(sidecar, get())).status
    assert (200, 0) == ((await ask(sidecar, get())).status, gate(sidecar).pauses)


async def test_a_503_with_a_wait_pauses_nobody_else(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(Limiter("one", wait="Retry-After: 50", line="503 Service Unavailable"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"default": {"max_attempts": 1}})
    assert 503 == (await ask(sidecar, get())).status
    assert (200, 0) == ((await ask(sidecar, get())).status, gate(sidecar).pauses)


async def test_a_gate_that_is_switched_off_holds_nobody(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Limiter("one", wait="Retry-After: 50"))
    sidecar = await start_sidecar(upstreams=route(upstream, rate_limit_gate={"enabled": False}), policies=ONCE)
    assert [429, 200] == [(await ask(sidecar, get())).status for _ in range(2)]


async def test_who_cannot_be_let_go_before_the_deadline_is_told_now(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Limiter("one", wait="Retry-After: 50"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE)
    assert 429 == (await ask(sidecar, get())).status
    reply = await ask(sidecar, get("one", "x-sidecar-timeout: 20"))
    assert (429, "RATE_LIMIT_EXCEEDED", "deadline", "0") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
        reply.get("x-sidecar-attempts"),
    )
    assert 48 <= int(reply.get("retry-after") or 0) == reply.json["retry_after"] <= 50
    assert "deadline" == reply.json["details"]["reason"]
    said = re.fullmatch(
        r"the upstream asked calls with this credential to wait another (\S+) s, longer than this request may take",
        reply.json["message"],
    )
    assert said is not None
    assert 40 < float(said[1]) <= 50
    session = await last_session(sidecar, 2)
    assert (session.ended - session.started < 10, []) == (True, session.attempts)
    assert 1 == len(upstream.requests)
    await at_rest(sidecar)


async def test_beyond_the_queues_length_a_call_is_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Limiter("one", wait="Retry-After: 50"))
    sidecar = await start_sidecar(upstreams=route(upstream, rate_limit_gate={"max_queue": 2}), policies=ONCE)
    await ask(sidecar, get())
    for number in range(1, 3):
        await (await sidecar.app()).send(get())
        await until(lambda expected=number: gate(sidecar).waiting == expected)  # type: ignore[misc]
    reply = await ask(sidecar, get())
    assert (503, "OVERLOADED", "denied", "gate") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
        reply.json["details"]["reason"],
    )
    assert 48 <= int(reply.get("retry-after") or 0) <= 50
    assert (200, 2) == ((await ask(sidecar, get("two"))).status, gate(sidecar).waiting)


async def test_a_second_429_makes_the_pause_longer_and_those_who_wait_wait_on(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    both_here = asyncio.Event()
    waits = iter(["retry-after-ms: 60", "retry-after-ms: 250"])

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if b"/limited" in head:
                wait = next(waits)
                if len(talk.upstream.requests) == 2:
                    both_here.set()
                await both_here.wait()
                await talk.send(answer(b"", "429 Too Many Requests", wait))
            else:
                await talk.send(OK)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=ONCE, telemetry={"slow_threshold": 0.01})
    await asyncio.gather(*(ask(sidecar, get(path="/u/limited")) for _ in range(2)))
    assert 200 == (await ask(sidecar, get())).status
    *limited, waited = ended(sidecar)
    assert waited.attempts[0].started >= min(one.attempts[0].ended for one in limited) + 0.248


# ---- places ------------------------------------------------------------------------------------------------------


class Busy:
    """A script that counts how many requests it holds at once and answers one for each `release`."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._go_on = asyncio.Semaphore(0)

    def release(self, times: int = 1) -> None:
        for _ in range(times):
            self._go_on.release()

    async def __call__(self, talk: Talk) -> None:
        while True:
            await talk.read_request()
            self.now += 1
            self.most = max(self.most, self.now)
            await self._go_on.acquire()
            self.now -= 1
            await talk.send(OK)


async def asked(sidecar: Running, number: int) -> App:
    app = await sidecar.app()
    await app.send(request("GET", f"/u/{number}"))
    return app


async def test_beyond_max_in_flight_calls_wait_in_order_and_beyond_max_queue_they_are_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    busy = Busy()
    upstream = await start_upstream(busy)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=2, max_queue=3))
    turns = sidecar.proxy.directory.configured["u"].turns
    apps = []
    for number in range(5):
        apps.append(await asked(sidecar, number))
        await until(lambda n=number: len(upstream.requests) + turns.waiting == n + 1)  # type: ignore[misc]
    assert (2, 3) == (busy.now, turns.waiting)
    refused = await ask(sidecar, request("GET", "/u/5"))
    assert (503, "OVERLOADED", "denied") == (
        refused.status,
        refused.json["error_code"],
        refused.get("x-sidecar-outcome"),
    )
    assert int(refused.get("retry-after") or 0) >= 1
    assert "max_queue" in refused.json["message"]
    busy.release(5)
    assert [200] * 5 == [(await app.reply()).status for app in apps]
    assert ["/0", "/1", "/2", "/3", "/4"] == paths(upstream)
    assert 2 == busy.most
    assert {"first_try": 5, "denied": 1} == sidecar.outcomes
    await at_rest(sidecar)


async def test_a_call_keeps_its_place_through_its_retries(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            failing = len(talk.upstream.requests) == 1
            await talk.send(answer(b"", "503 Service Unavailable", "retry-after-ms: 60") if failing else OK)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(
        upstreams=route(upstream, max_in_flight=1, max_queue=5),
        policies={"default": TINY},
        telemetry={"slow_threshold": 0.001},
    )
    first = await asked(sidecar, 0)
    await until(lambda: bool(sidecar.proxy.backoffs))
    second = await asked(sidecar, 1)
    assert [200, 200] == [(await app.reply()).status for app in (first, second)]
    assert ["/0", "/0", "/1"] == paths(upstream)
    waited = ended(sidecar)[-1]
    assert waited.waited > 0.0
    (attempt,) = waited.attempts
    assert attempt.started - waited.started >= waited.waited - 0.001  # its attempt began after its wait


async def test_the_limit_is_per_upstream(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    busy = Busy()
    full, free = await start_upstream(busy), await start_upstream(always(OK))
    upstreams = route(full, max_in_flight=1) | {"free": {"route": "/free", "endpoints": [free.url]}}
    sidecar = await start_sidecar(upstreams=upstreams)
    app = await asked(sidecar, 0)
    await until(lambda: busy.now == 1)
    assert 503 == (await ask(sidecar, request("GET", "/u/1"))).status
    assert 200 == (await ask(sidecar, request("GET", "/free/1"))).status
    busy.release()
    assert 200 == (await app.reply()).status


async def test_no_place_is_ever_lost(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    """Calls that end, that are cancelled in the queue and under way, that run out of time: over and over."""
    busy = Busy()
    upstream = await start_upstream(busy)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=3, max_queue=50))
    turns = sidecar.proxy.directory.configured["u"].turns
    for _ in range(10):
        apps = [await asked(sidecar, number) for number in range(9)]
        await until(lambda: busy.now == 3 and turns.waiting == 6)
        impatient = await sidecar.app()
        await impatient.send(request("GET", "/u/late", "x-sidecar-timeout: 0.01"))
        for app in apps[4:7]:
            app.close()
        apps[1].close()
        assert 504 == (await impatient.reply()).status
        busy.release(9)
        for app in (*apps[:1], *apps[2:4], *apps[7:]):
            assert 200 == (await app.reply()).status
        await at_rest(sidecar)
        busy._go_on = asyncio.Semaphore(0)
        busy.now = 0
