"""What an operator, kubelet and Prometheus ask: livez, readyz, metrics, config, errors.

Law: reads only; answers in JSON. `Host` is checked against DNS rebinding (a page in a browser can make a name of
its own point at loopback, but cannot fake the Host its requests carry), cross-site `Origin`s are refused.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from config.loader import Loaded
from sidecar import clock
from sidecar.live import LiveFacts
from sidecar.proxy import Proxy
from telemetry.live import families

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_READABLE = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS


def _json(data: object, status: int = 200) -> web.Response:
    body = orjson.dumps(data, option=_READABLE, default=str)
    return web.Response(body=body, status=status, content_type="application/json")


class Api:
    """The handlers. `ready` says None, or why not."""

    def __init__(self, proxy: Proxy, loaded: Loaded) -> None:
        self._proxy = proxy
        self._loaded = loaded
        self.not_ready: str | None = "starting"
        facts = LiveFacts(proxy, lambda: self.not_ready)
        proxy.metrics.live = lambda: families(facts)

    def application(self, *, probes_only: bool = False) -> web.Application:
        app = web.Application(middlewares=[_in_json] if probes_only else [_in_json, _only_from_here])
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        if not probes_only:
            app.router.add_get("/config", self._config)
            app.router.add_get("/errors", self._errors)
            app.router.add_get("/errors/{code}", self._error)
        return app

    async def _livez(self, request: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def _readyz(self, request: web.Request) -> web.Response:
        if self.not_ready is not None:
            return _json({"status": "not ready", "reason": self.not_ready}, status=503)
        return _json({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        """Rendered in slices, so that a scrape of many upstreams does not hold up the traffic."""
        content_type, slices = self._proxy.metrics.render(request.headers.get("Accept", ""))
        pieces = []
        for piece in slices:
            pieces.append(piece)
            await clock.sleep(0)
        return web.Response(body=b"".join(pieces), headers={"Content-Type": content_type})

    async def _config(self, request: web.Request) -> web.Response:
        return _json(
            {
                "file": self._loaded.path,
                "settings": self._loaded.settings.model_dump(mode="json"),
                "origins": self._loaded.origins,
            }
        )

    async def _errors(self, request: web.Request) -> web.Response:
        return _json({"items": [self._described(code) for code in self._proxy.registry], "next_cursor": None})

    async def _error(self, request: web.Request) -> web.Response:
        code = request.match_info["code"]
        if code not in self._proxy.registry:
            return _json({"error_code": "NOT_FOUND", "message": "no such error code; GET /errors lists all"}, 404)
        return _json(self._described(code))

    def _described(self, code: str) -> dict[str, object]:
        return dataclasses.asdict(self._proxy.registry[code])


@web.middleware
async def _only_from_here(request: web.Request, handler: Handler) -> web.StreamResponse:
    host = request.headers.get("Host", "")
    origin = request.headers.get("Origin")
    stranger = None
    if not _is_local_name(host):
        stranger = f"Host {host!r}"
    elif origin is not None and not _is_local_name(origin.partition("://")[2]):
        stranger = f"Origin {origin!r}"
    if stranger is not None:
        message = f"the admin port answers to loopback names only, not to {stranger}; ask for http://127.0.0.1"
        return _json({"error_code": "EGRESS_DENIED", "message": message}, 403)
    return await handler(request)


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What aiohttp refuses by itself (no such path, not with this method) is told in our shape too."""
    try:
        return await handler(request)
    except web.HTTPException as refused:
        known = ", ".join(sorted(resource.canonical for resource in request.app.router.resources()))
        message = f"{request.method} {request.path[:100]}: {refused.reason}; there is GET {known}"
        code = "NOT_FOUND" if refused.status == 404 else "CLIENT_ERROR"
        answer = _json({"error_code": code, "message": message}, refused.status)
        if "Allow" in refused.headers:
            answer.headers["Allow"] = refused.headers["Allow"]
        return answer


def _is_local_name(authority: str) -> bool:
    host = authority.rpartition(":")[0] if authority.rpartition(":")[2].isdigit() else authority
    host = host.strip("[]").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
