"""What an operator orders, and how it ends."""

from math import inf

from config.breaker import Breaker as Settings
from sidecar.policy.breaker import CLOSED, HALF_OPEN, OPEN, Breaker, Forced

LONG = Settings(open_for=30.0, open_for_max=300.0)


def fail(breaker: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        permit = breaker.admit(now)
        assert permit is not None
        breaker.record(permit, False, now)


def test_forced_open_refuses_everything_until_its_time_is_up() -> None:
    breaker = Breaker(LONG)
    breaker.force_open(100.0, "migration", ttl=600.0)
    assert breaker.admit(699.0) is None
    assert (OPEN, 500.0) == (breaker.state(200.0), breaker.retry_in(200.0))
    assert Forced(OPEN, 700.0, "migration") == breaker.forced


def test_forced_open_ends_with_probes() -> None:
    breaker = Breaker(LONG)
    breaker.force_open(100.0, "migration", ttl=600.0)
    assert HALF_OPEN == breaker.state(700.0)
    assert breaker.forced is None


def test_a_probe_that_fails_after_a_forced_time_opens_it_for_the_first_open_time() -> None:
    breaker = Breaker(LONG)
    breaker.force_open(100.0, "migration", ttl=600.0)
    fail(breaker, 700.0)
    assert 30.0 == breaker.retry_in(700.0)


def test_an_order_forgets_how_often_probes_failed_before() -> None:
    breaker = Breaker(LONG)
    fail(breaker, 0.0, times=5)
    fail(breaker, 30.0)
    breaker.force_open(40.0, "migration", ttl=60.0)
    fail(breaker, 100.0)
    assert 30.0 == breaker.retry_in(100.0)


def test_forced_open_without_an_end_holds_until_reset() -> None:
    breaker = Breaker(LONG)
    breaker.force_open(100.0, "for good")
    assert OPEN == breaker.state(1e9)
    assert 300.0 == breaker.retry_in(1e9), "nobody knows; ask again after the longest open time"
    assert breaker.snapshot(1e9).next_probe_at is None
    breaker.reset(1e9)
    assert (CLOSED, None) == (breaker.state(1e9), breaker.forced)


def test_forced_closed_lets_everything_pass_and_counts() -> None:
    breaker = Breaker(LONG)
    breaker.force_close(100.0, "we know", ttl=60.0)
    fail(breaker, 110.0, times=50)
    assert (CLOSED, 50) == (breaker.state(110.0), breaker.snapshot(110.0).failure_count)
    assert Forced(CLOSED, 160.0, "we know") == breaker.forced


def test_after_forced_closed_the_next_failure_may_open_it() -> None:
    breaker = Breaker(LONG)
    breaker.force_close(100.0, "we know", ttl=30.0)
    fail(breaker, 129.9, times=50)
    fail(breaker, 130.0)
    assert OPEN == breaker.state(130.0)
    assert breaker.forced is None


def test_forcing_an_open_breaker_closed_lets_calls_pass_at_once() -> None:
    breaker = Breaker(LONG)
    fail(breaker, 100.0, times=5)
    breaker.force_close(101.0, "it is back", ttl=60.0)
    assert CLOSED == breaker.state(101.0)
    assert 0 == breaker.snapshot(101.0).failure_count


def test_forcing_ends_what_was_under_way() -> None:
    breaker = Breaker(LONG)
    before = breaker.admit(100.0)
    assert before is not None
    breaker.force_close(101.0, "fresh start")
    breaker.record(before, False, 102.0)
    assert 0 == breaker.snapshot(102.0).failure_count


def test_a_new_order_replaces_the_old_one() -> None:
    breaker = Breaker(LONG)
    breaker.force_open(100.0, "one", ttl=600.0)
    breaker.force_open(110.0, "two", ttl=50.0)
    assert (50.0, Forced(OPEN, 160.0, "two")) == (breaker.retry_in(110.0), breaker.forced)
    breaker.force_close(120.0, "three")
    assert (CLOSED, Forced(CLOSED, inf, "three")) == (breaker.state(120.0), breaker.forced)


def test_reset_closes_it_and_forgets_everything() -> None:
    breaker = Breaker(LONG)
    fail(breaker, 100.0, times=5)
    fail(breaker, 130.0)
    breaker.reset(131.0)
    assert CLOSED == breaker.state(131.0)
    fail(breaker, 131.0, times=5)
    assert 30.0 == breaker.retry_in(131.0), "the doubling is forgotten too"


def test_orders_are_told_with_their_reason_and_only_when_the_state_changes() -> None:
    told: list[str] = []
    breaker = Breaker(LONG, lambda before, after, at, why: told.append(f"{at:g} {before} > {after}: {why}"))
    breaker.force_close(1.0, "already is")
    breaker.force_open(2.0, "migration", ttl=10.0)
    breaker.force_open(3.0, "still", ttl=10.0)
    breaker.reset(4.0)
    breaker.force_open(5.0, "again", ttl=10.0)
    breaker.reset(6.0, "done")
    assert [
        "2 closed > open: forced open: migration",
        "4 open > closed: reset",
        "5 closed > open: forced open: again",
        "6 open > closed: reset: done",
    ] == told


def test_a_disabled_breaker_can_be_forced_open_and_closes_when_the_time_is_up() -> None:
    breaker = Breaker(Settings(enabled=False))
    breaker.force_open(100.0, "maintenance", ttl=60.0)
    assert breaker.admit(159.0) is None
    assert breaker.admit(160.0) is not None
    assert CLOSED == breaker.state(160.0)


def test_an_order_that_has_run_out_is_not_shown() -> None:
    breaker = Breaker(LONG)
    breaker.force_close(100.0, "we know", ttl=60.0)
    assert breaker.snapshot(159.0).forced is not None
    assert breaker.snapshot(160.0).forced is None
