"""Sessions, retry metrics and time series over HTTP: what was kept, filtered, paged and explained."""

from __future__ import annotations

from typing import Any

import pytest

from telemetry.aggregates import SERIES
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.records import exhausted, healthy, recovered
from tests.doubles.upstream import Talk, answer
from tests.test_admin import admin, at_fault


async def fails_twice(talk: Talk) -> None:
    """503, 503, then 200; `/always` never gets better, `/never` is a 404."""
    while True:
        head, _ = await talk.read_request()
        path = head.split()[1]
        earlier = sum(request.split()[1] == path for request in talk.upstream.requests) - 1
        if path.startswith(b"/never"):
            await talk.send(answer(b"", "404 Not Found"))
        elif earlier % 3 < 2 or path.startswith(b"/always"):
            await talk.send(answer(b"", "503 Busy"))
        else:
            await talk.send(answer())


@pytest.fixture
async def sidecar(start_sidecar: Starter, start_upstream: UpstreamStarter, route: Any) -> Running:
    upstream = await start_upstream(fails_twice)
    policies = {"default": {"max_attempts": 3, "base_delay": 0.005, "jitter_type": "none"}}
    return await start_sidecar(upstreams=route(upstream, breaker={"enabled": False}), policies=policies)


async def get(sidecar: Running, path: str) -> str:
    """Through the proxy; the session's id."""
    reply = await (await sidecar.app()).ask(f"GET {path} HTTP/1.1\r\nHost: s\r\n\r\n")
    return reply.get("x-sidecar-session") or ""


# ---- the list ----------------------------------------------------------------------------------------------------


async def test_sessions_are_listed_newest_first_with_their_attempts(sidecar: Running) -> None:
    saved = await get(sidecar, "/u/a")
    lost = await get(sidecar, "/u/always")
    listed = (await admin(sidecar, "/sessions")).json
    assert None is listed["next_cursor"]
    assert [(lost, "exhausted", 3), (saved, "recovered", 3)] == [
        (one["session_id"], one["outcome"], len(one["attempts"])) for one in listed["items"]
    ]
    assert [503, 503, 200] == [attempt["status"] for attempt in listed["items"][1]["attempts"]]
    assert "explanation" not in listed["items"][0]


async def test_sessions_can_be_filtered(sidecar: Running) -> None:
    for path in ("/u/a", "/u/always", "/u/never", "/nowhere"):
        await get(sidecar, path)
    for query, paths in [
        ("outcome=recovered", ["/u/a"]),
        ("outcome=rejected", ["/u/never"]),
        ("code=NOT_FOUND", ["/u/never"]),
        ("code=TEMPORARY_UNAVAILABLE", ["/u/always", "/u/a"]),
        ("upstream=u&outcome=exhausted", ["/u/always"]),
        ("upstream=_none", ["/nowhere"]),
        ("upstream=another", []),
        ("since=5m&code=NOT_FOUND", ["/u/never"]),
        ("since=2020-01-01T00:00:00Z&code=NOT_FOUND", ["/u/never"]),
        ("since=2999-01-01T00:00:00Z", []),
    ]:
        listed = (await admin(sidecar, f"/sessions?{query}")).json
        assert paths == [one["url"] for one in listed["items"]]


async def test_a_long_list_is_read_in_pages_that_stay_where_they_are(sidecar: Running) -> None:
    for number in range(130):
        sidecar.proxy.signals.observe(recovered(session_id=b"%024d" % number, at=sidecar.proxy.loop.time()))
    seen: list[str] = []
    cursor = ""
    while cursor is not None:
        page = (await admin(sidecar, f"/sessions?limit=60{f'&cursor={cursor}' if cursor else ''}")).json
        seen += [one["session_id"] for one in page["items"]]
        cursor = page["next_cursor"]
        sidecar.proxy.signals.observe(exhausted(session_id=b"new", at=sidecar.proxy.loop.time()))
    assert [f"{number:024d}" for number in reversed(range(130))] == seen


async def test_a_filter_that_makes_no_sense_is_refused(sidecar: Running) -> None:
    for query, field, words in [
        ("outcome=recoverd", "outcome", 'did you mean "recovered"?'),
        ("code=TIMEOUT_NETWORK_", "code", "is not an error code; GET /errors"),
        ("code=NETWORK_TIMEOT", "code", 'did you mean "NETWORK_TIMEOUT"?'),
        ("limit=0", "limit", "at least 1"),
        ("limit=1001", "limit", "at most 1000"),
        ("limit=ten", "limit", "must be a whole number"),
        ("since=yesterday", "since", "15m"),
        ("cursor=abc", "cursor", "leave it out to begin with the newest"),
        (f"upstream={'x' * 501}", "upstream", "too long"),
    ]:
        reply = await admin(sidecar, f"/sessions?{query}")
        assert (400, "VALIDATION_ERROR", [field]) == (reply.status, reply.json["error_code"], at_fault(reply))
        assert words in reply.json["message"]


# ---- one ---------------------------------------------------------------------------------------------------------


async def test_a_session_is_told_with_its_explanation(sidecar: Running) -> None:
    session_id = await get(sidecar, "/u/a?token=secret")
    told = (await admin(sidecar, f"/sessions/{session_id}")).json
    assert ("recovered", 2, "/u/a?token=REDACTED") == (told["outcome"], told["retry_count"], told["url"])
    assert told["summary"].startswith("GET to u recovered after 3 attempts")
    whats = [step["what"] for step in told["explanation"]]
    assert list(range(1, 8)) == [step["step"] for step in told["explanation"]]
    assert "Retried after 5 ms" in whats[2]
    assert "policies.default: attempt 2 of 3" == told["explanation"][2]["rule"]


async def test_the_explanation_is_plain_text_for_those_who_ask_for_that(sidecar: Running) -> None:
    session_id = await get(sidecar, "/u/a")
    reply = await admin(sidecar, f"/sessions/{session_id}", "Accept: text/plain")
    assert "text/plain; charset=utf-8" == reply.get("content-type")
    assert reply.body.decode().startswith("GET to u recovered after 3 attempts")
    assert "decided by: policies.default" in reply.body.decode()


async def test_a_session_that_is_not_kept_is_a_404_that_says_which_are(sidecar: Running) -> None:
    reply = await admin(sidecar, "/sessions/0000")
    assert (404, "NOT_FOUND") == (reply.status, reply.json["error_code"])
    assert "retried, failed, refused and slow ones are kept" in reply.json["message"]


# ---- added up ----------------------------------------------------------------------------------------------------


async def test_retry_metrics_add_up_to_what_the_app_saw(sidecar: Running) -> None:
    for path in ("/u/a", "/u/b", "/u/always", "/u/never"):
        await get(sidecar, path)
    told = (await admin(sidecar, "/retry-metrics?window=5m")).json
    assert (4, 2, 1, 1) == tuple(told[f"{word}_sessions"] for word in ("total", "successful", "failed", "neutral"))
    assert (10, 6, 3) == (told["total_attempts"], told["total_retries"], told["max_attempts_in_session"])
    assert {"3": 2} == {key: count for key, count in told["success_by_attempt"].items() if count}
    assert {"NOT_FOUND": 1, "TEMPORARY_UNAVAILABLE": 7} == told["failure_by_reason"]
    assert 4 == told["by_upstream"]["u"]["sessions"] == told["by_policy"]["default"]["sessions"]


async def test_a_window_of_any_length_up_to_a_day_is_answered(sidecar: Running) -> None:
    await get(sidecar, "/u/a")
    for window in ["1m", "60", "1h", "24h"]:
        assert 1 == (await admin(sidecar, f"/retry-metrics?window={window}")).json["total_sessions"]
        points = (await admin(sidecar, f"/timeseries?metric=retries&window={window}")).json["items"]
        assert 2 == sum(point["value"] for point in points)


async def test_every_series_can_be_asked_for(sidecar: Running) -> None:
    await get(sidecar, "/u/a")
    for metric in SERIES:
        told = (await admin(sidecar, f"/timeseries?metric={metric}&window=10m&step=5m")).json
        assert (metric, 600, 300) == (told["metric"], told["window"], told["step"])
        assert 2 <= len(told["items"]) <= 3
        assert told["items"][-1]["value"] is not None


async def test_a_window_that_makes_no_sense_is_refused(sidecar: Running) -> None:
    for path, field, words in [
        ("/retry-metrics?window=10s", "window", "at least 60"),
        ("/retry-metrics?window=25h", "window", "at most 86400"),
        ("/retry-metrics?window=long", "window", "15m"),
        ("/timeseries", "metric", "is required"),
        ("/timeseries?metric=retrys", "metric", 'did you mean "retries"?'),
        ("/timeseries?metric=retries&step=90", "step", "multiple of 60"),
        ("/timeseries?metric=retries&window=24h&step=5m", "step", "multiple of 3600"),
        ("/timeseries?metric=retries&step=1s", "step", "at least 60"),
    ]:
        reply = await admin(sidecar, path)
        assert (400, [field]) == (reply.status, at_fault(reply))
        assert words in reply.json["message"]


async def test_sampled_healthy_sessions_can_be_looked_at_too(sidecar: Running) -> None:
    sidecar.proxy.signals.sessions.sample(healthy(session_id=b"f1ne", at=sidecar.proxy.loop.time()))
    assert "first_try" == (await admin(sidecar, "/sessions/f1ne")).json["outcome"]
