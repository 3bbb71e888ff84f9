"""What is true now, asked of the living objects at each scrape.

Law: a gauge is never kept by counting events, which would leave it stuck after the first one missed. The proxy hands
in plain facts in the shapes below; this file alone turns them into families. `None` means that the feature is not
there, and it is not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from prometheus_client.core import Metric, Sample

from telemetry import names


class LiveBreaker(NamedTuple):
    """One endpoint's breaker."""

    endpoint: str
    state: str  # one of names.BREAKER_STATES
    failure_ratio: float
    changed_at: float | None = None
    """Wall time of the last transition; None before the first."""


class LiveUpstream(NamedTuple):
    """One upstream. Several may share a label (`_other`): their facts are added up."""

    label: str
    in_flight: int = 0
    active: int = 0
    idle: int = 0
    connects: Mapping[str, int] = {}
    """Connections opened, by `success` or `failure`."""
    tls_unverified: bool = False
    budget_left: float | None = None
    gate_waiting: int | None = None
    gate_pauses: int = 0
    breakers: tuple[LiveBreaker, ...] = ()


class LiveDeadLetters(NamedTuple):
    """What waits on disk: per upstream label (entries, wall time of the oldest or None), and the room."""

    waiting: Mapping[str, tuple[int, float | None]]
    size: int
    capacity: int
    disk_free: int


class Live(Protocol):
    """What the proxy supplies. Called on the event loop's thread, once per scrape."""

    def upstreams(self) -> Iterable[LiveUpstream]:
        """Every upstream that exists now."""
        ...

    def ready(self) -> bool:
        """New requests are accepted."""
        ...

    def downstream_connections(self) -> int:
        """Open connections of the app."""
        ...

    def memory(self) -> tuple[Mapping[str, int], int, int]:
        """Bytes held for requests under way by kind, the limit, and how many bodies gave up their copy."""
        ...

    def label_overflows(self) -> int:
        """Hosts that got no label of their own, since the start."""
        ...

    def dead_letters(self) -> LiveDeadLetters | None:
        """None while there is no store for them."""
        ...

    def keeps(self) -> bool | None:
        """What fails can be kept; None while nothing had to be."""
        ...

    def incomplete(self) -> bool:
        """Something is missing in the store, and nobody has answered for it yet."""
        ...

    def outbox_jobs(self) -> Mapping[str, int] | None:
        """Jobs by state; None while there is no outbox."""
        ...


def families(live: Live) -> Iterator[Metric]:
    """For `Metrics.live`."""
    upstreams = tuple(live.upstreams())
    yield from _connections(upstreams)
    yield from _breakers(upstreams)
    yield from _optional(upstreams)
    yield _of(names.DOWNSTREAM_CONNECTIONS, {(): live.downstream_connections()})
    held, most, given_up = live.memory()
    yield _of(names.MEMORY_HELD, {(kind,): size for kind, size in held.items()})
    yield _of(names.MEMORY_LIMIT, {(): most})
    yield _of(names.BODIES_GIVEN_UP, {(): given_up})
    yield _of(names.LABEL_OVERFLOW, {("upstream",): live.label_overflows()})
    yield _of(names.READY, {(): int(live.ready())})
    keeps = live.keeps()
    if keeps is not None:
        yield _of(names.STORE_KEEPS, {(): int(keeps)})
    letters = live.dead_letters()
    if letters is not None:
        yield _of(names.DLQ_ENTRIES, {(label,): count for label, (count, _) in letters.waiting.items()})
        oldest: Facts = {(label,): at for label, (_, at) in letters.waiting.items() if at is not None}
        yield _of(names.DLQ_OLDEST, oldest)
        yield _of(names.STORE_INCOMPLETE, {(): int(live.incomplete())})
        yield _of(names.DLQ_SIZE, {(): letters.size})
        yield _of(names.DLQ_CAPACITY, {(): letters.capacity})
        yield _of(names.DLQ_DISK_FREE, {(): letters.disk_free})
    jobs = live.outbox_jobs()
    if jobs is not None:
        yield _of(names.OUTBOX_JOBS, {(state,): count for state, count in jobs.items()})


Facts = dict[tuple[str, ...], float]
_HOW_BAD = ("closed", "half_open", "open")  # of several breakers under one label, the worst is shown


def _of(what: names.Metric, facts: Mapping[tuple[str, ...], float]) -> Metric:
    family = Metric(what.name, what.help, what.kind)
    for labels, value in facts.items():
        family.samples.append(Sample(what.exposed, dict(zip(what.labels, labels, strict=True)), value))
    return family


def _add(facts: Facts, labels: tuple[str, ...], value: float) -> None:
    facts[labels] = facts.get(labels, 0) + value


def _connections(upstreams: Iterable[LiveUpstream]) -> Iterator[Metric]:
    flying: Facts = {}
    connections: Facts = {}
    connects: Facts = {}
    unverified: Facts = {}
    for upstream in upstreams:
        label = upstream.label
        _add(flying, (label,), upstream.in_flight)
        _add(connections, (label, "active"), upstream.active)
        _add(connections, (label, "idle"), upstream.idle)
        for result in (*names.RESULTS, *(upstream.connects.keys() - set(names.RESULTS))):
            _add(connects, (label, result), upstream.connects.get(result, 0))
        if upstream.tls_unverified:
            unverified[label,] = 1
    yield _of(names.IN_FLIGHT, flying)
    yield _of(names.UPSTREAM_CONNECTIONS, connections)
    yield _of(names.UPSTREAM_CONNECTS, connects)
    yield _of(names.TLS_VERIFICATION_DISABLED, unverified)


def _breakers(upstreams: Iterable[LiveUpstream]) -> Iterator[Metric]:
    states: dict[tuple[str, str], str] = {}
    ratios: Facts = {}
    changed: Facts = {}
    endpoints: Counter[str] = Counter()
    for upstream in upstreams:
        label = upstream.label
        for breaker in upstream.breakers:
            endpoints[label] += 1
            own = label != names.OTHER and endpoints[label] <= names.MOST_ENDPOINTS
            key = (label, breaker.endpoint if own else names.OTHER)
            states[key] = max(states.get(key, "closed"), breaker.state, key=_HOW_BAD.index)
            ratios[label,] = max(ratios.get((label,), 0.0), breaker.failure_ratio)
            if breaker.changed_at is not None:
                changed[label,] = max(changed.get((label,), 0.0), breaker.changed_at)
    one_hot: Facts = {
        (*key, word): int(word == state) for key, state in states.items() for word in names.BREAKER_STATES
    }
    yield _of(names.BREAKER_STATE, one_hot)
    yield _of(names.BREAKER_RATIO, ratios)
    yield _of(names.BREAKER_CHANGED, changed)


def _optional(upstreams: Iterable[LiveUpstream]) -> Iterator[Metric]:
    budget: Facts = {}
    waiting: Facts = {}
    pauses: Facts = {}
    for upstream in upstreams:
        if upstream.budget_left is not None:
            budget[upstream.label,] = min(budget.get((upstream.label,), 1.0), upstream.budget_left)
        if upstream.gate_waiting is not None:
            _add(waiting, (upstream.label,), upstream.gate_waiting)
            _add(pauses, (upstream.label,), upstream.gate_pauses)
    yield _of(names.BUDGET_LEFT, budget)
    yield _of(names.GATE_WAITING, waiting)
    yield _of(names.GATE_PAUSES, pauses)
