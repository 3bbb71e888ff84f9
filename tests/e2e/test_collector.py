"""A collector that dies, hangs, refuses or talks nonsense costs no request anything, is counted, and is found again."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from telemetry.otel_settings import BadVariable, read
from tests.conftest import Running, UpstreamStarter
from tests.doubles.faults import NO_BREAKER, request, until
from tests.doubles.otlp import Received, grpc_collector, http_collector
from tests.doubles.prometheus import free_port
from tests.doubles.upstream import Talk, Upstream, always, answer
from tests.e2e.conftest import Runner, Watched, Watcher, variables
from tests.e2e.line import Line
from tests.e2e.signs import arrived, trees

IMPATIENT = {
    "OTEL_EXPORTER_OTLP_TIMEOUT": "0.4",
    "OTEL_BSP_MAX_QUEUE_SIZE": "100",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "50",
}


@pytest_asyncio.fixture(params=["grpc", "http/protobuf"])
async def distant(request: pytest.FixtureRequest) -> AsyncIterator[tuple[dict[str, str], Received, Line]]:
    """A collector behind a line: the variables that lead there, what it got, and the line."""
    running = grpc_collector if request.param == "grpc" else http_collector
    with running() as (url, received):
        line = await Line(int(url.rpartition(":")[2])).start()
        yield variables(line.url, request.param), received, line
        await line.cut()


async def now_and_then(talk: Talk) -> None:
    """Every fifth request fails at first."""
    while True:
        await talk.read_request()
        failing = len(talk.upstream.requests) % 5 == 0
        await talk.send(answer(b"no", "503 Service Unavailable") if failing else answer())


def routes(upstream: Upstream) -> dict[str, Any]:
    return {"u": {"route": "/u", "endpoints": [upstream.url], **NO_BREAKER}}


@asynccontextmanager
async def under_load(sidecar: Running, workers: int = 4) -> AsyncIterator[Counter[tuple[int, str | None]]]:
    """Apps that ask and ask on kept connections; what they got, by status and outcome."""
    got: Counter[tuple[int, str | None]] = Counter()
    over = False

    async def work() -> None:
        app = await sidecar.app()
        while not over:
            reply = await app.ask(request("GET", "/u/x"))
            got[reply.status, reply.get("x-sidecar-outcome")] += 1
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(work()) for _ in range(workers)]
    try:
        yield got
    finally:
        over = True
        await asyncio.gather(*tasks)


async def grows(value: Callable[[], int], by: int, what: str) -> None:
    before = value()
    await until(lambda: value() >= before + by, f"{what} stayed at {value()}")


async def check_sums(sidecar: Watched, got: Counter[tuple[int, str | None]]) -> None:
    """No request failed, none is missing, and every span has a fate."""
    assert {(200, "first_try"), (200, "recovered")} == got.keys()
    queue = sidecar.proxy.metrics.queue
    assert queue is not None
    await until(lambda: queue()[0] == 0)
    scraped = await sidecar.metrics()
    attempts = scraped.total("sidecar_upstream_attempts_total")

    def fates() -> int:
        return sum(sidecar.proxy.metrics.spans.values())

    assert sum(got.values()) == scraped.total("sidecar_sessions_total")
    await until(lambda: sum(got.values()) + attempts == fates(), "a span without a fate")


async def test_killed_under_load_it_costs_no_request_is_counted_and_is_found_again(
    distant: tuple[dict[str, str], Received, Line], watch: Watcher, start_upstream: UpstreamStarter
) -> None:
    environ, _, line = distant
    upstream = await start_upstream(now_and_then)
    sidecar = await watch({**environ, **IMPATIENT}, upstreams=routes(upstream))
    spans, exports = sidecar.proxy.metrics.spans, sidecar.proxy.metrics.exports
    async with under_load(sidecar) as got:
        await grows(lambda: spans["exported"], 100, "exported")
        asked = sum(got.values())
        await line.cut()
        await grows(lambda: spans["export_failed"], 200, "export_failed")
        assert sum(got.values()) > asked, "requests went on all the time"
        assert exports["traces", "failure"] > 0
        await line.mend()
        await grows(lambda: spans["exported"], 100, "exported after the collector came back")
    await check_sums(sidecar, got)
    told = [entry for entry in sidecar.lines("sidecar.telemetry") if entry["severity_text"] in ("WARN", "ERROR")]
    assert len(told) < 150, "the log does not drown in it"
    scraped = await sidecar.metrics()
    assert scraped.total("sidecar_telemetry_exports_total", signal="traces", result="failure") > 0
    assert scraped.total("sidecar_telemetry_last_export_success_timestamp_seconds", signal="traces") > 0


@pytest.mark.parametrize("fault", ["hold", "refuse", "babble"])
async def test_a_collector_that_hangs_refuses_or_babbles_costs_no_request(
    distant: tuple[dict[str, str], Received, Line], watch: Watcher, start_upstream: UpstreamStarter, fault: str
) -> None:
    environ, received, line = distant
    await line.fail(fault)
    upstream = await start_upstream(now_and_then)
    sidecar = await watch({**environ, **IMPATIENT}, upstreams=routes(upstream))
    spans = sidecar.proxy.metrics.spans
    async with under_load(sidecar) as got:
        await grows(lambda: spans["export_failed"], 50, "export_failed")
        if fault == "hold":  # the queue fills while one batch is waited for, and loses its oldest
            await grows(lambda: spans["dropped_queue_full"], 50, "dropped_queue_full")
        assert 0 == spans["exported"] == len(received.spans)
        assert line.accepted > 0
        await line.mend()
        await grows(lambda: spans["exported"], 50, "exported")
    await check_sums(sidecar, got)


# ---- as a process, in an environment that is not made for it -----------------------------------------------------


async def test_telemetry_never_goes_through_the_sidecar_itself(
    distant: tuple[dict[str, str], Received, Line], run: Runner, start_upstream: UpstreamStarter
) -> None:
    environ, received, line = distant
    upstream, port = await start_upstream(always(answer())), free_port()
    names = "HTTP_PROXY http_proxy HTTPS_PROXY https_proxy ALL_PROXY all_proxy grpc_proxy".split()
    proxied = dict.fromkeys(names, f"http://127.0.0.1:{port}")
    over_http = environ["OTEL_EXPORTER_OTLP_PROTOCOL"] != "grpc"
    await line.cut()  # reconnecting must not find the proxy either
    process = await run(
        {
            **environ,
            **proxied,
            "NO_PROXY": "",
            "no_proxy": "",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "0.4",
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp" if over_http else "none",  # they take some seconds to be gathered
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
            "SIDECAR__LISTEN__PORT": str(port),
        },
        upstreams=routes(upstream),
        egress={"connect_ports": [line.port]},
    )
    assert 200 == (await process.ask(request("GET", "/u/x"))).status
    told = await process.logged("sidecar.telemetry")
    assert ("ERROR", True) == (told["severity_text"], "export" in told["body"]), "the log names the trouble"
    await line.mend()
    replies = [await process.ask(request("GET", path)) for path in ("/u/x", "/nowhere")]
    assert [200, 404] == [reply.status for reply in replies]
    wanted = {reply.get("x-sidecar-session") for reply in replies}
    await arrived(received, lambda: wanted <= trees(received.spans).keys(), "the spans")
    await arrived(received, lambda: bool(received.log_records), "log records")
    if over_http:
        await arrived(received, lambda: bool(received.metrics), "metrics")
    scraped = await process.metrics()
    assert {"first_try": 2, "denied": 1} == scraped.by("outcome", "sidecar_sessions_total"), "nothing but ours"
    assert 0 == scraped.total("sidecar_malformed_requests_total")
    assert {"u", "_none"} == scraped.values("upstream")
    process.signal(signal.SIGTERM)
    assert 0 == await process.ended()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317/with s3cr3t"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon"),
        ("OTEL_TRACES_SAMPLER", "s3cr3t"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "s3cr3t"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such/file.pem"),
    ],
)
async def test_a_bad_variable_is_named_and_the_sidecar_runs_on_without_export(
    run: Runner, start_upstream: UpstreamStarter, name: str, value: str
) -> None:
    upstream = await start_upstream(always(answer()))
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    process = await run({**environ, name: value}, upstreams=routes(upstream))
    told = [line["body"] for line in process.lines("sidecar.telemetry") if line["severity_text"] == "ERROR"]
    assert [name] == [body.split()[0] for body in told], told
    assert "s3cr3t" not in process.stderr
    parent = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    reply = await process.ask(request("GET", "/u/x", parent))
    assert (200, "first_try") == (reply.status, reply.get("x-sidecar-outcome"))
    assert parent.encode() in upstream.requests[0].split(b"\r\n"), "forwarded as it came"
    assert 200 == (await process.admin("/readyz")).status
    process.signal(signal.SIGTERM)
    assert 0 == await process.ended()


def test_a_certificate_of_the_signal_goes_before_the_general_one(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4317", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such/file.pem"}
    with pytest.raises(BadVariable, match=r"^OTEL_EXPORTER_OTLP_CERTIFICATE must name a file"):
        read(environ)
    assert None is not read({**environ, "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": str(tmp_path / "ca.pem")})


async def test_the_end_does_not_wait_for_a_dead_collector(run: Runner, start_upstream: UpstreamStarter) -> None:
    upstream = await start_upstream(always(answer()))
    environ = {**variables(f"http://127.0.0.1:{free_port()}", "grpc"), "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    process = await run(environ, upstreams=routes(upstream))
    for _ in range(20):
        assert 200 == (await process.ask(request("GET", "/u/x"))).status
    process.signal(signal.SIGTERM)
    assert 0 == await process.ended(within=15)
    assert "sidecar.stopped" == process.lines()[-1]["event_name"]
