"""Body files: whole or not at all, sealed, verified when read, collected when nobody refers to them."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable.bodies import INLINE, Bodies, BodyFile
from sidecar.durable.disk import Disk
from sidecar.durable.seal import CHUNK, load_keyring
from sidecar.durable.trouble import Damaged, NotKept
from tests.durability.faults import FaultyDisk
from tests.durability.rigs import opened

LARGE = os.urandom(CHUNK) * 5 + b"end"


@asynccontextmanager
async def bodies_in(directory: Path, disk: Disk | None = None, **options: Any) -> AsyncIterator[Bodies]:
    keys = load_keyring(directory, None)
    async with opened(directory, disk=disk or Disk(), hooks=[keys.prove], **options) as store:
        yield Bodies(store, keys)


async def kept(bodies: Bodies, body: bytes = LARGE) -> BodyFile:
    file = await bodies.keep("api.test", "dlq_1", body)
    assert isinstance(file, BodyFile)
    return file


async def content(bodies: Bodies, name: str, host: str = "api.test", ident: str = "dlq_1") -> bytes:
    return b"".join([chunk async for chunk in bodies.read(name, host, ident)])


@pytest.mark.parametrize("size", [0, 1, INLINE])
async def test_a_small_body_stays_in_memory(tmp_path: Path, size: int) -> None:
    async with bodies_in(tmp_path) as bodies:
        assert bytes(size) == await bodies.keep("api.test", "dlq_1", bytes(size))
        assert not bodies.folder.exists()


@pytest.mark.parametrize("size", [INLINE + 1, CHUNK * 5 - 1, CHUNK * 5, CHUNK * 5 + 1, CHUNK * 16, CHUNK * 40 + 17])
async def test_a_large_one_goes_to_a_sealed_file_and_comes_back(tmp_path: Path, size: int) -> None:
    body = (b"secret content " * (size // 15 + 1))[:size]
    async with bodies_in(tmp_path) as bodies:
        file = await kept(bodies, body)
        stored = (bodies.folder / file.name).read_bytes()
        assert (size, len(stored)) == (file.size, file.stored)
        assert b"secret" not in stored
        assert body == await content(bodies, file.name)
        assert [file.name] == os.listdir(bodies.folder)


async def test_a_body_that_comes_in_pieces_is_spooled(tmp_path: Path) -> None:
    async with bodies_in(tmp_path) as bodies:
        spool = bodies.spool("api.test", "dlq_1", 10_000_000)
        pieces = [os.urandom(size) for size in (1, 100_000, 700_000, 3, 1_000_000, 17)]
        for piece in pieces:
            await spool.write(piece)
        file = await spool.finish()
        assert isinstance(file, BodyFile)
        assert b"".join(pieces) == await content(bodies, file.name)


async def test_a_body_over_the_limit_leaves_nothing_behind(tmp_path: Path) -> None:
    async with bodies_in(tmp_path) as bodies:
        spool = bodies.spool("api.test", "dlq_1", 1_000_000)
        await spool.write(bytes(999_999))
        with pytest.raises(NotKept, match="larger than 1000000 bytes") as refused:
            await spool.write(b"12")
        assert "too_large" == refused.value.reason
        assert [] == os.listdir(bodies.folder)


async def test_a_body_opens_only_for_its_entry_and_host(tmp_path: Path) -> None:
    async with bodies_in(tmp_path) as bodies:
        file = await kept(bodies)
        with pytest.raises(Damaged):
            await content(bodies, file.name, ident="dlq_2")
        with pytest.raises(Damaged):
            await content(bodies, file.name, host="evil.test")


async def test_truncation_at_every_byte_is_noticed(tmp_path: Path) -> None:
    """Every byte of the head, of the edges of every chunk, and of the end; in between every 97th."""
    async with bodies_in(tmp_path) as bodies:
        file = await kept(bodies)
        path = bodies.folder / file.name
        whole = path.read_bytes()
        edges = {15 + chunk * (CHUNK + 16) + by for chunk in range(6) for by in range(-20, 21)}
        step = 1 if os.environ.get("SIDECAR_LONG_TESTS") else 997
        lengths = sorted({*range(100), *edges, *range(0, len(whole), step), *range(len(whole) - 100, len(whole))})
        unnoticed = []
        for length in (length for length in lengths if 0 <= length < len(whole)):
            os.truncate(path, length) if length < path.stat().st_size else path.write_bytes(whole[:length])
            try:
                list(bodies.chunks(file.name, "api.test", "dlq_1"))
            except Damaged:
                continue
            unnoticed.append(length)
        assert [] == unnoticed


async def test_a_bit_flip_or_an_extra_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    async with bodies_in(tmp_path) as bodies:
        file = await kept(bodies)
        path = bodies.folder / file.name
        whole = path.read_bytes()
        unnoticed = []
        for place in [*range(40), *range(40, len(whole), 4999), len(whole) - 1, len(whole)]:
            changed = bytearray(whole + b"\0" if place == len(whole) else whole)
            changed[place] ^= 4
            path.write_bytes(changed)
            try:
                list(bodies.chunks(file.name, "api.test", "dlq_1"))
            except Damaged:
                continue
            unnoticed.append(place)
        assert [] == unnoticed


@pytest.mark.parametrize("name", ["../../etc/passwd", "x", "0" * 64])
async def test_only_names_of_bodies_are_read(tmp_path: Path, name: str) -> None:
    async with bodies_in(tmp_path) as bodies:
        with pytest.raises(Damaged):
            await content(bodies, name)
        with pytest.raises(Damaged, match="cannot be read"):
            await content(bodies, "0" * 64 + ".body")


async def test_whichever_step_fails_the_body_is_not_kept_and_no_half_stays(tmp_path: Path) -> None:
    counting = FaultyDisk()
    async with bodies_in(tmp_path / "count", counting) as bodies:
        before = counting.steps
        await kept(bodies)
        needed = counting.steps - before
    for failing in range(1, needed + 1):
        for error, reason in ((errno.EIO, "disk_error"), (errno.ENOSPC, "full")):
            disk = FaultyDisk()
            async with bodies_in(tmp_path / f"{failing}{reason}", disk) as bodies:
                disk.failing, disk.error = disk.steps + failing, error
                with pytest.raises(NotKept) as refused:
                    await kept(bodies)
                assert reason == refused.value.reason
                disk.failing = 0
                await bodies.collect()
                assert [] == os.listdir(bodies.folder)
                assert LARGE == await content(bodies, (await kept(bodies)).name), "it works again"


async def test_below_the_floor_no_body_is_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with bodies_in(tmp_path, disk, min_free_bytes=1000) as bodies:
        disk.free = 2000
        with pytest.raises(NotKept, match="min_free_bytes") as refused:
            await kept(bodies)
        assert "full" == refused.value.reason
        assert [] == os.listdir(bodies.folder)


async def test_only_what_no_row_refers_to_is_collected(tmp_path: Path) -> None:
    async with bodies_in(tmp_path) as bodies:
        assert 0 == await bodies.collect(), "there is no folder yet"
        referenced, pending, orphan = (
            await kept(bodies, LARGE + b"1"),
            await kept(bodies, LARGE + b"2"),
            await kept(bodies, LARGE + b"3"),
        )
        await bodies.store.write(
            lambda connection: connection.execute("INSERT INTO body_files VALUES (?, 1)", (referenced.name,)) and None
        )
        bodies.settled(referenced.name)
        bodies.settled(orphan.name)
        (bodies.folder / "left.tmp").write_bytes(b"half")
        (bodies.folder / "README").write_bytes(b"not ours")
        assert 2 == await bodies.collect()
        assert {referenced.name, pending.name, "README"} == set(os.listdir(bodies.folder))
        await bodies.remove([pending.name, None, "0" * 64 + ".body"])
        assert {referenced.name, "README"} == set(os.listdir(bodies.folder))


async def test_a_body_that_cannot_be_removed_now_is_left_for_later(tmp_path: Path) -> None:
    class Stuck(Disk):
        def remove(self, path: Path) -> None:
            raise OSError(errno.EROFS, "read only")

    async with bodies_in(tmp_path, Stuck()) as bodies:
        file = await kept(bodies)
        await bodies.remove([file.name])
        assert [file.name] == os.listdir(bodies.folder)
        spool = bodies.spool("api.test", "dlq_2", 10_000_000)
        await spool.write(LARGE)
        await spool.abort()
        assert 2 == len(os.listdir(bodies.folder))


async def test_the_loop_goes_on_while_a_body_is_written(tmp_path: Path) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with bodies_in(tmp_path) as bodies:
        counting = asyncio.create_task(count())
        await kept(bodies, bytes(20_000_000))
        counting.cancel()
    assert turns > 20
