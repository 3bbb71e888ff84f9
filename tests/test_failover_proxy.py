"""Traffic through a parent proxy, or a pool of them: the forms it is spoken to in, and who is blamed for what."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from sidecar.policy.breaker import Snapshot
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.faults import (
    QUICK_POLICIES,
    CorporateProxy,
    ask,
    at_rest,
    field,
    last_session,
    refusing_port,
    request,
    reset_at_once,
    status,
    unanswering_port,
    until,
)
from tests.doubles.upstream import Talk, Upstream, always, answer, echo
from tests.test_tls import Authority, server_side

GET = request("GET", "/u/x")
OK = answer(b"ok")
ONCE = {"default": {"max_attempts": 1}}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "trusted")


def route(upstream: Upstream | str, *proxies: Upstream | str, **keys: Any) -> dict[str, Any]:
    """`u` through these proxies."""
    addresses = [proxy if isinstance(proxy, str) else proxy.url for proxy in proxies]
    endpoint = upstream if isinstance(upstream, str) else upstream.url
    return {"u": {"route": "/u", "endpoints": [endpoint], "egress_proxy": addresses, **keys}}


def secure(upstream: Upstream) -> str:
    return f"https://127.0.0.1:{upstream.port}"


def blamed(sidecar: Running) -> dict[str, int]:
    """Failures in the window, by endpoint and proxy."""
    now = asyncio.get_running_loop().time()
    looks: dict[str, Snapshot] = {
        name: breaker.snapshot(now) for name, breaker in sidecar.proxy.directory.configured["u"].breakers()
    }
    return {name: look.failure_count for name, look in looks.items()}


def label(upstream: Upstream | str) -> str:
    return (upstream if isinstance(upstream, str) else upstream.url).rpartition("/")[2].rpartition("@")[2]


# ---- forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [True, False], ids=["one", "a list"])
async def test_http_is_asked_for_in_absolute_form(
    start_sidecar: Starter, start_upstream: UpstreamStarter, single: bool
) -> None:
    corporate = CorporateProxy()
    upstream, proxy = await start_upstream(echo), await start_upstream(corporate)
    upstreams = route(upstream, proxy)
    if single:
        upstreams["u"]["egress_proxy"] = proxy.url
    sidecar = await start_sidecar(upstreams=upstreams, telemetry={"slow_threshold": 0.0001})
    reply = await ask(sidecar, request("POST", "/u/v1/x?q=1", "X-A: b", body=b"hi"))
    assert (200, "first_try") == (reply.status, reply.get("x-sidecar-outcome"))
    assert [f"POST http://{label(upstream)}/v1/x?q=1 HTTP/1.1"] == corporate.lines
    assert (None, label(upstream).encode()) == (
        field(corporate.heads[0], b"proxy-authorization"),
        field(corporate.heads[0], b"host"),
    )
    assert reply.body.startswith(b"POST /v1/x?q=1 HTTP/1.1\r\n")
    assert reply.body.endswith(b"\r\n\r\nhi")
    (attempt,) = (await last_session(sidecar)).attempts
    assert (label(proxy), label(upstream)) == (attempt.egress_proxy, attempt.endpoint)


async def test_a_connection_to_the_proxy_is_kept_and_used_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    corporate = CorporateProxy()
    upstream, proxy = await start_upstream(always(OK)), await start_upstream(corporate)
    sidecar = await start_sidecar(upstreams=route(upstream, proxy))
    app = await sidecar.app()
    for _ in range(3):
        assert b"ok" == (await app.ask(GET)).body
    assert (3, 1) == (len(corporate.lines), proxy.connections)


async def test_options_for_the_whole_server_keeps_its_meaning_behind_a_proxy(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    corporate = CorporateProxy()
    upstream, proxy = await start_upstream(always(OK)), await start_upstream(corporate)
    upstreams = {"u": {"hosts": ["127.0.0.1"], "egress_proxy": proxy.url}}
    sidecar = await start_sidecar(upstreams=upstreams)
    await ask(sidecar, request("OPTIONS", f"http://{label(upstream)}"))
    assert [f"OPTIONS http://{label(upstream)} HTTP/1.1"] == corporate.lines  # RFC 9112, 3.2.4


async def test_https_goes_through_a_tunnel_of_the_proxy(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    corporate = CorporateProxy()
    upstream = await start_upstream(echo, tls=server_side(authority.issue("127.0.0.1")))
    proxy = await start_upstream(corporate)
    sidecar = await start_sidecar(
        upstreams=route(secure(upstream), proxy, ca_bundle=str(authority.bundle)), telemetry={"slow_threshold": 0.0001}
    )
    app = await sidecar.app()
    for _ in range(2):
        reply = await app.ask(GET)
        assert reply.body.startswith(b"GET /x HTTP/1.1\r\n")  # inside, the path alone
    assert [f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1"] == corporate.lines
    assert b"proxy-" not in reply.body.lower()
    assert label(proxy) == (await last_session(sidecar, 2)).attempts[0].egress_proxy


async def test_the_certificate_behind_a_proxy_is_verified_and_the_endpoint_is_blamed(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream = await start_upstream(echo, tls=server_side(authority.issue("other.test")))
    proxy = await start_upstream(CorporateProxy())
    sidecar = await start_sidecar(upstreams=route(secure(upstream), proxy, ca_bundle=str(authority.bundle)))
    reply = await ask(sidecar, GET)
    assert (502, "TLS_FAILURE", "not_retryable") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
    )
    assert "certificate" in reply.json["message"]
    assert [] == upstream.requests


async def test_a_tunnel_of_the_app_goes_through_the_proxy_too(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    corporate = CorporateProxy(user="me:pass")
    upstream, proxy = await start_upstream(always(OK)), await start_upstream(corporate)
    upstreams = {"u": {"hosts": ["127.0.0.1"], "egress_proxy": f"http://me:pass@127.0.0.1:{proxy.port}"}}
    sidecar = await start_sidecar(upstreams=upstreams, egress={"connect_ports": [upstream.port]})
    app = await sidecar.app()
    reply = await app.ask(request("CONNECT", label(upstream), "Proxy-Authorization: Basic bWluZQ=="), to_head=True)
    assert 200 == reply.status
    assert b"ok" == (await app.ask(request("GET", "/inside"))).body
    assert [f"CONNECT {label(upstream)} HTTP/1.1"] == corporate.lines
    app.close()
    await until(lambda: sidecar.outcomes == {"tunnelled": 1})
    await at_rest(sidecar)


async def test_a_tunnel_the_proxy_refuses_is_retried_and_shown(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    corporate = CorporateProxy(refuse="403 Forbidden")
    upstream, proxy = await start_upstream(always(OK)), await start_upstream(corporate)
    upstreams = {"u": {"hosts": ["127.0.0.1"], "egress_proxy": proxy.url}}
    sidecar = await start_sidecar(
        upstreams=upstreams, egress={"connect_ports": [upstream.port]}, policies=QUICK_POLICIES
    )
    reply = await ask(sidecar, request("CONNECT", label(upstream)))
    assert (502, "CONNECTION_REFUSED", 4) == (reply.status, reply.json["error_code"], len(corporate.lines))
    assert f"through the egress proxy {label(proxy)}: it answered CONNECT with 403" in reply.json["message"]
    assert [label(proxy)] * 4 == [attempt.egress_proxy for attempt in (await last_session(sidecar)).attempts]


# ---- credentials -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_the_proxy_gets_its_own_credentials_and_nobody_else_does(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, tls: bool
) -> None:
    corporate = CorporateProxy(user="me:p@ss")
    context = server_side(authority.issue("127.0.0.1")) if tls else None
    upstream, proxy = await start_upstream(echo, tls=context), await start_upstream(corporate)
    address = f"http://me:p%40ss@127.0.0.1:{proxy.port}"
    keys = {"ca_bundle": str(authority.bundle)} if tls else {}
    sidecar = await start_sidecar(upstreams=route(secure(upstream) if tls else upstream, address, **keys))
    reply = await ask(
        sidecar, request("GET", "/u/x", "Proxy-Authorization: Basic of-the-app", "Authorization: Bearer t")
    )
    assert 200 == reply.status
    assert b"Basic " + base64.b64encode(b"me:p@ss") == field(corporate.heads[0], b"proxy-authorization")
    assert b"of-the-app" not in corporate.heads[0] + reply.body
    if tls:  # a proxy passes on what it gets, so only inside a tunnel can it be seen
        assert b"proxy-authorization" not in reply.body.lower()
        assert b"Authorization: Bearer t" in reply.body
        assert b"Bearer" not in corporate.heads[0]


async def test_wrong_credentials_for_the_proxy_are_told_with_what_to_do(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream = await start_upstream(echo, tls=server_side(authority.issue("127.0.0.1")))
    proxy = await start_upstream(CorporateProxy(user="me:right"))
    address = f"http://me:wr0ng@127.0.0.1:{proxy.port}"
    sidecar = await start_sidecar(
        upstreams=route(secure(upstream), address, ca_bundle=str(authority.bundle)), policies=ONCE
    )
    reply = await ask(sidecar, GET)
    assert ("CONNECTION_REFUSED", True) == (reply.json["error_code"], "407" in reply.json["message"])
    assert "egress_proxy" in reply.json["message"]
    assert "wr0ng" not in reply.body.decode() + sidecar.logged.getvalue()
    assert {f"127.0.0.1:{upstream.port}": 0, label(proxy): 1} == blamed(sidecar)


# ---- who is blamed, who is tried next ----------------------------------------------------------------------------


async def test_a_proxy_that_refuses_is_replaced_by_another_and_it_is_the_one_blamed(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    corporate = CorporateProxy()
    upstream, good = await start_upstream(always(OK)), await start_upstream(corporate)
    with refusing_port() as port:
        dead = f"http://127.0.0.1:{port}"
        sidecar = await start_sidecar(upstreams=route(upstream, dead, good), policies=QUICK_POLICIES)
        app = await sidecar.app()
        for _ in range(12):
            reply = await app.ask(request("POST", "/u/x", body=b"hi"))  # nothing was sent: safe for every method
            assert (200, b"ok") == (reply.status, reply.body)
    # Every other call begins at the dead one, until its breaker opens after five.
    assert {"recovered": 5, "first_try": 7} == sidecar.outcomes
    assert 12 == len(upstream.requests)
    states = {
        name: breaker.state(asyncio.get_running_loop().time())
        for name, breaker in sidecar.proxy.directory.configured["u"].breakers()
    }
    assert {label(upstream): "closed", label(dead): "open", label(good): "closed"} == states
    first, second = (await last_session(sidecar)).attempts
    assert (label(dead), "CONNECTION_REFUSED", label(good)) == (first.egress_proxy, first.code, second.egress_proxy)


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
async def test_a_proxy_that_cannot_be_connected_to_in_time_is_blamed_itself(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority, tls: bool
) -> None:
    context = server_side(authority.issue("127.0.0.1")) if tls else None
    upstream = await start_upstream(always(OK), tls=context)
    with unanswering_port() as port:
        proxy = f"http://127.0.0.1:{port}"
        keys = {"timeouts": {"connect": 0.1}}
        sidecar = await start_sidecar(
            upstreams=route(secure(upstream) if tls else upstream, proxy, **keys), policies=ONCE
        )
        reply = await ask(sidecar, GET)
    assert (504, "CONNECT_TIMEOUT") == (reply.status, reply.json["error_code"])
    assert f"through the egress proxy {label(proxy)}" in reply.json["message"]
    assert {f"127.0.0.1:{upstream.port}": 0, label(proxy): 1} == blamed(sidecar)


async def test_a_proxy_that_resets_before_its_tunnel_is_open_is_blamed_itself(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream = await start_upstream(always(OK), tls=server_side(authority.issue("127.0.0.1")))
    proxy = await start_upstream(reset_at_once)
    sidecar = await start_sidecar(upstreams=route(secure(upstream), proxy), policies=ONCE)
    reply = await ask(sidecar, GET)
    assert (502, "CONNECTION_RESET") == (reply.status, reply.json["error_code"])
    assert {f"127.0.0.1:{upstream.port}": 0, label(proxy): 1} == blamed(sidecar)


@pytest.mark.parametrize(
    ("line", "endpoint", "proxy_failures"),
    [
        ("502 Bad Gateway", 1, 0),
        ("504 Gateway Timeout", 1, 0),
        ("503 Service Unavailable", 0, 1),
        ("407 Proxy Authentication Required", 0, 1),
        ("500 Internal Server Error", 0, 1),
    ],
)
async def test_a_proxy_that_cannot_reach_the_endpoint_says_so_and_is_not_blamed_for_it(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    authority: Authority,
    line: str,
    endpoint: int,
    proxy_failures: int,
) -> None:
    upstream = await start_upstream(always(OK), tls=server_side(authority.issue("127.0.0.1")))
    proxy = await start_upstream(CorporateProxy(refuse=line))
    sidecar = await start_sidecar(upstreams=route(secure(upstream), proxy), policies=ONCE)
    reply = await ask(sidecar, GET)
    assert f"it answered CONNECT with {line[:3]}" in reply.json["message"]
    assert {f"127.0.0.1:{upstream.port}": endpoint, label(proxy): proxy_failures} == blamed(sidecar)


async def test_what_the_endpoint_answers_is_the_endpoints_and_a_retry_may_take_another_way(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    one, two = CorporateProxy(), CorporateProxy()
    upstream = await start_upstream(status("503 Service Unavailable"))
    proxies = [await start_upstream(one), await start_upstream(two)]
    sidecar = await start_sidecar(upstreams=route(upstream, *proxies), policies=QUICK_POLICIES)
    assert "4" == (await ask(sidecar, GET)).get("x-sidecar-attempts")
    assert {label(upstream): 1, label(proxies[0]): 0, label(proxies[1]): 0} == blamed(sidecar), "one request, one voice"
    assert (2, 2) == (len(one.lines), len(two.lines))


async def test_a_retry_prefers_another_endpoint_over_another_way_to_the_same_one(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    failing, alive = await start_upstream(status("503 Service Unavailable")), await start_upstream(always(OK))
    proxies = [await start_upstream(CorporateProxy()) for _ in range(2)]
    upstreams = route(failing, *proxies, breaker={"enabled": False})
    upstreams["u"]["endpoints"].append(alive.url)
    sidecar = await start_sidecar(upstreams=upstreams, policies=QUICK_POLICIES)
    app = await sidecar.app()
    for _ in range(8):
        reply = await app.ask(GET)
        assert 200 == reply.status
        assert int(reply.get("x-sidecar-attempts") or 0) <= 2
    assert {"first_try": 4, "recovered": 4} == sidecar.outcomes


async def test_when_every_proxy_is_open_the_call_is_refused(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(OK))
    with refusing_port() as first, refusing_port() as second:
        proxies = [f"http://127.0.0.1:{port}" for port in (first, second)]
        sidecar = await start_sidecar(
            upstreams=route(upstream, *proxies, breaker={"failure_threshold": 1}), policies=QUICK_POLICIES
        )
        codes = [(await ask(sidecar, GET)).json["error_code"] for _ in range(2)]
    assert ["CONNECTION_REFUSED", "CIRCUIT_OPEN"] == codes
    assert {label(upstream): 0, **{label(proxy): 1 for proxy in proxies}} == blamed(sidecar)
    assert {"breaker_open": 2} == sidecar.outcomes


async def test_a_probe_of_a_proxy_that_fails_gives_the_lease_of_the_endpoint_back(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(OK))
    with refusing_port() as port:
        proxy = f"http://127.0.0.1:{port}"
        breaker = {"failure_threshold": 1, "open_for": 0.05, "open_for_max": 0.05}
        sidecar = await start_sidecar(upstreams=route(upstream, proxy, breaker=breaker), policies=ONCE)
        (_, of_endpoint), (_, of_proxy) = sidecar.proxy.directory.configured["u"].breakers()
        loop = asyncio.get_running_loop()
        of_endpoint.force_open(loop.time(), "test", 0.05)
        of_proxy.force_open(loop.time(), "test", 0.05)
        await until(lambda: {"half_open"} == {b.state(loop.time()) for b in (of_endpoint, of_proxy)})
        assert "CONNECTION_REFUSED" == (await ask(sidecar, GET)).json["error_code"]
        assert ("half_open", 0) == (of_endpoint.state(loop.time()), of_endpoint.snapshot(loop.time()).probes)
    await at_rest(sidecar)


async def test_an_app_that_leaves_while_the_proxy_thinks_leaves_nothing(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    corporate = CorporateProxy(deaf=True)
    upstream = await start_upstream(always(OK), tls=server_side(authority.issue("127.0.0.1")))
    proxy = await start_upstream(corporate)
    sidecar = await start_sidecar(upstreams=route(secure(upstream), proxy))
    app = await sidecar.app()
    await app.send(GET)
    await until(lambda: len(corporate.lines) == 1)
    app.close()
    await at_rest(sidecar)
    assert {"cancelled": 1} == sidecar.outcomes
    assert {f"127.0.0.1:{upstream.port}": 0, label(proxy): 0} == blamed(sidecar)


async def test_a_proxy_that_answers_nonsense_is_not_trusted(
    start_sidecar: Starter, start_upstream: UpstreamStarter, authority: Authority
) -> None:
    upstream = await start_upstream(always(OK), tls=server_side(authority.issue("127.0.0.1")))
    for data in (b"220 smtp ready\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nearly bytes", b"x" * 20_000):

        async def script(talk: Talk, said: bytes = data) -> None:
            await talk.read_request()
            await talk.send(said)
            await talk.reader.read()

        proxy = await start_upstream(script)
        sidecar = await start_sidecar(upstreams=route(secure(upstream), proxy), policies=ONCE)
        reply = await ask(sidecar, GET)
        assert (502, f"through the egress proxy {label(proxy)}") == (
            reply.status,
            reply.json["message"].partition(":")[0] + ":" + reply.json["message"].split(":")[1],
        )
        assert {f"127.0.0.1:{upstream.port}": 0, label(proxy): 1} == blamed(sidecar)
        assert 0 == upstream.connections
