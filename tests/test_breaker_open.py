"""An open breaker: nothing passes, and time alone ends it."""

from math import inf

import pytest

from config.breaker import Breaker as Settings
from sidecar.policy.breaker import CLOSED, HALF_OPEN, OPEN, Breaker, Permit

LONG = Settings(open_for=30.0, open_for_max=300.0)


def opened(at: float = 100.0, settings: Settings | None = None, **hooks: object) -> Breaker:
    breaker = Breaker(settings or LONG, **hooks)  # type: ignore[arg-type]
    for _ in range(5):
        permit = breaker.admit(at)
        assert permit is not None
        breaker.record(permit, False, at)
    assert OPEN == breaker.state(at)
    return breaker


def fail_probe(breaker: Breaker, now: float) -> None:
    probe = breaker.admit(now)
    assert probe is not None
    breaker.record(probe, False, now)


def test_nothing_passes() -> None:
    breaker = opened(100.0)
    assert breaker.admit(100.0) is None
    assert breaker.admit(129.999) is None


def test_it_says_when_the_next_probe_may_go() -> None:
    breaker = opened(100.0)
    assert 30.0 == breaker.retry_in(100.0)
    assert 10.0 == breaker.retry_in(120.0)
    assert 0.0 == breaker.retry_in(130.0)


def test_time_alone_makes_it_half_open() -> None:
    breaker = opened(100.0)
    assert OPEN == breaker.state(129.9)
    assert HALF_OPEN == breaker.state(130.0)


def test_the_change_is_dated_when_it_was_due_not_when_it_was_noticed() -> None:
    told: list[tuple[str, str, float, str]] = []
    breaker = opened(100.0, on_change=lambda *change: told.append(change))
    breaker.state(5000.0)
    assert (OPEN, HALF_OPEN, 130.0, "30 s have passed, probes may go") == told[-1]
    assert 2 == len(told)
    assert 130.0 == breaker.snapshot(5000.0).changed_at


def test_looking_twice_tells_a_change_once() -> None:
    told: list[str] = []
    breaker = opened(100.0, on_change=lambda before, after, at, why: told.append(after))
    breaker.state(131.0)
    breaker.snapshot(132.0)
    breaker.retry_in(133.0)
    assert [OPEN, HALF_OPEN] == told


def test_results_of_calls_from_before_it_opened_are_ignored() -> None:
    breaker = Breaker(LONG)
    early = breaker.admit(100.0)
    assert early is not None
    for _ in range(5):
        breaker.record(early, False, 100.0)
    breaker.record(early, True, 101.0)
    breaker.record(early, False, 102.0)
    breaker.abandon(early, 103.0)
    shown = breaker.snapshot(103.0)
    assert (OPEN, 5, 0, 100.0) == (shown.state, shown.failure_count, shown.success_count, shown.last_failure_at)


def test_results_from_before_it_opened_are_ignored_in_half_open_and_after_closing_too() -> None:
    breaker = Breaker(LONG.model_copy(update={"success_threshold": 1}))
    early = breaker.admit(100.0)
    assert early is not None
    for _ in range(5):
        breaker.record(early, False, 100.0)
    breaker.record(early, False, 130.0)
    assert HALF_OPEN == breaker.state(130.0)
    probe = breaker.admit(130.0)
    assert probe is not None
    breaker.record(probe, True, 131.0)
    breaker.record(early, False, 132.0)
    shown = breaker.snapshot(132.0)
    assert (CLOSED, 0) == (shown.state, shown.failure_count)


def test_each_failed_probe_doubles_the_open_time_up_to_its_maximum() -> None:
    breaker = opened(0.0)
    now, waits = 0.0, []
    for _ in range(6):
        wait = breaker.retry_in(now)
        waits.append(wait)
        now += wait
        fail_probe(breaker, now)
    assert [30.0, 60.0, 120.0, 240.0, 300.0, 300.0] == waits


def test_after_closing_the_open_time_starts_small_again() -> None:
    settings = LONG.model_copy(update={"success_threshold": 1})
    breaker = opened(0.0, settings)
    fail_probe(breaker, 30.0)
    probe = breaker.admit(90.0)
    assert probe is not None
    breaker.record(probe, True, 91.0)
    for _ in range(5):
        permit = breaker.admit(92.0)
        assert permit is not None
        breaker.record(permit, False, 92.0)
    assert 30.0 == breaker.retry_in(92.0)


def test_an_open_time_over_its_maximum_is_the_maximum() -> None:
    assert 5.0 == opened(0.0, Settings(open_for=30.0, open_for_max=5.0)).retry_in(0.0)


def test_what_there_is_to_show_of_an_open_breaker() -> None:
    shown = opened(100.0).snapshot(110.0)
    assert (OPEN, 100.0, 130.0, 100.0) == (shown.state, shown.opened_at, shown.next_probe_at, shown.changed_at)
    assert (5, 1.0) == (shown.failure_count, shown.failure_ratio), "what opened it stays visible"


@pytest.mark.parametrize("ok", [True, False])
def test_a_permit_nobody_gave_out_changes_nothing(ok: bool) -> None:
    breaker = opened(100.0)
    breaker.record(Permit(1, probe=True), ok, 110.0)
    breaker.abandon(Permit(1, probe=True), 110.0, waited=inf)
    assert (OPEN, 20.0) == (breaker.state(110.0), breaker.retry_in(110.0))
