"""Noticing that a file has changed: whatever way it changes, once, and never in the middle of a write."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from sidecar import watching
from sidecar.watching import content, look_at, watch


class Watched:
    """A file, and what was read of it each time a change was noticed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_read = content(path)
        self.readings: list[bytes | None] = []

    async def changed(self) -> None:
        self.last_read = content(self.path)
        self.readings.append(self.last_read)

    async def noticed(self, *expected: bytes | None) -> None:
        async with asyncio.timeout(20):
            while len(self.readings) < len(expected):
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # several looks: nothing is noticed twice
        assert [*expected] == self.readings
        self.readings.clear()


@pytest_asyncio.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(watching, "_EACH", 0.02)
    monkeypatch.setattr(watching, "_SETTLE", 0.05)
    path = tmp_path / "sidecar.yaml"
    path.write_bytes(b"a: 1")
    file, stop = Watched(path), asyncio.Event()
    looking = asyncio.get_running_loop().create_task(watch(path, lambda: file.last_read, file.changed, stop))
    yield file
    stop.set()
    await asyncio.wait_for(looking, 5)


def in_place(path: Path) -> None:
    path.write_bytes(b"a: 2")


def in_place_with_the_old_times(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"a: 2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_another_file(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(b"a: 2")
    os.replace(new, path)


def by_a_link(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(b"a: 2")
    path.unlink()
    path.symlink_to(new)


@pytest.mark.parametrize("change", [in_place, in_place_with_the_old_times, by_another_file, by_a_link])
async def test_a_change_is_noticed_once(watched: Watched, change: Callable[[Path], None]) -> None:
    await asyncio.sleep(0.1)
    change(watched.path)
    await watched.noticed(b"a: 2")


async def test_what_changed_before_the_first_look_is_noticed(watched: Watched) -> None:
    watched.path.write_bytes(b"a: 3")  # the watch has not run yet: the file was read before
    await watched.noticed(b"a: 3")


async def test_who_writes_in_pieces_is_let_finish(watched: Watched) -> None:
    await asyncio.sleep(0.1)
    with watched.path.open("wb", buffering=0) as file:
        for piece in (b"a: ", b"4", b"\n", b"b: 5"):
            file.write(piece)
            await asyncio.sleep(0.01)
    await watched.noticed(b"a: 4\nb: 5")


async def test_a_file_that_goes_and_comes_back_is_told_both_times(watched: Watched) -> None:
    watched.path.unlink()
    await watched.noticed(None)
    watched.path.write_bytes(b"a: 1")
    await watched.noticed(b"a: 1")


async def test_a_touch_is_no_change(watched: Watched) -> None:
    await asyncio.sleep(0.1)
    watched.path.touch()
    await watched.noticed()


def test_two_writes_of_one_size_look_different_even_with_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a: 1")
    before = look_at(path)
    in_place_with_the_old_times(path)
    assert before != look_at(path)
    path.unlink()
    assert look_at(path) is None
