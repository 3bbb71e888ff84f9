"""What the end of `shutdown_grace` cuts off: answered, kept, and never blamed on the app."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar import clock
from sidecar.durable.filters import Filter
from telemetry.record import Session
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.letters import keep
from tests.doubles.upstream import Script, Talk, answer
from tests.test_admin import admin
from tests.test_dead_letters_live import letters_of, until
from tests.test_lifecycle import Runner, held_back, requests_in_flight, routed, run
from tests.test_replay_live import parts

__all__ = ["run"]

POST = "POST /u/pay HTTP/1.1\r\nHost: s\r\nContent-Length: 5\r\n\r\nhello"
KEYED = POST.replace("Content-Length", "Idempotency-Key: k\r\nContent-Length")
GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"


def silent() -> Script:
    """Reads, and never answers."""
    return held_back(asyncio.Event())


def sessions(sidecar: Running) -> list[Session]:
    return [session for _, session in sidecar.proxy.signals.sessions.ring.newest_first()][::-1]


async def cut_off(sidecar: Running, app: App, grace: float = 0.05) -> Reply:
    """Stops the sidecar; what the app gets for what it has under way."""
    stopping = asyncio.ensure_future(sidecar.stop(grace=grace))
    try:
        return await app.reply()
    finally:
        assert not await stopping


async def under_way(sidecar: Running, count: int = 1) -> None:
    await until(lambda: count == sum(bool(one.busy) for one in sidecar._downstreams()))


def told(reply: Reply) -> tuple[Any, ...]:
    details = reply.json["details"]
    return reply.status, reply.json["error_code"], details["reason"], details["outcome"], bool(details["dlq_id"])


CUT = (503, "SHUTTING_DOWN", "draining", "deadline")


async def test_a_post_that_was_sent_is_answered_and_kept_as_one_that_may_have_been_executed(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream(silent())
    keys = {"upstreams": route(upstream), "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    app = await sidecar.app()
    await app.send(POST)
    await until(lambda: upstream.bodies)
    reply = await cut_off(sidecar, app)
    assert (*CUT, True) == told(reply)
    assert ("2", "close") == (reply.get("retry-after"), reply.get("connection"))
    (session,) = sessions(sidecar)
    assert ("deadline", "SHUTTING_DOWN", "draining") == (session.outcome, session.code, session.suppressed)
    again = await start_sidecar(**keys)
    (letter,) = await letters_of(again)
    assert reply.json["details"]["dlq_id"] == letter.dlq_id
    assert ("SHUTTING_DOWN", "sent", "unsafe") == (letter.error_class, letter.send_phase, letter.verdict)
    durable = again.proxy.kept.durable
    assert durable is not None
    assert b"hello" == (await durable.letters.request(letter.dlq_id)).body


async def test_a_get_is_answered_and_its_breaker_hears_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(silent())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    await until(lambda: upstream.requests)
    assert (*CUT, False) == told(await cut_off(sidecar, app))
    (endpoint,) = sidecar.proxy.directory.configured["u"].endpoints.values()
    assert (0, 0) == endpoint.breaker.snapshot(clock.monotonic())[2:4]
    assert {"deadline": 1} == sidecar.outcomes


async def test_a_post_that_waits_for_a_place_was_never_sent_and_is_safe(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream(silent())
    keys = {"upstreams": route(upstream, max_in_flight=1, max_queue=5), "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    first, waiting = await sidecar.app(), await sidecar.app()
    await first.send(GET)
    await until(lambda: upstream.requests)
    await waiting.send(POST)
    await under_way(sidecar, 2)
    assert (*CUT, True) == told(await cut_off(sidecar, waiting))
    assert (*CUT, False) == told(await first.reply())
    (letter,) = await letters_of(await start_sidecar(**keys))
    assert ("not_connected", "safe") == (letter.send_phase, letter.verdict)


async def test_a_post_that_waits_at_the_gate_was_never_sent_and_is_safe(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    limited = answer(b"", "429 Too Many Requests", "Retry-After: 30")

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(limited)

    upstream = await start_upstream(script)
    keys = {"upstreams": route(upstream), "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    assert 429 == (await (await sidecar.app()).ask(GET.replace("Host", "x-sidecar-retry: off\r\nHost"))).status
    app = await sidecar.app()
    await app.send(POST)
    await under_way(sidecar)
    assert (*CUT, True) == told(await cut_off(sidecar, app))
    (letter,) = await letters_of(await start_sidecar(**keys))
    assert ("not_connected", "safe", 1) == (letter.send_phase, letter.verdict, len(upstream.requests))


async def test_a_connection_that_is_still_being_opened_carried_nothing(
    start_sidecar: Starter, route: Any, tmp_path: Path
) -> None:
    never = asyncio.Event()

    async def lookup(host: str, port: int) -> Any:
        await never.wait()

    upstreams = {"u": {"route": "/u", "endpoints": ["http://slow.test"], "timeouts": {"connect": 30}}}
    state = str(tmp_path / "state")
    sidecar = await start_sidecar(lookup=lookup, upstreams=upstreams, state_dir=state)
    app = await sidecar.app()
    await app.send(POST)
    await under_way(sidecar)
    assert (*CUT, True) == told(await cut_off(sidecar, app))
    (letter,) = await letters_of(await start_sidecar(upstreams=upstreams, state_dir=state))
    assert ("not_connected", "safe") == (letter.send_phase, letter.verdict)


@pytest.mark.parametrize("rest", ["", "lo"])
async def test_an_upload_under_way_is_answered_and_kept_if_the_rest_still_comes(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path, rest: str
) -> None:
    upstream = await start_upstream(silent())
    keys = {"upstreams": route(upstream), "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    app = await sidecar.app()
    await app.send(POST[:-2])
    await until(lambda: upstream.requests)
    stopping = asyncio.ensure_future(sidecar.stop(grace=0.05))
    await until(lambda: sidecar.proxy.cutting_off)
    await app.send(rest)
    assert (*CUT, bool(rest)) == told(await app.reply())
    assert await app.closed()
    assert not await stopping
    letters = await letters_of(await start_sidecar(**keys))
    assert [("partly_sent", "unsafe")] * bool(rest) == [(one.send_phase, one.verdict) for one in letters]


async def test_an_answer_that_has_begun_is_visibly_broken_off(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def endless(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await asyncio.Event().wait()

    upstream = await start_upstream(endless)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    head = await app.reply(to_head=True)
    stopping = asyncio.ensure_future(sidecar.stop(grace=0.05))
    rest = await asyncio.wait_for(app.reader.read(), 10)
    assert (200, b"5\r\nhello\r\n") == (head.status, rest)
    assert not await stopping
    (session,) = sessions(sidecar)
    assert ("failed_streaming", "SHUTTING_DOWN") == (session.outcome, session.code)


async def test_a_tunnel_is_closed_and_says_who_did_it(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(silent())
    sidecar = await start_sidecar(egress={"connect_ports": [upstream.port]})
    app = await sidecar.app()
    place = f"127.0.0.1:{upstream.port}"
    assert 200 == (await app.ask(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n", to_head=True)).status
    assert not await sidecar.stop(grace=0.05)
    assert await app.closed()
    (session,) = sessions(sidecar)
    assert ("tunnelled", "SHUTTING_DOWN") == (session.outcome, session.code)
    assert "shutting" not in sidecar.logged.getvalue()
    assert "told to stop" in sidecar.proxy.signals.explain(session)


async def test_the_claim_of_a_key_is_given_back_so_that_the_same_call_may_come_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    answered = asyncio.Event()

    async def second_time(talk: Talk) -> None:
        await talk.read_request()
        if len(upstream.requests) > 1:
            await talk.send(answer(b"paid"))
            answered.set()
        await asyncio.Event().wait()

    upstream = await start_upstream(second_time)
    keys = {
        "upstreams": route(upstream, idempotency={"provider_honours": False}),
        "state_dir": str(tmp_path / "state"),
    }
    sidecar = await start_sidecar(**keys)
    app = await sidecar.app()
    await app.send(KEYED)
    await until(lambda: upstream.bodies)
    assert (*CUT, True) == told(await cut_off(sidecar, app))
    again = await start_sidecar(**keys)
    reply = await (await again.app()).ask(KEYED)
    assert (200, b"paid") == (reply.status, reply.body)
    (letter,) = await letters_of(again)
    await until(lambda: answered.is_set())
    assert "completed" == (await _status(again, letter.dlq_id))


async def _status(sidecar: Running, dlq_id: str) -> str:
    durable = sidecar.proxy.kept.durable
    assert durable is not None
    async with asyncio.timeout(10):
        while True:
            (letter,) = (await durable.listing.page(Filter())).items
            if letter.status != "pending":
                return letter.status
            await asyncio.sleep(0.01)


async def test_a_replay_under_way_is_noted_with_how_far_it_got(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream(silent())
    upstreams = {"payments": {"endpoints": [upstream.url], "hosts": ["api.test"]}}
    keys = {"upstreams": upstreams, "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    dlq_id = await keep(sidecar, upstream)
    replaying = asyncio.ensure_future(parts(sidecar)[1].one(dlq_id, "tester"))
    await until(lambda: upstream.requests)
    assert not await sidecar.stop(grace=0.05)
    assert "failed" == (await replaying).outcome
    (letter,) = await letters_of(await start_sidecar(**keys))
    assert ("pending", "SHUTTING_DOWN", "sent", "unsafe") == (
        letter.status,
        letter.error_class,
        letter.send_phase,
        letter.verdict,
    )
    assert "replay_interrupted" not in {event["event"] for event in letter.history}


async def test_a_delivery_under_way_is_settled_as_one_that_may_have_arrived(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    upstream = await start_upstream(silent())
    keys = {"upstreams": route(upstream), "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    posted = await (await sidecar.app()).ask(POST.replace("Host", "Prefer: respond-async\r\nHost"))
    await until(lambda: upstream.bodies)
    assert not await sidecar.stop(grace=0.05)
    again = await start_sidecar(**keys)
    job = (await admin(again, f"/jobs/{posted.json['job_id']}")).json
    (delivery,) = job["deliveries"]
    assert ("unknown", True) == (delivery["state"], "SHUTTING_DOWN" in delivery["last_error"])
    assert 1 == len(upstream.requests)


async def test_a_replay_that_ends_within_the_grace_completes(
    start_sidecar: Starter, start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    go_on = asyncio.Event()
    upstream = await start_upstream(held_back(go_on))
    upstreams = {"payments": {"endpoints": [upstream.url], "hosts": ["api.test"]}}
    keys = {"upstreams": upstreams, "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    dlq_id = await keep(sidecar, upstream)
    replaying = asyncio.ensure_future(parts(sidecar)[1].one(dlq_id, "tester"))
    await until(lambda: upstream.requests)
    stopping = asyncio.ensure_future(sidecar.stop(grace=10))
    await until(lambda: sidecar.proxy.draining)
    go_on.set()
    assert await stopping
    assert "completed" == (await replaying).outcome


# ---- real processes ----------------------------------------------------------------------------------------------


async def sidecar_command(folder: Path, port: int, *words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", *words, "--admin", f"http://127.0.0.1:{port}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parent.parent,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_after_a_sigterm_and_a_restart_what_was_cut_off_is_listed_and_can_be_replayed(
    run: Runner, start_upstream: UpstreamStarter
) -> None:
    held = asyncio.Event()

    async def slow(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await held.wait()
            await talk.send(answer(b"paid"))

    upstream = await start_upstream(slow)
    keys = {"upstreams": routed(upstream), "shutdown_grace": 0.3, "telemetry": {"log": {"level": "info"}}}
    process = await (await run(**keys)).ready()
    (getting,) = await requests_in_flight(process, upstream, 1)
    paying = [await process.app() for _ in range(5)]
    for app in paying:
        await app.send(POST)
    await until(lambda: len(upstream.bodies) == 6)
    process.signal(signal.SIGTERM)
    replies = [await app.reply() for app in paying]
    assert [(*CUT, True)] * 5 == [told(reply) for reply in replies]
    assert (*CUT, False) == told(await getting.reply())
    assert 1 == await process.ended()
    assert 6 == (await process.logged("sidecar.stopped"))["cut_off"]
    again = await (await run(**keys)).ready()
    code, listed = await sidecar_command(Path(), again.admin_address[1], "dlq", "list", "--json")
    entries = json.loads(listed)["items"]
    ids = {reply.get("x-sidecar-dlq-id") for reply in replies}
    assert (0, ids) == (code, {entry["dlq_id"] for entry in entries})
    assert {("unsafe", "SHUTTING_DOWN")} == {(entry["verdict"], entry["error_class"]) for entry in entries}
    held.set()
    one = min(ids, key=str)
    refused, why = await sidecar_command(Path(), again.admin_address[1], "dlq", "replay", str(one), "--yes")
    assert (1, True) == (refused, "executed" in why)
    replay = ("dlq", "replay", str(one), "--yes", "--force", "--reason", "the provider has none of it")
    code, said = await sidecar_command(Path(), again.admin_address[1], *replay)
    assert 0 == code, said
    again.signal(signal.SIGTERM)
    assert 0 == await again.ended()
