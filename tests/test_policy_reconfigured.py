"""State machines that get other settings while they are in use: nothing that was counted, held or ordered is lost."""

from __future__ import annotations

from config.breaker import RateLimitGate
from config.breaker import RetryBudget as BudgetSettings
from config.model import Breaker as BreakerSettings
from sidecar.policy.breaker import Breaker
from sidecar.policy.budget import RetryBudget
from sidecar.policy.concurrency import Bulkhead
from sidecar.policy.gate import Gate
from sidecar.policy.stages import StageBudgets


def test_an_open_breaker_stays_open_and_a_permit_given_out_before_still_counts() -> None:
    breaker = Breaker(BreakerSettings(failure_threshold=2))
    permit = breaker.admit(0.0)
    assert permit is not None
    breaker.record(permit, False, 0.0)
    breaker.configure(BreakerSettings(failure_threshold=3))
    breaker.record(permit, False, 1.0)
    assert "closed" == breaker.state(1.0)
    breaker.record(permit, False, 2.0)
    assert "open" == breaker.state(2.0)
    breaker.configure(BreakerSettings(open_for=1.0))
    assert 10.0 == breaker.retry_in(2.0)  # the time it was opened for


def test_a_breaker_counts_anew_only_over_another_window() -> None:
    breaker = Breaker(BreakerSettings())
    permit = breaker.admit(0.0)
    assert permit is not None
    breaker.record(permit, False, 0.0)
    breaker.configure(BreakerSettings(min_volume=5))
    assert 1 == breaker.snapshot(0.0).failure_count
    breaker.configure(BreakerSettings(window=10.0))
    assert (0, 1) == (breaker.snapshot(0.0).failure_count, breaker.snapshot(0.0).consecutive_failures)


def test_a_budget_remembers_what_was_spent() -> None:
    budget = RetryBudget(BudgetSettings(ratio=0.0, min_per_second=1.0, window=2.0))
    assert [True, True, False] == [budget.try_charge(0.0) for _ in range(3)]
    budget.configure(BudgetSettings(ratio=0.0, min_per_second=2.0, window=2.0))
    assert [True, True, False] == [budget.try_charge(0.0) for _ in range(3)]


def test_a_raised_limit_lets_in_those_who_waited_in_their_order() -> None:
    bulkhead = Bulkhead(1, 10)
    bulkhead.enter()
    waiting = [bulkhead.enter() for _ in range(3)]
    assert waiting[:2] == bulkhead.configure(3, 10)
    assert (3, 1) == (bulkhead.in_flight, bulkhead.waiting)


def test_a_lowered_limit_lets_nobody_in_before_enough_have_left() -> None:
    bulkhead = Bulkhead(3, 10)
    inside = [bulkhead.enter() for _ in range(3)]
    waiting = bulkhead.enter()
    assert [] == bulkhead.configure(1, 10)
    first, second, third = inside
    assert first is not None and second is not None and third is not None
    assert [None, None] == [bulkhead.leave(first), bulkhead.leave(second)]
    assert waiting is bulkhead.leave(third)
    assert (1, 0) == (bulkhead.in_flight, bulkhead.waiting)


def test_a_gate_that_is_switched_off_lets_everybody_go() -> None:
    gate = Gate(RateLimitGate())
    gate.pause(b"key", 100.0, 0.0)
    ticket = gate.enter(b"key")
    assert [] == gate.release(1.0)
    gate.configure(RateLimitGate(max_queue=5))
    assert [] == gate.release(1.0)
    gate.configure(RateLimitGate(enabled=False))
    assert ([ticket], None) == (gate.release(1.0), gate.closed_until(b"key", 1.0))


def test_stages_keep_their_counts_under_other_limits() -> None:
    stages = StageBudgets({"fetch": 2}, 100.0, 10)
    for number in range(6):
        stages.attempt(f"w{number}", "fetch", 0.0)
    stages.configure({"fetch": 9}, 100.0, 3)
    assert (1, 9) == (stages.made("w5", "fetch", 1.0), stages.limit("fetch"))
    stages.attempt("w6", "fetch", 1.0)
    assert 3 == len(stages)
