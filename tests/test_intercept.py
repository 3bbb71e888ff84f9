"""Interception: HTTPS of listed hosts is opened, retried and seen; everything else passes closed."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App, Reply
from tests.doubles.authority import Authority, server_side
from tests.doubles.faults import QUICK_POLICIES, at_rest, in_turn, last_session, until
from tests.doubles.upstream import Talk, Upstream, always, answer
from tests.test_nothing_left import alive, nothing_left

OK = answer(b"secret")
BUSY = answer(b"busy", "503 Service Unavailable")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "upstream authority")


class Opened:
    """A sidecar that intercepts `api.test`, whose requests go to one TLS upstream."""

    def __init__(self, sidecar: Running, upstream: Upstream, host: str) -> None:
        self.sidecar = sidecar
        self.upstream = upstream
        self.host = host

    @property
    def ca(self) -> Path:
        return Path(self.sidecar.settings.state_dir) / "ca" / "ca.pem"

    def trusting(self, *, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.maximum_version = newest
        return context

    async def connect(self, target: str | None = None, fields: str = "") -> App:
        app = await self.sidecar.app()
        named = target or f"{self.host}:443"
        reply = await app.ask(f"CONNECT {named} HTTP/1.1\r\nHost: {named}\r\n{fields}\r\n", to_head=True)
        assert 200 == reply.status, reply.body
        return app

    async def secure(self, context: ssl.SSLContext | None = None, name: str | None = None, fields: str = "") -> App:
        app = await self.connect(fields=fields)
        await asyncio.wait_for(app.writer.start_tls(context or self.trusting(), server_hostname=name or self.host), 10)
        return app

    async def ask(self, request: str | bytes, **options: Any) -> Reply:
        return await (await self.secure(**options)).ask(request)

    def get(self, path: str = "/x") -> str:
        return f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\n\r\n"

    def errors(self, word: str) -> int:
        return self.sidecar.proxy.metrics.tls_client_errors[word]

    @property
    def demotions(self) -> int:
        return self.sidecar.proxy.metrics.demotions["api"]


@pytest.fixture
def opened(start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority) -> Any:
    async def start(script: Any, host: str = "api.test", **keys: Any) -> Opened:
        certificate = keys.pop("certificate", None) or authority.issue("api.test", host)
        upstream = await start_upstream(script, tls=server_side(certificate))
        settings = {
            "hosts": [host],
            "intercept": True,
            "endpoints": [f"https://127.0.0.1:{upstream.port}"],
            "ca_bundle": str(authority.bundle),
            **keys.pop("upstream", {}),
        }
        sidecar = await start_sidecar(upstreams={"api": settings}, policies=QUICK_POLICIES, **keys)
        return Opened(sidecar, upstream, host)

    return start


# ---- what is inside ----------------------------------------------------------------------------------------------


async def test_a_get_inside_is_answered_retried_and_recorded(opened: Any) -> None:
    its = await opened(in_turn(BUSY, OK))
    reply = await its.ask(its.get("/v1/x?y=1"))
    assert (200, b"secret", "2", "recovered") == (
        reply.status,
        reply.body,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    assert its.upstream.requests[0].startswith(b"GET /v1/x?y=1 HTTP/1.1\r\nHost: api.test\r\n")
    session = await last_session(its.sidecar)
    assert ("https://api.test/v1/x?y=1", "api", 2) == (session.target, session.upstream, len(session.attempts))
    assert ("https", "api.test:443") == (session.scheme, session.host)
    assert {"recovered": 1} == its.sidecar.outcomes


async def test_an_intercepted_connection_that_ended_is_gone_without_a_collector(opened: Any) -> None:
    its = await opened(always(answer(b"secret", "200 OK", "Connection: close")))
    gc.collect()
    gc.disable()
    try:
        before = alive()
        app = await its.secure()
        await app.ask(b"PUT /x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 100000\r\n\r\n" + b"z" * 100_000)
        app.close()
        await nothing_left(before)
    finally:
        gc.enable()


async def test_a_connection_carries_many_requests_with_bodies_and_streams(opened: Any) -> None:
    async def script(talk: Talk) -> None:
        while True:
            _, body = await talk.read_request()
            await talk.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (body, b"-", body):
                await talk.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await talk.send(b"0\r\n\r\n")

    its = await opened(script)
    app = await its.secure()
    for size in (1, 70_000, 1_500_000):
        body = bytes(index % 251 for index in range(size))
        reply = await app.ask(b"POST /x HTTP/1.1\r\nHost: api.test\r\nContent-Length: %d\r\n\r\n%b" % (size, body))
        assert (200, body + b"-" + body) == (reply.status, reply.body)
    assert {"first_try": 3} == its.sidecar.outcomes
    await at_rest(its.sidecar)


async def test_a_post_that_may_have_been_executed_is_not_sent_twice(opened: Any) -> None:
    its = await opened(in_turn(BUSY, OK))
    reply = await its.ask("POST /x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 2\r\n\r\nhi")
    assert (503, "1") == (reply.status, reply.get("x-sidecar-attempts"))
    assert 1 == len(its.upstream.requests)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_of_tls_speak_http11(opened: Any, newest: ssl.TLSVersion) -> None:
    its = await opened(always(OK))
    context = its.trusting(newest=newest)
    context.set_alpn_protocols(["h2", "http/1.1"])
    app = await its.secure(context)
    tls = app.writer.get_extra_info("ssl_object")
    assert ("http/1.1", str(newest.name).replace("_", ".")) == (tls.selected_alpn_protocol(), tls.version())
    assert 200 == (await app.ask(its.get())).status


async def test_an_address_can_be_intercepted(opened: Any) -> None:
    its = await opened(always(OK), host="127.0.0.9")
    assert 200 == (await its.ask(its.get())).status


async def test_other_ports_of_the_host_keep_their_port(opened: Any) -> None:
    its = await opened(always(OK), egress={"connect_ports": [443, 8443]})
    app = await its.connect("API.test:8443")
    await app.writer.start_tls(its.trusting(), server_hostname="api.test")
    assert 400 == (await app.ask(its.get())).status
    app = await its.connect("API.test:8443")
    await app.writer.start_tls(its.trusting(), server_hostname="api.test")
    assert 200 == (await app.ask("GET /x HTTP/1.1\r\nHost: api.test:8443\r\n\r\n")).status
    assert b"Host: api.test:8443\r\n" in its.upstream.requests[-1]


async def test_options_for_the_whole_server_stays_that(opened: Any) -> None:
    its = await opened(always(OK))
    assert 200 == (await its.ask("OPTIONS * HTTP/1.1\r\nHost: api.test\r\n\r\n")).status
    assert its.upstream.requests[0].startswith(b"OPTIONS * HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "request_line",
    ["GET /x HTTP/1.1\r\nHost: other.test", "GET https://other.test/ HTTP/1.1\r\nHost: api.test",
     "GET https://api.test.evil/ HTTP/1.1\r\nHost: api.test", "CONNECT other.test:443 HTTP/1.1\r\nHost: api.test",
     "GET https://api.test@other.test/ HTTP/1.1\r\nHost: api.test", "GET http://api.test/ HTTP/1.1\r\nHost: api.test",
     "GET https://api.test:8443/ HTTP/1.1\r\nHost: api.test", "GET * HTTP/1.1\r\nHost: api.test",
     "GET /x HTTP/1.1\r\nHost: api.test:80", "GET /x HTTP/1.1\r\nHost: ",
     "GET /x HTTP/1.1", "GET /x#y HTTP/1.1\r\nHost: api.test"],
)  # fmt: skip
async def test_inside_tls_nobody_else_can_be_asked(opened: Any, request_line: str) -> None:
    its = await opened(always(OK))
    reply = await its.ask(f"{request_line}\r\n\r\n")
    assert (400, "MALFORMED_REQUEST") == (reply.status, reply.json["error_code"])
    assert [] == its.upstream.requests


@pytest.mark.parametrize(
    "request_line",
    ["GET https://api.test/a HTTP/1.1\r\nHost: api.test", "GET HTTPS://API.test:443/a HTTP/1.1\r\nHost: api.test",
     "GET /a HTTP/1.1\r\nHost: Api.Test.", "GET /a HTTP/1.1\r\nHost: api.test.:443", "GET /a HTTP/1.0"],
)  # fmt: skip
async def test_the_same_host_may_be_written_in_another_way_or_left_out_by_http10(
    opened: Any, request_line: str
) -> None:
    its = await opened(always(OK))
    assert 200 == (await its.ask(f"{request_line}\r\n\r\n")).status
    assert its.upstream.requests[0].startswith(b"GET /a HTTP/1.1\r\nHost: api.test\r\n")


async def test_a_websocket_inside_becomes_a_tunnel(opened: Any) -> None:
    async def switch(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello")
        while data := await talk.reader.read(65536):
            await talk.send(data)

    its = await opened(switch)
    app = await its.secure()
    handshake = "GET /chat HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert 101 == (await app.ask(handshake)).status
    await app.send(b" and you")
    assert b"hello and you" == await asyncio.wait_for(app.reader.readexactly(13), 10)
    app.close()
    await until(lambda: not its.sidecar.proxy.tunnels)
    assert {"tunnelled": 1} == its.sidecar.outcomes


async def test_an_error_of_the_sidecar_is_told_inside(opened: Any) -> None:
    its = await opened(always(OK))
    await its.upstream.stop()
    reply = await its.ask(its.get())
    assert (502, "CONNECTION_REFUSED") == (reply.status, reply.json["error_code"])


def wrong_certificates(authority: Authority, folder: Path) -> dict[str, tuple[Path, str]]:
    other = Authority(folder, "somebody")
    return {
        "expired": (authority.issue("api.test", days=-1), "renewed"),
        "wrong host": (authority.issue("other.test"), "another host"),
        "self-signed": (other.itself(), "ca_bundle"),
        "unknown authority": (other.issue("api.test"), "ca_bundle"),
        "weak": (authority.issue("api.test", weak=True), "stronger"),
    }


@pytest.mark.parametrize("fault", ["expired", "wrong host", "self-signed", "unknown authority", "weak"])
async def test_a_wrong_certificate_of_the_upstream_is_a_tls_failure_with_a_sentence(
    opened: Any, authority: Authority, tmp_path: Path, fault: str
) -> None:
    certificate, todo = wrong_certificates(authority, tmp_path)[fault]
    its = await opened(always(OK), certificate=certificate)
    for method in ("GET", "POST"):
        reply = await its.ask(f"{method} /x HTTP/1.1\r\nHost: api.test\r\n\r\n")
        assert (502, "TLS_FAILURE", "1") == (reply.status, reply.json["error_code"], reply.get("x-sidecar-attempts"))
        assert "was not accepted" in reply.json["message"]
        assert todo in reply.json["message"]
    assert [] == its.upstream.requests


async def test_the_upstream_may_ask_for_a_client_certificate(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    context = server_side(authority.issue("api.test"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.bundle)
    upstream = await start_upstream(always(OK), tls=context)
    settings = {"hosts": ["api.test"], "intercept": True, "endpoints": [f"https://127.0.0.1:{upstream.port}"]}
    settings |= {"ca_bundle": str(authority.bundle), "client_cert": str(authority.issue("client"))}
    its = Opened(await start_sidecar(upstreams={"api": settings}), upstream, "api.test")
    assert 200 == (await its.ask(its.get())).status


async def test_a_malformed_request_inside_is_answered_and_ends_the_connection(opened: Any) -> None:
    its = await opened(always(OK))
    app = await its.secure()
    assert 400 == (await app.ask("GET /x HTTP/1.1\r\nHost: api.test\r\nBad Field: x\r\n\r\n")).status
    assert await app.closed()
    await at_rest(its.sidecar)


async def test_without_endpoints_it_goes_where_the_app_said_over_verified_tls(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream = await start_upstream(always(OK), tls=server_side(authority.issue("127.0.0.1")))
    host = f"127.0.0.1:{upstream.port}"
    sidecar = await start_sidecar(
        upstreams={"api": {"hosts": [host], "intercept": True, "ca_bundle": str(authority.bundle)}}
    )
    its = Opened(sidecar, upstream, "127.0.0.1")
    app = await its.connect(host)
    await app.writer.start_tls(its.trusting(), server_hostname="127.0.0.1")
    assert 200 == (await app.ask(f"GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n")).status
    assert [f"127.0.0.1:{upstream.port}"] == list(dict(sidecar.proxy.directory.configured["api"].breakers()))


async def test_a_host_that_is_not_listed_passes_closed(
    opened: Any, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    other = await start_upstream(always(OK), tls=server_side(authority.issue("127.0.0.1")))
    its = await opened(always(OK), egress={"connect_ports": [443, other.port]})
    app = await its.connect(f"127.0.0.1:{other.port}")
    await app.writer.start_tls(ssl.create_default_context(cafile=str(authority.bundle)), server_hostname="127.0.0.1")
    assert (200, None) == ((reply := await app.ask(its.get())).status, reply.get("x-sidecar-session"))


# ---- how TLS may begin -------------------------------------------------------------------------------------------


class ByHand:
    """A TLS client whose bytes are carried by the test."""

    def __init__(self, context: ssl.SSLContext, name: str | None) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name)

    def step(self) -> bytes:
        """What is to be sent next; empty when the handshake is complete."""
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        return self.outgoing.read()

    async def finish(self, app: App) -> None:
        async with asyncio.timeout(10):
            while True:
                await app.send(self.step())
                try:
                    self.tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    data = await app.reader.read(65536)
                    assert data, "the sidecar closed the connection"
                    self.incoming.write(data)
        await app.send(self.outgoing.read())

    async def ask(self, app: App, request: str) -> bytes:
        self.tls.write(request.encode())
        await app.send(self.outgoing.read())
        async with asyncio.timeout(10):
            while True:
                try:
                    return self.tls.read(65536)
                except ssl.SSLWantReadError:
                    self.incoming.write(await app.reader.read(65536))


async def test_a_client_hello_right_behind_the_connect_is_not_lost(opened: Any) -> None:
    its = await opened(always(OK))
    client = ByHand(its.trusting(), "api.test")
    app = await its.sidecar.app()
    await app.send(b"CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\n" + client.step())
    assert 200 == (await app.reply(to_head=True)).status
    await client.finish(app)
    assert (await client.ask(app, its.get())).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_client_hello_in_single_bytes_is_understood(opened: Any) -> None:
    its = await opened(always(OK))
    client = ByHand(its.trusting(), "api.test")
    app = await its.connect()
    for byte in client.step():
        await app.send(bytes([byte]))
        await asyncio.sleep(0)
    await client.finish(app)
    assert (await client.ask(app, its.get())).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: api.test\r\n\r\n", b"\x00" * 64, b"SSH-2.0-x\r\n", bytes(range(200, 0, -1))]
)
async def test_garbage_instead_of_tls_is_counted_and_closed(opened: Any, garbage: bytes) -> None:
    its = await opened(always(OK), limits={"head_timeout": 1.0})  # some may announce a record that never comes
    app = await its.connect()
    await app.send(garbage)
    assert await _ended(app)
    await until(lambda: sum(its.sidecar.proxy.metrics.tls_client_errors.values()) == 1)
    assert 0 == its.demotions
    assert 0 == len(its.sidecar.proxy.handshakes)
    assert {} == its.sidecar.outcomes
    if garbage.startswith((b"GET", b"SSH")):
        assert 1 == its.errors("not_tls")


async def test_many_failed_handshakes_do_not_flood_the_log(opened: Any) -> None:
    its = await opened(always(OK))
    await (await its.connect()).send(b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: its.errors("not_tls") == 1)
    for _ in range(999):
        its.sidecar.proxy.handshakes.tell("not_tls", "what the app sent is not TLS")
    told = its.sidecar.logged.getvalue().count("sidecar.tls.client_error")
    assert 1 <= told < 1000
    assert 1000 == told + its.sidecar.proxy.log.suppressed["warn"]


async def test_garbage_right_behind_the_connect_is_closed_too(opened: Any) -> None:
    its = await opened(always(OK))
    app = await its.sidecar.app()
    await app.send(b"CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n")
    assert 200 == (await app.reply(to_head=True)).status
    assert await _ended(app)
    await until(lambda: its.errors("not_tls") == 1)


async def test_a_client_that_stays_silent_is_closed_in_time(opened: Any) -> None:
    its = await opened(always(OK), limits={"head_timeout": 0.3})
    app = await its.connect()
    assert await app.closed()
    await until(lambda: its.errors("timeout") == 1)
    assert 0 == len(its.sidecar.proxy.handshakes)


async def test_a_client_that_leaves_in_the_handshake_leaves_nothing(opened: Any) -> None:
    its = await opened(always(OK))
    app = await its.connect()
    await app.send(ByHand(its.trusting(), "api.test").step()[:40])
    app.close()
    await until(lambda: its.errors("closed") == 1)
    assert 0 == len(its.sidecar.proxy.handshakes)
    assert 0 == its.demotions


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x01"])
async def test_a_client_that_resets_right_behind_its_connect_leaves_nothing(opened: Any, hello: bytes) -> None:
    its = await opened(always(OK))
    with socket.create_connection(its.sidecar.address) as app:
        app.sendall(b"CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\n" + hello)
        app.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await until(lambda: its.errors("closed") == 1)
    await until(lambda: not len(its.sidecar.proxy.handshakes) and not its.sidecar.proxy.downstreams)
    assert 0 == its.demotions


async def test_another_name_inside_than_in_the_connect_is_refused_and_counted(opened: Any) -> None:
    its = await opened(always(OK))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await its.secure(name="other.test")
    await until(lambda: its.errors("sni_mismatch") == 1)
    assert 0 == its.demotions
    assert [] == its.upstream.requests
    assert 200 == (await its.ask(its.get())).status, "the host itself is intercepted as before"


async def test_a_name_in_capitals_and_no_name_at_all_are_fine(opened: Any) -> None:
    its = await opened(always(OK))
    assert 200 == (await its.ask(its.get(), name="API.test")).status
    context = its.trusting()
    context.check_hostname = False
    client = ByHand(context, None)
    app = await its.connect()
    await client.finish(app)
    assert (await client.ask(app, its.get())).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_handshakes_count_as_connections(opened: Any) -> None:
    its = await opened(always(OK), limits={"connections": 3})
    held = [await its.connect() for _ in range(3)]
    app = await its.sidecar.app()
    reply = await app.ask("CONNECT api.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (503, "OVERLOADED") == (reply.status, reply.json["error_code"])
    for one in held:
        one.close()


# ---- clients that refuse -----------------------------------------------------------------------------------------


def pinned(authority: Authority) -> ssl.SSLContext:
    """Trusts the upstream's own authority and nobody else."""
    return ssl.create_default_context(cafile=str(authority.bundle))


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_that_refuses_the_certificate_gets_a_tunnel_with_its_next_call(
    opened: Any, authority: Authority, newest: ssl.TLSVersion
) -> None:
    its = await opened(always(OK))
    context = pinned(authority)
    context.maximum_version = newest
    with pytest.raises(ssl.SSLCertVerificationError):
        await its.secure(context)
    await until(lambda: its.demotions == 1)
    assert 1 == its.errors("certificate_refused")
    reply = await its.ask(its.get(), context=context)
    assert (200, b"secret", None) == (reply.status, reply.body, reply.get("x-sidecar-session"))
    (event,) = its.sidecar.proxy.signals.events.recent()
    assert ("interception_demoted", "api.test:443") == (event.type, event.facts["host"])
    said = its.sidecar.logged.getvalue()
    assert "sidecar.interception.demoted" in said
    assert "sidecar run -- CMD" in said
    assert "intercept: false" in said


async def test_a_client_that_says_so_in_an_alert_is_understood(opened: Any, authority: Authority) -> None:
    its = await opened(always(OK))
    client = ByHand(pinned(authority), "api.test")
    app = await its.connect()
    with pytest.raises(ssl.SSLCertVerificationError):
        await client.finish(app)
    await app.send(client.outgoing.read())
    await until(lambda: its.demotions == 1)
    assert "unknown ca" in its.sidecar.logged.getvalue()


async def test_another_client_is_still_seen_when_one_is_demoted(opened: Any, authority: Authority) -> None:
    its = await opened(always(OK))
    with pytest.raises(ssl.SSLCertVerificationError):
        await its.secure(pinned(authority), fields="User-Agent: pinning/1\r\n")
    await until(lambda: its.demotions == 1)
    assert 200 == (await its.ask(its.get(), context=pinned(authority), fields="User-Agent: pinning/1\r\n")).status
    seen = await its.ask(its.get(), fields="User-Agent: trusting/1\r\n")
    assert "first_try" == seen.get("x-sidecar-outcome")


async def test_a_client_that_twice_shakes_hands_and_leaves_is_demoted(opened: Any, authority: Authority) -> None:
    its = await opened(always(OK))
    for count in (1, 2):
        (await its.secure()).close()
        await until(lambda count=count: its.errors("unused") == count)
        assert count - 1 == its.demotions
    assert 200 == (await its.ask(its.get(), context=pinned(authority))).status


async def test_a_request_shows_that_a_client_trusts_us(opened: Any) -> None:
    its = await opened(always(OK))
    for _ in range(2):
        (await its.secure()).close()
        assert 200 == (await its.ask(its.get())).status
    assert 0 == its.demotions


# ---- the authority -----------------------------------------------------------------------------------------------


async def test_the_authority_is_private_and_constrained_to_the_listed_hosts(opened: Any) -> None:
    its = await opened(always(OK), upstream={"hosts": ["api.test", "b.test:8443", "10.1.2.3"]})
    folder = its.ca.parent
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
    assert {0o600} == {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert b"PRIVATE" not in its.ca.read_bytes()
    certificate = x509.load_pem_x509_certificate(its.ca.read_bytes())
    constraints = certificate.extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert ["10.1.2.3/32", "api.test", "b.test"] == sorted(str(n.value) for n in constraints.value.permitted_subtrees)
    assert "secp256r1" == certificate.public_key().curve.name


async def test_a_key_that_others_could_read_is_closed_to_them_and_that_is_told(opened: Any) -> None:
    its = await opened(always(OK))
    whole = its.ca.parent / "authority.pem"
    assert 200 == (await its.ask(its.get("/"))).status
    assert "key_exposed" not in its.sidecar.logged.getvalue()
    whole.chmod(0o644)
    os.utime(whole)  # as a restore does
    assert 200 == (await its.ask(its.get("/"))).status
    assert 0o600 == stat.S_IMODE(whole.stat().st_mode)
    told = its.sidecar.logged.getvalue()
    assert 1 == told.count("sidecar.interception.key_exposed")
    assert "mode 0644" in told and "sidecar ca rotate" in told


async def test_a_leaf_for_another_host_would_not_be_trusted(opened: Any, tmp_path: Path) -> None:
    from sidecar.authority import read

    its = await opened(always(OK))
    stolen = read(Path(its.sidecar.settings.state_dir))
    assert stolen is not None
    for name in ("bank.test", "10.0.0.1"):
        server = stolen.leaf(name)
        client = ByHand(its.trusting(), name)
        other = _Server(server)
        with pytest.raises(ssl.SSLCertVerificationError, match=r"permitted subtree|excluded subtree"):
            other.talk_to(client)


async def test_leaves_are_kept_and_short_lived(opened: Any) -> None:
    its = await opened(always(OK))
    seen = []
    for _ in range(2):
        app = await its.secure()
        shown = app.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        seen.append(x509.load_der_x509_certificate(shown))
        assert 200 == (await app.ask(its.get())).status
    assert seen[0] == seen[1]
    assert 26 * 3600 > (seen[0].not_valid_after_utc - seen[0].not_valid_before_utc).total_seconds()


async def test_a_rotated_authority_is_used_at_once(opened: Any) -> None:
    from sidecar.authority import rotate

    its = await opened(always(OK))
    old = its.trusting()
    assert 200 == (await its.ask(its.get(), context=old)).status
    rotate(Path(its.sidecar.settings.state_dir), ["api.test"])
    assert 200 == (await its.ask(its.get(), context=its.trusting())).status
    with pytest.raises(ssl.SSLCertVerificationError):
        await its.secure(old)


async def test_an_authority_that_cannot_be_used_means_tunnels_and_a_line_in_the_log(
    opened: Any, authority: Authority
) -> None:
    its = await opened(always(OK))
    (its.ca.parent / "authority.pem").write_text("scratched")
    reply = await its.ask(its.get(), context=pinned(authority))
    assert (200, None) == (reply.status, reply.get("x-sidecar-session"))
    assert "sidecar ca rotate" in its.sidecar.logged.getvalue()


async def test_nothing_is_made_where_nothing_is_intercepted(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar(upstreams={"api": {"hosts": ["api.test"]}})
    assert not (Path(sidecar.settings.state_dir) / "ca").exists()


# ---- the end -----------------------------------------------------------------------------------------------------


async def test_a_drain_finishes_what_is_inside_and_ends_handshakes(opened: Any) -> None:
    asked = asyncio.Event()
    go_on = asyncio.Event()

    async def slow(talk: Talk) -> None:
        await talk.read_request()
        asked.set()
        await go_on.wait()
        await talk.send(OK)

    its = await opened(slow)
    app = await its.secure()
    silent = await its.connect()
    await app.send(its.get())
    await asked.wait()
    stopping = asyncio.create_task(its.sidecar.stop(grace=3))
    await asyncio.sleep(0.1)
    go_on.set()
    reply = await app.reply()
    assert (200, "close") == (reply.status, reply.get("connection"))
    await stopping
    assert await silent.closed()
    assert 0 == len(its.sidecar.proxy.handshakes)


async def _ended(app: App) -> bool:
    try:
        await asyncio.wait_for(app.reader.read(), 10)
    except ConnectionError:
        pass
    return True


class _Server:
    """The other end of a handshake, in memory."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def talk_to(self, client: ByHand) -> None:
        for _ in range(10):
            self._incoming.write(client.step())
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            client.incoming.write(self._outgoing.read())
