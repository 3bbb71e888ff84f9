"""Dead letters go out again through the same pipeline as live calls; over real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from sidecar import clock
from sidecar.durable.filters import Filter
from sidecar.durable.layers import Durable
from sidecar.durable.replay import Replayer
from sidecar.durable.replay_job import ENDED, Order
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.upstream import Script, Talk, answer
from tests.test_dead_letters_live import KEYED, POST, QUICK, letters_of, until

OLD, NEW = b"Basic YXBwOm9sZA==", b"Basic YXBwOm5ldw=="  # of app:old and app:new
OTHER = b"Basic b3RoZXI6cHc="  # of other:pw
UNAVAILABLE = answer(b"", "503 Service Unavailable")
NAMED = {"caller": "X-Consumer"}  # who asks is known by a field that stays when a credential is renewed


class Provider:
    """Fails while `down`, then works."""

    def __init__(self) -> None:
        self.down = True

    async def __call__(self, talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(UNAVAILABLE if self.down else answer(b"made"))


def accepting(credential: bytes) -> Script:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            await talk.send(answer(b"ok") if credential in head else answer(b"", "401 Unauthorized"))

    return script


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
    upstream = await start_upstream(accepting(NEW))
    keys = {"replay": {"credentials": "live", "require_remediation": "none"}, "breaker": {"enabled": False}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys, idempotency=NAMED), policies=QUICK)
    app = await sidecar.app()
    failed = await app.ask(POST.replace("Bearer canary-4711", f"{OLD.decode()}\r\nX-Consumer: app"))
    assert 401 == failed.status
    _, replayer = parts(sidecar)
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert "held_back" == settled.outcome  # no newer one was seen
    live = f"GET /u HTTP/1.1\r\nHost: s\r\nX-Consumer: app\r\nAuthorization: {NEW.decode()}\r\n\r\n"
    assert 200 == (await app.ask(live)).status
    settled = await replayer.one(failed.get("x-sidecar-dlq-id") or "", "tester")
    assert ("completed", True) == (settled.outcome, NEW in upstream.requests[-1])


async def test_credentials_of_another_caller_are_not_taken_unless_all_share_one(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(accepting(OTHER))
    live = {"credentials": "live", "require_remediation": "none"}
    found = {}
    for single in (False, True):
        keys = {"replay": {**live, "single_credential": single}, "breaker": {"enabled": False}}
        sidecar = await start_sidecar(upstreams=route(upstream, **keys), policies=QUICK)
        app = await sidecar.app()
        failed = await app.ask(POST.replace("Bearer canary-4711", OLD.decode()))
        seen = await app.ask(f"GET /u HTTP/1.1\r\nHost: s\r\nAuthorization: {OTHER.decode()}\r\n\r\n")
        assert (401, 200) == (failed.status, seen.status)
        settled = await parts(sidecar)[1].one(failed.get("x-sidecar-dlq-id") or "", "tester")
        found[single] = settled.outcome, settled.entry.replays
    assert {False: ("held_back", 0), True: ("completed", 1)} == found
    assert 1 == sum(head.startswith(b"POST") and OTHER in head for head in upstream.requests)


async def test_credentials_can_come_from_a_variable_and_a_missing_one_sends_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(accepting(NEW))
    rules = {
        "credentials": "environment",
        "environment": {"Authorization": "PAY_AUTHORIZATION", "X-Tenant": "PAY_TENANT"},
        "require_remediation": "none",
    }
    keys = route(upstream, replay=rules, breaker={"enabled": False})
    environ = {"PAY_AUTHORIZATION": NEW.decode()}
    sidecar = await start_sidecar(upstreams=keys, policies=QUICK, environ=environ)
    failed = await (await sidecar.app()).ask(POST.replace("Bearer canary-4711", OLD.decode()))
    dlq_id = failed.get("x-sidecar-dlq-id") or ""
    durable, replayer = parts(sidecar)
    settled = await replayer.one(dlq_id, "tester")
    assert (401, "held_back", "pending", 0) == (
        failed.status,
        settled.outcome,
        settled.entry.status,
        settled.entry.replays,
    )
    assert "PAY_TENANT" in settled.entry.history[-1]["why"]
    assert 1 == len(upstream.requests)
    environ["PAY_TENANT"] = "t-1"
    settled = await replayer.one(dlq_id, "tester")
    assert "completed" == settled.outcome
    head = upstream.requests[-1]
    assert (1, 1, False) == (head.count(b"Authorization: " + NEW), head.count(b"X-Tenant: t-1"), OLD in head)
    kept = await durable.letters.request(dlq_id)
    assert (b"Authorization", OLD) in kept.headers, "what was kept stays as it was"


async def test_a_half_open_breaker_takes_a_replay_for_its_probe_and_believes_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 0.05, "success_threshold": 1}
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=breaker, policy="once"))
    failed = await (await sidecar.app()).ask(KEYED)
    dlq_id = failed.get("x-sidecar-dlq-id") or ""
    breaker_now = sidecar.proxy.directory.named("u").choices[0].endpoint.breaker
    _, replayer = parts(sidecar)

    async def once_it_may() -> tuple[str, int]:
        async with asyncio.timeout(30):
            while (settled := await replayer.one(dlq_id, "tester")).outcome == "held_back":
                await asyncio.sleep(0.02)
        return settled.outcome, settled.entry.replays

    assert ("failed", 1) == await once_it_may()
    assert "closed" != breaker_now.state(clock.monotonic()), "a failed probe opens it again"
    provider.down = False
    assert ("completed", 2) == await once_it_may()
    assert "closed" == breaker_now.state(clock.monotonic())
    assert 3 == len(upstream.requests)


async def test_a_replay_is_held_back_while_a_live_call_probes_the_half_open_breaker(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    leave = asyncio.Event()

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if head.startswith(b"GET"):
                await leave.wait()
            first = len(talk.upstream.requests) == 1
            await talk.send(UNAVAILABLE if first else answer(b"made"))

    upstream = await start_upstream(script)
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 0.05, "success_threshold": 1}
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=breaker, policy="once"))
    failed = await (await sidecar.app()).ask(KEYED)
    dlq_id = failed.get("x-sidecar-dlq-id") or ""
    breaker_now = sidecar.proxy.directory.named("u").choices[0].endpoint.breaker
    await until(lambda: "half_open" == breaker_now.state(clock.monotonic()))
    live = await sidecar.app()
    await live.send("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    await until(lambda: 2 == len(upstream.requests))
    _, replayer = parts(sidecar)
    held = await replayer.one(dlq_id, "tester")
    assert ("held_back", "CIRCUIT_OPEN", 2) == (held.outcome, held.entry.history[-1]["code"], len(upstream.requests))
    leave.set()
    assert 200 == (await live.reply(within=30)).status
    assert "completed" == (await replayer.one(dlq_id, "tester")).outcome


async def test_a_replay_after_a_restart_goes_through_the_egress_rules_of_now(
    start_sidecar: Starter, start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    state = str(tmp_path / "kept")
    sidecar = await start_sidecar(policies=QUICK, state_dir=state)
    request = KEYED.replace("POST /u/", f"POST {upstream.url}/").replace("Host: s", f"Host: 127.0.0.1:{upstream.port}")
    failed = await (await sidecar.app()).ask(request)
    dlq_id = failed.get("x-sidecar-dlq-id") or ""
    await sidecar.stop(grace=0.1)
    provider.down, sent = False, len(upstream.requests)
    strict = await start_sidecar(policies=QUICK, state_dir=state, egress={"deny": ["127.0.0.1"]})
    held = await parts(strict)[1].one(dlq_id, "tester")
    assert ("held_back", "EGRESS_DENIED", "pending") == (
        held.outcome,
        held.entry.history[-1]["code"],
        held.entry.status,
    )
    assert "egress.deny" in held.entry.history[-1]["why"]
    assert sent == len(upstream.requests)
    await strict.stop(grace=0.1)
    open_again = await start_sidecar(policies=QUICK, state_dir=state)
    assert "completed" == (await parts(open_again)[1].one(dlq_id, "tester")).outcome
    assert upstream.requests[-1].startswith(b"POST /pay?card=1 HTTP/1.1")


async def test_a_job_against_an_open_breaker_waits_and_goes_on_by_itself(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 1, "open_for_max": 1}
    sidecar = await start_sidecar(upstreams=route(upstream, breaker=breaker, policy="once"))
    app = await sidecar.app()
    for number in range(3):  # the first opens the breaker, the others are kept without being sent
        await app.ask(KEYED.replace("Idempotency-Key: k", f"Idempotency-Key: k{number}"))
    provider.down = False
    durable, replayer = parts(sidecar)
    job = await replayer.start(Order(Filter(), rate=1000))
    await until(lambda: job.current.startswith("waiting for the breaker"))
    await until(lambda: job.ended_at is not None)
    assert ("done", {"completed": 3}) == (job.state, dict(job.outcomes))
    assert {"completed"} == {entry.status for entry in (await durable.listing.page(Filter())).items}


async def test_a_replay_waits_while_live_calls_take_every_place(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    leave = asyncio.Event()
    provider = Provider()

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if head.startswith(b"GET"):
                await leave.wait()
            await talk.send(UNAVAILABLE if provider.down else answer(b"made"))

    upstream = await start_upstream(script)
    keys = {"breaker": {"enabled": False}, "max_in_flight": 1, "max_queue": 2, "policy": "once"}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys))
    failed = [await (await sidecar.app()).ask(KEYED.replace("Key: k", f"Key: k{number}")) for number in range(2)]
    provider.down = False
    (state,) = sidecar.proxy.directory.states()
    live = [await sidecar.app() for _ in range(3)]
    durable, replayer = parts(sidecar)
    await live[0].send("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    await until(lambda: state.turns.busy)
    job = await replayer.start(Order(Filter(), rate=1000))
    await until(lambda: job.current == "waiting for live traffic")
    assert {"pending"} == {entry.status for entry in (await durable.listing.page(Filter())).items}
    await live[1].send("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    await until(lambda: state.turns.waiting == 1)
    alone = asyncio.ensure_future(replayer.one(failed[1].get("x-sidecar-dlq-id") or "", "tester"))
    await until(lambda: state.in_flight == 3)  # the replay of one entry is under way, and stands in no queue
    await live[2].send("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    await until(lambda: state.turns.waiting == 2)
    assert ({}, False) == (dict(job.outcomes), alone.done())
    leave.set()
    assert [200, 200, 200] == [(await app.reply(within=30)).status for app in live]
    await until(lambda: job.state in ENDED and alone.done())
    assert "completed" == alone.result().outcome
    methods = [head.split(b" ")[0] for head in upstream.requests]
    assert [b"POST"] * 2 + [b"GET"] * 3 + [b"POST"] * 2 == methods


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


async def test_a_caller_without_a_live_credential_does_not_hold_up_the_others(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Provider()
    upstream = await start_upstream(provider)
    keys = {"replay": {"credentials": "live"}, "breaker": {"enabled": False}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), policies=QUICK)
    app = await sidecar.app()
    for number, credential in enumerate((OTHER, OLD, OLD)):  # the oldest is of the caller who was not seen again
        request = KEYED.replace("Key: k", f"Key: k{number}").replace("Bearer canary-4711", credential.decode())
        assert 503 == (await app.ask(request)).status
    provider.down = False
    assert 200 == (await app.ask(f"GET /u HTTP/1.1\r\nHost: s\r\nAuthorization: {OLD.decode()}\r\n\r\n")).status
    _, replayer = parts(sidecar)
    job = await replayer.start(Order(Filter(), rate=1000))
    await until(lambda: job.state in ENDED)
    assert ("done", {"completed": 2, "held_back": 1}) == (job.state, dict(job.outcomes))
    (why,) = job.skipped
    assert "no live call of its caller" in why
