"""Every file of `requests/`, sent to an upstream directly and through a sidecar."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.differential import rules
from tests.differential.case import Case, cases
from tests.differential.through import HOST, sidecar_before
from tests.doubles.upstream import Talk, Upstream, answer
from tests.doubles.wire import Wire
from tests.framing import rfc9112
from tests.framing.rfc9112 import Message

CASES = cases("requests")
pytestmark = pytest.mark.asyncio(loop_scope="module")

_MARKER = f"GET /marker HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


class Recorder:
    """Notes the requests that reach an upstream and answers each that is whole."""

    def __init__(self) -> None:
        self.seen: list[Message] = []
        self.parts: list[Message] = []
        self.garbage: list[bytes] = []
        self.open = 0

    async def __call__(self, talk: Talk) -> None:
        data, reading = b"", rfc9112.requests(b"")
        self.open += 1
        try:
            while more := await talk.reader.read(65_536):
                data += more
                while (reading := rfc9112.requests(data, most=1)).messages and reading.messages[0].whole:
                    (message,) = reading.messages
                    self.seen.append(message)
                    data = reading.rest
                    body = b"" if message.method == b"HEAD" else b"seen " + message.target
                    await talk.send(answer(body, "200 OK", "X-Seen: 1"))
        finally:
            self.open -= 1
            self.parts += [message for message in reading.messages if not message.whole]
            if data and not reading.messages:
                self.garbage.append(data)


class Between:
    def __init__(self, recorder: Recorder, address: tuple[str, int], upstream: Upstream) -> None:
        self.recorder = recorder
        self.address = address
        self.upstream = upstream


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def between(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Between]:
    recorder = Recorder()
    async with sidecar_before(recorder, tmp_path_factory.mktemp("state")) as (sidecar, upstream):
        yield Between(recorder, sidecar.address, upstream)


async def directly(case: Case, between: Between) -> rfc9112.Reading:
    """What the upstream makes of the bytes as they are."""
    wire = await Wire.to(("127.0.0.1", between.upstream.port))
    await wire.send(*case.segments)
    wire.writer.write_eof()
    await wire.rest()
    wire.close()
    reading = rfc9112.requests(case.data)
    whole = [message for message in reading.messages if message.whole]
    assert whole == between.recorder.seen[: len(whole)], "the model on a socket is the model on bytes"
    return reading


def as_passed_on(message: Message) -> tuple[object, ...]:
    method, target, host = rules.asked_for(message)
    fields = rules.without(rules.passed(message), b"host", b"max-forwards")
    return (method, target, [host] if host else [], fields, message.body, rules.trailers(message), _hops(message))


def _hops(message: Message) -> list[bytes]:
    """Max-Forwards counts down where it means something (RFC 9110, 7.6.2)."""
    values = message.all(b"max-forwards")
    return [b"%d" % (int(value) - 1) for value in values] if message.method in (b"TRACE", b"OPTIONS") else values


def as_arrived(message: Message, pseudonym: bytes = b"1.1 sidecar-") -> tuple[object, ...]:
    assert b"HTTP/1.1" == message.start.split(b" ")[2]
    assert rules.one_framing(message), message.fields
    via = [value for name, value in message.fields if name.lower() == b"via"]
    assert via and via[-1].startswith(pseudonym), "a proxy names itself behind those that were there"
    assert not message.all(b"connection") or [b"Upgrade"] == message.all(b"connection")
    ours = (b"Via", via[-1])
    hop = (b"host", b"content-length", b"transfer-encoding", b"max-forwards", b"connection", b"upgrade")
    fields = tuple(pair for pair in rules.without(message.fields, *hop) if pair != ours)
    hosts = message.all(b"host")
    return (message.method, message.target, hosts, fields, message.body, message.trailers, message.all(b"max-forwards"))


async def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 300


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
async def test_a_request_reaches_the_upstream_as_it_was_or_not_at_all(case: Case, between: Between) -> None:
    recorder = between.recorder
    recorder.seen.clear()
    direct = await directly(case, between)
    recorder.seen.clear()
    recorder.parts.clear()
    recorder.garbage.clear()
    wire = await Wire.to(between.address)
    try:
        expected = await converse(case, wire, direct, recorder)
    finally:
        wire.close()
    assert expected == [as_arrived(message) for message in recorder.seen]
    assert [] == recorder.garbage
    for part in recorder.parts:
        assert any(message.body.startswith(part.body) for message in direct.messages)


async def converse(case: Case, wire: Wire, direct: rfc9112.Reading, recorder: Recorder) -> list[tuple[object, ...]]:
    """Send the case, check each answer and how the connection goes on. What is to have reached the upstream."""
    await wire.send(*case.segments)
    sent, expected, over = direct.messages, list[tuple[object, ...]](), False
    for number, word in enumerate(case.expected):
        what, _, status = word.partition(" ")
        if what == "closes":
            over = True
            break
        if what == "cut":
            wire.writer.write_eof()
            left = await wire.rest()
            assert not left.startswith(b"HTTP/1.1 2"), "what was not complete was answered as if it were"
            return expected
        method = sent[number].method if number < len(sent) else b"GET"
        reading = await wire.answer(method)
        assert reading.messages, f"{word!r} was expected, and the connection ended"
        reply = reading.messages[-1]
        if what == "passes":
            said = b"" if method == b"HEAD" else b"seen "
            assert (200, True) == (reply.status, reply.body.startswith(said)), reply
            expected.append(as_passed_on(sent[number]))
            over = direct.end == rfc9112.LAST and number == len(sent) - 1
        else:
            assert (int(status), []) == (reply.status, reply.all(b"x-seen")), reply
            over = what == "refused"
    if over:
        assert b"" == await wire.rest(), "behind the last answer the connection ends"
    else:
        await wire.send(_MARKER)
        last = await wire.answer(b"GET")
        assert b"seen /marker" == last.messages[-1].body, "the connection goes on"
        assert b"/marker" == recorder.seen.pop().target
    return expected
