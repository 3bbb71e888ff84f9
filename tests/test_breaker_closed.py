"""A closed breaker: everything passes, and what is counted may open it."""

import pytest

from config.breaker import Breaker as Settings
from config.errors import registry
from sidecar.policy.breaker import CLOSED, OPEN, Breaker, Permit, counts, failure_codes


def call(breaker: Breaker, now: float, *, ok: bool) -> None:
    permit = breaker.admit(now)
    assert permit is not None
    breaker.record(permit, ok, now)


def calls(breaker: Breaker, pattern: str, now: float = 1.0) -> None:
    """`+` succeeds, `-` fails."""
    for sign in pattern:
        call(breaker, now, ok=sign == "+")


def test_a_new_breaker_is_closed_and_lets_everything_pass() -> None:
    breaker = Breaker(Settings())
    assert CLOSED == breaker.state(0.0)
    assert breaker.admit(0.0) is not None
    assert 0.0 == breaker.retry_in(0.0)


def test_everyone_gets_the_same_permit() -> None:
    breaker = Breaker(Settings())
    assert breaker.admit(1.0) is breaker.admit(2.0)


def test_a_dead_endpoint_opens_it_after_five_calls() -> None:
    breaker = Breaker(Settings())
    calls(breaker, "----")
    assert CLOSED == breaker.state(1.0)
    calls(breaker, "-")
    assert OPEN == breaker.state(1.0)


def test_a_flaky_endpoint_does_not_open_it() -> None:
    breaker = Breaker(Settings())
    calls(breaker, "++++++++++++-----+++++++++++++-----")
    assert CLOSED == breaker.state(1.0), "five in a row, but less than half of all"


def test_failures_in_a_row_open_it_once_they_are_over_half_of_all() -> None:
    breaker = Breaker(Settings())
    calls(breaker, "+++++" + "-----")
    assert CLOSED == breaker.state(1.0), "half is not over half"
    calls(breaker, "-")
    assert OPEN == breaker.state(1.0)


def test_a_success_ends_the_run_of_failures() -> None:
    breaker = Breaker(Settings())
    calls(breaker, "----+----")
    assert CLOSED == breaker.state(1.0)


def test_the_share_of_failures_opens_it_with_enough_calls() -> None:
    breaker = Breaker(Settings(failure_ratio=0.5, min_volume=20, failure_threshold=100))
    calls(breaker, "+-" * 9 + "-")
    assert CLOSED == breaker.state(1.0), "nineteen calls are not enough"
    calls(breaker, "-")
    assert OPEN == breaker.state(1.0)


def test_exactly_the_share_is_enough() -> None:
    breaker = Breaker(Settings(failure_ratio=0.5, min_volume=4, failure_threshold=100))
    calls(breaker, "++--")
    assert OPEN == breaker.state(1.0)


def test_a_success_never_opens_it() -> None:
    breaker = Breaker(Settings(failure_ratio=0.5, min_volume=4, failure_threshold=100))
    calls(breaker, "--++")
    assert CLOSED == breaker.state(1.0)


def test_nothing_but_failures_is_over_every_share() -> None:
    breaker = Breaker(Settings(failure_ratio=1.0, min_volume=100))
    calls(breaker, "-----")
    assert OPEN == breaker.state(1.0)


def test_failures_that_left_the_window_do_not_count() -> None:
    breaker = Breaker(Settings(window=60.0, min_volume=4, failure_threshold=100))
    calls(breaker, "---", now=1.0)
    calls(breaker, "-", now=61.0)
    assert CLOSED == breaker.state(61.0)
    assert 1 == breaker.snapshot(61.0).failure_count


def test_a_disabled_breaker_counts_and_never_opens() -> None:
    breaker = Breaker(Settings(enabled=False))
    calls(breaker, "-" * 50)
    assert CLOSED == breaker.state(1.0)
    assert 50 == breaker.snapshot(1.0).failure_count


def test_abandoned_calls_count_as_nothing() -> None:
    breaker = Breaker(Settings())
    calls(breaker, "----")
    for _ in range(10):
        permit = breaker.admit(1.0)
        assert permit is not None
        breaker.abandon(permit, 1.0)
    assert (CLOSED, 4) == (breaker.state(1.0), breaker.snapshot(1.0).failure_count)


@pytest.mark.parametrize(("waited", "failures"), [(None, 0), (1.9, 0), (2.0, 1), (60.0, 1)])
def test_a_call_the_app_gave_up_on_counts_as_a_failure_when_it_waited_long(waited: float | None, failures: int) -> None:
    breaker = Breaker(Settings(slow_after=2.0))
    permit = breaker.admit(1.0)
    assert permit is not None
    breaker.abandon(permit, 5.0, waited=waited)
    assert failures == breaker.snapshot(5.0).failure_count


def test_without_slow_after_a_call_the_app_gave_up_on_never_counts() -> None:
    breaker = Breaker(Settings())
    permit = breaker.admit(1.0)
    assert permit is not None
    breaker.abandon(permit, 500.0, waited=499.0)
    assert 0 == breaker.snapshot(500.0).failure_count


def test_the_reason_for_opening_is_told() -> None:
    told: list[tuple[str, str, float, str]] = []
    breaker = Breaker(Settings(), lambda *change: told.append(change))
    calls(breaker, "-----", now=3.0)
    assert [(CLOSED, OPEN, 3.0, "5 calls in a row failed")] == told


def test_the_share_as_a_reason_names_calls_and_window() -> None:
    told: list[tuple[str, str, float, str]] = []
    breaker = Breaker(Settings(min_volume=4, failure_threshold=100), lambda *change: told.append(change))
    calls(breaker, "+---", now=3.0)
    assert [(CLOSED, OPEN, 3.0, "3 of 4 calls failed within 60 s")] == told


def test_what_there_is_to_show_of_a_closed_breaker() -> None:
    breaker = Breaker(Settings())
    calls(breaker, "+", now=1.0)
    calls(breaker, "+--", now=2.0)
    shown = breaker.snapshot(3.0)
    assert (CLOSED, 2, 2, 2, 0.5) == shown[:5]
    assert 2.0 == shown.last_failure_at
    assert (None, None, None) == (shown.opened_at, shown.next_probe_at, shown.changed_at)
    assert 0.5 == breaker.failure_ratio(3.0)


FAILURES = failure_codes(registry())


def test_the_codes_that_speak_against_an_endpoint() -> None:
    assert {
        *("DNS_FAILURE", "CONNECTION_REFUSED", "CONNECT_TIMEOUT"),
        *("CONNECTION_RESET", "NETWORK_TIMEOUT", "PROTOCOL_ERROR"),
        *("EXTERNAL_SERVICE_TIMEOUT", "BAD_GATEWAY", "TEMPORARY_UNAVAILABLE", "UPSTREAM_ERROR"),
        *("SERVICE_OVERLOADED", "DATABASE_CONNECTION_ERROR"),
    } == FAILURES


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (None, 200, True),
        ("UPSTREAM_ERROR", 500, False),
        ("CONNECTION_RESET", 0, False),
        ("DATABASE_CONNECTION_ERROR", 200, False),
        ("EXTERNAL_SERVICE_TIMEOUT", 504, False),
        ("EXTERNAL_SERVICE_TIMEOUT", 408, None),
        ("RATE_LIMIT_EXCEEDED", 429, None),
        ("QUOTA_EXCEEDED", 429, None),
        ("NOT_FOUND", 404, None),
        ("CONFLICT", 409, None),
        ("CLIENT_DISCONNECTED", 0, None),
        ("TLS_FAILURE", 0, None),
        ("CIRCUIT_OPEN", 0, None),
        ("NOT_IN_THE_REGISTRY", 0, None),
    ],
)
def test_what_an_ended_attempt_says_about_its_endpoint(code: str | None, status: int, expected: bool | None) -> None:
    assert expected is counts(code, status, FAILURES)


def test_all_attempts_of_one_request_are_one_failure() -> None:
    breaker = Breaker(Settings())
    blamed: list[Permit] = []
    for now in (1.0, 2.0, 3.0, 4.0):
        permit = breaker.admit(now)
        assert permit is not None
        breaker.record(permit, False, now, blamed)
    seen = breaker.snapshot(4.0)
    assert (1, 1, 4.0) == (seen.failure_count, seen.consecutive_failures, seen.last_failure_at)


def test_a_request_that_succeeds_in_the_end_takes_its_failure_back() -> None:
    breaker = Breaker(Settings())
    blamed: list[Permit] = []
    for ok in (False, False, True):
        permit = breaker.admit(1.0)
        assert permit is not None
        breaker.record(permit, ok, 1.0, blamed)
    seen = breaker.snapshot(1.0)
    assert (0, 1, 0) == (seen.failure_count, seen.success_count, seen.consecutive_failures)


def test_a_failure_of_an_earlier_generation_is_not_taken_back_from_this_one() -> None:
    breaker = Breaker(Settings())
    blamed: list[Permit] = []
    permit = breaker.admit(1.0)
    assert permit is not None
    breaker.record(permit, False, 1.0, blamed)
    breaker.reset(2.0)
    other = breaker.admit(3.0)
    assert other is not None
    breaker.record(other, False, 3.0)
    breaker.record(other, True, 4.0, blamed)
    assert (1, 1) == (breaker.snapshot(4.0).failure_count, breaker.snapshot(4.0).success_count)


def test_many_in_a_row_open_it_whatever_the_window_says() -> None:
    breaker = Breaker(Settings())
    for now in range(50 * 50):
        permit = breaker.admit(now / 50)
        assert permit is not None
        breaker.record(permit, True, now / 50)
    for failure in range(1, 21):
        permit = breaker.admit(50.0)
        assert permit is not None
        breaker.record(permit, False, 50.0)
        assert ("open" if failure == 20 else "closed") == breaker.state(50.0)
