"""Base-URL routes and TLS origination: redirects lead back, streams flow as they come, nothing ever goes in clear."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest

from sidecar.location import led_back
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import Reply
from tests.doubles.authority import Authority, server_side
from tests.doubles.faults import QUICK_POLICIES
from tests.doubles.upstream import Talk, Upstream, always, answer
from tests.test_tls import resolving


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "api authority")


# ---- where Location leads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "stripped", "kept"),
    [
        ("https://api.test/v1/x?y=1#z", "/api/v1/x?y=1#z", "https://api.test/v1/x?y=1#z"),
        ("HTTPS://API.test:443/v1", "/api/v1", "HTTPS://API.test:443/v1"),
        ("http://api.test/v1", "/api/v1", "http://api.test/v1"),
        ("//api.test/v1", "/api/v1", "//api.test/v1"),
        ("https://api.test", "/api/", "https://api.test"),
        ("https://api.test?x", "/api/?x", "https://api.test?x"),
        ("https://api.test/api/v1", "/api/api/v1", "/api/v1"),
        ("https://api.test/apis", "/api/apis", "https://api.test/apis"),
        ("/v1/x", "/api/v1/x", "/v1/x"),
        ("x/y", "x/y", "x/y"),
        ("../x", "../x", "../x"),
        ("?page=2", "?page=2", "?page=2"),
        ("https://other.test/v1", "https://other.test/v1", "https://other.test/v1"),
        ("https://api.test:8443/v1", "https://api.test:8443/v1", "https://api.test:8443/v1"),
        ("https://u:p@api.test/v1", "https://u:p@api.test/v1", "https://u:p@api.test/v1"),
        ("mailto:me@api.test", "mailto:me@api.test", "mailto:me@api.test"),
        ("ftp://api.test/x", "ftp://api.test/x", "ftp://api.test/x"),
        ("", "", ""),
        ("https://", "https://", "https://"),
    ],
)
def test_a_location_of_the_same_upstream_leads_back_by_the_route(given: str, stripped: str, kept: str) -> None:
    def same(host: str, port: int) -> bool:
        return (host, port) in (("api.test", 443), ("api.test", 80))

    for strip, expected in ((True, stripped), (False, kept)):
        assert expected.encode() == led_back(given.encode(), b"/api", stripped=strip, same_upstream=same)


@pytest.mark.parametrize("path", ["//evil.test/x", "/\\evil.test/x", "/\t/evil.test/x", "///x", "/\\/x"])
@pytest.mark.parametrize("stripped", [True, False])
def test_a_path_that_could_be_read_as_another_host_leads_back_to_this_one(path: str, stripped: bool) -> None:
    given = f"https://a.test{path}".encode()
    found = led_back(given, b"", stripped=stripped, same_upstream=lambda *_: True).decode()
    assert f"/.{path}" == found
    joined = urljoin("http://s:4140/a/b", found)
    assert ("s:4140", path.replace("\t", "")) == (urlsplit(joined).netloc, joined.removeprefix("http://s:4140"))
    assert f"/api{path}".encode() == led_back(given, b"/api", stripped=True, same_upstream=lambda *_: True)


def test_a_route_for_everything_adds_nothing() -> None:
    assert b"/x" == led_back(b"https://a.test/x", b"", stripped=True, same_upstream=lambda *_: True)
    assert b"/" == led_back(b"https://a.test", b"", stripped=True, same_upstream=lambda *_: True)


def moved(location: str, *fields: str, status: str = "302 Found") -> bytes:
    return answer(b"", status, f"Location: {location}", *fields)


@pytest.mark.parametrize("status", ["201 Created", "302 Found", "308 Permanent Redirect"])
async def test_an_app_that_follows_stays_on_the_route_and_cookies_stay_as_they_are(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, status: str
) -> None:
    cookie = "Set-Cookie: a=b; Domain=127.0.0.1; Path=/v1; Secure"

    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            here = f"https://127.0.0.1:{talk.upstream.port}"
            there = head.startswith(b"GET /v1/new?x=1 ")
            await talk.send(answer(b"here") if there else moved(f"{here}/v1/new?x=1", cookie, status=status))

    upstream = await start_upstream(script, tls=server_side(authority.issue("127.0.0.1")))
    sidecar = await start_sidecar(
        upstreams={
            "api": {
                "route": "/openai",
                "endpoints": [f"https://127.0.0.1:{upstream.port}"],
                "ca_bundle": str(authority.bundle),
            }
        }
    )
    app = await sidecar.app()
    first = await app.ask("GET /openai/v1/old HTTP/1.1\r\nHost: s\r\n\r\n")
    assert (int(status[:3]), "/openai/v1/new?x=1") == (first.status, first.get("location"))
    assert cookie.partition(": ")[2] == first.get("set-cookie")
    assert b"here" == (await app.ask(f"GET {first.get('location')} HTTP/1.1\r\nHost: s\r\n\r\n")).body
    assert {b"Host: 127.0.0.1:%d" % upstream.port} == {head.split(b"\r\n")[1] for head in upstream.requests}


async def test_an_app_that_named_the_host_gets_the_location_as_it_is(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(moved("http://api.test/x")))
    sidecar = await start_sidecar(
        upstreams={"api": {"hosts": ["api.test"], "route": "/api", "endpoints": [upstream.url]}}
    )
    app = await sidecar.app()
    for target, host in (("http://api.test/api/y", "x"), ("/api/y", "api.test")):
        reply = await app.ask(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n")
        assert "http://api.test/x" == reply.get("location")
    reply = await app.ask("GET /api/y HTTP/1.1\r\nHost: s\r\n\r\n")
    assert "/api/x" == reply.get("location")


async def test_events_flow_as_they_come(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    go_on = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.read_request()
        await talk.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await talk.send(b"8\r\ndata: 1\n\r\n")
        await go_on.wait()
        await talk.send(b"8\r\ndata: 2\n\r\n0\r\n\r\n")

    upstream = await start_upstream(script, tls=server_side(authority.issue("127.0.0.1")))
    sidecar = await start_sidecar(
        upstreams={
            "api": {
                "route": "/api",
                "endpoints": [f"https://127.0.0.1:{upstream.port}"],
                "ca_bundle": str(authority.bundle),
            }
        }
    )
    app = await sidecar.app()
    reply = await app.ask("GET /api/events HTTP/1.1\r\nHost: s\r\n\r\n", to_head=True)
    assert "text/event-stream" == reply.get("content-type")
    assert b"8\r\ndata: 1\n\r\n" == await asyncio.wait_for(app.reader.readexactly(13), 10)
    go_on.set()
    assert b"8\r\ndata: 2\n\r\n0\r\n\r\n" == await asyncio.wait_for(app.reader.readexactly(18), 10)


# ---- origination -------------------------------------------------------------------------------------------------


class Sniffed:
    """`api.test` with `tls: originate`; whatever comes to its plain port is counted."""

    def __init__(self, sidecar: Running, plain: Upstream, secure: Upstream) -> None:
        self.sidecar, self.plain, self.secure = sidecar, plain, secure

    async def ask(self, url: str) -> Reply:
        return await (await self.sidecar.app()).ask(f"GET {url} HTTP/1.1\r\nHost: x\r\n\r\n")


@pytest.fixture
def sniffed(start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority) -> Any:
    async def start(script: Any, **keys: Any) -> Sniffed:
        plain = await start_upstream(always(answer(b"in clear!")))
        secure = await start_upstream(script, tls=server_side(authority.issue("api.test", "backup.test")))
        originate = {"tls": "originate", "ca_bundle": str(authority.bundle)}
        upstreams = {
            "api": {"hosts": ["api.test"], **originate, **keys.pop("api", {})},
            "backup": {"hosts": ["backup.test"], **originate},
        }
        sidecar = await start_sidecar(
            lookup=resolving(p80=plain.port, p443=secure.port), upstreams=upstreams, policies=QUICK_POLICIES, **keys
        )
        return Sniffed(sidecar, plain, secure)

    return start


async def test_an_originated_host_is_never_spoken_to_in_clear_not_on_a_retry(sniffed: Any) -> None:
    async def flaky(talk: Talk) -> None:
        await talk.read_request()
        if len(talk.upstream.requests) % 2:
            talk.reset()
        else:
            await talk.send(answer(b"over tls"))

    its = await sniffed(flaky)
    for _ in range(3):
        reply = await its.ask("http://api.test/x")
        assert (b"over tls", "recovered") == (reply.body, reply.get("x-sidecar-outcome"))
    assert (0, 6) == (its.plain.connections, its.secure.connections)


async def test_nor_on_a_redirect_that_says_http(sniffed: Any) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            await talk.send(answer(b"over tls") if b"/new" in head else moved("http://api.test/new"))

    its = await sniffed(script)
    first = await its.ask("http://api.test/old")
    assert b"over tls" == (await its.ask(first.get("location"))).body
    assert 0 == its.plain.connections


async def test_nor_on_a_fallback(sniffed: Any) -> None:
    async def script(talk: Talk) -> None:
        while True:
            head, _ = await talk.read_request()
            if b"Host: api.test" in head:
                talk.reset()
            await talk.send(answer(b"over tls"))

    breaker = {"failure_threshold": 1, "failure_ratio": 0.1}
    its = await sniffed(script, api={"fallback": "backup", "breaker": breaker})
    reply = await its.ask("http://api.test/x")
    assert (b"over tls", "backup") == (reply.body, reply.get("x-sidecar-upstream"))
    assert 0 == its.plain.connections


async def test_nor_when_tls_fails(sniffed: Any) -> None:
    its = await sniffed(always(answer(b"over tls")))
    await its.secure.stop()
    assert 502 == (await its.ask("http://api.test/x")).status
    assert 0 == its.plain.connections
