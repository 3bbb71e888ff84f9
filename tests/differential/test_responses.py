"""Every file of `responses/`, read by a client from an upstream directly and through a sidecar."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.conftest import Running
from tests.differential import rules
from tests.differential.case import Case, cases
from tests.differential.through import HOST, sidecar_before
from tests.doubles.upstream import Talk, Upstream, answer
from tests.doubles.wire import Wire
from tests.framing import rfc9112
from tests.framing.rfc9112 import Message

CASES = cases("responses")
pytestmark = pytest.mark.asyncio(loop_scope="module")

_NEXT = f"GET /next HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
_PAUSE = 0.004


class Scripted:
    """Sends the bytes of a case to whoever asks for /case, and a plain answer to whoever asks for /next."""

    def __init__(self) -> None:
        self.case: Case | None = None
        self.said_all = asyncio.Event()
        self.asked: list[tuple[bytes, int]] = []
        """Which target, on which connection."""
        self._connections = 0

    async def __call__(self, talk: Talk) -> None:
        self._connections += 1
        number = self._connections
        while True:
            head, _ = await talk.read_request()
            target = head.split(b" ")[1]
            self.asked.append((target, number))
            if target == b"/next":
                await talk.send(answer(b"the next answer"))
                continue
            assert self.case is not None
            try:
                for place, segment in enumerate(self.case.segments):
                    if place:
                        await asyncio.sleep(_PAUSE)
                    await talk.send(segment)
            finally:
                self.said_all.set()  # also where the sidecar has closed over the rest
            then = self.case.headers.get("then")
            if then is not None:
                await asyncio.sleep(_PAUSE)  # a reset would overtake what was sent before it
                return talk.close() if then == "close" else talk.reset()


class Between:
    def __init__(self, script: Scripted, sidecar: Running, upstream: Upstream) -> None:
        self.script = script
        self.sidecar = sidecar
        self.upstream = upstream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def between(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Between]:
    script = Scripted()
    async with sidecar_before(script, tmp_path_factory.mktemp("state")) as (sidecar, upstream):
        yield Between(script, sidecar, upstream)


def request_of(method: bytes, version: bytes = b"1.1") -> bytes:
    return b"%b /case HTTP/%b\r\nHost: %b\r\n\r\n" % (method, version, HOST.encode())


async def directly(case: Case, method: bytes, between: Between) -> rfc9112.Reading:
    """What a client makes of the bytes as they are."""
    wire = await Wire.to(("127.0.0.1", between.upstream.port))
    await wire.send(request_of(method))
    assert case.data == await wire.exactly(len(case.data))
    wire.close()
    return rfc9112.answer(case.data, method, ended=case.headers.get("then") == "close")


def announced(message: Message) -> list[int]:
    return [int(value) for value in message.all(b"content-length")]


async def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 300


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
async def test_an_answer_reaches_the_app_as_it_was_or_not_at_all_and_no_byte_of_it_the_next_one(
    case: Case, between: Between
) -> None:
    method, script = case.headers.get("asked", "GET").encode(), between.script
    script.case = case
    direct = await directly(case, method, between)
    script.asked.clear()
    script.said_all.clear()
    wire = await Wire.to(between.sidecar.address)
    try:
        await wire.send(request_of(method))
        reading = await wire.answer(method)
        check(case, direct, reading, wire)
        # What comes on a kept connection when the next request is on its way already is its answer, for everybody.
        await script.said_all.wait()
        await asyncio.sleep(_PAUSE)
        if wire.ended or (reading.messages and b"close" in reading.messages[-1].all(b"connection")):
            assert b"" == await wire.rest()
            wire.close()
            wire = await Wire.to(between.sidecar.address)
        await wire.send(_NEXT)
        following = await wire.answer(b"GET")
        assert b"the next answer" == following.messages[-1].body
        assert [200] == [message.status for message in following.messages]
        assert rfc9112.CLEAN == following.end
    finally:
        wire.close()
    if direct.end != rfc9112.CLEAN:
        (_, first), (_, second) = script.asked[-2:]  # a kept connection may have died under the first
        assert first != second, "a connection that has said too much, or good-bye, is not used again"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
async def test_an_app_of_http10_gets_it_without_chunks_interim_answers_and_doubts_about_its_end(
    case: Case, between: Between
) -> None:
    method, script = case.headers.get("asked", "GET").encode(), between.script
    script.case = case
    direct = await directly(case, method, between)
    script.said_all.clear()
    wire = await Wire.to(between.sidecar.address)
    try:
        await wire.send(request_of(method, b"1.0"))
        reading = await wire.answer(method)
        assert b"" == await wire.rest()
        await script.said_all.wait()
        await asyncio.sleep(_PAUSE)  # or what it says late would meet the request of the next case
    finally:
        wire.close()
    what, _, status = case.headers["expect"].partition(" ")
    if what == "cut":
        assert wire.reset or not reading.messages[-1].whole, "a plain end would look complete"
        return
    (message,) = reading.messages
    assert ([], False, True) == (message.all(b"transfer-encoding"), wire.reset, message.whole)
    if what == "refused":
        assert int(status) == message.status
    else:
        sent = direct.messages[-1]
        assert rules.answer_passed_on(sent)[:-1] == rules.answer_arrived(message, sent)[:-1]


def check(case: Case, direct: rfc9112.Reading, reading: rfc9112.Reading, wire: Wire) -> None:
    what, _, status = case.headers["expect"].partition(" ")
    if what == "passes":
        assert [rules.answer_passed_on(message) for message in direct.messages] == [
            rules.answer_arrived(message, sent) for message, sent in zip(reading.messages, direct.messages, strict=True)
        ]
        assert reading.messages[-1].whole
        sent, arrived = direct.messages[-1], reading.messages[-1]
        if sent.all(b"content-length") and sent.status != 204:
            assert announced(sent) == announced(arrived), "a known length stays known"
    elif what == "refused":
        final = reading.messages[-1]
        assert (int(status), True) == (final.status, final.whole), final
        assert b'"error_code":"' in final.body or case.headers.get("asked") == "HEAD"
        assert all(message.status < 200 for message in reading.messages[:-1])
    else:
        assert what == "cut"
        assert wire.ended, "what is not complete must not look complete"
        if reading.messages:
            assert not reading.messages[-1].whole
            assert direct.messages[-1].body.startswith(reading.messages[-1].body)
