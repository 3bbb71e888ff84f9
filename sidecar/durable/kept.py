"""Whether there is a store: opened at the start if one lies in `state_dir`, else when something first has to be kept.

Law: everybody who needs the store asks here and gets the same one, opened once and reconciled before it is handed out.
A sidecar that keeps nothing never loads the database or the ciphers. A store that cannot be opened later on costs
what should have been kept, never the traffic: it is said once, shown by /readyz, and tried again.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar import clock
from sidecar.durable.disk import volatile_file_system
from sidecar.durable.trouble import NotKept, Trouble
from telemetry.names import Attribute, Event, Field

if TYPE_CHECKING:
    from config.errors import ErrorCode
    from config.model import Settings, Telemetry, Upstream
    from sidecar.durable.credentials import Credentials
    from sidecar.durable.deadletter import Terms
    from sidecar.durable.layers import Durable
    from sidecar.durable.lock import StateLock
    from sidecar.durable.outbox import Terms as OutboxTerms
    from sidecar.proxy import Proxy

T = TypeVar("T")

# Of opening.py and account.py, which would bring the database library with them.
_OF_THE_STORE = ("store.db", "account")
_BODIES = "bodies"
_SEAL_KEY = "SIDECAR_SEAL_KEY"
_TRY_AGAIN = 5.0
_LAST_WRITES = 5.0
_ERRORS = frozenset(
    f"sidecar.store.{what}"
    for what in ("degraded", "damaged", "set_aside", "gone", "mended", "log_damaged", "incomplete", "unclaimed")
)
_GOOD_NEWS = frozenset({"sidecar.store.recovered", "sidecar.store.upgraded"})


class Kept:
    """`durable` is what is open now."""

    def __init__(self, proxy: Proxy, settings: Settings, environ: Mapping[str, str]) -> None:
        self._proxy = proxy
        self._settings = settings.dead_letter
        self._directory = Path(settings.state_dir)
        self._environ = environ
        self._opening: asyncio.Task[Durable] | None = None
        self._try_again_at = 0.0
        self._failure: Trouble | None = None
        self._told_volatile = False
        self._draining = False
        self._closed = False
        self._credentials: Credentials | None = None
        self._following: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._terms: dict[str, tuple[Upstream, Telemetry, Terms]] = {}
        """Made from these settings of the upstream and of telemetry."""
        self.durable: Durable | None = None
        self.lock: StateLock | None = None
        """Of the directory; taken at the start."""
        self.still_with: int | None = None
        """The process that has the store until it ends: we take its place."""
        self._arrived: asyncio.Future[None] | None = None
        self.on_open: Callable[[Durable], None] = _nothing_sends
        """Given by the composition root: attaches what sends, before anything is reconciled."""

    # ---- opening -------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._directory / _OF_THE_STORE[0]

    @property
    def exists(self) -> bool:
        """Or existed: what is missing has to be said at the start, not when something is to be kept."""
        bodies = self._directory / _BODIES
        return any((self._directory / name).exists() for name in _OF_THE_STORE) or (
            bodies.is_dir() and any(path.suffix == ".body" for path in bodies.iterdir())
        )

    async def begin(self) -> None:
        """At the start. Raises CannotUse when what lies there must not be touched by this sidecar."""
        self.warn_if_volatile()
        if self.exists:
            self._opening = clock.spawn(self._open_first(), "open the store")
            await asyncio.shield(self._opening)

    async def open(self) -> Durable:
        """The store, opened now if it is not yet. Raises Trouble when that cannot be."""
        if self._arrived is not None:
            await asyncio.shield(self._arrived)
        if self.durable is not None:
            return self.durable
        if self._closed:
            raise NotKept("disk_error", "the sidecar is stopping", "send it again later")
        if self._failure is not None and clock.monotonic() < self._try_again_at:
            raise self._failure.with_traceback(None)  # else it would collect the frames of everyone who asks
        if self._opening is None:
            self._opening = clock.spawn(self._open_late(), "open the store")
            self._opening.add_done_callback(clock.heard)  # its failure has been logged
        return await asyncio.shield(self._opening)

    def expect(self, owner: int) -> None:
        """Another process owns the directory until it has finished what it began; who needs the store waits."""
        self.still_with, self._arrived = owner, asyncio.get_running_loop().create_future()

    async def arrive(self, lock: StateLock) -> None:
        """The directory is ours from now on."""
        self.lock = lock
        arrived, self._arrived, self.still_with = self._arrived, None, None
        try:
            if self.exists and not self._closed:
                await self.open()
        except Trouble:
            pass  # told, and tried again
        finally:
            if arrived is not None and not arrived.done():
                arrived.set_result(None)

    async def at_hand(self, patience: float) -> None:
        """For people, who are told after a while what they are waiting for. Raises Trouble."""
        if self._arrived is not None:
            done, _ = await asyncio.wait([self._arrived], timeout=patience)
            if not done:
                raise Trouble(
                    f"the store is still with process {self.still_with}, whose place this one takes: it finishes its "
                    "requests first",
                    "ask again in a moment",
                )

    @property
    def writing(self) -> bool:
        """Something is on its way to the store."""
        return bool(self._background) or self._opening is not None

    async def _open_first(self) -> Durable:
        settings = self._settings
        try:
            self.durable = durable = await self._open()
        finally:
            self._opening = None
        if self._settings is not settings:  # a reload while it was being opened
            durable.configure(self._settings, self._proxy.registry)
        return durable

    async def _open_late(self) -> Durable:
        try:
            durable = await self._open_first()
        except Exception as error:
            trouble = _translated(error, self._directory)
            if self._failure is None or str(self._failure) != str(trouble):
                self._report("sidecar.store.degraded", f"{trouble}. Traffic goes on, nothing is kept until then")
            self._failure, self._try_again_at = trouble, clock.monotonic() + _TRY_AGAIN
            raise trouble from error
        else:
            self._failure = None
            return durable

    async def _open(self) -> Durable:
        loop = asyncio.get_running_loop()
        # In a thread: loading the ciphers would hold up the traffic.
        layers = await loop.run_in_executor(None, importlib.import_module, "sidecar.durable.layers")
        durable: Durable = await layers.Durable.open(
            self._directory,
            settings=self._settings,
            registry=self._proxy.registry,
            terms_of=self.terms_of,
            seal_key=self._environ.get(_SEAL_KEY),
            counts=self._proxy.metrics.stored,
            report=self._report,
            lock=self.lock,
        )
        durable.store.on_fault = lambda what, error: self._proxy.signals.internal_error("store", what, error)
        self.on_open(durable)
        if self._draining:
            durable.drain()
        await durable.begin()
        return durable

    def drain(self) -> None:
        """Nothing more is sent from here; the store goes on taking what is to be kept."""
        self._draining = True
        if self.durable is not None:
            self.durable.drain()

    async def close(self) -> None:
        deadline = clock.monotonic() + _LAST_WRITES
        while self._background and clock.monotonic() < deadline:  # one of them may have to open the store first
            await asyncio.wait(self._background, timeout=deadline - clock.monotonic())
        self._closed = True
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)  # it never came: whoever waits is told by `open`
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self.durable is not None:
            await self.durable.close()
            self.durable = None

    # ---- beside the traffic --------------------------------------------------------------------------------------

    def background(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Work on the store that goes on without whoever began it; the store is not closed before it has ended."""
        task: asyncio.Task[T] = clock.spawn(work, name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def beside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """The same, where nobody waits for it."""
        self.background(work, name).add_done_callback(_look_at)

    def not_kept(self, upstream: str, trouble: Trouble) -> None:
        """A request that should have been kept is lost: said, and counted where the store itself could not."""
        stored = self._proxy.metrics.stored
        stored.begin("dlq")
        if self.durable is None:
            stored.dead_letter_rejected(trouble.reason if isinstance(trouble, NotKept) else "disk_error")
        body = f"a failed request to {upstream} could not be kept: {trouble}"
        fields = {Field.BODY: body, Attribute.UPSTREAM: upstream, "reason": "DLQ_FULL"}
        self._proxy.log.event("error", Event.DLQ_REJECTED, upstream, clock.monotonic(), lambda: fields)

    def caller_id(self, who: bytes) -> str:
        """A keyed hash of who asks (`policy/caller.py`), the same in every run. Only once the store is open."""
        assert self.durable is not None
        return "" if not who else self.durable.letters.keyring.digest("caller", who)[:8].hex()

    def digest(self, *parts: str | bytes) -> str:
        """A keyed hash, the same in every run. Only once the store is open."""
        assert self.durable is not None
        return self.durable.letters.keyring.digest(*parts)[:16].hex()

    def credentials(self) -> Credentials:
        if self._credentials is None:
            from sidecar.durable.credentials import Credentials

            self._credentials = Credentials()
        return self._credentials

    def follow_clock(self) -> None:
        """The wall clock was stepped. Whatever is kept goes along at once with it, or nothing does."""
        if self._following is not None and not self._following.done():
            return
        if self.durable is not None:
            self._following = self.background(self._follow_clock(self.durable), "follow the clock")
        elif self._opening is None and not self.exists:
            clock.steady.step(clock.steady.behind())

    async def _follow_clock(self, durable: Durable) -> None:
        try:
            await durable.letters.steps.follow(durable.store)
        except Trouble:
            pass  # tried again at the next look

    # ---- what is true of it --------------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """Why nothing is kept at the moment; None while all is well."""
        if self.durable is not None:
            health = self.durable.store.health
            return self.durable.listing.full() if health.ok else health.reason
        return None if self._failure is None else str(self._failure)

    @property
    def incomplete(self) -> str | None:
        """What is missing in the store, until somebody has answered for it."""
        losses = () if self.durable is None else self.durable.store.losses
        return "; ".join(loss.what for loss in losses) or None

    @property
    def gone(self) -> bool:
        """The files of the store are not in their places any more, which no later try puts right."""
        return self.durable is not None and self.durable.store.health.gone

    def warn_if_volatile(self) -> None:
        kind = volatile_file_system(self._directory)
        if kind is not None:
            self._report(
                "sidecar.store.volatile",
                f"state_dir {self._directory} is on {kind}, which does not outlive this machine or container; "
                "mount a volume there if what is kept is to survive",
            )

    def _report(self, event: str, sentence: str) -> None:
        log = self._proxy.log
        if event == "sidecar.store.volatile":
            if self._told_volatile:
                return
            self._told_volatile = True
        if event in _ERRORS:
            log.error(event, sentence)
        elif event in _GOOD_NEWS:
            log.info(event, sentence)
        else:
            log.warn(event, sentence)

    # ---- settings ------------------------------------------------------------------------------------------------

    def configure(self, settings: Settings, registry: Mapping[str, ErrorCode]) -> None:
        """Other settings, from now on; the directory is that of the start."""
        self._settings = settings.dead_letter
        if self.durable is not None:
            self.durable.configure(settings.dead_letter, registry)

    def settings_of(self, upstream: str) -> Upstream:
        """By the upstream's label; those of a host that no upstream lists are the defaults."""
        from sidecar.upstream.endpoints import AUTOMATIC

        state = self._proxy.directory.configured.get(upstream)
        return AUTOMATIC if state is None else state.settings

    def terms_of(self, upstream: str) -> Terms:
        settings, telemetry = self.settings_of(upstream), self._proxy.settings.telemetry
        known = self._terms.get(upstream)
        if known is not None and known[0] is settings and known[1] is telemetry:
            return known[2]
        from sidecar.durable.deadletter import Terms
        from telemetry.redact import Redactor

        redactor = Redactor(telemetry.redact_query, (*telemetry.redact_paths, *settings.dead_letter.redact_paths))
        terms = Terms(settings.dead_letter, settings.replay, settings.idempotency, redactor)
        if len(self._terms) > _MOST_TERMS:
            self._terms.clear()
        self._terms[upstream] = (settings, telemetry, terms)
        return terms

    def outbox_terms_of(self, upstream: str) -> OutboxTerms:
        from sidecar.durable.outbox import Terms

        settings = self.settings_of(upstream)
        return Terms(settings.outbox, settings.idempotency, self.terms_of(upstream).redactor)


_MOST_TERMS = 1024


def _look_at(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        raise RuntimeError(f"{task.get_name()} failed") from task.exception()  # told by the loop's handler


def _nothing_sends(durable: Any) -> None:
    """Until the composition root says what does."""


def _translated(error: Exception, directory: Path) -> Trouble:
    if isinstance(error, Trouble):
        return error
    return NotKept("disk_error", f"the store in {directory} cannot be opened: {error}", "look at the disk")
