"""TLS towards upstreams: verified, under the right name, resumed, and never silently in clear."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import Reply
from tests.doubles.authority import Authority, server_side
from tests.doubles.upstream import Talk, Upstream, always, answer

ONE_ATTEMPT = True

GET = "GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "trusted")


@dataclass
class Seen:
    """What a TLS server saw of its clients."""

    names: list[str | None]
    resumed: list[bool]
    certificates: list[Any]


async def a_tls_upstream(
    start_upstream: UpstreamStarter, context: ssl.SSLContext, *, keep: bool = True
) -> tuple[Upstream, Seen]:
    seen = Seen([], [], [])

    def named(_: object, name: str | None, __: object) -> None:
        seen.names.append(name)

    context.sni_callback = named

    async def script(talk: Talk) -> None:
        tls = talk.writer.get_extra_info("ssl_object")
        seen.resumed.append(tls.session_reused)
        seen.certificates.append(tls.getpeercert())
        while True:
            await talk.read_request()
            await talk.send(answer(b"secret", "200 OK", "Connection: keep-alive" if keep else "Connection: close"))

    return await start_upstream(script, tls=context), seen


def towards(upstream: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [f"https://127.0.0.1:{upstream.port}"], **keys}}


def resolving(**ports: int) -> Callable[..., Any]:
    """Every name is this machine; `p443=…` is where port 443 really is."""

    async def lookup(host: str, port: int) -> list[Any]:
        where = ("127.0.0.1", ports.get(f"p{port}", port))
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where)]

    return lookup


async def ask(sidecar: Running, request: str = GET) -> Reply:
    return await (await sidecar.app()).ask(request)


def assert_tls_failure(reply: Reply, *words: str) -> None:
    assert (502, "TLS_FAILURE") == (reply.status, reply.json["error_code"]), reply.body
    for word in words:
        assert word in reply.json["message"].lower()


# ---- verification ------------------------------------------------------------------------------------------------


async def test_an_https_endpoint_with_its_authority_is_spoken_to(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream, _ = await a_tls_upstream(start_upstream, server_side(authority.issue("127.0.0.1")))
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    app = await sidecar.app()
    for _ in range(3):
        assert (200, b"secret") == ((reply := await app.ask(GET)).status, reply.body)
    assert 1 == upstream.connections


async def test_an_absolute_https_target_is_spoken_to_over_tls(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream, seen = await a_tls_upstream(start_upstream, server_side(authority.issue("api.test")))
    sidecar = await start_sidecar(
        lookup=resolving(), upstreams={"u": {"hosts": ["api.test"], "ca_bundle": str(authority.bundle)}}
    )
    reply = await ask(sidecar, f"GET https://api.test:{upstream.port}/x HTTP/1.1\r\nHost: api.test\r\n\r\n")
    assert (200, b"secret") == (reply.status, reply.body)
    assert ["api.test"] == seen.names
    assert upstream.requests[0].startswith(f"GET /x HTTP/1.1\r\nHost: api.test:{upstream.port}\r\n".encode())


async def test_an_untrusted_certificate_is_refused_with_a_hint(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream, _ = await a_tls_upstream(start_upstream, server_side(authority.issue("127.0.0.1")))
    sidecar = await start_sidecar(upstreams=towards(upstream))
    assert_tls_failure(await ask(sidecar), "ca_bundle", f"127.0.0.1:{upstream.port}")
    assert [] == upstream.requests


async def test_a_certificate_of_another_authority_is_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    upstream, _ = await a_tls_upstream(start_upstream, server_side(other.issue("127.0.0.1")))
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    assert_tls_failure(await ask(sidecar))
    assert [] == upstream.requests


@pytest.mark.parametrize("name", ["other.test", "127.0.0.2"])
async def test_a_certificate_for_another_name_is_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, name: str
) -> None:
    upstream, _ = await a_tls_upstream(start_upstream, server_side(authority.issue(name)))
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    assert_tls_failure(await ask(sidecar), "127.0.0.1")
    assert [] == upstream.requests


async def test_a_name_in_the_subject_alone_is_no_name(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    for only, status in ((True, 502), (False, 200)):
        certificate = authority.issue("localhost", common_name_only=only)
        upstream, _ = await a_tls_upstream(start_upstream, server_side(certificate))
        endpoints = [f"https://localhost:{upstream.port}"]
        sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle), endpoints=endpoints))
        reply = await ask(sidecar)
        assert status == reply.status
        if only:
            assert_tls_failure(reply, "subjectaltname", "in its subject alone does not count")


async def test_an_expired_certificate_is_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream, _ = await a_tls_upstream(start_upstream, server_side(authority.issue("127.0.0.1", days=-1)))
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    assert_tls_failure(await ask(sidecar), "expired")


async def test_verification_can_be_switched_off_for_one_upstream_and_that_is_said(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream, _ = await a_tls_upstream(start_upstream, server_side(authority.issue("other.test")))
    strict = {"route": "/strict", "endpoints": [f"https://127.0.0.1:{upstream.port}"]}
    sidecar = await start_sidecar(upstreams={**towards(upstream, insecure_skip_verify=True), "strict": strict})
    assert (200, b"secret") == ((reply := await ask(sidecar)).status, reply.body)
    assert_tls_failure(await ask(sidecar, "GET /strict/ HTTP/1.1\r\nHost: s\r\n\r\n"))
    warnings = [line for line in sidecar.logged.getvalue().splitlines() if "sidecar.tls.unverified" in line]
    assert 1 == len(warnings)
    assert '"severity_text":"WARN"' in warnings[0]
    assert '"upstream":"u"' in warnings[0]
    shown = sidecar.proxy.metrics.registry.get_sample_value
    assert 1 == shown("sidecar_tls_verification_disabled", {"upstream": "u"})
    assert not shown("sidecar_tls_verification_disabled", {"upstream": "strict"})


# ---- mutual ------------------------------------------------------------------------------------------------------


def demanding(authority: Authority, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = server_side(authority.issue("127.0.0.1"), newest=newest)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.bundle)
    return context


async def test_the_client_certificate_is_shown_to_an_upstream_that_asks(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream, seen = await a_tls_upstream(start_upstream, demanding(authority))
    keys = {"ca_bundle": str(authority.bundle), "client_cert": str(authority.issue("this-app"))}
    sidecar = await start_sidecar(upstreams=towards(upstream, **keys))
    assert 200 == (await ask(sidecar)).status
    assert [((("commonName", "this-app"),),)] == [certificate["subject"] for certificate in seen.certificates]


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_an_upstream_that_misses_a_client_certificate_is_a_tls_failure(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, newest: ssl.TLSVersion
) -> None:
    context = demanding(authority, newest)

    async def script(talk: Talk) -> None:
        """A handshake by hand: event loops drop the alert that says why, servers in the wild send it."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await talk.send(outgoing.read())
                incoming.write(await talk.reader.read(65_536))
            except ssl.SSLError:
                await talk.send(outgoing.read())
                await talk.reader.read()
                return

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    assert_tls_failure(await ask(sidecar), "alert")


# ---- sessions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_the_session_is_resumed_by_the_next_connection(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, newest: ssl.TLSVersion
) -> None:
    context = server_side(authority.issue("127.0.0.1"), newest=newest)
    upstream, seen = await a_tls_upstream(start_upstream, context)
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    app = await sidecar.app()
    for _ in range(3):
        assert 200 == (await app.ask(GET)).status
        sidecar.proxy.directory.sweep(asyncio.get_running_loop().time() + 3600)  # the next one dials
    assert [False, True, True] == seen.resumed


async def test_a_session_is_resumed_with_an_upstream_that_closes_after_each_answer(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    context = server_side(authority.issue("127.0.0.1"))
    upstream, seen = await a_tls_upstream(start_upstream, context, keep=False)
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    app = await sidecar.app()
    for _ in range(3):
        assert 200 == (await app.ask(GET)).status
    assert [False, True, True] == seen.resumed


async def plain_http(talk: Talk) -> None:
    """What an HTTP server without TLS answers to the beginning of a handshake."""
    await talk.reader.read(10)
    await talk.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await talk.reader.read()


# ---- origination -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_line",
    ["GET http://api.test/x HTTP/1.1", "GET /x HTTP/1.1"],
    ids=["absolute form", "by Host"],
)
async def test_tls_origination_sends_plain_requests_as_https_and_never_in_clear(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, request_line: str
) -> None:
    secure, seen = await a_tls_upstream(start_upstream, server_side(authority.issue("api.test")))
    plain = await start_upstream(always(answer(b"in clear")))
    sidecar = await start_sidecar(
        lookup=resolving(p443=secure.port, p80=plain.port),
        upstreams={"u": {"hosts": ["api.test"], "tls": "originate", "ca_bundle": str(authority.bundle)}},
    )
    reply = await ask(sidecar, f"{request_line}\r\nHost: api.test\r\n\r\n")
    assert (200, b"secret") == (reply.status, reply.body)
    assert ["api.test"] == seen.names
    assert secure.requests[0].startswith(b"GET /x HTTP/1.1\r\nHost: api.test\r\n")
    assert 0 == plain.connections


async def test_tls_origination_does_not_fall_back_to_clear_when_tls_fails(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    plain = await start_upstream(plain_http)
    sidecar = await start_sidecar(
        lookup=resolving(p443=plain.port, p80=plain.port),
        upstreams={"u": {"hosts": ["api.test"], "tls": "originate", "ca_bundle": str(authority.bundle)}},
    )
    assert_tls_failure(await ask(sidecar, "GET http://api.test/x HTTP/1.1\r\nHost: api.test\r\n\r\n"))
    assert 1 == plain.connections


async def test_tls_origination_applies_to_plain_endpoints_under_the_name_the_app_used(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream, seen = await a_tls_upstream(start_upstream, server_side(authority.issue("api.test")))
    keys = {"endpoints": [f"http://127.0.0.1:{upstream.port}"], "tls": "originate", "ca_bundle": str(authority.bundle)}
    sidecar = await start_sidecar(upstreams={"u": {"hosts": ["api.test"], **keys}})
    assert 200 == (await ask(sidecar, "GET http://api.test/x HTTP/1.1\r\nHost: api.test\r\n\r\n")).status
    assert ["api.test"] == seen.names
    assert b"\r\nHost: api.test\r\n" in upstream.requests[0]


# ---- broken handshakes -------------------------------------------------------------------------------------------


async def test_a_plain_http_server_behind_https_is_a_tls_failure(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream = await start_upstream(plain_http)
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    assert_tls_failure(await ask(sidecar), f"127.0.0.1:{upstream.port}")
    assert {"not_retryable": 1} == sidecar.outcomes


@pytest.mark.parametrize("end", [Talk.close, Talk.reset], ids=["closed", "reset"])
async def test_a_handshake_that_is_cut_is_a_tls_failure(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, end: Callable[[Talk], None]
) -> None:
    async def script(talk: Talk) -> None:
        await talk.reader.read(10)
        end(talk)

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    assert_tls_failure(await ask(sidecar))


async def test_a_handshake_that_is_never_answered_is_a_connect_timeout(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    async def script(talk: Talk) -> None:
        await talk.reader.read()

    upstream = await start_upstream(script)
    sidecar = await start_sidecar(upstreams=towards(upstream, timeouts={"connect": 0.3}))
    reply = await ask(sidecar)
    assert (504, "CONNECT_TIMEOUT") == (reply.status, reply.json["error_code"])
    assert "TLS" in reply.json["message"]


async def test_a_cut_without_close_notify_does_not_look_like_the_end_of_the_body(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    """Where only the end of the connection ends the body, anyone on the way could end it."""

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")
        await asyncio.sleep(0.05)
        talk.writer.transport.abort()

    upstream = await start_upstream(script, tls=server_side(authority.issue("127.0.0.1")))
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    reply = await ask(sidecar)
    assert (200, False) == (reply.status, reply.complete)
    assert {"failed_streaming": 1} == sidecar.outcomes


async def test_a_body_that_ends_with_close_notify_is_complete(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        talk.close()

    upstream = await start_upstream(script, tls=server_side(authority.issue("127.0.0.1")))
    sidecar = await start_sidecar(upstreams=towards(upstream, ca_bundle=str(authority.bundle)))
    reply = await ask(sidecar)
    assert (200, b"all of it", True) == (reply.status, reply.body, reply.complete)


# ---- reloads -----------------------------------------------------------------------------------------------------


async def test_tls_connections_survive_a_reload_until_the_authority_is_another(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, tmp_path: Path
) -> None:
    upstream, _ = await a_tls_upstream(start_upstream, server_side(authority.issue("127.0.0.1")))
    bundle = tmp_path / "bundle.pem"
    shutil.copy(authority.bundle, bundle)
    file = tmp_path / "sidecar.yaml"
    sidecar = await start_sidecar(file=file, upstreams=towards(upstream, ca_bundle=str(bundle)))
    assert 200 == (await ask(sidecar)).status
    await sidecar.reload("a test")
    assert 200 == (await ask(sidecar)).status
    assert 1 == upstream.connections
    renewed = bundle.with_suffix(".new")
    shutil.copy(authority.bundle, renewed)
    os.replace(renewed, bundle)
    await sidecar.reload("a test")
    assert 200 == (await ask(sidecar)).status
    assert 2 == upstream.connections  # what was verified by the old file is not used on
