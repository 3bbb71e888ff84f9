"""What all exchanges share: settings, upstreams, limits, counters.

Law: created once by `assembly`, handed to every connection; holds references and counts, decides nothing. Other
settings are put in force by `apply`, between two events of the loop: an exchange sees the ones before or the ones
after, and keeps what it took at its beginning.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from config.addresses import parse_endpoint
from config.errors import ErrorCode, registry_of
from config.model import Breaker as BreakerSettings
from config.model import Settings
from sidecar import clock
from sidecar.answers import Answers
from sidecar.clock import Ticker
from sidecar.descriptors import number_of, of_process
from sidecar.durable.kept import Kept
from sidecar.egress import Egress
from sidecar.failures import Refused
from sidecar.forced import ForcedStates
from sidecar.handshakes import Handshakes
from sidecar.headers import field_of
from sidecar.held import Held
from sidecar.intercept import Interception
from sidecar.policy.breaker import Breaker
from sidecar.policy.caller import SeenKeys, identity
from sidecar.policy.stages import StageBudgets
from sidecar.revision import revision
from sidecar.tunnel import Tunnel
from sidecar.turn import Turn
from sidecar.upstream.dial import Dialler
from sidecar.upstream.directory import Directory
from sidecar.upstream.pool import Wiring
from sidecar.upstream.resolve import Lookup, Resolver
from telemetry.logs import Log
from telemetry.names import Field
from telemetry.signals import Signals

if TYPE_CHECKING:
    from sidecar.errand import Sending
    from sidecar.guard import Guard
    from sidecar.listener import Listener
    from sidecar.request import Request


class Proxy:
    """See the module's law."""

    def __init__(
        self,
        settings: Settings,
        log: Log,
        version: str,
        lookup: Lookup | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.settings = settings
        self.limits = settings.limits
        self.log = log
        self.held = Held(settings.limits.memory_bytes)
        self.registry = registry_of(settings)
        self._wall_offset = clock.wall() - clock.monotonic()
        self.pseudonym = f"sidecar-{clock.unguessable(8)}".encode()
        self.via_line = b"Via: 1.1 %b\r\n" % self.pseudonym
        self.signals = Signals(
            settings.telemetry,
            environ=environ or {},
            monotonic=clock.monotonic,
            wall=self.wall,
            ids=clock.random_bits,
            log=log,
            state_dir=Path(settings.state_dir),
            upstreams=settings.upstreams,
            subsystems=_subsystems(settings),
            codes=self.registry,
            version=version,
            revision=revision(environ or {}),
            server_id=self.pseudonym.decode(),
        )
        self.metrics = self.signals.metrics
        self.forced = ForcedStates()
        self.ticker = Ticker(loop)
        self.turn = Turn(loop)
        self.egress = Egress(settings)
        resolver = Resolver(lookup)
        resolver.configured, resolver.on_stale = _names(settings), self._stale_name
        limits = settings.limits
        self.descriptors = of_process(1 if settings.probes is None else 2, limits.admin_connections)
        self.dialler = Dialler(loop, resolver, self.egress, self._may_dial)
        self._stages = StageBudgets(settings.stages, limits.workflow_ttl, limits.workflows)
        self.directory = Directory(self._wiring(settings, self.dialler, self.registry), self.egress)
        self.answers = Answers("", self.registry)
        self.kept = Kept(self, settings, environ or {})
        self.on_breaker_closed: Callable[[str], None] = lambda upstream: None
        """Given by the composition root."""
        self.draining = False
        self.cutting_off = False
        """The grace of a drain is over: whatever ends now is ended from here, and by nobody else."""
        self.retries_enabled = settings.retries_enabled
        """The kill switch."""
        self.backoffs: set[asyncio.Future[None]] = set()
        """Exchanges that wait before their next attempt; a drain ends their wait."""
        self._secret = clock.unguessable(64).encode()
        self.seen_keys = SeenKeys(self._secret, limits.workflow_ttl)
        self.listener: Listener | None = None
        self.downstreams: Collection[object] = ()  # the listener's connections, once there is one
        self.tunnels: set[Tunnel] = set()
        self.errands: set[Sending] = set()
        """Replays, deliveries and lookups under way."""
        self.handshakes = Handshakes(self, self._room_for_handshake)
        self.interception = Interception(self)
        self.guard: Guard | None = None
        if settings.listen.auth is not None:
            from sidecar.guard import Guard

            self.guard = Guard(settings.listen.auth)
        self._id_prefix = clock.unguessable(16).encode()
        self.next_session_id = _session_ids(self._id_prefix).__next__
        self.date_line = b""
        self.refresh_date(clock.monotonic())
        self.ticker.every(0.5, self._look_at_clock)
        self.ticker.every(1.0, self.refresh_date)
        self.ticker.every(1.0, self._sweep)
        self.ticker.every(0.5, self._look_at_memory)
        self.ticker.every(1.0, self.signals.tick)

    def apply(self, settings: Settings) -> None:
        """Put other settings in force, all at once. Raises UnusableCertificates, and then nothing has changed."""
        registry = registry_of(settings)
        egress = self.egress.under(settings)
        dialler = Dialler(self.loop, self.dialler.resolver, egress, self._may_dial)
        wiring = self._wiring(settings, dialler, registry)
        self.directory = Directory(wiring, egress, self.directory)
        self.egress, self.dialler, self.registry = egress, dialler, registry
        self.settings, self.limits = settings, settings.limits
        self.held.most = settings.limits.memory_bytes
        self.dialler.resolver.configured = _names(settings)
        self.answers.registry = registry
        self.retries_enabled = settings.retries_enabled
        if self.guard is not None and settings.listen.auth is not None:
            self.guard.configure(settings.listen.auth)
        self._stages.configure(settings.stages, settings.limits.workflow_ttl, settings.limits.workflows)
        self.seen_keys.ttl = settings.limits.workflow_ttl
        self.kept.configure(settings, registry)
        self.signals.configure(settings.telemetry, settings.upstreams, _subsystems(settings), registry)

    def _wiring(self, settings: Settings, dialler: Dialler, registry: Mapping[str, ErrorCode]) -> Wiring:
        return Wiring(
            self.loop,
            self.ticker,
            self.turn,
            dialler,
            settings,
            self.via_line,
            self._make_breaker,
            registry,
            self._stages,
            self.signals.surplus,
            self.log,
        )

    def _sweep(self, now: float) -> None:
        self.directory.sweep(now)

    def _look_at_memory(self, now: float) -> None:
        durable = self.kept.durable
        self.held.look(self.directory.bytes_waiting, 0 if durable is None else durable.store.waiting_bytes)

    def refusal_of_connection(self, already: int, transport: asyncio.BaseTransport | None) -> Refused | None:
        """Why an app cannot be let in besides `already` others, itself included; None when it can."""
        limit = self.limits.connections
        if already > limit:
            told = f"{limit} connections are open already (limits.connections)"
            body = f"{told}, so new ones are refused, with a 503 or, before TLS, without a word; raise it"
            fields = {Field.BODY: body}
            self.log.event("warn", "sidecar.connections.exhausted", "", clock.monotonic(), lambda: fields)
            return Refused("OVERLOADED", told, reason="connections", retry_after=1)
        if transport is not None and number_of(transport) >= self.descriptors.apps_below:
            self.tell_out_of_descriptors()
            told = "the sidecar has nearly all the sockets open that it may have (ulimit -n)"
            return Refused("OVERLOADED", told, reason="descriptors", retry_after=1)
        return None

    def _room_for_handshake(self, opening: int, transport: asyncio.BaseTransport | None) -> None:
        refused = self.refusal_of_connection(opening + len(self.downstreams), transport)
        if refused is not None:
            raise refused

    def _may_dial(self, descriptor: int | None) -> None:
        """Raises Refused when a new socket to an upstream has such a number, or could not even be had."""
        if descriptor is None or descriptor >= self.descriptors.upstreams_below:
            self.tell_out_of_descriptors()
            told = "the sidecar has all the sockets open that it may have (ulimit -n)"
            raise Refused("OVERLOADED", told, reason="descriptors", retry_after=1)

    def tell_out_of_descriptors(self) -> None:
        """At a limited rate; who is refused is counted."""
        most = self.descriptors.most
        body = (
            f"nearly all of the {most} files and sockets that the process may have open are in use (ulimit -n), so new "
            "connections are answered with 503; raise that limit, or lower limits.connections"
        )
        fields = {Field.BODY: body}
        self.log.event("error", "sidecar.descriptors.exhausted", "", clock.monotonic(), lambda: fields)

    def drain(self) -> None:
        """No new retries, replays or deliveries; every answer from here on says `Connection: close`."""
        self.draining = True
        self.kept.drain()
        for waiting in self.backoffs:
            if not waiting.done():
                waiting.set_result(None)

    def credential_id(self, request: Request, caller: str | None = None) -> str:
        """A keyed hash of who asks (`policy/caller.py`); never the credential. The same within one process. `caller` is
        the upstream's `idempotency.caller`."""
        query = request.target.partition(b"?")[2].decode("latin-1")
        who = identity(map(field_of, request.lines), query, sender=request.sender, caller=caller)
        return blake2b(who, digest_size=8, key=self._secret).hexdigest() if who else ""

    def _look_at_clock(self, now: float) -> None:
        """What is shown follows the wall clock at once, what is kept when all that was stamped can be taken along."""
        offset = clock.wall() - clock.monotonic()
        stepped, self._wall_offset = offset - self._wall_offset, offset
        if abs(stepped) >= clock.STEP:
            self.metrics.clock_steps += 1
            self.interception.clock_stepped()
            direction = "forward" if stepped > 0 else "back"
            self.log.warn(
                "sidecar.clock.stepped",
                f"the wall clock of this machine was set {direction} by {abs(stepped):.1f} s; nothing that is kept "
                "ages or expires by that. If it happens again, look at its time synchronisation",
                seconds=round(stepped, 3),
            )
        if clock.steady.look() is not None:
            self.kept.follow_clock()

    def wall(self, monotonic: float) -> float:
        return self._wall_offset + monotonic

    def refresh_date(self, now: float) -> None:
        self.date_line = b"Date: %b\r\n" % clock.http_date(self.wall(now))

    def _stale_name(self, host: str, why: str) -> None:
        self.log.warn(
            "sidecar.dns.stale",
            f"the name {host} cannot be resolved at the moment ({why}); its last addresses are used on",
            host=host,
        )

    def _make_breaker(self, settings: BreakerSettings, upstream: str, endpoint: str) -> Breaker:
        def changed(before: str, after: str, at: float, why: str) -> None:
            self.signals.breaker_changed(upstream, endpoint, before, after, why)
            if after == "closed":
                self.on_breaker_closed(upstream)

        def would_open(at: float, why: str) -> None:
            self.signals.breaker_would_open(upstream, endpoint, why)

        breaker = Breaker(settings, changed, would_open)
        now = clock.monotonic()
        self.forced.hold(breaker, upstream, endpoint, now, self.wall(now))
        return breaker


def _subsystems(settings: Settings) -> dict[str, str]:
    return {name: upstream.subsystem or name for name, upstream in settings.upstreams.items()}


def _names(settings: Settings) -> frozenset[str]:
    """What the configuration has by name."""
    hosts = {entry.partition(":")[0] for upstream in settings.upstreams.values() for entry in upstream.hosts}
    endpoints = (parse_endpoint(text) for upstream in settings.upstreams.values() for text in upstream.endpoints)
    return frozenset(hosts | {endpoint.host for endpoint in endpoints})


_SCATTERING = 0x9E3779B1  # odd, so that no two counts below 2**32 come out the same


def _session_ids(random: bytes) -> Iterator[bytes]:
    """Unique across processes by a random end, within one by a count; a UUID costs ten times as much. The count comes
    first and scattered, so that a few characters of the beginning are enough for a person to name one."""
    for number in itertools.count(1):
        yield b"%08x%b" % (number * _SCATTERING & 0xFFFFFFFF, random)
