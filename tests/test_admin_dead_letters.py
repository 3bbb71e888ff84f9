"""Dead letters over HTTP: listed, read, annotated, remediated, edited, discarded; nothing secret, nothing lost."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sidecar import clock
from sidecar.durable.trouble import NotKept
from telemetry.record import SENT
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import DENIED, Moody, keep, send, store
from tests.doubles.upstream import Upstream
from tests.test_admin import admin, at_fault

UNANSWERED = {"code": "NETWORK_TIMEOUT", "phase": SENT}


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter) -> Upstream:
    return await start_upstream(Moody())


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream) -> Running:
    payments = {"route": "/pay", "endpoints": [upstream.url], "breaker": {"enabled": False}}
    return await start_sidecar(upstreams={"payments": payments})


async def ids(sidecar: Running, query: str = "") -> list[str]:
    reply = await admin(sidecar, f"/dlq{query}")
    assert 200 == reply.status, reply.body
    return [item["dlq_id"] for item in reply.json["items"]]


# ---- without a store ---------------------------------------------------------------------------------------------


async def test_reading_does_not_make_a_store(sidecar: Running) -> None:
    for path in ("/dlq", "/dlq/replays", "/jobs"):
        assert [] == (await admin(sidecar, path)).json["items"]
    assert {"active": None, "needed": [], "resealing": None} == (await admin(sidecar, "/keys")).json
    for path in ("/dlq/dlq_x", "/dlq/replays/rpl_x", "/jobs/job_x"):
        assert (404, "NOT_FOUND") == ((reply := await admin(sidecar, path)).status, reply.json["error_code"])
    assert 404 == (await send(sidecar, "PATCH", "/dlq/dlq_x", {"notes": "x"})).status
    assert 404 == (await send(sidecar, "DELETE", "/dlq/dlq_x?reason=x")).status
    assert 404 == (await send(sidecar, "POST", "/dlq/dlq_x/replay", {})).status
    dry = (await send(sidecar, "POST", "/dlq/replay", {"dry_run": True})).json["dry_run"]
    assert (0, {}) == (dry["would_replay"], dry["by_verdict"])
    refused = await send(sidecar, "POST", "/dlq/replay", {})
    assert (409, "there is nothing to replay: no dead letter has been kept so far") == (
        refused.status,
        refused.json["message"],
    )
    assert 409 == (await send(sidecar, "POST", "/keys/rotate", {})).status
    assert None is sidecar.proxy.kept.durable
    assert not sidecar.proxy.kept.exists


# ---- the list ----------------------------------------------------------------------------------------------------


async def test_the_list_is_filtered_by_every_word(sidecar: Running, upstream: Upstream) -> None:
    now = clock.wall()
    old = await keep(sidecar, upstream, 1, at=now - 7200)
    unsafe = await keep(sidecar, upstream, 2, at=now - 600, **UNANSWERED)
    denied = await keep(sidecar, upstream, 3, at=now - 500, upstream="mail", workflow="w1", **DENIED)
    assert 200 == (await send(sidecar, "DELETE", f"/dlq/{old}?reason=not+needed")).status
    for query, expected in [
        ("", [denied, unsafe, old]),
        ("?status=pending", [denied, unsafe]),
        ("?status=discarded,failed", [old]),
        ("?upstream=mail", [denied]),
        ("?upstream=nobody", []),
        ("?error_class=NETWORK_TIMEOUT", [unsafe]),
        ("?verdict=safe", [denied, old]),
        ("?verdict=unsafe&status=pending", [unsafe]),
        ("?since=1h", [denied, unsafe]),
        ("?until=1h", [old]),
        ("?since=15m&until=550s", [unsafe]),
        ("?q=create_charge", [denied, unsafe, old]),
        ("?q=nothing", []),
        ("?workflow=w1", [denied]),
    ]:
        assert expected == await ids(sidecar, query), query


async def test_a_long_list_is_read_in_pages(sidecar: Running, upstream: Upstream) -> None:
    made = [await keep(sidecar, upstream, number) for number in range(7)]
    seen: list[str] = []
    cursor = ""
    while cursor is not None:
        page = (await admin(sidecar, f"/dlq?status=pending&limit=3{f'&cursor={cursor}' if cursor else ''}")).json
        seen += [item["dlq_id"] for item in page["items"]]
        cursor = page["next_cursor"]
    assert made[::-1] == seen


@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ("status=pendin", "status", 'did you mean "pending"?'),
        ("status=pending,lost", "status", "'lost' is not one of pending, replaying"),
        ("verdict=unsave", "verdict", 'did you mean "unsafe"?'),
        ("error_class=NETWORK_TIMEOT", "error_class", 'did you mean "NETWORK_TIMEOUT"?'),
        ("statuss=pending", "statuss", 'did you mean "status"?'),
        ("upstream=,", "upstream", "1 to 50 values"),
        ("since=yesterday", "since", "15m"),
        ("since=1h&until=2h", "until", "must be after `since`"),
        ("q=%21%21", "q", "no word to look for"),
        (f"q={'x' * 201}", "q", "too long"),
        ("limit=0", "limit", "at least 1"),
        ("limit=501", "limit", "at most 500"),
        ("cursor=abc", "cursor", "is not a cursor that a list gave out"),
    ],
)
async def test_a_malformed_filter_is_refused_by_name_with_the_nearest_valid_value(
    sidecar: Running, upstream: Upstream, query: str, field: str, words: str
) -> None:
    await keep(sidecar, upstream)
    reply = await admin(sidecar, f"/dlq?{query}")
    assert (400, "VALIDATION_ERROR", [field]) == (reply.status, reply.json["error_code"], at_fault(reply))
    assert words in reply.json["message"]


async def test_a_cursor_is_good_for_its_own_filter_only(sidecar: Running, upstream: Upstream) -> None:
    for number in range(3):
        await keep(sidecar, upstream, number)
    cursor = (await admin(sidecar, "/dlq?limit=1")).json["next_cursor"]
    reply = await admin(sidecar, f"/dlq?limit=1&status=pending&cursor={cursor}")
    assert (400, ["cursor"]) == (reply.status, at_fault(reply))
    assert "start again without a cursor" in reply.json["message"]


# ---- one ---------------------------------------------------------------------------------------------------------


async def test_an_entry_is_shown_with_everything_but_its_secrets(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, 5, **UNANSWERED)
    reply = await admin(sidecar, f"/dlq/{dlq_id}")
    shown = reply.json
    assert (200, "pending", "triage", "unsafe") == (reply.status, shown["status"], shown["state"], shown["verdict"])
    assert "it may have been executed" in shown["sentence"]
    assert f"{upstream.url}/v1/charges?order=5&token=REDACTED" == shown["url"]
    assert ["authorization", "x-kind"] == sorted(shown["sealed_headers"])
    assert [["content-type", "application/json"]] == shown["headers"]
    assert ["dead_lettered"] == [event["event"] for event in shown["history"]]
    assert (False, "use `force` with a `reason` to send it nevertheless") == (
        shown["replay"]["allowed"],
        shown["replay"]["what_to_do"],
    )
    assert b"canary" not in reply.body + (await admin(sidecar, "/dlq")).body


async def test_an_unknown_id_is_404_everywhere(sidecar: Running, upstream: Upstream) -> None:
    await keep(sidecar, upstream)
    for method, path, body in [
        ("GET", "/dlq/dlq_20270115_080000_ffffffff", None),
        ("PATCH", "/dlq/nonsense", {"notes": "x"}),
        ("PATCH", "/dlq/nonsense", {"edit": {"body": "x"}}),
        ("DELETE", "/dlq/nonsense?reason=x", None),
        ("POST", "/dlq/nonsense/replay", {}),
        ("GET", "/dlq/replays/nonsense", None),
        ("POST", "/dlq/replays/nonsense/pause", {}),
        ("POST", "/dlq/replays/nonsense/stop", {}),
        ("GET", "/jobs/nonsense", None),
        ("POST", "/jobs/nonsense/resolve", {"delivery": 1, "delivered": True, "reason": "looked"}),
    ]:
        reply = await send(sidecar, method, path, body)
        assert (404, "NOT_FOUND") == (reply.status, reply.json["error_code"]), path


async def test_what_is_damaged_on_disk_is_shown_as_far_as_it_can_be_read(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream)
    durable = await store(sidecar)
    await durable.store.write(lambda connection: connection.execute("UPDATE payloads SET head = x'00'") and None)
    for _ in range(2):
        shown = (await admin(sidecar, f"/dlq/{dlq_id}")).json
        assert ("not_replayable", "") == (shown["verdict"], shown["url"])
        assert "damaged" in shown["sentence"]


# ---- changes -----------------------------------------------------------------------------------------------------


async def patched(sidecar: Running, dlq_id: str, body: dict[str, Any]) -> Any:
    reply = await send(sidecar, "PATCH", f"/dlq/{dlq_id}", body)
    assert 200 == reply.status, reply.body
    return reply.json


async def test_notes_and_a_remediation_open_the_way_for_a_critical_class(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, **DENIED)
    before = (await admin(sidecar, f"/dlq/{dlq_id}")).json["replay"]
    assert (False, "add a remediation (kind and evidence), or use `force` with a `reason`") == (
        before["allowed"],
        before["what_to_do"],
    )
    assert "replay.require_remediation" in before["why_not"]
    noted = await patched(sidecar, dlq_id, {"notes": "asked the provider"})
    assert [("local", "asked the provider")] == [(note["by"], note["text"]) for note in noted["notes"]]
    given = {"kind": "auth_config", "evidence": "key rotated, see the vault", "ticket": "OPS-42"}
    fixed = await patched(sidecar, dlq_id, {"remediation": given, "notes": "done"})
    assert ("remediation", True, 2) == (fixed["state"], fixed["replay"]["allowed"], len(fixed["notes"]))
    assert given.items() <= fixed["remediation"].items()
    assert "validated" == (await patched(sidecar, dlq_id, {"state": "validated"}))["state"]


async def test_an_edit_changes_the_request_and_keeps_the_original_and_the_credential(
    sidecar: Running, upstream: Upstream
) -> None:
    dlq_id = await keep(sidecar, upstream, **DENIED)
    durable = await store(sidecar)
    edit = {
        "url": f"{upstream.url}/v2/charges?token=canary-new",
        "headers": {"x-kind": "canary-header", "Content-Type": None, "X-New": "n"},
        "body": "corrected ü",
    }
    shown = await patched(sidecar, dlq_id, {"edit": edit, "notes": "moved to v2"})
    assert (True, f"{upstream.url}/v2/charges?token=REDACTED") == (shown["edited"], shown["url"])
    assert ("edited", ["url", "headers", "body"]) == (
        shown["history"][-1]["event"],
        shown["history"][-1]["changed"],
    )
    request = await durable.letters.request(dlq_id)
    assert "corrected ü".encode() == request.body
    assert {
        b"Authorization": b"Bearer canary-credential",
        b"x-kind": b"canary-header",
        b"X-New": b"n",
    } == dict(request.headers)
    (original,) = await durable.store.read(
        lambda connection: connection.execute("SELECT original_head FROM payloads").fetchone()
    )
    assert original is not None
    logged = sidecar.logged.getvalue()
    assert "edited the request of dead letter" in logged
    assert "canary" not in logged


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "body", "must say what to change: notes, remediation, edit or state"),
        ({"note": "x"}, "note", 'did you mean "notes"?'),
        ({"notes": " "}, "notes", "must not be empty"),
        ({"remediation": {"kind": "dat", "evidence": "x"}}, "remediation.kind", 'did you mean "data"?'),
        ({"remediation": {"kind": "data", "evidence": ""}}, "remediation.evidence", "must not be empty"),
        ({"remediation": {"kind": "data"}}, "remediation.evidence", "is required"),
        ({"remediation": {"kind": "data", "evidence": "x", "tiket": "1"}}, "remediation.tiket", '"ticket"?'),
        ({"state": "done"}, "state", "must be one of validated, verified, closed"),
        ({"state": "verified", "edit": {"body": "x"}}, "body", "one change at a time, not edit and state"),
        ({"state": "closed"}, "note", "closing needs a note"),
        ({"edit": {}}, "edit", "must say what to change"),
        ({"edit": {"body": "x", "body_base64": "eA=="}}, "edit", "either `body` or `body_base64`"),
        ({"edit": {"body_base64": "!"}}, "edit.body_base64", "must be base64"),
        ({"edit": {"url": "http://evil.test/"}}, "url", "an edit must stay on http://127.0.0.1:"),
        ({"edit": {"url": "/relative"}}, "url", "this is not an absolute"),
        ({"edit": {"url": "http://u:p@127.0.0.1/"}}, "edit.url", "must not hold credentials"),
        ({"edit": {"url": "http://127.0.0.1/a b"}}, "edit.url", "without spaces"),
        ({"edit": {"headers": {"Host": "evil.test"}}}, "edit.headers", "follows from the url"),
        ({"edit": {"headers": {"content-length": "1"}}}, "edit.headers", "follows from the url"),
        ({"edit": {"headers": {"X-A": "a\r\nX-B: b"}}}, "edit.headers", "cannot carry"),
        ({"edit": {"headers": {"a b": "c"}}}, "edit.headers", "is not the name of a header"),
    ],
)
async def test_a_change_that_makes_no_sense_is_refused_and_changes_nothing(
    sidecar: Running, upstream: Upstream, body: Any, field: str, words: str
) -> None:
    dlq_id = await keep(sidecar, upstream)
    before = (await admin(sidecar, f"/dlq/{dlq_id}")).json
    reply = await send(sidecar, "PATCH", f"/dlq/{dlq_id}", body)
    assert (400, [field]) == (reply.status, at_fault(reply))
    assert words in reply.json["message"]
    assert before == (await admin(sidecar, f"/dlq/{dlq_id}")).json


async def test_steps_out_of_order_are_refused_with_what_to_do(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, **UNANSWERED)
    for body, words in [
        ({"state": "verified"}, "replay it first"),
        ({"state": "closed", "notes": "done"}, "possible: "),
        ({"state": "validated"}, "use `force` with a `reason`"),
    ]:
        reply = await send(sidecar, "PATCH", f"/dlq/{dlq_id}", body)
        assert (409, "CONFLICT") == (reply.status, reply.json["error_code"])
        assert words in reply.json["message"]


async def test_a_large_body_can_be_edited_in_up_to_the_limit_of_the_upstream(
    sidecar: Running, upstream: Upstream
) -> None:
    dlq_id = await keep(sidecar, upstream)
    assert 200_000 == (await patched(sidecar, dlq_id, {"edit": {"body": "x" * 200_000}}))["body"]["size"]
    reply = await send(sidecar, "PATCH", f"/dlq/{dlq_id}", {"edit": {"body": "x" * 1_048_577}})
    assert (400, ["body"]) == (reply.status, at_fault(reply))
    assert "dead_letter.max_body_bytes" in reply.json["message"]


async def test_discarding_needs_a_reason_marks_and_keeps(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream)
    for query in ("", "?reason=", "?reason=+"):
        reply = await send(sidecar, "DELETE", f"/dlq/{dlq_id}{query}")
        assert (400, ["reason"]) == (reply.status, at_fault(reply))
    assert ("discarded", "closed") == (
        (done := (await send(sidecar, "DELETE", f"/dlq/{dlq_id}?reason=a+duplicate")).json)["status"],
        done["state"],
    )
    assert [dlq_id] == await ids(sidecar, "?status=discarded")
    refused = await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {"force": True, "reason": "anyway"})
    assert (409, 0) == (refused.status, len(upstream.requests))
    assert "it was discarded" in refused.json["message"]
    assert "discarded dead letter" in sidecar.logged.getvalue()


async def test_a_store_in_trouble_says_so_and_what_to_do(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream)
    durable = await store(sidecar)
    connect = durable.store._opener.open

    def broken() -> Any:
        raise OSError(5, os.strerror(5))

    durable.store._opener.open = broken  # type: ignore[method-assign]  # a disk that cannot be read any more
    with pytest.raises(NotKept):
        await durable.store.write(lambda connection: connection.close())
    try:
        reply = await send(sidecar, "PATCH", f"/dlq/{dlq_id}", {"notes": "x"})
        assert (503, "DLQ_FULL") == (reply.status, reply.json["error_code"])
        assert "look at the disk" in reply.json["message"]
    finally:
        durable.store._opener.open = connect  # type: ignore[method-assign]


async def test_only_what_was_sent_again_can_be_verified_and_closed(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream)
    assert "completed" == (await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {})).json["outcome"]
    assert "verified" == (await patched(sidecar, dlq_id, {"state": "verified", "notes": "seen in their list"}))["state"]
    closed = await patched(sidecar, dlq_id, {"state": "closed", "notes": "told the customer"})
    assert ("closed", "completed", True) == (closed["state"], closed["status"], closed["processed"])
    assert ["replay_started", "replayed", "verify", "close"] == [one["event"] for one in closed["history"]][-4:]
