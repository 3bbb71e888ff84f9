"""`telemetry.log.level: debug`: what it adds for somebody who looks for a fault, and that nothing of it is there, nor made,
at any other level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telemetry.names import Event
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.upstream import Talk, answer
from tests.test_dead_letters_live import letters_of

QUICK = {"default": {"base_delay": 0.001, "max_delay": 0.001, "max_attempts": 2}}
GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
POST = "POST /u/pay?token=canary-4711 HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi"


def lines(sidecar: Running, event: str) -> list[dict[str, Any]]:
    sidecar.proxy.signals.writer.flush()
    shown = [json.loads(line) for line in sidecar.logged.getvalue().splitlines()]
    return [line for line in shown if line["event_name"] == event]


def error_records(sidecar: Running) -> list[dict[str, Any]]:
    sidecar.proxy.signals.writer.flush()
    folder = Path(sidecar.proxy.settings.state_dir, "logs")
    return [
        json.loads(line) for file in sorted(folder.glob("*/errors.jsonl")) for line in file.read_text().splitlines()
    ]


async def hang_up(talk: Talk) -> None:
    await talk.read_request()
    talk.reset()


def keys(level: str) -> dict[str, Any]:
    return {"policies": QUICK, "telemetry": {"log": {"level": level}}}


@pytest.mark.parametrize("level", ["debug", "info"])
async def test_a_record_of_an_exception_has_its_frames_at_debug_alone(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, level: str
) -> None:
    upstream = await start_upstream(hang_up)
    sidecar = await start_sidecar(upstreams=route(upstream), **keys(level))
    assert 502 == (await (await sidecar.app()).ask(POST)).status
    (record,) = error_records(sidecar)
    (letter,) = await letters_of(sidecar)
    if level == "info":
        assert (None, 1) == (record["stack_trace"], len(letter.last_stack.splitlines()))
        assert not lines(sidecar, Event.ATTEMPT) + lines(sidecar, Event.CONNECTION)
        return
    for told in (record["stack_trace"], letter.last_stack):
        assert "Connection reset by peer" in told, "the library's own exception"
        assert "sidecar/exchange.py" in told and "AttemptFailed: " in told, "and where ours was raised"
        assert "canary" not in told


async def test_an_answer_that_says_no_has_no_frames(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def unavailable(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(answer(b"", "503 Service Unavailable"))

    upstream = await start_upstream(unavailable)
    sidecar = await start_sidecar(upstreams=route(upstream), **keys("debug"))
    assert 503 == (await (await sidecar.app()).ask(POST)).status
    assert [None] == [record["stack_trace"] for record in error_records(sidecar)]


async def test_each_attempt_has_a_line_the_healthy_ones_too_and_so_have_connections(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    async def twice(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(answer(b"one"))
        await talk.read_request()
        await talk.send(answer(b"two").replace(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n"))

    upstream = await start_upstream(twice)
    sidecar = await start_sidecar(upstreams=route(upstream), **keys("debug"))
    app = await sidecar.app()
    assert [200, 200] == [(await app.ask(GET)).status for _ in range(2)]
    shown = lines(sidecar, Event.ATTEMPT)
    assert [("first", "sent", False), ("first", "sent", True)] == [
        (line["sidecar.attempt.kind"], line["sidecar.send_phase"], line["reused"]) for line in shown
    ]
    assert "over a kept connection to 127.0.0.1" in shown[1]["body"]
    opened, closed = (line["body"] for line in lines(sidecar, Event.CONNECTION))
    assert opened.endswith("opened") and closed.endswith("closed: the upstream keeps none")


async def test_a_line_of_a_failed_attempt_says_what_was_decided(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(hang_up)
    sidecar = await start_sidecar(upstreams=route(upstream), **keys("debug"))
    assert 502 == (await (await sidecar.app()).ask(GET)).status
    first, last = (line["body"] for line in lines(sidecar, Event.ATTEMPT))
    assert "CONNECTION_RESET" in first and "; the next one in " in first
    assert "; no further one (policies.default.max_attempts: 2)" in last


async def test_a_reload_tells_its_steps_and_may_begin_or_end_the_telling(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any, tmp_path: Path
) -> None:
    async def serve(talk: Talk) -> None:
        while True:
            await talk.read_request()
            await talk.send(answer(b"yes"))

    upstream, file = await start_upstream(serve), tmp_path / "sidecar.yaml"
    sidecar = await start_sidecar(file=file, upstreams=route(upstream), **keys("debug"))
    await sidecar.reloading.reload("a test")
    read, valid, in_force = (line["body"] for line in lines(sidecar, Event.CONFIG_STEP))
    assert f"{file} (" in read and "because of a test" in read
    assert "valid" in valid and "in force" in in_force
    file.write_text(file.read_text().replace("debug", "info"))
    await sidecar.reloading.reload("a test")
    app = await sidecar.app()
    await app.ask(GET)
    assert [] == lines(sidecar, Event.ATTEMPT)
