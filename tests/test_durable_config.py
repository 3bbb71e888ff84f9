"""Sections of the configuration about what is kept."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from config.durable import DeadLetter, DeadLetterStore, NotificationId, Outbox, Reconcile, Replay
from config.telemetry import Telemetry


def test_every_section_works_without_a_word() -> None:
    assert DeadLetter().enabled
    assert None is DeadLetterStore().retention
    assert "off" == Replay().auto
    assert None is Outbox().reconcile


def test_an_off_that_yaml_reads_as_false_is_off() -> None:
    assert "off" == Replay.model_validate({"auto": False}).auto
    for given, drains in (("off", ""), ("on_close", "on_close"), (["on_close", "schedule"], "on_close schedule")):
        rules = Replay.model_validate({"auto": given})
        assert drains.split() == [when for when in ("on_close", "schedule") if rules.drains(when)]


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        (DeadLetter, {"redact_paths": ["hooks"]}, "begins with a slash"),
        (DeadLetter, {"redact_paths": ["/a/{**}/b"]}, "a segment of its own"),
        (Telemetry, {"redact_paths": ["hooks/{id}"]}, "begins with a slash"),
        (DeadLetter, {"unknown": 1}, "Extra inputs"),
        (DeadLetterStore, {"notify_url": "ftp://x"}, "http:// or https://"),
        (DeadLetterStore, {"max_bytes": 10}, "greater than or equal to 1048576"),
        (Replay, {"auto": True}, "'off', 'on_close' or 'schedule'"),
        (Replay, {"credentials": "environment"}, "as in {Authorization: PAYMENTS_AUTHORIZATION}"),
        (NotificationId, {}, "either `header` or `json`"),
        (NotificationId, {"header": "x-id", "json": "id"}, "either `header` or `json`"),
        (Reconcile, {"url": "https://api.test/messages"}, "must contain {key}"),
        (Reconcile, {"url": "api.test/{key}"}, "http:// or https://"),
    ],
)
def test_what_cannot_be_meant_is_refused(section: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        section.model_validate(given)
    assert message in str(refused.value)


def test_a_complete_outbox_reads_as_in_the_specification() -> None:
    outbox = Outbox.model_validate(
        {
            "notification_id": {"json": "data.id"},
            "reconcile": {"method": "GET", "url": "https://api.test/m/{key}", "delivered_when": {"status": 200}},
        }
    )
    assert outbox.notification_id is not None and "data.id" == outbox.notification_id.json
    assert outbox.reconcile is not None and 200 == outbox.reconcile.delivered_when.status
    credentials = Replay.model_validate({"credentials": "environment", "environment": {"Authorization": "AUTH"}})
    assert {"Authorization": "AUTH"} == credentials.environment
