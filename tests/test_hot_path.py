"""The healthy path does only what it must, and each thing found out about it stays found out.

`WHERE` names, for each of the fifteen points of the design's "hot path", the test that keeps it; those that are about
speed and memory rather than about behaviour are in this file.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.inbound import Downstream
from sidecar.policy.breaker import Breaker
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import Talk, always, answer

ROOT = Path(__file__).parent.parent
GET = "GET /u HTTP/1.1\r\nHost: s\r\n\r\n"

WHERE = {
    1: ("test_aiohttp_hazards", "test_every_private_attribute_that_is_used_is_named_here"),
    2: ("test_hot_path", "test_a_healthy_request_costs_no_task"),
    3: ("test_aiohttp_hazards", "test_a_bad_chunk_in_a_later_segment_does_not_leave_the_exchange_hanging"),
    4: ("test_aiohttp_hazards", "test_a_trailer_never_becomes_a_header_of_the_next_request"),
    5: ("test_http_rules", "test_r15_what_is_too_large_is_named"),
    6: ("test_lifecycle", "test_a_sigterm_under_load_drops_no_request"),
    7: ("test_aiohttp_hazards", "test_bytes_behind_a_websocket_upgrade_are_held_until_the_101"),
    8: ("test_aiohttp_hazards", "test_an_app_that_goes_away_cancels_the_call_to_the_upstream"),
    9: ("test_streaming", "test_a_gigabyte_uploaded_to_a_hesitant_upstream_costs_no_memory"),
    10: ("test_hot_path", "test_a_connection_is_idle_again_only_after_its_answer_was_passed_on"),
    11: ("test_upstream_faults", "test_an_invalid_answer_is_a_502_and_its_connection_is_not_used_again"),
    12: ("test_hot_path", "test_attempts_in_flight_share_one_timer_and_healthy_permits_are_one_object"),
    13: ("test_hot_path", "test_what_exists_after_the_start_is_out_of_the_collectors_sight"),
    14: ("test_aiohttp_hazards", "test_an_early_refusal_arrives_although_the_app_keeps_sending"),
    15: ("test_bad_requests", "test_a_malformed_request_gets_its_code_and_a_closed_connection"),
}


@pytest.mark.parametrize("point", sorted(WHERE))
def test_every_point_of_the_hot_path_has_a_test_that_exists(point: int) -> None:
    module, name = WHERE[point]
    assert callable(getattr(importlib.import_module(f"tests.{module}"), name, None)), f"{module}.{name}"


@pytest.fixture
def healthy(start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any) -> Any:
    async def start() -> Any:
        upstream = await start_upstream(always(answer(b"hello")))
        sidecar = await start_sidecar(upstreams=route(upstream))
        app = await sidecar.app()
        assert 200 == (await app.ask(GET)).status  # the first one dials
        return sidecar, app

    return start


async def test_a_healthy_request_costs_no_task(healthy: Any) -> None:
    _, app = await healthy()
    made: list[Any] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(factory)
    try:
        for _ in range(5):
            app.writer.write(GET.encode())
            assert b"200 OK" in await app.reader.readuntil(b"hello")
    finally:
        loop.set_task_factory(None)
    assert [] == made


async def test_a_connection_is_idle_again_only_after_its_answer_was_passed_on(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    """Given back when the parser sees the end, it could be reset by another exchange before the first has read it."""
    upstream = await start_upstream(always(answer(b"x" * 1000)))
    sidecar = await start_sidecar(upstreams=route(upstream))
    (pool,) = sidecar.proxy.directory.configured["u"].pools.values()
    seen: list[tuple[int, int]] = []
    app = await sidecar.app()
    (client,) = (one for one in sidecar.proxy.downstreams if isinstance(one, Downstream))
    transport = client.transport

    class Watched:
        """The app's transport, which tells where the upstream's connection is while the answer is written."""

        def write(self, data: bytes) -> None:
            seen.append((pool.idle, len(pool.active)))
            transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

    client.transport = Watched()
    assert 200 == (await app.ask(GET)).status
    client.transport = transport
    assert ([(0, 1)], (1, 0)) == (seen, (pool.idle, len(pool.active)))


async def test_attempts_in_flight_share_one_timer_and_healthy_permits_are_one_object(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    go_on = asyncio.Event()

    async def waits(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await go_on.wait()
            await talk.send(answer())

    upstream = await start_upstream(waits)
    sidecar = await start_sidecar(upstreams=route(upstream))
    apps = [await sidecar.app() for _ in range(3)]
    for app in apps:
        await app.send(GET)
    async with asyncio.timeout(5):
        while len(upstream.requests) < 3:
            await asyncio.sleep(0.01)
    assert 3 == len(sidecar.proxy.ticker.watched)
    go_on.set()
    assert [200] * 3 == [(await app.reply()).status for app in apps]
    assert set() == sidecar.proxy.ticker.watched
    (endpoint,) = sidecar.proxy.directory.configured["u"].endpoints.values()
    breaker: Breaker = endpoint.breaker
    assert breaker.admit(1.0) is breaker.admit(2.0)


def test_what_exists_after_the_start_is_out_of_the_collectors_sight(tmp_path: Path) -> None:
    """The process itself says how many objects it froze, and from how many new ones on the collector runs."""
    program = (
        "import gc, sys\n"
        "freeze, tune = gc.freeze, gc.set_threshold\n"
        "gc.freeze = lambda: (freeze(), print('frozen', gc.get_freeze_count(), flush=True))\n"
        "gc.set_threshold = lambda *limits: (tune(*limits), print('threshold', limits[0], flush=True))\n"
        "from sidecar.__main__ import main\n"
        "sys.exit(main(['run']))\n"
    )
    environment = {
        **os.environ,
        "SIDECAR__LISTEN__PORT": "0",
        "SIDECAR__ADMIN__PORT": "0",
        "SIDECAR__STATE_DIR": str(tmp_path / "state"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    frozen, threshold = process.stdout.readline().split(), process.stdout.readline().split()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert frozen[0] == "frozen" and int(frozen[1]) > 10_000
    assert ["threshold", "50000"] == threshold
    assert 0 == process.returncode


async def test_a_plain_get_runs_no_code_of_what_keeps_requests(healthy: Any) -> None:
    _, app = await healthy()
    ran: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            ran.add(Path(frame.f_code.co_filename).stem + "." + frame.f_code.co_name)

    sys.setprofile(note)
    try:
        app.writer.write(GET.encode())
        assert b"200 OK" in await app.reader.readuntil(b"hello")
    finally:
        sys.setprofile(None)
    assert "exchange.run" in ran, "or this sees nothing"
    parts = ("keeping.", "once.", "posting.", "kept.", "tee.", "errand.", "senders.")
    assert set() == {name for name in ran if name.startswith(parts)}
