"""Dead letters as files: exact round trips, and files that were cut off or edited."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from sidecar.durable import document
from sidecar.durable.claims import Claims
from sidecar.durable.entry import Answer
from sidecar.durable.export import Files
from sidecar.durable.filters import Filter
from sidecar.durable.operator import Edit
from sidecar.durable.seal import FOLDER
from sidecar.durable.trouble import BadInput, Damaged, NoSuchThing, NotKept, NotNow
from sidecar.durable.workflow import Ask
from telemetry.record import NOT_CONNECTED
from tests.durability.faults import FaultyDisk
from tests.durability.rigs import START, Rig, failed, rig_in

SUFFIXES = {"body_file": ".body", "original_body_file": ".original.body"}


async def fill(rig: Rig) -> list[str]:
    """Every kind of entry: small, large, edited, without body, annotated, discarded."""
    kept = [
        await rig.letters.keep(failed(1, operation="create_charge", response=Answer(500, [(b"a", b"b")], b"said"))),
        await rig.letters.keep(
            failed(2, at=START + 1.234, idempotency_key="k", key_honoured=True, workflow="w", stage="s")
        ),
        await rig.letters.keep(failed(3, at=START + 2, body=os.urandom(400_000), operation="../evil/../name")),
        await rig.letters.keep(failed(4, at=START + 3, body=None, body_size=5_000_000)),
        await rig.letters.keep(failed(5, at=START + 4, method="PUT")),
        await rig.letters.keep(failed(6, at=START + 5, body=os.urandom(300_000))),
    ]
    ids = [one.dlq_id for one in kept]
    await rig.operator.annotate(ids[0], "ann", "looked at it, ünïcode")
    await rig.operator.remediate(ids[0], "ann", "data", "fixed", "OPS-1")
    await rig.operator.discard(ids[4], "ann", "not needed")
    await rig.operator.edit(ids[5], "ann", Edit(headers=[(b"x", b"y")], body=os.urandom(350_000)))
    return ids


async def write(rig: Rig, folder: Path) -> int:
    """Every entry to files, as the command line does it; how many."""
    damaged: list[str] = []
    entries = [files async for files in Files(rig.letters, rig.listing).export(Filter(), damaged)]
    for file in itertools.chain.from_iterable(entries):
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.path).write_bytes(file.content)
    assert [] == damaged
    return len(entries)


def given(path: Path) -> tuple[str, bytes, dict[str, bytes | None]]:
    """A document with what lies beside it."""
    beside = {name: path.with_suffix(suffix) for name, suffix in SUFFIXES.items()}
    found = {name: file.read_bytes() if file.exists() else None for name, file in beside.items()}
    return str(path), path.read_bytes(), found


def documents(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.json"))


class Imported(NamedTuple):
    added: int
    known: int
    refused: list[str]


async def bring_in(rig: Rig, folder: Path) -> Imported:
    outcomes: list[bool] = []
    refused: list[str] = []
    for path in documents(folder):
        try:
            outcomes.append(await Files(rig.letters, rig.listing).bring_in(*given(path)))
        except (BadInput, Damaged, NotNow) as why:
            refused.append(str(why))
    return Imported(outcomes.count(True), outcomes.count(False), refused)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def share_keys(source: Path, target: Path) -> None:
    shutil.copytree(source / FOLDER, target / FOLDER)


async def exported(tmp_path: Path) -> list[str]:
    async with rig_in(tmp_path / "one") as rig:
        ids = await fill(rig)
        assert 6 == await write(rig, tmp_path / "out")
    return ids


async def test_files_lie_where_s0_puts_them(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    names = set(content(tmp_path / "out"))
    assert {
        f"create_charge/{ids[0]}.json",
        f"payments/{ids[1]}.json",
        f"___evil____name/{ids[2]}.json",
        f"___evil____name/{ids[2]}.body",
        f"payments/{ids[3]}.json",
        f"payments/{ids[4]}.json",
        f"payments/{ids[5]}.json",
        f"payments/{ids[5]}.body",
        f"payments/{ids[5]}.original.body",
    } == names
    shown = orjson.loads((tmp_path / "out" / "create_charge" / f"{ids[0]}.json").read_bytes())
    assert {
        "dlq_id": ids[0],
        "operation_type": "create_charge",
        "status": "pending",
        "processed": False,
        "created_at": "2027-01-15T08:00:00.000Z",
        "last_attempt": "2027-01-15T08:00:02.000Z",
        "replayed_at": None,
    }.items() <= shown.items()
    assert {"error_type", "error_message", "retry_count"} == set(shown["error_details"])
    assert shown["original_payload"]
    assert all(b"canary" not in data for data in content(tmp_path / "out").values())


async def test_a_round_trip_is_exact(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    share_keys(tmp_path / "one", tmp_path / "two")
    async with rig_in(tmp_path / "one") as rig:
        before = [(await rig.entry(dlq_id), await rig.letters.request(dlq_id)) for dlq_id in ids]
    async with rig_in(tmp_path / "two") as rig:
        result = await bring_in(rig, tmp_path / "out")
        assert (6, 0, []) == (result.added, result.known, result.refused)
        assert {"payments"} == rig.letters.waiting
        again = await bring_in(rig, tmp_path / "out")
        assert (0, 6, []) == (again.added, again.known, again.refused)
        await write(rig, tmp_path / "again")
        after = [(await rig.entry(dlq_id), await rig.letters.request(dlq_id)) for dlq_id in ids]
        assert ids == await rig.ids(Filter(), oldest_first=True)
        for _, request in after:
            async for _ in rig.letters.payloads.body(request):
                pass
        assert 3 == len(os.listdir(rig.letters.bodies.folder))
        assert 0 == await rig.letters.bodies.collect()
        assert not (await rig.letters.keep(failed(2, at=START + 9, idempotency_key="k", key_honoured=True))).created
    assert before == after
    assert content(tmp_path / "out") == content(tmp_path / "again")


async def test_what_cannot_be_read_is_set_aside_and_named_and_the_rest_is_exported(tmp_path: Path) -> None:
    async with rig_in(tmp_path / "one") as rig:
        ids = await fill(rig)
        files, damaged = Files(rig.letters, rig.listing), list[str]()
        with pytest.raises(NoSuchThing):
            await files.files("dlq_20270115_080000_ffffffff")
        request = await rig.letters.request(ids[2])
        (rig.letters.bodies.folder / str(request.body_file)).unlink()
        await rig.store.write(
            lambda connection: (
                connection.execute(
                    "DELETE FROM payloads WHERE seq = (SELECT seq FROM dead_letters WHERE dlq_id = ?)", (ids[0],)
                )
                and None
            )
        )
        found = [entry async for entry in files.export(Filter(), damaged)]
        assert ([ids[0], ids[2]], 4) == (damaged, len(found))
        assert "not_replayable" == (await rig.entry(ids[2])).verdict


async def test_an_entry_that_goes_while_an_export_is_under_way_is_left_out(tmp_path: Path) -> None:
    async with rig_in(tmp_path / "one") as rig:
        await fill(rig)
        damaged: list[str] = []
        export = Files(rig.letters, rig.listing).export(Filter(), damaged)
        await anext(export)
        await rig.store.write(lambda connection: connection.execute("DELETE FROM dead_letters") and None)
        assert ([], []) == ([entry async for entry in export], damaged)


async def test_a_file_cut_off_at_any_byte_is_refused_with_the_line(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    data = (tmp_path / "out" / "create_charge" / f"{ids[0]}.json").read_bytes()
    document.read(data, "whole")
    for length in range(len(data)):
        with pytest.raises(BadInput, match=r"^file\.json:[0-9]+: ") as refused:
            document.read(data[:length], "file.json")
        assert data[:length].count(b"\n") + 1 == int(refused.value.field.partition(":")[2])


async def test_an_edited_line_is_refused_by_its_number(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    lines = (tmp_path / "out" / "create_charge" / f"{ids[0]}.json").read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        for changed in (line + b" ", line[:-1], b"", line.replace(b"pending", b"completed") + b"\t"):
            edited = b"\n".join([*lines[: number - 1], changed, *lines[number:]])
            with pytest.raises(BadInput) as refused:
                document.read(edited, "file.json")
            named = int(refused.value.field.partition(":")[2])
            assert named == number or number >= len(lines) - 2
    without = b"\n".join([*lines[:10], *lines[11:]])
    with pytest.raises(BadInput, match=r"file\.json:11: "):
        document.read(without, "file.json")
    twice = b"\n".join([*lines[:11], *lines[10:]])
    with pytest.raises(BadInput, match=r"file\.json:12: "):
        document.read(twice, "file.json")
    shorter = b"\n".join([*lines[: len(lines) - 4], *lines[len(lines) - 3 :]])
    with pytest.raises(BadInput, match="lines are missing here"):
        document.read(shorter, "file.json")


def rewritten(data: bytes, **changed: Any) -> bytes:
    """A file whose lines are accounted for, as somebody with time on their hands would write it."""
    fields = orjson.loads(data)
    fields.pop("integrity")
    for path, value in changed.items():
        where = fields
        *parts, last = path.split("__")
        for part in parts:
            where = where[part]
        if value is ...:
            del where[last]
        else:
            where[last] = value
    lines = [b"{", *(orjson.dumps(name) + b": " + orjson.dumps(value) + b"," for name, value in fields.items())]
    return b"\n".join([*lines, document._proof(lines), b"}", b""])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "something else 9"}, ":2: must say 'sidecar dead letter 1'"),
        ({"status": "lost"}, "status: must be one of"),
        ({"replayed_at": "2020-01-01T00:00:00.000Z"}, "replayed_at: must not be before last_attempt"),
        ({"created_at": "yesterday"}, "must be a time"),
        ({"dlq_id": "dlq_20270115_080000_ffffffff"}, "is the file of dlq_20270115_080000_ffffffff"),
        ({"dlq_id": "../../escape"}, "dlq_id: must look like"),
        ({"upstream": ...}, "is not a dead letter"),
        ({"original_payload": 5}, "is not a dead letter"),
        ({"original_payload__sealed__head": "!!!"}, "is not a dead letter"),
        ({"original_payload__sealed__head": None}, "has no sealed head"),
        ({"original_payload__host": "evil.test:443"}, "belongs to another entry or host"),
        ({"original_payload__sealed__body_file": "ab" * 32}, ".body: is missing"),
    ],
)
async def test_a_clever_edit_is_refused_as_well(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    ids = await exported(tmp_path)
    path = tmp_path / "out" / "create_charge" / f"{ids[0]}.json"
    path.write_bytes(rewritten(path.read_bytes(), **changed))
    share_keys(tmp_path / "one", tmp_path / "two")
    async with rig_in(tmp_path / "two") as rig:
        result = await bring_in(rig, tmp_path / "out")
        assert (5, 1) == (result.added, len(result.refused)), result.refused
        assert message in result.refused[0]
        assert str(path) in result.refused[0] or ids[0] in result.refused[0]
        assert 5 == len(await rig.ids(Filter()))


async def test_a_body_that_was_changed_or_cut_off_is_refused(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    share_keys(tmp_path / "one", tmp_path / "two")
    for name in (f"___evil____name/{ids[2]}.body", f"payments/{ids[5]}.original.body"):
        body = tmp_path / "out" / name
        body.write_bytes(body.read_bytes()[:-1])
    async with rig_in(tmp_path / "two") as rig:
        result = await bring_in(rig, tmp_path / "out")
        assert (4, 2) == (result.added, len(result.refused))
        assert all("was cut off or changed" in why for why in result.refused)
        assert [] == os.listdir(rig.letters.bodies.folder)


async def test_another_key_is_refused_with_its_id(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    async with rig_in(tmp_path / "two") as rig:
        result = await bring_in(rig, tmp_path / "out")
        assert (0, len(ids)) == (result.added, len(result.refused))
        assert all("needs key" in why for why in result.refused)
        assert [] == os.listdir(rig.letters.bodies.folder)


async def test_an_entry_that_is_here_already_is_left_as_it_is(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    async with rig_in(tmp_path / "one") as rig:
        await rig.operator.annotate(ids[0], "ann", "changed since")
        result = await bring_in(rig, tmp_path / "out")
        assert (0, 5, 1) == (result.added, result.known, len(result.refused))
        assert "is here already and differs" in result.refused[0]
        assert 2 == len((await rig.entry(ids[0])).notes)
        request = await rig.letters.request(ids[2])
        assert 400_000 == sum([len(chunk) async for chunk in rig.letters.payloads.body(request)])


async def test_one_that_was_being_replayed_comes_back_as_maybe_sent(tmp_path: Path) -> None:
    async with rig_in(tmp_path / "one") as rig:
        kept = await rig.letters.keep(failed(code="CONNECTION_REFUSED", phase=NOT_CONNECTED))
        await Claims(rig.letters).take(kept.dlq_id, "job", Ask(), "ann")
        await write(rig, tmp_path / "out")
    share_keys(tmp_path / "one", tmp_path / "two")
    async with rig_in(tmp_path / "two") as rig:
        assert 1 == (await bring_in(rig, tmp_path / "out")).added
        entry = await rig.entry(kept.dlq_id)
        assert ("pending", "unsafe") == (entry.status, entry.verdict)


async def test_two_imports_of_the_same_file_at_once_keep_the_body(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    share_keys(tmp_path / "one", tmp_path / "two")
    path = tmp_path / "out" / "___evil____name" / f"{ids[2]}.json"
    async with rig_in(tmp_path / "two") as rig:
        files = Files(rig.letters, rig.listing)
        original = rig.store.read
        skipped = [True]

        async def blind(work: Any) -> Any:
            if skipped and "_known" in repr(work):
                skipped.clear()
                return False  # as if the other import had not been committed yet
            return await original(work)

        assert await files.bring_in(*given(path))
        rig.store.read = blind  # type: ignore[method-assign]  # the moment between the look and the write
        assert not await files.bring_in(*given(path))
        rig.store.read = original  # type: ignore[method-assign]
        request = await rig.letters.request(ids[2])
        assert 400_000 == sum([len(chunk) async for chunk in rig.letters.payloads.body(request)])


async def test_a_disk_that_fails_during_an_import_leaves_nothing_half(tmp_path: Path) -> None:
    ids = await exported(tmp_path)
    path = tmp_path / "out" / "___evil____name" / f"{ids[2]}.json"
    for failing in range(1, 8):
        target = tmp_path / f"two{failing}"
        share_keys(tmp_path / "one", target)
        disk = FaultyDisk()
        async with rig_in(target, disk=disk) as rig:
            disk.failing = disk.steps + failing
            try:
                await Files(rig.letters, rig.listing).bring_in(*given(path))
            except NotKept:
                assert [] == await rig.ids(Filter())
                continue
            request = await rig.letters.request(ids[2])
            assert 400_000 == sum([len(chunk) async for chunk in rig.letters.payloads.body(request)])


async def test_an_export_ends_though_entries_come_faster_than_it_writes(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        for number in range(1, 401):
            await rig.letters.keep(failed(number, at=START + number))
        found = []
        async for files in Files(rig.letters, rig.listing).export(Filter(), []):
            found.append(files)
            await rig.letters.keep(failed(1000 + len(found), at=START + 1000 + len(found)))
            assert len(found) < 1000
        assert 400 <= len(found) <= 600
