"""Breakers, upstreams, the kill switch and policies over HTTP: what is shown, and what an operator's orders do."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from typing import Any

import pytest

from sidecar.admin.last_errors import LastErrors
from sidecar.admin.upstreams import quantile
from telemetry.sessions import Sessions
from telemetry.tally import Histogram
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.records import exhausted, healthy, recovered, wall
from tests.doubles.upstream import Talk, Upstream, always, answer
from tests.test_admin import admin, at_fault, order


async def by_path(talk: Talk) -> None:
    """`/500` is one; everything else is fine."""
    while True:
        head, _ = await talk.read_request()
        await talk.send(answer(b"", "500 No") if head.split()[1] == b"/500" else answer())


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter) -> Upstream:
    return await start_upstream(by_path)


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream, route: Any) -> Running:
    spare = "http://127.0.0.1:9"
    pair = {"hosts": ["pair.test"], "endpoints": ["http://127.0.0.1:7", spare]}
    return await start_sidecar(
        upstreams={**route(upstream, policy="once"), "pair": pair, "bare": {"hosts": ["bare.test"]}}
    )


async def get(sidecar: Running, path: str) -> int:
    return (await (await sidecar.app()).ask(f"GET {path} HTTP/1.1\r\nHost: s\r\n\r\n")).status


async def breaker(sidecar: Running, upstream: str = "u") -> dict[str, Any]:
    return (await admin(sidecar, f"/breakers?upstream={upstream}")).json["items"][0]


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


# ---- breakers ----------------------------------------------------------------------------------------------------


async def test_a_breaker_shows_its_state_counts_times_and_thresholds(sidecar: Running, upstream: Upstream) -> None:
    await get(sidecar, "/u/fine")
    for _ in range(5):
        await get(sidecar, "/u/500")
    shown = await breaker(sidecar)
    assert ("u", f"127.0.0.1:{upstream.port}", "open") == (shown["upstream"], shown["endpoint"], shown["state"])
    assert (5, 1, 5) == (shown["failure_count"], shown["success_count"], shown["consecutive_failures"])
    assert 0.833333 == shown["failure_ratio"]
    assert shown["last_failure_time"] == shown["opened_at"] == shown["last_state_change"]
    assert 10 == seconds_between(shown["opened_at"], shown["next_probe_at"])
    assert (5, 10.0, None) == (
        shown["thresholds"]["failure_threshold"],
        shown["thresholds"]["open_for"],
        shown["thresholds"]["slow_after"],
    )
    assert None is shown["forced"]
    assert 503 == await get(sidecar, "/u/fine")


async def test_breakers_can_be_chosen_and_paged(sidecar: Running) -> None:
    await order(sidecar, "/breakers/u/force-open")
    listed = (await admin(sidecar, "/breakers")).json["items"]
    assert ["pair", "pair", "u"] == [one["upstream"] for one in listed]
    assert ["u"] == [one["upstream"] for one in (await admin(sidecar, "/breakers?state=open")).json["items"]]
    first = (await admin(sidecar, "/breakers?limit=2")).json
    rest = (await admin(sidecar, f"/breakers?limit=2&cursor={first['next_cursor']}")).json
    assert (listed, None) == (first["items"] + rest["items"], rest["next_cursor"])
    wrong = await admin(sidecar, "/breakers?state=half-open")
    assert (400, ["state"]) == (wrong.status, at_fault(wrong))
    assert 'did you mean "half_open"?' in wrong.json["message"]


async def test_transitions_are_kept_newest_first_whatever_else_happens(sidecar: Running, upstream: Upstream) -> None:
    for _ in range(5):
        await get(sidecar, "/u/500")
    await order(sidecar, "/breakers/u/reset", {"reason": "it is back, token=verysecret"})
    for number in range(2_000):  # more than the ring of events holds
        sidecar.proxy.signals.observe(exhausted(session_id=b"%024d" % number, at=sidecar.proxy.loop.time()))
    await order(sidecar, "/breakers/pair/force-open", {"reason": "a drill"})
    told = (await admin(sidecar, "/breakers")).json["transitions"]
    assert [
        ("pair", "closed", "open", "forced open: a drill"),
        ("pair", "closed", "open", "forced open: a drill"),
        ("u", "open", "closed", "reset: it is back, token=REDACTED"),
        ("u", "closed", "open", "5 calls in a row failed"),
    ] == [(one["upstream"], one["from_state"], one["to_state"], one["reason"]) for one in told]
    assert f"127.0.0.1:{upstream.port}" == told[-1]["endpoint"]
    assert told == sorted(told, key=lambda one: one["timestamp"], reverse=True)
    assert 2 == len((await admin(sidecar, "/breakers?upstream=u")).json["transitions"])


async def test_the_last_thousand_transitions_are_kept(sidecar: Running) -> None:
    for number in range(1_005):
        sidecar.proxy.signals.breaker_changed("u", "a:1", "closed", "open", f"number {number}")
    told = (await admin(sidecar, "/breakers")).json["transitions"]
    assert (1_000, "number 1004", "number 5") == (len(told), told[0]["reason"], told[-1]["reason"])


async def test_what_is_kept_is_also_told_to_telemetry(sidecar: Running) -> None:
    await order(sidecar, "/breakers/u/force-open", {"reason": "a drill"})
    assert "circuit_breaker_opened" == sidecar.proxy.signals.events.recent(1)[0].type
    assert 1 == sum(sidecar.proxy.metrics.transitions.values())


# ---- orders ------------------------------------------------------------------------------------------------------


async def test_force_open_refuses_every_call_until_its_time_is_up(sidecar: Running, upstream: Upstream) -> None:
    reply = await order(sidecar, "/breakers/u/force-open", {"ttl": "10m", "reason": "a deploy"})
    (shown,) = reply.json["items"]
    assert (200, "open", "open", "a deploy") == (
        reply.status,
        shown["state"],
        shown["forced"]["state"],
        shown["forced"]["reason"],
    )
    assert 600 == seconds_between(shown["opened_at"], shown["forced"]["until"])
    assert 503 == await get(sidecar, "/u/fine")
    assert [] == upstream.requests
    (noted,) = (await admin(sidecar, "/audit?what=force-open")).json["items"]
    assert ("closed", {"state": "open", "for_seconds": 600}) == (noted["before"], noted["after"])


async def test_force_close_lets_every_call_through_until_reset(sidecar: Running) -> None:
    (shown,) = (await order(sidecar, "/breakers/u/force-close")).json["items"]
    assert {"state": "closed", "until": None, "reason": "by an operator"} == shown["forced"]
    for _ in range(10):
        assert 500 == await get(sidecar, "/u/500")
    (shown,) = (await order(sidecar, "/breakers/u/reset")).json["items"]
    assert (None, 0, "closed") == (shown["forced"], shown["failure_count"], shown["state"])


async def test_an_order_is_for_all_endpoints_or_the_one_that_is_named(sidecar: Running) -> None:
    await order(sidecar, "/breakers/pair/force-open?endpoint=127.0.0.1:9")
    listed = (await admin(sidecar, "/breakers?upstream=pair")).json["items"]
    assert {"127.0.0.1:7": "closed", "127.0.0.1:9": "open"} == {one["endpoint"]: one["state"] for one in listed}
    assert ["open", "open"] == [
        one["state"] for one in (await order(sidecar, "/breakers/pair/force-open")).json["items"]
    ]


async def test_a_host_that_is_not_configured_can_be_ordered_by_its_address(
    sidecar: Running, upstream: Upstream
) -> None:
    url = f"http://127.0.0.1:{upstream.port}/fine"
    assert 200 == await get(sidecar, url)
    assert 200 == (await order(sidecar, f"/breakers/127.0.0.1:{upstream.port}/force-open")).status
    assert 503 == await get(sidecar, url)


async def test_every_order_is_written_down_with_who_before_and_after(sidecar: Running) -> None:
    body = json.dumps({"reason": "a deploy"}).encode()
    fields = ("Content-Type: application/json", f"Content-Length: {len(body)}", "User-Agent: sidecar-cli/1 (ops)")
    await admin(sidecar, "/breakers/u/force-open", *fields, method="POST", body=body)
    lines = [json.loads(line) for line in sidecar.logged.getvalue().splitlines()]
    (line,) = [line for line in lines if line["event_name"] == "sidecar.operator.change"]
    assert ("closed", "open", "a deploy") == (line["before"], line["after"], line["reason"])
    assert ("127.0.0.1", "sidecar-cli/1 (ops)") == (line["client"], line["user_agent"])
    assert line["body"].startswith("ordered force-open of the breaker of u at 127.0.0.1:")


async def test_an_order_that_cannot_be_followed_names_what_is_wrong(sidecar: Running) -> None:
    for path, body, status, field, words in [
        ("/breakers/uu/reset", None, 404, "upstream", 'did you mean "u"?'),
        ("/breakers/pear/reset", None, 404, "upstream", 'did you mean "pair"?'),
        ("/breakers/u/rest", None, 404, "action", 'did you mean "reset"?'),
        ("/breakers/pair/reset?endpoint=127.0.0.1:8", None, 404, "endpoint", 'did you mean "127.0.0.1:'),
        ("/breakers/u/reset", {"ttl": "1m"}, 400, "ttl", "leave `ttl` out"),
        ("/retries/of", None, 404, "action", "enable, disable"),
        ("/retries/enabled", None, 404, "action", 'did you mean "enable"?'),
    ]:
        reply = await order(sidecar, path, body)
        assert (status, [field]) == (reply.status, at_fault(reply))
        assert words in reply.json["message"]
        assert [] == (await admin(sidecar, "/breakers")).json["transitions"]


async def test_an_upstream_that_has_no_breaker_yet_cannot_be_ordered_and_the_reason_is_told(sidecar: Running) -> None:
    reply = await order(sidecar, "/breakers/bare/force-open")
    assert (409, "CONFLICT") == (reply.status, reply.json["error_code"])
    assert "it names no `endpoints`" in reply.json["message"]


# ---- the kill switch ---------------------------------------------------------------------------------------------


async def test_the_kill_switch_ends_and_begins_retries_at_once(
    start_sidecar: Starter, upstream: Upstream, route: Any
) -> None:
    sidecar = await start_sidecar(upstreams=route(upstream), policies={"default": {"base_delay": 0.001}})
    shown = {"retries_enabled": True, "configured": True, "until": None, "lasting": True}
    assert shown == (await admin(sidecar, "/retries")).json
    assert {**shown, "retries_enabled": False} == (await order(sidecar, "/retries/disable")).json
    await get(sidecar, "/u/500")
    assert 1 == len(upstream.requests)
    assert "disabled" == (await admin(sidecar, "/sessions")).json["items"][0]["suppressed"]
    assert (await order(sidecar, "/retries/enable", {"reason": "over"})).json["retries_enabled"]
    await get(sidecar, "/u/500")
    assert 5 == len(upstream.requests)
    assert 2 == sidecar.logged.getvalue().count("sidecar.operator.change")


# ---- upstreams ---------------------------------------------------------------------------------------------------


async def test_an_upstream_shows_how_it_does(sidecar: Running, upstream: Upstream) -> None:
    for path in ("/u/fine", "/u/fine", "/u/fine", "/u/500"):
        await get(sidecar, path)
    shown = {one["name"]: one for one in (await admin(sidecar, "/upstreams")).json["items"]}
    assert ["bare", "pair", "u"] == list(shown)
    u = shown["u"]
    endpoint = {"endpoint": f"127.0.0.1:{upstream.port}", "breaker": "closed", "forced": False}
    assert (True, "once", [endpoint]) == (u["configured"], u["policy"], u["endpoints"])
    assert ({"good": 3, "neutral": 0, "bad": 1}, 0.75) == (u["sessions"], u["success_rate"])
    assert 0 < u["p50"] <= u["p99"]
    assert (4, 0.75) == (u["lately"]["sessions"], u["lately"]["success_rate"])
    assert {"active": 0, "idle": 1, "opened": 1, "failed": 0} == u["connections"]
    assert ({"remaining_ratio": 1.0, "allowance": 30}, 0, 0) == (u["retry_budget"], u["in_flight"], u["queued"])
    assert ("UPSTREAM_ERROR", "exhausted") == (u["last_error"]["code"], u["last_error"]["outcome"])
    assert 200 == (await admin(sidecar, f"/sessions/{u['last_error']['session_id']}")).status
    idle = shown["bare"]
    assert (None, None, None, None) == (idle["success_rate"], idle["p50"], idle["last_error"], idle["policy"])


async def test_hosts_that_are_not_configured_are_upstreams_too(sidecar: Running, upstream: Upstream) -> None:
    await get(sidecar, f"http://127.0.0.1:{upstream.port}/fine")
    (shown,) = (await admin(sidecar, "/upstreams?configured=false")).json["items"]
    assert (f"127.0.0.1:{upstream.port}", False) == (shown["name"], shown["configured"])
    assert 3 == len((await admin(sidecar, "/upstreams?configured=true")).json["items"])
    page = (await admin(sidecar, "/upstreams?limit=3")).json
    assert page["next_cursor"]
    rest = (await admin(sidecar, f"/upstreams?limit=3&cursor={page['next_cursor']}")).json
    assert (1, None) == (len(rest["items"]), rest["next_cursor"])


async def test_a_closed_gate_shows_who_waits_and_until_when(
    start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any
) -> None:
    limited = await start_upstream(always(answer(b"", "429 Slow Down", "Retry-After: 30")))
    sidecar = await start_sidecar(upstreams=route(limited, policy="once", max_in_flight=1, max_queue=5))
    await get(sidecar, "/u/x")
    waiting = await sidecar.app()
    await waiting.send("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")
    queued = await sidecar.app()
    await queued.send("GET /u/x HTTP/1.1\r\nHost: s\r\n\r\n")
    for _ in range(200):
        (shown,) = (await admin(sidecar, "/upstreams")).json["items"]
        if (1, 1) == (shown["gate"]["waiting"], shown["queued"]):
            break
    assert (1, 1, 1) == (shown["gate"]["waiting"], shown["gate"]["pauses"], shown["queued"])
    assert shown["gate"]["next_release"] > shown["last_error"]["timestamp"]
    assert ("RATE_LIMIT_EXCEEDED", 1) == (shown["last_error"]["code"], shown["max_in_flight"])


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.0005] * 10, 0.5, 0.0005),  # evenly spread below the first bound, 0.001
        ([0.002] * 5 + [0.2] * 5, 0.5, 0.0025),
        ([0.002] * 5 + [0.25] * 5, 0.99, 0.1 + 0.15 * 4.9 / 5),
        ([0.002] * 5 + [0.11] * 5, 0.99, 0.11),  # its bucket goes on, but no call was slower
        ([6.0], 0.99, 6.0),
        ([1000.0], 0.5, 60.0),  # beyond the last bound
    ],
)
def test_quantiles_are_those_of_prometheus_and_never_beyond_the_slowest(
    values: list[float], share: float, expected: float | None
) -> None:
    bounds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
    one, other = Histogram(bounds), Histogram(bounds)
    for index, value in enumerate(values):
        (one if index % 2 else other).observe(value)
    found = quantile((one, other), share)
    assert expected == (found if found is None else pytest.approx(found))


async def test_the_last_error_of_an_upstream_is_its_newest_however_many_sessions_there_are() -> None:
    sessions = Sessions(10_000, 60.0, wall)
    last = LastErrors(sessions)
    sessions.keep(recovered(session_id=b"a"))
    await last.refresh()
    assert b"a" == last.of("payments").session_id
    for number in range(5_000):
        sessions.keep(recovered(session_id=b"b%d" % number, at=2_000.0 + number))
    sessions.keep(exhausted(session_id=b"other", upstream="other"))
    sessions.keep(healthy(session_id=b"fine", at=9_000.0))
    await last.refresh()
    assert (b"b4999", b"other") == (last.of("payments").session_id, last.of("other").session_id)
    await last.refresh()
    assert b"b4999" == last.of("payments").session_id
    assert None is last.of("never")


async def test_a_slow_look_does_not_put_an_older_error_over_a_newer_one() -> None:
    sessions = Sessions(10_000, 60.0, wall)
    last = LastErrors(sessions)
    for number in range(2_500):
        sessions.keep(recovered(session_id=b"b%d" % number, at=2_000.0 + number))
    slow = last.refresh()
    slow.send(None)  # it has read its first slice
    sessions.keep(recovered(session_id=b"new", at=9_000.0))
    await last.refresh()
    with contextlib.suppress(StopIteration):
        while True:
            slow.send(None)
    assert b"new" == last.of("payments").session_id


# ---- policies ----------------------------------------------------------------------------------------------------


async def test_policies_are_shown_complete_with_who_uses_them(start_sidecar: Starter) -> None:
    operations = [{"name": "pay", "path": "/pay", "policy": "careful"}]
    sidecar = await start_sidecar(
        policies={"careful": {"max_attempts": 2}},
        upstreams={"a": {"hosts": ["a.test"], "policy": "careful", "operations": operations}},
        subsystem_mappings={"a": {"pay": {"NETWORK_TIMEOUT": "patient"}}},
    )
    listed = {one["id"]: one for one in (await admin(sidecar, "/policies")).json["items"]}
    assert {"default", "patient", "NETWORK_TIMEOUT", "careful"} <= set(listed)
    careful = (await admin(sidecar, "/policies/careful")).json
    assert listed["careful"] == careful
    assert (False, ["max_attempts"]) == (careful["shipped"], careful["changed"])
    assert ["upstreams.a.policy", "upstreams.a.operations.pay.policy"] == careful["used_by"]
    assert (2, 0.1) == (careful["policy"]["max_attempts"], careful["policy"]["base_delay"])
    outbox = "deliveries of the outbox, unless outbox.policy names another"
    assert ["subsystem_mappings.a.pay.NETWORK_TIMEOUT", outbox] == listed["patient"]["used_by"]
    assert ["whatever nothing else is chosen for"] == listed["default"]["used_by"]
    assert "error code NETWORK_TIMEOUT" in listed["NETWORK_TIMEOUT"]["used_by"]


async def test_a_policy_that_is_not_there_is_a_404_with_the_nearest(start_sidecar: Starter) -> None:
    reply = await admin(await start_sidecar(), "/policies/pateint")
    assert (404, ["id"]) == (reply.status, at_fault(reply))
    assert 'did you mean "patient"?' in reply.json["message"]
