"""The retry budget of an upstream."""

from config.breaker import RetryBudget as Settings
from sidecar.policy.budget import RetryBudget


def charges(budget: RetryBudget, now: float, tries: int) -> int:
    return sum(budget.try_charge(now) for _ in range(tries))


def test_a_fifth_of_the_requests_may_be_retried() -> None:
    budget = RetryBudget(Settings(ratio=0.2, window=10.0, min_per_second=0.0))
    for _ in range(100):
        budget.request(1.0)
    assert 20 == charges(budget, 1.0, 50)


def test_without_traffic_the_floor_holds() -> None:
    budget = RetryBudget(Settings(ratio=0.2, window=10.0, min_per_second=3.0))
    assert 30 == charges(budget, 1.0, 50)


def test_the_floor_is_not_on_top_of_the_ratio() -> None:
    budget = RetryBudget(Settings(ratio=0.2, window=10.0, min_per_second=3.0))
    for _ in range(200):
        budget.request(1.0)
    assert 40 == charges(budget, 1.0, 100)


def test_what_was_charged_comes_back_when_the_window_has_passed() -> None:
    budget = RetryBudget(Settings(ratio=0.0, window=10.0, min_per_second=0.1))
    assert budget.try_charge(1.0)
    assert not budget.try_charge(10.9)
    assert budget.try_charge(11.0)


def test_requests_that_left_the_window_pay_for_nothing() -> None:
    budget = RetryBudget(Settings(ratio=0.5, window=10.0, min_per_second=0.0))
    for _ in range(10):
        budget.request(1.0)
    assert 5 == budget.allowance(10.9)
    assert 0 == budget.allowance(11.0)


def test_a_refused_retry_is_not_charged() -> None:
    budget = RetryBudget(Settings(ratio=0.1, window=10.0, min_per_second=0.0))
    assert not budget.try_charge(1.0)
    for _ in range(10):
        budget.request(1.0)
    assert budget.try_charge(1.0)


def test_what_remains_is_a_share_between_0_and_1() -> None:
    budget = RetryBudget(Settings(ratio=0.2, window=10.0, min_per_second=1.0))
    assert 1.0 == budget.remaining(1.0)
    charges(budget, 1.0, 5)
    assert 0.5 == budget.remaining(1.0)
    charges(budget, 1.0, 50)
    assert 0.0 == budget.remaining(1.0)


def test_a_budget_of_nothing_has_nothing_left() -> None:
    budget = RetryBudget(Settings(ratio=0.0, window=10.0, min_per_second=0.0))
    assert 0.0 == budget.remaining(1.0)
    assert not budget.try_charge(1.0)


def test_less_traffic_does_not_make_the_rest_negative() -> None:
    budget = RetryBudget(Settings(ratio=0.5, window=10.0, min_per_second=0.1))
    for _ in range(10):
        budget.request(1.0)
    assert 5 == charges(budget, 9.0, 9)
    assert 0.0 == budget.remaining(12.0), "five charged, and one allowed now that the requests are gone"


def test_an_allowance_does_not_hang_on_the_last_bit_of_a_product() -> None:
    budget = RetryBudget(Settings(ratio=0.29, window=10.0, min_per_second=0.0))
    for _ in range(100):
        budget.request(1.0)
    assert 29 == budget.allowance(1.0)
