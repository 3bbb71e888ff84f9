"""Kept-alive connections to one origin.

Law: synchronous methods change the pool's state; only `dial` waits. Last in, first out, so that surplus
connections grow old and are swept. A connection is in exactly one place: idle here, or with one exchange.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from config.errors import ErrorCode
from config.model import Breaker as BreakerSettings
from config.model import Settings, Timeouts
from sidecar.clock import Ticker
from sidecar.policy.breaker import Breaker
from sidecar.policy.stages import StageBudgets
from sidecar.routing import Origin
from sidecar.turn import Turn
from sidecar.upstream.connection import UpstreamConnection
from sidecar.upstream.dial import Dialler
from sidecar.upstream.tls import ResumingContext
from telemetry.logs import Log
from telemetry.names import Attribute, Event, Field

if TYPE_CHECKING:
    from sidecar.upstream.endpoints import ParentProxy

# More idle connections than this to one origin are not worth their memory.
_KEPT_IDLE = 512


@dataclass(frozen=True, slots=True)
class Wiring:
    """What every pool needs from its surroundings."""

    loop: asyncio.AbstractEventLoop
    ticker: Ticker
    turn: Turn
    dialler: Dialler
    settings: Settings
    via_line: bytes
    make_breaker: Callable[[BreakerSettings, str, str], Breaker]
    """Settings, the upstream's label, the endpoint's label → a breaker whose changes are told to telemetry."""
    registry: Mapping[str, ErrorCode]
    stages: StageBudgets
    on_surplus: Callable[[str, str], None]
    """Hears the labels of an upstream and its endpoint that sent more than its answer."""
    log: Log


class Pool:
    """See the module's law. `connects` and `connect_failures` are counted for the metrics."""

    __slots__ = (
        "_idle",
        "_on_surplus",
        "_proxy",
        "_server_name",
        "_successor",
        "_timeouts",
        "_tls",
        "_upstream",
        "_wiring",
        "active",
        "closed",
        "connect_failures",
        "connects",
        "label",
        "origin",
    )

    def __init__(
        self,
        wiring: Wiring,
        upstream: str,
        origin: Origin,
        timeouts: Timeouts,
        tls: ResumingContext | None = None,
        server_name: str | None = None,
        proxy: ParentProxy | None = None,
    ) -> None:
        """`upstream` is the label of the one that it belongs to."""
        self._wiring = wiring
        self._upstream = upstream
        self._on_surplus = partial(wiring.on_surplus, upstream, origin.label)
        """For connections, which outlive this pool and these settings."""
        self._proxy = proxy
        self.origin = origin
        self.label = origin.label
        self._timeouts = timeouts
        self._tls = tls
        self._server_name = server_name
        self._idle: list[UpstreamConnection] = []
        self._successor: Pool | None = None
        self.active: set[UpstreamConnection] = set()
        self.closed = False
        self.connects = 0
        self.connect_failures = 0

    def under(self, wiring: Wiring, timeouts: Timeouts) -> Pool:
        """The pool of the same origin under other settings. Idle connections go there at once, those in use when their
        exchange gives them back: it ends, and dials if it has to, under the settings it began with."""
        pool = Pool(wiring, self._upstream, self.origin, timeouts, self._tls, self._server_name, self._proxy)
        pool.connects, pool.connect_failures = self.connects, self.connect_failures
        pool._idle, self._idle = self._idle, []
        for connection in pool._idle:
            pool._configure(connection)
        self._successor = pool
        self.closed = True
        return pool

    def speaks_with(self, tls: ResumingContext | None) -> bool:
        return self._tls is tls

    def _configure(self, connection: UpstreamConnection) -> None:
        limits = self._wiring.settings.limits
        connection.configure(limits.head_bytes, limits.buffer_response_bytes, self._timeouts.body_idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def take(self) -> UpstreamConnection | None:
        """An idle connection that is still open, or None: then `dial`."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.closed:
                self.active.add(connection)
                return connection
        return None

    async def dial(self, at_most: float = math.inf) -> UpstreamConnection:
        """A new connection, within `timeouts.connect` and `at_most` seconds."""
        wiring = self._wiring
        limits = wiring.settings.limits

        made: list[UpstreamConnection] = []

        def make() -> UpstreamConnection:
            connection = UpstreamConnection(
                wiring.loop,
                wiring.ticker,
                wiring.turn,
                limits.head_bytes,
                limits.buffer_response_bytes,
                self._timeouts.body_idle,
                self._on_surplus,
            )
            made.append(connection)
            return connection

        try:
            connection, address = await wiring.dialler.connect(
                make,
                self.origin,
                min(self._timeouts.connect, max(0.0, at_most)),
                self._tls,
                self._server_name,
                self._proxy,
            )
        except BaseException:
            self.connect_failures += 1
            for unused in made:  # TLS failed: it was never connected, so nobody will tell it that it is lost
                unused.forget_parser()
            raise
        self.connects += 1
        connection.address = address
        self._tell("opened", connection)
        self.active.add(connection)
        return connection

    def give_back(self, connection: UpstreamConnection, now: float) -> None:
        """The exchange has read what it wanted; keep the connection if it can be used again."""
        self.active.discard(connection)
        if self._tls is not None and not connection.reused:
            self._remember_session(connection)  # once: it is copied by decoding it anew, certificates and all
        if not connection.finish():
            self._tell(f"closed: {_why_not_kept(connection)}", connection)
            connection.abort()
            return
        if self.closed or len(self._idle) >= _KEPT_IDLE:
            self._hand_on(connection, now)
            return
        connection.idle_since = now
        self._idle.append(connection)

    def _hand_on(self, connection: UpstreamConnection, now: float) -> None:
        """No place for it here: to the pool that came after this one, if there is one."""
        pool = self
        while pool._successor is not None:
            pool = pool._successor
        if pool.closed or len(pool._idle) >= _KEPT_IDLE:
            self._tell("closed: there is no place for one more that is idle", connection)
            connection.abort()
            return
        pool._configure(connection)
        connection.idle_since = now
        pool._idle.append(connection)

    def discard(self, connection: UpstreamConnection) -> None:
        """Out of the pool for good: it failed, or it became a tunnel."""
        self.active.discard(connection)
        self._tell("left the pool: its attempt ended early, or it is a tunnel now", connection)

    def sweep(self, now: float) -> None:
        """Drop what has been idle too long or points at an address the name has left."""
        resolver = self._wiring.dialler.resolver
        towards = self.origin if self._proxy is None else self._proxy.origin
        host, port = towards.host, towards.port
        if self._idle or self.active:
            resolver.refresh(host, port)
        kept = []
        for connection in self._idle:
            too_old = now - connection.idle_since > self._timeouts.pool_idle
            if connection.closed or too_old or resolver.gone(host, port, connection.address):
                why = "the upstream closed it" if connection.closed else "the name has left its address"
                self._tell(f"closed: {'it was idle for longer than pool_idle' if too_old else why}", connection)
                connection.abort()
            else:
                kept.append(connection)
        self._idle = kept
        for connection in self.active:
            connection.retired = resolver.gone(host, port, connection.address)

    def close(self) -> None:
        self.closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _tell(self, what: str, connection: UpstreamConnection) -> None:
        """At `telemetry.log.level: debug`. Nothing of it is on the way of a request over a kept connection."""
        log = self._wiring.log
        if log.debugging:
            body = f"connection to {self.label} at {connection.address} {what}"
            fields = {Field.BODY: body, Attribute.UPSTREAM: self._upstream, Attribute.PEER_ADDRESS: connection.address}
            now = self._wiring.loop.time()
            log.event("debug", Event.CONNECTION, self._upstream, now, lambda: fields, limited=False)

    def _remember_session(self, connection: UpstreamConnection) -> None:
        if self._tls is not None and connection.transport is not None:
            tls = connection.transport.get_extra_info("ssl_object")
            if isinstance(tls, ssl.SSLObject):
                self._tls.remember(tls)


def _why_not_kept(connection: UpstreamConnection) -> str:
    if connection.closed:
        return "the upstream closed it"
    if connection.retired:
        return "the name has left its address"
    if connection.complete and not connection.keep_alive:
        return "the upstream keeps none"
    return "question or answer did not come to a clean end"
