"""Faults of the sidecar itself, and of the machine below it: counted and told in the log's own shape, or in a sentence with
the way out, never as a stack between the lines."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from config.loader import Loaded
from config.model import Settings
from sidecar import clock
from sidecar.assembly import Sidecar
from sidecar.durable.layers import Durable
from telemetry.logs import Log
from telemetry.names import COMPONENTS
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import store
from tests.doubles.upstream import always, answer
from tests.test_descriptors import limited  # noqa: F401  # a fixture
from tests.test_lifecycle import REPOSITORY, Process, routed

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"


def counted(sidecar: Running, component: str) -> float | None:
    return sidecar.proxy.metrics.registry.get_sample_value("sidecar_internal_errors_total", {"component": component})


def told(sidecar: Running) -> list[str]:
    """The faults in the log, which are taken out of it: the fixture wants none there at the end."""
    lines = [json.loads(line) for line in sidecar.logged.getvalue().splitlines()]
    sidecar.stream.truncate(0)
    sidecar.stream.seek(0)
    return [line["body"] for line in lines if line["event_name"] == "sidecar.internal_error"]


# ---- counted and told --------------------------------------------------------------------------------------------


async def test_every_component_is_shown_with_a_zero_before_its_first_fault(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    assert dict.fromkeys(COMPONENTS, 0.0) == {component: counted(sidecar, component) for component in COMPONENTS}


def test_every_component_that_is_named_in_the_code_is_known() -> None:
    named = {
        word
        for file in Path(REPOSITORY, "sidecar").rglob("*.py")
        for word in re.findall(r'internal_error\(\s*"(\w+)"', file.read_text())
    }
    assert set() == named - set(COMPONENTS)


async def test_a_callback_that_fails_is_counted_and_told_in_one_line(
    start_sidecar: Starter, capfd: pytest.CaptureFixture[str]
) -> None:
    sidecar = await start_sidecar()
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.05)
    assert 1.0 == counted(sidecar, "loop")
    assert 1 == len(told(sidecar))
    assert "Traceback" not in capfd.readouterr().err


async def test_a_task_that_nobody_waits_for_says_which_it_was(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()

    async def fail() -> None:
        raise LookupError

    task = clock.spawn(fail(), "work of a test")
    await asyncio.sleep(0.05)
    del task
    await asyncio.sleep(0.05)
    assert 1.0 == counted(sidecar, "loop")
    (body,) = told(sidecar)
    assert "work of a test" in body


async def test_a_chore_that_fails_is_counted_and_the_others_are_done(
    start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await start_sidecar()
    durable: Durable = await store(sidecar)

    async def fail() -> int:
        raise LookupError

    swept: list[int] = []
    sweep = durable.gate.sweep

    async def swept_after() -> int:
        swept.append(1)
        return await sweep()

    monkeypatch.setattr(durable.upkeep, "judge_due", fail)
    monkeypatch.setattr(durable.gate, "sweep", swept_after)
    await durable.chores()
    await asyncio.sleep(0.05)
    assert ([1], 1.0) == (swept, counted(sidecar, "store"))
    assert 1 == len(told(sidecar))


async def test_a_thread_that_ends_by_a_fault_is_counted(
    start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = await start_sidecar()
    monkeypatch.setattr(threading, "excepthook", sidecar.thread_fault)
    thread = threading.Thread(target=lambda: 1 / 0, name="one of ours")
    thread.start()
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0.05)
    assert 1.0 == counted(sidecar, "thread")
    assert ["the thread one of ours ended by a fault"] == told(sidecar)


@pytest.mark.parametrize("component", ["loop", "thread"])
async def test_a_fault_in_a_finaliser_is_counted_and_told_in_one_line(
    start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], component: str
) -> None:
    sidecar = await start_sidecar()
    monkeypatch.setattr(sys, "unraisablehook", sidecar.unraisable_fault)

    class Resource:
        def __del__(self) -> None:
            raise LookupError("token=canary-in-a-finaliser")

    if component == "loop":
        Resource()
    else:
        await asyncio.to_thread(lambda: (Resource(), None)[1])
    await asyncio.sleep(0.05)
    assert 1.0 == counted(sidecar, component)
    assert "canary" not in sidecar.logged.getvalue()
    (body,) = told(sidecar)
    assert "Resource.__del__" in body
    assert "Traceback" not in capfd.readouterr().err


def test_a_fault_after_the_loop_has_ended_is_told_all_the_same(tmp_path: Path) -> None:
    async def make() -> Sidecar:
        keys = {"listen": {"port": 0}, "admin": {"port": 0}, "state_dir": str(tmp_path / "state")}
        return Sidecar(Loaded(Settings.model_validate(keys), None, {}, b""), Log(stream))

    stream = io.StringIO()
    sidecar = asyncio.run(make())
    thread = threading.Thread(name="one of ours")
    error = LookupError("late")
    sidecar.thread_fault(threading.ExceptHookArgs((LookupError, error, None, thread)))
    sidecar.proxy.signals.writer.flush()
    assert "the thread one of ours ended by a fault" in stream.getvalue()


# ---- standard streams --------------------------------------------------------------------------------------------


async def test_without_standard_error_it_runs_and_nothing_takes_its_place(
    tmp_path: Path, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    file, port = tmp_path / "sidecar.yaml", free_port()
    file.write_text(json.dumps({"listen": {"port": port}, "admin": {"port": 0}, "upstreams": routed(upstream)}))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR")}
    process = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-m", "sidecar", "run", "-c", str(file)),
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        assert 200 == await until_served(port)
        streams = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 1, 2)]
        assert [os.devnull] * 3 == streams
    finally:
        process.send_signal(signal.SIGTERM)
    assert 0 == await asyncio.wait_for(process.wait(), 20)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def until_served(port: int) -> int:
    from tests.doubles.app import App

    async with asyncio.timeout(30):
        while True:
            try:
                app = await App.connect(("127.0.0.1", port))
            except OSError:
                await asyncio.sleep(0.1)
                continue
            try:
                return (await app.ask(GET)).status
            finally:
                app.close()


# ---- a machine with too little -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ulimit", ["-n 8", "-n 40", "-v 50000", "-v 90000"])
async def test_too_little_of_the_machine_is_a_sentence_with_the_way_out(
    limited: Any,  # noqa: F811
    ulimit: str,
) -> None:
    process: Process = await limited(ulimit)
    assert 1 == await process.ended()
    (line,) = process.text
    assert "ulimit" in line and "Traceback" not in line
