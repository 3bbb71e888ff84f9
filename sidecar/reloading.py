"""The configuration in force, and how another one takes its place.

Law: a configuration is read and validated whole, away from the event loop, before anything is touched; then it is put
in force between two events of the loop. Requests under way end under the one they began with. One that is not valid
changes nothing and is remembered as `refused` until a valid one comes. What is read only at the start stays as it is,
and is told as `needs_restart`. One change at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from config.changes import Change, at_start, at_start_only, changes, without_restart
from config.loader import ConfigError, Loaded, Origin, load
from config.model import Settings
from config.problems import Problem, dotted
from config.runtime import NOTHING_SET, RETRIES, Runtime, policy_key
from sidecar import clock
from sidecar.certificates import Pair, Shown
from sidecar.durable.trouble import Trouble
from sidecar.forced import ForcedState
from sidecar.inbound import Downstream
from sidecar.proxy import Proxy
from sidecar.upstream.tls import UnusableCertificates
from sidecar.watching import content
from telemetry.logs import Log
from telemetry.names import Event

_TOLD = 8
_EMPTIED = "the file is empty now, as after a write that broke off; put it back, or write `{}` for the defaults alone"
_AT_RUN_TIME = " (set at run time, over the file; `sidecar policies remove NAME` takes such a policy away)"


class NotApplied(Exception):
    """A configuration was refused; nothing has changed. `problems` says why, one by one."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload did."""

    changed: tuple[Change, ...]
    needs_restart: tuple[str, ...]
    """Keys that are another in the file than in force."""
    renewed: tuple[str, ...] = ()
    """Listeners that show another certificate from now on, by their key."""

    @property
    def before(self) -> dict[str, Any]:
        return {change.key: change.before for change in self.changed}

    @property
    def after(self) -> dict[str, Any]:
        return {change.key: change.after for change in self.changed}

    @property
    def summary(self) -> str:
        keys = [change.key for change in self.changed]
        more = f" and {len(keys) - _TOLD} more" if len(keys) > _TOLD else ""
        told = f"{', '.join(keys[:_TOLD])}{more} changed" if keys else "nothing changed" if not self.renewed else ""
        if self.renewed:
            told += f"{'; ' if told else ''}a renewed certificate is shown ({', '.join(self.renewed)})"
        if self.needs_restart:
            told += f"; restart the sidecar to put {', '.join(self.needs_restart)} in force"
        return told


_LOOK_AGAIN = 5.0


class Reloading:
    """See the module's law."""

    def __init__(self, proxy: Proxy, loaded: Loaded, environ: Mapping[str, str]) -> None:
        self._proxy = proxy
        self._environ = environ
        self._one_at_a_time = asyncio.Lock()
        self.loaded = loaded
        """In force."""
        self.shown: list[Shown] = []
        """By listeners with TLS, given by the composition root."""
        self.runtime = NOTHING_SET
        self.needs_restart: tuple[str, ...] = ()
        self.refused: str | None = None
        """Why the configuration that was read last is not in force."""
        self.last_read = loaded.text
        """What the file held when it was last read, valid or not."""
        self.configured_retries = loaded.settings.retries_enabled
        """The kill switch as the file has it."""
        self._configured_origin = loaded.origins.get("retries_enabled", "default")
        self._expiring: asyncio.Task[None] | None = None
        self.on_expired: Callable[[str, object, object], Awaitable[None]] = _untold
        """Told the key of what was set for a time that is over, and what it was and is."""

    async def reload(self, why: str) -> Reloaded:
        """Read the file again. `why` is for people: a signal, a changed file, an operator. Raises NotApplied."""
        async with self._one_at_a_time:
            path, loop = self.loaded.path, asyncio.get_running_loop()
            self.last_read = None if path is None else await loop.run_in_executor(None, content, path)
            try:
                if self.last_read is not None and not self.last_read.strip() and self.loaded.text:
                    raise NotApplied((Problem(_EMPTIED, file=str(path)),))
                where = "the values of the start" if path is None else f"{path} ({len(self.last_read or b'')} bytes)"
                self._step(f"reading {where}, because of {why}")
                _, loaded = await self._read(_as_it_is, self.loaded.text if path is None else None)
                self._step("all of it is valid; it is put in force between two events")
                renewed = await loop.run_in_executor(None, self._renewed, loaded.settings)
                done = replace(self._put_in_force(loaded), renewed=tuple(f"{shown.role}.tls" for shown, _ in renewed))
                for shown, pair in renewed:
                    shown.show(pair)
                self._step(f"in force; {len(self._proxy.downstreams)} connections of apps have its limits")
            except NotApplied as refused:
                self._refuse(refused, why)
                raise
            self.refused = None
            self._tell(done, why)
            return done

    async def begin(self) -> None:
        """At the start, when the store has been looked for: what operators had ordered before it."""
        durable = self._proxy.kept.durable
        if durable is not None:
            forced = await durable.orders.read_forced(clock.wall())
            await self.begin_with(await durable.orders.read_runtime(), forced)

    async def begin_with(self, runtime: Runtime, forced: Iterable[ForcedState]) -> None:
        """The same where it is known already."""
        proxy, now = self._proxy, clock.monotonic()
        for one in forced:
            proxy.forced.note(one)
        for state in proxy.directory.states():
            for endpoint, breaker in state.breakers():
                proxy.forced.hold(breaker, state.label, endpoint, now, proxy.wall(now))
        await self._begin_with(runtime)

    async def compare(self, seen: Runtime) -> None:
        """The store is ours now, and `seen` was read beside its owner: did he change something since? What was set here
        meanwhile is newer than either."""
        durable = self._proxy.kept.durable
        if durable is not None and self.runtime is seen:
            kept = await durable.orders.read_runtime()
            if kept != seen and self.runtime is seen:
                await self._begin_with(kept)

    async def _begin_with(self, runtime: Runtime) -> None:
        """At the start: what operators had set before it. Where the file does not go with it any more, the file alone
        is in force, and that is told."""
        async with self._one_at_a_time:
            self.runtime = runtime
            self._watch_expiry()
            if not runtime:
                return
            try:
                self._put_in_force((await self._read(_as_it_is, self.loaded.text))[1])
            except NotApplied as refused:
                self._refuse(refused, "what was set at run time, before this start")

    async def set(self, change: Callable[[Runtime], Runtime], why: str) -> Reloaded:
        """Change what is set at run time, over the file that is in force, whatever has become of it on disk since; it
        outlives a restart. Raises NotApplied, or Trouble when it cannot be kept: then nothing has changed either."""
        async with self._one_at_a_time:
            durable = await self._proxy.kept.open()
            while True:
                runtime, loaded = await self._read(change, self.loaded.text)
                before = self.runtime
                await durable.orders.keep_runtime(runtime, clock.wall())
                if self.runtime is before:  # the kill switch has not been touched meanwhile
                    break
            try:
                done = self._put_in_force(loaded)
            except NotApplied:
                await durable.orders.keep_runtime(self.runtime, clock.wall())
                raise
            self.runtime = runtime
            self._watch_expiry()
            self._tell(done, why, at_run_time=True)
            return done

    async def switch_retries(self, enabled: bool, ttl: float | None = None) -> Trouble | None:
        """The kill switch: at once, whatever else is under way, and then kept; after `ttl` seconds it is as the file
        says again. Returns why it could not be kept."""
        given = None if enabled == self.configured_retries else enabled
        self.runtime = runtime = self.runtime.with_retries(given, self.after(ttl))
        self._watch_expiry()
        settings = self._proxy.settings.model_copy(update={"retries_enabled": enabled})
        origin: Origin = "runtime" if given is not None else self._configured_origin
        origins = {**self.loaded.origins, "retries_enabled": origin}
        self.loaded = replace(self.loaded, settings=settings, origins=origins)
        self._proxy.settings = settings
        if enabled != self._proxy.retries_enabled:
            told = "retries_enabled changed"
            self._proxy.signals.config_changed(True, told, at_run_time=True, why="the kill switch", changed=[RETRIES])
        self._proxy.retries_enabled = enabled
        try:
            durable = await self._proxy.kept.open()
            await durable.orders.keep_runtime(runtime, clock.wall())
        except Trouble as trouble:
            return trouble
        return None

    # ---- what ends by itself -------------------------------------------------------------------------------------

    def _wall(self) -> float:
        return self._proxy.wall(clock.monotonic())

    def after(self, ttl: float | None) -> float | None:
        """The wall time at which something ends that is set now for so many seconds."""
        return None if ttl is None else self._wall() + ttl

    def given(self, key: str) -> object:
        """What is in force of something that can be set at run time, as somebody wrote it."""
        if key == RETRIES:
            return self._proxy.retries_enabled
        policy = self._proxy.settings.policies.get(key.removeprefix(policy_key("")))
        return None if policy is None else policy.model_dump(mode="json", include=set(policy.model_fields_set))

    def _watch_expiry(self) -> None:
        if self.runtime.until and (self._expiring is None or self._expiring.done()):
            self._expiring = clock.spawn(self._expire(), "the end of what was set for a while")

    async def _expire(self) -> None:
        """Looks again and again: it may be set anew, the clock of the wall may be set, the store may be in trouble."""
        while until := self.runtime.until:
            key = min(until, key=until.__getitem__)
            if (left := until[key] - self._wall()) > 0:
                await clock.sleep(min(left, _LOOK_AGAIN))
            elif not await self._take_away(key):
                await clock.sleep(_LOOK_AGAIN)

    async def _take_away(self, key: str) -> bool:
        """Its time is over. False: not yet, because it cannot be written down, which is told."""
        before = self.given(key)
        try:
            if key == RETRIES:
                await self.switch_retries(self.configured_retries)
            else:
                name = key.removeprefix(policy_key(""))
                await self.set(lambda runtime: runtime.without_policy(name), f"the time of policy {name} is over")
        except (NotApplied, Trouble) as still:
            told = f"{key} was set for a while which is over, and is still in force: {still}"
            self._proxy.log.error("sidecar.runtime.not_taken_away", told, key=key)
            return False
        await self.on_expired(key, before, self.given(key))
        return True

    def end(self) -> None:
        if self._expiring is not None:
            self._expiring.cancel()

    async def _read(self, change: Callable[[Runtime], Runtime], text: bytes | None) -> tuple[Runtime, Loaded]:
        """In a thread: it takes a while, and the kill switch does not wait for it. The file must be valid alone too, or
        the next start would fail."""
        path, environ, loop = self.loaded.path, self._environ, asyncio.get_running_loop()
        while True:
            before = self.runtime
            runtime = change(before)
            try:
                alone = loaded = await loop.run_in_executor(None, load, path, environ, NOTHING_SET, text)
            except ConfigError as wrong:
                raise NotApplied(wrong.problems) from None
            try:
                if runtime:
                    loaded = await loop.run_in_executor(None, load, path, environ, runtime, alone.text)
            except ConfigError as wrong:
                hint = _AT_RUN_TIME if runtime is before else ""  # else it is what is being set now
                told = (replace(problem, message=f"{problem.message}{hint}") for problem in wrong.problems)
                raise NotApplied(tuple(told)) from None
            if self.runtime is before:
                self.configured_retries = alone.settings.retries_enabled
                self._configured_origin = alone.origins["retries_enabled"]
                return runtime, loaded

    def _put_in_force(self, loaded: Loaded) -> Reloaded:
        before = self._proxy.settings
        settings, wrong = without_restart(before, loaded.settings)
        needs_restart = at_start_only(before, loaded.settings)
        if wrong:
            raise NotApplied(tuple(_needs_restart_first(problem.key, problem.message) for problem in wrong))
        try:
            self._proxy.apply(settings)
        except UnusableCertificates as unusable:
            raise NotApplied((Problem(str(unusable)),)) from None
        warn_of_unverified(self._proxy.log, settings, before)
        for connection in tuple(self._proxy.downstreams):
            if isinstance(connection, Downstream):
                connection.take_limits()
        self.loaded = replace(loaded, settings=settings, origins=self._origins(before, loaded, needs_restart))
        self.needs_restart = needs_restart
        return Reloaded(changes(before, settings), needs_restart)

    def _renewed(self, settings: Settings) -> list[tuple[Shown, Pair]]:
        """In a thread."""
        asked = {"listen": settings.listen.tls, "admin": settings.admin.tls}
        found = []
        for shown in self.shown:
            files = asked[shown.role]
            try:
                pair = None if files is None else shown.another(files)
            except UnusableCertificates as unusable:
                raise NotApplied((Problem(str(unusable)),)) from None
            if pair is not None:
                found.append((shown, pair))
        return found

    def _origins(self, before: Settings, loaded: Loaded, needs_restart: tuple[str, ...]) -> Mapping[str, Origin]:
        if not needs_restart:
            return loaded.origins
        stays = tuple(dotted(path) for path in at_start(before, loaded.settings))
        origins = {key: origin for key, origin in loaded.origins.items() if not key.startswith(stays)}
        return origins | {key: origin for key, origin in self.loaded.origins.items() if key.startswith(stays)}

    def _step(self, told: str) -> None:
        self._proxy.log.debug(Event.CONFIG_STEP, f"reload: {told}")

    def _refuse(self, refused: NotApplied, why: str) -> None:
        self.refused = str(refused)
        self._proxy.signals.config_changed(False, str(refused), why=why)

    def _tell(self, done: Reloaded, why: str, *, at_run_time: bool = False) -> None:
        self._proxy.signals.config_changed(
            True,
            done.summary,
            at_run_time=at_run_time,
            why=why,
            changed=[change.key for change in done.changed],
            needs_restart=list(done.needs_restart),
        )


def warn_of_unverified(log: Log, settings: Settings, before: Settings | None = None) -> None:
    """Upstreams whose certificates nobody looks at, as far as that is news."""
    known = {} if before is None else before.upstreams
    for name, upstream in settings.upstreams.items():
        if upstream.insecure_skip_verify and not (name in known and known[name].insecure_skip_verify):
            log.warn("sidecar.tls.unverified", f"certificates of upstream {name} are not verified", upstream=name)


def _needs_restart_first(key: str, message: str) -> Problem:
    told = f"{message} (with what stays as it is until a restart; restart the sidecar to put this file in force)"
    return Problem(told, key)


async def _untold(key: str, before: object, after: object) -> None:
    """Nobody wants to know."""


def _as_it_is(runtime: Runtime) -> Runtime:
    return runtime
