"""Names must lead somewhere: policies, error codes, subsystems, operations and fallbacks, each with the nearest one."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from config.loader import ConfigError, load
from config.model import Settings
from config.problems import Problem

TWO = "upstreams:\n  pay: {hosts: [p.test], operations: [{name: charge}, {name: refund}]}\n  mail: {hosts: [m.test]}\n"


def loaded(tmp_path: Path, content: str, environ: dict[str, str] | None = None) -> Settings:
    path = tmp_path / "sidecar.yaml"
    path.write_text(content)
    return load(path, environ or {}).settings


def problems_of(tmp_path: Path, content: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, content)
    return caught.value.problems


def refused(tmp_path: Path, content: str) -> Problem:
    (problem,) = problems_of(tmp_path, content)
    return problem


@pytest.mark.parametrize(
    ("content", "line", "key"),
    [
        ("upstreams:\n  a:\n    hosts: [a.test]\n    policy: patiant\n", 4, "upstreams.a.policy"),
        (
            "upstreams:\n  a:\n    hosts: [a.test]\n    operations:\n      - name: x\n        policy: patiant\n",
            6,
            "upstreams.a.operations[0].policy",
        ),
        ("error_codes:\n  CONFLICT:\n    policy: patiant\n", 3, "error_codes.CONFLICT.policy"),
        (
            TWO + "subsystem_mappings:\n  pay:\n    charge: {default: patiant}\n",
            6,
            "subsystem_mappings.pay.charge.default",
        ),
    ],
)
def test_an_unknown_policy_is_told_where_it_is_named(tmp_path: Path, content: str, line: int, key: str) -> None:
    problem = refused(tmp_path, content)
    assert (line, key, "patient", "patiant") == (problem.line, problem.key, problem.nearest, problem.value)
    assert "no policy of this name under `policies`" in problem.message


@pytest.mark.parametrize(
    ("content", "line", "key"),
    [
        ("policies:\n  a: {retryable_errors: [CONFLICT, NETWORK_TIMEOT]}\n", 2, "policies.a.retryable_errors[1]"),
        ("global_defaults:\n  retryable_errors: [NETWORK_TIMEOT]\n", 2, "global_defaults.retryable_errors[0]"),
        ("rules:\n  - {when: {status: 500}, code: NETWORK_TIMEOT}\n", 2, "rules[0].code"),
        (
            "upstreams:\n  a:\n    hosts: [a.test]\n    rules: [{when: {status: 500}, code: NETWORK_TIMEOT}]\n",
            4,
            "upstreams.a.rules[0].code",
        ),
        ("error_codes:\n  CONFLICT: {related: [NETWORK_TIMEOT]}\n", 2, "error_codes.CONFLICT.related[0]"),
        (
            TWO + "subsystem_mappings:\n  pay:\n    charge:\n      NETWORK_TIMEOT: default\n",
            7,
            "subsystem_mappings.pay.charge.NETWORK_TIMEOT",
        ),
    ],
)
def test_an_unknown_error_code_is_told_where_it_is_named(tmp_path: Path, content: str, line: int, key: str) -> None:
    problem = refused(tmp_path, content)
    assert (line, key, "NETWORK_TIMEOUT") == (problem.line, problem.key, problem.nearest)
    assert "no such error code" in problem.message


def test_a_misspelled_default_of_a_mapping_is_recognised(tmp_path: Path) -> None:
    assert "default" == refused(tmp_path, TWO + "subsystem_mappings: {pay: {charge: {defalt: patient}}}").nearest


def test_an_added_error_code_can_be_named_everywhere(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        "error_codes: {CARD_DECLINED: {category: PERMANENT, retry: fatal, description: No., policy: own}}\n"
        "policies: {own: {retryable_errors: [CARD_DECLINED]}}\n"
        "rules: [{when: {status: 402}, code: CARD_DECLINED}]\n"
        + TWO
        + "subsystem_mappings: {pay: {charge: {CARD_DECLINED: own}}}\n",
    )
    assert {"CARD_DECLINED": "own"} == dict(settings.subsystem_mappings["pay"]["charge"])


@pytest.mark.parametrize(
    ("entry", "words", "nearest"),
    [
        ("CARD_DECLINED: {retry: fatal}", "needs category, description as well", None),
        ("CONECTION_RESET: {severity: low}", "needs category, retry, description as well", "CONNECTION_RESET"),
    ],
)
def test_a_new_error_code_must_say_enough(tmp_path: Path, entry: str, words: str, nearest: str | None) -> None:
    problem = refused(tmp_path, f"error_codes:\n  {entry}\n")
    assert (2, nearest) == (problem.line, problem.nearest)
    assert words in problem.message


@pytest.mark.parametrize(
    ("entry", "key", "words"),
    [
        ("card: {}", "card", "written in capitals"),
        ("CONFLICT: {status: 302}", "CONFLICT.status", "must be at least 400"),
        ("CONFLICT: {retry: never}", "CONFLICT.retry", "must be one of retryable, fatal, conditional"),
        ("CONFLICT: {category: transient}", "CONFLICT.category", "must be one of TRANSIENT, PERMANENT, CRITICAL"),
        ("CONFLICT: {colour: red}", "CONFLICT.colour", "unknown key"),
        ("CONFLICT: {causes: one}", "CONFLICT.causes", "must be a list"),
        ("CONFLICT: ", "CONFLICT", "has no value"),
    ],
)
def test_an_error_code_that_cannot_be_is_refused_in_words(tmp_path: Path, entry: str, key: str, words: str) -> None:
    problem = refused(tmp_path, f"error_codes: {{{entry}}}")
    assert f"error_codes.{key}" == problem.key
    assert words in problem.message


def test_an_unknown_subsystem_gets_the_nearest_one(tmp_path: Path) -> None:
    problem = refused(tmp_path, TWO + "subsystem_mappings:\n  pai: {}\n")
    assert (5, "subsystem_mappings.pai", "pay") == (problem.line, problem.key, problem.nearest)
    assert "there is: pay, mail" in problem.message
    assert "give the upstream it is about a `subsystem` of this name" in problem.message


def test_a_subsystem_without_any_upstream_is_told_so(tmp_path: Path) -> None:
    assert "there is: none yet" in refused(tmp_path, "subsystem_mappings: {browser: {}}").message


def test_an_upstream_with_a_label_is_known_by_that_alone(tmp_path: Path) -> None:
    labelled = "upstreams: {pay: {hosts: [p.test], subsystem: billing, operations: [{name: charge}]}}\n"
    assert loaded(tmp_path, labelled + "subsystem_mappings: {billing: {charge: {default: patient}}}")
    problem = refused(tmp_path, labelled + "subsystem_mappings: {pay: {charge: {default: patient}}}")
    assert "belongs to the subsystem `billing`; write that instead" in problem.message


def test_upstreams_that_share_a_label_share_their_operations(tmp_path: Path) -> None:
    content = (
        "upstreams:\n"
        "  a: {hosts: [a.test], subsystem: both, operations: [{name: one}]}\n"
        "  b: {hosts: [b.test], subsystem: both, operations: [{name: two}]}\n"
        "subsystem_mappings: {both: {one: {default: patient}, two: {default: patient}}}\n"
    )
    assert {"one", "two"} == loaded(tmp_path, content).subsystem_mappings["both"].keys()


def test_an_unknown_operation_gets_the_nearest_one(tmp_path: Path) -> None:
    problem = refused(tmp_path, TWO + "subsystem_mappings:\n  pay:\n    chrage: {default: default}\n")
    assert (6, "subsystem_mappings.pay.chrage", "charge") == (problem.line, problem.key, problem.nearest)
    assert "there is: charge, refund" in problem.message


def test_an_operation_of_an_upstream_without_any_is_told_so(tmp_path: Path) -> None:
    assert "there is: none yet" in refused(tmp_path, TWO + "subsystem_mappings: {mail: {send: {}}}").message


def test_what_follows_from_a_wrong_operation_is_not_told(tmp_path: Path) -> None:
    content = (
        "upstreams: {pay: {hosts: [p.test], operations: [{name: charge, path: x}]}}\n"
        "subsystem_mappings: {pay: {charge: {default: default}}}\n"
    )
    assert "upstreams.pay.operations[0].path" == refused(tmp_path, content).key


def test_an_operation_name_is_given_once_per_upstream(tmp_path: Path) -> None:
    problem = refused(
        tmp_path, "upstreams:\n  a:\n    hosts: [a.test]\n    operations:\n      - name: x\n      - name: x\n"
    )
    assert (6, "upstreams.a.operations[1].name") == (problem.line, problem.key)
    assert loaded(
        tmp_path,
        "upstreams: {a: {hosts: [a.test], operations: [{name: x}]}, b: {hosts: [b.test], operations: [{name: x}]}}",
    )


def test_variables_reach_codes_and_operations_whatever_their_case(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        TWO,
        {
            "SIDECAR__ERROR_CODES__CONFLICT__SEVERITY": "low",
            "SIDECAR__SUBSYSTEM_MAPPINGS__PAY__CHARGE__NETWORK_TIMEOUT": "patient",
            "SIDECAR__SUBSYSTEM_MAPPINGS__PAY__CHARGE__DEFAULT": "default",
        },
    )
    assert "low" == settings.error_codes["CONFLICT"].severity
    assert {"NETWORK_TIMEOUT": "patient", "default": "default"} == dict(settings.subsystem_mappings["pay"]["charge"])


# ---- Fallbacks


def chain(**fallbacks: str) -> str:
    lines = [f"  {name}: {{hosts: [{name}.test], fallback: {to}}}" for name, to in fallbacks.items()]
    return "\n".join(["upstreams:", *lines, "  last: {hosts: [last.test]}", ""])


def test_a_fallback_must_exist(tmp_path: Path) -> None:
    problem = refused(tmp_path, chain(a="lst"))
    assert (2, "upstreams.a.fallback", "last") == (problem.line, problem.key, problem.nearest)
    assert "no upstream of this name (there is: last)" in problem.message


def test_without_another_upstream_there_is_no_fallback(tmp_path: Path) -> None:
    assert "no other one" in refused(tmp_path, "upstreams: {a: {hosts: [a.test], fallback: b}}").message


def test_an_upstream_is_not_its_own_fallback(tmp_path: Path) -> None:
    assert "cannot be its own fallback" in refused(tmp_path, chain(a="a")).message


@pytest.mark.parametrize(
    ("fallbacks", "line", "shown"),
    [
        ({"a": "b", "b": "a"}, 2, "a → b → a"),
        ({"a": "b", "b": "c", "c": "a"}, 2, "a → b → c → a"),
        ({"a": "b", "b": "c", "c": "b"}, 3, "b → c → b"),
        ({"a": "last", "b": "c", "c": "b"}, 3, "b → c → b"),
    ],
)
def test_fallbacks_that_go_round_in_a_circle_are_named_once(
    tmp_path: Path, fallbacks: dict[str, str], line: int, shown: str
) -> None:
    problem = refused(tmp_path, chain(**fallbacks))
    assert line == problem.line
    assert f"in a circle: {shown};" in problem.message


def test_a_chain_of_fallbacks_that_ends_is_accepted(tmp_path: Path) -> None:
    settings = loaded(tmp_path, chain(a="b", b="last", c="b"))
    assert ["b", "last", "b", None] == [upstream.fallback for upstream in settings.upstreams.values()]


@pytest.mark.parametrize(
    ("fallback", "words"),
    [
        ("{hosts: ['*.b.test']}", "does not say where to send to"),
        ("{hosts: [b.test]}", "never spoken to in clear"),
        ("{endpoints: [http://b.test]}", "never spoken to in clear"),
        ("{endpoints: [https://b.test, http://c.test]}", "never spoken to in clear"),
    ],
)
def test_a_fallback_that_would_leak_or_get_lost_is_refused(tmp_path: Path, fallback: str, words: str) -> None:
    content = f"upstreams:\n  a: {{hosts: [a.test], tls: originate, fallback: b}}\n  b: {fallback}\n"
    problem = refused(tmp_path, content)
    assert (2, "upstreams.a.fallback") == (problem.line, problem.key)
    assert words in problem.message


@pytest.mark.parametrize(
    ("tls", "fallback"),
    [
        ("originate", "{endpoints: [https://b.test]}"),
        ("originate", "{endpoints: [http://b.test], tls: originate}"),
        ("originate", "{hosts: [b.test], tls: originate}"),
        ("off", "{endpoints: [http://b.test]}"),
        ("off", "{hosts: [b.test]}"),
    ],
)
def test_a_fallback_that_keeps_what_was_promised_is_accepted(tmp_path: Path, tls: str, fallback: str) -> None:
    content = f"upstreams:\n  a: {{hosts: [a.test], tls: {tls}, fallback: b}}\n  b: {fallback}\n"
    assert "b" == loaded(tmp_path, content).upstreams["a"].fallback


@pytest.mark.parametrize(
    "data",
    [
        {"upstreams": {"a": {"hosts": ["a.test"], "fallback": "b"}}},
        {"subsystem_mappings": {"a": {}}},
        {"rules": [{"when": {"status": 500}, "code": "NOPE"}]},
    ],
)
def test_dangling_names_are_refused_without_the_loader_too(data: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(data)
