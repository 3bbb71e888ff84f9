"""How long the sidecar waits before it tries again: what an upstream may ask for, and what it may not.

A wait is read from the record's decision, which is made before the waiting: the app then goes away, and nobody
waits for policy time.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sidecar.clock import http_date
from telemetry.record import Session
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.faults import (
    NO_BREAKER,
    QUICK_POLICIES,
    TINY,
    ask,
    at_rest,
    in_turn,
    last_session,
    request,
    silence,
    status,
    unanswering_port,
    until,
)
from tests.doubles.upstream import Talk, Upstream, answer

GET = request("GET", "/u/x")
OK = answer(b"ok")


def route(upstream: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER, **keys}}


def policies(**keys: Any) -> dict[str, Any]:
    """The shipped ones, all with these keys."""
    return {name: {**policy, **keys} for name, policy in QUICK_POLICIES.items()}


def dated(seconds_ahead: float, *, date: float = 1_000_000_000.0) -> list[str]:
    """A Retry-After of the date form, measured by a clock far from ours."""
    return [f"Date: {http_date(date).decode()}", f"Retry-After: {http_date(date + seconds_ahead).decode()}"]


async def waiting_session(sidecar: Running, data: bytes = GET) -> Session:
    """Ask, wait until the sidecar is about to wait, go away; the session as it was then."""
    app = await sidecar.app()
    await app.send(data)
    await until(lambda: bool(sidecar.proxy.backoffs), "no retry is planned")
    app.close()
    session = await last_session(sidecar)
    assert "cancelled" == session.outcome
    return session


def planned(session: Session) -> float | None:
    decision = session.attempts[-1].decision
    assert decision is not None
    return decision.delay


# ---- what is asked for and granted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        (["Retry-After: 7"], 7.0),
        (["retry-after:   7  "], 7.0),
        (dated(9), 9.0),
        (["Retry-After-Ms: 1500"], 1.5),
        (["Retry-After: 30", "retry-after-ms: 2500"], 2.5),
        (["Retry-After: 55"], 55.0),
        (
            [
                f"Retry-After: {http_date(time.time() + 3600).decode()}",
                f"Date: {http_date(time.time() + 3570).decode()}",
            ],
            30.0,
        ),
    ],
    ids=["seconds", "spaces", "date", "milliseconds", "milliseconds win", "longer than max_delay", "their clock ahead"],
)
@pytest.mark.parametrize("line", ["503 Service Unavailable", "429 Too Many Requests"])
async def test_the_upstream_says_when_to_come_back(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str, fields: list[str], seconds: float
) -> None:
    upstream = await start_upstream(status(line, *fields))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=policies(total_timeout=600.0))
    session = await waiting_session(sidecar)
    assert seconds == pytest.approx(planned(session), abs=1.01 if "their clock" in str(fields) else 1e-9)
    assert f"Retry-After of {planned(session):g} s" in session.attempts[0].decision.rule  # type: ignore[union-attr]
    assert 1 == len(upstream.requests)


async def test_a_wait_of_some_milliseconds_is_waited_out_and_written_down(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    late = answer(b"no", "503 Service Unavailable", "retry-after-ms: 20")
    upstream = await start_upstream(in_turn(late, late, OK))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    assert b"ok" == (await ask(sidecar, GET)).body
    session = await last_session(sidecar)
    assert [0.0, 0.02, 0.02] == [attempt.delay for attempt in session.attempts]
    first, second, third = session.attempts
    for before, after in ((first, second), (second, third)):
        assert after.started - before.ended >= 0.018  # the loop's timers are whole milliseconds


async def test_the_ceiling_cuts_what_the_upstream_asks_for(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("503 Service Unavailable", "Retry-After: 86400"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=policies(total_timeout=3600.0))
    assert 300.0 == planned(await waiting_session(sidecar))


@pytest.mark.parametrize(
    ("line", "attempts"), [("503 Service Unavailable", "4"), ("429 Too Many Requests", "3")], ids=["503", "429"]
)
async def test_a_policy_may_ignore_what_the_upstream_asks_for(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str, attempts: str
) -> None:
    upstream = await start_upstream(status(line, "Retry-After: 3600"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=policies(respect_retry_after=False))
    for _ in range(2):  # and no gate holds the next one up
        assert attempts == (await ask(sidecar, GET)).get("x-sidecar-attempts")


HOSTILE = {
    "negative": "-5",
    "very negative": "-99999999999999999999",
    "past date": "Sun, 06 Nov 1994 08:49:37 GMT",
    "garbage": "soon",
    "empty": "",
    "infinite": "inf",
    "not a number": "nan",
    "hexadecimal": "0x10",
    "exponent": "1e400",
    "list": "1, 2",
    "no such day": "Mon, 31 Feb 2022 08:49:37 GMT",
    "zero": "0",
    "binary": "\xff\xfe\x80",
    "long": "a" * 8000,
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("line", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_a_hostile_retry_after_does_not_hold_anything_up(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str, value: str
) -> None:
    upstream = await start_upstream(in_turn(answer(b"no", line, f"Retry-After: {value}"), OK))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert (200, b"ok", "2") == (reply.status, reply.body, reply.get("x-sidecar-attempts"))
    session = await last_session(sidecar)
    assert 0.0 <= session.attempts[1].delay <= TINY["max_delay"]
    assert b"ok" == (await ask(sidecar, GET)).body  # nor is anyone else held up


@pytest.mark.parametrize(
    "value", ["999999999999", "9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT"], ids=["large", "huge", "far date"]
)
@pytest.mark.parametrize("line", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_an_endless_retry_after_is_bounded_by_the_ceiling(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str, value: str
) -> None:
    upstream = await start_upstream(in_turn(answer(b"no", line, f"Retry-After: {value}"), OK))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=policies(retry_after_ceiling=0.03))
    reply = await ask(sidecar, GET)
    assert (200, "2") == (reply.status, reply.get("x-sidecar-attempts"))
    assert 0.03 == (await last_session(sidecar)).attempts[1].delay
    assert b"ok" == (await ask(sidecar, GET)).body  # the gate of a 429 is open again as well


# ---- what does not fit is not waited for -------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["503 Service Unavailable", "429 Too Many Requests"])
async def test_a_wait_beyond_the_deadline_ends_the_session_now_with_the_upstreams_answer(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str
) -> None:
    upstream = await start_upstream(status(line, "Retry-After: 120", "X-Own: yes", body=b"come back"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    began = time.monotonic()
    reply = await ask(sidecar, GET)
    assert time.monotonic() - began < 30  # it could have waited for a minute
    assert (int(line[:3]), b"come back", "yes") == (reply.status, reply.body, reply.get("x-own"))
    assert ("120", "deadline", "1") == tuple(
        reply.get(name) for name in ("retry-after", "x-sidecar-outcome", "x-sidecar-attempts")
    )
    session = await last_session(sidecar)
    assert ("deadline", "deadline") == (session.outcome, session.suppressed)
    assert "a wait of 120 s does not fit" in session.attempts[0].decision.rule  # type: ignore[union-attr]
    assert {"deadline": 1} == sidecar.outcomes


async def test_the_request_may_bring_a_deadline_of_its_own(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("503 Service Unavailable", "Retry-After: 3"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    reply = await ask(sidecar, request("GET", "/u/x", "x-sidecar-timeout: 2.5"))
    assert (503, "deadline") == (reply.status, reply.get("x-sidecar-outcome"))
    assert "x-sidecar-timeout: 2.5" in (await last_session(sidecar)).attempts[0].decision.rule  # type: ignore[union-attr]


async def test_total_timeout_ends_an_attempt_that_gets_no_answer(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(silence)
    sidecar = await start_sidecar(
        upstreams=route(upstream), policies=policies(attempt_timeout=0.2, total_timeout=0.6, max_attempts=10)
    )
    reply = await ask(sidecar, GET)
    assert (504, "NETWORK_TIMEOUT", "deadline") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
    )
    assert "deadline" == reply.json["details"]["reason"]
    assert 2 <= reply.json["details"]["attempts"] == len(upstream.requests) <= 3  # time is looked at every 0.1 s


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        (["x-sidecar-attempt-timeout: 0.1"], {}),
        ([], {"attempt_timeout": 0.1}),
        (["x-sidecar-timeout: 0.1"], {}),
    ],
    ids=["header", "policy", "total"],
)
async def test_an_attempt_includes_the_time_it_takes_to_connect(
    start_sidecar: Starter, fields: list[str], keys: dict[str, Any]
) -> None:
    with unanswering_port() as port:
        sidecar = await start_sidecar(
            upstreams={"u": {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"], "timeouts": {"connect": 50.0}}},
            policies=policies(max_attempts=1, **keys),
        )
        reply = await ask(sidecar, request("GET", "/u/x", *fields))
    assert (504, "CONNECT_TIMEOUT") == (reply.status, reply.json["error_code"])
    (attempt,) = (await last_session(sidecar)).attempts
    assert attempt.ended - attempt.started < 20


async def test_a_tunnel_is_not_waited_for_past_the_deadline_either(start_sidecar: Starter) -> None:
    with unanswering_port() as port:
        sidecar = await start_sidecar(
            upstreams={"u": {"hosts": [f"127.0.0.1:{port}"], "timeouts": {"connect": 50.0}}},
            policies=policies(max_attempts=1),
        )
        head = request("CONNECT", f"127.0.0.1:{port}", "x-sidecar-timeout: 0.1")
        reply = await ask(sidecar, head)
    assert (504, "CONNECT_TIMEOUT") == (reply.status, reply.json["error_code"])


async def test_a_body_that_comes_after_its_head_does_not_put_the_deadline_off(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """Many clients send head and body apart."""
    upstream = await start_upstream(silence)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    app = await sidecar.app()
    await app.send(request("PUT", "/u/x", "x-sidecar-timeout: 0.3", "Content-Length: 5"))
    await until(lambda: len(upstream.requests) == 1)
    await app.send(b"hello")
    reply = await app.reply(within=20)
    assert (504, "NETWORK_TIMEOUT", "deadline") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
    )


async def test_an_upload_that_takes_longer_than_the_deadline_still_gets_its_answer(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """While bytes move nobody waits in vain; the answer then has the time of an attempt."""
    upstream = await start_upstream(in_turn(OK))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    app = await sidecar.app()
    await app.send(request("PUT", "/u/x", "x-sidecar-timeout: 0.1", "Content-Length: 5"))
    for byte in b"hello":
        await asyncio.sleep(0.06)
        await app.send(bytes([byte]))
    assert b"ok" == (await app.reply()).body


async def test_a_stop_ends_the_wait_and_no_retry_is_begun(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("503 Service Unavailable", "Retry-After: 30"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    app = await sidecar.app()
    await app.send(GET)
    await until(lambda: bool(sidecar.proxy.backoffs))
    sidecar.proxy.drain()
    reply = await app.reply()
    assert (503, "TEMPORARY_UNAVAILABLE", "draining") == (
        reply.status,
        reply.json["error_code"],
        reply.json["details"]["reason"],
    )
    assert ("draining", 1) == ((await last_session(sidecar)).suppressed, len(upstream.requests))
    await at_rest(sidecar)


# ---- the server's own verdict ------------------------------------------------------------------------------------

DEFAULT_ATTEMPTS = 4


@pytest.mark.parametrize("name", ["x-should-retry", "stripe-should-retry"])
@pytest.mark.parametrize(
    ("method", "line", "said", "attempts", "outcome"),
    [
        ("GET", "503 Service Unavailable", "false", 1, "not_retryable"),
        ("GET", "429 Too Many Requests", "FALSE", 1, "not_retryable"),
        ("GET", "404 Not Found", "true", DEFAULT_ATTEMPTS, "exhausted"),
        ("GET", "404 Not Found", "maybe", 1, "rejected"),
        ("GET", "409 Conflict", "true", DEFAULT_ATTEMPTS, "exhausted"),
        ("POST", "503 Service Unavailable", "true", 1, "not_retryable"),
        ("POST", "404 Not Found", "true", 1, "rejected"),
        ("POST", "429 Too Many Requests", "false", 1, "not_retryable"),
    ],
)
async def test_the_server_may_forbid_a_retry_and_ask_for_one_but_not_for_an_unsafe_one(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    name: str,
    method: str,
    line: str,
    said: str,
    attempts: int,
    outcome: str,
) -> None:
    upstream = await start_upstream(status(line, f"{name}: {said}"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    reply = await ask(sidecar, request(method, "/u/x", body=b"hi" if method == "POST" else b""))
    assert (attempts, str(attempts), outcome) == (
        len(upstream.requests),
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    assert said == reply.get(name)  # what the upstream says is passed on


# ---- a small answer that breaks ----------------------------------------------------------------------------------


def broken_at_first(data: bytes, cut: int) -> Any:
    """The first connection ends after so many bytes of the answer, the others answer whole."""

    async def script(talk: Talk) -> None:
        first = talk.upstream.connections == 1
        await talk.read_request()
        await talk.send(data[:cut] if first else data)
        await asyncio.sleep(0.02)
        talk.close()

    return script


async def test_a_small_answer_that_breaks_in_the_middle_is_made_whole_by_a_retry(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    whole = answer(b"x" * 60_000)
    for cut in (1, len(whole) - 59_999, len(whole) - 1):
        upstream = await start_upstream(broken_at_first(whole, cut))
        sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
        reply = await ask(sidecar, GET)
        assert (200, b"x" * 60_000, "2", "recovered") == (
            reply.status,
            reply.body,
            reply.get("x-sidecar-attempts"),
            reply.get("x-sidecar-outcome"),
        )
        assert 2 == len(upstream.requests)


@pytest.mark.parametrize(
    "whole",
    [
        answer(b"x" * 70_000),
        answer(b"data: x\n\n", "200 OK", "Content-Type: text/event-stream"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ],
    ids=["large", "event stream", "chunked"],
)
async def test_an_answer_that_has_begun_is_never_asked_for_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter, whole: bytes
) -> None:
    upstream = await start_upstream(broken_at_first(whole, len(whole) - 6))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    app = await sidecar.app()
    reply = await app.ask(GET)
    assert (200, False) == (reply.status, reply.complete)
    assert await app.closed()
    session = await last_session(sidecar)
    assert ("failed_streaming", "response_started", "CONNECTION_RESET") == (
        session.outcome,
        session.suppressed,
        session.code,
    )
    assert 1 == len(upstream.requests)
    await at_rest(sidecar)


async def test_a_lower_buffer_limit_gives_up_the_recovery_of_larger_answers(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    whole = answer(b"x" * 100)
    upstream = await start_upstream(broken_at_first(whole, len(whole) - 1))
    sidecar = await start_sidecar(
        upstreams=route(upstream), policies=QUICK_POLICIES, limits={"buffer_response_bytes": 99}
    )
    reply = await ask(sidecar, GET)
    assert (False, 1) == (reply.complete, len(upstream.requests))
