"""Bodies in motion: passed on as they come, held back by the slower side, never gathered in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import Talk, Upstream, always, answer

ONE_ATTEMPT = True

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PUT_CHUNKED = "PUT /u/x HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n"
MIB = 1024 * 1024
Route = Callable[..., dict[str, Any]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# ---- as they come ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nContent-Length: 33\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
    ],
    ids=["chunked", "length", "until close"],
)
async def test_server_sent_events_pass_one_by_one(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, head: bytes
) -> None:
    received = asyncio.Event()
    framed = chunk if b"chunked" in head else bytes

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(head)
        for number in range(3):
            await talk.send(framed(b"data: %d\n\n  " % number))
            await received.wait()  # the next event is not sent before the app has this one
            received.clear()
        await talk.send(b"0\r\n\r\n" if b"chunked" in head else b"")

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    for number in range(3):
        await asyncio.wait_for(app.reader.readuntil(b"data: %d\n\n" % number), 5)
        received.set()


@pytest.mark.parametrize("pieces", [0, 1, 3], ids=["empty", "one chunk", "three chunks"])
@pytest.mark.parametrize("at_once", [True, False], ids=["in one segment", "piece by piece"])
async def test_a_chunked_answer_arrives_chunked_and_whole(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, pieces: int, at_once: bool
) -> None:
    parts = [CHUNKED_HEAD, *(chunk(b"piece") for _ in range(pieces)), b"0\r\n\r\n"]

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            for part in [b"".join(parts)] if at_once else parts:
                await talk.send(part)
                await asyncio.sleep(0.01)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    for _ in range(2):
        reply = await app.ask(GET)
        assert (200, b"piece" * pieces, "chunked") == (reply.status, reply.body, reply.get("transfer-encoding"))
    assert 1 == upstream.connections


async def test_an_http_1_0_app_gets_a_chunked_answer_up_to_the_end_of_the_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    upstream = await start_upstream(always(CHUNKED_HEAD + chunk(b"one") + chunk(b"two") + b"0\r\n\r\n"))
    sidecar = await start_sidecar(upstreams=route(upstream))
    reply = await (await sidecar.app()).ask("GET /u/x HTTP/1.0\r\nHost: s\r\n\r\n")
    assert (b"onetwo", None) == (reply.body, reply.get("transfer-encoding"))
    assert {"first_try": 1} == sidecar.outcomes


async def test_the_trailers_of_an_answer_are_forwarded_except_those_that_would_change_its_meaning(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    trailers = b"X-Checksum: abc\r\nContent-Type: a/b\r\nSet-Cookie: a=b\r\nX-Sidecar-Outcome: fake\r\nX-Last: 1\r\n"
    upstream = await start_upstream(always(CHUNKED_HEAD + chunk(b"hello") + b"0\r\n" + trailers + b"\r\n"))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    for _ in range(2):  # and none of them turns up in the next answer
        reply = await app.ask(GET)
        assert (b"hello", True) == (reply.body, reply.complete)
        assert [("X-Checksum", "abc"), ("X-Last", "1")] == reply.trailers
        assert None is reply.get("x-checksum")


async def test_a_small_answer_is_held_until_it_is_complete(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst")
        await go_on.wait()
        await talk.send(b" last")

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(GET)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(app.reader.read(1), 0.2)
    go_on.set()
    assert b"first last" == (await app.reply()).body


async def test_a_large_answer_is_passed_on_before_it_is_complete(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst")
        await go_on.wait()
        await talk.send(b" last")

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"buffer_response_bytes": 9})
    app = await sidecar.app()
    await app.send(GET)
    await asyncio.wait_for(app.reader.readuntil(b"\r\n\r\nfirst"), 5)
    go_on.set()
    assert b" last" == await app.reader.readexactly(5)


async def test_an_upload_is_passed_on_before_it_is_complete(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(talk: Talk) -> None:
        await talk.read_head()
        for _ in range(3):
            size = int(await talk.reader.readuntil(b"\r\n"), 16)
            await pieces.put(await talk.reader.readexactly(size))
            await talk.reader.readexactly(2)
        await talk.reader.readexactly(5)
        await talk.send(answer(b"thanks"))

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(PUT_CHUNKED)
    for piece in (b"one", b"two", b"three"):
        await app.send(chunk(piece))
        assert piece == await asyncio.wait_for(pieces.get(), 5)
    await app.send(b"0\r\n\r\n")
    assert b"thanks" == (await app.reply()).body


async def test_an_echo_flows_in_both_directions_at_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(CHUNKED_HEAD)
        while size := int(await talk.reader.readuntil(b"\r\n"), 16):
            await talk.send(chunk(await talk.reader.readexactly(size)))
            await talk.reader.readexactly(2)
        await talk.reader.readexactly(2)
        await talk.send(b"0\r\n\r\n")

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    await app.send(PUT_CHUNKED)
    for number in range(5):
        await app.send(chunk(b"ping %d" % number))
        await asyncio.wait_for(app.reader.readuntil(b"ping %d\r\n" % number), 5)
    await app.send(b"0\r\n\r\n")
    assert b"0\r\n\r\n" == await asyncio.wait_for(app.reader.readexactly(5), 5)


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_body_too_large_to_keep_still_streams(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, chunked: bool
) -> None:
    body = os.urandom(3 * MIB)
    upstream = await start_upstream(always(answer(b"ok")))
    sidecar = await start_sidecar(upstreams=route(upstream), limits={"replay_body_bytes": 10_000})
    app = await sidecar.app()
    if chunked:
        await app.send(PUT_CHUNKED.encode() + chunk(body[:MIB]) + chunk(body[MIB:]) + b"0\r\n\r\n")
    else:
        await app.send(b"PUT /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert b"ok" == (await app.reply()).body
    assert [body] == upstream.bodies


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_an_early_answer_reaches_the_app_whole_while_it_uploads(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route, chunked: bool
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(answer(b"too much" * 1000, "413 Content Too Large", "Connection: close"))
        talk.close()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    size = 8 * MIB

    async def upload() -> None:
        with contextlib.suppress(ConnectionError):
            if chunked:
                await app.send(PUT_CHUNKED)
            else:
                await app.send(f"PUT /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: {size}\r\n\r\n")
            for _ in range(size // 65_536):
                await app.send(chunk(bytes(65_536)) if chunked else bytes(65_536))

    uploading = asyncio.create_task(upload())
    reply = await app.reply()
    assert (413, b"too much" * 1000, "close") == (reply.status, reply.body, reply.get("connection"))
    assert {"rejected": 1} == sidecar.outcomes
    app.close()
    uploading.cancel()
    await asyncio.gather(uploading, return_exceptions=True)


# ---- those who stop ----------------------------------------------------------------------------------------------


async def test_an_app_that_never_reads_is_cut_off_after_body_idle(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    cut_off = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        try:
            await talk.send(CHUNKED_HEAD)
            while True:
                await talk.send(chunk(bytes(65_536)))
        except ConnectionError:
            cut_off.set()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"body_idle": 0.3}))
    loop = asyncio.get_running_loop()
    with socket.create_connection(sidecar.address) as app:
        app.setblocking(False)
        await loop.sock_sendall(app, GET.encode())
        await asyncio.wait_for(cut_off.wait(), 10)
    assert {"cancelled": 1} == sidecar.outcomes  # the app's doing, not the upstream's


async def test_an_upstream_that_never_reads_is_given_up_after_body_idle(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_head()
        talk.writer.transport.pause_reading()
        await asyncio.sleep(30)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"body_idle": 0.3}))
    app = await sidecar.app()
    size = 64 * MIB

    async def upload() -> None:
        with contextlib.suppress(ConnectionError):
            await app.send(f"PUT /u/x HTTP/1.1\r\nHost: s\r\nContent-Length: {size}\r\n\r\n")
            for _ in range(size // 65_536):
                await app.send(bytes(65_536))

    uploading = asyncio.create_task(upload())
    reply = await app.reply()
    assert (504, "NETWORK_TIMEOUT") == (reply.status, reply.json["error_code"])
    uploading.cancel()
    await asyncio.gather(uploading, return_exceptions=True)


async def test_an_app_that_stops_in_the_middle_of_its_upload_is_given_up_after_body_idle(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    seen = bytearray()
    ended = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_head()
        with contextlib.suppress(ConnectionError):
            while data := await talk.reader.read(1000):
                seen.extend(data)
        ended.set()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"body_idle": 0.3}))
    app = await sidecar.app()
    reply = await app.ask(PUT_CHUNKED + "5\r\nhello\r\n")
    assert (408, "MALFORMED_REQUEST", "denied") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
    )
    assert "request body did not go on" in reply.json["message"]
    await asyncio.wait_for(ended.wait(), 5)
    assert b"5\r\nhello\r\n" == seen  # and never the chunk that would end it cleanly


async def test_a_slow_transfer_that_keeps_moving_is_not_cut_off(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Route
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(CHUNKED_HEAD)
        for _ in range(5):
            await asyncio.sleep(0.15)
            await talk.send(chunk(b"."))
        await talk.send(b"0\r\n\r\n")

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=route(upstream, timeouts={"body_idle": 0.4}))
    assert b"....." == (await (await sidecar.app()).ask(GET)).body


# ---- memory ------------------------------------------------------------------------------------------------------

GIGABYTE = 1024 * MIB
PIECE = bytes(MIB)


class Process:
    """A sidecar of its own, so that its memory can be watched from outside."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.address = ("127.0.0.1", port)

    def memory(self, line: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{line}:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


@pytest.fixture
async def sidecar_process(tmp_path: Path, start_upstream: UpstreamStarter) -> AsyncIterator[Callable[[Upstream], Any]]:
    started: list[asyncio.subprocess.Process] = []

    async def start(upstream: Upstream) -> Process:
        file = tmp_path / "sidecar.yaml"
        file.write_text(
            f"listen: {{port: 0}}\nadmin: {{port: 0}}\nstate_dir: {tmp_path / 'state'}\n"
            f"upstreams: {{u: {{route: /u, endpoints: ['{upstream.url}']}}}}\n"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidecar", "run", "--config", str(file)),
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
        started.append(process)
        assert process.stderr is not None
        while line := await asyncio.wait_for(process.stderr.readline(), 15):
            if listening := re.search(rb"listening on 127\.0\.0\.1:(\d+)", line):
                return Process(process, int(listening[1]))
        raise AssertionError("the sidecar did not start")

    yield start
    for process in started:
        process.terminate()
        await asyncio.wait_for(process.communicate(), 10)


async def hesitant_read(reader: asyncio.StreamReader, total: int) -> None:
    """Take in `total` bytes, stopping for a while at some points, so that everything before backs up."""
    stops = [0, total // 3, 2 * total // 3]
    taken = 0
    while taken < total:
        if stops and taken >= stops[0]:
            stops.pop(0)
            await asyncio.sleep(0.7)
        data = await reader.read(4 * MIB)
        assert data
        taken += len(data)
    assert total == taken


async def warm_up(process: Process) -> int:
    """One request of each kind, then the memory used."""
    app = await App.connect(process.address)
    for _ in range(20):
        assert 200 == (await app.ask(GET)).status
    app.close()
    return process.memory("VmRSS")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
async def test_a_gigabyte_downloaded_by_a_hesitant_app_costs_no_memory(
    start_upstream: UpstreamStarter, sidecar_process: Callable[[Upstream], Any]
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head = await talk.read_head()
            if b"/big" not in head:
                await talk.send(answer(b"ok"))
                continue
            await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % GIGABYTE)
            for _ in range(GIGABYTE // len(PIECE)):
                await talk.send(PIECE)

    process = await sidecar_process(await start_upstream(script))
    before = await warm_up(process)
    app = await App.connect(process.address)
    await app.send("GET /u/big HTTP/1.1\r\nHost: s\r\n\r\n")
    await app.reader.readuntil(b"\r\n\r\n")
    await hesitant_read(app.reader, GIGABYTE)
    grown = process.memory("VmHWM") - before
    app.close()
    assert grown < 10 * MIB, f"{grown / MIB:.1f} MiB"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
async def test_a_gigabyte_uploaded_to_a_hesitant_upstream_costs_no_memory(
    start_upstream: UpstreamStarter, sidecar_process: Callable[[Upstream], Any]
) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head = await talk.read_head()
            if head.startswith(b"PUT"):
                await hesitant_read(talk.reader, GIGABYTE)
            await talk.send(answer(b"ok"))

    process = await sidecar_process(await start_upstream(script))
    before = await warm_up(process)
    app = await App.connect(process.address)
    await app.send(f"PUT /u/big HTTP/1.1\r\nHost: s\r\nContent-Length: {GIGABYTE}\r\n\r\n")
    for _ in range(GIGABYTE // len(PIECE)):
        await app.send(PIECE)
    assert 200 == (await app.reply(within=20)).status
    grown = process.memory("VmHWM") - before
    app.close()
    assert grown < 10 * MIB, f"{grown / MIB:.1f} MiB"
