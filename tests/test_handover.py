"""A restart that nobody notices: `sidecar run --takeover`, and sockets that systemd holds. Real processes under load;
`SIDECAR_TEST_RESTARTS=10` makes it ten restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.conftest import UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.upstream import Talk, answer
from tests.test_dead_letters_live import until
from tests.test_lifecycle import FREE_PORTS, REPOSITORY, Process

RESTARTS = int(os.environ.get("SIDECAR_TEST_RESTARTS", "3"))
GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
POST = "POST /u/pay HTTP/1.1\r\nHost: s\r\nIdempotency-Key: %s\r\nContent-Length: 2\r\n\r\nhi"
READY = "GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Machine:
    """One configuration and its processes, one after the other."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder = folder
        self.keys = keys
        self.processes: list[Process] = []
        self._apps: list[App] = []

    async def app(self, address: tuple[str, int]) -> App:
        self._apps.append(await App.connect(address))
        return self._apps[-1]

    async def end(self) -> None:
        for app in self._apps:
            app.close()
        for process in self.processes:
            await process.clean_up()

    async def start(self, *words: str, environ: dict[str, str] | None = None, **given: Any) -> Process:
        (self.folder / "sidecar.yaml").write_text(json.dumps(self.keys))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidecar", "run", "-c", "sidecar.yaml", *words),
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder,
            env={**clean, "PYTHONPATH": str(REPOSITORY), **FREE_PORTS, **(environ or {})},
            **given,
        )
        self.processes.append(Process(process))
        return self.processes[-1]


@pytest_asyncio.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    await machine.end()


def failing_posts() -> Any:
    """GETs are answered, POSTs fail."""

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            await talk.send(answer(b"", "503 Service Unavailable") if head.startswith(b"POST") else answer(b"fine"))

    return script


async def asked(address: tuple[str, int], request: str) -> Reply:
    app = await App.connect(address)
    try:
        return await app.ask(request)
    finally:
        app.close()


_PAUSE = 0.004


class Load:
    """Clients that ask all the time; what they got."""

    def __init__(self, address: tuple[str, int], admin: tuple[str, int]) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self.unready: list[Any] = []
        self.letters: set[str] = set()
        self._over = False
        self._address, self._admin = address, admin
        work = [self._kept(), self._kept(), self._new(), self._new(), self._posting()]
        work += [self._probing(kept=True), self._probing(kept=False)]
        self._tasks = [asyncio.create_task(one) for one in work]

    async def end(self) -> None:
        self._over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)

    async def _kept(self) -> None:
        """Asks over one connection until it is told that it ends."""
        while not self._over:
            app: App | None = None
            try:
                app = await App.connect(self._address)
                closing = False
                while not (closing or self._over):
                    reply = await app.ask(GET)
                    self._note(reply, 200)
                    closing = reply.get("connection") == "close"
                    await asyncio.sleep(_PAUSE)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.failed.append(f"kept connection: {error!r}")
            finally:
                if app is not None:
                    app.close()

    async def _new(self) -> None:
        while not self._over:
            try:
                self._note(await asked(self._address, GET), 200)
                await asyncio.sleep(_PAUSE)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.failed.append(f"new connection: {error!r}")

    async def _posting(self) -> None:
        count = 0
        while not self._over:
            count += 1
            try:
                app = await App.connect(self._address)
                await app.send(POST % f"key-{count}")
                reply = await app.reply(within=60)
                app.close()
                self._note(reply, 503)
                self.letters.add(reply.get("x-sidecar-dlq-id") or f"none: {reply}")
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.failed.append(f"post: {error!r}")
            await asyncio.sleep(2 * _PAUSE)

    async def _probing(self, *, kept: bool) -> None:
        """A health check, over new connections or over one for as long as it is kept."""
        app: App | None = None
        while not self._over:
            try:
                app = app or await App.connect(self._admin)
                reply = await app.ask(READY)
                if reply.status != 200:
                    self.unready.append(reply.json)
                if not kept or reply.get("connection") == "close":
                    app.close()
                    app = None
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.unready.append(repr(error))
                app = None
            await asyncio.sleep(2 * _PAUSE)
        if app is not None:
            app.close()

    def _note(self, reply: Reply, status: int) -> None:
        if (reply.status, reply.complete) == (status, True):
            self.answered += 1
        else:
            self.failed.append(str(reply))


@pytest.mark.timeout(60 + 40 * RESTARTS)
async def test_under_load_no_restart_refuses_a_connection_fails_a_request_or_loses_what_was_kept(
    machine: Machine, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(failing_posts())
    machine.keys = {
        "upstreams": {"u": {"route": "/u", "endpoints": [upstream.url], "breaker": {"enabled": False}}},
        "policies": {"default": {"max_attempts": 1}},
        "telemetry": {"log": {"level": "info"}},
    }
    old = await (await machine.start()).ready()
    load = Load(old.address, old.admin_address)
    for _ in range(RESTARTS):
        seen = load.answered
        await until(lambda seen=seen: load.answered > seen + 50)
        new = await (await machine.start("--takeover")).ready()
        assert (old.address, old.admin_address) == (new.address, new.admin_address)
        assert 0 == await old.ended()
        await new.logged("sidecar.store.taken_over")
        old = new
    seen = load.answered
    await until(lambda: load.answered > seen + 50)
    await load.end()
    assert ([], []) == (load.failed[:5], load.unready[:5])
    kept: set[str] = set()
    page = await old.admin("/dlq?limit=500")
    while True:
        kept |= {entry["dlq_id"] for entry in page.json["items"]}
        if page.json["next_cursor"] is None:
            break
        page = await old.admin(f"/dlq?limit=500&cursor={page.json['next_cursor']}")
    assert set() == load.letters - kept
    assert len(load.letters) > 3 * RESTARTS


async def test_the_old_one_finishes_what_it_began_while_the_new_one_serves(
    machine: Machine, start_upstream: UpstreamStarter
) -> None:
    go_on = asyncio.Event()

    async def slow(talk: Talk) -> None:
        head, _ = await talk.read_request()
        if b"/slow" in head:
            await go_on.wait()
        await talk.send(answer(b"finished", "503 Service Unavailable" if head.startswith(b"POST") else "200 OK"))

    upstream = await start_upstream(slow)
    machine.keys = {
        "upstreams": {"u": {"route": "/u", "endpoints": [upstream.url], "breaker": {"enabled": False}}},
        "policies": {"default": {"max_attempts": 1}},
    }
    old = await (await machine.start()).ready()
    paying = await machine.app(old.address)
    await paying.send((POST % "a").replace("/pay", "/slow"))
    await until(lambda: upstream.requests)
    new = await (await machine.start("--takeover")).ready()
    assert 200 == (await asked(new.address, GET)).status
    waiting = await machine.app(new.address)
    await waiting.send(POST % "b")  # its key is checked, and its failure kept, in a store that is not ours yet
    told = (await new.admin("/readyz")).json
    assert ("ready", True) == (told["status"], f"process {old.pid}" in told["store"])
    refused = await new.admin("/dlq")
    assert (503, True) == (refused.status, f"process {old.pid}" in refused.json["message"])
    assert 2 == len(upstream.requests)
    go_on.set()
    first, second = await paying.reply(), await waiting.reply(within=30)
    assert (503, 503) == (first.status, second.status)
    assert 0 == await old.ended()
    ids = {entry["dlq_id"] for entry in (await new.admin("/dlq")).json["items"]}
    assert {first.get("x-sidecar-dlq-id"), second.get("x-sidecar-dlq-id")} == ids
    assert "store" not in {key for key, value in (await new.admin("/readyz")).json.items() if value}


async def test_a_stream_that_goes_on_in_the_old_one_does_not_hold_the_store(
    machine: Machine, start_upstream: UpstreamStarter
) -> None:
    go_on = asyncio.Event()

    async def streaming(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await go_on.wait()
        await talk.send(b"0\r\n\r\n")

    upstream = await start_upstream(streaming)
    machine.keys = {"upstreams": {"u": {"route": "/u", "endpoints": [upstream.url]}}, "shutdown_grace": 60}
    old = await (await machine.start()).ready()
    reading = await machine.app(old.address)
    await reading.send(GET)
    assert b"HTTP/1.1 200" in await reading.reader.readuntil(b"hello\r\n")
    new = await (await machine.start("--takeover")).ready()
    await new.logged("sidecar.store.taken_over")
    assert old._process.returncode is None
    go_on.set()
    assert b"0\r\n\r\n" == await asyncio.wait_for(reading.reader.readexactly(5), 10)
    assert 0 == await old.ended()


async def test_what_an_operator_has_ordered_holds_in_the_new_one_from_its_first_request(
    machine: Machine, start_upstream: UpstreamStarter
) -> None:
    go_on = asyncio.Event()

    async def held(talk: Talk) -> None:
        await talk.read_request()
        await go_on.wait()
        await talk.send(answer())

    upstream = await start_upstream(held)
    machine.keys = {"upstreams": {"u": {"route": "/u", "endpoints": [upstream.url]}}}
    old = await (await machine.start()).ready()
    assert 200 == (await asked(old.admin_address, "POST /retries/disable HTTP/1.1\r\nHost: localhost\r\n\r\n")).status
    holding = await machine.app(old.address)
    await holding.send(GET)
    await until(lambda: upstream.requests)
    new = await (await machine.start("--takeover")).ready()
    assert f"process {old.pid}" in (await new.admin("/readyz")).json["store"]
    assert not (await new.admin("/config")).json["settings"]["retries_enabled"]
    go_on.set()
    assert 200 == (await holding.reply()).status
    await new.logged("sidecar.store.taken_over")
    assert not (await new.admin("/config")).json["settings"]["retries_enabled"]


async def test_a_new_one_that_cannot_start_changes_nothing_for_the_old_one(machine: Machine) -> None:
    old = await (await machine.start()).ready()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        machine.keys = {"probes": {"host": "127.0.0.1", "port": taken.getsockname()[1]}}
        failed = await machine.start("--takeover")
        assert 1 == await failed.ended()
    assert "in use" in (await failed.logged("sidecar.cannot_start"))["body"]
    assert 200 == (await old.admin("/readyz")).status
    machine.keys = {"no_such_key": 1}
    assert 2 == await (await machine.start("--takeover")).ended()
    assert 200 == (await old.admin("/readyz")).status
    machine.keys = {}
    plain = await machine.start()
    assert 1 == await plain.ended()
    assert "--takeover" in (await plain.logged("sidecar.cannot_start"))["body"]


async def test_an_old_one_that_is_killed_meanwhile_leaves_everything_to_the_new_one(
    machine: Machine, start_upstream: UpstreamStarter
) -> None:
    async def silent(talk: Talk) -> None:
        await talk.read_request()
        await asyncio.Event().wait()

    upstream = await start_upstream(silent)
    machine.keys = {"upstreams": {"u": {"route": "/u", "endpoints": [upstream.url]}}, "shutdown_grace": 60}
    old = await (await machine.start()).ready()
    app = await machine.app(old.address)
    await app.send(GET)
    await until(lambda: upstream.requests)
    new = await (await machine.start("--takeover")).ready()
    old.signal(signal.SIGKILL)
    await new.logged("sidecar.store.taken_over")
    assert 200 == (await new.admin("/readyz")).status


async def test_without_an_old_one_a_takeover_is_a_start(machine: Machine) -> None:
    alone = await (await machine.start("--takeover")).ready()
    assert 200 == (await alone.admin("/readyz")).status
    alone.signal(signal.SIGTERM)
    assert 0 == await alone.ended()
    assert not (machine.folder / "sidecar-data" / "handover").exists()


async def test_two_with_directories_of_their_own_share_a_port_if_both_say_so(tmp_path: Path) -> None:
    from config.model import Settings
    from sidecar.sockets import CannotListen, listening

    assert not Settings().listen.reuse_port
    loop = asyncio.get_running_loop()
    (first,) = await listening(loop, asyncio.Protocol, "listen", ("127.0.0.1", 0), None, shared=True)
    place = first.sockets[0].getsockname()
    (second,) = await listening(loop, asyncio.Protocol, "listen", place, None, shared=True)
    with pytest.raises(CannotListen, match=r"in use by another program.*SIDECAR__LISTEN__PORT"):
        await listening(loop, asyncio.Protocol, "listen", place, None)
    for server in (first, second):
        server.close()


# ---- the service manager -----------------------------------------------------------------------------------------


def opened(host: str = "127.0.0.1") -> socket.socket:
    listening = socket.socket()
    listening.bind((host, 0))
    listening.listen(128)
    return listening


async def activated(machine: Machine, sockets: dict[str, socket.socket], **environ: str) -> Process:
    """As systemd starts it: the sockets from descriptor 3 on, and its own process id in `LISTEN_PID`."""
    passed = [os.dup(one.fileno()) for one in sockets.values()]
    moves = "; ".join(f"os.dup2({fd}, {3 + place})" for place, fd in enumerate(passed))
    (machine.folder / "as_systemd.py").write_text(
        "import os, sys\n"
        f"high = [os.dup2(fd, 100 + place) for place, fd in enumerate({passed})]\n"
        "[os.dup2(fd, 3 + place) for place, fd in enumerate(high)]\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'sidecar', 'run', '-c', 'sidecar.yaml'])\n"
    )
    assert moves
    (machine.folder / "sidecar.yaml").write_text(json.dumps(machine.keys))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR")}
    names = {"LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": ":".join(sockets)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "as_systemd.py"),
        stderr=asyncio.subprocess.PIPE,
        cwd=machine.folder,
        env={**clean, "PYTHONPATH": str(REPOSITORY), **names, **environ},
        pass_fds=passed,
    )
    for fd in passed:
        os.close(fd)
    machine.processes.append(Process(process))
    return machine.processes[-1]


def at(sock: socket.socket) -> dict[str, Any]:
    host, port = sock.getsockname()
    return {"host": host, "port": port}


async def test_sockets_of_the_service_manager_are_served_and_it_is_told_how_far_we_are(
    machine: Machine, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(failing_posts())
    with (
        opened() as listen,
        opened() as admin,
        opened() as probes,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told,
    ):
        told.bind(str(machine.folder / "notify"))
        told.setblocking(False)
        machine.keys = {
            "listen": at(listen),
            "admin": at(admin),
            "probes": at(probes),
            "upstreams": {"u": {"route": "/u", "endpoints": [upstream.url]}},
        }
        sockets = {"listen": listen, "admin": admin, "probes": probes}
        waiting = await machine.app(listen.getsockname())  # before there is anybody to accept it
        await waiting.send(GET)
        process = await activated(machine, sockets, NOTIFY_SOCKET=str(machine.folder / "notify"))
        assert 200 == (await waiting.reply()).status
        await process.ready()
        assert (listen.getsockname(), admin.getsockname()) == (process.address, process.admin_address)
        assert 200 == (await asked(probes.getsockname(), READY)).status
        first = await _heard(told)
        assert first.startswith(b"READY=1\nSTATUS=listening on 127.0.0.1:")
        process.signal(signal.SIGTERM)
        assert (await _heard(told)).startswith(b"STOPPING=1\n")
        assert 0 == await process.ended()
        between = await machine.app(listen.getsockname())  # nobody runs, and it is not refused
        await between.send(GET)
        await (await activated(machine, sockets)).ready()
        assert 200 == (await between.reply()).status


async def _heard(told: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(told, 4096), 15)


async def test_a_socket_at_another_address_than_the_configuration_checked_is_refused(machine: Machine) -> None:
    with opened("0.0.0.0") as everywhere:
        machine.keys = {"listen": {"port": everywhere.getsockname()[1]}, "admin": {"port": 0}}
        process = await activated(machine, {"listen": everywhere})
        assert 1 == await process.ended()
    why = (await process.logged("sidecar.cannot_start"))["body"]
    assert "0.0.0.0" in why or "in use" in why
