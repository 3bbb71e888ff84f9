"""Policies: what one may say, which are shipped, and in which order a file, `global_defaults` and both are laid."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from config.loader import ConfigError, Loaded, load
from config.model import Settings
from config.policy import DEFAULT_STAGE_ATTEMPTS, SHIPPED, Policy
from config.problems import Problem

# Every key of a policy with the default that the specification gives it.
DEFAULTS = {
    "enabled": True,
    "max_attempts": 4,
    "backoff_type": "exponential",
    "base_delay": 0.1,
    "multiplier": 2.0,
    "min_delay": 0.0,
    "max_delay": 10.0,
    "jitter_type": "full",
    "jitter_amount": 1.0,
    "jitter_min": 0.0,
    "jitter_max": 0.0,
    "respect_retry_after": True,
    "retry_after_ceiling": 300,
    "attempt_timeout": 30,
    "total_timeout": 60,
    "retry_status_codes": None,
    "retryable_errors": None,
    "retry_non_idempotent": False,
}


def given(tmp_path: Path, content: str, environ: dict[str, str] | None = None) -> Loaded:
    path = tmp_path / "sidecar.yaml"
    path.write_text(content)
    return load(path, environ or {})


def policies(tmp_path: Path, content: str) -> dict[str, Policy]:
    return dict(given(tmp_path, content).settings.policies)


def problems_of(tmp_path: Path, content: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        given(tmp_path, content)
    return caught.value.problems


def refused(tmp_path: Path, content: str) -> Problem:
    (problem,) = problems_of(tmp_path, content)
    return problem


def values(policy: Policy, *keys: str) -> tuple[Any, ...]:
    return tuple(getattr(policy, key) for key in keys)


def test_the_default_policy_has_the_values_it_promises() -> None:
    policy = Settings().policies["default"]
    assert DEFAULTS == policy.model_dump(exclude={"name", "description"})
    assert "Default" == policy.name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("patient", (5, 1.0, 2.0, 60.0, 30.0)),
        ("NETWORK_TIMEOUT", (5, 0.1, 1.5, 5.0, 10.0)),
        ("DATABASE_CONNECTION_ERROR", (3, 1.0, 2.0, 60.0, 30.0)),
        ("RATE_LIMIT_EXCEEDED", (3, 1.0, 2.0, 60.0, 30.0)),
    ],
)
def test_the_shipped_policies_are_always_there(name: str, expected: tuple[float, ...]) -> None:
    policy = Settings().policies[name]
    assert expected == values(policy, "max_attempts", "base_delay", "multiplier", "max_delay", "attempt_timeout")
    assert policy.respect_retry_after
    assert policy.description


def test_what_is_shipped_can_be_said_by_a_user_too() -> None:
    for name, said in SHIPPED.items():
        assert Settings().policies[name] == Settings.model_validate({"policies": {"mine": said}}).policies["mine"]


def test_a_file_changes_a_shipped_policy_key_by_key(tmp_path: Path) -> None:
    changed = policies(tmp_path, "policies: {default: {max_attempts: 2}, NETWORK_TIMEOUT: {max_delay: 7}}")
    assert (2, 0.1, "Default") == values(changed["default"], "max_attempts", "base_delay", "name")
    assert (5, 1.5, 7.0, 10.0) == values(
        changed["NETWORK_TIMEOUT"], "max_attempts", "multiplier", "max_delay", "attempt_timeout"
    )


def test_shipped_policies_come_first_and_then_those_of_the_file_in_its_order(tmp_path: Path) -> None:
    assert [*SHIPPED, "zeta", "alpha"] == list(policies(tmp_path, "policies: {zeta: {}, patient: {}, alpha: {}}"))


def test_global_defaults_fill_what_a_policy_leaves_out(tmp_path: Path) -> None:
    content = "global_defaults: {jitter_type: none, max_attempts: 7, max_delay: 20}\npolicies: {own: {max_attempts: 2}}"
    filled = policies(tmp_path, content)
    assert ("none", 2, 20.0) == values(filled["own"], "jitter_type", "max_attempts", "max_delay")
    assert ("none", 7, 20.0) == values(filled["default"], "jitter_type", "max_attempts", "max_delay")


def test_global_defaults_do_not_change_what_a_shipped_policy_says_itself(tmp_path: Path) -> None:
    filled = policies(tmp_path, "global_defaults: {jitter_type: none, max_attempts: 7, attempt_timeout: 3}")
    assert ("none", 5, 10.0) == values(filled["NETWORK_TIMEOUT"], "jitter_type", "max_attempts", "attempt_timeout")


def test_a_policy_remembers_which_keys_its_own_file_gave(tmp_path: Path) -> None:
    filled = policies(tmp_path, "global_defaults: {jitter_type: none}\npolicies: {patient: {max_attempts: 2}}")
    assert {"max_attempts"} == filled["patient"].model_fields_set
    assert set() == filled["default"].model_fields_set


def test_the_origin_of_a_policy_key_is_the_place_where_it_was_said(tmp_path: Path) -> None:
    content = "global_defaults: {jitter_type: none, max_attempts: 7}\npolicies: {patient: {min_delay: 1}, own: {enabled: true}}"
    environ = {"SIDECAR__POLICIES__OWN__MULTIPLIER": "3", "SIDECAR__GLOBAL_DEFAULTS__JITTER_AMOUNT": "0.5"}
    origins = given(tmp_path, content, environ).origins
    assert {
        "policies.patient.min_delay": "file",
        "policies.patient.jitter_type": "file",  # from global_defaults
        "policies.patient.max_attempts": "default",  # the shipped policy's own
        "policies.own.max_attempts": "file",
        "policies.own.multiplier": "environment",
        "policies.own.jitter_amount": "environment",
        "policies.own.base_delay": "default",
        "global_defaults.jitter_type": "file",
        "global_defaults.base_delay": "default",
    } == {
        key: origins[key]
        for key in (
            "policies.patient.min_delay",
            "policies.patient.jitter_type",
            "policies.patient.max_attempts",
            "policies.own.max_attempts",
            "policies.own.multiplier",
            "policies.own.jitter_amount",
            "policies.own.base_delay",
            "global_defaults.jitter_type",
            "global_defaults.base_delay",
        )
    }


def test_a_variable_reaches_a_shipped_policy_that_the_file_does_not_have(tmp_path: Path) -> None:
    loaded = given(tmp_path, "", {"SIDECAR__POLICIES__NETWORK_TIMEOUT__MAX_ATTEMPTS": "2"})
    assert SHIPPED.keys() == loaded.settings.policies.keys()
    assert (2, 1.5) == values(loaded.settings.policies["NETWORK_TIMEOUT"], "max_attempts", "multiplier")


def test_no_retry_may_be_written_as_zero_attempts() -> None:
    assert 1 == Policy(max_attempts=0).max_attempts


def test_an_attempt_that_may_take_long_is_not_cut_off_by_a_total_nobody_set(tmp_path: Path) -> None:
    assert 120 == policies(tmp_path, "policies: {slow: {attempt_timeout: 120}}")["slow"].total_timeout
    assert 60 == policies(tmp_path, "policies: {slow: {attempt_timeout: 45}}")["slow"].total_timeout


def test_a_total_that_was_set_stands_beside_an_attempt_timeout_that_was_not(tmp_path: Path) -> None:
    assert (30, 5) == values(
        policies(tmp_path, "policies: {brisk: {total_timeout: 5}}")["brisk"], "attempt_timeout", "total_timeout"
    )
    assert 5 == policies(tmp_path, "global_defaults: {total_timeout: 5}")["NETWORK_TIMEOUT"].total_timeout


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ("max_attempts: 11", "max_attempts", "must be at most 10"),
        ("max_attempts: -1", "max_attempts", "must be at least 1"),
        ("max_attempts: 2.5", "max_attempts", "must be a whole number"),
        ("max_attempts: false", "max_attempts", "must be a whole number"),
        ("backoff_type: exponental", "backoff_type", "must be one of exponential, linear, fixed, immediate"),
        ("base_delay: -0.1", "base_delay", "must be at least 0"),
        ("base_delay: 1 second", "base_delay", "with its unit, as in 500ms, 90s, 10m, 1h or 2d"),
        ("multiplier: 0.5", "multiplier", "must be at least 1"),
        ("multiplier: 1000", "multiplier", "must be at most 100"),
        ("jitter_type: some", "jitter_type", "must be one of none, full, equal, decorrelated, additive"),
        ("jitter_amount: 1.5", "jitter_amount", "must be at most 1"),
        ("jitter_min: -1", "jitter_min", "must be at least 0"),
        ("retry_after_ceiling: -1", "retry_after_ceiling", "must be at least 0"),
        ("attempt_timeout: 0", "attempt_timeout", "must be greater than 0"),
        ("total_timeout: .nan", "total_timeout", "must be a finite number"),
        ("respect_retry_after: 'yes'", "respect_retry_after", "without quotes"),
        ("retry_status_codes: 503", "retry_status_codes", "must be a list"),
        ("retry_status_codes: [503, 404]", "retry_status_codes[1]", "only 408, 425, 429 and 500 to 999"),
        ("retry_status_codes: [1000]", "retry_status_codes[0]", "only 408, 425, 429 and 500 to 999"),
        ("retry_status_codes: ['503']", "retry_status_codes[0]", "written without quotes"),
        ("retryable_errors: [timeout]", "retryable_errors[0]", "written in capitals"),
        ("retryable_exceptions: [TimeoutError]", "retryable_exceptions", "unknown key"),
        ("base_delay: 20", "max_delay", "must be at least base_delay (20); raise it, or lower base_delay"),
        ("max_delay: 0.05", "max_delay", "must be at least base_delay (0.1)"),
        ("min_delay: 11", "min_delay", "must be at most max_delay (10)"),
        ("jitter_type: additive, jitter_min: 1", "jitter_max", "must be at least jitter_min (1)"),
        ("jitter_max: 2", "jitter_max", "only counts with `jitter_type: additive` or `factor` (here it is full)"),
        ("attempt_timeout: 20, total_timeout: 10", "attempt_timeout", "(total_timeout: 10)"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_in_words(tmp_path: Path, settings: str, key: str, words: str) -> None:
    problem = refused(tmp_path, f"policies:\n  own: {{{settings}}}\n")
    assert (2, f"policies.own.{key}") == (problem.line, problem.key)
    assert words in problem.message


@pytest.mark.parametrize(
    "settings",
    [
        "max_delay: 0.1",
        "min_delay: 10",
        "base_delay: 0, max_delay: 0, backoff_type: immediate",
        "retry_status_codes: [408, 425, 429, 500, 599]",
        "retry_status_codes: []",
        "retryable_errors: []",
        "retryable_errors: [NETWORK_TIMEOUT, TLS_FAILURE]",
        "jitter_type: additive, jitter_min: 0.5, jitter_max: 0.5",
        "attempt_timeout: 60, total_timeout: 60",
        "multiplier: 1",
    ],
)
def test_a_policy_at_the_very_edge_is_accepted(tmp_path: Path, settings: str) -> None:
    assert "own" in policies(tmp_path, f"policies: {{own: {{{settings}}}}}")


def test_a_contradiction_within_global_defaults_is_told_once_and_there(tmp_path: Path) -> None:
    problem = refused(tmp_path, "policies: {own: {}}\nglobal_defaults:\n  base_delay: 20\n")
    assert (3, "global_defaults.max_delay") == (problem.line, problem.key)


def test_a_contradiction_between_a_policy_and_global_defaults_points_at_the_policy(tmp_path: Path) -> None:
    content = "global_defaults: {base_delay: 5}\npolicies:\n  own:\n    max_delay: 2\n"
    problem = refused(tmp_path, content)
    assert (4, "policies.own.max_delay") == (problem.line, problem.key)


def test_a_shipped_policy_that_global_defaults_contradict_points_at_those(tmp_path: Path) -> None:
    problem = refused(tmp_path, "global_defaults:\n  min_delay: 6\n")
    assert (2, "policies.NETWORK_TIMEOUT.min_delay") == (problem.line, problem.key)


def test_timeouts_said_in_two_places_are_compared_too(tmp_path: Path) -> None:
    content = "global_defaults: {total_timeout: 20}\npolicies: {own: {attempt_timeout: 25}}\n"
    assert "policies.own.attempt_timeout" == refused(tmp_path, content).key


def test_a_wrong_number_is_not_told_a_second_time_by_what_follows_from_it(tmp_path: Path) -> None:
    content = "global_defaults: {max_delay: x}\npolicies: {own: {base_delay: 20}}\n"
    assert ["global_defaults.max_delay"] == [problem.key for problem in problems_of(tmp_path, content)]


def test_a_contradiction_is_refused_without_the_loader_too() -> None:
    with pytest.raises(ValidationError, match=r"policies\.own\.max_delay"):
        Settings.model_validate({"policies": {"own": {"base_delay": 20}}})


def test_a_policy_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().policies["default"].max_attempts = 9  # type: ignore[misc]  # that it cannot be set is the point


def test_stages_are_counted_from_one(tmp_path: Path) -> None:
    assert {"fetch": 3} == dict(given(tmp_path, "stages: {fetch: 3}").settings.stages)
    assert "stages.fetch" == refused(tmp_path, "stages: {fetch: 0}").key
    assert 5 == DEFAULT_STAGE_ATTEMPTS


def test_retries_are_on_and_workflows_remembered_for_an_hour() -> None:
    settings = Settings()
    assert (True, 3600, 10_000) == (settings.retries_enabled, settings.limits.workflow_ttl, settings.limits.workflows)
