"""One proxy with one connection on either side, and no sockets: bytes go in by hand, transports keep nothing.

Everything between the app's bytes and the upstream's is the real thing, so what is measured here is the proxy's own
code, without the kernel and without an event loop.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers import JSON_BODY
from config.model import Settings
from sidecar.listener import Listener
from sidecar.proxy import Proxy
from telemetry.logs import Log

REQUEST = b"GET /bench/json HTTP/1.1\r\nHost: 127.0.0.1:15001\r\n\r\n"
ANSWER = (
    b"HTTP/1.1 200 OK\r\nServer: nginx/1.22.1\r\nDate: Wed, 18 Nov 2026 10:00:00 GMT\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: keep-alive\r\n\r\n%b"
    % (len(JSON_BODY), JSON_BODY.encode())
)
TURNS_OF_THE_LOOP = 100  # far more than connecting to nobody takes
DELIVERY_LIMIT_SECONDS = 30.0
SPANS_PER_REQUEST = 2


class NotOnThePath(Exception):
    """A layer's switch is not used by a healthy request: this file has to follow the code it measures."""


class NullTransport(asyncio.Transport):
    """Takes bytes and keeps their number."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, data: object) -> None:
        self.writes += 1

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Line:
    """One proxy with one connection on either side. Call `connect` first."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        route = {"route": "/bench", "strip_prefix": True, "endpoints": ["http://127.0.0.1:9"]}
        settings = Settings.model_validate({"state_dir": str(folder), "upstreams": {"bench": route}})
        log = io.StringIO()
        self.proxy = Proxy(settings, Log(log), "bench", environ=environ)
        if environ and self.proxy.signals.export is None:
            raise NotOnThePath(f"nothing is exported: {log.getvalue()}")
        self._upstream: Any = None
        self.app = NullTransport()
        self._downstream = Listener(self.proxy)()
        self._pushed = 0

    async def connect(self) -> None:
        """Bring both connections up with a first request; the pool dials as always, only nobody is there."""

        async def connected(make: Callable[[], Any], *where: object, **how: object) -> tuple[Any, str]:
            self._upstream = make()
            self._upstream.connection_made(NullTransport())
            return self._upstream, "127.0.0.1:9"

        dialler: Any = self.proxy.dialler
        dialler.connect = connected
        self._downstream.connection_made(self.app)
        self._downstream.data_received(REQUEST)
        await _turns_until(lambda: self._upstream is not None and self._upstream.busy)
        self._upstream.data_received(ANSWER)
        await _turns_until(lambda: not self._downstream.busy)
        self._pushed = 1
        self.push(1)
        if self.app.writes != 2:
            raise NotOnThePath("the second request was not answered at once on the connections of the first")

    def push(self, count: int) -> None:
        """So many requests and their answers, one after the other."""
        ask, answer = self._downstream.data_received, self._upstream.data_received
        send = self.proxy.turn.send
        for _ in range(count):
            ask(REQUEST)
            send()
            answer(ANSWER)
            send()
        self._pushed += count

    def microseconds(self, count: int) -> float:
        """CPU time of one request, exporting what is exported included."""
        began = time.process_time()
        self.push(count)
        if self.proxy.signals.export is not None:
            self._wait_for_delivery()
        return (time.process_time() - began) / count * 1e6

    def _wait_for_delivery(self) -> None:
        spans, deadline = self.proxy.metrics.spans, time.monotonic() + DELIVERY_LIMIT_SECONDS
        while sum(spans.values()) < self._pushed * SPANS_PER_REQUEST:
            if time.monotonic() > deadline:
                raise NotOnThePath(
                    f"of {self._pushed * SPANS_PER_REQUEST} spans only these were heard of again: {spans}"
                )
            time.sleep(0.005)
        if spans["export_failed"] or spans["dropped_queue_full"]:
            raise NotOnThePath(f"the receiver did not get every span, so its price is not known: {spans}")

    @property
    def destination(self) -> Any:
        found = self.proxy.directory.by_route(b"/bench/json")
        assert found is not None
        return found[0]

    def close(self) -> None:
        self.proxy.signals.close(1.0)


async def _turns_until(seen: Callable[[], bool]) -> None:
    for _ in range(TURNS_OF_THE_LOOP):
        if seen():
            return
        await asyncio.sleep(0)
    raise NotOnThePath("the first request did not get through")
