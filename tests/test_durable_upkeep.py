"""Upkeep of dead letters (verdicts, retention, checks) and the rotation of keys."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable.audit import Audit
from sidecar.durable.audit import Entry as AuditEntry
from sidecar.durable.audit import Wanted as AuditWanted
from sidecar.durable.bodies import Bodies
from sidecar.durable.entry import Answer
from sidecar.durable.filters import Filter
from sidecar.durable.idempotency import Call, Gate, Hit, Proceed, Response
from sidecar.durable.jobs import Jobs, Submission, Wanted
from sidecar.durable.operator import Edit
from sidecar.durable.outbox import Outbox
from sidecar.durable.rotation import Rotation
from sidecar.durable.seal import load_keyring
from sidecar.durable.store import Store
from sidecar.durable.trouble import CannotUse, Damaged, NoSuchThing, NotKept, NotNow, Trouble
from sidecar.durable.upkeep import Upkeep
from telemetry.record import NOT_CONNECTED
from tests.durability.faults import desync_index
from tests.durability.rigs import START, Rig, failed, rig_in, terms


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.upkeep._PER_STEP", 3)
    monkeypatch.setattr("sidecar.durable.rotation._PER_STEP", 3)


async def keyed(rig: Rig, count: int) -> list[str]:
    return [
        (
            await rig.letters.keep(failed(number, at=START + number, idempotency_key=f"k{number}", key_honoured=True))
        ).dlq_id
        for number in range(count)
    ]


# ---- verdicts ----------------------------------------------------------------------------------------------------


async def test_time_alone_changes_what_filters_and_counts_say(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        await keyed(rig, 8)
        upkeep = Upkeep(rig.letters)
        assert 0 == await upkeep.judge_due()
        rig.now = START + 86_400 + 4
        assert 5 == await upkeep.judge_due()
        assert {"safe": 3, "key_window_expired": 5} == await rig.listing.count(Filter())
        assert 0 == await upkeep.judge_due()


async def test_a_damaged_entry_does_not_hold_up_the_judging(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        ids = await keyed(rig, 7)
        await rig.store.write(
            lambda c: c.execute("UPDATE dead_letters SET search = 'x' WHERE dlq_id = ?", (ids[0],)) and None
        )
        rig.now += 90_000
        assert 7 == await Upkeep(rig.letters).judge_due()
        assert 6 == (await rig.listing.count(Filter()))["key_window_expired"]


async def test_new_settings_judge_everything_that_waits_anew(tmp_path: Path) -> None:
    async with rig_in(tmp_path, {"payments": terms(), "other": terms()}) as rig:
        for number in range(8):
            upstream = "payments" if number % 2 else "other"
            await rig.letters.keep(failed(number, upstream=upstream, method="PUT", at=START - 5000))
        assert {"safe": 8} == await rig.listing.count(Filter())
        for upstream in ("payments", "other"):
            rig.terms[upstream] = terms(replay={"stale_after": 60.0})
        assert 4 == await Upkeep(rig.letters).judge_all("payments")
        assert {"safe": 4, "stale": 4} == await rig.listing.count(Filter())
        assert 8 == await Upkeep(rig.letters).judge_all()
        assert {"stale": 8} == await rig.listing.count(Filter())


# ---- letting go --------------------------------------------------------------------------------------------------


async def test_what_waits_is_never_dropped_unless_retention_says_so(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        ids = await keyed(rig, 5)
        rig.now += 10 * 365 * 86_400
        assert {"done": 0, "lost": 0} == await Upkeep(rig.letters).expire()
        assert set(ids) == set(await rig.ids(Filter()))


async def test_retention_drops_what_is_old_and_counts_it_as_loss(tmp_path: Path) -> None:
    async with rig_in(tmp_path, settings={"retention": 100.0}) as rig:
        old = [(await rig.letters.keep(failed(number, body=bytes(400_000)))).dlq_id for number in range(7)]
        young = (await rig.letters.keep(failed(50, at=START + 150))).dlq_id
        rig.now = START + 200
        assert {"done": 0, "lost": 7} == await Upkeep(rig.letters).expire()
        assert [young] == await rig.ids(Filter())
        assert [] == os.listdir(rig.letters.bodies.folder)
        assert 7 == rig.counts.evicted["ttl"]
        assert "7 dead letters were dropped" in rig.told.sentence("sidecar.dlq.expired")
        with pytest.raises(NoSuchThing):
            await rig.entry(old[0])


async def test_what_is_done_goes_after_a_while_and_is_no_loss(tmp_path: Path) -> None:
    async with rig_in(tmp_path, settings={"keep_completed": 1000.0}) as rig:
        ids = await keyed(rig, 5)
        rig.now += 500
        for dlq_id in ids[:4]:
            await rig.operator.discard(dlq_id, "ann")
        rig.now += 900
        assert {"done": 0, "lost": 0} == await Upkeep(rig.letters).expire()
        rig.now += 101
        assert {"done": 4, "lost": 0} == await Upkeep(rig.letters).expire()
        assert ids[4:] == await rig.ids(Filter())
        assert 0 == sum(rig.counts.evicted.values())


# ---- checking ----------------------------------------------------------------------------------------------------


async def test_a_healthy_store_checks_out(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        await keyed(rig, 60)
        await rig.letters.keep(failed(100, body=bytes(400_000), response=Answer(500, [], b"x")))
        await rig.letters.keep(failed(101, body=None, body_size=9_000_000))
        found = await Upkeep(rig.letters).check()
        assert (62, 0, 0) == (found.entries, found.damaged, found.repaired)


@pytest.mark.parametrize(
    ("statement", "whole_row"),
    [
        ("UPDATE dead_letters SET record = substr(record, 1, 50)", True),
        ("UPDATE payloads SET head = zeroblob(60)", False),
        ("UPDATE payloads SET response = zeroblob(60)", False),
        ("DELETE FROM payloads", False),
    ],
)
async def test_a_check_finds_what_is_damaged_and_sets_it_aside(tmp_path: Path, statement: str, whole_row: bool) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(1, response=Answer(500, [], b"x")))
        await rig.store.write(lambda connection: connection.execute(statement) and None)
        good = await rig.letters.keep(failed(2))
        found = await Upkeep(rig.letters).check()
        assert (2, 1) == (found.entries, found.damaged)
        assert 1 == rig.counts.evicted["corrupt"]
        assert whole_row == (kept.dlq_id not in await rig.ids(Filter()))
        assert "unsafe" == (await rig.entry(good.dlq_id)).verdict


async def test_a_body_file_that_is_gone_is_found(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(1, body=bytes(400_000)))
        (name,) = os.listdir(rig.letters.bodies.folder)
        (rig.letters.bodies.folder / name).unlink()
        assert 1 == (await Upkeep(rig.letters).check()).damaged
        assert "not_replayable" == (await rig.entry(kept.dlq_id)).verdict


async def test_copies_and_counts_that_disagree_are_repaired(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        ids = await keyed(rig, 4)
        await rig.operator.discard(ids[0], "ann")

        def break_copies(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE facets SET n = n + 10 WHERE status = 'discarded'")
            other = connection.execute("SELECT id FROM facets WHERE status = 'discarded'").fetchone()[0]
            connection.execute("UPDATE dead_letters SET facet = ? WHERE dlq_id = ?", (other, ids[1]))

        await rig.store.write(break_copies)
        assert {"payments": 2} == (await rig.listing.refresh()).waiting
        found = await Upkeep(rig.letters).check()
        assert (4, 0, 2) == (found.entries, found.damaged, found.repaired)
        assert {"payments": 3} == (await rig.listing.refresh()).waiting
        assert {"discarded": 1, "pending": 3} == rig.listing.stats.count("status")


async def test_an_index_that_disagrees_with_its_table_is_made_anew(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        ids = await keyed(rig, 5)
    desync_index(tmp_path / "store.db", "dead_letters_by_key", "UPDATE dead_letters SET key_hash = key_hash + 1")
    desync_index(tmp_path / "store.db", "dead_letters_by_key", "UPDATE dead_letters SET key_hash = NULL")
    async with rig_in(tmp_path) as rig:
        assert None is not await rig.store.problem()
        found = await Upkeep(rig.letters).check()
        assert (5, 5, 1) == (found.entries, found.damaged, found.repaired), "the rows were changed as well"
        assert None is await rig.store.problem()
        assert not set(ids) & set(await rig.ids(Filter()))


async def test_a_file_that_cannot_be_repaired_is_told(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        await keyed(rig, 3)
    async with rig_in(tmp_path) as rig:
        problems = iter(["row 3 missing from index", "still missing"])

        async def problem(check: Any = None) -> str | None:
            return next(problems)

        rig.store.problem = problem  # type: ignore[method-assign]  # a file that no REINDEX helps
        await Upkeep(rig.letters).check()
        await asyncio.sleep(0)
        assert "still missing" in rig.told.sentence("sidecar.store.damaged")
        assert (tmp_path / "store.suspect").exists()


async def test_a_flipped_bit_anywhere_is_never_shown_as_the_truth(tmp_path: Path) -> None:
    """Flip one bit at many places of the closed file: every entry is then exactly as before, or said to be damaged."""
    place = tmp_path / "state"
    async with rig_in(place) as rig:
        for number in range(12):
            await rig.letters.keep(
                failed(number, at=START + number, body=bytes(300), response=Answer(500, [], b"a" * 50))
            )
        before = {dlq_id: await state_of(rig, dlq_id) for dlq_id in await rig.ids(Filter())}
    whole = (place / "store.db").read_bytes()
    step = 211 if os.environ.get("SIDECAR_LONG_TESTS") else 3989
    found, silent = 0, []
    for position in range(0, len(whole), step):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        (place / "store.db").write_bytes(flipped)
        for left in ("store.db-wal", "store.db-shm"):
            (place / left).unlink(missing_ok=True)
        try:
            async with rig_in(place) as rig:
                checked = await Upkeep(rig.letters).check()
                after = {dlq_id: await state_of(rig, dlq_id) for dlq_id in await rig.ids(Filter())}
                told = set(rig.told.events)
        except Trouble:  # said loudly
            found += 1
            continue
        noticed = bool(
            checked.damaged or told & {"sidecar.store.set_aside", "sidecar.dlq.damaged", "sidecar.store.damaged"}
        )
        found += noticed
        wrong = [dlq_id for dlq_id, state in after.items() if state is not None and before.get(dlq_id) != state]
        missing = before.keys() - after.keys()
        if wrong or (missing and not noticed):
            silent.append((position, wrong, missing))
    assert [] == silent
    assert found > 5, "some flips must have hit something"


async def state_of(rig: Rig, dlq_id: str) -> Any:
    """All of it; None when it is said to be damaged."""
    try:
        entry, request = await rig.entry(dlq_id), await rig.letters.request(dlq_id)
        return entry.record(), request, await rig.letters.last_answer(dlq_id)
    except Damaged:
        return None


# ---- new keys ----------------------------------------------------------------------------------------------------


async def test_after_a_rotation_everything_opens_under_the_new_key_alone(tmp_path: Path) -> None:
    call = Call("payments", "ak", "POST", "/x", "key", "ab" * 32)
    wanted = [
        Wanted("ann", "mail", "POST", "https://mail.test/", (), b"x" * 400_000),
        Wanted("bob", "mail", "POST", "https://mail.test/", (), b"y"),
    ]
    async with rig_in(tmp_path) as rig:
        old = rig.letters.keyring.active
        ids = await keyed(rig, 10)
        large = (await rig.letters.keep(failed(90, body=b"z" * 300_000, response=Answer(500, [], b"said")))).dlq_id
        await rig.operator.edit(large, "ann", Edit(body=b"w" * 310_000))
        gate = Gate(rig.store, rig.letters.keyring, now=lambda: rig.now)
        proceed = await gate.begin(call)
        assert isinstance(proceed, Proceed)
        await gate.succeeded(proceed, Response(200, [], b"stored"))
        outbox = Outbox(rig.store, rig.letters.keyring, rig.letters.bodies, _never, _never)
        await Jobs(outbox).submit(Submission("j", "s", wanted))
        rotation = Rotation(rig.store, rig.letters.keyring, rig.letters.bodies)
        new = await rotation.rotate()
        assert new != old
        fresh = (await rig.letters.keep(failed(91))).dlq_id
        done = await rotation.reseal()
        assert (10 * 2 + 2 + 1 + 1 + 3, 3, 0) == (done.values, done.files, done.damaged)
        again = await rotation.reseal()
        assert (0, 0, 0) == (again.values, again.files, again.damaged)
        assert 3 == len(os.listdir(rig.letters.bodies.folder))
    (tmp_path / "keys" / f"seal-0001-{old}.key").unlink()
    async with rig_in(tmp_path) as rig:
        assert [new] == rig.letters.keyring.key_ids
        assert (0, 12) == ((await Upkeep(rig.letters).check()).damaged, len(await rig.ids(Filter())))
        request = await rig.letters.request(large)
        assert b"w" * 310_000 == b"".join([chunk async for chunk in rig.letters.payloads.body(request)])
        assert failed(3).body == (await rig.letters.request(ids[3])).body
        assert failed(91).body == (await rig.letters.request(fresh)).body
        assert isinstance(await Gate(rig.store, rig.letters.keyring, now=lambda: rig.now).begin(call), Hit)
        outbox = Outbox(rig.store, rig.letters.keyring, Bodies(rig.store, rig.letters.keyring), _never, _never)
        assert ["ann", "bob"] == [
            one["recipient"]
            for one in (await Jobs(outbox).get((await Jobs(outbox).page())["items"][0]["job_id"]))["deliveries"]
        ]


async def _never(delivery: Any) -> Any:
    raise AssertionError("nothing is sent here")


async def test_until_it_is_sealed_anew_the_old_key_stays_needed(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        old = rig.letters.keyring.active
        await keyed(rig, 2)
        await Rotation(rig.store, rig.letters.keyring, rig.letters.bodies).rotate()
    async with rig_in(tmp_path) as rig:
        assert 2 == len(await rig.ids(Filter()))
    (tmp_path / "keys" / f"seal-0001-{old}.key").unlink()
    with pytest.raises(CannotUse, match=f"sealed with key {old}"):
        await Store.open(tmp_path, hooks=[load_keyring(tmp_path, None).prove])


async def test_what_is_damaged_keeps_the_old_key_needed(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        old = rig.letters.keyring.active
        ids = await keyed(rig, 3)
        await rig.letters.keep(failed(9, body=bytes(400_000)))
        (name,) = os.listdir(rig.letters.bodies.folder)
        (rig.letters.bodies.folder / name).unlink()

        def break_one(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE dead_letters SET record = 'x' WHERE dlq_id = ?", (ids[0],))

        await rig.store.write(break_one)
        rotation = Rotation(rig.store, rig.letters.keyring, rig.letters.bodies)
        await rotation.rotate()
        done = await rotation.reseal()
        assert (5, 3) == (done.values, done.damaged)
        needed = await rig.store.read(lambda c: {key_id for (key_id,) in c.execute("SELECT key_id FROM seal_keys")})
        assert old in needed


async def test_a_key_from_the_environment_is_rotated_by_a_restart(tmp_path: Path) -> None:
    key, other = os.urandom(32).hex(), os.urandom(32).hex()
    keyring = load_keyring(tmp_path, key)
    store = await Store.open(tmp_path, hooks=[keyring.prove])
    bodies = Bodies(store, keyring)
    with pytest.raises(NotNow, match="set SIDECAR_SEAL_KEY to `new,old`"):
        await Rotation(store, keyring, bodies).rotate()
    await store.close()
    keyring = load_keyring(tmp_path, f"{other},{key}")
    store = await Store.open(tmp_path, hooks=[keyring.prove])
    await Rotation(store, keyring, Bodies(store, keyring)).reseal()
    await store.close()
    store = await Store.open(tmp_path, hooks=[load_keyring(tmp_path, other).prove])
    await store.close()


async def test_a_file_edited_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(body=bytes(400_000), code="CONNECTION_REFUSED", phase=NOT_CONNECTED))
        rotation = Rotation(rig.store, rig.letters.keyring, rig.letters.bodies)
        await rotation.rotate()
        original = rig.letters.bodies.read

        async def slow(name: str, host: str, ident: str) -> Any:
            async for chunk in original(name, host, ident):
                yield chunk
            await rig.store.write(lambda c: c.execute("UPDATE payloads SET body_file = NULL, body = NULL") and None)

        monkeypatch.setattr(rig.letters.bodies, "read", slow)
        done = await rotation.reseal()
        assert 0 == done.files
        assert 1 == len(os.listdir(rig.letters.bodies.folder))
        assert kept.created


async def test_the_file_shrinks_when_much_of_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig_in(tmp_path, settings={"keep_completed": 10.0}) as rig:
        upkeep = Upkeep(rig.letters)
        ids = [(await rig.letters.keep(failed(number, body=b"x" * 200_000))).dlq_id for number in range(60)]
        assert 0 == await upkeep.shrink(), "nothing is free"
        for dlq_id in ids:
            await rig.operator.discard(dlq_id, "ann", "a test")
        rig.now += 20
        assert 60 == (await upkeep.expire())["done"]
        freed = await upkeep.shrink()
        assert 1024 <= freed <= 8 * 256, "a bounded piece at a time"
        while await upkeep.shrink():
            pass
        await rig.store.write(lambda connection: None)
    assert (tmp_path / "store.db").stat().st_size < 6_000_000


async def test_a_file_of_an_earlier_release_learns_to_shrink(tmp_path: Path) -> None:
    def how(connection: sqlite3.Connection) -> int:
        return int(connection.execute("PRAGMA auto_vacuum").fetchone()[0])

    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed())
        assert 2 == await rig.store.read(how)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA auto_vacuum = NONE")
        connection.execute("VACUUM")
        assert 0 == how(connection)
    async with rig_in(tmp_path) as rig:
        assert 2 == await rig.store.read(how)
        assert kept.dlq_id == (await rig.entry(kept.dlq_id)).dlq_id
        assert () == rig.store.losses


async def test_the_audit_lets_go_of_what_is_old_and_of_nothing_else(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        audit = Audit(rig.store)
        for at in range(10):
            await audit.add(AuditEntry(float(at), "ann", "did", f"thing {at}"))
        assert 4 == await audit.expire(4.0)
        assert [f"thing {at}" for at in range(9, 3, -1)] == [
            row.about for row in (await audit.page(AuditWanted(), 20))[0]
        ]
        with pytest.raises(sqlite3.IntegrityError, match="only ever added to"):
            await rig.store.write(lambda connection: connection.execute("DELETE FROM audit WHERE at = 5") and None)
        assert 0 == await audit.expire(4.0)


async def test_a_fault_of_ours_in_the_store_is_told_as_such(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        told: list[str] = []
        rig.store.on_fault = lambda what, error: told.append(f"{what}: {error}")
        rig.store._writer._room = lambda: 1 // 0  # type: ignore[assignment]
        with pytest.raises(NotKept):
            await rig.letters.keep(failed())
        await asyncio.sleep(0)
        assert ["a group of writes failed inside the sidecar: integer division or modulo by zero"] == told
