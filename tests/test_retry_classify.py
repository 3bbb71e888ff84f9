"""What an answer or a failure is called decides what becomes of it: rules, error bodies, headers, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Starter, UpstreamStarter
from tests.doubles.faults import (
    NO_BREAKER,
    QUICK_POLICIES,
    ask,
    ended,
    in_turn,
    last_session,
    refusing_port,
    request,
    reset_after_request,
    status,
)
from tests.doubles.upstream import Upstream, always, answer

GET = request("GET", "/u/x")
JSON = "Content-Type: application/json"
OK = answer(b'{"ok":true}', "200 OK", JSON)


def route(upstream: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER, **keys}}


def told(document: Any, line: str = "200 OK", *fields: str) -> bytes:
    return answer(json.dumps(document).encode(), line, JSON, *fields)


OVERLOADED = b'{"error": {"type": "overloaded"}}'
OVERLOADED_IN_A_200 = [{"when": {"status": "2xx", "json": {"error.type": "overloaded"}}, "code": "SERVICE_OVERLOADED"}]


# ---- rules -------------------------------------------------------------------------------------------------------


async def test_an_error_in_a_200_body_is_retried_and_the_good_answer_passed_on(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(in_turn(told({"error": {"type": "overloaded"}}), OK))
    sidecar = await start_sidecar(upstreams=route(upstream, rules=OVERLOADED_IN_A_200), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert (200, {"ok": True}, "2", "recovered") == (
        reply.status,
        reply.json,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    first, second = (await last_session(sidecar)).attempts
    assert ("SERVICE_OVERLOADED", 200, None) == (first.code, first.status, second.code)


async def test_an_error_in_a_200_body_that_stays_is_passed_on_as_it_is_and_counts_as_a_failure(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(told({"error": {"type": "overloaded"}})))
    keys = {"rules": OVERLOADED_IN_A_200, "breaker": {"failure_threshold": 1, "min_volume": 1000}}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert (200, "1", "breaker_open") == (reply.status, reply.get("x-sidecar-attempts"), reply.get("x-sidecar-outcome"))
    assert {"error": {"type": "overloaded"}} == reply.json
    assert "CIRCUIT_OPEN" == (await ask(sidecar, GET)).json["error_code"]  # a 200 may speak against an endpoint too


async def test_a_post_answered_with_an_error_in_a_200_may_have_been_executed(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(told({"error": {"type": "overloaded"}})))
    sidecar = await start_sidecar(upstreams=route(upstream, rules=OVERLOADED_IN_A_200), policies=QUICK_POLICIES)
    reply = await ask(sidecar, request("POST", "/u/x", body=b"hi"))
    assert (200, "rejected", 1) == (reply.status, reply.get("x-sidecar-outcome"), len(upstream.requests))


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n%b\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
        % (JSON.encode(), len(OVERLOADED), OVERLOADED),
        told({"error": {"type": "overloaded"}, "padding": "x" * 70_000}),
        told({"error": {"type": ["overloaded"]}}),
        told({"error": "overloaded"}),
        answer(b'{"error": {"type": "overloaded"', "200 OK", JSON),
        answer(b"[" * 5000, "200 OK", JSON),
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ],
    ids=["chunked", "large", "list", "elsewhere", "broken JSON", "deep JSON", "no body"],
)
async def test_a_body_that_is_not_there_whole_or_says_something_else_is_a_success(
    start_sidecar: Starter, start_upstream: UpstreamStarter, data: bytes
) -> None:
    upstream = await start_upstream(always(data))
    sidecar = await start_sidecar(upstreams=route(upstream, rules=OVERLOADED_IN_A_200), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert (True, "1", "first_try") == (
        reply.complete,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )


async def test_rules_of_the_upstream_go_before_the_global_ones_and_the_first_match_wins(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("400 Bad Request", "X-Why: Quota", "X-Other: 1"))
    own = [
        {"when": {"status": 400, "header": {"x-why": "something else"}}, "code": "CONTENT_POLICY"},
        {"when": {"status": [400, 418], "header": {"x-why": "quota", "x-other": "*"}}, "code": "QUOTA_EXCEEDED"},
        {"when": {"status": "4xx"}, "code": "DUPLICATE_RECORD"},
    ]
    everywhere = [{"when": {"status": 400}, "code": "BUSINESS_RULE_VIOLATION"}]
    sidecar = await start_sidecar(upstreams=route(upstream, rules=own), rules=everywhere, policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    session = await last_session(sidecar)
    assert ("QUOTA_EXCEEDED", 400) == (session.code, reply.status)
    assert len(session.attempts) == len(upstream.requests) > 1  # a 400 by status, but one that passes by its name


async def test_a_global_rule_holds_where_the_upstream_has_none(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("500 Internal Server Error", body=b'{"cause": "db"}'))
    everywhere = [{"when": {"status": 500, "json": {"cause": "db"}}, "code": "DATABASE_CONNECTION_ERROR"}]
    sidecar = await start_sidecar(upstreams=route(upstream), rules=everywhere, policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    session = await last_session(sidecar)
    assert ("DATABASE_CONNECTION_ERROR", "3") == (session.code, reply.get("x-sidecar-attempts"))
    assert "DATABASE_CONNECTION_ERROR" == session.attempts[1].policy_id


async def test_a_rule_may_call_a_failure_without_an_answer_something_else(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(reset_after_request)
    rules = [{"when": {"exception": ["CONNECTION_RESET", "NETWORK_TIMEOUT"]}, "code": "CONTENT_POLICY"}]
    sidecar = await start_sidecar(upstreams=route(upstream, rules=rules), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert ("CONTENT_POLICY", "not_retryable", 1) == (
        reply.json["error_code"],
        reply.get("x-sidecar-outcome"),
        len(upstream.requests),
    )


async def test_a_code_of_the_users_own_is_retried_as_it_says(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    with refusing_port() as port:
        codes = {
            "WAREHOUSE_ASLEEP": {
                "category": "TRANSIENT",
                "retry": "retryable",
                "description": "It sleeps.",
                "status": 503,
            }
        }
        rules = [{"when": {"exception": "CONNECTION_REFUSED"}, "code": "WAREHOUSE_ASLEEP"}]
        upstream = {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"], "rules": rules, **NO_BREAKER}
        sidecar = await start_sidecar(upstreams={"u": upstream}, error_codes=codes, policies=QUICK_POLICIES)
        reply = await ask(sidecar, request("POST", "/u/x", body=b"hi"))
    assert (503, "WAREHOUSE_ASLEEP", 4) == (
        reply.status,
        reply.json["error_code"],
        reply.json["details"]["attempts"],
    )


# ---- error bodies understood without a rule ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "document", "kind", "code", "attempts"),
    [
        ("400 Bad Request", {"error_code": "SERVICE_OVERLOADED"}, JSON, "SERVICE_OVERLOADED", 4),
        ("400 Bad Request", {"error_code": "SLOT_CONFLICT"}, JSON, "SLOT_CONFLICT", 1),
        ("500 Internal Server Error", {"error_code": "DUPLICATE_RECORD"}, JSON, "DUPLICATE_RECORD", 1),
        ("500 Internal Server Error", {"error_code": "NO_SUCH_CODE"}, JSON, "UPSTREAM_ERROR", 4),
        ("500 Internal Server Error", {"error_code": 7}, JSON, "UPSTREAM_ERROR", 4),
        (
            "503 Service Unavailable",
            {"error_code": "INVALID_API_KEY"},
            "Content-Type: application/problem+json; charset=utf-8",
            "INVALID_API_KEY",
            1,
        ),
        ("503 Service Unavailable", {"error_code": "INVALID_API_KEY"}, "Content-Type: text/plain", "TEMPORARY_UNAVAILABLE", 4),
    ],
)  # fmt: skip
async def test_an_error_code_of_the_registry_in_an_error_body_wins(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    line: str,
    document: dict[str, Any],
    kind: str,
    code: str,
    attempts: int,
) -> None:
    upstream = await start_upstream(always(answer(json.dumps(document).encode(), line, kind)))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert (int(line[:3]), document) == (reply.status, reply.json)  # passed on as it is
    session = await last_session(sidecar)
    assert (code, attempts) == (session.code, len(session.attempts))


async def test_an_error_body_that_is_too_large_to_complete_is_judged_by_its_status(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    body = json.dumps({"error_code": "DUPLICATE_RECORD", "padding": "x" * 70_000}).encode()
    upstream = await start_upstream(always(answer(body, "503 Service Unavailable", JSON)))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert (body, "4") == (reply.body, reply.get("x-sidecar-attempts"))
    assert "TEMPORARY_UNAVAILABLE" == (await last_session(sidecar)).code


@pytest.mark.parametrize(
    ("line", "fields", "code"),
    [
        ("503 Service Unavailable", ["x-envoy-overloaded: true"], "SERVICE_OVERLOADED"),
        ("503 Service Unavailable", ["x-envoy-overloaded: false"], "TEMPORARY_UNAVAILABLE"),
        ("529 Site is overloaded", [], "SERVICE_OVERLOADED"),
        ("502 Bad Gateway", [], "BAD_GATEWAY"),
        ("504 Gateway Timeout", [], "EXTERNAL_SERVICE_TIMEOUT"),
        ("507 Insufficient Storage", [], "UPSTREAM_ERROR"),
        ("408 Request Timeout", [], "EXTERNAL_SERVICE_TIMEOUT"),
    ],
)
async def test_a_passing_status_is_named_and_retried(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str, fields: list[str], code: str
) -> None:
    upstream = await start_upstream(status(line, *fields))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    await ask(sidecar, GET)
    await ask(sidecar, request("POST", "/u/x", body=b"hi"))
    got, posted = ended(sidecar)
    assert (code, 4, "exhausted") == (got.code, len(got.attempts), got.outcome)
    assert (code, 1, "not_retryable") == (posted.code, len(posted.attempts), posted.outcome)


@pytest.mark.parametrize(
    ("fields", "attempts", "outcome"),
    [([], 1, "rejected"), (["Idempotency-Key: k"], 4, "exhausted")],
    ids=["plain", "keyed"],
)
async def test_a_conflict_is_retried_only_with_a_key(
    start_sidecar: Starter, start_upstream: UpstreamStarter, fields: list[str], attempts: int, outcome: str
) -> None:
    upstream = await start_upstream(status("409 Conflict"))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    for method in ("POST", "PUT"):
        upstream.requests.clear()
        reply = await ask(sidecar, request(method, "/u/x", *fields, body=b"hi"))
        assert (attempts, outcome) == (len(upstream.requests), reply.get("x-sidecar-outcome"))


# ---- what will not change ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [("501 Not Implemented", "NOT_IMPLEMENTED"), ("505 HTTP Version Not Supported", "VERSION_NOT_SUPPORTED")],
)
async def test_what_an_upstream_will_never_do_is_asked_once_and_is_not_held_against_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str, code: str
) -> None:
    upstream = await start_upstream(always(answer(b"no", line)))
    breaker = {"breaker": {"failure_threshold": 1, "min_volume": 1000}}
    sidecar = await start_sidecar(upstreams=route(upstream, **breaker), policies=QUICK_POLICIES)
    for asked in (1, 2, 3):
        reply = await ask(sidecar, GET)
        assert (int(line[:3]), b"no", "1", "rejected") == (
            reply.status,
            reply.body,
            reply.get("x-sidecar-attempts"),
            reply.get("x-sidecar-outcome"),
        )
        assert asked == len(upstream.requests)
    assert code == (await last_session(sidecar)).code
