"""How long to wait before the next attempt, and whether that fits."""

import pytest

from config.policy import Policy
from sidecar.policy import deadline
from sidecar.policy.backoff import delay, effective_delay, raw_delay


def lowest(low: float, high: float) -> float:
    return low


def highest(low: float, high: float) -> float:
    return high


def halfway(low: float, high: float) -> float:
    return (low + high) / 2


def policy(**changes: object) -> Policy:
    return Policy.model_validate({"jitter_type": "none", "base_delay": 1.0, "max_delay": 100.0, **changes})


def waits(policy: Policy, count: int = 5) -> list[float]:
    return [delay(policy, failures, 0.0, halfway) for failures in range(1, count + 1)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("exponential", [1.0, 3.0, 9.0, 27.0, 81.0]),
        ("linear", [1.0, 2.0, 3.0, 4.0, 5.0]),
        ("fixed", [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("immediate", [0.0, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_each_backoff_grows_its_own_way(kind: str, expected: list[float]) -> None:
    assert expected == waits(policy(backoff_type=kind, multiplier=3.0))


def test_growth_ends_at_the_longest_delay() -> None:
    assert [1.0, 2.0, 4.0, 5.0, 5.0] == waits(policy(max_delay=5.0))
    assert [1.0, 2.0, 2.5, 2.5, 2.5] == waits(policy(backoff_type="linear", max_delay=2.5))


def test_growth_beyond_every_number_is_the_longest_delay() -> None:
    assert 100.0 == raw_delay(policy(multiplier=100.0), 10_000)


def test_no_base_delay_is_no_delay_however_often_it_failed() -> None:
    assert 0.0 == raw_delay(policy(base_delay=0.0, multiplier=100.0), 10_000)


@pytest.mark.parametrize(
    ("kind", "amount", "low", "high"),
    [
        ("none", 1.0, 4.0, 4.0),
        ("full", 1.0, 0.0, 4.0),
        ("full", 0.5, 2.0, 4.0),
        ("full", 0.0, 4.0, 4.0),
        ("equal", 1.0, 2.0, 4.0),
        ("equal", 0.5, 3.0, 4.0),
    ],
)
def test_jitter_makes_its_share_of_the_delay_random(kind: str, amount: float, low: float, high: float) -> None:
    spread = policy(jitter_type=kind, jitter_amount=amount)
    assert (low, high) == (delay(spread, 3, 0.0, lowest), delay(spread, 3, 0.0, highest))


def test_full_jitter_is_spread_below_the_cap_not_cut_by_it() -> None:
    assert 2.5 == delay(policy(jitter_type="full", max_delay=5.0), 9, 0.0, halfway)


def test_additive_jitter_comes_on_top() -> None:
    added = policy(backoff_type="fixed", jitter_type="additive", jitter_min=0.5, jitter_max=2.0)
    assert (1.5, 3.0) == (delay(added, 4, 0.0, lowest), delay(added, 4, 0.0, highest))


def test_jitter_may_be_a_factor_of_the_wait() -> None:
    half_to_half_more = policy(jitter_type="factor", jitter_min=0.5, jitter_max=1.5)
    assert (0.5, 1.0, 1.5) == tuple(delay(half_to_half_more, 1, 0.0, chance) for chance in (lowest, halfway, highest))
    tenth_more = policy(jitter_type="factor", jitter_min=1.0, jitter_max=1.1)
    assert (4.0, pytest.approx(4.4)) == (delay(tenth_more, 3, 0.0, lowest), delay(tenth_more, 3, 0.0, highest))
    assert 3.0 == delay(policy(jitter_type="factor", jitter_min=1.5, jitter_max=1.5, max_delay=3.0), 9, 0.0, highest)


def test_the_cap_holds_after_additive_jitter() -> None:
    added = policy(jitter_type="additive", jitter_min=5.0, jitter_max=5.0, max_delay=4.0)
    assert 4.0 == delay(added, 1, 0.0, highest)


def test_decorrelated_jitter_is_drawn_between_the_base_and_three_times_the_last_delay() -> None:
    loose = policy(jitter_type="decorrelated")
    assert (1.0, 12.0) == (delay(loose, 2, 4.0, lowest), delay(loose, 2, 4.0, highest))
    assert (1.0, 3.0) == (delay(loose, 1, 0.0, lowest), delay(loose, 1, 0.0, highest)), "the base stands in for it"


def test_decorrelated_jitter_never_draws_from_an_empty_range() -> None:
    assert 1.0 == delay(policy(jitter_type="decorrelated"), 2, 0.1, highest)


def test_decorrelated_jitter_is_capped() -> None:
    assert 6.0 == delay(policy(jitter_type="decorrelated", max_delay=6.0), 5, 50.0, highest)


def test_immediate_stays_immediate_with_decorrelated_jitter() -> None:
    assert 0.0 == delay(policy(backoff_type="immediate", jitter_type="decorrelated"), 3, 5.0, highest)


def test_no_delay_is_shorter_than_the_shortest() -> None:
    assert 0.25 == delay(policy(jitter_type="full", min_delay=0.25), 1, 0.0, lowest)
    assert 0.25 == delay(policy(backoff_type="immediate", min_delay=0.25), 1, 0.0, lowest)


@pytest.mark.parametrize(
    ("backoff", "retry_after", "expected"),
    [(1.0, None, 1.0), (1.0, 5.0, 5.0), (7.0, 5.0, 7.0), (1.0, 9999.0, 300.0), (1.0, 0.0, 1.0), (400.0, 350.0, 400.0)],
)
def test_retry_after_makes_a_delay_longer_up_to_the_ceiling_and_never_shorter(
    backoff: float, retry_after: float | None, expected: float
) -> None:
    assert expected == effective_delay(policy(), backoff, retry_after)


def test_retry_after_can_be_ignored() -> None:
    assert 1.0 == effective_delay(policy(respect_retry_after=False), 1.0, 5.0)


def test_retry_after_may_exceed_the_longest_backoff() -> None:
    assert 200.0 == effective_delay(policy(max_delay=10.0), 10.0, 200.0)


def test_a_delay_fits_when_there_is_time_left_for_an_attempt_after_it() -> None:
    assert deadline.fits(5.0, 100.0, 106.0)
    assert not deadline.fits(5.0, 100.0, 105.0)
    assert not deadline.fits(0.0, 100.0, 99.0)


def test_the_time_left_is_never_negative() -> None:
    assert 5.0 == deadline.left(100.0, 105.0)
    assert 0.0 == deadline.left(110.0, 105.0)
