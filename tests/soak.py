"""Load for a long time, and what it leaves behind: `python -m tests.soak --minutes 10`, or `make soak`.

A sidecar as a process of its own, an upstream that fails three times in ten, apps that ask through it as a proxy, go
away in the middle, open tunnels. First as fast as it goes, until everything that the sidecar remembers is full with its
shipped limits: sessions, workflows, keys. Then at a steady pace; dead letters are kept for half a minute, so that soon
as many go as come. From there on memory and open files, read once a second, must be flat; when the load ends, its files
must be closed.

Flat means the line fitted through all readings, not through their floor: it may rise by 0.2 MiB a minute. One in a
hundred requests remembered for ever, at 400 a second and a kilobyte each, would be 0.23. Less than that cannot be told
from noise in ten minutes: readings scatter by about half a MiB, which alone moves the line by 0.05 either way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import uvloop

from tests.doubles.app import App
from tests.doubles.otlp import Received, http_collector
from tests.doubles.upstream import Talk, Upstream, answer
from tests.e2e.process import Process
from tests.soak_readings import MIB, SHIPPED, TO_THE_COLLECTOR, Reading, Result, Stores, report

_LARGE = b"x" * 300_000
_FAILURES = {
    "503 Service Unavailable": 12,
    "500 Internal Server Error": 6,
    "429 Too Many Requests": 4,
    "reset": 5,
    "cut": 3,
}
_FAILING = 0.3
_LONGEST_FILLING = 900.0  # seconds; a machine that needs more of them has other things to do
_RETENTION = 30.0
SETTLING = 3 * _RETENTION  # seconds after the last burst: then as many dead letters go as come
_chance = random.Random(30)


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
    """Clients that ask until they are told to stop, `rate` times a second together; None: as often as they can."""

    def __init__(self, process: Process, upstream: Upstream, tunnel_port: int, result: Result) -> None:
        self._proxy = "http://{}:{}".format(*process.address)
        self._process = process
        self._base = upstream.url
        self._tunnel_port = tunnel_port
        self._result = result
        self._next = 0.0
        self.rate: float | None = None
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
            await self._turn()

    async def _turn(self) -> None:
        """Wait for the next place in time. What was missed is not made up for: a burst would be another load."""
        now = time.monotonic()
        if self.rate is not None:
            self._next = max(now, self._next + 1 / self.rate)
        await asyncio.sleep(max(0.0, self._next - now))

    async def _request(self, session: aiohttp.ClientSession, draw: float) -> None:
        result = self._result
        method = _chance.choice(["GET", "GET", "GET", "PUT", "POST"])
        headers = {"Authorization": "Bearer x", "X-Request": str(draw)}
        filling = self.rate is None
        if draw < 0.3 or filling:
            headers["Idempotency-Key"] = str(_chance.getrandbits(64))
            result.keys += 1
        if draw < 0.1 or filling:
            headers |= {"x-sidecar-workflow": str(_chance.getrandbits(32)), "x-sidecar-stage": "fetch"}
            result.workflows += 1
        path = "/large" if draw > 0.97 else f"/item/{_chance.getrandbits(24)}?page=1"
        data = b"z" * _chance.choice([10, 1_000, 100_000]) if method != "GET" else None
        patience = aiohttp.ClientTimeout(total=0.002 if 0.5 < draw < 0.52 else 30)
        async with session.request(
            method, self._base + path, proxy=self._proxy, headers=headers, data=data, timeout=patience
        ) as answered:
            await answered.read()
            result.outcomes[answered.headers.get("x-sidecar-outcome", "none")] += 1

    async def _tunnel(self) -> None:
        app = await App.connect(self._process.address)
        await app.send(f"CONNECT 127.0.0.1:{self._tunnel_port} HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = await app.reply(to_head=True)
        await app.send(b"ping")
        if await app.reader.readexactly(4) == b"ping":
            self._result.outcomes[reply.get("x-sidecar-outcome") or "none"] += 1
        app.close()


# ---- one run -----------------------------------------------------------------------------------------------------


def _settings(tunnel_port: int, stores: Stores) -> dict[str, Any]:
    return {
        "upstreams": {"flaky": {"hosts": ["127.0.0.1"], "timeouts": {"pool_idle": 2}}},
        "egress": {"connect_ports": [tunnel_port]},
        "policies": {"default": {"base_delay": 0.005, "max_delay": 0.02}},
        "limits": {"keepalive_timeout": 5, "workflows": stores.workflows},
        "dead_letter": {"max_bytes": 256 * MIB, "retention": _RETENTION},  # so that they come and go
        "telemetry": {"events": {"file": "events.jsonl", "max_bytes": 4 * MIB}, "sessions": stores.sessions},
    }


@contextlib.asynccontextmanager
async def _running(folder: Path, url: str, stores: Stores) -> AsyncIterator[tuple[Any, ...]]:
    upstream, mirrored = await Upstream(flaky).start(), await Upstream(mirror).start()
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
        "OTEL_LOGS_EXPORTER": "otlp",
    }
    process = await Process.start(folder, environ, _settings(mirrored.port, stores))
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
    seconds: float,
    rate: float,
    *,
    stores: Stores = SHIPPED,
    settling: float = SETTLING,
    workers: int = 8,
    every: float = 30.0,
    tell: Any = None,
) -> Result:
    """Load as fast as it goes until the stores are full, then `rate` requests a second; `settling` seconds later, for so
    long. `tell` gets a line `every` so many seconds."""
    result = Result(stores)
    with tempfile.TemporaryDirectory() as folder, http_collector() as (url, received):
        async with _running(Path(folder) / "sidecar", url, stores) as (process, upstream, tunnel_port):
            apps = Apps(process, upstream, tunnel_port, result)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                result.idle_before = process.sockets()
                tasks = [asyncio.create_task(apps.ask(session)) for _ in range(workers)]
                began, told = time.monotonic(), 0.0
                while (at := time.monotonic() - began) < min(result.full_at, _LONGEST_FILLING) + seconds:
                    if not process.running:
                        await _tell_of_the_end(process, at)
                    if apps.rate is None and result.full:
                        apps.rate, result.full_at = rate, at + settling
                    result.readings.append(Reading(at, process.resident(), process.descriptors()))
                    if tell is not None and at - told >= every:
                        tell(_line(result))
                        told = at
                    _forget(upstream, received, process)
                    await asyncio.sleep(1)
                apps.stopped = True
                await asyncio.gather(*tasks)
            result.idle_after = await _settled(process, result.idle_before)
            seen = await process.metrics()
            result.dead_letters = round(seen.total("sidecar_dlq_enqueued_total"))
            result.dropped = round(seen.total("sidecar_dlq_evicted_total"))
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
        if process.sockets() <= before + TO_THE_COLLECTOR:
            break
        await asyncio.sleep(0.1)
    return process.sockets()


# ---- by hand -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, with the stores full (default: 10)")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second (default: 400)")
    parser.add_argument("--growth", type=float, default=0.2, help="MiB a minute that may be noise (default: 0.2)")
    chosen = parser.parse_args()
    told = f"{chosen.minutes:g} minutes at {chosen.rate:g} requests a second"
    print(f"{told}, once the stores are full; {_FAILING:.0%} of attempts fail")
    result = uvloop.run(soak(chosen.minutes * 60, chosen.rate, tell=lambda line: print(line, flush=True)))
    print(f"outcomes: {dict(result.outcomes.most_common())}")
    wrong = report(result, chosen.growth)
    if len(result.measured) > 1:
        values = [reading.resident / MIB for reading in result.measured]
        print(f"memory:   {result.per_minute('resident') / MIB:+.3f} MiB per minute after {result.full_at:.0f} s")
        print(f"          {min(values):.1f} to {max(values):.1f} MiB, {statistics.stdev(values):.2f} around the middle")
        print(f"files:    {result.per_minute('descriptors'):+.2f} per minute")
    print(f"letters:  {result.dead_letters:,} kept, {result.dropped:,} of them dropped at their age")
    print(f"idle:     {result.idle_before} connections before, {result.idle_after} after")
    print("flat" if not wrong else "NOT FLAT: " + "; ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
