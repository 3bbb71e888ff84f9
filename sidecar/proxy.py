"""What all exchanges share: settings, upstreams, limits, counters.

Law: created once by `assembly`, handed to every connection; holds references and counts, decides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection

from config.model import Settings
from sidecar import clock
from sidecar.answers import Answers
from sidecar.clock import Ticker
from sidecar.egress import Egress
from sidecar.tunnel import Tunnel
from sidecar.upstream.dial import Dialler
from sidecar.upstream.endpoints import Directory
from sidecar.upstream.pool import Wiring
from sidecar.upstream.resolve import Lookup, Resolver
from telemetry.logs import Log
from telemetry.metrics import Metrics


class Proxy:
    """See the module's law."""

    def __init__(self, settings: Settings, log: Log, version: str, lookup: Lookup | None = None) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.settings = settings
        self.limits = settings.limits
        self.log = log
        self.metrics = Metrics(version)
        self.ticker = Ticker(loop)
        self.egress = Egress(settings)
        self.dialler = Dialler(loop, Resolver(lookup), self.egress)
        self.pseudonym = f"sidecar-{clock.unguessable(8)}".encode()
        self.via_line = b"Via: 1.1 %b\r\n" % self.pseudonym
        wiring = Wiring(loop, self.ticker, self.dialler, settings, self.via_line)
        self.directory = Directory(wiring, self.egress)
        self.answers = Answers("")
        self.draining = False
        self.downstreams: Collection[object] = ()  # the listener's connections, once there is one
        self.tunnels: set[Tunnel] = set()
        self._wall_offset = clock.wall() - clock.monotonic()
        self._id_prefix = clock.unguessable(16).encode()
        self._numbers = itertools.count(1)
        self.date_line = b""
        self.refresh_date(clock.monotonic())
        self.ticker.every(1.0, self.refresh_date)
        self.ticker.every(1.0, self.directory.sweep)

    def next_session_id(self) -> bytes:
        """Unique across processes by a random prefix, within one by a count; a UUID costs ten times as much."""
        return b"%b%08x" % (self._id_prefix, next(self._numbers))

    def wall(self, monotonic: float) -> float:
        return self._wall_offset + monotonic

    def refresh_date(self, now: float) -> None:
        self.date_line = b"Date: %b\r\n" % clock.http_date(self.wall(now))
