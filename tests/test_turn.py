"""What is written within one turn of the event loop leaves at its end, in order, and never later."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.turn import Gathering, Turn, released
from sidecar.upstream.connection import UpstreamConnection
from telemetry.record import CONNECTED, PARTLY_SENT, SENT
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import Talk, always, answer


class Recorder(asyncio.Transport):
    """Notes what it is told, in a list that several may share."""

    def __init__(self, told: list[Any], unsent: int = 1000) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.told = told
        self.unsent = unsent
        self.closing = False
        self.broken = False

    def write(self, data: Any) -> None:
        if self.broken:
            raise RuntimeError("no more bytes, please")
        self.told.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.told.append("write_eof")

    def close(self) -> None:
        self.told.append("close")
        self.closing = True

    def abort(self) -> None:
        self.told.append("abort")
        self.closing = True

    def pause_reading(self) -> None:
        self.told.append("pause_reading")

    def resume_reading(self) -> None:
        self.told.append("resume_reading")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.told.append(("limits", high, low))


@pytest.fixture
async def turn() -> Turn:
    return Turn(asyncio.get_running_loop())


async def test_requests_leave_before_answers_and_each_in_the_order_of_writing(turn: Turn) -> None:
    told: list[Any] = []
    answers = [Gathering(Recorder(told), turn, turn.answers) for _ in range(2)]
    requests = [Gathering(Recorder(told), turn, turn.requests) for _ in range(2)]
    answers[1].write(b"answer 1")
    requests[0].write(b"request 1")
    answers[0].write(b"answer 2")
    requests[1].write(b"request 2")
    assert [] == told
    await asyncio.sleep(0)
    assert [b"request 1", b"request 2", b"answer 1", b"answer 2"] == told


async def test_small_pieces_of_one_connection_leave_as_one(turn: Turn) -> None:
    told: list[Any] = []
    writer = Gathering(Recorder(told), turn, turn.answers)
    for piece in (b"5\r\n", b"hello", b"\r\n"):
        writer.write(piece)
    assert 1000 + 10 == writer.get_write_buffer_size()
    await asyncio.sleep(0)
    assert ([b"5\r\nhello\r\n"], 1000) == (told, writer.get_write_buffer_size())


async def test_a_large_piece_does_not_wait_and_overtakes_nothing(turn: Turn) -> None:
    told: list[Any] = []
    writer = Gathering(Recorder(told), turn, turn.answers)
    large = b"x" * 16_385
    writer.write(large)
    assert [large] == told
    writer.write(b"small")
    writer.write(large)
    assert [large, b"small", large] == told
    writer.write(b"y" * 10_000)
    writer.write(b"z" * 10_000)
    await asyncio.sleep(0)
    assert [large, b"small", large, b"y" * 10_000, b"z" * 10_000] == told


@pytest.mark.parametrize("ending", ["close", "abort", "write_eof"])
async def test_what_was_written_leaves_before_the_connection_ends(turn: Turn, ending: str) -> None:
    told: list[Any] = []
    writer = Gathering(Recorder(told), turn, turn.answers)
    writer.write(b"last words")
    getattr(writer, ending)()
    assert [b"last words", ending] == told
    await asyncio.sleep(0)
    assert [b"last words", ending] == told


async def test_nothing_is_written_to_a_connection_that_has_ended_meanwhile(turn: Turn) -> None:
    told: list[Any] = []
    transport = Recorder(told)
    writer = Gathering(transport, turn, turn.requests)
    writer.write(b"too late")
    transport.closing = True
    await asyncio.sleep(0)
    assert [] == told and writer.is_closing()


async def test_a_transport_that_takes_no_bytes_is_given_up_and_the_others_are_served(turn: Turn) -> None:
    told: list[Any] = []
    broken, whole = Recorder(told), Recorder(told)
    broken.broken = True
    Gathering(broken, turn, turn.answers).write(b"lost")
    Gathering(whole, turn, turn.answers).write(b"kept")
    await asyncio.sleep(0)
    assert ["abort", b"kept"] == told


async def test_who_takes_the_connection_over_gets_the_transport_itself_with_nothing_left_to_send(turn: Turn) -> None:
    told: list[Any] = []
    transport = Recorder(told)
    writer = Gathering(transport, turn, turn.answers)
    writer.write(b"before the tunnel")
    assert transport is released(writer)
    assert [b"before the tunnel"] == told
    assert transport is released(transport)


async def test_all_else_reaches_the_transport(turn: Turn) -> None:
    told: list[Any] = []
    writer = Gathering(Recorder(told), turn, turn.answers)
    writer.pause_reading()
    writer.resume_reading()
    writer.set_write_buffer_limits(high=5, low=3)
    assert ["pause_reading", "resume_reading", ("limits", 5, 3)] == told
    assert (True, False) == (writer.can_write_eof(), writer.is_closing())
    assert (("127.0.0.1", 1), "none") == (writer.get_extra_info("peername"), writer.get_extra_info("cipher", "none"))


async def test_a_turn_that_ended_leaves_nothing_behind(turn: Turn) -> None:
    told: list[Any] = []
    writer = Gathering(Recorder(told), turn, turn.requests)
    for number in range(3):
        writer.write(b"%d" % number)
        turn.send()
        assert ([], []) == (turn.requests, turn.answers)
    await asyncio.sleep(0)
    assert [b"0", b"1", b"2"] == told


# ---- a request that has not left yet -----------------------------------------------------------------------------


def asked(turn: Turn, transport: Recorder, *, reused: bool = False) -> tuple[UpstreamConnection, list[Any]]:
    """A connection whose request was written in this turn, and what its exchange was woken with."""
    ticker: Any = SimpleNamespace(watched=set())
    connection = UpstreamConnection(asyncio.get_running_loop(), ticker, turn, 65_536, 65_536, 60, list)
    connection.connection_made(transport)
    transport.told.clear()
    woken: list[Any] = []
    owner: Any = SimpleNamespace(wake=lambda: woken.append(connection.failure))
    connection.reused = reused
    connection.begin(owner, bodyless=False, deadline=1e9)
    connection.write_all(b"request")
    return connection, woken


async def test_a_request_counts_as_sent_from_the_end_of_its_turn_on(turn: Turn) -> None:
    told: list[Any] = []
    connection, _ = asked(turn, Recorder(told, unsent=0))
    assert (CONNECTED, []) == (connection.phase, told)
    await asyncio.sleep(0)
    assert (SENT, [b"request"]) == (connection.phase, told)


async def test_pieces_of_a_request_count_as_partly_sent_while_some_of_them_wait(turn: Turn) -> None:
    told: list[Any] = []
    connection, _ = asked(turn, Recorder(told, unsent=0))
    await asyncio.sleep(0)
    connection.write(b"more", last=False)
    assert PARTLY_SENT == connection.phase
    connection.write(b"the end", last=True)
    assert PARTLY_SENT == connection.phase
    await asyncio.sleep(0)
    assert (SENT, [b"request", b"morethe end"]) == (connection.phase, told)


async def test_a_connection_that_ends_before_its_request_left_has_sent_nothing(turn: Turn) -> None:
    """So that every method may be sent again, on another connection."""
    told: list[Any] = []
    transport = Recorder(told, unsent=0)
    connection, woken = asked(turn, transport, reused=True)
    transport.close()
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert ["close"] == told
    (failed,) = woken
    assert (True, CONNECTED) == (failed.stale, failed.phase)


async def test_a_request_that_met_the_end_of_its_connection_at_the_end_of_the_turn_was_never_sent(turn: Turn) -> None:
    """The loop tells of the loss behind whatever else it does: the end of a turn that began earlier may come first."""
    told: list[Any] = []
    transport = Recorder(told, unsent=0)
    connection, woken = asked(turn, transport, reused=True)
    transport.close()
    await asyncio.sleep(0)
    connection.connection_lost(None)
    assert ["close"] == told
    (failed,) = woken
    assert (True, CONNECTED) == (failed.stale, failed.phase)


async def test_a_request_given_up_before_it_left_never_leaves(turn: Turn) -> None:
    told: list[Any] = []
    connection, woken = asked(turn, Recorder(told, unsent=0))
    connection.check(2e9)
    await asyncio.sleep(0)
    assert ["abort"] == told
    assert [("NETWORK_TIMEOUT", CONNECTED)] == [(failed.code, failed.phase) for failed in woken]


async def test_what_an_upstream_says_before_it_was_asked_is_no_answer(turn: Turn) -> None:
    told: list[Any] = []
    connection, woken = asked(turn, Recorder(told, unsent=0), reused=True)
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await asyncio.sleep(0)
    assert (["abort"], None) == (told, connection.head)
    (failed,) = woken
    assert ("CONNECTION_RESET", True, CONNECTED) == (failed.code, failed.stale, failed.phase)


async def test_an_answer_to_a_request_that_is_still_being_sent_is_an_answer(turn: Turn) -> None:
    told: list[Any] = []
    connection, woken = asked(turn, Recorder(told, unsent=0), reused=True)
    await asyncio.sleep(0)
    connection.write(b"a piece of the body", last=False)
    connection.data_received(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
    assert ([None], 413, True) == (woken, connection.status, connection.complete)


async def test_pipelined_answers_of_every_sort_keep_their_order(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    """Relayed whole, made here, streamed, and an error that ends the connection: each is written in another place."""

    async def serve(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if b"/large" in head:
                await talk.send(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"L" * 300_000)
            else:
                await talk.send(answer(b"small"))

    upstream = await start_upstream(serve)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    heads = ["GET /u/small", "GET /nowhere", "GET /u/large", "GET /u/small", "GET /nowhere", "GET /u/small"]
    await app.send("".join(f"{head} HTTP/1.1\r\nHost: s\r\n\r\n" for head in heads) + "NOT HTTP\r\n\r\n")
    statuses = [(await app.reply()).status for _ in range(len(heads) + 1)]
    assert [200, 404, 200, 200, 404, 200, 501] == statuses


async def test_a_request_is_sent_although_nothing_else_happens(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    upstream = await start_upstream(always(answer(b"hello")))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    assert 200 == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status
    assert ([], []) == (sidecar.proxy.turn.requests, sidecar.proxy.turn.answers)


async def test_what_is_written_to_a_connection_that_has_ended_is_dropped() -> None:
    """On uvloop, as in production: its transports raise once they have told their protocol of the end."""
    ended = asyncio.Event()

    class Ending(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

        def connection_lost(self, exc: BaseException | None) -> None:
            ended.set()

    made: list[Any] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Ending, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.close()
    await ended.wait()
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        made[0].write(b"x")
    turn = Turn(loop)
    gathering = Gathering(made[0], turn, turn.answers)
    for data in (b"small", b"large" * 10_000, b"small", b"large" * 10_000):
        gathering.write(data)
    gathering.write_eof()
    turn.send()
    server.close()
