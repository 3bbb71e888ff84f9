"""What a request may ask for itself, and how it is told when it cannot have it."""

import re
from pathlib import Path

import pytest

from sidecar.failures import Refused
from sidecar.policy.overrides import NO_OVERRIDES, Overrides, parse, shortened

POLICIES = {"default", "patient"}
OPERATIONS = ("create_charge", "refund")


def read(*fields: tuple[bytes, bytes]) -> Overrides:
    return parse(fields, POLICIES, OPERATIONS)


def shown(overrides: Overrides) -> dict[str, object]:
    return {name: getattr(overrides, name) for name in Overrides.__slots__ if getattr(overrides, name) is not None}


@pytest.mark.parametrize(
    ("name", "value", "attribute", "expected"),
    [
        (b"x-sidecar-retry", b"off", "retry_off", True),
        (b"X-Sidecar-Retry", b" OFF\t", "retry_off", True),
        (b"x-sidecar-retry", b"on", "retry_off", False),
        (b"x-sidecar-max-attempts", b"3", "max_attempts", 3),
        (b"x-sidecar-max-attempts", b"10", "max_attempts", 10),
        (b"x-sidecar-max-attempts", b"0", "max_attempts", 1),
        (b"x-sidecar-timeout", b"2.5", "timeout", 2.5),
        (b"x-sidecar-timeout", b"86400", "timeout", 86_400.0),
        (b"x-sidecar-attempt-timeout", b"1", "attempt_timeout", 1.0),
        (b"x-sidecar-policy", b"patient", "policy", "patient"),
        (b"x-sidecar-operation", b"refund", "operation", "refund"),
        (b"x-sidecar-stage", b"fetch", "stage", "fetch"),
        (b"x-sidecar-workflow", b"order:42/a", "workflow", "order:42/a"),
        (b"x-sidecar-version", b"7", "version", 7),
        (b"x-sidecar-dead-letter", b"on", "dead_letter", True),
        (b"x-sidecar-dead-letter", b"off", "dead_letter", False),
        (b"x-sidecar-correlation-id", b"0af7-65", "correlation_id", "0af7-65"),
    ],
)
def test_each_header_is_read(name: bytes, value: bytes, attribute: str, expected: object) -> None:
    overrides = read((name, value))
    assert expected == getattr(overrides, attribute)
    assert {"retry_off", attribute} == set(shown(overrides)), "and nothing else was set"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((b"x-sidecar-retry", value) for value in (b"", b"no", b"false", b"0", b"off off", b"\xff")),
        *((b"x-sidecar-max-attempts", value) for value in (b"", b"-1", b"11", b"3.0", b"+3", b"three", b"9" * 5000)),
        *((b"x-sidecar-timeout", value) for value in (b"", b"0", b"0.0", b"-1", b"nan", b"inf", b"1e3", b"86401")),
        *((b"x-sidecar-timeout", value) for value in (b"9" * 5000, b"1.", b".5", b"1 s", "５".encode(), b"1_0")),
        *((b"x-sidecar-attempt-timeout", value) for value in (b"0", b"soon")),
        *((b"x-sidecar-policy", value) for value in (b"", b"Patient", b"unknown")),
        *((b"x-sidecar-operation", value) for value in (b"", b"charge")),
        *((b"x-sidecar-stage", value) for value in (b"", b"a b", b"-x", b"a" * 64, b"\xff")),
        *((b"x-sidecar-workflow", value) for value in (b"", b"a b", b"a" * 129, b"a\x00b", b'"')),
        *((b"x-sidecar-version", value) for value in (b"", b"-1", b"1.5", b"v2", b"9" * 19, b"9" * 30)),
        *((b"x-sidecar-dead-letter", value) for value in (b"", b"true")),
        *((b"x-sidecar-correlation-id", value) for value in (b"", b"a b", b"a" * 129)),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_the_name_of_the_header(name: bytes, value: bytes) -> None:
    with pytest.raises(Refused) as refused:
        read((name, value))
    assert ("VALIDATION_ERROR", 400, "override") == (refused.value.code, refused.value.status, refused.value.reason)
    assert refused.value.details is not None
    (error,) = refused.value.details["errors"]  # type: ignore[misc, attr-defined]
    assert name.decode() == error["field"]
    assert {"field", "value", "constraint", "message"} == set(error)
    assert error["message"] in refused.value.message
    assert len(error["value"]) <= 40


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(Refused) as refused:
        read((b"x-sidecar-retry", b"never"), (b"x-sidecar-stage", b"fetch"), (b"x-sidecar-timeout", b"-3"))
    assert {
        "errors": [
            {
                "field": "x-sidecar-retry",
                "value": "never",
                "constraint": "`on` or `off`",
                "message": "x-sidecar-retry: 'never' is not `on` or `off`",
            },
            {
                "field": "x-sidecar-timeout",
                "value": "-3",
                "constraint": "a number of seconds above 0 and up to 86400, such as 2.5",
                "message": "x-sidecar-timeout: '-3' is not a number of seconds above 0 and up to 86400, such as 2.5",
            },
        ],
        "total_errors": 2,
    } == refused.value.details


def test_an_unknown_operation_is_told_which_there_are() -> None:
    with pytest.raises(Refused, match=r"an operation of this upstream \(create_charge, refund\)"):
        read((b"x-sidecar-operation", b"charge"))
    with pytest.raises(Refused, match="an operation of this upstream; it has none"):
        parse([(b"x-sidecar-operation", b"charge")], POLICIES, ())


def test_a_name_that_is_not_known_is_ignored() -> None:
    assert {"retry_off": False} == shown(read((b"x-sidecar-frobnicate", b"yes"), (b"x-sidecar-session", b"a b c")))


def test_the_same_header_twice_must_say_the_same() -> None:
    assert 3 == read((b"x-sidecar-max-attempts", b"3"), (b"X-SIDECAR-MAX-ATTEMPTS", b"3")).max_attempts
    with pytest.raises(Refused, match="is not one value, not two different ones"):
        read((b"x-sidecar-max-attempts", b"3"), (b"x-sidecar-max-attempts", b"4"))


def test_a_long_value_is_shown_only_in_part() -> None:
    secret = "sk_live_" + "a1b2c3d4" * 10
    assert "sk_live_… (88 characters)" == shortened(secret)
    assert "short" == shortened("short")
    assert "a?b?" == shortened("a\x00b\xff")


def test_nothing_asked_for_is_one_shared_value() -> None:
    assert {"retry_off": False} == shown(NO_OVERRIDES)


def test_the_readme_has_every_header_with_a_value_that_can_be_used() -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    table = readme.partition("| a header of the request |")[2].partition("\n\n")[0]
    shown_there = re.findall(r"`(x-sidecar-[a-z-]+): ([^`]+)`", table)
    assert set(Overrides.__slots__) - {"respond_async", "retry_off"} == {
        name.removeprefix("x-sidecar-").replace("-", "_") for name, _ in shown_there
    } - {"retry"}
    for name, value in shown_there:
        assert shown(NO_OVERRIDES) != shown(read((name.encode(), value.encode())))
