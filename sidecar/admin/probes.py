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
from sidecar.reloading import Reloading

FOR_ANYONE = web.AppKey("for_anyone", bool)
"""Set on the application of the `probes` listener, which others than operators may reach."""


class Alive(Answer):
    """The process answers."""

    status: Literal["alive"] = "alive"


class ConfigurationState(Answer):
    """Why what was read last is not all in force. The sidecar runs on with what was in force before, and is ready."""

    needs_restart: tuple[str, ...]
    """Keys that are another in the file than in force."""
    refused: str | None
    """What is wrong with the configuration that was read last; on the `probes` listener, that something is."""


class Ready(Answer):
    """New requests are accepted, or not."""

    status: Literal["ready", "not ready"]
    reason: str | None = None
    """Why not."""
    store: str | None = None
    """Why nothing can be kept at the moment; null while all is well. Traffic goes on meanwhile. A disk in trouble is
    no reason not to be ready; files that were removed or replaced under the running sidecar are."""
    missing: str | None = None
    """What should be in the store and is not, until somebody has answered for it: `sidecar dlq verify`."""
    configuration: ConfigurationState | None = None
    """Not there while the configuration that was read last is in force."""


class Probes:
    """`not_ready` says None, or why not."""

    def __init__(self, proxy: Proxy, not_ready: Callable[[], str | None], reloading: Reloading) -> None:
        self._proxy = proxy
        self._not_ready = not_ready
        self._reloading = reloading

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
        told: dict[str, Any] = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
        if problem is not None and self._proxy.kept.gone:
            told = {"status": "not ready", "reason": "store gone"} if reason is None else told
            reason, told["store"] = told["reason"], f"gone: {problem}"
        elif self._proxy.kept.still_with is not None:
            told["store"] = f"still with process {self._proxy.kept.still_with}, whose place this one takes"
        elif problem is not None:
            told["store"] = f"degraded: {problem}"
        if self._proxy.kept.incomplete is not None:
            told["missing"] = self._proxy.kept.incomplete
        if self._reloading.refused is not None or self._reloading.needs_restart:
            told["configuration"] = self._configuration(open_to_all=FOR_ANYONE in call.request.app)
        return json_response(told, 200 if reason is None else 503)

    def _configuration(self, *, open_to_all: bool) -> dict[str, Any]:
        refused = self._reloading.refused
        why = None
        if refused is not None:
            told = "the configuration that was read last is not valid; GET /readyz on the admin port says why"
            why = told if open_to_all else self._proxy.signals.redactor.text(refused)
        return {"needs_restart": self._reloading.needs_restart, "refused": why}

    async def metrics(self, call: Call[NoQuery, NoBody]) -> Told:
        """Rendered in slices, so that a scrape of many upstreams does not hold up the traffic."""
        content_type, slices = self._proxy.metrics.render(call.request.headers.get("Accept", ""))
        pieces: list[Any] = []
        for piece in slices:
            pieces.append(piece)
            await clock.sleep(0)
        return web.Response(body=b"".join(pieces), headers={"Content-Type": content_type})
