"""What requests under way may hold in memory: who gives something up, in which order, and what is said about it."""

from __future__ import annotations

import asyncio
from typing import Any

from sidecar.body import HELD, HELD_WHEN_SHORT, RequestBody
from sidecar.held import Held
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import TINY
from tests.doubles.upstream import Talk, always, answer
from tests.test_admin import admin

MIB = 1_048_576
LIMIT = 4 * MIB
GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"


class Reading:
    """The connection a body comes from."""

    def regulate(self) -> None:
        """It is looked at by `held`."""


def body(held: Held, size: int, *, taken: bool = True) -> RequestBody:
    made = RequestBody(Reading(), False, MIB, held)
    for _ in range(size // 65_536):
        made.feed(b"x" * 65_536)
    if taken:
        made.finish()
        made.arrived_whole()
    return made


# ---- the rules ---------------------------------------------------------------------------------------------------


def test_the_largest_give_up_first_and_no_more_than_needed() -> None:
    held = Held(LIMIT)
    large, small = [body(held, MIB) for _ in range(3)], [body(held, 131_072) for _ in range(3)]
    assert 0 == held.given_up
    small.append(body(held, 262_144))
    assert 0 < held.given_up < 3
    assert [True] * 4 == [one.replayable for one in small]
    assert held.given_up == sum(one.given_up for one in large)
    assert held.bodies == sum(one.kept for one in (*large, *small)) <= LIMIT


def test_what_the_upstream_has_not_got_yet_is_never_given_up() -> None:
    held = Held(LIMIT)
    waiting = [body(held, MIB, taken=False) for _ in range(4)]
    assert [MIB] * 4 == [one.kept for one in waiting]
    assert held.short


def test_between_two_attempts_nothing_is_given_up() -> None:
    held = Held(LIMIT)
    failed = body(held, MIB)
    failed.wanted_again = True
    others = [body(held, MIB) for _ in range(3)]
    assert failed.replayable and any(one.given_up for one in others)


def test_when_that_is_not_enough_new_bodies_are_not_kept_and_then_refused() -> None:
    held = Held(LIMIT)
    waiting = [body(held, MIB, taken=False) for _ in range(4)]
    late = RequestBody(Reading(), False, MIB, held)
    late.feed(b"x" * (HELD_WHEN_SHORT + 1))
    assert (False, True, True) == (late.replayable, late.given_up, late.held)
    refused = held.refusal()
    assert refused is not None
    assert ("OVERLOADED", "memory", 1) == (refused.code, refused.reason, refused.retry_after)
    for one in (*waiting, late):
        one.let_go()
    assert (0, False, None) == (held.bodies, held.short, held.refusal())
    assert RequestBody(Reading(), False, MIB, held).replayable
    assert HELD > HELD_WHEN_SHORT


def test_answers_and_what_waits_for_the_disk_count_as_well() -> None:
    held = Held(LIMIT)
    held.look(lambda: 3 * MIB, 2 * MIB)
    assert held.refusal() is not None
    held.look(lambda: 0, 0)
    assert held.refusal() is None


def test_what_comes_after_the_end_of_its_request_is_not_held() -> None:
    held = Held(LIMIT)
    one = body(held, 131_072)
    one.let_go()
    one.feed(b"x" * 65_536)
    assert 0 == held.bodies == one.kept


# ---- over sockets ------------------------------------------------------------------------------------------------


def post(size: int, announced: int | None = None) -> bytes:
    return b"PUT /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: %d\r\n\r\n" % (announced or size) + b"x" * size


async def stalled(sidecar: Running, count: int) -> list[App]:
    """Uploads of a megabyte of which the last byte never comes."""
    apps = [await sidecar.app() for _ in range(count)]
    for app in apps:
        await app.send(post(MIB - 1, MIB))
    return apps


async def until_still(sidecar: Running) -> None:
    seen = -1
    while seen != sidecar.proxy.held.bodies:
        seen = sidecar.proxy.held.bodies
        await asyncio.sleep(0.1)


async def test_stalled_uploads_take_no_more_than_the_limit_and_others_are_served(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"memory_bytes": LIMIT})
    apps = await stalled(sidecar, 20)
    await until_still(sidecar)
    held = sidecar.proxy.held
    assert held.all <= LIMIT and held.given_up > 0
    assert 200 == (await (await sidecar.app()).ask(GET)).status
    shown = sidecar.proxy.metrics.registry.get_sample_value
    assert (LIMIT, held.given_up, held.bodies) == (
        shown("sidecar_memory_limit_bytes"),
        shown("sidecar_request_bodies_given_up_total"),
        shown("sidecar_memory_held_bytes", {"kind": "bodies"}),
    )
    for app in apps:
        await app.send(b"x")
    assert [200] * 20 == [(await app.reply()).status for app in apps]
    assert 0 == held.bodies


async def test_a_body_that_was_given_up_is_not_sent_again_and_the_session_says_why(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    go_on = asyncio.Event()

    async def slow(talk: Talk) -> None:
        await talk.read_request()
        await go_on.wait()
        await talk.send(answer(b"no", "503 Service Unavailable"))

    upstream = await start_upstream(slow)
    sidecar = await start_sidecar(
        upstreams=route(upstream), policies={"default": TINY}, limits={"memory_bytes": MIB, "replay_body_bytes": MIB}
    )
    app = await sidecar.app()
    await app.send(post(MIB - 1))
    while not sidecar.proxy.held.given_up:
        await asyncio.sleep(0.02)
    go_on.set()
    reply = await app.reply()
    assert (503, "1") == (reply.status, reply.get("x-sidecar-attempts"))
    session = (await admin(sidecar, f"/sessions/{reply.get('x-sidecar-session')}")).json
    assert "limits.memory_bytes" in str(session["explanation"])
    assert 1.0 == sidecar.proxy.metrics.registry.get_sample_value(
        "sidecar_retries_suppressed_total", {"upstream": "u", "reason": "memory"}
    )
    assert {"not_retryable": 1} == sidecar.outcomes


async def test_at_the_limit_a_body_is_refused_early_and_a_get_is_served(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"memory_bytes": MIB})
    sidecar.proxy.held.look(lambda: 2 * MIB, 0)
    app = await sidecar.app()
    reply = await app.ask(post(1000))
    assert (503, "OVERLOADED", "1") == (reply.status, reply.json["error_code"], reply.get("retry-after"))
    assert "limits.memory_bytes" in reply.json["message"]
    assert {"denied": 1} == sidecar.outcomes
    assert 200 == (await (await sidecar.app()).ask(GET)).status
    assert 1 == len(upstream.requests)
