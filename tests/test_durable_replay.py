"""Replays: claims, results, jobs with rate and ramp, order, crashes, and the ledger of effects."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable.claims import Claims, Result
from sidecar.durable.entry import Entry, Tried
from sidecar.durable.filters import Filter
from sidecar.durable.replay import Replayer
from sidecar.durable.replay_job import Job, Order
from sidecar.durable.successes import Success
from sidecar.durable.trouble import BadInput, NoSuchThing, NotKept, NotNow
from sidecar.durable.workflow import Ask, Refusal
from telemetry.record import CONNECTED, NOT_CONNECTED, PARTLY_SENT, SENT
from tests.durability.faults import Wires, disk_error
from tests.durability.rigs import START, Rig, failed, rig_in, terms

OK = Result(ok=True, status=200)
DOWN = Result(ok=False, code="TEMPORARY_UNAVAILABLE", status=503, phase=SENT, message="still down")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)


class Time:
    """Waiting takes no time, and is remembered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def monotonic(self) -> float:
        return self.now


class Sender:
    """Answers from a list, then with `otherwise`; remembers what was sent."""

    def __init__(self, *answers: Result | BaseException, otherwise: Result = OK) -> None:
        self.answers = list(answers)
        self.otherwise = otherwise
        self.sent: list[Entry] = []
        self.under_way = self.most_under_way = 0
        self.during: Callable[[Entry], Awaitable[None]] | None = None

    async def __call__(self, entry: Entry) -> Result:
        self.sent.append(entry)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            if self.during is not None:
                await self.during(entry)
            answer = self.answers.pop(0) if self.answers else self.otherwise
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            self.under_way -= 1


@asynccontextmanager
async def replaying(directory: Path, sender: Any, *, replay: dict[str, Any] | None = None, **options: Any) -> Any:
    """(rig, replayer, time, events)."""
    rules = {"payments": terms(replay={"rate": 1000.0, **(replay or {})})}
    wires = {name: options.pop(name) for name in ("connect",) if name in options}
    async with rig_in(directory, rules, **wires) as rig:
        time, events = Time(), list[tuple[str, dict[str, object]]]()
        replayer = Replayer(
            rig.letters,
            rig.listing,
            sender,
            on_event=lambda name, facts: events.append((name, facts)),
            sleep=time.sleep,
            monotonic=time.monotonic,
            **options,
        )
        yield rig, replayer, time, events
        await replayer.close()


async def fresh(rig: Rig, number: int = 0, **changed: Any) -> str:
    """A safe one: it was never sent."""
    given = {"code": "CONNECTION_REFUSED", "phase": NOT_CONNECTED, "at": START + number, **changed}
    return (await rig.letters.keep(failed(number, **given))).dlq_id


async def ended(replayer: Replayer, job: Job) -> dict[str, Any]:
    while job.ended_at is None:
        await asyncio.sleep(0.001)
    return await replayer.job(job.job_id)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# ---- one ---------------------------------------------------------------------------------------------------------


async def test_a_success_is_final(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender) as (rig, replayer, _, events):
        dlq_id = await fresh(rig)
        rig.now += 60
        settled = await replayer.one(dlq_id, "ann")
        assert "completed" == settled.outcome
        entry = await rig.entry(dlq_id)
        assert ("completed", True, "replayed", 1) == (entry.status, entry.processed, entry.state, entry.replays)
        assert START + 60 == entry.replayed_at
        assert ["dead_lettered", "replay_started", "replayed"] == [event["event"] for event in entry.history]
        assert 1 == rig.counts.replayed["payments", "completed"]
        assert ["replayed"] == [name for name, _ in events]
        with pytest.raises(NotNow, match=r"already succeeded at 2027-01-15T08:01:00\.000Z") as refused:
            await replayer.one(dlq_id, "ann", force=True, reason="again")
        assert 409 == refused.value.status
        assert 1 == len(sender.sent)
        entry = await rig.operator.verify(dlq_id, "ann", "seen in the ledger")
        assert "verified" == entry.state
        assert "closed" == (await rig.operator.close(dlq_id, "ann", "done")).state


async def test_it_is_claimed_durably_before_it_is_sent(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)

        async def look(entry: Entry) -> None:
            assert "replaying" == (await rig.entry(dlq_id)).status
            with pytest.raises(NotNow, match="under way"):
                await replayer.one(dlq_id, "bob")
            with pytest.raises(NotNow, match="only what waits"):
                await rig.operator.discard(dlq_id, "bob")

        sender.during = look
        assert "completed" == (await replayer.one(dlq_id, "ann")).outcome
        assert 1 == len(sender.sent)


async def test_a_failure_returns_and_after_the_last_one_it_is_failed(tmp_path: Path) -> None:
    sender = Sender(otherwise=Result(ok=False, code="CONNECTION_REFUSED", phase=NOT_CONNECTED, message="refused"))
    async with replaying(tmp_path, sender, replay={"max_replays": 2}) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        assert "failed" == (await replayer.one(dlq_id, "ann")).outcome
        entry = await rig.entry(dlq_id)
        assert ("pending", "triage", 1, False) == (entry.status, entry.state, entry.replays, entry.escalated)
        await replayer.one(dlq_id, "ann")
        assert "failed" == (await rig.entry(dlq_id)).status
        with pytest.raises(NotNow, match="failed 2 replays"):
            await replayer.one(dlq_id, "ann")
        await replayer.one(dlq_id, "ann", force=True, reason="they say it works now")
        assert "they say it works now" == next(
            event["forced"] for event in (await rig.entry(dlq_id)).history if "forced" in event
        )


async def test_a_replay_that_was_sent_without_an_answer_makes_it_unsafe(tmp_path: Path) -> None:
    sender = Sender(Result(ok=False, code="NETWORK_TIMEOUT", phase=SENT, message="token=canary"))
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        await replayer.one(dlq_id, "ann")
        entry = await rig.entry(dlq_id)
        assert ("pending", "unsafe", "NETWORK_TIMEOUT") == (entry.status, entry.verdict, entry.error_class)
        assert "token=REDACTED" == entry.error_details["error_message"]
        with pytest.raises(NotNow, match="unsafe: "):
            await replayer.one(dlq_id, "ann")
        assert 1 == len(sender.sent)


async def test_the_same_fatal_class_again_is_escalated(tmp_path: Path) -> None:
    sender = Sender(Result(ok=False, code="VALIDATION_ERROR", status=422, message="still wrong"))
    async with replaying(tmp_path, sender) as (rig, replayer, _, events):
        dlq_id = await fresh(rig, code="VALIDATION_ERROR", phase=SENT, status=422)
        assert "escalated" == (await replayer.one(dlq_id, "ann")).outcome
        entry = await rig.entry(dlq_id)
        assert ("pending", True) == (entry.status, entry.escalated)
        assert ["replayed", "escalated"] == [name for name, _ in events]
        assert 1 == rig.counts.replayed["payments", "escalated"]


async def test_what_the_sidecar_held_back_counts_for_nothing(tmp_path: Path) -> None:
    sender = Sender(Result(ok=False, code="CIRCUIT_OPEN", phase=NOT_CONNECTED, held_back=True))
    async with replaying(tmp_path, sender) as (rig, replayer, _, events):
        dlq_id = await fresh(rig)
        await rig.operator.validate(dlq_id, "ann")
        assert "held_back" == (await replayer.one(dlq_id, "ann")).outcome
        entry = await rig.entry(dlq_id)
        assert ("pending", "validated", 0, "safe") == (entry.status, entry.state, entry.replays, entry.verdict)
        assert [] == events


@pytest.mark.parametrize("fault", [RuntimeError("our mistake"), ValueError("another")])
async def test_an_exception_counts_as_sent_without_an_answer(tmp_path: Path, fault: Exception) -> None:
    async with replaying(tmp_path, Sender(fault)) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        assert "failed" == (await replayer.one(dlq_id, "ann")).outcome
        entry = await rig.entry(dlq_id)
        assert ("SIDECAR_INTERNAL", "unsafe") == (entry.error_class, entry.verdict)


async def test_a_send_that_outlasts_its_lease_is_cut_off(tmp_path: Path) -> None:
    sender = Sender()
    sender.during = lambda entry: asyncio.sleep(60)
    async with replaying(tmp_path, sender, replay={"lease": 0.05}) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        assert "failed" == (await replayer.one(dlq_id, "ann")).outcome
        assert "unsafe" == (await rig.entry(dlq_id)).verdict


async def test_a_caller_that_goes_away_leaves_a_settled_entry(tmp_path: Path) -> None:
    sender, begun = Sender(), asyncio.Event()

    async def forever(entry: Entry) -> None:
        begun.set()
        await asyncio.sleep(60)

    sender.during = forever
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        task = asyncio.create_task(replayer.one(dlq_id, "ann"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        entry = await rig.entry(dlq_id)
        assert ("pending", "unsafe") == (entry.status, entry.verdict)


async def test_a_result_that_cannot_be_written_is_written_when_the_disk_works_again(tmp_path: Path) -> None:
    wires, sender = Wires(), Sender()
    async with replaying(tmp_path, sender, connect=wires.connect) as (rig, replayer, time, _events):
        dlq_id = await fresh(rig)

        async def break_disk(entry: Entry) -> None:
            def broken(statement: str) -> None:
                if statement == "COMMIT" and len(time.waited) < 3:
                    raise disk_error()

            wires.before = broken

        sender.during = break_disk
        assert "completed" == (await replayer.one(dlq_id, "ann")).outcome
        assert len(time.waited) >= 3
        assert "completed" == (await rig.entry(dlq_id)).status
        assert 1 == len(sender.sent)


async def test_nothing_is_sent_when_the_claim_cannot_be_written(tmp_path: Path) -> None:
    wires, sender = Wires(), Sender()
    async with replaying(tmp_path, sender, connect=wires.connect) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        wires.fail_once("COMMIT")
        with pytest.raises(NotKept):
            await replayer.one(dlq_id, "ann")
        assert [] == sender.sent


async def test_a_critical_class_needs_evidence_before_it_goes_out(tmp_path: Path) -> None:
    async with replaying(tmp_path, Sender()) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig, code="INVALID_API_KEY", phase=SENT, status=401)
        with pytest.raises(NotNow, match="needs evidence"):
            await replayer.one(dlq_id, "ann")
        await rig.operator.remediate(dlq_id, "ann", "auth_config", "key rotated", "OPS-1")
        assert "completed" == (await replayer.one(dlq_id, "ann")).outcome


async def test_an_unknown_entry_is_said_to_be_unknown(tmp_path: Path) -> None:
    async with replaying(tmp_path, Sender()) as (_, replayer, _time, _events):
        with pytest.raises(NoSuchThing):
            await replayer.one("dlq_20270115_080000_ffffffff", "ann")


async def test_a_damaged_entry_is_not_sent(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        await rig.store.write(lambda c: c.execute("UPDATE dead_letters SET search = 'x'") and None)
        with pytest.raises(NotNow, match="does not match its digest"):
            await replayer.one(dlq_id, "ann")
        assert [] == sender.sent
        assert 1 == rig.counts.evicted["corrupt"]


async def test_a_success_elsewhere_during_a_replay_does_not_close_it_under_its_feet(tmp_path: Path) -> None:
    sender = Sender(DOWN)
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        failure = failed(idempotency_key="k", key_honoured=True)
        dlq_id = (await rig.letters.keep(failure)).dlq_id

        async def meanwhile(entry: Entry) -> None:
            told = Success("payments", "POST", failure.url, "other", START + 9, idempotency_key="k")
            assert [] == await rig.successes.tell(told)

        sender.during = meanwhile
        await replayer.one(dlq_id, "ann")
        entry = await rig.entry(dlq_id)
        assert ("pending", "superseded") == (entry.status, entry.verdict)


# ---- crashes -----------------------------------------------------------------------------------------------------


async def test_what_a_dead_process_held_is_reconciled_never_trusted(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        unkeyed = await fresh(rig, 1)
        keyed = await fresh(rig, 2, idempotency_key="k", key_honoured=True)
        for dlq_id in (unkeyed, keyed):
            claimed = await Claims(rig.letters).take(dlq_id, "job", Ask(), "ann")
            assert isinstance(claimed, Entry)
    sender = Sender()
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        assert {unkeyed, keyed} == {entry.dlq_id for entry in await replayer.recover()}
        found = {dlq_id: await rig.entry(dlq_id) for dlq_id in (unkeyed, keyed)}
        assert {"pending"} == {entry.status for entry in found.values()}
        assert ("unsafe", "safe") == (found[unkeyed].verdict, found[keyed].verdict)
        assert ["replay_interrupted"] * 2 == [entry.history[-1]["event"] for entry in found.values()]
        job = await replayer.start(Order(Filter()))
        assert {"completed": 1} == (await ended(replayer, job))["outcomes"]
        assert [keyed] == [entry.dlq_id for entry in sender.sent]
        assert [] == await replayer.recover()


async def test_a_living_claim_is_left_alone_until_it_runs_out(tmp_path: Path) -> None:
    async with replaying(tmp_path, Sender()) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        claims = Claims(rig.letters)
        await claims.take(dlq_id, "job", Ask(), "ann")
        assert [] == await replayer.recover()
        rig.now += 301
        assert 1 == len(await replayer.recover())
        assert "lost" == (await claims.settle(dlq_id, "job", OK)).outcome, "too late"
        assert "pending" == (await rig.entry(dlq_id)).status
        refused = await claims.take(dlq_id, "job", Ask(), "ann")
        assert isinstance(refused, Refusal)


async def test_a_claimed_entry_that_is_damaged_is_set_aside_on_recovery(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        dlq_id = await fresh(rig)
        await Claims(rig.letters).take(dlq_id, "job", Ask(), "ann")
        await rig.store.write(lambda c: c.execute("UPDATE dead_letters SET search = 'x'") and None)
    async with replaying(tmp_path, Sender()) as (rig, replayer, _, _events):
        assert [] == await replayer.recover()
        assert 1 == rig.counts.evicted["corrupt"]
        with pytest.raises(NoSuchThing):
            await rig.entry(dlq_id)


async def test_a_job_of_a_dead_process_is_interrupted(tmp_path: Path) -> None:
    sender, begun = Sender(), asyncio.Event()

    async def forever(entry: Entry) -> None:
        begun.set()
        await asyncio.sleep(60)

    sender.during = forever
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        await fresh(rig)
        job = await replayer.start(Order(Filter()))
        await begun.wait()
        running = await rig.store.read(lambda c: c.execute("SELECT document FROM replay_jobs").fetchone()[0])
    async with replaying(tmp_path, Sender()) as (rig, replayer, _, _events):
        assert "interrupted" == (await replayer.job(job.job_id))["state"], "it was stopped in an orderly way"
        await rig.store.write(
            lambda c: c.execute("UPDATE replay_jobs SET state = 'running', document = ?", (running,)) and None
        )
        await replayer.recover()
        shown = await replayer.job(job.job_id)
        assert ("interrupted", "the sidecar was stopped or killed") == (shown["state"], shown["why"])
        assert [job.job_id] == [one["job_id"] for one in (await replayer.jobs())[0]]
        with pytest.raises(NotNow, match="earlier run"):
            await replayer.act(job.job_id, "resume")
        with pytest.raises(NoSuchThing):
            await replayer.act("rpl_unknown", "resume")


# ---- many --------------------------------------------------------------------------------------------------------


async def test_everything_safe_goes_out_oldest_first(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender, replay={"concurrency": 1}) as (rig, replayer, _, _events):
        safe = [await fresh(rig, number) for number in range(20)]
        unsafe = (await rig.letters.keep(failed(99))).dlq_id
        job = await replayer.start(Order(Filter()))
        shown = await ended(replayer, job)
        assert ("done", 20, 20, {"completed": 20}) == (shown["state"], shown["total"], shown["done"], shown["outcomes"])
        assert safe == [entry.dlq_id for entry in sender.sent]
        assert "pending" == (await rig.entry(unsafe)).status


async def test_a_dry_run_counts_and_sends_nothing(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        for number in range(3):
            await fresh(rig, number)
        await fresh(rig, 10, code="INVALID_API_KEY", phase=SENT, status=401)
        await rig.letters.keep(failed(99))
        plan = await replayer.dry_run(Order(Filter()))
        assert {"safe": 4, "unsafe": 1} == plan["by_verdict"]
        assert (3, {"remediation": 1}, 3) == (plan["would_replay"], plan["refused_in_first_page"], len(plan["first"]))
        plan = await replayer.dry_run(Order(Filter(), limit=2, force=True, reason="x"))
        assert 2 == plan["would_replay"]
        plan = await replayer.dry_run(Order(Filter(verdict=("unsafe",))))
        assert {"unsafe": 1} == plan["refused_in_first_page"]
        assert [] == sender.sent


async def test_with_a_limit_as_many_go_out_as_the_dry_run_said(tmp_path: Path) -> None:
    async with replaying(tmp_path, Sender()) as (rig, replayer, _, _events):
        await fresh(rig, 1, code="INVALID_API_KEY", phase=SENT, status=401)
        for number in range(2, 7):
            await fresh(rig, number)
        plan = await replayer.dry_run(Order(Filter(), limit=4))
        assert (3, {"remediation": 1}) == (plan["would_replay"], plan["refused_in_first_page"])
        shown = await ended(replayer, await replayer.start(Order(Filter(), limit=4)))
        assert {"completed": 3, "skipped": 1} == shown["outcomes"]


async def test_unsafe_ones_go_out_only_when_forced_with_a_reason(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        dlq_id = (await rig.letters.keep(failed())).dlq_id
        with pytest.raises(BadInput, match="a forced replay needs one"):
            await replayer.start(Order(Filter(), force=True))
        shown = await ended(replayer, await replayer.start(Order(Filter(verdict=("unsafe",)))))
        assert {"skipped": 1} == shown["outcomes"]
        assert {"unsafe": 1} == shown["skipped"]
        await ended(replayer, await replayer.start(Order(Filter(), force=True, reason="not in their ledger")))
        assert [dlq_id] == [entry.dlq_id for entry in sender.sent]


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"rate": 0.0}, "rate"), ({"rate": 1001.0}, "rate"), ({"limit": 0}, "limit")],
)
async def test_an_order_that_makes_no_sense_is_refused(tmp_path: Path, changed: dict[str, Any], field: str) -> None:
    async with replaying(tmp_path, Sender()) as (_, replayer, _time, _events):
        with pytest.raises(BadInput, match=field):
            await replayer.start(Order(Filter(), **changed))
        with pytest.raises(NotNow, match="only pending entries"):
            await replayer.start(Order(Filter(status=("completed",))))


async def test_the_limit_and_the_rate_hold(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender) as (rig, replayer, time, _events):
        for number in range(10):
            await fresh(rig, number)
        job = await replayer.start(Order(Filter(), rate=4.0, limit=6))
        shown = await ended(replayer, job)
        assert (6, 6) == (shown["total"], len(sender.sent))
        assert [0.25] * 6 == time.waited


async def test_it_begins_with_one_and_doubles(tmp_path: Path) -> None:
    sender = Sender()
    sizes: list[int] = []

    async def gather(entry: Entry) -> None:
        await asyncio.sleep(0.02)
        if sender.under_way > 0:
            sizes.append(sender.under_way)

    sender.during = gather
    async with replaying(tmp_path, sender, replay={"concurrency": 4}) as (rig, replayer, _, _events):
        for number in range(11):
            await fresh(rig, number)
        await ended(replayer, await replayer.start(Order(Filter())))
        assert 1 == sizes[0]
        assert 4 == sender.most_under_way
        assert 11 == len(sender.sent)


async def test_a_failed_canary_pauses_the_job_until_somebody_looked(tmp_path: Path) -> None:
    sender = Sender(DOWN)
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        for number in range(5):
            await fresh(rig, number)
        job = await replayer.start(Order(Filter()))
        await until(lambda: job.state == "paused")
        assert 1 == len(sender.sent)
        assert "look at it, then resume or cancel" in (await replayer.job(job.job_id))["why"]
        await replayer.act(job.job_id, "resume")
        shown = await ended(replayer, job)
        assert {"completed": 4, "failed": 1} == shown["outcomes"]


async def test_a_job_waits_for_an_open_breaker_and_then_goes_on_by_itself(tmp_path: Path) -> None:
    sender, refusing = Sender(), [True]
    async with replaying(tmp_path, sender, refuses=lambda upstream: refusing[0]) as (rig, replayer, time, _events):
        await fresh(rig)
        job = await replayer.start(Order(Filter()))
        await until(lambda: len(time.waited) > 20)
        assert [] == sender.sent
        assert "waiting for the breaker of payments" == (await replayer.job(job.job_id))["current"]
        refusing[0] = False
        assert {"completed": 1} == (await ended(replayer, job))["outcomes"]


async def test_what_a_breaker_refused_all_the_same_is_sent_again_by_the_same_job(tmp_path: Path) -> None:
    sender = Sender(OK, Result(ok=False, code="CIRCUIT_OPEN", held_back=True))
    async with replaying(tmp_path, sender, replay={"concurrency": 1}) as (rig, replayer, _, _events):
        ids = [await fresh(rig, number) for number in range(3)]
        job = await replayer.start(Order(Filter()))
        assert {"completed": 3} == (await ended(replayer, job))["outcomes"]
        assert [ids[0], ids[1], ids[1], ids[2]] == [entry.dlq_id for entry in sender.sent]


async def test_what_else_holds_it_back_pauses_the_job(tmp_path: Path) -> None:
    sender = Sender(OK, Result(ok=False, code="EGRESS_DENIED", held_back=True))
    async with replaying(tmp_path, sender, replay={"concurrency": 1}) as (rig, replayer, _, _events):
        ids = [await fresh(rig, number) for number in range(3)]
        job = await replayer.start(Order(Filter()))
        await until(lambda: job.state == "paused")
        assert "takes no calls" in job.why
        assert ("pending", 0) == ((await rig.entry(ids[1])).status, (await rig.entry(ids[1])).replays)
        await replayer.act(job.job_id, "resume")
        assert {"completed": 2, "held_back": 1} == (await ended(replayer, job))["outcomes"]


@pytest.mark.parametrize(("stop_after", "sent"), [(3, 3), (0, 8)])
async def test_a_job_stops_after_so_many_failures_until_it_is_resumed(
    tmp_path: Path, stop_after: int, sent: int
) -> None:
    sender = Sender(*[DOWN] * 8)
    async with replaying(tmp_path, sender, replay={"concurrency": 1}) as (rig, replayer, _, _events):
        for number in range(8):
            await fresh(rig, number)
        job = await replayer.start(Order(Filter(), ramp=False, stop_after=stop_after))
        if stop_after:
            await until(lambda: job.state == "paused")
            assert (3, "3 replays failed (`stop_after`); look at them, then resume or cancel") == (
                len(sender.sent),
                job.why,
            )
            await replayer.act(job.job_id, "resume")
            await until(lambda: job.state == "paused" and len(sender.sent) == 6)
            await replayer.act(job.job_id, "resume")
        assert {"failed": 8} == (await ended(replayer, job))["outcomes"]


async def test_a_job_that_nobody_can_resume_ends_instead(tmp_path: Path) -> None:
    async with replaying(tmp_path, Sender(DOWN), replay={"auto": "on_close"}) as (rig, replayer, _, _events):
        for number in range(3):
            await fresh(rig, number)
        job = await replayer.breaker_closed("payments")
        assert job is not None
        shown = await ended(replayer, job)
        assert ("cancelled", {"failed": 1}) == (shown["state"], shown["outcomes"])
        again = await replayer.breaker_closed("payments")
        assert again is not None, "it does not stand in the way of the next one"


async def test_a_job_says_how_far_it_is_how_fast_and_for_how_long(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender, replay={"concurrency": 1}) as (rig, replayer, time, _events):
        for number in range(4):
            await fresh(rig, number)
        hold = asyncio.Event()
        third = asyncio.Event()

        async def during(entry: Entry) -> None:
            if len(sender.sent) == 3:
                third.set()
                await hold.wait()
            await time.sleep(2.0)

        sender.during = during
        job = await replayer.start(Order(Filter(), ramp=False))
        await third.wait()
        shown = job.shown()
        assert (50.0, 2, 4) == (shown["percent"], shown["done"], shown["total"])
        assert shown["seconds_left"] == pytest.approx(2 / shown["per_second"], rel=0.02)
        await fresh(rig, 10)
        await fresh(rig, 11)
        hold.set()
        shown = await ended(replayer, job)
        assert shown["done"] <= shown["total"]
        assert (100.0, None) == (shown["percent"], shown["seconds_left"])


async def test_reasons_are_counted_by_kind_not_by_entry(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender, replay={"concurrency": 1}) as (rig, replayer, _, _events):
        ids = [await fresh(rig, number) for number in range(5)]
        quicker = False

        async def during(entry: Entry) -> None:
            nonlocal quicker
            if not quicker:
                quicker = True
                for dlq_id in ids[1:]:
                    rig.now += 1.5  # each at another time
                    await replayer.one(dlq_id, "somebody quicker")

        sender.during = during
        shown = await ended(replayer, await replayer.start(Order(Filter(), ramp=False)))
        assert ({"completed": 1, "skipped": 4}, {"it already succeeded": 4}) == (shown["outcomes"], shown["skipped"])


async def test_a_schedule_drains_where_no_breaker_ever_opened(tmp_path: Path) -> None:
    rules = {"auto": ["schedule"], "every": 300.0}
    async with replaying(tmp_path, Sender(), replay=rules) as (rig, replayer, time, _events):
        await fresh(rig)
        await replayer.scheduled()
        assert [] == (await replayer.jobs())[0], "its time has not come"
        await time.sleep(301.0)
        await replayer.scheduled()
        (shown,) = (await replayer.jobs())[0]
        assert "auto: schedule" == shown["order"]["by"]
        await until(lambda: not replayer._tasks)
        assert {"completed": 1} == (await replayer.job(shown["job_id"]))["outcomes"]
        await time.sleep(301.0)
        await replayer.scheduled()
        assert 1 == len((await replayer.jobs())[0]), "nothing waits, so no job is made"


async def test_a_job_waits_while_live_calls_wait(tmp_path: Path) -> None:
    sender, busy = Sender(), [True]
    async with replaying(tmp_path, sender, live_waiting=lambda upstream: busy[0]) as (rig, replayer, time, _events):
        await fresh(rig)
        job = await replayer.start(Order(Filter()))
        await until(lambda: len(time.waited) > 20)
        assert [] == sender.sent
        assert "waiting for live traffic" == (await replayer.job(job.job_id))["current"]
        busy[0] = False
        assert {"completed": 1} == (await ended(replayer, job))["outcomes"]


async def test_pause_resume_and_cancel(tmp_path: Path) -> None:
    sender, gate = Sender(), asyncio.Event()

    async def wait(entry: Entry) -> None:
        await gate.wait()

    sender.during = wait
    async with replaying(tmp_path, sender, replay={"concurrency": 1}) as (rig, replayer, _, _events):
        for number in range(10):
            await fresh(rig, number)
        job = await replayer.start(Order(Filter()))
        await until(lambda: len(sender.sent) == 1)
        assert "paused" == (await replayer.act(job.job_id, "pause"))["state"]
        gate.set()
        await until(lambda: job.outcomes["completed"] == 1)
        await asyncio.sleep(0.02)
        assert 1 == len(sender.sent)
        gate.clear()
        await replayer.act(job.job_id, "resume")
        await until(lambda: len(sender.sent) == 2)
        await replayer.act(job.job_id, "cancel")
        gate.set()
        shown = await ended(replayer, job)
        assert ("cancelled", {"completed": 2}) == (shown["state"], shown["outcomes"]), "what was under way has ended"
        for action in ("pause", "resume", "cancel"):
            with pytest.raises(NotNow, match="cancelled"):
                await replayer.act(job.job_id, action)


async def test_one_key_goes_out_in_order_and_never_two_at_a_time(tmp_path: Path) -> None:
    sender = Sender(otherwise=OK)
    running: Counter[str] = Counter()

    async def watch(entry: Entry) -> None:
        running[entry.sanitized_context["url_hash"]] += 1
        assert 1 == running[entry.sanitized_context["url_hash"]]
        await asyncio.sleep(0.002)
        running[entry.sanitized_context["url_hash"]] -= 1

    sender.during = watch
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        for number in range(24):
            url = f"https://api.payments.test/things/{number % 3}"
            await fresh(rig, number, method="PUT", url=url, body=b"%d" % number)
        sender.answers = [OK, DOWN]  # one of a key fails: the rest of that key goes on
        job = await replayer.start(Order(Filter(), ramp=False))
        assert {"completed": 23, "failed": 1} == (await ended(replayer, job))["outcomes"]
        for url in {entry.sanitized_context["url_hash"] for entry in sender.sent}:
            times = [entry.created_at for entry in sender.sent if entry.sanitized_context["url_hash"] == url]
            assert sorted(times) == times
        assert 3 == sender.most_under_way


async def test_a_workflow_goes_from_the_failed_stage_on_in_stage_order(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender, stages=lambda: ("fetch", "llm", "notify")) as (rig, replayer, _, _events):
        for number, stage in enumerate(("notify", "llm", "notify", "fetch")):
            await fresh(rig, number, workflow="w", stage=stage)
        await fresh(rig, 9, workflow="other", stage="fetch")
        await ended(replayer, await replayer.start(Order(Filter(workflow="w"))))
        assert ["fetch", "llm", "notify", "notify"] == [entry.stage for entry in sender.sent]
        assert [3, 1, 0, 2] == [int(entry.created_at - START) for entry in sender.sent]


async def test_a_stage_that_fails_ends_its_workflow(tmp_path: Path) -> None:
    sender = Sender(OK, DOWN)
    async with replaying(tmp_path, sender, stages=lambda: ("fetch", "llm", "notify")) as (rig, replayer, _, _events):
        for number, stage in enumerate(("fetch", "llm", "notify")):
            await fresh(rig, number, workflow="w", stage=stage)
        shown = await ended(replayer, await replayer.start(Order(Filter(workflow="w"))))
        assert {"completed": 1, "failed": 1} == shown["outcomes"]
        assert "stage llm did not succeed" in shown["why"]
        await rig.letters.keep(failed(7, workflow="v", stage="fetch"))
        await fresh(rig, 8, workflow="v", stage="llm")
        shown = await ended(replayer, await replayer.start(Order(Filter(workflow="v"))))
        assert {"skipped": 1} == shown["outcomes"], "an earlier stage that may not go holds up the later ones"


async def test_a_breaker_that_closes_drains_what_is_safe_when_asked_to(tmp_path: Path) -> None:
    sender = Sender()
    async with replaying(tmp_path, sender, replay={"auto": "on_close"}) as (rig, replayer, _, _events):
        assert None is await replayer.breaker_closed("payments"), "nothing waits"
        await fresh(rig)
        await rig.letters.keep(failed(5))
        job = await replayer.breaker_closed("payments")
        assert job is not None
        assert None is await replayer.breaker_closed("payments"), "one at a time"
        assert {"completed": 1} == (await ended(replayer, job))["outcomes"]
        assert None is await replayer.breaker_closed("elsewhere"), "off unless asked for"


async def test_a_store_in_trouble_ends_a_job_with_the_reason(tmp_path: Path) -> None:
    wires, sender = Wires(), Sender()
    async with replaying(tmp_path, sender, connect=wires.connect, replay={"concurrency": 1}) as (rig, replayer, _, _e):
        for number in range(3):
            await fresh(rig, number)

        def broken(statement: str) -> None:
            if statement == "COMMIT":
                raise disk_error()

        job = await replayer.start(Order(Filter()))
        wires.before = broken
        await until(lambda: job.ended_at is not None)
        assert ("interrupted", True) == (job.state, "cannot be written" in job.why)
        wires.before = lambda statement: None


async def test_closing_stops_at_once_and_notes_what_was_under_way(tmp_path: Path) -> None:
    sender = Sender()
    sender.during = lambda entry: asyncio.sleep(60)
    async with replaying(tmp_path, sender) as (rig, replayer, _, _events):
        dlq_id = await fresh(rig)
        job = await replayer.start(Order(Filter()))
        await until(lambda: bool(sender.sent))
        await replayer.close()
        assert "interrupted" == job.state
        assert "pending" == (await rig.entry(dlq_id)).status
        assert "unsafe" == (await rig.entry(dlq_id)).verdict


# ---- the ledger --------------------------------------------------------------------------------------------------


class Provider:
    """Counts the effects of requests, and honours keys where it says so."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self._keys: set[str] = set()

    def execute(self, name: str, key: str | None) -> None:
        if key is not None:
            if key in self._keys:
                return
            self._keys.add(key)
        self.effects[name] += 1


FAULTS = (
    ("CONNECTION_REFUSED", NOT_CONNECTED, None, False),
    ("CONNECTION_RESET", CONNECTED, None, False),
    ("CONNECTION_RESET", PARTLY_SENT, None, False),
    ("CONNECTION_RESET", PARTLY_SENT, None, True),
    ("NETWORK_TIMEOUT", SENT, None, True),
    ("NETWORK_TIMEOUT", SENT, None, False),
    ("UPSTREAM_ERROR", SENT, 500, True),
    ("RATE_LIMIT_EXCEEDED", SENT, 429, False),
)


async def test_the_ledger_of_effects_after_replaying_everything_safe(tmp_path: Path) -> None:
    """Faults at every send phase, with and without a key: one effect for every safe entry, at most one for others."""
    count = 2000 if os.environ.get("SIDECAR_LONG_TESTS") else 240
    provider, naive, names = Provider(), Provider(), dict[str, str]()

    async def send(entry: Entry) -> Result:
        name = names[entry.dlq_id]
        provider.execute(name, entry.idempotency_key)
        return OK

    async with replaying(tmp_path, send) as (rig, replayer, _, _events):
        for number in range(count):
            code, phase, status, executed = FAULTS[number % len(FAULTS)]
            key = f"key-{number}" if (number // len(FAULTS)) % 2 else None
            method = ("POST", "PATCH", "PUT")[(number // len(FAULTS) // 2) % 3]
            failure = failed(
                number,
                at=START + number,
                attempts=[Tried(phase, code, status)],
                error_class=code,
                method=method,
                url=f"https://api.payments.test/{number}",
                idempotency_key=key,
                key_honoured=key is not None,
            )
            kept = await rig.letters.keep(failure)
            names[kept.dlq_id] = f"{method} {number}"
            if executed:
                provider.execute(names[kept.dlq_id], key)
                naive.execute(names[kept.dlq_id], key)
        safe = {entry.dlq_id async for entry in replayer._entries(Filter(verdict=("safe",)))}
        job = await replayer.start(Order(Filter(), ramp=False))
        shown = await ended(replayer, job)
        assert {"completed": len(safe)} == shown["outcomes"]
        wrong = []
        for dlq_id, name in names.items():
            entry = await rig.entry(dlq_id)
            if name.startswith("PUT"):
                continue  # the same effect however often
            if dlq_id in safe:
                if provider.effects[name] != 1 or entry.status != "completed":
                    wrong.append((name, provider.effects[name], entry.status))
            elif provider.effects[name] > 1 or entry.status != "pending":
                wrong.append((name, provider.effects[name], entry.status))
        assert [] == wrong
        assert len(names) == sum((await rig.listing.count(Filter())).values()), "none is lost"
        for dlq_id, name in names.items():
            naive.execute(name, (await rig.entry(dlq_id)).idempotency_key)
        twice = [name for name, effects in naive.effects.items() if effects > 1 and not name.startswith("PUT")]
        assert len(twice) >= count // 16, "sending everything again would have done these twice"


async def test_a_stage_that_was_held_back_ends_its_workflow_too(tmp_path: Path) -> None:
    sender = Sender(OK, Result(ok=False, code="CIRCUIT_OPEN", phase=NOT_CONNECTED, held_back=True))
    async with replaying(tmp_path, sender, stages=lambda: ("fetch", "llm", "notify")) as (rig, replayer, _, _events):
        for number, stage in enumerate(("fetch", "llm", "notify")):
            await fresh(rig, number, workflow="w", stage=stage)
        shown = await ended(replayer, await replayer.start(Order(Filter(workflow="w"))))
        assert ("done", {"completed": 1, "held_back": 1}) == (shown["state"], shown["outcomes"])
        assert "stage llm did not succeed" in shown["why"]
