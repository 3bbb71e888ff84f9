"""What kubelet and Prometheus ask: alive, ready, and the numbers.

Law: cheap, and answered whatever state the proxy is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from aiohttp import web

from sidecar import clock
from sidecar.admin.fields import Answer, NoBody, NoQuery
from sidecar.admin.route import Call, Route, Told, json_response
from sidecar.proxy import Proxy


class Alive(Answer):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(Answer):
    """New requests are accepted, or not."""

    status: Literal["ready", "not ready"]
    reason: str | None = None
    """Why not."""
    store: str | None = None
    """Why nothing can be kept at the moment; null while all is well. Traffic goes on meanwhile."""


class Probes:
    """`not_ready` says None, or why not."""

    def __init__(self, proxy: Proxy, not_ready: Callable[[], str | None]) -> None:
        self._proxy = proxy
        self._not_ready = not_ready

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/livez", "Whether the process answers.", self.livez, Alive, probe=True)
        yield Route(
            "GET",
            "/readyz",
            "Whether new requests are accepted.",
            self.readyz,
            Ready,
            otherwise={503: Ready},
            probe=True,
        )
        yield Route(
            "GET",
            "/metrics",
            "The metrics, for Prometheus.",
            self.metrics,
            None,
            also=("text/plain", "application/openmetrics-text"),
            probe=True,
        )

    async def livez(self, call: Call[NoQuery, NoBody]) -> Told:
        return Alive()

    async def readyz(self, call: Call[NoQuery, NoBody]) -> Told:
        reason, problem = self._not_ready(), self._proxy.kept.problem
        degraded = {} if problem is None else {"store": f"degraded: {problem}"}
        if reason is None:
            return {"status": "ready", **degraded}
        return json_response({"status": "not ready", "reason": reason, **degraded}, status=503)

    async def metrics(self, call: Call[NoQuery, NoBody]) -> Told:
        """Rendered in slices, so that a scrape of many upstreams does not hold up the traffic."""
        content_type, slices = self._proxy.metrics.render(call.request.headers.get("Accept", ""))
        pieces: list[Any] = []
        for piece in slices:
            pieces.append(piece)
            await clock.sleep(0)
        return web.Response(body=b"".join(pieces), headers={"Content-Type": content_type})
