"""The files of the store are removed or replaced under a running sidecar: nothing is promised that a start would miss."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from config.durable import DeadLetterStore
from config.errors import registry
from sidecar.durable.deadletter import DEFAULT_TERMS
from sidecar.durable.layers import Durable
from sidecar.durable.lock import StateLock
from sidecar.durable.trouble import CannotUse, NotKept
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import always, answer
from tests.durability.rigs import Told, failed
from tests.e2e.process import Process

LARGE = b"x" * 300_000


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)
    monkeypatch.setattr("sidecar.durable.writer._LOOK_AFTER", 0.02)
    monkeypatch.setattr("sidecar.durable.presence._MEND_AFTER", 0.05)


async def in_the_end(durable: Durable, number: int) -> str:
    """Kept, once what can be mended is."""
    async with asyncio.timeout(5):
        while True:
            try:
                return (await durable.letters.keep(failed(number))).dlq_id
            except NotKept:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def durable_in(folder: Path, told: Told) -> AsyncIterator[Durable]:
    lock = StateLock.take(folder)
    durable = await Durable.open(
        folder,
        settings=DeadLetterStore(min_free_bytes=0),
        registry=registry(),
        terms_of=lambda upstream: DEFAULT_TERMS,
        report=told,
        lock=lock,
    )
    await durable.begin()
    try:
        yield durable
    finally:
        await durable.close()
        lock.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


async def readable(folder: Path, ids: list[str]) -> int:
    """How many of these a later run finds, with their bodies."""
    async with durable_in(folder, Told()) as durable:
        found = 0
        for dlq_id in ids:
            request = await durable.letters.request(dlq_id)
            found += bool(b"".join([chunk async for chunk in durable.letters.payloads.body(request)]))
        return found


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def made_anew(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def unlinked(folder: Path) -> None:
    (folder / "store.db").unlink()


def replaced(folder: Path) -> None:
    shutil.copy(folder / "store.db", folder / "other.db")
    (folder / "other.db").rename(folder / "store.db")


@pytest.mark.parametrize("change", [removed, moved, made_anew, unlinked, replaced])
@pytest.mark.parametrize("size", [100, len(LARGE)])
async def test_nothing_is_promised_into_files_that_no_start_will_find(
    tmp_path: Path, change: Callable[[Path], None], size: int
) -> None:
    folder, told = tmp_path / "state", Told()
    async with durable_in(folder, told) as durable:
        await durable.letters.keep(failed(1))
        change(folder)
        for number in (2, 3):
            with pytest.raises(NotKept):
                await durable.letters.keep(failed(number, body=LARGE[:size]))
        await until(lambda: durable.store.health.gone)
        assert "while the sidecar runs" in durable.store.health.reason
        assert "restart the sidecar" in durable.store.health.reason
        assert not (folder / "store.db").exists() or change is replaced
    assert 1 == told.events.count("sidecar.store.gone")


async def test_it_is_noticed_without_a_write(tmp_path: Path) -> None:
    async with durable_in(tmp_path / "state", Told()) as durable:
        shutil.rmtree(tmp_path / "state")
        await until(lambda: durable.store.health.gone)


async def test_a_commit_that_the_files_vanished_under_is_no_promise(tmp_path: Path) -> None:
    async with durable_in(tmp_path / "state", Told()) as durable:

        def work(connection: sqlite3.Connection) -> None:
            shutil.rmtree(tmp_path / "state")

        with pytest.raises(NotKept, match="was removed while the sidecar runs"):
            await durable.store.write(work)


async def test_the_same_files_in_their_places_again_keep_everything(tmp_path: Path) -> None:
    folder, told = tmp_path / "state", Told()
    async with durable_in(folder, told) as durable:
        before = await durable.letters.keep(failed(1))
        folder.rename(tmp_path / "elsewhere")
        await until(lambda: durable.store.health.gone)
        (tmp_path / "elsewhere").rename(folder)
        await until(lambda: durable.store.health.ok)
        after = await durable.letters.keep(failed(2))
    assert ["sidecar.store.gone", "sidecar.store.recovered"] == [
        event for event in told.events if event != "sidecar.store.volatile"
    ]
    assert 2 == await readable(folder, [before.dlq_id, after.dlq_id])


@pytest.mark.parametrize("replacement", [False, True])
async def test_a_log_that_was_removed_costs_nothing_that_was_in_it(tmp_path: Path, replacement: bool) -> None:
    folder, told = tmp_path / "state", Told()
    async with durable_in(folder, told) as durable:
        ids = [(await durable.letters.keep(failed(number))).dlq_id for number in range(5)]
        await asyncio.gather(*(durable.letters.get(dlq_id) for dlq_id in ids))  # readers of the old log
        (folder / "store.db-wal").unlink()
        if replacement:
            (folder / "store.db-wal").write_bytes(b"")
        await until(lambda: "sidecar.store.recovered" in told.events)
        for number in range(5, 10):
            ids.append((await durable.letters.keep(failed(number))).dlq_id)
        assert ids == [(await durable.letters.get(dlq_id)).dlq_id for dlq_id in ids]
        assert None is await durable.store.problem()
        shutil.copytree(folder, tmp_path / "crashed", ignore=shutil.ignore_patterns("*-shm"))
    assert 10 == await readable(tmp_path / "crashed", ids)


async def test_keys_that_were_removed_are_written_again_from_memory(tmp_path: Path) -> None:
    folder, told = tmp_path / "state", Told()
    async with durable_in(folder, told) as durable:
        ids = [(await durable.letters.keep(failed(1))).dlq_id]
        shutil.rmtree(folder / "keys")
        ids.append(await in_the_end(durable, 2))
        for path in (folder / "keys").glob("seal-*"):
            path.write_bytes(b"")
        ids.append(await in_the_end(durable, 3))
    assert 2 == told.events.count("sidecar.store.mended")
    assert {0o600} == {os.stat(path).st_mode & 0o777 for path in (folder / "keys").iterdir()}
    assert 3 == await readable(folder, ids)


async def test_keys_that_cannot_be_written_again_end_the_promise_until_they_are_back(tmp_path: Path) -> None:
    folder, told = tmp_path / "state", Told()
    async with durable_in(folder, told) as durable:
        (folder / "keys").rename(tmp_path / "keys")
        (folder / "keys").write_bytes(b"in the way")
        with pytest.raises(NotKept, match=r"seal-0001-.*\.key was removed or changed|hash\.key was removed or changed"):
            await durable.letters.keep(failed(1))
        (folder / "keys").unlink()
        (tmp_path / "keys").rename(folder / "keys")
        await until(lambda: durable.store.health.ok)
        kept = await durable.letters.keep(failed(2))
    assert 1 == await readable(folder, [kept.dlq_id])


async def test_the_file_of_a_key_that_was_replaced_may_be_deleted(tmp_path: Path) -> None:
    told = Told()
    async with durable_in(tmp_path, told) as durable:
        old = list((tmp_path / "keys").glob("seal-*"))
        await durable.rotation.rotate()
        await durable.rotation.reseal()
        old[0].unlink()
        await durable.letters.keep(failed(1))
        assert not old[0].exists()
    assert "sidecar.store.mended" not in told.events


async def test_a_lock_that_was_removed_is_taken_anew_before_another_process_can(tmp_path: Path) -> None:
    told = Told()
    async with durable_in(tmp_path, told) as durable:
        (tmp_path / "lock").unlink()
        await in_the_end(durable, 1)
        with pytest.raises(CannotUse, match=f"is in use by process {os.getpid()}"):
            StateLock.take(tmp_path)
    assert "sidecar.store.mended" in told.events


async def test_a_directory_that_another_process_has_locked_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    async with durable_in(tmp_path, Told()) as durable:
        (tmp_path / "lock").unlink()
        other = StateLock.take(tmp_path)
        try:
            with pytest.raises(NotKept, match="lock was removed or replaced while the sidecar runs"):
                await durable.letters.keep(failed(1))
            await asyncio.sleep(0.2)
            assert durable.store.health.gone
        finally:
            other.close()


async def test_an_answer_says_that_it_is_not_kept_and_the_sidecar_is_not_ready(
    start_sidecar: Starter, start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    upstream = await start_upstream(always(answer(b"", "503 Service Unavailable")))
    sidecar = await start_sidecar(
        state_dir=str(tmp_path / "state"),
        policies={"once": {"max_attempts": 1}},
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "policy": "once"}},
    )
    app = await App.connect(sidecar.address)
    post = "POST /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: 1\r\n\r\nx"
    assert None is not (await app.ask(post)).get("x-sidecar-dlq-id")
    shutil.rmtree(tmp_path / "state", ignore_errors=True)  # its logs may be written to at this moment
    reply = await app.ask(post)
    assert (503, None, "DLQ_FULL") == (reply.status, reply.get("x-sidecar-dlq-id"), reply.get("x-sidecar-dlq-error"))
    app.close()
    admin = await App.connect(sidecar.admin_address)
    host = "{}:{}".format(*sidecar.admin_address)
    ready = await admin.ask(f"GET /readyz HTTP/1.1\r\nHost: {host}\r\n\r\n")
    assert (503, "not ready", "store gone") == (ready.status, ready.json["status"], ready.json["reason"])
    assert "was removed while the sidecar runs" in ready.json["store"]
    shown = (await admin.ask(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n")).body.decode()
    admin.close()
    assert "\nsidecar_store_keeps 0" in shown
    assert "\nsidecar_ready 0" in shown
    assert '\nsidecar_dlq_rejected_total{reason="disk_error"} 1' in shown


@pytest.mark.timeout(60)
async def test_no_promise_made_afterwards_is_lost_by_a_restart(start_upstream: UpstreamStarter, tmp_path: Path) -> None:
    """A process of its own, `rm -rf` and `mv` by their own programs, and what the next start finds."""
    upstream = await start_upstream(always(answer(b"", "503 Service Unavailable")))
    state = tmp_path / "state"
    keys = {
        "state_dir": str(state),
        "policies": {"once": {"max_attempts": 1}},
        "upstreams": {
            "u": {
                "route": "/u",
                "endpoints": [upstream.url],
                "policy": "once",
                "breaker": {"enabled": False},
                "dead_letter": {"dedupe_window": 0},
            }
        },
    }
    number = iter(range(1000))

    async def promised(process: Process, count: int) -> list[str]:
        ids = []
        for _ in range(count):
            body = f"letter {next(number)}"
            told = await process.ask(f"POST /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: {len(body)}\r\n\r\n{body}")
            assert (told.get("x-sidecar-dlq-id") is None) != (told.get("x-sidecar-dlq-error") is None)
            ids += [told.get("x-sidecar-dlq-id") or ""] if told.get("x-sidecar-dlq-id") else []
        return ids

    async def run(*command: str) -> None:
        assert 0 == await (await asyncio.create_subprocess_exec(*command)).wait()

    process = await (await Process.start(tmp_path / "first", None, keys)).ready()
    try:
        assert 5 == len(await promised(process, 5))
        await run("rm", "-rf", str(state))
        assert [] == await promised(process, 5)
        await run("mkdir", str(state))
        assert [] == await promised(process, 5)
        await process.clean_up()
        process = await (await Process.start(tmp_path / "second", None, keys)).ready()
        kept = await promised(process, 5)
        await run("mv", str(state), str(tmp_path / "elsewhere"))
        assert [] == await promised(process, 5)
        await run("mv", str(tmp_path / "elsewhere"), str(state))
        await process.logged("sidecar.store.recovered")
        kept += await promised(process, 5)
        await process.clean_up()
        process = await (await Process.start(tmp_path / "third", None, keys)).ready()
        assert 10 == len(kept)
        assert [200] * 10 == [(await process.admin(f"/dlq/{dlq_id}")).status for dlq_id in kept]
    finally:
        await process.clean_up()
