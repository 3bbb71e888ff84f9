"""Sending dead letters again: one, or many as a job with a rate, a ramp and a limit, below live traffic.

Law: claim (durable) → send → settle (durable), and nothing is sent outside of that. How an entry is sent is not known
here: `send` is given, and goes through the same breaker, policy and egress checks as live calls. Entries of one key
go out in the order they failed, one at a time; one that fails does not hold up the others. A job waits while live
calls of its upstream wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from sidecar import clock
from sidecar.durable.attempts import Attempts, Event, Send, quiet
from sidecar.durable.claims import Claims, Settled
from sidecar.durable.deadletter import DeadLetters
from sidecar.durable.entry import Entry
from sidecar.durable.filters import Filter
from sidecar.durable.listing import Listing
from sidecar.durable.ramp import Ramp
from sidecar.durable.replay_job import AUTOMATIC, ENDED, Job, Order
from sidecar.durable.replay_shelf import Shelf
from sidecar.durable.trouble import NotNow, Trouble
from sidecar.durable.workflow import Ask, Refusal, needs_remediation, refuse_replay

_PAGE = 200
_LIVE_PAUSE = 0.05
_BREAKER_PAUSE = 0.25
_AGAIN_AFTER = 1.0
_STOPPED = "the sidecar was stopped"


class Replayer:
    """`send` raises nothing it can help; whatever it raises counts as sent without an answer. `stages` are those of
    workflows in their order, asked for each time: they may have changed."""

    def __init__(
        self,
        letters: DeadLetters,
        listing: Listing,
        send: Send,
        *,
        live_waiting: Callable[[str], bool] = lambda upstream: False,
        refuses: Callable[[str], bool] = lambda upstream: False,
        on_event: Event = quiet,
        stages: Callable[[], Iterable[str]] = tuple,
        sleep: Callable[[float], Awaitable[None]] = clock.sleep,
        monotonic: Callable[[], float] = clock.monotonic,
    ) -> None:
        self._letters = letters
        self._listing = listing
        self._attempts = Attempts(letters, send, on_event, sleep)
        self._live_waiting = live_waiting
        self._refuses = refuses
        self._drained_at: dict[str, float] = {}
        self._stages = stages
        self._sleep = sleep
        self._monotonic = monotonic
        self._claims = Claims(letters)
        self._shelf = Shelf(letters.store)
        self.jobs, self.job = self._shelf.jobs, self._shelf.job
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._draining = False

    # ---- one -----------------------------------------------------------------------------------------------------

    async def one(self, dlq_id: str, by: str, *, force: bool = False, reason: str = "") -> Settled:
        """Raises NotNow when the rules say no."""
        found = await self._attempts.make(dlq_id, "single", Ask(force=force, reason=reason), by)
        if isinstance(found, Refusal):
            raise NotNow(f"{dlq_id}: {found.why}", found.what_to_do)
        return found

    # ---- many ----------------------------------------------------------------------------------------------------

    async def dry_run(self, order: Order) -> dict[str, Any]:
        """What would happen, without anything happening: counts by verdict, and reasons against the first entries.
        `would_replay` leaves these out; later ones may be refused as well."""
        order.check()
        verdicts = await self._listing.count(self._candidates(order, every_verdict=True))
        page = await self._listing.page(self._candidates(order), limit=_PAGE, oldest_first=True)
        reasons: dict[str, int] = {}
        sample: list[str] = []
        going = sum(verdicts.values()) if order.force else verdicts.get("safe", 0)
        going = going if order.limit is None else min(going, order.limit)
        for entry in page.items[: order.limit]:  # what is skipped counts towards the limit
            view, rules = self._letters.view(entry), self._letters.terms_of(entry.upstream).replay
            refusal = refuse_replay(view, rules, order.ask)
            if refusal is not None:
                word = "remediation" if needs_remediation(view, rules) else view.verdict
                reasons[word] = reasons.get(word, 0) + 1
                going -= order.force or view.verdict == "safe"
            elif len(sample) < 10:
                sample.append(entry.dlq_id)
        return {
            "by_verdict": verdicts,
            "would_replay": max(0, going),
            "stop_after": order.stop_after,
            "refused_in_first_page": reasons,
            "first": sample,
        }

    def _candidates(self, order: Order, *, every_verdict: bool = False) -> Filter:
        statuses = ("pending", "failed") if order.force else ("pending",)
        wanted = replace(
            order.wanted, status=tuple(word for word in statuses if word in (order.wanted.status or statuses))
        )
        if not wanted.status:
            raise NotNow("only pending entries are replayed (and failed ones, when forced)", "change the filter")
        if not every_verdict and not order.force and not wanted.verdict:
            wanted = replace(wanted, verdict=("safe",))
        return wanted

    async def start(self, order: Order) -> Job:
        order.check()
        wanted = self._candidates(order)
        total = sum((await self._listing.count(wanted)).values())
        job = Job(f"rpl_{clock.unguessable(12)}", order, self._letters.now(), monotonic=self._monotonic)
        job.total = total if order.limit is None else min(total, order.limit)
        job.go()
        await self._shelf.save(job)
        self._shelf.add(job)
        self._tasks[job.job_id] = clock.spawn(self._run(job, wanted), f"replay {job.job_id}")
        return job

    async def _run(self, job: Job, wanted: Filter) -> None:
        try:
            if wanted.workflow:
                await self._run_workflow(job, wanted)
            else:
                await self._run_all(job, wanted)
            if job.state not in ENDED:
                job.state = "done"
        except asyncio.CancelledError:
            job.state, job.why = "interrupted", _STOPPED
            raise
        except Trouble as trouble:
            job.state, job.why = "interrupted", str(trouble)
        finally:
            job.ended_at = self._letters.now()
            job.end()
            self._tasks.pop(job.job_id, None)
            try:
                await asyncio.shield(clock.spawn(self._shelf.save(job), "note the end of a replay"))
            except Trouble:
                pass  # its end is known in memory; on disk it will be found as interrupted

    async def _run_all(self, job: Job, wanted: Filter) -> None:
        waiting: deque[Entry] = deque()
        entries = self._entries(wanted)
        ramp: Ramp | None = None
        begun = 0
        while True:
            while len(waiting) < _PAGE and (entry := await anext(entries, None)) is not None:
                waiting.append(entry)
            if not waiting:
                return
            rules = self._letters.terms_of(waiting[0].upstream).replay
            ramp = ramp or Ramp(rules.concurrency, careful=job.order.ramp)
            room = ramp.size if job.order.limit is None else min(ramp.size, job.order.limit - begun)
            if room <= 0:
                return
            batch = _next_batch(waiting, room)
            begun += len(batch)
            again: list[Entry] = []
            failures = await self._send_batch(job, batch, job.order.rate or rules.rate, again)
            if failures is None:
                return
            begun -= len(again)
            waiting.extendleft(reversed(again))
            if again:
                await self._sleep(_AGAIN_AFTER)  # its breaker had let in others, or had just opened
            elif not ramp.ended(failures) and job.state == "running":
                job.give_up("the first replay failed; look at it, then resume or cancel")
                await self._shelf.save(job)

    async def _run_workflow(self, job: Job, wanted: Filter) -> None:
        """From the failed stage on, in stage order, one at a time; a stage that fails ends it."""
        entries = [entry async for entry in self._entries(replace(wanted, verdict=()))]
        places = {stage: place for place, stage in enumerate(self._stages())}
        entries.sort(key=lambda entry: (places.get(entry.stage or "", len(places)), entry.created_at))
        for entry in entries[: job.order.limit]:
            rate = job.order.rate or self._letters.terms_of(entry.upstream).replay.rate
            failures = await self._send_batch(job, [entry], rate)
            if failures is None:
                return
            if failures or job.outcomes["skipped"] or job.outcomes["held_back"]:
                job.why = (
                    f"stage {entry.stage or '(none)'} did not succeed ({entry.dlq_id}); later stages were not sent"
                )
                return

    async def _entries(self, wanted: Filter) -> AsyncIterator[Entry]:
        """Oldest first, a page at a time. What is sent and fails again is behind the cursor by then."""
        cursor = None
        while True:
            page = await self._listing.page(wanted, limit=_PAGE, cursor=cursor, oldest_first=True)
            for entry in page.items:
                yield entry
            cursor = page.next_cursor
            if cursor is None:
                return

    async def _send_batch(
        self, job: Job, batch: list[Entry], rate: float, again: list[Entry] | None = None
    ) -> int | None:
        """How many failed; None when the job has ended. `again` takes those that an open breaker kept from going."""
        tasks: list[asyncio.Task[int]] = []
        try:
            for entry in batch:
                if not await self._may_go(job, entry.upstream):
                    break
                begun = self._monotonic()
                tasks.append(clock.spawn(self._one_of(job, entry, again), f"replay of {entry.dlq_id}"))
                await self._sleep(max(0.0, 1 / rate - (self._monotonic() - begun)))
            failures = sum(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return None if job.state in ENDED else failures

    async def _may_go(self, job: Job, upstream: str) -> bool:
        await job.going.wait()
        while job.state == "running" and not self._draining:
            if self._refuses(upstream):
                job.current, pause = f"waiting for the breaker of {upstream}", _BREAKER_PAUSE
            elif self._live_waiting(upstream):
                job.current, pause = "waiting for live traffic", _LIVE_PAUSE
            else:
                break
            await self._sleep(pause)
            await job.going.wait()
        job.current = "sending"
        if self._draining and job.state == "running":
            job.state, job.why = "interrupted", _STOPPED
        return job.state == "running"

    async def _one_of(self, job: Job, entry: Entry, again: list[Entry] | None) -> int:
        found = await self._attempts.make(entry.dlq_id, job.job_id, job.order.ask, job.order.by)
        if isinstance(found, Refusal):
            job.count("skipped")
            job.skipped[(found.kind or found.why)[:200]] += 1
            return 0
        if found.outcome == "held_back":
            return await self._held_back(job, found.entry, again)
        job.count(found.outcome)
        failed = found.outcome in ("failed", "escalated")
        if failed and job.state == "running" and 0 < job.order.stop_after <= job.failures:
            job.give_up(f"{job.failures} replays failed (`stop_after`); look at them, then resume or cancel")
            await self._shelf.save(job)
        return failed

    async def _held_back(self, job: Job, entry: Entry, again: list[Entry] | None) -> int:
        held = entry.history[-1]
        if held["code"] == "CIRCUIT_OPEN" and again is not None:
            again.append(entry)
            return 0
        job.count("held_back")
        why = held.get("why") or f"{entry.upstream} takes no calls at the moment"
        if held["code"] == NotNow.code:  # its credential is not at hand; others may have theirs
            job.skipped[why[:200]] += 1
        elif job.state == "running":
            job.give_up(f"{why}; resume when that has changed")
            await self._shelf.save(job)
        return 0

    # ---- looking after jobs ----------------------------------------------------------------------------------------

    async def act(self, job_id: str, action: str) -> dict[str, Any]:
        """pause, resume or cancel."""
        job = self._shelf.live.get(job_id)
        if job is None:
            state = (await self._shelf.job(job_id))["state"]
            raise NotNow(f"replay {job_id} is {state}", "it belongs to an earlier run; start another one")
        {"pause": job.pause, "resume": job.resume, "cancel": job.cancel}[action]()
        await self._shelf.save(job)
        return job.shown()

    async def recover(self) -> list[Entry]:
        """After a start: what an earlier run held is reconciled, its jobs are interrupted."""
        await self._shelf.interrupt()
        return await self.reconcile()

    async def reconcile(self) -> list[Entry]:
        """Claims that ran out while this process lives; call it now and then."""
        return await self._claims.reconcile()

    async def breaker_closed(self, upstream: str) -> Job | None:
        """`replay.auto: on_close`: drain what is safe, one entry first."""
        return await self._drain(upstream, "on_close")

    async def scheduled(self) -> None:
        """`replay.auto: schedule`, for what failed where no breaker opened. Call it now and then."""
        now = self._monotonic()
        for upstream in tuple(self._letters.waiting):
            since = self._drained_at.setdefault(upstream, now)
            if now - since >= self._letters.terms_of(upstream).replay.every and not self._refuses(upstream):
                self._drained_at[upstream] = now
                await self._drain(upstream, "schedule")

    async def _drain(self, upstream: str, when: str) -> Job | None:
        if self._attempts.closing or self._draining or not self._letters.terms_of(upstream).replay.drains(when):
            return None
        if any(
            job.state in ("running", "paused") and upstream in job.order.wanted.upstream
            for job in self._shelf.live.values()
        ):
            return None
        if upstream not in self._letters.waiting:
            return None
        order = Order(Filter(upstream=(upstream,)), by=f"{AUTOMATIC}{when}")
        if when == "schedule" and not (await self._listing.count(self._candidates(order))).get("safe"):
            return None  # a job without an entry would only fill the list
        return await self.start(order)

    def drain(self) -> None:
        """No further entry of a job is sent; those under way may end."""
        self._draining = True

    async def close(self) -> None:
        """Stop at once; what is under way is noted as sent without an answer, what has ended as it ended."""
        self._attempts.closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._attempts.settled()


def _next_batch(waiting: deque[Entry], size: int) -> list[Entry]:
    """The oldest ones, at most one per key; the others of that key stay in front for the next batch."""
    batch: list[Entry] = []
    passed: list[Entry] = []
    keys: set[tuple[str, ...]] = set()
    while waiting and len(batch) < size:
        entry = waiting.popleft()
        key = order_key(entry)
        if key in keys:
            passed.append(entry)
        else:
            keys.add(key)
            batch.append(entry)
    waiting.extendleft(reversed(passed))
    return batch


def order_key(entry: Entry) -> tuple[str, ...]:
    """Entries with the same one must go out in the order they failed."""
    if entry.idempotency_key is not None:
        return (entry.upstream, entry.idempotency_key)  # whoever's: credentials may have been renewed in between
    if entry.method != "POST":
        return (entry.upstream, str(entry.sanitized_context.get("url_hash")))
    return (entry.dlq_id,)
