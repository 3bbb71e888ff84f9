"""The outbox: jobs, deliveries in their exact order, the failure matrix, and operators who decide."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from config.durable import DeadLetterStore
from config.durable import Outbox as Rules
from config.errors import registry
from config.idempotency import Idempotency
from sidecar.durable.bodies import Bodies
from sidecar.durable.deadletter import DeadLetters
from sidecar.durable.delivery import Found, Sent
from sidecar.durable.entry import Answer
from sidecar.durable.jobs import Jobs, Submission, Wanted
from sidecar.durable.listing import Listing
from sidecar.durable.outbox import Outbox, Terms
from sidecar.durable.outbox_rows import Delivery
from sidecar.durable.seal import load_keyring
from sidecar.durable.store import Store
from sidecar.durable.trouble import BadInput, NoSuchThing, NotKept, NotNow, OtherPayload
from telemetry.metrics import Stored
from telemetry.record import NOT_CONNECTED, SENT
from telemetry.redact import Redactor
from tests.durability.faults import Wires, disk_error
from tests.durability.rigs import START, Told, failed, opened

MIB = 1_048_576

RECONCILE = {"url": "https://mail.test/messages/{key}"}
LOST = Sent(ok=False, code="NETWORK_TIMEOUT", phase=SENT, message="no answer, token=canary")
NOT_SENT = Sent(ok=False, code="CONNECTION_REFUSED", phase=NOT_CONNECTED, message="refused")
REFUSED = Sent(ok=False, code="VALIDATION_ERROR", status=422, fatal=True, message="no such mailbox")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.writer._RETRY_AFTER", 0.02)


class Provider:
    """Takes messages, counts them by recipient, and can be asked about a key."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.keys: dict[str, str] = {}
        self.script: list[Callable[[Delivery], Sent] | Sent | Exception] = []
        self.lookups: list[Found | Exception | None] = []
        self.sends: list[Delivery] = []
        self.asked = 0
        self.honours = False
        self.watch: Callable[[Delivery], Any] | None = None

    def accept(self, delivery: Delivery) -> Sent:
        if not (self.honours and delivery.send_key in self.keys):
            self.effects[delivery.recipient] += 1
            self.keys[delivery.send_key] = f"m{len(self.keys)}"
        return Sent(ok=True, status=202, notification_id=self.keys[delivery.send_key])

    def accept_and_lose(self, delivery: Delivery) -> Sent:
        self.accept(delivery)
        return LOST

    async def send(self, delivery: Delivery) -> Sent:
        self.sends.append(delivery)
        if self.watch is not None:
            await self.watch(delivery)
        step = self.script.pop(0) if self.script else self.accept
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, Sent) else step(delivery)

    async def lookup(self, delivery: Delivery) -> Found:
        self.asked += 1
        answer = self.lookups.pop(0) if self.lookups else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer
        known = self.keys.get(delivery.send_key)
        return Found(known is not None, known, "found it" if known else "")


@dataclass
class Rig:
    store: Store
    outbox: Outbox
    jobs: Jobs
    provider: Provider
    counts: Stored
    told: Told
    events: list[str] = field(default_factory=list)
    now: float = START

    async def submit(
        self, *recipients: str, key: str = "j1", version: int = 1, subject: str = "cl-1"
    ) -> dict[str, Any]:
        job, _ = await self.jobs.submit(submission(*recipients, key=key, version=version, subject=subject))
        return job

    async def settle(self, steps: int = 20, seconds: float = 120) -> None:
        """Let time pass until nothing is due any more."""
        for _ in range(steps):
            await self.outbox.step()
            self.now += seconds

    async def states(self, job_id: str) -> list[str]:
        return [one["state"] for one in (await self.jobs.get(job_id))["deliveries"]]

    async def state(self, job_id: str) -> str:
        return str((await self.jobs.get(job_id))["state"])


def submission(
    *recipients: str, key: str = "j1", version: int = 1, subject: str = "cl-1", **changed: Any
) -> Submission:
    wanted = [
        Wanted(
            recipient,
            "mail",
            "POST",
            f"https://mail.test/send?to={recipient}",
            [(b"Authorization", b"Bearer canary"), (b"X-Odd", b"caf\xe9")],
            changed.get("body", b"hello canary"),
        )
        for recipient in recipients
    ]
    return Submission(key, subject, wanted, version)


@asynccontextmanager
async def outbox_in(
    directory: Path,
    *,
    reconcile: bool = False,
    honours: bool = False,
    provider_honours: bool | None = None,
    rules: dict[str, Any] | None = None,
    provider: Provider | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    keys, counts, told, given = load_keyring(directory, None), Stored(), Told(), provider or Provider()
    given.honours = honours
    terms = Terms(
        Rules.model_validate({**({"reconcile": RECONCILE} if reconcile else {}), **(rules or {})}),
        Idempotency(provider_honours=honours or provider_honours),
    )
    async with opened(directory, hooks=[keys.prove], report=told, **options) as store:

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(0.001)

        outbox = Outbox(
            store,
            keys,
            Bodies(store, keys),
            given.send,
            given.lookup,
            terms_of=lambda upstream: terms,
            counts=counts,
            on_event=lambda event, facts: rig.events.append(event),
            now=lambda: rig.now,
            sleep=sleep,
        )
        rig = Rig(store, outbox, Jobs(outbox), given, counts, told)
        yield rig
        await outbox.close()


async def sql(rig: Rig, statement: str, *parameters: Any) -> Any:
    def work(connection: sqlite3.Connection) -> Any:
        return connection.execute(statement, parameters).fetchall()

    return await rig.store.write(work)


# ---- jobs --------------------------------------------------------------------------------------------------------


async def test_a_job_is_delivered_to_every_recipient_once(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann", "bob")
        assert "in_progress" == job["state"]
        await rig.settle()
        shown = await rig.jobs.get(job["job_id"])
        assert ("succeeded", "2027-01-15T08:00:00.000Z") == (shown["state"], shown["finished_at"])
        assert {"ann": 1, "bob": 1} == rig.provider.effects
        ann = shown["deliveries"][0]
        assert ("ann", "sent", 1, "m0", "2027-01-15T08:00:00.000Z") == (
            ann["recipient"],
            ann["state"],
            ann["attempts"],
            ann["notification_id"],
            ann["notified_at"],
        )
        assert 2 == rig.counts.deliveries["mail", "delivered"]
        assert {"succeeded": 1} == {state: n for state, n in (await rig.jobs.counts()).items() if n}


async def test_the_same_idempotency_key_returns_the_first_job(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        first, new = await rig.jobs.submit(submission("ann", body=bytes(400_000)))
        assert new
        again, new = await rig.jobs.submit(submission("ann", body=bytes(400_000)))
        assert not new
        assert first["job_id"] == again["job_id"]
        assert 1 == len(os.listdir(rig.outbox.bodies.folder)), "its body was not needed again"
        assert ["ann"] == [one["recipient"] for one in again["deliveries"]]


async def test_many_submissions_at_once_are_one_job(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        found = await asyncio.gather(*(rig.jobs.submit(submission("ann")) for _ in range(50)))
        assert 1 == len({job["job_id"] for job, _ in found})
        assert 1 == sum(new for _, new in found)


async def test_the_same_intent_of_two_jobs_is_one_delivery(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        one, two = await rig.submit("ann", "bob", key="j1"), await rig.submit("bob", "cleo", key="j2")
        await rig.settle()
        assert {"ann": 1, "bob": 1, "cleo": 1} == rig.provider.effects
        assert ["succeeded"] * 2 == [await rig.state(job["job_id"]) for job in (one, two)]
        three = await rig.submit("ann", "bob", key="j3")
        assert "succeeded" == three["state"], "all of it was delivered before"


async def test_only_a_strictly_higher_version_goes_out_again(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        await rig.submit("ann", key="v3", version=3)
        await rig.settle()
        assert "succeeded" == (await rig.submit("ann", key="v3 again", version=3))["state"]
        await rig.settle()
        assert 1 == rig.provider.effects["ann"]
        with pytest.raises(NotNow, match="version 3 of 'cl-1' has succeeded already, 2 is older"):
            await rig.submit("ann", key="v2", version=2)
        await rig.submit("ann", key="v4", version=4)
        await rig.submit("ann", key="other", version=1, subject="cl-2")
        await rig.settle()
        assert 3 == rig.provider.effects["ann"]
        assert 3 == len({delivery.send_key for delivery in rig.provider.sends})


async def test_the_request_arrives_as_it_was_given(tmp_path: Path) -> None:
    large = os.urandom(400_000)
    async with outbox_in(tmp_path) as rig:
        await rig.jobs.submit(submission("ann"))
        await rig.jobs.submit(submission("bob", key="j2", body=large))
        await rig.settle()
        small, big = rig.provider.sends
        assert ("POST", "https://mail.test/send?to=ann", b"hello canary") == (small.method, small.url, small.body)
        assert [(b"Authorization", b"Bearer canary"), (b"X-Odd", b"caf\xe9")] == small.headers
        assert big.body_file is not None
        chunks = [chunk async for chunk in rig.outbox.bodies.read(big.body_file, big.host, big.send_key)]
        assert large == b"".join(chunks)
        assert small.send_key != big.send_key


async def test_neither_requests_nor_recipients_lie_readable_on_disk(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        await rig.submit("ann.personal@example.test")
    content = (tmp_path / "store.db").read_bytes()
    assert b"canary" not in content
    assert b"ann.personal" not in content


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (Submission("", "s", [Wanted("a", "u", "POST", "https://x.test/")]), "idempotency_key"),
        (Submission("k" * 201, "s", [Wanted("a", "u", "POST", "https://x.test/")]), "idempotency_key"),
        (Submission("k", "", [Wanted("a", "u", "POST", "https://x.test/")]), "subject"),
        (Submission("k", "s", []), "deliveries"),
        (Submission("k", "s", [Wanted("a", "u", "POST", "https://x.test/")], -1), "version"),
        (Submission("k", "s", [Wanted("", "u", "POST", "https://x.test/")]), r"deliveries\[0\]\.recipient"),
        (Submission("k", "s", [Wanted("a", "u", "POST", "https://x.test/")] * 2), r"deliveries\[1\]\.recipient"),
        (Submission("k", "s", [Wanted("a", "u", "POST", "/relative")]), r"deliveries\[0\]\.request\.url"),
    ],
)
async def test_a_malformed_submission_is_refused_by_name(tmp_path: Path, given: Submission, field: str) -> None:
    async with outbox_in(tmp_path) as rig:
        with pytest.raises(BadInput, match=field):
            await rig.jobs.submit(given)
        assert {} == {state: n for state, n in (await rig.jobs.counts()).items() if n}


async def test_nothing_is_promised_that_was_not_written(tmp_path: Path) -> None:
    wires = Wires()
    async with outbox_in(tmp_path, connect=wires.connect) as rig:
        wires.fail_once("COMMIT")
        with pytest.raises(NotKept):
            await rig.jobs.submit(submission("ann", body=bytes(400_000)))
        assert [] == os.listdir(rig.outbox.bodies.folder)
        while not rig.store.health.ok:
            await asyncio.sleep(0.01)
        await rig.settle()
        assert [] == rig.provider.sends


async def test_the_outbox_has_a_bound(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        store = DeadLetterStore(max_bytes=1_048_576)
        letters = DeadLetters(rig.store, rig.outbox.keyring, settings=store, registry=registry())
        jobs = Jobs(rig.outbox, letters.check_room)
        with pytest.raises(NotKept, match="let the outbox drain"):
            await jobs.submit(Submission("big", "s", [Wanted("a", "mail", "POST", "https://x.test/", body=b"x" * MIB)]))
        half = Wanted("b", "mail", "POST", "https://x.test/", body=b"x" * (MIB // 2))
        await jobs.submit(Submission("half", "s2", [half]))
        kept = Listing(letters)
        assert MIB // 2 < (await kept.refresh()).bytes < MIB
        with pytest.raises(NotKept, match="dead letters and deliveries take"):  # what the outbox has, letters have not
            await letters.keep(failed(1, body=b"x" * 600_000, body_size=600_000))


async def test_jobs_are_listed_in_pages_newest_first(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        ids = []
        for number in range(7):
            rig.now += number % 2
            ids.append((await rig.submit(f"r{number}", key=f"j{number}"))["job_id"])
        found, cursor = [], None
        while True:
            page = await rig.jobs.page(limit=2, cursor=cursor)
            found += [item["job_id"] for item in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert set(ids) == set(found)
        assert 7 == len(found)
        assert [] == (await rig.jobs.page(state="failed"))["items"]
        assert 7 == len((await rig.jobs.page(state="in_progress"))["items"])
        for wrong in ({"state": "lost"}, {"limit": 0}, {"cursor": "??"}, {"cursor": "aGVsbG8="}):
            with pytest.raises(BadInput, match=next(iter(wrong))):
                await rig.jobs.page(**wrong)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(NoSuchThing):
            await rig.jobs.get("job_unknown")


# ---- order -------------------------------------------------------------------------------------------------------


async def test_started_is_durable_before_the_send_and_one_write_marks_it_sent(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        await rig.submit("ann")

        async def look(delivery: Delivery) -> None:
            other = sqlite3.connect(f"file:{tmp_path}/store.db?mode=ro", uri=True)
            row = other.execute("SELECT state, started_at, notified_at, notification_id FROM deliveries").fetchone()
            other.close()
            assert ("sending", START, None, None) == row

        rig.provider.watch = look
        await rig.settle()
        rows = await sql(rig, "SELECT state, started_at, notified_at, notification_id, evidence FROM deliveries")
        assert [("sent", START, START, "m0", "answered 202")] == rows


async def test_nothing_is_sent_when_started_cannot_be_written(tmp_path: Path) -> None:
    wires = Wires()
    async with outbox_in(tmp_path, connect=wires.connect) as rig:
        await rig.submit("ann")
        wires.fail_once("COMMIT")
        await rig.outbox.step()
        assert [] == rig.provider.sends
        while not rig.store.health.ok:
            await asyncio.sleep(0.01)
        await rig.settle()
        assert {"ann": 1} == rig.provider.effects


async def test_a_delivery_under_way_is_not_begun_twice(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        await rig.submit("ann")
        inner: list[str] = []

        async def again(delivery: Delivery) -> None:
            assert 0 == await rig.outbox.begin_due()
            inner.append(await rig.outbox.deliver(delivery.id))

        rig.provider.watch = again
        await rig.settle()
        assert ["none"] == inner
        assert "none" == await rig.outbox.deliver(1), "it was delivered"
        assert "none" == await rig.outbox.deliver(99), "there is none"
        assert {"ann": 1} == rig.provider.effects


async def test_not_more_at_once_than_the_settings_allow(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, rules={"concurrency": 3}) as rig:
        await rig.submit(*(f"r{number}" for number in range(10)))
        running = most = 0

        async def count(delivery: Delivery) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.002)
            running -= 1

        rig.provider.watch = count
        for _ in range(6):
            await rig.outbox.step()
        assert 3 == most
        assert 10 == len(rig.provider.sends)


# ---- the failure matrix ------------------------------------------------------------------------------------------


async def test_what_was_not_sent_goes_again_after_its_backoff(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [NOT_SENT, NOT_SENT, NOT_SENT]
        waits = []
        for _ in range(3):
            await rig.outbox.step()
            assert "retryable_failed" == await rig.state(job["job_id"])
            ((next_at,),) = await sql(rig, "SELECT next_at FROM deliveries")
            waits.append(next_at - rig.now)
            assert 0 == await rig.outbox.step(), "not yet"
            rig.now = next_at
        assert [1.0, 2.0, 4.0] == waits
        await rig.settle()
        assert ("succeeded", {"ann": 1}) == (await rig.state(job["job_id"]), rig.provider.effects)


async def test_sent_but_the_answer_was_lost_is_looked_up_and_not_sent_again(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, reconcile=True) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [rig.provider.accept_and_lose]
        await rig.settle()
        assert ("succeeded", {"ann": 1}, 1) == (
            await rig.state(job["job_id"]),
            rig.provider.effects,
            rig.provider.asked,
        )
        assert 1 == rig.counts.deliveries["mail", "reconciled"]
        ((notification_id, evidence),) = await sql(rig, "SELECT notification_id, evidence FROM deliveries")
        assert ("m0", "found it") == (notification_id, evidence)


async def test_lost_before_it_arrived_is_looked_up_and_sent_again(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, reconcile=True) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [LOST]
        await rig.outbox.step()
        shown = (await rig.jobs.get(job["job_id"]))["deliveries"][0]
        assert ("reconcile", "NETWORK_TIMEOUT: no answer, token=REDACTED") == (shown["state"], shown["last_error"])
        await rig.settle()
        assert ("succeeded", {"ann": 1}, 1) == (
            await rig.state(job["job_id"]),
            rig.provider.effects,
            rig.provider.asked,
        )


async def test_an_honoured_key_is_sent_again_without_a_lookup(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, honours=True) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [rig.provider.accept_and_lose]
        await rig.settle()
        assert ("succeeded", {"ann": 1}, 2) == (
            await rig.state(job["job_id"]),
            rig.provider.effects,
            len(rig.provider.sends),
        )
        assert 1 == len({delivery.send_key for delivery in rig.provider.sends})


@pytest.mark.parametrize(("says", "state", "sends"), [(None, "succeeded", 2), (False, "unknown", 1)])
async def test_the_key_of_the_app_itself_is_honoured_unless_it_is_denied(
    tmp_path: Path, says: bool | None, state: str, sends: int
) -> None:
    async with outbox_in(tmp_path, provider_honours=says) as rig:
        asked = submission("ann")
        asked.deliveries[0].headers.append((b"idempotency-key", b"order-7"))
        job, _ = await rig.jobs.submit(asked)
        rig.provider.script = [LOST]
        await rig.settle()
        assert (state, sends) == (await rig.state(job["job_id"]), len(rig.provider.sends))


async def test_another_request_for_the_same_intent_is_refused_whatever_the_key(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann")
        assert job["job_id"] == (await rig.submit("ann"))["job_id"]
        for key in ("j1", "j2"):
            with pytest.raises(OtherPayload, match="another request"):
                await rig.jobs.submit(submission("ann", key=key, body=b"something else"))
        with pytest.raises(OtherPayload):
            await rig.jobs.submit(submission("ann", "bob"))
        await rig.settle()
        assert {"ann": 1} == rig.provider.effects


async def test_a_key_the_provider_has_forgotten_is_not_relied_on(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, honours=True) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [LOST]
        await rig.outbox.step()
        rig.now += 86_401
        await rig.settle()
        assert ("unknown", 1) == (await rig.state(job["job_id"]), len(rig.provider.sends))


async def test_without_lookup_or_honoured_key_an_operator_decides(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann", "bob")
        rig.provider.script = [rig.provider.accept_and_lose, LOST]
        await rig.settle()
        assert ("unknown", 2) == (await rig.state(job["job_id"]), len(rig.provider.sends))
        ann, bob = (one["delivery_id"] for one in (await rig.jobs.get(job["job_id"]))["deliveries"])
        with pytest.raises(BadInput, match="reason"):
            await rig.jobs.resolve(job["job_id"], ann, "op", " ", delivered=True)
        with pytest.raises(NoSuchThing):
            await rig.jobs.resolve(job["job_id"], 99, "op", "x", delivered=True)
        await rig.jobs.resolve(job["job_id"], ann, "op", "seen in their log", delivered=True, notification_id="m0")
        await rig.jobs.resolve(job["job_id"], bob, "op", "not in their log", delivered=False)
        with pytest.raises(NotNow, match="is sent"):
            await rig.jobs.resolve(job["job_id"], ann, "op", "again", delivered=False)
        await rig.settle()
        assert ("succeeded", {"ann": 1, "bob": 1}) == (await rig.state(job["job_id"]), rig.provider.effects)


async def test_a_refusal_is_failed_only_after_the_provider_was_asked(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, reconcile=True) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [REFUSED]
        await rig.settle()
        assert ("failed", 1) == (await rig.state(job["job_id"]), rig.provider.asked)
        assert 1 == rig.counts.deliveries["mail", "failed"]
        assert ["failed"] == await rig.states(job["job_id"])


async def test_a_refusal_without_doubt_or_lookup_is_failed_at_once(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [REFUSED]
        await rig.settle()
        assert ("failed", 1) == (await rig.state(job["job_id"]), rig.counts.deliveries["mail", "failed"])


async def test_a_provider_that_never_says_ends_with_an_operator(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, reconcile=True, rules={"max_lookups": 3}) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [LOST]
        rig.provider.lookups = [Found(None, message="503"), RuntimeError("broken"), Found(None)]
        await rig.settle()
        assert ("unknown", 3) == (await rig.state(job["job_id"]), rig.provider.asked)
        assert 1 == len(rig.provider.sends)


async def test_attempts_are_bounded(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, rules={"max_attempts": 3}) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [NOT_SENT] * 10
        await rig.settle()
        assert ("failed", 3) == (await rig.state(job["job_id"]), len(rig.provider.sends))


async def test_what_the_sidecar_held_back_is_no_attempt(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, rules={"max_attempts": 2}) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [Sent(ok=False, code="CIRCUIT_OPEN", held_back=True)] * 5
        await rig.settle()
        shown = (await rig.jobs.get(job["job_id"]))["deliveries"][0]
        assert ("sent", 1) == (shown["state"], shown["attempts"])


async def test_what_is_held_back_again_and_again_is_tried_less_and_less_often(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        waits: list[int] = []
        rig.outbox._delay = lambda upstream, code, tried, asked: waits.append(tried) or 1.0  # type: ignore[func-returns-value]
        rig.provider.script = [Sent(ok=False, code="EGRESS_DENIED", held_back=True)] * 4 + [NOT_SENT]
        job = await rig.submit("ann")
        await rig.settle()
        assert ("succeeded", [1, 2, 3, 4, 1]) == (await rig.state(job["job_id"]), waits[:5])


async def test_an_exception_of_our_own_counts_as_maybe_sent(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann")
        rig.provider.script = [RuntimeError("our mistake")]
        await rig.settle()
        assert ("unknown", 1) == (await rig.state(job["job_id"]), len(rig.provider.sends))


async def test_sent_but_the_write_failed_is_written_when_the_disk_works_again(tmp_path: Path) -> None:
    wires = Wires()
    async with outbox_in(tmp_path, connect=wires.connect) as rig:
        job = await rig.submit("ann")
        broken_for = [3]

        def broken(statement: str) -> None:
            if statement == "COMMIT" and broken_for[0] > 0:
                broken_for[0] -= 1
                raise disk_error()

        async def break_disk(delivery: Delivery) -> None:
            wires.before = broken

        rig.provider.watch = break_disk
        await rig.settle()
        assert ("succeeded", {"ann": 1}, 0) == (await rig.state(job["job_id"]), rig.provider.effects, broken_for[0])


@pytest.mark.parametrize(
    ("options", "state", "effects", "sends"),
    [
        ({"reconcile": True}, "succeeded", 1, 0),
        ({"honours": True}, "succeeded", 1, 1),
        ({}, "unknown", 1, 0),
    ],
)
async def test_sent_and_killed_before_the_write_is_reconciled_by_the_next_run(
    tmp_path: Path, options: dict[str, Any], state: str, effects: int, sends: int
) -> None:
    provider = Provider()
    async with outbox_in(tmp_path, provider=provider, **options) as rig:
        job = await rig.submit("ann")

        async def cut(delivery: Delivery) -> None:
            provider.accept(delivery)
            await asyncio.sleep(60)

        provider.watch = cut
        await rig.outbox.begin_due()
        while not provider.sends:
            await asyncio.sleep(0.001)
        await rig.outbox.close()
    provider.watch = None
    provider.sends.clear()
    async with outbox_in(tmp_path, provider=provider, **options) as rig:
        assert {"cut_off": 1, "unproven": 0} == await rig.outbox.recover()
        await rig.settle()
        assert (state, effects, sends) == (await rig.state(job["job_id"]), provider.effects["ann"], len(provider.sends))


async def test_killed_before_the_send_goes_out_once(tmp_path: Path) -> None:
    provider = Provider()
    async with outbox_in(tmp_path, provider=provider, reconcile=True) as rig:
        job = await rig.submit("ann")
        await sql(rig, "UPDATE deliveries SET state = 'sending', boot = 'dead', started_at = 1.0, next_at = NULL")
    async with outbox_in(tmp_path, provider=provider, reconcile=True) as rig:
        await rig.outbox.recover()
        assert "retryable_failed" == await rig.state(job["job_id"])
        await rig.settle()
        assert ("succeeded", {"ann": 1}) == (await rig.state(job["job_id"]), provider.effects)


async def test_marked_without_being_sent_is_repaired_and_alerted(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, reconcile=True) as rig:
        job = await rig.submit("ann")
        await sql(rig, "UPDATE deliveries SET state = 'sent', notified_at = 5.0, notification_id = 'x', next_at = NULL")
        assert {"cut_off": 0, "unproven": 1} == await rig.outbox.recover()
        await rig.settle()
        assert ("succeeded", {"ann": 1}) == (await rig.state(job["job_id"]), rig.provider.effects)
        assert (1, ["outbox_order_violated"]) == (rig.counts.violations["mail"], rig.events)


async def test_marked_without_proof_but_delivered_gets_its_proof(tmp_path: Path) -> None:
    async with outbox_in(tmp_path, reconcile=True) as rig:
        job = await rig.submit("ann")
        await rig.settle(1)
        await sql(rig, "UPDATE deliveries SET evidence = NULL")
        await rig.outbox.recover()
        await rig.settle()
        assert ("succeeded", {"ann": 1}) == (await rig.state(job["job_id"]), rig.provider.effects)
        assert {"cut_off": 0, "unproven": 0} == await rig.outbox.recover()


async def test_marked_without_proof_and_nobody_to_ask_waits_for_an_operator(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann")
        await sql(rig, "UPDATE deliveries SET state = 'sent', notified_at = 5.0, next_at = NULL")
        await rig.outbox.recover()
        await rig.settle()
        assert ("unknown", []) == (await rig.state(job["job_id"]), rig.provider.sends)
        assert 1 == rig.counts.violations["mail"]


# ---- the rest ----------------------------------------------------------------------------------------------------


async def test_a_damaged_request_is_not_sent(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        job = await rig.submit("ann")
        await sql(rig, "UPDATE deliveries SET request = zeroblob(80)")
        await rig.settle()
        assert ("unknown", []) == (await rig.state(job["job_id"]), rig.provider.sends)
        assert "(damaged)" == (await rig.jobs.get(job["job_id"]))["deliveries"][0]["recipient"]
        assert "an operator decides" in rig.told.sentence("sidecar.outbox.damaged")


async def test_finished_jobs_are_forgotten_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.outbox._PER_SWEEP", 1)
    async with outbox_in(tmp_path) as rig:
        await rig.jobs.submit(submission("ann", "bob", body=bytes(400_000)))
        await rig.jobs.submit(submission("bob", "cleo", key="j2", body=bytes(400_000)))
        await rig.settle(3)
        rig.provider.script = [NOT_SENT] * 50
        waiting = await rig.submit("dora", key="j3")
        assert 0 == await rig.outbox.sweep(keep=1000)
        rig.now += 10_000
        assert 2 == await rig.outbox.sweep(keep=1000)
        assert [waiting["job_id"]] == [item["job_id"] for item in (await rig.jobs.page())["items"]]
        assert [] == os.listdir(rig.outbox.bodies.folder)
        assert [(1,)] == await sql(rig, "SELECT count(*) FROM deliveries")


async def test_the_worker_runs_by_itself_and_survives_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.outbox._POLL", 0.01)
    async with outbox_in(tmp_path) as rig:
        rig.outbox.start()
        job = await rig.submit("ann", "bob")
        while "succeeded" != await rig.state(job["job_id"]):
            await asyncio.sleep(0.005)
        original = rig.store.read

        async def broken(work: Any) -> Any:
            raise NotKept("disk_error", "broken")

        monkeypatch.setattr(rig.store, "read", broken)
        await asyncio.sleep(0.05)
        monkeypatch.setattr(rig.store, "read", original)
        job = await rig.submit("cleo", key="j2")
        while "succeeded" != await rig.state(job["job_id"]):
            await asyncio.sleep(0.005)
        assert {"ann": 1, "bob": 1, "cleo": 1} == rig.provider.effects


async def test_a_full_house_starts_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.durable.outbox._AT_ONCE", 1)
    async with outbox_in(tmp_path) as rig:
        await rig.submit("ann", "bob")
        gate = asyncio.Event()

        async def wait(delivery: Delivery) -> None:
            await gate.wait()

        rig.provider.watch = wait
        assert 1 == await rig.outbox.begin_due()
        assert 0 == await rig.outbox.begin_due()
        gate.set()
        await rig.settle()
        assert {"ann": 1, "bob": 1} == rig.provider.effects


# ---- what the provider says --------------------------------------------------------------------------------------


async def test_the_provider_is_left_alone_for_as_long_as_it_asks(tmp_path: Path) -> None:
    busy = Sent(ok=False, code="RATE_LIMIT_EXCEEDED", status=429, retry_after=90.0)
    async with outbox_in(tmp_path) as rig:
        rig.provider.script = [busy]
        await rig.submit("ann")
        await rig.outbox.step()
        assert START + 90.0 == (await sql(rig, "SELECT next_at FROM deliveries"))[0][0]


async def test_a_lookup_by_the_providers_id_is_made_once_it_has_named_one(tmp_path: Path) -> None:
    rules = {"reconcile": {"url": "https://mail.test/messages/{notification_id}"}}
    half = Sent(ok=False, code="UPSTREAM_ERROR", status=500, notification_id="m-7")
    asked: list[str | None] = []

    async with outbox_in(tmp_path, rules=rules) as rig:

        async def lookup(delivery: Delivery) -> Found:
            asked.append(delivery.notification_id)
            return Found(True)

        rig.outbox._lookup = lookup
        rig.provider.script = [half, LOST]
        named, unnamed = await rig.submit("ann", key="a"), await rig.submit("bob", key="b", subject="cl-2")
        await rig.settle()
        assert ["m-7"] == asked
        assert "succeeded" == await rig.state(named["job_id"])
        (delivery,) = (await rig.jobs.get(named["job_id"]))["deliveries"]
        assert ("sent", "m-7", 1) == (delivery["state"], delivery["notification_id"], delivery["attempts"])
        assert "unknown" == await rig.state(unnamed["job_id"])


async def test_what_the_provider_said_last_can_be_read_and_is_sealed(tmp_path: Path) -> None:
    said = Answer(200, [(b"Content-Type", b"text/plain"), (b"Set-Cookie", b"canary=1")], b"canary says hello")
    async with outbox_in(tmp_path, rules={"max_response_bytes": 6}) as rig:
        rig.provider.script = [
            Sent(ok=False, code="RATE_LIMIT_EXCEEDED", status=429, answer=Answer(429, [], b"\xff")),
            Sent(ok=True, status=200, answer=said, answer_size=17),
        ]
        job = await rig.submit("ann")
        assert None is (await rig.jobs.result(job["job_id"]))["results"][0]["answer"]
        await rig.outbox.step()
        assert "/w==" == (await rig.jobs.result(job["job_id"]))["results"][0]["answer"]["body_base64"]
        await rig.settle()
        found = await rig.jobs.result(job["job_id"])
        assert {
            "status": 200,
            "headers": [["Content-Type", "text/plain"]],
            "body_bytes": 17,
            "complete": False,
            "body": "canary",
        } == found["results"][0]["answer"]
        (size, kept), *_ = await sql(rig, "SELECT size, answer FROM deliveries")
        assert b"canary" not in kept
        assert [(1, size)] == await sql(rig, "SELECT n, bytes FROM totals WHERE name = 'deliveries'")
    with pytest.raises(NoSuchThing):
        async with outbox_in(tmp_path) as rig:
            await rig.jobs.result("job_0")


async def test_a_full_disk_costs_the_answer_and_not_the_fate_of_a_delivery(tmp_path: Path) -> None:
    wires = Wires()
    async with outbox_in(tmp_path, connect=wires.connect) as rig:
        job = await rig.submit("ann")

        async def accept(delivery: Delivery) -> Sent:
            wires.fail_once("COMMIT", sqlite3.SQLITE_FULL)
            return Sent(ok=True, status=200, answer=Answer(200, [], b"hello"))

        rig.outbox._send = accept
        await rig.settle()
        assert "succeeded" == await rig.state(job["job_id"])
        assert None is (await rig.jobs.result(job["job_id"]))["results"][0]["answer"]


@pytest.mark.parametrize(("expected", "rules"), [("unknown", {}), ("succeeded", {"unknown": "resend"})])
async def test_a_delivery_of_unknown_fate_waits_for_somebody_or_is_sent_again_as_the_settings_say(
    tmp_path: Path, expected: str, rules: dict[str, Any]
) -> None:
    async with outbox_in(tmp_path, rules=rules) as rig:
        rig.provider.script = [LOST, LOST]
        job = await rig.submit("ann")
        await rig.settle()
        assert expected == await rig.state(job["job_id"])
        assert (3 if rules else 1) == len(rig.provider.sends)
        assert (["outbox_gave_up"] if not rules else []) == rig.events
        assert int(not rules) == rig.counts.deliveries["mail", "unknown"]


async def test_a_list_says_what_each_job_is_about_without_its_secrets(tmp_path: Path) -> None:
    async with outbox_in(tmp_path) as rig:
        rig.outbox.terms_of = lambda upstream: Terms(Rules(), Idempotency(), Redactor(("to",)))
        await rig.submit("ann", "bob")
        (item,) = (await rig.jobs.page())["items"]
        assert ("mail", "POST", "https://mail.test/send?to=REDACTED", 2) == (
            item["upstream"],
            item["method"],
            item["url"],
            item["delivery_count"],
        )
        shown = (await rig.jobs.get(item["job_id"]))["deliveries"]
        assert ["https://mail.test/send?to=REDACTED"] * 2 == [one["url"] for one in shown]
