"""Spans on their way to a collector: what is sent again, over TLS with certificates of one's own, and how it ends."""

from __future__ import annotations

import gzip
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from telemetry import otlp_spans
from telemetry.otel_settings import Destination, read
from telemetry.otlp_spans import Result, SpanExporter, Undelivered
from tests.doubles.authority import Authority

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
REQUEST = b"\x0a\x02\x0a\x00"

# What a collector says, as HTTP has it and as gRPC has it.
BUSY = (503, grpc.StatusCode.UNAVAILABLE)
WRONG = (400, grpc.StatusCode.INVALID_ARGUMENT)
FINE = (200, grpc.StatusCode.OK)


class Collector:
    """Answers as it is told, and with FINE when it is told no more."""

    def __init__(self, *answers: tuple[int, grpc.StatusCode]) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def take(self, body: bytes, headers: dict[str, str]) -> tuple[int, grpc.StatusCode]:
        self.bodies.append(body)
        self.headers.append(headers)
        return self.answers.pop(0) if self.answers else FINE


@contextmanager
def over_http(collector: Collector, tls: ssl.SSLContext | None = None, after: str = "") -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, _ = collector.take(body, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(status)
            if after:
                self.send_header("Retry-After", after)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    collector.url = f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_address[1]}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def over_grpc(collector: Collector, credentials: grpc.ServerCredentials | None = None) -> Iterator[Collector]:
    def export(request: bytes, context: Any) -> bytes:
        _, code = collector.take(request, {str(key): str(value) for key, value in context.invocation_metadata()})
        if code is not grpc.StatusCode.OK:
            context.abort(code, "as told")
        return b""

    service, _, method = TRACES[1:].partition("/")
    workers = ThreadPoolExecutor(2)
    server = grpc.server(workers)
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(export)})
    server.add_generic_rpc_handlers((handler,))
    if credentials is None:
        collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        collector.url = f"https://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait(5)
        workers.shutdown()


WAYS = pytest.mark.parametrize(("way", "protocol"), [(over_http, "http/protobuf"), (over_grpc, "grpc")])


def to(url: str, protocol: str, timeout: float = 5.0, **more: Any) -> Destination:
    plain = Destination("traces", protocol, url, {"x-tenant": "t1"}, timeout, "none", None, None, None)
    return plain._replace(**more)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_spans, "_FIRST_WAIT", 0.02)


@WAYS
def test_the_bytes_arrive_as_they_were_made_with_the_headers_asked_for(way: Any, protocol: str) -> None:
    with way(Collector()) as collector:
        exporter = SpanExporter(to(collector.url, protocol), "sidecar/1.2.3")
        assert Result.SUCCESS is exporter.export(REQUEST)
        exporter.shutdown()
    assert [REQUEST] == collector.bodies
    assert "t1" == collector.headers[0]["x-tenant"]
    assert collector.headers[0]["user-agent"].startswith("sidecar/1.2.3")


@WAYS
def test_a_busy_collector_is_asked_again(way: Any, protocol: str) -> None:
    with way(Collector(BUSY, BUSY)) as collector:
        exporter = SpanExporter(to(collector.url, protocol), "s")
        assert Result.SUCCESS is exporter.export(REQUEST)
        exporter.shutdown()
    assert [REQUEST] * 3 == collector.bodies


@WAYS
def test_a_collector_that_says_no_is_not_asked_again_and_the_reason_is_told(way: Any, protocol: str) -> None:
    with way(Collector(WRONG)) as collector:
        exporter = SpanExporter(to(collector.url, protocol), "s")
        with pytest.raises(Undelivered, match=r"answered (400|INVALID_ARGUMENT)"):
            exporter.export(REQUEST)
        exporter.shutdown()
    assert [REQUEST] == collector.bodies


@WAYS
def test_the_time_for_one_export_bounds_the_tries(way: Any, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_spans, "_FIRST_WAIT", 60.0)
    with way(Collector(BUSY)) as collector:
        exporter = SpanExporter(to(collector.url, protocol), "s")
        with pytest.raises(Undelivered):
            exporter.export(REQUEST)  # returns: a wait that does not fit is not begun
        exporter.shutdown()
    assert [REQUEST] == collector.bodies


def test_a_collector_says_itself_when_to_come_again() -> None:
    with over_http(Collector(BUSY), after="600") as collector:
        exporter = SpanExporter(to(collector.url, "http/protobuf"), "s")
        with pytest.raises(Undelivered):
            exporter.export(REQUEST)
        exporter.shutdown()
    assert [REQUEST] == collector.bodies, "ten minutes do not fit into the five seconds of an export"


@WAYS
def test_the_end_interrupts_a_wait(way: Any, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_spans, "_FIRST_WAIT", 20.0)
    ended: list[BaseException] = []

    def export(exporter: SpanExporter) -> None:
        try:
            exporter.export(REQUEST)
        except Undelivered as error:
            ended.append(error)

    with way(Collector(BUSY)) as collector:
        exporter = SpanExporter(to(collector.url, protocol, timeout=60), "s")
        thread = threading.Thread(target=export, args=(exporter,), daemon=True)
        thread.start()
        while not collector.bodies:
            time.sleep(0.005)
        exporter.shutdown()
        thread.join(10)
        assert not thread.is_alive()
    assert 1 == len(ended)


def test_http_is_packed_when_asked_for() -> None:
    with over_http(Collector()) as collector:
        exporter = SpanExporter(to(collector.url, "http/protobuf", compression="gzip"), "s")
        exporter.export(REQUEST * 100)
        exporter.shutdown()
    assert ("gzip", REQUEST * 100) == (collector.headers[0]["content-encoding"], gzip.decompress(collector.bodies[0]))


def test_grpc_is_packed_when_asked_for_and_arrives_whole() -> None:
    with over_grpc(Collector()) as collector:
        exporter = SpanExporter(to(collector.url, "grpc", compression="gzip"), "s")
        exporter.export(REQUEST * 100)
        exporter.shutdown()
    assert [REQUEST * 100] == collector.bodies


# ---- TLS ---------------------------------------------------------------------------------------------------------


@contextmanager
def with_tls(protocol: str, collector: Collector, authority: Authority) -> Iterator[Collector]:
    """A collector that shows a certificate and asks for one."""
    own = authority.issue("127.0.0.1")
    if protocol == "grpc":
        pair = [(own.read_bytes(), own.read_bytes())]
        bundle = authority.bundle.read_bytes()
        with over_grpc(collector, grpc.ssl_server_credentials(pair, bundle, require_client_auth=True)):
            yield collector
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.bundle))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(own)
    with over_http(collector, context):
        yield collector


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_certificates_of_ones_own_are_trusted_and_shown(protocol: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "collectors")
    client = str(authority.issue("sidecar"))
    with with_tls(protocol, Collector(), authority) as collector:
        files = {"ca_file": str(authority.bundle), "certificate_file": client, "key_file": client}
        exporter = SpanExporter(to(collector.url, protocol, **files), "s")
        assert Result.SUCCESS is exporter.export(REQUEST)
        exporter.shutdown()
    assert [REQUEST] == collector.bodies


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_nobody_vouches_for_gets_nothing(protocol: str, tmp_path: Path) -> None:
    with with_tls(protocol, Collector(), Authority(tmp_path, "collectors")) as collector:
        exporter = SpanExporter(to(collector.url, protocol, timeout=0.5), "s")
        with pytest.raises(Undelivered):
            exporter.export(REQUEST)
        exporter.shutdown()
    assert [] == collector.bodies


def test_the_files_come_from_the_standard_variables_the_signals_own_first(tmp_path: Path) -> None:
    for name in ("ca", "own-ca", "cert", "key"):
        (tmp_path / name).write_text("x")
    wanted = read(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4317",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca"),
            "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": str(tmp_path / "own-ca"),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(tmp_path / "cert"),
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(tmp_path / "key"),
        }
    )
    assert wanted is not None and wanted.traces is not None
    found = (wanted.traces.ca_file, wanted.traces.certificate_file, wanted.traces.key_file)
    assert tuple(str(tmp_path / name) for name in ("own-ca", "cert", "key")) == found
