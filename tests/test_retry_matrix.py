"""Every method against every fault: how often a request really arrives, how it ends, and what the app is told.

The table is SPEC 2 to 4 written out for the shipped policies. A cell is the number of attempts and the outcome:
x exhausted, n not_retryable, r rejected, f first_try, s failed_streaming. Four attempts is `default`, five the policy
of NETWORK_TIMEOUT, three that of RATE_LIMIT_EXCEEDED.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from telemetry.record import CONNECTED, NOT_CONNECTED, PARTLY_SENT, SENT
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.app import App
from tests.doubles.faults import (
    NO_BREAKER,
    QUICK_POLICIES,
    at_rest,
    cut_off,
    ended,
    garbage,
    refusing_port,
    request,
    reset_after_request,
    reset_at_once,
    reset_in_request_body,
    seen,
    silence,
    status,
    unanswering_port,
    until,
)
from tests.doubles.upstream import Script, Talk
from tests.test_tls import Authority, demanding, server_side

METHODS = ("GET", "HEAD", "PUT", "DELETE", "POST", "PATCH", "POST+key")

#                           GET HEAD PUT DELETE POST PATCH POST+key | code, status, how far each attempt got
TABLE = {
    "refused":             ("4x  4x  4x  4x  4x  4x  4x", "CONNECTION_REFUSED", 502, NOT_CONNECTED),
    "connect timeout":     ("4x  4x  4x  4x  4x  4x  4x", "CONNECT_TIMEOUT", 504, NOT_CONNECTED),
    "reset before send":   ("4x  4x  4x  4x  4x  4x  4x", "CONNECTION_RESET", 502, CONNECTED),
    "reset mid-body":      ("4x  4x  4x  4x  1n  1n  4x", "CONNECTION_RESET", 502, PARTLY_SENT),
    "reset after send":    ("4x  4x  4x  4x  1n  1n  4x", "CONNECTION_RESET", 502, SENT),
    "no answer":           ("5x  5x  5x  5x  1n  1n  5x", "NETWORK_TIMEOUT", 504, SENT),
    "garbage":             ("4x  4x  4x  4x  1n  1n  4x", "PROTOCOL_ERROR", 502, SENT),
    "truncated, small":    ("4x  1f  4x  4x  1n  1n  4x", "CONNECTION_RESET", 502, SENT),
    "truncated, chunked":  ("1s  1f  1s  1s  1s  1s  1s", "CONNECTION_RESET", 200, SENT),
    "429":                 ("3x  3x  3x  3x  3x  3x  3x", "RATE_LIMIT_EXCEEDED", 429, SENT),
    "500":                 ("4x  4x  4x  4x  1n  1n  4x", "UPSTREAM_ERROR", 500, SENT),
    "503":                 ("4x  4x  4x  4x  1n  1n  4x", "TEMPORARY_UNAVAILABLE", 503, SENT),
    "503 + Retry-After":   ("4x  4x  4x  4x  1n  1n  4x", "TEMPORARY_UNAVAILABLE", 503, SENT),
    "401":                 ("1r  1r  1r  1r  1r  1r  1r", "INVALID_API_KEY", 401, SENT),
    "404":                 ("1r  1r  1r  1r  1r  1r  1r", "NOT_FOUND", 404, SENT),
    "422":                 ("1r  1r  1r  1r  1r  1r  1r", "VALIDATION_ERROR", 422, SENT),
}  # fmt: skip

OUTCOMES = {"x": "exhausted", "n": "not_retryable", "r": "rejected", "f": "first_try", "s": "failed_streaming"}

SCRIPTS: dict[str, Script] = {
    "reset before send": reset_at_once,
    "reset mid-body": reset_in_request_body,
    "reset after send": reset_after_request,
    "no answer": silence,
    "garbage": garbage,
    "truncated, small": cut_off(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"),
    "truncated, chunked": cut_off(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel"),
    "429": status("429 Too Many Requests"),
    "500": status("500 Internal Server Error"),
    "503": status("503 Service Unavailable"),
    "503 + Retry-After": status("503 Service Unavailable", "Retry-After: 1"),
    "401": status("401 Unauthorized"),
    "404": status("404 Not Found"),
    "422": status("422 Unprocessable Content"),
}

CEILING = 0.02
"""Where a Retry-After of a second is cut, so that the matrix need not wait for it."""


class Cell(NamedTuple):
    """What became of one request. `arrived` counts heads at the upstream, `told` is x-sidecar-attempts."""

    arrived: int
    told: int | None
    attempts: int
    phases: frozenset[int]
    status: int | None
    outcome: str
    code: str | None


def expected(fault: str) -> dict[str, Cell]:
    row, code, shown, phase = TABLE[fault]
    cells = {}
    for method, cell in zip(METHODS, row.split(), strict=True):
        attempts, outcome = int(cell[:-1]), OUTCOMES[cell[-1]]
        arrived = attempts if phase >= PARTLY_SENT else 0
        cells[method] = Cell(arrived, attempts, attempts, frozenset({phase}), shown, outcome, code)
        if outcome == "first_try":  # a HEAD has no body that could be cut off
            cells[method] = cells[method]._replace(status=200, code=None)
    return cells


@pytest.fixture
def ports() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("fault", TABLE)
async def test_each_method_is_sent_as_often_as_is_safe_and_never_more(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ports: ExitStack, fault: str
) -> None:
    heads: list[bytes] = []
    if fault == "refused":
        port = ports.enter_context(refusing_port())
    elif fault == "connect timeout":
        port = ports.enter_context(unanswering_port())
    else:
        upstream = await start_upstream(SCRIPTS[fault])
        port, heads = upstream.port, upstream.requests
    # Only what never answers is waited for in vain; all others have time, however busy the machine is.
    patience = 0.1 if fault in ("connect timeout", "no answer") else 20.0
    settings: dict[str, Any] = {"attempt_timeout": patience, "retry_after_ceiling": CEILING}
    sidecar = await start_sidecar(
        upstreams={
            "u": {
                "route": "/u",
                "endpoints": [f"http://127.0.0.1:{port}"],
                "timeouts": {"connect": 0.1 if fault == "connect timeout" else 20.0},
                **NO_BREAKER,
            }
        },
        policies={name: {**policy, **settings} for name, policy in QUICK_POLICIES.items()},
    )
    if fault == "reset before send":
        let_resets_arrive_first(sidecar)
    told = dict(zip(METHODS, await asyncio.gather(*(call(sidecar, fault, method) for method in METHODS)), strict=True))
    await at_rest(sidecar)
    sessions = {session.target: session for session in ended(sidecar)}
    found = {}
    for method in METHODS:
        session = sessions.get(f"/u/{method}")
        arrived = sum(head.split(b" ")[1] == f"/{method}".encode() for head in heads)
        number, shown = told[method]
        if session is None:  # healthy ones are not kept
            found[method] = Cell(arrived, number, number or 0, frozenset({SENT}), shown, "first_try", None)
        else:
            phases = frozenset(attempt.phase for attempt in session.attempts)
            attempts = len(session.attempts)
            found[method] = Cell(arrived, number, attempts, phases, shown, session.outcome, session.code)
            if fault == "503 + Retry-After":
                assert [CEILING] * (attempts - 1) == [attempt.delay for attempt in session.attempts[1:]]
    differing = {method: cell for method, cell in expected(fault).items() if cell != found[method]}
    assert differing == {method: found[method] for method in differing}
    assert sum(cell.arrived for cell in expected(fault).values()) == len(heads)
    assert len(METHODS) == sum(sidecar.outcomes.values())


async def call(sidecar: Running, fault: str, method: str) -> tuple[int | None, int | None]:
    """Send one request; x-sidecar-attempts and the status that the app got."""
    verb, _, key = method.partition("+")
    fields = ["Idempotency-Key: k1"] if key else []
    app: App = await sidecar.app()
    if fault == "reset mid-body":
        # Half of a body: the upstream goes before the other half is there.
        await app.send(request(verb, f"/u/{method}", *fields, "Content-Length: 20") + b"0123456789")
    else:
        body = b"" if verb in ("GET", "HEAD", "DELETE") else b"hello"
        await app.send(request(verb, f"/u/{method}", *fields, body=body))
    # The half that never comes is waited for: by the check of a key, and once more before a dead letter is given up.
    reply = await seen(app, to_head=verb == "HEAD", within=40.0)
    if reply is None:  # broken off in the head
        return None, None
    assert reply.complete == (fault != "truncated, chunked" or verb == "HEAD")
    return int(reply.get("x-sidecar-attempts") or 0), reply.status


def let_resets_arrive_first(sidecar: Running) -> None:
    """Whether a reset or our first byte is faster is a matter of luck; here the reset is."""
    dialler = sidecar.proxy.dialler
    connect = dialler.connect

    async def slowly(*args: Any, **options: Any) -> Any:
        protocol, address = await connect(*args, **options)
        await until(lambda: protocol.closed)
        return protocol, address

    dialler.connect = slowly  # type: ignore[method-assign]


UPGRADE = request("GET", "/u/ws", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x")


@pytest.mark.parametrize(
    ("fault", "attempts", "outcome"),
    [("refused", 4, "exhausted"), ("reset after send", 1, "not_retryable"), ("503", 1, "not_retryable")],
)
async def test_a_handshake_that_was_sent_is_not_sent_again_although_it_is_a_get(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ports: ExitStack, fault: str, attempts: int, outcome: str
) -> None:
    if fault == "refused":
        port = ports.enter_context(refusing_port())
    else:
        port = (await start_upstream(SCRIPTS[fault])).port
    upstream = {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"], **NO_BREAKER}
    sidecar = await start_sidecar(upstreams={"u": upstream}, policies=QUICK_POLICIES)
    reply = await (await sidecar.app()).ask(UPGRADE)
    assert (str(attempts), outcome) == (reply.get("x-sidecar-attempts"), reply.get("x-sidecar-outcome"))
    await at_rest(sidecar)


# ---- TLS ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "trusted")


def refusing_certificates(authority: Authority) -> Script:
    """TLS 1.3: the handshake is over for the client before the server says that it misses a certificate."""
    context = demanding(authority)

    async def script(talk: Talk) -> None:
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

    return script


async def cut_in_handshake(talk: Talk) -> None:
    await talk.reader.read(10)
    talk.reset()


@pytest.mark.parametrize(
    ("fault", "attempts", "outcome"),
    [
        ("handshake cut", 4, "exhausted"),
        ("certificate not accepted", 1, "not_retryable"),
        ("our certificate missing", 1, "not_retryable"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_handshake_that_was_cut_is_tried_again_a_certificate_is_not(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    authority: Authority,
    fault: str,
    attempts: int,
    outcome: str,
    method: str,
) -> None:
    if fault == "handshake cut":
        upstream = await start_upstream(cut_in_handshake)
    elif fault == "certificate not accepted":
        upstream = await start_upstream(silence, tls=server_side(authority.issue("other.test")))
    else:
        upstream = await start_upstream(refusing_certificates(authority))
    settings = {
        "route": "/u",
        "endpoints": [f"https://127.0.0.1:{upstream.port}"],
        "ca_bundle": str(authority.bundle),
        **NO_BREAKER,
    }
    sidecar = await start_sidecar(upstreams={"u": settings}, policies=QUICK_POLICIES)
    if fault == "our certificate missing":
        let_resets_arrive_first(sidecar)
    reply = await (await sidecar.app()).ask(request(method, "/u/x", body=b"hi" if method == "POST" else b""))
    assert (502, "TLS_FAILURE", str(attempts), outcome) == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    assert [] == upstream.requests
    await at_rest(sidecar)
