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
    """The store, opened now if it is not yet."""
    return await sidecar.proxy.kept.open()


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
