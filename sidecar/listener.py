"""What accepts the app's connections: aiohttp's low-level server, making connections of ours.

Law: with `inbound.py` the only file that touches aiohttp's private parts. It knows its connections and looks at each
from time to time; it decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp.web_server import Server

from sidecar.inbound import Downstream

if TYPE_CHECKING:
    from sidecar.proxy import Proxy


class Listener(Server):
    """aiohttp's server, making our connections. Its own `__call__` hides a wrong option behind defaults."""

    def __init__(self, proxy: Proxy) -> None:
        super().__init__(_never_called, handler_cancellation=True, loop=proxy.loop)
        self.proxy = proxy
        proxy.listener, proxy.downstreams = self, self._connections
        self.options: dict[str, Any] = {
            "loop": proxy.loop,
            "keepalive_timeout": 0,  # one coarse tick watches all connections instead of a timer each
            "access_log": None,
        }
        proxy.ticker.every(0.5, self._check_connections)

    def __call__(self) -> Downstream:
        return Downstream(self, **self.options)

    def _check_connections(self, now: float) -> None:
        for connection in tuple(self._connections):
            if isinstance(connection, Downstream):
                connection.check(now)


async def _never_called(request: object) -> Any:
    raise AssertionError("exchanges are driven by the bytes of their connections")
