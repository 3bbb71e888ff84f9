"""RetryEvents: which a session tells, who hears them, what happens to those who do not listen."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from telemetry.events import Events, RetryEvent, as_line, as_sse, serialise
from telemetry.names import RETRY_EVENTS
from telemetry.redact import Redactor
from tests.doubles.records import ARRIVED, attempt, exhausted, healthy, lived, recovered, retry, session, wall

R = Redactor()


def events(*made: Any) -> list[RetryEvent]:
    published = Events(wall)
    for each in made:
        published.session_ended(lived(published, each))
    return published.recent()[::-1]


# ---- what is told ------------------------------------------------------------------------------------------------


def test_a_recovered_session_tells_each_retry_and_its_success() -> None:
    told = [serialise(event, R) for event in events(recovered(operation="create_charge", policy_id="careful"))]
    assert ["retry_attempt", "retry_success"] == [event["event_type"] for event in told]
    first, last = told
    assert {
        "event_type": "retry_attempt",
        "timestamp": "2023-11-14T22:30:00.300Z",
        "correlation_id": "5e55107100000001",
        "session_id": "5e55107100000001",
        "policy_id": "default",
        "operation": "create_charge",
        "attempt": 2,
        "delay": 0.2,
        "component": "sidecar",
        "context": {
            "upstream": "payments",
            "outcome": "recovered",
            "status": 200,
            "endpoint": "a.test:443",
            "kind": "retry",
            "last_error": {"type": "TEMPORARY_UNAVAILABLE", "message": "the upstream answered 503"},
        },
    } == {name: value for name, value in first.items() if name != "event_id"}
    assert ("careful", 2) == (last["policy_id"], last["attempt"])
    assert first["event_id"] != last["event_id"]


def test_a_retry_is_told_when_it_begins_by_a_session_that_has_no_outcome_yet() -> None:
    published, made = Events(wall), recovered()
    made.outcome = ""
    published.attempt_begun(made)
    (event,) = published.recent()
    assert ("retry_attempt", 2, None) == (event.type, event.attempt, serialise(event, R)["context"]["outcome"])
    del made.attempts[1]  # refused before it was dialled
    assert "attempt" not in serialise(event, R)


def test_an_answer_that_is_a_failure_says_so_in_words() -> None:
    failed = session("exhausted", attempt(status=503, code="TEMPORARY_UNAVAILABLE"), status=503)
    failed.code = "TEMPORARY_UNAVAILABLE"
    (told,) = (serialise(event, R) for event in events(failed))
    assert {"type": "TEMPORARY_UNAVAILABLE", "message": "the upstream answered 503"} == told["error"]


def test_a_failed_session_tells_its_error() -> None:
    *_, last = (serialise(event, R) for event in events(exhausted(dlq_id="dlq_1", stage="fetch")))
    assert ("retry_failure", {"type": "CONNECTION_REFUSED", "message": "nothing listens on a.test:443"}) == (
        last["event_type"],
        last["error"],
    )
    assert ("attempts", "dlq_1", "fetch") == tuple(last["context"][n] for n in ("suppressed", "dlq_id", "stage"))


@pytest.mark.parametrize(
    ("made", "types"),
    [
        (healthy(took=5), []),
        (session("rejected", attempt(status=404, code="NOT_FOUND")), []),
        (session("breaker_open", status=503, code="CIRCUIT_OPEN"), ["request_failure"]),
        (
            session("cancelled", attempt(code="BAD_GATEWAY", decision=retry("BAD_GATEWAY", 1)), attempt(delay=1.0)),
            ["retry_attempt"],
        ),
    ],
)
def test_a_session_tells_of_retries_and_failures_only(made: Any, types: list[str]) -> None:
    assert types == [event.type for event in events(made)]


def test_a_state_change_has_the_fields_that_a_session_would_bring() -> None:
    published = Events(wall)
    facts = {"upstream": "payments", "why": "http://a.test/?token=abc", "count": 5}
    published.state_changed("circuit_breaker_opened", 1_700_000_000.0, facts)
    (event,) = published.recent()
    shown = serialise(event, R)
    assert (shown["event_id"], "", "", "payments") == tuple(
        shown[name] for name in ("correlation_id", "session_id", "policy_id", "operation")
    )
    assert {"upstream": "payments", "why": "http://a.test/?token=REDACTED", "count": 5} == shown["context"]


def test_every_type_of_the_model_has_a_name() -> None:
    assert 13 == len(set(RETRY_EVENTS))
    assert {event.type for event in events(recovered(), exhausted())} <= set(RETRY_EVENTS)


def test_an_event_is_one_line_and_one_server_sent_event() -> None:
    (event, _) = events(recovered())
    line = as_line(event, R)
    assert b"\n" not in line
    head, data = as_sse(event, R).split(b"\ndata: ")
    assert f"id: {event.event_id}\nevent: retry_attempt".encode() == head
    assert data.endswith(b"\n\n")
    assert json.loads(line) == json.loads(data)


# ---- who hears them ----------------------------------------------------------------------------------------------


async def taken(reader: Any, count: int) -> list[RetryEvent]:
    found: list[RetryEvent] = []
    async with asyncio.timeout(5):
        async for event in reader:
            found.append(event)
            if len(found) == count:
                return found
    return found


async def test_a_reader_hears_what_happens_from_now_on() -> None:
    published = Events(wall)
    published.session_ended(exhausted())
    reader = published.subscribe()
    published.session_ended(lived(published, recovered()))
    assert ["retry_attempt", "retry_success"] == [event.type for event in await taken(reader, 2)]
    assert 1 == published.readers
    reader.close()
    assert 0 == published.readers


async def test_a_reader_that_comes_back_hears_what_it_missed() -> None:
    published = Events(wall)
    for number in range(4):
        published.state_changed("config_changed", ARRIVED + number, {"number": number})
    last_seen = published.recent()[2].event_id
    reader = published.subscribe(last_seen)
    assert not reader.missed
    assert [2, 3] == [event.facts["number"] for event in await taken(reader, 2)]


async def test_a_reader_that_was_away_too_long_is_told_that_it_missed_something() -> None:
    published = Events(wall)
    for number in range(1500):
        published.state_changed("config_changed", ARRIVED + number, {"number": number})
    reader = published.subscribe("evt_0_10")
    assert reader.missed
    assert [500] == [event.facts["number"] for event in await taken(reader, 1)]


@pytest.mark.parametrize("last_event_id", ["", "rubbish", "evt_1_x", "evt_1_" + "9" * 40, "evt_5_99"])
async def test_an_id_from_elsewhere_brings_what_is_known(last_event_id: str) -> None:
    published = Events(wall)
    published.state_changed("config_changed", ARRIVED, {"number": 1})
    reader = published.subscribe(last_event_id)
    assert reader.missed
    assert [1] == [event.facts["number"] for event in await taken(reader, 1)]


async def test_what_an_open_breaker_refuses_does_not_push_out_why_it_opened() -> None:
    told = Events(wall)
    told.state_changed("circuit_breaker_opened", wall(ARRIVED), {"why": "20 calls in a row failed"})
    for _ in range(2_500):
        told.session_ended(exhausted())
    told.state_changed("circuit_breaker_half_open", wall(ARRIVED), {})
    for _ in range(999):
        told.session_ended(exhausted())
    known = [event async for event in told.subscribe(follow=False)]
    assert ["circuit_breaker_opened", "circuit_breaker_half_open"] == [one.type for one in (known[0], known[1])]
    assert (1000, 998) == (len(known), sum(event.type == "retry_failure" for event in known))
    assert sorted(known, key=lambda event: event.number) == known
    for _ in range(500):
        told.state_changed("circuit_breaker_opened", wall(ARRIVED), {})
        told.session_ended(exhausted())
    assert 1000 == len([event async for event in told.subscribe(follow=False)])


async def test_an_id_of_an_earlier_process_brings_everything_also_when_its_number_is_one_of_ours() -> None:
    earlier, published = Events(wall), Events(wall)
    for number in range(3):
        earlier.state_changed("config_changed", ARRIVED + number, {"number": number})
        published.state_changed("config_changed", ARRIVED + 60 + number, {"number": 10 + number})
    reader = published.subscribe(earlier.recent()[0].event_id)
    assert reader.missed
    assert [10, 11, 12] == [event.facts["number"] for event in await taken(reader, 3)]


async def test_a_reader_that_saw_the_newest_event_missed_nothing_and_hears_only_what_comes() -> None:
    published = Events(wall)
    published.state_changed("config_changed", ARRIVED, {"number": 1})
    reader = published.subscribe(published.recent()[0].event_id)
    published.state_changed("config_changed", ARRIVED, {"number": 2})
    assert not reader.missed
    assert [2] == [event.facts["number"] for event in await taken(reader, 1)]


async def test_a_slow_reader_is_cut_off_and_counted_and_others_go_on() -> None:
    published = Events(wall)
    slow, quick = published.subscribe(size=3), published.subscribe(size=100)
    for number in range(10):
        published.state_changed("config_changed", ARRIVED, {"number": number})
    assert (1, 1, True, False) == (published.slow_readers, published.readers, slow.too_slow, quick.too_slow)
    assert [0, 1, 2] == [event.facts["number"] for event in await taken(slow, 100)]
    assert list(range(10)) == [event.facts["number"] for event in await taken(quick, 10)]


async def test_at_the_end_every_reader_is_let_go() -> None:
    published = Events(wall)
    reader = published.subscribe()
    published.close()
    assert [] == await taken(reader, 1)
    assert 0 == published.readers


def test_each_event_goes_to_the_file_too() -> None:
    written: list[RetryEvent] = []
    published = Events(wall, written.append)
    published.session_ended(recovered())
    assert published.recent()[::-1] == written
