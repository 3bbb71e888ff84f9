"""An app that closes when it has all that it asked for has been served; one that leaves in the middle has not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from telemetry.record import Session
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.faults import at_rest, request, until
from tests.doubles.upstream import Script, Talk, answer

EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streaming(*pieces: bytes, kind: str = EVENTS, end: asyncio.Event | None = None, rest: bytes = b"") -> Script:
    """Each answer in these chunks, and when `end` is set the rest and the last chunk."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for piece in pieces:
                await talk.send(chunk(piece))
            if end is not None:
                await end.wait()
            await talk.send((chunk(rest) if rest else b"") + b"0\r\n\r\n")

    return script


async def left(sidecar: Running, last: bytes, ask: bytes = request("POST", "/u/x", body=b"b")) -> None:
    """An app asks, reads up to these bytes, and closes."""
    app = await sidecar.app()
    await app.send(ask)
    await app.reader.readuntil(last)
    app.close()
    await app.writer.wait_closed()


async def kept(sidecar: Running) -> Session:
    await at_rest(sidecar)
    (session,) = sidecar.proxy.signals.sessions.page(limit=10).items
    return session


async def started(start_sidecar: Starter, start_upstream: UpstreamStarter, script: Script, **keys: Any) -> Any:
    """Every session is kept."""
    upstream = await start_upstream(script)
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], **keys}}, telemetry={"slow_threshold": 1e-6}
    )
    return sidecar, upstream


@pytest.mark.parametrize(
    "pieces",
    [
        (b"data: 1\n\n", DONE),
        (b"data: 1\r\n\r\ndata: [DONE]\r\n\r\n",),
        (b"data: 1\n\ndata:[DO", b"NE]\n", b"\n"),
        (b"data: " + b"x" * 100 + b"\n\ndata: [DONE]\n",),
    ],
)
async def test_a_stream_whose_last_event_was_sent_is_a_success_however_long_its_end_takes(
    start_sidecar: Starter, start_upstream: UpstreamStarter, pieces: tuple[bytes, ...]
) -> None:
    sidecar, upstream = await started(start_sidecar, start_upstream, streaming(*pieces, end=asyncio.Event()))
    await left(sidecar, b"DONE]" if len(pieces) < 3 else b"NE]")
    session = await kept(sidecar)
    assert ({"first_try": 1}, (0, 1)) == (sidecar.outcomes, (len(sidecar.proxy.downstreams), len(upstream.requests)))
    assert (200, None, sum(map(len, pieces))) == (session.status, session.attempts[0].code, session.response_bytes)
    assert session.left.at == session.ended  # the moment that the end was waited for is not the app's
    assert "closed its connection when it had been sent the last event" in sidecar.proxy.signals.explain(session)
    assert 0 == sidecar.proxy.directory.configured["u"].connections[1]  # it had not ended: not used again


async def test_its_connection_carries_the_next_call_when_the_end_comes_within_a_moment(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    end = asyncio.Event()
    sidecar, upstream = await started(start_sidecar, start_upstream, streaming(b"data: 1\n\n", DONE, end=end))
    for number in range(1, 4):
        end.clear()
        await left(sidecar, DONE)
        await until(lambda: not sidecar.proxy.downstreams)
        end.set()
        await at_rest(sidecar)
        assert ({"first_try": number}, 1) == (sidecar.outcomes, upstream.connections)
    assert 1 == sidecar.proxy.directory.configured["u"].connections[1]


@pytest.mark.parametrize("kind", [EVENTS, "application/x-ndjson"])
async def test_so_is_an_answer_that_ends_within_a_moment_after_the_app_has_left(
    start_sidecar: Starter, start_upstream: UpstreamStarter, kind: str
) -> None:
    end = asyncio.Event()
    script = streaming(b"data: 1\n\n", b"event: completed\n\n", kind=kind, end=end, rest=b": bye\n\n")
    sidecar, _upstream = await started(start_sidecar, start_upstream, script)
    await left(sidecar, b"completed\n\n")
    await until(lambda: not sidecar.proxy.downstreams)
    end.set()
    session = await kept(sidecar)
    assert ({"first_try": 1}, (0, 1)) == (sidecar.outcomes, sidecar.proxy.directory.configured["u"].connections)
    assert "a moment before the upstream ended the answer" in sidecar.proxy.signals.explain(session)


CANCELLED = {
    "an end that does not come": streaming(b"data: 1\n\n", end=asyncio.Event()),
    "what only looks like the last event": streaming(b"data: 1\n\ndata: say data: [DONE]\n\n", end=asyncio.Event()),
    "the last event in the middle of a line": streaming(b"data: 1\n\nxdata: [DONE]\n\n", end=asyncio.Event()),
    "more after it": streaming(b"data: 1\n\n" + DONE + b"data: 2\n\n", end=asyncio.Event()),
    "the words in another kind of answer": streaming(b"data: 1\n\n" + DONE, kind="text/plain", end=asyncio.Event()),
}


@pytest.mark.parametrize("script", CANCELLED.values(), ids=CANCELLED)
async def test_an_app_that_leaves_before_the_end_has_cancelled(
    start_sidecar: Starter, start_upstream: UpstreamStarter, script: Script
) -> None:
    sidecar, _ = await started(start_sidecar, start_upstream, script)
    await left(sidecar, b"data: 1\n\n")
    session = await kept(sidecar)
    assert ({"cancelled": 1}, "CLIENT_DISCONNECTED") == (sidecar.outcomes, session.code)
    assert session.left.at == session.ended


async def test_a_download_of_known_length_that_is_left_is_cancelled_although_it_ends_at_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        whole = answer(b"a" * 300_000)
        await talk.send(whole[:200_000])
        await go_on.wait()
        await talk.send(whole[200_000:])

    sidecar, _ = await started(start_sidecar, start_upstream, script)
    await left(sidecar, b"aaaa")
    await until(lambda: not sidecar.proxy.downstreams)
    go_on.set()
    await kept(sidecar)
    assert {"cancelled": 1} == sidecar.outcomes


async def test_no_more_than_a_little_is_read_for_an_app_that_has_left(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    closed = asyncio.Event()
    sent = 0

    async def script(talk: Talk) -> None:
        nonlocal sent
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"begun"))
        await go_on.wait()
        try:
            while sent < 50_000_000:
                await talk.send(chunk(bytes(50_000)))
                sent += 50_000
            await talk.send(b"0\r\n\r\n")
        finally:
            closed.set()

    go_on = asyncio.Event()
    sidecar, _ = await started(start_sidecar, start_upstream, script)
    await left(sidecar, b"begun")
    await until(lambda: not sidecar.proxy.downstreams)
    go_on.set()
    await asyncio.wait_for(closed.wait(), 10)
    await kept(sidecar)
    assert {"cancelled": 1} == sidecar.outcomes
    assert sent < 50_000_000


async def test_a_keyed_stream_that_was_left_at_its_end_is_given_again_whole(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    end = asyncio.Event()
    script = streaming(b"data: 1\n\n", DONE, end=end, rest=b": bye\n\n")
    sidecar, upstream = await started(start_sidecar, start_upstream, script)
    ask = request("POST", "/u/x", "Idempotency-Key: k", body=b"b")
    await left(sidecar, DONE, ask)
    await until(lambda: not sidecar.proxy.downstreams)
    end.set()
    await at_rest(sidecar)
    again = await (await sidecar.app()).ask(ask)
    assert (b"data: 1\n\n" + DONE + b": bye\n\n", "true") == (again.body, again.get("idempotent-replayed"))
    assert ({"first_try": 1, "deduplicated": 1}, 1) == (sidecar.outcomes, len(upstream.requests))
