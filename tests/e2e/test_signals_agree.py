"""One exchange, all signals agree: each outcome is driven through a running sidecar, then metrics, spans, session,
events, log line and error records are laid beside each other and beside what app and upstream saw."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from telemetry.record import GOOD, OUTCOMES
from tests.conftest import UpstreamStarter
from tests.doubles.app import Reply
from tests.doubles.faults import NO_BREAKER, ask, cut_off, in_turn, request, silence, status, until
from tests.doubles.otlp import attributes
from tests.doubles.upstream import Script, Talk, Upstream, always, answer
from tests.e2e.conftest import Collector, Watched, Watcher
from tests.e2e.signs import CLIENT, ERROR, SERVER, UNSET, Scrape, Tree, arrived, error_records, parent_of, trees
from tests.e2e.signs import get as read

UNAVAILABLE = "503 Service Unavailable"
T = "TEMPORARY_UNAVAILABLE"
LARGE = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 70_000


@dataclass
class Case:
    """How an outcome is brought about, and what every signal has to say about it."""

    drive: Callable[[Watched, Upstream], Awaitable[Reply | None]]
    script: Script
    status: int
    """What the app gets; 0 for nothing."""
    tries: list[tuple[int, str | None]]
    """Of each attempt: status and error code."""
    code: str | None = None
    spans: tuple[int, list[int]] = (UNSET, [])
    """Status of the SERVER span and of each CLIENT span."""
    events: list[str] = field(default_factory=list)
    severity: str = "ERROR"
    suppressed: str | None = None
    keys: dict[str, Any] = field(default_factory=lambda: dict(NO_BREAKER))
    telemetry: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Watched], Awaitable[object]] | None = None


def asking(*what: Any, **more: Any) -> Callable[[Watched, Upstream], Awaitable[Reply]]:
    async def drive(sidecar: Watched, upstream: Upstream) -> Reply:
        return await ask(sidecar, request(*what, **more))

    return drive


get = asking("GET", "/u/x?page=1")


async def leave_early(sidecar: Watched, upstream: Upstream) -> None:
    app = await sidecar.app()
    await app.send(request("GET", "/u/x"))
    await until(lambda: len(upstream.bodies) == 1)
    app.close()


async def tunnel(sidecar: Watched, upstream: Upstream) -> None:
    app = await sidecar.app()
    target = f"127.0.0.1:{upstream.port}"
    await app.send(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n")
    reply = await app.reply(to_head=True)
    assert "tunnelled" == reply.get("x-sidecar-outcome")
    await app.send(b"ping")
    assert b"ping" == await app.reader.readexactly(4)
    app.close()


async def mirror(talk: Talk) -> None:
    while data := await talk.reader.read(1000):
        await talk.send(data)


async def break_in(sidecar: Watched, upstream: Upstream) -> Reply:
    """A fault of our own, in the middle of an attempt."""
    (state,) = sidecar.proxy.directory.states()
    state.classifier = None  # type: ignore[assignment]
    return await ask(sidecar, request("GET", "/u/x"))


async def trip(sidecar: Watched) -> None:
    assert 503 == (await ask(sidecar, request("GET", "/u/x", "x-sidecar-retry: off"))).status


failing = always(answer(b"no", UNAVAILABLE))
CASES = {
    "first_try": Case(
        get,
        always(answer()),
        200,
        [(200, None)],
        spans=(UNSET, [UNSET]),
        severity="INFO",
        telemetry={"healthy_sample": 1, "log": {"access": True}},
    ),
    "recovered": Case(
        get,
        in_turn(answer(b"no", UNAVAILABLE), answer(b"no", "502 Bad Gateway"), answer()),
        200,
        [(503, T), (502, "BAD_GATEWAY"), (200, None)],
        spans=(UNSET, [ERROR, ERROR, UNSET]),
        events=["retry_attempt", "retry_attempt", "retry_success"],
        severity="WARN",
    ),
    "tunnelled": Case(
        tunnel, mirror, 200, [(200, None)], severity="INFO", telemetry={"healthy_sample": 1, "log": {"access": True}}
    ),
    "rejected": Case(
        get,
        status("404 Not Found"),
        404,
        [(404, "NOT_FOUND")],
        "NOT_FOUND",
        spans=(UNSET, [ERROR]),
        severity="INFO",
    ),
    "denied": Case(asking("GET", "/nowhere"), always(answer()), 404, [], "NO_ROUTE", severity="INFO"),
    "cancelled": Case(
        leave_early,
        silence,
        0,
        [(0, "CLIENT_DISCONNECTED")],
        "CLIENT_DISCONNECTED",
        spans=(UNSET, [UNSET]),
        severity="INFO",
    ),
    "exhausted": Case(
        get,
        failing,
        503,
        [(503, T)] * 4,
        T,
        spans=(ERROR, [ERROR] * 4),
        events=["retry_attempt"] * 3 + ["retry_failure"],
        suppressed="attempts",
    ),
    "not_retryable": Case(
        asking("POST", "/u/x", body=b"{}"),
        failing,
        503,
        [(503, T)],
        T,
        spans=(ERROR, [ERROR]),
        events=["dead_lettered", "request_failure"],
        suppressed="not_resendable",
    ),
    "budget": Case(
        get,
        failing,
        503,
        [(503, T)],
        T,
        spans=(ERROR, [ERROR]),
        events=["request_failure"],
        suppressed="budget",
        keys={"retry_budget": {"ratio": 0, "min_per_second": 0}},
    ),
    "deadline": Case(
        get,
        always(answer(b"no", UNAVAILABLE, "Retry-After: 200")),
        503,
        [(503, T)],
        T,
        spans=(ERROR, [ERROR]),
        events=["request_failure"],
        suppressed="deadline",
    ),
    "breaker_open": Case(
        get,
        failing,
        503,
        [],
        "CIRCUIT_OPEN",
        spans=(ERROR, []),
        events=["request_failure"],
        keys={"breaker": {"failure_threshold": 1}},
        prepare=trip,
    ),
    "failed_streaming": Case(
        get,
        cut_off(LARGE),
        200,
        [(200, "CONNECTION_RESET")],
        "CONNECTION_RESET",
        spans=(ERROR, [ERROR]),
        events=["request_failure"],
        suppressed="response_started",
    ),
    "internal": Case(
        break_in,
        status("500 Internal Server Error"),
        500,
        [(500, "SIDECAR_INTERNAL")],
        "SIDECAR_INTERNAL",
        spans=(ERROR, [ERROR]),
        events=["request_failure"],
    ),
}
NOT_YET = {"deduplicated", "queued"}


def test_every_outcome_there_is_has_a_case() -> None:
    assert OUTCOMES == CASES.keys() | NOT_YET


@dataclass
class Seen:
    """Everything there is to see of one request."""

    reply: Reply | None
    heads: list[bytes]
    """What the upstream got."""
    before: Scrape
    after: Scrape
    tree: Tree
    session: dict[str, Any]
    line: dict[str, Any]
    record: Any
    """The log record over OTLP; None for a request that only the access log tells of."""
    events: list[dict[str, Any]]
    errors: list[dict[str, Any]]

    def counted(self, label: str, name: str) -> dict[str, float]:
        before, after = self.before.by(label, name), self.after.by(label, name)
        return {word: count - before.get(word, 0) for word, count in after.items() if count != before.get(word, 0)}


async def see(case: Case, outcome: str, collector: Collector, watch: Watcher, start_upstream: UpstreamStarter) -> Seen:
    environ, received = collector
    upstream = await start_upstream(case.script)
    sidecar = await watch(
        {**environ, "OTEL_LOGS_EXPORTER": "otlp"},
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url], **case.keys}},
        egress={"connect_ports": [upstream.port]},
        telemetry=case.telemetry,
    )
    if case.prepare is not None:
        await case.prepare(sidecar)
    earlier, heads = len(sidecar.sessions()), len(upstream.requests)
    events, spans = len(sidecar.events()), len(received.spans)
    before = await sidecar.metrics()
    reply = await case.drive(sidecar, upstream)
    await until(lambda: len(sidecar.sessions()) > earlier, "no session was kept")
    (session,) = sidecar.sessions()[earlier:]
    assert outcome == session["outcome"]
    found: dict[str, Tree] = {}

    def complete() -> bool:
        if len(received.spans) - spans >= (1 if session["method"] == "CONNECT" else 1 + session["total_attempts"]):
            found.update(trees(received.spans))
        return session["session_id"] in found

    await arrived(received, complete, f"the spans of {outcome}")
    access = case.telemetry.get("log", {}).get("access", False)
    (line,) = [
        line
        for line in sidecar.lines("sidecar.access" if access else "sidecar.session.completed")
        if line["sidecar.session.id"] == session["session_id"]
    ]

    def logged() -> list[Any]:
        return [r for r in received.log_records if attributes(r).get("sidecar.session.id") == session["session_id"]]

    if not access:
        await arrived(received, lambda: len(logged()) == 1, "the log record")
    return Seen(
        reply,
        upstream.requests[heads:],
        before,
        await sidecar.metrics(),
        found[session["session_id"]],
        session,
        line,
        None if access else logged()[0],
        [event for event in sidecar.events()[events:] if event["session_id"]],
        [r for r in error_records(sidecar.state_dir) if r["context"]["request_id"] == session["session_id"]],
    )


@pytest.mark.parametrize("outcome", sorted(CASES))
async def test_every_signal_tells_the_same_story(
    outcome: str, collector: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    case = CASES[outcome]
    seen = await see(case, outcome, collector, watch, start_upstream)
    the_app_saw_it(case, outcome, seen)
    metrics_count_it(case, outcome, seen)
    spans_show_it(case, outcome, seen)
    the_upstream_is_in_the_trace(seen)
    session_and_line_tell_it(case, outcome, seen)
    events_and_error_records_tell_it(case, seen)


def the_app_saw_it(case: Case, outcome: str, seen: Seen) -> None:
    if seen.reply is None:
        return
    assert case.status == seen.reply.status
    assert seen.session["session_id"] == seen.reply.get("x-sidecar-session")
    assert str(len(case.tries)) == seen.reply.get("x-sidecar-attempts")
    # An answer that breaks off later had begun well.
    assert ("first_try" if outcome == "failed_streaming" else outcome) == seen.reply.get("x-sidecar-outcome")
    if seen.reply.get("content-type") == "application/json":  # one of ours
        told = seen.reply.json
        assert (case.code, seen.session["session_id"], seen.session["trace_id"]) == (
            told["error_code"],
            told["request_id"],
            told["trace_id"],
        )
        assert (len(case.tries), outcome) == (told["details"]["attempts"], told["details"]["outcome"])


def metrics_count_it(case: Case, outcome: str, seen: Seen) -> None:
    method = seen.session["method"]
    results = Counter(code or "success" for _, code in case.tries)
    assert {outcome: 1} == seen.counted("outcome", "sidecar_sessions_total")
    assert {method: 1} == seen.counted("method", "sidecar_requests_total")
    assert {str(case.status): 1} == seen.counted("code", "sidecar_requests_total")
    assert results == seen.counted("result", "sidecar_upstream_attempts_total")
    assert ({case.suppressed: 1} if case.suppressed else {}) == seen.counted(
        "reason", "sidecar_retries_suppressed_total"
    )
    retried = Counter(code for _, code in case.tries[:-1])
    assert retried == seen.counted("reason", "sidecar_retries_total")
    name = seen.session["upstream"]
    attempts = [scrape.total("sidecar_session_attempts_sum", upstream=name) for scrape in (seen.before, seen.after)]
    assert len(case.tries) == attempts[1] - attempts[0]
    assert ({"NO_ROUTE": 1} if outcome == "denied" else {}) == {
        {"no_route": "NO_ROUTE"}.get(word, word): count
        for word, count in seen.counted("reason", "sidecar_denied_total").items()
    }
    assert ({"exchange": 1} if outcome == "internal" else {}) == seen.counted(
        "component", "sidecar_internal_errors_total"
    )


def spans_show_it(case: Case, outcome: str, seen: Seen) -> None:
    root, children, shown = seen.tree.root, seen.tree.children, seen.tree.shown
    method = seen.session["method"]
    assert (SERVER, method, b"") == (root.kind, root.name, root.parent_span_id)
    assert (outcome, len(case.tries), "head") == (
        shown["sidecar.session.outcome"],
        shown["sidecar.session.attempts"],
        shown["sidecar.sampling"],
    )
    server, clients = case.spans
    assert (server, clients) == (root.status.code, [span.status.code for span in children])
    assert (case.code if server == ERROR else None) == shown.get("error.type")
    assert (case.status or None) == shown.get("http.response.status_code")
    if method == "CONNECT":
        assert [] == children, "nothing can be seen inside a tunnel"
        return
    assert [CLIENT] * len(case.tries) == [span.kind for span in children]
    for number, (span, (got, code)) in enumerate(zip(children, case.tries, strict=True)):
        tried = attributes(span)
        assert root.span_id == span.parent_span_id
        assert (number or None) == tried.get("http.request.resend_count")
        assert (got or None) == tried.get("http.response.status_code")
        assert (code if span.status.code == ERROR else None) == tried.get("error.type")
        assert (case.tries[number - 1][1] if number else None) == tried.get("sidecar.retry.reason")
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    scheduled = [(event.name, attributes(event)["reason"]) for event in root.events]
    assert [("sidecar.retry.scheduled", code) for _, code in case.tries[:-1]] == scheduled


def the_upstream_is_in_the_trace(seen: Seen) -> None:
    """Each attempt that arrived names, as its parent, the CLIENT span of exactly this attempt."""
    trace_id = seen.tree.root.trace_id.hex()
    expected = [(trace_id, span.span_id.hex(), "01") for span in seen.tree.children]
    assert expected == [parent_of(head) for head in seen.heads]


def session_and_line_tell_it(case: Case, outcome: str, seen: Seen) -> None:
    session, line, root = seen.session, seen.line, seen.tree.root
    assert root.trace_id.hex() == session["trace_id"] == line["trace_id"]
    assert root.span_id.hex() == line["span_id"]
    assert session["session_id"] == line["sidecar.session.id"] == seen.tree.session_id
    assert outcome == line["sidecar.session.outcome"]
    assert case.severity == line["severity_text"]
    assert (outcome in GOOD) == session["success"]
    assert ({"status": case.status} if case.status else None) == session["final_result"]
    assert case.code == (session["final_error"] or {}).get("type") == line.get("error.type")
    assert case.suppressed == session["suppressed"] == line.get("sidecar.retry.suppressed")
    assert len(case.tries) == session["total_attempts"] == line["sidecar.session.attempts"]
    assert case.tries == [(a["status"] or 0, (a["error"] or {}).get("type")) for a in session["attempts"]]
    assert case.tries == [(a.get("status", 0), a.get("error_type")) for a in line["attempts"]]
    assert session["summary"] == line["body"]
    assert len(session["explanation"]) >= 2
    for span, attempt in zip(seen.tree.children, session["attempts"], strict=False):
        tried = attributes(span)
        assert attempt["kind"] == tried["sidecar.attempt.kind"]
        assert attempt["send_phase"] == tried["sidecar.send_phase"]
        assert attempt["policy_id"] == tried["sidecar.policy"]
        assert abs(attempt["duration"] - (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9) < 1e-4
    if seen.record is not None:
        assert (root.trace_id, root.span_id) == (seen.record.trace_id, seen.record.span_id)
        assert (line["severity_text"], line["body"]) == (seen.record.severity_text, seen.record.body.string_value)
        assert line["attempts"] == json.loads(attributes(seen.record)["attempts"])


def events_and_error_records_tell_it(case: Case, seen: Seen) -> None:
    session = seen.session
    assert case.events == [event["event_type"] for event in seen.events]
    for event in seen.events:
        assert (session["session_id"], session["trace_id"]) == (event["session_id"], event["correlation_id"])
        if event["event_type"] == "dead_lettered":  # before the answer: the id is in it, the outcome is not known yet
            assert session["dlq_id"] == event["context"]["dlq_id"]
        else:
            assert session["outcome"] == event["context"]["outcome"]
    resent = [event for event in seen.events if event["event_type"] == "retry_attempt"]
    assert list(range(2, len(case.tries) + 1)) == [event["attempt"] for event in resent]
    assert [code for _, code in case.tries[:-1]] == [event["context"]["last_error"]["type"] for event in resent]
    for event in seen.events:
        if event["event_type"] in ("retry_failure", "request_failure"):
            assert case.code == event["error"]["type"]
    failed = [code for _, code in case.tries if code is not None]
    assert failed == [record["error_type"] for record in seen.errors]
    assert {session["trace_id"]} >= {record["context"]["trace_id"] for record in seen.errors}


# ---- what a table of outcomes does not show ----------------------------------------------------------------------


async def test_a_tunnel_that_the_upstream_broke_is_kept_with_its_error(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    async def break_off(talk: Talk) -> None:
        await talk.reader.readexactly(4)
        talk.reset()

    environ, received = http_only
    upstream = await start_upstream(break_off)
    sidecar = await watch(environ, egress={"connect_ports": [upstream.port]})
    app = await sidecar.app()
    await app.send(f"CONNECT 127.0.0.1:{upstream.port} HTTP/1.1\r\nHost: x\r\n\r\nping")
    assert 200 == (await app.reply(to_head=True)).status
    assert await app.closed()
    await until(lambda: len(sidecar.sessions()) == 1)
    await arrived(received, lambda: len(received.spans) == 1)
    (session,), (line,) = sidecar.sessions(), sidecar.lines("sidecar.session.completed")
    assert ("tunnelled", "CONNECTION_RESET") == (session["outcome"], session["final_error"]["type"])
    assert ("WARN", "CONNECTION_RESET") == (line["severity_text"], line["error.type"])
    assert {"CONNECTION_RESET": 1} == (await sidecar.metrics()).by("result", "sidecar_tunnels_total")
    shown = attributes(received.spans[0])
    assert ("127.0.0.1", upstream.port, 4, "127.0.0.1") == (
        shown["server.address"],
        shown["server.port"],
        shown["sidecar.tunnel.bytes_sent"],
        shown["client.address"],
    )


async def test_a_websocket_is_one_tree_whose_handshake_is_the_attempt(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    async def switch(talk: Talk) -> None:
        await talk.read_head()
        await talk.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        await mirror(talk)

    environ, received = http_only
    upstream = await start_upstream(switch)
    sidecar = await watch(environ)
    app = await sidecar.app()
    await app.send(
        request("GET", f"{upstream.url}/chat", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x")
    )
    assert 101 == (await app.reply(to_head=True)).status
    app.close()
    await arrived(received, lambda: len(received.spans) == 2)
    (tree,) = trees(received.spans).values()
    assert ("tunnelled", 101, 1) == (
        tree.shown["sidecar.session.outcome"],
        tree.shown["http.response.status_code"],
        len(tree.children),
    )
    assert (tree.root.trace_id.hex(), tree.children[0].span_id.hex(), "01") == parent_of(upstream.requests[0])


async def test_the_session_names_the_target_of_the_app_and_the_attempt_where_it_went(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = http_only
    upstream = await start_upstream(always(answer()))
    sidecar = await watch(environ, upstreams={"u": {"hosts": ["api.test"], "endpoints": [upstream.url]}})
    for target in ("http://api.test/v1", "http://api.test:8080?x=1"):
        assert 200 == (await ask(sidecar, request("GET", target))).status
    await arrived(received, lambda: len(received.spans) == 4)
    found = sorted(trees(received.spans).values(), key=lambda tree: tree.root.start_time_unix_nano)
    assert [("api.test", 80, "/v1"), ("api.test", 8080, "/")] == [
        (tree.shown["server.address"], tree.shown["server.port"], tree.shown["url.path"]) for tree in found
    ]
    for tree in found:
        went = attributes(tree.children[0])
        assert ("127.0.0.1", upstream.port) == (went["server.address"], went["server.port"])
        assert ("127.0.0.1", upstream.port) == (went["network.peer.address"], went["network.peer.port"])


async def test_the_attempt_says_https_where_tls_began_here(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    async def no_tls(talk: Talk) -> None:
        await talk.send(b"SSH-2.0-OpenSSH_9.2\r\n")

    environ, received = http_only
    upstream = await start_upstream(no_tls)  # so the attempt fails, which is not the point
    endpoint = f"https://127.0.0.1:{upstream.port}"
    sidecar = await watch(environ, upstreams={"u": {"route": "/u", "endpoints": [endpoint]}})
    assert "TLS_FAILURE" == (await ask(sidecar, request("GET", "/u/x", "x-sidecar-retry: off"))).json["error_code"]
    await arrived(received, lambda: len(received.spans) == 2)
    (tree,) = trees(received.spans).values()
    assert ("http", f"{endpoint}/x") == (tree.shown["url.scheme"], attributes(tree.children[0])["url.full"])


async def test_an_operation_gives_spans_their_name_and_their_route(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = http_only
    upstream = await start_upstream(always(answer()))
    operation = {"name": "get_charge", "methods": ["GET"], "path": "/v1/charges/{id}"}
    sidecar = await watch(
        environ, upstreams={"u": {"route": "/u", "endpoints": [upstream.url], "operations": [operation]}}
    )
    assert 200 == (await ask(sidecar, request("GET", "/u/v1/charges/ch_1"))).status
    await arrived(received, lambda: len(received.spans) == 2)
    (tree,) = trees(received.spans).values()
    assert ["GET get_charge"] * 2 == [tree.root.name, tree.children[0].name]
    assert ("get_charge", "/v1/charges/{id}", "/u/v1/charges/ch_1") == (
        tree.shown["sidecar.operation"],
        tree.shown["http.route"],
        tree.shown["url.path"],
    )
    assert f"{upstream.url}/v1/charges/ch_1" == attributes(tree.children[0])["url.full"]


# ---- which traces are kept ---------------------------------------------------------------------------------------


async def test_with_sampling_off_what_is_interesting_is_exported_whole_and_what_is_healthy_is_not(
    collector: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = collector
    upstream = await start_upstream(in_turn(answer(), answer(b"no", UNAVAILABLE), answer(), answer(b"", "404 No")))
    sidecar = await watch(
        {**environ, "OTEL_TRACES_SAMPLER": "parentbased_always_off"},
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}},
    )
    outcomes = [(await ask(sidecar, request("GET", "/u/x"))).get("x-sidecar-outcome") for _ in range(3)]
    assert ["first_try", "recovered", "rejected"] == outcomes
    await arrived(received, lambda: len(received.spans) == 5)
    found = trees(received.spans).values()
    assert [("recovered", "tail", 2), ("rejected", "tail", 1)] == sorted(
        (tree.shown["sidecar.session.outcome"], tree.shown["sidecar.sampling"], len(tree.children)) for tree in found
    )
    parents = [parent_of(head) for head in upstream.requests]
    assert {"00"} == {flags for _, _, flags in parents}, "nobody else is asked to sample"
    exported = {span.span_id.hex() for tree in found for span in tree.children}
    assert exported == {span_id for _, span_id, _ in parents[1:]}, "the ids are those that were sent before"
    await until(lambda: sidecar.proxy.metrics.spans["exported"] == 5)
    assert {"unsampled": 2, "exported": 5} == (await sidecar.metrics()).by("result", "sidecar_telemetry_spans_total")


@pytest.mark.parametrize(("flags", "sampling"), [("01", "head"), ("00", "tail")])
async def test_the_callers_flag_goes_before_the_sampler(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter, flags: str, sampling: str
) -> None:
    environ, received = http_only
    other = {"01": "always_off", "00": "always_on"}[flags]
    upstream = await start_upstream(in_turn(answer(b"no", UNAVAILABLE), answer()))
    sidecar = await watch(
        {**environ, "OTEL_TRACES_SAMPLER": f"parentbased_{other}"},
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}},
    )
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    assert 200 == (await ask(sidecar, request("GET", "/u/x", f"traceparent: 00-{trace}-{parent}-{flags}"))).status
    await arrived(received, lambda: len(received.spans) == 3)
    (tree,) = trees(received.spans).values()
    assert (trace, parent, sampling) == (
        tree.root.trace_id.hex(),
        tree.root.parent_span_id.hex(),
        tree.shown["sidecar.sampling"],
    )
    assert [(trace, span.span_id.hex(), flags) for span in tree.children] == [
        parent_of(head) for head in upstream.requests
    ]


async def test_exemplars_of_the_latency_lead_to_traces_that_were_kept(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = http_only
    upstream = await start_upstream(in_turn(answer(), answer(b"no", UNAVAILABLE), answer()))
    sidecar = await watch(
        {**environ, "OTEL_TRACES_SAMPLER": "always_off"},
        upstreams={"u": {"route": "/u", "endpoints": [upstream.url]}},
    )
    for _ in range(2):
        assert 200 == (await ask(sidecar, request("GET", "/u/x"))).status
    await arrived(received, lambda: len(received.spans) == 3)
    reply = await read(sidecar.admin_address, "/metrics", "Accept: application/openmetrics-text; version=1.0.0")
    pointed = set(re.findall(r'# \{trace_id="(\w+)",span_id="(\w+)"\}', reply.body.decode()))
    assert pointed == {(span.trace_id.hex(), span.span_id.hex()) for span in received.spans}
