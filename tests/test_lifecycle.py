"""The life of the process: `python -m sidecar` as a person, an orchestrator or a second copy of it meets it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.conftest import UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.upstream import Talk, Upstream, always, answer

REPOSITORY = Path(__file__).resolve().parent.parent
FREE_PORTS = {"SIDECAR__LISTEN__PORT": "0", "SIDECAR__ADMIN__PORT": "0"}
GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
_PATIENCE = 60  # a start takes long where many share a core


class Process:
    """`python -m sidecar run`, its log lines and its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        self._apps: list[App] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            self.text.append(raw.decode())
            if raw.startswith(b"{"):
                self.lines.append(json.loads(raw))
            async with self._news:
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def logged(self, event: str) -> dict[str, Any]:
        """The first line with this event, as soon as there is one."""

        def found() -> dict[str, Any] | None:
            return next((line for line in self.lines if line["event_name"] == event), None)

        async with asyncio.timeout(_PATIENCE), self._news:
            await self._news.wait_for(lambda: found() or self._process.stderr.at_eof())
        line = found()
        assert line is not None, "".join(self.text)
        return line

    async def ready(self) -> Process:
        started = await self.logged("sidecar.started")
        self.address = _address(started["listen"])
        self.admin_address = _address(started["admin"])
        return self

    async def app(self) -> App:
        self._apps.append(await App.connect(self.address))
        return self._apps[-1]

    async def admin(self, path: str) -> Reply:
        app = await App.connect(self.admin_address)
        try:
            return await app.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        finally:
            app.close()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        code = await asyncio.wait_for(self._process.wait(), _PATIENCE)
        await self._reader
        return code

    async def clean_up(self) -> None:
        for app in self._apps:
            app.close()
        if self._process.returncode is None:
            self._process.kill()
        await self.ended()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


Runner = Callable[..., Any]


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Runner]:
    """Start a process; keys are the configuration file, none means no file at all."""
    processes: list[Process] = []

    async def start(environ: dict[str, str] | None = None, **keys: Any) -> Process:
        arguments = ["run"]
        if keys:
            (tmp_path / "sidecar.yaml").write_text(json.dumps(keys))
            arguments += ["-c", str(tmp_path / "sidecar.yaml")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidecar", *arguments),
            stderr=asyncio.subprocess.PIPE,
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": str(REPOSITORY), **FREE_PORTS, **(environ or {})},
        )
        processes.append(Process(process))
        return processes[-1]

    yield start
    for process in processes:
        await process.clean_up()


def routed(upstream: Upstream) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url]}}


# ---- start -------------------------------------------------------------------------------------------------------


async def test_it_runs_without_any_file_and_says_where_it_listens(run: Runner, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(answer(b"hello")))
    process = await (await run()).ready()
    started = await process.logged("sidecar.started")
    assert 0 not in (process.address[1], process.admin_address[1])
    assert (None, None, "INFO") == (started["config"], started["probes"], started["severity_text"])
    for told in (started["listen"], started["admin"]):
        assert told in started["body"]
    reply = await (await process.app()).ask(f"GET {upstream.url}/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (200, b"hello") == (reply.status, reply.body)
    assert 200 == (await process.admin("/readyz")).status
    process.signal(signal.SIGTERM)
    assert 0 == await process.ended()


async def test_what_it_writes_is_for_its_owner_alone(run: Runner, tmp_path: Path) -> None:
    process = await (await run(state_dir="deep/state")).ready()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep").rglob("*")}
    assert {"state": 0o700, "lock": 0o600, "handover": 0o600} == modes
    assert 0o700 == stat.S_IMODE((tmp_path / "deep").stat().st_mode)
    process.signal(signal.SIGINT)
    assert 0 == await process.ended()


async def test_a_state_directory_that_others_could_read_is_closed_to_them(run: Runner, tmp_path: Path) -> None:
    state = tmp_path / "open"
    state.mkdir(mode=0o755)
    state.chmod(0o755)
    await (await run(state_dir=str(state), listen={"port": 0}, admin={"port": 0})).ready()
    assert 0o700 == state.stat().st_mode & 0o777


async def test_a_second_process_on_the_same_state_directory_names_the_first_and_does_not_start(run: Runner) -> None:
    first = await (await run()).ready()
    second = await run()
    assert 1 == await second.ended()
    why = (await second.logged("sidecar.cannot_start"))["body"]
    assert f"process {first.pid}" in why
    assert "`state_dir`" in why
    assert 200 == (await first.admin("/readyz")).status


async def test_a_state_directory_is_free_again_after_its_owner_was_killed(run: Runner) -> None:
    first = await (await run()).ready()
    first.signal(signal.SIGKILL)
    assert -signal.SIGKILL == await first.ended()
    await (await run()).ready()


async def test_a_state_directory_that_cannot_be_made_is_explained(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = await run(state_dir="file/state")
    assert 1 == await process.ended()
    why = (await process.logged("sidecar.cannot_start"))["body"]
    assert "file/state" in why
    assert "state_dir" in why


@pytest.mark.parametrize("role", ["listen", "admin", "probes"])
async def test_a_port_that_is_taken_is_named_with_the_way_out(run: Runner, role: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await run(
            {f"SIDECAR__{role.upper()}__HOST": "127.0.0.1", f"SIDECAR__{role.upper()}__PORT": str(port)}
        )
        assert 1 == await process.ended()
    why = (await process.logged("sidecar.cannot_start"))["body"]
    assert f"127.0.0.1:{port} is in use" in why
    assert f"SIDECAR__{role.upper()}__PORT" in why
    assert "Traceback" not in "".join(process.text)


async def test_listening_beyond_loopback_is_refused_unless_only_configured_hosts_may_be_called(run: Runner) -> None:
    open_proxy = await run({"SIDECAR__LISTEN__HOST": "0.0.0.0"})
    assert 2 == await open_proxy.ended()
    told = "".join(open_proxy.text)
    assert "open proxy" in told
    assert "egress.mode: configured_only" in told
    closed = await (await run({"SIDECAR__LISTEN__HOST": "0.0.0.0", "SIDECAR__EGRESS__MODE": "configured_only"})).ready()
    assert "0.0.0.0" == closed.address[0]


async def test_an_admin_port_beyond_loopback_is_refused(run: Runner) -> None:
    process = await run(admin={"host": "0.0.0.0"})
    assert 2 == await process.ended()
    assert "admin.host" in "".join(process.text)


async def test_libraries_that_nothing_needs_yet_are_not_loaded_at_start(run: Runner) -> None:
    process = await (await run({"PYTHONPROFILEIMPORTTIME": "1"})).ready()
    imported = {line.rpartition("|")[2].strip() for line in process.text if line.startswith("import time:")}
    assert {"sidecar.exchange", "uvloop"} <= imported
    assert set() == {name for name in imported if name.partition(".")[0] in ("grpc", "cryptography")}


# ---- drain -------------------------------------------------------------------------------------------------------


def held_back(go_on: asyncio.Event) -> Any:
    """An upstream that answers when it is told to."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(answer(b"finished"))

    return script


async def requests_in_flight(process: Process, upstream: Upstream, count: int) -> list[App]:
    apps = [await process.app() for _ in range(count)]
    for app in apps:
        await app.send(GET)
    async with asyncio.timeout(10):
        while len(upstream.requests) < count:
            await asyncio.sleep(0.01)
    return apps


async def test_a_drain_lets_requests_finish_and_says_it_is_not_ready(
    run: Runner, start_upstream: UpstreamStarter
) -> None:
    go_on = asyncio.Event()
    upstream = await start_upstream(held_back(go_on))
    process = await (await run(upstreams=routed(upstream))).ready()
    apps = await requests_in_flight(process, upstream, 30)
    assert 200 == (await process.admin("/readyz")).status
    process.signal(signal.SIGTERM)
    await process.logged("sidecar.draining")
    unready = await process.admin("/readyz")
    assert (503, "draining") == (unready.status, unready.json["reason"])
    assert 200 == (await process.admin("/livez")).status
    go_on.set()
    for app in apps:
        reply = await app.reply()
        assert (200, b"finished", "close") == (reply.status, reply.body, reply.get("connection"))
    assert 0 == await process.ended()
    assert "stopped" == (await process.logged("sidecar.stopped"))["body"]


async def test_a_sigterm_under_load_drops_no_request(run: Runner, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(answer()))
    process = await (await run(upstreams=routed(upstream))).ready()
    answered = dropped = 0

    async def client() -> None:
        """Asks until it is told that the connection ends, or finds that nobody listens any more."""
        nonlocal answered, dropped
        while True:
            try:
                app = await process.app()
            except ConnectionError:
                return
            try:
                closing = False
                while not closing:
                    await app.send(GET)
                    reply = await app.reply()
                    assert (200, True) == (reply.status, reply.complete)
                    answered += 1
                    closing = reply.get("connection") == "close"
            except (ConnectionError, asyncio.IncompleteReadError):
                dropped += 1
                return
            finally:
                app.close()

    clients = [asyncio.create_task(client()) for _ in range(20)]
    async with asyncio.timeout(10):
        while answered < 500:
            await asyncio.sleep(0.01)
    process.signal(signal.SIGTERM)
    assert 0 == await process.ended()
    await asyncio.wait_for(asyncio.gather(*clients), 10)
    assert 0 == dropped
    assert answered == len(upstream.requests)


async def test_an_idle_connection_does_not_hold_up_the_end(run: Runner, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(answer()))
    process = await (await run(upstreams=routed(upstream), shutdown_grace=60)).ready()
    idle = await process.app()
    assert 200 == (await idle.ask(GET)).status
    process.signal(signal.SIGTERM)
    assert await idle.closed()
    assert 0 == await process.ended()


async def test_a_request_that_outlives_the_grace_is_cut_and_the_exit_code_says_so(
    run: Runner, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(held_back(asyncio.Event()))
    process = await (await run(upstreams=routed(upstream), shutdown_grace=0.2)).ready()
    (app,) = await requests_in_flight(process, upstream, 1)
    process.signal(signal.SIGTERM)
    assert (503, "SHUTTING_DOWN") == ((reply := await app.reply()).status, reply.json["error_code"])
    assert await app.closed()
    assert 1 == await process.ended()
    assert "grace" in (await process.logged("sidecar.stopped"))["body"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_at_once(run: Runner, start_upstream: UpstreamStarter, number: int) -> None:
    upstream = await start_upstream(held_back(asyncio.Event()))
    process = await (await run(upstreams=routed(upstream), shutdown_grace=60)).ready()
    await requests_in_flight(process, upstream, 1)
    process.signal(number)
    await process.logged("sidecar.draining")
    unready = await process.admin("/readyz")  # answered after the step that logs "draining" is over
    assert 503 == unready.status
    process.signal(number)
    assert -number == await process.ended()
    assert "sidecar.stopped" not in {line["event_name"] for line in process.lines}


# ---- reload ------------------------------------------------------------------------------------------------------


async def test_sighup_reads_the_file_again_says_what_it_found_and_keeps_running(run: Runner, tmp_path: Path) -> None:
    process = await (await run(shutdown_grace=5)).ready()
    process.signal(signal.SIGHUP)
    verdict = await process.logged("sidecar.config.reloaded")
    assert ("INFO", True, "SIGHUP") == (verdict["severity_text"], verdict["ok"], verdict["why"])
    process.lines.clear()
    (tmp_path / "sidecar.yaml").write_text("shutdown_grce: 7\n")  # noticed without any signal
    verdict = await process.logged("sidecar.config.reloaded")
    assert ("ERROR", False, "the file changed") == (verdict["severity_text"], verdict["ok"], verdict["why"])
    for told in ("not changed", "sidecar.yaml:1", "shutdown_grce", "shutdown_grace"):
        assert told in verdict["body"]
    (tmp_path / "sidecar.yaml").unlink()
    process.signal(signal.SIGHUP)
    ready = await process.admin("/readyz")
    assert (200, "ready") == (ready.status, ready.json["status"])
    assert ready.json["configuration"]["refused"]
    process.signal(signal.SIGTERM)
    assert 0 == await process.ended()


# ---- a pipe nobody reads -----------------------------------------------------------------------------------------


async def test_standard_error_that_nobody_reads_costs_lines_and_holds_up_nothing(
    start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    upstream = await start_upstream(always(answer(b"no", status="503 Service Unavailable")))
    keys = {"upstreams": routed(upstream), "policies": {"default": {"max_attempts": 1}}, "shutdown_grace": 20}
    (tmp_path / "sidecar.yaml").write_text(json.dumps(keys))
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", "run", "-c", "sidecar.yaml"),
        stderr=writing,
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(REPOSITORY), **FREE_PORTS},
    )
    os.close(writing)
    try:
        started = json.loads(await asyncio.to_thread(os.read, reading, 4096))
        app = await App.connect(_address(started["listen"]))
        for _ in range(30):  # of about 1 kB each
            assert 503 == (await app.ask(GET)).status
        process.send_signal(signal.SIGHUP)
        assert 503 == (await app.ask(GET)).status
        admin = await App.connect(_address(started["admin"]))
        assert 200 == (await admin.ask("GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")).status
        admin.close()
        app.close()
        process.send_signal(signal.SIGTERM)
        assert 0 == await asyncio.wait_for(process.wait(), keys["shutdown_grace"])
    finally:
        os.close(reading)
        if process.returncode is None:
            process.kill()
            await process.wait()
