"""Upstreams at run time: their endpoints and pools, and what guards them.

Law: everything a request needs to know about its upstream is prepared here once (label, timeouts, bytes of answer
headers, breakers, budget), so the exchange looks up and goes. Number of endpoints and pools is bounded.

New settings make a new state. It takes over what the old one has learned and holds: breakers, budget, queues, pools.
Requests under way keep the state they began with, and with it the settings they began with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from config.egress_proxy import EgressProxy
from config.model import Upstream
from sidecar.policy.breaker import Breaker
from sidecar.policy.budget import RetryBudget
from sidecar.policy.retry import Terms
from sidecar.routing import DEFAULT_PORTS, Origin, Router, parse_authority
from sidecar.upstream.connect_check import ConnectCheck
from sidecar.upstream.dial import Dialler
from sidecar.upstream.pool import Pool, Wiring
from sidecar.upstream.rules import Rules
from sidecar.upstream.tls import ResumingContext, TlsContexts
from sidecar.upstream.waiting import Turns

if TYPE_CHECKING:
    from sidecar.upstream.destination import Destination

MOST_POOLS = 1024
AUTOMATIC = Upstream.model_construct()
"""The settings of hosts that no configured upstream lists."""


class Endpoint:
    """One address an upstream is reached at. Its breaker is shared by all ways that lead there."""

    __slots__ = ("breaker", "label", "origin")

    def __init__(self, origin: Origin, breaker: Breaker) -> None:
        self.origin = origin
        self.label = origin.label
        self.breaker = breaker


class ParentProxy:
    """One proxy of `egress_proxy`."""

    __slots__ = ("breaker", "label", "lines", "origin")

    def __init__(self, settings: EgressProxy, breaker: Breaker) -> None:
        self.origin = Origin("http", settings.host, settings.port)
        self.label = settings.label
        self.breaker = breaker
        authorization = settings.authorization
        self.lines = b"" if authorization is None else f"Proxy-Authorization: {authorization}\r\n".encode()


class UpstreamState:
    """One upstream: configured, or automatic for one host and port."""

    __slots__ = (
        "_closed_connects",
        "_closed_failures",
        "_connect_check",
        "_earlier",
        "_tls",
        "_wiring",
        "answer_lines",
        "budget",
        "classifier",
        "configured",
        "dialler",
        "endpoints",
        "fallback",
        "first_try_lines",
        "in_flight",
        "label",
        "last_used",
        "name",
        "next_turn",
        "ordinary",
        "origins",
        "pools",
        "proxies",
        "rules",
        "settings",
        "terms",
        "timeouts",
        "turns",
    )

    def __init__(
        self,
        name: str,
        label: str,
        settings: Upstream,
        rules: Rules,
        wiring: Wiring,
        tls: TlsContexts,
        before: UpstreamState | None = None,
    ) -> None:
        """`before`: the same upstream under the settings that these replace."""
        self.name = name
        self.label = label
        self.settings = settings
        self.configured = settings is not AUTOMATIC
        self.timeouts = settings.timeouts
        self.rules = rules
        key = settings.idempotency
        self.ordinary = (
            rules.plain is not None
            and settings.propagation != "strip"
            and not key.inject
            and settings.replay.credentials != "live"
            and key.header.lower() == "idempotency-key"
        )
        """Nothing about a request that asks for nothing depends on this upstream's settings."""
        self.classifier = rules.classifier
        self.fallback: Destination | None = None
        """Where calls go when all breakers are open."""
        self.dialler: Dialler = wiring.dialler
        self.in_flight = 0
        self.last_used = 0.0
        self.next_turn = 0
        self._wiring = wiring
        self._tls = tls
        self._earlier: list[UpstreamState] = []
        """The same upstream under earlier settings, as long as requests are under way there."""
        self._closed_connects = self._closed_failures = 0
        self._connect_check = ConnectCheck(wiring.dialler, settings.timeouts.connect)
        self.endpoints: dict[Origin, Endpoint] = {}
        self.pools: dict[tuple[Origin, str, ParentProxy | None], Pool] = {}
        self.origins = tuple(endpoint_origin(url, settings) for url in settings.endpoints)
        """Those of the settings alone; `endpoints` grows with what apps ask for, tunnels included."""
        if before is None:
            self.budget = RetryBudget(settings.retry_budget)
            self.turns = Turns(wiring.loop, settings)
        else:
            self.budget = before.budget
            self.budget.configure(settings.retry_budget)
            self.turns = before.turns.under(settings)
            self.last_used, self.next_turn = before.last_used, before.next_turn
            self._earlier = [before, *before._earlier]
            before._earlier = []
        self.terms = Terms(rules.registry, rules.uniform, self.budget, rules.stages)
        self.proxies = [self._parent(proxy, before) for proxy in settings.egress_proxy]
        for origin in self.origins:
            known = None if before is None else before.endpoints.get(origin)
            if known is None:
                self.endpoint(origin)
            else:
                self._adopt(known)
        self.answer_lines = b"x-sidecar-upstream: %b\r\n%b" % (label.encode("ascii", "replace"), wiring.via_line)
        self.first_try_lines = b"x-sidecar-attempts: 1\r\nx-sidecar-outcome: first_try\r\n" + self.answer_lines

    def take_over(self, before: UpstreamState, router: Router | None, *, connections: bool) -> None:
        """The endpoints that are not in the settings, as far as the router still leads there, and the pools of what is
        there. `connections`: those that are open may be used on."""
        for origin, endpoint in before.endpoints.items():
            ours = router is None or router.by_host(origin.host, origin.port) == self.name
            if ours and origin not in before.origins and origin not in self.endpoints:
                self._adopt(endpoint)
        self._closed_connects, self._closed_failures = before._closed_connects, before._closed_failures
        for key, pool in before.pools.items():
            origin, _, proxy = key
            leads_there = origin in self.endpoints and proxy in (self.proxies or (None,))
            if connections and leads_there and pool.speaks_with(self._context(origin)):
                self.pools[key] = pool.under(self._wiring, self.timeouts)
            else:
                self._close_pool(pool)

    @property
    def requests(self) -> int:
        """Under way, under these settings or earlier ones."""
        return self.in_flight + sum(earlier.in_flight for earlier in self._earlier)

    @property
    def connections(self) -> tuple[int, int]:
        """In use, under these settings or earlier ones, and idle."""
        pools = [*self.pools.values(), *(pool for earlier in self._earlier for pool in earlier.pools.values())]
        return sum(len(pool.active) for pool in pools), sum(pool.idle for pool in pools)

    @property
    def connects(self) -> tuple[int, int]:
        """How many connections were opened, and how many could not be."""
        pools = self.pools.values()
        return (
            self._closed_connects + sum(pool.connects for pool in pools),
            self._closed_failures + sum(pool.connect_failures for pool in pools),
        )

    def sweep(self, now: float) -> None:
        """Once a second: what time alone does."""
        for pool in self.pools.values():
            pool.sweep(now)
        if self.turns.gate.paused:
            self.turns.release()
        for _, breaker in self.breakers():
            breaker.state(now)
        self._connect_check.sweep(self.endpoints.values(), self.proxies, now)
        if self._earlier:
            self._earlier = [earlier for earlier in self._earlier if earlier.in_flight]

    def close(self) -> None:
        self._connect_check.close()
        for pool in self.pools.values():
            pool.close()

    def endpoint(self, origin: Origin) -> Endpoint:
        found = self.endpoints.get(origin)
        if found is None:
            found = self.endpoints[origin] = Endpoint(origin, self._breaker(origin.label))
            if len(self.endpoints) > MOST_POOLS:
                del self.endpoints[next(known for known in self.endpoints if known not in self.origins)]
        return found

    def pool(self, origin: Origin, server_name: str, proxy: ParentProxy | None = None) -> Pool:
        key = (origin, server_name if origin.scheme == "https" else "", proxy)
        pool = self.pools.get(key)
        if pool is None:
            context = self._context(origin)
            pool = self.pools[key] = Pool(self._wiring, self.label, origin, self.timeouts, context, server_name, proxy)
            if len(self.pools) > MOST_POOLS:
                self._drop_one_unused_pool(keep=pool)
        return pool

    def breakers(self) -> Iterator[tuple[str, Breaker]]:
        """Of all endpoints and parent proxies, with their labels."""
        for endpoint in self.endpoints.values():
            yield endpoint.label, endpoint.breaker
        for proxy in self.proxies:
            yield proxy.label, proxy.breaker

    def _breaker(self, endpoint: str) -> Breaker:
        return self._wiring.make_breaker(self.settings.breaker, self.label, endpoint)

    def _adopt(self, endpoint: Endpoint) -> None:
        endpoint.breaker.configure(self.settings.breaker)
        self.endpoints[endpoint.origin] = endpoint

    def _parent(self, settings: EgressProxy, before: UpstreamState | None) -> ParentProxy:
        known = [proxy for proxy in before.proxies if proxy.label == settings.label] if before is not None else []
        if not known:
            return ParentProxy(settings, self._breaker(settings.label))
        known[0].breaker.configure(self.settings.breaker)
        parent = ParentProxy(settings, known[0].breaker)
        return known[0] if known[0].lines == parent.lines else parent

    def _context(self, origin: Origin) -> ResumingContext | None:
        return self._tls.for_upstream(self.settings) if origin.scheme == "https" else None

    def _close_pool(self, pool: Pool) -> None:
        self._closed_connects += pool.connects
        self._closed_failures += pool.connect_failures
        pool.close()

    def _drop_one_unused_pool(self, keep: Pool) -> None:
        for key, pool in self.pools.items():
            if pool is not keep and not pool.active:
                self._close_pool(pool)
                del self.pools[key]
                return


def endpoint_origin(url: str, settings: Upstream) -> Origin:
    """Where an entry of `endpoints` leads."""
    scheme, _, authority = url.partition("://")
    host, port = parse_authority(authority.rstrip("/"), what="endpoint")
    if settings.tls == "originate":
        return Origin("https", host, 443 if port in (0, 80) else port)
    return Origin(scheme, host, port or DEFAULT_PORTS[scheme])
