"""OTLP: exporters for each signal over gRPC or HTTP, and who feeds them.

Law: imported only when something is exported. Spans have an exporter of ours (`otlp_spans.py`), because they are many
and encoded already; those of log records and metrics are OpenTelemetry's, chosen and wired here. No connection goes
through a proxy: with HTTP_PROXY set for the app, telemetry would otherwise go through the sidecar itself. gRPC and
`requests` are the exporters' own libraries, imported only where they are used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from opentelemetry.sdk.version import __version__ as sdk_version

from telemetry.courier import Courier
from telemetry.delivery import Delivery, Listening, tell
from telemetry.export import Fields, Surroundings
from telemetry.otel_settings import Destination, OtelSettings
from telemetry.otlp_spans import SpanExporter
from telemetry.protobuf import SpanEncoder
from telemetry.record import Session
from telemetry.spans import Materialiser, span_count

_EXPORTERS = {
    ("logs", "grpc"): ("opentelemetry.exporter.otlp.proto.grpc._log_exporter", "OTLPLogExporter"),
    ("logs", "http/protobuf"): ("opentelemetry.exporter.otlp.proto.http._log_exporter", "OTLPLogExporter"),
    ("metrics", "grpc"): ("opentelemetry.exporter.otlp.proto.grpc.metric_exporter", "OTLPMetricExporter"),
    ("metrics", "http/protobuf"): ("opentelemetry.exporter.otlp.proto.http.metric_exporter", "OTLPMetricExporter"),
}


_AT_A_TIME = 25  # sessions put into spans before the event loop is let in: less than half a millisecond


def make_exporter(destination: Destination) -> Any:
    """OpenTelemetry's exporter for log records or metrics."""
    module, name = _EXPORTERS[destination.signal, destination.protocol]
    options: dict[str, Any] = {"endpoint": destination.endpoint, "timeout": destination.timeout}
    if destination.headers:
        options["headers"] = dict(destination.headers)
    compressed = destination.compression == "gzip"
    if destination.protocol == "grpc":
        options["channel_options"] = (("grpc.enable_http_proxy", 0),)
        if compressed:
            import grpc  # type: ignore[import-untyped]  # its stubs would be one more package for one name

            options["compression"] = grpc.Compression.Gzip
    else:
        import requests

        session = requests.Session()
        session.trust_env = False
        options["session"] = session
        if compressed:
            from opentelemetry.exporter.otlp.proto.http import Compression

            options["compression"] = Compression.Gzip
    return getattr(import_module(module), name)(**options)


class Otlp:
    """Everything that is exported; telemetry/export.py says what is called from where."""

    def __init__(self, wanted: OtelSettings, surroundings: Surroundings) -> None:
        resource = _resource(wanted.resource, surroundings)
        self._listening = Listening(surroundings)
        self._traces: Spans | None = None
        self._logs: Any = None
        self._bridge: Any = None
        if wanted.traces is not None:
            self._traces = Spans(wanted.traces, resource, wanted, surroundings)
        if wanted.logs is not None:
            from telemetry.otlp_logs import LogRecords

            self._logs = LogRecords(make_exporter(wanted.logs), resource, wanted, surroundings)
        if wanted.metrics is not None:
            from telemetry.otlp_metrics import Bridge

            self._bridge = Bridge(make_exporter(wanted.metrics), resource, wanted, surroundings)

    def spans(self, session: Session) -> None:
        if self._traces is not None:
            self._traces.courier.put(session)

    def log(self, level: str, event: str, at: float, fields: Fields) -> None:
        if self._logs is not None:
            self._logs.courier.put((level, event, at, fields))

    def tick(self, now: float) -> None:
        if self._bridge is not None:
            self._bridge.tick(now)

    def gather_last(self) -> None:
        if self._bridge is not None:
            self._bridge.gather_last()

    def close(self, timeout: float) -> None:
        parts = [part for part in (self._traces, self._logs, self._bridge) if part is not None]
        for part in parts:
            part.courier.close(part.delivery.patience(timeout / len(parts)))
            part.delivery.close()
        self._listening.close()


class Spans:
    """Finished sessions → spans → the collector."""

    def __init__(
        self, destination: Destination, resource: Mapping[str, str], wanted: OtelSettings, surroundings: Surroundings
    ) -> None:
        self._materialiser = Materialiser(surroundings.wall, surroundings.redactor, wanted.known_methods)
        self._encoder = SpanEncoder(resource, "sidecar", surroundings.metrics.version)
        self._most = wanted.batch_size
        self._fates = surroundings.metrics.spans
        self._surroundings = surroundings
        agent = f"sidecar/{surroundings.metrics.version}"
        self.delivery = Delivery("traces", SpanExporter(destination, agent), surroundings)
        self.courier: Courier[Session] = Courier(
            "telemetry-spans", wanted.queue_size, wanted.batch_size, wanted.schedule_delay, self._deliver, self._lost
        )
        surroundings.metrics.queue = lambda: (len(self.courier), self.courier.capacity)

    def _lost(self, session: Session) -> None:
        self._fates["dropped_queue_full"] += span_count(session)

    def _deliver(self, sessions: list[Session]) -> None:
        encoded: list[bytes] = []
        for number, session in enumerate(sessions, 1):
            try:
                encoded += [self._encoder.span(span) for span in self._materialiser.spans_of(session)]
            except Exception as error:  # one strange record must not take the batch, or the thread, with it
                tell(self._surroundings, "error", f"a session could not be put into spans: {error!r}")
                self._fates["export_failed"] += span_count(session)
            if len(encoded) >= self._most:
                self._export(encoded[: self._most])
                del encoded[: self._most]
            if number % _AT_A_TIME == 0:
                time.sleep(0)  # lets the event loop have the interpreter: it may be waiting for it
        if encoded:
            self._export(encoded)

    def _export(self, encoded: list[bytes]) -> None:
        request = self._encoder.request(encoded)
        self._fates["exported" if self.delivery.export(request) else "export_failed"] += len(encoded)


def _resource(given: Mapping[str, str], surroundings: Surroundings) -> dict[str, str]:
    resource = {
        "service.name": "sidecar",
        "service.version": surroundings.metrics.version,
        "service.instance.id": surroundings.server_id,
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": sdk_version,
        **given,
    }
    return {name: value for name, value in resource.items() if value}
