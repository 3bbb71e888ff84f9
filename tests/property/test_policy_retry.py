"""Whatever fails in whatever order, a session ends, and within its bounds."""

from hypothesis import given
from hypothesis import strategies as st

from config.breaker import RetryBudget as BudgetSettings
from config.errors import registry
from config.policy import Policy
from sidecar.policy.budget import RetryBudget
from sidecar.policy.choice import Chosen
from sidecar.policy.resend import IDEMPOTENT
from sidecar.policy.retry import Failure, Situation, Terms, decide
from sidecar.policy.stages import StageBudgets
from telemetry.record import CONNECTED, FATAL, SUPPRESSED
from tests.property import calm

codes = sorted(registry())
failures = st.builds(
    Failure,
    st.sampled_from(codes),
    status=st.sampled_from([0, 200, 400, 409, 425, 429, 500, 503]),
    phase=st.sampled_from([0, 1, 2, 3, 7]),
    verdict=st.sampled_from([None, None, True, False]),
    retry_after=st.none() | st.floats(min_value=0.0, max_value=1e6),
    momentary=st.booleans(),
)
policies = st.builds(
    lambda attempts, base, cap, ceiling, jitter: Policy(
        max_attempts=attempts, base_delay=min(base, cap), max_delay=cap, retry_after_ceiling=ceiling, jitter_type=jitter
    ),
    st.integers(1, 10),
    st.floats(0.0, 5.0),
    st.floats(0.0, 20.0),
    st.floats(0.0, 100.0),
    st.sampled_from(["none", "full", "equal", "decorrelated"]),
)


@calm
@given(
    st.lists(st.tuples(failures, policies, st.floats(0.0, 5.0), st.floats(0.0, 1.0)), min_size=1, max_size=15),
    st.sampled_from(["GET", "POST", "PUT", "PATCH"]),
    st.booleans(),
    st.integers(1, 6),
    st.integers(0, 20),
    st.floats(min_value=0.1, max_value=120.0),
)
def test_no_session_makes_more_attempts_than_policy_stage_and_budget_allow_or_outlives_its_deadline(
    story: list[tuple[Failure, Policy, float, float]],
    method: str,
    keyed: bool,
    stage_limit: int,
    allowed: int,
    seconds: float,
) -> None:
    budget = RetryBudget(BudgetSettings(ratio=0.0, window=1000.0, min_per_second=allowed / 1000.0))
    stages = StageBudgets({"fetch": stage_limit}, 3600.0, 10)
    now = 0.0
    at = Situation(method, Chosen("default", Policy()), seconds)
    at.keyed, at.stage, at.workflow = keyed, "fetch", "w"
    stages.attempt("w", "fetch", now)
    for retries, (failure, policy, took, luck) in enumerate(story, 1):
        now += took
        terms = Terms(registry(), lambda low, high, luck=luck: low + (high - low) * luck, budget, stages)  # type: ignore[misc]
        made = decide(failure, at, Chosen("p", policy), terms, now)
        if made.delay is None:
            assert made.reason in (*SUPPRESSED, FATAL)
            return
        assert failure.code == made.reason
        assert 0.0 <= made.delay <= max(policy.max_delay, policy.retry_after_ceiling)
        assert now + made.delay < seconds
        assert failure.verdict is not False
        safe = failure.phase in (0, CONNECTED) or failure.not_executed or method in IDEMPOTENT or keyed
        assert safe, "what may have been executed was sent again"
        now += made.delay
        at.attempts += 1
        at.previous_delay = made.delay
        stages.attempt("w", "fetch", now)
        assert at.attempts <= min(policy.max_attempts, stage_limit)
        assert retries <= allowed
