"""Replays over HTTP: one entry, many by a filter, looked at before, on the way and afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from telemetry.record import SENT
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.letters import DENIED, Moody, keep, send, store
from tests.doubles.upstream import Upstream
from tests.test_admin import admin, at_fault


@pytest.fixture
def mood() -> Moody:
    return Moody()


@pytest.fixture
async def upstream(start_upstream: UpstreamStarter, mood: Moody) -> Upstream:
    return await start_upstream(mood)


@pytest.fixture
async def sidecar(start_sidecar: Starter, upstream: Upstream) -> Running:
    payments = {
        "route": "/pay",
        "endpoints": [upstream.url],
        "policy": "once",
        "breaker": {"enabled": False},
        "replay": {"rate": 1000},
    }
    return await start_sidecar(upstreams={"payments": payments})


async def replay(sidecar: Running, body: dict[str, Any] | None = None) -> Any:
    reply = await send(sidecar, "POST", "/dlq/replay", body or {})
    assert reply.status in (200, 202), reply.body
    return reply.json


async def ended(sidecar: Running, job_id: str, *states: str) -> Any:
    async with asyncio.timeout(20):
        while (shown := (await admin(sidecar, f"/dlq/replays/{job_id}")).json)["state"] not in states:
            await asyncio.sleep(0.02)
    return shown


# ---- one ---------------------------------------------------------------------------------------------------------


async def test_an_entry_is_replayed_once_and_the_second_time_refused_with_when(
    sidecar: Running, upstream: Upstream
) -> None:
    dlq_id = await keep(sidecar, upstream)
    done = (await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {})).json
    assert ("completed", "completed", True) == (done["outcome"], done["entry"]["status"], done["entry"]["processed"])
    again = await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {"force": True, "reason": "I want it twice"})
    assert (409, "CONFLICT") == (again.status, again.json["error_code"])
    assert f"it already succeeded at {done['entry']['replayed_at']}" in again.json["message"]
    assert 1 == len(upstream.requests)
    assert b"canary-credential" in upstream.requests[0]
    assert "replayed dead letter" in sidecar.logged.getvalue()
    assert "canary" not in sidecar.logged.getvalue()


async def test_a_replay_that_fails_leaves_the_entry_waiting(sidecar: Running, upstream: Upstream, mood: Moody) -> None:
    dlq_id = await keep(sidecar, upstream)
    mood.status = "503 Busy"
    done = (await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {})).json
    assert ("failed", "pending", "triage") == (done["outcome"], done["entry"]["status"], done["entry"]["state"])
    assert ("TEMPORARY_UNAVAILABLE", 1) == (done["entry"]["error_class"], done["entry"]["replays"])


async def test_a_critical_class_needs_a_remediation_first(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, **DENIED)
    refused = await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {})
    assert (409, 0) == (refused.status, len(upstream.requests))
    assert "add a remediation (kind and evidence), or use `force` with a `reason`" in refused.json["message"]
    fixed = {"remediation": {"kind": "auth_config", "evidence": "rotated"}}
    assert 200 == (await send(sidecar, "PATCH", f"/dlq/{dlq_id}", fixed)).status
    assert "completed" == (await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {})).json["outcome"]


async def test_force_needs_a_reason(sidecar: Running, upstream: Upstream) -> None:
    dlq_id = await keep(sidecar, upstream, code="NETWORK_TIMEOUT", phase=SENT)
    for path in (f"/dlq/{dlq_id}/replay", "/dlq/replay"):
        for body in ({"force": True}, {"force": True, "reason": "  "}):
            reply = await send(sidecar, "POST", path, body)
            assert 400 == reply.status
            assert "reason" in reply.json["message"]
    assert 0 == len(upstream.requests)
    forced = await send(sidecar, "POST", f"/dlq/{dlq_id}/replay", {"force": True, "reason": "they have not got it"})
    assert "completed" == forced.json["outcome"]


# ---- many --------------------------------------------------------------------------------------------------------


async def test_a_dry_run_says_what_would_happen_and_changes_nothing(sidecar: Running, upstream: Upstream) -> None:
    for number in range(3):
        await keep(sidecar, upstream, number)
    await keep(sidecar, upstream, 3, code="NETWORK_TIMEOUT", phase=SENT)
    await keep(sidecar, upstream, 4, **DENIED)
    before = (await admin(sidecar, "/dlq")).json
    told = await replay(sidecar, {"dry_run": True})
    dry = told["dry_run"]
    assert (None, {"safe": 4, "unsafe": 1}) == (told["replay"], dry["by_verdict"])
    assert ({"remediation": 1}, 3, 3) == (dry["refused_in_first_page"], len(dry["first"]), dry["would_replay"])
    limited = (await replay(sidecar, {"dry_run": True, "limit": 2, "filter": {"status": "pending"}}))["dry_run"]
    assert 2 == limited["would_replay"]
    assert before == (await admin(sidecar, "/dlq")).json
    assert (0, []) == (len(upstream.requests), (await admin(sidecar, "/dlq/replays")).json["items"])


async def test_a_dry_run_tells_which_breakers_are_in_the_way(
    start_sidecar: Starter, start_upstream: UpstreamStarter
) -> None:
    upstream = await start_upstream(Moody())
    sidecar = await start_sidecar(upstreams={"payments": {"route": "/pay", "endpoints": [upstream.url]}})
    await keep(sidecar, upstream)
    await (await store(sidecar)).listing.refresh()
    assert {} == (await replay(sidecar, {"dry_run": True}))["dry_run"]["breakers"]
    assert 200 == (await send(sidecar, "POST", "/breakers/payments/force-open", {})).status
    assert {"payments": "open"} == (await replay(sidecar, {"dry_run": True}))["dry_run"]["breakers"]
    elsewhere = {"dry_run": True, "filter": {"upstream": "mail"}}
    assert {} == (await replay(sidecar, elsewhere))["dry_run"]["breakers"]


async def test_many_go_out_by_filter_and_each_once(sidecar: Running, upstream: Upstream) -> None:
    safe = [await keep(sidecar, upstream, number) for number in range(9)]
    unsafe = await keep(sidecar, upstream, 20, code="NETWORK_TIMEOUT", phase=SENT)
    reply = await send(sidecar, "POST", "/dlq/replay", {"filter": {"status": "pending"}, "reason": "they are back"})
    assert (202, None) == (reply.status, reply.json["dry_run"])
    job = reply.json["replay"]
    done = await ended(sidecar, job["job_id"], "done")
    assert (9, 9, {"completed": 9}) == (done["total"], done["done"], done["outcomes"])
    assert 9 == len(upstream.requests)
    completed = (await admin(sidecar, "/dlq?status=completed")).json["items"]
    assert sorted(safe) == sorted(item["dlq_id"] for item in completed)
    assert "pending" == (await admin(sidecar, f"/dlq/{unsafe}")).json["status"]
    assert [job["job_id"]] == [item["job_id"] for item in (await admin(sidecar, "/dlq/replays")).json["items"]]
    assert "they are back" in sidecar.logged.getvalue()


async def test_a_failed_canary_pauses_the_job_until_somebody_resumes_or_cancels(
    sidecar: Running, upstream: Upstream, mood: Moody
) -> None:
    for number in range(6):
        await keep(sidecar, upstream, number)
    mood.next = ["503 Busy"]
    job_id = (await replay(sidecar))["replay"]["job_id"]
    paused = await ended(sidecar, job_id, "paused")
    assert ({"failed": 1}, "the first replay failed; look at it, then resume or cancel") == (
        paused["outcomes"],
        paused["why"],
    )
    resumed = await send(sidecar, "POST", f"/dlq/replays/{job_id}/resume", {"reason": "a hiccup"})
    assert "running" == resumed.json["state"]
    done = await ended(sidecar, job_id, "done")
    assert {"failed": 1, "completed": 5} == done["outcomes"]
    late = await send(sidecar, "POST", f"/dlq/replays/{job_id}/cancel", {})
    assert (409, "CONFLICT") == (late.status, late.json["error_code"])
    assert "there is nothing left to cancel" in late.json["message"]
    assert "ordered resume of replay" in sidecar.logged.getvalue()


async def test_a_replay_is_paused_and_cancelled(sidecar: Running, upstream: Upstream) -> None:
    for number in range(50):
        await keep(sidecar, upstream, number)
    job_id = (await replay(sidecar, {"rate": 5}))["replay"]["job_id"]
    assert "paused" == (await send(sidecar, "POST", f"/dlq/replays/{job_id}/pause", {})).json["state"]
    assert "cancelled" == (await send(sidecar, "POST", f"/dlq/replays/{job_id}/cancel", {})).json["state"]
    shown = (await admin(sidecar, f"/dlq/replays/{job_id}")).json
    assert shown["done"] < 50
    unknown = await send(sidecar, "POST", f"/dlq/replays/{job_id}/stop", {})
    assert (404, ["action"]) == (unknown.status, at_fault(unknown))


async def test_replays_are_listed_in_pages(sidecar: Running, upstream: Upstream) -> None:
    started = []
    for number in range(3):
        await keep(sidecar, upstream, number)
        started.append((await replay(sidecar))["replay"]["job_id"])
        await ended(sidecar, started[-1], "done")
    first = (await admin(sidecar, "/dlq/replays?limit=2")).json
    second = (await admin(sidecar, f"/dlq/replays?limit=2&cursor={first['next_cursor']}")).json
    assert (started[::-1], None) == (
        [item["job_id"] for item in first["items"] + second["items"]],
        second["next_cursor"],
    )
    reply = await admin(sidecar, "/dlq/replays?cursor=rpl_x")
    assert (400, ["cursor"]) == (reply.status, at_fault(reply))


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"filter": {"status": "pendin"}}, "filter.status", 'did you mean "pending"?'),
        ({"filter": {"upstrem": "u"}}, "filter.upstrem", 'did you mean "upstream"?'),
        ({"filter": {"error_class": "NETWORK_TIMEOT"}}, "error_class", 'did you mean "NETWORK_TIMEOUT"?'),
        ({"filter": {"upstream": [1]}}, "filter.upstream", "must be words"),
        ({"rate": 0}, "rate", "greater than 0"),
        ({"rate": 1001}, "rate", "at most 1000"),
        ({"limit": 0}, "limit", "at least 1"),
        ({"dryrun": True}, "dryrun", 'did you mean "dry_run"?'),
    ],
)
async def test_an_order_that_makes_no_sense_starts_nothing(
    sidecar: Running, upstream: Upstream, body: Any, field: str, words: str
) -> None:
    await keep(sidecar, upstream)
    reply = await send(sidecar, "POST", "/dlq/replay", body)
    assert (400, [field]) == (reply.status, at_fault(reply))
    assert words in reply.json["message"]
    assert (0, []) == (len(upstream.requests), (await admin(sidecar, "/dlq/replays")).json["items"])


async def test_a_filter_for_what_cannot_be_replayed_is_refused(sidecar: Running, upstream: Upstream) -> None:
    await keep(sidecar, upstream)
    reply = await send(sidecar, "POST", "/dlq/replay", {"filter": {"status": "completed"}})
    assert (409, "CONFLICT") == (reply.status, reply.json["error_code"])
    assert "only pending entries are replayed" in reply.json["message"]
