"""Everything that can go wrong beyond the sidecar, and ways to see from outside what the sidecar made of it.

Scripts are for `tests.doubles.upstream.Upstream`: each plays one fault on every connection or request, so that what
the sidecar does next can be counted in `requests` (heads that arrived) and `connections`.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from telemetry.record import Session
from tests.conftest import Running
from tests.doubles.app import App, Reply
from tests.doubles.upstream import Script, Talk, answer

TINY = {"base_delay": 0.001, "max_delay": 0.002}
"""Backoff that costs a test nothing."""
QUICK_POLICIES = {
    "default": TINY,
    "patient": TINY,
    "NETWORK_TIMEOUT": TINY,
    "RATE_LIMIT_EXCEEDED": TINY,
    "DATABASE_CONNECTION_ERROR": TINY,
}
"""The shipped policies as they are, with waits that cost nothing: attempts and choice are the real ones."""
NO_BREAKER = {"breaker": {"enabled": False}, "retry_budget": {"min_per_second": 1000.0}}
"""For tests about attempts: nothing but the policy limits them."""


# ---- what an upstream does wrong ---------------------------------------------------------------------------------


async def reset_at_once(talk: Talk) -> None:
    talk.reset()


async def reset_in_request_body(talk: Talk) -> None:
    """Take the head and the beginning of the body, then go."""
    await talk.read_head()
    await talk.reader.readexactly(1)
    talk.reset()


async def reset_after_request(talk: Talk) -> None:
    await talk.read_request()
    talk.reset()


async def silence(talk: Talk) -> None:
    await talk.read_request()
    await talk.reader.read()


async def garbage(talk: Talk) -> None:
    await talk.read_request()
    await talk.send(b"SSH-2.0-OpenSSH_9.2\r\n")
    await talk.reader.read()


def cut_off(data: bytes) -> Script:
    """Answer with these bytes, then close: they are the beginning of something longer."""

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(data)
        await asyncio.sleep(0.02)  # or the end would overtake the beginning on its way to the app
        talk.close()

    return script


def status(line: str, *fields: str, body: bytes = b"no") -> Script:
    """Answer every request with this status, on kept connections."""

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            whole = answer(body, line, *fields)
            await talk.send(whole[: -len(body)] if body and head.startswith(b"HEAD ") else whole)

    return script


def in_turn(*answers: bytes) -> Script:
    """The first request gets the first answer, and so on; the last one is repeated."""

    async def script(talk: Talk) -> None:
        while True:
            await talk.read_request()
            number = min(len(talk.upstream.bodies), len(answers))
            await talk.send(answers[number - 1])

    return script


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port that is taken, so nobody else gets it, and on which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


@contextmanager
def unanswering_port() -> Iterator[int]:
    """A port whose backlog is full: the kernel drops every further attempt to connect."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]
        for filler in fillers:
            filler.close()


# ---- a parent proxy ----------------------------------------------------------------------------------------------


class CorporateProxy:
    """A script: a small but real proxy. It takes absolute-form requests and CONNECT, and notes each first line.

    `refuse` is a status line with which every CONNECT is answered; `user` is what Proxy-Authorization must say.
    """

    def __init__(self, *, user: str | None = None, refuse: str | None = None, deaf: bool = False) -> None:
        self.lines: list[str] = []
        self.heads: list[bytes] = []
        self._wanted = None if user is None else b"Basic " + base64.b64encode(user.encode())
        self._refuse = refuse
        self._deaf = deaf

    async def __call__(self, talk: Talk) -> None:
        while True:
            head, body = await talk.read_request()
            self.heads.append(head)
            self.lines.append(head.split(b"\r\n")[0].decode())
            method, target, _ = head.split(b"\r\n")[0].split(b" ")
            if self._deaf:
                await talk.reader.read()
                return
            if self._wanted is not None and self._wanted != field(head, b"proxy-authorization"):
                await talk.send(answer(b"", "407 Proxy Authentication Required"))
            elif method == b"CONNECT":
                if self._refuse is not None:
                    await talk.send(answer(b"", self._refuse))
                    continue
                await self._tunnel(talk, target)
                return
            else:
                await self._forward(talk, head, body, target)

    async def _tunnel(self, talk: Talk, target: bytes) -> None:
        host, _, port = target.decode().rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await talk.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(_pipe(talk.reader, writer), _pipe(reader, talk.writer))
        finally:
            writer.close()

    async def _forward(self, talk: Talk, head: bytes, body: bytes, target: bytes) -> None:
        """To where the absolute form says, with the path alone, as a proxy does."""
        authority, _, path = target.removeprefix(b"http://").partition(b"/")
        host, _, port = authority.decode().rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.replace(target, b"/" + path, 1) + b"\r\n\r\n" + body)
        reply = await App(reader, writer).reply()
        writer.close()
        fields = [f"{name}: {value}" for name, value in reply.fields if name.lower() != "content-length"]
        await talk.send(answer(reply.body, f"{reply.status} {reply.reason}", *fields))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def field(head: bytes, name: bytes) -> bytes | None:
    """The value of a field of a raw head, by its lower-case name."""
    for line in head.split(b"\r\n")[1:]:
        given, _, value = line.partition(b":")
        if given.lower() == name:
            return value.strip()
    return None


# ---- what the app does, and what it sees -------------------------------------------------------------------------


def request(method: str, path: str, *fields: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: s", *fields]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def seen(app: App, *, to_head: bool = False, within: float = 10.0) -> Reply | None:
    """What the app gets; None when the connection ended before a whole head."""
    try:
        return await app.reply(to_head=to_head, within=within)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def ask(sidecar: Running, data: bytes) -> Reply:
    """One request on a connection of its own."""
    app = await sidecar.app()
    return await app.ask(data, to_head=data.startswith(b"HEAD "))


async def until(true: Callable[[], bool], what: str = "it did not come to that") -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


# ---- what the sidecar says about it ------------------------------------------------------------------------------


def ended(sidecar: Running) -> list[Session]:
    """The sessions that were kept, the oldest first."""
    return sidecar.proxy.signals.sessions.page(limit=10_000).items[::-1]


async def last_session(sidecar: Running, count: int = 1) -> Session:
    """The newest kept session, once so many are kept: the app has its answer a moment before."""
    await until(lambda: len(ended(sidecar)) >= count, f"fewer than {count} sessions ended")
    return ended(sidecar)[-1]


def drop_idle(sidecar: Running) -> None:
    """Kept connections would still follow the script of an upstream that got another one since."""
    for state in sidecar.proxy.directory.states():
        for pool in state.pools.values():
            pool.sweep(asyncio.get_running_loop().time() + 3600)


async def at_rest(sidecar: Running) -> None:
    """Wait until nothing is under way any more; fail with what still is."""
    for _ in range(500):
        if not (busy := under_way(sidecar)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still under way: {busy}")


def under_way(sidecar: Running) -> list[str]:
    """Whatever an exchange may have left behind."""
    proxy, found = sidecar.proxy, []
    for state in proxy.directory.states():
        turns = state.turns
        held = {
            "in_flight": state.requests,
            "active connections": state.connections[0],
            "waiting for a turn": turns.waiting,
            "at the gate": turns.gate.waiting,
            "places": turns.bulkhead.in_flight + turns.bulkhead.waiting if turns.bulkhead is not None else 0,
        }
        found += [f"{state.label}: {count} {what}" for what, count in held.items() if count]
        now = asyncio.get_running_loop().time()
        found += [
            f"{state.label}: a probe of {name}" for name, breaker in state.breakers() if breaker.snapshot(now).probes
        ]
    found += [f"watched: {thing}" for thing in proxy.ticker.watched]
    found += [f"{len(proxy.backoffs)} in backoff"] if proxy.backoffs else []
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if getattr(coroutine, "__qualname__", "").startswith("Exchange."):
            found.append(f"task {coroutine}")
    return found
