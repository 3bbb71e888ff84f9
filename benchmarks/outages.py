"""How breakers bear an upstream that dies, comes back, or is merely flaky, as an app sees it.

Four upstreams behind one sidecar with its default settings, 50 requests a second each:

    killed        healthy for a while, then nothing listens there any more, then it is back
    failing       the same, but it goes on listening and answers 503
    flaky         30 % of its answers are 503, at random, all the time
    alternating   503, 200, 503, 200 …: thirty GETs one after the other

    python -m benchmarks.outages [--healthy S] [--down S] [--flaky S] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from benchmarks.processes import LOOPBACK, Stage, free_ports

RATE = 50.0
FLAKY_SHARE = 0.3
ALTERNATING_REQUESTS = 30
LONGEST_RETURN_SECONDS = 90.0

UNTIL_OPEN = "killed at 50/s: failures until open"
BACK = "… back: until the first success"
FAILING_UNTIL_OPEN = "answering 503 at 50/s: failures until open"
FAILING_BACK = "… answering again: until the first success"
FLAKY_OPENED = "30 % random failures: times opened"
REFUSED = "alternating 503 and 200: refusals"
BOUNDS = {UNTIL_OPEN: 40.0, BACK: 3.0, FAILING_UNTIL_OPEN: 40.0, FAILING_BACK: 60.0, FLAKY_OPENED: 0.0, REFUSED: 0.0}
SECONDS = (BACK, FAILING_BACK)

Answer = Callable[[], int]


class Upstream:
    """Listens on one port, or does not."""

    def __init__(self, port: int, answer: Answer) -> None:
        self.port = port
        self.answer = answer
        self._runner: web.ServerRunner | None = None

    async def up(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, self.port, reuse_address=True).start()

    async def down(self) -> None:
        """Nothing listens any more, and open connections are gone."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        return web.Response(status=self.answer())


class Caller:
    """Asks at an even rate, whether or not earlier ones have been answered."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._asking: set[asyncio.Task[None]] = set()
        self.outcomes: list[tuple[float, str]] = []
        """When each ended, and how: the `x-sidecar-outcome`."""

    async def ask(self) -> str:
        async with self._session.get(self._url) as response:
            await response.read()
            outcome = response.headers.get("x-sidecar-outcome", "none")
        self.outcomes.append((time.monotonic(), outcome))
        return outcome

    async def keep_asking(self, until: Callable[[], bool]) -> None:
        due = time.monotonic()
        while not until():
            task = asyncio.create_task(self._ask_once())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            due += 1.0 / RATE
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*self._asking)

    async def _ask_once(self) -> None:
        await self.ask()


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


async def outage(
    caller: Caller, begin: Callable[[], object], end: Callable[[], object], healthy: float, down: float
) -> tuple[float, float]:
    """How many calls failed before one was refused, and seconds from the end of the outage to the first success."""
    await caller.keep_asking(for_seconds(healthy))
    assert {"first_try"} == {outcome for _, outcome in caller.outcomes}, Counter(o for _, o in caller.outcomes)
    caller.outcomes.clear()
    await _done(begin())
    await caller.keep_asking(for_seconds(down))
    told = [outcome for _, outcome in sorted(caller.outcomes)]
    failures = told.index("breaker_open") if "breaker_open" in told else len(told)
    failures += sum(outcome in ("exhausted", "budget", "not_retryable", "deadline") for outcome in told[failures:])
    caller.outcomes.clear()
    await _done(end())
    back, limit = time.monotonic(), for_seconds(LONGEST_RETURN_SECONDS)

    def succeeded() -> bool:
        return limit() or any(outcome in ("first_try", "recovered") for _, outcome in caller.outcomes)

    await caller.keep_asking(succeeded)
    good = [at for at, outcome in caller.outcomes if outcome in ("first_try", "recovered")]
    return float(failures), (min(good) - back) if good else float("inf")


async def _done(what: object) -> None:
    if asyncio.iscoroutine(what):
        await what


async def measure(stage: Stage, *, healthy: float, down: float, flaky: float) -> dict[str, float]:
    proxy, admin, *ports = free_ports(6)
    state = {"failing": 200}
    chance, turns = random.Random(7), itertools.cycle((503, 200))
    upstreams = {
        "killed": Upstream(ports[0], lambda: 200),
        "failing": Upstream(ports[1], lambda: state["failing"]),
        "flaky": Upstream(ports[2], lambda: 503 if chance.random() < FLAKY_SHARE else 200),
        "alternating": Upstream(ports[3], lambda: next(turns)),
    }
    settings = {
        "listen": {"port": proxy},
        "admin": {"port": admin},
        "state_dir": str(stage.folder / "state"),
        "upstreams": {
            name: {"route": f"/{name}", "endpoints": [f"http://{LOOPBACK}:{upstream.port}"]}
            for name, upstream in upstreams.items()
        },
    }
    file = stage.folder / "sidecar.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    core = min(os.sched_getaffinity(0))
    for upstream in upstreams.values():
        await upstream.up()
    stage.start(
        "sidecar", [sys.executable, "-m", "sidecar", "run", "-c", str(file)], core=core, port=proxy, cwd=Path.cwd()
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        callers = {name: Caller(session, f"http://{LOOPBACK}:{proxy}/{name}/x") for name in upstreams}
        killed, failing, _, refused = await asyncio.gather(
            outage(callers["killed"], upstreams["killed"].down, upstreams["killed"].up, healthy, down),
            outage(
                callers["failing"],
                lambda: state.update(failing=503),
                lambda: state.update(failing=200),
                healthy,
                down,
            ),
            callers["flaky"].keep_asking(for_seconds(flaky)),
            _alternating(callers["alternating"]),
        )
        opened = await _times_opened(session, admin, "flaky")
    for upstream in upstreams.values():
        await upstream.down()
    return {
        UNTIL_OPEN: killed[0],
        BACK: killed[1],
        FAILING_UNTIL_OPEN: failing[0],
        FAILING_BACK: failing[1],
        FLAKY_OPENED: opened,
        REFUSED: refused,
    }


async def _alternating(caller: Caller) -> float:
    told = [await caller.ask() for _ in range(ALTERNATING_REQUESTS)]
    return float(told.count("breaker_open"))


async def _times_opened(session: aiohttp.ClientSession, admin: int, upstream: str) -> float:
    async with session.get(f"http://{LOOPBACK}:{admin}/breakers", params={"upstream": upstream}) as response:
        page = await response.json()
    told = [one for one in page["transitions"] if one["upstream"] == upstream]
    return float(sum(one["to_state"] == "open" for one in told))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outages", description="Breakers in an outage.")
    parser.add_argument("--healthy", type=float, default=60.0, help="seconds before the outage")
    parser.add_argument("--down", type=float, default=15.0, help="seconds that it lasts")
    parser.add_argument("--flaky", type=float, default=600.0, help="seconds of 30 %% random failures")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    with Stage() as stage:
        found = asyncio.run(measure(stage, healthy=options.healthy, down=options.down, flaky=options.flaky))
    if options.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        unit = " s" if name in SECONDS else ""
        verdict = "OK" if value <= BOUNDS[name] else "MISSED"
        print(f"{name:<46} {value:>7.3g}{unit:<2}  at most {BOUNDS[name]:g}  {verdict}")
    return 0 if all(value <= BOUNDS[name] for name, value in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
