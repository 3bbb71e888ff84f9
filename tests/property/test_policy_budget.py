"""Whatever happens, the budget is not overspent."""

from hypothesis import given
from hypothesis import strategies as st

from config.breaker import RetryBudget as Settings
from sidecar.policy.budget import RetryBudget
from sidecar.policy.window import TICKS
from tests.property import calm


@calm
@given(
    st.floats(min_value=0.0, max_value=1.0),
    st.floats(min_value=0.1, max_value=60.0),
    st.floats(min_value=0.0, max_value=10.0),
    st.lists(st.tuples(st.floats(min_value=0.0, max_value=3.0), st.booleans()), max_size=300),
)
def test_no_window_holds_more_retries_than_were_allowed_when_the_last_was_charged(
    ratio: float, window: float, floor: float, steps: list[tuple[float, bool]]
) -> None:
    budget = RetryBudget(Settings(ratio=ratio, window=window, min_per_second=floor))
    now, requests, retries = 0.0, [], []

    def within(moments: list[float]) -> int:
        tick = TICKS / window
        return sum(now * tick // 1 - moment * tick // 1 < TICKS for moment in moments)

    for gap, is_request in steps:
        now += gap
        if is_request:
            budget.request(now)
            requests.append(now)
            continue
        allowed = max(ratio * within(requests), floor * window)
        if budget.try_charge(now):
            retries.append(now)
            assert within(retries) <= allowed + 1e-6
        else:
            assert within(retries) + 1 > allowed - 1e-6
        assert 0.0 <= budget.remaining(now) <= 1.0
