"""All upstreams, found by what the app wrote.

Law: what an app wrote (an authority, a Host, a path) is looked at once and remembered, bounded. Hosts that no
configured upstream lists get an automatic one; their number, and the number of labels they may take, is bounded.
A directory never changes its settings: others make another directory, which takes over from the one before. Nothing
refers back to the one before but the requests that are under way in it, so that it goes when they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from config.model import Upstream
from sidecar import clock
from sidecar.egress import Egress
from sidecar.failures import Refused
from sidecar.location import led_back
from sidecar.routing import DEFAULT_PORTS, Origin, Router, Routes, bracketed, parse_authority
from sidecar.upstream.destination import Destination
from sidecar.upstream.endpoints import AUTOMATIC, UpstreamState
from sidecar.upstream.pool import Wiring
from sidecar.upstream.rules import Rules
from sidecar.upstream.tls import TlsContexts

if TYPE_CHECKING:
    from sidecar.request import Request

_REMEMBERED_AUTHORITIES = 4096
_AUTOMATIC_UPSTREAMS = 1024


class Directory:
    """All upstreams, found by what the app wrote."""

    def __init__(self, wiring: Wiring, egress: Egress, before: Directory | None = None) -> None:
        self._wiring = wiring
        self._egress = egress
        self._tls: TlsContexts = TlsContexts(None if before is None else before._tls)
        if before is not None:
            for name, upstream in wiring.settings.upstreams.items():
                self._tls.prepare(name, upstream)  # what can be wrong is found before anything is taken over
        self.router = Router(wiring.settings)
        known = {} if before is None else before.configured
        self.configured: dict[str, UpstreamState] = {
            name: UpstreamState(name, name, upstream, self._rules(name, upstream), wiring, self._tls, known.get(name))
            for name, upstream in wiring.settings.upstreams.items()
        }
        self._automatic_rules = self._rules("", AUTOMATIC)
        self._automatic: dict[str, UpstreamState] = {}
        self._labels: set[str] = set()
        self.label_overflows = 0
        if before is not None:
            self._take_over(before)
        for state in self.configured.values():
            if state.settings.fallback is not None:
                state.fallback = self._routed_destination(self.configured[state.settings.fallback])
        self.authorities: dict[bytes, Destination] = {}
        """What `forward` has found so far, by what the app wrote behind `http://`; others begin with their scheme."""
        self.hosts: dict[bytes | None, Destination | None] = {}
        """What `by_host` has found so far, for whoever looks often."""
        self.routes = Routes(
            {
                state.settings.route: (self._routed_destination(state), state.settings.strip_prefix)
                for state in self.configured.values()
                if state.settings.route is not None
            }
        )
        self.connect_ports = egress.connect_ports | _ports_of(self.configured.values())

    def states(self) -> Iterator[UpstreamState]:
        yield from self.configured.values()
        yield from self._automatic.values()

    def forward(self, scheme: str, authority: bytes) -> Destination:
        """For an absolute-form target."""
        key = authority if scheme == "http" else b"https://" + authority
        found = self.authorities.get(key)
        if found is None:
            host, port = parse_authority(authority.decode("latin-1"))
            found = self._towards(scheme, host, port or DEFAULT_PORTS[scheme], authority)
            self._remember(key, found)
        return found

    def _remember(self, key: bytes, found: Destination) -> None:
        if len(self.authorities) >= _REMEMBERED_AUTHORITIES:
            self.authorities.clear()
        self.authorities[key] = found

    def by_host(self, written: bytes) -> Destination | None:
        """For an origin-form target whose Host an upstream lists; None when none does. Refuses a malformed one."""
        host, port = parse_authority(written.decode("latin-1"), what="Host")
        port = port or DEFAULT_PORTS["http"]
        found = None
        if self.router.by_host(host, port) is not None:
            found = self._towards("http", host, port, written)
        if len(self.hosts) >= _REMEMBERED_AUTHORITIES:
            self.hosts.clear()
        self.hosts[written] = found
        return found

    def by_route(self, path: bytes) -> tuple[Destination, bytes] | None:
        """For an origin-form target under an upstream's `route`: where, and the path to ask for."""
        found = self.routes.find(path)
        if found is None:
            return None
        destination, strip_prefix = found[0]
        return destination, found[1] if strip_prefix else path

    def location(self, request: Request, upstream: UpstreamState | None, value: bytes) -> bytes:
        """A `Location` of this upstream, as an app needs it that may have come by a route."""
        path = request.target
        if not path.startswith(b"/") or self.hosts.get(request.host) is not None or upstream is None:
            return value  # it named the host itself
        found = self.routes.find(path)
        if found is None:
            return value
        (_, stripped), rest = found

        def same_upstream(host: str, port: int) -> bool:
            # http for https counts as well: by the route it goes where the route says.
            ports = ((origin.host, origin.port) for origin in upstream.origins)
            named = any(host == name and (port == known or (port, known) == (80, 443)) for name, known in ports)
            return named or self.router.by_host(host, port) == upstream.name

        return led_back(value, path[: len(path) - len(rest)], stripped=stripped, same_upstream=same_upstream)

    def named(self, name: str) -> Destination:
        """A configured upstream with endpoints, whatever led to it."""
        return self._routed_destination(self.configured[name])

    def tunnel(self, origin: Origin) -> Destination:
        """For a CONNECT: the upstream it is counted under, and a breaker of its own for that host and port."""
        key = f"connect://{origin.label}".encode()
        found = self.authorities.get(key)
        if found is None:
            name = self.router.by_host(origin.host, origin.port)
            state = self.configured[name] if name is not None else self._automatic_for(origin.host, origin.port)
            # A client that is not intercepted goes where its requests would have gone.
            origins = state.origins if state.settings.intercept and state.origins else [origin]
            found = Destination(state, b"", origins, "")
            self._remember(key, found)
        return found

    def sweep(self, now: float) -> None:
        """Once a second: what time alone does to pools, gates and breakers."""
        for state in self.states():
            state.sweep(now)

    def bytes_waiting(self) -> int:
        """Of answers whose apps do not take them as fast as they come."""
        pools = (pool for state in self.states() for pool in state.pools.values())
        return sum(len(data) for pool in pools for connection in pool.active for data in connection.waiting)

    def close(self) -> None:
        for state in self.states():
            state.close()

    def _take_over(self, before: Directory) -> None:
        """What the upstreams of the directory before have and know. An open connection was let through by the egress
        rules of its time: where those have changed, none is used on."""
        connections = before._wiring.settings.egress == self._wiring.settings.egress
        for name, state in self.configured.items():
            known = before.configured.get(name)
            if known is not None:
                state.take_over(known, self.router, connections=connections)
        self._labels, self.label_overflows = before._labels, before.label_overflows
        for key, known in before._automatic.items():
            host, port = parse_authority(key)
            if self._egress.configured_only or self.router.by_host(host, port) is not None:
                known.close()
                continue
            state = self._automatic[key] = UpstreamState(
                key, known.label, AUTOMATIC, self._automatic_rules, self._wiring, self._tls, known
            )
            state.take_over(known, None, connections=connections)
        for name, known in before.configured.items():
            if name not in self.configured:
                known.close()
        self._tls.forget_before()

    def _rules(self, name: str, upstream: Upstream) -> Rules:
        wiring = self._wiring
        return Rules(wiring.settings, name, upstream, wiring.registry, wiring.stages, clock.uniform)

    def _towards(self, scheme: str, host: str, port: int, written: bytes) -> Destination:
        name = self.router.by_host(host, port)
        if name is None:
            state = self._automatic_for(host, port)
            return Destination(state, written, [Origin(scheme, host, port)], host)
        state = self.configured[name]
        if state.settings.endpoints:
            if state.settings.rewrite_host:
                return Destination(state, b"", state.origins, "")
            return Destination(state, written, state.origins, host)
        if state.settings.tls == "originate":
            return Destination(state, written, [Origin("https", host, 443 if port == 80 else port)], host)
        return Destination(state, written, [Origin(scheme, host, port)], host)

    def _routed_destination(self, state: UpstreamState) -> Destination:
        if state.settings.endpoints:
            # `rewrite_host: false` on a route would name the sidecar itself; there is no other name to keep.
            return Destination(state, b"", state.origins, "")
        first = next(entry for entry in state.settings.hosts if not entry.startswith("*"))
        host, port = parse_authority(first, what="host")
        return self._towards("http", host, port or DEFAULT_PORTS["http"], first.encode("ascii"))

    def _automatic_for(self, host: str, port: int) -> UpstreamState:
        if self._egress.configured_only:
            raise Refused(
                "EGRESS_DENIED",
                f"{host}:{port} is in no upstream's `hosts`, and egress.mode is configured_only",
                reason="egress",
            )
        key = f"{bracketed(host)}:{port}"
        state = self._automatic.get(key)
        if state is None:
            if len(self._automatic) >= _AUTOMATIC_UPSTREAMS:
                self._drop_least_recent()
            state = self._automatic[key] = UpstreamState(
                key, self._label(key), AUTOMATIC, self._automatic_rules, self._wiring, self._tls
            )
        return state

    def _label(self, key: str) -> str:
        if key not in self._labels:
            if len(self._labels) >= self._wiring.settings.limits.auto_upstreams:
                self.label_overflows += 1
                return "_other"
            self._labels.add(key)
        return key

    def _drop_least_recent(self) -> None:
        unused = [state for state in self._automatic.values() if state.requests == 0]
        if not unused:
            raise Refused(
                "OVERLOADED", "too many different hosts are being called at once", reason="hosts", retry_after=1
            )
        oldest = min(unused, key=lambda state: state.last_used)
        oldest.close()
        del self._automatic[oldest.name]
        self.authorities.clear()  # may still lead to the dropped one


def _ports_of(states: Iterable[UpstreamState]) -> frozenset[int]:
    ports: set[int] = set()
    for state in states:
        ports.update(origin.port for origin in state.endpoints)
        for entry in state.settings.hosts:
            _, port = parse_authority(entry.removeprefix("*."), what="host")
            if port:
                ports.add(port)
    return frozenset(ports)
