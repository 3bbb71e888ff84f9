"""A collector in this process: OTLP over gRPC and over HTTP, with the faults a real one can have."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Received:
    """What arrived, and how the collector is to behave."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.blocked = threading.Event()
        self.blocked.set()  # cleared: every export waits
        self.refusing = False

    def take(self, request: Any, headers: dict[str, str]) -> bool:
        """False when the collector refuses."""
        self.blocked.wait(30)
        if self.refusing:
            return False
        with self._news:
            self.requests.append(request)
            self.headers.append(headers)
            self._news.notify_all()
        return True

    def until(self, true: Callable[[], bool], timeout: float = 10.0) -> None:
        with self._news:
            assert self._news.wait_for(true, timeout), "the collector did not get what was expected"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in tuple(self.requests)
            if hasattr(request, "resource_spans")
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resources(self) -> list[dict[str, str]]:
        return [
            {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for request in tuple(self.requests)
            for resource in getattr(request, "resource_spans", ())
        ]

    @property
    def log_records(self) -> list[Any]:
        return [
            record
            for request in tuple(self.requests)
            if hasattr(request, "resource_logs")
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            metric.name: metric
            for request in tuple(self.requests)
            if hasattr(request, "resource_metrics")
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def attributes(thing: Any) -> dict[str, Any]:
    """The attributes of a span, an event or a log record as plain values."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in thing.attributes}


@contextmanager
def grpc_collector() -> Iterator[tuple[str, Received]]:
    received = Received()

    class Service:
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  # the protocol's name
            headers = {str(key): str(value) for key, value in context.invocation_metadata()}
            if not received.take(request, headers):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "refused by the test")
            return self._answer()

    workers = ThreadPoolExecutor(4)
    server = grpc.server(workers)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(
        Service(trace_service_pb2.ExportTraceServiceResponse), server
    )
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Service(logs_service_pb2.ExportLogsServiceResponse), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(
        Service(metrics_service_pb2.ExportMetricsServiceResponse), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        received.blocked.set()
        server.stop(0).wait(5)
        workers.shutdown()


@contextmanager
def http_collector() -> Iterator[tuple[str, Received]]:
    received = Received()
    messages = {
        "/v1/traces": trace_service_pb2.ExportTraceServiceRequest,
        "/v1/logs": logs_service_pb2.ExportLogsServiceRequest,
        "/v1/metrics": metrics_service_pb2.ExportMetricsServiceRequest,
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            status = 404
            if self.path in messages:
                request = messages[self.path]()
                request.ParseFromString(body)
                status = 200 if received.take(request, {k.lower(): v for k, v in self.headers.items()}) else 400
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        received.blocked.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
