"""What is missing in a store after a crash is missed, and nothing else ever is."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.durable import account
from sidecar.durable.account import Notes, Sheet
from sidecar.durable.bodies import INLINE
from sidecar.durable.schema import VERSION
from sidecar.durable.store import Store
from tests.durability.rigs import Told, failed, rig_in

LARGE = b"x" * (INLINE + 1)
SHEET = Sheet("a", 7, 3, 2, 1, run="this run")


async def crashed(folder: Path, letters: int = 3) -> Path:
    """A state directory as a kill leaves it: `letters` entries, one of them with a body file."""
    async with rig_in(folder / "live") as rig:
        for number in range(letters):
            await rig.letters.keep(failed(number, body=LARGE if number == 0 else b"small"))
        shutil.copytree(folder / "live", folder / "state", ignore=shutil.ignore_patterns("*-shm"))
    return folder / "state"


def bodies(state: Path) -> int:
    return len(list((state / "bodies").iterdir())) if (state / "bodies").is_dir() else 0


async def found_in(state: Path) -> tuple[Told, str, int]:
    """What is told at a start, what the store says is missing, and how many bodies are left by then."""
    async with rig_in(state) as rig:
        await rig.letters.bodies.collect()
        return rig.told, "; ".join(loss.what for loss in rig.store.losses), bodies(state)


def without_log(state: Path) -> None:
    (state / "store.db-wal").unlink()


def zeroed_log(state: Path) -> None:
    size = (state / "store.db-wal").stat().st_size
    (state / "store.db-wal").write_bytes(bytes(size))


def half_a_log(state: Path) -> None:
    size = (state / "store.db-wal").stat().st_size
    os.truncate(state / "store.db-wal", size // 2)


def without_database(state: Path) -> None:
    for path in state.glob("store.db*"):
        path.unlink()


def garbled_database(state: Path) -> None:
    without_log(state)
    (state / "store.db").write_bytes(b"not a database" * 500)


@pytest.mark.parametrize("damage", [without_log, zeroed_log, half_a_log, without_database, garbled_database])
async def test_a_loss_is_said_and_no_body_is_removed_before_somebody_has_answered_for_it(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    state = await crashed(tmp_path)
    damage(state)
    told, missing, left = await found_in(state)
    assert "sidecar.store.incomplete" in told.events
    assert "3 dead letters" in missing
    everywhere = len([path for path in state.rglob("*.body") if path.is_file()])
    assert 1 == everywhere
    if damage is not garbled_database:  # its bodies are set aside with it
        assert 1 == left
    told, missing, again = await found_in(state)
    assert "sidecar.store.incomplete" not in told.events, "said once"
    assert "3 dead letters" in missing, "and remembered"
    assert left == again
    async with rig_in(state) as rig:
        await rig.store.accept_losses()
        assert () == rig.store.losses
        await rig.letters.bodies.release_unclaimed()
    told, missing, left = await found_in(state)
    assert "" == missing
    assert "sidecar.store.unclaimed" not in told.events


async def test_bodies_without_a_store_and_its_account_stay(tmp_path: Path) -> None:
    state = await crashed(tmp_path)
    without_database(state)
    (state / "account").unlink()
    told, _, left = await found_in(state)
    assert "1 files in" in told.sentence("sidecar.store.unclaimed")
    assert 1 == left


async def test_what_a_crash_leaves_behind_is_collected_in_silence(tmp_path: Path) -> None:
    async with rig_in(tmp_path / "live") as rig:
        await rig.letters.keep(failed(1, body=LARGE))
        finished = await rig.letters.bodies.keep("h", "never promised", LARGE)
        shutil.copytree(tmp_path / "live", tmp_path / "state", ignore=shutil.ignore_patterns("*-shm"))
        await rig.letters.bodies.remove([finished.name])  # type: ignore[union-attr]  # it is large
    assert 2 == bodies(tmp_path / "state")
    told, missing, left = await found_in(tmp_path / "state")
    assert ("", 1) == (missing, left)
    assert {"sidecar.store.incomplete", "sidecar.store.unclaimed"}.isdisjoint(told.events)


async def test_after_a_power_cut_what_no_row_refers_to_stays_but_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await crashed(tmp_path)
    monkeypatch.setattr(account, "run_of_kernel", lambda: "another run")
    (state / "bodies" / f"{'0' * 64}.body").write_bytes(b"whose?")
    told, missing, left = await found_in(state)
    assert ("", 2) == (missing, left)
    assert "sidecar.store.unclaimed" in told.events


async def test_a_note_that_is_older_than_the_store_is_no_loss(tmp_path: Path) -> None:
    """After a power cut: the store was synced, the note was not."""
    state = await crashed(tmp_path)
    old = (state / "account").read_bytes()
    async with rig_in(state) as rig:
        await rig.letters.keep(failed(9))
    (state / "account").write_bytes(old)
    _, missing, _ = await found_in(state)
    assert "" == missing


@pytest.mark.parametrize("cut", [0, 1, 100, 511, 512, 513, 700])
async def test_half_a_note_is_none(tmp_path: Path, cut: int) -> None:
    state = await crashed(tmp_path)
    os.truncate(state / "account", cut)
    _, missing, _ = await found_in(state)
    assert "" == missing


async def test_entries_that_were_let_go_are_not_missed(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        for number in range(3):
            await rig.letters.keep(failed(number))
        await rig.store.write(lambda connection: connection.execute("DELETE FROM dead_letters") and None)
    _, missing, _ = await found_in(tmp_path)
    assert "" == missing


async def test_a_store_of_an_earlier_release_misses_nothing(tmp_path: Path) -> None:
    state = await crashed(tmp_path)
    (state / "account").unlink()
    async with rig_in(state):
        pass
    with closing(sqlite3.connect(state / "store.db", isolation_level=None)) as connection:
        connection.execute("DELETE FROM totals WHERE name = 'commits'")
        connection.execute(f"PRAGMA user_version = {VERSION - 1}")
    (state / "account").unlink()
    told, missing, _ = await found_in(state)
    assert "" == missing
    assert "sidecar.store.incomplete" not in told.events


async def test_writes_that_change_nothing_are_not_counted(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    before = Notes(tmp_path / "account").read()
    await store.write(lambda connection: connection.execute("SELECT 1") and None)
    assert before == Notes(tmp_path / "account").read()
    await store.write(lambda connection: connection.execute("INSERT INTO meta VALUES ('a', 1)") and None)
    after = Notes(tmp_path / "account").read()
    await store.close()
    assert before is not None
    assert after is not None
    assert before.commits + 1 == after.commits


@given(st.binary(min_size=1, max_size=40), st.integers(0, 1023))
def test_whatever_is_written_over_a_note_it_is_the_last_one_or_the_one_before_or_none(data: bytes, place: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        notes = Notes(Path(folder, "account"))
        notes.open()
        for commits in (6, 7):
            notes.write(Sheet("a", commits, 3, 2))
        notes.close()
        content = bytearray(Path(folder, "account").read_bytes())
        content[place : place + len(data)] = data
        Path(folder, "account").write_bytes(content)
        assert notes.read() in (Sheet("a", 7, 3, 2), Sheet("a", 6, 3, 2), None)
