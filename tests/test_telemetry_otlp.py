"""Spans, log records and metrics as a real collector receives them, over gRPC and HTTP, and what its faults do to us."""

from __future__ import annotations

import io
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from config.telemetry import Telemetry
from telemetry.logs import Log
from telemetry.record import PARTLY_SENT, Trace
from telemetry.signals import Signals
from tests.doubles.otlp import Received, attributes, grpc_collector, http_collector
from tests.doubles.records import ARRIVED, attempt, exhausted, healthy, recovered, retry, session, wall

TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
SERVER, CLIENT, INTERNAL = 2, 3, 1
UNSET, ERROR = 0, 2

Make = Callable[..., Signals]


@pytest.fixture
def make_signals() -> Iterator[Make]:
    made: list[Signals] = []

    def make(environ: dict[str, str], **settings: Any) -> Signals:
        signals = Signals(
            Telemetry.model_validate(settings),
            environ={"OTEL_BSP_SCHEDULE_DELAY": "20", **environ},
            monotonic=lambda: ARRIVED,
            wall=wall,
            ids=random.Random(3).getrandbits,
            log=Log(io.StringIO()),
            version="1.2.3",
            server_id="sidecar-1",
        )
        made.append(signals)
        return signals

    yield make
    for signals in made:
        signals.close(0.2)


def said(signals: Signals) -> list[dict[str, Any]]:
    signals.writer.flush()
    stream = signals.log._stream
    assert isinstance(stream, io.StringIO)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def traced(signals: Signals, made: Any, traceparent: bytes | None = None) -> Any:
    """As the exchange does it: a trace at the start, a span id for each attempt, then the finished record."""
    made.trace = signals.begin(traceparent, None, "participate")
    for each in made.attempts:
        signals.traces.header(made.trace, each)
    signals.observe(made)
    return made


@pytest.fixture(params=["grpc", "http/protobuf"])
def collector(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, str], Received]]:
    """The variables that lead to it, and what it got."""
    running = grpc_collector if request.param == "grpc" else http_collector
    with running() as (url, received):
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": request.param}, received


# ---- the tree ----------------------------------------------------------------------------------------------------


def test_a_recovered_session_is_one_server_span_and_a_client_span_per_attempt(
    make_signals: Make, collector: tuple[dict[str, str], Received]
) -> None:
    environ, received = collector
    signals = make_signals(environ)
    made = recovered(
        method="POST",
        operation="create_charge",
        host="api.test:443",
        client="127.0.0.1",
        target="http://api.test:443/v1/charges?token=s3cret&page=2",
    )
    made.attempts[0].address = "10.0.0.1:443"
    traced(signals, made, f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01".encode())
    received.until(lambda: len(received.spans) == 3)
    server, first, second = received.spans
    assert ["POST create_charge"] * 3 == [span.name for span in received.spans]
    assert [SERVER, CLIENT, CLIENT] == [span.kind for span in received.spans]
    assert {TRACE_ID.to_bytes(16, "big")} == {span.trace_id for span in received.spans}
    assert SPAN_ID.to_bytes(8, "big") == server.parent_span_id
    assert [server.span_id] * 2 == [first.parent_span_id, second.parent_span_id]
    assert [each.span_id.to_bytes(8, "big") for each in made.attempts] == [first.span_id, second.span_id]
    assert [UNSET, ERROR, UNSET] == [span.status.code for span in received.spans]
    assert {
        "http.request.method": "POST",
        "url.path": "/v1/charges",
        "url.scheme": "http",
        "url.query": "token=REDACTED&page=2",
        "server.address": "api.test",
        "server.port": 443,
        "client.address": "127.0.0.1",
        "http.response.status_code": 200,
        "sidecar.session.id": made.session_id.decode(),
        "sidecar.session.attempts": 2,
        "sidecar.session.outcome": "recovered",
        "sidecar.upstream": "payments",
        "sidecar.operation": "create_charge",
        "sidecar.policy": "default",
        "sidecar.sampling": "head",
    } == attributes(server)
    assert {
        "http.request.method": "POST",
        "server.address": "a.test",
        "server.port": 443,
        "url.full": "http://a.test:443/v1/charges?token=REDACTED&page=2",
        "http.response.status_code": 503,
        "error.type": "TEMPORARY_UNAVAILABLE",
        "network.peer.address": "10.0.0.1",
        "network.peer.port": 443,
        "network.protocol.version": "1.1",
        "sidecar.upstream": "payments",
        "sidecar.policy": "default",
        "sidecar.breaker.state": "closed",
        "sidecar.send_phase": "sent",
        "sidecar.attempt.kind": "first",
    } == attributes(first)
    resent = attributes(second)
    assert (1, "TEMPORARY_UNAVAILABLE", 0.2) == (
        resent["http.request.resend_count"],
        resent["sidecar.retry.reason"],
        resent["sidecar.retry.backoff_s"],
    )
    (scheduled,) = server.events
    assert ("sidecar.retry.scheduled", {"reason": "TEMPORARY_UNAVAILABLE", "delay_s": 0.2}) == (
        scheduled.name,
        attributes(scheduled),
    )


def test_spans_have_the_times_of_the_record(make_signals: Make, collector: tuple[dict[str, str], Received]) -> None:
    environ, received = collector
    made = traced(make_signals(environ), recovered())
    received.until(lambda: len(received.spans) == 3)
    expected = [(made.started, made.ended), *((each.started, each.ended) for each in made.attempts)]
    for (started, ended), span in zip(expected, received.spans, strict=True):
        assert abs(wall(started) * 1e9 - span.start_time_unix_nano) < 2_000
        assert abs(wall(ended) * 1e9 - span.end_time_unix_nano) < 2_000


def test_the_resource_says_who_and_headers_go_along(
    make_signals: Make, collector: tuple[dict[str, str], Received]
) -> None:
    environ, received = collector
    environ |= {
        "OTEL_SERVICE_NAME": "checkout-sidecar",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=prod,service.name=ignored,team=a%20b",
        "OTEL_EXPORTER_OTLP_HEADERS": "Api-Key=abc%3D,x=1",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    traced(make_signals(environ), recovered())
    received.until(lambda: len(received.spans) == 3)
    resource = received.resources[0]
    assert ("checkout-sidecar", "1.2.3", "sidecar-1", "prod", "a b") == tuple(
        resource[name]
        for name in ("service.name", "service.version", "service.instance.id", "deployment.environment.name", "team")
    )
    assert ("abc=", "1") == (received.headers[0]["api-key"], received.headers[0]["x"])


@pytest.mark.parametrize(
    ("made", "server", "attempt_statuses", "error"),
    [
        (healthy(), UNSET, [UNSET], None),
        (recovered(), UNSET, [ERROR, UNSET], None),
        (exhausted(), ERROR, [ERROR, ERROR], "CONNECTION_REFUSED"),
        (session("rejected", attempt(status=404, code="NOT_FOUND")), UNSET, [ERROR], None),
        (session("cancelled", attempt(code="CLIENT_DISCONNECTED"), status=0), UNSET, [UNSET], None),
        (session("cancelled", attempt(status=200, code=None)), UNSET, [UNSET], None),
        (session("failed_streaming", attempt(status=200, code="CONNECTION_RESET")), ERROR, [ERROR], "CONNECTION_RESET"),
        (session("breaker_open", status=503, code="CIRCUIT_OPEN"), ERROR, [], "CIRCUIT_OPEN"),
        (session("exhausted", attempt(status=429, code="RATE_LIMIT_EXCEEDED")), UNSET, [ERROR], None),
        (session("internal", status=500, code="SIDECAR_INTERNAL"), ERROR, [], "SIDECAR_INTERNAL"),
        (session("denied", status=403, code="EGRESS_DENIED"), UNSET, [], None),
    ],
)
def test_what_is_an_error_and_what_is_not(
    make_signals: Make, made: Any, server: int, attempt_statuses: list[int], error: str | None
) -> None:
    with http_collector() as (url, received):
        signals = make_signals({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
        traced(signals, made)
        received.until(lambda: len(received.spans) == 1 + len(attempt_statuses))
        first, *rest = received.spans
        assert (server, attempt_statuses) == (first.status.code, [span.status.code for span in rest])
        assert error == attributes(first).get("error.type")


def spans_of(make_signals: Make, made: Any, count: int, **environ: str) -> list[Any]:
    with http_collector() as (url, received):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", **environ}
        traced(make_signals(variables), made)
        received.until(lambda: len(received.spans) >= count)
        assert count == len(received.spans)
        return received.spans


def test_the_path_is_never_in_a_name_and_an_unknown_method_is_other(make_signals: Make) -> None:
    spans = spans_of(make_signals, healthy(method="BREW"), 2)
    assert ["HTTP", "HTTP"] == [span.name for span in spans]
    assert ("_OTHER", "BREW") == (
        attributes(spans[0])["http.request.method"],
        attributes(spans[0])["http.request.method_original"],
    )
    spans = spans_of(make_signals, healthy(method="BREW"), 2, OTEL_INSTRUMENTATION_HTTP_KNOWN_METHODS="BREW,GET")
    assert ["BREW", "BREW"] == [span.name for span in spans]


def test_the_attempt_shows_the_path_that_was_sent_and_the_session_the_one_that_was_asked_for(
    make_signals: Make,
) -> None:
    made = healthy(target="/pay/v1/x?key=1", forwarded="/v1/x?key=1")
    server, client = spans_of(make_signals, made, 2)
    assert ("/pay/v1/x", "key=REDACTED") == (attributes(server)["url.path"], attributes(server)["url.query"])
    assert "http://a.test:443/v1/x?key=REDACTED" == attributes(client)["url.full"]


def test_a_replay_is_a_root_of_its_own_with_a_link_to_where_it_came_from(make_signals: Make) -> None:
    origin = Trace(TRACE_ID, SPAN_ID, 0, True)
    made = session("recovered", attempt(status=200, kind="replay"), errand="replay", origin=origin, dlq_id="dlq_1")
    root, client = spans_of(make_signals, made, 2)
    assert ("replay payments", INTERNAL, b"") == (root.name, root.kind, root.parent_span_id)
    (link,) = root.links
    assert (TRACE_ID.to_bytes(16, "big"), SPAN_ID.to_bytes(8, "big")) == (link.trace_id, link.span_id)
    assert link.trace_id != root.trace_id
    assert ("replay", "dlq_1") == (attributes(client)["sidecar.attempt.kind"], attributes(root)["sidecar.dlq.id"])


def test_a_tunnel_is_one_span_with_its_address_bytes_and_connect_time(make_signals: Make) -> None:
    made = session(
        "tunnelled",
        attempt(took=0.02),
        method="CONNECT",
        target="api.test:443",
        status=200,
        request_bytes=7,
        response_bytes=9,
    )
    (span,) = spans_of(make_signals, made, 1)
    shown = attributes(span)
    assert ("CONNECT", SERVER, UNSET) == (span.name, span.kind, span.status.code)
    assert ("api.test", 443, 7, 9, 0.02) == (
        shown["server.address"],
        shown["server.port"],
        shown["sidecar.tunnel.bytes_sent"],
        shown["sidecar.tunnel.bytes_received"],
        shown["sidecar.tunnel.connect_s"],
    )
    assert not any(name.startswith("url.") for name in shown)


def test_a_tunnel_that_could_not_be_opened_is_an_error(make_signals: Make) -> None:
    made = session("exhausted", attempt(code="CONNECTION_REFUSED"), method="CONNECT", target="api.test:443", status=502)
    (span,) = spans_of(make_signals, made, 1)
    assert (ERROR, "CONNECTION_REFUSED") == (span.status.code, attributes(span)["error.type"])


def test_a_tunnel_that_broke_is_an_error_although_it_was_opened(make_signals: Make) -> None:
    made = session("tunnelled", attempt(), method="CONNECT", target="api.test:443", status=200, code="CONNECTION_RESET")
    (span,) = spans_of(make_signals, made, 1)
    assert (ERROR, "CONNECTION_RESET") == (span.status.code, attributes(span)["error.type"])


def test_what_was_never_connected_has_no_version_of_a_protocol(make_signals: Make) -> None:
    _, refused, answered = spans_of(
        make_signals, session("recovered", attempt(code="CONNECTION_REFUSED"), attempt(status=200)), 3
    )
    assert "network.protocol.version" not in attributes(refused)
    assert "1.1" == attributes(answered)["network.protocol.version"]


def test_the_tracestate_of_the_caller_is_on_the_spans(make_signals: Make) -> None:
    made = healthy(trace=Trace(TRACE_ID, SPAN_ID, 5, True, b"vendor=1"))
    with http_collector() as (url, received):
        signals = make_signals({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
        signals.observe(made)
        received.until(lambda: len(received.spans) == 2)
        assert {"vendor=1"} == {span.trace_state for span in received.spans}
        assert all(span.span_id != bytes(8) for span in received.spans), "forwarded attempts get an id too"


# ---- which traces are kept ---------------------------------------------------------------------------------------


def test_unsampled_healthy_sessions_are_counted_and_interesting_ones_are_kept_whole(make_signals: Make) -> None:
    with grpc_collector() as (url, received):
        signals = make_signals(
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_TRACES_SAMPLER": "always_off"}, slow_threshold=0.5
        )
        traced(signals, healthy())
        traced(signals, recovered())
        traced(signals, healthy(took=0.7))
        received.until(lambda: len(received.spans) == 5)
        servers = [attributes(span) for span in received.spans if span.kind == SERVER]
        assert [("recovered", "tail"), ("first_try", "tail")] == [
            (shown["sidecar.session.outcome"], shown["sidecar.sampling"]) for shown in servers
        ]
        signals.close()
        assert {"exported": 5, "dropped_queue_full": 0, "export_failed": 0, "unsampled": 2} == signals.metrics.spans


def test_the_batch_is_cut_at_its_size(make_signals: Make) -> None:
    with grpc_collector() as (url, received):
        signals = make_signals(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10",
                "OTEL_BSP_SCHEDULE_DELAY": "60000",
            }
        )
        for _ in range(20):
            traced(signals, healthy())
        received.until(lambda: len(received.spans) == 40)
        sizes = [len(request.resource_spans[0].scope_spans[0].spans) for request in received.requests]
        assert max(sizes) <= 10


# ---- log records and metrics -------------------------------------------------------------------------------------


def test_lines_about_traffic_are_log_records_when_asked_for(
    make_signals: Make, collector: tuple[dict[str, str], Received]
) -> None:
    environ, received = collector
    signals = make_signals({**environ, "OTEL_LOGS_EXPORTER": "otlp"})
    made = traced(signals, recovered())
    signals.breaker_changed("payments", "a.test:443", "closed", "open", "5 failures in a row")
    signals.dead_lettered("payments", "dlq_1", "CONNECTION_REFUSED", made)
    received.until(lambda: len(received.log_records) == 3)
    records = {record.event_name: record for record in received.log_records}
    assert {"sidecar.session.completed", "sidecar.breaker.transition", "sidecar.dlq.enqueued"} == records.keys()
    told = records["sidecar.session.completed"]
    assert (made.trace.trace_id.to_bytes(16, "big"), made.trace.span_id.to_bytes(8, "big")) == (
        told.trace_id,
        told.span_id,
    )
    assert ("WARN", 13, "recovered") == (
        told.severity_text,
        told.severity_number,
        attributes(told)["sidecar.session.outcome"],
    )
    assert 2 == len(json.loads(attributes(told)["attempts"]))
    assert "5 failures in a row" in records["sidecar.breaker.transition"].body.string_value
    assert told.trace_id == records["sidecar.dlq.enqueued"].trace_id


def test_no_log_record_and_no_metric_leaves_unless_asked_for(make_signals: Make) -> None:
    with grpc_collector() as (url, received):
        signals = make_signals({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
        traced(signals, recovered())
        signals.tick(ARRIVED + 1000)
        received.until(lambda: len(received.spans) == 3)
        signals.close()
        assert ([], {}) == (received.log_records, received.metrics)


def test_the_bridge_tells_what_a_scrape_tells(make_signals: Make, collector: tuple[dict[str, str], Received]) -> None:
    environ, received = collector
    signals = make_signals({**environ, "OTEL_METRICS_EXPORTER": "otlp", "OTEL_TRACES_EXPORTER": "none"})
    assert not signals.traces.participating
    for made in (healthy(), healthy(), recovered(), exhausted()):
        signals.observe(made)
    for second in range(80):
        signals.tick(ARRIVED + second)
    received.until(lambda: bool(received.metrics))
    metrics = received.metrics
    sessions = {
        attributes(point)["outcome"]: point.as_double or point.as_int
        for point in metrics["sidecar_sessions"].sum.data_points
    }
    assert (2, 1, 1) == (sessions["first_try"], sessions["recovered"], sessions["exhausted"])
    assert metrics["sidecar_sessions"].sum.is_monotonic
    (durations,) = (
        point
        for point in metrics["sidecar_request_duration_seconds"].histogram.data_points
        if attributes(point)["result"] == "success"
    )
    value = signals.metrics.registry.get_sample_value
    labels = {"upstream": "payments", "result": "success"}
    assert (3, 3, 15) == (durations.count, sum(durations.bucket_counts), len(durations.explicit_bounds))
    assert value("sidecar_request_duration_seconds_sum", labels) == durations.sum
    assert value("sidecar_request_duration_seconds_bucket", {**labels, "le": "0.01"}) == sum(
        durations.bucket_counts[:4]
    )
    assert 1 == metrics["sidecar_build_info"].gauge.data_points[0].as_int


def test_what_a_short_life_has_counted_arrives_at_its_end(
    make_signals: Make, collector: tuple[dict[str, str], Received]
) -> None:
    environ, received = collector
    signals = make_signals({**environ, "OTEL_METRICS_EXPORTER": "otlp", "OTEL_TRACES_EXPORTER": "none"})
    signals.observe(exhausted())
    signals.tick(ARRIVED + 1)
    signals.gather_last()
    signals.close()
    points = received.metrics["sidecar_sessions"].sum.data_points
    assert [1] == [point.as_double or point.as_int for point in points if attributes(point)["outcome"] == "exhausted"]


@pytest.mark.parametrize(("interval", "warned"), [("1500", True), ("500", True), ("2000", False), ("", False)])
def test_an_interval_that_cannot_be_kept_is_told(make_signals: Make, interval: str, warned: bool) -> None:
    with grpc_collector() as (url, _):
        variables = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": interval}
        signals = make_signals({**variables, "OTEL_EXPORTER_OTLP_ENDPOINT": url})
        told = [line["body"] for line in said(signals) if "OTEL_METRIC_EXPORT_INTERVAL" in line["body"]]
        assert warned == (len(told) == 1)


def test_metrics_leave_as_often_as_asked_for_in_the_long_run(make_signals: Make) -> None:
    with grpc_collector() as (url, _):
        variables = {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": "9500"}
        signals = make_signals({**variables, "OTEL_EXPORTER_OTLP_ENDPOINT": url})
        courier = signals.export._bridge.courier  # type: ignore[union-attr]
        given: list[object] = []
        courier.put = given.append
        for second in range(200):
            signals.tick(ARRIVED + second)
        assert len(given) in (20, 21)


# ---- a collector in trouble --------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_dead_collector_is_counted_and_told_and_the_end_does_not_wait_for_it(
    make_signals: Make, protocol: str
) -> None:
    signals = make_signals(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{closed_port()}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2",
        }
    )
    traced(signals, recovered())
    until(lambda: signals.metrics.spans["export_failed"] == 3)
    started = time.monotonic()
    traced(signals, recovered())
    signals.close(5)
    assert time.monotonic() - started < 4, "a collector known to be dead gets half a second"
    assert 0 == signals.metrics.spans["exported"]
    assert signals.metrics.exports["traces", "failure"] >= 1
    assert {} == signals.metrics.last_export
    assert any("sidecar.telemetry" == line["event_name"] for line in said(signals)), "the log names the trouble"


def test_a_collector_that_refuses_is_a_failed_export(
    make_signals: Make, collector: tuple[dict[str, str], Received]
) -> None:
    environ, received = collector
    received.refusing = True
    signals = make_signals(environ)
    traced(signals, recovered())
    until(lambda: signals.metrics.spans["export_failed"] == 3)
    received.refusing = False
    traced(signals, recovered())
    received.until(lambda: len(received.spans) == 3)
    until(lambda: signals.metrics.spans["exported"] == 3)
    assert {"traces": wall(ARRIVED)} == signals.metrics.last_export


def test_a_slow_collector_fills_the_queue_which_loses_its_oldest_and_blocks_nobody(make_signals: Make) -> None:
    with grpc_collector() as (url, received):
        received.blocked.clear()
        signals = make_signals(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_BSP_MAX_QUEUE_SIZE": "10",
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2",
                "OTEL_EXPORTER_OTLP_TIMEOUT": "30",
            }
        )
        traced(signals, healthy(session_id=b"taken-first"))
        until(lambda: signals.metrics.queue is not None and signals.metrics.queue()[0] == 0)
        for number in range(30):
            traced(signals, healthy(session_id=b"s%02d" % number))
        assert (10, 10) == signals.metrics.queue()  # type: ignore[misc]
        assert 40 == signals.metrics.spans["dropped_queue_full"], "20 sessions of two spans"
        received.blocked.set()
        received.until(lambda: len(received.spans) == 22)
        kept = {attributes(span)["sidecar.session.id"] for span in received.spans if span.kind == SERVER}
        assert {"taken-first", *(f"s{number}" for number in range(20, 30))} == kept


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy"])
def test_telemetry_never_goes_through_the_proxy_of_the_environment(
    make_signals: Make, collector: tuple[dict[str, str], Received], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    environ, received = collector
    traced(make_signals(environ), recovered())
    received.until(lambda: len(received.spans) == 3)


def test_what_is_queued_at_the_end_is_still_delivered(make_signals: Make) -> None:
    with grpc_collector() as (url, received):
        signals = make_signals({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "60000"})
        traced(signals, recovered())
        signals.close()
        assert 3 == len(received.spans)


def test_an_end_with_a_stuck_collector_is_bounded_and_the_rest_is_counted_as_lost(make_signals: Make) -> None:
    with grpc_collector() as (url, received):
        received.blocked.clear()
        signals = make_signals({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "2"})
        traced(signals, healthy())
        until(lambda: signals.metrics.queue is not None and signals.metrics.queue()[0] == 0)
        traced(signals, healthy())
        signals.close(0.3)
        assert 2 == signals.metrics.spans["dropped_queue_full"]


def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


class Broken:
    """An exporter that cannot do anything right."""

    def export(self, batch: object) -> None:
        raise RuntimeError("token=abc cannot be sent")

    def shutdown(self) -> None:
        raise RuntimeError("still busy")


def test_an_exporter_that_raises_is_a_failed_export_and_a_line(make_signals: Make) -> None:
    signals = make_signals({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_LOGS_EXPORTER": "otlp"})
    otlp: Any = signals.export
    for part in (otlp._traces, otlp._logs):
        part.delivery._exporter = Broken()
    traced(signals, recovered())
    until(lambda: signals.metrics.spans["export_failed"] == 3)
    until(lambda: signals.metrics.exports["logs", "failure"] == 1)
    signals.close(1)
    bodies = [line["body"] for line in said(signals)]
    assert any("export of traces failed" in body and "token=REDACTED" in body for body in bodies)
    assert any("did not shut down cleanly" in body for body in bodies)


def test_a_strange_record_takes_neither_the_batch_nor_the_thread_with_it(
    make_signals: Make, collector: tuple[dict[str, str], Received]
) -> None:
    environ, received = collector
    signals = make_signals({**environ, "OTEL_LOGS_EXPORTER": "otlp"})
    strange = recovered()
    strange.attempts[0].phase = 99  # no such word
    strange.attempts[1].endpoint = None  # type: ignore[assignment]  # breaks the log record too
    traced(signals, strange)
    until(lambda: signals.metrics.spans["export_failed"] == 3)
    traced(signals, recovered())
    received.until(lambda: len(received.spans) == 3 and len(received.log_records) == 1)
    assert any("could not be put into spans" in line["body"] for line in said(signals))
    assert any("log records could not be made" in line["body"] for line in said(signals))


def test_metrics_that_cannot_be_put_into_words_do_not_end_the_bridge(make_signals: Make) -> None:
    from prometheus_client.core import Metric

    with http_collector() as (url, received):
        signals = make_signals(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_METRICS_EXPORTER": "otlp",
            }
        )
        odd = Metric("odd", "A histogram without a sum.", "histogram")
        odd.add_sample("odd_bucket", {"le": "+Inf"}, 1)
        signals.metrics.live = lambda: [odd]
        for second in range(80):
            signals.tick(ARRIVED + second)
        until(lambda: any("could not be put into OTLP" in line["body"] for line in said(signals)))
        signals.metrics.live = tuple
        for second in range(80, 160):
            signals.tick(ARRIVED + second)
        received.until(lambda: "sidecar_build_info" in received.metrics)


def test_log_records_that_a_slow_collector_does_not_take_are_counted(make_signals: Make) -> None:
    with grpc_collector() as (url, received):
        received.blocked.clear()
        signals = make_signals(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": url,
                "OTEL_TRACES_EXPORTER": "none",
                "OTEL_LOGS_EXPORTER": "otlp",
                "OTEL_BSP_MAX_QUEUE_SIZE": "5",
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1",
            }
        )
        otlp: Any = signals.export
        signals.observe(recovered())
        until(lambda: len(otlp._logs.courier) == 0)
        before = signals.metrics.log_suppressed["warn"]
        for _ in range(20):
            signals.observe(recovered())
        assert 15 == signals.metrics.log_suppressed["warn"] - before


# ---- variables ---------------------------------------------------------------------------------------------------

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://collector"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:notaport"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:99999"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "sup3rsecret"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_LOGS_EXPORTER", "file"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_SDK_DISABLED", "perhaps"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "1.5"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "nan"),
        ("OTEL_RESOURCE_ATTRIBUTES", "=x"),
    ],
)
def test_a_bad_variable_is_named_its_value_is_not_and_everything_else_goes_on(
    make_signals: Make, name: str, value: str
) -> None:
    signals = make_signals({**ENDPOINT, name: value})
    (line,) = said(signals)
    assert ("ERROR", "sidecar.telemetry") == (line["severity_text"], line["event_name"])
    assert name in line["body"]
    assert "sup3rsecret" not in line["body"]
    assert not signals.traces.participating
    assert None is signals.begin(b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", None, "participate")
    signals.observe(recovered())
    assert 1 == signals.metrics.sessions_by_outcome()["recovered"]


def test_a_propagator_that_is_not_spoken_is_named_and_export_goes_on(make_signals: Make) -> None:
    signals = make_signals({**ENDPOINT, "OTEL_PROPAGATORS": "tracecontext, baggage,B3"})
    (line,) = said(signals)
    assert ("WARN", "sidecar.telemetry") == (line["severity_text"], line["event_name"])
    assert line["body"].startswith("OTEL_PROPAGATORS: 'b3' is not spoken here; ")
    assert signals.traces.participating
    assert [] == said(make_signals({**ENDPOINT, "OTEL_PROPAGATORS": "baggage,tracecontext,"}))


def test_a_bad_sampler_argument_is_named(make_signals: Make) -> None:
    for value in ("2", "-0.1", "x"):
        signals = make_signals({**ENDPOINT, "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": value})
        assert "OTEL_TRACES_SAMPLER_ARG" in said(signals)[0]["body"]


def test_what_only_the_exporter_finds_wrong_is_told_too(make_signals: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_TIMEOUT", "ten")  # read by the exporter itself
    signals = make_signals({**ENDPOINT, "OTEL_LOGS_EXPORTER": "otlp"})
    assert "OTEL_EXPORTER_OTLP_* variables" in said(signals)[0]["body"]
    assert not signals.traces.participating


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://127.0.0.1:9"},
    ],
)
def test_without_a_reason_to_export_nothing_is_exported(make_signals: Make, environ: dict[str, str]) -> None:
    signals = make_signals(environ)
    assert (None, False, []) == (signals.export, signals.traces.participating, said(signals))


def test_the_endpoint_and_protocol_follow_the_specification() -> None:
    from telemetry.otel_settings import read

    def where(**environ: str) -> tuple[str, str, float]:
        wanted = read({f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environ.items()})
        assert wanted is not None and wanted.traces is not None
        return wanted.traces.protocol, wanted.traces.endpoint, wanted.traces.timeout

    assert ("grpc", "http://c:4317", 10.0) == where(ENDPOINT="http://c:4317")
    assert ("http/protobuf", "http://c:4318/v1/traces", 10.0) == where(ENDPOINT="http://c:4318/")
    assert ("http/protobuf", "https://c/otel/v1/traces", 2.5) == where(
        ENDPOINT="https://c/otel", PROTOCOL="http/protobuf", TIMEOUT="2500"
    )
    assert ("http/protobuf", "http://c:4318/own", 3.0) == where(
        ENDPOINT="http://g:4317", TRACES_ENDPOINT="http://c:4318/own", TRACES_TIMEOUT="3"
    )
    wanted = read({"OTEL_TRACES_EXPORTER": "otlp"})
    assert wanted is not None and wanted.traces is not None
    assert "http://localhost:4317" == wanted.traces.endpoint


def test_partly_sent_is_a_word_on_the_span(make_signals: Make) -> None:
    made = session(
        "recovered",
        attempt(code="CONNECTION_RESET", phase=PARTLY_SENT, decision=retry("CONNECTION_RESET", 0.0)),
        attempt(status=200),
    )
    _, first, _ = spans_of(make_signals, made, 3)
    assert "partly_sent" == attributes(first)["sidecar.send_phase"]
