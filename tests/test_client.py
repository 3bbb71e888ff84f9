"""The client's side: real libraries, a real sidecar, and answers nobody expects."""

from __future__ import annotations

import ast
import asyncio
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import requests

from config.errors import registry
from sidecar.client import SidecarError
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.faults import NO_BREAKER, QUICK_POLICIES, in_turn, refusing_port, reset_after_request, status
from tests.doubles.upstream import always, answer

Ask = Callable[..., Any]


# ---- three libraries ---------------------------------------------------------------------------------------------


async def with_requests(url: str, method: str = "GET", **options: Any) -> SidecarError:
    def call() -> SidecarError:
        with requests.Session() as session:
            session.trust_env = False
            return SidecarError.from_response(session.request(method, url, timeout=10, **options))

    return await asyncio.to_thread(call)


async def with_httpx(url: str, method: str = "GET", **options: Any) -> SidecarError:
    async with httpx.AsyncClient(trust_env=False) as client:
        return SidecarError.from_response(await client.request(method, url, **options))


async def with_httpx_sync(url: str, method: str = "GET", **options: Any) -> SidecarError:
    def call() -> SidecarError:
        with httpx.Client(trust_env=False) as client:
            return SidecarError.from_response(client.request(method, url, **options))

    return await asyncio.to_thread(call)


async def with_httpx_stream(url: str, method: str = "GET", **options: Any) -> SidecarError:
    async with httpx.AsyncClient(trust_env=False) as client, client.stream(method, url, **options) as response:
        return await SidecarError.from_async_response(response)


async def with_aiohttp(url: str, method: str = "GET", **options: Any) -> SidecarError:
    async with aiohttp.ClientSession() as session, session.request(method, url, **options) as response:
        return await SidecarError.from_async_response(response)


LIBRARIES = [with_requests, with_httpx, with_httpx_sync, with_httpx_stream, with_aiohttp]
every_library = pytest.mark.parametrize("ask", LIBRARIES, ids=lambda ask: ask.__name__.removeprefix("with_"))


def base(sidecar: Running) -> str:
    return f"http://{sidecar.address[0]}:{sidecar.address[1]}"


@every_library
async def test_a_failure_is_told_with_everything_the_sidecar_knows(start_sidecar: Starter, ask: Ask) -> None:
    with refusing_port() as port:
        sidecar = await start_sidecar(
            upstreams={"u": {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"], **NO_BREAKER}},
            policies=QUICK_POLICIES,
        )
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        error = await ask(f"{base(sidecar)}/u/x", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    assert isinstance(error, Exception)
    assert (502, "CONNECTION_REFUSED", True, True, None) == (
        error.status,
        error.code,
        error.retryable,
        error.by_sidecar,
        error.retry_after,
    )
    assert ("u", 4, "exhausted", None, trace) == (
        error.upstream,
        error.attempts,
        error.outcome,
        error.dlq_id,
        error.trace_id,
    )
    assert ("attempts", 4) == (error.details["reason"], error.details["attempts"])
    assert f"127.0.0.1:{port}" in error.message
    assert str(error).startswith("CONNECTION_REFUSED: ")
    assert str(error).endswith(f"(request {error.request_id})")
    assert error.documentation_url is not None and error.documentation_url.endswith("/errors/CONNECTION_REFUSED")
    (session,) = sidecar.proxy.signals.sessions.page().items
    assert session.session_id.decode() == error.request_id


@every_library
async def test_an_open_breaker_says_when_to_come_back(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ask: Ask
) -> None:
    upstream = await start_upstream(status("503 Service Unavailable"))
    breaker = {"failure_threshold": 1, "open_for": 40.0}
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "breaker": breaker}}, policies=QUICK_POLICIES
    )
    passed_on = await ask(f"{base(sidecar)}/u/x")
    assert ("TEMPORARY_UNAVAILABLE", False, False, True, "breaker_open") == (
        passed_on.code,
        passed_on.shaped,
        passed_on.by_sidecar,
        passed_on.retryable,
        passed_on.outcome,
    )
    error = await ask(f"{base(sidecar)}/u/x")
    assert ("CIRCUIT_OPEN", True, 0) == (error.code, error.retryable, error.attempts)
    assert 38 <= error.retry_after <= 40


@every_library
async def test_a_request_that_may_have_been_executed_is_not_called_retryable(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ask: Ask
) -> None:
    upstream = await start_upstream(reset_after_request)
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    error = await ask(f"{base(sidecar)}/u/x", "POST", data={"a": "b"})
    assert ("CONNECTION_RESET", "not_retryable", False) == (error.code, error.outcome, error.retryable)


@every_library
async def test_a_bad_header_is_named_in_the_details(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ask: Ask
) -> None:
    upstream = await start_upstream(always(answer(b"ok")))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    error = await ask(f"{base(sidecar)}/u/x", headers={"x-sidecar-max-attempts": "many"})
    assert (400, "VALIDATION_ERROR", False) == (error.status, error.code, error.retryable)
    assert ["x-sidecar-max-attempts"] == [one["field"] for one in error.details["errors"]]


@every_library
async def test_an_error_of_the_upstream_in_the_same_shape_is_read_but_not_taken_for_ours(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ask: Ask
) -> None:
    body = b'{"error_code": "DUPLICATE_RECORD", "message": "exists", "request_id": "theirs", "details": {"id": 7}}'
    upstream = await start_upstream(always(answer(body, "409 Conflict", "Content-Type: application/json")))
    sidecar = await start_sidecar(upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}})
    error = await ask(f"{base(sidecar)}/u/x")
    assert ("DUPLICATE_RECORD", "exists", {"id": 7}, "theirs", False, False, "rejected") == (
        error.code,
        error.message,
        error.details,
        error.request_id,
        error.by_sidecar,
        error.retryable,
        error.outcome,
    )


@every_library
async def test_an_error_of_the_upstream_keeps_its_own_words_beside_our_code(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ask: Ask
) -> None:
    body = b'{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}'
    busy = answer(body, "529 Site is overloaded", "x-sidecar-error-code: FORGED")
    upstream = await start_upstream(always(busy))
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER}}, policies=QUICK_POLICIES
    )
    error = await ask(f"{base(sidecar)}/u/x")
    assert (529, "SERVICE_OVERLOADED", "Overloaded", body, False) == (
        error.status,
        error.code,
        error.message,
        error.body,
        error.by_sidecar,
    )
    assert "overloaded_error" == error.document["error"]["type"]
    assert (error.code, error.body, error.message) == (
        (again := pickle.loads(pickle.dumps(error))).code,
        again.body,
        again.message,
    )


async def test_only_what_failed_has_an_error_code(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(in_turn(answer(b"", "503 Service Unavailable"), answer(b"ok")))
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}}, policies=QUICK_POLICIES
    )
    app = await sidecar.app()
    for outcome in ("recovered", "first_try"):
        reply = await app.ask("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")
        assert (200, outcome, None) == (reply.status, reply.get("x-sidecar-outcome"), reply.get("x-sidecar-error-code"))


@every_library
async def test_an_error_page_of_the_upstream_still_names_the_session(
    start_sidecar: Starter, start_upstream: UpstreamStarter, ask: Ask
) -> None:
    upstream = await start_upstream(status("429 Too Many Requests", "Retry-After: 7", body=b"<html>slow down</html>"))
    sidecar = await start_sidecar(
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}},
        policies={"RATE_LIMIT_EXCEEDED": {"max_attempts": 1}},
    )
    error = await ask(f"{base(sidecar)}/u/x")
    assert ("RATE_LIMIT_EXCEEDED", 7.0, True, {}, 1) == (
        error.code,
        error.retry_after,
        error.retryable,
        error.details,
        error.attempts,
    )
    (session,) = sidecar.proxy.signals.sessions.page().items
    assert session.session_id.decode() == error.request_id


async def test_an_answer_that_was_not_read_is_known_by_its_head(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        client.stream("GET", f"{base(sidecar)}/nowhere") as response,
    ):
        error = SidecarError.from_response(response)
    assert ("NO_ROUTE", "denied", False) == (error.code, error.outcome, error.retryable)
    assert error.request_id


async def test_an_answer_of_aiohttp_needs_the_asynchronous_way(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    async with aiohttp.ClientSession() as session, session.get(f"{base(sidecar)}/nowhere") as response:
        with pytest.raises(TypeError, match=r"await SidecarError\.from_async_response"):
            SidecarError.from_response(response)  # type: ignore[arg-type]
        assert "NO_ROUTE" == (await SidecarError.from_async_response(response)).code


async def test_a_released_answer_of_aiohttp_is_known_by_its_head(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    async with aiohttp.ClientSession() as session, session.get(f"{base(sidecar)}/nowhere") as response:
        response.close()
        assert "NO_ROUTE" == (await SidecarError.from_async_response(response)).code


# ---- answers nobody expects --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"error_code": 7}',
        b'{"error_code": null, "message": "m", "details": 1}',
        b'{"error_code": "X", "pad": "' + b"x" * 1_100_000 + b'"}',
    ],
    ids=["empty", "null", "list", "text", "broken", "not UTF-8", "deep", "number", "nothing", "huge"],
)
def test_whatever_the_body_is_the_result_is_an_error_with_a_code(body: bytes) -> None:
    error = SidecarError(502, {}, body)
    assert ("HTTP_502", {}, True) == (error.code, error.details, error.retryable)
    assert "HTTP_502" in str(error)


@pytest.mark.parametrize(
    ("said", "headers", "seconds"),
    [
        ("12", {}, 12.0),
        ("0.5", {}, 0.5),
        ("null", {"Retry-After": "3"}, 3.0),
        ("true", {"retry-after": "3"}, 3.0),
        ("-1", {"Retry-After": "3"}, 3.0),
        ("1e400", {}, None),
        ("null", {"RETRY-AFTER": "Sun, 06 Nov 1994 08:49:47 GMT", "Date": "Sun, 06 Nov 1994 08:49:37 GMT"}, 10.0),
        ("null", {"Retry-After": "Sun, 06 Nov 1994 08:49:27 GMT", "Date": "Sun, 06 Nov 1994 08:49:37 GMT"}, 0.0),
        ("null", {"Retry-After": "Sun, 06 Nov 1994 08:49:47 GMT"}, None),
        ("null", {"Retry-After": "soon", "Date": "Sun, 06 Nov 1994 08:49:37 GMT"}, None),
        ("null", {"Retry-After": "-5"}, None),
        ("null", {"Retry-After": "9" * 30}, None),
        ("null", {}, None),
    ],
)
def test_when_to_come_back_is_read_from_body_and_header(
    said: str, headers: dict[str, str], seconds: float | None
) -> None:
    body = f'{{"error_code": "OVERLOADED", "retry_after": {said}}}'.encode()
    assert seconds == SidecarError(503, headers, body).retry_after


@pytest.mark.parametrize("attempts", ["", "x", "-1", "9" * 20, "²"])
def test_a_count_that_is_none_is_none(attempts: str) -> None:
    assert SidecarError(503, {"x-sidecar-attempts": attempts}).attempts is None


def test_what_is_retryable_is_what_the_registry_calls_transient() -> None:
    def called(code: str, retry_after: str) -> bool:
        body = f'{{"error_code": "{code}", "retry_after": {retry_after}}}'.encode()
        return SidecarError(503, {}, body).retryable

    transient = {code for code, entry in registry().items() if entry.category == "TRANSIENT"} - {"CLIENT_DISCONNECTED"}
    conditional = {code for code in transient if registry()[code].retry == "conditional"}
    assert transient - conditional == {code for code in registry() if called(code, "null")}
    assert transient == {code for code in registry() if called(code, "5")}


def test_an_error_survives_the_way_between_processes() -> None:
    headers = {"X-Sidecar-Session": "s1", "X-Sidecar-Attempts": "3", "Set-Cookie": "secret"}
    body = b'{"error_code": "CIRCUIT_OPEN", "message": "m", "request_id": "s1", "retry_after": 4}'
    error = SidecarError(503, headers, body)
    stored = pickle.dumps(error)
    again = pickle.loads(stored)
    assert (error.code, str(error), 3, 4.0, True) == (
        again.code,
        str(again),
        again.attempts,
        again.retry_after,
        again.by_sidecar,
    )
    assert b"secret" not in stored


def test_the_file_may_be_copied_it_needs_nothing_but_the_standard_library() -> None:
    source = Path(__file__).resolve().parent.parent / "sidecar" / "client.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert set() == {name for name in imported if name and name.split(".")[0] not in sys.stdlib_module_names}
