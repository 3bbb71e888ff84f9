"""Nothing is lost and nothing counted twice: under a storm every signal adds up to what client and upstream counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from telemetry.record import GOOD
from tests.conftest import UpstreamStarter
from tests.doubles.faults import NO_BREAKER, at_rest, until
from tests.doubles.otlp import Received
from tests.doubles.upstream import Talk, Upstream
from tests.e2e.conftest import Collector, Watched, Watcher
from tests.e2e.signs import Scrape, get, trees
from tests.e2e.storm import Ledger, Weather, storm

ROUTES = ["/calm", "/guarded", "/metered"]


async def mirror(talk: Talk) -> None:
    while data := await talk.reader.read(1000):
        await talk.send(data)


def upstreams(upstream: Upstream) -> dict[str, Any]:
    """The same one, watched over in three ways, so that breakers and budgets say no as well."""
    to = {"endpoints": [upstream.url]}
    return {
        "calm": {"route": "/calm", **to, **NO_BREAKER},
        "guarded": {"route": "/guarded", **to, "breaker": {"failure_threshold": 3, "failure_ratio": 0.3}},
        "metered": {"route": "/metered", **to, "breaker": {"enabled": False}, "retry_budget": {"min_per_second": 0}},
    }


async def quiet(sidecar: Watched) -> Scrape:
    """A scrape once nothing is under way any more and nothing waits to be exported."""
    await at_rest(sidecar)
    await until(lambda: not sidecar.proxy.tunnels)
    spans, before = sidecar.proxy.metrics.spans, -1
    while before != (before := sum(spans.values())) or (sidecar.proxy.metrics.queue or (lambda: (0, 0)))()[0]:
        await asyncio.sleep(0.3)
    return await sidecar.metrics()


async def one_storm(
    watch: Watcher, start_upstream: UpstreamStarter, seed: int, environ: dict[str, str], count: int, **keys: Any
) -> tuple[Watched, Weather, Ledger]:
    weather = Weather(seed)
    upstream, mirrored = await start_upstream(weather), await start_upstream(mirror)
    sidecar = await watch(environ, upstreams=upstreams(upstream), egress={"connect_ports": [mirrored.port]}, **keys)
    ledger = await storm(sidecar, weather, seed, count, ROUTES, mirrored.port)
    assert ledger.tunnels == mirrored.connections
    return sidecar, weather, ledger


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_sessions_attempts_spans_events_and_aggregates_add_up(
    collector: Collector, watch: Watcher, start_upstream: UpstreamStarter, tmp_path: Path, seed: int
) -> None:
    environ, received = collector
    sidecar, weather, ledger = await one_storm(
        watch,
        start_upstream,
        seed,
        environ,
        600,
        telemetry={"slow_threshold": 600, "events": {"file": str(tmp_path / "events.jsonl")}},
    )
    scraped = await quiet(sidecar)
    made = sum(weather.arrivals.values())
    resent = sum(count - 1 for count in weather.arrivals.values())

    # The client and the upstream agree with each other, or the rest proves nothing.
    assert {name: weather.arrivals[name] for name in ledger.attempts} == ledger.attempts
    assert 600 == ledger.asked + ledger.malformed
    assert len(ledger.outcomes) >= 7, ledger.outcomes  # how many there are is for the timing to say

    # Metrics.
    assert ledger.asked == scraped.total("sidecar_sessions_total") == scraped.total("sidecar_requests_total")
    assert ledger.outcomes == scraped.by("outcome", "sidecar_sessions_total")
    assert ledger.malformed == scraped.total("sidecar_malformed_requests_total")
    assert made + ledger.tunnels == scraped.total("sidecar_upstream_attempts_total")
    assert made + ledger.tunnels == scraped.total("sidecar_session_attempts_sum")
    replaced = scraped.total("sidecar_upstream_attempts_total", kind="stale")  # sent again, and no retry
    assert resent == scraped.total("sidecar_retries_total") + replaced
    assert replaced > 0
    stopped = scraped.total("sidecar_retries_suppressed_total", reason="breaker_open")  # after a first attempt
    assert ledger.outcomes["breaker_open"] == scraped.total("sidecar_breaker_rejections_total") + stopped
    assert 0 == scraped.total("sidecar_requests_in_flight") == scraped.total("sidecar_internal_errors_total")

    # Spans: everything was sampled, so everything arrived, once.
    assert ledger.asked + made == scraped.total("sidecar_telemetry_spans_total", result="exported")
    assert ledger.asked + made == scraped.total("sidecar_telemetry_spans_total") == len(received.spans)
    found = trees(received.spans)
    assert ledger.asked == len(found)
    assert ledger.sessions <= found.keys()
    assert ledger.outcomes == Counter(tree.shown["sidecar.session.outcome"] for tree in found.values())
    assert len(received.spans) == len({(span.trace_id, span.span_id) for span in received.spans})

    # Sessions, events, aggregates.
    kept = {outcome: count for outcome, count in ledger.outcomes.items() if outcome not in ("first_try", "tunnelled")}
    listed: Counter[str] = Counter()
    for session in interesting(sidecar):  # what an open breaker refused is one row for all of a period
        listed[session["outcome"]] += 1 if session["refusals"] is None else session["refusals"]["count"]
    assert kept == listed
    events = Counter(event_types(tmp_path / "events.jsonl"))
    assert resent == events["retry_attempt"]
    assert ledger.outcomes["recovered"] == events["retry_success"]
    totals = (await get(sidecar.admin_address, "/retry-metrics?window=1h")).json
    assert (ledger.asked, made + ledger.tunnels, resent - replaced) == (
        totals["total_sessions"],
        totals["total_attempts"],
        totals["total_retries"],
    )
    assert sum(ledger.outcomes[word] for word in GOOD) == totals["successful_sessions"]


def interesting(sidecar: Watched) -> list[dict[str, Any]]:
    return [session for session in sidecar.sessions() if session["outcome"] not in ("first_try", "tunnelled")]


def event_types(path: Path) -> list[str]:
    return [json.loads(line)["event_type"] for line in path.read_bytes().splitlines()]


async def trouble(received: Received) -> None:
    """A collector that is fine, stuck and refusing by turns."""
    while True:
        await asyncio.sleep(0.15)
        received.blocked.clear()
        await asyncio.sleep(0.3)
        received.blocked.set()
        received.refusing = True
        await asyncio.sleep(0.15)
        received.refusing = False


async def test_every_span_has_exactly_one_fate_whatever_the_collector_does(
    collector: Collector, watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, received = collector
    small = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "40",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.3",
    }
    troubled = asyncio.create_task(trouble(received))
    try:
        sidecar, weather, ledger = await one_storm(watch, start_upstream, 7, {**environ, **small}, 1500)
    finally:
        troubled.cancel()
        received.refusing = False
        received.blocked.set()
    scraped = await quiet(sidecar)
    fates = scraped.by("result", "sidecar_telemetry_spans_total")
    assert ledger.asked + sum(weather.arrivals.values()) == sum(fates.values())
    assert {"exported", "dropped_queue_full", "export_failed", "unsampled"} == fates.keys(), "each of them happened"
    assert fates["exported"] <= len(received.spans), "what timed out may have arrived all the same"
    assert ledger.asked == scraped.total("sidecar_sessions_total"), "and no request has noticed"
    assert ledger.outcomes == scraped.by("outcome", "sidecar_sessions_total")
