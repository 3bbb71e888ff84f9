"""Generated answers through a whole sidecar over sockets: what the parsers took apart has to be put together again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tests.differential import rules
from tests.differential.through import HOST, sidecar_before
from tests.doubles.upstream import Talk, answer
from tests.doubles.wire import Wire
from tests.framing import rfc9112
from tests.framing.messages import Answer
from tests.framing.rfc9112 import Message

_NEXT = f"GET /next HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


class Through:
    """Use `start`, then `wrong`; `stop` in the end."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._address = ("", 0)
        self._segments: Sequence[bytes] = ()
        self._ends = False
        self._said_all = asyncio.Event()

    async def start(self, folder: Path) -> None:
        sidecar, _ = await self._stack.enter_async_context(sidecar_before(self._script, folder))
        self._address = sidecar.address

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _script(self, talk: Talk) -> None:
        try:
            await self._serve(talk)
        except RuntimeError:
            pass  # how uvloop says that the other side has gone meanwhile

    async def _serve(self, talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            talk.upstream.requests.clear()
            talk.upstream.bodies.clear()
            if b" /next " in head:
                await talk.send(answer(b"the next answer"))
                continue
            try:
                for segment in self._segments:
                    await talk.send(segment)
                    await asyncio.sleep(0)
            finally:
                self._said_all.set()
            if self._ends:
                return talk.close()

    async def wrong(self, asked: Answer, segments: Sequence[bytes], version: bytes) -> str | None:
        """What is wrong, or None."""
        model = rfc9112.answer(asked.data, asked.method, ended=True)
        # What is not complete would be waited for. What comes late is the answer to the next request, for everybody.
        self._ends = asked.ended or model.end not in (rfc9112.CLEAN, rfc9112.SURPLUS)
        self._segments = [asked.data] if model.end == rfc9112.SURPLUS else segments
        self._said_all.clear()
        wire = await Wire.to(self._address)
        try:
            await wire.send(b"%b /x HTTP/%b\r\nHost: %b\r\n\r\n" % (asked.method, version, HOST.encode()))
            reading = await wire.answer(asked.method)
            told = _compared(model, reading)
            if told is None and version == b"1.1" and not wire.ended:
                await self._said_all.wait()
                told = await _next(wire, reading)
        finally:
            wire.close()
        return told


async def _next(wire: Wire, reading: rfc9112.Reading) -> str | None:
    if b"close" in reading.messages[-1].all(b"connection"):
        behind = await wire.rest()
        return f"{behind!r} came behind an answer that was the last" if behind else None
    await wire.send(_NEXT)
    following = await wire.answer(b"GET")
    got = following.messages[-1].body if following.messages else following.rest
    return None if got == b"the next answer" else f"the next request was answered with {got!r}"


def _compared(model: rfc9112.Reading, reading: rfc9112.Reading) -> str | None:
    if reading.end in (rfc9112.REFUSED, rfc9112.SWITCHED, rfc9112.SURPLUS):
        return f"the app got no answer, but {reading.end} {reading.why} {reading.rest!r}"
    if not reading.messages:
        return None
    arrived = reading.messages[-1]
    if _ours(arrived):
        return None  # that too much is refused is not looked at here
    sent = model.messages[-1] if model.messages else None
    if sent is None or sent.status < 200:
        return f"{arrived} was made of what is no answer ({model.why})"
    if not arrived.whole:
        return None if sent.body.startswith(arrived.body) else f"{arrived} is no beginning of {sent}"
    if not sent.whole:
        return f"{arrived} looks complete; the model: {model.why}"
    wanted, got = rules.answer_passed_on(sent), rules.answer_arrived(arrived, sent)
    return None if got[:-1] == wanted[:-1] and got[-1] in (wanted[-1], ()) else f"{got} arrived, {wanted} was sent"


def _ours(message: Message) -> bool:
    """An error of the sidecar; one for a HEAD shows in its outcome alone."""
    outcome = [value for name, value in message.fields if name == b"x-sidecar-outcome"]
    return b'"error_code":"' in message.body or outcome in ([b"exhausted"], [b"not_retryable"])
