"""A storm of requests with every fault an upstream has, and the bookkeeping of both ends.

Which request meets which fault is decided by chance with a seed; how the requests overlap is not, so nothing here
expects a number: what the client and the upstream counted is what the sidecar's signals are measured against.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.conftest import Running
from tests.doubles.app import Reply
from tests.doubles.faults import field as field_of
from tests.doubles.faults import request
from tests.doubles.upstream import Talk, answer

_FAULTS = {
    "fine": 60,
    "large": 4,
    "unavailable": 10,
    "broken": 5,
    "limited": 3,
    "not found": 4,
    "reset": 5,
    "cut small": 4,
    "cut large": 3,
    "hang": 2,
}
_STATUS = {
    "fine": "200 OK",
    "unavailable": "503 Service Unavailable",
    "broken": "500 Internal Server Error",
    "limited": "429 Too Many Requests",
    "not found": "404 Not Found",
}
_LARGE = b"x" * 200_000


class Weather:
    """A script for an upstream. `arrivals` counts the heads that came, by the id the client gave them."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.arrivals: Counter[str] = Counter()
        self.hanging: dict[str, asyncio.Event] = {}

    async def __call__(self, talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            name = (field_of(head, b"x-id") or b"").decode()
            self.arrivals[name] += 1
            fault = self._chance.choices(list(_FAULTS), list(_FAULTS.values()))[0]
            if fault in _STATUS:
                body = b"" if head.startswith(b"HEAD ") else b"ok"
                await talk.send(answer(b"ok", _STATUS[fault])[: None if body else -2])
            elif fault == "large":
                await talk.send(answer(_LARGE))
            elif fault == "reset":
                return talk.reset()
            elif fault == "hang":
                self.hanging[name].set()
                await talk.reader.read()
                return None
            else:
                body = b"0123456789" if fault == "cut small" else _LARGE
                await talk.send(answer(body)[: -len(body) // 2])
                await asyncio.sleep(0.02)  # or the end would overtake the beginning
                return talk.close()


@dataclass
class Ledger:
    """What the client saw."""

    asked: int = 0
    tunnels: int = 0
    malformed: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    attempts: dict[str, int] = field(default_factory=dict)
    """By id: what `x-sidecar-attempts` said, where there was an answer."""
    sessions: set[str] = field(default_factory=set)

    def note(self, name: str, reply: Reply) -> None:
        outcome = reply.get("x-sidecar-outcome") or "none"
        self.outcomes[outcome if reply.complete else "failed_streaming"] += 1
        self.attempts[name] = int(reply.get("x-sidecar-attempts") or -1)
        self.sessions.add(reply.get("x-sidecar-session") or "")


async def storm(
    sidecar: Running, weather: Weather, seed: int, requests: int, routes: list[str], tunnel_port: int, workers: int = 16
) -> Ledger:
    """So many requests through these routes, among them tunnels, bad ones and some that lead nowhere."""
    chance, ledger = random.Random(seed), Ledger()
    numbers = iter(range(requests))

    async def work() -> None:
        for number in numbers:
            draw = chance.random()
            if draw < 0.02:
                await _tunnel(sidecar, ledger, tunnel_port)
            elif draw < 0.04:
                await _malformed(sidecar, ledger)
            else:
                route = chance.choice(routes) if draw > 0.06 else "/nowhere"
                method = chance.choice(["GET", "GET", "GET", "PUT", "POST", "DELETE", "PATCH"])
                await _one(sidecar, weather, ledger, f"{seed}-{number}", method, route)

    await asyncio.gather(*(work() for _ in range(workers)))
    return ledger


async def _one(sidecar: Running, weather: Weather, ledger: Ledger, name: str, method: str, route: str) -> None:
    app = await sidecar.app()
    ledger.asked += 1
    hanging = weather.hanging[name] = asyncio.Event()
    body = b"{}" if method in ("PUT", "POST", "PATCH") else b""
    await app.send(request(method, f"{route}/x", f"x-id: {name}", body=body))
    reply, hangs = asyncio.create_task(app.reply(within=30)), asyncio.create_task(hanging.wait())
    await asyncio.wait({reply, hangs}, return_when=asyncio.FIRST_COMPLETED)
    hangs.cancel()
    if reply.done():
        ledger.note(name, reply.result())
    else:  # it would take forever, so the app goes
        reply.cancel()
        ledger.outcomes["cancelled"] += 1
    await asyncio.gather(reply, hangs, return_exceptions=True)
    app.close()


async def _tunnel(sidecar: Running, ledger: Ledger, port: int) -> None:
    app = await sidecar.app()
    ledger.asked += 1
    ledger.tunnels += 1
    await app.send(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await app.reply(to_head=True)
    assert 200 == reply.status
    await app.send(b"ping")
    assert b"ping" == await app.reader.readexactly(4)
    ledger.outcomes["tunnelled"] += 1
    ledger.sessions.add(reply.get("x-sidecar-session") or "")
    app.close()


async def _malformed(sidecar: Running, ledger: Ledger) -> None:
    app = await sidecar.app()
    ledger.malformed += 1
    assert 400 == (await app.ask("GET /u/x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n")).status
    app.close()
