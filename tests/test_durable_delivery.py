"""The rules of the outbox, row by row of the failure matrix."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from config.durable import NotificationId, Reconcile
from sidecar.durable.delivery import (
    STATES,
    Facts,
    Found,
    Means,
    Next,
    Sent,
    after_lookup,
    after_send,
    first_step,
    found_by,
    job_state,
    notification_id_of,
    patient_delay,
)
from telemetry.record import NOT_CONNECTED, SENT

FRESH = Facts("queued", False, False, False, 0, 0, False, False)
SENDING = Facts("sending", True, False, False, 1, 0, False, False)
NOTHING = Means(lookup=False, key_honoured=False, max_attempts=5, max_lookups=3)
LOOKUP = dataclasses.replace(NOTHING, lookup=True)
KEY = dataclasses.replace(NOTHING, key_honoured=True)
RESEND = dataclasses.replace(NOTHING, resend=True)
OK = Sent(ok=True, status=202)
NOT_SENT = Sent(ok=False, code="CONNECTION_REFUSED", phase=NOT_CONNECTED)
LOST = Sent(ok=False, code="NETWORK_TIMEOUT", phase=SENT)
REFUSED = Sent(ok=False, code="VALIDATION_ERROR", status=422, phase=SENT, fatal=True)


@pytest.mark.parametrize(
    ("step", "changed"),
    [
        ("send", {}),
        ("reconcile", {"started": True}),
        ("reconcile", {"state": "reconcile"}),
        ("none", {"state": "sent", "notified": True, "evidence": True}),
        ("reconcile", {"state": "sent", "notified": True}),
        ("none", {"state": "failed"}),
        ("none", {"state": "unknown", "started": True}),
    ],
)
def test_a_row_is_read_again_before_anything_is_sent(step: str, changed: dict[str, Any]) -> None:
    assert step == first_step(dataclasses.replace(FRESH, **changed), NOTHING)


@pytest.mark.parametrize("means", [NOTHING, LOOKUP, KEY])
def test_success_is_sent_and_never_looked_at_again(means: Means) -> None:
    assert Next("sent", "never", started=True) == after_send(SENDING, OK, means)


@pytest.mark.parametrize("means", [NOTHING, LOOKUP, KEY])
def test_what_certainly_was_not_executed_goes_again_later(means: Means) -> None:
    assert Next("queued", "later") == after_send(SENDING, NOT_SENT, means)


def test_what_may_have_been_executed_is_asked_for_before_it_goes_again() -> None:
    assert Next("reconcile", "later", started=True, ambiguous=True) == after_send(SENDING, LOST, LOOKUP)
    assert Next("reconcile", "later", started=True, ambiguous=True) == after_send(SENDING, LOST, KEY)
    assert Next("unknown", "never", started=True, ambiguous=True) == after_send(SENDING, LOST, NOTHING)


def test_an_earlier_doubt_is_not_forgotten() -> None:
    doubtful = dataclasses.replace(SENDING, ambiguous=True)
    assert "reconcile" == after_send(doubtful, NOT_SENT, LOOKUP).state
    assert "unknown" == after_send(doubtful, NOT_SENT, NOTHING).state
    assert "unknown" == after_send(doubtful, REFUSED, NOTHING).state
    assert "unknown" == after_send(doubtful, REFUSED, KEY).state


def test_nothing_is_failed_before_the_provider_was_asked_where_it_can_be() -> None:
    assert Next("reconcile", "now", started=True, giving_up=True) == after_send(SENDING, REFUSED, LOOKUP)
    assert Next("failed", "never") == after_send(SENDING, REFUSED, NOTHING)
    last = dataclasses.replace(SENDING, attempts=5)
    assert Next("failed", "never") == after_send(last, NOT_SENT, NOTHING)
    assert Next("unknown", "never", started=True, ambiguous=True) == after_send(last, LOST, KEY)


def test_what_the_sidecar_held_back_changes_nothing() -> None:
    held = Sent(ok=False, code="CIRCUIT_OPEN", held_back=True)
    assert Next("queued", "later") == after_send(SENDING, held, NOTHING)


def test_sent_but_not_noted_is_noted_without_a_second_send() -> None:
    assert Next("sent", "never", started=True) == after_lookup(SENDING, Found(True, "m1"), LOOKUP)


def test_noted_but_not_sent_is_cleared_and_queued() -> None:
    marked = dataclasses.replace(FRESH, state="sent", notified=True)
    assert "reconcile" == first_step(marked, LOOKUP)
    assert Next("queued", "now") == after_lookup(marked, Found(False), LOOKUP)


def test_a_provider_that_does_not_say_is_asked_again_and_then_an_operator() -> None:
    asked = dataclasses.replace(SENDING, lookups=2)
    assert ("reconcile", "later") == after_lookup(asked, Found(None), LOOKUP)[:2]
    assert ("unknown", "never") == after_lookup(dataclasses.replace(asked, lookups=3), Found(None), LOOKUP)[:2]


def test_without_a_lookup_only_an_honoured_key_goes_again() -> None:
    assert Next("queued", "now", ambiguous=True) == after_lookup(SENDING, None, KEY)
    assert "unknown" == after_lookup(SENDING, None, NOTHING).state
    assert "unknown" == after_lookup(dataclasses.replace(SENDING, giving_up=True), None, KEY).state


def test_giving_up_is_final_once_the_provider_says_no() -> None:
    giving_up = dataclasses.replace(SENDING, giving_up=True)
    assert Next("failed", "never") == after_lookup(giving_up, Found(False), LOOKUP)


def test_no_rule_ever_queues_a_doubtful_row_where_a_second_send_would_count_twice() -> None:
    """Every combination: with neither lookup nor honoured key, what may have been executed is never sent again."""
    for state, ambiguous, giving_up, attempts in itertools.product(STATES, (False, True), (False, True), (1, 5)):
        facts = Facts(state, True, False, False, attempts, 0, ambiguous, giving_up)
        assert "queued" != after_send(facts, LOST, NOTHING).state
        assert "queued" != after_lookup(facts, None, NOTHING).state


def test_whoever_asks_for_it_has_what_may_have_been_executed_sent_again_until_the_attempts_are_used_up() -> None:
    assert Next("queued", "later", ambiguous=True) == after_send(SENDING, LOST, RESEND)
    assert Next("queued", "now", ambiguous=True) == after_lookup(SENDING, None, RESEND)
    assert "unknown" == after_send(dataclasses.replace(SENDING, attempts=5), LOST, RESEND).state
    assert "unknown" == after_send(SENDING, dataclasses.replace(LOST, fatal=True), RESEND).state


def test_with_a_lookup_it_is_sent_again_only_where_the_provider_does_not_say() -> None:
    means = dataclasses.replace(LOOKUP, resend=True)
    assert "reconcile" == after_send(SENDING, LOST, means).state
    assert "reconcile" == after_lookup(dataclasses.replace(SENDING, lookups=2), Found(None), means).state
    asked = dataclasses.replace(SENDING, lookups=3)
    assert Next("queued", "later", ambiguous=True) == after_lookup(asked, Found(None), means)
    assert "sent" == after_lookup(asked, Found(True), means).state
    assert "unknown" == after_lookup(dataclasses.replace(asked, giving_up=True), Found(None), means).state


@pytest.mark.parametrize(
    ("expected", "deliveries"),
    [
        ("succeeded", [("sent", 1), ("sent", 3)]),
        ("succeeded", []),
        ("in_progress", [("sent", 1), ("queued", 0)]),
        ("in_progress", [("sending", 2), ("failed", 5)]),
        ("retryable_failed", [("queued", 1), ("sent", 1)]),
        ("retryable_failed", [("reconcile", 1), ("unknown", 1)]),
        ("unknown", [("unknown", 1), ("failed", 5), ("sent", 1)]),
        ("failed", [("failed", 5), ("sent", 1)]),
    ],
)
def test_a_job_is_what_its_deliveries_make_it(expected: str, deliveries: list[tuple[str, int]]) -> None:
    assert expected == job_state(deliveries)


def test_the_wait_doubles_up_to_a_minute() -> None:
    assert [0, 1, 2, 4, 8, 16, 32, 60, 60] == [patient_delay(attempts) for attempts in range(9)]


@pytest.mark.parametrize(
    ("expected", "rule", "body"),
    [
        (None, None, b""),
        ("m-1", {"header": "X-Message-Id"}, b""),
        (None, {"header": "x-other"}, b""),
        ("m-2", {"json": "data.id"}, b'{"data": {"id": "m-2"}}'),
        ("7", {"json": "ids.0"}, b'{"ids": [7]}'),
        (None, {"json": "ids.x"}, b'{"ids": [7]}'),
        (None, {"json": "data.id"}, b"not json"),
        (None, {"json": "data.id"}, b"{}"),
        (None, {"json": "data"}, b'{"data": {}}'),
        (None, {"json": "data.id"}, b'{"data": 5}'),
    ],
)
def test_the_id_of_a_message_is_where_the_rule_says(expected: str | None, rule: Any, body: bytes) -> None:
    given = None if rule is None else NotificationId.model_validate(rule)
    assert expected == notification_id_of(given, [(b"x-message-id", b"m-1")], body)


@pytest.mark.parametrize(("status", "delivered"), [(200, True), (404, False), (410, False), (500, None), (None, None)])
def test_what_the_answer_to_a_lookup_means(status: int | None, delivered: bool | None) -> None:
    assert delivered == found_by(Reconcile(url="https://api.test/{key}"), status).delivered
