"""What the sidecar sends by itself, over a kept connection that dies in the middle: each is executed as often as it
says, and never twice where the provider is not known to honour its key."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import pytest

from sidecar import clock
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import Talk, Upstream, answer
from tests.test_dead_letters_live import QUICK, letters_of, until
from tests.test_outbox_live import job_of
from tests.test_replay_live import parts

PATIENT = {**QUICK, "patient": {"base_delay": 0.01, "max_delay": 0.02, "jitter_type": "none"}}
GET = "GET /u/warm HTTP/1.1\r\nHost: s\r\n\r\n"


class Fickle:
    """A provider that executes every request it reads. The first request on a connection is answered; while `dying`,
    the next one on the same connection is executed and the connection reset: nobody is told."""

    def __init__(self) -> None:
        self.down = False
        self.dying = True
        self.executed: Counter[bytes] = Counter()
        self.keys: list[bytes] = []

    async def __call__(self, talk: Talk) -> None:
        first = True
        while True:
            head, _ = await talk.read_request()
            if self.down:
                await talk.send(answer(b"", "429 Too Many Requests"))
                continue
            if b"/warm" not in head:
                self.executed[head.split(b" ")[0]] += 1
                self.keys += [line for line in head.split(b"\r\n") if line.lower().startswith(b"idempotency-key:")]
            if not first and self.dying:
                talk.reset()
                return
            first = False
            await talk.send(answer(b"ok"))


class Rig(NamedTuple):
    sidecar: Running
    app: App
    provider: Fickle
    upstream: Upstream

    async def warm(self) -> None:
        """Leave one connection behind, kept alive, on which the next request dies."""
        assert 200 == (await self.app.ask(GET)).status


async def rig(start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, **keys: Any) -> Rig:
    provider = Fickle()
    upstream = await start_upstream(provider)
    rules = {"breaker": {"enabled": False}, **keys}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=PATIENT)
    return Rig(sidecar, await sidecar.app(), provider, upstream)


def post(*fields: str, method: str = "POST") -> str:
    return "\r\n".join([f"{method} /u/send HTTP/1.1", "Host: s", "Content-Length: 5", *fields]) + "\r\n\r\nhello"


# ---- deliveries --------------------------------------------------------------------------------------------------

HONOURED = {"idempotency": {"provider_honours": True}}
NOT_HONOURED = {"idempotency": {"provider_honours": False}}
OWN_KEY = "Idempotency-Key: app-1"


@pytest.mark.parametrize(
    ("settings", "fields", "state", "executions"),
    [
        pytest.param({}, (), "unknown", 1, id="a derived key, which nobody is known to honour"),
        pytest.param(NOT_HONOURED, (OWN_KEY,), "unknown", 1, id="the app's key, denied by the settings"),
        pytest.param(HONOURED, (), "succeeded", 2, id="a derived key, honoured"),
        pytest.param({}, (OWN_KEY,), "succeeded", 2, id="the app's key, honoured"),
    ],
)
async def test_a_delivery_on_a_dying_connection_is_executed_as_often_as_its_row_says(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    route: Any,
    settings: dict[str, Any],
    fields: tuple[str, ...],
    state: str,
    executions: int,
) -> None:
    found = await rig(start_sidecar, start_upstream, route, **settings)
    await found.warm()
    reply = await found.app.ask(post("Prefer: respond-async", *fields))
    job = await job_of(found.sidecar, reply.json["job_id"], state)
    assert executions == found.provider.executed[b"POST"] == job["deliveries"][0]["attempts"]
    assert 1 == len(set(found.provider.keys))  # the same one each time


async def test_a_delivery_on_a_dying_connection_is_looked_up_before_it_goes_out_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Fickle()
    upstream = await start_upstream(provider)
    outbox = {"reconcile": {"url": f"{upstream.url}/made/{{key}}"}}
    rules = {"breaker": {"enabled": False}, "outbox": outbox}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=PATIENT)
    app = await sidecar.app()
    assert 200 == (await app.ask(GET)).status
    reply = await app.ask(post("Prefer: respond-async", OWN_KEY))
    job = await job_of(sidecar, reply.json["job_id"], "succeeded")
    assert (1, 1) == (provider.executed[b"POST"], job["deliveries"][0]["lookups"])
    assert 1 == provider.executed[b"GET"]


async def test_a_lookup_on_a_dying_connection_is_asked_again_at_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    provider = Fickle()
    provider.dying = False
    upstream = await start_upstream(provider)
    outbox = {"reconcile": {"url": f"{upstream.url}/made/{{key}}"}}
    rules = {"breaker": {"enabled": False}, "outbox": outbox}
    sidecar = await start_sidecar(upstreams=route(upstream, **rules), policies=PATIENT)
    reply = await (await sidecar.app()).ask(post("Prefer: respond-async"))
    job = await job_of(sidecar, reply.json["job_id"], "succeeded")  # one connection is kept now
    provider.dying = True
    durable = sidecar.proxy.kept.durable
    assert durable is not None and durable.outbox is not None
    number = job["deliveries"][0]["delivery_id"]
    unproven = f"UPDATE deliveries SET evidence = NULL, state = 'reconcile', next_at = 0 WHERE id = {number}"
    await durable.store.write(lambda connection: connection.execute(unproven))
    durable.outbox.wake()
    await until(lambda: 2 == provider.executed[b"GET"])
    job = await job_of(sidecar, reply.json["job_id"], "succeeded")
    assert (1, 1) == (provider.executed[b"POST"], job["deliveries"][0]["lookups"])


# ---- replays -----------------------------------------------------------------------------------------------------

INJECTED = {"idempotency": {"inject": True}}
INJECTED_HONOURED = {"idempotency": {"inject": True, "provider_honours": True}}


@pytest.mark.parametrize(
    ("settings", "fields", "outcome", "executions"),
    [
        pytest.param({}, (), "failed", 1, id="no key"),
        pytest.param(INJECTED, (), "failed", 1, id="a key that was added, which nobody is known to honour"),
        pytest.param(NOT_HONOURED, (OWN_KEY,), "failed", 1, id="the app's key, denied by the settings"),
        pytest.param(INJECTED_HONOURED, (), "completed", 2, id="a key that was added, honoured"),
        pytest.param({}, (OWN_KEY,), "completed", 2, id="the app's key, honoured"),
    ],
)
@pytest.mark.parametrize("by", ["an operator", "the breaker's closing"])
async def test_a_replay_on_a_dying_connection_is_executed_again_only_under_an_honoured_key(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    route: Any,
    settings: dict[str, Any],
    fields: tuple[str, ...],
    outcome: str,
    executions: int,
    by: str,
) -> None:
    found = await rig(start_sidecar, start_upstream, route, replay={"auto": "on_close"}, **settings)
    found.provider.down = True
    failed = await found.app.ask(post(*fields))  # refused, so it may go out again
    found.provider.down = False
    await found.warm()
    dlq_id = failed.get("x-sidecar-dlq-id") or ""
    _, replayer = parts(found.sidecar)
    if by == "an operator":
        settled = await replayer.one(dlq_id, "tester")
        assert outcome == settled.outcome
    else:
        await replayer.breaker_closed("u")

        async def tried() -> bool:
            (entry,) = await letters_of(found.sidecar)
            return entry.status == "completed" or entry.replays > 0

        async with asyncio.timeout(15):
            while not await tried():
                await asyncio.sleep(0.01)
    assert executions == found.provider.executed[b"POST"]
    assert len(set(found.provider.keys)) <= 1


# ---- notices -----------------------------------------------------------------------------------------------------


async def test_a_notice_on_a_dying_connection_is_not_given_twice(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    listener = Fickle()
    told = await start_upstream(listener)

    async def refusing(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"", "503 Service Unavailable"))

    upstream = await start_upstream(refusing)
    sidecar = await start_sidecar(
        upstreams=route(upstream, breaker={"enabled": False}),
        policies=PATIENT,
        dead_letter={"notify_url": f"{told.url}/hook"},
    )
    app = await sidecar.app()
    assert 200 == (await app.ask(f"GET {told.url}/warm HTTP/1.1\r\nHost: {told.url[7:]}\r\n\r\n")).status
    await app.ask(post())
    durable = sidecar.proxy.kept.durable
    assert durable is not None and durable.notifier is not None
    notifier = durable.notifier
    await until(lambda: 1 == notifier.failures)
    assert 1 == listener.executed[b"POST"]


# ---- another provider --------------------------------------------------------------------------------------------


async def test_nothing_that_the_sidecar_sends_by_itself_goes_to_a_fallback(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    """A delivery may have been executed where it was meant to go; and what a fallback says when it is asked about a
    delivery of somebody else's says nothing."""
    provider, other = Fickle(), Fickle()
    provider.dying = other.dying = False
    upstream, backup = await start_upstream(provider), await start_upstream(other)
    breaker = {"failure_threshold": 1, "min_volume": 1, "open_for": 60}
    upstreams = route(upstream, breaker=breaker, fallback="backup", idempotency={"provider_honours": True})
    upstreams["backup"] = {"route": "/backup", "endpoints": [backup.url]}
    sidecar = await start_sidecar(upstreams=upstreams, policies=PATIENT)
    sidecar.proxy.directory.named("u").choices[0].endpoint.breaker.force_open(clock.monotonic(), "a test")
    app = await sidecar.app()
    reply = await app.ask(post("Prefer: respond-async"))
    job = await job_of(sidecar, reply.json["job_id"], "in_progress", "retryable_failed")
    await asyncio.sleep(0.3)
    job = await job_of(sidecar, reply.json["job_id"], "in_progress", "retryable_failed")
    assert (Counter(), 0) == (other.executed, job["deliveries"][0]["attempts"])
