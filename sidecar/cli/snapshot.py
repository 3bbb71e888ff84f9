"""What `sidecar top` shows: asked of a running sidecar, and turned into rates.

Law: counts are the sidecar's own, from `/upstreams` and `/metrics`; a rate is their difference between two looks, over
the time between them, and a success rate that between now and a look of ten seconds ago. A count that went down is a
restart: no rate until the next look.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from sidecar.cli.admin import Admin
from telemetry.record import BAD, GOOD

_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(?<!\w)(\w++)="((?:[^"\\]|\\.)*+)"')
_WANTED = frozenset(
    {
        "sidecar_sessions_total",
        "sidecar_retries_total",
        "sidecar_dlq_entries",
        "sidecar_requests_in_flight",
        "sidecar_ready",
        "sidecar_build_info",
    }
)
_PAGE = 1000
_LATELY = 10.0

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class UpstreamSeen:
    """One upstream at one moment. Rates are per second, None at the first look."""

    name: str
    requests: float | None
    retries: float | None
    errors: float | None
    """Failures that the app got."""
    success_10s: float | None
    success_rate: float | None
    """Of five minutes."""
    p50: float | None
    p99: float | None
    in_flight: int
    budget: float
    breakers: Mapping[str, int]
    """How many endpoints are in each state."""
    forced: bool
    gate_waiting: int
    dead_letters: int
    last_error: str | None
    """Its code: of the newest failure that is no refusal of a breaker, if there is one."""
    last_error_at: str | None
    last_session: str | None
    """The session of that failure."""


@dataclass(frozen=True, slots=True)
class ReplaySeen:
    """A replay of many that is not over."""

    job_id: str
    state: str
    done: int
    total: int
    why: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it."""

    version: str
    ready: bool
    retries_enabled: bool
    requests: float | None
    retries: float | None
    errors: float | None
    in_flight: int
    dead_letters: int
    upstreams: tuple[UpstreamSeen, ...]
    replays: tuple[ReplaySeen, ...] = ()
    events: tuple[Mapping[str, Any], ...] = field(default=())
    """The newest first."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Looking:
    """Looks again and again."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._looks: deque[tuple[float, Samples]] = deque()

    def look(self, events: tuple[Mapping[str, Any], ...] = ()) -> Snapshot:
        upstreams = self._upstreams()
        samples = parsed(self._admin.text("/metrics"))
        enabled = self._admin.get("/retries")["retries_enabled"]
        now = monotonic()
        before_at, before = self._looks[-1] if self._looks else (now, {})
        self._looks.append((now, samples))
        while len(self._looks) > 2 and now - self._looks[1][0] >= _LATELY:
            self._looks.popleft()
        rates = _Rates(before, samples, now - before_at)
        lately = _Rates(self._looks[0][1] if before else {}, samples, now - self._looks[0][0])
        build = samples.get("sidecar_build_info", [({"version": "?"}, 1.0)])[0][0]
        seen = tuple(_seen(upstream, rates, lately, samples) for upstream in upstreams)
        return Snapshot(
            version=build["version"],
            ready=_sum(samples, "sidecar_ready") > 0,
            retries_enabled=enabled,
            requests=rates.of("sidecar_sessions_total"),
            retries=rates.of("sidecar_retries_total"),
            errors=rates.of("sidecar_sessions_total", outcomes=BAD),
            in_flight=int(_sum(samples, "sidecar_requests_in_flight")),
            dead_letters=int(_sum(samples, "sidecar_dlq_entries")),
            upstreams=tuple(sorted(seen, key=_most_urgent)),
            replays=tuple(self._replays()),
            events=events,
        )

    def _replays(self) -> Iterator[ReplaySeen]:
        """Of the newest, those that go on or wait for somebody."""
        for job in self._admin.get("/dlq/replays", limit=20)["items"]:
            if job["state"] in ("running", "paused"):
                yield ReplaySeen(job["job_id"], job["state"], job["done"], job["total"], job["why"] or "")

    def _upstreams(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self._admin.get("/upstreams", limit=_PAGE, cursor=cursor)
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found


def parsed(text: str) -> Samples:
    """The samples of the text format that are wanted here, by name."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is not None and sample[1] in _WANTED:
            labels = {name: _plain(value) for name, value in _LABEL.findall(sample[2] or "")}
            found.setdefault(sample[1], []).append((labels, float(sample[3])))
    return found


def _plain(value: str) -> str:
    return value.replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")


def _sum(samples: Samples, name: str, upstream: str | None = None, outcomes: frozenset[str] | None = None) -> float:
    return sum(
        value
        for labels, value in samples.get(name, ())
        if upstream in (None, labels.get("upstream")) and (outcomes is None or labels.get("outcome") in outcomes)
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    before: Samples
    after: Samples
    seconds: float

    def of(self, name: str, upstream: str | None = None, outcomes: frozenset[str] | None = None) -> float | None:
        grown = self._grown(name, upstream, outcomes)
        return None if grown is None else grown / self.seconds

    def success(self, upstream: str) -> float | None:
        """The share of good ones among those that are good or bad."""
        good = self._grown("sidecar_sessions_total", upstream, GOOD)
        bad = self._grown("sidecar_sessions_total", upstream, BAD)
        return None if good is None or bad is None or not good + bad else good / (good + bad)

    def _grown(self, name: str, upstream: str | None, outcomes: frozenset[str] | None) -> float | None:
        if not self.before or self.seconds <= 0:
            return None
        grown = _sum(self.after, name, upstream, outcomes) - _sum(self.before, name, upstream, outcomes)
        return grown if grown >= 0 else None


def _seen(upstream: dict[str, Any], rates: _Rates, lately: _Rates, samples: Samples) -> UpstreamSeen:
    label = upstream["label"]
    states: dict[str, int] = {}
    for endpoint in upstream["endpoints"]:
        states[endpoint["breaker"]] = states.get(endpoint["breaker"], 0) + 1
    error = upstream["cause"] or upstream["last_error"]
    return UpstreamSeen(
        name=upstream["name"],
        requests=rates.of("sidecar_sessions_total", label),
        retries=rates.of("sidecar_retries_total", label),
        errors=rates.of("sidecar_sessions_total", label, BAD),
        success_10s=lately.success(label),
        success_rate=upstream["lately"]["success_rate"],
        p50=upstream["p50"],
        p99=upstream["p99"],
        in_flight=upstream["in_flight"],
        budget=upstream["retry_budget"]["remaining_ratio"],
        breakers=states,
        forced=any(endpoint["forced"] for endpoint in upstream["endpoints"]),
        gate_waiting=upstream["gate"]["waiting"],
        dead_letters=int(_sum(samples, "sidecar_dlq_entries", label)),
        last_error=None if error is None else error["code"],
        last_error_at=None if error is None else error["timestamp"],
        last_session=None if error is None else error["session_id"],
    )


def _most_urgent(upstream: UpstreamSeen) -> tuple[bool, float, float, str]:
    """Open breakers first, then those with errors, then the busiest."""
    open_one = "open" in upstream.breakers or "half_open" in upstream.breakers
    return not open_one, -(upstream.errors or 0.0), -(upstream.requests or 0.0), upstream.name
