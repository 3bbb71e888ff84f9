"""A sidecar in this process with a collector beside it, and one as a process of its own."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from config.loader import Loaded
from config.model import Settings
from sidecar.upstream.resolve import Lookup
from telemetry.events import serialise
from telemetry.logs import Log
from tests.conftest import Running
from tests.doubles.faults import QUICK_POLICIES
from tests.doubles.otlp import Received, grpc_collector, http_collector
from tests.e2e.process import Process
from tests.e2e.signs import Scrape, scrape

Collector = tuple[dict[str, str], Received]
Watcher = Callable[..., Awaitable["Watched"]]
Runner = Callable[..., Awaitable[Process]]

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
"""Export at once: nobody wants to wait five seconds for a batch."""


class Watched(Running):
    """A sidecar with everything it says at hand."""

    state_dir: Path

    async def metrics(self) -> Scrape:
        return await scrape(self.admin_address)

    def sessions(self) -> list[dict[str, Any]]:
        """Those that are kept and those sampled, explained, the oldest first."""
        signals = self.proxy.signals
        return [signals.show(made, explained=True) for made in signals.sessions.page(limit=10_000).items[::-1]]

    def events(self) -> list[dict[str, Any]]:
        """The oldest first."""
        signals = self.proxy.signals
        return [serialise(event, signals.redactor) for event in signals.events.recent(10_000)[::-1]]

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        self.proxy.signals.writer.flush()
        said = [json.loads(line) for line in self.logged.getvalue().splitlines()]
        return [line for line in said if event in (None, line["event_name"])]


def variables(url: str, protocol: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, **SOON}


@pytest.fixture(params=["grpc", "http/protobuf"])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    """The variables that lead to it, and what it got; once over each protocol."""
    running = grpc_collector if request.param == "grpc" else http_collector
    with running() as (url, received):
        yield variables(url, request.param), received


@pytest.fixture
def http_only() -> Iterator[Collector]:
    """One collector, where the protocol does not matter."""
    with http_collector() as (url, received):
        yield variables(url, "http/protobuf"), received


@pytest_asyncio.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Watcher]:
    """`await watch(environ, upstreams={…})`: keys as in the configuration file, waits that cost nothing."""
    started: list[Watched] = []

    async def start(environ: dict[str, str] | None = None, *, lookup: Lookup | None = None, **keys: Any) -> Watched:
        state_dir = tmp_path / f"state{len(started)}"
        keys = {"listen": {"port": 0}, "admin": {"port": 0}, "state_dir": str(state_dir), **keys}
        keys["policies"] = {**QUICK_POLICIES, **keys.get("policies", {})}
        logged = io.StringIO()
        sidecar = Watched(Loaded(Settings.model_validate(keys), None, {}), Log(logged), lookup, environ)
        sidecar.stream, sidecar.apps, sidecar.state_dir = logged, [], state_dir
        await sidecar.start()
        started.append(sidecar)
        return sidecar

    yield start
    for sidecar in started:
        for app in sidecar.apps:
            app.close()
        await sidecar.stop(grace=0.1)


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Runner]:
    """`await run(environ, upstreams={…})`: `python -m sidecar run` with this file, ready. `before` is
    a command that replaces itself by it."""
    processes: list[Process] = []

    async def start(environ: dict[str, str] | None = None, *, before: tuple[str, ...] = (), **keys: Any) -> Process:
        folder = tmp_path / f"process{len(processes)}"
        processes.append(await Process.start(folder, environ, keys, before))
        return await processes[-1].ready()

    yield start
    for process in processes:
        await process.clean_up()
