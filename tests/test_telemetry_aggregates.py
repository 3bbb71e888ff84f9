"""RetryMetrics and time series: exact, against a recount that keeps everything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.aggregates import SERIES, Aggregates
from telemetry.record import BAD, GOOD, NEUTRAL, OUTCOMES, Session
from telemetry.timestamps import rfc3339
from tests.doubles.records import attempt, exhausted, healthy, recovered, session

NOW = 1_000_000.0  # monotonic
OFFSET = 1_699_000_017.25  # so that minutes do not begin where monotonic ones do


def wall(monotonic: float) -> float:
    return monotonic + OFFSET


def aggregates(**subsystems: str) -> Aggregates:
    return Aggregates(wall, subsystems)


def ended(made: Session, at: float) -> Session:
    """Move a session so that it ends then."""
    shift = at - made.ended
    made.started += shift
    made.ended = at
    for each in made.attempts:
        each.started += shift
        each.ended += shift
    return made


# ---- S1's and S2's numbers ---------------------------------------------------------------------------------------


def test_a_window_has_every_number_of_the_model() -> None:
    counted = aggregates(payments="billing")
    first, second, third = ended(healthy(took=0.05), NOW), ended(recovered(), NOW), ended(exhausted(), NOW)
    for made in (first, second, third):
        counted.observe(made)
    shown = counted.retry_metrics(3600, NOW)
    durations = [made.ended - made.started for made in (first, second, third)]
    latencies = [each.ended - each.started for made in (first, second, third) for each in made.attempts]
    assert pytest.approx(sum(durations)) == shown.pop("total_duration")
    assert pytest.approx(sum(durations) / 3) == shown.pop("average_duration_per_session")
    assert pytest.approx(sum(latencies) / 5) == shown.pop("avg_latency")
    each_group = {"sessions": 3, "success_rate": 2 / 3, "average_attempts": 5 / 3, "retries": 2}
    assert {
        "time_window_start": rfc3339((wall(NOW) // 60 - 59) * 60),
        "time_window_end": rfc3339(wall(NOW)),
        "total_sessions": 3,
        "successful_sessions": 2,
        "failed_sessions": 1,
        "neutral_sessions": 0,
        "success_rate": 2 / 3,
        "total_attempts": 5,
        "total_retries": 2,
        "average_attempts_per_session": 5 / 3,
        "max_attempts_in_session": 2,
        "success_by_attempt": {"1": 1, "2": 1},
        "failure_by_reason": {"CONNECTION_REFUSED": 2, "TEMPORARY_UNAVAILABLE": 1},
        "by_policy": {"default": each_group},
        "by_subsystem": {"billing": each_group},
        "by_upstream": {"payments": each_group},
    } == shown


def test_nothing_happened_is_an_answer_too() -> None:
    shown = aggregates().retry_metrics(60, NOW)
    assert (0, 0, None, 0.0, {}) == (
        shown["total_sessions"],
        shown["max_attempts_in_session"],
        shown["success_rate"],
        shown["average_attempts_per_session"],
        shown["by_policy"],
    )


def test_minutes_go_after_an_hour_and_hours_after_a_day() -> None:
    counted = aggregates()
    counted.observe(ended(healthy(), NOW))
    later = NOW + 3600
    counted.observe(ended(healthy(), later))
    assert 1 == counted.retry_metrics(3600, later)["total_sessions"]
    assert 2 == counted.retry_metrics(7200, later)["total_sessions"]
    counted.observe(ended(healthy(), NOW + 26 * 3600))
    assert 1 == counted.retry_metrics(86400, NOW + 26 * 3600)["total_sessions"]
    assert len(counted._minutes) <= 60 and len(counted._hours) <= 24


def test_a_session_that_is_told_late_counts_when_it_ended() -> None:
    counted = aggregates()
    counted.observe(ended(healthy(), NOW))
    counted.observe(ended(recovered(), NOW - 120))
    counted.observe(ended(exhausted(), NOW - 2 * 3600))
    counted.observe(ended(exhausted(), NOW - 50 * 3600))
    assert 1 == counted.retry_metrics(60, NOW)["total_sessions"]
    assert 2 == counted.retry_metrics(300, NOW)["total_sessions"]
    assert 3 == counted.retry_metrics(86400, NOW)["total_sessions"]


# ---- exact -------------------------------------------------------------------------------------------------------


@st.composite
def told(draw: st.DrawFn) -> tuple[float, Session]:
    outcome = draw(st.sampled_from(sorted(OUTCOMES)))
    count = 1 if outcome == "first_try" else draw(st.integers(0, 4))
    attempts = [
        attempt(
            status=200,
            took=draw(st.sampled_from([0.0, 0.5, 2.0])),
            code=draw(st.sampled_from(["NETWORK_TIMEOUT", "BAD_GATEWAY"]))
            if number < count - 1 or outcome in BAD
            else None,
            kind=draw(st.sampled_from(["retry", "stale", "probe"])) if number else "first",
        )
        for number in range(count)
    ]
    made = session(
        outcome,
        *attempts,
        upstream=draw(st.sampled_from(["a", "b", "c"])),
        policy_id=draw(st.sampled_from(["default", "careful"])),
    )
    return draw(st.integers(0, 30 * 3600)), made


def naive(sessions: list[Session]) -> dict[str, Any]:
    """The same numbers the slow way."""
    success_by_attempt = Counter(str(len(made.attempts)) for made in sessions if made.outcome in GOOD)
    reasons = Counter(each.code for made in sessions for each in made.attempts if each.code is not None)
    return {
        "total_sessions": len(sessions),
        "successful_sessions": sum(made.outcome in GOOD for made in sessions),
        "failed_sessions": sum(made.outcome in BAD for made in sessions),
        "neutral_sessions": sum(made.outcome in NEUTRAL for made in sessions),
        "total_attempts": sum(len(made.attempts) for made in sessions),
        "total_retries": sum(
            number > 0 and each.kind != "stale" for made in sessions for number, each in enumerate(made.attempts)
        ),
        "max_attempts_in_session": max((len(made.attempts) for made in sessions), default=0),
        "success_by_attempt": dict(success_by_attempt),
        "failure_by_reason": dict(reasons),
    }


@settings(deadline=None)
@given(
    st.lists(told(), max_size=40),
    st.sampled_from([60, 61, 300, 1800, 3600, 3601, 7200, 6 * 3600, 86400]),
    st.booleans(),
)
def test_any_window_equals_a_naive_recount(storm: list[tuple[float, Session]], window: float, in_order: bool) -> None:
    if in_order:
        storm.sort(key=lambda pair: pair[0])
    sessions = [ended(made, NOW + at) for at, made in storm]
    counted = aggregates(a="one", b="one")
    for made in sessions:
        counted.observe(made)
    now = max((made.ended for made in sessions), default=NOW)
    shown = counted.retry_metrics(window, now)
    size = 60 if window <= 3600 else 3600
    first = wall(now) // size - -(-window // size) + 1
    inside = [made for made in sessions if wall(made.ended) // size >= first]
    expected = naive(inside)
    assert expected == {name: shown[name] for name in expected}
    assert pytest.approx(sum(made.ended - made.started for made in inside)) == shown["total_duration"]
    for group, key in (("by_policy", lambda m: m.policy_id), ("by_upstream", lambda m: m.upstream)):
        assert Counter(map(key, inside)) == {name: cell["sessions"] for name, cell in shown[group].items()}
    assert sum(made.upstream in ("a", "b") for made in inside) == shown["by_subsystem"].get("one", {}).get(
        "sessions", 0
    )


@settings(deadline=None)
@given(
    st.lists(told(), min_size=1, max_size=30),
    st.sampled_from([(3600, 60), (3600, 300), (1800, 60), (86400, 3600), (43200, 7200)]),
)
def test_the_points_of_a_series_add_up_to_the_window(
    storm: list[tuple[float, Session]], shape: tuple[int, int]
) -> None:
    window, step = shape
    counted = aggregates()
    for at, made in sorted(storm, key=lambda pair: pair[0]):
        counted.observe(ended(made, NOW + at))
    now = NOW + max(at for at, _ in storm)
    points = counted.timeseries("sessions", window, step, now)
    assert -(-window // step) == len(points)
    assert counted.retry_metrics(window, now)["total_sessions"] == sum(point["value"] for point in points)
    assert sorted(point["timestamp"] for point in points) == [point["timestamp"] for point in points]


def test_every_series_can_be_asked_for() -> None:
    counted = aggregates()
    for made in (healthy(took=0.05), recovered(), exhausted()):
        counted.observe(ended(made, NOW))
    last = {name: counted.timeseries(name, 600, 60, NOW)[-1]["value"] for name in SERIES}
    assert (3, 2, 1, 5, 2, 2 / 3) == tuple(
        last[name] for name in ("sessions", "successes", "failures", "attempts", "retries", "success_rate")
    )
    assert last["avg_duration"] > last["avg_latency"] > 0
    assert None is counted.timeseries("avg_latency", 600, 60, NOW)[0]["value"]


@pytest.mark.parametrize(
    ("metric", "window", "step", "told_of"),
    [
        ("latency", 600, 60, "sessions"),
        ("sessions", 600, 30, "60"),
        ("sessions", 600, 90, "60"),
        ("sessions", 7200, 60, "3600"),
    ],
)
def test_a_series_that_cannot_be_had_says_what_can(metric: str, window: int, step: int, told_of: str) -> None:
    with pytest.raises(ValueError, match=told_of):
        aggregates().timeseries(metric, window, step, NOW)


# ---- the wall clock is set ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [-5_184_000.0, -3_600.0, -20.0, 0.0, 20.0, 1_800.0, 5_184_000.0])
@pytest.mark.parametrize("asked_between", [False, True])
def test_after_a_step_of_the_wall_clock_everything_is_as_long_ago_as_it_was(by: float, asked_between: bool) -> None:
    step = 0.0
    counted = Aggregates(lambda moment: wall(moment) + step)
    for _ in range(3):
        counted.observe(ended(exhausted(), NOW - 600))
    counted.observe(ended(recovered(), NOW - 1))
    step = by
    if asked_between:
        assert 4 == counted.retry_metrics(3600, NOW)["total_sessions"]
    counted.observe(ended(healthy(), NOW + 0.5))
    for window in (3600, 86_400):
        shown = counted.retry_metrics(window, NOW + 1)
        assert (5, 3) == (shown["total_sessions"], shown["failed_sessions"])
        assert rfc3339(wall(NOW + 1) + by) == shown["time_window_end"]
    series = counted.timeseries("failures", 3600, 60, NOW + 1)
    assert 3 == sum(point["value"] for point in series[-13:-8]), "ten minutes ago, to the minute"
    assert 5 == counted.retry_metrics(3600, NOW + 2940)["total_sessions"]
    assert 2 == counted.retry_metrics(3600, NOW + 3300)["total_sessions"], "they leave the hour when theirs is over"


def test_the_clock_may_be_set_before_anything_has_happened() -> None:
    step = 0.0
    counted = Aggregates(lambda moment: wall(moment) + step)
    step = -86_400.0
    assert 0 == counted.retry_metrics(3600, NOW)["total_sessions"]
    counted.observe(ended(healthy(), NOW))
    assert 1 == counted.retry_metrics(3600, NOW)["total_sessions"]
