"""What happened in the last minutes and hours, added up.

Law: the sums are telemetry's; here is only what may be asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, WithJsonSchema

from sidecar import clock
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Duration, NoBody, Query, Text
from sidecar.admin.problem import Problem, wrong, wrong_choice
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy
from telemetry.aggregates import SERIES

_HOUR, _DAY = 3_600.0, 86_400.0
Window = Annotated[Duration, Field(ge=60, le=_DAY)]
Step = Annotated[Duration, Field(ge=60, le=_DAY)]


class RetryMetricsQuery(Query):
    """How far back."""

    window: Window = _HOUR
    """A duration from 1m to 24h. Up to an hour it is counted in minutes, beyond in hours."""


class TimeseriesQuery(Query):
    """What, how far back and how fine."""

    metric: Annotated[Text, WithJsonSchema({"enum": list(SERIES)})]
    """One of sessions, successes, failures, attempts, retries, success_rate, avg_duration, avg_latency."""
    window: Window = _HOUR
    """A duration from 1m to 24h."""
    step: Step | None = None
    """The width of a point: whole minutes for a window up to an hour, whole hours beyond. Not given: one of them."""


class Share(Answer):
    """The part of one policy, upstream or subsystem."""

    sessions: int
    success_rate: float | None
    average_attempts: float
    retries: int


class RetryMetrics(Answer):
    """Totals over the window. Times are in seconds; success rate is good / (good + bad)."""

    time_window_start: str
    time_window_end: str
    total_sessions: int
    successful_sessions: int
    failed_sessions: int
    neutral_sessions: int
    success_rate: float | None
    total_attempts: int
    total_retries: int
    average_attempts_per_session: float
    max_attempts_in_session: int
    total_duration: float
    average_duration_per_session: float
    avg_latency: float
    success_by_attempt: Mapping[str, int]
    failure_by_reason: Mapping[str, int]
    by_policy: Mapping[str, Share]
    by_subsystem: Mapping[str, Share]
    by_upstream: Mapping[str, Share]


class Point(Answer):
    """One step of a series; null where nothing happened that the metric could be made from."""

    timestamp: str
    value: float | None


class Timeseries(Answer):
    """One point per step, oldest first; the last one is unfinished."""

    metric: str
    window: float
    step: float
    items: tuple[Point, ...]
    next_cursor: None = None


class Measures:
    """The handlers."""

    def __init__(self, proxy: Proxy, changes: Changes) -> None:
        self._aggregates = proxy.signals.aggregates
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route(
            "GET", "/retry-metrics", "What retries did lately.", self.retry_metrics, RetryMetrics, RetryMetricsQuery
        )
        yield Route("GET", "/timeseries", "One metric over time.", self.timeseries, Timeseries, TimeseriesQuery)

    async def retry_metrics(self, call: Call[RetryMetricsQuery, NoBody]) -> Told:
        await self._changes.note_reading(call.request, "retry metrics")
        return self._aggregates.retry_metrics(call.query.window, clock.monotonic())

    async def timeseries(self, call: Call[TimeseriesQuery, NoBody]) -> Told:
        await self._changes.note_reading(call.request, "time series")
        metric, window = call.query.metric, call.query.window
        step = call.query.step or (60.0 if window <= _HOUR else _HOUR)
        if metric not in SERIES:
            raise wrong_choice("metric", metric, SERIES, f"is not one of {', '.join(SERIES)}")
        try:
            points = self._aggregates.timeseries(metric, window, step, clock.monotonic())
        except ValueError as refused:
            raise _about_step(step, refused) from None
        return {"metric": metric, "window": window, "step": step, "items": points, "next_cursor": None}


def _about_step(step: float, refused: ValueError) -> Problem:
    return wrong("step", f"{step:g}", str(refused).partition(": ")[2])
