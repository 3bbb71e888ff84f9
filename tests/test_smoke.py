"""The shortest proof that bytes go through, in each of the ways in."""

from __future__ import annotations

from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import always, answer, echo


async def test_a_routed_request_reaches_the_upstream_without_its_prefix(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route
) -> None:
    upstream = await start_upstream(echo)
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    reply = await app.ask("GET /u/a%2Fb?x=1 HTTP/1.1\r\nHost: s\r\nX-One: 1\r\n\r\n")
    assert 200 == reply.status
    assert reply.body.startswith(f"GET /a%2Fb?x=1 HTTP/1.1\r\nHost: 127.0.0.1:{upstream.port}\r\nX-One: 1\r\n".encode())
    assert "first_try" == reply.get("x-sidecar-outcome")


async def test_an_absolute_form_request_goes_where_it_says(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer(b"hello")))
    sidecar = await start_sidecar()
    app = await sidecar.app()
    for _ in range(3):
        reply = await app.ask(f"GET {upstream.url}/x HTTP/1.1\r\nHost: wrong.test\r\n\r\n")
        assert (200, b"hello") == (reply.status, reply.body)
    assert 1 == upstream.connections
    assert {"first_try": 3} == sidecar.outcomes
