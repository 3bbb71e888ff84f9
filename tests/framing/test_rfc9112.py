"""The model itself, on the examples of RFC 9112 and on what it has to refuse."""

from __future__ import annotations

import pytest

from tests.framing import rfc9112
from tests.framing.rfc9112 import CLEAN, INCOMPLETE, LAST, REFUSED, SURPLUS, SWITCHED


def bodies(reading: rfc9112.Reading) -> list[bytes]:
    return [message.body for message in reading.messages]


def test_pipelined_requests_are_cut_where_their_lengths_say() -> None:
    data = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcGET /b HTTP/1.1\r\nHost: a\r\n\r\n"
    reading = rfc9112.requests(data)
    assert ([b"abc", b""], [b"/a", b"/b"], CLEAN) == (
        bodies(reading),
        [message.target for message in reading.messages],
        reading.end,
    )


def test_a_chunked_body_is_joined_and_its_trailers_are_read() -> None:
    data = (
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4;a=b\r\nWiki\r\nA\r\npedia in c\r\n0\r\nX-T: 1\r\n\r\n"
    )
    (message,) = rfc9112.requests(data).messages
    assert (b"Wikipedia in c", ((b"X-T", b"1"),)) == (message.body, message.trailers)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "Transfer-Encoding and Content-Length"),
        (b"Content-Length: 3\r\nContent-Length: 3\r\n", "Content-Length is not one number"),
        (b"Content-Length: 3, 3\r\n", "Content-Length is not one number"),
        (b"Content-Length: +3\r\n", "Content-Length is not one number"),
        (b"Content-Length:\r\n", "Content-Length is not one number"),
        (b"Transfer-Encoding: chunked, chunked\r\n", "transfer codings other than chunked"),
        (b"Transfer-Encoding: identity\r\n", "transfer codings other than chunked"),
        (b"X-A: 1\r\n 2\r\n", "a field line without a name that is a token"),
        (b"X-A : 1\r\n", "a field line without a name that is a token"),
        (b"X-A: 1\n", "a line that does not end with CRLF"),
        (b"X-A: 1\r2\r\n", "a line that does not end with CRLF"),
        (b"X-A: \x00\r\n", "a control byte in a field value"),
    ],
)
def test_what_could_be_framed_in_two_ways_is_refused(fields: bytes, why: str) -> None:
    reading = rfc9112.requests(b"POST / HTTP/1.1\r\n" + fields + b"\r\nabc")
    assert ((), REFUSED, why) == (reading.messages, reading.end, reading.why)


@pytest.mark.parametrize(
    "chunks", [b"zz\r\n", b"5\r\nhelloX\r\n", b"-1\r\n", b"\r\n", b"5 x\r\nhello", b"5;a\rb\r\n", b"5\nhello"]
)
def test_a_bad_chunk_ends_everything(chunks: bytes) -> None:
    reading = rfc9112.requests(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert (REFUSED, False) == (reading.end, reading.messages[0].whole)


def test_every_beginning_of_a_message_is_incomplete_and_none_is_refused() -> None:
    data = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n3;e\r\nabc\r\n0\r\nX-T: 1\r\n\r\n"
    assert {INCOMPLETE} == {rfc9112.requests(data[:at]).end for at in range(1, len(data))}
    assert CLEAN == rfc9112.requests(data).end


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\nGET / HTTP/1.1\r\n\r\n", LAST),
        (b"GET / HTTP/1.0\r\n\r\nGET / HTTP/1.1\r\n\r\n", LAST),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n\r\n", SWITCHED),
        (b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x00", SWITCHED),
    ],
)
def test_behind_the_last_request_nothing_is_read(data: bytes, end: str) -> None:
    reading = rfc9112.requests(data)
    assert (1, end) == (len(reading.messages), reading.end)


@pytest.mark.parametrize(
    ("data", "method", "body", "end"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"GET", b"hello", CLEAN),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"HEAD", b"", CLEAN),
        (b"HTTP/1.1 304 N\r\nContent-Length: 5\r\n\r\n", b"GET", b"", CLEAN),
        (b"HTTP/1.1 204 N\r\nTransfer-Encoding: chunked\r\n\r\n", b"GET", b"", CLEAN),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"GET", b"to the end", LAST),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"GET", b"ok", LAST),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n", b"GET", b"ok", SURPLUS),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"HEAD", b"", SURPLUS),
        (b"HTTP/1.1 101 S\r\n\r\nrest", b"GET", b"", SWITCHED),
    ],
)
def test_how_long_an_answer_is_depends_on_what_was_asked(data: bytes, method: bytes, body: bytes, end: str) -> None:
    reading = rfc9112.answer(data, method, ended=True)
    assert (body, end, True) == (reading.messages[-1].body, reading.end, reading.messages[-1].whole)


def test_interim_answers_come_before_the_final_one() -> None:
    data = b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 E\r\nLink: <a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    assert [100, 103, 200] == [message.status for message in rfc9112.answer(data).messages]


def test_an_answer_without_an_end_is_whole_only_when_the_end_came() -> None:
    data = b"HTTP/1.1 200 OK\r\n\r\npart"
    assert [True, False] == [rfc9112.answer(data, ended=ended).messages[0].whole for ended in (True, False)]


@pytest.mark.parametrize("size", ["ext", "head"])
def test_long_lines_cost_no_more_than_their_length(size: str) -> None:
    long = b"a" * 1_000_000
    line = b"5;" + long if size == "ext" else b"X-A: " + long
    data = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + (b"\r\n" if size == "ext" else b"") + line
    assert INCOMPLETE == rfc9112.requests(data).end
