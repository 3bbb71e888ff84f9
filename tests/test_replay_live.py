"""Dead letters go out again through the same pipeline as live calls; over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sidecar.durable.filters import Filter
from sidecar.durable.layers import Durable
from sidecar.durable.replay import Replayer
from sidecar.durable.replay_job import ENDED, Order
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.upstream import Talk, answer
from tests.test_dead_letters_live import KEYED, POST, QUICK, letters_of, until

OLD, NEW = b"Basic YXBwOm9sZA==", b"Basic YXBwOm5ldw=="  # of app:old and app:new
UNAVAILABLE = answer(b"", "503 Service Unavailable")


class Provider:
    """Fails while `down`, then works."""

    def __init__(self) -> None:
        self.down = True

    async def __call__(self, talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(UNAVAILABLE if self.down else answer(b"made"))


def parts(sidecar: Running) -> tuple[Durable, Replayer]:
    durable = sidecar.proxy.kept.durable
    assert durable is not None and durable.replayer is not None
    return durable, durable.replayer


async def test_a_replay_sends_the_request_as_it_was_and_completes_the_entry(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    failed = await (await sidecar.app()).ask(KEYED)
    dlq_id = failed.get("x-sidecar-dlq-id")
    assert dlq_id
    provider.down = False
    _, replayer = parts(sidecar)
    settled = await replayer.one(dlq_id, "tester")
    assert ("completed", "completed") == (settled.outcome, settled.entry.status)
    head, body = upstream.requests[-1], upstream.bodies[-1]
    assert head.startswith(b"POST /pay?card=1 HTTP/1.1")
    assert b"Authorization: Bearer canary-4711" in head and b"Idempotency-Key: k" in head
    assert b"hello" == body
    attempts = sidecar.proxy.metrics.tally("u").attempts
    assert (1, 1) == (attempts["replay", "success"], sum(sidecar.outcomes.values()))
    session = sidecar.proxy.signals.sessions.page(limit=1).items[0]
    assert (dlq_id, "replay") == (session.dlq_id, session.attempts[0].kind)
    assert "sidecar.dlq.replayed" in sidecar.logged.getvalue()
    repeated = await (await sidecar.app()).ask(KEYED)  # the app asks again: it was done for it meanwhile
    assert (200, b"made", "true") == (repeated.status, repeated.body, repeated.get("idempotent-replayed"))


async def test_a_replay_whose_answer_streams_is_completed_and_remembered(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    made = b"m" * 100_000
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(made), made)
    down = True

    async def provider(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(UNAVAILABLE if down else chunked)

    upstream = await start_upstream(provider)
    keys = {"breaker": {"enabled": False}, "idempotency": {"max_response_bytes": 200_000}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), policies=QUICK)
    failed = await (await sidecar.app()).ask(KEYED)
    down, sent = False, len(upstream.requests)
    _, replayer = parts(sidecar)
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert ("completed", "completed") == (settled.outcome, settled.entry.status)
    repeated = await (await sidecar.app()).ask(KEYED)
    assert (200, made, "true") == (repeated.status, repeated.body, repeated.get("idempotent-replayed"))
    assert sent + 1 == len(upstream.requests)


async def test_a_replay_goes_through_the_breaker_and_is_held_back_by_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 60}
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=breaker, policy="once"))
    failed = await (await sidecar.app()).ask(KEYED)
    sent = len(upstream.requests)
    _, replayer = parts(sidecar)
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert ("held_back", "pending", 0) == (settled.outcome, settled.entry.status, settled.entry.replays)
    assert sent == len(upstream.requests)


async def test_a_replay_that_fails_is_noted_and_the_entry_waits_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(Provider())
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    failed = await (await sidecar.app()).ask(KEYED)
    _, replayer = parts(sidecar)
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert ("failed", "pending", 1, "TEMPORARY_UNAVAILABLE") == (
        settled.outcome,
        settled.entry.status,
        settled.entry.replays,
        settled.entry.error_class,
    )
    assert 1 == len(await letters_of(sidecar))


async def test_a_large_body_comes_back_from_disk(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    sidecar = await start_sidecar(
        upstreams=route(upstream, dead_letter={"max_body_bytes": 5_000_000}, breaker={"enabled": False}),
        limits={"replay_body_bytes": 100_000},
        policies=QUICK,
    )
    body = bytes(range(256)) * 8_000
    head = f"PUT /u/big HTTP/1.1\r\nHost: s\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    failed = await (await sidecar.app()).ask(head + body)
    provider.down = False
    _, replayer = parts(sidecar)
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert "completed" == settled.outcome
    assert body == upstream.bodies[-1]


async def test_credentials_can_be_the_newest_ones_of_the_same_caller(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            await talk.send(answer(b"ok") if NEW in head else answer(b"", "401 Unauthorized"))

    upstream = await start_upstream(script)
    keys = {"replay": {"credentials": "live", "require_remediation": "none"}, "breaker": {"enabled": False}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), policies=QUICK)
    app = await sidecar.app()
    failed = await app.ask(POST.replace("Bearer canary-4711", OLD.decode()))
    assert 401 == failed.status
    _, replayer = parts(sidecar)
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert "held_back" == settled.outcome  # no newer one was seen
    assert 200 == (await app.ask(f"GET /u HTTP/1.1\r\nHost: s\r\nAuthorization: {NEW.decode()}\r\n\r\n")).status
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert ("completed", True) == (settled.outcome, NEW in upstream.requests[-1])


async def test_what_is_safe_goes_out_by_itself_when_the_breaker_closes(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 0.2, "success_threshold": 1}
    keys = {"breaker": breaker, "policy": "once", "replay": {"auto": "on_close", "rate": 1000}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys))
    app = await sidecar.app()
    for number in range(3):
        await app.ask(KEYED.replace("Idempotency-Key: k", f"Idempotency-Key: k{number}"))
    provider.down = False
    durable, _ = parts(sidecar)
    async with asyncio.timeout(30):
        while {"completed"} != {entry.status for entry in (await durable.listing.page(Filter())).items}:
            await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
            await asyncio.sleep(0.05)
    made = [head for head in upstream.requests if b"Idempotency-Key" in head]
    assert {b"k0", b"k1", b"k2"} <= {head.split(b"Idempotency-Key: ")[1].split(b"\r\n")[0] for head in made}


async def test_a_job_replays_all_that_is_safe_and_leaves_the_rest(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    sidecar = await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=QUICK)
    app = await sidecar.app()
    for number in range(5):
        await app.ask(KEYED.replace("Idempotency-Key: k", f"Idempotency-Key: k{number}"))
    await app.ask(POST)  # maybe executed, and no key
    provider.down = False
    durable, replayer = parts(sidecar)
    job = await replayer.start(Order(Filter(), rate=1000))
    async with asyncio.timeout(30):
        while job.state not in ENDED:
            await asyncio.sleep(0.01)
    assert ("done", 5) == (job.state, job.outcomes["completed"])
    left = [entry for entry in (await durable.listing.page(Filter())).items if entry.status == "pending"]
    assert ["needs_key"] == [entry.verdict for entry in left]


async def test_somebody_is_told_once_when_requests_begin_to_be_kept(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def listening(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b""))

    upstream, hook = await start_upstream(Provider()), await start_upstream(listening)
    sidecar = await start_sidecar(
        upstreams=route(upstream, breaker={"enabled": False}),
        policies=QUICK,
        dead_letter={"notify_url": f"{hook.url}/hook"},
    )
    app = await sidecar.app()
    replies = [await app.ask(KEYED.replace("Key: k", f"Key: k{number}")) for number in range(3)]
    await until(lambda: hook.bodies)
    (told,) = [json.loads(body) for body in hook.bodies]
    assert ("dead_lettered", "u", replies[0].get("x-sidecar-dlq-id")) == (
        told["event"],
        told["upstream"],
        told["dlq_id"],
    )
    assert {"exhausted": 3} == sidecar.outcomes, "a notice is no request of an app"
