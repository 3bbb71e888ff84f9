"""The idempotency gate: first calls, repeats, versions, crashes and the bounds of what is stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable.idempotency import Call, Gate, Hit, Proceed, Refuse, Response
from sidecar.durable.seal import load_keyring
from sidecar.durable.store import Store
from sidecar.durable.trouble import NotKept
from telemetry.metrics import Stored
from tests.durability.faults import Wires, disk_error
from tests.durability.rigs import opened

NOW = 1_800_000_000.0
CALL = Call("payments", "caller1", "POST", "/v1/charges?x=1", "key-1", "ab" * 32)
ANSWER = Response(201, [(b"Content-Type", b"text/plain"), (b"X-Caf\xe9", b"caf\xe9")], b"created, canary")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)


class Rig:
    def __init__(self, store: Store, gate: Gate, counts: Stored) -> None:
        self.store, self.gate, self.counts, self.now = store, gate, counts, NOW
        self.waited: list[float] = []

    async def first(self, call: Call = CALL) -> Proceed:
        found = await self.gate.begin(call)
        assert isinstance(found, Proceed)
        return found

    async def done(self, call: Call = CALL, answer: Response = ANSWER) -> None:
        await self.gate.succeeded(await self.first(call), answer)

    async def refused(self, call: Call) -> Refuse:
        found = await self.gate.begin(call)
        assert isinstance(found, Refuse)
        return found


@asynccontextmanager
async def gate_in(directory: Path, **options: Any) -> AsyncIterator[Rig]:
    keys, counts = load_keyring(directory, None), Stored()
    bounds = {name: options.pop(name) for name in ("max_bytes",) if name in options}
    async with opened(directory, hooks=[keys.prove], **options) as store:

        async def sleep(seconds: float) -> None:
            rig.waited.append(seconds)
            await asyncio.sleep(0.001)

        gate = Gate(store, keys, counts=counts, now=lambda: rig.now, sleep=sleep, **bounds)
        rig = Rig(store, gate, counts)
        yield rig


async def test_a_repeat_after_success_gets_the_stored_answer(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.done()
        found = await rig.gate.begin(CALL)
        assert Hit(ANSWER, 0) == found
        assert {"miss": 1, "hit": 1} == {word: n for word, n in rig.counts.lookups.items() if n}


async def test_it_is_remembered_across_restarts_and_sealed(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.done()
    assert b"canary" not in (tmp_path / "store.db").read_bytes()
    assert b"key-1" not in (tmp_path / "store.db").read_bytes()
    async with gate_in(tmp_path) as rig:
        assert Hit(ANSWER, 0) == await rig.gate.begin(CALL)


async def test_a_repeat_while_the_first_is_under_way_is_told_to_wait(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.first()
        refused = await rig.refused(CALL)
        assert (409, 1, "in_progress") == (refused.status, refused.retry_after, refused.result)
        assert 1 == rig.counts.lookups["in_progress"]


async def test_another_payload_under_the_same_key_is_refused(tmp_path: Path) -> None:
    other = replace(CALL, payload_sha256="cd" * 32)
    async with gate_in(tmp_path) as rig:
        proceed = await rig.first()
        assert 422 == (await rig.refused(other)).status
        await rig.gate.succeeded(proceed, ANSWER)
        assert (422, "conflict") == ((await rig.refused(other)).status, (await rig.refused(other)).result)
        await rig.done(replace(CALL, key="k2"))


async def test_a_repeat_after_failure_goes_through(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.gate.failed(await rig.first())
        proceed = await rig.first()
        assert not proceed.interrupted
        await rig.gate.succeeded(proceed, ANSWER)
        assert isinstance(await rig.gate.begin(CALL), Hit)


@pytest.mark.parametrize(
    "changed",
    [
        {"upstream": "other"},
        {"api_key_id": "caller2"},
        {"method": "PUT"},
        {"path": "/v1/charges?x=2"},
        {"key": "key-2"},
        {"version": 1},
    ],
)
async def test_each_part_of_the_key_makes_it_another_one(tmp_path: Path, changed: dict[str, Any]) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.done()
        await rig.first(replace(CALL, **changed))


async def test_of_many_at_the_same_moment_exactly_one_goes_through(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        found = await asyncio.gather(*(rig.gate.begin(CALL) for _ in range(200)))
        assert {Proceed: 1, Refuse: 199} == Counter(map(type, found))


# ---- versions ----------------------------------------------------------------------------------------------------


async def test_only_a_strictly_higher_version_runs_again(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.done(replace(CALL, version=3))
        second = Response(200, [], b"version 4")
        await rig.done(replace(CALL, version=4, payload_sha256="ef" * 32), second)
        assert Hit(second, 4) == await rig.gate.begin(replace(CALL, version=4, payload_sha256="ef" * 32))
        assert Hit(ANSWER, 3) == await rig.gate.begin(replace(CALL, version=3)), "its own result"
        assert Hit(second, 4) == await rig.gate.begin(replace(CALL, version=2)), "older: the newest result"
        assert Hit(second, 4) == await rig.gate.begin(CALL)
        refused = await rig.refused(replace(CALL, version=4))
        assert (422, True) == (refused.status, "higher x-sidecar-version" in refused.message)


async def test_a_version_that_failed_does_not_count_as_done(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.done(replace(CALL, version=1))
        await rig.gate.failed(await rig.first(replace(CALL, version=2)))
        assert isinstance(await rig.gate.begin(replace(CALL, version=2)), Proceed)
        assert 409 == (await rig.refused(replace(CALL, version=2))).status


# ---- crashes -----------------------------------------------------------------------------------------------------


async def test_a_mark_of_a_dead_process_is_not_trusted(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.first()
        await rig.first(replace(CALL, key="k2", may_resend=False))
    async with gate_in(tmp_path) as rig:
        assert 2 == await rig.gate.recover()
        assert 0 == await rig.gate.recover()
        proceed = await rig.first()
        assert proceed.interrupted
        refused = await rig.refused(replace(CALL, key="k2", may_resend=False))
        assert (409, None) == (refused.status, refused.retry_after)
        assert "cut off by a crash" in refused.message
        assert 409 == (await rig.refused(CALL)).status, "now it is under way again"


async def test_even_before_the_recovery_has_run(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.first()
    async with gate_in(tmp_path) as rig:
        assert (await rig.first()).interrupted


async def test_a_mark_that_outlived_every_call_belongs_to_nobody(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        forgotten = await rig.first()
        rig.now += 301
        proceed = await rig.first()
        assert proceed.interrupted
        await rig.gate.succeeded(proceed, ANSWER)
        await rig.gate.failed(forgotten)
        assert isinstance(await rig.gate.begin(CALL), Hit), "the late one changes nothing"


async def test_nothing_is_sent_unmarked_and_trouble_is_told(tmp_path: Path) -> None:
    wires = Wires()
    async with gate_in(tmp_path, connect=wires.connect) as rig:
        wires.fail_once("COMMIT")
        with pytest.raises(NotKept):
            await rig.gate.begin(CALL)
        while not rig.store.health.ok:
            await asyncio.sleep(0.01)
        assert isinstance(await rig.gate.begin(CALL), Proceed)


async def test_a_result_waits_for_the_disk(tmp_path: Path) -> None:
    wires = Wires()
    async with gate_in(tmp_path, connect=wires.connect) as rig:
        proceed = await rig.first()

        def broken(statement: str) -> None:
            if statement == "COMMIT" and len(rig.waited) < 3:
                raise disk_error()

        wires.before = broken
        await rig.gate.succeeded(proceed, ANSWER)
        assert isinstance(await rig.gate.begin(CALL), Hit)


async def test_a_result_that_cannot_be_written_in_time_is_given_up(tmp_path: Path) -> None:
    wires = Wires()
    async with gate_in(tmp_path, connect=wires.connect) as rig:
        proceed = await rig.first(replace(CALL, lasts=1.0))

        def broken(statement: str) -> None:
            if statement == "COMMIT":
                raise disk_error()

        wires.before = broken
        await rig.gate.succeeded(proceed, ANSWER)
        assert [0.5, 0.5] == rig.waited
        wires.before = lambda statement: None


# ---- bounds ------------------------------------------------------------------------------------------------------


async def test_an_answer_that_is_too_large_is_not_stored_and_that_is_said(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.gate.succeeded(await rig.first(), Response(200, [], bytes(1000)), limit=500)
        refused = await rig.refused(CALL)
        assert (409, "hit") == (refused.status, refused.result)
        assert "larger than `idempotency.max_response_bytes` (500)" in refused.message
        await rig.gate.succeeded(await rig.first(replace(CALL, key="k2")), None, why_not="it was streamed")
        assert "it was streamed" in (await rig.refused(replace(CALL, key="k2"))).message
        await rig.gate.succeeded(await rig.first(replace(CALL, key="k3")), None)
        assert "it was not stored" in (await rig.refused(replace(CALL, key="k3"))).message


async def test_all_answers_together_are_bounded(tmp_path: Path) -> None:
    async with gate_in(tmp_path, max_bytes=3000) as rig:
        for number in range(4):
            await rig.done(replace(CALL, key=f"k{number}"), Response(200, [], bytes(700)))
        assert isinstance(await rig.gate.begin(replace(CALL, key="k0")), Hit)
        assert "no room" in (await rig.refused(replace(CALL, key="k3"))).message


async def test_what_has_expired_is_forgotten_at_once_and_swept_later(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        for number in range(3):
            await rig.done(replace(CALL, key=f"k{number}", ttl=60.0))
        rig.now += 59
        assert 0 == await rig.gate.sweep()
        assert isinstance(await rig.gate.begin(replace(CALL, key="k0")), Hit)
        rig.now += 2
        assert isinstance(await rig.gate.begin(replace(CALL, key="k0")), Proceed)
        assert 2 == await rig.gate.sweep()
        totals = await rig.store.read(
            lambda c: c.execute("SELECT n, bytes FROM totals WHERE name = 'idempotency'").fetchone()
        )
        assert (1, 400) == totals


async def test_a_large_sweep_goes_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.idempotency._PER_SWEEP", 2)
    async with gate_in(tmp_path) as rig:
        for number in range(5):
            await rig.done(replace(CALL, key=f"k{number}"))
        rig.now += 90_000
        assert 5 == await rig.gate.sweep()


async def test_a_damaged_answer_is_never_given(tmp_path: Path) -> None:
    async with gate_in(tmp_path) as rig:
        await rig.done()
        await rig.done(replace(CALL, key="k2"))
        await rig.store.write(
            lambda c: (
                c.execute(
                    "UPDATE idempotency SET response = (SELECT response FROM idempotency WHERE id = 2) WHERE id = 1"
                )
                and None
            )
        )
        assert "belongs to another entry" in (await rig.refused(CALL)).message
        assert isinstance(await rig.gate.begin(replace(CALL, key="k2")), Hit)
