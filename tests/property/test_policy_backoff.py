"""No delay leaves its bounds, whatever the policy, the chance and the upstream say."""

import math

from hypothesis import given
from hypothesis import strategies as st

from config.policy import Policy
from sidecar.policy.backoff import delay, effective_delay
from tests.property import calm

seconds = st.floats(min_value=0.0, max_value=1e300)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    low, base, high = sorted(draw(st.tuples(seconds, seconds, seconds)))
    least, most = sorted(draw(st.tuples(seconds, seconds)))
    return Policy(
        backoff_type=draw(st.sampled_from(["exponential", "linear", "fixed", "immediate"])),
        jitter_type=draw(st.sampled_from(["none", "full", "equal", "decorrelated", "additive"])),
        base_delay=base,
        min_delay=low,
        max_delay=high,
        multiplier=draw(st.floats(min_value=1.0, max_value=100.0)),
        jitter_amount=draw(st.floats(min_value=0.0, max_value=1.0)),
        jitter_min=least,
        jitter_max=most,
        retry_after_ceiling=draw(seconds),
    )


shares = st.floats(min_value=0.0, max_value=1.0)


@calm
@given(policies(), st.lists(shares, min_size=1, max_size=12))
def test_a_delay_lies_between_the_shortest_and_the_longest(policy: Policy, luck: list[float]) -> None:
    wait = 0.0
    for failures, share in enumerate(luck, 1):
        wait = delay(policy, failures, wait, lambda low, high, share=share: low + (high - low) * share)  # type: ignore[misc]
        assert policy.min_delay <= wait <= policy.max_delay
        assert math.isfinite(wait)


@calm
@given(policies(), seconds, st.none() | st.floats(min_value=0.0, allow_nan=False))
def test_the_effective_delay_is_at_least_the_backoff_and_no_longer_than_the_ceiling_makes_it(
    policy: Policy, backoff: float, retry_after: float | None
) -> None:
    wait = effective_delay(policy, backoff, retry_after)
    assert backoff <= wait <= max(backoff, policy.retry_after_ceiling)
