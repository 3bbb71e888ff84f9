"""The store: what a commit promises, what a broken disk does to it, and how it comes back."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable import opening, wal
from sidecar.durable import store as store_module
from sidecar.durable.disk import Disk, tightened, volatile_file_system
from sidecar.durable.schema import MIGRATIONS, VERSION
from sidecar.durable.store import Store
from sidecar.durable.trouble import CannotUse, NotKept, Trouble
from tests.durability.faults import FaultyDisk, Wires, desync_index, disk_error
from tests.durability.rigs import Told, crashed_copy, opened

KNOWN = ["90988eab7ec1", "3476f7312268", "2037cd2e0346", "5bedfb43aa6a", "686524643484", "c0ccb48a1cff", "587796e4d967"]


def note(name: str, value: Any = 1) -> Any:
    def work(connection: sqlite3.Connection) -> str:
        connection.execute("INSERT INTO meta VALUES (?, ?)", (name, value))
        return name

    return work


def noted(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute(
        "SELECT name FROM meta WHERE name NOT IN ('opened_at', 'hash_proof', 'store_id', 'losses')"
    )
    return {name for (name,) in rows}


def found(folder: Path, part: str) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if part in name]


async def until_healthy(store: Store) -> None:
    while not store.health.ok:
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)


async def test_what_was_awaited_is_there_after_opening_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert "a" == await store.write(note("a"))
    async with opened(tmp_path) as store:
        assert {"a"} == await store.read(noted)


async def test_what_was_awaited_is_in_the_files_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path / "live") as store:
        await store.write(note("a"))
        copy = crashed_copy(tmp_path / "live", tmp_path / "copy")
    async with opened(copy) as store:
        assert {"a"} == await store.read(noted)


async def test_writes_that_wait_together_share_a_commit(tmp_path: Path) -> None:
    wires = Wires()
    async with opened(tmp_path, connect=wires.connect) as store:
        before = wires.commits
        await asyncio.gather(*(store.write(note(f"n{number}")) for number in range(500)))
        assert wires.commits - before < 50
        assert 500 == len(await store.read(noted))


async def test_a_write_is_not_acknowledged_before_its_commit(tmp_path: Path) -> None:
    wires, release = Wires(), threading.Event()
    async with opened(tmp_path, connect=wires.connect) as store:
        wires.before = lambda statement: statement != "COMMIT" or release.wait() or None
        write = store.write(note("a"))
        await asyncio.sleep(0.05)
        assert not write.done()
        release.set()
        assert "a" == await write


async def test_a_write_whose_waiter_was_cancelled_still_happens(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        store.write(note("a")).cancel()
        await store.write(note("b"))
        assert {"a", "b"} == await store.read(noted)


async def test_a_mistake_undoes_only_the_write_that_made_it(tmp_path: Path) -> None:
    def mistaken(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO meta VALUES ('half', 1)")
        raise ValueError("changed my mind")

    async with opened(tmp_path) as store:
        good, bad, twice, odd = (
            store.write(note("a")),
            store.write(mistaken),
            store.write(note("a")),
            store.write(lambda connection: connection.execute("NOT SQL")),
        )
        assert "a" == await good
        with pytest.raises(ValueError, match="changed my mind"):
            await bad
        with pytest.raises(sqlite3.IntegrityError):
            await twice
        with pytest.raises(sqlite3.OperationalError, match="syntax"):
            await odd
        assert {"a"} == await store.read(noted)
        assert store.health.ok


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "SAVEPOINT one", "COMMIT"])
async def test_a_failed_commit_is_told_and_the_handle_is_never_used_again(tmp_path: Path, statement: str) -> None:
    wires, told = Wires(), Told()
    async with opened(tmp_path, connect=wires.connect, report=told) as store:
        wires.fail_once(statement)
        both = await asyncio.gather(store.write(note("a")), store.write(note("b")), return_exceptions=True)
        assert ["disk_error", "disk_error"] == [error.reason for error in both if isinstance(error, NotKept)]
        assert not store.health.ok
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            wires.connections[0].execute("SELECT 1")
        await until_healthy(store)
        await store.write(note("c"))
        assert {"c"} == await store.read(noted)
        assert 2 == len(wires.connections)
        assert ["sidecar.store.degraded", "sidecar.store.recovered"] == [
            event for event in told.events if event != "sidecar.store.volatile"
        ]


async def test_while_the_disk_is_in_trouble_writes_are_refused_at_once(tmp_path: Path) -> None:
    wires = Wires()
    async with opened(tmp_path, connect=wires.connect) as store:

        def broken(statement: str) -> None:
            if statement == "COMMIT":
                raise disk_error()

        wires.before = broken
        for name in "abc":
            with pytest.raises(NotKept, match="cannot be written: disk I/O error; look at the disk"):
                await store.write(note(name))
        assert set() == await store.read(noted), "reading goes on"
        wires.before = lambda statement: None
        await until_healthy(store)
        await store.write(note("d"))
        assert {"d"} == await store.read(noted)


async def test_a_full_database_refuses_and_recovers_without_a_restart(tmp_path: Path) -> None:
    pages = [60]

    def limited(connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages[0]}")

    async with opened(tmp_path, hooks=[limited]) as store:
        kept: set[str] = set()

        async def fill() -> None:
            for number in range(100):
                kept.add(await store.write(note(f"n{number}", bytes(20_000))))

        with pytest.raises(NotKept, match="full") as refused:
            await fill()
        assert "full" == refused.value.reason
        assert kept == await store.read(noted)
        pages[0] = 10_000
        await until_healthy(store)
        await store.write(note("more", bytes(20_000)))
        assert kept | {"more"} == await store.read(noted)


async def test_below_the_floor_only_writes_that_need_no_room_are_taken(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with opened(tmp_path, disk=disk, min_free_bytes=1000) as store:
        disk.free = 1500
        with pytest.raises(NotKept, match="min_free_bytes"):
            await store.write(note("large"), grows=501)
        await store.write(note("fits"), grows=500)
        disk.free = 0
        await store.write(note("marker"))
        assert {"fits", "marker"} == await store.read(noted)
        assert store.health.ok


async def test_what_waits_for_its_commit_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MOST_WAITING_BYTES", 1000)
    async with opened(tmp_path) as store:
        first = store.write(note("a"), grows=900)
        with pytest.raises(NotKept, match="than memory allows"):
            await store.write(note("b"), grows=200)
        await first
        await store.write(note("c"), grows=200)
        assert {"a", "c"} == await store.read(noted)


async def test_a_closed_store_refuses_politely(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        pending = store.write(note("a"))
    assert "a" == await pending, "what was submitted before closing is committed"
    with pytest.raises(NotKept, match="is closed"):
        await store.write(note("b"))
    with pytest.raises(NotKept, match="is closed"):
        await store.read(noted)
    assert not store.health.ok
    await store.close()


# ---- reading ---------------------------------------------------------------------------------------------------


async def test_a_reader_cannot_write(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        with pytest.raises(Trouble, match="readonly"):
            await store.read(note("a"))
        assert set() == await store.read(noted)


async def test_a_read_that_takes_too_long_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LONGEST_READ", 0.05)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
    async with opened(tmp_path) as store:
        with pytest.raises(Trouble, match="narrow the filter"):
            await store.read(lambda connection: connection.execute(endless).fetchone())
        assert set() == await store.read(noted)


# ---- opening ---------------------------------------------------------------------------------------------------


async def test_files_are_private_and_loose_ones_are_tightened(tmp_path: Path) -> None:
    place = tmp_path / "state"
    async with opened(place) as store:
        await store.write(note("a"))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [place, *place.iterdir()]}
        assert {"state": 0o700, "store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600} == {
            name: mode for name, mode in modes.items() if name != "account"
        }
        assert 0o600 == modes["account"]
    place.chmod(0o755)
    (place / "store.db").chmod(0o644)
    told = Told()
    async with opened(place, report=told) as store:
        assert {"a"} == await store.read(noted)
    assert 0o700 == stat.S_IMODE(place.stat().st_mode)
    assert 0o600 == stat.S_IMODE((place / "store.db").stat().st_mode)
    assert 2 == told.events.count("sidecar.store.permissions")
    assert not tightened(place)


@pytest.mark.parametrize("version", range(1, VERSION))
async def test_a_store_of_every_earlier_version_becomes_as_a_new_one(tmp_path: Path, version: int) -> None:
    def layout(connection: sqlite3.Connection) -> list[Any]:
        return connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()

    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    with sqlite3.connect(old / "store.db") as connection:
        for statements in MIGRATIONS[:version]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    old_told, new_told = Told(), Told()
    async with opened(old, report=old_told) as migrated, opened(new, report=new_told) as made:
        assert await made.read(layout) == await migrated.read(layout)
    assert (1, 0) == tuple(told.events.count("sidecar.store.upgraded") for told in (old_told, new_told))


def test_what_an_earlier_version_holds_is_as_it_was() -> None:
    """A store has seen a migration once it was here; what is added to one later never reaches that store."""
    seen = [hashlib.sha256("\n".join(statements).encode()).hexdigest()[:12] for statements in MIGRATIONS]
    assert KNOWN == seen, "append a migration instead of changing one"


async def test_a_store_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.write(note("a"))
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    with pytest.raises(CannotUse, match=r"newer sidecar .*start that release again"):
        await Store.open(tmp_path)
    assert ["account", "store.db"] == sorted(os.listdir(tmp_path))


async def test_what_is_not_a_database_is_set_aside_with_its_bodies(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"something else" * 1000)
    (tmp_path / "bodies").mkdir()
    (tmp_path / "bodies" / "x").write_bytes(b"kept")
    told = Told()
    async with opened(tmp_path, report=told) as store:
        await store.write(note("fresh"))
    aside = {path.name.split(".damaged-")[0]: path for path in found(tmp_path, ".damaged-")}
    assert {"store.db", "bodies"} == set(aside)
    assert b"something else" * 1000 == aside["store.db"].read_bytes()
    assert b"kept" == (aside["bodies"] / "x").read_bytes()
    assert str(aside["store.db"]) in told.sentence("sidecar.store.set_aside")


async def test_a_file_with_a_broken_page_is_set_aside_and_never_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await asyncio.gather(*(store.write(note(f"n{number}", bytes(3000))) for number in range(100)))
    file = tmp_path / "store.db"
    content = bytearray(file.read_bytes())
    for page in range(40, len(content) // 4096):
        content[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    file.write_bytes(content)
    told = Told()
    async with opened(tmp_path, report=told) as store:
        assert set() == await store.read(noted)
        await store.write(note("fresh"))
    assert bytes(content) == found(tmp_path, "store.db.damaged-")[0].read_bytes()
    assert "sidecar.store.set_aside" in told.events


async def test_a_suspected_file_whose_index_is_wrong_is_repaired_not_set_aside(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.write(
            lambda c: c.execute("INSERT INTO jobs VALUES ('j', 'k', 's', 1, 'failed', 1.0, NULL)") and None
        )
    desync_index(tmp_path / "store.db", "jobs_by_time", "UPDATE jobs SET created_at = 2.0")
    (tmp_path / "store.suspect").touch()
    told = Told()
    async with opened(tmp_path, report=told) as store:
        found = "SELECT job_id FROM jobs WHERE created_at = 2.0"
        assert ("j",) == await store.read(lambda connection: connection.execute(found).fetchone())
    assert "sidecar.store.set_aside" not in told.events
    assert ["account", "store.db"] == sorted(os.listdir(tmp_path)), "no longer suspected"


async def test_a_suspected_file_that_cannot_be_repaired_is_set_aside(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for key in "ab":
            row = (f"j{key}", key)
            await store.write(
                lambda c, row=row: (
                    c.execute("INSERT INTO jobs VALUES (?, ?, 's', 1, 'failed', 1.0, NULL)", row) and None
                )
            )
        await store.write(lambda c: c.execute("CREATE UNIQUE INDEX once ON jobs (idempotency_key)") and None)
    connection = sqlite3.connect(tmp_path / "store.db")
    with connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = 'CREATE UNIQUE INDEX once ON jobs (subject)' WHERE name = 'once'"
        )
    connection.close()
    (tmp_path / "store.suspect").touch()
    told = Told()
    async with opened(tmp_path, report=told) as store:
        assert set() == await store.read(noted)
    assert "UNIQUE constraint failed" in told.sentence("sidecar.store.set_aside")


async def test_two_files_set_aside_in_the_same_moment_are_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.clock.wall", lambda: 1_800_000_000.0)
    for content in (b"first" * 1000, b"second" * 1000, b"third" * 1000):
        (tmp_path / "store.db").write_bytes(content)
        async with opened(tmp_path):
            pass
    kept = {path.read_bytes()[:5] for path in found(tmp_path, "store.db.damaged-")}
    assert {b"first", b"secon", b"third"} == kept


async def test_a_log_that_cannot_be_copied_is_still_compared(tmp_path: Path) -> None:
    async with opened(tmp_path / "live") as store:
        for number in range(20):
            await store.write(note(f"n{number}"))
        copy = crashed_copy(tmp_path / "live", tmp_path / "copy")
    log = copy / "store.db-wal"
    content = bytearray(log.read_bytes())
    content[200] ^= 1
    log.write_bytes(content)
    told = Told()
    async with opened(copy, report=told, disk=FaultyDisk(1)) as store:
        assert store.health.ok
    assert "sidecar.store.log_damaged" in told.events


async def test_damage_found_while_running_sets_the_file_aside_too(tmp_path: Path) -> None:
    wires, told = Wires(), Told()
    async with opened(tmp_path, connect=wires.connect, report=told) as store:
        await store.write(note("a"))
        (tmp_path / "store.db").write_bytes(b"overwritten by somebody" * 500)
        (tmp_path / "store.db-wal").write_bytes(b"")
        wires.fail_once("COMMIT", sqlite3.SQLITE_CORRUPT)
        with pytest.raises(NotKept):
            await store.write(note("b"))
        await until_healthy(store)
        await store.write(note("c"))
        assert {"c"} == await store.read(noted)
    assert "sidecar.store.set_aside" in told.events


async def test_a_log_without_its_database_is_not_taken_for_the_new_ones(tmp_path: Path) -> None:
    async with opened(tmp_path / "live") as store:
        await store.write(note("a"))
        copy = crashed_copy(tmp_path / "live", tmp_path / "copy")
    (copy / "store.db").unlink()
    async with opened(copy) as store:
        assert set() == await store.read(noted)
    assert 1 == len(found(copy, "store.db-wal.damaged-"))


async def test_a_large_file_is_checked_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def large(number: int) -> Any:
        values = (number, bytes(2_000_000))
        return lambda c: c.execute("INSERT INTO quarantine VALUES (?, 0, '', '', '', ?)", values) and None

    def how_many(connection: sqlite3.Connection) -> int:
        return int(connection.execute("SELECT count(*) FROM quarantine").fetchone()[0])

    async with opened(tmp_path) as store:
        for number in range(3):
            await store.write(large(number))
    monkeypatch.setattr(opening, "CHECKED_AT_ONCE", 0)
    told = Told()
    async with opened(tmp_path, report=told) as store:
        assert store._check is not None
        await store._check
        assert 3 == await store.read(how_many)
    content = bytearray((tmp_path / "store.db").read_bytes())
    content[700 * 4096 : 700 * 4096 + 4] = b"\0\0\0\1"  # a large value's page now points back to the first one
    (tmp_path / "store.db").write_bytes(content)
    async with opened(tmp_path, report=told) as store:
        assert store._check is not None
        await store._check
        await asyncio.sleep(0)
        assert "then restart" in told.sentence("sidecar.store.damaged")
    async with opened(tmp_path, report=told) as store:
        assert 0 == await store.read(how_many), "suspected: this time all of it was checked first"
    assert "sidecar.store.set_aside" in told.events


async def test_a_disk_in_trouble_at_the_start_degrades_and_recovers(tmp_path: Path) -> None:
    place = tmp_path / "state"
    place.write_text("a file where the directory should be")
    async with opened(place) as store:
        assert not store.health.ok
        with pytest.raises(NotKept):
            await store.write(note("a"))
        with pytest.raises(Trouble):
            await store.read(noted)
        place.unlink()
        await until_healthy(store)
        await store.write(note("b"))
        assert {"b"} == await store.read(noted)


async def test_every_failing_step_of_the_first_start_is_survived(tmp_path: Path) -> None:
    steps = FaultyDisk()
    async with opened(tmp_path / "count", disk=steps):
        pass
    assert steps.steps >= 2
    for failing in range(1, steps.steps + 1):
        async with opened(tmp_path / str(failing), disk=FaultyDisk(failing)) as store:
            await until_healthy(store)
            await store.write(note("a"))
            assert {"a"} == await store.read(noted)


async def test_a_file_system_without_shared_memory_is_refused(tmp_path: Path) -> None:
    def in_memory(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)

    with pytest.raises(CannotUse, match="set `state_dir` to a local disk"):
        await Store.open(tmp_path, connect=in_memory)


# ---- the log after a crash -------------------------------------------------------------------------------------


async def test_an_undamaged_log_is_taken_back_in_silence(tmp_path: Path) -> None:
    async with opened(tmp_path / "live") as store:
        for number in range(20):
            await store.write(note(f"n{number}"))
        copy = crashed_copy(tmp_path / "live", tmp_path / "copy")
    assert wal.last_commit(copy / "store.db-wal") > 0
    told = Told()
    async with opened(copy, report=told) as store:
        assert 20 == len(await store.read(noted))
        assert "sidecar.store.log_damaged" not in told.events
    assert {"account", "store.db"} == set(os.listdir(copy))


@pytest.mark.parametrize("where", [4, 20, 32 + 10, 32 + 24 + 100, 32 + (24 + 4096) * 9 + 500])
async def test_a_bit_flip_in_the_log_is_found_and_the_log_is_kept(tmp_path: Path, where: int) -> None:
    async with opened(tmp_path / "live") as store:
        for number in range(20):
            await store.write(note(f"n{number}"))
        copy = crashed_copy(tmp_path / "live", tmp_path / "copy")
    log = copy / "store.db-wal"
    content = bytearray(log.read_bytes())
    content[where] ^= 0x10
    log.write_bytes(content)
    told = Told()
    async with opened(copy, report=told) as store:
        await store.write(note("after"))
    assert "sidecar.store.log_damaged" in told.events
    assert bytes(content) == found(copy, "store.db-wal.damaged-")[0].read_bytes()


async def test_a_torn_end_of_the_log_is_normal(tmp_path: Path) -> None:
    async with opened(tmp_path / "live") as store:
        for number in range(20):
            await store.write(note(f"n{number}"))
        copy = crashed_copy(tmp_path / "live", tmp_path / "copy")
    log = copy / "store.db-wal"
    log.write_bytes(log.read_bytes()[:-2000])
    told = Told()
    async with opened(copy, report=told) as store:
        assert 19 == len(await store.read(noted))
    assert "sidecar.store.log_damaged" not in told.events


def test_no_log_or_a_stump_of_one_promises_nothing(tmp_path: Path) -> None:
    assert 0 == wal.last_commit(tmp_path / "none")
    (tmp_path / "stump").write_bytes(b"short")
    assert 0 == wal.last_commit(tmp_path / "stump")


# ---- files -----------------------------------------------------------------------------------------------------


def test_a_whole_file_is_there_or_not_at_all_whichever_step_fails(tmp_path: Path) -> None:
    counting = FaultyDisk()
    counting.write_whole(tmp_path / "count", b"content")
    for failing in range(1, counting.steps + 1):
        path = tmp_path / f"file{failing}"
        with pytest.raises(OSError, match="Input/output error"):
            FaultyDisk(failing).write_whole(path, b"content")
        assert not path.exists() or b"content" == path.read_bytes()
        assert [] == list(tmp_path.glob("*.tmp"))
    Disk().write_whole(path, b"other")
    assert b"other" == path.read_bytes()


MOUNTS = """\
21 1 8:1 / / rw - overlay overlay rw
22 21 8:2 / /var rw - ext4 /dev/sda2 rw
23 22 0:5 / /var/tmp\\040files rw - tmpfs tmpfs rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"), [("/state", "overlay"), ("/var/lib/sidecar", None), ("/var/tmp files/x", "tmpfs")]
)
def test_a_file_system_that_forgets_is_recognised(path: str, kind: str | None) -> None:
    assert kind == volatile_file_system(Path(path), MOUNTS)


def test_without_a_list_of_mounts_nothing_is_said() -> None:
    assert None is volatile_file_system(Path("/state"), "")


async def test_a_state_dir_that_forgets_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "volatile_file_system", lambda path: "tmpfs")
    told = Told()
    async with opened(tmp_path, report=told):
        await asyncio.sleep(0)
    assert "mount a volume there" in told.sentence("sidecar.store.volatile")
