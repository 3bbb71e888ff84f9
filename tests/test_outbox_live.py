"""Requests that are handed over: `Prefer: respond-async`, delivered through the pipeline of live calls."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import orjson
import pytest

from sidecar import clock
from sidecar.posting import job_address
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.upstream import Talk, answer
from tests.test_dead_letters_live import QUICK

SOON = {"base_delay": 0.01, "max_delay": 0.02, "jitter_type": "none"}
FAST = {**QUICK, "patient": SOON, "unhurried": SOON}


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
    assert f"{sidecar.proxy.answers.documentation}/jobs/{reply.json['job_id']}" == reply.get("location")
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


async def test_a_503_is_sent_again_after_what_retry_after_says(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def busy(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"", "503 Service Unavailable", "Retry-After: 20"))

    upstream = await start_upstream(busy)
    rules = {"breaker": {"enabled": False}, "idempotency": {"provider_honours": True}}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=FAST)
    begun = clock.wall()
    reply = await (await sidecar.app()).ask(post())
    job = await job_of(sidecar, reply.json["job_id"], "retryable_failed")
    assert 1 == job["deliveries"][0]["attempts"]
    assert 20 <= datetime.fromisoformat(job["deliveries"][0]["next_at"]).timestamp() - begun < 50


PACES = {
    **QUICK,
    "patient": {"base_delay": 7, "jitter_type": "none"},
    "unhurried": {"base_delay": 60, "jitter_type": "none"},
    "odd": {"base_delay": 33, "max_delay": 40, "jitter_type": "none"},
}


@pytest.mark.parametrize(
    ("seconds", "status", "outbox"),
    [
        (7, "500 Internal Server Error", {}),
        (60, "429 Too Many Requests", {}),
        (7, "429 Too Many Requests", {"policy": "patient"}),
        (33, "500 Internal Server Error", {"policies": {"UPSTREAM_ERROR": "odd"}}),
        (7, "429 Too Many Requests", {"policies": {"UPSTREAM_ERROR": "odd"}}),
    ],
)
async def test_deliveries_are_spaced_by_what_went_wrong(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, seconds: int, status: str, outbox: Any
) -> None:
    async def fails(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"", status))

    upstream = await start_upstream(fails)
    rules = {"breaker": {"enabled": False}, "idempotency": {"provider_honours": True}, "outbox": outbox}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=PACES)
    begun = clock.wall()
    reply = await (await sidecar.app()).ask(post())
    job = await job_of(sidecar, reply.json["job_id"], "retryable_failed")
    waits = datetime.fromisoformat(job["deliveries"][0]["next_at"]).timestamp() - begun
    assert seconds <= waits < seconds + 6


async def test_the_key_and_the_providers_id_stay_where_they_belong_in_the_url_of_a_lookup(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            found = answer(b"") if head.startswith(b"GET") else answer(b'{"id":"a/../b"}', "500 Internal Server Error")
            await talk.send(found)

    upstream = await start_upstream(script)
    lookup = {"url": f"{upstream.url}/made/{{key}}/{{notification_id}}"}
    rules = {"breaker": {"enabled": False}, "outbox": {"reconcile": lookup, "notification_id": {"json": "id"}}}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=FAST)
    reply = await (await sidecar.app()).ask(post("hello", "Idempotency-Key: ../admin?x=1"))
    job = await job_of(sidecar, reply.json["job_id"], "succeeded")
    assert b"GET /made/..%2Fadmin%3Fx%3D1/a%2F..%2Fb HTTP/1.1" == upstream.requests[-1].split(b"\r\n")[0]
    assert "a/../b" == job["deliveries"][0]["notification_id"]


async def test_who_resends_what_is_unknown_gets_it_delivered(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            first = len(talk.upstream.requests) == 1
            await talk.send(answer(b"", "500 Internal Server Error") if first else answer(b"done"))

    upstream = await start_upstream(script)
    rules = {"breaker": {"enabled": False}, "outbox": {"unknown": "resend"}}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=FAST)
    reply = await (await sidecar.app()).ask(post())
    job = await job_of(sidecar, reply.json["job_id"], "succeeded")
    assert (2, 2) == (len(upstream.requests), job["deliveries"][0]["attempts"])


async def test_a_delivery_that_arrived_is_no_warning_and_one_that_did_not_is_told_with_what_to_do(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"", "500 Internal Server Error") if b"lost" in talk.upstream.bodies else answer())

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=FAST)
    app, started = await sidecar.app(), len(logged(sidecar))  # what the start says is about the machine
    await job_of(sidecar, (await app.ask(post("fine"))).json["job_id"], "succeeded")
    assert [] == [line for line in logged(sidecar)[started:] if line["severity_text"] in ("WARN", "ERROR")]
    reply = await app.ask(post("lost"))
    await job_of(sidecar, reply.json["job_id"], "unknown")
    (told,) = [line for line in logged(sidecar) if line["event_name"] == "sidecar.outbox.gave_up"]
    assert ("ERROR", reply.json["job_id"]) == (told["severity_text"], told["job_id"])
    assert f"sidecar jobs resolve {reply.json['job_id']} 2" in told["body"]
    assert 1 == sidecar.proxy.metrics.stored.deliveries["u", "unknown"]


def logged(sidecar: Running) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in sidecar.logged.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("expected", "base", "sockname", "peer"),
    [
        ("http://127.0.0.1:4141/jobs/job_1", "http://127.0.0.1:4141", "127.0.0.1", "127.0.0.1"),
        ("http://127.0.0.1:4141/jobs/job_1", "http://127.0.0.1:4141", "10.0.0.7", "10.0.0.7"),
        (None, "http://127.0.0.1:4141", "10.0.0.7", "10.0.0.9"),
        (None, "http://[::1]:4141", "10.0.0.7", "10.0.0.9"),
        ("https://10.0.0.7:4141/jobs/job_1", "https://10.0.0.7:4141", "10.0.0.7", "10.0.0.9"),
        ("https://10.0.0.7:4141/jobs/job_1", "https://0.0.0.0:4141", "10.0.0.7", "10.0.0.9"),
        ("https://[fd00::7]:4141/jobs/job_1", "https://[::]:4141", "fd00::7", "fd00::9"),
    ],
)
def test_an_app_is_sent_only_where_it_can_get_to(expected: str | None, base: str, sockname: str, peer: str) -> None:
    assert expected == job_address(base, "job_1", sockname, peer)
