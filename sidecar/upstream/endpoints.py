"""Upstreams at run time: their endpoints and pools, and what guards them.

Law: everything a request needs to know about its upstream is prepared here once (label, timeouts, bytes of answer
headers, breakers, budget), so the exchange looks up and goes. Number of endpoints and pools is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator

from config.egress_proxy import EgressProxy
from config.model import Upstream
from sidecar.policy.breaker import Breaker
from sidecar.policy.budget import RetryBudget
from sidecar.policy.retry import Terms
from sidecar.routing import DEFAULT_PORTS, Origin, parse_authority
from sidecar.upstream.pool import Pool, Wiring
from sidecar.upstream.rules import Rules
from sidecar.upstream.tls import TlsContexts
from sidecar.upstream.waiting import Turns

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
        "_tls",
        "_wiring",
        "answer_lines",
        "budget",
        "classifier",
        "configured",
        "endpoints",
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
        self, name: str, label: str, settings: Upstream, rules: Rules, wiring: Wiring, tls: TlsContexts
    ) -> None:
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
            and key.header.lower() == "idempotency-key"
        )
        """Nothing about a request that asks for nothing depends on this upstream's settings."""
        self.classifier = rules.classifier
        self.in_flight = 0
        self.last_used = 0.0
        self.next_turn = 0
        self._wiring = wiring
        self._tls = tls
        self.endpoints: dict[Origin, Endpoint] = {}
        self.pools: dict[tuple[Origin, str, ParentProxy | None], Pool] = {}
        self.budget = RetryBudget(settings.retry_budget)
        self.terms = Terms(rules.registry, rules.uniform, self.budget, rules.stages)
        self.turns = Turns(wiring.loop, settings)
        self.proxies = [ParentProxy(proxy, self._breaker(proxy.label)) for proxy in settings.egress_proxy]
        self.origins = tuple(endpoint_origin(url, settings) for url in settings.endpoints)
        """Those of the settings alone; `endpoints` grows with what apps ask for, tunnels included."""
        for origin in self.origins:
            self.endpoint(origin)
        self.answer_lines = b"x-sidecar-upstream: %b\r\n%b" % (label.encode("ascii", "replace"), wiring.via_line)
        self.first_try_lines = b"x-sidecar-attempts: 1\r\nx-sidecar-outcome: first_try\r\n" + self.answer_lines

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
            tls = self._tls.for_upstream(self.settings) if origin.scheme == "https" else None
            pool = self.pools[key] = Pool(self._wiring, origin, self.timeouts, tls, server_name, proxy)
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

    def _drop_one_unused_pool(self, keep: Pool) -> None:
        for key, pool in self.pools.items():
            if pool is not keep and not pool.active:
                pool.close()
                del self.pools[key]
                return


def endpoint_origin(url: str, settings: Upstream) -> Origin:
    """Where an entry of `endpoints` leads."""
    scheme, _, authority = url.partition("://")
    host, port = parse_authority(authority.rstrip("/"), what="endpoint")
    if settings.tls == "originate":
        return Origin("https", host, 443 if port in (0, 80) else port)
    return Origin(scheme, host, port or DEFAULT_PORTS[scheme])
