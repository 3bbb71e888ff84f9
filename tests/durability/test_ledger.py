"""The duplicates ledger: faults at every send phase, then everything that is safe is replayed.

A provider counts the effects of every call. Exactly one effect for each safe entry, at most one for every other, which
stays pending, and none is lost. A naive replay of the same entries is shown to duplicate, so the ledger can tell.
LEDGER_ENTRIES sets how many (`make ledger`: 2000).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from typing import Any

from sidecar.durable.entry import Entry
from sidecar.durable.filters import Filter
from sidecar.durable.layers import Durable
from sidecar.durable.replay_job import ENDED, Order
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import field
from tests.doubles.upstream import Talk, answer

ENTRIES = int(os.environ.get("LEDGER_ENTRIES", "240"))
APPS = 8
FAULTS = (
    "refused",  # nothing connected
    "reset at once",  # connected, not a byte written
    "cut in the body",  # part of it written
    "lost before",  # sent, not executed, no answer
    "lost after",  # sent, executed, no answer
    "503 before",  # answered, not executed
    "503 after",  # answered, executed all the same
    "429",  # the answer says it was not executed
    "401",  # the credential was refused
)
KINDS = ("keyed POST", "POST", "PUT")


class Provider:
    """Executes a key once, and a PUT as often as it likes, which changes nothing more."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.keys: set[bytes] = set()
        self.down = True

    def execute(self, head: bytes) -> None:
        call = (field(head, b"x-call") or b"").decode()
        key = field(head, b"idempotency-key")
        if head.startswith(b"PUT"):
            self.effects[call] = 1
        elif key is None or key not in self.keys:
            self.effects[call] += 1
        if key is not None:
            self.keys.add(key)

    async def __call__(self, talk: Talk) -> None:
        while True:
            head = await talk.read_head()
            fault = (field(head, b"x-fault") or b"").decode() if self.down else ""
            if fault.startswith("cut"):
                return talk.reset()
            await talk.reader.readexactly(int(field(head, b"content-length") or 0))
            if not fault or fault.endswith(" after"):
                self.execute(head)
            if fault.startswith("lost"):
                return talk.reset()
            status = {"503": "503 Service Unavailable", "429": "429 Too Many Requests", "401": "401 Unauthorized"}
            await talk.send(answer(b"made", status.get(fault.partition(" ")[0], "200 OK")))


async def reset_at_once(talk: Talk) -> None:
    talk.reset()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def fail_all(sidecar: Running) -> dict[str, tuple[str, str]]:
    """Every call with its fault and kind, each once; returns dlq_id → (call, fault)."""
    kept: dict[str, tuple[str, str]] = {}

    async def some(app: App, first: int) -> None:
        for number in range(first, ENTRIES, APPS):
            fault, kind = FAULTS[number % len(FAULTS)], KINDS[number // len(FAULTS) % len(KINDS)]
            route = {"refused": "/refused", "reset at once": "/reset"}.get(fault, "/works")
            key = f"Idempotency-Key: key-{number}\r\n" if kind == "keyed POST" else ""
            body = f"call {number}"
            head = (
                f"{kind.split()[-1]} {route}/{number} HTTP/1.1\r\nHost: s\r\nX-Call: {number}\r\nX-Fault: {fault}\r\n"
                f"{key}Content-Length: {len(body)}\r\n\r\n"
            )
            await app.send(head + body[:3])
            if fault.startswith("cut"):
                await asyncio.sleep(0.02)  # let it be sent on; if it was not, the call is cut elsewhere
            await app.send(body[3:])
            reply = await app.reply()
            dlq_id = reply.get("x-sidecar-dlq-id")
            assert dlq_id is not None, f"{fault} {kind}: {reply.status} {reply.body!r}"
            kept[dlq_id] = (str(number), fault)

    await asyncio.gather(*[some(await sidecar.app(), number) for number in range(APPS)])
    return kept


async def all_entries(durable: Durable) -> list[Entry]:
    entries, cursor = [], None
    while True:
        page = await durable.listing.page(Filter(), limit=500, cursor=cursor)
        entries += page.items
        if (cursor := page.next_cursor) is None:
            return entries


async def test_replaying_all_that_is_safe_makes_exactly_one_effect_of_each(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    provider = Provider()
    works, ports = await start_upstream(provider), {"refused": unused_port(), "reset": 0}
    resetting = await start_upstream(reset_at_once)
    ports["reset"] = resetting.port
    rules: dict[str, Any] = {"policy": "once", "breaker": {"enabled": False}, "rate_limit_gate": {"enabled": False}}
    rules["replay"] = {"require_remediation": "none", "concurrency": 64}
    sidecar = await start_sidecar(
        upstreams={
            "works": {"route": "/works", "endpoints": [works.url], **rules},
            "refused": {"route": "/refused", "endpoints": [f"http://127.0.0.1:{ports['refused']}"], **rules},
            "reset": {"route": "/reset", "endpoints": [resetting.url], **rules},
        }
    )
    kept = await fail_all(sidecar)
    durable = sidecar.proxy.kept.durable
    assert durable is not None and durable.replayer is not None
    before = await all_entries(durable)
    assert ENTRIES == len(kept) == len(before)
    assert {entry.dlq_id for entry in before} == set(kept)
    earlier = Counter(provider.effects)

    naive = Provider()  # the same world, replayed without thinking
    naive.effects, naive.keys = Counter(earlier), set(provider.keys)
    for dlq_id in kept:
        request = await durable.letters.request(dlq_id)
        lines = b"\r\n".join(b"%b: %b" % line for line in request.headers)
        naive.execute(request.method.encode() + b" / HTTP/1.1\r\n" + lines)
    assert max(naive.effects.values()) > 1, "a naive replay duplicates, or this test sees nothing"

    provider.down = False
    await start_upstream(provider, port=ports["refused"])
    resetting.script = provider
    job = await durable.replayer.start(Order(Filter(), rate=1000, ramp=False))
    async with asyncio.timeout(30 + ENTRIES / 10):
        while job.state not in ENDED:
            await asyncio.sleep(0.02)
    assert "done" == job.state, job.shown()
    after = {entry.dlq_id: entry for entry in await all_entries(durable)}
    assert set(kept) == set(after), "none is lost"
    counts: Counter[str] = Counter()
    for entry in before:
        call, fault = kept[entry.dlq_id]
        now, effects = after[entry.dlq_id], provider.effects[call]
        told = f"{fault} {entry.method} {entry.idempotency_key}: {entry.verdict}, {effects} effects, now {now.status}"
        counts[entry.verdict] += 1
        if entry.verdict == "safe":
            assert ("completed", 1) == (now.status, effects), told
        else:
            assert "pending" == now.status and effects <= 1, told
    assert {"safe", "needs_key"} <= set(counts), counts
    assert counts["safe"] == job.outcomes["completed"]
