"""Where one request may go: the endpoints of its upstream, each with its pool, its breaker and its spelling of Host.

Law: `pick` is synchronous and hands out a permit of the endpoint's breaker together with the choice; whoever picks
gives the permit back. The first pick is round robin, later ones prefer endpoints that were not tried yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from sidecar.policy.breaker import OPEN, Breaker, Permit
from sidecar.routing import DEFAULT_PORTS, Origin, bracketed
from sidecar.upstream.endpoints import Endpoint, ParentProxy, UpstreamState
from sidecar.upstream.pool import Pool


class Choice:
    """One endpoint, perhaps through one parent proxy. `admit`, `record` and `abandon` are those of its breaker."""

    __slots__ = (
        "abandon",
        "admit",
        "endpoint",
        "host",
        "label",
        "pool",
        "prefix",
        "proxy",
        "proxy_failed",
        "proxy_lines",
        "record",
    )

    def __init__(self, endpoint: Endpoint, proxy: ParentProxy | None, pool: Pool, host: bytes) -> None:
        self.endpoint = endpoint
        self.proxy = proxy
        self.pool = pool
        self.host = host
        self.label = endpoint.label
        self.prefix = b""
        """Stands before the path: a parent proxy is asked for `http://host/path`."""
        self.proxy_lines = b""
        guard: Breaker | _Both = endpoint.breaker
        self.proxy_failed: Callable[..., None] | None = None
        if proxy is not None:
            guard = both = _Both(endpoint.breaker, proxy.breaker)
            self.proxy_failed = both.proxy_failed
            if endpoint.origin.scheme == "http":
                self.prefix = b"http://" + host_field(endpoint.origin)
                self.proxy_lines = proxy.lines
        self.admit: Callable[[float], Any] = guard.admit
        self.record: Callable[..., None] = guard.record
        self.abandon: Callable[..., None] = guard.abandon


class _BothPermits:
    """Leave of an endpoint and of the parent proxy on the way to it."""

    __slots__ = ("endpoint", "probe", "proxy")

    def __init__(self, endpoint: Permit, proxy: Permit) -> None:
        self.endpoint = endpoint
        self.proxy = proxy
        self.probe: bool = endpoint.probe or proxy.probe


class _Both:
    """The breakers of an endpoint and of the parent proxy on the way to it, as one."""

    __slots__ = ("_endpoint", "_proxy")

    def __init__(self, endpoint: Breaker, proxy: Breaker) -> None:
        self._endpoint = endpoint
        self._proxy = proxy

    def admit(self, now: float) -> _BothPermits | None:
        endpoint = self._endpoint.admit(now)
        if endpoint is None:
            return None
        proxy = self._proxy.admit(now)
        if proxy is None:
            self._endpoint.abandon(endpoint, now)
            return None
        return _BothPermits(endpoint, proxy)

    def record(
        self,
        permits: _BothPermits,
        ok: bool,
        now: float,
        blamed: list[Permit] | None = None,
        *,
        connected: bool = True,
    ) -> None:
        self._endpoint.record(permits.endpoint, ok, now, blamed, connected=connected)
        self._proxy.record(permits.proxy, True, now, blamed)  # it let us through, whatever came of that

    def abandon(self, permits: _BothPermits, now: float, waited: float | None = None) -> None:
        self._endpoint.abandon(permits.endpoint, now, waited)
        self._proxy.abandon(permits.proxy, now)

    def proxy_failed(self, permits: _BothPermits, now: float, blamed: list[Permit], *, connected: bool) -> None:
        """It speaks against the parent proxy, and says nothing about the endpoint."""
        self._endpoint.abandon(permits.endpoint, now)
        self._proxy.record(permits.proxy, False, now, blamed, connected=connected)


class Destination:
    """Where one request goes: the upstream, and the choices there are."""

    __slots__ = ("_choices", "_host", "_server_name", "upstream")

    def __init__(self, upstream: UpstreamState, host: bytes, origins: Sequence[Origin], server_name: str) -> None:
        """An empty `host` or `server_name` means the endpoint's own name."""
        self.upstream = upstream
        self._host = host
        self._server_name = server_name
        proxies: Sequence[ParentProxy | None] = upstream.proxies or (None,)
        self._choices = [self._choice(upstream.endpoint(origin), proxy) for origin in origins for proxy in proxies]

    @property
    def choices(self) -> Sequence[Choice]:
        return self._choices

    def pick(self, now: float, tried: Collection[Choice] = ()) -> tuple[Choice, Any] | None:
        """A choice and its permit, or None when every breaker refuses."""
        choices = self._choices
        turn = 0
        if len(choices) > 1:
            turn = self.upstream.next_turn % len(choices)
            if not tried:  # a retry uses up no turn
                self.upstream.next_turn = turn + 1
        if not tried or len(choices) == 1:
            choice = choices[turn]
            if choice.pool.closed:  # dropped as least recently used since
                choice = choices[turn] = self._choice(self.upstream.endpoint(choice.endpoint.origin), choice.proxy)
            permit = choice.admit(now)
            if permit is not None:
                return choice, permit
            if len(choices) == 1:
                return None
        in_turn = [*choices[turn:], *choices[:turn]]
        for choice in sorted(in_turn, key=lambda choice: _how_tried(choice, tried)):
            permit = choice.admit(now)
            if permit is not None:
                if not tried:
                    self.upstream.next_turn = choices.index(choice) + 1
                return choice, permit
        return None

    def retry_in(self, now: float) -> float:
        """Seconds until the first of the breakers lets a call pass; 0 when one does now."""
        waits = []
        for choice in self._choices:
            wait = choice.endpoint.breaker.retry_in(now)
            waits.append(wait if choice.proxy is None else max(wait, choice.proxy.breaker.retry_in(now)))
        return min(waits)

    def held_open(self) -> bool:
        """Whether an operator has forced the breakers of all endpoints open."""
        orders = [choice.endpoint.breaker.forced for choice in self._choices]
        return all(order is not None and order.state == OPEN for order in orders)

    def _choice(self, endpoint: Endpoint, proxy: ParentProxy | None) -> Choice:
        origin = endpoint.origin
        pool = self.upstream.pool(origin, self._server_name or origin.host, proxy)
        return Choice(endpoint, proxy, pool, self._host or host_field(origin))


def _how_tried(choice: Choice, tried: Collection[Choice]) -> tuple[int, int]:
    """How often. Sorts another endpoint first, then another way to the same one."""
    return sum(choice.endpoint is one.endpoint for one in tried), sum(choice.proxy is one.proxy for one in tried)


def host_field(origin: Origin) -> bytes:
    """How an origin is written in Host: without the port that its scheme implies."""
    name = bracketed(origin.host)
    return (name if DEFAULT_PORTS[origin.scheme] == origin.port else f"{name}:{origin.port}").encode("ascii")
