"""Bare connections to endpoints that could not be connected to.

Law: while a breaker is open because nobody could connect, a connection is made once a second and closed at once; the
first that succeeds lets probes through. Nothing is sent on it. It is made under the same egress rules and towards the
same addresses as any other, one at a time per breaker.
Behind a parent proxy only CONNECT reaches the endpoint, so a plain-http endpoint there is not checked: time decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sidecar import clock
from sidecar.failures import AttemptFailed, Refused
from sidecar.policy.breaker import Breaker
from sidecar.routing import Origin
from sidecar.upstream.dial import Dialler

if TYPE_CHECKING:
    from sidecar.upstream.endpoints import Endpoint, ParentProxy


class ConnectCheck:
    """The checks of one upstream that are under way."""

    __slots__ = ("_dialler", "_running", "_timeout")

    def __init__(self, dialler: Dialler, timeout: float) -> None:
        self._dialler = dialler
        self._timeout = timeout
        self._running: dict[Breaker, asyncio.Task[None]] = {}

    def sweep(self, endpoints: Iterable[Endpoint], proxies: list[ParentProxy], now: float) -> None:
        """Once a second: begin the checks that are due."""
        for endpoint in endpoints:
            if endpoint.breaker.awaits_connection(now):
                proxy = proxies[0] if proxies else None
                if proxy is None or (endpoint.origin.scheme == "https" and not proxy.breaker.retry_in(now)):
                    self._begin(endpoint.breaker, endpoint.origin, proxy)
        for proxy in proxies:
            if proxy.breaker.awaits_connection(now):
                self._begin(proxy.breaker, proxy.origin, None)

    def close(self) -> None:
        for task in self._running.values():
            task.cancel()

    def _begin(self, breaker: Breaker, origin: Origin, proxy: ParentProxy | None) -> None:
        if breaker not in self._running:
            self._running[breaker] = clock.spawn(self._check(breaker, origin, proxy), "connect check")

    async def _check(self, breaker: Breaker, origin: Origin, proxy: ParentProxy | None) -> None:
        try:
            made, _ = await self._dialler.connect(_Bare, origin, self._timeout, proxy=proxy, tunnel=proxy is not None)
        except (AttemptFailed, Refused):
            return
        else:
            made.close()
            breaker.connected(clock.monotonic())
        finally:
            del self._running[breaker]


class _Bare(asyncio.Protocol):
    """A connection with nothing on it. Closed from outside: uvloop leaves the socket open when `connection_made` does
    it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def close(self) -> None:
        self._transport.close()
