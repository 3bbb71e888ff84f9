"""Dead letters in a running sidecar, as if its traffic had failed."""

from __future__ import annotations

import json
from typing import Any

from sidecar import clock
from sidecar.durable.layers import Durable
from telemetry.record import NOT_CONNECTED, SENT
from tests.conftest import Running
from tests.doubles.app import Reply
from tests.doubles.upstream import Talk, Upstream, answer
from tests.durability.rigs import failed
from tests.test_admin import admin

REFUSED = {"code": "CONNECTION_REFUSED", "phase": NOT_CONNECTED}
"""Nothing was sent, so a replay is safe."""
DENIED = {"code": "INVALID_API_KEY", "status": 401, "phase": SENT}
"""A CRITICAL class: it needs a remediation."""


class Moody:
    """The script of an upstream that answers as it is told: with `status`, or with those in `next` first."""

    def __init__(self) -> None:
        self.status = "200 OK"
        self.next: list[str] = []

    async def __call__(self, talk: Talk) -> None:
        while True:
            await talk.read_request()
            status = self.next.pop(0) if self.next else self.status
            await talk.send(answer(b"{}", status, "Content-Type: application/json"))


async def store(sidecar: Running) -> Durable:
    durable = await sidecar.proxy.kept.open()
    if durable.replayer is None:  # PROVISIONAL
        _provisional(durable)
    return durable


def _provisional(d: Durable) -> None:
    import asyncio
    import http.client
    from urllib.parse import urlsplit

    from sidecar.durable.claims import Result
    from sidecar.durable.delivery import Found, Sent

    async def send(entry: Any) -> Result:
        request = await d.letters.request(entry.dlq_id)
        body = b"".join([chunk async for chunk in d.letters.payloads.body(request)])

        def call() -> int:
            u = urlsplit(request.url)
            c = http.client.HTTPConnection(u.hostname or "", u.port)
            c.request(
                request.method,
                u.path,
                body,
                {k.decode(): v.decode() for k, v in request.headers if k.lower() != b"host"},
            )
            status = c.getresponse().status
            c.close()
            return status

        status = await asyncio.to_thread(call)
        return Result(
            ok=status < 400,
            status=status,
            code="" if status < 400 else {503: "TEMPORARY_UNAVAILABLE", 401: "INVALID_API_KEY"}[status],
        )

    async def deliver(x: Any) -> Sent:
        return Sent(ok=True, status=202)

    async def lookup(x: Any) -> Found:
        return Found(True, "m", "f")

    d.attach(send_replay=send, send_delivery=deliver, lookup=lookup)
    assert d.outbox is not None
    d.outbox.start()


async def keep(sidecar: Running, towards: Upstream, number: int = 0, /, **changed: Any) -> str:
    """A POST of the upstream `payments` that failed a moment ago; its id."""
    at = changed.pop("at", clock.wall() - 1000 + number)
    path = changed.pop("path", f"/v1/charges?order={number}&token=canary-in-url")
    facts: dict[str, Any] = {"url": f"{towards.url}{path}", "operation": "create_charge", **REFUSED, **changed}
    facts.setdefault(
        "headers",
        [(b"Authorization", b"Bearer canary-credential"), (b"Content-Type", b"application/json"), (b"X-Kind", b"a")],
    )
    kept = await (await store(sidecar)).letters.keep(failed(number, at=at, **facts))
    return kept.dlq_id


async def send(sidecar: Running, method: str, path: str, body: Any = None) -> Reply:
    """A request to the admin port, with a JSON body if one is given."""
    data = b"" if body is None else json.dumps(body).encode()
    fields = [f"Content-Length: {len(data)}"] + ["Content-Type: application/json"] * (body is not None)
    return await admin(sidecar, path, *fields, method=method, body=data)
