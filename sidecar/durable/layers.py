"""All durable parts on one store: opened, recovered, looked after and closed together.

Law: the order of lines is the order of events. Nothing is sent by anybody before what an earlier run left behind has
been reconciled. The two parts that send, replays and the outbox, are given their sending by the composition root.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from config.durable import DeadLetterStore
from config.errors import ErrorCode
from sidecar import clock
from sidecar.durable.attempts import Event, quiet
from sidecar.durable.attempts import Send as SendReplay
from sidecar.durable.audit import Audit
from sidecar.durable.deadletter import DeadLetters, Terms
from sidecar.durable.export import Files
from sidecar.durable.idempotency import Gate
from sidecar.durable.jobs import Jobs
from sidecar.durable.listing import Listing
from sidecar.durable.notify import Notifier
from sidecar.durable.operator import Operator
from sidecar.durable.orders import Orders
from sidecar.durable.outbox import Delay, Lookup, Outbox
from sidecar.durable.outbox import Send as SendDelivery
from sidecar.durable.outbox import Terms as OutboxTerms
from sidecar.durable.presence import Guard
from sidecar.durable.replay import Replayer
from sidecar.durable.rotation import Rotation
from sidecar.durable.seal import Keyring, load_keyring
from sidecar.durable.steps import Steps
from sidecar.durable.store import Store, silent
from sidecar.durable.successes import Successes
from sidecar.durable.trouble import NotNow, Trouble
from sidecar.durable.upkeep import Upkeep
from telemetry.metrics import Stored
from telemetry.redact import Redactor

_REFRESH_EVERY = 5.0
_AUDIT_KEEP = 31_536_000.0
_CHORES_EVERY = 30.0
_OUTBOX_KEEP = 604_800.0


class Durable:
    """Made by `open`; then `attach` what sends, then `begin`; at the end `close`."""

    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        settings: DeadLetterStore,
        registry: Mapping[str, ErrorCode],
        terms_of: Callable[[str], Terms],
        counts: Stored,
        steps: Steps,
    ) -> None:
        self.store = store
        self.counts = counts
        self.letters = DeadLetters(
            store, keyring, settings=settings, registry=registry, terms_of=terms_of, counts=counts, steps=steps
        )
        self.listing = Listing(self.letters)
        self.operator = Operator(self.letters)
        self.successes = Successes(self.letters)
        self.files = Files(self.letters, self.listing)
        self.upkeep = Upkeep(self.letters)
        self.gate = Gate(store, keyring, counts=counts)
        self.rotation = Rotation(store, keyring, self.letters.bodies)
        self.audit = Audit(store)
        self.orders = Orders(store)
        self.replayer: Replayer | None = None
        self.outbox: Outbox | None = None
        self.jobs: Jobs | None = None
        self.notifier: Notifier | None = None
        self.job_counts: dict[str, int] = {}
        self._outbox_keep: Callable[[], float] = lambda: _OUTBOX_KEEP
        self._audit_keep: Callable[[], float] = lambda: _AUDIT_KEEP
        self._chores: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._judging: asyncio.Task[None] | None = None
        self._judge_anew = False
        self._verifying: asyncio.Task[None] | None = None
        self._verified_at = clock.monotonic()

    @classmethod
    async def open(
        cls,
        state_dir: Path,
        *,
        settings: DeadLetterStore,
        registry: Mapping[str, ErrorCode],
        terms_of: Callable[[str], Terms],
        seal_key: str | None = None,
        counts: Stored | None = None,
        report: Callable[[str, str], None] = silent,
        lock: Guard | None = None,
        **options: Any,
    ) -> Durable:
        """Raises CannotUse when the sidecar must not start: a newer store, a missing key, unusable key files."""
        loop = asyncio.get_running_loop()
        keyring = await loop.run_in_executor(None, load_keyring, state_dir, seal_key)
        steps = Steps()
        store = await Store.open(
            state_dir,
            min_free_bytes=settings.min_free_bytes,
            report=report,
            hooks=[keyring.prove, steps.read],
            guards=[keyring] if lock is None else [keyring, lock],
            **options,
        )
        return cls(store, keyring, settings, registry, terms_of, counts or Stored(), steps)

    def attach(
        self,
        *,
        send_replay: SendReplay,
        send_delivery: SendDelivery,
        lookup: Lookup,
        live_waiting: Callable[[str], bool] = lambda upstream: False,
        refuses: Callable[[str], bool] = lambda upstream: False,
        on_event: Event = quiet,
        stages: Callable[[], Iterable[str]] = tuple,
        outbox_terms_of: Callable[[str], OutboxTerms] | None = None,
        delay: Delay | None = None,
        outbox_keep: Callable[[], float] = lambda: _OUTBOX_KEEP,
        audit_keep: Callable[[], float] = lambda: _AUDIT_KEEP,
        redactor: Redactor | None = None,
    ) -> None:
        """What sends. Nothing is sent before `begin`. Settings are asked for where they are used: a reload changes
        them."""
        self.replayer = Replayer(
            self.letters,
            self.listing,
            send_replay,
            live_waiting=live_waiting,
            refuses=refuses,
            on_event=on_event,
            stages=stages,
        )
        given: dict[str, Any] = {"terms_of": outbox_terms_of, "delay": delay}
        self.outbox = Outbox(
            self.store,
            self.letters.keyring,
            self.letters.bodies,
            send_delivery,
            lookup,
            counts=self.counts,
            on_event=on_event,
            redactor=redactor,
            **{name: value for name, value in given.items() if value is not None},
        )
        self.jobs = Jobs(self.outbox, self.letters.check_room)
        self._outbox_keep = outbox_keep
        self._audit_keep = audit_keep

    def configure(self, settings: DeadLetterStore, registry: Mapping[str, ErrorCode]) -> None:
        """Other settings, from now on. What waits is judged by them in the background."""
        self.letters.settings = settings
        self.letters.registry = registry
        self.store.min_free_bytes = settings.min_free_bytes
        if self.notifier is not None:
            self.notifier.settings = settings
        self._judge_anew = True
        if self._judging is None or self._judging.done():
            self._judging = clock.spawn(self._judge_all(), "judge dead letters anew")

    async def _judge_all(self) -> None:
        while self._judge_anew and not self._closing.is_set():
            self._judge_anew = False
            await self._each(self.upkeep.judge_all)

    async def begin(self) -> None:
        """Reconcile what an earlier run left, then let the outbox and the chores run."""
        for part in ("dlq", "idempotency", "outbox"):
            self.counts.begin(part)
        await self._each(self.letters.bodies.collect, self.gate.recover)
        if self.replayer is not None:
            await self._each(self.replayer.recover)
        if self.outbox is not None:
            await self._each(self.outbox.recover)
            self.outbox.start()
        await self._refresh()
        self._chores = clock.spawn(self._run_chores(), "durable chores")

    async def _run_chores(self) -> None:
        waited = 0.0
        while not self._closing.is_set():
            try:
                async with asyncio.timeout(_REFRESH_EVERY):
                    await self._closing.wait()
            except TimeoutError:
                pass
            else:
                return
            await self._refresh()
            waited += _REFRESH_EVERY
            if waited >= _CHORES_EVERY:
                waited = 0.0
                await self.chores()

    async def chores(self) -> None:
        """What is due now and then; each one may fail without the others."""
        await self._each(self.upkeep.judge_due, self.upkeep.expire, self.gate.sweep)
        await self._each(lambda: self.audit.expire(self.letters.now() - self._audit_keep()), self.upkeep.shrink)
        every = self.letters.settings.verify_every
        due = every and clock.monotonic() - self._verified_at >= every
        if due and (self._verifying is None or self._verifying.done()):
            self._verified_at = clock.monotonic()
            self._verifying = clock.spawn(self._each(self._verify), "verify everything that is kept")
        if self.replayer is not None:
            await self._each(self.replayer.reconcile, self.replayer.scheduled)
        outbox = self.outbox
        if outbox is not None:
            await self._each(lambda: outbox.sweep(self._outbox_keep()))

    async def _verify(self) -> None:
        """Beside the traffic: a fifth of one thread's time. What it finds is said, counted and set aside there."""

        async def pace(took: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(took * 4):
                    await self._closing.wait()
            if self._closing.is_set():
                raise NotNow("the sidecar is stopping")

        await self.upkeep.check(pace)

    async def _refresh(self) -> None:
        await self._each(self.listing.refresh)
        if self.jobs is not None:
            try:
                self.job_counts = await self.jobs.counts()
            except Trouble:
                pass

    async def _each(self, *work: Callable[[], Awaitable[object]]) -> None:
        for one in work:
            try:
                await one()
            except Trouble:
                pass  # a store in trouble says so itself, and all of this is tried again
            except Exception as error:  # our own fault: the others go on, and it is tried again
                self.store.fault("something that is due in the store now and then failed", error)

    def drain(self) -> None:
        """What is being sent goes on, nothing else is begun."""
        if self.replayer is not None:
            self.replayer.drain()
        if self.outbox is not None:
            self.outbox.drain()

    async def close(self) -> None:
        """What sends stops first, the store last."""
        self._closing.set()
        if self._chores is not None:
            await self._chores
        if self.replayer is not None:
            await self.replayer.close()
        if self.outbox is not None:
            await self.outbox.close()
        if self._verifying is not None:
            await self._verifying
        await self.store.close()
        if self._judging is not None:
            await self._judging  # which a closed store ends
