"""The parts of the https benchmark that can be wrong without anybody noticing: its relay, its peer's lock file."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from benchmarks import connecting
from benchmarks.processes import LOOPBACK, free_ports
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import always, answer

LOCK = Path(connecting.__file__).parent / "mitmproxy.lock"


async def test_the_relay_asks_the_proxy_for_a_tunnel_and_passes_bytes(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer(b"through")))
    sidecar = await start_sidecar(egress={"connect_ports": [upstream.port]})
    (port,) = free_ports(1)
    serving = asyncio.create_task(connecting.serve(port, sidecar.address[1], f"{LOOPBACK}:{upstream.port}"))
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    app = await App.connect((LOOPBACK, port))
                    break
                except ConnectionError:
                    await asyncio.sleep(0.01)
        for _ in range(2):
            assert b"through" == (await app.ask("GET / HTTP/1.1\r\nHost: x\r\n\r\n")).body
        assert 1 == len(sidecar.proxy.tunnels)
        app.close()
    finally:
        serving.cancel()


def test_every_package_of_the_peer_is_pinned_with_hashes() -> None:
    text = LOCK.read_text()
    names = re.findall(r"^([a-z0-9._-]+)==", text, re.MULTILINE)
    assert "mitmproxy" in names
    pieces = re.split(r"^(?=[a-z0-9._-]+==)", text, flags=re.MULTILINE)[1:]
    assert [] == [piece.split("==")[0] for piece in pieces if "--hash=sha256:" not in piece]
