"""Real faults: processes killed, system calls that fail, a disk that is full. No promise may be broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.durable.filters import Filter
from sidecar.durable.trouble import NotKept
from sidecar.durable.upkeep import Upkeep
from tests.durability.keeper import body_of
from tests.durability.rigs import Rig, failed, rig_in

ROOT = Path(__file__).resolve().parents[2]
LONG = bool(os.environ.get("SIDECAR_LONG_TESTS"))
STRACE = shutil.which("strace")


@pytest.mark.timeout(1800)
def test_no_kill_breaks_a_promise_or_repeats_an_effect(tmp_path: Path) -> None:
    rounds = 1000 if LONG else 50
    run = subprocess.run(
        [sys.executable, "-m", "tests.durability.chaos", "--rounds", str(rounds), "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == run.returncode, run.stderr[-4000:]
    summary = json.loads(run.stdout.splitlines()[-1])
    assert (rounds, []) == (summary["rounds"], summary["failed"])
    assert summary["promises"]["kept"] > rounds and summary["promises"]["job"] > rounds / 2, "it had something to lose"


async def compare(state_dir: Path, lines: list[str]) -> None:
    """Everything that was said to be kept is there, whole; nothing is half there."""
    async with rig_in(state_dir) as rig:
        found = await Upkeep(rig.letters).check()
        assert (0, 0) == (found.damaged, found.repaired)
        for line in lines:
            word, ident, number = line.split(" ")
            if word == "kept":
                request = await rig.letters.request(ident)
                assert body_of(int(number)) == b"".join([chunk async for chunk in rig.letters.payloads.body(request)])
        await rig.letters.bodies.collect()
        referenced = await rig.store.read(lambda c: {name for (name,) in c.execute("SELECT name FROM body_files")})
        folder = rig.letters.bodies.folder
        assert referenced == {path.name for path in folder.glob("*")}


def strace_works() -> bool:
    if STRACE is None:
        return False
    tried = subprocess.run([STRACE, "-o", os.devnull, "true"], capture_output=True, check=False)
    return tried.returncode == 0


def under_strace(state_dir: Path, fault: str, count: int) -> subprocess.CompletedProcess[str]:
    assert STRACE is not None
    calls = fault.partition(":")[0]
    return subprocess.run(
        [
            *(STRACE, "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}", "-e", f"inject={fault}"),
            *(sys.executable, "-m", "tests.durability.keeper", str(state_dir), str(count)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


SYNC = "fsync,fdatasync"
WRITE = "pwrite64"


def faults() -> list[str]:
    numbers = range(1, 120) if LONG else (1, 9, 17)
    single = [f"{calls}:error={error}:when={n}" for n in numbers for calls, error in ((SYNC, "EIO"), (WRITE, "ENOSPC"))]
    lasting = [f"{SYNC}:error=EIO:when=12..20", f"{WRITE}:error=EIO:when=25..40"]
    return [*single, *lasting]


@pytest.mark.skipif(not strace_works(), reason="strace is not here, or may not trace")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", faults())
async def test_a_failing_system_call_is_told_and_survived(tmp_path: Path, fault: str) -> None:
    state_dir = tmp_path / "state"
    run = under_strace(state_dir, fault, 12)
    lines = run.stdout.splitlines()
    if run.returncode == 1 and "cannot be used" in run.stderr:
        assert [] == lines, "the very first keys could not be written: it says so and does not start"
        return
    assert 0 == run.returncode, f"{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    assert lines[-1].startswith("kept"), "it recovered by itself"
    await compare(state_dir, lines)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small disk can only be made by root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def fill(rig: Rig, first: int) -> tuple[list[str], int, str]:
    """Keep until it is refused; every promise, the number of the one refused, and why."""
    lines, number = list[str](), first
    while True:
        try:
            kept = await rig.letters.keep(failed(number, body=body_of(number)))
        except NotKept as refused:
            return lines, number, refused.reason
        lines.append(f"kept {kept.dlq_id} {number}")
        number += 1


async def test_a_full_disk_breaks_no_promise_and_works_again_once_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3_000_000))
    state_dir = small_disk / "state"
    async with rig_in(state_dir, settings={"min_free_bytes": 0}) as rig:
        lines, number, reason = await fill(rig, 1)
        assert len(lines) > 5
        assert reason in ("full", "disk_error")
        assert 1 == sum(rig.counts.rejected.values())
        more, number, _ = await fill(rig, number + 1)  # refused again and again, without harm
        ballast.unlink()
        for _ in range(200):
            try:
                kept = await rig.letters.keep(failed(number + 1, body=body_of(number + 1)))
                break
            except NotKept:
                number += 1
        else:
            pytest.fail("it did not recover although there is room")
        lines += [*more, f"kept {kept.dlq_id} {number + 1}"]
        assert rig.store.health.ok
        assert len(lines) == sum((await rig.listing.count(Filter())).values())
    await compare(state_dir, lines)


async def test_a_floor_keeps_the_disk_from_filling_up(small_disk: Path) -> None:
    async with rig_in(small_disk / "state", min_free_bytes=4_000_000) as rig:
        assert "full" == (await fill(rig, 1))[2]
        assert os.statvfs(small_disk).f_bavail * 4096 >= 3_000_000
        assert rig.store.health.ok, "it is full, not broken"
