"""Load for a long time, and what it leaves behind: `python -m tests.soak --minutes 10`, or `make soak`.

A sidecar as a process of its own, an upstream that fails three times in ten, apps that ask through it as a proxy, go
away in the middle, open tunnels. Memory and open files of the sidecar are read once a second. After a warm-up, in which
rings and pools fill, both must be flat; when the load ends, its files must be closed.

What a pass says: the floor of memory rose by less than the limit between the first third and the last. A slow leak hides
below that in ten minutes (5 MiB in five of them is a megabyte a minute): `--minutes 60` is the run that can rule it out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import uvloop

from tests.doubles.app import App
from tests.doubles.otlp import Received, http_collector
from tests.doubles.upstream import Talk, Upstream, answer
from tests.e2e.process import Process

MIB = 1024 * 1024
_LARGE = b"x" * 300_000
_FAILURES = {
    "503 Service Unavailable": 12,
    "500 Internal Server Error": 6,
    "429 Too Many Requests": 4,
    "reset": 5,
    "cut": 3,
}
_FAILING = 0.3
_TO_THE_COLLECTOR = 2  # kept open by the exporters of spans and logs
_chance = random.Random(30)


@dataclass
class Reading:
    """Of the sidecar's process."""

    at: float
    resident: int
    descriptors: int


@dataclass
class Result:
    """What was read, and how the requests came out. `warm_up` is how long it took, infinite if it was not over."""

    warm_up: float = float("inf")
    readings: list[Reading] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    idle_before: int = 0
    idle_after: int = 0

    @property
    def kept(self) -> int:
        """Requests that the sidecar remembers; when it remembers all it may, the first make room for the next."""
        return sum(count for outcome, count in self.outcomes.items() if outcome not in ("first_try", "tunnelled"))

    @property
    def measured(self) -> list[Reading]:
        return [reading for reading in self.readings if reading.at >= self.warm_up]

    def growth(self, what: str) -> float:
        """How much the floor rose from the first third after the warm-up to the last. Memory goes up and down with
        what waits to be collected; what is never given back raises the floor."""
        values = [float(getattr(reading, what)) for reading in self.measured]
        third = max(1, len(values) // 3)
        return _floor(values[-third:]) - _floor(values[:third])

    def per_minute(self, what: str) -> float:
        return _slope(self.measured, what) * 60


def _floor(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def _slope(readings: list[Reading], what: str) -> float:
    """Least squares, per second."""
    times = [reading.at for reading in readings]
    values = [float(getattr(reading, what)) for reading in readings]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    return sum((at - middle) * (value - mean) for at, value in zip(times, values, strict=True)) / spread


# ---- both ends ---------------------------------------------------------------------------------------------------


async def flaky(talk: Talk) -> None:
    """Fails three times in ten, in several ways."""
    while True:
        head, _ = await talk.read_request()
        fault = "200 OK"
        if _chance.random() < _FAILING:
            fault = _chance.choices(list(_FAILURES), list(_FAILURES.values()))[0]
        if fault == "reset":
            return talk.reset()
        body = _LARGE if b" /large" in head else b'{"ok": true}'
        if fault == "cut":
            await talk.send(answer(body)[: -len(body) // 2])
            return talk.close()
        await talk.send(answer(body, fault))


async def mirror(talk: Talk) -> None:
    while data := await talk.reader.read(65_536):
        await talk.send(data)


class Apps:
    """Clients that ask until they are told to stop."""

    def __init__(self, process: Process, upstream: Upstream, tunnel_port: int, result: Result, pause: float) -> None:
        self._proxy = "http://{}:{}".format(*process.address)
        self._process = process
        self._base = upstream.url
        self._tunnel_port = tunnel_port
        self._result = result
        self._pause = pause
        self.stopped = False

    async def ask(self, session: aiohttp.ClientSession) -> None:
        while not self.stopped:
            draw = _chance.random()
            try:
                if draw < 0.01:
                    await self._tunnel()
                else:
                    await self._request(session, draw)
            except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
                self._result.outcomes["broken off"] += 1  # as the upstream had it
            except TimeoutError:
                self._result.outcomes["left early"] += 1
            except Exception as error:  # whatever else it is, the end of the run must name it
                self._result.unexpected[repr(error)] += 1
            await asyncio.sleep(self._pause)

    async def _request(self, session: aiohttp.ClientSession, draw: float) -> None:
        method = _chance.choice(["GET", "GET", "GET", "PUT", "POST"])
        headers = {"Authorization": "Bearer x", "X-Request": str(draw)}
        if draw < 0.3:
            headers["Idempotency-Key"] = str(_chance.getrandbits(64))
        if draw < 0.1:
            headers |= {"x-sidecar-workflow": str(_chance.getrandbits(32)), "x-sidecar-stage": "fetch"}
        path = "/large" if draw > 0.97 else f"/item/{_chance.getrandbits(24)}?page=1"
        data = b"z" * _chance.choice([10, 1_000, 100_000]) if method != "GET" else None
        patience = aiohttp.ClientTimeout(total=0.002 if 0.5 < draw < 0.52 else 30)
        async with session.request(
            method, self._base + path, proxy=self._proxy, headers=headers, data=data, timeout=patience
        ) as answered:
            await answered.read()
            self._result.outcomes[answered.headers.get("x-sidecar-outcome", "none")] += 1

    async def _tunnel(self) -> None:
        app = await App.connect(self._process.address)
        await app.send(f"CONNECT 127.0.0.1:{self._tunnel_port} HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = await app.reply(to_head=True)
        await app.send(b"ping")
        if await app.reader.readexactly(4) == b"ping":
            self._result.outcomes[reply.get("x-sidecar-outcome") or "none"] += 1
        app.close()


# ---- one run -----------------------------------------------------------------------------------------------------


def _settings(tunnel_port: int, sessions: int) -> dict[str, Any]:
    return {
        "upstreams": {"flaky": {"hosts": ["127.0.0.1"], "timeouts": {"pool_idle": 2}}},
        "egress": {"connect_ports": [tunnel_port]},
        "policies": {"default": {"base_delay": 0.005, "max_delay": 0.02}},
        "limits": {"keepalive_timeout": 5, "workflows": 1_000},  # so few that they are full when the warm-up ends
        "telemetry": {"events": {"file": "events.jsonl", "max_bytes": 4 * MIB}, "sessions": sessions},
    }


@contextlib.asynccontextmanager
async def _running(folder: Path, url: str, sessions: int) -> AsyncIterator[tuple[Any, ...]]:
    upstream, mirrored = await Upstream(flaky).start(), await Upstream(mirror).start()
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
        "OTEL_LOGS_EXPORTER": "otlp",
    }
    process = await Process.start(folder, environ, _settings(mirrored.port, sessions))
    try:
        yield await process.ready(), upstream, mirrored.port
    finally:
        await process.clean_up()
        await upstream.stop()
        await mirrored.stop()


def _forget(upstream: Upstream, received: Received, process: Process) -> None:
    """What the doubles remember is of no use here, and would fill this process instead."""
    upstream.requests.clear()
    upstream.bodies.clear()
    received.requests.clear()
    received.headers.clear()
    del process.written[:-1000]


async def soak(
    seconds: float, warm_up: float, *, sessions: int = 10_000, workers: int = 8, pause: float = 0.0, tell: Any = None
) -> Result:
    """Load for so long, warming up for at least so long and until `sessions`, which is a setting, are remembered.
    `tell` gets a line now and then."""
    result = Result()
    with tempfile.TemporaryDirectory() as folder, http_collector() as (url, received):
        async with _running(Path(folder) / "sidecar", url, sessions) as (process, upstream, tunnel_port):
            apps = Apps(process, upstream, tunnel_port, result, pause)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                result.idle_before = process.sockets()
                tasks = [asyncio.create_task(apps.ask(session)) for _ in range(workers)]
                began, told = time.monotonic(), 0.0
                while (at := time.monotonic() - began) < seconds:
                    if not process.running:
                        await _tell_of_the_end(process, at)
                    result.readings.append(Reading(at, process.resident(), process.descriptors()))
                    if at >= warm_up and result.kept >= sessions:
                        result.warm_up = min(at, result.warm_up)
                    if tell is not None and at - told >= seconds / 20:
                        tell(_line(result))
                        told = at
                    _forget(upstream, received, process)
                    await asyncio.sleep(1)
                apps.stopped = True
                await asyncio.gather(*tasks)
            result.idle_after = await _settled(process, result.idle_before)
    return result


async def _tell_of_the_end(process: Process, at: float) -> NoReturn:
    """Ended by a fault of its own, or told to stop by somebody: its last lines say which."""
    code = await process.ended()
    last = [f"{line['event_name']}: {line['body']}" for line in process.lines()[-5:]]
    raise SystemExit(f"the sidecar ended after {at:.0f} s with {code}; its last lines:\n  " + "\n  ".join(last))


def _line(result: Result) -> str:
    last, asked = result.readings[-1], sum(result.outcomes.values())
    return f"{last.at:6.0f} s {asked:10,} requests {last.resident / MIB:8.1f} MiB {last.descriptors:5} files"


async def _settled(process: Process, before: int) -> int:
    """Connections that are left once idle ones have run out of their time, or after all the time that they get."""
    for _ in range(150):
        if process.sockets() <= before + _TO_THE_COLLECTOR:
            break
        await asyncio.sleep(0.1)
    return process.sockets()


# ---- by hand -----------------------------------------------------------------------------------------------------


def report(result: Result, most_growth: float) -> list[str]:
    """What is wrong; nothing when memory and files are flat."""
    if len(result.measured) < 5:
        return [f"no time was left after the warm-up, with {result.kept:,} sessions remembered; let it run longer"]
    wrong = []
    if result.growth("resident") > most_growth:
        wrong.append(f"memory grew by {result.growth('resident') / MIB:.1f} MiB after the warm-up")
    if result.growth("descriptors") > 10:
        wrong.append(f"{result.growth('descriptors'):.0f} more files are open than after the warm-up")
    if result.idle_after > result.idle_before + _TO_THE_COLLECTOR:
        wrong.append(f"{result.idle_after} connections are left without any load, {result.idle_before} before it")
    if result.unexpected:
        wrong.append(f"apps met what no upstream caused: {dict(result.unexpected.most_common(3))}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--workers", type=int, default=8, help="apps at the same time (default: 8)")
    parser.add_argument("--growth", type=float, default=5.0, help="MiB that it may grow after the warm-up (default: 5)")
    chosen = parser.parse_args()
    seconds = chosen.minutes * 60
    warm_up = max(seconds / 4, min(60.0, seconds / 2))
    print(f"{chosen.minutes:g} minutes, the first {warm_up:.0f} s and more to warm up, {_FAILING:.0%} of attempts fail")
    result = uvloop.run(soak(seconds, warm_up, workers=chosen.workers, tell=lambda line: print(line, flush=True)))
    print(f"outcomes: {dict(result.outcomes.most_common())}")
    wrong = report(result, chosen.growth * MIB)
    if len(result.measured) > 1:
        print(f"memory:   {result.per_minute('resident') / 1024:+.1f} KiB per minute after {result.warm_up:.0f} s")
        print(f"floor:    {result.growth('resident') / MIB:+.1f} MiB from the first third to the last")
        print(f"files:    {result.per_minute('descriptors'):+.2f} per minute")
    print(f"idle:     {result.idle_before} connections before, {result.idle_after} after")
    print("flat" if not wrong else "NOT FLAT: " + "; ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
