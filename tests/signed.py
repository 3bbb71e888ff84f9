"""Bytes that were meant for others: `python -m tests.signed`, or `make storm`.

Some hundred apps on kept connections, pipelined, in base-URL and in forward mode, keyed, in HTTP/1.0, going away in the
middle; upstreams on several ports with every fault, among them bytes behind the end of an answer; a sidecar as a process
of its own, reloaded all the time. Every body is signed: it is made of the name of its upstream, of the id that the
request carried and of its length, so that each byte of it says whose it is. An app checks each byte that it reads, an
upstream each byte of a request. One that was meant for somebody else ends in `wrong`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from tests.doubles.faults import field as field_of
from tests.doubles.upstream import Talk, Upstream
from tests.doubles.wire import Wire
from tests.e2e.process import Process
from tests.framing import rfc9112
from tests.reloads import reload

_NAMES = ("red", "green", "blue", "black")
_SIZES = [0, 1, 20, 200, 3_000, 40_000, 150_000]
_SIZE_WEIGHTS = [2, 2, 10, 10, 4, 2, 1]
_PATIENCE = 60.0

_ANSWERS = {
    # whole
    "length": 30,
    "dated": 20,
    "chunked": 12,
    "trailers": 5,
    "to the end": 4,
    "no content": 5,
    "not modified": 3,
    "hints": 4,
    "http10": 3,
    "in pieces": 5,
    "closing": 4,
    "unavailable": 4,
    "limited": 1,
    # with something behind the end
    "surplus answer": 12,
    "surplus bytes": 4,
    "surplus interim": 2,
    "late surplus": 4,
    # broken
    "cut": 5,
    "cut chunked": 4,
    "cut head": 2,
    "bad chunk": 2,
    "reset": 3,
    "silent": 2,
    "hang": 1,
    "early": 3,
    "garbage": 2,
}
_BEHIND = frozenset({"surplus answer", "surplus bytes", "surplus interim", "late surplus"})


def signed(name: str, ident: str, size: int) -> bytes:
    """The only body of this size that this upstream gives to this request, or takes from it."""
    seal = blake2b(f"{name} {ident} {size}".encode(), digest_size=12).hexdigest()
    line = f"{name} {ident} {size} {seal}\n".encode()
    return (line * (size // len(line) + 1))[:size]


@dataclass
class Found:
    """What the run has shown."""

    sent: Counter[str] = field(default_factory=Counter)
    """What upstreams did, by kind."""
    read: Counter[str] = field(default_factory=Counter)
    """What apps saw."""
    reloads: int = 0
    surplus_told: int = 0
    wrong: list[str] = field(default_factory=list)
    examples: Counter[str] = field(default_factory=Counter)

    def blame(self, what: str, shown: object) -> None:
        self.examples[what] += 1
        if self.examples[what] <= 5:
            self.wrong.append(f"{what}: {shown!r}"[:400])


# ---- upstreams ---------------------------------------------------------------------------------------------------


class Signing:
    """The script of one upstream."""

    def __init__(self, name: str, found: Found, chance: random.Random) -> None:
        self._name = name
        self._found = found
        self._chance = chance

    async def __call__(self, talk: Talk) -> None:
        try:
            await self._serve(talk)
        except RuntimeError:
            pass  # how uvloop says that the other side has gone meanwhile

    async def _serve(self, talk: Talk) -> None:
        while True:
            head = await talk.read_head()
            talk.upstream.requests.clear()
            ident = (field_of(head, b"x-id") or b"").decode()
            if self._name not in (field_of(head, b"x-for") or b"").decode().split():
                self._found.blame("a request came to an upstream that it was not for", head)
            kind = self._chance.choices(list(_ANSWERS), list(_ANSWERS.values()))[0]
            self._found.sent[kind] += 1
            if kind != "early":
                await self._take_body(talk, head, ident)
            if not await self._answer(talk, kind, ident, head.startswith(b"HEAD ")):
                return

    async def _take_body(self, talk: Talk, head: bytes, ident: str) -> None:
        size = int(field_of(head, b"x-size") or b"0")
        body = b""
        if field_of(head, b"transfer-encoding") is not None:
            while length := int(await talk.reader.readuntil(b"\r\n"), 16):
                body += await talk.reader.readexactly(length)
                await talk.reader.readexactly(2)
            await talk.reader.readexactly(2)
        elif (announced := field_of(head, b"content-length")) is not None:
            body = await talk.reader.readexactly(int(announced))
        if body != signed("app", ident, size):
            self._found.blame("an upstream got a body that was not signed for its request", (ident, body[:200]))

    async def _answer(self, talk: Talk, kind: str, ident: str, to_head: bool) -> bool:
        """True if the connection goes on."""
        chance = self._chance
        size = chance.choices(_SIZES, _SIZE_WEIGHTS)[0]
        body = signed(self._name, ident, size)
        mark = f"X-Signed: {self._name} {ident} {size}"
        length = f"Content-Length: {size}"
        bodyless = to_head or kind in ("no content", "not modified")
        given = b"" if bodyless else body

        def head(status: str, *lines: str, version: str = "1.1") -> bytes:
            return "\r\n".join([f"HTTP/{version} {status}", mark, *lines, "", ""]).encode()

        plain = head("200 OK", length) + given
        if kind in ("length", "early"):
            await talk.send(plain)
            return kind == "length"
        if kind == "dated":
            await talk.send(head("200 OK", "Date: Thu, 01 Jan 1970 00:00:00 GMT", length) + given)
        elif kind in ("chunked", "trailers"):
            trailer = f"X-Trailer: {ident}\r\n".encode() if kind == "trailers" else b""
            end = b"" if to_head else b"0\r\n" + trailer + b"\r\n"
            await talk.send(head("200 OK", "Transfer-Encoding: chunked") + _chunks(given, chance) + end)
        elif kind == "to the end":
            await talk.send(head("200 OK") + given)
            return False
        elif kind == "no content":
            await talk.send(head("204 No Content"))
        elif kind == "not modified":
            await talk.send(head("304 Not Modified", length))
        elif kind == "hints":
            await talk.send(head("103 Early Hints", "Link: </a>") + plain)
        elif kind == "http10":
            await talk.send(head("200 OK", length, version="1.0") + given)
            return False
        elif kind == "in pieces":
            for at in range(0, len(plain), max(1, len(plain) // 5)):
                await talk.send(plain[at : at + max(1, len(plain) // 5)])
                await asyncio.sleep(chance.random() * 0.02)
        elif kind == "closing":
            await talk.send(head("200 OK", length, "Connection: close") + given)
            return False
        elif kind in ("unavailable", "limited"):
            status = "503 Service Unavailable" if kind == "unavailable" else "429 Too Many Requests"
            await talk.send(head(status, length, "Retry-After: 0") + given)
        elif kind in _BEHIND:
            return await self._too_much(talk, kind, head, given, length, to_head)
        else:
            await self._broken(talk, kind, head, plain, body, to_head)
            return False
        return True

    async def _too_much(
        self, talk: Talk, kind: str, head: Callable[..., bytes], given: bytes, length: str, to_head: bool
    ) -> bool:
        """What is meant for nobody behind an answer, framed in one of several ways."""
        chance = self._chance
        forged = signed(self._name, "forged", 64)
        behind = b"HTTP/1.1 200 OK\r\nX-Signed: %b forged 64\r\nContent-Length: 64\r\n\r\n%b" % (
            self._name.encode(),
            forged,
        )
        if kind == "surplus bytes":
            behind = chance.choice([b"!", b"HTTP/1.1 ", forged, b"\0\xff" * 50, b"0\r\n\r\n", b"\r\n\r\nX"])
        elif kind == "surplus interim":
            behind = b"HTTP/1.1 103 Early Hints\r\nX-Signed: %b forged 0\r\n\r\n" % self._name.encode()
        framing = chance.choice(["length", "dated", "chunked", "204", "304", "hints"])
        answer = {
            "length": lambda: head("200 OK", length) + given,
            "dated": lambda: head("200 OK", "Date: Thu, 01 Jan 1970 00:00:00 GMT", length) + given,
            "chunked": lambda: (
                head("200 OK", "Transfer-Encoding: chunked")
                + (b"" if to_head else _chunks(given, chance) + b"0\r\n\r\n")
            ),
            "204": lambda: head("204 No Content"),
            "304": lambda: head("304 Not Modified", length),
            "hints": lambda: head("103 Early Hints") + head("200 OK", length) + given,
        }[framing]()
        if kind != "late surplus":
            await talk.send(answer + behind)
            return chance.random() < 0.7
        # A whole answer on a kept connection, once the next request is on its way, is the answer to that, for everybody.
        # So what comes late is no answer, or its connection was said to end.
        if chance.random() < 0.5:
            behind = b"!" + behind
        else:
            answer = head("200 OK", length, "Connection: close") + given
        await talk.send(answer)
        await asyncio.sleep(chance.random() * 0.01)
        await talk.send(behind)
        return False

    async def _broken(
        self, talk: Talk, kind: str, head: Callable[..., bytes], plain: bytes, body: bytes, to_head: bool
    ) -> None:
        chance = self._chance
        if kind == "cut":
            await talk.send(plain[: chance.randrange(len(plain))])
        elif kind in ("cut chunked", "bad chunk"):
            sent = head("200 OK", "Transfer-Encoding: chunked")
            if not to_head:
                sent += _chunks(body, chance)
                sent = sent + b"zz\r\n" if kind == "bad chunk" else sent[: chance.randrange(len(sent))]
            await talk.send(sent)
        elif kind == "cut head":
            await talk.send(plain[: chance.randrange(30)])
        elif kind == "garbage":
            await talk.send(b"SSH-2.0-OpenSSH_9.2\r\n")
        elif kind == "hang":
            await asyncio.wait([asyncio.ensure_future(talk.reader.read())], timeout=3)
        if kind == "reset" or chance.random() < 0.3:
            talk.reset()


def _chunks(body: bytes, chance: random.Random) -> bytes:
    size = chance.choice([17, 1000, 70_000])
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


# ---- apps --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One request: its bytes, the id that its answer has to carry, and who may answer it."""

    method: bytes
    ident: str
    names: tuple[str, ...]
    data: bytes
    old: bool = False
    """In HTTP/1.0, whose answers may end with the connection."""


class Asking:
    """One app, which asks until it is over."""

    def __init__(self, number: int, storm: Storm, chance: random.Random) -> None:
        self._number = number
        self._storm = storm
        self._chance = chance
        self._numbers = count()

    async def run(self) -> None:
        found, wire = self._storm.found, None
        while not self._storm.over.is_set():
            try:
                if wire is None or wire.ended:
                    wire = await Wire.to(self._storm.address, _PATIENCE)
                keeps = await self._turn(wire)
            except TimeoutError:
                found.blame("an app got no answer at all", self._number)
                keeps = False
            except OSError:
                found.read["connection lost"] += 1
                keeps = False
            if not keeps and wire is not None:
                wire.close()
                wire = None
            await asyncio.sleep(self._chance.random() * 0.05)
        if wire is not None:
            wire.close()

    async def _turn(self, wire: Wire) -> bool:
        """Some requests at once, and their answers in order. True if the connection goes on."""
        chance, found = self._chance, self._storm.found
        await asyncio.sleep(0)
        if wire.unasked:
            found.blame("bytes came before an app had asked", wire.unasked[:200])
            return False
        questions = [self._question() for _ in range(chance.choice([1, 1, 1, 1, 2, 3, 5]))]
        if chance.random() < 0.05 and b"Transfer-Encoding" not in questions[0].data:
            old = questions[0].data.replace(b" HTTP/1.1", b" HTTP/1.0", 1)
            questions = [replace(questions[0], data=old, old=True)]
        data = b"".join(question.data for question in questions)
        leaves = chance.random()
        if leaves < 0.03:  # in the middle of asking
            await wire.send(data[: chance.randrange(len(data))])
            found.read["left while asking"] += 1
            return False
        await wire.send(data)
        if leaves < 0.08:  # before, or in the middle of an answer
            await asyncio.sleep(chance.random() * 0.05)
            self._check_part(wire.unasked, questions[0])
            found.read["left while waiting"] += 1
            if chance.random() < 0.5:
                wire.writer.transport.abort()
            return False
        for question in questions:
            reading = await wire.answer(question.method)
            if not self._check(reading, question, wire):
                return False
        return True

    def _question(self) -> Question:
        chance, storm = self._chance, self._storm
        keyed = chance.random() < 0.1
        ident = f"{self._number}.{next(self._numbers)}"
        if keyed and chance.random() < 0.5:
            ident = f"{self._number}.again"  # a key is asked for again: its answer is the first one's, and so is its id
        draw = chance.random()
        if draw < 0.5:
            route, names = chance.choice(list(storm.routes.items()))
            target = f"{route}/x"
        else:
            name, upstream = chance.choice(list(storm.upstreams.items()))
            target, names = f"{upstream.url}/x", (name,)
        if keyed:
            route, names = next(iter(storm.routes.items()))
            target = f"{route}/keyed"
        method = "POST" if keyed else chance.choice(["GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE"])
        lines = [f"{method} {target} HTTP/1.1", "Host: s", f"x-id: {ident}", "x-for: " + " ".join(names)]
        body = b""
        if method in ("POST", "PUT"):
            size = 64 if keyed else chance.choices(_SIZES, _SIZE_WEIGHTS)[0]
            body = signed("app", ident, size)
            lines.append(f"x-size: {size}")
            if chance.random() < 0.3 and not keyed:
                lines.append("Transfer-Encoding: chunked")
                body = _chunks(body, chance) + b"0\r\n\r\n"
            else:
                lines.append(f"Content-Length: {size}")
        if keyed:
            lines.append(f"Idempotency-Key: {ident}")
        return Question(method.encode(), ident, names, "\r\n".join([*lines, "", ""]).encode() + body)

    def _check_part(self, data: bytes, question: Question) -> None:
        """What an app has that does not wait for the end."""
        reading = rfc9112.answer(data, question.method)
        for message in reading.messages:
            self._whose(message, question)

    def _check(self, reading: rfc9112.Reading, question: Question, wire: Wire) -> bool:
        """True if the connection may be used for the next."""
        found = self._storm.found
        if reading.end in (rfc9112.REFUSED, rfc9112.SWITCHED):
            found.blame("an app read what is no answer", (question.ident, reading.why, reading.rest[:200]))
            return False
        if not reading.messages:
            found.read["no answer"] += 1
            return False
        for message in reading.messages:
            self._whose(message, question)
        final = reading.messages[-1]
        found.read["whole" if final.whole else "cut off"] += 1
        closes = b"close" in [value.lower() for value in final.all(b"connection")]
        return final.whole and not closes and not wire.ended and not question.old

    def _whose(self, message: rfc9112.Message, question: Question) -> None:
        found, marks = self._storm.found, message.all(b"x-signed")
        if not marks:
            self._own(message, question)
            return
        name, ident, size = marks[0].decode().split()
        if len(marks) > 1 or ident != question.ident or name not in question.names:
            found.blame("an app got the answer to another request", (question.ident, question.names, marks))
            return
        if message.status < 200 and question.old:
            found.blame("an HTTP/1.0 app got an interim answer", (question.ident, message))
        bodyless = question.method == b"HEAD" or message.status < 200 or message.status in (204, 304)
        wanted = b"" if bodyless else signed(name, ident, int(size))
        if message.whole and message.body != wanted:
            found.blame("an answer that looks whole is not the one that was signed", (question.ident, message))
        elif not wanted.startswith(message.body):
            found.blame("an app got bytes that were not signed for it", (question.ident, message))
        if message.trailers not in ((), ((b"X-Trailer", ident.encode()),)):
            found.blame("an app got trailers of something else", (question.ident, message.trailers))
        found.read["signed"] += 1

    def _own(self, message: rfc9112.Message, question: Question) -> None:
        """Only the sidecar's own errors are not signed: in its shape, for its session."""
        found = self._storm.found
        if question.method == b"HEAD" and message.all(b"x-sidecar-session"):
            found.read["own errors"] += 1
            return
        try:
            found.read[f"own {json.loads(message.body)['error_code']}"] += 1
            return
        except (ValueError, KeyError, TypeError):
            pass
        found.blame("an app got what nobody signed", (question.ident, message))


# ---- the run -----------------------------------------------------------------------------------------------------


class Storm:
    def __init__(self, seed: int) -> None:
        self.found = Found()
        self.over = asyncio.Event()
        self.address = ("", 0)
        self.seed = seed
        self.upstreams: dict[str, Upstream] = {}
        self.routes = {"/warm": ("red", "green"), "/cold": ("blue",), "/dark": ("black", "blue")}

    def keys(self, number: int) -> dict[str, Any]:
        """Settings that differ in what a request can meet: order, attempts, bounds."""
        waits = {"base_delay": 0.001, "max_delay": 0.01}
        plain = {
            "breaker": {"enabled": False},
            "retry_budget": {"min_per_second": 10_000},
            "dead_letter": {"enabled": False},
            "timeouts": {"body_idle": 5 + number % 2},
        }
        routes = {
            route.strip("/"): {
                "route": route,
                "endpoints": [self.upstreams[name].url for name in (names if number % 2 else names[::-1])],
                "max_in_flight": 1000 if number % 3 else None,
                **plain,
            }
            for route, names in self.routes.items()
        }
        return {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "telemetry": {"sessions": 100},
            "policies": {
                "default": {**waits, "attempt_timeout": 2, "total_timeout": 10, "max_attempts": 2 + number % 2}
            },
            "upstreams": routes,
        }

    async def run(self, seconds: float, clients: int, folder: Path, tell: Callable[[str], None] | None = None) -> Found:
        for place, name in enumerate(_NAMES):
            script = Signing(name, self.found, random.Random(f"{self.seed} {place}"))
            self.upstreams[name] = await Upstream(script).start()
        process = await (await Process.start(folder, None, self.keys(0))).ready()
        self.address = process.address
        apps = [Asking(number, self, random.Random(f"{self.seed} app {number}")) for number in range(clients)]
        tasks = [asyncio.create_task(app.run()) for app in apps]
        try:
            await self._reload_until(seconds, process, tell)
            self.over.set()
            await asyncio.gather(*tasks)
            if not process.running:
                self.found.blame("the sidecar ended", process.stderr[-500:])
                return self.found
            seen = await process.metrics()
            self.found.surplus_told = round(seen.total("sidecar_upstream_surplus_total"))
            for line in process.lines("sidecar.internal_error"):
                self.found.blame("a fault of the sidecar itself", line)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await process.clean_up()
            for upstream in self.upstreams.values():
                await upstream.stop()
        return self.found

    async def _reload_until(self, seconds: float, process: Process, tell: Callable[[str], None] | None) -> None:
        loop = asyncio.get_running_loop()
        ends, told = loop.time() + seconds, loop.time()
        for number in count(1):
            await asyncio.sleep(min(1.0, max(0.0, ends - loop.time())))
            if loop.time() >= ends or not process.running:
                return
            if await reload(process, json.dumps(self.keys(number))) == 200:
                self.found.reloads += 1
            del process.written[:-2000]
            if tell is not None and loop.time() - told >= 10:
                told = loop.time()
                tell(
                    f"{ends - told:5.0f} s to go, {self.found.read['whole']:,} whole answers, wrong: {len(self.found.wrong)}"
                )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.signed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (default: 120)")
    parser.add_argument("--clients", type=int, default=300, help="apps at once (default: 300)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of what upstreams and apps do")
    chosen = parser.parse_args()
    print(f"{chosen.clients} apps for {chosen.seconds:g} s, --seed {chosen.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:

        async def run() -> Found:
            storm = Storm(chosen.seed)
            return await storm.run(
                chosen.seconds, chosen.clients, Path(folder) / "run", lambda line: print(line, flush=True)
            )

        found = uvloop.run(run())
    behind = sum(found.sent[kind] for kind in _BEHIND)
    print(f"upstreams: {dict(found.sent.most_common())}")
    print(f"apps:      {dict(found.read.most_common())}")
    print(
        f"{found.reloads} reloads; {behind:,} answers with something behind them, {found.surplus_told:,} of them told of"
    )
    for line in found.wrong:
        print(line)
    print(f"WRONG: {dict(found.examples)}" if found.wrong else "no app got a byte that was not meant for it")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
