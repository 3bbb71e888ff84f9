"""Dead letters: what is kept, what is shown, when two failures are one, and what is never lost silently."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable.bodies import INLINE
from sidecar.durable.entry import Answer, Entry, Failure, Tried, host_of, validate
from sidecar.durable.filters import Filter
from sidecar.durable.intake import sha256_of
from sidecar.durable.operator import Edit
from sidecar.durable.successes import Success
from sidecar.durable.trouble import BadInput, Damaged, NoSuchThing, NotKept, NotNow
from telemetry.record import CONNECTED, NOT_CONNECTED, SENT
from telemetry.redact import Redactor
from tests.durability.faults import FaultyDisk, Wires
from tests.durability.rigs import START, Rig, crashed_copy, failed, rig_in, terms


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)


def files_with(folder: Path, text: bytes) -> list[str]:
    paths = [Path(below, name) for below, _, names in os.walk(folder) for name in names]
    assert len(paths) > 4, "database, log, body and keys"
    return [path.name for path in paths if text in path.read_bytes()]


def success_of(failure: Failure, **changed: Any) -> Success:
    given: dict[str, Any] = {
        "upstream": failure.upstream,
        "method": failure.method,
        "url": failure.url,
        "body_sha256": sha256_of(failure.body),
        "started_at": failure.last_failure_at + 1,
        "api_key_id": failure.api_key_id,
        "idempotency_key": failure.idempotency_key,
        "session_id": "s1",
    }
    return Success(**{**given, **changed})


# ---- keeping -----------------------------------------------------------------------------------------------------


async def test_an_entry_has_every_field_of_the_specification(tmp_path: Path) -> None:
    failure = failed(
        operation="create_charge",
        stage="notify",
        workflow="w1",
        status=503,
        code="TEMPORARY_UNAVAILABLE",
        last_stack="TimeoutError: token=canary-in-stack\ncaused by reset",
        context={"request_id": "r1", "trace_id": "t1", "path": "/v1/canary", "long": "x" * 300, "attempts": 9},
        response=Answer(503, [(b"Set-Cookie", b"canary"), (b"Retry-After", b"3")], b"canary in answer"),
        idempotency_key="k1",
        key_honoured=True,
        api_key_id="ak1",
    )
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failure)
        assert kept.created
        shown = await rig.letters.detail(kept.dlq_id)
    assert time.strftime("dlq_%Y%m%d_%H%M%S_", time.gmtime(START)) == kept.dlq_id[:-8]
    assert {
        "dlq_id": kept.dlq_id,
        "upstream": "payments",
        "operation_type": "create_charge",
        "stage": "notify",
        "workflow": "w1",
        "status": "pending",
        "state": "triage",
        "escalated": False,
        "error_class": "TEMPORARY_UNAVAILABLE",
        "category": "TRANSIENT",
        "error_details": {
            "error_type": "TEMPORARY_UNAVAILABLE",
            "error_message": "no answer within 30 s",
            "retry_count": 0,
        },
        "method": "POST",
        "host": "api.payments.test:443",
        "url": "https://api.payments.test/v1/charges?order=0&token=REDACTED",
        "send_phase": "sent",
        "first_failure_at": "2027-01-15T08:00:00.000Z",
        "last_failure_at": "2027-01-15T08:00:02.000Z",
        "created_at": "2027-01-15T08:00:00.000Z",
        "last_attempt": "2027-01-15T08:00:02.000Z",
        "replayed_at": None,
        "processed": False,
        "headers": [["content-type", "application/json"]],
        "sealed_headers": ["host", "authorization"],
        "body": {"kept": True, "size": 35, "note": ""},
        "response": {"status": 503, "headers": {"set-cookie": "REDACTED", "retry-after": "3"}, "body_bytes": 16},
        "verdict": "safe",
        "idempotency_key": "k1",
        "remediation": None,
        "notes": [],
    }.items() <= shown.items()
    context = shown["sanitized_context"]
    assert {
        "request_id": "r1",
        "trace_id": "t1",
        "attempts": 1,
        "status": 503,
        "request_bytes": 35,
    }.items() <= context.items()
    assert {"path", "long"}.isdisjoint(context)
    assert "token=REDACTED\ncaused by reset" in shown["last_stack"]
    assert ["dead_lettered"] == [event["event"] for event in shown["history"]]


async def test_the_request_comes_back_as_it_was(tmp_path: Path) -> None:
    headers = [(b"X-Odd", b"caf\xe9"), (b"Authorization", b"Bearer canary"), (b"x-odd", b"second")]
    failure = failed(headers=headers, response=Answer(500, [], b"said so"))
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failure)
    async with rig_in(tmp_path) as rig:
        request = await rig.letters.request(kept.dlq_id)
        assert (failure.method, failure.url, headers, failure.body) == (
            request.method,
            request.url,
            request.headers,
            b"".join([chunk async for chunk in rig.letters.payloads.body(request)]),
        )
        assert b"said so" == await rig.letters.last_answer(kept.dlq_id)


async def test_no_secret_lies_readable_anywhere_below_the_state_directory(tmp_path: Path) -> None:
    large = b"canary-in-large-body " * 20_000
    async with rig_in(tmp_path / "live", {"payments": terms({"max_body_bytes": 10_000_000})}) as rig:
        await rig.letters.keep(
            failed(1, response=Answer(500, [(b"set-cookie", b"canary")], b"canary"), last_stack="key=canary")
        )
        await rig.letters.keep(failed(2, body=large))
        await rig.operator.edit(
            (await rig.ids(Filter()))[0], "me", Edit(headers=[(b"authorization", b"canary-edited")], body=b"canary!")
        )
        shown = repr(await rig.listing.rows_shown(await rig.listing.page(Filter())))
        copy = crashed_copy(tmp_path / "live", tmp_path / "copy")
    assert [] == files_with(copy, b"canary")
    assert "canary" not in shown


async def test_headers_on_the_allowlist_and_those_named_stay_readable(tmp_path: Path) -> None:
    headers = [
        (b"Accept", b"*/*"),
        (b"Content-Language", b"de"),
        (b"User-Agent", b"app/1"),
        (b"Idempotency-Key", b"k"),
        (b"Traceparent", b"00-a-b-01"),
        (b"X-Tenant", b"t1"),
        (b"Cookie", b"canary"),
        (b"Accept-Secret", b"canary"),
        (b"X-Other", b"canary"),
    ]
    async with rig_in(tmp_path, {"payments": terms({"keep_headers": ["x-tenant"]})}) as rig:
        entry = await rig.entry((await rig.letters.keep(failed(headers=headers))).dlq_id)
        readable = ["accept", "content-language", "user-agent", "idempotency-key", "traceparent", "x-tenant"]
        assert readable == [name for name, _ in entry.headers]
        assert ["cookie", "accept-secret", "x-other"] == entry.sealed_headers


async def test_secret_segments_of_a_path_are_hidden_in_listings(tmp_path: Path) -> None:
    rules = terms({"redact_paths": ["/hooks/{id}"]}, redactor=Redactor(paths=["/hooks/{id}"]))
    async with rig_in(tmp_path, {"payments": rules}) as rig:
        await rig.letters.keep(failed(url="https://hooks.test/hooks/T0canary"))
        (row,) = await rig.listing.rows_shown(await rig.listing.page(Filter()))
        assert "https://hooks.test/hooks/REDACTED" == row["url"]


async def test_a_large_body_is_in_a_file_and_comes_back_whole(tmp_path: Path) -> None:
    body = os.urandom(INLINE + 12_345)
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(body=body))
    async with rig_in(tmp_path) as rig:
        assert 0 == await rig.letters.bodies.collect(), "its row refers to it"
        request = await rig.letters.request(kept.dlq_id)
        assert request.body_file is not None
        assert body == b"".join([chunk async for chunk in rig.letters.payloads.body(request)])


async def test_a_spooled_body_belongs_to_the_entry_it_was_spooled_for(tmp_path: Path) -> None:
    rules = terms({"max_body_bytes": 2_000_000})
    async with rig_in(tmp_path, {"payments": rules}) as rig:
        failure = failed()
        dlq_id = rig.letters.new_id()
        spool = rig.letters.spool(dlq_id, "payments", failure.url)
        for _ in range(10):
            await spool.write(bytes(100_000))
        kept = await rig.letters.keep(failed(body=await spool.finish(), dlq_id=dlq_id))
        assert dlq_id == kept.dlq_id
        request = await rig.letters.request(dlq_id)
        assert bytes(1_000_000) == b"".join([chunk async for chunk in rig.letters.payloads.body(request)])


@pytest.mark.parametrize(
    ("failure", "note"),
    [
        (failed(body=None, body_size=13_448_576), "not kept, 12.4 MB over the limit"),
        (failed(body=bytes(1_049_000)), "not kept, 424 bytes over the limit"),
        (failed(body=None, body_size=1_050_000), "not kept, 1.4 kB over the limit"),
        (failed(body=None, body_size=3_001_048_576), "not kept, 3.0 GB over the limit"),
    ],
)
async def test_a_body_that_was_not_kept_is_said(tmp_path: Path, failure: Failure, note: str) -> None:
    async with rig_in(tmp_path) as rig:
        entry = await rig.entry((await rig.letters.keep(failure)).dlq_id)
        assert (False, note) == (entry.body["kept"], entry.body["note"])
        assert "not_replayable" == entry.verdict
        assert note in entry.sentence


async def test_a_wall_clock_that_was_set_back_does_not_lose_the_entry(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(first_failure_at=START, last_failure_at=START - 3600))
        entry = await rig.entry(kept.dlq_id)
        assert START == entry.created_at == entry.last_attempt


async def test_an_entry_is_kept_although_the_app_has_gone(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        keeping = asyncio.create_task(rig.letters.keep(failed(body=bytes(500_000))))
        await asyncio.sleep(0)
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        while not (await rig.listing.page(Filter())).items:
            await asyncio.sleep(0.01)
        assert 1 == rig.counts.enqueued["payments", "NETWORK_TIMEOUT"]


# ---- the same failure twice --------------------------------------------------------------------------------------


async def test_the_same_key_and_content_update_one_entry_however_late(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        first = await rig.letters.keep(failed(idempotency_key="k", phase=CONNECTED, code="CONNECTION_RESET"))
        second = await rig.letters.keep(failed(idempotency_key="k", at=START + 50_000, response=Answer(500, [], b"x")))
        assert (first.dlq_id, False) == (second.dlq_id, second.created)
        entry = await rig.entry(first.dlq_id)
        assert 2 == entry.occurrences
        assert ("NETWORK_TIMEOUT", "unanswered", "sent") == (entry.error_class, entry.exposure, entry.send_phase)
        assert (START, START + 50_002) == (entry.first_failure_at, entry.last_failure_at)
        assert b"x" == await rig.letters.last_answer(first.dlq_id)
        assert [first.dlq_id] == await rig.ids(Filter())
        assert [] == await rig.ids(Filter(error_class=("CONNECTION_RESET",)))


async def test_a_later_failure_that_was_not_sent_does_not_make_it_safer(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        await rig.letters.keep(failed(phase=CONNECTED, code="CONNECTION_RESET", at=START + 5))
        entry = await rig.entry(kept.dlq_id)
        assert (2, "unanswered", "unsafe") == (entry.occurrences, entry.exposure, entry.verdict)


@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({"body": b"other"}, 60.0),
        ({"method": "PATCH"}, 60.0),
        ({"url": "https://api.payments.test/other"}, 60.0),
        ({"api_key_id": "somebody else"}, 60.0),
        ({"idempotency_key": "k2"}, 60.0),
        ({"upstream": "other"}, 60.0),
        ({"at": START + 61}, 60.0),
        ({}, 0.0),
        ({"body": None, "body_size": 5_000_000}, 60.0),
    ],
)
async def test_what_differs_is_another_entry(tmp_path: Path, changed: dict[str, Any], window: float) -> None:
    async with rig_in(tmp_path, {"payments": terms({"dedupe_window": window})}) as rig:
        first = await rig.letters.keep(failed(**({"body": None} if "body_size" in changed else {})))
        second = await rig.letters.keep(failed(**changed))
        assert second.created
        assert first.dlq_id != second.dlq_id


async def test_the_same_key_with_other_content_is_another_entry(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        await rig.letters.keep(failed(idempotency_key="k"))
        assert (await rig.letters.keep(failed(idempotency_key="k", body=b"other"))).created


async def test_a_second_large_body_of_the_same_failure_leaves_no_file_behind(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        await rig.letters.keep(failed(body=bytes(500_000)))
        assert not (await rig.letters.keep(failed(body=bytes(500_000)))).created
        assert 1 == len(os.listdir(rig.letters.bodies.folder))


async def test_duplicates_at_the_same_moment_are_one_entry(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await asyncio.gather(*(rig.letters.keep(failed(idempotency_key="k")) for _ in range(50)))
        assert 1 == len({one.dlq_id for one in kept})
        assert 1 == sum(one.created for one in kept)
        assert 50 == (await rig.entry(kept[0].dlq_id)).occurrences


async def test_what_is_done_is_not_updated(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        first = await rig.letters.keep(failed(idempotency_key="k"))
        await rig.operator.discard(first.dlq_id, "me")
        assert (await rig.letters.keep(failed(idempotency_key="k"))).created


# ---- successes elsewhere -----------------------------------------------------------------------------------------


async def test_a_later_success_with_the_same_key_closes_the_entry(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        failure = failed(idempotency_key="k")
        assert not rig.successes.worth_telling("payments", "POST", keyed=True)
        kept = await rig.letters.keep(failure)
        assert rig.successes.worth_telling("payments", "POST", keyed=True)
        assert not rig.successes.worth_telling("payments", "GET", keyed=False)
        rig.now = START + 10
        assert [kept.dlq_id] == await rig.successes.tell(success_of(failure))
        entry = await rig.entry(kept.dlq_id)
        assert ("completed", True, "closed") == (entry.status, entry.processed, entry.state)
        assert START + 10 == entry.replayed_at
        assert [] == await rig.successes.tell(success_of(failure)), "done is done"


async def test_a_success_that_began_before_the_failure_settles_nothing(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        failure = failed(idempotency_key="k")
        kept = await rig.letters.keep(failure)
        assert [] == await rig.successes.tell(success_of(failure, started_at=START))
        assert "pending" == (await rig.entry(kept.dlq_id)).status


async def test_the_same_body_without_a_key_supersedes(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        failure = failed()
        kept = await rig.letters.keep(failure)
        assert [] == await rig.successes.tell(success_of(failure))
        entry = await rig.entry(kept.dlq_id)
        assert ("pending", "superseded") == (entry.status, entry.verdict)
        assert [kept.dlq_id] == await rig.ids(Filter(verdict=("superseded",)))


@pytest.mark.parametrize(("method", "verdict"), [("PUT", "stale"), ("DELETE", "stale"), ("GET", "safe")])
async def test_a_later_change_of_the_same_url_makes_a_put_stale(tmp_path: Path, method: str, verdict: str) -> None:
    async with rig_in(tmp_path) as rig:
        failure = failed(method="PUT")
        kept = await rig.letters.keep(failure)
        await rig.successes.tell(success_of(failure, method=method, body_sha256="other"))
        assert verdict == (await rig.entry(kept.dlq_id)).verdict


# ---- bounds and loss ---------------------------------------------------------------------------------------------


async def test_a_full_dead_letter_queue_says_so_and_removes_nothing(tmp_path: Path) -> None:
    async with rig_in(tmp_path, settings={"max_bytes": 1_048_576}) as rig:
        kept, number = [], 0

        async def fill() -> None:
            nonlocal number
            while True:
                kept.append((await rig.letters.keep(failed(number, body=bytes(100_000)))).dlq_id)
                number += 1

        with pytest.raises(NotKept, match=r"`dead_letter\.max_bytes` is 1048576; replay or discard entries") as refused:
            await fill()
        assert ("full", "DLQ_FULL") == (refused.value.reason, refused.value.code)
        assert 1 == rig.counts.rejected["full"]
        assert sorted(kept) == sorted(await rig.ids(Filter()))
        stats = await rig.listing.refresh()
        assert 900_000 < stats.bytes <= 1_048_576


async def test_large_bodies_count_as_well(tmp_path: Path) -> None:
    rules = terms({"max_body_bytes": 10_000_000})
    async with rig_in(tmp_path, {"payments": rules}, settings={"max_bytes": 1_048_576}) as rig:
        await rig.letters.keep(failed(1, body=bytes(600_000)))
        with pytest.raises(NotKept):
            await rig.letters.keep(failed(2, body=bytes(600_000)))
        assert 1 == len(os.listdir(rig.letters.bodies.folder))


async def test_a_failed_commit_is_no_promise_and_leaves_no_body(tmp_path: Path) -> None:
    wires = Wires()
    async with rig_in(tmp_path, connect=wires.connect) as rig:
        wires.fail_once("COMMIT")
        with pytest.raises(NotKept) as refused:
            await rig.letters.keep(failed(body=bytes(500_000)))
        assert "disk_error" == refused.value.reason
        assert {"disk_error": 1} == {reason: n for reason, n in rig.counts.rejected.items() if n}
        assert [] == os.listdir(rig.letters.bodies.folder)
        assert [] == await rig.ids(Filter())
        while not rig.store.health.ok:
            await asyncio.sleep(0.01)
        await rig.letters.keep(failed(body=bytes(500_000)))


async def test_no_step_of_the_disk_can_fail_and_leave_a_false_promise(tmp_path: Path) -> None:
    """A body in a file and its row, with each file step failing in turn: kept means whole, refused means absent."""
    for failing in range(1, 40):
        disk = FaultyDisk()
        async with rig_in(tmp_path / str(failing), disk=disk) as rig:
            disk.failing = disk.steps + failing
            try:
                kept = await rig.letters.keep(failed(body=bytes(400_000)))
            except NotKept:
                assert [] == await rig.ids(Filter())
                continue
            request = await rig.letters.request(kept.dlq_id)
            assert bytes(400_000) == b"".join([chunk async for chunk in rig.letters.payloads.body(request)])
            if disk.steps < disk.failing:
                break
    else:
        pytest.fail("the last round should have had no fault")


# ---- damage ------------------------------------------------------------------------------------------------------


def damage(directory: Path, statement: str, *parameters: Any) -> None:
    connection = sqlite3.connect(directory / "store.db")
    with connection:
        connection.execute(statement, parameters)
    connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE dead_letters SET record = replace(record, 'payments', 'paymentz')",
        "UPDATE dead_letters SET record = 'nonsense'",
        "UPDATE dead_letters SET fingerprint = fingerprint + 1",
        "UPDATE dead_letters SET search = 'x'",
        "UPDATE dead_letters SET verdict_until = 1.0",
        "UPDATE dead_letters SET dlq_id = 'dlq_20270115_080000_ffffffff'",
    ],
)
async def test_a_damaged_row_is_set_aside_counted_and_the_rest_goes_on(tmp_path: Path, statement: str) -> None:
    async with rig_in(tmp_path) as rig:
        bad = (await rig.letters.keep(failed(1))).dlq_id
        good = (await rig.letters.keep(failed(2))).dlq_id
    damage(tmp_path, f"{statement} WHERE dlq_id = ?", bad)
    async with rig_in(tmp_path) as rig:
        assert [good] == await rig.ids(Filter())
        assert 1 == rig.counts.evicted["corrupt"]
        assert 1 == (await rig.store.read(lambda c: c.execute("SELECT count(*) FROM quarantine").fetchone()))[0]
        assert {"payments": 1} == (await rig.listing.refresh()).waiting
        assert "sidecar.dlq.damaged" in rig.told.events
        with pytest.raises(NoSuchThing):
            await rig.letters.get(bad)


async def test_asking_for_a_damaged_entry_says_so_once(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        bad = (await rig.letters.keep(failed())).dlq_id
    damage(tmp_path, "UPDATE dead_letters SET size = size + 1")
    async with rig_in(tmp_path) as rig:
        with pytest.raises(Damaged, match="does not match its digest"):
            await rig.operator.annotate(bad, "me", "hello")
        with pytest.raises(NoSuchThing, match="list them with"):
            await rig.operator.annotate(bad, "me", "hello")


@pytest.mark.parametrize("column", ["head", "body"])
async def test_a_damaged_payload_makes_an_entry_not_replayable(tmp_path: Path, column: str) -> None:
    async with rig_in(tmp_path) as rig:
        bad = (await rig.letters.keep(failed())).dlq_id
    damage(tmp_path, f"UPDATE payloads SET {column} = zeroblob(50)")
    async with rig_in(tmp_path) as rig:
        if column == "head":
            assert "" == (await rig.listing.rows_shown(await rig.listing.page(Filter())))[0]["url"]
        for _ in range(2):
            with pytest.raises(Damaged):
                await rig.letters.request(bad)
        entry = await rig.entry(bad)
        assert ("not_replayable", "damaged on disk") == (entry.verdict, entry.body["note"])
        assert 1 == rig.counts.evicted["corrupt"]


async def test_a_missing_payload_is_damage_too(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        bad = (await rig.letters.keep(failed())).dlq_id
        await rig.store.write(lambda connection: connection.execute("DELETE FROM payloads") and None)
        assert None is await rig.letters.last_answer(bad)
        with pytest.raises(Damaged, match="missing"):
            await rig.letters.request(bad)
        with pytest.raises(Damaged):
            await rig.operator.edit(bad, "me", Edit(body=b"x"))


# ---- entries -----------------------------------------------------------------------------------------------------


async def an_entry(tmp_path: Path, **changed: Any) -> Entry:
    async with rig_in(tmp_path) as rig:
        entry: Entry = await rig.entry((await rig.letters.keep(failed(**changed))).dlq_id)
        return entry


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dlq_id", "../../etc", "must look like"),
        ("status", "lost", "pending, replaying"),
        ("state", "lost", "triage"),
        ("verdict", "lost", "safe"),
        ("exposure", "lost", "not_sent"),
        ("send_phase", "lost", "not_connected"),
        ("operation_type", "", "empty"),
        ("upstream", "", "empty"),
        ("method", "GET /", "HTTP method"),
        ("error_class", "oops", "error code"),
        ("body", {}, "kept, size and note"),
        ("error_details", {"error_type": "x", "error_message": "y"}, "is missing"),
        ("error_details", {"error_type": "x", "error_message": "y", "retry_count": -1}, "0 or more"),
        ("error_details", {"error_type": "x", "error_message": "y", "retry_count": True}, "0 or more"),
        ("remediation", {"kind": "luck"}, "transient"),
        ("created_at", "today", "must be a time"),
        ("first_failure_at", START + 10, "must not be before first_failure_at"),
        ("created_at", START + 10, "must not be before created_at"),
        ("replayed_at", START - 10, "must not be before last_attempt"),
    ],
)
async def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path, field: str, value: Any, message: str) -> None:
    entry = await an_entry(tmp_path)
    validate(entry)
    setattr(entry, field, value)
    with pytest.raises(BadInput, match=message):
        validate(entry)


async def test_a_long_history_loses_its_middle_never_its_beginning(tmp_path: Path) -> None:
    entry = await an_entry(tmp_path)
    for number in range(300):
        entry.happened(START + number, "poked", number=number, nothing=None)
    assert 100 == len(entry.history)
    assert "dead_lettered" == entry.history[0]["event"]
    assert {"at": START + 299, "event": "poked", "number": 299} == entry.history[-1]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://API.test/x", "api.test:443"),
        ("http://api.test:8080/", "api.test:8080"),
        ("http://[::1]/", "[::1]:80"),
        ("https://user:pass@api.test/", "api.test:443"),
    ],
)
def test_the_destination_is_host_and_port(url: str, host: str) -> None:
    assert host == host_of(url)


@pytest.mark.parametrize("url", ["/relative", "ftp://x/", "http://", "http://h:99999/", "http://[::1/"])
def test_a_url_without_a_destination_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="url"):
        host_of(url)


# ---- operators ---------------------------------------------------------------------------------------------------


async def completed(rig: Rig) -> str:
    failure = failed(idempotency_key="done")
    kept = await rig.letters.keep(failure)
    await rig.successes.tell(success_of(failure))
    return kept.dlq_id


async def test_notes_and_remediation_are_found_again_by_words(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(code="CONNECTION_REFUSED", phase=NOT_CONNECTED))
        await rig.operator.annotate(kept.dlq_id, "ann", "asked the provider about it")
        await rig.operator.remediate(kept.dlq_id, "ann", "auth_config", "rotated the key", "OPS-42")
        rig.now += 5
        entry = await rig.operator.validate(kept.dlq_id, "ann")
        assert "validated" == entry.state
        assert entry.remediation is not None
        assert {"kind": "auth_config", "ticket": "OPS-42", "by": "ann"}.items() <= entry.remediation.items()
        for words in ("provider", "OPS-42", "rotat*"):
            assert [kept.dlq_id] == await rig.ids(Filter(q=words))
        assert [] == await rig.ids(Filter(q="nonsense"))


async def test_what_a_replay_would_refuse_cannot_be_called_validated(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        with pytest.raises(NotNow, match="it may have been executed"):
            await rig.operator.validate(kept.dlq_id, "ann", "looks good")
        entry = await rig.entry(kept.dlq_id)
        assert ("triage", []) == (entry.state, entry.notes)


async def test_discarding_twice_is_counted_once(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        for _ in range(2):
            assert "discarded" == (await rig.operator.discard(kept.dlq_id, "ann", "not needed")).status
        assert 1 == [event["event"] for event in (await rig.entry(kept.dlq_id)).history].count("discard")
        assert 1 == rig.counts.replayed["payments", "discarded"]


async def test_an_edit_cannot_lead_a_credential_into_the_clear(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(url="https://api.payments.test:8443/x"))
        with pytest.raises(BadInput, match="an edit must stay on https://"):
            await rig.operator.edit(kept.dlq_id, "ann", Edit(url="http://api.payments.test:8443/x"))


async def test_steps_out_of_order_are_refused_with_what_is_possible(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        with pytest.raises(NotNow, match="has not succeeded yet"):
            await rig.operator.verify(kept.dlq_id, "ann")
        with pytest.raises(NotNow, match="possible: "):
            await rig.operator.close(kept.dlq_id, "ann", "all good")
        with pytest.raises(BadInput, match="needs evidence"):
            await rig.operator.remediate(kept.dlq_id, "ann", "data", " ")
        with pytest.raises(BadInput, match="closing needs a note"):
            await rig.operator.close(kept.dlq_id, "ann", "")
        with pytest.raises(BadInput, match="a note has 1 to 4000"):
            await rig.operator.annotate(kept.dlq_id, "ann", "")
        assert "triage" == (await rig.entry(kept.dlq_id)).state


async def test_notes_are_bounded(tmp_path: Path) -> None:
    entry = await an_entry(tmp_path)
    for _ in range(200):
        entry.annotate(START, "ann", "again")
    with pytest.raises(BadInput, match="put the rest into the ticket"):
        entry.annotate(START, "ann", "again")


async def test_discarding_marks_and_is_counted(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        for _ in range(2):
            entry = await rig.operator.discard(kept.dlq_id, "ann", "test traffic")
            assert ("discarded", "closed") == (entry.status, entry.state)
        with pytest.raises(NotNow, match="completed"):
            await rig.operator.discard(await completed(rig), "ann")


async def test_an_edit_keeps_the_original_and_shows_what_was_changed(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(body=None, body_size=2_000_000, status=400, code="VALIDATION_ERROR"))
        assert "not_replayable" == (await rig.entry(kept.dlq_id)).verdict
        edit = Edit("https://api.payments.test/v2/charges", [(b"authorization", b"Bearer new")], b"corrected")
        entry = await rig.operator.edit(kept.dlq_id, "ann", edit)
        assert (True, "safe") == (entry.edited, entry.verdict)
        assert {"event": "edited", "by": "ann", "changed": ["url", "headers", "body"]}.items() <= entry.history[
            -1
        ].items()
        request = await rig.letters.request(kept.dlq_id)
        assert (edit.url, edit.headers, edit.body) == (request.url, request.headers, request.body)
        await rig.operator.edit(kept.dlq_id, "ann", Edit(body=bytes(400_000)))
        await rig.operator.edit(kept.dlq_id, "ann", Edit(body=bytes(300_000)))
        assert 1 == len(os.listdir(rig.letters.bodies.folder)), "only the original and the newest are kept"
        request = await rig.letters.request(kept.dlq_id)
        assert bytes(300_000) == b"".join([chunk async for chunk in rig.letters.payloads.body(request)])
        originals = await rig.store.read(lambda c: c.execute("SELECT original_head FROM payloads").fetchone())
        assert b"order=0" in rig.letters.keyring.open("head", entry.host, entry.dlq_id, originals[0])


async def test_an_edit_cannot_lead_a_credential_elsewhere(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        with pytest.raises(BadInput, match=r"must stay on https://api\.payments\.test:443"):
            await rig.operator.edit(kept.dlq_id, "ann", Edit(url="https://evil.test/"))
        with pytest.raises(BadInput, match="max_body_bytes"):
            await rig.operator.edit(kept.dlq_id, "ann", Edit(body=bytes(1_048_577)))
        with pytest.raises(NotNow, match="only what waits"):
            await rig.operator.edit(await completed(rig), "ann", Edit(body=bytes(400_000)))
        assert [] == os.listdir(rig.letters.bodies.folder)
        with pytest.raises(NoSuchThing):
            await rig.operator.edit("dlq_20270115_080000_ffffffff", "ann", Edit(body=b""))


async def test_another_key_does_not_make_what_was_sent_safe(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        headers = [(b"Idempotency-Key", b"k1")]
        kept = await rig.letters.keep(failed(headers=headers, idempotency_key="k1", key_honoured=True))
        assert "safe" == (await rig.entry(kept.dlq_id)).verdict
        entry = await rig.operator.edit(kept.dlq_id, "ann", Edit(headers=[(b"idempotency-key", b"k2")]))
        assert ("k2", "unsafe") == (entry.idempotency_key, entry.verdict)
        again = await rig.letters.keep(failed(headers=headers, idempotency_key="k1", key_honoured=True, at=START + 9))
        assert again.created, "that is another key's failure"


async def test_an_edited_request_is_not_overwritten_by_the_next_failure(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        await rig.operator.edit(kept.dlq_id, "ann", Edit(headers=[(b"x-fixed", b"1")]))
        assert not (await rig.letters.keep(failed(at=START + 5))).created
        assert [(b"x-fixed", b"1")] == (await rig.letters.request(kept.dlq_id)).headers


def test_every_attempt_counts_for_the_retry_count() -> None:
    assert 3 == len(failed(attempts=[Tried(SENT, "NETWORK_TIMEOUT", None)] * 3).attempts)
