"""Try again or stop: every reason, and the order in which they are asked."""

from dataclasses import replace

import pytest

from config.breaker import RetryBudget as BudgetSettings
from config.errors import registry
from config.operations import Operation
from config.policy import Policy
from sidecar.policy.budget import RetryBudget
from sidecar.policy.choice import Chosen
from sidecar.policy.overrides import Overrides
from sidecar.policy.resend import APP_KEY, INJECTED_KEY
from sidecar.policy.retry import Failure, Situation, Terms, decide, resendable
from sidecar.policy.stages import StageBudgets
from telemetry.record import CONNECTED, FATAL, SENT, SUPPRESSED, Decision

NOW = 1000.0
PLAIN = {"jitter_type": "none", "base_delay": 1.0, "max_delay": 100.0}


def chosen(name: str = "default", **changes: object) -> Chosen:
    return Chosen(name, Policy.model_validate({**PLAIN, **changes}))


def terms(retries: float = 100.0) -> Terms:
    budget = RetryBudget(BudgetSettings(ratio=0.0, window=10.0, min_per_second=retries / 10.0))
    return Terms(registry(), lambda low, high: high, budget, StageBudgets({"fetch": 3}, 3600.0, 100))


def situation(method: str = "GET", *, max_attempts: int | None = None, **changes: object) -> Situation:
    overrides = Overrides()
    overrides.max_attempts = max_attempts
    made = Situation(method, chosen(), NOW + 60.0, overrides)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def failed(code: str = "UPSTREAM_ERROR", status: int = 500, **more: object) -> Failure:
    return Failure(code, status=status, **more)  # type: ignore[arg-type]


def decided(
    failure: Failure | None = None,
    at: Situation | None = None,
    policy: Chosen | None = None,
    bound: Terms | None = None,
) -> Decision:
    return decide(failure or failed(), at or situation(), policy or chosen(), bound or terms(), NOW)


# ---- yes -------------------------------------------------------------------------------------------------------------


def test_a_failure_that_may_pass_is_tried_again_after_the_backoff() -> None:
    assert (
        Decision(1.0, "UPSTREAM_ERROR", "policies.default: attempt 2 of 4", "", 4, "the method is idempotent")
        == decided()
    )
    assert 4.0 == decided(at=situation(attempts=3)).delay


def test_the_delay_is_the_longer_of_backoff_and_retry_after() -> None:
    asked = decided(failed("RATE_LIMIT_EXCEEDED", 429, retry_after=7.0))
    assert (7.0, "policies.default: attempt 2 of 4, Retry-After of 7 s") == (asked.delay, asked.rule)
    assert 1.0 == decided(failed("RATE_LIMIT_EXCEEDED", 429, retry_after=0.2)).delay
    assert 20.0 == decided(failed(retry_after=50.0), policy=chosen(retry_after_ceiling=20.0)).delay


def test_decorrelated_jitter_is_told_the_delay_before() -> None:
    loose = chosen(jitter_type="decorrelated")
    assert 12.0 == decided(at=situation(attempts=2, previous_delay=4.0), policy=loose).delay


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_sent_is_tried_again_with_every_method(method: str) -> None:
    assert decided(failed("CONNECTION_REFUSED", 0, phase=CONNECTED), situation(method)).delay is not None


@pytest.mark.parametrize("code", ["RATE_LIMIT_EXCEEDED", "QUOTA_EXCEEDED"])
def test_what_was_not_executed_is_tried_again_with_every_method(code: str) -> None:
    assert decided(failed(code, 429), situation("POST")).delay is not None


@pytest.mark.parametrize("code", ["RATE_LIMIT_EXCEEDED", "QUOTA_EXCEEDED"])
@pytest.mark.parametrize("status", [0, 200, 500])
def test_a_limit_that_only_a_rule_or_a_body_speaks_of_does_not_say_that_nothing_was_executed(
    code: str, status: int
) -> None:
    assert "not_resendable" == decided(failed(code, status), situation("POST")).reason


def test_a_key_that_the_provider_honours_makes_a_post_resendable() -> None:
    assert decided(at=situation("POST", keyed=True, key=APP_KEY)).delay is not None


def test_the_users_word_makes_a_post_resendable_and_the_operations_word_wins_over_the_policys() -> None:
    careless = chosen(retry_non_idempotent=True)
    assert decided(at=situation("POST"), policy=careless).delay is not None
    careful = situation("POST", operation=Operation(name="pay", retry_non_idempotent=False))
    assert "not_resendable" == decided(at=careful, policy=careless).reason
    unsaid = situation("POST", operation=Operation(name="pay"))
    assert decided(at=unsaid, policy=careless).delay is not None
    harmless = situation("POST", operation=Operation(name="ping", retry_non_idempotent=True))
    assert decided(at=harmless).delay is not None


@pytest.mark.parametrize("code", ["CONFLICT", "SLOT_CONFLICT", "VALIDATION_QUEUE_FULL", "IDEMPOTENCY_CONFLICT"])
def test_conflicts_are_tried_again_with_an_honoured_key_only(code: str) -> None:
    assert decided(failed(code, 409), situation("POST", keyed=True)).delay is not None
    refused = decided(failed(code, 409), situation("PUT"))
    assert "not_resendable" == refused.reason
    assert (
        f"error registry: {code} is retried only with an idempotency key that the provider honours",
        "an Idempotency-Key: with one it would have been",
    ) == (refused.rule, refused.remedy)


def test_a_handshake_that_was_cut_is_tried_again_though_its_code_is_fatal() -> None:
    assert FATAL == decided(failed("TLS_FAILURE", 0, phase=CONNECTED)).reason
    assert decided(failed("TLS_FAILURE", 0, phase=CONNECTED, momentary=True)).delay is not None


def test_the_servers_yes_makes_a_fatal_status_one_that_passes() -> None:
    assert decided(failed("VALIDATION_ERROR", 400, verdict=True)).delay is not None
    assert decided(failed("CONFLICT", 409, verdict=True), situation("PUT")).delay is not None


def test_the_servers_yes_never_makes_a_request_safe_to_send_again() -> None:
    assert "not_resendable" == decided(failed(verdict=True), situation("POST")).reason
    assert "not_resendable" == decided(failed("CONFLICT", 409, verdict=True), situation("POST")).reason


def test_too_early_passes_where_a_policy_lists_it() -> None:
    early = failed("CLIENT_ERROR", 425)
    assert FATAL == decided(early).reason
    assert FATAL == decided(early, policy=chosen(retry_status_codes=[503])).reason
    assert decided(early, policy=chosen(retry_status_codes=[425])).delay is not None


# ---- no --------------------------------------------------------------------------------------------------------------


def switched_off() -> Overrides:
    overrides = Overrides()
    overrides.retry_off = True
    return overrides


def short_of_time() -> Overrides:
    overrides = Overrides()
    overrides.timeout = 1.0
    return overrides


# Every reason, in the order in which they are asked: (reason, failure, situation, policy, retries left in the budget).
NO = [
    (FATAL, {"code": "NOT_FOUND", "status": 404}, {}, {}, 100),
    ("server_verdict", {"verdict": False}, {}, {}, 100),
    ("not_resendable", {}, {"method": "POST"}, {}, 100),
    ("memory", {}, {"body_given_up": True}, {}, 100),
    ("body_too_large", {}, {"body_kept": False}, {}, 100),
    ("disabled", {}, {"retries_enabled": False}, {}, 100),
    ("disabled", {}, {"overrides": switched_off()}, {}, 100),
    ("disabled", {}, {}, {"enabled": False}, 100),
    ("draining", {}, {"draining": True}, {}, 100),
    (FATAL, {}, {}, {"retryable_errors": ["BAD_GATEWAY"]}, 100),
    (FATAL, {}, {}, {"retry_status_codes": [502, 503]}, 100),
    ("attempts", {}, {"attempts": 4}, {}, 100),
    ("stage_budget", {}, {"stage": "fetch", "attempts": 3}, {}, 100),
    ("deadline", {}, {"ends_at": NOW + 1.0}, {}, 100),
    ("breaker_open", {}, {"refused_for": 30.0}, {}, 100),
    ("budget", {}, {}, {}, 0),
]


@pytest.mark.parametrize(("reason", "failure", "at", "policy", "left"), NO)
def test_each_reason_to_stop_stops_alone(
    reason: str, failure: dict[str, object], at: dict[str, object], policy: dict[str, object], left: int
) -> None:
    made = decided(failed(**failure), situation(**at), chosen(**policy), terms(left))  # type: ignore[arg-type]
    assert (None, reason) == (made.delay, made.reason)
    assert made.reason in (*SUPPRESSED, FATAL)
    assert made.rule


def test_every_word_for_a_suppressed_retry_can_be_the_reason() -> None:
    # An answer that has begun is broken off where it is passed on; nobody asks here any more.
    assert set(SUPPRESSED) - {"response_started"} == {reason for reason, *_ in NO} - {FATAL}


@pytest.mark.parametrize("first", range(len(NO)), ids=[f"{n}-{entry[0]}" for n, entry in enumerate(NO)])
def test_of_several_reasons_the_first_in_order_is_given(first: int) -> None:
    failure: dict[str, object] = {}
    at: dict[str, object] = {}
    policy: dict[str, object] = {}
    left = 100
    for reason, about_failure, about_session, about_policy, about_budget in reversed(NO[first:]):
        if reason == "stage_budget" and "attempts" in at:
            continue
        failure, at, policy = {**failure, **about_failure}, {**at, **about_session}, {**policy, **about_policy}
        left = min(left, about_budget)
    made = decided(failed(**failure), situation(**at), chosen(**policy), terms(left))  # type: ignore[arg-type]
    assert NO[first][0] == made.reason


def test_nothing_is_charged_to_the_budget_unless_everything_else_says_yes() -> None:
    bound = terms(1.0)
    for _, failure, at, policy, left in NO:
        if left:
            decided(failed(**failure), situation(**at), chosen(**policy), bound)  # type: ignore[arg-type]
    assert 1.0 == bound.budget.remaining(NOW)
    assert decided(bound=bound).delay is not None
    assert "budget" == decided(bound=bound).reason


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "DNS_FAILURE",
            "a name that resolves (look at `endpoints` and the name server): more attempts do not cure that",
        ),
        ("CONNECTION_REFUSED", "something that listens at that address and port: more attempts only bridge a restart"),
    ],
)
def test_more_attempts_are_no_advice_where_they_cure_nothing(code: str, said: str) -> None:
    for at in (situation(attempts=2), situation(attempts=2, max_attempts=2)):
        made = decided(failed(code), at, chosen(max_attempts=2))
        assert ("attempts", said) == (made.reason, made.remedy)


@pytest.mark.parametrize(
    ("at", "policy", "rule", "remedy"),
    [
        (
            {"attempts": 2},
            {"max_attempts": 2},
            "policies.careful.max_attempts: 2",
            "a higher max_attempts in policy careful",
        ),
        ({"attempts": 3, "max_attempts": 3}, {}, "x-sidecar-max-attempts: 3", "a higher number in this header"),
        ({}, {"enabled": False}, "policies.careful.enabled: false", "`enabled: true` in policy careful"),
        ({"retries_enabled": False}, {}, "retries_enabled: false", "retries_enabled: true, or `POST /retries/enable`"),
        ({"overrides": switched_off()}, {}, "x-sidecar-retry: off", "leaving the header out"),
        (
            {},
            {"retry_status_codes": [502, 503]},
            "policies.careful.retry_status_codes: [502, 503]",
            "500 in this list",
        ),
        (
            {},
            {"retryable_errors": ["BAD_GATEWAY"]},
            "policies.careful.retryable_errors: [BAD_GATEWAY]",
            "UPSTREAM_ERROR in this list",
        ),
        ({"stage": "fetch", "attempts": 3}, {}, "stages.fetch: 3", "a higher number for `fetch` under `stages`"),
        (
            {"ends_at": NOW + 0.5},
            {},
            "policies.default.total_timeout: 60, and a wait of 1 s does not fit into the time left (500 ms)",
            "a longer total_timeout, or an x-sidecar-timeout header",
        ),
        (
            {"ends_at": NOW + 0.25, "overrides": short_of_time()},
            {},
            "x-sidecar-timeout: 1, and a wait of 1 s does not fit into the time left (250 ms)",
            "a higher number in this header (x-sidecar-timeout)",
        ),
        (
            {"ends_at": NOW + 1e-12, "overrides": short_of_time()},
            {"base_delay": 0.0046},
            "x-sidecar-timeout: 1, and a wait of 4.6 ms does not fit into the time left (0 ms)",
            "a higher number in this header (x-sidecar-timeout)",
        ),
        (
            {"method": "POST"},
            {},
            "POST, body fully sent, no Idempotency-Key",
            "an Idempotency-Key: with one it would have been",
        ),
        (
            {"method": "POST", "body_kept": False},
            {},
            "POST, body fully sent, no Idempotency-Key",
            "an Idempotency-Key: with one it would have been; the body is not there either: a higher limits.replay_body_bytes",
        ),
        (
            {"method": "POST", "key": INJECTED_KEY, "key_header": "X-Key"},
            {},
            "POST, body fully sent, the provider is not known to honour the injected X-Key",
            "`idempotency.provider_honours: true`, if the provider executes a key only once",
        ),
    ],
)
def test_the_decision_names_the_rule_and_what_would_have_changed_it(
    at: dict[str, object], policy: dict[str, object], rule: str, remedy: str
) -> None:
    made = decided(at=situation(**at), policy=chosen("careful", **policy))  # type: ignore[arg-type]
    assert (rule, remedy) == (made.rule, made.remedy)


def test_the_attempts_of_this_failures_policy_count_not_those_of_the_first() -> None:
    at = situation(attempts=3)
    assert "attempts" == decided(at=at, policy=chosen("RATE_LIMIT_EXCEEDED", max_attempts=3)).reason
    assert decided(at=at, policy=chosen("NETWORK_TIMEOUT", max_attempts=5)).delay is not None


def test_the_requests_own_number_of_attempts_replaces_every_policys() -> None:
    assert decided(at=situation(attempts=5, max_attempts=6)).delay is not None
    assert "attempts" == decided(at=situation(attempts=1, max_attempts=1)).reason


def test_a_list_of_statuses_says_nothing_about_failures_without_an_answer() -> None:
    reset = failed("CONNECTION_RESET", 0)
    assert decided(reset, policy=chosen(retry_status_codes=[503])).delay is not None


def test_attempts_of_a_stage_are_counted_over_the_whole_workflow() -> None:
    bound = terms()
    at = situation(stage="fetch", workflow="w", attempts=1)
    for _ in range(2):
        bound.stages.attempt("w", "fetch", NOW)
    assert decided(at=at, bound=bound).delay is not None
    bound.stages.attempt("w", "fetch", NOW)
    spent = decided(at=at, bound=bound)
    assert ("stage_budget", "a higher number for `fetch` under `stages`, or a new workflow id") == (
        spent.reason,
        spent.remedy,
    )
    assert decided(at=situation(stage="notify", workflow="w"), bound=bound).delay is not None


def test_a_breaker_that_lets_the_attempt_through_in_time_does_not_stop_it() -> None:
    assert decided(at=situation(refused_for=1.0)).delay is not None


def test_a_code_the_registry_does_not_know_is_fatal() -> None:
    assert FATAL == decided(failed("NEVER_HEARD_OF")).reason


@pytest.mark.parametrize("code", sorted(registry()))
def test_every_code_of_the_registry_is_decided_as_it_says(code: str) -> None:
    entry = registry()[code]
    made = decided(failed(code, entry.status), situation("GET"))
    expected = {"fatal": FATAL, "conditional": "not_resendable", "retryable": code}[entry.retry]
    assert expected == made.reason


def test_a_code_the_configuration_changed_is_decided_as_that_says() -> None:
    bound = terms()
    bound.registry = {**registry(), "NOT_FOUND": replace(registry()["NOT_FOUND"], retry="retryable")}
    assert decided(failed("NOT_FOUND", 404), bound=bound).delay is not None


def test_whether_a_fallback_may_take_the_call_is_the_same_question() -> None:
    assert not resendable(failed(), situation("POST"), chosen()).allowed
    assert resendable(failed("CIRCUIT_OPEN", 0, phase=0), situation("POST"), chosen()).allowed
    assert resendable(failed(phase=SENT), situation("GET"), chosen()).allowed
