"""Composition root: settings → a running sidecar. The only module that knows all parts.

Law: `start` and `stop` are lists of steps in the order they happen. Anything that can be wrong with the machine
(port in use, state directory taken, a pure-Python parser) is told as a `CannotStart` that says what to do.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp.http_parser
from aiohttp import web

from config.addresses import is_loopback, join_host_port
from config.files import certificate_files
from config.loader import Loaded
from config.model import Admin, Listen, Probes, ServerCertificate, Settings
from sidecar import __version__, clock
from sidecar.admin.api import Api
from sidecar.admin.door import Door
from sidecar.certificates import Shown
from sidecar.descriptors import TooFew
from sidecar.durable.lock import InUse, StateLock
from sidecar.durable.trouble import Trouble
from sidecar.handover import CannotTakeOver, Offer, Taking
from sidecar.inbound import Downstream
from sidecar.listener import Listener
from sidecar.proxy import Proxy
from sidecar.reloading import NotApplied, Reloading, warn_of_unverified
from sidecar.senders import Senders
from sidecar.sockets import CannotListen, Given, GivenSockets, listening
from sidecar.upstream.resolve import Lookup
from sidecar.upstream.tls import UnusableCertificates
from sidecar.watching import look_at_each, watch, watch_each
from telemetry.logs import Log

# Connections that were accepted but not yet served when a drain begins get this long to bring their request.
_LAST_REQUESTS = 0.5
# … and this long where another process serves already, so that nobody waits for their end.
_LAST_REQUESTS_BESIDE = 1.0
# What is cut off at the end of the grace is kept and answered; at most this long, however slow disk and apps are.
_LAST_WORDS = 5.0
_LOOK_AGAIN = 0.02
# Who watches the configuration gets this long to notice that it ends.
_LAST_LOOK = 1.0
# A query with every parameter at its longest, percent-encoded.
_ADMIN_TARGET = 65_536
# What aiohttp would say about bytes that are no HTTP: stacks, in another shape than our lines. They got their 400.
_UNHEARD = logging.getLogger("sidecar.unheard")
_UNHEARD.setLevel(logging.CRITICAL + 1)


Role = Literal["listen", "admin", "probes"]


class CannotStart(Exception):
    """Why not, and what to do."""


class Sidecar:
    """Everything that runs. Use `start`, then `stop`."""

    def __init__(
        self,
        loaded: Loaded,
        log: Log,
        lookup: Lookup | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        given: GivenSockets | None = None,
        takeover: bool = False,
    ) -> None:
        """`takeover`: from the sidecar that owns `state_dir`, if there is one."""
        if not getattr(aiohttp.http_parser, "HttpRequestParserC", None):
            raise CannotStart(
                "aiohttp is installed without its C parser, whose checks the proxy relies on; "
                "install a wheel built for this platform"
            )
        self.log = log
        try:
            self.proxy = Proxy(loaded.settings, log, __version__, lookup, environ)
        except TooFew as few:
            raise CannotStart(str(few)) from few
        senders = Senders(self.proxy, environ or {})
        self.proxy.kept.on_open = senders.attach
        self.proxy.on_breaker_closed = senders.breaker_closed
        self.reloading = Reloading(self.proxy, loaded, environ or {})
        self.api = Api(self.proxy, self.reloading)
        self._stopping = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []
        self._listener = Listener(self.proxy)
        self._servers: list[asyncio.Server] = []
        self._side_servers: list[tuple[asyncio.Server, Door, Role]] = []
        self._runners: list[web.AppRunner] = []
        self._lock: StateLock | None = None
        self._given = given
        self._takeover = takeover
        self._taking_store: asyncio.Task[None] | None = None
        self._offer: Offer | None = None
        self.on_handed_over: Callable[[], None] | None = None
        """Set before the start by whoever lets another process take the place of this one; called when it has."""
        self.successor: int | None = None
        """The process that has taken our place."""
        self.address = ("", 0)
        self.admin_address = ("", 0)
        self.probes_address: tuple[str, int] | None = None

    @property
    def settings(self) -> Settings:
        """In force now. Nothing here keeps those of the start."""
        return self.proxy.settings

    def _loop_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What nobody else has caught: in a callback, in a task that nobody waits for, in the loop itself."""
        what = str(context.get("message") or "a callback failed")
        error = context.get("exception") or RuntimeError(what)
        task = context.get("task") or context.get("future")
        if isinstance(task, asyncio.Task):
            what = f"{what} ({task.get_name()})"
        self.proxy.signals.internal_error("loop", what, error)

    def thread_fault(self, context: threading.ExceptHookArgs) -> None:
        """For `threading.excepthook`."""
        error = context.exc_value or RuntimeError(str(context.exc_type))
        name = "a thread" if context.thread is None else f"the thread {context.thread.name}"
        self._fault_elsewhere("thread", f"{name} ended by a fault", error)

    def unraisable_fault(self, context: sys.UnraisableHookArgs) -> None:
        """For `sys.unraisablehook`: a finaliser failed, or a callback from C, where nobody can catch it. The object is
        only named, because keeping it would bring it back to life."""
        error = context.exc_value or RuntimeError(str(context.exc_type))
        where = getattr(context.object, "__qualname__", None) or type(context.object).__qualname__
        component = "loop" if threading.current_thread() is threading.main_thread() else "thread"
        self._fault_elsewhere(component, f"{context.err_msg or 'a fault that nobody could catch'} ({where})", error)

    def _fault_elsewhere(self, component: str, what: str, error: BaseException) -> None:
        """Between two things that the loop does, or at once where it has ended."""
        tell = partial(self.proxy.signals.internal_error, component, what, error)
        try:
            self.proxy.loop.call_soon_threadsafe(tell)
        except RuntimeError:
            tell()

    async def start(self) -> None:
        self.proxy.loop.set_exception_handler(self._loop_fault)
        settings, proxy, path = self.settings, self.proxy, self.reloading.loaded.path
        taking = await self._claim(Path(settings.state_dir))
        certificates = look_at_each(certificate_files(settings))
        try:
            if taking is not None:
                await self._look_beside(taking)
                self.api.not_ready = None  # the same socket leads to the other one as well, which is ready
            tls = self._shown("admin", settings.admin.tls)
            self.admin_address = await self._serve(settings.admin, "admin", tls)
            if settings.probes is not None:
                self.probes_address = await self._serve(settings.probes, "probes")
            scheme = "http" if tls is None else "https"
            proxy.answers.documentation = f"{scheme}://{join_host_port(*self.admin_address)}"
            if taking is None:
                await self._open_store()
            self.address = await self._listen()
            if self._given is not None:
                self._given.close()
            if taking is not None:
                for server in (*self._servers, *(server for server, *_ in self._side_servers)):
                    await server.start_serving()
                await proxy.loop.run_in_executor(None, taking.ready)
        except BaseException as error:
            await proxy.kept.close()
            await self._close_servers()
            if isinstance(error, (CannotListen, CannotTakeOver)):
                raise CannotStart(str(error)) from error
            raise
        if any(upstream.intercept for upstream in settings.upstreams.values()):
            proxy.interception.prepare()
        proxy.ticker.on_lag = proxy.metrics.loop_lag
        proxy.ticker.start()
        self.api.not_ready = None
        warn_of_unverified(self.log, settings)
        if settings.admin.tls is None and not is_loopback(settings.admin.host):
            self.log.warn(
                "sidecar.admin.unencrypted",
                "tokens for the admin port travel in clear beyond this machine; set `admin.tls`",
            )
        self.log.info(
            "sidecar.started",
            f"listening on {join_host_port(*self.address)}, admin on {join_host_port(*self.admin_address)}",
            listen=join_host_port(*self.address),
            admin=join_host_port(*self.admin_address),
            probes=join_host_port(*self.probes_address) if self.probes_address else None,
            version=__version__,
            config=str(path) if path else None,
            state_dir=str(settings.state_dir),
        )
        if taking is not None:
            told = f"process {taking.pid} has handed its listeners over; state_dir follows when it has finished"
            self.log.info("sidecar.taken_over", told, predecessor=taking.pid)
            self._taking_store = clock.spawn(self._take_store(taking.pid), "take the store over")
        else:
            self._offer_place()
        shortage = proxy.descriptors.shortage(settings.limits.connections)
        if shortage is not None:
            # Nobody asked for the default: that not quite all of it fits is no reason to be alarmed at every start.
            asked = self.reloading.loaded.origins.get("limits.connections", "default") != "default"
            alarming = asked or proxy.descriptors.apps_below < settings.limits.connections
            (self.log.warn if alarming else self.log.info)("sidecar.descriptors.short", shortage)
        if path is not None and path.is_file():  # not a pipe, which can be read only once
            last_read = lambda: self.reloading.last_read  # noqa: E731  # a name says what it is
            looking = partial(watch, path, last_read, lambda: self.reload("the file changed"), self._stopping)
            self._watching.append(clock.spawn(self._watch(looking, str(path)), "watching the configuration"))
        files = lambda: certificate_files(self.settings)  # noqa: E731
        looking = partial(
            watch_each, files, certificates, lambda: self.reload("a certificate was renewed"), self._stopping
        )
        self._watching.append(clock.spawn(self._watch(looking, "certificates"), "watching certificates"))

    async def _watch(self, looking: Callable[[], Awaitable[None]], at: str) -> None:
        try:
            await looking()
        except Exception as error:  # whatever it is, the sidecar runs on without it
            self.log.warn(
                "sidecar.config.unwatched",
                f"changes of {at} are not noticed by themselves ({error}); use SIGHUP or POST /reload",
            )

    async def reload(self, why: str) -> None:
        """Put the configuration on disk in force, for whoever asks without waiting for an answer; the log has it."""
        try:
            done = await self.reloading.reload(why)
        except NotApplied:
            return  # told, and remembered for /readyz
        except Exception as error:
            self.proxy.signals.internal_error("reload", "a reload failed inside the sidecar", error)
            return
        if done.changed:
            await self.api.changes.note_own("signal" if why == "SIGHUP" else "file", done)

    async def stop(self, grace: float | None = None) -> bool:
        """Drain, then close. True if everything in flight ended within the grace."""
        proxy = self.proxy
        grace = proxy.settings.shutdown_grace if grace is None else grace
        deadline = clock.monotonic() + grace
        if self.successor is None:  # else whoever asks here over a kept connection asks about both
            self.api.not_ready = "draining"
        self._stopping.set()
        if self._offer is not None:
            self._offer.close()
        proxy.drain()
        for server in self._servers:
            server.close()
        await clock.sleep(min(_LAST_REQUESTS if self.successor is None else _LAST_REQUESTS_BESIDE, grace))
        while clock.monotonic() < deadline:
            self._close_idle()
            if self.successor is not None and self._lock is not None and not self._store_needed():
                await self._give_store_up()
            if not proxy.downstreams and not proxy.tunnels and not proxy.errands:
                break
            await clock.sleep(0.05)
        left = self._under_way()
        if left:
            await self._cut_off()
        for connection in self._downstreams():
            connection.cut_off()
        await clock.sleep(0)
        if self._watching:
            await asyncio.wait(self._watching, timeout=_LAST_LOOK)  # a disk may take for ever
        if self._taking_store is not None:
            self._taking_store.cancel()
        await proxy.kept.close()  # what it still sends needs the upstreams
        self.reloading.end()
        proxy.directory.close()
        proxy.dialler.resolver.close()
        proxy.interception.close()
        if proxy.guard is not None:
            proxy.guard.close()
        proxy.ticker.stop()
        await self._close_servers()
        proxy.signals.gather_last()
        await asyncio.get_running_loop().run_in_executor(None, proxy.signals.close)
        told = (
            f"stopped; the grace ended before {left} of what was under way did, which was cut off"
            if left
            else "stopped"
        )
        self.log.info("sidecar.stopped", told, cut_off=left)
        return not left

    def _under_way(self) -> int:
        """Requests, tunnels and errands that have not ended."""
        busy = sum(connection.busy for connection in self._downstreams())
        return busy + len(self.proxy.tunnels) + len(self.proxy.errands)

    async def _cut_off(self) -> None:
        """The grace is over. Requests are answered and kept, while there is time; tunnels are closed."""
        proxy, deadline = self.proxy, clock.monotonic() + _LAST_WORDS
        proxy.cutting_off = True
        while clock.monotonic() < deadline:
            for tunnel in tuple(proxy.tunnels):
                tunnel.cut_off()
            for errand in tuple(proxy.errands):
                errand.cut_off()
            for connection in self._downstreams():
                connection.cut_exchange_off()
            self._close_idle()
            if not self._under_way() and not any(connection.lingering for connection in self._downstreams()):
                break
            await clock.sleep(_LOOK_AGAIN)

    # ---- one after the other -------------------------------------------------------------------------------------

    async def _claim(self, state_dir: Path) -> Taking | None:
        """The directory is ours, or, where we are to take the place of its owner, he has passed his sockets on."""
        try:
            self._lock = self.proxy.kept.lock = StateLock.take(state_dir)
        except InUse as taken:
            if not self._takeover:
                raise CannotStart(f"{taken}; or take its place with `sidecar run --takeover`") from taken
        except Trouble as trouble:
            raise CannotStart(str(trouble)) from trouble
        if self._lock is not None:
            return None
        try:
            taking = await self.proxy.loop.run_in_executor(None, Taking, state_dir)
        except CannotTakeOver as why:
            raise CannotStart(str(why)) from why
        self._given = GivenSockets(taking.given, f"process {taking.pid}")
        return taking

    async def _look_beside(self, taking: Taking) -> None:
        """What operators have ordered holds here from the first request on, though the store is not ours yet."""
        kept, loop = self.proxy.kept, self.proxy.loop
        kept.expect(taking.pid)
        if not kept.path.exists():
            return
        orders = await loop.run_in_executor(None, importlib.import_module, "sidecar.durable.orders")
        try:
            runtime, forced = await loop.run_in_executor(None, orders.read_beside, kept.path, clock.wall())
        except Trouble as trouble:
            raise CannotStart(f"{trouble}; process {taking.pid} goes on as before") from trouble
        await self.reloading.begin_with(runtime, forced)

    async def _take_store(self, owner: int) -> None:
        """As soon as its owner has finished, or is dead: then the kernel gives his lock up."""
        state_dir, kept = Path(self.settings.state_dir), self.proxy.kept
        while self._lock is None:
            try:
                self._lock = StateLock.take(state_dir)
            except Trouble:
                await clock.sleep(_LOOK_AGAIN)
        seen = self.reloading.runtime
        await kept.arrive(self._lock)
        await self.reloading.compare(seen)
        self.log.info("sidecar.store.taken_over", f"process {owner} has given state_dir up; it is in use here now")
        self._offer_place()

    def _offer_place(self) -> None:
        """Let another process take our place, when one asks for it."""
        if self.on_handed_over is None:
            return
        offer = Offer(Path(self.settings.state_dir), self._passed_on, self._hand_over)
        try:
            offer.open()
        except OSError as error:
            told = f"no other sidecar can take the place of this one (`run --takeover`): {error}; a restart is needed"
            self.log.warn("sidecar.handover.impossible", told)
            return
        self._offer = offer

    def _passed_on(self) -> list[Given]:
        settings = self.settings
        asked: dict[Role, Listen | Admin | Probes] = {"listen": settings.listen, "admin": settings.admin}
        if settings.probes is not None:
            asked["probes"] = settings.probes
        roles: list[tuple[asyncio.Server, Role]] = [(server, "listen") for server in self._servers]
        roles += [(server, role) for server, _, role in self._side_servers]
        return [
            Given(role, asked[role].host, asked[role].port, sock) for server, role in roles for sock in server.sockets
        ]

    async def _hand_over(self, successor: int) -> None:
        """Another process accepts on the same sockets: here nothing is accepted any more, and a drain begins."""
        self.successor = successor
        for server in self._servers:
            server.close()
        for server, door, _ in self._side_servers:
            server.close()
            door.leaving = True
        self.api.events.end()  # who follows them asks again, and is answered by the other one
        if self.on_handed_over is not None:
            self.on_handed_over()

    def _store_needed(self) -> bool:
        proxy = self.proxy
        return bool(proxy.errands) or proxy.kept.writing or any(c.needs_store for c in self._downstreams())

    async def _give_store_up(self) -> None:
        """Streams and tunnels that go on need it no more; the one that took our place does."""
        await self.proxy.kept.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _open_store(self) -> None:
        """What an earlier run left is reconciled before anything is served."""
        try:
            await self.proxy.kept.begin()
            await self.reloading.begin()
        except Trouble as trouble:
            raise CannotStart(str(trouble)) from trouble
        except OSError as error:
            raise CannotStart(
                f"state_dir {self.settings.state_dir} cannot be used: {error}; make it readable and writable, or set "
                "another `state_dir`"
            ) from error

    def _downstreams(self) -> list[Downstream]:
        return [c for c in tuple(self.proxy.downstreams) if isinstance(c, Downstream)]

    def _close_idle(self) -> None:
        self.proxy.handshakes.close()
        for connection in self._downstreams():
            if not connection.busy and not connection.lingering:
                connection.force_close()

    async def _listen(self) -> tuple[str, int]:
        listen = self.settings.listen
        loop = asyncio.get_running_loop()
        accept: Callable[[], asyncio.Protocol] = self._listener
        if self.proxy.guard is not None:
            from sidecar.guarded import Guarded  # here and below: not for those who do not use it

            accept = partial(Guarded, self._listener, self.proxy.guard)
        tls = self._shown("listen", listen.tls)
        if tls is not None:
            from sidecar.front import Front

            accept = partial(Front, self.proxy, self.proxy.handshakes, accept, tls)
        place = (listen.host, listen.port)
        self._servers = servers = await listening(
            loop,
            accept,
            "listen",
            place,
            self._given,
            shared=listen.reuse_port,
            at_once=self.proxy.kept.still_with is None,
        )
        return self._open_at(servers, "proxy")

    def _shown(self, role: str, files: ServerCertificate | None) -> Shown | None:
        if files is None:
            return None
        try:
            shown = Shown(role, files)
        except UnusableCertificates as unusable:
            raise CannotStart(str(unusable)) from unusable
        self.reloading.shown.append(shown)
        return shown

    def _open_at(self, servers: list[asyncio.Server], role: str) -> tuple[str, int]:
        """The first address; none of them is a target of anybody's request."""
        addresses = [sock.getsockname() for server in servers for sock in server.sockets]
        for address in addresses:
            self.proxy.egress.add_listener(address[0], address[1], role)
        return addresses[0][0], addresses[0][1]

    async def _serve(
        self, where: Admin | Probes, role: Literal["admin", "probes"], tls: Shown | None = None
    ) -> tuple[str, int]:
        host, port, proxy = where.host, where.port, self.proxy
        door = Door(proxy, proxy.descriptors.side_doors_each)
        app = self.api.application(door, probes_only=role == "probes")
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1,
            logger=_UNHEARD,
            max_line_size=_ADMIN_TARGET,
        )
        await runner.setup()
        self._runners.append(runner)
        assert runner.server is not None
        door.serve = runner.server
        accept: Callable[[], asyncio.Protocol] = door
        if tls is not None:
            from sidecar.front import Front

            accept = partial(Front, proxy, door.handshakes, door, tls)
        servers = await listening(
            proxy.loop, accept, role, (host, port), self._given, at_once=proxy.kept.still_with is None
        )
        self._side_servers += [(server, door, role) for server in servers]
        return self._open_at(servers, role)

    async def _close_servers(self) -> None:
        for server in self._servers:
            server.close()
        for server, door, _ in self._side_servers:
            server.close()
            door.handshakes.close()
        self._side_servers.clear()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def lock_state_dir(path: Path) -> StateLock:
    """Raises CannotStart when another process has it."""
    try:
        return StateLock.take(path)
    except Trouble as trouble:
        raise CannotStart(str(trouble)) from trouble
