"""What `sidecar top` shows: asked of a running sidecar, and turned into rates.

Law: counts are the sidecar's own, from `/upstreams` and `/metrics`; a rate is their difference between two looks, over
the time between them. A count that went down is a restart: no rate until the next look.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from sidecar.cli.admin import Admin

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

Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class UpstreamSeen:
    """One upstream at one moment. Rates are per second, None at the first look."""

    name: str
    requests: float | None
    retries: float | None
    success_rate: float | None
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it."""

    version: str
    ready: bool
    retries_enabled: bool
    requests: float | None
    retries: float | None
    in_flight: int
    dead_letters: int
    upstreams: tuple[UpstreamSeen, ...]
    events: tuple[Mapping[str, Any], ...] = field(default=())
    """The newest first."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Looking:
    """Looks again and again."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._before: Samples = {}
        self._at = 0.0

    def look(self, events: tuple[Mapping[str, Any], ...] = ()) -> Snapshot:
        upstreams = self._upstreams()
        samples = parsed(self._admin.text("/metrics"))
        enabled = self._admin.get("/retries")["retries_enabled"]
        now = monotonic()
        rates = _Rates(self._before, samples, now - self._at)
        self._before, self._at = samples, now
        build = samples.get("sidecar_build_info", [({"version": "?"}, 1.0)])[0][0]
        seen = tuple(_seen(upstream, rates, samples) for upstream in upstreams)
        return Snapshot(
            version=build["version"],
            ready=_sum(samples, "sidecar_ready") > 0,
            retries_enabled=enabled,
            requests=rates.of("sidecar_sessions_total"),
            retries=rates.of("sidecar_retries_total"),
            in_flight=int(_sum(samples, "sidecar_requests_in_flight")),
            dead_letters=int(_sum(samples, "sidecar_dlq_entries")),
            upstreams=tuple(sorted(seen, key=_most_urgent)),
            events=events,
        )

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


def _sum(samples: Samples, name: str, upstream: str | None = None) -> float:
    return sum(value for labels, value in samples.get(name, ()) if upstream in (None, labels.get("upstream")))


@dataclass(frozen=True, slots=True)
class _Rates:
    before: Samples
    after: Samples
    seconds: float

    def of(self, name: str, upstream: str | None = None) -> float | None:
        if not self.before or self.seconds <= 0:
            return None
        grown = _sum(self.after, name, upstream) - _sum(self.before, name, upstream)
        return grown / self.seconds if grown >= 0 else None


def _seen(upstream: dict[str, Any], rates: _Rates, samples: Samples) -> UpstreamSeen:
    label = upstream["label"]
    states: dict[str, int] = {}
    for endpoint in upstream["endpoints"]:
        states[endpoint["breaker"]] = states.get(endpoint["breaker"], 0) + 1
    error = upstream["last_error"]
    return UpstreamSeen(
        name=upstream["name"],
        requests=rates.of("sidecar_sessions_total", label),
        retries=rates.of("sidecar_retries_total", label),
        success_rate=upstream["lately"]["success_rate"],
        p50=upstream["p50"],
        p99=upstream["p99"],
        in_flight=upstream["in_flight"],
        budget=upstream["retry_budget"]["remaining_ratio"],
        breakers=states,
        forced=any(endpoint["forced"] for endpoint in upstream["endpoints"]),
        gate_waiting=upstream["gate"]["waiting"],
        dead_letters=int(_sum(samples, "sidecar_dlq_entries", label)),
        last_error=None if error is None else f"{error['timestamp'][11:19]} {error['code']}",
    )


def _most_urgent(upstream: UpstreamSeen) -> tuple[bool, float, str]:
    """Open breakers first, then the busiest."""
    return "open" not in upstream.breakers, -(upstream.requests or 0.0), upstream.name
