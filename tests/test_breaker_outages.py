"""Outages as an app lives them, on the pure breaker with the default settings: an upstream dies, comes back, is flaky,
or alternates. Fifty requests a second, each with up to four attempts; the same is measured live by
benchmarks/outages.py."""

import random
from collections.abc import Callable

from config.breaker import Breaker as Settings
from sidecar.policy.breaker import CLOSED, HALF_OPEN, OPEN, Breaker, Permit

RATE = 50
ATTEMPTS = 4
SETTINGS = Settings()
Answers = Callable[[], bool]


def request(breaker: Breaker, now: float, answers: Answers, *, connected: bool = True) -> str:
    """One request with its retries: good, failed or refused."""
    blamed: list[Permit] = []
    for _ in range(ATTEMPTS):
        permit = breaker.admit(now)
        if permit is None:
            return "failed" if blamed else "refused"
        ok = answers()
        breaker.record(permit, ok, now, blamed, connected=connected or ok)
        if ok:
            return "good"
    return "failed"


def healthy_minute(breaker: Breaker) -> float:
    for number in range(60 * RATE):
        assert "good" == request(breaker, number / RATE, lambda: True)
    return 60.0


def until_open(breaker: Breaker, now: float, *, connected: bool) -> tuple[int, float]:
    """How many requests failed until it opened, and when that was."""
    failures = 0
    while breaker.state(now) != OPEN:
        failures += request(breaker, now, lambda: False, connected=connected) == "failed"
        assert failures <= 40
        now += 1 / RATE
    return failures, now


def test_an_upstream_that_dies_after_a_healthy_minute_costs_at_most_forty_requests() -> None:
    for connected in (False, True):
        breaker = Breaker(SETTINGS)
        failures, _ = until_open(breaker, healthy_minute(breaker), connected=connected)
        assert 1 <= failures <= 40


def test_one_that_could_not_be_connected_to_is_asked_within_a_second_of_its_return() -> None:
    breaker = Breaker(SETTINGS)
    _, now = until_open(breaker, healthy_minute(breaker), connected=False)
    back = now + 47.3
    while now < back:  # a bare connect each second fails; live requests are refused, probes fail
        assert breaker.awaits_connection(now) or breaker.state(now) == HALF_OPEN
        request(breaker, now, lambda: False, connected=False)
        now += 1.0
    breaker.connected(now)
    assert "good" == request(breaker, now, lambda: True)
    assert now - back <= 3.0


def test_one_that_went_on_listening_is_asked_again_within_open_for_max() -> None:
    for down in (5.0, 30.0, 90.0, 600.0):
        breaker = Breaker(SETTINGS)
        _, now = until_open(breaker, healthy_minute(breaker), connected=True)
        back = now + down
        while now < back:
            request(breaker, now, lambda: False)
            now += 1 / RATE
        while request(breaker, now, lambda: True) != "good":
            now += 1 / RATE
        assert now - back <= SETTINGS.open_for_max


def test_thirty_percent_of_random_failures_for_ten_minutes_never_open_it() -> None:
    chance = random.Random(7)
    breaker = Breaker(SETTINGS)
    for number in range(600 * RATE):
        now = number / RATE
        assert "refused" != request(breaker, now, lambda: chance.random() >= 0.3)
        assert CLOSED == breaker.state(now)


def test_an_upstream_that_fails_every_other_time_is_never_refused_while_retries_heal_it() -> None:
    breaker = Breaker(SETTINGS)
    turns = 0

    def every_other() -> bool:
        nonlocal turns
        turns += 1
        return turns % 2 == 0

    assert {"good"} == {request(breaker, number / RATE, every_other) for number in range(300)}
