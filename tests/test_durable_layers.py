"""All durable parts together: opened, recovered, looked after, closed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from config.durable import DeadLetterStore
from config.durable import Outbox as OutboxRules
from config.errors import registry
from config.idempotency import Idempotency
from sidecar import clock
from sidecar.durable import layers
from sidecar.durable.claims import Claims, Result
from sidecar.durable.delivery import Found, Sent
from sidecar.durable.entry import Entry
from sidecar.durable.filters import Filter
from sidecar.durable.idempotency import Call, Proceed
from sidecar.durable.jobs import Submission, Wanted
from sidecar.durable.layers import Durable
from sidecar.durable.outbox import Terms as OutboxTerms
from sidecar.durable.outbox_rows import Delivery
from sidecar.durable.trouble import CannotUse
from sidecar.durable.workflow import Ask
from telemetry.record import NOT_CONNECTED
from tests.durability.rigs import Told, failed, terms


async def send_replay(entry: Entry) -> Result:
    return Result(ok=True, status=200)


async def send_delivery(delivery: Delivery) -> Sent:
    return Sent(ok=True, status=202)


async def lookup(delivery: Delivery) -> Found:
    return Found(True, "m1", "found")


async def opened(directory: Path, **changed: Any) -> Durable:
    settings = DeadLetterStore(min_free_bytes=0, keep_completed=10.0)
    given: dict[str, Any] = {"settings": settings, "registry": registry(), "terms_of": lambda upstream: terms()}
    return await Durable.open(directory, **{**given, **changed})


def attach(durable: Durable) -> None:
    known = OutboxTerms(
        OutboxRules.model_validate({"reconcile": {"url": "https://x.test/{key}"}}), Idempotency(provider_honours=True)
    )
    durable.attach(
        send_replay=send_replay,
        send_delivery=send_delivery,
        lookup=lookup,
        outbox_terms_of=lambda upstream: known,
        outbox_keep=lambda: 5.0,
    )


async def test_it_recovers_what_an_earlier_run_left_before_anything_is_sent(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    now = clock.wall()
    kept = await first.letters.keep(failed(code="CONNECTION_REFUSED", phase=NOT_CONNECTED, at=now - 100))
    await Claims(first.letters).take(kept.dlq_id, "job", Ask(), "ann")
    call = Call("u", "", "POST", "/", "k", "00")
    assert isinstance(await first.gate.begin(call), Proceed)
    attach(first)
    assert first.jobs is not None
    job, _ = await first.jobs.submit(Submission("j", "s", [Wanted("ann", "mail", "POST", "https://x.test/")]))
    (first.letters.bodies.folder).mkdir()
    (first.letters.bodies.folder / "left.tmp").write_bytes(b"half")
    await first.close()

    told = Told()
    second = await opened(tmp_path, report=told)
    attach(second)
    await second.begin()
    try:
        assert "pending" == (await second.letters.get(kept.dlq_id)).status
        assert (await second.gate.begin(call)).interrupted  # type: ignore[union-attr]  # a Proceed
        assert [] == os.listdir(second.letters.bodies.folder)
        assert {"payments": 1} == second.listing.stats.waiting
        assert {"dlq", "idempotency", "outbox"} == second.counts.parts
        assert second.jobs is not None
        while "succeeded" != (await second.jobs.get(job["job_id"]))["state"]:
            await asyncio.sleep(0.005)
    finally:
        await second.close()


async def test_chores_run_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_REFRESH_EVERY", 0.01)
    monkeypatch.setattr(layers, "_CHORES_EVERY", 0.02)
    durable = await opened(tmp_path)
    attach(durable)
    await durable.begin()
    try:
        kept = await durable.letters.keep(failed(at=clock.wall() - 1000))
        await durable.operator.discard(kept.dlq_id, "ann")
        durable.letters.now = lambda: clock.wall() + 60
        while await durable.listing.count(Filter()):
            await asyncio.sleep(0.01)
        assert durable.jobs is not None and durable.outbox is not None
        await durable.jobs.submit(Submission("j", "s", [Wanted("ann", "mail", "POST", "https://x.test/")]))
        while durable.job_counts.get("succeeded") != 1:
            await asyncio.sleep(0.01)
        durable.outbox.now = lambda: clock.wall() + 60
        while durable.job_counts.get("succeeded") != 0:
            await asyncio.sleep(0.01)
    finally:
        await durable.close()


async def test_without_anything_that_sends_it_still_keeps(tmp_path: Path) -> None:
    durable = await opened(tmp_path)
    await durable.begin()
    await durable.letters.keep(failed())
    await durable.chores()
    await durable.close()


async def test_a_store_in_trouble_does_not_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)
    (tmp_path / "store.db").mkdir()  # something that is no file
    durable = await opened(tmp_path)
    attach(durable)
    await durable.begin()
    await durable.chores()
    assert not durable.store.health.ok
    (tmp_path / "store.db").rmdir()
    while not durable.store.health.ok:
        await asyncio.sleep(0.01)
    await durable.letters.keep(failed())
    await durable.close()


async def test_a_wrong_key_stops_it_with_what_to_do(tmp_path: Path) -> None:
    durable = await opened(tmp_path, seal_key="ab" * 32)
    await durable.close()
    with pytest.raises(CannotUse, match="`new,old` keeps"):
        await opened(tmp_path, seal_key="cd" * 32)
