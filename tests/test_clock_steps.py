"""The wall clock of the machine is set while the sidecar runs: what is kept keeps its age."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from config.durable import DeadLetterStore
from config.errors import registry
from sidecar import clock
from sidecar.durable.deadletter import DEFAULT_TERMS
from sidecar.durable.filters import Filter
from sidecar.durable.idempotency import Call, Hit, Proceed, Response
from sidecar.durable.layers import Durable
from sidecar.durable.steps import Step, Steps
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import keep, store
from tests.doubles.upstream import always, answer
from tests.durability.rigs import failed

DAY = 86_400.0
SIXTY_DAYS = 60 * DAY
RULES = DeadLetterStore(min_free_bytes=0, retention=7 * DAY, keep_completed=DAY)
CALL = Call("u", "", "POST", "/x", "key-1", "00", ttl=DAY)


class Machine:
    """Its wall clock, which can be set."""

    def __init__(self) -> None:
        self.off = 0.0
        self._true = clock.wall

    def wall(self) -> float:
        return self._true() + self.off


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(clock, "wall", made.wall)
    restarted()
    yield made
    monkeypatch.undo()
    restarted()


async def opened(tmp_path: Path) -> Durable:
    return await Durable.open(tmp_path, settings=RULES, registry=registry(), terms_of=lambda upstream: DEFAULT_TERMS)


def letter(durable: Durable, number: int, **changed: Any) -> Any:
    return durable.letters.keep(failed(number, at=clock.steady(), **changed))


def restarted() -> None:
    """Another process, which looks at the clock as it is then."""
    vars(clock.steady).update(vars(clock.Steady()))


# ---- the clock ---------------------------------------------------------------------------------------------------


def test_slewing_is_followed_and_a_step_is_told(machine: Machine) -> None:
    steady = clock.Steady()
    machine.off = 0.4
    assert steady.look() is None
    assert abs(steady() - machine.wall()) < 0.05
    machine.off = SIXTY_DAYS
    assert abs(SIXTY_DAYS - (steady.look() or 0.0)) < 1
    assert abs(machine.wall() - steady() - SIXTY_DAYS) < 1  # it goes on as if nothing had been


@pytest.mark.parametrize("by", [SIXTY_DAYS, -SIXTY_DAYS])
def test_ages_are_those_of_the_clock_that_stamped(by: float) -> None:
    steps = Steps()
    steps.known = (Step(1000.0, 2000.0, by),)
    now = 2000.0 + by  # just after the step
    old = [stamp for stamp in (500.0, 1500.0, 2000.0) if any(a <= stamp < b for a, b in steps.older_than(now - 600))]
    assert 1500.0 not in old and 2000.0 not in old
    later = [stamp for stamp in (1500.0,) if any(a <= stamp < b for a, b in steps.older_than(now + 10_000))]
    assert [1500.0] == later


# ---- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [SIXTY_DAYS, -SIXTY_DAYS])
async def test_what_was_stamped_by_a_wrong_clock_is_as_old_as_it_is(
    tmp_path: Path, machine: Machine, by: float
) -> None:
    machine.off = -by  # it starts with a wrong clock
    restarted()
    durable = await opened(tmp_path)
    kept = await letter(durable, 1)
    proceed = await durable.gate.begin(CALL)
    assert isinstance(proceed, Proceed)
    await durable.gate.succeeded(proceed, Response(200, [], b"the answer"))
    machine.off = 0.0  # and is set
    assert {"done": 0, "lost": 0} == await durable.upkeep.expire()  # before anybody noticed
    await durable.letters.steps.follow(durable.store)
    assert abs(clock.steady() - machine.wall()) < 1
    for _ in range(2):
        assert {"done": 0, "lost": 0} == await durable.upkeep.expire()
        assert 0 == await durable.gate.sweep()
        assert isinstance(await durable.gate.begin(CALL), Hit)
        (entry,) = (await durable.listing.page(Filter())).items
        assert kept.dlq_id == entry.dlq_id
        await durable.close()
        restarted()  # and it is so in the next run as well
        durable = await opened(tmp_path)
    machine.off = 8 * DAY  # that time has passed between two runs
    await durable.close()
    restarted()
    durable = await opened(tmp_path)
    assert {"done": 0, "lost": 1} == await durable.upkeep.expire()
    assert 1 == await durable.gate.sweep()
    await durable.close()


async def test_what_an_earlier_run_has_stamped_is_not_touched(tmp_path: Path, machine: Machine) -> None:
    durable = await opened(tmp_path)
    await letter(durable, 1)
    await durable.close()
    machine.off = -SIXTY_DAYS
    restarted()
    durable = await opened(tmp_path)
    await letter(durable, 2)
    machine.off = 8 * DAY
    await durable.letters.steps.follow(durable.store)
    assert {"done": 0, "lost": 1} == await durable.upkeep.expire()
    (left,) = (await durable.listing.page(Filter())).items
    assert "order=2" in (await durable.letters.request(left.dlq_id)).url
    await durable.close()


async def test_a_claim_does_not_end_because_the_clock_was_set(tmp_path: Path, machine: Machine) -> None:
    from sidecar.durable.claims import Claims
    from sidecar.durable.workflow import Ask

    durable = await opened(tmp_path)
    kept = await letter(durable, 1, code="CONNECTION_REFUSED", phase=0)
    claims = Claims(durable.letters)
    await claims.take(kept.dlq_id, "job", Ask(), "ann")
    machine.off = SIXTY_DAYS
    await durable.letters.steps.follow(durable.store)
    assert [] == await claims.reconcile()
    await durable.close()


# ---- running -----------------------------------------------------------------------------------------------------


async def until_followed(sidecar: Running) -> None:
    async with asyncio.timeout(15):
        while abs(clock.steady.behind()) > 1 or not sidecar.proxy.metrics.clock_steps:
            await asyncio.sleep(0.05)


async def test_a_running_sidecar_notices_counts_and_follows(
    start_sidecar: Starter, start_upstream: UpstreamStarter, machine: Machine
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    machine.off = -SIXTY_DAYS
    keys = {"hosts": ["api.test"], "endpoints": [upstream.url]}
    sidecar = await start_sidecar(upstreams={"payments": keys}, dead_letter={"retention": DAY})
    await keep(sidecar, upstream, 1, at=clock.steady())
    machine.off = 0.0
    await until_followed(sidecar)
    assert {"done": 0, "lost": 0} == await (await store(sidecar)).upkeep.expire()
    assert 1.0 == sidecar.proxy.metrics.registry.get_sample_value("sidecar_clock_steps_total")
    assert "the wall clock of this machine was set forward" in sidecar.logged.getvalue()
    assert abs(machine.wall() - sidecar.proxy.wall(clock.monotonic())) < 1


def test_an_authority_of_the_future_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidecar import authority

    true, hosts = authority._now, frozenset({"api.test"})
    monkeypatch.setattr(authority, "_now", lambda: true() + timedelta(days=60))
    made, _ = authority.ensure(tmp_path, hosts)
    monkeypatch.setattr(authority, "_now", true)
    assert not made.is_current(hosts)
    again, _ = authority.ensure(tmp_path, hosts)
    assert again.is_current(hosts)
