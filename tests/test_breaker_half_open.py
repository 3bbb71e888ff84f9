"""A half-open breaker: a few probes pass, each on a lease, and they decide."""

from config.breaker import Breaker as Settings
from sidecar.policy.breaker import CLOSED, HALF_OPEN, OPEN, PROBE_LEASE, Breaker, Permit

LONG = Settings(open_for=30.0, open_for_max=300.0)


def half_open(now: float = 130.0, lease: float = PROBE_LEASE, **changes: object) -> Breaker:
    breaker = Breaker(LONG.model_copy(update=changes), lease=lease)
    for _ in range(5):
        permit = breaker.admit(now - 30.0)
        assert permit is not None
        breaker.record(permit, False, now - 30.0)
    assert HALF_OPEN == breaker.state(now)
    return breaker


def probe(breaker: Breaker, now: float) -> Permit:
    permit = breaker.admit(now)
    assert permit is not None
    return permit


def test_one_probe_passes_and_the_others_are_refused() -> None:
    breaker = half_open()
    assert probe(breaker, 130.0).probe
    assert breaker.admit(130.0) is None
    assert 1.0 == breaker.retry_in(130.0)


def test_as_many_probes_pass_at_once_as_are_set() -> None:
    breaker = half_open(half_open_probes=3)
    assert 3 == len({probe(breaker, 130.0) for _ in range(3)})
    assert breaker.admit(130.0) is None
    assert 3 == breaker.snapshot(130.0).probes


def test_enough_successes_close_it() -> None:
    breaker = half_open()
    breaker.record(probe(breaker, 130.0), True, 131.0)
    assert HALF_OPEN == breaker.state(131.0)
    breaker.record(probe(breaker, 131.0), True, 132.0)
    assert CLOSED == breaker.state(132.0)


def test_one_failure_opens_it_again() -> None:
    breaker = half_open()
    breaker.record(probe(breaker, 130.0), True, 131.0)
    breaker.record(probe(breaker, 131.0), False, 132.0)
    assert (OPEN, 60.0) == (breaker.state(132.0), breaker.retry_in(132.0))
    assert 132.0 == breaker.snapshot(132.0).last_failure_at


def test_successes_from_before_it_opened_again_do_not_count() -> None:
    breaker = half_open()
    breaker.record(probe(breaker, 130.0), True, 131.0)
    breaker.record(probe(breaker, 131.0), False, 132.0)
    breaker.record(probe(breaker, 192.0), True, 193.0)
    assert HALF_OPEN == breaker.state(193.0)


def test_what_opened_it_is_forgotten_when_it_closes() -> None:
    breaker = half_open(success_threshold=1)
    breaker.record(probe(breaker, 130.0), True, 131.0)
    shown = breaker.snapshot(131.0)
    assert (CLOSED, 0, 0, 0) == (shown.state, shown.failure_count, shown.success_count, shown.consecutive_failures)
    breaker.record(probe(breaker, 131.0), False, 132.0)
    assert CLOSED == breaker.state(132.0), "one failure is one failure"


def test_an_abandoned_probe_gives_its_lease_back() -> None:
    breaker = half_open()
    breaker.abandon(probe(breaker, 130.0), 131.0)
    assert (HALF_OPEN, 0.0) == (breaker.state(131.0), breaker.retry_in(131.0))
    assert breaker.admit(131.0) is not None


def test_a_probe_the_app_gave_up_on_after_a_long_wait_is_a_failure() -> None:
    breaker = half_open(slow_after=2.0)
    breaker.abandon(probe(breaker, 130.0), 135.0, waited=5.0)
    assert OPEN == breaker.state(135.0)


def test_a_lost_probe_cannot_jam_it() -> None:
    breaker = half_open(lease=20.0)
    lost = probe(breaker, 130.0)
    assert breaker.admit(149.9) is None
    assert breaker.admit(150.0) is not None
    breaker.record(lost, False, 151.0)
    assert HALF_OPEN == breaker.state(151.0), "its place was given to another"


def test_a_probe_that_ends_after_its_lease_is_ignored_even_if_nobody_took_its_place() -> None:
    breaker = half_open(lease=20.0)
    late = probe(breaker, 130.0)
    breaker.record(late, False, 150.0)
    assert HALF_OPEN == breaker.state(150.0)


def test_a_lease_that_ran_out_leaves_the_other_probes_alone() -> None:
    breaker = half_open(lease=20.0, half_open_probes=2)
    probe(breaker, 130.0)
    second = probe(breaker, 140.0)
    assert 1 == breaker.snapshot(155.0).probes
    breaker.record(second, False, 155.0)
    assert OPEN == breaker.state(155.0)


def test_a_probe_counts_once() -> None:
    breaker = half_open()
    once = probe(breaker, 130.0)
    breaker.record(once, True, 131.0)
    breaker.record(once, True, 131.0)
    breaker.abandon(once, 131.0)
    assert HALF_OPEN == breaker.state(131.0)


def test_results_of_probes_that_end_after_it_closed_are_ignored() -> None:
    breaker = half_open(half_open_probes=2, success_threshold=1)
    first, second = probe(breaker, 130.0), probe(breaker, 130.0)
    breaker.record(first, True, 131.0)
    breaker.record(second, False, 132.0)
    shown = breaker.snapshot(132.0)
    assert (CLOSED, 0) == (shown.state, shown.failure_count)


def test_each_state_has_a_generation_of_its_own() -> None:
    breaker = half_open(success_threshold=1)
    first = breaker.snapshot(130.0).generation
    breaker.record(probe(breaker, 130.0), True, 131.0)
    assert first + 1 == breaker.snapshot(131.0).generation
    assert first + 1 == probe(breaker, 131.0).generation


def test_the_reasons_for_closing_and_opening_again_are_told() -> None:
    told: list[str] = []
    breaker = Breaker(LONG, lambda before, after, at, why: told.append(f"{before} > {after}: {why}"))
    for _ in range(5):
        breaker.record(probe(breaker, 0.0), False, 0.0)
    breaker.record(probe(breaker, 30.0), False, 30.0)
    breaker.record(probe(breaker, 90.0), True, 90.0)
    breaker.record(probe(breaker, 90.0), True, 90.0)
    assert [
        "closed > open: 5 calls in a row failed",
        "open > half_open: 30 s have passed, probes may go",
        "half_open > open: a probe failed",
        "open > half_open: 60 s have passed, probes may go",
        "half_open > closed: 2 probes succeeded",
    ] == told
