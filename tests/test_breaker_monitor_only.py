"""A breaker that only watches: it says when it would have opened, and never refuses."""

from config.breaker import Breaker as Settings
from sidecar.policy.breaker import CLOSED, OPEN, Breaker


def fail(breaker: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        permit = breaker.admit(now)
        assert permit is not None
        breaker.record(permit, False, now)


def test_it_never_refuses() -> None:
    breaker = Breaker(Settings(monitor_only=True))
    fail(breaker, 1.0, times=1000)
    assert CLOSED == breaker.state(1.0)
    assert 0.0 == breaker.retry_in(1.0)


def test_it_counts_when_it_would_have_opened() -> None:
    breaker = Breaker(Settings(monitor_only=True))
    fail(breaker, 1.0, times=4)
    assert 0 == breaker.would_open
    fail(breaker, 1.0)
    assert 1 == breaker.would_open
    assert 1 == breaker.snapshot(1.0).would_open


def test_it_counts_once_per_time_it_would_have_been_open() -> None:
    breaker = Breaker(Settings(monitor_only=True, open_for=30.0))
    fail(breaker, 1.0, times=50)
    fail(breaker, 30.9, times=50)
    assert 1 == breaker.would_open
    fail(breaker, 31.0)
    assert 2 == breaker.would_open


def test_it_tells_when_and_why_and_no_change_of_state() -> None:
    changes: list[object] = []
    told: list[tuple[float, str]] = []
    breaker = Breaker(
        Settings(monitor_only=True), lambda *change: changes.append(change), lambda at, why: told.append((at, why))
    )
    fail(breaker, 7.0, times=5)
    assert ([], [(7.0, "5 calls in a row failed")]) == (changes, told)


def test_an_operator_can_still_open_it_for_a_while() -> None:
    breaker = Breaker(Settings(monitor_only=True))
    breaker.force_open(10.0, "maintenance", ttl=5.0)
    assert breaker.admit(14.0) is None
    assert OPEN == breaker.state(14.0)
    assert breaker.admit(15.0) is not None
    assert CLOSED == breaker.state(15.0)


def test_a_reset_forgets_that_it_would_be_open() -> None:
    breaker = Breaker(Settings(monitor_only=True))
    fail(breaker, 1.0, times=5)
    breaker.reset(2.0)
    fail(breaker, 3.0, times=5)
    assert 2 == breaker.would_open
