"""A sidecar in this process, on free ports, for tests that talk to it over real sockets."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from config.loader import Loaded, load
from config.model import Settings
from sidecar.assembly import Sidecar
from sidecar.upstream.resolve import Lookup
from telemetry.logs import Log
from tests.doubles.app import App
from tests.doubles.upstream import Script, Upstream


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The product runs on uvloop, so do its tests."""
    return {"uvloop": uvloop.new_event_loop}


class Running(Sidecar):
    """A started sidecar with what tests ask of it."""

    stream: io.StringIO

    @property
    def logged(self) -> io.StringIO:
        """What it wrote, all of it: lines go through a thread."""
        self.proxy.signals.writer.flush()
        return self.stream

    async def app(self) -> App:
        app = await App.connect(self.address)
        self.apps.append(app)
        return app

    apps: list[App]

    @property
    def outcomes(self) -> dict[str, int]:
        return {word: count for word, count in self.proxy.metrics.sessions_by_outcome().items() if count}


Starter = Callable[..., Awaitable[Running]]
UpstreamStarter = Callable[..., Awaitable[Upstream]]


@pytest_asyncio.fixture
async def start_upstream() -> AsyncIterator[UpstreamStarter]:
    started: list[Upstream] = []

    async def start(script: Script, **options: Any) -> Upstream:
        upstream = await Upstream(script).start(**options)
        started.append(upstream)
        return upstream

    yield start
    for upstream in started:
        await upstream.stop()


@pytest_asyncio.fixture
async def start_sidecar(tmp_path: Path) -> AsyncIterator[Starter]:
    """`await start_sidecar(upstreams={…}, limits={…}, lookup=…)`: keys as in the configuration file, which is written
    to `file` if that is given; `environ` is what the sidecar sees of its environment."""
    started: list[Running] = []

    async def start(
        lookup: Lookup | None = None, file: Path | None = None, environ: dict[str, str] | None = None, **keys: Any
    ) -> Running:
        keys.setdefault("listen", {"port": 0})
        keys.setdefault("admin", {"port": 0})
        keys.setdefault("state_dir", str(tmp_path / f"state{len(started)}"))
        policies = keys.get("policies", {})
        keys["policies"] = {"once": {**policies.get("default", {}), "max_attempts": 1}, **policies}
        text = json.dumps(keys, default=str).encode()
        if file is not None:
            loaded = _written(file, text)
        else:
            loaded = Loaded(Settings.model_validate(keys), None, {}, text)
        stream = io.StringIO()
        sidecar = Running(loaded, Log(stream), lookup, environ)
        sidecar.stream = stream
        sidecar.apps = []
        await sidecar.start()
        started.append(sidecar)
        return sidecar

    yield start
    for sidecar in started:
        for app in sidecar.apps:
            app.close()
        await sidecar.stop(grace=0.1)
        assert "sidecar.internal_error" not in sidecar.logged.getvalue(), sidecar.logged.getvalue()


def _written(file: Path, text: bytes) -> Loaded:
    file.write_bytes(text)
    return load(file, {})


# For tests about single attempts: what becomes of one must not be hidden by another, or by a breaker.
ONCE = {"policy": "once", "breaker": {"enabled": False}}


@pytest.fixture
def route(request: pytest.FixtureRequest) -> Callable[[Upstream], dict[str, Any]]:
    """The configuration of one upstream `u` under `/u`; one attempt per request in files that say ONE_ATTEMPT."""
    attempts = ONCE if getattr(request.module, "ONE_ATTEMPT", False) else {}

    def make(upstream: Upstream, **keys: Any) -> dict[str, Any]:
        return {"u": {"route": "/u", "endpoints": [upstream.url], **attempts, **keys}}

    return make
