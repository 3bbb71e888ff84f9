"""Descriptors are shared out: apps, upstreams, and what must always answer. Real processes with few of them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sidecar.descriptors import Descriptors, TooFew, of_process
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.authority import Authority
from tests.doubles.upstream import always, answer
from tests.test_lifecycle import FREE_PORTS, REPOSITORY, Process, routed

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
LIVEZ = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
OK = always(answer(b"ok"))

Limited = Callable[..., Any]


@pytest_asyncio.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Limited]:
    """`await limited("-n 100", **keys)`: a process of its own under such a ulimit."""
    processes: list[Process] = []

    async def start(ulimit: str, *command: str, **keys: Any) -> Process:
        file = tmp_path / "sidecar.yaml"
        file.write_text(json.dumps(keys))
        script = f'ulimit {ulimit} && exec "$@"'
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SIDECAR")}
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", script, "sh", sys.executable, "-m", "sidecar", "run", "-c", str(file), *command),
            stderr=asyncio.subprocess.PIPE,
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": str(REPOSITORY), **FREE_PORTS},
        )
        processes.append(Process(process))
        return processes[-1]

    yield start
    for process in processes:
        await process.clean_up()


async def silent(address: tuple[str, int], count: int) -> list[App]:
    """Connections that say nothing, one after the other; those that are refused at once are among them."""
    return [await App.connect(address) for _ in range(count)]


# ---- shares ------------------------------------------------------------------------------------------------------


def test_apps_stop_first_then_upstreams_and_the_rest_is_for_what_must_always_answer() -> None:
    found = Descriptors(1000, 2, 100)
    assert 0 < found.apps_below < found.upstreams_below < 1000 - found.side_doors


def test_a_limit_that_does_not_fit_is_told_with_numbers_and_the_way_out() -> None:
    told = Descriptors(1024, 1, 128).shortage(10_000)
    assert told is not None
    for word in ("limits.connections is 10000", "1024", "20176", "ulimit -n", "LimitNOFILE"):
        assert word in told
    assert Descriptors(1 << 20, 2, 128).shortage(10_000) is None


def test_too_few_are_refused_with_a_number_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(most: int) -> str | None:
        monkeypatch.setattr("sidecar.descriptors.soft_limit", lambda: most)
        try:
            of_process(2, 128)
        except TooFew as few:
            return str(few)
        return None

    refused = told(64)
    assert refused is not None
    enough = int(refused.partition("at least ")[2].partition(",")[0])
    assert told(enough) is None
    assert told(enough - 17) is not None


# ---- processes ---------------------------------------------------------------------------------------------------


async def test_the_soft_limit_is_raised_and_the_app_that_is_started_gets_the_old_one(limited: Limited) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    look = "ulimit -n >&2; sleep 0.3; grep 'open files' /proc/$PPID/limits >&2"
    process = await limited("-S -n 300", "--", "/bin/sh", "-c", look)
    assert 0 == await process.ended()
    assert "300\n" in process.text
    (sidecar,) = [line for line in process.text if line.startswith("Max open files")]
    assert [str(hard), str(hard)] == sidecar.split()[3:5]


async def test_silent_connections_to_the_admin_port_take_nothing_from_the_apps(
    limited: Limited, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(OK)
    probes = {"host": "127.0.0.1", "port": 0}
    process = await (await limited("-n 300", upstreams=routed(upstream), probes=probes)).ready()
    host, _, port = (await process.logged("sidecar.started"))["probes"].rpartition(":")
    others = [*await silent(process.admin_address, 200), *await silent((host, int(port)), 200)]
    try:
        apps = [await process.app() for _ in range(50)]
        assert [200] * 50 == [(await app.ask(GET)).status for app in apps]
        for address in (process.admin_address, (host, int(port))):
            probe = await App.connect(address)
            assert 200 == (await probe.ask(LIVEZ)).status
            probe.close()
    finally:
        for other in others:
            other.close()


async def test_out_of_descriptors_an_app_reads_a_503_and_health_still_answers(
    limited: Limited, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(OK)
    process = await (await limited("-n 220", upstreams=routed(upstream))).ready()
    told = await process.logged("sidecar.descriptors.short")
    assert ("WARN", True) == (told["severity_text"], "ulimit -n" in told["body"])
    served = await process.app()
    others = await silent(process.address, 250)
    try:
        refused = await process.app()
        reply = await refused.reply()
        assert (503, "OVERLOADED", "descriptors") == (
            reply.status,
            reply.json["error_code"],
            reply.json["details"]["reason"],
        )
        assert "1" == reply.get("retry-after")
        assert 200 == (await served.ask(GET)).status  # who is in is served on, with a new upstream connection
        for path in ("/livez", "/readyz", "/metrics"):
            assert 200 == (await process.admin(path)).status
        metrics = (await process.admin("/metrics")).body.decode()
        assert 'sidecar_malformed_requests_total{reason="descriptors"}' in metrics
        assert "raise that limit" in (await process.logged("sidecar.descriptors.exhausted"))["body"]
    finally:
        for other in others:
            other.close()
    for _ in range(100):
        if 200 == (await (await process.app()).ask(GET)).status:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("it never recovered")


async def test_too_few_to_serve_anybody_is_a_sentence_with_the_way_out(limited: Limited) -> None:
    process = await limited("-n 64")
    assert 1 == await process.ended()
    (line,) = process.text
    assert "sidecar.cannot_start" == json.loads(line)["event_name"]
    assert "raise it to at least" in json.loads(line)["body"]


# ---- the admin port ----------------------------------------------------------------------------------------------


async def test_the_longest_silent_connection_makes_room(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(limits={"admin_connections": 3})
    others = await silent(sidecar.admin_address, 3)
    asked = await App.connect(sidecar.admin_address)
    assert 200 == (await asked.ask(LIVEZ)).status
    assert await others[0].closed()
    assert not others[1].reader.at_eof()
    for other in others:
        other.close()
    asked.close()


async def test_a_connection_that_is_being_answered_keeps_its_place(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(limits={"admin_connections": 2})
    listening = [await App.connect(sidecar.admin_address) for _ in range(2)]
    for app in listening:
        await app.send("GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await app.reader.readuntil(b"\r\n\r\n")
    late = await App.connect(sidecar.admin_address)
    reply = await late.reply()
    assert (503, "OVERLOADED") == (reply.status, reply.json["error_code"])
    assert not any(app.reader.at_eof() for app in listening)
    for app in (*listening, late):
        app.close()


@pytest.mark.parametrize("beginning", ["", "GET /livez HTT"])
async def test_a_head_that_does_not_come_ends_the_connection(start_sidecar: Starter, beginning: str) -> None:
    sidecar = await start_sidecar(limits={"head_timeout": 0.2})
    (app,) = await silent(sidecar.admin_address, 1)
    await app.send(beginning)
    assert await app.closed()
    app.close()


async def test_an_idle_connection_ends_after_the_keepalive_timeout(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(limits={"keepalive_timeout": 0.2})
    app = await App.connect(sidecar.admin_address)
    assert 200 == (await app.ask(LIVEZ)).status
    assert await app.closed()
    app.close()


async def test_over_tls_those_who_never_begin_are_bounded_too(start_sidecar: Starter, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    leaf = str(authority.issue("localhost"))
    sidecar = await start_sidecar(
        admin={"port": 0, "tls": {"cert": leaf, "key": leaf}}, limits={"admin_connections": 3}
    )
    others = await silent(sidecar.admin_address, 3)
    context = ssl.create_default_context(cafile=str(authority.bundle))
    reader, writer = await asyncio.open_connection(*sidecar.admin_address, ssl=context, server_hostname="localhost")
    writer.write(LIVEZ.encode())
    assert b"200 OK" in await reader.readline()
    assert await others[0].closed()
    for other in others:
        other.close()
    writer.close()


@pytest.mark.parametrize(
    ("limits", "level"), [({}, "INFO"), ({"connections": 10_000}, "WARN")], ids=["by default", "asked for"]
)
async def test_only_who_asked_for_so_many_connections_is_warned_that_not_all_fit(
    limited: Limited, limits: dict[str, int], level: str
) -> None:
    process = await (await limited("-n 15000", limits=limits)).ready()
    assert level == (await process.logged("sidecar.descriptors.short"))["severity_text"]
