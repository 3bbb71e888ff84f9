"""Which failures are kept, with which credential they go out again, and who is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from config.durable import DeadLetter, DeadLetterStore, Replay
from sidecar.durable.credentials import Credentials
from sidecar.durable.eligible import OUTCOMES, answers_accepted, worth_keeping
from sidecar.durable.entry import Entry, Failure
from sidecar.durable.notify import Notifier
from sidecar.durable.trouble import NotNow
from telemetry.record import GOOD
from tests.durability.rigs import START, failed, rig_in


def kept(rules: dict[str, Any] | None = None, **changed: Any) -> bool:
    given: dict[str, Any] = {
        "outcome": "exhausted",
        "method": "POST",
        "code": "NETWORK_TIMEOUT",
        "category": "TRANSIENT",
        "failed_attempts": 4,
    }
    return worth_keeping(DeadLetter.model_validate(rules or {}), **{**given, **changed})


def test_every_bad_end_is_kept_and_no_good_one() -> None:
    assert all(kept(outcome=outcome) for outcome in OUTCOMES)
    assert not any(kept(outcome=outcome) for outcome in (*GOOD, "denied", "failed_streaming"))


@pytest.mark.parametrize(
    ("expected", "rules", "changed"),
    [
        (True, {}, {"method": "DELETE"}),
        (False, {}, {"method": "GET"}),
        (True, {"methods": ["GET"]}, {"method": "GET"}),
        (False, {"enabled": False}, {}),
        (True, {}, {"outcome": "rejected", "code": "INVALID_API_KEY", "category": "CRITICAL"}),
        (False, {}, {"outcome": "rejected", "code": "VALIDATION_ERROR", "category": "PERMANENT"}),
        (True, {"codes": ["VALIDATION_ERROR"]}, {"code": "VALIDATION_ERROR", "category": "PERMANENT"}),
        (False, {"codes": ["VALIDATION_ERROR"]}, {}),
        (True, {}, {"outcome": "cancelled", "failed_attempts": 1}),
        (False, {}, {"outcome": "cancelled", "failed_attempts": 0}),
        (True, {}, {"outcome": "denied", "interrupted": True}),
        (False, {}, {"asked": False}),
        (True, {"enabled": False}, {"asked": True, "method": "GET"}),
        (False, {}, {"asked": True, "outcome": "recovered"}),
    ],
)
def test_settings_and_the_request_itself_narrow_and_widen(
    expected: bool, rules: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert expected == kept(rules, **changed)


def test_accepted_is_said_only_for_what_may_pass() -> None:
    accepted = DeadLetter(respond="accepted")
    assert answers_accepted(accepted, "TRANSIENT")
    assert not answers_accepted(accepted, "CRITICAL")
    assert not answers_accepted(DeadLetter(), "TRANSIENT")


# ---- credentials -------------------------------------------------------------------------------------------------

OLD = [(b"Accept", b"*/*"), (b"Authorization", b"Bearer old"), (b"X-Other", b"1")]


async def an_entry(tmp_path: Path, api_key_id: str = "caller") -> Entry:
    async with rig_in(tmp_path) as rig:
        found: Entry = await rig.entry((await rig.letters.keep(failed(api_key_id=api_key_id))).dlq_id)
        return found


def rules(**given: Any) -> Replay:
    return Replay.model_validate(given)


async def test_the_sealed_credential_is_used_unless_said_otherwise(tmp_path: Path) -> None:
    entry = await an_entry(tmp_path)
    credentials = Credentials()
    credentials.seen("payments", "caller", [(b"authorization", b"Bearer new")])
    assert OLD == credentials.headers_for(entry, OLD, rules(), {})


async def test_the_newest_live_one_of_the_same_caller_takes_its_place(tmp_path: Path) -> None:
    entry = await an_entry(tmp_path)
    credentials = Credentials()
    for value in (b"Bearer 1", b"Bearer 2"):
        credentials.seen("payments", "caller", [(b"authorization", value), (b"accept", b"x"), (b"X-API-Key", b"k")])
    credentials.seen("payments", "somebody", [(b"authorization", b"Bearer theirs")])
    credentials.seen("other", "caller", [(b"authorization", b"Bearer elsewhere")])
    credentials.seen("payments", "caller", [(b"accept", b"nothing to remember")])
    assert [(b"Accept", b"*/*"), (b"Authorization", b"Bearer 2"), (b"X-Other", b"1"), (b"X-API-Key", b"k")] == (
        credentials.headers_for(entry, OLD, rules(credentials="live"), {})
    )


async def test_without_a_live_one_nothing_is_sent(tmp_path: Path) -> None:
    entry = await an_entry(tmp_path)
    credentials = Credentials()
    credentials.seen("payments", "somebody", [(b"authorization", b"Bearer theirs")])
    with pytest.raises(NotNow, match="let the application make a call"):
        credentials.headers_for(entry, OLD, rules(credentials="live"), {})
    shared = rules(credentials="live", single_credential=True)
    assert (b"Authorization", b"Bearer theirs") in credentials.headers_for(entry, OLD, shared, {})
    credentials.seen("payments", "caller", [(b"authorization", b"Bearer own")])
    assert (b"Authorization", b"Bearer own") in credentials.headers_for(entry, OLD, shared, {})


async def test_a_variable_that_ends_with_a_line_end_is_used_without_it_and_one_of_two_lines_refused(
    tmp_path: Path,
) -> None:
    entry, asked = await an_entry(tmp_path), rules(credentials="environment", environment={"Authorization": "AUTH"})
    sent = Credentials().headers_for(entry, OLD, asked, {"AUTH": "Bearer fresh\n"})
    assert (b"Authorization", b"Bearer fresh") in sent
    with pytest.raises(NotNow, match="AUTH holds a character"):
        Credentials().headers_for(entry, OLD, asked, {"AUTH": "Bearer fresh\r\nX-Admin: yes"})


async def test_a_variable_can_hold_it(tmp_path: Path) -> None:
    entry = await an_entry(tmp_path)
    named = rules(credentials="environment", environment={"authorization": "AUTH"})
    doubled = [*OLD, (b"authorization", b"Bearer second")]
    assert [(b"Accept", b"*/*"), (b"Authorization", b"Bearer env"), (b"X-Other", b"1")] == (
        Credentials().headers_for(entry, doubled, named, {"AUTH": "Bearer env"})
    )
    with pytest.raises(NotNow, match=r"AUTH that `replay\.environment` of payments names is not set"):
        Credentials().headers_for(entry, OLD, named, {})


async def test_only_so_many_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.credentials._MOST", 2)
    entry = await an_entry(tmp_path)
    credentials = Credentials()
    credentials.seen("payments", "caller", [(b"authorization", b"1")])
    credentials.seen("payments", "b", [(b"authorization", b"2")])
    credentials.seen("other", "c", [(b"authorization", b"3")])
    with pytest.raises(NotNow):
        credentials.headers_for(entry, OLD, rules(credentials="live"), {})
    shared = rules(credentials="live", single_credential=True)
    assert (b"Authorization", b"2") in credentials.headers_for(entry, OLD, shared, {})
    credentials.seen("other", "d", [(b"authorization", b"4")])
    with pytest.raises(NotNow):
        credentials.headers_for(entry, OLD, shared, {})


# ---- notifications -----------------------------------------------------------------------------------------------


async def test_one_message_per_upstream_and_code_within_a_window() -> None:
    posted: list[tuple[str, dict[str, Any]]] = []
    now = [START]

    async def post(url: str, message: dict[str, Any]) -> None:
        posted.append((url, message))
        if len(posted) == 2:
            raise OSError("nobody there")

    notifier = Notifier(DeadLetterStore(notify_url="https://hook.test/x"), post, lambda: now[0])
    for number in range(5):
        notifier.kept("payments", "NETWORK_TIMEOUT", f"dlq_{number}")
    notifier.kept("payments", "BAD_GATEWAY", "dlq_9")
    now[0] += 301
    notifier.kept("payments", "NETWORK_TIMEOUT", "dlq_10")
    await asyncio.sleep(0.01)
    assert [("NETWORK_TIMEOUT", 0), ("BAD_GATEWAY", 0), ("NETWORK_TIMEOUT", 4)] == [
        (message["error_class"], message["since_last_notice"]) for _, message in posted
    ]
    assert ("https://hook.test/x", "dlq_10", "2027-01-15T08:05:01.000Z") == (
        posted[-1][0],
        posted[-1][1]["dlq_id"],
        posted[-1][1]["at"],
    )
    assert 1 == notifier.failures


async def test_without_a_url_nobody_is_told_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.notify._MOST", 2)
    posted: list[str] = []

    async def post(url: str, message: dict[str, Any]) -> None:
        posted.append(message["error_class"])

    Notifier(DeadLetterStore(), post).kept("u", "A", "d")
    notifier = Notifier(DeadLetterStore(notify_url="https://hook.test/"), post)
    for code in ("A", "B", "C", "C"):
        notifier.kept("u", code, "d")
    await asyncio.sleep(0.01)
    assert ["A", "B", "C"] == posted


async def test_whoever_wants_to_know_is_told_about_every_entry(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        told: list[tuple[Failure, bool]] = []
        rig.letters.on_kept = lambda failure, kept: told.append((failure, kept.created))
        for _ in range(2):
            await rig.letters.keep(failed(idempotency_key="k"))
        assert [True, False] == [created for _, created in told]
