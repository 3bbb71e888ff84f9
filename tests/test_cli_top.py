"""`sidecar top`, in a real terminal: what it shows, how it fits, and that it leaves the terminal as it was."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio

from sidecar.cli.folding import folded
from sidecar.cli.snapshot import ReplaySeen, Snapshot, UpstreamSeen, parsed
from sidecar.cli.topkeys import View
from sidecar.cli.topview import frame
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.records import exhausted
from tests.doubles.upstream import Talk, answer
from tests.test_cli_admin import Ended, ask, here, run, started, url

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def every_other(talk: Talk) -> None:
    while True:
        await talk.read_request()
        odd = len(talk.upstream.requests) % 2
        await talk.send(answer(b"", "503 Busy") if odd else answer())


@pytest.fixture
async def busy(start_sidecar: Starter, start_upstream: UpstreamStarter) -> Running:
    flaky = await start_upstream(every_other)
    quick = {"max_attempts": 3, "base_delay": 0.01, "jitter_type": "none"}
    sidecar = await start_sidecar(
        upstreams={"payments": {"route": "/pay", "endpoints": [flaky.url], "policy": "quick"}},
        policies={"quick": quick},
    )
    for _ in range(3):
        await (await sidecar.app()).ask("GET /pay/x HTTP/1.1\r\nHost: s\r\n\r\n")
    return sidecar


class Shown:
    """A program in a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int, slave: int) -> None:
        self.process = process
        self._master, self._slave = master, slave
        self.modes = termios.tcgetattr(slave)
        self.written = ""
        os.set_blocking(master, False)
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.written += os.read(self._master, 65536).decode(errors="replace")

    @property
    def frames(self) -> list[list[str]]:
        """Whole frames, without what colours and places them."""
        return [
            [ESCAPE.sub("", line).rstrip("\r") for line in text.split("\n")]
            for text in self.written.split("\x1b[H")[1:-1]
        ]

    async def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(1500):
            if condition():
                return
            assert self.process.returncode is None, self.written
            await asyncio.sleep(0.01)
        raise AssertionError(self.written[-3000:])

    async def until_shown(self, text: str, after: int = 0) -> list[str]:
        await self.until(lambda: any(text in line for shown in self.frames[after:] for line in shown))
        return self.frames[-1]

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    async def ended(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 20)
        for _ in range(1500):  # what it wrote last may still be on its way
            if LEFT in self.written:
                break
            await asyncio.sleep(0.01)
        return code

    @property
    def restored(self) -> bool:
        return self.modes == termios.tcgetattr(self._slave) and self.written.rstrip().endswith(LEFT)

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
        os.close(self._slave)


@pytest_asyncio.fixture
async def top(busy: Running) -> AsyncIterator[Shown]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 110, 0, 0))
    process = await started("top", "--admin", url(busy), stdin=slave, stdout=slave, stderr=slave)
    shown = Shown(process, master, slave)
    yield shown
    await shown.close()


async def test_keys_order_filter_explain_and_help(busy: Running, top: Shown) -> None:
    await top.until_shown("retry_success")
    await top.until_shown("TEMPORARY_UNAVAILABLE")
    for keys, shown in (("s", "s order: requests"), ("?", "another order"), ("q", "s order: requests")):
        at = len(top.frames)
        top.type(keys)
        await top.until_shown(shown, after=at)
    at = len(top.frames)
    top.type("\r")
    await top.until_shown("was answered with 503", after=at)
    top.type("q")
    await top.until_shown("s order: requests", after=len(top.frames))
    at = len(top.frames)
    top.type("/nothing like it\r")
    await top.until_shown("No upstream has this text in its name.", after=at)
    at = len(top.frames)
    top.type("\x1b")
    await top.until_shown("payments", after=at)
    top.type("q")
    assert (0, True) == (await top.ended(), top.restored)


async def test_it_shows_upstreams_and_events_and_goes_on(busy: Running, top: Shown) -> None:
    last = await top.until_shown("retry_success")
    assert last[0].startswith("sidecar ")
    assert " ready " in last[0]
    row = next(line for line in last if line.startswith("> payments"))
    assert "100.0%" in row
    assert "1 closed" in row
    seen = len(top.frames)
    await (await busy.app()).ask("GET /pay/x HTTP/1.1\r\nHost: s\r\n\r\n")
    session = busy.proxy.signals.sessions.page().items[0].session_id.decode()
    await top.until_shown(session[:8], after=seen)
    assert "\x1b[32m" in top.written


async def test_it_fits_the_terminal_and_follows_its_size(top: Shown) -> None:
    await top.until_shown("retry_success")
    assert all(len(line) <= 110 for line in top.frames[-1])
    for columns, lines in ((60, 12), (200, 50), (20, 4)):
        top.resize(columns, lines)

        def fits(columns: int = columns, lines: int = lines) -> bool:
            body = top.frames[-1][3:]
            return len(top.frames[-1]) <= lines and all(len(line) <= max(columns, 45) for line in body)

        await top.until(fits)


async def test_q_ends_it_and_the_terminal_is_as_it_was(top: Shown) -> None:
    await top.until_shown("payments")
    top.type("xyz\x1b[5~")  # no keys of ours
    top.type("q")
    assert (0, True) == (await top.ended(), top.restored)
    assert "Traceback" not in top.written


async def test_ctrl_c_ends_it_and_the_terminal_is_as_it_was(top: Shown) -> None:
    await top.until_shown("payments")
    top.process.send_signal(signal.SIGINT)
    assert (0, True) == (await top.ended(), top.restored)
    assert "Traceback" not in top.written


async def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(top: Shown) -> None:
    await top.until_shown("payments")
    top.process.send_signal(signal.SIGTERM)
    assert (128 + signal.SIGTERM, True) == (await top.ended(), top.restored)


async def test_a_sidecar_that_goes_away_is_told_and_waited_for(busy: Running, top: Shown) -> None:
    await top.until_shown("payments")
    await busy.stop(grace=0.1)
    last = await top.until_shown("trying again")
    assert "NO ANSWER" in last[0]
    top.type("q")
    assert (0, True) == (await top.ended(), top.restored)


async def test_once_is_plain_text_for_scripts(busy: Running) -> None:
    ended = await ask(busy, "top", "--once")
    assert 0 == ended.code
    assert "\x1b" not in ended.out
    assert "retry_success" in ended.out
    told = json.loads((await ask(busy, "top", "--json")).out)
    assert ("payments", 1.0, {"closed": 1}) == tuple(
        told["upstreams"][0][key] for key in ("name", "success_rate", "breakers")
    )
    assert (True, True, 0.0) == tuple(told[key] for key in ("ready", "retries_enabled", "requests"))
    assert "retry_success" == told["events"][0]["event_type"]


async def test_once_ends_though_something_happens_all_the_time(busy: Running) -> None:
    async def never_quiet() -> None:
        while True:
            busy.proxy.signals.observe(exhausted())
            await asyncio.sleep(0.01)

    noise = asyncio.create_task(never_quiet())
    try:
        ended = await asyncio.wait_for(ask(busy, "top", "--json"), 15)
    finally:
        noise.cancel()
    assert (0, 20) == (ended.code, len(json.loads(ended.out)["events"]))


async def test_without_a_terminal_or_a_sidecar_it_says_what_to_do(busy: Running) -> None:
    ended: Ended = await run("top", SIDECAR_ADMIN=url(busy))
    assert (2, True) == (ended.code, "--once" in ended.err)
    nobody = await here("top", "--admin", "127.0.0.1:1")
    assert (1, True) == (nobody.code, "Start one with `sidecar run`" in nobody.err)


def seen(name: str, **facts: Any) -> UpstreamSeen:
    usual = {
        "requests": 1.0,
        "retries": 0.0,
        "errors": 0.0,
        "success_10s": 1.0,
        "success_rate": 1.0,
        "p50": 0.001,
        "p99": 0.01,
        "in_flight": 0,
        "budget": 1.0,
        "breakers": {"closed": 1},
        "forced": False,
        "gate_waiting": 0,
        "dead_letters": 0,
        "last_error": None,
        "last_error_at": None,
        "last_session": None,
    }
    return UpstreamSeen(name, **(usual | facts))


def snapshot(*upstreams: UpstreamSeen, **facts: Any) -> Snapshot:
    usual = {"version": "1", "ready": True, "retries_enabled": True, "requests": None, "retries": None, "errors": None}
    return Snapshot(**(usual | {"in_flight": 0, "dead_letters": 0, "upstreams": upstreams} | facts))


def test_what_does_not_fit_is_counted() -> None:
    lines = frame(snapshot(*(seen(f"u{number}") for number in range(40))), "x", NOW, width=80, height=20, colour=False)
    shown = [line for line in lines if re.match(r"u\d", line)]
    assert f"… and {40 - len(shown)} more" in lines
    assert len(lines) <= 20
    assert "EVENTS" in lines


def test_what_needs_attention_is_told() -> None:
    events = (
        {"event_type": "circuit_breaker_opened", "timestamp": "2026-01-01T00:00:00Z", "context": {"reason": "\x1b[2J"}},
    )
    hurt = seen("u", breakers={"open": 1, "closed": 2}, forced=True, gate_waiting=3, dead_letters=4, budget=0.0)
    told = "\n".join(
        frame(
            snapshot(hurt, retries_enabled=False, ready=False, dead_letters=1, events=events),
            "x",
            NOW,
            width=None,
            height=None,
            colour=True,
        )
    )
    for words in ("NOT READY", "retries OFF", "1 breaker open", "1 dead letter", "2 closed, 1 open (forced)", "0+3"):
        assert words in told
    assert "\x1b[2J" not in told  # text of others does not command the terminal
    assert "No upstreams yet" in "\n".join(frame(snapshot(), "x", NOW, width=80, height=24, colour=False))


def test_samples_are_read_as_prometheus_writes_them() -> None:
    text = 'sidecar_dlq_entries{upstream="a\\"b\\\\c"} 3\n# HELP x\nother{upstream="u"} 1\nsidecar_ready 1.0\n'
    assert {"sidecar_dlq_entries": [({"upstream": 'a"b\\c'}, 3.0)], "sidecar_ready": [({}, 1.0)]} == parsed(text)


def happened(kind: str, ago: float, upstream: str = "payments", **facts: Any) -> dict[str, Any]:
    at = datetime.fromtimestamp(NOW - ago, UTC).isoformat()
    return {
        "event_type": kind,
        "timestamp": at,
        "session_id": "abcdef0123456789",
        "context": {"upstream": upstream},
    } | facts


def refused(ago: float, upstream: str = "payments") -> dict[str, Any]:
    context = {"upstream": upstream, "outcome": "breaker_open"}
    return happened("request_failure", ago, context=context, error={"type": "CIRCUIT_OPEN", "message": ""})


def test_events_of_a_kind_are_one_line_with_their_number_until_there_was_a_pause() -> None:
    events = [refused(number * 0.5) for number in range(61)]
    events[3:3] = [refused(1.2, "other")]
    events += [refused(100.0)]
    told = [(fold.told, fold.times) for fold in folded(events)]
    assert [
        ("payments: 61 × breaker_open in 30 s", 61),
        ("other: 1 × breaker_open", 1),
        ("payments: 1 × breaker_open", 1),
    ] == told


def test_what_opened_a_breaker_and_its_changes_stay_in_sight_on_a_small_screen() -> None:
    opened = happened(
        "circuit_breaker_opened",
        200,
        context={"upstream": "payments", "endpoint": "a.test:443", "to_state": "open", "why": "20 failures in a row"},
    )
    events = (
        *(refused(number) for number in range(100)),
        *(happened("replayed", 50, f"u{n}") for n in range(30)),
        opened,
    )
    since = datetime.fromtimestamp(NOW - 200, UTC).isoformat()
    hurt = seen("payments", breakers={"open": 1}, last_error="CONNECTION_REFUSED", last_error_at=since, errors=50.0)
    others = [seen(f"u{number:02}") for number in range(30)]
    going_on = ReplaySeen("rpl_1a2b", "paused", 10, 40, "the breaker is open")
    lines = frame(
        snapshot(hurt, *others, events=events, replays=(going_on,), errors=50.0),
        "http://127.0.0.1:4141",
        NOW,
        width=80,
        height=24,
        colour=False,
        view=View(),
    )
    text = "\n".join(lines)
    assert (24, True) == (len(lines), all(len(line) <= 80 for line in lines))
    for words in (
        "50.0 errors/s",
        "CONNECTION_REFUSED, 3",
        "3 min ago   payments at a.test:443 is open: 20 failures in a row",
        "rpl_1a2b is paused: 10 of 40, 25%, the breaker is open",
        "payments: 100 × breaker_open in 1 min",
        "? help",
    ):
        assert words in text


def test_a_filter_leaves_out_changes_of_other_breakers_too() -> None:
    endpoint = {"endpoint": "a.test:443", "to_state": "open", "why": "20 failures in a row"}
    events = [
        happened("circuit_breaker_opened", 5, context={"upstream": name, **endpoint}) for name in ("payments", "mail")
    ]
    view, known = View(), [seen("payments"), seen("mail")]
    view.typed("/mail\r", known)
    lines = frame(snapshot(*known, events=tuple(events)), "http://x", NOW, width=80, height=24, colour=False, view=view)
    assert ["5 s ago     mail at a.test:443 is open: 20 failures in a row"] == [
        one for one in lines if "is open" in one
    ]


def test_keys_choose_order_and_filter() -> None:
    known = [seen("a", requests=1.0, errors=5.0, last_session="s1"), seen("b", requests=9.0, last_session="s2")]
    view = View()
    assert ["a", "b"] == [one.name for one in view.upstreams(known)]
    assert view.typed("s", known)
    assert ["b", "a"] == [one.name for one in view.upstreams(known)]
    view.typed("\x1b[B\x1b[B\r", known)
    assert "s1" == view.wish
    view.typed("/Bx\x7f\r", known)
    assert (["b"], False) == ([one.name for one in view.upstreams(known)], view.typing)
    assert not view.typed("q", known)
