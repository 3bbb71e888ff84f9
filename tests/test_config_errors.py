"""The registry of error codes: complete, consistent, and useful to the person who looks a code up."""

import dataclasses
from pathlib import Path

import pytest

from config import errors
from config.document import parse
from config.errors import BrokenRegistry, ErrorCode, parse_registry, registry

DATA = Path(errors.__file__).with_name("errors.yaml")

# Every code of the product, with its category, whether it is sent again, and the status when there is no answer.
EXPECTED = {
    "DNS_FAILURE": ("TRANSIENT", "retryable", 502),
    "CONNECTION_REFUSED": ("TRANSIENT", "retryable", 502),
    "CONNECT_TIMEOUT": ("TRANSIENT", "retryable", 504),
    "TLS_FAILURE": ("CRITICAL", "fatal", 502),
    "CONNECTION_RESET": ("TRANSIENT", "retryable", 502),
    "NETWORK_TIMEOUT": ("TRANSIENT", "retryable", 504),
    "PROTOCOL_ERROR": ("TRANSIENT", "retryable", 502),
    "EXTERNAL_SERVICE_TIMEOUT": ("TRANSIENT", "retryable", 504),
    "BAD_GATEWAY": ("TRANSIENT", "retryable", 502),
    "TEMPORARY_UNAVAILABLE": ("TRANSIENT", "retryable", 503),
    "UPSTREAM_ERROR": ("TRANSIENT", "retryable", 502),
    "SERVICE_OVERLOADED": ("TRANSIENT", "retryable", 503),
    "DATABASE_CONNECTION_ERROR": ("TRANSIENT", "retryable", 503),
    "RATE_LIMIT_EXCEEDED": ("TRANSIENT", "retryable", 429),
    "QUOTA_EXCEEDED": ("TRANSIENT", "retryable", 429),
    "CONFLICT": ("TRANSIENT", "conditional", 409),
    "SLOT_CONFLICT": ("TRANSIENT", "conditional", 409),
    "VALIDATION_QUEUE_FULL": ("TRANSIENT", "conditional", 503),
    "IDEMPOTENCY_CONFLICT": ("TRANSIENT", "conditional", 409),
    "INVALID_API_KEY": ("CRITICAL", "fatal", 401),
    "API_KEY_EXPIRED": ("CRITICAL", "fatal", 401),
    "INSUFFICIENT_PERMISSIONS": ("CRITICAL", "fatal", 403),
    "VALIDATION_ERROR": ("PERMANENT", "fatal", 400),
    "MALFORMED_JSON": ("PERMANENT", "fatal", 400),
    "UNSUPPORTED_CONTENT_TYPE": ("PERMANENT", "fatal", 415),
    "PAYLOAD_TOO_LARGE": ("PERMANENT", "fatal", 413),
    "NOT_FOUND": ("PERMANENT", "fatal", 404),
    "DUPLICATE_RECORD": ("PERMANENT", "fatal", 409),
    "BUSINESS_RULE_VIOLATION": ("PERMANENT", "fatal", 422),
    "CONTENT_POLICY": ("PERMANENT", "fatal", 451),
    "CLIENT_ERROR": ("PERMANENT", "fatal", 400),
    "CIRCUIT_OPEN": ("TRANSIENT", "fatal", 503),
    "RETRY_BUDGET_EXHAUSTED": ("TRANSIENT", "fatal", 503),
    "DEADLINE_EXCEEDED": ("TRANSIENT", "fatal", 504),
    "CLIENT_DISCONNECTED": ("TRANSIENT", "fatal", 499),
    "NO_ROUTE": ("PERMANENT", "fatal", 404),
    "EGRESS_DENIED": ("PERMANENT", "fatal", 403),
    "LOOP_DETECTED": ("PERMANENT", "fatal", 508),
    "PROXY_AUTH_REQUIRED": ("CRITICAL", "fatal", 407),
    "MALFORMED_REQUEST": ("PERMANENT", "fatal", 400),
    "TARGET_TOO_LONG": ("PERMANENT", "fatal", 414),
    "HEADERS_TOO_LARGE": ("PERMANENT", "fatal", 431),
    "NOT_IMPLEMENTED": ("PERMANENT", "fatal", 501),
    "VERSION_NOT_SUPPORTED": ("PERMANENT", "fatal", 505),
    "OVERLOADED": ("TRANSIENT", "fatal", 503),
    "SHUTTING_DOWN": ("TRANSIENT", "conditional", 503),
    "DLQ_FULL": ("CRITICAL", "fatal", 503),
    "DLQ_BODY_NOT_KEPT": ("CRITICAL", "fatal", 503),
    "SIDECAR_INTERNAL": ("CRITICAL", "fatal", 500),
}

SOUND = {
    "category": "TRANSIENT",
    "severity": "low",
    "retry": "fatal",
    "status": "500",
    "description": "What happened.",
    "causes": "[Something.]",
    "resolution": "Do this.",
    "examples": "[500 with no body.]",
    "related": "[]",
    "policy": "null",
}


def written(code: str = "SOME_CODE", **changed: str | None) -> str:
    """One entry of a registry as text; None leaves a key out."""
    lines = [f"  {key}: {value}" for key, value in {**SOUND, **changed}.items() if value is not None]
    return "\n".join([f"{code}:", *lines, ""])


def test_every_code_of_the_product_is_there_with_its_verdict() -> None:
    assert EXPECTED == {code: (entry.category, entry.retry, entry.status) for code, entry in registry().items()}


def test_no_code_is_written_down_twice() -> None:
    assert () == parse(DATA.read_text(encoding="utf-8")).faults


def test_every_entry_knows_its_own_code() -> None:
    assert list(registry()) == [entry.code for entry in registry().values()]


@pytest.mark.parametrize("code", sorted(EXPECTED))
def test_an_entry_speaks_in_sentences(code: str) -> None:
    entry = registry()[code]
    for sentence in (entry.description, entry.resolution, *entry.causes):
        assert sentence[0].isupper()
        assert sentence.endswith((".", ".)"))
        assert "\n" not in sentence


@pytest.mark.parametrize("code", sorted(EXPECTED))
def test_an_entry_leads_to_other_codes_but_not_to_itself(code: str) -> None:
    related = registry()[code].related
    assert related
    assert code not in related
    assert len(set(related)) == len(related)
    assert set(related) <= registry().keys()


def test_it_is_read_once_and_cannot_be_changed() -> None:
    entries = registry()
    assert entries is registry()
    with pytest.raises(TypeError):
        entries["NEW"] = entries["CONFLICT"]  # type: ignore[index]  # that it cannot be set is the point
    with pytest.raises(dataclasses.FrozenInstanceError):
        entries["CONFLICT"].status = 200  # type: ignore[misc]  # likewise


def test_an_entry_is_small() -> None:
    assert not hasattr(registry()["CONFLICT"], "__dict__")


def test_a_sound_entry_is_read() -> None:
    assert {
        "SOME_CODE": ErrorCode(
            code="SOME_CODE",
            category="TRANSIENT",
            severity="low",
            retry="fatal",
            status=500,
            description="What happened.",
            causes=("Something.",),
            resolution="Do this.",
            examples=("500 with no body.",),
            related=(),
            policy=None,
        )
    } == dict(parse_registry(written()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no error codes"),
        ("- A", "holds no error codes"),
        ("A: 5", "A: holds no keys"),
        (written("lower_case"), "lower_case: a code is written in capitals"),
        (written(retry=None), "SOME_CODE: `retry` is missing"),
        (written(colour="red"), "`colour` is not a key"),
        (written(category="WORSE"), "`category` must be one of TRANSIENT, PERMANENT, CRITICAL"),
        (written(category="[TRANSIENT]"), "`category` must be one of"),
        (written(severity="LOW"), "`severity` must be one of low, medium, high, critical"),
        (written(retry="maybe"), "`retry` must be one of retryable, fatal, conditional"),
        (written(status="200"), "`status` must be a number from 400 to 599"),
        (written(status="'500'"), "`status` must be a number"),
        (written(status="true"), "`status` must be a number"),
        (written(description="''"), "`description` must be text"),
        (written(resolution="[a]"), "`resolution` must be text"),
        (written(causes="Something."), "`causes` must be a list of text"),
        (written(causes="[]"), "`causes` is empty"),
        (written(examples="[]"), "`examples` is empty"),
        (written(examples="one"), "`examples` must be a list of text"),
        (written(policy="[a]"), "`policy` must be the name of a policy, or null"),
        (written(policy=None), "SOME_CODE: `policy` is missing"),
        (written(related="[5]"), "`related` must be a list of text"),
        (written(related="[OTHER]"), "`related` names OTHER, which is not a code"),
        (written(related="[SOME_CODE]"), "`related` names the code itself"),
        (written(related="[[a]]"), "`related` must be a list of text"),
        ("A: [", "not valid YAML"),
    ],
)
def test_a_registry_with_a_hole_is_refused_as_a_whole(text: str, words: str) -> None:
    with pytest.raises(BrokenRegistry) as caught:
        parse_registry(text)
    assert words in str(caught.value)


def test_everything_wrong_with_a_registry_is_told_at_once() -> None:
    with pytest.raises(BrokenRegistry) as caught:
        parse_registry(written("ONE", retry="maybe", status="7") + written("TWO", severity=None))
    assert ["ONE", "ONE", "TWO"] == [line.partition(":")[0] for line in str(caught.value).splitlines()[1:]]
