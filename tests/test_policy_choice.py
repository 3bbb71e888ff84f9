"""Which policy, in which order, and which operation a request is."""

import pytest

from config.errors import registry_of
from config.model import Settings
from config.operations import Operation
from config.upstream import Upstream
from sidecar.policy.choice import Operations, PolicyChoice

NAMES = ("asked", "mapped", "mapped-default", "of-operation", "of-upstream", "of-code")


def choice(*, subsystem: str | None = None, automatic: bool = False, **said: bool) -> PolicyChoice:
    """Everything that can choose a policy for operation `pay` and NETWORK_TIMEOUT, unless switched off."""
    operation: dict[str, object] = {"name": "pay", "methods": ["POST"]}
    if said.get("operation", True):
        operation["policy"] = "of-operation"
    upstream: dict[str, object] = {"hosts": ["api.test"], "operations": [operation]}
    if said.get("upstream", True):
        upstream["policy"] = "of-upstream"
    if subsystem is not None:
        upstream["subsystem"] = subsystem
    mapping = {}
    if said.get("code_mapping", True):
        mapping["NETWORK_TIMEOUT"] = "mapped"
    if said.get("default_mapping", True):
        mapping["default"] = "mapped-default"
    settings = Settings.model_validate(
        {
            "policies": {name: {} for name in NAMES},
            "upstreams": {"payments": upstream},
            "subsystem_mappings": {subsystem or "payments": {"pay": mapping}} if mapping else {},
            "error_codes": {"NETWORK_TIMEOUT": {"policy": "of-code"}} if said.get("code", True) else {},
        }
    )
    chosen_upstream = Upstream.model_construct() if automatic else settings.upstreams["payments"]
    return PolicyChoice(settings, "payments", chosen_upstream, registry_of(settings))


LAYERS = [
    ({}, "mapped"),
    ({"code_mapping": False}, "mapped-default"),
    ({"code_mapping": False, "default_mapping": False}, "of-operation"),
    ({"code_mapping": False, "default_mapping": False, "operation": False}, "of-upstream"),
    ({"code_mapping": False, "default_mapping": False, "operation": False, "upstream": False}, "of-code"),
    (
        {"code_mapping": False, "default_mapping": False, "operation": False, "upstream": False, "code": False},
        "NETWORK_TIMEOUT",
    ),
]


@pytest.mark.parametrize(("said", "expected"), LAYERS)
def test_after_a_failure_the_first_who_says_something_wins(said: dict[str, bool], expected: str) -> None:
    assert expected == choice(**said).after("pay", "NETWORK_TIMEOUT").id


@pytest.mark.parametrize(("said", "expected"), LAYERS)
def test_the_requests_own_wish_wins_over_everyone(said: dict[str, bool], expected: str) -> None:
    assert "asked" == choice(**said).after("pay", "NETWORK_TIMEOUT", "asked").id
    assert "asked" == choice(**said).before("pay", "asked").id


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "mapped-default"),
        ({"default_mapping": False}, "of-operation"),
        ({"default_mapping": False, "operation": False}, "of-upstream"),
        ({"default_mapping": False, "operation": False, "upstream": False}, "default"),
    ],
)
def test_before_a_failure_there_is_no_code_to_choose_by(said: dict[str, bool], expected: str) -> None:
    assert expected == choice(**said).before("pay").id


def test_a_request_without_an_operation_follows_its_upstream() -> None:
    assert "of-upstream" == choice().before(None).id
    assert "of-upstream" == choice().after(None, "NETWORK_TIMEOUT").id
    assert "of-code" == choice(upstream=False).after(None, "NETWORK_TIMEOUT").id


def test_a_code_without_a_policy_of_its_own_follows_the_default() -> None:
    assert "default" == choice(upstream=False).after(None, "UPSTREAM_ERROR").id


def test_an_unknown_code_or_operation_follows_what_was_chosen_before() -> None:
    assert "of-upstream" == choice().after(None, "NOT_A_CODE").id
    assert "default" == choice().before("not-an-operation").id


def test_naming_the_default_policy_at_the_upstream_is_a_choice_too() -> None:
    settings = Settings.model_validate({"upstreams": {"payments": {"hosts": ["api.test"], "policy": "default"}}})
    chosen = PolicyChoice(settings, "payments", settings.upstreams["payments"], registry_of(settings))
    assert "default" == chosen.after(None, "NETWORK_TIMEOUT").id


def test_the_subsystem_is_the_upstream_or_its_label() -> None:
    assert "mapped" == choice(subsystem="billing").after("pay", "NETWORK_TIMEOUT").id


def test_a_host_nobody_configured_follows_the_code_and_the_default() -> None:
    automatic = choice(automatic=True)
    assert ("default", "of-code") == (automatic.before(None).id, automatic.after(None, "NETWORK_TIMEOUT").id)


def test_the_chosen_policy_is_the_one_under_that_name() -> None:
    chosen = choice(upstream=False, code=False).after(None, "NETWORK_TIMEOUT")
    assert (5, 10.0) == (chosen.policy.max_attempts, chosen.policy.attempt_timeout)


# ---- operations ------------------------------------------------------------------------------------------------------


def operations(*given: tuple[str, str, list[str]]) -> Operations:
    return Operations([Operation(name=name, path=path, methods=tuple(methods)) for name, path, methods in given])


def found(known: Operations, method: str, target: bytes) -> str | None:
    operation = known.match(method, target)
    return operation.name if operation is not None else None


CHARGES = operations(
    ("create", "/v1/charges", ["POST"]),
    ("read", "/v1/charges/{id}", ["GET", "HEAD"]),
    ("refund", "/v1/charges/*/refunds", ["POST"]),
    ("file", "/v1/files/{name}.json", []),
    ("reports", "/v1/reports/**", []),
    ("v1", "/v1/**", ["GET"]),
)


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("POST", b"/v1/charges", "create"),
        ("POST", b"/v1/charges?expand=a/b", "create"),
        ("GET", b"/v1/charges", "v1"),
        ("GET", b"/v1/charges/ch_1", "read"),
        ("HEAD", b"/v1/charges/ch_1?x=/y/", "read"),
        ("GET", b"/v1/charges/", "v1"),
        ("GET", b"/v1/charges/?x", "v1"),
        ("GET", b"/v1/charges/a/b", "v1"),
        ("POST", b"/v1/charges/ch_1/refunds", "refund"),
        ("POST", b"/v1/charges/a/b/refunds", None),
        ("DELETE", b"/v1/files/a.json", "file"),
        ("DELETE", b"/v1/files/aXjson", None),
        ("GET", b"/v1/reports", "reports"),
        ("PUT", b"/v1/reports/", "reports"),
        ("PUT", b"/v1/reports/2024/01?all", "reports"),
        ("PUT", b"/v1/reportsx", None),
        ("GET", b"/v1", "v1"),
        ("GET", b"/v2", None),
        ("PATCH", b"/v1/charges", None),
        ("POST", b"/v1/charges\n", None),
        ("GET", b"/v1/charges/\xff", "read"),
        ("GET", b"", None),
        ("OPTIONS", b"*", None),
    ],
)
def test_the_first_operation_whose_method_and_path_match_is_the_one(
    method: str, target: bytes, expected: str | None
) -> None:
    assert expected == found(CHARGES, method, target)


def test_a_longer_path_is_not_taken_for_the_shorter_one_before_it() -> None:
    known = operations(("short", "/a/{x}", []), ("long", "/a/b/c", []), ("rest", "/**", []))
    assert ("short", "long", "rest") == tuple(found(known, "GET", path) for path in (b"/a/b", b"/a/b/c", b"/a/b/d"))


def test_the_order_of_the_list_decides_across_methods() -> None:
    known = operations(("any", "/a", []), ("get", "/a", ["GET"]))
    assert ("any", "any") == (found(known, "GET", b"/a"), found(known, "POST", b"/a"))


def test_no_operations_match_nothing() -> None:
    none = Operations([])
    assert not none
    assert none.match("GET", b"/") is None
    assert () == none.names()


def test_operations_can_be_found_by_name() -> None:
    assert CHARGES
    assert ("create", "read", "refund", "file", "reports", "v1") == CHARGES.names()
    refund = CHARGES.named("refund")
    assert refund is not None
    assert "/v1/charges/*/refunds" == refund.path
    assert CHARGES.named("nothing") is None
