"""The shipped examples carry the numbers of the systems they were made from."""

from pathlib import Path

import pytest

from config.errors import registry_of
from config.loader import load
from config.model import Policy, Settings
from config.operations import path_regex

EXAMPLES = Path(__file__).resolve().parent.parent / "config" / "examples"
NETWORK = {"NETWORK_TIMEOUT", "DNS_FAILURE", "CONNECT_TIMEOUT", "CONNECTION_REFUSED", "CONNECTION_RESET"}


@pytest.fixture(scope="module")
def pipeline() -> Settings:
    return load(EXAMPLES / "s0-pipeline.yaml", {}).settings


@pytest.fixture(scope="module")
def models() -> Settings:
    return load(EXAMPLES / "llm-providers.yaml", {}).settings


@pytest.fixture(scope="module")
def consolidated() -> Settings:
    return load(EXAMPLES / "s1-retry-config.yaml", {}).settings


def operation_of(settings: Settings, upstream: str, method: str, path: str) -> str | None:
    """The first operation that matches."""
    for operation in settings.upstreams[upstream].operations:
        if method in (operation.methods or (method,)) and path_regex(operation.path).fullmatch(path):
            return operation.name
    return None


# ---- The pipeline: gmail, gemini, notion, infisical


@pytest.mark.parametrize(
    ("name", "attempts", "longest", "jitter", "timeout", "retry_after"),
    [
        ("gmail", 3, 10.0, (0.0, 2.0), 30.0, True),
        ("gemini", 3, 10.0, (0.0, 2.0), 60.0, True),
        ("notion", 3, 10.0, (0.0, 2.0), 30.0, True),
        ("infisical", 2, 5.0, (0.0, 1.0), 10.0, False),
    ],
)
def test_each_service_of_the_pipeline_has_its_own_retry_numbers(
    pipeline: Settings,
    name: str,
    attempts: int,
    longest: float,
    jitter: tuple[float, float],
    timeout: float,
    retry_after: bool,
) -> None:
    assert name == pipeline.upstreams[name].chosen_policy
    policy = pipeline.policies[name]
    assert (attempts, longest, jitter, timeout, retry_after) == (
        policy.max_attempts,
        policy.max_delay,
        (policy.jitter_min, policy.jitter_max),
        policy.attempt_timeout,
        policy.respect_retry_after,
    )
    assert ("exponential", 1.0, 2.0, 1.0, "additive") == (
        policy.backoff_type,
        policy.base_delay,
        policy.multiplier,
        policy.min_delay,
        policy.jitter_type,
    )


@pytest.mark.parametrize("name", ["gmail", "gemini", "notion", "infisical"])
def test_every_attempt_and_wait_of_the_pipeline_fits_the_total(pipeline: Settings, name: str) -> None:
    policy = pipeline.policies[name]
    longest = policy.max_attempts * policy.attempt_timeout + (policy.max_attempts - 1) * policy.max_delay
    assert longest <= policy.total_timeout


@pytest.mark.parametrize(
    ("name", "failures", "successes", "timeout"),
    [("gmail", 5, 2, 60.0), ("gemini", 5, 2, 60.0), ("notion", 5, 2, 60.0), ("infisical", 3, 2, 30.0)],
)
def test_each_service_of_the_pipeline_has_its_own_breaker_numbers(
    pipeline: Settings, name: str, failures: int, successes: int, timeout: float
) -> None:
    breaker = pipeline.upstreams[name].breaker
    assert (True, failures, successes, timeout, timeout) == (
        breaker.enabled,
        breaker.failure_threshold,
        breaker.success_threshold,
        breaker.open_for,
        breaker.open_for_max,
    )


def test_the_pipeline_retries_the_failures_it_named(pipeline: Settings) -> None:
    assert NETWORK == set(pipeline.policies["infisical"].retryable_errors or ())
    assert NETWORK | {
        "RATE_LIMIT_EXCEEDED",
        "QUOTA_EXCEEDED",
        "SERVICE_OVERLOADED",
        "EXTERNAL_SERVICE_TIMEOUT",
    } == set(pipeline.policies["gemini"].retryable_errors or ())
    assert (None, None) == (pipeline.policies["gmail"].retryable_errors, pipeline.policies["notion"].retryable_errors)


@pytest.mark.parametrize(
    ("upstream", "method", "path", "operation"),
    [
        ("gmail", "GET", "/gmail/v1/users/me/messages/19a3f3f856f0b4d4", "gmail_fetch"),
        ("gemini", "POST", "/v1beta/models/gemini-2.5-flash:generateContent", "gemini_extract"),
        ("notion", "POST", "/v1/pages", "notion_write"),
        ("notion", "PATCH", "/v1/pages/abc", "notion_write"),
        ("notion", "GET", "/v1/pages/abc", None),
        ("infisical", "GET", "/api/v3/secrets/raw", "infisical_fetch"),
    ],
)
def test_the_operations_of_the_pipeline_have_their_names(
    pipeline: Settings, upstream: str, method: str, path: str, operation: str | None
) -> None:
    assert operation == operation_of(pipeline, upstream, method, path)


def test_only_what_does_no_harm_twice_is_sent_twice_in_the_pipeline(pipeline: Settings) -> None:
    assert ["gemini_extract"] == [
        operation.name
        for upstream in pipeline.upstreams.values()
        for operation in upstream.operations
        if operation.retry_non_idempotent
    ]
    assert not any(policy.retry_non_idempotent for policy in pipeline.policies.values())


# ---- Language models


@pytest.mark.parametrize("name", ["openai", "anthropic", "gemini"])
def test_language_models_are_given_time_and_reached_by_a_route(models: Settings, name: str) -> None:
    upstream = models.upstreams[name]
    policy = models.policies[upstream.policy]
    assert (f"/{name}", "originate", "llm", 300.0) == (
        upstream.route,
        upstream.tls,
        upstream.subsystem,
        upstream.timeouts.body_idle,
    )
    assert (4, 600.0, 900.0, 120.0) == (
        policy.max_attempts,
        policy.attempt_timeout,
        policy.total_timeout,
        policy.retry_after_ceiling,
    )
    assert (True, 500) == (upstream.rate_limit_gate.enabled, upstream.rate_limit_gate.max_queue)


def test_overload_of_a_language_model_has_a_policy_of_its_own(models: Settings) -> None:
    assert {"SERVICE_OVERLOADED": "overloaded"} == dict(models.subsystem_mappings["llm"]["chat"])
    policy = models.policies["overloaded"]
    assert (5, 2.0, 60.0, "decorrelated") == (
        policy.max_attempts,
        policy.base_delay,
        policy.max_delay,
        policy.jitter_type,
    )


def test_the_rules_of_language_models_know_quota_overload_and_policy(models: Settings) -> None:
    codes = {name: {rule.code for rule in upstream.rules} for name, upstream in models.upstreams.items()}
    assert {"QUOTA_EXCEEDED", "SERVICE_OVERLOADED", "CONTEXT_TOO_LONG", "CONTENT_POLICY"} == codes["openai"]
    assert {"SERVICE_OVERLOADED", "RATE_LIMIT_EXCEEDED", "QUOTA_EXCEEDED"} <= codes["anthropic"]
    assert {"SERVICE_OVERLOADED", "INVALID_API_KEY"} == codes["gemini"]


def test_an_empty_account_is_not_asked_again(models: Settings) -> None:
    assert ("fatal", "critical") == (
        registry_of(models)["QUOTA_EXCEEDED"].retry,
        registry_of(models)["QUOTA_EXCEEDED"].severity,
    )
    assert 400 == registry_of(models)["CONTEXT_TOO_LONG"].status


@pytest.mark.parametrize(
    ("upstream", "method", "path", "operation"),
    [
        ("openai", "POST", "/v1/chat/completions", "chat"),
        ("openai", "POST", "/v1/responses", "respond"),
        ("openai", "GET", "/v1/models", "list_models"),
        ("anthropic", "POST", "/v1/messages", "chat"),
        ("anthropic", "POST", "/v1/messages/count_tokens", "count_tokens"),
        ("gemini", "POST", "/v1beta/models/gemini-2.5-pro:generateContent", "chat"),
        ("gemini", "POST", "/v1beta/models/gemini-2.5-pro:streamGenerateContent", "chat_stream"),
    ],
)
def test_the_operations_of_language_models_have_their_names(
    models: Settings, upstream: str, method: str, path: str, operation: str
) -> None:
    assert operation == operation_of(models, upstream, method, path)


# ---- The consolidated retry configuration


def essence(policy: Policy) -> tuple[int, str, float, float]:
    return policy.max_attempts, policy.backoff_type, policy.base_delay, policy.max_delay


@pytest.mark.parametrize(
    ("name", "expected", "shown"),
    [
        ("browser_state_timeout", (3, "exponential", 1.0, 10.0), "Browser State Timeout Retry"),
        ("browser_network_error", (5, "exponential", 2.0, 30.0), "Browser Network Error Retry"),
        ("navigation_retry_with_delay", (3, "exponential", 2.0, 30.0), "Navigation Retry With Delay"),
        ("telemetry_error_handling", (3, "exponential", 1.0, 60.0), "Telemetry Error Handling Retry"),
    ],
)
def test_the_policies_of_the_original_keep_their_numbers(
    consolidated: Settings, name: str, expected: tuple[int, str, float, float], shown: str
) -> None:
    policy = consolidated.policies[name]
    assert (expected, shown, True) == (essence(policy), policy.name, policy.enabled)
    assert ("full", 0.1) == (policy.jitter_type, policy.jitter_amount)  # its global defaults


def test_the_policies_that_the_original_forgot_are_there(consolidated: Settings) -> None:
    forgotten = {
        "browser_disk_full",
        "browser_monitoring_timeout",
        "browser_access_denied",
        "browser_psutil_error",
        "browser_session_default",
        "telemetry_batch_processing",
        "telemetry_alerting_notification",
        "telemetry_simple_retries",
    }
    assert forgotten <= consolidated.policies.keys()
    assert 1 == consolidated.policies["browser_access_denied"].max_attempts
    assert "immediate" == consolidated.policies["browser_psutil_error"].backoff_type


def test_every_mapping_of_the_original_is_there(consolidated: Settings) -> None:
    mapped = {
        subsystem: {operation: set(by_code.values()) for operation, by_code in operations.items()}
        for subsystem, operations in consolidated.subsystem_mappings.items()
    }
    assert {
        "browser": {
            "state_operations": {"browser_state_timeout", "browser_network_error", "browser_disk_full"},
            "monitoring_operations": {
                "browser_monitoring_timeout",
                "browser_access_denied",
                "browser_psutil_error",
            },
            "session_operations": {"browser_session_default"},
        },
        "navigation": {"route_adaptation": {"navigation_retry_with_delay"}},
        "telemetry": {
            "error_handling": {"telemetry_error_handling"},
            "batch_processing": {"telemetry_batch_processing"},
            "alerting": {"telemetry_alerting_notification"},
            "simple_retries": {"telemetry_simple_retries"},
        },
    } == mapped
    assert "browser_state_timeout" == consolidated.subsystem_mappings["browser"]["state_operations"]["NETWORK_TIMEOUT"]


def test_the_breakers_of_the_original_stay_off_with_their_numbers(consolidated: Settings) -> None:
    assert {(False, 5, 60.0)} == {
        (upstream.breaker.enabled, upstream.breaker.failure_threshold, upstream.breaker.open_for)
        for upstream in consolidated.upstreams.values()
    }
