"""The circuit breakers: what state they are in, why, and an operator's orders to them.

Law: states are read off the living breakers, never kept here. An order names an upstream, and one of its endpoints or
all of them; it holds for as long as it says and is written down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from config.model import Breaker as Thresholds
from sidecar import clock
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, BreakerState, Duration, Limit, NoBody, Prose, Query, StateShown, Text
from sidecar.admin.pages import in_slices, page_of
from sidecar.admin.problem import Problem, unknown, wrong
from sidecar.admin.route import Call, Route, Told
from sidecar.durable.trouble import Trouble
from sidecar.forced import ForcedState
from sidecar.policy.breaker import Breaker
from sidecar.proxy import Proxy
from sidecar.upstream.endpoints import UpstreamState
from telemetry.signals import Transition
from telemetry.timestamps import rfc3339

ACTIONS = ("reset", "force-open", "force-close")
_LONGEST_TTL = 30 * 86_400.0
_NO_REASON = "by an operator"


class BreakersQuery(Query):
    """Which breakers; their transitions follow."""

    upstream: Text | None = None
    """Only those of this upstream."""
    state: BreakerState | None = None
    """Only those in this state. Transitions are not chosen by it."""
    limit: Limit = 100
    cursor: Text | None = None
    """`next_cursor` of the page before."""


class EndpointQuery(Query):
    """Which breaker of the upstream."""

    endpoint: Text | None = None
    """`host:port` as `GET /breakers` shows it. Not given: all of the upstream."""


class Order(Body):
    """May be left out."""

    ttl: Annotated[Duration, Field(gt=0, le=_LONGEST_TTL)] | None = None
    """How long a forced state holds: 90s, 10m, 2h, or seconds; at most 30 days. Not given: until `reset`."""
    reason: Prose = ""
    """For whoever looks at the breaker, and for the log."""


class ForcedShown(Answer):
    """What an operator ordered."""

    state: StateShown
    until: str | None
    """null: until `reset`."""
    reason: str


class BreakerShown(Answer):
    """One breaker. Times are RFC 3339, counts are those of the window."""

    upstream: str
    endpoint: str
    state: StateShown
    failure_count: int
    success_count: int
    failure_ratio: float
    consecutive_failures: int
    last_failure_time: str | None
    opened_at: str | None
    next_probe_at: str | None
    last_state_change: str | None
    probes_in_flight: int
    would_open_count: int
    """How often `monitor_only` kept it closed."""
    forced: ForcedShown | None
    thresholds: Thresholds


class TransitionShown(Answer):
    """One change of state."""

    timestamp: str
    upstream: str
    endpoint: str
    from_state: StateShown
    to_state: StateShown
    reason: str


class BreakerPage(Answer):
    """Some breakers by upstream and endpoint, and the last transitions, newest first."""

    items: tuple[BreakerShown, ...]
    next_cursor: str | None
    total: int | None
    """How many fit in all; on the first page only."""
    transitions: tuple[TransitionShown, ...]


class Ordered(Answer):
    """The breakers after the order."""

    items: tuple[BreakerShown, ...]
    next_cursor: None = None


class Breakers:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._proxy = proxy
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET",
            "/breakers",
            "Every circuit breaker, and the last thousand changes of their states.",
            self.shown,
            BreakerPage,
            BreakersQuery,
        )
        yield Route(
            "POST",
            "/breakers/{upstream}/{action}",
            "Reset a breaker, or hold it open or closed.",
            self.order,
            Ordered,
            EndpointQuery,
            Order,
            parts={"upstream": "The name of an upstream, or `host:port`.", "action": f"One of {', '.join(ACTIONS)}."},
            one_of={"action": ACTIONS},
            refusals=(404, 409, 413, 415),
        )

    async def shown(self, call: Call[BreakersQuery, NoBody]) -> Told:
        query, now = call.query, clock.monotonic()
        found = [
            ((state.name, endpoint), breaker, state)
            for state in self._proxy.directory.states()
            if query.upstream is None or query.upstream in (state.name, state.label)
            for endpoint, breaker in state.breakers()
            if query.state is None or breaker.state(now) == query.state
        ]
        page, next_cursor, total = page_of(found, query.limit, query.cursor)
        return {
            "items": await in_slices(page, lambda item: self._breaker(item[2], item[0][1], item[1], now).model_dump()),
            "next_cursor": next_cursor,
            "total": total,
            "transitions": await in_slices(self._newest_first(query.upstream), self._transition),
        }

    async def order(self, call: Call[EndpointQuery, Order]) -> Told:
        action, order = call.named("action"), call.body
        if action not in ACTIONS:
            raise unknown("action", action, ACTIONS, f"breakers do not obey {action[:60]!r}", ", ".join(ACTIONS))
        if action == "reset" and order.ttl is not None:
            raise wrong("ttl", f"{order.ttl:g}", "a reset lasts until the breaker opens by itself; leave `ttl` out")
        state = self._upstream(call.named("upstream"))
        chosen = self._chosen(state, call.query.endpoint)
        now = clock.monotonic()
        seen = []
        for endpoint, breaker in chosen:
            before = self._breaker(state, endpoint, breaker, now)
            _obey(breaker, action, order, now)
            seen.append((endpoint, before, self._breaker(state, endpoint, breaker, now)))
        await self._keep_forced(state, chosen)
        for endpoint, before, after in seen:
            await self._changes.note(
                call.request,
                f"ordered {action} of the breaker of",
                about=f"{state.name} at {endpoint}",
                before=before.state,
                after=after.state if order.ttl is None else {"state": after.state, "for_seconds": order.ttl},
                reason=order.reason,
            )
        return Ordered(items=tuple(self._breaker(state, endpoint, breaker, now) for endpoint, breaker in chosen))

    async def _keep_forced(self, state: UpstreamState, chosen: list[tuple[str, Breaker]]) -> None:
        """So that a restart does not forget it. An order holds also where nothing can be kept."""
        proxy, held = self._proxy, []
        for endpoint, breaker in chosen:
            forced = breaker.forced
            until = None if forced is None or math.isinf(forced.until) else proxy.wall(forced.until)
            reason = "" if forced is None else forced.reason
            held.append(ForcedState(state.label, endpoint, None if forced is None else forced.state, until, reason))
            proxy.forced.note(held[-1])
        try:
            durable = await proxy.kept.open()
            await durable.orders.keep_forced(held, clock.wall())
        except Trouble as trouble:
            proxy.log.error(
                "sidecar.breaker.not_kept", f"the order to {state.name} holds until a restart only: {trouble}"
            )

    def _newest_first(self, upstream: str | None) -> list[Transition]:
        kept = reversed(self._proxy.signals.transitions)
        return [one for one in kept if upstream is None or one.upstream == upstream]

    def _upstream(self, name: str) -> UpstreamState:
        states = {state.name: state for state in self._proxy.directory.states()}
        state = states.get(name)
        if state is None:
            told = f"no upstream is called {name[:60]!r}, and no host of that name was called lately"
            raise unknown("upstream", name, states, told, "GET /upstreams")
        return state

    def _chosen(self, state: UpstreamState, endpoint: str | None) -> list[tuple[str, Breaker]]:
        breakers = list(state.breakers())
        if not breakers:
            raise Problem(
                409,
                "CONFLICT",
                f"upstream {state.name} has no breaker yet: it names no `endpoints`, so each host gets one with its "
                "first request",
            )
        if endpoint is None:
            return breakers
        chosen = [(label, breaker) for label, breaker in breakers if label == endpoint]
        if not chosen:
            labels = [label for label, _ in breakers]
            told = f"upstream {state.name} has no endpoint {endpoint[:60]!r}"
            raise unknown("endpoint", endpoint, labels, told, f"GET /breakers?upstream={state.name}")
        return chosen

    def _breaker(self, state: UpstreamState, endpoint: str, breaker: Breaker, now: float) -> BreakerShown:
        seen = breaker.snapshot(now)
        forced = None
        if seen.forced is not None:
            until = None if math.isinf(seen.forced.until) else self._time(seen.forced.until)
            forced = ForcedShown.model_construct(
                state=seen.forced.state, until=until, reason=self._text(seen.forced.reason)
            )
        return BreakerShown.model_construct(
            upstream=state.name,
            endpoint=endpoint,
            state=seen.state,
            failure_count=seen.failure_count,
            success_count=seen.success_count,
            failure_ratio=round(seen.failure_ratio, 6),
            consecutive_failures=seen.consecutive_failures,
            last_failure_time=self._time(seen.last_failure_at),
            opened_at=self._time(seen.opened_at),
            next_probe_at=self._time(seen.next_probe_at),
            last_state_change=self._time(seen.changed_at),
            probes_in_flight=seen.probes,
            would_open_count=seen.would_open,
            forced=forced,
            thresholds=state.settings.breaker,
        )

    def _transition(self, one: Transition) -> dict[str, str]:
        """A TransitionShown, without the price of a model for each of a thousand."""
        return {
            "timestamp": rfc3339(one.at),
            "upstream": one.upstream,
            "endpoint": one.endpoint,
            "from_state": one.from_state,
            "to_state": one.to_state,
            "reason": self._text(one.why),
        }

    def _time(self, monotonic: float | None) -> str | None:
        return None if monotonic is None else rfc3339(self._proxy.wall(monotonic))

    def _text(self, text: str) -> str:
        return self._proxy.signals.redactor.text(text)


def _obey(breaker: Breaker, action: str, order: Order, now: float) -> None:
    reason, ttl = order.reason or _NO_REASON, math.inf if order.ttl is None else order.ttl
    if action == "force-open":
        breaker.force_open(now, reason, ttl)
    elif action == "force-close":
        breaker.force_close(now, reason, ttl)
    else:
        breaker.reset(now, reason)
