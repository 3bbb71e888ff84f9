"""Who decides how often a request is sent: policies, mappings, headers of the request, budgets, the kill switch."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.faults import (
    NO_BREAKER,
    QUICK_POLICIES,
    TINY,
    ask,
    at_rest,
    drop_idle,
    ended,
    in_turn,
    last_session,
    refusing_port,
    request,
    reset_after_request,
    silence,
    status,
)
from tests.doubles.upstream import Upstream, always, answer, echo

OK = answer(b"ok")
DOWN = status("503 Service Unavailable")
GET = request("GET", "/u/x")


def route(upstream: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER, **keys}}


def sample(sidecar: Running, name: str, **labels: str) -> float:
    return sidecar.proxy.metrics.registry.get_sample_value(name, {"upstream": "u", **labels}) or 0.0


# ---- which policy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "attempts", "policy"),
    [
        ("429 Too Many Requests", 3, "RATE_LIMIT_EXCEEDED"),
        ("503 Service Unavailable", 4, "default"),
        ("504 Gateway Timeout", 4, "default"),
    ],
)
async def test_a_code_brings_its_own_policy_where_nobody_chose_one(
    start_sidecar: Starter, start_upstream: UpstreamStarter, line: str, attempts: int, policy: str
) -> None:
    upstream = await start_upstream(status(line))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    assert str(attempts) == (await ask(sidecar, GET)).get("x-sidecar-attempts")
    session = await last_session(sidecar)
    assert ["default"] + [policy] * (attempts - 1) == [attempt.policy_id for attempt in session.attempts]
    assert attempts == len(upstream.requests)


async def test_each_failure_is_judged_by_its_own_policy(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    """Three attempts are too many for a 429, but not for a 503: the policy of the last failure counts."""
    down, limited = answer(b"", "503 Service Unavailable"), answer(b"", "429 Too Many Requests")
    upstream = await start_upstream(in_turn(down, down, limited, OK))
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    assert (429, "3") == ((reply := await ask(sidecar, GET)).status, reply.get("x-sidecar-attempts"))
    upstream.bodies.clear()
    upstream.script = in_turn(limited, limited, down, OK)
    drop_idle(sidecar)
    assert (200, "4") == ((reply := await ask(sidecar, GET)).status, reply.get("x-sidecar-attempts"))
    session = await last_session(sidecar, 2)
    assert ["default", "RATE_LIMIT_EXCEEDED", "RATE_LIMIT_EXCEEDED", "default"] == [
        a.policy_id for a in session.attempts
    ]


MAPPED = {
    "policies": {
        **{f"p{number}": {**TINY, "max_attempts": number} for number in range(1, 10)},
        "default": {**TINY, "max_attempts": 2},
    },
    "subsystem_mappings": {
        "billing": {"charge": {"TEMPORARY_UNAVAILABLE": "p5", "default": "p4"}, "other": {"UPSTREAM_ERROR": "p6"}}
    },
}
OPERATIONS = [
    {"name": "charge", "methods": ["PUT"], "path": "/charges/{id}"},
    {"name": "other", "path": "/other/**", "policy": "p3"},
    {"name": "odd", "path": "/odd"},
]


@pytest.mark.parametrize(
    ("method", "path", "line", "fields", "attempts"),
    [
        ("PUT", "/charges/7", "503 Service Unavailable", [], 5),
        ("PUT", "/charges/7", "500 Internal Server Error", [], 4),
        ("GET", "/charges/7", "503 Service Unavailable", [], 7),
        ("GET", "/other/a/b", "500 Internal Server Error", [], 6),
        ("GET", "/other/a/b", "503 Service Unavailable", [], 3),
        ("GET", "/odd", "503 Service Unavailable", [], 7),
        ("GET", "/odd?x=/charges/7", "503 Service Unavailable", [], 7),
        ("PUT", "/charges/7", "503 Service Unavailable", ["x-sidecar-policy: p8"], 8),
        ("GET", "/odd", "503 Service Unavailable", ["x-sidecar-operation: charge"], 5),
        ("GET", "/odd", "503 Service Unavailable", ["x-sidecar-operation: charge", "x-sidecar-max-attempts: 9"], 9),
    ],
)
async def test_the_nearest_policy_wins(
    start_sidecar: Starter,
    start_upstream: UpstreamStarter,
    method: str,
    path: str,
    line: str,
    fields: list[str],
    attempts: int,
) -> None:
    upstream = await start_upstream(status(line))
    keys = {"subsystem": "billing", "policy": "p7", "operations": OPERATIONS}
    sidecar = await start_sidecar(upstreams=route(upstream, **keys), **MAPPED)
    reply = await ask(sidecar, request(method, f"/u{path}", *fields))
    assert (str(attempts), attempts) == (reply.get("x-sidecar-attempts"), len(upstream.requests))


async def test_a_policy_may_narrow_and_an_operation_may_allow_what_is_not_idempotent(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("502 Bad Gateway"))
    operations = [
        {"name": "search", "methods": ["POST"], "path": "/search", "retry_non_idempotent": True},
        {"name": "narrow", "path": "/narrow", "policy": "narrow"},
        {"name": "listed", "path": "/listed", "policy": "listed"},
        {"name": "off", "path": "/off", "policy": "off"},
    ]
    policies = {
        **QUICK_POLICIES,
        "narrow": {**TINY, "retry_status_codes": [503]},
        "listed": {**TINY, "retryable_errors": ["CONNECTION_REFUSED"]},
        "off": {**TINY, "enabled": False},
    }
    sidecar = await start_sidecar(upstreams=route(upstream, operations=operations), policies=policies)
    made = {}
    for method, path in (("POST", "/search"), ("GET", "/narrow"), ("GET", "/listed"), ("GET", "/off"), ("POST", "/x")):
        reply = await ask(sidecar, request(method, f"/u{path}", body=b"q" if method == "POST" else b""))
        made[path] = (reply.get("x-sidecar-attempts"), reply.get("x-sidecar-outcome"))
    assert {
        "/search": ("4", "exhausted"),
        "/narrow": ("1", "not_retryable"),
        "/listed": ("1", "not_retryable"),
        "/off": ("1", "exhausted"),
        "/x": ("1", "not_retryable"),
    } == made
    assert ["attempts", None, None, "disabled", "not_resendable"] == [s.suppressed for s in ended(sidecar)]


# ---- what a request asks for itself ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "attempts"),
    [
        (["x-sidecar-retry: off"], 1),
        (["X-Sidecar-Retry: ON"], 4),
        (["x-sidecar-max-attempts: 2"], 2),
        (["x-sidecar-max-attempts: 7"], 7),
        (["x-sidecar-max-attempts: 0"], 1),
        (["x-sidecar-policy: patient"], 5),
        (["x-sidecar-policy: patient", "x-sidecar-max-attempts: 3"], 3),
        (["x-sidecar-stage: fetch"], 4),
        (["x-sidecar-stage: short"], 2),
        (["x-sidecar-version: 12"], 4),
        (["x-sidecar-dead-letter: off"], 4),
        (["x-sidecar-something-new: yes"], 4),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
async def test_a_request_may_ask_for_its_own_number_of_attempts(
    start_sidecar: Starter, start_upstream: UpstreamStarter, fields: list[str], attempts: int
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES, stages={"short": 2})
    reply = await ask(sidecar, request("GET", "/u/x", *fields))
    assert (str(attempts), attempts) == (reply.get("x-sidecar-attempts"), len(upstream.requests))
    assert all(b"x-sidecar" not in head.lower() for head in upstream.requests)


async def test_a_request_may_ask_for_its_own_times(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(silence)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    fields = ["x-sidecar-attempt-timeout: 0.1", "x-sidecar-max-attempts: 2"]
    reply = await ask(sidecar, request("GET", "/u/x", *fields))
    assert (504, "NETWORK_TIMEOUT", "2") == (
        reply.status,
        reply.json["error_code"],
        reply.get("x-sidecar-attempts"),
    )


async def test_ids_of_a_request_are_shown_in_its_session(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    fields = ["x-sidecar-correlation-id: order-7", "x-sidecar-workflow: w:1", "x-sidecar-stage: fetch"]
    await ask(sidecar, request("GET", "/u/x", *fields))
    session = await last_session(sidecar)
    assert ("order-7", "w:1", "fetch") == (session.correlation_id, session.workflow, session.stage)


BAD = {
    "x-sidecar-retry": "maybe",
    "x-sidecar-max-attempts": "11",
    "x-sidecar-timeout": "-1",
    "x-sidecar-attempt-timeout": "soon",
    "x-sidecar-policy": "no-such-policy",
    "x-sidecar-operation": "no-such-operation",
    "x-sidecar-stage": "not a name",
    "x-sidecar-workflow": "with space",
    "x-sidecar-version": "1.5",
    "x-sidecar-dead-letter": "yes",
    "x-sidecar-correlation-id": "",
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_override_is_a_400_that_names_it_and_nothing_is_sent(
    start_sidecar: Starter, start_upstream: UpstreamStarter, name: str
) -> None:
    upstream = await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(upstream))
    app = await sidecar.app()
    reply = await app.ask(request("POST", "/u/x", f"{name}: {BAD[name]}", body=b"hi"))
    assert (400, "VALIDATION_ERROR") == (reply.status, reply.json["error_code"])
    details = reply.json["details"]
    assert (1, "override", "denied") == (details["total_errors"], details["reason"], details["outcome"])
    (error,) = details["errors"]
    assert {"field", "value", "constraint", "message"} == error.keys()
    assert name == error["field"]
    assert name in reply.json["message"]
    assert ({"denied": 1}, []) == (sidecar.outcomes, upstream.requests)
    assert b"ok" == (await app.ask(request("GET", "/u/x"))).body  # the connection goes on


async def test_every_bad_override_is_named_at_once_and_a_long_value_is_not_repeated(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(OK))
    sidecar = await start_sidecar(upstreams=route(upstream))
    secret = "Bearer-" + "s3cr3t" * 20
    fields = [f"{name}: {value}" for name, value in BAD.items() if name != "x-sidecar-policy"]
    reply = await ask(sidecar, request("GET", "/u/x", f"x-sidecar-policy: {secret}", *fields))
    assert set(BAD) == {error["field"] for error in reply.json["details"]["errors"]}
    assert len(BAD) == reply.json["details"]["total_errors"]
    assert "s3cr3ts3cr3t" not in reply.body.decode()


async def test_headers_of_ours_are_neither_forwarded_nor_believed_when_they_come_back(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    forged = [
        "x-sidecar-session: forged",
        "X-SIDECAR-Attempts: 99",
        "x-sidecar-outcome: recovered",
        "x-sidecar-dlq-id: d",
    ]
    upstream = await start_upstream(
        in_turn(answer(b"", "503 Service Unavailable", *forged), answer(b"ok", "200 OK", *forged))
    )
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    reply = await ask(sidecar, request("GET", "/u/x", "x-sidecar-workflow: w", "X-Sidecar-Unknown: 1"))
    assert (["2"], ["recovered"], ["u"], []) == tuple(
        reply.all(f"x-sidecar-{name}") for name in ("attempts", "outcome", "upstream", "dlq-id")
    )
    assert re.fullmatch("[0-9a-f]{24}", reply.get("x-sidecar-session") or "")
    assert all(b"x-sidecar" not in head.lower() for head in upstream.requests)


async def test_every_attempt_carries_the_same_bytes(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    await ask(sidecar, request("PUT", "/u/x?q=1", "X-A: b", "x-a: c", body=b"hello"))
    assert (4, 1) == (len(upstream.requests), len(set(upstream.requests)))
    assert [b"hello"] * 4 == upstream.bodies


async def test_an_injected_key_is_the_same_on_every_attempt_and_is_trusted_only_where_the_provider_honours_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    found = {}
    for honours in (None, True, False):
        upstream.requests.clear()
        keys = {"inject": True} if honours is None else {"inject": True, "provider_honours": honours}
        sidecar = await start_sidecar(upstreams=route(upstream, idempotency=keys), policies=QUICK_POLICIES)
        await ask(sidecar, request("POST", "/u/x", body=b"hi"))
        sent = {re.search(rb"Idempotency-Key: (\S+)", head)[1] for head in upstream.requests}  # type: ignore[index]
        found[honours] = (len(upstream.requests), len(sent))
    assert {None: (1, 1), True: (4, 1), False: (1, 1)} == found


# ---- stages ------------------------------------------------------------------------------------------------------


async def test_a_stage_of_a_workflow_has_one_budget_over_all_its_requests(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES, stages={"render": 2})

    async def attempts(workflow: str, stage: str) -> int:
        reply = await ask(
            sidecar, request("GET", "/u/x", f"x-sidecar-workflow: {workflow}", f"x-sidecar-stage: {stage}")
        )
        assert (503, "exhausted") == (reply.status, reply.get("x-sidecar-outcome"))
        return int(reply.get("x-sidecar-attempts") or 0)

    assert [4, 1, 1] == [await attempts("w1", "fetch") for _ in range(3)]  # five by default
    assert [2, 1] == [await attempts("w1", "render") for _ in range(2)]  # another stage is not robbed
    assert 4 == await attempts("w2", "fetch")  # nor another workflow
    assert ["attempts"] + ["stage_budget"] * 4 + ["attempts"] == [session.suppressed for session in ended(sidecar)]


async def test_a_stage_that_succeeds_begins_anew(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES)
    fetch = request("GET", "/u/x", "x-sidecar-workflow: w", "x-sidecar-stage: fetch")
    assert "4" == (await ask(sidecar, fetch)).get("x-sidecar-attempts")
    upstream.script = always(OK)
    drop_idle(sidecar)
    assert "1" == (await ask(sidecar, fetch)).get("x-sidecar-attempts")
    upstream.script = DOWN
    drop_idle(sidecar)
    assert "4" == (await ask(sidecar, fetch)).get("x-sidecar-attempts")


async def test_an_operation_names_the_stage_of_its_requests(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    operations = [{"name": "notify", "stage": "notify", "path": "/notify"}]
    sidecar = await start_sidecar(
        upstreams=route(upstream, operations=operations), policies=QUICK_POLICIES, stages={"notify": 3}
    )
    made = [
        (await ask(sidecar, request("GET", "/u/notify", "x-sidecar-workflow: w"))).get("x-sidecar-attempts")
        for _ in range(2)
    ]
    assert ["3", "1"] == made


# ---- the kill switch ---------------------------------------------------------------------------------------------


async def test_the_kill_switch_stops_retries_at_once_and_lets_them_begin_again(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies=QUICK_POLICIES, retries_enabled=False)
    app = await sidecar.app()
    made = []
    for enabled in (False, True, False):
        sidecar.proxy.retries_enabled = enabled
        made.append((await app.ask(GET)).get("x-sidecar-attempts"))
    assert ["1", "4", "1"] == made
    assert ["disabled", "attempts", "disabled"] == [session.suppressed for session in ended(sidecar)]
    assert 2 == sample(sidecar, "sidecar_retries_suppressed_total", reason="disabled")


# ---- the retry budget --------------------------------------------------------------------------------------------


async def test_a_spent_retry_budget_passes_the_upstreams_answer_on(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(status("503 Service Unavailable", "X-Own: yes", body=b"down"))
    budget = {"ratio": 0.0, "window": 10.0, "min_per_second": 0.5}  # five retries in all
    sidecar = await start_sidecar(upstreams=route(upstream, retry_budget=budget), policies=QUICK_POLICIES)
    app = await sidecar.app()
    replies = [await app.ask(GET) for _ in range(4)]
    assert ["4", "3", "1", "1"] == [reply.get("x-sidecar-attempts") for reply in replies]
    assert ["exhausted", "budget", "budget", "budget"] == [reply.get("x-sidecar-outcome") for reply in replies]
    assert [(503, b"down", "yes")] * 4 == [(reply.status, reply.body, reply.get("x-own")) for reply in replies]
    assert 4 + 5 == len(upstream.requests)
    assert {"exhausted": 1, "budget": 3} == sidecar.outcomes


async def test_a_spent_retry_budget_is_named_where_there_is_no_answer(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(reset_after_request)
    budget = {"ratio": 0.0, "min_per_second": 0.0}
    sidecar = await start_sidecar(upstreams=route(upstream, retry_budget=budget), policies=QUICK_POLICIES)
    reply = await ask(sidecar, GET)
    assert (502, "CONNECTION_RESET", "budget") == (
        reply.status,
        reply.json["error_code"],
        reply.json["details"]["reason"],
    )
    assert {"budget": 1} == sidecar.outcomes


async def test_a_share_of_the_requests_may_be_retries(start_sidecar: Starter, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(DOWN)
    budget = {"ratio": 0.2, "min_per_second": 0.0}
    sidecar = await start_sidecar(upstreams=route(upstream, retry_budget=budget), policies=QUICK_POLICIES)
    app = await sidecar.app()
    for _ in range(50):
        await app.ask(GET)
    assert 50 + 10 == len(upstream.requests)


# ---- retries of the caller ---------------------------------------------------------------------------------------


async def test_the_callers_own_resends_are_recognised_counted_and_shown(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"default": {"max_attempts": 1}})
    cases = [
        (["amz-sdk-request: attempt=1; max=3"], False),
        (["amz-sdk-request: attempt=2; max=3"], True),
        (["x-stainless-retry-count: 0"], False),
        (["x-stainless-retry-count: 1"], True),
        (["Idempotency-Key: k1", "Authorization: Bearer one"], False),
        (["Idempotency-Key: k1", "Authorization: Bearer two"], False),  # another caller's key of the same name
        (["Idempotency-Key: k1", "Authorization: Bearer one"], True),
        ([], False),
    ]
    for fields, _ in cases:
        await ask(sidecar, request("GET", "/u/x", *fields))
    assert [resend for _, resend in cases] == [session.caller_resend for session in ended(sidecar)]
    assert 3 == sample(sidecar, "sidecar_caller_resends_total")
    assert b"amz-sdk-request: attempt=2; max=3" in upstream.requests[1]  # the upstream sees them as they are


# ---- explained ---------------------------------------------------------------------------------------------------


async def test_an_error_of_ours_says_what_happened_how_often_and_why_it_ended(
    start_sidecar: Starter,
) -> None:
    with refusing_port() as port:
        sidecar = await start_sidecar(
            upstreams={"u": {"route": "/u", "endpoints": [f"http://127.0.0.1:{port}"], **NO_BREAKER}},
            policies=QUICK_POLICIES,
        )
        reply = await ask(sidecar, request("POST", "/u/x", body=b"hi"))
    told = reply.json
    assert {
        "error_code",
        "message",
        "details",
        "request_id",
        "trace_id",
        "timestamp",
        "retry_after",
        "documentation_url",
    } == told.keys()
    assert ("CONNECTION_REFUSED", reply.get("x-sidecar-session")) == (told["error_code"], told["request_id"])
    details = told["details"]
    assert ("u", 4, "exhausted", "attempts", reply.get("x-sidecar-dlq-id")) == tuple(
        details[name] for name in ("upstream", "attempts", "outcome", "reason", "dlq_id")
    )
    assert "something that listens at that address" in details["hint"]
    assert f"127.0.0.1:{port}" in told["message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told["timestamp"])
    admin = f"http://{sidecar.admin_address[0]}:{sidecar.admin_address[1]}"
    assert f"{admin}/errors/CONNECTION_REFUSED" == told["documentation_url"]


async def test_a_body_too_large_to_keep_is_said_to_be_the_reason(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(DOWN)
    sidecar = await start_sidecar(
        upstreams=route(upstream), policies=QUICK_POLICIES, limits={"replay_body_bytes": 1000}
    )
    reply = await ask(sidecar, request("PUT", "/u/x", body=b"x" * 1001))
    assert (503, "1", "not_retryable") == (
        reply.status,
        reply.get("x-sidecar-attempts"),
        reply.get("x-sidecar-outcome"),
    )
    session = await last_session(sidecar)
    assert "body_too_large" == session.suppressed
    assert 1 == sample(sidecar, "sidecar_retries_suppressed_total", reason="body_too_large")
    reply = await ask(sidecar, request("PUT", "/u/x", body=b"x" * 1000))
    assert "4" == reply.get("x-sidecar-attempts")
    await at_rest(sidecar)


async def test_the_trace_of_the_caller_is_named_in_an_error_of_ours(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(echo)
    sidecar = await start_sidecar(upstreams=route(upstream))
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    fields = [f"traceparent: 00-{trace}-00f067aa0ba902b7-01", "x-sidecar-retry: perhaps"]
    assert trace == (await ask(sidecar, request("GET", "/u/x", *fields))).json["trace_id"]
