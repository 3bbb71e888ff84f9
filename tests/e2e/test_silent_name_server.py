"""A name server that never answers, for a real process with the system's own resolver."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import UpstreamStarter
from tests.doubles.upstream import answer, once
from tests.e2e.conftest import Runner

_NAME_SERVER = "127.0.0.77"
_MOUNT = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


@pytest.fixture
def silence(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """The command that gives a process a name server which takes every question and answers none."""
    config = tmp_path / "resolv.conf"
    config.write_text(f"nameserver {_NAME_SERVER}\n")
    command = ("unshare", "-rm", "sh", "-c", _MOUNT, str(config))
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a mount namespace")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((_NAME_SERVER, 53))
        except OSError:
            pytest.skip("needs the name server's port")
        yield command


async def test_names_without_an_answer_neither_hold_up_the_others_nor_the_end(
    run: Runner, start_upstream: UpstreamStarter, silence: tuple[str, ...]
) -> None:
    upstream = await start_upstream(once(answer(b"ok", "200 OK", "Connection: close")))
    # No connection is kept: each call needs the address anew.
    sidecar = await run(before=silence, shutdown_grace=1, telemetry={"log": {"level": "info"}})
    silent = [
        asyncio.create_task(sidecar.ask(f"GET http://silent{n}.test/ HTTP/1.1\r\nHost: silent{n}.test\r\n\r\n"))
        for n in range(24)
    ]
    await asyncio.sleep(0.3)
    get = f"GET http://localhost:{upstream.port}/ HTTP/1.1\r\nHost: localhost:{upstream.port}\r\n\r\n"
    async with asyncio.timeout(4):  # far less than the resolver takes to give up on one of the others
        assert [200] * 7 == [(await sidecar.ask(get)).status for _ in range(7)]
    sidecar.signal(signal.SIGTERM)
    await sidecar.logged("sidecar.stopped")
    async with asyncio.timeout(3):
        await sidecar.ended()
    for task in silent:
        task.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
