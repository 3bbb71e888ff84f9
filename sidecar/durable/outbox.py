"""The outbox: requests that are taken over, and delivered until they have arrived or somebody must decide.

Law: rows first, sends later. For every delivery in exactly this order: `started_at` synced → send under the derived
key → one write with notified_at, notification_id and evidence. Whatever may have been sent is looked up before it is
sent again (the rules are in delivery.py). Survives a kill between any two lines.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from config.durable import Outbox as Rules
from config.idempotency import Idempotency
from sidecar import clock
from sidecar.durable import outbox_rows
from sidecar.durable.bodies import Bodies
from sidecar.durable.delivery import Found, Means, Next, Sent, after_lookup, after_send, first_step, patient_delay
from sidecar.durable.outbox_rows import Delivery, Row
from sidecar.durable.seal import Keyring
from sidecar.durable.store import Store
from sidecar.durable.trouble import Damaged, NotKept, Trouble
from sidecar.policy.resend import APP_KEY, INJECTED_KEY, honoured
from telemetry.metrics import Stored
from telemetry.redact import Redactor

Send = Callable[[Delivery], Awaitable[Sent]]
Lookup = Callable[[Delivery], Awaitable[Found]]
Event = Callable[[str, dict[str, object]], None]
Delay = Callable[[str, str, int, "float | None"], float]
"""Upstream, error code, failures in a row, what the provider asked for → seconds to wait."""

_AT_ONCE = 64
_POLL = 0.5
_PER_SWEEP = 200
_WRITE_AGAIN = 0.5


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of one upstream that matter here."""

    outbox: Rules
    idempotency: Idempotency
    redactor: Redactor = field(default_factory=Redactor)


DEFAULT_TERMS = Terms(Rules(), Idempotency())


def _quiet(event: str, facts: dict[str, object]) -> None:
    """Nobody listens."""


def _patient(upstream: str, code: str, failures: int, retry_after: float | None) -> float:
    return max(patient_delay(failures), retry_after or 0.0)


@dataclass(slots=True)
class _End:
    """How one send or lookup ended, and what follows."""

    following: Next
    message: str
    code: str = ""
    notification_id: str | None = None
    evidence: str | None = None
    retry_after: float | None = None
    answer: bytes | None = None
    """What the provider said, sealed."""


class Outbox:
    """The worker. How jobs get in and are looked at is in jobs.py."""

    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        bodies: Bodies,
        send: Send,
        lookup: Lookup,
        *,
        terms_of: Callable[[str], Terms] = lambda upstream: DEFAULT_TERMS,
        delay: Delay = _patient,
        counts: Stored | None = None,
        on_event: Event = _quiet,
        redactor: Redactor | None = None,
        now: Callable[[], float] = clock.steady,
        sleep: Callable[[float], Awaitable[None]] = clock.sleep,
    ) -> None:
        self.store = store
        self.keyring = keyring
        self.bodies = bodies
        self._send = send
        self._lookup = lookup
        self.terms_of = terms_of
        self._delay = delay
        self._held_back: dict[int, int] = {}
        """How often in a row by delivery: no attempts, but what is refused for long is not tried every second."""
        self.counts = counts or Stored()
        self._on_event = on_event
        self._redactor = redactor or Redactor()
        self.now = now
        self._sleep = sleep
        self._under_way: dict[int, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._settling: set[asyncio.Task[list[str]]] = set()
        self._draining = False
        self._closing = False

    # ---- the worker ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._runner = clock.spawn(self._run(), "outbox")

    def wake(self) -> None:
        """There is something new to deliver."""
        self._wake.set()

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                await self.begin_due()
            except Trouble:
                pass  # the store says so itself; the rows are still there later
            except Exception as error:  # deliveries must not stop for good
                self.store.fault("the outbox failed, and goes on", error)
            try:
                async with asyncio.timeout(_POLL):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def begin_due(self) -> int:
        """Start what is due and fits. Returns how many were started."""
        if self._draining or len(self._under_way) >= _AT_ONCE:
            return 0
        due = await self.store.read(
            lambda connection: connection.execute(
                "SELECT id, upstream FROM deliveries WHERE next_at <= ? ORDER BY next_at LIMIT 1000", (self.now(),)
            ).fetchall()
        )
        started = 0
        busy = Counter(self._under_way.values())
        for delivery, upstream in due:
            free = len(self._under_way) < _AT_ONCE and busy[upstream] < self.terms_of(upstream).outbox.concurrency
            if free and delivery not in self._under_way:
                self._under_way[delivery] = upstream
                busy[upstream] += 1
                task = clock.spawn(self._one(delivery), f"delivery {delivery}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                started += 1
        return started

    async def step(self) -> int:
        """Start what is due and wait for it; for tests and for draining."""
        started = await self.begin_due()
        while self._tasks:
            await asyncio.gather(*self._tasks)
        return started

    async def _one(self, delivery: int) -> None:
        try:
            await self.deliver(delivery)
        except Trouble:
            pass  # not claimed, or not settled: the row is found again
        finally:
            self._under_way.pop(delivery, None)
            self._wake.set()

    # ---- one delivery --------------------------------------------------------------------------------------------

    async def deliver(self, delivery: int) -> str:
        """Whatever is next for it. Returns the state it is in afterwards."""
        begun = await self.store.write(lambda connection: self._begin(connection, delivery))
        if begun is None:
            return "none"
        step, row = begun
        try:
            opened = await self.store.in_thread(lambda: outbox_rows.opened(self.keyring, row))
        except Damaged as damaged:
            ended = _End(Next("unknown", "never", started=row.started_at is not None), damaged.message)
            await self._finish(row, ended, "delivered")
            self.store.report("sidecar.outbox.damaged", f"delivery {delivery}: {damaged.message}; an operator decides")
            return "unknown"
        if step == "send":
            return await self._deliver_by_sending(row, opened)
        return await self._reconcile(row, opened)

    def _begin(self, connection: sqlite3.Connection, delivery: int) -> tuple[str, Row] | None:
        """Read the row again, decide, and mark it; what is read here is what counts."""
        row = outbox_rows.load(connection, delivery)
        if row is None or row.boot == self.store.boot_id:
            return None
        step = first_step(row.facts(), self._means(row))
        if step == "none":
            connection.execute("UPDATE deliveries SET next_at = NULL WHERE id = ?", (delivery,))
            return None
        state = "sending" if step == "send" else "reconcile"
        outbox_rows.begin(connection, row, self.store.boot_id, state, self.now())
        marked = outbox_rows.load(connection, delivery)
        assert marked is not None
        return step, marked

    def _means(self, row: Row, notification_id: str | None = None) -> Means:
        terms = self.terms_of(row.upstream)
        rule, first = terms.outbox.reconcile, row.first_started_at
        in_window = first is None or self.now() - first < terms.idempotency.provider_window
        return Means(
            lookup=rule is not None and not (rule.by_id and (notification_id or row.notification_id) is None),
            key_honoured=in_window and honoured(APP_KEY if row.own_key else INJECTED_KEY, terms.idempotency),
            max_attempts=terms.outbox.max_attempts,
            max_lookups=terms.outbox.max_lookups,
            resend=terms.outbox.unknown == "resend",
        )

    async def _deliver_by_sending(self, row: Row, delivery: Delivery) -> str:
        try:
            sent = await self._send(delivery)
        except asyncio.CancelledError:
            raise  # started, and nothing known: reconciled by the next run
        except Exception as error:  # our own fault: it may have been sent
            sent = Sent(ok=False, code="SIDECAR_INTERNAL", message=f"{type(error).__name__}: {error}")
        following = after_send(row.facts(), sent, self._means(row, sent.notification_id))
        if sent.held_back:
            row = replace(row, attempts=row.attempts - 1)
            self._held_back[row.id] = self._held_back.get(row.id, 0) + 1
        else:
            self._held_back.pop(row.id, None)
        ended = _End(
            following,
            code=sent.code,
            message=f"{sent.code}: {sent.message}",
            notification_id=sent.notification_id,
            evidence=sent.evidence or (f"answered {sent.status}" if sent.status else None),
            retry_after=sent.retry_after,
            answer=await self._sealed_answer(row, sent),
        )
        await self._finish(row, ended, "delivered")
        return following.state

    async def _sealed_answer(self, row: Row, sent: Sent) -> bytes | None:
        answer, most = sent.answer, self.terms_of(row.upstream).outbox.max_response_bytes
        if answer is None:
            return None
        return await self.store.in_thread(
            lambda: outbox_rows.sealed_answer(self.keyring, row, answer, sent.answer_size, most)
        )

    async def _reconcile(self, row: Row, delivery: Delivery) -> str:
        violated = row.notified_at is not None
        found: Found | None = None
        if self._means(row).lookup:
            try:
                found = await self._lookup(delivery)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # not knowing is an answer as well
                found = Found(None, message=f"{type(error).__name__}: {error}")
        following = after_lookup(row.facts(), found, self._means(row))
        given = found or Found(None, message=self._why_not_asked(row))
        ended = _End(
            following,
            message=given.message,
            notification_id=given.notification_id,
            evidence=given.evidence,
            retry_after=given.retry_after,
        )
        await self._finish(row, ended, "reconciled")
        if violated and row.lookups == 1:
            self.counts.order_violated(row.upstream)
            self._on_event("outbox_order_violated", {"delivery": row.id, "upstream": row.upstream})
        return following.state

    def _why_not_asked(self, row: Row) -> str:
        if self.terms_of(row.upstream).outbox.reconcile is None:
            return "there is no lookup for this upstream (`outbox.reconcile`)"
        return "the lookup needs the provider's own id (`{notification_id}`), and it has named none"

    async def _finish(self, row: Row, ended: _End, good: str) -> None:
        """Until it is written: only a crash leaves a row that has to be reconciled. `good` is what it counts as when
        the provider has it."""
        following = ended.following
        tried = max(1, row.attempts + row.lookups + self._held_back.get(row.id, 0))
        pause = {
            "now": 0.0,
            "later": self._delay(row.upstream, ended.code, tried, ended.retry_after),
            "never": None,
        }[following.again]
        error = self._redactor.clauses(ended.message)[:2000]

        def work(connection: sqlite3.Connection) -> list[str]:
            now = self.now()
            connection.execute("UPDATE deliveries SET attempts = ? WHERE id = ?", (row.attempts, row.id))
            outbox_rows.end(
                connection,
                row,
                following,
                now=now,
                next_at=None if pause is None else now + pause,
                error=error,
                notification_id=ended.notification_id,
                evidence=ended.evidence,
            )
            if ended.answer is not None:
                outbox_rows.keep_answer(connection, row.id, ended.answer)
            return outbox_rows.jobs_of(connection, row.id)

        settling = clock.spawn(self._until_written(work, ended), "settle a delivery")
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        jobs = await asyncio.shield(settling)
        if following.state == "sent":
            self.counts.delivered(row.upstream, good)
        elif following.state in ("failed", "unknown"):
            self.counts.delivered(row.upstream, following.state)
            told = {"delivery": row.id, "upstream": row.upstream, "state": following.state, "error": error}
            self._on_event("outbox_gave_up", {**told, "job_id": jobs[0] if jobs else ""})

    async def _until_written(self, work: Callable[[sqlite3.Connection], list[str]], ended: _End) -> list[str]:
        while True:
            try:
                return await self.store.write(work)
            except NotKept:
                if self._closing or not self.store.running:
                    raise
            ended.answer = None  # where there is no room, the fate of a delivery goes before what was said about it
            await self._sleep(_WRITE_AGAIN)

    # ---- start and end -------------------------------------------------------------------------------------------

    async def recover(self) -> dict[str, int]:
        """After a start: what an earlier run had under way is reconciled, and so is what was marked without proof."""

        def work(connection: sqlite3.Connection) -> dict[str, int]:
            now = self.now()
            cut_off = connection.execute(
                "UPDATE deliveries SET boot = NULL, next_at = ?, state = CASE WHEN started_at IS NULL AND "
                "notified_at IS NULL THEN 'queued' ELSE 'reconcile' END WHERE boot IS NOT NULL AND boot <> ?",
                (now, self.store.boot_id),
            ).rowcount
            unproven = connection.execute(
                "UPDATE deliveries SET state = 'reconcile', lookups = 0, next_at = ? "
                "WHERE notified_at IS NOT NULL AND evidence IS NULL AND boot IS NULL",
                (now,),
            ).rowcount
            touched = "SELECT DISTINCT job_id FROM job_deliveries JOIN deliveries ON id = delivery WHERE next_at = ?"
            for (job_id,) in connection.execute(touched, (now,)).fetchall():
                outbox_rows.settle_job(connection, job_id, now)
            return {"cut_off": cut_off, "unproven": unproven}

        return await self.store.write(work)

    async def sweep(self, keep: float) -> int:
        """Forget jobs that ended longer than `keep` seconds ago."""
        before, removed = self.now() - keep, 0
        while True:
            some, files = await self.store.write(
                lambda connection: outbox_rows.remove_finished(connection, before, _PER_SWEEP)
            )
            await self.bodies.remove(files)
            removed += some
            if some < _PER_SWEEP:
                return removed

    def drain(self) -> None:
        """No more deliveries are begun; those that are due wait for the next run."""
        self._draining = True

    async def close(self) -> None:
        """Stop at once: what is under way stays started, and is reconciled by the next run. How a delivery ended that
        has ended is written first."""
        self._closing = True
        self._wake.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._settling, return_exceptions=True)
        if self._runner is not None:
            await self._runner
