"""Trace headers on their way through: forwarded, replaced or removed as configured; broken ones fail nothing and lead
nowhere. And what a hostile peer writes into a request creates no series."""

from __future__ import annotations

import random
import socket
import string
from typing import Any

import pytest

from tests.conftest import UpstreamStarter
from tests.doubles.faults import NO_BREAKER, ask, at_rest, in_turn, request, status
from tests.doubles.upstream import Upstream, always, answer, echo
from tests.e2e.conftest import Collector, Watched, Watcher
from tests.e2e.signs import arrived, parent_of, trees

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"
BROKEN = {
    "empty": "",
    "a word": "banana",
    "upper case": GOOD.upper(),
    "forbidden version": f"ff-{TRACE}-{PARENT}-01",
    "version of one digit": f"0-{TRACE}-{PARENT}-01",
    "no trace": f"00-{'0' * 32}-{PARENT}-01",
    "no parent": f"00-{TRACE}-{'0' * 16}-01",
    "short trace": f"00-{TRACE[:-1]}-{PARENT}-01",
    "long trace": f"00-{TRACE}a-{PARENT}-01",
    "short parent": f"00-{TRACE}-{PARENT[:-1]}-01",
    "no flags": f"00-{TRACE}-{PARENT}",
    "long flags": f"00-{TRACE}-{PARENT}-011",
    "more than version 00 has": f"{GOOD}-extra",
    "underscores": f"00-{TRACE[:15]}_{TRACE[16:]}-{PARENT}-01",
    "a sign": f"00-+{TRACE[1:]}-{PARENT}-01",
    "0x": f"00-0x{TRACE[2:]}-{PARENT}-01",
    "other separators": GOOD.replace("-", "_"),
    "letters beyond hex": f"00-{'g' * 32}-{PARENT}-01",
    "two in one": f"{GOOD}, {GOOD}",
    "not ASCII": "00-\xe9\xe8-\xff-01",
    "endless": "0" * 20_000,
}
BROKEN_STATES = {
    "no value": "vendor",
    "upper-case key": "Vendor=1",
    "twice the same key": "a=1,a=2",
    "too many": ",".join(f"k{number}=1" for number in range(33)),
    "a key of spaces": " =1",
    "an equals sign in the value": "a=b=c",
    "not ASCII": "a=\xe9",
    "endless": "a=" + "x" * 20_000,
}


def routes(upstream: Upstream, **keys: Any) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER, **keys}}


def fields_of(head: bytes, *names: bytes) -> list[bytes]:
    """Whole lines, as they are."""
    return [line for line in head.split(b"\r\n")[1:] if line.partition(b":")[0].lower() in names]


TRACE_FIELDS = (b"traceparent", b"tracestate", b"baggage")


# ---- without an exporter -----------------------------------------------------------------------------------------


async def test_without_an_exporter_headers_are_forwarded_byte_for_byte(
    watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    failing = await start_upstream(status("503 Service Unavailable"))
    sidecar = await watch(upstreams=routes(failing))
    for name, header in {"good": GOOD, **BROKEN}.items():
        sent = [f"TraceParent: {header}", "tracestate: b=2,A", "tracestate: a=1", "Baggage: user=%C3%A9;x=1, y=2"]
        reply = await ask(sidecar, request("GET", "/u/x", *sent))
        assert ("exhausted", "4") == (reply.get("x-sidecar-outcome"), reply.get("x-sidecar-attempts")), name
        for head in failing.requests[-4:]:
            passed = [line.strip() for line in fields_of(head, *TRACE_FIELDS)]
            assert [line.encode("latin-1").strip() for line in sent] == passed, name
    named = {None, TRACE}  # the caller's own, where it is well formed: nobody else made one
    assert named == {session["trace_id"] for session in sidecar.sessions()}


async def test_without_an_exporter_nothing_is_added(watch: Watcher, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(answer()))
    sidecar = await watch(upstreams=routes(upstream))
    assert 200 == (await ask(sidecar, request("GET", "/u/x"))).status
    assert [] == fields_of(upstream.requests[0], *TRACE_FIELDS)


# ---- with one ----------------------------------------------------------------------------------------------------


async def test_a_broken_traceparent_fails_nothing_and_never_leaks_into_ours(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = http_only
    upstream = await start_upstream(status("404 Not Found"))
    sidecar = await watch(environ, upstreams=routes(upstream))
    for number, (name, header) in enumerate(BROKEN.items(), 1):
        given = [f"traceparent: {header}", "tracestate: vendor=secret-state", "baggage: a=1"]
        passed = await ask(sidecar, request("GET", "/u/x", *given))
        refused = await ask(sidecar, request("GET", "/nowhere", *given))
        assert (404, "NO_ROUTE") == (passed.status, refused.json["error_code"]), name
        await arrived(received, lambda number=number: len(received.spans) == 3 * number)
        found = trees(received.spans)
        first, second = found[passed.get("x-sidecar-session") or ""], found[refused.get("x-sidecar-session") or ""]
        assert second.root.trace_id.hex() == refused.json["trace_id"], name
        for tree in (first, second):
            assert (b"", "") == (tree.root.parent_span_id, tree.root.trace_state), name
            assert TRACE != tree.root.trace_id.hex(), name
        head = upstream.requests[-1]
        assert (first.root.trace_id.hex(), first.children[0].span_id.hex(), "01") == parent_of(head), name
        assert b"secret-state" not in head, name
        assert [b"baggage: a=1"] == fields_of(head, b"baggage"), name
    told = str(sidecar.sessions()) + sidecar.logged.getvalue()
    assert TRACE not in told and "secret-state" not in told


async def test_a_tracestate_without_its_traceparent_belongs_to_nobody_and_stays_behind(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer()))
    sidecar = await watch(http_only[0], upstreams=routes(upstream))
    assert 200 == (await ask(sidecar, request("GET", "/u/x", "tracestate: vendor=1"))).status
    assert [] == fields_of(upstream.requests[0], b"tracestate")


async def test_two_traceparents_are_as_good_as_none(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = http_only
    upstream = await start_upstream(always(answer()))
    sidecar = await watch(environ, upstreams=routes(upstream))
    assert 200 == (await ask(sidecar, request("GET", "/u/x", f"traceparent: {GOOD}", f"Traceparent: {GOOD}"))).status
    await arrived(received, lambda: len(received.spans) == 2)
    trace_id, _, _ = parent_of(upstream.requests[0])
    assert TRACE != trace_id


async def test_a_broken_tracestate_stays_behind_and_the_trace_goes_on(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = http_only
    upstream = await start_upstream(always(answer()))
    sidecar = await watch(environ, upstreams=routes(upstream))
    for name, state in BROKEN_STATES.items():
        reply = await ask(sidecar, request("GET", "/u/x", f"traceparent: {GOOD}", f"tracestate: {state}"))
        assert 200 == reply.status, name
        assert TRACE == parent_of(upstream.requests[-1])[0], name
        assert [] == fields_of(upstream.requests[-1], b"tracestate"), name
    await arrived(received, lambda: len(received.spans) == 2 * len(BROKEN_STATES))
    assert {""} == {span.trace_state for span in received.spans}


async def test_a_good_tracestate_goes_along_with_every_attempt_however_many_lines_it_came_in(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = http_only
    upstream = await start_upstream(in_turn(answer(b"no", "503 Service Unavailable"), answer()))
    sidecar = await watch(environ, upstreams=routes(upstream))
    sent = [f"traceparent: {GOOD}", "tracestate: a=1, b=2", "x: y", "TraceState: c@d=3", "baggage: k=v;p, \xe9=\xe8"]
    assert 200 == (await ask(sidecar, request("GET", "/u/x", *sent))).status
    await arrived(received, lambda: len(received.spans) == 3)
    for head in upstream.requests:
        assert [b"tracestate: a=1,b=2,c@d=3"] == fields_of(head, b"tracestate")
        assert [sent[-1].encode("latin-1")] == fields_of(head, b"baggage"), "never parsed"
        assert TRACE == parent_of(head)[0]
    assert {"a=1,b=2,c@d=3"} == {span.trace_state for span in received.spans}


@pytest.mark.parametrize("exporting", [True, False])
async def test_forward_leaves_the_headers_alone_and_the_session_is_traced_all_the_same(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter, exporting: bool
) -> None:
    environ, received = http_only
    upstream = await start_upstream(always(answer()))
    sidecar = await watch(environ if exporting else {}, upstreams=routes(upstream, propagation="forward"))
    sent = [f"traceparent: {GOOD}", "tracestate: A,b=2", "tracestate: c=3", "baggage: x=1"]
    assert 200 == (await ask(sidecar, request("GET", "/u/x", *sent))).status
    assert 200 == (await ask(sidecar, request("GET", "/u/x"))).status
    with_one, without = upstream.requests
    assert [line.encode() for line in sent] == fields_of(with_one, *TRACE_FIELDS)
    assert [] == fields_of(without, *TRACE_FIELDS)
    if exporting:
        await arrived(received, lambda: len(received.spans) == 4)
        assert TRACE in {tree.root.trace_id.hex() for tree in trees(received.spans).values()}


@pytest.mark.parametrize("exporting", [True, False])
async def test_strip_keeps_the_trace_to_ourselves(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter, exporting: bool
) -> None:
    environ, received = http_only
    upstream = await start_upstream(in_turn(answer(b"no", "503 Service Unavailable"), answer()))
    sidecar = await watch(environ if exporting else {}, upstreams=routes(upstream, propagation="strip"))
    sent = [f"traceparent: {GOOD}", "tracestate: b=2", "tracestate: c=3", "baggage: user=7"]
    assert 200 == (await ask(sidecar, request("GET", "/u/x", *sent))).status
    assert 200 == (await ask(sidecar, request("GET", "/u/x", *sent[1:]))).status
    assert 3 == len(upstream.requests)
    for head in upstream.requests:
        assert [] == fields_of(head, *TRACE_FIELDS)
    if exporting:
        await arrived(received, lambda: len(received.spans) == 5)
        found = {tree.root.trace_id.hex(): len(tree.children) for tree in trees(received.spans).values()}
        assert 2 == found[TRACE]


@pytest.mark.parametrize("first", ["participate", "forward", "strip"])
@pytest.mark.parametrize("second", ["participate", "forward", "strip"])
async def test_a_fallback_sees_what_its_own_settings_allow(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter, first: str, second: str
) -> None:
    environ, received = http_only
    failing, working = await start_upstream(status("503 Service Unavailable")), await start_upstream(echo)
    sidecar = await watch(
        environ,
        upstreams={
            "u": {
                "route": "/u",
                "endpoints": [failing.url],
                "propagation": first,
                "breaker": {"failure_threshold": 1},
                "fallback": "spare",
            },
            "spare": {"route": "/spare", "endpoints": [working.url], "propagation": second},
        },
    )
    sent = [f"traceparent: {GOOD}", "tracestate: b=2", "baggage: x=1"]
    reply = await ask(sidecar, request("GET", "/u/x", *sent))
    assert ("spare", "recovered") == (reply.get("x-sidecar-upstream"), reply.get("x-sidecar-outcome"))
    await arrived(received, lambda: len(received.spans) == 3)
    (tree,) = trees(received.spans).values()
    assert TRACE == tree.root.trace_id.hex()
    (head,) = working.requests
    if second == "participate":
        assert (TRACE, tree.children[1].span_id.hex(), "01") == parent_of(head)
        assert [b"tracestate: b=2"] == fields_of(head, b"tracestate")
    elif second == "forward":  # what the first one was not to see is gone by then
        forwarded = sent[:2] if first == "forward" else []
        assert [line.encode() for line in forwarded] == fields_of(head, b"traceparent", b"tracestate")
    else:
        assert [] == fields_of(head, *TRACE_FIELDS)


# ---- the app's own telemetry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/metrics", "/v1/logs"])
@pytest.mark.parametrize("own_otlp", [False, True])
async def test_the_apps_own_otlp_just_passes_unless_asked_for(
    http_only: Collector, watch: Watcher, start_upstream: UpstreamStarter, path: str, own_otlp: bool
) -> None:
    environ, received = http_only
    upstream = await start_upstream(always(answer(b"no", "503 Service Unavailable")))
    sidecar = await watch(
        environ,
        upstreams={"collector": {"route": "/otel", "endpoints": [upstream.url], **NO_BREAKER}},
        policies={"default": {"retry_non_idempotent": True, "base_delay": 0.001, "max_delay": 0.001}},
        telemetry={"own_otlp": own_otlp},
    )
    reply = await ask(sidecar, request("POST", f"/otel{path}", f"traceparent: {GOOD}", body=b"spans"))
    assert 503 == reply.status
    tries = 4 if own_otlp else 1
    assert tries == len(upstream.requests)
    # A request beside it, so that there is something to wait for.
    await ask(sidecar, request("GET", f"/otel{path}"))
    await arrived(received, lambda: len(received.spans) >= 5 + (5 if own_otlp else 0))
    methods = sorted(tree.root.name for tree in trees(received.spans).values())
    assert (["GET", "POST"] if own_otlp else ["GET"]) == methods
    passed = [fields_of(head, b"traceparent") for head in upstream.requests[:tries]]
    if own_otlp:
        assert tries == len({head[0] for head in passed}), "each attempt has a span of its own"
    else:
        assert [[b"traceparent: " + GOOD.encode()]] == passed
    scraped = await sidecar.metrics()
    assert 2 == scraped.total("sidecar_sessions_total"), "counted it is"
    assert {"GET": 1, "POST": 1} == scraped.by("method", "sidecar_requests_total")


# ---- no series for whoever asks ----------------------------------------------------------------------------------


async def unknown(host: str, port: int) -> list[Any]:
    raise socket.gaierror(socket.EAI_NONAME, "nobody knows this name")


async def hostile_requests(sidecar: Watched, chance: random.Random, count: int) -> None:
    """Methods, hosts, paths, header names and sizes that nobody should have to store."""

    def word(most: int) -> str:
        return "".join(chance.choices(string.ascii_letters + string.digits, k=chance.randint(1, most)))

    for number in range(count):
        method = chance.choice([word(20), word(200).upper(), "PROPFIND", "M-SEARCH", "QUERY", "GET", "get"])
        target = chance.choice(
            [
                f"/{word(50)}",
                f"/u/{word(2000)}?{word(50)}={word(50)}",
                f"http://{word(60)}.invalid/{word(9)}",
                f"http://{word(300)}:{number}/",
                f"http://[{word(4)}]/",
                f"{word(30)}:{number}",
                "*",
            ]
        )
        fields = [f"{word(100)}: {word(2000)}" for _ in range(chance.randint(0, 20))]
        if chance.random() < 0.1:
            fields.append(f"X: {'y' * 80_000}")
        app = await sidecar.app()
        try:
            await app.ask(
                request(method, target, f"traceparent: {word(99)}", f"x-sidecar-{word(9)}: {word(9)}", *fields)
            )
        except (EOFError, ConnectionError):
            pass  # refused while it was still being sent
        app.close()


async def test_absurd_methods_hosts_and_headers_create_no_series(
    watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(always(answer()))
    sidecar = await watch(lookup=unknown, upstreams=routes(upstream), limits={"auto_upstreams": 5})
    chance = random.Random(4)
    await hostile_requests(sidecar, chance, 250)
    await at_rest(sidecar)
    first = await sidecar.metrics()
    await hostile_requests(sidecar, chance, 250)
    await at_rest(sidecar)
    second = await sidecar.metrics()
    assert second.total("sidecar_sessions_total") > first.total("sidecar_sessions_total") > 50
    assert second.total("sidecar_malformed_requests_total") > first.total("sidecar_malformed_requests_total") > 50
    known = {"GET", "QUERY", "_OTHER"}
    assert known >= second.values("method")
    assert len(second.values("upstream")) <= 5 + len(("u", "_other", "_none"))
    assert max(map(len, second.values("upstream"))) < 300
    assert second.series() <= 250 * 8
    assert second.series() - first.series() < 40, "twice the abuse, hardly a new series"


async def test_hosts_behind_a_wildcard_share_a_series_when_they_are_too_many(
    watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    keys = {"hosts": ["*.test"], "breaker": {"failure_threshold": 1}}
    sidecar = await watch(lookup=unknown, upstreams={"wild": keys})
    for number in range(120):
        await ask(sidecar, request("GET", f"http://h{number}.test/", "x-sidecar-retry: off"))
    scraped = await sidecar.metrics()
    assert {"_other"} < scraped.values("endpoint")
    assert 51 == len({s.labels["endpoint"] for s in scraped.samples if s.name == "sidecar_breaker_state"})
    assert 51 >= len({s.labels["endpoint"] for s in scraped.samples if s.name == "sidecar_breaker_transitions_total"})
    assert 120 == scraped.total("sidecar_breaker_transitions_total", to_state="open"), "none is lost"
    assert 1 == scraped.total("sidecar_breaker_state", endpoint="_other"), "one state, the worst of them"
    assert 1 == scraped.total("sidecar_breaker_state", endpoint="_other", state="open")
