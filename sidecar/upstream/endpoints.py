"""Upstreams at run time: which pool serves a request, under which label, with how many calls in flight.

Law: everything a request needs to know about its upstream is prepared here once (label, timeouts, bytes of
answer headers), so the exchange looks up and goes. Hosts that no configured upstream lists get an automatic one;
their number, and the number of labels they may take, is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from config.model import Upstream
from sidecar.egress import Egress
from sidecar.failures import Refused
from sidecar.routing import DEFAULT_PORTS, Origin, Router, bracketed, parse_authority
from sidecar.upstream.pool import Pool, Wiring
from sidecar.upstream.tls import TlsContexts

_REMEMBERED_AUTHORITIES = 4096
_AUTOMATIC_UPSTREAMS = 1024
_AUTOMATIC = Upstream.model_construct()


class UpstreamState:
    """One upstream: configured, or automatic for one host and port."""

    __slots__ = (
        "_tls",
        "_wiring",
        "answer_lines",
        "attempt_timeout",
        "configured",
        "endpoints",
        "first_try_lines",
        "in_flight",
        "label",
        "last_used",
        "max_in_flight",
        "name",
        "next_turn",
        "pools",
        "settings",
        "timeouts",
    )

    def __init__(self, name: str, label: str, settings: Upstream, wiring: Wiring, tls: TlsContexts) -> None:
        self.name = name
        self.label = label
        self.settings = settings
        self.configured = settings is not _AUTOMATIC
        self.timeouts = settings.timeouts
        self.attempt_timeout = wiring.settings.policies[settings.policy].attempt_timeout
        self.max_in_flight = settings.max_in_flight
        self.in_flight = 0
        self.last_used = 0.0
        self.pools: dict[tuple[Origin, str], Pool] = {}
        self.endpoints = [_endpoint_origin(url, settings) for url in settings.endpoints]
        self.next_turn = 0
        self._wiring = wiring
        self._tls = tls
        self.answer_lines = b"x-sidecar-upstream: %b\r\n%b" % (label.encode("ascii", "replace"), wiring.via_line)
        self.first_try_lines = b"x-sidecar-attempts: 1\r\nx-sidecar-outcome: first_try\r\n" + self.answer_lines

    def pool(self, origin: Origin, server_name: str) -> Pool:
        key = (origin, server_name if origin.scheme == "https" else "")
        pool = self.pools.get(key)
        if pool is None:
            tls = self._tls.for_upstream(self.settings) if origin.scheme == "https" else None
            pool = self.pools[key] = Pool(self._wiring, origin, self.timeouts, tls, server_name)
            if len(self.pools) > _AUTOMATIC_UPSTREAMS:
                self._drop_one_unused_pool(keep=pool)
        return pool

    def _drop_one_unused_pool(self, keep: Pool) -> None:
        for key, pool in self.pools.items():
            if pool is not keep and not pool.active:
                pool.close()
                del self.pools[key]
                return


class Destination:
    """Where one request goes: the upstream, and per endpoint the pool and how Host (and SNI) are spelled."""

    __slots__ = ("_choices", "_server_name", "upstream")

    def __init__(self, upstream: UpstreamState, host: bytes, origins: Sequence[Origin], server_name: str) -> None:
        """An empty `host` or `server_name` means the endpoint's own name."""
        self.upstream = upstream
        self._server_name = server_name
        self._choices = [(self._pool(origin), host or host_field(origin)) for origin in origins]

    def pick(self) -> tuple[Pool, bytes]:
        """The pool for the next attempt and the value of Host: round robin over the endpoints."""
        choices = self._choices
        turn = 0
        if len(choices) > 1:
            turn = self.upstream.next_turn % len(choices)
            self.upstream.next_turn += 1
        choice = choices[turn]
        if choice[0].closed:  # dropped as least recently used since
            choice = choices[turn] = (self._pool(choice[0].origin), choice[1])
        return choice

    def _pool(self, origin: Origin) -> Pool:
        return self.upstream.pool(origin, self._server_name or origin.host)


class Directory:
    """All upstreams, found by what the app wrote."""

    def __init__(self, wiring: Wiring, egress: Egress) -> None:
        self._wiring = wiring
        self._egress = egress
        self._tls = TlsContexts()
        self.router = Router(wiring.settings)
        self.configured = {
            name: UpstreamState(name, name, upstream, wiring, self._tls)
            for name, upstream in wiring.settings.upstreams.items()
        }
        self._automatic: dict[str, UpstreamState] = {}
        self._labels: set[str] = set()
        self.label_overflows = 0
        self._by_authority: dict[bytes, Destination] = {}
        self._by_host: dict[bytes, Destination | None] = {}
        self._routed = {
            name: (self._routed_destination(state), state.settings.strip_prefix)
            for name, state in self.configured.items()
            if state.settings.route is not None
        }
        self.connect_ports = egress.connect_ports | _ports_of(self.configured.values())

    def states(self) -> Iterator[UpstreamState]:
        yield from self.configured.values()
        yield from self._automatic.values()

    def forward(self, scheme: str, authority: bytes) -> Destination:
        """For an absolute-form target."""
        key = authority if scheme == "http" else b"https://" + authority
        found = self._by_authority.get(key)
        if found is None:
            host, port = parse_authority(authority.decode("latin-1"))
            found = self._towards(scheme, host, port or DEFAULT_PORTS[scheme], authority)
            if len(self._by_authority) >= _REMEMBERED_AUTHORITIES:
                self._by_authority.clear()
            self._by_authority[key] = found
        return found

    def by_host(self, written: bytes) -> Destination | None:
        """For an origin-form target whose Host an upstream lists; None when none does. Refuses a malformed one."""
        try:
            return self._by_host[written]
        except KeyError:
            pass
        host, port = parse_authority(written.decode("latin-1"), what="Host")
        port = port or DEFAULT_PORTS["http"]
        found = None
        if self.router.by_host(host, port) is not None:
            found = self._towards("http", host, port, written)
        if len(self._by_host) >= _REMEMBERED_AUTHORITIES:
            self._by_host.clear()
        self._by_host[written] = found
        return found

    def by_route(self, path: bytes) -> tuple[Destination, bytes] | None:
        """For an origin-form target under an upstream's `route`: where, and the path to ask for."""
        match = self.router.by_path(path)
        if match is None:
            return None
        name, rest = match
        destination, strip_prefix = self._routed[name]
        return destination, rest if strip_prefix else path

    def tunnel(self, host: str, port: int) -> UpstreamState:
        """The upstream a CONNECT is counted under."""
        name = self.router.by_host(host, port)
        return self.configured[name] if name is not None else self._automatic_for(host, port)

    def sweep(self, now: float) -> None:
        for state in self.states():
            for pool in state.pools.values():
                pool.sweep(now)

    def close(self) -> None:
        for state in self.states():
            for pool in state.pools.values():
                pool.close()

    def _towards(self, scheme: str, host: str, port: int, written: bytes) -> Destination:
        name = self.router.by_host(host, port)
        if name is None:
            state = self._automatic_for(host, port)
            return Destination(state, written, [Origin(scheme, host, port)], host)
        state = self.configured[name]
        if state.endpoints:
            if state.settings.rewrite_host:
                return Destination(state, b"", state.endpoints, "")
            return Destination(state, written, state.endpoints, host)
        if state.settings.tls == "originate":
            return Destination(state, written, [Origin("https", host, 443 if port == 80 else port)], host)
        return Destination(state, written, [Origin(scheme, host, port)], host)

    def _routed_destination(self, state: UpstreamState) -> Destination:
        if state.endpoints:
            # `rewrite_host: false` on a route would name the sidecar itself; there is no other name to keep.
            return Destination(state, b"", state.endpoints, "")
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
            state = self._automatic[key] = UpstreamState(key, self._label(key), _AUTOMATIC, self._wiring, self._tls)
        return state

    def _label(self, key: str) -> str:
        if key not in self._labels:
            if len(self._labels) >= self._wiring.settings.limits.auto_upstreams:
                self.label_overflows += 1
                return "_other"
            self._labels.add(key)
        return key

    def _drop_least_recent(self) -> None:
        unused = [state for state in self._automatic.values() if state.in_flight == 0]
        if not unused:
            raise Refused(
                "OVERLOADED", "too many different hosts are being called at once", reason="hosts", retry_after=1
            )
        oldest = min(unused, key=lambda state: state.last_used)
        for pool in oldest.pools.values():
            pool.close()
        del self._automatic[oldest.name]
        self._by_authority.clear()  # may still lead to the dropped one


def host_field(origin: Origin) -> bytes:
    """How an origin is written in Host: without the port that its scheme implies."""
    name = bracketed(origin.host)
    return (name if DEFAULT_PORTS[origin.scheme] == origin.port else f"{name}:{origin.port}").encode("ascii")


def _endpoint_origin(url: str, settings: Upstream) -> Origin:
    scheme, _, authority = url.partition("://")
    host, port = parse_authority(authority.rstrip("/"), what="endpoint")
    if settings.tls == "originate":
        return Origin("https", host, 443 if port in (0, 80) else port)
    return Origin(scheme, host, port or DEFAULT_PORTS[scheme])


def _ports_of(states: Iterable[UpstreamState]) -> frozenset[int]:
    ports: set[int] = set()
    for state in states:
        ports.update(origin.port for origin in state.endpoints)
        for entry in state.settings.hosts:
            _, port = parse_authority(entry.removeprefix("*."), what="host")
            if port:
                ports.add(port)
    return frozenset(ports)
