"""`GET /events` with real readers: live, resumed, slow, gone, and at the end of the sidecar."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, NamedTuple

import pytest

from sidecar.admin import events as live_events
from tests.conftest import Running, Starter
from tests.doubles.app import App, Reply
from tests.doubles.records import exhausted, lived, recovered
from tests.test_admin import admin, at_fault


class Event(NamedTuple):
    """One frame of the stream; a comment has only text."""

    id: str | None
    type: str
    data: Any
    comment: str = ""


class Reader:
    """Reads server-sent events off a chunked answer."""

    def __init__(self, app: App, head: Reply) -> None:
        self.app = app
        self.head = head
        self._text = ""
        self.ended = False

    @classmethod
    async def connect(cls, sidecar: Running, *fields: str, room: int = 0) -> Reader:
        """`room` is how many bytes the system keeps for a reader that does not read."""
        sock = socket.socket()
        if room:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        sock.connect(sidecar.admin_address)
        app = App(*await asyncio.open_connection(sock=sock, limit=2**22))
        sidecar.apps.append(app)
        lines = "".join(f"{field}\r\n" for field in fields)
        head = await app.ask(f"GET /events HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n", to_head=True)
        reader = cls(app, head)
        if 200 == head.status:
            assert "2000" == await reader.retry()
        return reader

    async def frame(self) -> dict[str, str]:
        while "\n\n" not in self._text:
            size = int(await asyncio.wait_for(self.app.reader.readuntil(b"\r\n"), 10), 16)
            self._text += (await self.app.reader.readexactly(size)).decode()
            await self.app.reader.readexactly(2)
            if size == 0:
                self.ended = True
                return {}
        frame, _, self._text = self._text.partition("\n\n")
        return dict(line.split(": ", 1) for line in frame.splitlines())

    async def retry(self) -> str:
        return (await self.frame())["retry"]

    async def event(self) -> Event:
        """The next that is not a comment."""
        while True:
            frame = await self.frame()
            if "event" in frame:
                return Event(frame.get("id"), frame["event"], json.loads(frame["data"]))

    async def rest(self) -> list[Event]:
        """Everything until the end, comments included."""
        found = []
        while True:
            frame = await self.frame()
            if self.ended:
                return found
            data = json.loads(frame["data"]) if "data" in frame else None
            found.append(Event(frame.get("id"), frame.get("event", ""), data, frame.get("", "")))


async def until(true: Any) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


def tell(sidecar: Running, count: int, text: str = "") -> None:
    """Publish so many events at once."""
    for number in range(count):
        sidecar.proxy.signals.events.state_changed("config_changed", 1_700_000_000.0, {"number": number, "text": text})


async def test_events_are_told_as_they_happen(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    reader = await Reader.connect(sidecar)
    assert "text/event-stream; charset=utf-8" == reader.head.get("content-type")
    assert "no-store" == reader.head.get("cache-control")
    signals = sidecar.proxy.signals
    signals.observe(lived(signals, recovered(target="/x?token=secret")))
    sidecar.proxy.signals.breaker_changed("payments", "a.test:443", "closed", "open", "5 calls in a row failed")
    told = [await reader.event() for _ in range(3)]
    assert ["retry_attempt", "retry_success", "circuit_breaker_opened"] == [event.type for event in told]
    for event in told:
        assert (event.id, event.type) == (event.data["event_id"], event.data["event_type"])
    assert "5 calls in a row failed" == told[2].data["context"]["why"]
    assert "secret" not in str(told)


async def test_a_reader_begins_with_what_happens_after_it_came(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    tell(sidecar, 3)
    reader = await Reader.connect(sidecar)
    sidecar.proxy.signals.observe(exhausted())
    assert "retry_failure" == (await reader.event()).type


async def test_a_reader_that_comes_back_goes_on_after_the_last_it_saw(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    reader = await Reader.connect(sidecar)
    tell(sidecar, 5)
    seen = [await reader.event() for _ in range(2)]
    reader.app.close()
    back = await Reader.connect(sidecar, f"Last-Event-ID: {seen[-1].id}")
    assert [2, 3, 4] == [(await back.event()).data["context"]["number"] for _ in range(3)]


async def test_a_reader_that_comes_back_too_late_is_told_of_the_gap(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    tell(sidecar, 1_500)
    reader = await Reader.connect(sidecar, "Last-Event-ID: evt_1700000000000_10")
    gap = await reader.event()
    assert ("gap", "evt_1700000000000_10", None) == (gap.type, gap.data["after"], gap.id)
    assert 500 == (await reader.event()).data["context"]["number"]


async def test_an_id_of_an_earlier_life_gets_what_is_known_and_the_gap(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    tell(sidecar, 2)
    reader = await Reader.connect(sidecar, "Last-Event-ID: evt_1600000000000_99")
    assert ["gap", "config_changed", "config_changed"] == [(await reader.event()).type for _ in range(3)]


async def test_what_is_not_an_id_is_refused(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    for wrong in ["5", "evt_1", "evt_x_1", "evt_1_1; drop", ""]:
        reply = await admin(sidecar, "/events", f"Last-Event-ID: {wrong}")
        assert (400, ["Last-Event-ID"]) == (reply.status, at_fault(reply))


async def test_a_reader_that_is_overrun_is_let_go_and_misses_nothing_when_it_comes_back(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    reader = await Reader.connect(sidecar)
    tell(sidecar, 1_500)  # faster than anybody could read: nothing else runs in between
    *got, last = await reader.rest()
    assert list(range(1_000)) == [event.data["context"]["number"] for event in got]
    assert last.comment.startswith("too slow")
    assert 1 == sidecar.proxy.signals.events.slow_readers
    back = await Reader.connect(sidecar, f"Last-Event-ID: {got[-1].id}")
    assert 1_000 == (await back.event()).data["context"]["number"]


async def test_a_reader_that_does_not_read_is_cut_off_and_nobody_waits_for_it(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    sidecar.api.events.patience = 0.2
    slow, quick = await Reader.connect(sidecar, room=4_096), await Reader.connect(sidecar)
    slow.app.reader._transport.pause_reading()  # type: ignore[attr-defined]  # a program that is stuck
    events = sidecar.proxy.signals.events
    number = 0
    async with asyncio.timeout(15):
        while events.readers == 2:
            tell(sidecar, 50, "word " * 300)
            for _ in range(50):
                assert number % 50 == (await quick.event()).data["context"]["number"]
                number += 1
    assert 1 == events.readers
    assert 200 == (await admin(sidecar, "/livez")).status
    tell(sidecar, 1)
    assert 0 == (await quick.event()).data["context"]["number"]


async def test_silence_is_broken_now_and_then_by_a_comment(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    sidecar.api.events.heartbeat = 0.01
    reader = await Reader.connect(sidecar)
    assert {"": "still here"} == await reader.frame()
    assert {"": "still here"} == await reader.frame()


async def test_a_reader_that_went_away_is_forgotten_though_nothing_happens(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    sidecar.api.events.heartbeat = 0.01
    reader = await Reader.connect(sidecar)
    assert 1 == sidecar.proxy.signals.events.readers
    reader.app.close()
    await until(lambda: sidecar.proxy.signals.events.readers == 0)


async def test_a_reader_that_went_away_is_noticed_by_the_next_event_too(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    reader = await Reader.connect(sidecar)
    reader.app.close()
    async with asyncio.timeout(10):
        while sidecar.proxy.signals.events.readers:
            tell(sidecar, 1)
            await asyncio.sleep(0.01)


async def test_only_so_many_may_listen(start_sidecar: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = await start_sidecar()
    monkeypatch.setattr(live_events, "MOST_READERS", 2)
    for _ in range(2):
        assert 200 == (await Reader.connect(sidecar)).head.status
    refused = await admin(sidecar, "/events")
    assert (503, "OVERLOADED", "5") == (refused.status, refused.json["error_code"], refused.get("retry-after"))


async def test_the_stream_ends_cleanly_with_the_sidecar(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    reader = await Reader.connect(sidecar)
    tell(sidecar, 1)
    stopping = asyncio.ensure_future(sidecar.stop(grace=0.05))
    async with asyncio.timeout(5):
        event, last = await reader.rest()
        assert await stopping
    assert ("config_changed", "the sidecar stops") == (event.type, last.comment)
    assert await reader.app.closed()


async def test_an_event_that_cannot_be_told_breaks_its_stream_and_nothing_else(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    reader = await Reader.connect(sidecar)
    sidecar.proxy.signals.events.state_changed("config_changed", float("nan"), {})
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.event()
    await until(lambda: sidecar.proxy.signals.events.readers == 0)
    assert 1 == sidecar.proxy.metrics.internal_errors["admin"]
    sidecar.proxy.signals.writer.flush()
    sidecar.logged.truncate(0)  # it was meant


async def test_who_does_not_follow_gets_what_is_known_and_the_end_of_it(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    tell(sidecar, 1_500)
    text = (await admin(sidecar, "/events?follow=false")).body.decode()
    assert 1_000 == text.count("event: config_changed")
    assert text.endswith(": that is all so far\n\n")
    last = text.rpartition("id: ")[2].partition("\n")[0]
    nothing_new = (await admin(sidecar, "/events?follow=false", f"Last-Event-ID: {last}")).body.decode()
    assert (0, True) == (nothing_new.count("event: "), nothing_new.endswith(": that is all so far\n\n"))
    assert 0 == sidecar.proxy.signals.events.readers
    assert 400 == (await admin(sidecar, "/events?follow=maybe")).status
