"""Requests that are handed over: `Prefer: respond-async`, delivered through the pipeline of live calls."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.upstream import Talk, answer
from tests.test_dead_letters_live import QUICK

FAST = {**QUICK, "patient": {"base_delay": 0.01, "max_delay": 0.02, "jitter_type": "none"}}


def post(body: str = "hello", *fields: str) -> str:
    lines = ["POST /u/send HTTP/1.1", "Host: s", "Prefer: respond-async", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines) + "\r\n\r\n" + body


async def job_of(sidecar: Running, job_id: str, *states: str) -> dict[str, Any]:
    durable = sidecar.proxy.kept.durable
    assert durable is not None and durable.jobs is not None
    async with asyncio.timeout(30):
        while True:
            job = await durable.jobs.get(job_id)
            if job["state"] in states:
                return job
            await asyncio.sleep(0.02)


async def takes_it(talk: Talk) -> None:
    while True:
        await talk.read_request()
        await talk.send(answer(b"ok"))


async def test_a_request_that_prefers_it_is_taken_over_and_delivered(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            first = len(talk.upstream.requests) == 1
            await talk.send(answer(b"", "429 Too Many Requests") if first else answer(b'{"data":{"id":"m-1"}}'))

    upstream = await start_upstream(script)
    keys = {"outbox": {"notification_id": {"json": "data.id"}}, "breaker": {"enabled": False}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), policies=FAST)
    reply = await (await sidecar.app()).ask(post("hello", "Authorization: Bearer x"))
    assert (202, "queued", "respond-async") == (
        reply.status,
        reply.get("x-sidecar-outcome"),
        reply.get("preference-applied"),
    )
    assert (
        reply.get(
            "location",
        )
        == f"{sidecar.proxy.answers.documentation}/jobs/{reply.json['job_id']}"
    )
    job = await job_of(sidecar, reply.json["job_id"], "succeeded")
    (delivery,) = job["deliveries"]
    assert ("sent", "m-1", 2) == (delivery["state"], delivery["notification_id"], delivery["attempts"])
    first, second = upstream.requests
    assert b"respond-async" not in second and b"Authorization: Bearer x" in second
    key = second.split(b"Idempotency-Key: ")[1].split(b"\r\n")[0]
    assert key in first
    assert [b"hello", b"hello"] == upstream.bodies
    assert {"queued": 1} == sidecar.outcomes
    assert 1 == sidecar.proxy.metrics.tally("u").attempts["outbox", "success"]


async def test_the_same_call_again_is_the_same_job(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(takes_it)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=FAST)
    app = await sidecar.app()
    first, second = [await app.ask(post("hello", "Idempotency-Key: k")) for _ in range(2)]
    assert (202, 200) == (first.status, second.status)
    assert first.json["job_id"] == second.json["job_id"]
    await job_of(sidecar, first.json["job_id"], "succeeded")
    assert 1 == len(upstream.requests)


async def test_the_same_key_with_another_request_is_refused_and_not_dropped(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(takes_it)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=FAST)
    app = await sidecar.app()
    first = await app.ask(post("hello", "Idempotency-Key: k"))
    second = await app.ask(post("other", "Idempotency-Key: k"))
    assert (202, 422) == (first.status, second.status)
    assert ("IDEMPOTENCY_CONFLICT", True) == (second.json["error_code"], "another request" in second.json["message"])
    await job_of(sidecar, first.json["job_id"], "succeeded")
    assert [b"hello"] == upstream.bodies
    assert {"queued": 1, "denied": 1} == sidecar.outcomes


async def test_an_unknown_fate_without_a_lookup_waits_for_an_operator_and_with_one_is_asked(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    made: set[bytes] = set()

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if head.startswith(b"GET"):
                known = head.split(b" ")[1].rpartition(b"/")[2] in made
                await talk.send(answer(b"", "200 OK" if known else "404 Not Found"))
                continue
            made.add(head.split(b"Idempotency-Key: ")[1].split(b"\r\n")[0])
            talk.reset()  # executed, and nobody is told
            return

    upstream = await start_upstream(script)
    blind = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=FAST)
    reply = await (await blind.app()).ask(post())
    await job_of(blind, reply.json["job_id"], "unknown")
    assert 1 == len(made)
    keys = {"outbox": {"reconcile": {"url": f"{upstream.url}/made/{{key}}"}}, "breaker": {"enabled": False}}
    asking = await start_sidecar(upstreams=route(upstream, **keys), policies=FAST)
    reply = await (await asking.app()).ask(post("again"))
    job = await job_of(asking, reply.json["job_id"], "succeeded")
    assert (1, 1) == (job["deliveries"][0]["attempts"], job["deliveries"][0]["lookups"])
    assert 2 == len(made)
    assert 1 == asking.proxy.metrics.tally("u").attempts["reconcile", "success"]


async def test_where_the_outbox_is_off_or_the_store_in_trouble_it_is_sent_at_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"now"))

    upstream = await start_upstream(script)
    off = await start_sidecar(upstreams=route(upstream, outbox={"enabled": False}), policies=FAST)
    assert (200, b"now") == ((reply := await (await off.app()).ask(post())).status, reply.body)
    troubled = await start_sidecar(upstreams=route(upstream), policies=FAST, state_dir=str(tmp_path / "state"))
    (tmp_path / "state/keys").write_text("in the way")
    assert (200, b"now") == ((reply := await (await troubled.app()).ask(post())).status, reply.body)
    assert b"Prefer: respond-async" in upstream.requests[-1]


async def test_what_was_taken_over_before_a_restart_is_delivered_after_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Any
) -> None:
    up = False

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"ok") if up else answer(b"", "429 Too Many Requests"))

    upstream = await start_upstream(script)
    # Honoured, because the stop may come in the middle of a delivery.
    rules = {"breaker": {"enabled": False}, "idempotency": {"provider_honours": True}}
    keys = {
        "upstreams": route(upstream, **rules),
        "policies": FAST,
        "state_dir": str(tmp_path / "state"),
    }
    first = await start_sidecar(**keys)
    reply = await (await first.app()).ask(post())
    await job_of(first, reply.json["job_id"], "retryable_failed")
    await first.stop(grace=0.1)
    up = True
    second = await start_sidecar(**keys)
    await job_of(second, reply.json["job_id"], "succeeded")
