"""The rules for an HTTP/1.1 intermediary, R1 to R17, each over real sockets.

The tests are named after the rules they keep; the hazards of the server library and the table of malformed
messages have files of their own.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.upstream import Talk, Upstream, always, answer, echo, once

ONE_ATTEMPT = True


@pytest.fixture
def connect(start_sidecar: Starter, start_upstream: UpstreamStarter, route):
    """A sidecar in front of one scripted upstream under /u, and an app connected to it."""

    async def start(script=echo, **keys) -> tuple[App, Upstream, Running]:
        upstream = await start_upstream(script)
        sidecar = await start_sidecar(upstreams=route(upstream), **keys)
        return await sidecar.app(), upstream, sidecar

    return start


def lines_of(head: bytes, name: str) -> list[str]:
    """The values of one field in a head as an upstream saw it, in order."""
    split = (line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:])
    return [value for key, _, value in split if key.lower() == name.lower()]


def target_of(head: bytes) -> bytes:
    return head.split(b" ", 2)[1]


# ---- R1: hop-by-hop fields ---------------------------------------------------------------------------------------

HOP_BY_HOP = [
    "Connection",
    "Proxy-Connection",
    "Keep-Alive",
    "TE",
    "Transfer-Encoding",
    "Upgrade",
    "Proxy-Authorization",
]


async def test_r1_fields_named_by_connection_are_removed(connect) -> None:
    app, upstream, _ = await connect()
    await app.ask(
        "GET /u HTTP/1.1\r\nHost: s\r\nx-a: 1\r\nConnection: X-A,  x-b\r\nX-B: 2\r\nX-C: 3\r\nconnection: X-D\r\nX-D: 4\r\n\r\n"
    )
    (head,) = upstream.requests
    assert ([], [], ["3"], []) == tuple(lines_of(head, name) for name in ("X-A", "X-B", "X-C", "X-D"))
    assert [] == lines_of(head, "Connection")


async def test_r1_hop_by_hop_fields_of_a_request_are_removed_even_when_connection_does_not_name_them(connect) -> None:
    app, upstream, _ = await connect()
    await app.ask(
        "GET /u HTTP/1.1\r\nHost: s\r\nProxy-Connection: keep-alive\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\n"
        "Upgrade: h2c\r\nProxy-Authorization: Basic eDp5\r\nAuthorization: Basic eDp5\r\n\r\n"
    )
    (head,) = upstream.requests
    assert {name: [] for name in HOP_BY_HOP} == {name: lines_of(head, name) for name in HOP_BY_HOP}
    assert ["Basic eDp5"] == lines_of(head, "Authorization")


async def test_r1_fields_named_by_connection_in_a_response_are_removed(connect) -> None:
    given = answer(
        b"ok", "200 OK", "Connection: X-A, keep-alive", "X-A: 1", "X-B: 2", "Keep-Alive: timeout=5", "Upgrade: h2"
    )
    app, _, _ = await connect(always(given))
    reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert ([], ["2"]) == (reply.all("X-A"), reply.all("X-B"))
    assert ([], [], []) == (reply.all("Connection"), reply.all("Keep-Alive"), reply.all("Upgrade"))


async def test_r1_connection_cannot_take_away_host_or_framing(connect) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(
        "POST /u HTTP/1.1\r\nHost: s\r\nConnection: Host, Content-Length, Via\r\nContent-Length: 5\r\n\r\nhello"
    )
    assert 200 == reply.status
    (head,) = upstream.requests
    assert ([f"127.0.0.1:{upstream.port}"], ["5"]) == (lines_of(head, "Host"), lines_of(head, "Content-Length"))
    assert 1 == len(lines_of(head, "Via"))


# ---- R2: Via and loops -------------------------------------------------------------------------------------------


async def test_r2_via_is_added_in_both_directions_behind_what_was_there(connect) -> None:
    app, upstream, sidecar = await connect(always(answer(b"ok", "200 OK", "Via: 1.1 origin")))
    reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\nVia: 1.0 app\r\n\r\n")
    ours = "1.1 " + sidecar.proxy.pseudonym.decode()
    assert ["1.0 app", ours] == lines_of(upstream.requests[0], "Via")
    assert ["1.1 origin", ours] == reply.all("Via")


async def test_r2_a_request_that_passed_here_before_is_a_loop(connect) -> None:
    app, upstream, sidecar = await connect()
    pseudonym = sidecar.proxy.pseudonym.decode()
    reply = await app.ask(f"GET /u HTTP/1.1\r\nHost: s\r\nVia: 1.1 other, 1.1 {pseudonym}\r\nVia: 1.1 third\r\n\r\n")
    assert (508, "LOOP_DETECTED") == (reply.status, reply.json["error_code"])
    assert [] == upstream.requests


async def test_r2_a_request_for_our_own_listener_is_a_loop(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    app = await sidecar.app()
    reply = await app.ask(f"GET http://127.0.0.1:{sidecar.address[1]}/ HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (508, "LOOP_DETECTED") == (reply.status, reply.json["error_code"])


# ---- R3: no automatic resend -------------------------------------------------------------------------------------


async def answers_then_hangs_up(talk: Talk) -> None:
    """One good answer per connection; the next request on it is read and met with a closed connection."""
    await talk.read_request()
    await talk.send(answer())
    await talk.read_request()
    talk.close()


@pytest.mark.parametrize(
    ("method", "seen", "status"), [("POST", 2, 502), ("PATCH", 2, 502), ("PUT", 3, 200), ("GET", 3, 200)]
)
async def test_r3_only_an_idempotent_request_is_sent_again_when_a_kept_connection_dies(
    connect, method: str, seen: int, status: int
) -> None:
    app, upstream, _ = await connect(answers_then_hangs_up)
    assert 200 == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status
    reply = await app.ask(f"{method} /u HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\nhi")
    assert (status, seen) == (reply.status, len(upstream.requests))


async def test_r3_a_request_on_a_fresh_connection_is_never_sent_twice(connect) -> None:
    async def hangs_up(talk: Talk) -> None:
        await talk.read_request()
        talk.close()

    app, upstream, _ = await connect(hangs_up)
    for method in ("GET", "POST", "DELETE"):
        assert 502 == (await app.ask(f"{method} /u HTTP/1.1\r\nHost: s\r\n\r\n")).status
    assert [b"GET", b"POST", b"DELETE"] == [head.split(b" ")[0] for head in upstream.requests]


# ---- R4: 1xx -----------------------------------------------------------------------------------------------------


async def test_r4_interim_answers_are_forwarded_in_order(connect) -> None:
    async def hints(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 102 Processing\r\n\r\n")
        await talk.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nConnection: X-A\r\nX-A: 1\r\n\r\n")
        await talk.send(answer(b"done"))

    app, _, sidecar = await connect(hints)
    processing = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    early, final = await app.reply(), await app.reply()
    assert (102, 103, 200, b"done") == (processing.status, early.status, final.status, final.body)
    assert (["</a.css>; rel=preload"], []) == (early.all("Link"), early.all("X-A"))
    assert "1.1 " + sidecar.proxy.pseudonym.decode() == early.get("Via")


# ---- R5: absolute form -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["other.test", "s:1", "[::1]"])
async def test_r5_the_host_of_an_absolute_target_wins_over_the_host_field(connect, host: str) -> None:
    app, upstream, _ = await connect()
    await app.ask(f"GET {upstream.url}/x HTTP/1.1\r\nHost: {host}\r\n\r\n")
    (head,) = upstream.requests
    assert (b"/x", [f"127.0.0.1:{upstream.port}"]) == (target_of(head), lines_of(head, "Host"))


async def test_r5_an_absolute_target_is_never_matched_by_its_path(connect) -> None:
    """A router that looked at the path alone would send this to the upstream behind /u without its prefix."""
    app, upstream, _ = await connect()
    await app.ask(f"GET {upstream.url}/u/x HTTP/1.1\r\nHost: s\r\n\r\n")
    assert b"/u/x" == target_of(upstream.requests[0])


@pytest.mark.parametrize(
    "target", ["http://a:b@127.0.0.1:{port}/", "http://a@127.0.0.1:{port}/", "http://127.0.0.1:{port}/#f"]
)
async def test_r5_userinfo_and_fragments_are_refused(connect, target: str) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(f"GET {target.format(port=upstream.port)} HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert await app.closed()
    assert [] == upstream.requests


# ---- R6: OPTIONS and Max-Forwards --------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "asked"), [("", b"*"), ("/", b"/"), ("/x", b"/x"), ("?q", b"/?q")])
async def test_r6_options_without_a_path_asks_about_the_whole_server(connect, target: str, asked: bytes) -> None:
    app, upstream, _ = await connect()
    await app.ask(f"OPTIONS {upstream.url}{target} HTTP/1.1\r\nHost: s\r\n\r\n")
    assert asked == target_of(upstream.requests[0])


@pytest.mark.parametrize("method", ["TRACE", "OPTIONS"])
async def test_r6_max_forwards_counts_down_on_trace_and_options(connect, method: str) -> None:
    app, upstream, _ = await connect()
    await app.ask(f"{method} /u HTTP/1.1\r\nHost: s\r\nMax-Forwards: 10\r\n\r\n")
    assert ["9"] == lines_of(upstream.requests[0], "Max-Forwards")


@pytest.mark.parametrize("method", ["TRACE", "OPTIONS"])
async def test_r6_at_zero_forwards_the_sidecar_answers_itself(connect, method: str) -> None:
    app, upstream, _ = await connect()
    fields = "Host: s\r\nX-A: 1\r\nAuthorization: secret\r\n"
    reply = await app.ask(f"{method} /u HTTP/1.1\r\n{fields}Max-Forwards: 0\r\n\r\n")
    assert (200, []) == (reply.status, upstream.requests)
    if method == "TRACE":
        assert b"TRACE /u HTTP/1.1\r\nHost: s\r\nX-A: 1\r\nMax-Forwards: 0\r\n\r\n" == reply.body
        assert "message/http" == reply.get("Content-Type")
    else:
        assert "OPTIONS" in str(reply.get("Allow"))
    assert 200 == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status, "the connection goes on"


async def test_r6_max_forwards_on_other_methods_is_passed_on_untouched(connect) -> None:
    app, upstream, _ = await connect()
    await app.ask("GET /u HTTP/1.1\r\nHost: s\r\nMax-Forwards: 0\r\n\r\n")
    assert ["0"] == lines_of(upstream.requests[0], "Max-Forwards")


# ---- R7: what passes untouched -----------------------------------------------------------------------------------

ODD_TARGETS = [
    "/a%2Fb/%2e%2e/c",
    "/a/../b/./c",
    "//double//slashes",
    "/x?a=1&a=2&b=%20+%zz",
    "/x?",
    "/?/?",
    "/%",
    "/a;b=c,d@e:f!$'()*[]|^`{}\"<>",
    "/x?redirect=http://other.test/",
]


async def test_r7_path_and_query_pass_byte_for_byte(connect) -> None:
    app, upstream, _ = await connect()
    for target in ODD_TARGETS:
        assert 200 == (await app.ask(f"GET {upstream.url}{target} HTTP/1.1\r\nHost: s\r\n\r\n")).status
        assert 200 == (await app.ask(f"GET /u{target} HTTP/1.1\r\nHost: s\r\n\r\n")).status
    twice = [target.encode() for target in ODD_TARGETS for _ in range(2)]
    assert twice == [target_of(head) for head in upstream.requests]


async def test_r7_an_empty_path_becomes_a_slash(connect) -> None:
    app, upstream, _ = await connect()
    await app.ask(f"GET {upstream.url} HTTP/1.1\r\nHost: s\r\n\r\n")
    await app.ask(f"GET {upstream.url}?q=1 HTTP/1.1\r\nHost: s\r\n\r\n")
    await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    await app.ask("GET /u?q=1 HTTP/1.1\r\nHost: s\r\n\r\n")
    assert [b"/", b"/?q=1", b"/", b"/?q=1"] == [target_of(head) for head in upstream.requests]


async def test_r7_fields_keep_their_order_their_case_and_their_bytes(connect) -> None:
    app, upstream, _ = await connect()
    passed = [
        b"X-One: 1",
        b"x-oNE: 2",
        b"Accept: a",
        b"X-Raw: \xe9\xff\x80",
        b"ACCEPT: b",
        b"X-Empty: ",
        b"Cookie: a=b",
    ]
    await app.send(b"GET /u HTTP/1.1\r\nHost: s\r\n" + b"\r\n".join(passed) + b"\r\n\r\n")
    assert 200 == (await app.reply()).status
    assert passed == upstream.requests[0].split(b"\r\n")[2:-1]


async def test_r7_fields_of_a_response_keep_their_order_their_case_and_their_bytes(connect) -> None:
    passed = ["Set-Cookie: a=1", "X-Raw: \xe9\xff\x80", "set-cookie: b=2", "X-Unknown: x", "SET-COOKIE: c=3"]
    app, _, _ = await connect(always(answer(b"ok", "200 Fine By Me", *passed)))
    reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert passed == [f"{name}: {value}" for name, value in reply.fields[: len(passed)]]
    assert "Fine By Me" == reply.reason


# ---- R8: CONNECT -------------------------------------------------------------------------------------------------


async def parrot(talk: Talk) -> None:
    """Send back what comes until the other side has finished, then say goodbye."""
    while data := await talk.reader.read(1000):
        await talk.send(data)
    await talk.send(b"goodbye")


async def test_r8_the_answer_to_connect_has_no_framing_and_bytes_pass(connect) -> None:
    app, upstream, _ = await connect(parrot)
    await app.send(f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: 127.0.0.1:{upstream.port}\r\n\r\nearly")
    head = (await app.reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert head.startswith("http/1.1 200 ")
    assert not re.search(r"^(content-length|transfer-encoding|connection):", head, re.MULTILINE)
    assert b"early" == await app.reader.readexactly(5)
    await app.send(b"late")
    assert b"late" == await app.reader.readexactly(4)


async def test_r8_a_half_close_is_passed_on_and_what_is_outstanding_is_flushed(connect) -> None:
    app, upstream, sidecar = await connect(parrot)
    await app.send(f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: s\r\n\r\n")
    await app.reader.readuntil(b"\r\n\r\n")
    await app.send(b"x" * 100_000)
    app.writer.write_eof()
    assert b"x" * 100_000 + b"goodbye" == await asyncio.wait_for(app.reader.read(), 5)
    app.close()
    async with asyncio.timeout(5):
        while sidecar.proxy.tunnels:
            await asyncio.sleep(0.01)
    assert {"tunnelled": 1} == sidecar.outcomes


@pytest.mark.parametrize("target", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:70000", ":443"])
async def test_r8_connect_without_a_valid_port_is_a_bad_request(connect, target: str) -> None:
    app, _, _ = await connect()
    reply = await app.ask(f"CONNECT {target} HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert await app.closed()


async def test_r8_connect_reaches_443_and_configured_ports_only(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(parrot)
    request = f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: s\r\n\r\n"
    closed = await (await start_sidecar()).app()
    reply = await closed.ask(request)
    assert (403, "EGRESS_DENIED") == (reply.status, reply.json["error_code"])
    opened = await (await start_sidecar(egress={"connect_ports": [upstream.port]})).app()
    await opened.send(request)
    assert (await opened.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert 1 == upstream.connections


# ---- R9: Expect --------------------------------------------------------------------------------------------------

EXPECTING = "POST /u HTTP/1.1\r\nHost: s\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"


async def test_r9_an_expectation_is_forwarded_and_the_body_waits_for_the_upstreams_100(connect) -> None:
    async def continues(talk: Talk) -> None:
        head = await talk.read_head()
        assert ["100-continue"] == lines_of(head, "Expect")
        await talk.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await talk.send(answer(await talk.reader.readexactly(5)))

    app, _, _ = await connect(continues)
    assert 100 == (await app.ask(EXPECTING)).status
    final = await app.ask(b"hello")
    assert (200, b"hello") == (final.status, final.body)


async def test_r9_a_final_answer_in_place_of_the_100_ends_the_connection(connect) -> None:
    async def refuses(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(answer(b"too big", "413 Content Too Large"))
        assert b"" == await talk.reader.read()  # no body comes

    app, upstream, _ = await connect(refuses)
    reply = await app.ask(EXPECTING)
    assert (413, b"too big", "close") == (reply.status, reply.body, reply.get("Connection"))
    assert await app.closed()
    assert 1 == len(upstream.requests)


async def test_r9_the_sidecars_own_refusal_comes_without_a_100(connect) -> None:
    app, _, _ = await connect()
    reply = await app.ask("POST /nowhere HTTP/1.1\r\nHost: s\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert (404, "NO_ROUTE") == (reply.status, reply.json["error_code"])


# ---- R10: framing of requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "version", "framing"),
    [
        (400, "1.1", "Content-Length: 5\r\nTransfer-Encoding: chunked"),
        (400, "1.1", "Content-Length: 5\r\nContent-Length: 6"),
        (400, "1.1", "Transfer-Encoding: chunked, gzip"),
        (400, "1.0", "Transfer-Encoding: chunked"),
        (501, "1.1", "Transfer-Encoding: gzip, chunked"),
        (505, "2.0", "Content-Length: 0"),
    ],
)
async def test_r10_ambiguous_framing_and_other_versions_are_refused(
    connect, status: int, version: str, framing: str
) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(f"POST /u HTTP/{version}\r\nHost: s\r\n{framing}\r\n\r\n")
    assert status == reply.status
    assert await app.closed()
    assert [] == upstream.requests


# ---- R11: framing of responses -----------------------------------------------------------------------------------

BAD_RESPONSES = {
    "both framings": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "differing lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
    "a length that is no number": b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok",
    "an unknown coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "status 99": b"HTTP/1.1 099 No\r\nContent-Length: 0\r\n\r\n",
    "another version": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "garbage": b"hello\r\n\r\n",
    "a NUL in a value": b"HTTP/1.1 200 OK\r\nX-A: \x00\r\nContent-Length: 0\r\n\r\n",
    "a CR in a value": b"HTTP/1.1 200 OK\r\nX-A: a\rb\r\nContent-Length: 0\r\n\r\n",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_RESPONSES)
async def test_r11_an_invalid_response_is_a_502_and_its_connection_is_discarded(connect, name: str) -> None:
    first = True

    async def bad_then_good(talk: Talk) -> None:
        nonlocal first
        while True:
            await talk.read_request()
            data, first = (BAD_RESPONSES[name] if first else answer(b"good")), False
            await talk.send(data)

    app, upstream, _ = await connect(bad_then_good)
    reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (502, "PROTOCOL_ERROR") == (reply.status, reply.json["error_code"])
    reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (200, b"good", 2) == (reply.status, reply.body, upstream.connections)


# ---- R12: syntax of requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        b"Host: s\r\nX-A: 1\r\n 2",
        b"Host: s\r\nX-A : 1",
        b"Host: s\r\nX-A: \x00",
        b"Host: s\r\nX-A: a\rb",
        b"Host: s\r\nX-A: a\nb",
        b"Host:",
        b"Host: a/b",
        b"Host: a\r\nHost: a",
        b"X-A: no host",
    ],
)
async def test_r12_bad_field_syntax_and_bad_hosts_are_refused(connect, fields: bytes) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(b"GET /u HTTP/1.1\r\n" + fields + b"\r\n\r\n")
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert await app.closed()
    assert [] == upstream.requests


# ---- R13: incomplete stays incomplete ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "framing", ["Content-Length: 100000", "Transfer-Encoding: chunked"], ids=["content-length", "chunked"]
)
async def test_r13_a_response_cut_short_is_cut_short_for_the_app(connect, framing: str) -> None:
    body = b"5\r\nhello\r\n" if "chunked" in framing else b"hello"
    app, _, sidecar = await connect(once(f"HTTP/1.1 200 OK\r\n{framing}\r\n\r\n".encode() + body))
    reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (b"hello", False) == (reply.body, reply.complete)
    assert {"failed_streaming": 1} == sidecar.outcomes


async def test_r13_a_response_cut_short_is_a_reset_for_an_http10_app(connect) -> None:
    app, _, _ = await connect(once(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"))
    await app.send("GET /u HTTP/1.0\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(app.reader.read(), 5)


@pytest.mark.parametrize(
    ("framing", "part"), [("Content-Length: 10", b"hello"), ("Transfer-Encoding: chunked", b"5\r\nhello\r\n")]
)
async def test_r13_a_request_cut_short_is_cut_short_for_the_upstream(connect, framing: str, part: bytes) -> None:
    received = asyncio.get_running_loop().create_future()

    async def reads_all(talk: Talk) -> None:
        await talk.read_head()
        data = b""
        try:
            while more := await talk.reader.read(1000):
                data += more
        except ConnectionError:
            pass
        received.set_result(data)

    app, upstream, sidecar = await connect(reads_all)
    await app.send(f"POST /u HTTP/1.1\r\nHost: s\r\n{framing}\r\n\r\n".encode() + part)
    async with asyncio.timeout(5):
        while not upstream.requests:
            await asyncio.sleep(0.01)
        app.close()
        assert await received in (b"", part)
        while not sidecar.outcomes:
            await asyncio.sleep(0.01)
    assert {"cancelled": 1} == sidecar.outcomes


# ---- R14: our own version ----------------------------------------------------------------------------------------


async def test_r14_each_side_is_spoken_to_in_our_own_version(connect) -> None:
    app, upstream, _ = await connect(once(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"))
    await app.send("GET /u HTTP/1.0\r\n\r\n")
    assert (await app.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert upstream.requests[0].startswith(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("asked", ["", "Connection: keep-alive\r\n"])
async def test_r14_an_http10_app_gets_no_persistent_connection(connect, asked: str) -> None:
    app, _, _ = await connect()
    reply = await app.ask(f"GET /u HTTP/1.0\r\n{asked}\r\n")
    assert (200, "close") == (reply.status, reply.get("Connection"))
    assert await app.closed()


async def test_r14_an_http10_upstream_is_not_kept(connect) -> None:
    app, upstream, _ = await connect(always(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"))
    for _ in range(2):
        assert b"ok" == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).body
    assert 2 == upstream.connections


# ---- R20: what an HTTP/1.0 app is sent -----------------------------------------------------------------------------

KEEP_ALIVE = ["", "Connection: keep-alive\r\n", "Proxy-Connection: keep-alive\r\n", "proxy-connection: Keep-Alive\r\n"]


@pytest.mark.parametrize("asked", KEEP_ALIVE)
async def test_r20_an_http10_app_gets_no_interim_answer_and_no_chunks_whatever_it_asks_for(connect, asked: str) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    app, _, _ = await connect(once(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + chunked))
    reply = await app.ask(f"GET /u HTTP/1.0\r\n{asked}\r\n")
    assert (200, None, "close", b"ok") == (
        reply.status,
        reply.get("Transfer-Encoding"),
        reply.get("Connection"),
        reply.body,
    )
    assert await app.closed()


@pytest.mark.parametrize("asked", KEEP_ALIVE)
async def test_r20_an_http10_app_is_never_asked_for_its_body_with_a_100(connect, asked: str) -> None:
    app, upstream, _ = await connect(always(b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"ok")))
    reply = await app.ask(f"POST /u HTTP/1.0\r\n{asked}Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi")
    assert (200, b"ok", [b"hi"]) == (reply.status, reply.body, upstream.bodies)


@pytest.mark.parametrize("version", ["0.9", "2.0", "3.0", "0.1"])
@pytest.mark.parametrize("asked", KEEP_ALIVE)
async def test_r20_other_versions_are_refused_whatever_they_ask_for(connect, version: str, asked: str) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(f"GET /u HTTP/{version}\r\nHost: s\r\n{asked}\r\n")
    assert (505, "VERSION_NOT_SUPPORTED", []) == (reply.status, reply.json["error_code"], upstream.requests)
    assert await app.closed()


@pytest.mark.parametrize("field", ["Connection", "Proxy-Connection"])
async def test_r20_an_http10_app_cannot_change_protocols(connect, field: str) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(f"GET /u HTTP/1.0\r\n{field}: Upgrade, keep-alive\r\nUpgrade: websocket\r\n\r\n")
    assert (200, "close") == (reply.status, reply.get("Connection"))
    assert [] == lines_of(upstream.requests[0], "Upgrade")
    assert await app.closed()


# ---- R15: sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "request_"),
    [
        (414, "TARGET_TOO_LONG", "GET /u/" + "x" * 2000 + " HTTP/1.1\r\nHost: s\r\n\r\n"),
        (431, "HEADERS_TOO_LARGE", "GET /u HTTP/1.1\r\nHost: s\r\nX-A: " + "x" * 2000 + "\r\n\r\n"),
        (431, "HEADERS_TOO_LARGE", "GET /u HTTP/1.1\r\nHost: s\r\n" + ("X-A: " + "x" * 600 + "\r\n") * 3 + "\r\n"),
    ],
)
async def test_r15_what_is_too_large_is_named(connect, status: int, code: str, request_: str) -> None:
    app, upstream, _ = await connect(limits={"head_bytes": 1024})
    reply = await app.ask(request_)
    assert (status, code) == (reply.status, reply.json["error_code"])
    assert await app.closed()
    assert [] == upstream.requests


async def test_r15_a_head_just_under_the_limit_passes_however_large_the_body_behind_it(connect) -> None:
    app, _, _ = await connect(always(answer()), limits={"head_bytes": 1024})
    head = "POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 50000\r\nX-A: " + "x" * 900 + "\r\n\r\n"
    for _ in range(2):
        assert 200 == (await app.ask(head + "x" * 50_000)).status


async def test_r15_pipelined_heads_are_measured_one_by_one(connect) -> None:
    app, upstream, _ = await connect(always(answer()), limits={"head_bytes": 1024})
    await app.send(("GET /u HTTP/1.1\r\nHost: s\r\nX-A: " + "x" * 600 + "\r\n\r\n") * 4)
    assert [200] * 4 == [(await app.reply()).status for _ in range(4)]
    assert 4 == len(upstream.requests)


async def test_r15_an_upstreams_413_arrives_although_the_body_is_still_being_sent(connect) -> None:
    async def refuses(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(answer(b"too big", "413 Content Too Large", "Connection: close"))
        await asyncio.sleep(0.05)

    app, _, _ = await connect(refuses)
    await app.send("POST /u HTTP/1.1\r\nHost: s\r\nContent-Length: 3000000\r\n\r\n" + "x" * 300_000)
    reply = await app.reply()
    assert (413, b"too big", "close") == (reply.status, reply.body, reply.get("Connection"))


# ---- R16: serialised anew ----------------------------------------------------------------------------------------


async def test_r16_a_request_is_written_anew_with_one_framing(connect) -> None:
    app, upstream, _ = await connect()
    await app.ask(
        "POST  /u HTTP/1.1\r\nHost:   s  \r\nX-A:\t  padded \t\r\ntransfer-ENCODING:  Chunked\r\n\r\n"
        "3;ext=1\r\none\r\n02\r\nxy\r\n0\r\n\r\n"
    )
    (head,) = upstream.requests
    assert head.startswith(b"POST / HTTP/1.1\r\nHost: 127.0.0.1:")
    assert (["padded"], ["chunked"], []) == tuple(
        lines_of(head, name) for name in ("X-A", "Transfer-Encoding", "Content-Length")
    )
    assert [b"onexy"] == upstream.bodies


async def test_r16_a_response_is_written_anew_with_one_framing(connect) -> None:
    app, _, _ = await connect(
        always(b"HTTP/1.1 200 OK\r\ntransfer-ENCODING: Chunked\r\n\r\n3;e=1\r\none\r\n02\r\nxy\r\n0\r\n\r\n")
    )
    for _ in range(2):
        reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
        assert (b"onexy", ["chunked"], []) == (reply.body, reply.all("Transfer-Encoding"), reply.all("Content-Length"))


async def test_r16_a_parse_error_closes_the_connection_even_after_good_requests(connect) -> None:
    app, upstream, _ = await connect()
    assert 200 == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status
    assert 400 == (await app.ask("GET /u HTTP/1.1\r\nHost: s\r\nX-A : 1\r\n\r\n")).status
    assert await app.closed()
    assert 1 == len(upstream.requests)


# ---- R17: Upgrade ------------------------------------------------------------------------------------------------

HANDSHAKE = "GET /u HTTP/1.1\r\nHost: s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


async def test_r17_bytes_behind_an_upgrade_are_held_until_the_101(connect) -> None:
    ahead = []

    async def switches(talk: Talk) -> None:
        head = await talk.read_head()
        assert (["Upgrade"], ["websocket"]) == (lines_of(head, "Connection"), lines_of(head, "Upgrade"))
        try:
            ahead.append(await asyncio.wait_for(talk.reader.read(100), 0.1))
        except TimeoutError:
            pass
        await talk.send(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Accept: a\r\n\r\nfirst"
        )
        await talk.send(await talk.reader.readexactly(5))

    app, _, sidecar = await connect(switches)
    reply = await app.ask(HANDSHAKE + "frame")
    assert (101, "Upgrade", "websocket", "a") == (
        reply.status,
        reply.get("Connection"),
        reply.get("Upgrade"),
        reply.get("Sec-WebSocket-Accept"),
    )
    assert b"firstframe" == await asyncio.wait_for(app.reader.read(), 5)
    assert [] == ahead
    app.close()
    async with asyncio.timeout(5):
        while sidecar.proxy.tunnels:
            await asyncio.sleep(0.01)
    assert {"tunnelled": 1} == sidecar.outcomes


@pytest.mark.parametrize("body", ["Content-Length: 2\r\n\r\nhi", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"])
async def test_r17_an_upgrade_with_a_body_is_refused(connect, body: str) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(HANDSHAKE.removesuffix("\r\n") + body)
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert await app.closed()
    assert [] == upstream.requests


async def test_r17_an_upgraded_connection_never_returns_to_the_pool(connect) -> None:
    async def switches_or_answers(talk: Talk) -> None:
        head = await talk.read_head()
        if lines_of(head, "Upgrade"):
            await talk.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            await talk.reader.read()
        else:
            await talk.send(answer())

    app, upstream, sidecar = await connect(switches_or_answers)
    assert 101 == (await app.ask(HANDSHAKE)).status
    app.close()
    async with asyncio.timeout(5):
        while sidecar.proxy.tunnels:
            await asyncio.sleep(0.01)
    second = await sidecar.app()
    assert 200 == (await second.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")).status
    assert 2 == upstream.connections


async def test_r17_a_101_nobody_asked_for_is_a_502(connect) -> None:
    app, _, sidecar = await connect(
        always(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
    )
    reply = await app.ask("GET /u HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (502, "PROTOCOL_ERROR") == (reply.status, reply.json["error_code"])
    assert set() == sidecar.proxy.tunnels


async def test_r17_a_handshake_that_says_it_has_no_body_is_a_handshake(connect) -> None:
    app, upstream, _ = await connect(once(SWITCHED + b"first"))
    reply = await app.ask(HANDSHAKE.replace("Sec-", "Content-Length: 0\r\nSec-"))
    (head,) = upstream.requests
    assert (101, "websocket") == (reply.status, reply.get("Upgrade"))
    assert (["Upgrade"], ["websocket"], ["0"]) == tuple(
        lines_of(head, name) for name in ("Connection", "Upgrade", "Content-Length")
    )
    assert b"first" == await asyncio.wait_for(app.reader.read(), 5)


@pytest.mark.parametrize("scheme", ["ws", "WS"])
async def test_r17_a_handshake_may_name_its_target_with_the_scheme_of_websocket(connect, scheme: str) -> None:
    app, upstream, _ = await connect(once(SWITCHED + b"first"))
    named = f"{scheme}://127.0.0.1:{upstream.port}/chat?room=1"
    reply = await app.ask(HANDSHAKE.replace("/u", named))
    assert (101, b"/chat?room=1") == (reply.status, target_of(upstream.requests[0]))
    assert b"first" == await asyncio.wait_for(app.reader.read(), 5)


async def test_r17_an_ordinary_request_may_carry_that_scheme_too(connect) -> None:
    app, upstream, _ = await connect()
    reply = await app.ask(f"GET ws://127.0.0.1:{upstream.port}/x HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (200, b"/x") == (reply.status, target_of(upstream.requests[0]))


@pytest.mark.parametrize("protocol", ["chat/2", "h2c, websocket", None])
async def test_r17_a_101_is_told_with_the_protocol_that_the_upstream_speaks(connect, protocol: str | None) -> None:
    said = b"" if protocol is None else b"Upgrade: %b\r\n" % protocol.encode()
    app, _, _ = await connect(once(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n%b\r\n" % said))
    reply = await app.ask(HANDSHAKE)
    assert (101, "Upgrade", protocol) == (reply.status, reply.get("Connection"), reply.get("Upgrade"))
