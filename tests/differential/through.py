"""A sidecar in front of an upstream that notes what reaches it, and apps that write raw bytes."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from config.loader import Loaded
from config.model import Settings
from telemetry.logs import Log
from tests.conftest import ONCE, Running
from tests.doubles.upstream import Script, Upstream

HOST = "origin.test"


@asynccontextmanager
async def sidecar_before(script: Script, folder: Path) -> AsyncIterator[tuple[Running, Upstream]]:
    """One attempt for each request, no breaker, nothing kept: what becomes of one message is not mixed with others."""
    upstream = await Upstream(script).start()
    keys = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "state_dir": str(folder),
        "policies": {"once": {"max_attempts": 1}},
        "upstreams": {
            "u": {
                "hosts": [HOST],
                "endpoints": [upstream.url],
                "rewrite_host": False,
                "dead_letter": {"enabled": False},
                **ONCE,
            }
        },
    }
    stream = io.StringIO()
    sidecar = Running(Loaded(Settings.model_validate(keys), None, {}, b""), Log(stream))
    sidecar.stream = stream
    sidecar.apps = []
    await sidecar.start()
    try:
        yield sidecar, upstream
        assert "sidecar.internal_error" not in sidecar.logged.getvalue(), sidecar.logged.getvalue()
    finally:
        await sidecar.stop(grace=0.1)
        await upstream.stop()
