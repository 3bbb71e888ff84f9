"""All that is kept, in one file and back: taken while the sidecar writes, whole or refused, nothing overwritten."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sqlite3
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.__main__ import main
from sidecar.durable.backup import back_up, restore
from sidecar.durable.bodies import INLINE
from sidecar.durable.schema import VERSION
from sidecar.durable.trouble import Damaged, NotNow, Trouble
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import keep
from tests.doubles.upstream import Upstream, always, answer
from tests.test_admin import admin, order

Started = Callable[[str], Any]


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter) -> Upstream:
    return await start_upstream(always(answer(b"ok")))


@pytest.fixture
def started(start_sidecar: Starter, tmp_path: Path) -> Started:
    async def start(name: str) -> Running:
        return await start_sidecar(state_dir=str(tmp_path / name))

    return start


async def letters(sidecar: Running) -> list[str]:
    return sorted(item["dlq_id"] for item in (await admin(sidecar, "/dlq?limit=500")).json["items"])


async def test_a_backup_of_a_running_sidecar_restored_elsewhere_has_everything(
    started: Started, upstream: Upstream, tmp_path: Path
) -> None:
    sidecar = await started("old")
    small = await keep(sidecar, upstream, 1)
    large = await keep(sidecar, upstream, 2, body=b"x" * (INLINE + 1000))
    await order(sidecar, "/retries/disable", {"reason": "a test"})
    file = tmp_path / "state.backup"
    made = await asyncio.to_thread(back_up, tmp_path / "old", file)
    await keep(sidecar, upstream, 3)  # after that moment
    assert (VERSION, ()) == (made.version, made.missing)
    assert 0o600 == stat.S_IMODE(os.stat(file).st_mode)
    assert [] == [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    _, aside = await asyncio.to_thread(restore, file, tmp_path / "new")
    assert aside is None
    again = await started("new")
    assert sorted([small, large]) == await letters(again)
    assert not again.proxy.retries_enabled
    assert ["disabled"] == [one["what"] for one in (await admin(again, "/audit")).json["items"]]
    durable = await again.proxy.kept.open()
    request = await durable.letters.request(large)
    body = b"".join([chunk async for chunk in durable.letters.payloads.body(request)])
    assert b"x" * (INLINE + 1000) == body


async def test_a_backup_taken_while_entries_come_is_of_one_moment(
    started: Started, upstream: Upstream, tmp_path: Path
) -> None:
    sidecar = await started("old")
    await keep(sidecar, upstream, 0)
    writing = asyncio.create_task(_keep_on(sidecar, upstream))
    try:
        for number in range(3):
            file = tmp_path / f"{number}.backup"
            await asyncio.to_thread(back_up, tmp_path / "old", file)
            await asyncio.to_thread(restore, file, tmp_path / f"new{number}")
    finally:
        writing.cancel()
    found = [_counted(tmp_path / f"new{number}" / "store.db") for number in range(3)]
    assert all(entries == told for entries, told in found)
    assert found == sorted(found)


async def _keep_on(sidecar: Running, upstream: Upstream) -> None:
    for number in range(1, 10_000):
        await keep(sidecar, upstream, number, body=b"y" * (INLINE + number) if number % 5 == 0 else b"{}")


def _counted(path: Path) -> tuple[int, int]:
    with sqlite3.connect(path) as connection:
        entries = connection.execute("SELECT count(*) FROM dead_letters").fetchone()[0]
        told = connection.execute("SELECT n FROM totals WHERE name = 'dead_letters'").fetchone()[0]
    connection.close()
    return entries, told


async def test_what_is_there_is_set_aside_and_only_when_asked(
    started: Started, upstream: Upstream, tmp_path: Path
) -> None:
    sidecar = await started("state")
    first = await keep(sidecar, upstream, 1)
    file = tmp_path / "state.backup"
    await asyncio.to_thread(back_up, tmp_path / "state", file)
    second = await keep(sidecar, upstream, 2)
    with pytest.raises(NotNow, match="--force"):
        await asyncio.to_thread(back_up, tmp_path / "state", file)
    await sidecar.stop(grace=0.1)
    with pytest.raises(NotNow, match="--force"):
        await asyncio.to_thread(restore, file, tmp_path / "state")
    _, aside = await asyncio.to_thread(lambda: restore(file, tmp_path / "state", overwrite=True))
    assert aside is not None
    assert (2, 2) == _counted(aside / "store.db")
    assert [first] == await letters(await started("state"))
    assert second not in await letters(await started("other"))


async def test_a_backup_of_a_sidecar_that_does_not_run(started: Started, upstream: Upstream, tmp_path: Path) -> None:
    sidecar = await started("state")
    await keep(sidecar, upstream, 1)
    await sidecar.stop(grace=0.1)
    await asyncio.to_thread(back_up, tmp_path / "state", tmp_path / "a.backup")
    await asyncio.to_thread(restore, tmp_path / "a.backup", tmp_path / "new")
    assert (1, 1) == _counted(tmp_path / "new" / "store.db")


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.fixture
async def backup(started: Started, upstream: Upstream, tmp_path: Path) -> Path:
    sidecar = await started("old")
    await keep(sidecar, upstream, 1, body=b"z" * (INLINE + 10))
    file = tmp_path / "state.backup"
    await asyncio.to_thread(back_up, tmp_path / "old", file)
    return file


def rewritten(file: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> Path:
    """The archive with other parts."""
    other = file.with_name("other.backup")
    with tarfile.open(file) as old, tarfile.open(other, "w") as new:
        for member in old:
            content = old.extractfile(member)
            assert content is not None
            changed = change(member.name, content.read())
            if changed is not None:
                info = tarfile.TarInfo(changed[0])
                info.size = len(changed[1])
                new.addfile(info, io.BytesIO(changed[1]))
    return other


def newer(name: str, data: bytes) -> tuple[str, bytes]:
    if name != "manifest.json":
        return name, data
    return name, json.dumps({**json.loads(data), "format": 2}).encode()


BROKEN: dict[str, Callable[[str, bytes], tuple[str, bytes] | None]] = {
    "without its manifest": lambda name, data: None if name == "manifest.json" else (name, data),
    "with an empty manifest": lambda name, data: (name, b"{}" if name == "manifest.json" else data),
    "with a manifest of nonsense": lambda name, data: (name, b"[1" if name == "manifest.json" else data),
    "without a body": lambda name, data: None if name.startswith("bodies/") else (name, data),
    "with a flipped byte": lambda name, data: (name, b"?" + data[1:] if name == "store.db" else data),
    "with a path that leads out": lambda name, data: (f"../{name}" if name == "store.db" else name, data),
    "of a newer format": newer,
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_backup_is_refused_and_nothing_is_touched(backup: Path, tmp_path: Path, how: str) -> None:
    broken = await asyncio.to_thread(rewritten, backup, BROKEN[how])
    with pytest.raises(Trouble):
        await asyncio.to_thread(restore, broken, tmp_path / "new")
    assert [] == sorted(path.name for path in (tmp_path / "new").iterdir())
    assert not (tmp_path / "store.db").exists()


async def test_every_beginning_of_a_backup_is_refused(backup: Path, tmp_path: Path) -> None:
    data = await asyncio.to_thread(backup.read_bytes)
    cut = tmp_path / "cut.backup"
    for size in (0, 100, 512, 1024, len(data) // 3, len(data) // 2, len(data) - 12_000):
        cut.write_bytes(data[:size])
        with pytest.raises(Damaged):
            await asyncio.to_thread(restore, cut, tmp_path / "new")
        assert not (tmp_path / "new" / "store.db").exists()


async def test_a_newer_store_is_refused_with_what_to_do(backup: Path, tmp_path: Path, started: Started) -> None:
    sidecar = await started("newer")
    await order(sidecar, "/retries/disable")
    await sidecar.stop(grace=0.1)
    with sqlite3.connect(tmp_path / "newer" / "store.db") as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    await asyncio.to_thread(back_up, tmp_path / "newer", tmp_path / "newer.backup")
    with pytest.raises(NotNow, match=rf"newer sidecar.*format {VERSION + 1}.*restore it with that release"):
        await asyncio.to_thread(restore, tmp_path / "newer.backup", tmp_path / "new")


# ---- the commands ------------------------------------------------------------------------------------------------


async def test_the_commands_say_what_they_did_and_what_to_do(
    started: Started, upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("SIDECAR__STATE_DIR", str(tmp_path / "state"))
    file = str(tmp_path / "state.backup")
    assert 1 == main(["backup", file])
    assert "nothing is kept" in capsys.readouterr().err
    sidecar = await started("state")
    await keep(sidecar, upstream, 1)
    assert 0 == main(["backup", file])
    assert "the keys are in it" in capsys.readouterr().out
    assert 1 == main(["backup", file])
    assert 0 == main(["backup", file, "--force", "--json"])
    assert file == json.loads(capsys.readouterr().out.splitlines()[-1])["file"]
    assert 1 == main(["restore", file, "--force"])
    assert "in use by process" in capsys.readouterr().err
    await sidecar.stop(grace=0.1)
    assert 1 == main(["restore", file])
    assert "--force" in capsys.readouterr().err
    assert 0 == main(["restore", file, "--force"])
    restored = capsys.readouterr().out
    assert "before-restore-" in restored
    assert "knows nothing of what happened since" in restored
    assert 2 == main(["restore", str(tmp_path / "nothing"), "--state-dir", str(tmp_path / "new")])
    assert "there is no" in capsys.readouterr().err
