"""Lines about traffic → OTLP log records, when OTEL_LOGS_EXPORTER asks for them.

Law: the same fields as in the log line, in the same words; joined to the trace by its ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from telemetry.courier import Courier
from telemetry.delivery import Delivery, tell
from telemetry.export import Fields, Surroundings
from telemetry.logs import SEVERITY
from telemetry.names import Field
from telemetry.otel_settings import OtelSettings

Line = tuple[str, str, float, Fields]  # level, event, wall time, what is said


class LogRecords:
    """Lines → log records → the collector."""

    def __init__(
        self, exporter: Any, resource: Mapping[str, str], wanted: OtelSettings, surroundings: Surroundings
    ) -> None:
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope("sidecar", surroundings.metrics.version)
        self._surroundings = surroundings
        self.delivery = Delivery("logs", exporter, surroundings)
        self.courier: Courier[Line] = Courier(
            "telemetry-logs", wanted.queue_size, wanted.batch_size, wanted.schedule_delay, self._deliver, self._lost
        )

    def _lost(self, line: Line) -> None:
        suppressed = self._surroundings.metrics.log_suppressed
        suppressed[line[0]] = suppressed.get(line[0], 0) + 1

    def _deliver(self, lines: list[Line]) -> None:
        try:
            records = [self._record(*line) for line in lines]
        except Exception as error:  # one strange value must not stop all later ones
            tell(self._surroundings, "error", f"log records could not be made: {error!r}")
            return
        self.delivery.export(records)

    def _record(self, level: str, event: str, at: float, fields: Fields) -> ReadableLogRecord:
        said = dict(fields())
        text, number = SEVERITY[level]
        at_ns = int(at * 1_000_000) * 1_000
        record = LogRecord(
            timestamp=at_ns,
            observed_timestamp=at_ns,
            context=_context(said),
            severity_text=text,
            severity_number=SeverityNumber(number),
            body=str(said.pop(Field.BODY, "")),
            attributes={name: _plain(value) for name, value in said.items() if value is not None},
            event_name=event,
        )
        return ReadableLogRecord(record, self._resource, self._scope)


def _context(said: dict[str, Any]) -> Context:
    """The trace and span of a line, taken out of its fields."""
    trace_id, span_id = said.pop(Field.TRACE_ID, None), said.pop(Field.SPAN_ID, None)
    flags = said.pop(Field.TRACE_FLAGS, "00")
    if trace_id is None or span_id is None:
        return Context()
    context = SpanContext(int(trace_id, 16), int(span_id, 16), False, TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(context), Context())


def _plain(value: Any) -> str | int | float | bool:
    """Lists and objects as JSON: not every backend takes nested attributes."""
    return value if isinstance(value, str | int | float | bool) else orjson.dumps(value, default=str).decode()
