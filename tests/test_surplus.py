"""What an upstream sends behind the end of its answer reaches nobody: no app, no store, no other request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from ssl import create_default_context
from typing import Any

import pytest

from sidecar.relay import AppSink, Framing, WrongLength
from sidecar.upstream.connection import UpstreamConnection
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.authority import Authority, server_side
from tests.doubles.faults import until
from tests.doubles.upstream import Script, Talk, Upstream, always, answer
from tests.test_idempotency_live import post

FORGED = answer(b"forged", "200 OK", "X-Forged: yes")
BALANCE = b"balance: 7"
BIG = bytes(range(256)) * 1500
CHUNKS = b"5\r\nfirst\r\n0\r\n\r\n"
BIG_CHUNKS = b"%x\r\n%b\r\n" % (len(BIG), BIG) * 2 + b"0\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 104 Upload\r\n\r\n"

# What the upstream answers, and the body that the app gets.
FORMS: dict[str, tuple[str, bytes, bytes]] = {
    "a small body": ("GET", answer(b"first"), b"first"),
    "a dated small body": ("GET", answer(b"first", "200 OK", "Date: Mon, 01 Jan 2029 00:00:00 GMT"), b"first"),
    "an empty body": ("GET", answer(b""), b""),
    "a body that says close": ("GET", answer(b"first", "200 OK", "Connection: close"), b"first"),
    "a large body": ("GET", answer(BIG), BIG),
    "an event stream": ("GET", answer(b"data: 1\n\n", "200 OK", "Content-Type: text/event-stream"), b"data: 1\n\n"),
    "chunked": ("GET", CHUNKED_HEAD + CHUNKS, b"first"),
    "chunked with a trailer": ("GET", CHUNKED_HEAD + CHUNKS[:-2] + b"X-T: 1\r\n\r\n", b"first"),
    "chunked and large": ("GET", CHUNKED_HEAD + BIG_CHUNKS, BIG * 2),
    "204": ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "304 with a length": ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
    "HEAD": ("HEAD", b"HTTP/1.1 200 OK\r\n\r\n", b""),
    "HEAD with a length": ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b""),
    "HEAD with chunks": ("HEAD", CHUNKED_HEAD, b""),
    "1xx first": ("GET", INTERIM + answer(b"first"), b"first"),
    "1xx first and then 204": ("GET", INTERIM + b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "a failure": ("GET", answer(b"gone", "404 Not Found"), b"gone"),
}
CLOSING = ("a body that says close", "HEAD")
WHEN = ["in the same segment", "in the next", "after the connection was given back"]


def forging(answered: bytes, when: str, idle: asyncio.Event, surplus: bytes = FORGED) -> Script:
    """The first answer of the first connection has surplus; everything else is as it should be."""

    async def script(talk: Talk) -> None:
        first = talk.upstream.connections == 1
        while True:
            await talk.read_request()
            if not first:
                await talk.send(answered)
                continue
            first = False
            if when == WHEN[0]:
                await talk.send(answered + surplus)
                continue
            await talk.send(answered)
            if when == WHEN[2]:
                await idle.wait()
            else:
                await asyncio.sleep(0.001)
            await talk.send(surplus)

    return script


async def last_of(app: App, request: str) -> Reply:
    """The final answer; 1xx are read over."""
    await app.send(request)
    while (reply := await app.reply(to_head=request.startswith("HEAD"))).status < 200:
        pass
    return reply


def surplus(sidecar: Running, upstream: str) -> float | None:
    return sidecar.proxy.metrics.registry.get_sample_value("sidecar_upstream_surplus_total", {"upstream": upstream})


def told(sidecar: Running) -> list[dict[str, Any]]:
    lines = map(json.loads, sidecar.logged.getvalue().splitlines())
    return [line for line in lines if line["event_name"] == "sidecar.upstream.surplus"]


def idle_in(sidecar: Running, upstream: str) -> int:
    (state,) = [state for state in sidecar.proxy.directory.states() if state.label == upstream]
    return state.connections[1]


async def started(
    start_sidecar: Starter, start_upstream: UpstreamStarter, scripts: dict[str, Script], **keys: Any
) -> tuple[Running, dict[str, Upstream]]:
    """A sidecar with an upstream for each, under a route of its name."""
    upstreams = {name: await start_upstream(script) for name, script in scripts.items()}
    settings = {name: {"route": f"/{name}", "endpoints": [each.url], **keys} for name, each in upstreams.items()}
    return await start_sidecar(upstreams=settings), upstreams


async def given_back(sidecar: Running, upstream: str, idle: asyncio.Event) -> None:
    """The connection is idle; now the surplus may come."""
    await until(lambda: idle_in(sidecar, upstream) == 1, f"{upstream}: its connection was not kept")
    idle.set()


@pytest.mark.parametrize("when", WHEN)
async def test_surplus_reaches_no_app_and_its_connection_no_further_request(
    start_sidecar: Starter, start_upstream: UpstreamStarter, when: str
) -> None:
    forms = [form for form in FORMS if when == WHEN[0] or form not in CLOSING]
    idle = {form: asyncio.Event() for form in forms}
    scripts = {form.replace(" ", "-"): forging(FORMS[form][1], when, idle[form]) for form in forms}
    sidecar, upstreams = await started(start_sidecar, start_upstream, {**scripts, "bank": always(answer(BALANCE))})
    for asked, form in enumerate(forms, 1):
        (method, _, body), name = FORMS[form], form.replace(" ", "-")
        app = await sidecar.app()
        ask = f"{method} /{name}/x HTTP/1.1\r\nHost: s\r\n\r\n"
        reply = await last_of(app, ask)
        assert (body, None, True) == (reply.body, reply.get("x-forged"), reply.complete), form
        assert [] == [field for field in reply.trailers if field != ("X-T", "1")], form
        if when == WHEN[2]:
            await given_back(sidecar, name, idle[form])
        reply = await last_of(app, "GET /bank/balance HTTP/1.1\r\nHost: s\r\n\r\n")
        assert (BALANCE, asked) == (reply.body, len(upstreams["bank"].requests)), form
        await until(lambda name=name: surplus(sidecar, name) == 1, f"{form}: not counted")  # type: ignore[misc]
        reply = await last_of(app, ask)
        assert (body, None, True) == (reply.body, reply.get("x-forged"), reply.complete), form
        assert (2, 2) == (upstreams[name].connections, len(upstreams[name].requests)), form
    assert dict.fromkeys(scripts, 1) == {line["sidecar.upstream"]: line["count"] for line in told(sidecar)}
    assert 0 == surplus(sidecar, "bank")


@pytest.mark.parametrize("when", WHEN)
async def test_surplus_is_not_remembered_for_a_key(
    start_sidecar: Starter, start_upstream: UpstreamStarter, when: str
) -> None:
    forms = ["a small body", "an empty body", "a large body", "chunked", "204"]
    idle = {form: asyncio.Event() for form in forms}
    scripts = {form.replace(" ", "-"): forging(FORMS[form][1], when, idle[form]) for form in forms}
    sidecar, upstreams = await started(
        start_sidecar, start_upstream, scripts, idempotency={"max_response_bytes": 2**20}
    )
    for form in forms:
        (_, _, body), name = FORMS[form], form.replace(" ", "-")
        request = post(path=f"/{name}/x")
        first = await (await sidecar.app()).ask(request)
        assert (body, True) == (first.body, first.complete), form
        if when == WHEN[2]:
            await given_back(sidecar, name, idle[form])
        await until(lambda name=name: surplus(sidecar, name) == 1, f"{form}: not counted")  # type: ignore[misc]
        again = await (await sidecar.app()).ask(request)
        assert (body, "true", None) == (again.body, again.get("idempotent-replayed"), again.get("x-forged")), form
        assert 1 == len(upstreams[name].requests), form


@pytest.mark.parametrize("when", WHEN)
async def test_surplus_inside_intercepted_tls_reaches_no_app(
    start_sidecar: Starter, start_upstream: UpstreamStarter, tmp_path: Path, when: str
) -> None:
    forms = {f"{number}.api.test": form for number, form in enumerate(["a small body", "a large body", "chunked"])}
    authority = Authority(tmp_path, "upstream authority")
    idle = {host: asyncio.Event() for host in forms}
    upstreams = {}
    for host, form in forms.items():
        script = forging(FORMS[form][1], when, idle[host])
        upstreams[host] = await start_upstream(script, tls=server_side(authority.issue(host)))
    sidecar = await start_sidecar(
        upstreams={
            host.partition(".")[0] + "-api": {
                "hosts": [host],
                "intercept": True,
                "endpoints": [f"https://127.0.0.1:{upstream.port}"],
                "ca_bundle": str(authority.bundle),
            }
            for host, upstream in upstreams.items()
        }
    )
    trusting = create_default_context(cafile=str(Path(sidecar.settings.state_dir) / "ca" / "ca.pem"))
    for host, form in forms.items():
        name, (_, _, body) = host.partition(".")[0] + "-api", FORMS[form]
        app = await sidecar.app()
        await app.ask(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n", to_head=True)
        await app.writer.start_tls(trusting, server_hostname=host)
        ask = f"GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n"
        assert body == (await app.ask(ask)).body, form
        if when == WHEN[2]:
            await given_back(sidecar, name, idle[host])
        await until(lambda name=name: surplus(sidecar, name) == 1, f"{form}: not counted")  # type: ignore[misc]
        reply = await app.ask(ask)
        assert (body, None, 2) == (reply.body, reply.get("x-forged"), upstreams[host].connections), form


async def test_inside_a_tunnel_every_byte_is_the_apps_and_the_connection_nobody_elses(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    evil = await start_upstream(always(answer(b"first") + FORGED))
    sidecar = await start_sidecar(egress={"connect_ports": [evil.port]})
    app = await sidecar.app()
    where = f"127.0.0.1:{evil.port}"
    assert 200 == (await app.ask(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n", to_head=True)).status
    request = f"GET /x HTTP/1.1\r\nHost: {where}\r\n\r\n"
    assert [b"first", b"forged"] == [(await app.ask(request)).body, (await app.reply()).body]
    outside = await (await sidecar.app()).ask(request.replace("/x", f"http://{where}/x"))
    assert (b"first", 2) == (outside.body, evil.connections)


PIECES = {
    "the first byte of an answer": ("GET", answer(b"first"), b"H"),
    "no HTTP at all": ("GET", answer(b"first"), b"\0"),
    "a longer body than announced": ("GET", answer(b"first"), b"er"),
    "a body behind a 204": ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", b"body"),
    "an answer behind an empty line": ("GET", answer(b"first"), b"\r\n" + FORGED),
    "a 1xx": ("GET", answer(b"first"), b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "the body that a HEAD announces": ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"first"),
    "an empty line for a body": ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"\r\n"),
    "the chunks that a HEAD announces": ("HEAD", CHUNKED_HEAD, CHUNKS),
    "the last chunk alone": ("HEAD", CHUNKED_HEAD, b"0\r\n\r\n"),
    "the beginning of a chunk": ("HEAD", CHUNKED_HEAD, b"0\r\n"),
    "a last chunk with a trailer": ("HEAD", CHUNKED_HEAD, b"0\r\nX-Forged: yes\r\n\r\n"),
}  # fmt: skip


async def test_any_byte_behind_the_end_is_surplus(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    scripts = {
        piece.replace(" ", "-"): forging(answered, WHEN[0], asyncio.Event(), behind)
        for piece, (_, answered, behind) in PIECES.items()
    }
    sidecar, upstreams = await started(start_sidecar, start_upstream, scripts)
    app = await sidecar.app()
    for piece, (method, answered, _) in PIECES.items():
        name = piece.replace(" ", "-")
        ask = f"{method} /{name}/x HTTP/1.1\r\nHost: s\r\n\r\n"
        replies = [await last_of(app, ask), await last_of(app, ask)]
        expected = (int(answered.split(b" ")[1]), b"first" if b"\r\n\r\nfirst" in answered else b"", None)
        assert [expected] * 2 == [(reply.status, reply.body, reply.get("x-forged")) for reply in replies], piece
        assert (2, 1) == (upstreams[name].connections, surplus(sidecar, name)), piece


async def test_an_answer_in_two_pieces_has_no_surplus(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    """Wherever it is cut, also within the line ends of its head."""
    splits = range(1, len(answer(b"first")))
    sidecar, upstreams = await started(start_sidecar, start_upstream, {str(split): _in_two(split) for split in splits})
    app = await sidecar.app()
    for split, upstream in upstreams.items():
        for ask in (f"HEAD /{split}/x", f"GET /{split}/x", f"GET /{split}/204", f"GET /{split}/chunked"):
            assert 200 <= (await last_of(app, f"{ask} HTTP/1.1\r\nHost: s\r\n\r\n")).status < 300
        assert (1, 0) == (upstream.connections, surplus(sidecar, split)), split


def _in_two(split: int) -> Script:
    answers = {
        b"HEAD /x": CHUNKED_HEAD,
        b"GET /x": answer(b"first"),
        b"GET /204": b"HTTP/1.1 204 No Content\r\n\r\n",
        b"GET /chunked": CHUNKED_HEAD + CHUNKS,
    }

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            whole = answers[head.partition(b" HTTP")[0]]
            at = -split if len(whole) > split else -1
            await talk.send(whole[:at])
            await asyncio.sleep(0.002)
            await talk.send(whole[at:])

    return script


async def test_a_server_that_says_good_bye_on_an_idle_connection_sends_no_surplus(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    idle = asyncio.Event()
    good_bye = answer(b"", "408 Request Timeout", "Connection: close")
    upstream = await start_upstream(forging(answer(b"first"), WHEN[2], idle, good_bye))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    app = await sidecar.app()
    ask = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"
    assert b"first" == (await app.ask(ask)).body
    idle.set()
    (state,) = sidecar.proxy.directory.states()
    (pool,) = state.pools.values()
    await until(lambda: all(connection.closed for connection in pool._idle))
    assert (b"first", 2, 0) == ((await app.ask(ask)).body, upstream.connections, surplus(sidecar, "u"))


async def test_an_upstream_that_does_it_always_is_counted_always_and_told_once(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    evil = await start_upstream(always(answer(b"first") + FORGED))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [evil.url]}})
    app = await sidecar.app()
    for _ in range(20):
        assert b"first" == (await app.ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")).body
    assert (20, 20, 1) == (surplus(sidecar, "u"), evil.connections, len(told(sidecar)))
    assert {"first_try": 20} == sidecar.outcomes


# ---- by construction ---------------------------------------------------------------------------------------------


class Written:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("pieces", [[b"abcd"], [b"ab", b"cd", b"ef"], [b"ab"], []])
def test_a_sink_never_writes_more_than_was_announced_and_never_ends_with_another_length(pieces: list[bytes]) -> None:
    transport: Any = Written()
    sink = AppSink(transport, Framing(b"", length=3))
    for piece in pieces:
        sink.body(piece)
    assert len(transport.data) <= 3
    with pytest.raises(WrongLength):
        sink.end([])


async def test_an_answer_that_goes_out_of_step_within_the_sidecar_is_cut_and_counted(
    start_sidecar: Starter, start_upstream: UpstreamStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar, _ = await started(
        start_sidecar, start_upstream, {"small": always(answer(b"first", "404 No")), "large": always(answer(BIG))}
    )
    read, write = UpstreamConnection.on_body, AppSink.body
    monkeypatch.setattr(UpstreamConnection, "on_body", lambda connection, data: read(connection, data + b"+"))
    app = await sidecar.app()
    reply = await app.ask("GET /small/x HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (500, "SIDECAR_INTERNAL") == (reply.status, reply.json["error_code"])
    monkeypatch.setattr(UpstreamConnection, "on_body", read)
    monkeypatch.setattr(AppSink, "body", lambda sink, data: write(sink, data[:-1]))
    app = await sidecar.app()
    reply = await app.ask("GET /large/x HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (200, False, True) == (reply.status, reply.complete, await app.closed())
    assert ({"internal": 2}, 2) == (sidecar.outcomes, sidecar.proxy.metrics.internal_errors["exchange"])
    sidecar.logged.truncate(0)  # it was meant
