"""May it be sent again? Section by section."""

import pytest

from config.idempotency import Idempotency
from sidecar.policy.resend import APP_KEY, IDEMPOTENT, INJECTED_KEY, NO_KEY, honoured, judge
from telemetry.record import CONNECTED, NOT_CONNECTED, PARTLY_SENT, SENT

METHODS = ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "POST", "PATCH", "LOCK"]
SENT_PHASES = [PARTLY_SENT, SENT, 4, 99, -1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", [NOT_CONNECTED, CONNECTED])
def test_what_was_never_sent_may_always_be_sent(phase: int, method: str) -> None:
    assert judge(phase, method, keyed=False).allowed


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", SENT_PHASES)
def test_what_was_sent_only_with_an_idempotent_method_and_an_unknown_phase_counts_as_sent(
    phase: int, method: str
) -> None:
    assert (method in IDEMPOTENT) == judge(phase, method, keyed=False).allowed


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("phase", SENT_PHASES)
def test_what_was_sent_with_any_method_when_something_makes_it_safe(phase: int, method: str) -> None:
    assert judge(phase, method, keyed=True).allowed
    assert judge(phase, method, keyed=False, not_executed=True).allowed
    assert judge(phase, method, keyed=False, retry_non_idempotent=True).allowed


@pytest.mark.parametrize(
    ("key", "honours", "expected"),
    [
        (NO_KEY, None, False),
        (NO_KEY, True, False),
        (APP_KEY, None, True),
        (APP_KEY, True, True),
        (APP_KEY, False, False),
        (INJECTED_KEY, None, False),
        (INJECTED_KEY, True, True),
        (INJECTED_KEY, False, False),
    ],
)
def test_whose_key_is_honoured(key: str, honours: bool | None, expected: bool) -> None:
    assert expected == honoured(key, Idempotency(provider_honours=honours))


def test_where_idempotency_is_off_no_key_is_honoured() -> None:
    assert not honoured(APP_KEY, Idempotency(enabled=False, provider_honours=True))


def test_the_refusal_names_what_is_missing_and_what_would_have_helped() -> None:
    assert (
        False,
        "POST, body fully sent, no Idempotency-Key",
        "an Idempotency-Key: with one it would have been",
    ) == judge(SENT, "POST", keyed=False)
    assert "PATCH, body partly sent, no X-Key" == judge(PARTLY_SENT, "PATCH", keyed=False, header="X-Key").rule


def test_the_refusal_of_a_request_with_a_key_says_why_the_key_does_not_help() -> None:
    own = judge(SENT, "POST", keyed=False, key=APP_KEY)
    assert "POST, body fully sent, the provider does not honour its Idempotency-Key" == own.rule
    injected = judge(SENT, "POST", keyed=False, key=INJECTED_KEY)
    assert "POST, body fully sent, the provider is not known to honour the injected Idempotency-Key" == injected.rule
    assert "`idempotency.provider_honours: true`, if the provider executes a key only once" == injected.remedy


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"phase": CONNECTED, "method": "POST", "keyed": True}, "nothing was sent"),
        ({"phase": SENT, "method": "GET", "keyed": True, "not_executed": True}, "the answer says it was not executed"),
        ({"phase": SENT, "method": "GET", "keyed": True}, "the method is idempotent"),
        ({"phase": SENT, "method": "POST", "keyed": True}, "the provider honours the idempotency key"),
        (
            {"phase": SENT, "method": "POST", "keyed": False, "retry_non_idempotent": True},
            "retry_non_idempotent: true",
        ),
    ],
)
def test_the_leave_names_the_first_reason_that_holds(asked: dict[str, object], rule: str) -> None:
    assert (True, rule, "") == judge(**asked)  # type: ignore[arg-type]


def test_nobody_is_told_to_send_a_key_that_would_not_be_honoured() -> None:
    refused = judge(SENT, "POST", keyed=False, key_helps=False)
    assert (False, True, False) == (
        refused.allowed,
        "no idempotency key is honoured here" in refused.rule,
        "Idempotency-Key" in refused.remedy,
    )
