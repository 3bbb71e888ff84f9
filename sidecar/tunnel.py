"""Byte tunnels: CONNECT, and Upgrade after the 101.

Law: nothing inside is looked at. Bytes are pushed across as they come; a slow side pauses the other. A half-close
is passed on (R8); when one side is gone what it sent is flushed to the other, then both are closed. A tunnel
never returns to a pool and has its own place in limits and drain.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, cast

from sidecar import clock
from sidecar.failures import SHUTTING_DOWN, Malformed, Refused
from sidecar.routing import Origin, parse_authority
from sidecar.upstream.endpoints import UpstreamState

if TYPE_CHECKING:
    from sidecar.proxy import Proxy
    from telemetry.record import Session

_BUFFER = 262_144


class Side(asyncio.Protocol):
    """One end of a tunnel."""

    __slots__ = ("bytes", "ended", "held", "other", "transport", "tunnel")

    def __init__(self) -> None:
        self.tunnel: Tunnel | None = None
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None
        self.bytes = 0
        self.ended = False
        self.held = b""  # arrived on a dialled connection before the tunnel began

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_BUFFER)

    def data_received(self, data: bytes) -> None:
        tunnel, other = self.tunnel, self.other
        if tunnel is None:
            # uvloop reads whatever `connection_made` says, and a server may speak first: nothing is lost.
            self.held += data
            if self.transport is not None:
                self.transport.pause_reading()
            return
        self.bytes += len(data)
        if other is not None and other.transport is not None:
            tunnel.moved = True
            other.transport.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        if self.tunnel is None:
            return True  # passed on when the tunnel begins
        other = self.other
        if other is None or other.transport is None or other.ended:
            return False
        if other.transport.can_write_eof():
            other.transport.write_eof()
            return True
        other.transport.close()  # TLS cannot half-close
        return False

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.tunnel is not None:
            self.tunnel.moved = True
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transport = None
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()  # flushes what is outstanding first
        if self.tunnel is not None:
            self.tunnel.side_lost(exc)


class Tunnel:
    """Two sides and the record of what passed between them."""

    __slots__ = ("_client", "_deadline", "_ends_at", "_idle", "_proxy", "_record", "_state", "_upstream", "moved")

    def __init__(self, proxy: Proxy, state: UpstreamState, record: Session, dialled: Side | None = None) -> None:
        self._proxy = proxy
        self._state = state
        self._record = record
        self._idle = proxy.limits.tunnel_idle_timeout
        self._client = Side()
        self._upstream = dialled or Side()
        self._deadline = 0.0
        lasts = proxy.limits.tunnel_total_timeout
        self._ends_at = math.inf if lasts is None else clock.monotonic() + lasts
        self.moved = True

    def begin(
        self,
        client_transport: asyncio.Transport,
        client_tail: bytes,
        upstream_transport: asyncio.Transport,
        upstream_tail: bytes,
        answer: bytes,
    ) -> None:
        """Connect the two transports. `answer` and the tails go out first, in order."""
        client, upstream = self._client, self._upstream
        client.tunnel = upstream.tunnel = self
        client.other, upstream.other = upstream, client
        self._proxy.tunnels.add(self)
        self._proxy.ticker.watched.add(self)
        self._state.in_flight += 1
        for transport, side in ((client_transport, client), (upstream_transport, upstream)):
            if transport.get_protocol() is not side:
                transport.set_protocol(side)
                side.connection_made(transport)
        upstream_tail += upstream.held
        upstream.held = b""
        client_transport.write(answer + upstream_tail)
        client.bytes, upstream.bytes = len(client_tail), len(upstream_tail)
        if client_tail:
            upstream_transport.write(client_tail)
        client_transport.resume_reading()
        if not upstream.ended:
            upstream_transport.resume_reading()
        elif client_transport.can_write_eof():
            client_transport.write_eof()
        else:
            client_transport.close()  # TLS cannot half-close

    @property
    def record(self) -> Session:
        return self._record

    def check(self, now: float) -> None:
        if now > self._ends_at:
            self.close()
        elif self.moved:
            self.moved = False
            self._deadline = now + self._idle
        elif now > self._deadline:
            self.close()

    def cut_off(self) -> None:
        """The grace of a shutdown is over. Whether it was idle nobody can see: a broken tunnel like any other."""
        record = self._record
        if record.code is None:
            record.code, record.message = SHUTTING_DOWN, "the sidecar was told to stop, and its grace was over"
        self.close()

    def close(self) -> None:
        for side in (self._client, self._upstream):
            if side.transport is not None:
                side.transport.abort()

    def side_lost(self, exc: BaseException | None) -> None:
        if exc is not None and self._upstream.transport is None and self._client.transport is not None:
            self._record.code = "CONNECTION_RESET"  # by the upstream; an app may leave as it likes
        if self._client.transport is not None or self._upstream.transport is not None:
            return
        self._proxy.tunnels.discard(self)
        self._proxy.ticker.watched.discard(self)
        for side in (self._client, self._upstream):
            side.tunnel = side.other = None  # they hold each other and us: nothing here waits for the collector
        self._state.in_flight -= 1
        record = self._record
        record.outcome = "tunnelled"
        record.request_bytes = self._client.bytes
        record.response_bytes = self._upstream.bytes
        record.ended = clock.monotonic()
        self._proxy.signals.observe(record)


def connect_target(proxy: Proxy, target: str) -> Origin:
    """Validate the target of a CONNECT (R8) and say where it leads."""
    host, port = parse_authority(target)
    if not port:
        raise Malformed("MALFORMED_REQUEST", "CONNECT needs host:port", reason="target")
    if port not in proxy.directory.connect_ports:
        raise Refused(
            "EGRESS_DENIED",
            f"CONNECT to port {port} is not allowed; list it in egress.connect_ports",
            reason="connect_port",
        )
    return Origin("http", host, port)


def check_room(proxy: Proxy) -> None:
    """Asked before dialling or upgrading, and again when both sides are there: others may have been faster."""
    if len(proxy.tunnels) >= proxy.limits.tunnels:
        raise Refused(
            "OVERLOADED",
            f"{proxy.limits.tunnels} tunnels are open already (limits.tunnels)",
            reason="tunnels",
            retry_after=1,
        )
