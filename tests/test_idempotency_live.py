"""A key is executed once: repeats, concurrent duplicates and restarts, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.conftest import Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import Talk, always, answer
from tests.test_dead_letters_live import QUICK, busy_store, doing, letters_of, until


def post(key: str = "k1", body: str = "hello", *fields: str, path: str = "/u/pay") -> str:
    lines = [f"POST {path} HTTP/1.1", "Host: s", f"Idempotency-Key: {key}", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines) + "\r\n\r\n" + body


def counting(*fields: str) -> Any:
    """Answers each execution with its number."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"%d" % len(talk.upstream.bodies), "201 Created", "X-Made: yes", *fields))

    return script


async def test_a_repeat_after_success_gets_the_first_answer_and_nothing_is_sent(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    first, second = await app.ask(post()), await app.ask(post())
    assert (201, b"1", None) == (first.status, first.body, first.get("idempotent-replayed"))
    assert (201, b"1", "true", "yes") == (
        second.status,
        second.body,
        second.get("idempotent-replayed"),
        second.get("x-made"),
    )
    assert ("deduplicated", "0", "u") == (
        second.get("x-sidecar-outcome"),
        second.get("x-sidecar-attempts"),
        second.get("x-sidecar-upstream"),
    )
    assert 1 == len(upstream.requests)
    assert {"first_try": 1, "deduplicated": 1} == sidecar.outcomes
    assert b"2" == (await app.ask(post("k2"))).body
    assert b"3" == (await app.ask(post(path="/u/other"))).body


async def test_a_key_with_another_payload_is_422(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.ask(post())
    reply = await app.ask(post(body="hullo"))
    assert (422, "IDEMPOTENCY_CONFLICT", "denied") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
    )
    assert 1 == len(upstream.requests)


async def test_of_many_at_the_same_moment_one_is_sent_and_the_others_are_told_to_wait(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    go = asyncio.Event()

    async def slow(talk: Talk) -> None:
        await talk.read_request()
        await go.wait()
        await talk.send(answer(b"done"))

    upstream = await start_upstream(slow)
    sidecar = await start_sidecar(upstreams=route(upstream))
    apps = [await sidecar.app() for _ in range(8)]
    replies = [asyncio.ensure_future(app.ask(post())) for app in apps]
    await until(lambda: 7 == sum(reply.done() for reply in replies))
    go.set()
    found = await asyncio.gather(*replies)
    assert [200] + [409] * 7 == sorted(reply.status for reply in found)
    refused = next(reply for reply in found if reply.status == 409)
    assert ("1", "IDEMPOTENCY_CONFLICT") == (refused.get("retry-after"), refused.json["error_code"])
    assert 1 == len(upstream.requests)
    assert b"done" == (await apps[0].ask(post())).body


async def test_a_repeat_after_a_failure_goes_through_and_its_success_closes_the_dead_letter(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            failed = len(talk.upstream.requests) <= 2
            await talk.send(answer(b"", "503 Service Unavailable") if failed else answer(b"at last"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    app = await sidecar.app()
    failed = await app.ask(post())
    assert 503 == failed.status
    (entry,) = await letters_of(sidecar)
    assert (failed.get("x-sidecar-dlq-id"), "pending", "safe") == (entry.dlq_id, entry.status, entry.verdict)
    assert b"at last" == (await app.ask(post())).body

    async def closed() -> bool:
        return "completed" == (await letters_of(sidecar))[0].status

    async with asyncio.timeout(15):
        while not await closed():
            await asyncio.sleep(0.01)


async def test_a_higher_version_is_run_again_and_a_lower_one_gets_the_stored_result(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    assert b"1" == (await app.ask(post("k", "a", "x-sidecar-version: 1"))).body
    assert b"2" == (await app.ask(post("k", "b", "x-sidecar-version: 2"))).body
    assert b"2" == (await app.ask(post("k", "b", "x-sidecar-version: 2"))).body
    assert b"1" == (await app.ask(post("k", "a", "x-sidecar-version: 1"))).body
    assert 2 == len(upstream.requests)


async def test_what_was_answered_before_a_restart_is_answered_after_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Any
) -> None:
    upstream = await start_upstream(counting())
    keys = {"upstreams": route(upstream), "state_dir": str(tmp_path / "state")}
    first = await start_sidecar(**keys)
    await (await first.app()).ask(post("k", "b", "Authorization: Bearer one"))
    await first.stop(grace=0.1)
    second = await start_sidecar(**keys)
    app = await second.app()
    assert b"1" == (await app.ask(post("k", "b", "Authorization: Bearer one"))).body
    assert b"2" == (await app.ask(post("k", "b", "Authorization: Bearer two"))).body  # another caller's key


async def test_an_answer_that_streams_is_remembered_while_it_is_small(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def chunked(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            size = 300_000 if b"/large" in head else 10
            if b"/known" in head:
                await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"y" * 300_000)
                continue
            piece = b"%x\r\n%b\r\n" % (size, b"x" * size)
            await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + piece + piece + b"0\r\n\r\n")

    upstream = await start_upstream(chunked)
    keys = {"idempotency": {"max_response_bytes": 400_000}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys))
    app = await sidecar.app()
    for path, size in (("/u/small", 20), ("/u/known", 300_000)):
        assert [size, size] == [len((await app.ask(post(path=path))).body) for _ in range(2)]
    assert 600_000 == len((await app.ask(post(path="/u/large"))).body)
    refused = await app.ask(post(path="/u/large"))
    assert 409 == refused.status
    assert "max_response_bytes" in refused.json["message"]
    assert 3 == len(upstream.requests)


async def test_a_store_in_trouble_lets_the_call_through_and_the_record_says_so(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(
        upstreams=route(upstream),
        state_dir=str(tmp_path / "state"),
        telemetry={"healthy_sample": 1},
    )
    (tmp_path / "state/keys").write_text("in the way")
    app = await sidecar.app()
    assert [b"1", b"2"] == [(await app.ask(post())).body for _ in range(2)]
    session = sidecar.proxy.signals.sessions.page(limit=1).items[0]
    assert "was not checked" in sidecar.proxy.signals.explain(session)


async def test_an_app_that_leaves_while_its_key_is_being_checked_does_not_leave_the_key_taken(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    durable = await sidecar.proxy.kept.open()
    with busy_store(durable):
        app = await sidecar.app()
        await app.send(post())
        await until(lambda: doing("ask about a key"))
        app.close()
        await until(lambda: {"cancelled": 1} == sidecar.outcomes)
    await until(lambda: not doing("ask about a key") and not doing("withdraw a call"))
    again = await (await sidecar.app()).ask(post())
    assert (201, b"1") == (again.status, again.body)


async def test_an_app_that_speaks_http10_is_never_told_to_continue(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    reply = await app.ask(post("k1", "hello", "Expect: 100-continue").replace("HTTP/1.1", "HTTP/1.0"))
    assert (201, b"1") == (reply.status, reply.body)


async def test_keys_that_are_switched_off_or_on_reads_write_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app: App = await sidecar.app()
    for _ in range(2):
        assert 200 == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\nIdempotency-Key: k\r\n\r\n")).status
    assert (2, None) == (len(upstream.requests), sidecar.proxy.kept.durable)
    off = await start_sidecar(upstreams=route(upstream, idempotency={"enabled": False}))
    app = await off.app()
    for _ in range(2):
        assert 200 == (await app.ask(post())).status
    assert (4, None) == (len(upstream.requests), off.proxy.kept.durable)


async def test_an_app_that_goes_away_leaves_no_mark_that_keeps_its_repeat_waiting(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(counting())
    sidecar = await start_sidecar(upstreams=route(upstream))
    await sidecar.proxy.kept.open()
    for number in range(20):  # one of them goes while its key is being checked
        app = await App.connect(sidecar.address)
        await app.send(post(f"k{number}"))
        await asyncio.sleep(number * 0.0005)
        app.close()
    app = await sidecar.app()
    for number in range(20):
        async with asyncio.timeout(15):
            while 201 != (await app.ask(post(f"k{number}"))).status:
                await asyncio.sleep(0.02)
