"""Requests that finally fail are on disk before the app hears of it; over real sockets, with a real store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sidecar.durable.entry import Entry
from sidecar.durable.filters import Filter
from sidecar.durable.layers import Durable
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import Talk, always, answer

QUICK = {"default": {"max_attempts": 2, "base_delay": 0.001, "max_delay": 0.002}}
UNAVAILABLE = answer(b"not now", "503 Service Unavailable", "X-Why: tired")
POST = "POST /u/pay?card=1 HTTP/1.1\r\nHost: s\r\nAuthorization: Bearer canary-4711\r\nContent-Length: 5\r\n\r\nhello"
PUT = POST.replace("POST", "PUT")
KEYED = POST.replace("Content-Length", "Idempotency-Key: k\r\nContent-Length")


async def letters_of(sidecar: Running) -> list[Entry]:
    durable = sidecar.proxy.kept.durable
    return [] if durable is None else (await durable.listing.page(Filter())).items


async def until(true: Callable[[], Any], within: float = 15.0) -> None:
    async with asyncio.timeout(within):
        while not true():
            await asyncio.sleep(0.01)


def doing(name: str) -> bool:
    """Whether a task of this name is under way."""
    return any(task.get_name() == name for task in asyncio.all_tasks())


@contextmanager
def busy_store(durable: Durable) -> Iterator[None]:
    """Nothing is written meanwhile."""
    go_on = threading.Event()
    occupied = durable.store.write(lambda _: go_on.wait(30))
    try:
        yield
    finally:
        go_on.set()
        occupied.add_done_callback(lambda done: done.exception())


async def test_an_exhausted_post_is_kept_and_the_answer_that_is_passed_on_names_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    reply = await (await sidecar.app()).ask(POST)
    assert (503, b"not now") == (reply.status, reply.body)
    (entry,) = await letters_of(sidecar)
    assert entry.dlq_id == reply.get("x-sidecar-dlq-id")
    assert ("u", "POST", "TEMPORARY_UNAVAILABLE", "pending") == (
        entry.upstream,
        entry.method,
        entry.error_class,
        entry.status,
    )
    place = upstream.url.removeprefix("http://")
    assert f"first attempt at {place}: TEMPORARY_UNAVAILABLE: answered 503" == entry.last_stack
    durable = sidecar.proxy.kept.durable
    assert durable is not None
    kept = await durable.letters.request(entry.dlq_id)
    assert f"{upstream.url}/pay?card=1" == kept.url
    assert b"hello" == kept.body
    assert (b"Authorization", b"Bearer canary-4711") in kept.headers
    assert b"not now" == await durable.letters.last_answer(entry.dlq_id)
    (session,) = list(sidecar.proxy.signals.sessions.page(limit=10).items)
    assert entry.dlq_id == session.dlq_id
    assert "sidecar.dlq.enqueued" in sidecar.logged.getvalue()
    assert f"`sidecar dlq show {entry.dlq_id}` tells whether" in sidecar.proxy.signals.explain(session)


async def test_a_failure_without_an_answer_names_its_entry_in_the_details(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def reset(talk: Talk) -> None:
        await talk.read_request()
        talk.reset()

    upstream = await start_upstream(reset)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    reply = await (await sidecar.app()).ask(POST)
    assert 502 == reply.status
    (entry,) = await letters_of(sidecar)
    assert entry.dlq_id == reply.json["details"]["dlq_id"] == reply.get("x-sidecar-dlq-id")
    assert "sent" == entry.send_phase
    assert "CONNECTION_RESET: " in entry.last_stack


async def test_a_get_and_a_permanent_failure_are_not_kept(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            await talk.send(UNAVAILABLE if head.startswith(b"GET") else answer(b"no", "404 Not Found"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    app = await sidecar.app()
    for request in ("GET /u HTTP/1.1\r\nHost: s\r\n\r\n", POST):
        assert None is (await app.ask(request)).get("x-sidecar-dlq-id")
    assert None is sidecar.proxy.kept.durable


async def test_the_request_itself_can_ask_to_be_kept_or_not(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    app = await sidecar.app()
    asked = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\nx-sidecar-dead-letter: on\r\n\r\n")
    assert asked.get("x-sidecar-dlq-id")
    refused = await app.ask(POST.replace("Host: s", "Host: s\r\nx-sidecar-dead-letter: off"))
    assert None is refused.get("x-sidecar-dlq-id")
    assert [asked.get("x-sidecar-dlq-id")] == [entry.dlq_id for entry in await letters_of(sidecar)]


async def test_a_credential_outage_keeps_its_requests(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(answer(b"who?", "401 Unauthorized")))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    reply = await (await sidecar.app()).ask(POST)
    assert (401, "rejected") == (reply.status, reply.get("x-sidecar-outcome"))
    (entry,) = await letters_of(sidecar)
    assert (entry.dlq_id, "CRITICAL") == (reply.get("x-sidecar-dlq-id"), entry.category)


async def test_an_open_breaker_still_reads_the_body_so_that_it_can_be_kept(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 60}
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=breaker, policy="once"))
    app = await sidecar.app()
    await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    seen = len(upstream.requests)
    await app.send("POST /u/late HTTP/1.1\r\nHost: s\r\nContent-Length: 400000\r\nExpect: 100-continue\r\n\r\n")
    assert 100 == (await app.reply()).status
    for _ in range(4):
        await app.send(b"x" * 100_000)
    reply = await app.reply()
    assert (503, "breaker_open") == (reply.status, reply.json["details"]["outcome"])
    (entry,) = await letters_of(sidecar)
    assert (entry.dlq_id, 400_000, True, "not_connected", "safe") == (
        reply.json["details"]["dlq_id"],
        entry.body["size"],
        entry.body["kept"],
        entry.send_phase,
        entry.verdict,
    )
    assert seen == len(upstream.requests)
    assert 503 == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status  # the connection is in step


async def test_respond_accepted_answers_202_with_the_id_where_the_failure_passes(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            await talk.send(answer(b"", "401 Unauthorized") if b"/denied" in head else UNAVAILABLE)

    upstream = await start_upstream(script)
    keys = {"dead_letter": {"respond": "accepted"}, "breaker": {"enabled": False}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), policies=QUICK)
    app = await sidecar.app()
    reply = await app.ask(POST)
    assert (202, "not_retryable") == (reply.status, reply.get("x-sidecar-outcome"))
    assert reply.json["dlq_id"] == reply.get("x-sidecar-dlq-id")
    denied = await app.ask(POST.replace("/u/pay", "/u/denied"))
    assert 401 == denied.status
    assert denied.get("x-sidecar-dlq-id")
    assert 2 == len(await letters_of(sidecar))


async def test_a_store_in_trouble_costs_the_entry_and_says_so_never_the_answer(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Any
) -> None:
    async def reset(talk: Talk) -> None:
        await talk.read_request()
        talk.reset()

    upstream = await start_upstream(reset)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK, state_dir=str(tmp_path / "state"))
    (tmp_path / "state/keys").write_text("in the way")
    reply = await (await sidecar.app()).ask(POST)
    assert 502 == reply.status
    assert None is reply.json["details"]["dlq_id"]
    assert "DLQ_FULL" == reply.json["details"]["dlq_error"]["error_code"]
    assert 1 == sidecar.proxy.metrics.stored.rejected["disk_error"]
    assert "sidecar.dlq.rejected" in sidecar.logged.getvalue()
    (session,) = sidecar.proxy.signals.sessions.page(limit=10).items
    assert "The store did not help" in sidecar.proxy.signals.explain(session)


async def test_a_full_store_tells_the_app(start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any) -> None:
    async def reset(talk: Talk) -> None:
        await talk.read_request()
        talk.reset()

    upstream = await start_upstream(reset)
    sidecar = await start_sidecar(
        upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK, dead_letter={"max_bytes": 1_048_576}
    )
    app = await sidecar.app()
    body = "y" * 200_000
    for number in range(10):
        reply = await app.ask(f"POST /u/{number} HTTP/1.1\r\nHost: s\r\nContent-Length: 200000\r\n\r\n{body}")
        if reply.json["details"]["dlq_id"] is None:
            break
    assert "DLQ_FULL" == reply.json["details"]["dlq_error"]["error_code"]
    assert 1 == sidecar.proxy.metrics.stored.rejected["full"]
    assert number == len(await letters_of(sidecar))


async def test_an_answer_that_is_passed_on_says_that_its_request_was_not_kept(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    keys = route(upstream, breaker={"enabled": False})
    sidecar = await start_sidecar(upstreams=keys, policies=QUICK, state_dir=str(tmp_path / "state"))
    (tmp_path / "state/keys").write_text("in the way")
    app = await sidecar.app()
    told = ("x-sidecar-dlq-error", "x-sidecar-dlq-id")
    reply = await app.ask(POST)
    assert (503, b"not now", ["DLQ_FULL", None]) == (reply.status, reply.body, [reply.get(name) for name in told])
    read = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert [None, None] == [read.get(name) for name in told], "it was not to be kept"
    (tmp_path / "state/keys").unlink()
    async with asyncio.timeout(30):
        while (reply := await app.ask(POST)).get("x-sidecar-dlq-id") is None:
            await asyncio.sleep(0.1)
    assert None is reply.get("x-sidecar-dlq-error")


@pytest.mark.parametrize("respond", ["error", "accepted"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("passed_on", [True, False])
async def test_an_entry_without_its_body_is_no_promise(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, respond: str, chunked: bool, passed_on: bool
) -> None:
    async def reset(talk: Talk) -> None:
        await talk.read_request()
        talk.reset()

    upstream = await start_upstream(always(UNAVAILABLE) if passed_on else reset)
    keys = route(upstream, breaker={"enabled": False}, policy="once", dead_letter={"respond": respond})
    sidecar = await start_sidecar(upstreams=keys)
    app = await sidecar.app()
    body = "y" * 1_500_000
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    sent = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n" if chunked else body
    reply = await app.ask(f"POST /u HTTP/1.1\r\nHost: s\r\n{framing}\r\n\r\n{sent}")
    assert (503 if passed_on else 502, "DLQ_BODY_NOT_KEPT", None) == (
        reply.status,
        reply.get("x-sidecar-dlq-error"),
        reply.get("x-sidecar-dlq-id"),
    )
    (letter,) = await letters_of(sidecar)
    assert (False, "not_replayable") == (letter.body["kept"], letter.verdict)
    if not passed_on:
        details = reply.json["details"]
        assert (None, "DLQ_BODY_NOT_KEPT") == (details["dlq_id"], details["dlq_error"]["error_code"])
        assert letter.dlq_id in details["dlq_error"]["message"]
    assert 1 == sidecar.proxy.metrics.stored.rejected["too_large"]
    (session,) = sidecar.proxy.signals.sessions.page(limit=10).items
    explained = sidecar.proxy.signals.explain(session)
    assert f"so {letter.dlq_id} is there to be looked at and cannot be replayed" in explained
    assert "sidecar dlq replay" not in explained


async def test_a_key_that_could_not_be_checked_is_not_called_a_full_store(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def reset(talk: Talk) -> None:
        await talk.reader.readuntil(b"\r\n\r\n")
        talk.reset()

    upstream = await start_upstream(reset)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    app = await sidecar.app()
    await app.send(KEYED.removesuffix("llo"))  # the check of the key gives up after three seconds
    reply = await app.reply(within=40)
    assert (502, None, False) == (
        reply.status,
        reply.get("x-sidecar-dlq-error"),
        "dlq_error" in reply.json["details"],
    )
    (session,) = sidecar.proxy.signals.sessions.page(limit=10).items
    assert "its idempotency key was not checked" in sidecar.proxy.signals.explain(session)


async def test_nobody_waits_for_the_place_of_a_request_whose_body_stopped(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    failed = asyncio.Event()

    async def script(talk: Talk) -> None:
        while True:
            head = await talk.reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                talk.reset()
                failed.set()
                return
            await talk.send(answer(b"ok"))

    upstream = await start_upstream(script)
    keys = {"breaker": {"enabled": False}, "max_in_flight": 1, "policy": "once", "timeouts": {"body_idle": 60}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys))
    slow, quick = await sidecar.app(), await sidecar.app()
    await slow.send("POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 100000\r\n\r\nhalf")
    (state,) = sidecar.proxy.directory.states()
    bulkhead = state.turns.bulkhead
    assert bulkhead is not None
    dripping = asyncio.ensure_future(_drip(slow))
    try:
        await until(lambda: failed.is_set() and not bulkhead.in_flight)
        assert 1 == state.in_flight, "it is still being kept"
        assert 200 == (await quick.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status
    finally:
        dripping.cancel()
    reply = await slow.reply(within=40)
    assert (502, None) == (reply.status, reply.get("x-sidecar-dlq-id"))
    await until(lambda: not state.in_flight)
    assert 0 == bulkhead.in_flight, "given back once, not twice"


async def _drip(app: App) -> None:
    """Never more than a moment of silence."""
    while True:
        await app.send(b".")
        await asyncio.sleep(0.1)


async def test_an_app_that_goes_away_after_a_failed_attempt_leaves_its_request_here(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    slow = {"default": {"base_delay": 60, "jitter_type": "none", "max_delay": 60, "total_timeout": 600}}
    sidecar = await start_sidecar(upstreams=route(upstream), policies=slow)
    app = await sidecar.app()
    await app.send(KEYED)
    await until(lambda: upstream.requests and sidecar.proxy.backoffs)
    app.close()
    await until(lambda: sidecar.outcomes)
    assert {"cancelled": 1} == sidecar.outcomes
    (entry,) = await letters_of(sidecar)
    assert "TEMPORARY_UNAVAILABLE" == entry.error_class
    (session,) = sidecar.proxy.signals.sessions.page(limit=10).items
    assert entry.dlq_id == session.dlq_id


async def test_an_app_that_goes_away_during_its_second_attempt_leaves_its_request_here(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            if len(talk.upstream.requests) == 1:
                await talk.send(UNAVAILABLE)
            else:
                await asyncio.sleep(60)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    app = await sidecar.app()
    await app.send(KEYED)
    await until(lambda: 2 == len(upstream.requests))
    app.close()
    await until(lambda: sidecar.outcomes)
    (entry,) = await letters_of(sidecar)
    assert ("TEMPORARY_UNAVAILABLE", "k") == (entry.error_class, entry.idempotency_key)


async def test_an_app_that_goes_away_while_its_failure_is_being_kept_is_kept_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    durable = await sidecar.proxy.kept.open()
    with busy_store(durable):
        app = await sidecar.app()
        await app.send(POST)
        await until(lambda: doing("keep a request"))
        app.close()
        await until(lambda: not sidecar.proxy.downstreams)
    await until(lambda: {"cancelled": 1} == sidecar.outcomes)
    (entry,) = await letters_of(sidecar)
    (session,) = list(sidecar.proxy.signals.sessions.page(limit=10).items)
    assert (entry.dlq_id, 1) == (session.dlq_id, sidecar.logged.getvalue().count("sidecar.dlq.enqueued"))


async def test_what_an_app_left_behind_holds_no_place_while_it_is_being_kept(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if head.startswith(b"GET"):
                await talk.send(answer(b"ok"))
            elif len(talk.upstream.requests) == 1:
                await talk.send(UNAVAILABLE)
            else:
                await asyncio.sleep(60)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, max_in_flight=1), policies=QUICK)
    kept, disk = sidecar.proxy.kept, asyncio.Event()
    opens = kept.open

    async def slowly() -> Any:
        await disk.wait()
        return await opens()

    app = await sidecar.app()
    await app.send(PUT)
    await until(lambda: 2 == len(upstream.requests))
    kept.open = slowly  # type: ignore[method-assign]
    app.close()
    (state,) = sidecar.proxy.directory.states()
    await until(lambda: not state.turns.busy)
    assert 200 == (await (await sidecar.app()).ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status
    assert (1, []) == (state.in_flight, await letters_of(sidecar))
    disk.set()
    await until(lambda: "cancelled" in sidecar.outcomes)
    assert ["TEMPORARY_UNAVAILABLE"] == [entry.error_class for entry in await letters_of(sidecar)]


async def test_an_app_that_goes_away_in_its_first_attempt_leaves_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def silent(talk: Talk) -> None:
        await talk.read_request()
        await asyncio.sleep(60)

    upstream = await start_upstream(silent)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    app = await sidecar.app()
    await app.send(POST)
    await until(lambda: upstream.requests)
    app.close()
    await until(lambda: sidecar.outcomes)
    assert ({"cancelled": 1}, []) == (sidecar.outcomes, await letters_of(sidecar))


async def test_a_shutdown_in_the_middle_of_a_backoff_keeps_what_waited(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    slow = {"default": {"base_delay": 60, "jitter_type": "none", "max_delay": 60, "total_timeout": 600}}
    keys = {"upstreams": route(upstream), "policies": slow, "state_dir": str(tmp_path / "state")}
    sidecar = await start_sidecar(**keys)
    app = await sidecar.app()
    await app.send(KEYED)
    await until(lambda: sidecar.proxy.backoffs)
    stopping = asyncio.ensure_future(sidecar.stop(grace=10))
    reply = await app.reply()
    await stopping
    again = await start_sidecar(**keys)
    assert [reply.json["details"]["dlq_id"]] == [entry.dlq_id for entry in await letters_of(again)]


async def test_a_body_too_large_for_memory_is_spooled_while_it_is_sent(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def reset_late(talk: Talk) -> None:
        await talk.read_head()
        await talk.reader.readexactly(900_000)
        talk.reset()

    upstream = await start_upstream(reset_late)
    sidecar = await start_sidecar(
        upstreams=route(upstream, dead_letter={"max_body_bytes": 5_000_000}, breaker={"enabled": False}),
        limits={"replay_body_bytes": 100_000},
        policies=QUICK,
    )
    body = bytes(range(256)) * 8_000
    app = await sidecar.app()
    head = f"POST /u/big HTTP/1.1\r\nHost: s\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    reply = await app.ask(head + body)
    assert 502 == reply.status
    (entry,) = await letters_of(sidecar)
    assert (reply.json["details"]["dlq_id"], True, len(body)) == (entry.dlq_id, entry.body["kept"], entry.body["size"])
    durable = sidecar.proxy.kept.durable
    assert durable is not None
    request = await durable.letters.request(entry.dlq_id)
    assert body == b"".join([chunk async for chunk in durable.letters.payloads.body(request)])


async def test_a_body_over_the_limit_is_said_not_to_be_kept(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def reset_late(talk: Talk) -> None:
        await talk.read_head()
        await talk.reader.readexactly(200_000)
        talk.reset()

    upstream = await start_upstream(reset_late)
    limits = {"replay_body_bytes": 100_000}
    keys = {"dead_letter": {"max_body_bytes": 100_000}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), limits=limits, policies=QUICK)
    app = await sidecar.app()
    reply = await app.ask(b"POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000)
    (entry,) = await letters_of(sidecar)
    assert (None, "DLQ_BODY_NOT_KEPT") == (
        reply.json["details"]["dlq_id"],
        reply.json["details"]["dlq_error"]["error_code"],
    )
    assert ({"kept": False, "size": 300_000, "note": "not kept, 200.0 kB over the limit"}, "not_replayable") == (
        entry.body,
        entry.verdict,
    )


async def test_the_apps_own_telemetry_just_passes(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(UNAVAILABLE))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK)
    reply = await (await sidecar.app()).ask(POST.replace("/u/pay?card=1", "/u/v1/traces"))
    assert (503, None, 1) == (reply.status, reply.get("x-sidecar-dlq-id"), len(upstream.requests))


async def test_what_a_fallback_could_not_do_either_is_kept_for_the_one_that_was_asked(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    first, second = await start_upstream(always(UNAVAILABLE)), await start_upstream(always(UNAVAILABLE))
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 60}
    upstreams = {
        "u": {"route": "/u", "endpoints": [first.url], "breaker": breaker, "policy": "once", "fallback": "b"},
        "b": {"endpoints": [second.url], "breaker": {"enabled": False}, "policy": "once"},
    }
    sidecar = await start_sidecar(upstreams=upstreams)
    app = await sidecar.app()
    await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    reply = await app.ask(POST)
    (entry,) = await letters_of(sidecar)
    assert (503, "u") == (reply.status, entry.upstream)
    durable = sidecar.proxy.kept.durable
    assert durable is not None
    kept = await durable.letters.request(entry.dlq_id)
    assert f"{first.url}/pay?card=1" == kept.url
    assert (b"Authorization", b"Bearer canary-4711") in kept.headers
    assert not any(b"canary" in head for head in second.requests)
