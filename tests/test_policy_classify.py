"""From an answer, or the lack of one, to one error code."""

import pytest

from config.errors import registry, registry_of
from config.model import Settings
from config.rules import Rule
from sidecar.policy.classify import LARGEST_JSON, Classifier, code_of, is_verdict
from sidecar.policy.verdict import Fields

JSON: Fields = [(b"Content-Type", b"application/json; charset=utf-8")]


def rule(code: str, **when: object) -> Rule:
    return Rule.model_validate({"when": when, "code": code})


def plain(*rules: Rule) -> Classifier:
    return Classifier(registry(), rules)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *((status, None) for status in (100, 200, 204, 302, 399)),
        *((400, "VALIDATION_ERROR"), (401, "INVALID_API_KEY"), (402, "CLIENT_ERROR")),
        *((403, "INSUFFICIENT_PERMISSIONS"), (404, "NOT_FOUND"), (408, "EXTERNAL_SERVICE_TIMEOUT")),
        *((409, "CONFLICT"), (410, "NOT_FOUND"), (413, "PAYLOAD_TOO_LARGE"), (415, "UNSUPPORTED_CONTENT_TYPE")),
        *((418, "CLIENT_ERROR"), (422, "VALIDATION_ERROR"), (425, "CLIENT_ERROR"), (429, "RATE_LIMIT_EXCEEDED")),
        *((451, "CONTENT_POLICY"), (499, "CLIENT_ERROR"), (500, "UPSTREAM_ERROR"), (501, "NOT_IMPLEMENTED")),
        *((502, "BAD_GATEWAY"), (503, "TEMPORARY_UNAVAILABLE"), (504, "EXTERNAL_SERVICE_TIMEOUT")),
        *((505, "VERSION_NOT_SUPPORTED"), (529, "SERVICE_OVERLOADED"), (599, "UPSTREAM_ERROR")),
    ],
)
def test_each_status_has_its_code(status: int, code: str | None) -> None:
    assert code == code_of(status)
    assert code == plain().classify(status, [], None)


def test_every_code_a_status_leads_to_is_in_the_registry() -> None:
    assert set() == {code_of(status) for status in range(400, 600)} - set(registry())


@pytest.mark.parametrize(
    ("status", "expected"),
    [(399, False), (400, True), (408, False), (429, False), (500, False), (501, True), (503, False), (505, True)],
)
def test_a_verdict_speaks_of_the_request_and_not_of_the_moment(status: int, expected: bool) -> None:
    assert expected == is_verdict(status)


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_a_rule_by_status_and_by_class_of_statuses() -> None:
    classifier = plain(rule("NOT_FOUND", status=500), rule("DUPLICATE_RECORD", status=["5xx", 409]))
    assert "NOT_FOUND" == classifier.classify(500, [], None)
    assert "DUPLICATE_RECORD" == classifier.classify(503, [], None)
    assert "DUPLICATE_RECORD" == classifier.classify(409, [], None)
    assert "VALIDATION_ERROR" == classifier.classify(400, [], None)


def test_the_upstreams_rules_come_before_the_global_ones() -> None:
    ours, everyones = rule("NOT_FOUND", status=500), rule("CONFLICT", status=500)
    assert "NOT_FOUND" == Classifier(registry(), [ours], [everyones]).classify(500, [], None)
    assert "CONFLICT" == Classifier(registry(), [], [everyones]).classify(500, [], None)


@pytest.mark.parametrize(
    ("wanted", "value", "matches"),
    [
        ("yes", b"yes", True),
        ("Yes", b"  yEs\t", True),
        ("yes", b"yes please", False),
        ("*", b"", True),
        ("*", b"anything", True),
        ("true", b"\xff", False),
    ],
)
def test_a_rule_by_header_compares_the_whole_value(wanted: str, value: bytes, matches: bool) -> None:
    classifier = plain(rule("QUOTA_EXCEEDED", header={"X-Quota": wanted}))
    assert ("QUOTA_EXCEEDED" if matches else "CLIENT_ERROR") == classifier.classify(402, [(b"x-QUOTA", value)], None)


def test_of_a_header_sent_twice_one_match_is_enough_and_of_two_headers_both_must_match() -> None:
    classifier = plain(rule("QUOTA_EXCEEDED", header={"a": "1", "b": "*"}))
    assert "QUOTA_EXCEEDED" == classifier.classify(400, [(b"a", b"0"), (b"a", b"1"), (b"b", b"x")], None)
    assert "VALIDATION_ERROR" == classifier.classify(400, [(b"a", b"1")], None)


@pytest.mark.parametrize(
    ("place", "wanted", "body", "matches"),
    [
        ("error.type", "rate", b'{"error": {"type": "rate"}}', True),
        ("error.type", "rate", b'{"error": {"type": "Rate"}}', False),
        ("error.type", ["a", "rate"], b'{"error": {"type": "rate"}}', True),
        ("error.type", "rate", b'{"error": "rate"}', False),
        ("error.type", "rate", b'{"error": {"type": ["rate"]}}', False),
        ("errors.0.code", 7, b'{"errors": [{"code": 7}]}', True),
        ("errors.0.code", 7, b'{"errors": [{"code": 7.0}]}', True),
        ("errors.0.code", 7, b'{"errors": [{"code": "7"}]}', False),
        ("errors.1.code", 7, b'{"errors": [{"code": 7}]}', False),
        ("errors.-1.code", 7, b'{"errors": [{"code": 7}]}', False),
        ("errors.0.code", 7, b'{"errors": {"0": {"code": 7}}}', True),
        ("ok", False, b'{"ok": false}', True),
        ("ok", False, b'{"ok": 0}', False),
        ("ok", 1, b'{"ok": true}', False),
        ("ok", None, b'{"ok": null}', True),
        ("ok", None, b"{}", False),
        ("ok", None, b"", False),
        ("ok", None, b"null", False),
        ("0", "x", b'["x"]', True),
        ("a.b.c", "x", b'"x"', False),
    ],
)
def test_a_rule_by_a_place_in_the_body(place: str, wanted: object, body: bytes, matches: bool) -> None:
    classifier = plain(rule("QUOTA_EXCEEDED", json={place: wanted}))
    assert ("QUOTA_EXCEEDED" if matches else None) == classifier.classify(200, JSON, body)


def test_a_body_that_is_not_there_whole_matches_no_rule_about_bodies() -> None:
    assert "UPSTREAM_ERROR" == plain(rule("QUOTA_EXCEEDED", json={"a": 1})).classify(500, JSON, None)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"a": 1',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe\x00",
        b'{"a": "\xff"}',
        b'{"a": 1e99999}',
        b"\x1f\x8b\x08",
        b'{"a": 1}' + b" " * LARGEST_JSON,
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_broken_too_deep_or_too_large_matches_nothing_and_does_no_harm(body: bytes) -> None:
    assert "UPSTREAM_ERROR" == plain(rule("QUOTA_EXCEEDED", json={"a": 1})).classify(500, JSON, body)


def test_all_keys_of_a_rule_must_match() -> None:
    classifier = plain(rule("QUOTA_EXCEEDED", status=429, header={"x": "1"}, json={"a": 1}))
    assert "QUOTA_EXCEEDED" == classifier.classify(429, [(b"x", b"1")], b'{"a": 1}')
    assert "RATE_LIMIT_EXCEEDED" == classifier.classify(429, [(b"x", b"1")], b'{"a": 2}')
    assert "RATE_LIMIT_EXCEEDED" == classifier.classify(429, [(b"x", b"2")], b'{"a": 1}')
    assert "VALIDATION_ERROR" == classifier.classify(400, [(b"x", b"1")], b'{"a": 1}')


def test_a_failure_without_an_answer_keeps_its_code_unless_a_rule_gives_another() -> None:
    classifier = plain(
        rule("DATABASE_CONNECTION_ERROR", exception="CONNECTION_RESET"),
        rule("NOT_FOUND", exception=["CONNECTION_RESET", "DNS_FAILURE"]),
    )
    assert "DATABASE_CONNECTION_ERROR" == classifier.of_failure("CONNECTION_RESET")
    assert "NOT_FOUND" == classifier.of_failure("DNS_FAILURE")
    assert "NETWORK_TIMEOUT" == classifier.of_failure("NETWORK_TIMEOUT")


def test_a_rule_about_failures_matches_no_answer() -> None:
    assert None is plain(rule("NOT_FOUND", exception="DNS_FAILURE")).classify(200, [], b"")


# ---- healthy answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "fields", "body"),
    [
        ({"status": "5xx"}, False, False),
        ({"status": 404, "json": {"a": 1}}, False, False),
        ({"exception": "DNS_FAILURE"}, False, False),
        ({"status": 204}, True, False),
        ({"header": {"x-error": "*"}}, True, False),
        ({"json": {"ok": False}}, True, True),
        ({"status": "2xx", "json": {"ok": False}}, True, True),
    ],
)
def test_healthy_answers_are_looked_at_only_when_a_rule_could_match_them(
    when: dict[str, object], fields: bool, body: bool
) -> None:
    classifier = plain(rule("NOT_FOUND", **when))
    assert (fields, body) == (classifier.needs_fields_for_success, classifier.needs_body_for_success)


def test_an_error_in_a_200_is_one_when_a_rule_says_so() -> None:
    classifier = plain(rule("SERVICE_OVERLOADED", status=200, json={"status": "busy"}))
    assert "SERVICE_OVERLOADED" == classifier.classify(200, [], b'{"status": "busy"}')
    assert classifier.classify(200, [], b'{"status": "fine"}') is None


# ---- understood without a rule ---------------------------------------------------------------------------------------


def test_a_known_error_code_in_the_body_wins_over_the_status() -> None:
    assert "API_KEY_EXPIRED" == plain().classify(401, JSON, b'{"error_code": "API_KEY_EXPIRED"}')
    assert "DATABASE_CONNECTION_ERROR" == plain().classify(
        500, [(b"content-type", b"application/problem+json")], b'{"error_code": "DATABASE_CONNECTION_ERROR"}'
    )


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (JSON, b'{"error_code": "NEVER_HEARD_OF"}'),
        (JSON, b'{"error_code": ["API_KEY_EXPIRED"]}'),
        (JSON, b'{"error_code": {"a": 1}}'),
        (JSON, b'["error_code"]'),
        (JSON, b"API_KEY_EXPIRED"),
        (JSON, b""),
        (JSON, None),
        ([], b'{"error_code": "API_KEY_EXPIRED"}'),
        ([(b"content-type", b"text/plain")], b'{"error_code": "API_KEY_EXPIRED"}'),
    ],
)
def test_anything_else_in_the_body_is_no_error_code(fields: Fields, body: bytes | None) -> None:
    assert "UPSTREAM_ERROR" == plain().classify(500, fields, body)


def test_an_error_code_in_a_success_is_none() -> None:
    assert plain().classify(200, JSON, b'{"error_code": "API_KEY_EXPIRED"}') is None


def test_a_rule_wins_over_the_error_code_in_the_body() -> None:
    classifier = plain(rule("NOT_FOUND", status=401))
    assert "NOT_FOUND" == classifier.classify(401, JSON, b'{"error_code": "API_KEY_EXPIRED"}')


def test_codes_added_by_the_configuration_are_understood_too() -> None:
    settings = Settings.model_validate(
        {
            "error_codes": {
                "CARD_DECLINED": {
                    "category": "PERMANENT",
                    "severity": "low",
                    "retry": "fatal",
                    "status": 402,
                    "description": "The bank said no.",
                }
            }
        }
    )
    assert "CARD_DECLINED" == Classifier(registry_of(settings)).classify(402, JSON, b'{"error_code": "CARD_DECLINED"}')


@pytest.mark.parametrize(
    ("status", "field", "code"),
    [
        (503, (b"X-Envoy-Overloaded", b"true"), "SERVICE_OVERLOADED"),
        (503, (b"x-overloaded", b""), "SERVICE_OVERLOADED"),
        (503, (b"x-overload", b"False"), "TEMPORARY_UNAVAILABLE"),
        (503, (b"x-other", b"true"), "TEMPORARY_UNAVAILABLE"),
        (500, (b"x-overloaded", b"true"), "UPSTREAM_ERROR"),
    ],
)
def test_a_503_with_an_overload_header(status: int, field: tuple[bytes, bytes], code: str) -> None:
    assert code == plain().classify(status, [field], None)
